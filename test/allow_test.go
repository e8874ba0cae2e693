//go:build linux

package test

import (
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	. "shunt/test/harness"
)

// dialBy connects from a loopback address of the caller's choice.
func dialBy(local, addr string) (*net.TCPConn, error) {
	d := net.Dialer{Timeout: 10 * time.Second, LocalAddr: &net.TCPAddr{IP: net.ParseIP(local)}}
	c, err := d.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), c.SetDeadline(time.Now().Add(Patience))
}

// refusedBy returns nil if a client from local is reset without a byte.
func refusedBy(local, addr string) error {
	c, err := dialBy(local, addr)
	if err != nil {
		if IsReset(err) {
			return nil // the end came before connect(2) returned
		}
		return err
	}
	defer c.Close()
	if n, err := c.Read(make([]byte, 1)); n != 0 || !IsReset(err) {
		return fmt.Errorf("a client from %s got %d bytes, %v; want a reset", local, n, err)
	}
	return nil
}

// servedBy returns nil if a client from local talks with an echo service.
func servedBy(local, addr string) error {
	c, err := dialBy(local, addr)
	if err != nil {
		return err
	}
	defer c.Close()
	return converse(c, 10, 1000)
}

// waitRefused waits for the count of the refused.
func waitRefused(t *testing.T, s *Shunt, reason string, n int) {
	t.Helper()
	Until(t, 5*time.Second, "shunt_refused_total", func() error {
		m, err := s.Metrics()
		if err == nil && int(m.Sum("shunt_refused_total", "reason", reason)) != n {
			err = fmt.Errorf("%v refused for %s, want %d", m.Sum("shunt_refused_total", "reason", reason), reason, n)
		}
		return err
	})
}

func TestRefusedPeersLeaveNothing(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		t.Parallel()
		// Fewer places on the bypass than peers, so that each must be given back. That
		// nothing else is left is checked at the end of each test.
		const peers, workers = 5000, 8
		f := Open(t, p, Serve(t, echo).Addr, WithBypass("max_sockets", "400"),
			WithListener("allow", `["127.0.0.0/8"]`), WithListener("deny", `["127.0.0.2"]`))
		var wg sync.WaitGroup
		var failed atomic.Pointer[error]
		for range workers {
			wg.Go(func() {
				for range peers / workers {
					if err := refusedBy("127.0.0.2", f.Addr); err != nil {
						failed.Store(&err)
						return
					}
				}
			})
		}
		wg.Wait()
		if err := failed.Load(); err != nil {
			t.Fatal(*err)
		}
		waitRefused(t, f.Shunt, "acl", peers)
		m, err := f.Shunt.Metrics()
		if err != nil {
			t.Fatal(err)
		}
		if n := m.Sum("shunt_connections_total"); n != 0 {
			t.Errorf("%v of them count as connections", n)
		}
		if err := f.Shunt.CheckIdle(5 * time.Second); err != nil {
			t.Error(err)
		}
		Until(t, 10*time.Second, "a connection of somebody else", func() error {
			if err := servedBy("127.0.0.3", f.Addr); err != nil || !p.Bypass() {
				return err
			}
			m, err := f.Shunt.Metrics()
			if err == nil && m.Sum("shunt_bytes_total", "path", "bypass") == 0 {
				err = fmt.Errorf("declined: %v", m.Declined())
			}
			return err
		})
	})
}

func TestAddressListsOfEveryKindOfListener(t *testing.T) {
	OnPaths(t, []Path{Off, Every}, func(t *testing.T, p Path) {
		s := Serve(t, echo)
		for _, c := range []struct {
			name, listen, host, client string
			allow, deny                string
			served                     bool
		}{
			{"IPv4", "127.0.0.1", "127.0.0.1", "127.0.0.7", `["127.0.0.7"]`, `[]`, true},
			{"IPv4, not allowed", "127.0.0.1", "127.0.0.1", "127.0.0.8", `["127.0.0.7"]`, `[]`, false},
			{"IPv4 of a dual-stack listener", "[::]", "127.0.0.1", "127.0.0.7", `["127.0.0.0/8"]`, `[]`, true},
			{"IPv4 of a dual-stack listener, denied", "[::]", "127.0.0.1", "127.0.0.7", `["127.0.0.0/8", "::/0"]`, `["127.0.0.7"]`, false},
			{"IPv6", "[::1]", "[::1]", "::1", `["::/64"]`, `["0.0.0.0/0"]`, true},
			{"IPv6, denied", "[::]", "[::1]", "::1", `["::1"]`, `["::1"]`, false},
		} {
			t.Run(c.name, func(t *testing.T) {
				f := Open(t, p, s.Addr, WithListen(c.listen, c.host), WithListener("allow", c.allow), WithListener("deny", c.deny))
				if c.served {
					if err := servedBy(c.client, f.Addr); err != nil {
						t.Fatal(err)
					}
					f.CheckPath(t, 10_000, 10_000, 0.3)
					return
				}
				if err := refusedBy(c.client, f.Addr); err != nil {
					t.Fatal(err)
				}
				waitRefused(t, f.Shunt, "acl", 1)
			})
		}
	})
}

func TestLimitsCountLiveConnections(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		cfg := Configure(p, "", Serve(t, echo).Addr)
		cfg.Limits = map[string]string{"max_connections": "4"}
		cfg.Listeners[0].Listen = fmt.Sprintf("127.0.0.1:%d", Port(t, nil))
		cfg.Listeners[0].Extra = map[string]string{"max_connections_per_source": "2"}
		second := cfg.Listeners[0]
		second.Name, second.Listen = "second", fmt.Sprintf("127.0.0.1:%d", Port(t, nil))
		cfg.Listeners = append(cfg.Listeners, second)
		s := StartShunt(t, cfg, Launch{})
		first := cfg.Listeners[0].Listen
		var conns []*net.TCPConn
		open := func(local, addr string) {
			t.Helper()
			c, err := dialBy(local, addr)
			if err == nil {
				t.Cleanup(func() { c.Close() })
				conns = append(conns, c)
				err = converse(c, 2, 1000)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		open("127.0.0.1", first)
		open("127.0.0.1", first)
		if err := refusedBy("127.0.0.1", first); err != nil {
			t.Fatal(err)
		}
		waitRefused(t, s, "source-limit", 1)
		open("127.0.0.2", first)
		open("127.0.0.1", second.Listen) // each listener counts for itself
		for _, addr := range []string{first, second.Listen} {
			if err := refusedBy("127.0.0.3", addr); err != nil {
				t.Fatal(err)
			}
		}
		waitRefused(t, s, "limit", 2)
		conns[0].Close()
		Until(t, 5*time.Second, "a free place", func() error { return servedBy("127.0.0.1", first) })
		for _, c := range conns[1:] {
			if err := converse(c, 2, 1000); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestSourceRateRefusesWhoIsFaster(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		const burst, tries = 5, 40
		f := Open(t, p, Serve(t, echo).Addr, WithListener("source_rate", fmt.Sprintf("{ per_second = 1, burst = %d }", burst)))
		begin := time.Now()
		served := 0
		for range tries {
			if servedBy("127.0.0.1", f.Addr) == nil {
				served++
			}
		}
		if most := burst + int(time.Since(begin)/time.Second) + 1; served < burst || served > most {
			t.Errorf("%d served, want %d to %d", served, burst, most)
		}
		waitRefused(t, f.Shunt, "source-rate", tries-served)
		if err := servedBy("127.0.0.2", f.Addr); err != nil {
			t.Errorf("another source: %v", err)
		}
	})
}
