//go:build linux

package test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	. "shunt/test/harness"
)

// redirect lets connections to a port, made in the namespace ("output") or
// coming to it ("prerouting"), end at another port of it.
func redirect(from, to string, hooks ...string) string {
	var b strings.Builder
	for _, family := range []string{"ip", "ip6"} {
		for _, hook := range hooks {
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
		natTables(t, middle, redirect("999", portOf(f), "output", "prerouting"))
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
		f.CheckPath(t, 400_000, 400_000, 0.3)
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

// gateway is a client and a service in namespaces of their own, with shunt's
// between them as their way to each other.
func gateway(t *testing.T) (client, middle, service *Netns) {
	t.Helper()
	NeedVeth(t)
	client, middle, service = NewNetns(t), NewNetns(t), NewNetns(t)
	if err := errors.Join(Link(client, middle, 1), Link(middle, service, 2)); err != nil {
		t.Fatal(err)
	}
	for _, v := range []struct {
		ns   *Netns
		via  string
		via6 string
	}{
		{client, LinkAddr(1, 2).String(), LinkAddr6(1, 2).String()},
		{service, LinkAddr(2, 1).String(), LinkAddr6(2, 1).String()},
	} {
		ipIn(t, v.ns, "route", "add", "default", "via", v.via)
		ipIn(t, v.ns, "-6", "route", "add", "default", "via", v.via6)
	}
	return client, middle, service
}

// deliverMarked makes packets with mark 1 local ones, whatever their destination.
func deliverMarked(t *testing.T, ns *Netns) {
	t.Helper()
	for _, family := range []string{"-4", "-6"} {
		ipIn(t, ns, family, "rule", "add", "fwmark", "1", "lookup", "100")
		ipIn(t, ns, family, "route", "add", "local", "default", "dev", "lo", "table", "100")
	}
}

// markAnswers marks what comes for a transparent socket.
const markAnswers = `table inet answers {
	chain c {
		type filter hook prerouting priority -150
		socket transparent 1 meta mark set 1 accept
	}
}
`

// tproxy is redirect by TPROXY.
func tproxy(from, to string) string {
	return markAnswers + fmt.Sprintf(`table inet t {
	chain c {
		type filter hook prerouting priority -149
		meta mark != 1 tcp dport %s tproxy to :%s meta mark set 1 accept
	}
}
`, from, to)
}

func TestOriginalDestination(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		client, middle, service := gateway(t)
		deliverMarked(t, middle)
		peers := make(chan string, 1)
		told := func(c *net.TCPConn) error {
			peers <- c.RemoteAddr().(*net.TCPAddr).IP.String()
			return echo(c)
		}
		for _, kind := range []struct {
			name, transparent string
			rules             func(from, to string) string
		}{
			{"REDIRECT", "false", func(from, to string) string { return redirect(from, to, "prerouting") }},
			{"TPROXY", "true", tproxy},
		} {
			t.Run(kind.name, func(t *testing.T) {
				v4 := ServeOn(t, service, netip.AddrPortFrom(LinkAddr(2, 2), 0).String(), told)
				v6 := ServeOn(t, service, netip.AddrPortFrom(LinkAddr6(2, 2), 0).String(), told)
				f := Open(t, p, "original-dst", WithLaunch(Launch{Netns: middle}), WithListen("", "127.0.0.1"), WithListener("transparent", kind.transparent))
				for _, v := range []struct {
					service, from string
				}{
					{v4.Addr, LinkAddr(2, 1).String()},
					{v6.Addr, LinkAddr6(2, 1).String()},
				} {
					rules := kind.rules(v.service[strings.LastIndexByte(v.service, ':')+1:], portOf(f))
					natTables(t, middle, rules)
					want := v.from
					if kind.transparent == "true" {
						want = strings.Replace(strings.Replace(want, "10.211.2.", "10.211.1.", 1), "::2:", "::1:", 1)
					}
					for range 5 {
						if err := exchangeEchoFrom(client, v.service, 20, 1000); err != nil {
							t.Fatal(err)
						}
						if got := <-peers; got != want {
							t.Errorf("the service's peer is %s, want %s", got, want)
						}
					}
					natTables(t, middle, "flush ruleset\n")
				}
				f.CheckPath(t, 200_000, 200_000, 0.3)
			})
		}
	})
}

func TestOriginalDestinationThatIsShuntIsRefused(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		NeedVeth(t)
		middle, service := NewNetns(t), NewNetns(t)
		if err := Link(middle, service, 2); err != nil {
			t.Fatal(err)
		}
		s := ServeOn(t, service, netip.AddrPortFrom(LinkAddr(2, 2), 0).String(), func(*net.TCPConn) error {
			return errors.New("a connection came through")
		})
		f := Open(t, p, "original-dst", WithLaunch(Launch{Netns: middle}), WithListen("0.0.0.0", "127.0.0.1"))
		refused := func(addr string) {
			t.Helper()
			c, err := DialErr(middle, addr)
			if err == nil {
				defer c.Close()
				_, err = c.Read(make([]byte, 1))
			}
			if !IsReset(err) {
				t.Errorf("%s: %v, want a reset", addr, err)
			}
		}
		// Not redirected at all: by loopback and by another address of the host.
		refused(f.Addr)
		refused(LinkAddr(2, 1).String() + ":" + portOf(f))
		// Redirected, and what shunt dials too.
		natTables(t, middle, redirect(s.Addr[strings.LastIndexByte(s.Addr, ':')+1:], portOf(f), "output"))
		refused(s.Addr)
		Until(t, 5*time.Second, "counts", func() error {
			m, err := f.Shunt.Metrics()
			if err != nil {
				return err
			}
			loops, all := m.Sum("shunt_connections_ended_total", "cause", "dial-loop"), m.Sum("shunt_connections_total")
			if loops != 3 || all > 30 {
				return fmt.Errorf("%v loops among %v connections", loops, all)
			}
			return nil
		})
	})
}

