//go:build linux

package test

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	. "shunt/test/harness"
)

// redirect lets connections to a port, made in the namespace or passing it, end at another one of it.
func redirect(from, to string) string {
	var b strings.Builder
	for _, family := range []string{"ip", "ip6"} {
		for _, hook := range []string{"output", "prerouting"} {
			fmt.Fprintf(&b, `table %s %s {
	chain c {
		type nat hook %s priority -100
		tcp dport %s redirect to :%s
	}
}
`, family, hook, hook, from, to)
		}
	}
	return b.String()
}

func TestRedirectedClientsAreBypassed(t *testing.T) {
	// They dial an address that shunt doesn't listen on; the sequence numbers still tell whose they are.
	EachShuntPath(t, func(t *testing.T, p Path) {
		NeedVeth(t)
		client, middle, service := NewNetns(t), NewNetns(t), NewNetns(t)
		if err := errors.Join(Link(client, middle, 1), Link(middle, service, 2)); err != nil {
			t.Fatal(err)
		}
		s := ServeOn(t, service, netip.AddrPortFrom(LinkAddr(2, 2), 0).String(), echo)
		f := Open(t, p, s.Addr, WithLaunch(Launch{Netns: middle}), WithListen("", "127.0.0.1"))
		natTables(t, middle, redirect("999", portOf(f)))
		for _, c := range []struct {
			name string
			from *Netns
			to   netip.Addr
		}{
			{"IPv4, same namespace", middle, LinkAddr(2, 2)},
			{"IPv6, same namespace", middle, LinkAddr6(2, 2)},
			{"IPv4, another namespace", client, LinkAddr(1, 2)},
			{"IPv6, another namespace", client, LinkAddr6(1, 2)},
		} {
			t.Run(c.name, func(t *testing.T) {
				before := moved(t, f)
				for range 5 {
					if err := exchangeEchoFrom(c.from, netip.AddrPortFrom(c.to, 999).String(), 20, 1000); err != nil {
						t.Fatal(err)
					}
				}
				after := moved(t, f)
				if n := after - before; p.Bypass() && n < 100_000 {
					t.Errorf("%d bytes took the bypass", n)
				}
			})
		}
		f.CheckPath(t, 400_000, 400_000, 0.5)
	})
}

// moved is how many bytes took the bypass so far.
func moved(t *testing.T, f *Front) int64 {
	t.Helper()
	m, err := f.Moved()
	if err != nil {
		t.Fatal(err)
	}
	return m.UpBypass + m.DownBypass
}
