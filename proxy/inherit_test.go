//go:build linux

package proxy

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"
)

func listenTCP(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return ln
}

func TestInheritedSocketsFindTheirListeners(t *testing.T) {
	a, b, c := listenTCP(t), listenTCP(t), listenTCP(t)
	addr := func(ln net.Listener) string { return ln.Addr().String() }
	for what, test := range map[string]struct {
		in   []Inherited
		want map[string]net.Listener // by listener; "admin" is the endpoint
		err  string
	}{
		"by name": {[]Inherited{{Listener: a, Name: "two"}, {Listener: b, Name: "one"}}, map[string]net.Listener{"two": a, "one": b}, ""},
		"by address, where one name is for several": {
			[]Inherited{{Listener: a, Name: "x.socket"}, {Listener: b, Name: "x.socket"}}, map[string]net.Listener{"one": a, "two": b}, ""},
		"by address, where a listener's name is for several": {
			[]Inherited{{Listener: b, Name: "one"}, {Listener: a, Name: "one"}}, map[string]net.Listener{"one": a, "two": b}, ""},
		"admin by name":    {[]Inherited{{Listener: c, Name: "admin"}, {Listener: b, Name: "x"}}, map[string]net.Listener{"admin": c, "two": b}, ""},
		"two for one":      {[]Inherited{{Listener: c, Name: "one"}, {Listener: a, Name: "x"}}, nil, "already"},
		"nobody's":         {[]Inherited{{Listener: c, Name: "x"}}, nil, "no listener has this name or this address"},
		"former, the same": {[]Inherited{{Listener: c, Name: "old", Former: true, Listen: addr(a)}}, map[string]net.Listener{"one": c}, ""},
		"former, gone":     {[]Inherited{{Listener: listenTCP(t), Name: "old", Former: true, Listen: "127.0.0.1:9"}}, map[string]net.Listener{}, ""},
		"former admin":     {[]Inherited{{Listener: c, Former: true, Listen: "127.0.0.1:1", Admin: true}}, map[string]net.Listener{"admin": c}, ""},
	} {
		one, two := DefaultListener(), DefaultListener()
		one.Name, one.Listen, one.Upstream = "one", addr(a), "127.0.0.1:1"
		two.Name, two.Listen, two.Upstream = "two", addr(b), "127.0.0.1:1"
		cfg := Config{Listeners: []Listener{one, two}, Admin: "127.0.0.1:1", Inherited: test.in}
		s, err := New(cfg, nil, zerolog.Nop())
		if err != nil {
			t.Fatal(err)
		}
		err = s.inherit()
		if test.err != "" {
			if err == nil || !strings.Contains(err.Error(), test.err) {
				t.Errorf("%s: %v, want %q", what, err, test.err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		got := map[string]net.Listener{}
		for _, l := range s.listeners {
			if l.given != nil {
				got[l.cfg.Name] = l.given
			}
		}
		if s.adminSocket != nil {
			got["admin"] = s.adminSocket.Listener
		}
		if len(got) != len(test.want) {
			t.Errorf("%s: %v, want %v", what, got, test.want)
		}
		for name, ln := range test.want {
			if got[name] != ln {
				t.Errorf("%s: %s has another socket", what, name)
			}
		}
	}
}

func TestHandedSocketsServeInAnotherServer(t *testing.T) {
	dir, err := os.MkdirTemp("", "px")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "admin")
	r := newRig(t, nil, func(c *Config) { c.Admin = "unix:" + path })
	old, oldService := r.pair()
	r.touch(old, oldService)
	hs, err := r.srv.Sockets()
	if err != nil {
		t.Fatal(err)
	}
	cfg := r.srv.cfg
	for _, h := range hs {
		// As it is when a process is started with it: this must not make the socket block in the old one.
		h.File.Fd()
		in := h.Inherited
		if in.Listener, err = net.FileListener(h.File); err != nil {
			t.Fatal(err)
		}
		h.File.Close()
		cfg.Inherited = append(cfg.Inherited, in)
	}
	next, err := New(cfg, nil, zerolog.New(r.log))
	if err != nil {
		t.Fatal(err)
	}
	if err := next.Open(); err != nil {
		t.Fatal(err)
	}
	if next.ready.Load() {
		t.Error("ready before it serves")
	}
	next.Serve()
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		next.Shutdown(ctx)
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the admin socket's file after the last server: %v", err)
		}
	})
	r.srv.HandOver()
	over := make(chan error, 1)
	go func() { over <- r.srv.Shutdown(context.Background()) }()
	eventually(t, "draining", r.srv.Draining)
	client, service := r.pair()
	r.touch(client, service)
	send(t, oldService, []byte("old"))
	expect(t, old, "old")
	old.Close()
	oldService.Close()
	select {
	case err := <-over:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(deadline):
		t.Fatal("the old server doesn't end: its sockets block")
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the admin socket's file: %v", err)
	}
	if next.Numbers().Connections != 1 {
		t.Errorf("%+v", next.Numbers())
	}
	client.Close()
	service.Close()
	eventually(t, "the connection's end", func() bool { return next.liveCount() == 0 })
}

