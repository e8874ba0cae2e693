package proxy

import (
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"
)

// reload changes the rig's configuration.
func (r *rig) reload(change func(*Config)) error {
	r.t.Helper()
	cfg := Config{AccessLog: true, Admin: r.srv.cfg.Admin}
	for _, l := range r.srv.current() {
		cfg.Listeners = append(cfg.Listeners, l.cfg)
	}
	change(&cfg)
	return r.srv.Reload(cfg)
}

func (r *rig) mustReload(change func(*Config)) {
	r.t.Helper()
	if err := r.reload(change); err != nil {
		r.t.Fatal(err)
	}
}

func TestChangedListenerKeepsItsSocketAndItsConnections(t *testing.T) {
	r := newRig(t, nil)
	oldClient, oldService := r.pair()
	r.touch(oldClient, oldService)
	before := r.srv.current()[0]
	r.mustReload(func(c *Config) { c.Listeners[0].IdleTimeout = 50 * time.Millisecond })
	if got := r.srv.Addrs()[0].Addr.String(); got != r.addr {
		t.Fatalf("listens on %s, before %s", got, r.addr)
	}
	client, _ := r.pair()
	expectReset(t, client) // the new timeout
	send(t, oldService, []byte("still"))
	expect(t, oldClient, "still")
	after := r.srv.current()[0]
	if after == before || after.past != before.past || *after.ln.Load() != *before.ln.Load() {
		t.Error("want a new listener with the old one's socket and counters")
	}
	oldClient.CloseWrite()
	expectEOF(t, oldService)
	oldService.Close()
	expectEOF(t, oldClient)
	r.ended(causeClientFIN)
}

func TestUnchangedListenerIsNotTouched(t *testing.T) {
	r := newRig(t, nil)
	before := r.srv.current()[0]
	r.mustReload(func(c *Config) {
		second := c.Listeners[0]
		second.Name = "second"
		c.Listeners = append(c.Listeners, second)
	})
	if r.srv.current()[0] != before {
		t.Error("another listener")
	}
}

func TestListenersComeAndGo(t *testing.T) {
	r := newRig(t, nil)
	client, service := r.pair()
	r.touch(client, service)
	r.mustReload(func(c *Config) { c.Listeners[0].Name = "other" })
	if r.srv.Addrs()[0].Addr.String() == r.addr {
		t.Fatal("port 0 is another port for another name")
	}
	if _, err := net.Dial("tcp", r.addr); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("dial the removed listener: %v", err)
	}
	// Its connection goes on, and is counted until it ends.
	send(t, service, []byte("on"))
	expect(t, client, "on")
	const active = `shunt_connections_active{listener="web",path="copy"}`
	if v := r.metrics()[active]; v != 1 {
		t.Errorf("active connections of the removed listener: %v", v)
	}
	r.addr = r.srv.Addrs()[0].Addr.String()
	client2, service2 := r.pair()
	r.touch(client2, service2)
	client.Close()
	service.Close()
	eventually(t, "an end of the removed listener's metrics", func() bool {
		_, ok := r.metrics()[active]
		return !ok
	})
	client2.Close()
	service2.Close()
	eventually(t, "the connection's end", func() bool { return r.srv.liveCount() == 0 })
}

func TestFailedReloadChangesNothing(t *testing.T) {
	r := newRig(t, nil)
	taken := r.svc.Addr().String()
	before := r.srv.current()
	for what, change := range map[string]func(*Config){
		"address in use": func(c *Config) {
			fresh := c.Listeners[0]
			fresh.Name = "fresh"
			c.Listeners[0].IdleTimeout = time.Hour
			full := fresh
			full.Name, full.Listen = "full", taken
			c.Listeners = append(c.Listeners, fresh, full)
		},
		"admin in use": func(c *Config) { c.Listeners[0].Name, c.Admin = "other", taken },
		"bad listener": func(c *Config) { c.Listeners[0].DialTimeout = -1 },
		"no listener":  func(c *Config) { c.Listeners = nil },
	} {
		fds := openFDs()
		if err := r.reload(change); err == nil {
			t.Errorf("%s: no error", what)
		}
		if !slices.Equal(r.srv.current(), before) {
			t.Errorf("%s: other listeners", what)
		}
		if n := openFDs(); n > fds {
			t.Errorf("%s: %d descriptors, before %d", what, n, fds)
		}
	}
	client, service := r.pair()
	r.touch(client, service)
	if v := r.metrics()[`shunt_reloads_total{result="error"}`]; v != 4 {
		t.Errorf("counted %v bad reloads", v)
	}
	if strings.Count(r.log.String(), `"listening"`) != 1 {
		t.Error("the log tells of listeners that never were")
	}
	client.Close()
	service.Close()
}

