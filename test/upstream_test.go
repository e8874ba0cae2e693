//go:build linux

package test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	. "shunt/test/harness"
)

// replica is one of several services at the same port.
type replica struct {
	ln      *net.TCPListener
	addr    string
	talked  atomic.Int64 // connections on which something was said
	handler func(c *net.TCPConn) error
}

// replicas starts n services at 127.0.3.1 and so on, which echo.
func replicas(t *testing.T, n int) []*replica {
	t.Helper()
	port := Port(t, nil)
	rs := make([]*replica, n)
	for i := range rs {
		r := &replica{addr: fmt.Sprintf("127.0.3.%d:%d", i+1, port)}
		r.handler = func(c *net.TCPConn) error {
			buf := make([]byte, 64*kib)
			for first := true; ; first = false {
				n, err := c.Read(buf)
				if n > 0 && first {
					r.talked.Add(1)
				}
				if err == io.EOF {
					return c.CloseWrite()
				}
				if err != nil {
					return fmt.Errorf("%s: %w", r.addr, err)
				}
				if _, err := c.Write(buf[:n]); err != nil {
					return fmt.Errorf("%s: %w", r.addr, err)
				}
			}
		}
		r.start(t)
		rs[i] = r
	}
	return rs
}

func (r *replica) start(t *testing.T) {
	t.Helper()
	var err error
	Until(t, 5*time.Second, "listen again", func() error {
		var ln net.Listener
		ln, err = net.Listen("tcp", r.addr)
		if err == nil {
			r.ln = ln.(*net.TCPListener)
		}
		return err
	})
	ServeListener(t, r.ln, r.handler)
}

func (r *replica) stop() { r.ln.Close() }

// upstreams is the option that names them, before others.
func upstreams(first []string, rs []*replica) Option {
	for _, r := range rs {
		first = append(first, r.addr)
	}
	list, _ := json.Marshal(first)
	return WithListener("upstreams", string(list))
}

// talk has a conversation and ends it in order.
func talk(addr string, messages, size int) error {
	c, err := DialErr(nil, addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := converse(c, messages, size); err != nil {
		return err
	}
	if err := c.CloseWrite(); err != nil {
		return err
	}
	return ReceiveN(c, 1, 0, 0)
}

// upstreamStates are the states that /upstreams shows, by address.
func upstreamStates(s *Shunt) (map[string]string, error) {
	_, body, err := s.Get("/upstreams")
	if err != nil {
		return nil, err
	}
	var all []struct{ Address, State string }
	if err := json.Unmarshal([]byte(body), &all); err != nil {
		return nil, fmt.Errorf("%w: %s", err, body)
	}
	states := map[string]string{}
	for _, u := range all {
		states[u.Address] = u.State
	}
	return states, nil
}

func waitUpstream(t *testing.T, s *Shunt, addr, state string) {
	t.Helper()
	Until(t, 10*time.Second, addr+" "+state, func() error {
		states, err := upstreamStates(s)
		if err == nil && states[addr] != state {
			err = fmt.Errorf("%v", states)
		}
		return err
	})
}

// TestUpstreamsTakeTurns: also when one refuses, and a connection is bypassed after a dial that failed.
func TestUpstreamsTakeTurns(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		rs := replicas(t, 2)
		refusing := fmt.Sprintf("127.0.3.99:%d", Port(t, nil))
		f := Open(t, p, "", upstreams([]string{refusing}, rs), WithListener("eject", `{ failures = 4 }`))
		const connections, messages, size = 20, 50, 1000
		for range connections {
			if err := talk(f.Addr, messages, size); err != nil {
				t.Fatal(err)
			}
		}
		for _, r := range rs {
			if n := r.talked.Load(); n < connections/2-4 {
				t.Errorf("%s has %d of %d connections", r.addr, n, connections)
			}
		}
		waitUpstream(t, f.Shunt, refusing, "ejected")
		m, err := f.Shunt.Metrics()
		if err != nil {
			t.Fatal(err)
		}
		if n := m.Sum("shunt_upstream_dial_errors_total", "address", refusing); n != 4 {
			t.Errorf("%s was dialled %v times, want 4", refusing, n)
		}
		const all = connections * messages * size
		f.CheckPath(t, all, all, 0.6)
	})
}

// TestRecordsDriveTheUpstreams: a resolver that dies changes nothing.
func TestRecordsDriveTheUpstreams(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		rs := replicas(t, 2)
		d := ServeDNS(t)
		const name = "_echo._tcp.service.test"
		record := func(i int) SRV {
			host := fmt.Sprintf("n%d.service.test", i)
			d.Set(host, strings.Split(rs[i].addr, ":")[0])
			return SRV{Priority: 1, Weight: 1, Port: uint16(rs[i].ln.Addr().(*net.TCPAddr).Port), Target: host}
		}
		d.SetSRV(name, record(0))
		f := Open(t, p, "srv+"+name, WithDNS(d), WithListener("resolve_interval", `"100ms"`))
		say := func(times int) {
			t.Helper()
			for range times {
				if err := talk(f.Addr, 20, 1000); err != nil {
					t.Fatal(err)
				}
			}
		}
		say(2)
		d.SetSRV(name, record(1))
		waitUpstream(t, f.Shunt, rs[1].addr, "up")
		Until(t, 5*time.Second, "the end of the old address", func() error {
			states, err := upstreamStates(f.Shunt)
			if err == nil && len(states) != 1 {
				err = fmt.Errorf("%v", states)
			}
			return err
		})
		say(2)
		d.Stop()
		Until(t, 10*time.Second, "a failed lookup", func() error {
			m, err := f.Shunt.Metrics()
			if err == nil && m.Sum("shunt_resolve_errors_total") == 0 {
				err = fmt.Errorf("none")
			}
			return err
		})
		say(2)
		if a, b := rs[0].talked.Load(), rs[1].talked.Load(); a != 2 || b != 4 {
			t.Errorf("%d and %d connections, want 2 and 4", a, b)
		}
		f.CheckPath(t, 6*20*1000, 6*20*1000, 0.3)
		d.Restart()
		d.SetSRV(name, SRV{Target: "."})
		waitUpstream(t, f.Shunt, "", "unresolved")
		if err := talk(f.Addr, 1, 1); !IsReset(err) {
			t.Errorf("a service that isn't offered: %v", err)
		}
	})
}