func TestAliveMeansThatTheLoopsAnswer(t *testing.T) {
	block := make(chan struct{})
	r := newRig(t, nil, onListener(func(l *Listener) {
		l.MaxConnections = 1
		l.Admit = func(Stream) error { <-block; return nil }
	}))
	alive := func(d time.Duration) error {
		ctx, cancel := context.WithTimeout(context.Background(), d)
		defer cancel()
		return r.srv.Alive(ctx)
	}
	for range 3 {
		if err := alive(deadline); err != nil {
			t.Fatal(err)
		}
	}
	client := r.dial()
	// The accept loop is in Admit now, or soon.
	eventually(t, "error of a loop that hangs", func() bool { return alive(20*time.Millisecond) != nil })
	close(block)
	service := r.accept()
	r.touch(client, service)
	// At its limit the loop waits, which is no fault.
	eventually(t, "answer again", func() bool { return alive(deadline) == nil })
	r.srv.mu.Lock()
	if err := alive(10 * time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with the mutex held: %v", err)
	}
	r.srv.mu.Unlock()
	// Pings and reloads don't get into each other's way.
	stop := make(chan struct{})
	pinged := make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				pinged <- nil
				return
			default:
			}
			if err := alive(deadline); err != nil {
				pinged <- err
				return
			}
		}
	}()
	for i := range 100 {
		r.mustReload(func(c *Config) {
			c.Listeners[0].HalfOpenTimeout = time.Duration(i+1) * time.Minute
			c.Listeners[0].Admit = nil
		})
	}
	close(stop)
	if err := <-pinged; err != nil {
		t.Error(err)
	}
	client.Close()
	service.Close()
	next, nextService := r.pair()
	r.touch(next, nextService)
	next.Close()
	nextService.Close()
	eventually(t, "the connections' end", func() bool { return r.srv.liveCount() == 0 })
}

func TestReloadChangesTheKeepAliveOfNewConnections(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("missing: a way to read the options")
	}
	r := newRig(t, nil)
	for _, idle := range []time.Duration{17 * time.Second, 0, 23 * time.Second} {
		r.mustReload(func(c *Config) { c.Listeners[0].KeepAlive.Idle = idle })
		client, service := r.pair()
		r.touch(client, service)
		var on, secs int
		raw, err := r.conns()[0].down().(syscall.Conn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		raw.Control(func(fd uintptr) {
			on, _ = syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_KEEPALIVE)
			secs, _ = syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, 4) // TCP_KEEPIDLE
		})
		if (on != 0) != (idle > 0) || idle > 0 && time.Duration(secs)*time.Second != idle {
			t.Errorf("keepalive on %d, idle %d s; want %v", on, secs, idle)
		}
		client.Close()
		service.Close()
		eventually(t, "the connection's end", func() bool { return r.srv.liveCount() == 0 })
	}
}

func TestUnixListenerIsHandedOver(t *testing.T) {
	dir, err := os.MkdirTemp("", "px")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "l")
	r := newRig(t, nil, onListener(func(l *Listener) { l.Listen, l.Unix = "unix:"+path, UnixSocket{Mode: 0o600, Unlink: true} }))
	made, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	hs, err := r.srv.Sockets()
	if err != nil {
		t.Fatal(err)
	}
	cfg := r.srv.cfg
	cfg.Listeners = append([]Listener(nil), cfg.Listeners...)
	cfg.Listeners[0].Unix.Mode = 0o660
	for _, h := range hs {
		in := h.Inherited
		if in.Listener, err = net.FileListener(h.File); err != nil {
			t.Fatal(err)
		}
		h.File.Close()
		cfg.Inherited = append(cfg.Inherited, in)
	}
	next, err := New(cfg, nil, zerolog.New(r.log))
	if err != nil {
		t.Fatal(err)
	}
	if err := next.Start(); err != nil {
		t.Fatal(err)
	}
	r.srv.HandOver()
	if err := r.srv.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	fi, err := os.Lstat(path)
	if err != nil || !os.SameFile(fi, made) || fi.Mode().Perm() != 0o660 {
		t.Fatalf("after the first server: %v, %v", fi, err)
	}
	c, err := net.DialTimeout("unix", path, deadline)
	if err != nil {
		t.Fatal(err)
	}
	service := r.accept()
	send(t, c, []byte("x"))
	expect(t, service, "x")
	c.Close()
	service.Close()
	if err := next.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after the last server: %v", err)
	}
}

