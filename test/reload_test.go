//go:build linux

package test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	. "shunt/test/harness"
)

// reloadTime is how long TestHangUpsUnderLoad and, at least, TestUpgradesUnderLoad go on: 2 s, or what
// the environment variable SHUNT_TEST_RELOAD_TIME says.
func reloadTime(t *testing.T) time.Duration {
	t.Helper()
	v := os.Getenv("SHUNT_TEST_RELOAD_TIME")
	if v == "" {
		return 2 * time.Second
	}
	d, err := time.ParseDuration(v)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// load is clients that connect, talk and leave all the time, and others that
// stay and talk. No connection may be refused, no byte lost.
type load struct {
	stop    chan struct{}
	wg      sync.WaitGroup
	short   atomic.Int64 // connections
	long    atomic.Int64 // bytes on the ones that stay
	mu      sync.Mutex
	problem error
}

// apply starts the load of a front whose service echoes.
func apply(f *Front) *load {
	l := &load{stop: make(chan struct{})}
	for range 3 {
		l.wg.Go(func() {
			for !l.over() {
				if err := exchangeEcho(f.Addr, 3, 500); err != nil {
					l.fail(fmt.Errorf("connection %d: %w", l.short.Load(), err))
					return
				}
				l.short.Add(1)
			}
		})
	}
	for range 3 {
		l.wg.Go(func() {
			if err := l.talk(f.Addr); err != nil {
				l.fail(fmt.Errorf("a long connection: %w", err))
			}
		})
	}
	return l
}

func (l *load) talk(addr string) error {
	c, err := DialErr(nil, addr)
	if err != nil {
		return err
	}
	defer c.Close()
	const size = 20_000
	msg := make([]byte, size)
	off := int64(0)
	for ; !l.over(); off += size {
		Fill(msg, 7, off)
		sent := make(chan error, 1)
		go func() {
			_, err := c.Write(msg)
			sent <- err
		}()
		if err := errors.Join(ReceiveN(c, 7, off, size), <-sent); err != nil {
			return fmt.Errorf("at byte %d: %w", off, err)
		}
		l.long.Add(size)
	}
	if err := c.CloseWrite(); err != nil {
		return err
	}
	if n, err := c.Read(msg); n != 0 || err != io.EOF {
		return fmt.Errorf("%d bytes, %v; want EOF", n, err)
	}
	return nil
}

func (l *load) over() bool {
	select {
	case <-l.stop:
		return true
	default:
		return false
	}
}

func (l *load) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.problem == nil {
		l.problem = err
	}
}

// check returns the first problem so far.
func (l *load) check() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.problem
}

// moved waits for n more connections.
func (l *load) moved(t *testing.T, n int64) {
	t.Helper()
	from := l.short.Load()
	Until(t, 20*time.Second, "further connections", func() error {
		if err := l.check(); err != nil {
			return nil
		}
		if got := l.short.Load() - from; got < n {
			return fmt.Errorf("%d of %d", got, n)
		}
		return nil
	})
	if err := l.check(); err != nil {
		t.Fatal(err)
	}
}

func (l *load) end(t *testing.T) {
	t.Helper()
	close(l.stop)
	Within(t, 30*time.Second, "the end of the load", func() error { l.wg.Wait(); return l.check() })
}

func TestHangUpsUnderLoad(t *testing.T) {
	// SIGHUP every 100 ms, each with another configuration.
	EachShuntPath(t, func(t *testing.T, p Path) {
		t.Parallel()
		s := Serve(t, echo)
		f := Open(t, p, s.Addr)
		l := apply(f)
		l.moved(t, 1)
		extra := f.Shunt.Config.Listeners[0]
		extra.Name, extra.Listen = "extra", fmt.Sprintf("127.0.0.1:%d", Port(t, nil))
		// The connections of the listener that comes and goes go on.
		base := f.Shunt.Config
		with := base
		with.Listeners = append(with.Listeners[:1:1], extra)
		if err := errors.Join(f.Shunt.Rewrite(with), f.Shunt.Reload(10*time.Second)); err != nil {
			t.Fatal(err)
		}
		stays := DialFrom(t, nil, extra.Listen)
		if err := converse(stays, 5, 1000); err != nil {
			t.Fatal(err)
		}

		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		sent := 0
		for begin := time.Now(); time.Since(begin) < reloadTime(t); sent++ {
			<-tick.C
			next := base
			if sent%2 == 1 {
				next = with
			}
			next.Listeners = append(next.Listeners[:0:0], next.Listeners...)
			next.Listeners[0].Extra = map[string]string{"idle_timeout": fmt.Sprintf(`"%dm"`, 10+sent%7)}
			if err := f.Shunt.Rewrite(next); err != nil {
				t.Fatal(err)
			}
			f.Shunt.Signal(syscall.SIGHUP)
			if err := l.check(); err != nil {
				t.Fatal(err)
			}
		}
		if err := converse(stays, 5, 1000); err != nil {
			t.Errorf("the connection of a listener that came and went: %v", err)
		}
		stays.Close()
		l.moved(t, 1)
		m, err := f.Shunt.Metrics()
		if err != nil {
			t.Fatal(err)
		}
		// Signals that come while one is handled are one.
		if n := m.Sum("shunt_reloads_total", "result", "ok"); n < float64(sent)/4 {
			t.Errorf("%v reloads for %d signals", n, sent)
		}
		if n := m.Sum("shunt_reloads_total", "result", "error"); n != 0 {
			t.Errorf("%v reloads failed", n)
		}
		l.end(t)
		t.Logf("%d signals, %v reloads, %d connections, %d bytes on those that stayed", sent, m.Sum("shunt_reloads_total"), l.short.Load(), l.long.Load())
	})
}