func TestReloadSaysWhoHoldsTheAddress(t *testing.T) {
	r := newRig(t, nil)
	_, port, _ := net.SplitHostPort(r.addr)
	// The same port on all addresses, while the listener's socket is there.
	err := r.reload(func(c *Config) { c.Listeners[0].Listen = "0.0.0.0:" + port })
	if err == nil {
		t.Skip("this system lets both listen")
	}
	if !errors.Is(err, syscall.EADDRINUSE) || strings.Contains(err.Error(), "until") {
		t.Errorf("got %v", err) // "127.0.0.1:0" in the configuration: nothing to name
	}
	r.mustReload(func(c *Config) {
		c.Listeners[0].Name = "named"
		c.Listeners[0].Listen = "127.0.0.1:" + freePort(t)
	})
	_, port, _ = net.SplitHostPort(r.srv.Addrs()[0].Addr.String())
	err = r.reload(func(c *Config) { c.Listeners[0].Listen = "0.0.0.0:" + port })
	if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), `"named"`) {
		t.Errorf("got %v, want one that names the listener", err)
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	return port
}

func TestReloadAnnouncesBeforeItWithdraws(t *testing.T) {
	b := &fakeBypass{}
	r := newRig(t, b)
	r.mustReload(func(c *Config) { c.Listeners[0].DrainTimeout = time.Minute })
	if got, want := b.noted(), []string{"listen", "listen", "withdraw"}; !slices.Equal(got, want) {
		t.Errorf("changed: %v, want %v", got, want)
	}
	r.mustReload(func(c *Config) { c.Listeners[0].Bypass = BypassOff })
	r.mustReload(func(c *Config) { c.Listeners[0].Bypass = BypassOn })
	if got, want := b.noted()[3:], []string{"withdraw", "listen"}; !slices.Equal(got, want) {
		t.Errorf("off and on: %v, want %v", got, want)
	}
	if r.reload(func(c *Config) { c.Listeners[0].Name, c.Admin = "x", r.svc.Addr().String() }) == nil {
		t.Fatal("no error")
	}
	if got, want := b.noted()[5:], []string{"listen", "withdraw"}; !slices.Equal(got, want) {
		t.Errorf("given up: %v, want %v", got, want)
	}
}

func TestReloadMovesTheAdminEndpoint(t *testing.T) {
	r := newRig(t, nil)
	old := r.srv.AdminAddr()
	r.mustReload(func(c *Config) { c.Admin = "" })
	if r.srv.AdminAddr() != "" {
		t.Error("still there")
	}
	if _, err := net.Dial("tcp", old); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial the old address: %v", err)
	}
	path := "unix:" + t.TempDir() + "/a"
	r.mustReload(func(c *Config) { c.Admin = path })
	if r.srv.AdminAddr() != path {
		t.Errorf("it is at %q", r.srv.AdminAddr())
	}
}

func TestReloadChangesLimitsInUse(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) { l.MaxConnections = 2 }))
	c1, s1 := r.pair()
	c2, s2 := r.pair()
	r.touch(c1, s1)
	r.touch(c2, s2)
	waiting := r.dial()
	r.mustReload(func(c *Config) { c.Listeners[0].MaxConnections = 1 })
	// Two live ones of a limit of one: the first that ends makes no room.
	end := func(c, s net.Conn, left int) {
		t.Helper()
		c.Close()
		s.Close()
		eventually(t, "the connection's end", func() bool { return r.srv.liveCount() <= left })
	}
	end(c1, s1, 1)
	r.svc.SetDeadline(time.Now().Add(50 * time.Millisecond))
	if c, err := r.svc.Accept(); err == nil {
		c.Close()
		t.Fatal("a connection beyond the limit")
	}
	r.mustReload(func(c *Config) { c.Listeners[0].MaxConnections = 2 })
	s3 := r.accept()
	r.touch(waiting, s3)
	end(c2, s2, 1)
	end(waiting, s3, 0)
}