// handTo returns cfg with the rig's sockets, as another process gets them.
func handTo(t *testing.T, r *rig, cfg Config) Config {
	t.Helper()
	hs, err := r.srv.Sockets()
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range hs {
		in := h.Inherited
		if in.Listener, err = net.FileListener(h.File); err != nil {
			t.Fatal(err)
		}
		h.File.Close()
		cfg.Inherited = append(cfg.Inherited, in)
	}
	return cfg
}

func TestFilesOfDroppedSocketsAreRemoved(t *testing.T) {
	for _, unlink := range []bool{true, false} {
		dir := shortDir(t)
		listen, admin, other := filepath.Join(dir, "l"), filepath.Join(dir, "a"), filepath.Join(dir, "o")
		r := newRig(t, nil, listenAt(listen, func(u *UnixSocket) { u.Unlink = unlink }), func(c *Config) { c.Admin = "unix:" + admin })
		cfg := handTo(t, r, r.srv.cfg)
		cfg.Admin = ""
		cfg.Listeners = slices.Clone(cfg.Listeners)
		cfg.Listeners[0].Name, cfg.Listeners[0].Listen = "other", "unix:"+other
		next, err := New(cfg, nil, zerolog.Nop())
		if err != nil {
			t.Fatal(err)
		}
		if err := next.Open(); err != nil {
			t.Fatal(err)
		}
		// Until it serves the former process may go on.
		for _, path := range []string{listen, admin} {
			if _, err := os.Lstat(path); err != nil {
				t.Error(err)
			}
		}
		next.Serve()
		if _, err := os.Lstat(admin); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("admin socket: %v", err)
		}
		if _, err := os.Lstat(listen); errors.Is(err, os.ErrNotExist) != unlink {
			t.Errorf("unlink %v: %v", unlink, err)
		}
		if _, err := os.Lstat(other); err != nil {
			t.Error(err)
		}
		if err := next.Shutdown(context.Background()); err != nil {
			t.Fatal(err)
		}
		r.srv.HandOver()
	}
}

func TestServerThatDoesNotServeLeavesTheFormerOnesFiles(t *testing.T) {
	taken := listenTCP(t)
	for what, fail := range map[string]func(*Config){
		"can't open a listener": func(c *Config) {
			l := DefaultListener()
			l.Name, l.Listen, l.Upstream = "more", taken.Addr().String(), "127.0.0.1:1"
			c.Listeners = append(c.Listeners, l)
		},
		"can't become who it is to be": func(c *Config) { c.Opened = func() error { return errors.New("no") } },
		"isn't told to go":             nil,
	} {
		t.Run(what, func(t *testing.T) {
			dir := shortDir(t)
			listen, admin := filepath.Join(dir, "l"), filepath.Join(dir, "a")
			r := newRig(t, nil, listenAt(listen, nil), func(c *Config) { c.Admin = "unix:" + admin })
			cfg := handTo(t, r, r.srv.cfg)
			cfg.Listeners = slices.Clone(cfg.Listeners)
			cfg.Listeners[0].Unix.Mode = 0o660
			if fail != nil {
				fail(&cfg)
			}
			next, err := New(cfg, nil, zerolog.Nop())
			if err != nil {
				t.Fatal(err)
			}
			err = next.Open()
			if (err != nil) != (fail != nil) {
				t.Fatal(err)
			}
			if err == nil {
				if err := next.Shutdown(context.Background()); err != nil {
					t.Fatal(err)
				}
			}
			for _, path := range []string{listen, admin} {
				if fi, err := os.Lstat(path); err != nil || fi.Mode().Perm() != 0o600 {
					t.Errorf("%s: %v, %v", path, fi, err)
				}
			}
		})
	}
}

func TestAdminSocketWithoutAFileOfOursServes(t *testing.T) {
	path := filepath.Join(shortDir(t), "admin")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, nil, func(c *Config) {
		c.Admin, c.Inherited = "unix:"+path, []Inherited{{Listener: ln, Name: "admin"}}
	})
	if got := r.srv.AdminAddr(); got != "unix:"+path {
		t.Error(got)
	}
	c, err := net.DialTimeout("unix", path, deadline)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}
