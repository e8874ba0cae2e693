package proxy

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pires/go-proxyproto"

	"shunt/splice"
)

// v2 builds a header from its parts, right or wrong.
func v2(command, family byte, block ...[]byte) []byte {
	all := bytes.Join(block, nil)
	b := append([]byte("\r\n\r\n\x00\r\nQUIT\n"), command, family)
	return append(binary.BigEndian.AppendUint16(b, uint16(len(all))), all...)
}

func tlv(kind byte, value string) []byte {
	return append([]byte{kind, byte(len(value) >> 8), byte(len(value))}, value...)
}

// withCRC fills in the checksum of a header that ends with a zero one.
func withCRC(b []byte) []byte {
	b = bytes.Clone(b)
	binary.BigEndian.PutUint32(b[len(b)-4:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	return b
}

var (
	v4Block   = []byte{192, 0, 2, 1, 198, 51, 100, 2, 0x12, 0x34, 0, 80}
	v6Block   = append(append(netip.MustParseAddr("2001:db8::1").AsSlice(), netip.MustParseAddr("2001:db8::2").AsSlice()...), 0x12, 0x34, 0, 80)
	zeroCRC   = tlv(3, "\x00\x00\x00\x00")
	mapped    = append(append(netip.MustParseAddr("::ffff:192.0.2.1").AsSlice(), netip.MustParseAddr("::ffff:198.51.100.2").AsSlice()...), 0x12, 0x34, 0, 80)
	unixBlock = append(append([]byte("/run/client"), make([]byte, 108-11)...), append([]byte("/run/server"), make([]byte, 108-11)...)...)
	longUnix  = bytes.Repeat([]byte("a"), 216)
)

const v4Source, v6Source = "192.0.2.1:4660", "[2001:db8::1]:4660"

// goodHeaders are what is accepted, and whose address counts then; empty: the peer's.
var goodHeaders = map[string]struct {
	header []byte
	source string
}{
	"v1 TCP4":                     {[]byte("PROXY TCP4 192.0.2.1 198.51.100.2 4660 80\r\n"), v4Source},
	"v1 TCP6":                     {[]byte("PROXY TCP6 2001:db8::1 2001:DB8::2 4660 80\r\n"), v6Source},
	"v1 TCP6, the longest":        {[]byte("PROXY TCP6 " + strings.Repeat("ffff:", 7) + "ffff " + strings.Repeat("ffff:", 7) + "fffe 65535 65535\r\n"), "[" + strings.Repeat("ffff:", 7) + "ffff]:65535"},
	"v1 TCP6, mapped":             {[]byte("PROXY TCP6 ::ffff:192.0.2.1 ::ffff:c633:6402 4660 80\r\n"), v4Source},
	"v1 port 0":                   {[]byte("PROXY TCP4 192.0.2.1 198.51.100.2 0 0\r\n"), "192.0.2.1:0"},
	"v1 no address":               {[]byte("PROXY TCP4 0.0.0.0 0.0.0.0 0 0\r\n"), ""},
	"v1 UNKNOWN":                  {[]byte("PROXY UNKNOWN\r\n"), ""},
	"v1 UNKNOWN, the longest":     {[]byte("PROXY UNKNOWN " + strings.Repeat("f", 107-16) + "\r\n"), ""},
	"v1 UNKNOWN with junk":        {[]byte("PROXY UNKNOWN \x00 junk 1.2.3.4\r\n"), ""},
	"v2 TCP4":                     {v2(0x21, 0x11, v4Block), v4Source},
	"v2 TCP6":                     {v2(0x21, 0x21, v6Block), v6Source},
	"v2 TCP6, mapped":             {v2(0x21, 0x21, mapped), v4Source},
	"v2 UDP":                      {v2(0x21, 0x12, v4Block), ""},
	"v2 UNIX":                     {v2(0x21, 0x31, unixBlock), ""},
	"v2 UNIX, full":               {v2(0x21, 0x32, longUnix), ""},
	"v2 UNSPEC":                   {v2(0x21, 0x00), ""},
	"v2 UNSPEC with addresses":    {v2(0x21, 0x00, v4Block), ""},
	"v2 no transport":             {v2(0x21, 0x10, v4Block), ""},
	"v2 no family":                {v2(0x21, 0x01, v4Block), ""},
	"v2 LOCAL":                    {v2(0x20, 0x00), ""},
	"v2 LOCAL with addresses":     {v2(0x20, 0x11, v4Block), ""},
	"v2 LOCAL, junk addresses":    {v2(0x20, 0x11, []byte("junk")), ""},
	"v2 LOCAL, junk family":       {v2(0x20, 0xff, []byte("junk that is no address")), ""},
	"v2 LOCAL, family of PROXY":   {v2(0x20, 0x13, v4Block), ""},
	"v2 LOCAL, the longest":       {v2(0x20, 0x00, make([]byte, maxHeaderV2)), ""},
	"v2 TLVs":                     {v2(0x21, 0x11, v4Block, tlv(1, "h2"), tlv(4, ""), tlv(0xe0, "x"), tlv(0x7f, "?")), v4Source},
	"v2 TLVs, the longest":        {v2(0x21, 0x11, v4Block, tlv(0xea, strings.Repeat("x", maxHeaderV2-12-3))), v4Source},
	"v2 checksum":                 {withCRC(v2(0x21, 0x11, v4Block, zeroCRC)), v4Source},
	"v2 checksum, UNIX":           {withCRC(v2(0x21, 0x31, unixBlock, zeroCRC)), ""},
	"v2 checksum after other TLV": {withCRC(v2(0x21, 0x21, v6Block, tlv(2, "a.example"), zeroCRC)), v6Source},
}

// badHeaders are refused.
var badHeaders = map[string][]byte{
	"HTTP":                        []byte("GET / HTTP/1.1\r\n\r\n"),
	"lower case":                  []byte("proxy TCP4 192.0.2.1 198.51.100.2 1 2\r\n"),
	"v1 joined":                   []byte("PROXYTCP4 192.0.2.1 198.51.100.2 1 2\r\n"),
	"v1 LF":                       []byte("PROXY TCP4 192.0.2.1 198.51.100.2 1 2\n"),
	"v1 UNKNOWN LF":               []byte("PROXY UNKNOWN\nPROXY UNKNOWN\r\n"),
	"v1 CR":                       []byte("PROXY TCP4 192.0.2.1 198.51.100.2 1 2\rx\r\n"),
	"v1 too long":                 []byte("PROXY UNKNOWN " + strings.Repeat("f", 107-15) + "\r\n"),
	"v1 endless":                  bytes.Repeat([]byte("PROXY TCP4 "), 400),
	"v1 two spaces":               []byte("PROXY TCP4  192.0.2.1 198.51.100.2 1 2\r\n"),
	"v1 trailing space":           []byte("PROXY TCP4 192.0.2.1 198.51.100.2 1 2 \r\n"),
	"v1 missing port":             []byte("PROXY TCP4 192.0.2.1 198.51.100.2 1\r\n"),
	"v1 empty":                    []byte("PROXY \r\n"),
	"v1 UDP":                      []byte("PROXY UDP4 192.0.2.1 198.51.100.2 1 2\r\n"),
	"v1 other family":             []byte("PROXY TCP4 ::1 ::1 1 2\r\n"),
	"v1 mixed families":           []byte("PROXY TCP6 2001:db8::1 192.0.2.1 1 2\r\n"),
	"v1 octal":                    []byte("PROXY TCP4 192.0.2.01 198.51.100.2 1 2\r\n"),
	"v1 zone":                     []byte("PROXY TCP6 fe80::1%lo ::1 1 2\r\n"),
	"v1 port 65536":               []byte("PROXY TCP4 192.0.2.1 198.51.100.2 65536 2\r\n"),
	"v1 port 01":                  []byte("PROXY TCP4 192.0.2.1 198.51.100.2 01 2\r\n"),
	"v1 port +1":                  []byte("PROXY TCP4 192.0.2.1 198.51.100.2 +1 2\r\n"),
	"v1 port -1":                  []byte("PROXY TCP4 192.0.2.1 198.51.100.2 -1 2\r\n"),
	"v2 version 1":                v2(0x11, 0x11, v4Block),
	"v2 version 3":                v2(0x31, 0x11, v4Block),
	"v2 command 2":                v2(0x22, 0x11, v4Block),
	"v2 family 4":                 v2(0x21, 0x41, v4Block),
	"v2 transport 3":              v2(0x21, 0x13, v4Block),
	"v2 short address":            v2(0x21, 0x11, v4Block[1:]),
	"v2 short address, IPv6":      v2(0x21, 0x21, v4Block),
	"v2 short address, UNIX":      v2(0x21, 0x31, longUnix[1:]),
	"v2 half a TLV":               v2(0x21, 0x11, v4Block, []byte{1, 0}),
	"v2 TLV beyond the end":       v2(0x21, 0x11, v4Block, []byte{1, 0, 2, 'h'}),
	"v2 too long":                 v2(0x21, 0x11, v4Block, make([]byte, maxHeaderV2-11)),
	"v2 the longest length":       v2(0x20, 0x00, make([]byte, 0xffff)),
	"v2 wrong checksum":           v2(0x21, 0x11, v4Block, zeroCRC),
	"v2 short checksum":           v2(0x21, 0x11, v4Block, tlv(3, "\x00")),
	"v2 two checksums":            withCRC(v2(0x21, 0x11, v4Block, zeroCRC, zeroCRC)),
	"v2 checksum then half a TLV": withCRC(v2(0x21, 0x11, v4Block, []byte{1, 0xff, 0xff}, zeroCRC)),
}

// parseWhole is what a connection does with b.
func parseWhole(b []byte) (h head, n int, err error) {
	if n, err = headerLength(b); err != nil {
		return h, n, err
	}
	if n == 0 || n > len(b) {
		return h, n, io.ErrUnexpectedEOF
	}
	return h, n, h.parse(b[:n])
}

func TestHeaderTellsTheClientsAddress(t *testing.T) {
	for name, c := range goodHeaders {
		h, n, err := parseWhole(append(bytes.Clone(c.header), "PROXY payload\r\n"...))
		if err != nil || n != len(c.header) {
			t.Errorf("%s: %d of %d bytes, %v", name, n, len(c.header), err)
		}
		got := ""
		if h.source.IsValid() {
			got = h.source.String()
		}
		if got != c.source {
			t.Errorf("%s: source %q, want %q", name, got, c.source)
		}
	}
}

func TestBadHeadersAreRefused(t *testing.T) {
	for name, b := range badHeaders {
		if h, n, err := parseWhole(b); err == nil || n > len(b) {
			t.Errorf("%s: accepted as %+v, %d bytes", name, h, n)
		}
	}
}

func TestHeaderLengthNeverChangesItsMind(t *testing.T) {
	// However a header is cut up, the same bytes belong to it, and a bad one is never asked for more.
	for name, c := range goodHeaders {
		for i := 1; i < len(c.header); i++ {
			if n, err := headerLength(c.header[:i]); err != nil || n != 0 && n != len(c.header) {
				t.Fatalf("%s: after %d of %d bytes: %d, %v", name, i, len(c.header), n, err)
			}
		}
	}
}

func TestSentHeaderSaysTheAddresses(t *testing.T) {
	addr := netip.MustParseAddrPort
	none := netip.AddrPort{}
	for _, c := range []struct {
		name     string
		src, dst netip.AddrPort
		v1       string
		v2       []byte
	}{
		{"IPv4", addr(v4Source), addr("198.51.100.2:80"), "PROXY TCP4 192.0.2.1 198.51.100.2 4660 80\r\n", v2(0x21, 0x11, v4Block)},
		{"IPv6", addr(v6Source), addr("[2001:db8::2]:80"), "PROXY TCP6 2001:db8::1 2001:db8::2 4660 80\r\n", v2(0x21, 0x21, v6Block)},
		{"zone", addr("[fe80::1%lo]:1"), addr("[fe80::2%lo]:2"), "PROXY TCP6 fe80::1 fe80::2 1 2\r\n", nil},
		{"mixed", addr(v4Source), addr("[2001:db8::2]:80"), "PROXY TCP6 ::ffff:192.0.2.1 2001:db8::2 4660 80\r\n",
			v2(0x21, 0x21, mapped[:16], v6Block[16:])},
		{"not TCP", none, none, "PROXY UNKNOWN\r\n", v2(0x20, 0x00)},
		{"source unknown", none, addr("198.51.100.2:80"), "PROXY UNKNOWN\r\n", v2(0x20, 0x00)},
	} {
		if got, err := format(HeaderV1, c.src, c.dst, nil); err != nil || string(got) != c.v1 {
			t.Errorf("%s: v1 %q, %v; want %q", c.name, got, err, c.v1)
		}
		if got, err := format(HeaderV2, c.src, c.dst, nil); err != nil || c.v2 != nil && !bytes.Equal(got, c.v2) {
			t.Errorf("%s: v2 %q, %v; want %q", c.name, got, err, c.v2)
		}
	}
}

func TestTLVsArePassedOnWithoutTheChecksum(t *testing.T) {
	h, _, err := parseWhole(withCRC(v2(0x21, 0x11, v4Block, tlv(2, "a.example"), tlv(4, "pad"), tlv(0xea, "\x01id"), zeroCRC)))
	if err != nil {
		t.Fatal(err)
	}
	got, err := format(HeaderV2, h.source, h.dest, h.tlvs)
	if want := v2(0x21, 0x11, v4Block, tlv(2, "a.example"), tlv(0xea, "\x01id")); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
	if got, err := format(HeaderV1, h.source, h.dest, h.tlvs); err != nil || string(got) != "PROXY TCP4 192.0.2.1 198.51.100.2 4660 80\r\n" {
		t.Errorf("v1: %q, %v", got, err)
	}
}

func TestTrustUnmapsAndKnowsUnix(t *testing.T) {
	p := ProxyProtocol{Trusted: networks("192.0.2.0/24", "fe80::/10")}
	for addr, want := range map[string]bool{
		"192.0.2.7:1": true, "[::ffff:192.0.2.7]:1": true, "192.0.3.7:1": false, "[fe80::1%lo]:1": true, "[::1]:1": false,
	} {
		if got := p.trusts(net.TCPAddrFromAddrPort(netip.MustParseAddrPort(addr))); got != want {
			t.Errorf("%s: %v", addr, got)
		}
	}
	if p.trusts(&net.UnixAddr{Net: "unix"}) {
		t.Error("a UNIX client is trusted without being named")
	}
	p.TrustUnix = true
	if !p.trusts(&net.UnixAddr{Net: "unix"}) {
		t.Error("a UNIX client isn't trusted")
	}
}

func networks(list ...string) (ns []Network) {
	for _, s := range list {
		n, err := ParseNetwork(s)
		if err != nil {
			panic(err)
		}
		ns = append(ns, n)
	}
	return ns
}

func accepting(timeout time.Duration, send HeaderVersion) option {
	return onListener(func(l *Listener) {
		l.ProxyProtocol = ProxyProtocol{
			Send: send, Accept: true, HeaderTimeout: timeout, Trusted: networks("127.0.0.0/8"),
		}
	})
}

func TestHeaderIsReadAtEverySplit(t *testing.T) {
	for _, name := range []string{"v1 TCP4", "v1 UNKNOWN", "v2 LOCAL, junk family", "v2 checksum after other TLV"} {
		header := goodHeaders[name].header
		a, b := net.Pipe()
		defer a.Close()
		// All in one process, with a read for each piece.
		for i := 1; i < len(header); i++ {
			go func() {
				b.Write(header[:i])
				b.Write(header[i:])
				b.Write([]byte("payload"))
			}()
			a.SetDeadline(time.Now().Add(deadline))
			if got, err := readHeader(pipeStream{a}); err != nil || !bytes.Equal(got, header) {
				t.Fatalf("%s, split at %d: %q, %v", name, i, got, err)
			}
			expect(t, a, "payload")
		}
	}
	// And on sockets, where what comes behind it stays there.
	r := newRig(t, nil, accepting(deadline, HeaderV1))
	for name, c := range goodHeaders {
		for _, i := range []int{1, 5, 6, 12, 13, 14, 15, 16, 17, len(c.header) - 1} {
			if i >= len(c.header) {
				continue
			}
			client := r.dial()
			client.SetNoDelay(true)
			send(t, client, c.header[:i])
			eventually(t, "read of the first piece", func() bool { return unreadOf(r) == 0 })
			send(t, client, append(bytes.Clone(c.header[i:]), "payload"...))
			service := r.accept()
			want := "PROXY TCP4 127.0.0.1 127.0.0.1 "
			switch {
			case strings.HasPrefix(c.source, "["):
				want = "PROXY TCP6 " + netip.MustParseAddrPort(c.source).Addr().String() + " "
			case c.source != "":
				want = "PROXY TCP4 192.0.2.1 198.51.100.2 "
			}
			expect(t, service, want)
			rest := make([]byte, 64)
			n := 0
			for !bytes.HasSuffix(rest[:n], []byte("\r\npayload")) {
				m, err := service.Read(rest[n:])
				if n += m; err != nil {
					t.Fatalf("%s, split at %d: %q, %v", name, i, rest[:n], err)
				}
			}
			client.Close()
			service.Close()
		}
	}
}

// unreadOf is what waits in the rig's only connection that is reading its header; -1: none is.
func unreadOf(r *rig) int {
	for _, c := range r.conns() {
		c.mu.Lock()
		st := c.state
		c.mu.Unlock()
		if st == stateAccepted {
			n, err := unread(c.down().(*net.TCPConn))
			if err == nil {
				return n
			}
		}
	}
	return -1
}

// pipeStream is a Stream that isn't a socket.
type pipeStream struct{ net.Conn }

func (pipeStream) CloseWrite() error { return nil }

func TestHeaderIsNoPayload(t *testing.T) {
	for _, bypass := range []Bypass{nil, &fakeBypass{}} {
		r := newRig(t, bypass, accepting(deadline, HeaderV2))
		client := r.dial()
		send(t, client, append(bytes.Clone(goodHeaders["v1 TCP4"].header), "12345"...))
		service := r.accept()
		expect(t, service, string(goodHeaders["v2 TCP4"].header)+"12345")
		send(t, service, []byte("123"))
		expect(t, client, "123")
		for _, c := range r.srv.Connections() {
			if c.Client != v4Source || c.Down.Remote != client.LocalAddr().String() {
				t.Errorf("connection %+v", c)
			}
		}
		client.Close()
		expectEOF(t, service)
		service.Close()
		r.ended(causeClientFIN)
		if log := r.log.String(); !strings.Contains(log, `"client":"`+v4Source+`"`) {
			t.Errorf("no client in the log: %s", log)
		}
		if bypass == nil {
			m := r.metrics()
			if up := m[`shunt_bytes_total{direction="upstream",listener="web",path="copy"}`]; up != 5 {
				t.Errorf("%v bytes upward, want 5", up)
			}
		}
	}
}

func TestHeaderGoesBeforeAGreeting(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) { l.ProxyProtocol.Send = HeaderV1 }))
	client, service := r.pair()
	expect(t, service, fmt.Sprintf("PROXY TCP4 127.0.0.1 127.0.0.1 %d ", addrOf(client.LocalAddr()).Port()))
	send(t, service, []byte("220 hello"))
	expect(t, client, "220 hello")
}

