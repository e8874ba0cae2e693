package proxy

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"
)

func TestParseNetwork(t *testing.T) {
	for s, want := range map[string]string{
		"10.0.0.0/8": "10.0.0.0/8", "10.1.2.3": "10.1.2.3", "10.1.2.3/32": "10.1.2.3", "0.0.0.0/0": "0.0.0.0/0",
		"::ffff:10.0.0.0/104": "10.0.0.0/8", "::ffff:10.1.2.3": "10.1.2.3", "::ffff:0:0/96": "0.0.0.0/0",
		"2001:db8::/32": "2001:db8::/32", "::1": "::1", "::/0": "::/0",
		"fe80::1%eth0": "fe80::1%eth0", "fe80::%eth0/64": "fe80::%eth0/64",
	} {
		n, err := ParseNetwork(s)
		if err != nil || n.String() != want {
			t.Errorf("%s: %v, %v; want %s", s, n, err, want)
		}
		if again, err := ParseNetwork(n.String()); err != nil || again != n {
			t.Errorf("%s: reads back as %v, %v", s, again, err)
		}
	}
	for s, want := range map[string]string{
		"": "neither", "localhost": "neither", "10.0.0/8": "neither", "10.0.0.0/": "want a length from 0 to 32",
		"10.0.0.0/33": "want a length from 0 to 32", "10.0.0.0/08": "want a length", "10.0.0.0/+8": "want a length", "::/129": "from 0 to 128",
		"10.0.0.1/8": `did you mean "10.0.0.0/8"?`, "::ffff:10.0.0.0/8": "v4-mapped", "10.0.0.0/8/8": "want a length",
		"10.0.0.1:80": "neither",
	} {
		if n, err := ParseNetwork(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, %v; want an error with %q", s, n, err, want)
		}
	}
}

func FuzzParseNetwork(f *testing.F) {
	for _, s := range []string{"10.0.0.0/8", "::ffff:1.2.3.4/100", "fe80::%a/64", "1.2.3.4/", "::%/0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := ParseNetwork(s)
		if err != nil {
			return
		}
		if again, err := ParseNetwork(n.String()); err != nil || again != n {
			t.Errorf("%q is %v, which reads back as %v, %v", s, n, again, err)
		}
		if a := n.Prefix.Addr(); a.Is4In6() || !n.contains(a.WithZone(n.Zone)) && a.Is6() {
			t.Errorf("%q is %v", s, n)
		}
	})
}

// nets parses lists.
func nets(list ...string) (ns []Network) {
	for _, s := range list {
		n, err := ParseNetwork(s)
		if err != nil {
			panic(err)
		}
		ns = append(ns, n)
	}
	return ns
}

// peerAt is a Stream from an address.
type peerAt struct {
	Stream
	addr net.Addr
}

func (p peerAt) RemoteAddr() net.Addr { return p.addr }

func peer(addr string) Stream {
	return peerAt{addr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(addr), 1234))}
}

func TestDenyWinsOverAllow(t *testing.T) {
	for _, c := range []struct {
		allow, deny []string
		peer        string
		admitted    bool
	}{
		{nil, nil, "192.0.2.1", true},
		{[]string{"10.0.0.0/8"}, nil, "10.1.2.3", true},
		{[]string{"10.0.0.0/8"}, nil, "11.1.2.3", false},
		{[]string{"10.0.0.0/8"}, nil, "::ffff:10.1.2.3", true},
		{[]string{"10.0.0.0/8"}, []string{"10.1.0.0/16"}, "10.1.2.3", false},
		{[]string{"10.1.2.3"}, []string{"10.0.0.0/8"}, "10.1.2.3", false},
		{nil, []string{"10.0.0.0/8"}, "::ffff:10.1.2.3", false},
		{nil, []string{"10.0.0.0/8"}, "11.0.0.1", true},
		{nil, []string{"::/0"}, "11.0.0.1", true},
		{[]string{"::/0"}, nil, "::ffff:11.0.0.1", false},
		{[]string{"2001:db8::/32"}, nil, "2001:db8::5", true},
		{[]string{"fe80::/10"}, nil, "fe80::1%eth0", true},
		{[]string{"fe80::1"}, nil, "fe80::1%eth0", true},
		{[]string{"fe80::1%eth0"}, nil, "fe80::1%eth0", true},
		{[]string{"fe80::1%eth0"}, nil, "fe80::1%eth1", false},
		{nil, []string{"fe80::%eth0/64"}, "fe80::2%eth0", false},
		{nil, []string{"fe80::%eth0/64"}, "fe80::2%eth1", true},
		{[]string{"10.0.0.0/8", "192.0.2.1"}, nil, "192.0.2.1", true},
	} {
		g := newGate(&Listener{Allow: nets(c.allow...), Deny: nets(c.deny...)})
		want := ""
		if !c.admitted {
			want = refusedACL
		}
		if got := g.enter(peer(c.peer)); got != want {
			t.Errorf("allow %v, deny %v: %s is refused for %q, want %q", c.allow, c.deny, c.peer, got, want)
		}
	}
	// Who has no address is on no list.
	if got := newGate(&Listener{Allow: nets("0.0.0.0/0", "::/0")}).enter(peerAt{addr: &net.UnixAddr{Name: "/x"}}); got != refusedACL {
		t.Errorf("a UNIX peer is refused for %q", got)
	}
}

