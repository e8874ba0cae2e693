package harness

import (
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// A DNS is a name server on loopback, over UDP and TCP, whose records the test changes.
// A name without records doesn't exist.
type DNS struct {
	Addr string

	t     testing.TB
	mu    sync.Mutex
	hosts map[string][]netip.Addr
	srvs  map[string][]SRV
	rcode dnsmessage.RCode // if not zero: the answer to everything
	only  dnsmessage.Type  // if not zero: rcode is for such queries only
	mute  bool
	asked int
	stop  func()
}

// SRV is a record.
type SRV struct {
	Priority, Weight, Port uint16
	Target                 string
}

// dnsUDP is how much an answer over UDP may have.
const dnsUDP = 1232

// ServeDNS starts a DNS without records, until the end of the test.
func ServeDNS(t testing.TB) *DNS {
	t.Helper()
	d := &DNS{t: t, Addr: "127.0.0.1:0", hosts: map[string][]netip.Addr{}, srvs: map[string][]SRV{}}
	d.Restart()
	return d
}

// Restart serves again after Stop, at the same address.
func (d *DNS) Restart() {
	d.t.Helper()
	var pc net.PacketConn
	var ln net.Listener
	var err error
	for range 20 { // the port may be free for one of the two only
		if pc, err = net.ListenPacket("udp", d.Addr); err != nil {
			break
		}
		if ln, err = net.Listen("tcp", pc.LocalAddr().String()); err == nil {
			break
		}
		pc.Close()
	}
	if err != nil {
		d.t.Fatal(err)
	}
	d.Addr = pc.LocalAddr().String()
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 4096)
		for {
			n, from, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			if answer := d.answer(b[:n], dnsUDP); answer != nil {
				pc.WriteTo(answer, from)
			}
		}
	})
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				c.SetDeadline(time.Now().Add(5 * time.Second))
				var size [2]byte
				if _, err := io.ReadFull(c, size[:]); err != nil {
					return
				}
				b := make([]byte, binary.BigEndian.Uint16(size[:]))
				if _, err := io.ReadFull(c, b); err != nil {
					return
				}
				if answer := d.answer(b, 1<<16-1); answer != nil {
					c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...))
				}
			})
		}
	})
	d.stop = sync.OnceFunc(func() { pc.Close(); ln.Close(); wg.Wait() })
	d.t.Cleanup(d.stop)
}

// Stop closes the server's sockets: queries are refused.
func (d *DNS) Stop() { d.stop() }

// Set gives name these addresses, in this order; none: it exists without any.
func (d *DNS) Set(name string, ips ...string) {
	addrs := []netip.Addr{}
	for _, ip := range ips {
		addrs = append(addrs, netip.MustParseAddr(ip))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hosts[name] = addrs
}

// SetSRV gives name these records.
func (d *DNS) SetSRV(name string, records ...SRV) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.srvs[name] = slices.Clone(records)
}

// Remove takes a name away.
func (d *DNS) Remove(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.hosts, name)
	delete(d.srvs, name)
}

// Fail makes SERVFAIL the answer to everything, or ends that.
func (d *DNS) Fail(on bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.rcode, d.only = dnsmessage.RCodeSuccess, 0
	if on {
		d.rcode = dnsmessage.RCodeServerFailure
	}
}

// FailFor makes SERVFAIL the answer to queries of one type.
func (d *DNS) FailFor(kind dnsmessage.Type) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.rcode, d.only = dnsmessage.RCodeServerFailure, kind
}

// Mute leaves every query without an answer, or ends that.
func (d *DNS) Mute(on bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mute = on
}

// Asked is how many queries there were.
func (d *DNS) Asked() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.asked
}

func (d *DNS) answer(query []byte, limit int) []byte {
	var p dnsmessage.Parser
	h, err := p.Start(query)
	if err != nil {
		return nil
	}
	q, err := p.Question()
	if err != nil {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked++
	if d.mute {
		return nil
	}
	rcode := d.rcode
	if d.only != 0 && q.Type != d.only {
		rcode = dnsmessage.RCodeSuccess
	}
	name := strings.TrimSuffix(strings.ToLower(q.Name.String()), ".")
	ips, isHost := d.hosts[name]
	srvs, isSRV := d.srvs[name]
	m := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: h.ID, Response: true, RecursionDesired: true, RecursionAvailable: true, RCode: rcode},
		Questions: []dnsmessage.Question{q},
	}
	add := func(kind dnsmessage.Type, body dnsmessage.ResourceBody) {
		m.Answers = append(m.Answers, dnsmessage.Resource{
			Header: dnsmessage.ResourceHeader{Name: q.Name, Type: kind, Class: dnsmessage.ClassINET, TTL: 1}, Body: body,
		})
	}
	switch {
	case rcode != dnsmessage.RCodeSuccess:
	case !isHost && !isSRV:
		m.RCode = dnsmessage.RCodeNameError
	case q.Type == dnsmessage.TypeA || q.Type == dnsmessage.TypeAAAA:
		for _, ip := range ips {
			switch {
			case ip.Is4() && q.Type == dnsmessage.TypeA:
				add(q.Type, &dnsmessage.AResource{A: ip.As4()})
			case ip.Is6() && q.Type == dnsmessage.TypeAAAA:
				add(q.Type, &dnsmessage.AAAAResource{AAAA: ip.As16()})
			}
		}
	case q.Type == dnsmessage.TypeSRV:
		for _, s := range srvs {
			target := dnsmessage.MustNewName(strings.TrimSuffix(s.Target, ".") + ".")
			add(q.Type, &dnsmessage.SRVResource{Priority: s.Priority, Weight: s.Weight, Port: s.Port, Target: target})
		}
	}
	b, err := m.Pack()
	if err != nil {
		d.t.Error(err)
		return nil
	}
	if len(b) > limit {
		m.Truncated, m.Answers = true, nil
		b, _ = m.Pack()
	}
	return b
}
