//go:build linux

package test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	. "shunt/test/harness"
)

// nat puts nft's chains for IPv4 into a namespace of the test's own, or skips the test.
func nat(t *testing.T, ns *Netns, chains string) {
	t.Helper()
	natTables(t, ns, "table ip shunt {\n"+chains+"\n}\n")
}

// natTables is nat with whole tables.
func natTables(t *testing.T, ns *Netns, tables string) {
	t.Helper()
	nft := NeedProgram(t, "nft")
	load := func(rules string) error {
		cmd := exec.Command(nft, "-f", "-")
		cmd.Stdin = strings.NewReader(rules)
		var out strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := ns.Do(cmd.Run); err != nil {
			return fmt.Errorf("%w: %s", err, out.String())
		}
		return nil
	}
	if err := load("table ip probe { chain c { type nat hook prerouting priority -100; tcp dport 1 redirect to :2; }; }\ndelete table ip probe\n"); err != nil {
		Missing(t, AbilityNAT, "NAT by nft in this kernel (make test-kernels runs it): "+err.Error())
	}
	if err := load(tables); err != nil {
		t.Fatal(err)
	}
}

// forward lets a namespace route, between its own interfaces only.
func forward(t *testing.T, ns *Netns) {
	t.Helper()
	if err := ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644) }); err != nil {
		t.Fatal(err)
	}
}

func ipIn(t *testing.T, ns *Netns, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", append([]string{"-n", ns.Name}, args...)...).CombinedOutput(); err != nil {
		t.Fatalf("ip %v: %v: %s", args, err, out)
	}
}

func TestTranslatedClient(t *testing.T) {
	// The sequence numbers tell a client that dialled another address, or whose own
	// address is translated.
	const vip = "10.211.99.1"
	for _, c := range []struct {
		name   string
		target string // of the client; "": the listener
		chains string
	}{
		{"DNAT", vip + ":80", "chain p { type nat hook prerouting priority -100; ip daddr " + vip + " tcp dport 80 dnat to LISTEN; }"},
		{"REDIRECT", LinkAddr(1, 2).String() + ":80", "chain p { type nat hook prerouting priority -100; tcp dport 80 redirect to :PORT; }"},
		{"SNAT", "", "chain p { type nat hook input priority 100; tcp dport PORT snat to 10.211.1.77; }"},
	} {
		t.Run(c.name, func(t *testing.T) {
			OnPaths(t, append(pathsOf(Off), pathsOf(Every)...), func(t *testing.T, p Path) {
				NeedVeth(t)
				client, middle := NewNetns(t), NewNetns(t)
				if err := Link(client, middle, 1); err != nil {
					t.Fatal(err)
				}
				ipIn(t, client, "route", "add", vip+"/32", "via", LinkAddr(1, 2).String())
				s := ServeOn(t, middle, "127.0.0.1:0", echo)
				f := Open(t, p, s.Addr, WithLaunch(Launch{Netns: middle}), WithListen(LinkAddr(1, 2).String(), LinkAddr(1, 2).String()))
				port := f.Addr[strings.LastIndexByte(f.Addr, ':')+1:]
				nat(t, middle, strings.NewReplacer("LISTEN", f.Addr, "PORT", port).Replace(c.chains))
				target := c.target
				if target == "" {
					target = f.Addr
				}
				for range 5 {
					if err := exchangeEchoFrom(client, target, 20, 1000); err != nil {
						t.Fatal(err)
					}
				}
				f.CheckPath(t, 100_000, 100_000, 0.3)
			})
		})
	}
}

func TestTranslatedService(t *testing.T) {
	// B and S are told by their sequence numbers, which NAT doesn't touch.
	const vip = "10.211.99.2"
	for _, c := range []struct{ name, chains string }{
		{"DNAT by a router", "chain p { type nat hook prerouting priority -100; ip daddr " + vip + " tcp dport 80 dnat to SERVICE; }"},
		{"DNAT and SNAT by a router", "chain p { type nat hook prerouting priority -100; ip daddr " + vip + " tcp dport 80 dnat to SERVICE; }\n" +
			"chain q { type nat hook postrouting priority 100; ip daddr " + LinkAddr(3, 2).String() + " masquerade; }"},
		{"REDIRECT at the service", "chain p { type nat hook prerouting priority -100; tcp dport 80 redirect to :PORT; }"},
		{"DNAT at shunt", "chain p { type nat hook output priority -100; ip daddr " + vip + " tcp dport 80 dnat to SERVICE; }"},
	} {
		t.Run(c.name, func(t *testing.T) {
			OnPaths(t, append(pathsOf(Off), pathsOf(Every)...), func(t *testing.T, p Path) {
				NeedVeth(t)
				middle, router, service := NewNetns(t), NewNetns(t), NewNetns(t)
				if err := errors.Join(Link(middle, router, 2), Link(router, service, 3)); err != nil {
					t.Fatal(err)
				}
				forward(t, router)
				ipIn(t, middle, "route", "add", "default", "via", LinkAddr(2, 2).String())
				ipIn(t, service, "route", "add", "default", "via", LinkAddr(3, 1).String())
				s := ServeOn(t, service, LinkAddr(3, 2).String()+":0", echo)
				port := s.Addr[strings.LastIndexByte(s.Addr, ':')+1:]
				at, upstream := router, vip+":80"
				switch {
				case strings.HasSuffix(c.name, "at the service"):
					at, upstream = service, LinkAddr(3, 2).String()+":80"
				case strings.HasSuffix(c.name, "at shunt"):
					at = middle
				}
				nat(t, at, strings.NewReplacer("SERVICE", s.Addr, "PORT", port).Replace(c.chains))
				f := Open(t, p, upstream, WithLaunch(Launch{Netns: middle}))
				for range 5 {
					if err := exchangeEchoFrom(middle, f.Addr, 20, 1000); err != nil {
						t.Fatal(err)
					}
				}
				f.CheckPath(t, 100_000, 100_000, 0.3)
			})
		})
	}
}
