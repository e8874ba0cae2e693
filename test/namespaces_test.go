//go:build linux

package test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"

	. "shunt/test/harness"
)

func TestNamespaceToNamespace(t *testing.T) {
	// Client, shunt and service each in a namespace of its own, joined by veth.
	EachShuntPath(t, func(t *testing.T, p Path) {
		NeedVeth(t)
		client, middle, service := NewNetns(t), NewNetns(t), NewNetns(t)
		if err := errors.Join(Link(client, middle, 1), Link(middle, service, 2)); err != nil {
			t.Fatal(err)
		}
		for _, v := range []struct {
			name            string
			front, upstream netip.Addr
			listen          string
		}{
			{"IPv4", LinkAddr(1, 2), LinkAddr(2, 2), LinkAddr(1, 2).String()},
			{"IPv6", LinkAddr6(1, 2), LinkAddr6(2, 2), "[" + LinkAddr6(1, 2).String() + "]"},
			{"wildcard", LinkAddr(1, 2), LinkAddr(2, 2), "0.0.0.0"},
			{"dual stack", LinkAddr(1, 2), LinkAddr6(2, 2), ""},
		} {
			t.Run(v.name, func(t *testing.T) {
				s := ServeOn(t, service, netip.AddrPortFrom(v.upstream, 0).String(), echo)
				host := v.front.String()
				if v.front.Is6() {
					host = "[" + host + "]"
				}
				f := Open(t, p, s.Addr, WithLaunch(Launch{Netns: middle}), WithListen(v.listen, host))
				for range 5 {
					if err := exchangeEchoFrom(client, f.Addr, 20, 1000); err != nil {
						t.Fatal(err)
					}
				}
				n := Scaled[int64](32 * mib)
				c := DialFrom(t, client, f.Addr)
				sent := make(chan error, 1)
				go func() { sent <- errors.Join(Send(c, 1, n, 128*kib, nil), c.CloseWrite()) }()
				if err := errors.Join(Receive(c, 1, n), <-sent); err != nil {
					t.Fatal(err)
				}
				c.Close()
				f.CheckPath(t, n+100_000, n+100_000, 0.3)
			})
		}
	})
}

func TestClientOfAnotherHostIsCopied(t *testing.T) {
	// A client whose address has been translated is still this host's; but
	// the loopback of another namespace isn't shunt's: the same address and
	// port there reach another service, and must not be touched.
	EachShuntPath(t, func(t *testing.T, p Path) {
		other := NewNetns(t)
		f := Open(t, p, Serve(t, echo).Addr)
		twin := ServeOn(t, other, f.Addr, echo)
		for range 10 {
			if err := errors.Join(exchangeEcho(f.Addr, 20, 1000), exchangeEchoFrom(other, twin.Addr, 20, 1000)); err != nil {
				t.Fatal(err)
			}
		}
		f.CheckPath(t, 200_000, 200_000, 0.3)
		m, err := f.Shunt.Metrics()
		if err != nil {
			t.Fatal(err)
		}
		if n := m.Sum("shunt_connections_total"); n != 10 {
			t.Errorf("shunt counts %v connections, want 10", n)
		}
	})
}

func TestListenersOfEveryKind(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		v4, v6 := Serve(t, echo), ServeOn(t, nil, "[::1]:0", echo)
		for _, c := range []struct {
			name, listen, host string
			upstream           string
		}{
			{"IPv6", "[::1]", "[::1]", v6.Addr},
			{"IPv6 to IPv4", "[::1]", "[::1]", v4.Addr},
			{"IPv4 to IPv6", "127.0.0.1", "127.0.0.1", v6.Addr},
			{"dual stack, IPv4 client", "[::]", "127.0.0.1", v4.Addr},
			{"dual stack, IPv6 client", "[::]", "[::1]", v4.Addr},
			{"empty host, IPv4 client", "", "127.0.0.1", v6.Addr},
			{"IPv4 wildcard", "0.0.0.0", "127.0.0.1", v4.Addr},
			{"IPv4 wildcard, another loopback address", "0.0.0.0", "127.8.9.10", v4.Addr},
		} {
			t.Run(c.name, func(t *testing.T) {
				f := Open(t, p, c.upstream, WithListen(c.listen, c.host))
				for range 5 {
					if err := exchangeEcho(f.Addr, 20, 1000); err != nil {
						t.Fatal(err)
					}
				}
				f.CheckPath(t, 100_000, 100_000, 0.3)
			})
		}
	})
}

func TestWildcardListenerLeavesOtherTrafficAlone(t *testing.T) {
	// Connections of this host to the same port of other addresses aren't
	// shunt's; a wildcard listener must not hold them.
	EachBypass(t, func(t *testing.T, p Path) {
		NeedVeth(t)
		here, there := NewNetns(t), NewNetns(t)
		if err := Link(here, there, 3); err != nil {
			t.Fatal(err)
		}
		s := ServeOn(t, here, "127.0.0.1:0", echo)
		f := Open(t, p, s.Addr, WithLaunch(Launch{Netns: here}), WithListen("0.0.0.0", "127.0.0.1"))
		_, port, err := net.SplitHostPort(f.Addr)
		if err != nil {
			t.Fatal(err)
		}
		elsewhere := ServeOn(t, there, fmt.Sprintf("%s:%s", LinkAddr(3, 2), port), echo)
		a := newAgent(t)
		for range 5 {
			c, err := DialErr(here, elsewhere.Addr)
			if err != nil {
				t.Fatal(err)
			}
			if err := converse(c, 20, 1000); err != nil {
				t.Fatal(err)
			}
			// A socket that shunt doesn't hold can go into another sockmap.
			if err := Raw(c, a.hold); err != nil {
				t.Errorf("a connection to another host is enrolled: %v", err)
			}
			c.Close()
		}
		if err := exchangeEchoFrom(here, f.Addr, 20, 1000); err != nil {
			t.Fatal(err)
		}
		f.CheckPath(t, 20_000, 20_000, 0.3)
	})
}