func TestOneSourceIsWhatOneHostHas(t *testing.T) {
	for _, c := range []struct {
		a, b string
		same bool
	}{
		{"192.0.2.1", "192.0.2.1", true}, {"192.0.2.1", "192.0.2.2", false}, {"192.0.2.1", "::ffff:192.0.2.1", true},
		{"2001:db8::1", "2001:db8::ffff:2", true}, {"2001:db8::1", "2001:db8:0:1::1", false},
		{"fd00::1", "fd00::2", false}, {"fe80::1%a", "fe80::2%a", false}, {"fe80::1%a", "fe80::1%b", false}, {"::1", "::2", false},
	} {
		g := newGate(&Listener{MaxConnectionsPerSource: 1})
		first, second := g.enter(peer(c.a)), g.enter(peer(c.b))
		if first != "" || (second == refusedSourceLimit) != c.same {
			t.Errorf("%s, then %s: %q, %q", c.a, c.b, first, second)
		}
		g.leave(peer(c.a))
		if got := g.enter(peer(c.a)); got != "" {
			t.Errorf("%s after it left: %q", c.a, got)
		}
	}
}

func TestLiveSourcesAreForgotten(t *testing.T) {
	g := newGate(&Listener{MaxConnectionsPerSource: 2})
	for range 3 {
		g.enter(peer("192.0.2.1"))
	}
	g.leave(peer("192.0.2.1"))
	g.leave(peer("192.0.2.1"))
	if len(g.live) != 0 {
		t.Errorf("%v", g.live)
	}
}

func TestSourceRateIsABucket(t *testing.T) {
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	r := newRates(SourceRate{PerSecond: 10, Burst: 3})
	at := func(ms int) time.Duration { return time.Duration(ms) * time.Millisecond }
	for _, c := range []struct {
		source netip.Addr
		ms     int
		want   bool
	}{
		{a, 0, true}, {a, 0, true}, {a, 0, true}, {a, 0, false}, {b, 0, true}, // three at once, each
		{a, 99, false}, {a, 100, true}, {a, 100, false}, // one per 100 ms
		{a, 250, true}, {a, 299, false}, {a, 300, true}, // refused ones cost nothing
		{a, 5000, true}, {a, 5000, true}, {a, 5000, true}, {a, 5000, false}, // never more than three
	} {
		if got := r.take(c.source, at(c.ms)); got != c.want {
			t.Errorf("%v at %d ms: %v", c.source, c.ms, got)
		}
	}
	whole := newRates(SourceRate{PerSecond: 5})
	for i := range 6 {
		if got := whole.take(a, 0); got != (i < 5) {
			t.Errorf("burst of the rate, connection %d: %v", i+1, got)
		}
	}
}