func TestOldSettingsOutliveTheReload(t *testing.T) {
	// The drain timeout that counts is the one that the connection began with.
	r := newRig(t, nil, onListener(func(l *Listener) { l.DrainTimeout = 50 * time.Millisecond }))
	client, service := r.pair()
	r.touch(client, service)
	r.mustReload(func(c *Config) { c.Listeners[0].DrainTimeout = time.Hour })
	if err := r.srv.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	expectReset(t, client)
	if err := r.reload(func(*Config) {}); !errors.Is(err, ErrDraining) {
		t.Errorf("reload after the drain: %v", err)
	}
}

func TestReloadsLoseNoConnection(t *testing.T) {
	r := newRig(t, nil)
	go func() {
		for {
			c, err := r.svc.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 1)
				for {
					if _, err := c.Read(b); err != nil {
						return
					}
					c.Write(b)
				}
			}()
		}
	}()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var done atomic.Int64
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				c, err := net.DialTimeout("tcp", r.addr, deadline)
				if err != nil {
					t.Error(err)
					return
				}
				c.SetDeadline(time.Now().Add(deadline))
				b := []byte{'x'}
				if _, err := c.Write(b); err != nil {
					t.Error(err)
				}
				if _, err := c.Read(b); err != nil {
					t.Error(err)
				}
				c.Close()
				done.Add(1)
			}
		})
	}
	for i := range 200 {
		r.mustReload(func(c *Config) { c.Listeners[0].HalfOpenTimeout = time.Duration(i+1) * time.Minute })
		at := done.Load()
		if i%10 == 0 {
			eventually(t, "connection between reloads", func() bool { return done.Load() > at || t.Failed() })
		}
	}
	close(stop)
	wg.Wait()
	eventually(t, "the connections' end", func() bool { return r.srv.liveCount() == 0 })
}

func TestSlotsWakeWhoeverWaits(t *testing.T) {
	s := newSlots(1)
	if !s.try(false) || s.try(false) {
		t.Fatal("one place is one place")
	}
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for waited := false; !s.try(waited); waited = true {
				select {
				case <-s.freed:
				case <-time.After(deadline):
					t.Error("not woken")
					return
				}
			}
		})
	}
	s.resize(4)
	wg.Wait()
	s.resize(2)
	s.give()
	s.give()
	if s.try(false) {
		t.Error("more places than the new limit")
	}
	s.give()
	if !s.try(false) {
		t.Error("no place below the new limit")
	}
}

func TestListenersOutnumberThePlacesTheyShare(t *testing.T) {
	r := newRig(t, nil, func(c *Config) {
		for _, name := range []string{"two", "three"} {
			l := c.Listeners[0]
			l.Name = name
			c.Listeners = append(c.Listeners, l)
		}
	})
	serveAll := func() {
		t.Helper()
		for range 2 {
			for _, a := range r.srv.Addrs() {
				c, err := net.DialTimeout("tcp", a.Addr.String(), deadline)
				if err != nil {
					t.Fatal(err)
				}
				service := r.accept()
				send(t, c, []byte("x"))
				expect(t, service, "x")
				c.Close()
				service.Close()
				eventually(t, "the connection's end", func() bool { return r.srv.liveCount() == 0 })
			}
		}
	}
	serveAll()
	// As with few open files.
	r.srv.fitting = 1
	for i := range 3 {
		r.mustReload(func(c *Config) {
			for j := range c.Listeners {
				c.Listeners[j].IdleTimeout = time.Duration(i+1) * time.Hour
			}
		})
		serveAll()
	}
	s, err := New(r.srv.cfg, nil, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	if s.share(0); s.derived.limit != 3 {
		t.Errorf("%d places for three listeners", s.derived.limit)
	}
}