func TestReloadKeepsAddsChangesAndRemoves(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		t.Parallel()
		answer := func(tag string) *Service {
			return Serve(t, func(c *net.TCPConn) error {
				if _, err := io.WriteString(c, tag); err != nil {
					return err
				}
				return echo(c)
			})
		}
		first, second := answer("1"), answer("2")
		f := Open(t, p, first.Addr)
		ask := func(addr, want string) *net.TCPConn {
			t.Helper()
			c := DialFrom(t, nil, addr)
			tag := make([]byte, 1)
			if _, err := io.ReadFull(c, tag); err != nil || string(tag) != want {
				t.Fatalf("%s leads to the service %q, %v; want %s", addr, tag, err, want)
			}
			return c
		}
		old := ask(f.Addr, "1")
		// The upstream changes, a listener comes.
		cfg := f.Shunt.Config
		added := cfg.Listeners[0]
		added.Name, added.Listen = "added", fmt.Sprintf("127.0.0.1:%d", Port(t, nil))
		changed := cfg.Listeners[0]
		changed.Upstream = second.Addr
		cfg.Listeners = []Listener{changed, added}
		if err := errors.Join(f.Shunt.Rewrite(cfg), f.Shunt.Reload(10*time.Second)); err != nil {
			t.Fatal(err)
		}
		ask(f.Addr, "2").Close()
		onAdded := ask(added.Listen, "1")
		if err := converse(onAdded, 20, 1000); err != nil {
			t.Fatal(err)
		}
		if err := converse(old, 20, 1000); err != nil {
			t.Fatalf("the connection to the former upstream: %v", err)
		}
		// It goes again.
		cfg.Listeners = cfg.Listeners[:1]
		if err := errors.Join(f.Shunt.Rewrite(cfg), f.Shunt.Reload(10*time.Second)); err != nil {
			t.Fatal(err)
		}
		if c, err := DialErr(nil, added.Listen); err == nil {
			c.Close()
			t.Error("the removed listener accepts")
		}
		for name, c := range map[string]*net.TCPConn{"removed": onAdded, "changed": old} {
			if err := converse(c, 20, 1000); err != nil {
				t.Errorf("the connection of the %s listener: %v", name, err)
			}
			c.Close()
		}
		if p.Bypass() {
			// The announcement of the listener that took over is still there, and its connections are bypassed.
			c := ask(f.Addr, "2")
			if err := converse(c, 20, 1000); err != nil {
				t.Fatal(err)
			}
			c.Close()
			Until(t, 5*time.Second, "bypassed bytes", func() error {
				m, err := f.Shunt.Metrics()
				if err == nil && m.Sum("shunt_bytes_total", "path", "bypass") < 40_000 {
					err = fmt.Errorf("%v, of 120,000", m.Sum("shunt_bytes_total", "path", "bypass"))
				}
				return err
			})
		}
	})
}