func TestManySourcesDontFillMemory(t *testing.T) {
	r := newRates(SourceRate{PerSecond: 1, Burst: 60})
	a := netip.MustParseAddr("10.0.0.0")
	steady := netip.MustParseAddr("192.0.2.1")
	for range 60 {
		r.take(steady, 0)
	}
	for i := range 10 * maxRated {
		r.take(a, 0)
		a = a.Next()
		if i%1000 == 0 && r.take(steady, 0) {
			t.Fatal("a source that keeps coming is forgotten")
		}
	}
	if n := len(r.young) + len(r.old); n > 2*maxRated {
		t.Errorf("%d sources are held", n)
	}
	// All buckets are full again.
	r.take(a, time.Minute)
	r.take(a, 2*time.Minute)
	if n := len(r.young) + len(r.old); n > 2 {
		t.Errorf("%d sources are held after two minutes", n)
	}
}

// refusedAll waits until n peers were refused for the reason, and says so in the log.
func (r *rig) refusedAll(n int, reason string) {
	r.t.Helper()
	name := fmt.Sprintf(`shunt_refused_total{listener="web",reason=%q}`, reason)
	eventually(r.t, fmt.Sprintf("%s %d", name, n), func() bool { return r.metrics()[name] == float64(n) })
}

func TestRefusedPeersAreNoConnections(t *testing.T) {
	for reason, c := range map[string]struct {
		set  option
		keep int // connections that are let in first, and stay
	}{
		refusedACL:         {onListener(func(l *Listener) { l.Deny = nets("127.0.0.0/8") }), 0},
		refusedSourceLimit: {onListener(func(l *Listener) { l.MaxConnectionsPerSource = 2 }), 2},
		refusedSourceRate:  {onListener(func(l *Listener) { l.SourceRate = SourceRate{PerSecond: 1, Burst: 1} }), 1},
		refusedLimit:       {func(c *Config) { c.MaxConnections = 2 }, 2},
	} {
		t.Run(reason, func(t *testing.T) {
			b := &fakeBypass{}
			r := newRig(t, b, c.set)
			if g := r.srv.listeners[0].gate; g != nil && g.rates != nil {
				g.mu.Lock()
				g.rates.interval, g.rates.capacity = time.Hour, time.Hour // however slow this machine is
				g.mu.Unlock()
			}
			var client, service *net.TCPConn
			for range c.keep {
				client, service = r.pair()
				r.touch(client, service)
			}
			calls := len(b.noted())
			r.refused()
			r.refused()
			r.refusedAll(2, reason)
			if n := r.metrics()[`shunt_connections_total{listener="web"}`]; n != float64(c.keep) {
				t.Errorf("%v connections, want %d", n, c.keep)
			}
			if got := b.noted()[calls:]; len(got) != 0 {
				t.Errorf("the bypass was asked: %q", got)
			}
			if s := r.log.String(); !strings.Contains(s, "peer refused") || !strings.Contains(s, fmt.Sprintf("%q", reason)) || strings.Contains(s, `"end"`) {
				t.Errorf("log of two refused peers:\n%s", s)
			}
			if c.keep < 2 {
				return
			}
			// The one that goes makes room.
			client.Close()
			service.Close()
			eventually(t, "a free place", func() bool { return r.srv.liveCount() < c.keep })
			client, service = r.pair()
			r.touch(client, service)
		})
	}
}

func TestAdmitRefusesAsDenyDoes(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) { l.Admit = func(Stream) error { return errors.New("not you") } }))
	r.refused()
	r.refusedAll(1, refusedACL)
}

func TestSuppressedLinesAreCounted(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) { l.Deny = nets("127.0.0.1") }))
	const peers = 20
	for range peers {
		r.refused()
	}
	r.refusedAll(peers, refusedACL)
	if s := r.log.String(); strings.Contains(s, "suppressed") && strings.Count(s, "peer refused") < 2 {
		t.Errorf("the first line says that others were suppressed:\n%s", s)
	}
	l := r.srv.listeners[0].past.refused[refusedACL]
	l.log.mu.Lock()
	l.log.last = time.Time{} // as if the second were over
	skipped := l.log.skipped
	l.log.mu.Unlock()
	if skipped == 0 {
		t.Skip("no two peers were refused within a second")
	}
	r.refused()
	eventually(t, "the count", func() bool { return strings.Contains(r.log.String(), fmt.Sprintf(`"suppressed":%d`, skipped)) })
}