func TestRefusedHeadersResetAndAreCounted(t *testing.T) {
	b := &fakeBypass{}
	r := newRig(t, b, accepting(50*time.Millisecond, HeaderOff))
	half := goodHeaders["v2 TCP4"].header[:20]
	for cause, do := range map[string]func(c *net.TCPConn){
		causeBadHeader:     func(c *net.TCPConn) { send(t, c, badHeaders["v2 wrong checksum"]) },
		causeHeaderTimeout: func(c *net.TCPConn) { send(t, c, half) },
	} {
		c := r.dial()
		do(c)
		expectReset(t, c)
		r.ended(cause)
		if n := r.metrics()[fmt.Sprintf(`shunt_connections_ended_total{cause=%q,listener="web"}`, cause)]; n != 1 {
			t.Errorf("%s: counted %v", cause, n)
		}
		if got := b.noted(); got[len(got)-1] != "release" {
			t.Errorf("%s: calls %q", cause, got)
		}
	}
	// A client that only looks whether somebody listens is no fault.
	c := r.dial()
	c.CloseWrite()
	expectReset(t, c)
	r.ended(causeClientFIN)
	// One that gives up half-way is.
	c = r.dial()
	send(t, c, half)
	c.CloseWrite()
	expectReset(t, c)
	eventually(t, "second bad header", func() bool {
		return r.metrics()[`shunt_connections_ended_total{cause="bad-header",listener="web"}`] == 2
	})
	for _, call := range b.noted() {
		if call == "control" || call == "pair" {
			t.Errorf("a refused connection was dialled")
		}
	}
}