func TestBadFileOnHangUpChangesNothing(t *testing.T) {
	OnPaths(t, []Path{Off}, func(t *testing.T, p Path) {
		taken := Serve(t, echo)
		f := Open(t, p, taken.Addr)
		c := f.Dial(t)
		if err := converse(c, 1, 100); err != nil {
			t.Fatal(err)
		}
		good, err := os.ReadFile(f.Shunt.File)
		if err != nil {
			t.Fatal(err)
		}
		for what, text := range map[string]string{
			"syntax":         string(good) + "[[",
			"unknown key":    string(good) + "upstraem = \"x\"\n",
			"address in use": string(good) + fmt.Sprintf("[[listener]]\nlisten = %q\nupstream = \"127.0.0.1:1\"\n", taken.Addr),
			"other settings, and an address in use": strings.Replace(string(good), taken.Addr, "127.0.0.1:1", 1) +
				fmt.Sprintf("[[listener]]\nlisten = %q\nupstream = \"127.0.0.1:1\"\n", taken.Addr),
		} {
			if err := f.Shunt.RewriteText(text); err != nil {
				t.Fatal(err)
			}
			if err := f.Shunt.Reload(10 * time.Second); err == nil || !strings.Contains(err.Error(), "refused") {
				t.Errorf("%s: %v, want a refusal", what, err)
			}
			if err := errors.Join(exchangeEcho(f.Addr, 2, 100), converse(c, 1, 100)); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		if n := len(f.Shunt.Entries("configuration not reloaded: nothing was changed")); n != 4 {
			t.Errorf("%d error lines for four bad files", n)
		}
		if code, body, err := f.Shunt.Get("/readyz"); err != nil || code != http.StatusOK {
			t.Errorf("readyz: %d %s %v", code, body, err)
		}
	})
}

// copyProgram puts the program where a test may replace it.
func copyProgram(t *testing.T, to string) {
	t.Helper()
	bin, err := Build()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(bin)
	if err == nil {
		// As an installer does: the running one's file stays as it is.
		if err = os.WriteFile(to+".new", b, 0o755); err == nil {
			err = os.Rename(to+".new", to)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestUpgradesUnderLoad(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		t.Parallel()
		const upgrades = 10
		f := Open(t, p, Serve(t, echo).Addr, WithLogFile(), WithListener("drain_timeout", `"1m"`))
		l := apply(f)
		l.moved(t, 1)
		var former []int
		begin := time.Now()
		for i := range upgrades {
			for time.Since(begin) < reloadTime(t)*time.Duration(i)/upgrades {
				l.moved(t, 1)
			}
			pid, err := f.Shunt.Upgrade(30 * time.Second)
			if err != nil {
				t.Fatalf("upgrade %d: %v", len(former), err)
			}
			former = append(former, pid)
			l.moved(t, 2)
			if code, body, err := f.Shunt.Get("/readyz"); err != nil || code != http.StatusOK {
				t.Fatalf("readyz: %d %s %v", code, body, err)
			}
		}
		// The first process still has the connections that stayed.
		if Gone(former[0], 0) == nil {
			t.Error("the first process ended with live connections")
		}
		l.end(t)
		for i, pid := range former {
			if err := Gone(pid, 10*time.Second); err != nil {
				t.Errorf("process %d of the line: %v", i, err)
			}
		}
		if p.Bypass() {
			// All by itself again, the last one bypasses.
			if err := exchangeEcho(f.Addr, 50, 1000); err != nil {
				t.Fatal(err)
			}
			Until(t, 5*time.Second, "bypassed bytes", func() error {
				m, err := f.Shunt.Metrics()
				if err == nil && m.Sum("shunt_bytes_total", "path", "bypass") < 40_000 {
					err = fmt.Errorf("%v; declined: %v", m.Sum("shunt_bytes_total", "path", "bypass"), m.Declined())
				}
				return err
			})
		}
		m, err := f.Shunt.Metrics()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%d connections, %d bytes on those that stayed, the last process declined %v", l.short.Load(), l.long.Load(), m.Declined())
	})
}

func TestFailedUpgradeLeavesTheOldProcess(t *testing.T) {
	OnPaths(t, []Path{Off}, func(t *testing.T, p Path) {
		program := filepath.Join(t.TempDir(), "shunt")
		copyProgram(t, program)
		f := Open(t, p, Serve(t, echo).Addr, WithLaunch(Launch{Program: program, LogFile: true}))
		c := f.Dial(t)
		if err := converse(c, 1, 100); err != nil {
			t.Fatal(err)
		}
		good, err := os.ReadFile(f.Shunt.File)
		if err != nil {
			t.Fatal(err)
		}
		const failed = "upgrade failed: this process goes on"
		attempt := func(what, want string) {
			t.Helper()
			before := len(f.Shunt.Entries(failed))
			f.Shunt.Signal(syscall.SIGUSR2)
			Until(t, 20*time.Second, what, func() error {
				es := f.Shunt.Entries(failed)
				if len(es) == before {
					return errors.New("not refused yet")
				}
				if got := fmt.Sprint(es[len(es)-1]["error"]); !strings.Contains(got, want) {
					t.Fatalf("%s: %s, want a word about %q", what, got, want)
				}
				return nil
			})
			if err := errors.Join(exchangeEcho(f.Addr, 2, 100), converse(c, 1, 100)); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		if err := f.Shunt.RewriteText(string(good) + "upstraem = \"x\"\n"); err != nil {
			t.Fatal(err)
		}
		attempt("bad file", "upstraem")
		if err := f.Shunt.RewriteText(string(good)); err != nil {
			t.Fatal(err)
		}
		for _, script := range []struct{ what, text, want string }{
			{"a program that ends", "#!/bin/sh\nexit 7\n", "exit status 7"},
			{"a program that is killed", "#!/bin/sh\nkill -9 $$\n", "killed"},
			{"a program that talks nonsense", "#!/bin/sh\necho what >&3\nexec sleep 60\n", `"what"`},
		} {
			if err := os.WriteFile(program+".new", []byte(script.text), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(program+".new", program); err != nil {
				t.Fatal(err)
			}
			attempt(script.what, script.want)
		}
		// While one is on its way a second is refused, and so is a reload; SIGTERM ends both processes.
		hang := "#!/bin/sh\necho $$ > " + program + ".pid\nexec sleep 60\n"
		if err := os.WriteFile(program+".new", []byte(hang), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(program+".new", program); err != nil {
			t.Fatal(err)
		}
		for _, step := range []struct {
			sig  syscall.Signal
			want string
		}{
			{syscall.SIGUSR2, "upgrade: new process started"},
			{syscall.SIGUSR2, "no upgrade"},
			{syscall.SIGHUP, "no reload: an upgrade is running, and reads the file too"},
		} {
			before := len(f.Shunt.Entries(step.want))
			f.Shunt.Signal(step.sig)
			Until(t, 10*time.Second, step.want, func() error {
				if len(f.Shunt.Entries(step.want)) == before {
					return errors.New("not logged")
				}
				return nil
			})
		}
		started := f.Shunt.Entries("upgrade: new process started")
		pid, _ := started[len(started)-1]["new_pid"].(float64)
		f.Shunt.Signal(syscall.SIGTERM)
		if err := Gone(int(pid), 10*time.Second); err != nil {
			t.Errorf("the new process: %v", err)
		}
		if err := converse(c, 1, 100); err != nil {
			t.Errorf("the live connection: %v", err)
		}
		c.Close()
		if code, err := f.Shunt.ExitCode(10 * time.Second); err != nil || code != 0 {
			t.Errorf("exit code %d, %v", code, err)
		}
	})
}

func TestUpgradeChangesTheListeners(t *testing.T) {
	// The new process reads the file: it opens what is new, closes what is gone, keeps the rest.
	EachShuntPath(t, func(t *testing.T, p Path) {
		t.Parallel()
		f := Open(t, p, Serve(t, echo).Addr, WithLogFile())
		gone := f.Shunt.Config.Listeners[0]
		gone.Name, gone.Listen = "gone", fmt.Sprintf("127.0.0.1:%d", Port(t, nil))
		fresh := gone
		fresh.Name, fresh.Listen = "fresh", fmt.Sprintf("127.0.0.1:%d", Port(t, nil))
		cfg := f.Shunt.Config
		cfg.Listeners = append(cfg.Listeners[:1:1], gone)
		if err := errors.Join(f.Shunt.Rewrite(cfg), f.Shunt.Reload(10*time.Second)); err != nil {
			t.Fatal(err)
		}
		old := DialFrom(t, nil, gone.Listen)
		if err := converse(old, 10, 1000); err != nil {
			t.Fatal(err)
		}
		cfg.Listeners = append(cfg.Listeners[:1:1], fresh)
		if err := f.Shunt.Rewrite(cfg); err != nil {
			t.Fatal(err)
		}
		former, err := f.Shunt.Upgrade(20 * time.Second)
		if err != nil {
			t.Fatal(err)
		}
		Until(t, 5*time.Second, "the removed listener's end", func() error {
			if c, err := DialErr(nil, gone.Listen); err == nil {
				c.Close()
				return errors.New("it accepts")
			}
			return nil
		})
		for _, addr := range []string{f.Addr, fresh.Listen} {
			if err := exchangeEcho(addr, 10, 1000); err != nil {
				t.Error(err)
			}
		}
		if err := converse(old, 10, 1000); err != nil {
			t.Errorf("the former process's connection: %v", err)
		}
		old.Close()
		if err := Gone(former, 10*time.Second); err != nil {
			t.Error(err)
		}
	})
}