func TestUpstreamSeesTheClientsAddress(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		client, middle, service := gateway(t)
		deliverMarked(t, middle)
		natTables(t, middle, markAnswers)
		peers := make(chan string, 1)
		told := func(c *net.TCPConn) error {
			peers <- c.RemoteAddr().(*net.TCPAddr).IP.String()
			return echo(c)
		}
		for _, v := range []struct {
			name, front, service, want string
			header                     []byte
		}{
			{"IPv4", LinkAddr(1, 2).String(), LinkAddr(2, 2).String(), LinkAddr(1, 1).String(), nil},
			{"IPv6", "[" + LinkAddr6(1, 2).String() + "]", "[" + LinkAddr6(2, 2).String() + "]", LinkAddr6(1, 1).String(), nil},
			{"from a header", LinkAddr(1, 2).String(), LinkAddr(2, 2).String(), "192.0.2.1", clientHeader(2)},
		} {
			t.Run(v.name, func(t *testing.T) {
				s := ServeOn(t, service, v.service+":0", told)
				opts := []Option{WithLaunch(Launch{Netns: middle}), WithListen("", v.front), WithListener("transparent", "true")}
				if v.header != nil {
					opts = append(opts, acceptHeader(""))
				}
				f := Open(t, p, s.Addr, opts...)
				for range 5 {
					c, err := DialErr(client, f.Addr)
					if err != nil {
						t.Fatal(err)
					}
					if _, err := c.Write(v.header); err != nil {
						t.Fatal(err)
					}
					if err := converse(c, 20, 1000); err != nil {
						t.Fatal(err)
					}
					c.Close()
					if got := <-peers; got != v.want {
						t.Errorf("the service's peer is %s, want %s", got, v.want)
					}
				}
				f.CheckPath(t, 100_000, 100_000, 0.3)
			})
		}
		// An upstream of the other family can't have that client.
		s := ServeOn(t, service, "["+LinkAddr6(2, 2).String()+"]:0", told)
		f := Open(t, p, s.Addr, WithLaunch(Launch{Netns: middle}), WithListen("", LinkAddr(1, 2).String()), WithListener("transparent", "true"))
		c, err := DialErr(client, f.Addr)
		if err == nil {
			defer c.Close()
			_, err = c.Read(make([]byte, 1))
		}
		if !IsReset(err) {
			t.Errorf("IPv4 to IPv6: %v, want a reset", err)
		}
		Until(t, 5*time.Second, "cause", func() error {
			m, err := f.Shunt.Metrics()
			if err == nil && m.Sum("shunt_connections_ended_total", "cause", "dial-family") != 1 {
				err = errors.New("dial-family isn't counted")
			}
			return err
		})
	})
}

func TestTransparentKeepsItsCapabilityAsAnotherUser(t *testing.T) {
	EachBypass(t, func(t *testing.T, p Path) {
		peers := make(chan string, 1)
		s := Serve(t, func(c *net.TCPConn) error {
			peers <- c.RemoteAddr().(*net.TCPAddr).IP.String()
			return echo(c)
		})
		NeedRoot(t)
		cfg := Configure(p, fmt.Sprintf("127.0.0.1:%d", Port(t, nil)), s.Addr)
		cfg.Process = map[string]string{"user": `"nobody"`}
		cfg.Listeners[0].Extra["transparent"] = "true"
		cfg.Listeners[0].Extra["proxy_protocol"] = `{ accept = "on", trusted = ["127.0.0.1"] }`
		f := &Front{Path: p, Addr: cfg.Listeners[0].Listen}
		f.Shunt = StartShunt(t, cfg, Launch{})
		Until(t, 5*time.Second, "log line", func() error {
			if want := `"capabilities":["CAP_NET_RAW"]`; !strings.Contains(f.Shunt.Output(), want) {
				return fmt.Errorf("the log doesn't say %s", want)
			}
			return nil
		})
		c := f.Dial(t)
		if _, err := c.Write([]byte("PROXY TCP4 127.9.9.9 127.0.0.1 1 2\r\n")); err != nil {
			t.Fatal(err)
		}
		if err := converse(c, 20, 1000); err != nil {
			t.Fatal(err)
		}
		if got := <-peers; got != "127.9.9.9" {
			t.Errorf("the service's peer is %s", got)
		}
		c.Close()
		f.CheckPath(t, 20_000, 20_000, 0.3)
	})
}

func TestTransparentWithoutTheCapabilityIsRefusedAtStart(t *testing.T) {
	if testing.Short() {
		t.Skip("end-to-end test, not run with -short")
	}
	NeedRoot(t)
	setpriv := NeedProgram(t, "setpriv")
	cfg := Configure(Off, fmt.Sprintf("127.0.0.1:%d", Port(t, nil)), "127.0.0.1:1")
	cfg.Listeners[0].Extra["transparent"] = "true"
	dir := t.TempDir()
	_, err := NewShunt(dir, cfg, Launch{Prefix: []string{setpriv, "--bounding-set=-net_admin,-net_raw", "--inh-caps=-all"}})
	if err == nil || !strings.Contains(err.Error(), "CAP_NET_ADMIN or CAP_NET_RAW") {
		t.Errorf("%v", err)
	}
}