func TestUntrustedClientsAreReset(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) {
		l.ProxyProtocol = ProxyProtocol{Accept: true, HeaderTimeout: deadline, Trusted: networks("192.0.2.0/24")}
	}))
	r.refused()
	r.ended(causeUntrusted)
}

func TestStopEndsAWaitForAHeader(t *testing.T) {
	r := newRig(t, nil, accepting(time.Hour, HeaderOff))
	c := r.dial()
	eventually(t, "connection", func() bool { return len(r.conns()) == 1 })
	r.srv.killAll(nil, causeDrain)
	expectReset(t, c)
	r.ended(causeDrain)
}

func TestThousandBadHeadersLeaveNothing(t *testing.T) {
	b := &fakeBypass{}
	r := newRig(t, b, accepting(deadline, HeaderV1)) // which looks for leaks at its end
	var wg sync.WaitGroup
	var names []string
	for name := range badHeaders {
		names = append(names, name)
	}
	for worker := range 8 {
		wg.Go(func() {
			for i := range 125 {
				c, err := net.DialTimeout("tcp", r.addr, deadline)
				if err != nil {
					t.Error(err)
					return
				}
				c.SetDeadline(time.Now().Add(deadline))
				c.Write(badHeaders[names[(worker*125+i)%len(names)]])
				c.(*net.TCPConn).CloseWrite()
				if _, err := io.Copy(io.Discard, c); err == nil {
					t.Errorf("%s: no reset", names[(worker*125+i)%len(names)])
				}
				c.Close()
			}
		})
	}
	wg.Wait()
	eventually(t, "the connections' ends", func() bool { return r.srv.liveCount() == 0 })
	if n := r.metrics()[`shunt_connections_ended_total{cause="bad-header",listener="web"}`]; n != 1000 {
		t.Errorf("%v bad headers counted", n)
	}
	count := map[string]int{}
	for _, call := range b.noted() {
		count[call]++
	}
	if count["claim"] != 1000 || count["release"] != 1000 {
		t.Errorf("calls %v", count)
	}
}