// TestClientsAreRefusedWhileAllUpstreamsAreDown: early, by health checks that no service takes for an error.
func TestClientsAreRefusedWhileAllUpstreamsAreDown(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		rs := replicas(t, 2)
		f := Open(t, p, "", upstreams(nil, rs), WithListener("health", `{ interval = "100ms", rise = 1, fall = 1 }`), WithListener("dial_timeout", `"60s"`))
		if err := talk(f.Addr, 20, 1000); err != nil {
			t.Fatal(err)
		}
		for _, r := range rs {
			r.stop()
			waitUpstream(t, f.Shunt, r.addr, "down")
		}
		for range 20 {
			if err := talk(f.Addr, 1, 1); !IsReset(err) {
				t.Fatalf("all are down: %v", err)
			}
		}
		Until(t, 5*time.Second, "ends", func() error {
			m, err := f.Shunt.Metrics()
			if n := m.Sum("shunt_connections_ended_total", "cause", "no-upstream"); err == nil && n != 20 {
				err = fmt.Errorf("%v, want 20", n)
			}
			return err
		})
		rs[1].start(t)
		waitUpstream(t, f.Shunt, rs[1].addr, "up")
		if err := talk(f.Addr, 20, 1000); err != nil {
			t.Fatal(err)
		}
		f.CheckPath(t, 2*20*1000, 2*20*1000, 0.3)
	})
}

// TestFlappingUpstreamUnderLoad: connections that were made keep their bytes, others go elsewhere.
func TestFlappingUpstreamUnderLoad(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		rs := replicas(t, 3)
		f := Open(t, p, "", upstreams(nil, rs), WithListener("balance", `"least-connections"`),
			WithListener("eject", `{ failures = 1, duration = "20ms" }`), WithListener("health", `{ interval = "100ms" }`))
		var wg sync.WaitGroup
		var good, bad atomic.Int64
		done := make(chan struct{})
		for range 6 {
			wg.Go(func() {
				for {
					select {
					case <-done:
						return
					default:
					}
					// What was in the backlog of a socket that closes is reset; only that.
					if err := talk(f.Addr, 10, 1000); err == nil {
						good.Add(1)
					} else if IsReset(err) {
						bad.Add(1)
					} else {
						t.Errorf("connection: %v", err)
						return
					}
				}
			})
		}
		more := func() {
			t.Helper()
			before := good.Load()
			Until(t, 20*time.Second, "more connections", func() error {
				if n := good.Load(); n < before+20 {
					return fmt.Errorf("%d more", n-before)
				}
				return nil
			})
		}
		for range 5 {
			rs[0].stop()
			rs[1].stop()
			more()
			rs[0].start(t)
			rs[1].start(t)
			more()
		}
		close(done)
		wg.Wait()
		m, err := f.Shunt.Metrics()
		if err != nil {
			t.Fatal(err)
		}
		if n := m.Sum("shunt_dial_errors_total"); n != 0 {
			t.Errorf("%v connections found no upstream", n)
		}
		if n := m.Sum("shunt_connections_ended_total", "cause", "server-rst"); float64(bad.Load()) > n {
			t.Errorf("%d of %d connections were reset, %v by a service", bad.Load(), good.Load(), n)
		}
	})
}

// TestReloadChangesTheUpstreams: live connections stay where they are, the old pool's checks end.
func TestReloadChangesTheUpstreams(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		rs := replicas(t, 2)
		f := Open(t, p, "", upstreams(nil, rs[:1]), WithListener("health", `{ interval = "100ms" }`))
		c := f.Dial(t)
		if err := converse(c, 10, 1000); err != nil {
			t.Fatal(err)
		}
		cfg := f.Shunt.Config
		cfg.Listeners[0].Extra["upstreams"] = fmt.Sprintf("[%q]", rs[1].addr)
		if err := f.Shunt.Rewrite(cfg); err != nil {
			t.Fatal(err)
		}
		if err := f.Shunt.Reload(10 * time.Second); err != nil {
			t.Fatal(err)
		}
		if err := talk(f.Addr, 10, 1000); err != nil {
			t.Fatal(err)
		}
		if err := converse(c, 10, 1000); err != nil {
			t.Fatalf("connection from before: %v", err)
		}
		c.Close()
		if a, b := rs[0].talked.Load(), rs[1].talked.Load(); a != 1 || b != 1 {
			t.Errorf("%d and %d connections, want one each", a, b)
		}
		if states, err := upstreamStates(f.Shunt); err != nil || len(states) != 1 || states[rs[1].addr] != "up" {
			t.Errorf("%v, %v", states, err)
		}
	})
}