func TestDeadUpstreamGetsNoPayloadWithoutItsHeader(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) { l.ProxyProtocol.Send = HeaderV1 }))
	c := &conn{head: &head{first: []byte("header")}, l: r.srv.listeners[0]}
	up := r.dial()
	c.legs[1].sock = up
	up.Close()
	c.sendHead()
	if c.lostHead(splice.Up) == nil || c.lostHead(splice.Down) != nil {
		t.Errorf("lost %v", c.head.lost)
	}
}

func FuzzHeader(f *testing.F) {
	for _, c := range goodHeaders {
		f.Add(c.header)
	}
	for _, b := range badHeaders {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		h, n, err := parseWhole(b)
		if err != nil {
			return
		}
		for i := 1; i < n; i++ {
			if m, err := headerLength(b[:i]); err != nil || m != 0 && m != n {
				t.Fatalf("%q: after %d bytes %d, %v; then %d", b, i, m, err, n)
			}
		}
		if h.source.IsValid() != h.dest.IsValid() || h.source.Addr().Is4In6() {
			t.Fatalf("%q: %v to %v", b, h.source, h.dest)
		}
		// What is sent says the same to whoever reads it.
		for _, v := range []HeaderVersion{HeaderV1, HeaderV2} {
			sent, err := format(v, h.source, h.dest, h.tlvs)
			if err != nil {
				t.Fatalf("%q: format %s: %v", b, v, err)
			}
			again, n, err := parseWhole(sent)
			if err != nil || n != len(sent) || again.source != h.source {
				t.Fatalf("%q: %s says %q: %v, %v", b, v, sent, again.source, err)
			}
			if v == HeaderV2 && h.source.IsValid() && !tlvsEqual(again.tlvs, h.tlvs) {
				t.Fatalf("%q: TLVs %v, want %v", b, again.tlvs, h.tlvs)
			}
		}
	})
}

func tlvsEqual(a, b []proxyproto.TLV) bool {
	x, _ := proxyproto.JoinTLVs(a)
	y, _ := proxyproto.JoinTLVs(b)
	return bytes.Equal(x, y)
}
