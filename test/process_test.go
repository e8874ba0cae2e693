//go:build linux

package test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	. "shunt/test/harness"
)

func TestSIGTERMLetsLiveTransfersFinish(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		const transfers, n = 3, 4 * mib
		started := make(chan struct{}, transfers)
		resume := make(chan struct{})
		s := Serve(t, func(c *net.TCPConn) error {
			if err := Send(c, 1, n/2, 64*kib, nil); err != nil {
				return err
			}
			started <- struct{}{}
			<-resume
			buf := make([]byte, n/2)
			Fill(buf, 1, n/2)
			_, err := c.Write(buf)
			return err
		})
		f := Open(t, p, s.Addr)
		results := make(chan error, transfers)
		for range transfers {
			c := f.Dial(t)
			go func() { results <- errors.Join(Receive(c, 1, n), c.Close()) }()
		}
		for range transfers {
			<-started
		}
		f.Shunt.Signal(syscall.SIGTERM)
		Until(t, 5*time.Second, "readiness after SIGTERM", func() error {
			code, _, err := f.Shunt.Get("/readyz")
			if err == nil && code == http.StatusOK {
				err = errors.New("still ready")
			}
			return err
		})
		Until(t, 5*time.Second, "accepting after SIGTERM", func() error {
			c, err := DialErr(nil, f.Addr)
			if err == nil {
				c.Close()
				return errors.New("still accepts")
			}
			return nil
		})
		if err := f.Shunt.Wait(300 * time.Millisecond); err == nil {
			t.Fatal("shunt ended with live transfers")
		}
		close(resume)
		for range transfers {
			if err := <-results; err != nil {
				t.Error(err)
			}
		}
		if code, err := f.Shunt.ExitCode(5 * time.Second); err != nil || code != 0 {
			t.Fatalf("exit code %d, %v", code, err)
		}
	})
}

func TestDrainEndsAtItsBound(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		t.Parallel()
		f := Open(t, p, Serve(t, func(c *net.TCPConn) error { _, _ = io.Copy(io.Discard, OnlyReader(c)); return nil }).Addr,
			WithListener("drain_timeout", `"2s"`))
		c := f.Dial(t)
		if _, err := c.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		waitActive(t, f, 1)
		begin := time.Now()
		f.Shunt.Signal(syscall.SIGTERM)
		code, err := f.Shunt.ExitCode(10 * time.Second)
		if d := time.Since(begin); err != nil || code != 0 || d < 1900*time.Millisecond {
			t.Fatalf("exit code %d, %v, after %v; want 0 after 2 s", code, err, d)
		}
	})
}

func TestSecondSignalEndsNow(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		t.Parallel()
		f := Open(t, p, Serve(t, func(c *net.TCPConn) error { _, _ = io.Copy(io.Discard, OnlyReader(c)); return nil }).Addr)
		f.Dial(t)
		waitActive(t, f, 1)
		f.Shunt.Signal(syscall.SIGTERM)
		Until(t, 5*time.Second, "readiness after SIGTERM", func() error {
			code, _, err := f.Shunt.Get("/readyz")
			if err == nil && code == http.StatusOK {
				err = errors.New("still ready")
			}
			return err
		})
		// A second one within 200 ms is the first again.
		time.Sleep(250 * time.Millisecond)
		f.Shunt.Signal(syscall.SIGTERM)
		if _, err := f.Shunt.ExitCode(3 * time.Second); err != nil {
			t.Fatal(err)
		}
	})
}

func TestSignalThatComesTwiceIsOne(t *testing.T) {
	// timeout(1) signals its child, and then its whole group.
	EachShuntPath(t, func(t *testing.T, p Path) {
		t.Parallel()
		f := Open(t, p, Serve(t, echo).Addr)
		c := f.Dial(t)
		if err := converse(c, 1, 100); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		f.Shunt.Signal(syscall.SIGTERM)
		Until(t, 5*time.Second, "the end of accepting", func() error {
			if late, err := DialErr(nil, f.Addr); err == nil {
				late.Close()
				return errors.New("still accepts")
			}
			return nil
		})
		f.Shunt.Signal(syscall.SIGTERM)
		if took := time.Since(begin); took > 150*time.Millisecond {
			t.Skipf("this machine took %v for what must happen within 200 ms", took)
		}
		if err := f.Shunt.Wait(300 * time.Millisecond); err == nil {
			t.Fatal("shunt ended with a live connection")
		}
		c.Close()
		if code, err := f.Shunt.ExitCode(5 * time.Second); err != nil || code != 0 {
			t.Fatalf("exit code %d, %v", code, err)
		}
	})
}

func waitActive(t *testing.T, f *Front, n int) {
	t.Helper()
	Until(t, 5*time.Second, "active connections", func() error {
		m, err := f.Shunt.Metrics()
		if err == nil && int(m.Sum("shunt_connections_active")) != n {
			err = fmt.Errorf("%v, want %d", m.Sum("shunt_connections_active"), n)
		}
		return err
	})
}

func TestKilledShuntLosesNothingThatWasQueued(t *testing.T) {
	// kill -9: the peers read what they were given, and then an end.
	EachShuntPath(t, func(t *testing.T, p Path) {
		const n = 48 * kib // what the smallest receive buffer takes without a reader
		conns := make(chan *net.TCPConn, 1)
		end := make(chan struct{})
		s := Serve(t, func(c *net.TCPConn) error {
			if err := ReceiveN(c, 1, 0, 100); err != nil {
				return err
			}
			if _, err := c.Write([]byte("k")); err != nil {
				return err
			}
			conns <- c
			<-end
			return nil
		})
		defer close(end)
		f := Open(t, p, s.Addr)
		c := f.Dial(t)
		if err := errors.Join(Send(c, 1, 100, 100, nil), ReceiveN(OnlyReader(c), 0, 0, 0)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		service := <-conns
		if err := Send(c, 2, n, 4*kib, nil); err != nil {
			t.Fatal(err)
		}
		waiting := make([]byte, n)
		Until(t, 5*time.Second, "the service's queue", func() error {
			// FIONREAD doesn't see redirected bytes on every kernel.
			got, err := Peek(service, waiting)
			if err == nil && got < n {
				err = fmt.Errorf("%d bytes wait, want %d", got, n)
			}
			return err
		})
		f.Shunt.Signal(syscall.SIGKILL)
		if err := f.Shunt.Wait(5 * time.Second); err == nil {
			t.Fatal("shunt survived SIGKILL")
		}
		if err := ReceiveN(service, 2, 0, n); err != nil {
			t.Fatalf("the service: %v", err)
		}
		for name, conn := range map[string]*net.TCPConn{"client": c, "service": service} {
			_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
			if got, err := conn.Read(make([]byte, 1)); got != 0 || err != io.EOF && !IsReset(err) {
				t.Errorf("the %s: %d bytes, %v; want an end", name, got, err)
			}
		}
		// The same address serves again, and is bypassed again.
		again := Open(t, p, Serve(t, echo).Addr)
		if err := exchangeEcho(again.Addr, 4, 1000); err != nil {
			t.Fatal(err)
		}
		again.CheckPath(t, 4000, 4000, 0.3)
	})
}

// exchangeEcho sends messages to an echo service and checks what comes back.
func exchangeEcho(addr string, messages, size int) error {
	return exchangeEchoFrom(nil, addr, messages, size)
}

func exchangeEchoFrom(ns *Netns, addr string, messages, size int) error {
	c, err := DialErr(ns, addr)
	if err != nil {
		return err
	}
	defer c.Close()
	return converse(c, messages, size)
}

func converse(c *net.TCPConn, messages, size int) error {
	for i := range int64(messages) {
		msg := make([]byte, size)
		Fill(msg, 1, i*int64(size))
		if _, err := c.Write(msg); err != nil {
			return err
		}
		if err := ReceiveN(c, 1, i*int64(size), int64(size)); err != nil {
			return err
		}
	}
	return nil
}

func TestTwoShuntsOnOneHost(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		f1 := Open(t, p, Serve(t, echo).Addr)
		f2 := Open(t, p, Serve(t, echo).Addr)
		for range 10 {
			for _, f := range []*Front{f1, f2} {
				if err := exchangeEcho(f.Addr, 10, 1000); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, f := range []*Front{f1, f2} {
			f.CheckPath(t, 100_000, 100_000, 0.3)
		}
	})
}

func TestOneShuntInFrontOfAnother(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		inner := Open(t, p, Serve(t, echo).Addr)
		outer := Open(t, p, inner.Addr)
		for range 20 {
			if err := exchangeEcho(outer.Addr, 20, 1000); err != nil {
				t.Fatal(err)
			}
		}
		n := Scaled[int64](8 * mib)
		c := outer.Dial(t)
		sent := make(chan error, 1)
		go func() { sent <- errors.Join(Send(c, 1, n, 64*kib, nil), c.CloseWrite()) }()
		if err := errors.Join(Receive(c, 1, n), <-sent); err != nil {
			t.Fatal(err)
		}
		c.Close()
		// Which of the two has the bypass is theirs to settle; both count every byte.
		outer.CheckPath(t, n+400_000, n+400_000, 0)
		inner.CheckPath(t, n+400_000, n+400_000, 0)
	})
}

func TestSeveralListeners(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		cfg := Configure(p, "", "")
		first := cfg.Listeners[0]
		cfg.Listeners = nil
		for i := range 3 {
			l := first
			l.Name = fmt.Sprintf("l%d", i)
			l.Listen = fmt.Sprintf("127.0.0.1:%d", Port(t, nil))
			tag := byte('a' + i)
			l.Upstream = Serve(t, func(c *net.TCPConn) error {
				if _, err := c.Write([]byte{tag}); err != nil {
					return err
				}
				return echo(c)
			}).Addr
			cfg.Listeners = append(cfg.Listeners, l)
		}
		s := StartShunt(t, cfg, Launch{})
		for i, l := range cfg.Listeners {
			c := DialFrom(t, nil, l.Listen)
			tag := make([]byte, 1)
			if _, err := io.ReadFull(c, tag); err != nil || tag[0] != byte('a'+i) {
				t.Fatalf("listener %s leads to the service %q, %v", l.Name, tag, err)
			}
			if err := converse(c, 10, 1000); err != nil {
				t.Fatal(err)
			}
			c.Close()
		}
		m, err := s.Metrics()
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range cfg.Listeners {
			if n := m.Sum("shunt_connections_total", "listener", l.Name); n != 1 {
				t.Errorf("listener %s counts %v connections", l.Name, n)
			}
		}
	})
}

func TestBlackHoleIsBoundedByTheDialTimeout(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		// A backlog of zero that is full drops every further SYN.
		fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer syscall.Close(fd)
		if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), syscall.Listen(fd, 0)); err != nil {
			t.Fatal(err)
		}
		sa, err := syscall.Getsockname(fd)
		if err != nil {
			t.Fatal(err)
		}
		hole := fmt.Sprintf("127.0.0.1:%d", sa.(*syscall.SockaddrInet4).Port)
		for range 3 {
			if c, err := net.DialTimeout("tcp", hole, 300*time.Millisecond); err == nil {
				defer c.Close()
			}
		}
		f := Open(t, p, hole, WithListener("dial_timeout", `"2s"`))
		c := f.Dial(t)
		begin := time.Now()
		_, err = c.Read(make([]byte, 1))
		if d := time.Since(begin); err == nil || d < 1900*time.Millisecond || d > 5*time.Second {
			t.Fatalf("ended with %v after %v, want an end after 2 s", err, d)
		}
		// A client that leaves meanwhile frees everything: the check after the test sees to it.
		for range 20 {
			f.Dial(t).Close()
		}
		m, err := f.Shunt.Metrics()
		if err != nil {
			t.Fatal(err)
		}
		if m.Sum("shunt_dial_errors_total") < 1 {
			t.Error("the failed dial isn't counted")
		}
	})
}

func TestRefusedUpstreamEndsTheClient(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		f := Open(t, p, fmt.Sprintf("127.0.0.1:%d", Port(t, nil)))
		for range 50 {
			c, err := DialErr(nil, f.Addr)
			if IsReset(err) {
				continue // the end came before connect(2) returned
			}
			if err != nil {
				t.Fatal(err)
			}
			if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
				t.Fatalf("%d bytes, %v; want an end", n, err)
			}
			c.Close()
		}
		Until(t, 5*time.Second, "dial errors", func() error {
			m, err := f.Shunt.Metrics()
			if err == nil && m.Sum("shunt_dial_errors_total") != 50 {
				err = fmt.Errorf("%v, want 50", m.Sum("shunt_dial_errors_total"))
			}
			return err
		})
	})
}

func TestFewDescriptorsServeAllInTheEnd(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		NeedProgram(t, "prlimit")
		f := Open(t, p, Serve(t, echo).Addr, WithLaunch(Launch{Prefix: []string{"prlimit", "--nofile=64:64", "--"}}))
		const clients = 200
		errs := make(chan error, clients)
		hold := make(chan struct{})
		for range clients {
			go func() {
				c, err := DialErr(nil, f.Addr)
				if err != nil {
					errs <- err
					return
				}
				defer c.Close()
				<-hold
				errs <- converse(c, 2, 100)
			}()
		}
		// With all of them waiting, shunt doesn't spin.
		before, err := CPUTime(f.Shunt.Pid())
		if err != nil {
			t.Fatal(err)
		}
		const watched = 3 * time.Second
		time.Sleep(watched) // CPU time is measured over this
		after, err := CPUTime(f.Shunt.Pid())
		if err != nil {
			t.Fatal(err)
		}
		if used := after - before; used > watched/10 {
			t.Errorf("shunt used %v of CPU in %v at its limit", used, watched)
		}
		close(hold)
		for range clients {
			if err := <-errs; err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestGarbageCollectionLosesNoConnection(t *testing.T) {
	// A collection every 10 ms under load: a connection that only the kernel
	// still knew would be closed by its finalizer.
	EachShuntPath(t, func(t *testing.T, p Path) {
		f := Open(t, p, Serve(t, echo).Addr, WithLaunch(Launch{Env: []string{"GOGC=1"}}))
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-stop:
					return
				case <-tick.C:
					_, _ = f.Shunt.Metrics() // its allocations start a collection
				}
			}
		})
		const workers = 20
		errs := make(chan error, workers)
		for range workers {
			go func() {
				c, err := DialErr(nil, f.Addr)
				if err != nil {
					errs <- err
					return
				}
				defer c.Close()
				for begin := time.Now(); time.Since(begin) < 3*time.Second; {
					if err := errors.Join(converse(c, 50, 2000), exchangeEcho(f.Addr, 2, 100)); err != nil {
						errs <- err
						return
					}
				}
				errs <- nil
			}()
		}
		for range workers {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
		close(stop)
		wg.Wait()
		m, err := f.Shunt.Metrics()
		if err != nil {
			t.Fatal(err)
		}
		if n := m.Sum("go_gc_duration_seconds_count"); n < 50 {
			t.Fatalf("only %v collections ran", n)
		}
	})
}

func TestAddressOfANameMayChange(t *testing.T) {
	// The next connection goes to the new address. The name is in a hosts file of shunt's own.
	EachShuntPath(t, func(t *testing.T, p Path) {
		NeedRoot(t)
		NeedProgram(t, "unshare")
		port := Port(t, nil)
		for _, host := range []string{"127.0.0.2", "127.0.0.3"} {
			ServeOn(t, nil, fmt.Sprintf("%s:%d", host, port), func(c *net.TCPConn) error {
				_, err := c.Write([]byte(host))
				return err
			})
		}
		hosts := filepath.Join(t.TempDir(), "hosts")
		point := func(addr string) {
			t.Helper()
			if err := os.WriteFile(hosts, []byte(addr+" moving.test\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		point("127.0.0.2")
		// A private mount of that file over /etc/hosts; the wait for a change is Go's own cache of the file (5 s).
		f := Open(t, p, fmt.Sprintf("moving.test:%d", port), WithLaunch(Launch{Prefix: []string{
			"unshare", "--mount", "--", "sh", "-c", `mount --bind "$0" /etc/hosts && exec "$@"`, hosts}}))
		ask := func() string {
			t.Helper()
			got, err := io.ReadAll(f.Dial(t))
			if err != nil {
				t.Fatal(err)
			}
			return string(got)
		}
		if got := ask(); got != "127.0.0.2" {
			t.Fatalf("the first address: reached %q", got)
		}
		point("127.0.0.3")
		Until(t, 15*time.Second, "the new address", func() error {
			if got := ask(); got != "127.0.0.3" {
				return fmt.Errorf("reached %q", got)
			}
			return nil
		})
	})
}

func TestEveryAddressOfANameIsTried(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		// "localhost" is ::1 and 127.0.0.1; the service listens on the second only.
		s := Serve(t, echo)
		_, port, err := net.SplitHostPort(s.Addr)
		if err != nil {
			t.Fatal(err)
		}
		f := Open(t, p, "localhost:"+port)
		if err := exchangeEcho(f.Addr, 10, 1000); err != nil {
			t.Fatal(err)
		}
		f.CheckPath(t, 10_000, 10_000, 0.3)
	})
}

func TestBadConfigurationIsRefused(t *testing.T) {
	if testing.Short() {
		t.Skip("end-to-end test, not run with -short")
	}
	bin, err := Build()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ toml, want string }{
		"unknown key":  {"[bypass]\nverdikt = \"auto\"\n", "verdict"},
		"bad size":     {"[bypass]\nwindow = \"much\"\n", "window"},
		"no listener":  {"[log]\nlevel = \"info\"\n", "listener"},
		"bad duration": {"[[listener]]\nname = \"a\"\nlisten = \"127.0.0.1:1\"\nupstream = \"127.0.0.1:2\"\ndial_timeout = \"soon\"\n", "dial_timeout"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "c.toml")
			if err := os.WriteFile(file, []byte(c.toml), 0o644); err != nil {
				t.Fatal(err)
			}
			for _, command := range []string{"run", "check"} {
				cmd := exec.Command(bin, command, "--config", file)
				out, err := cmd.CombinedOutput()
				var exit *exec.ExitError
				if !errors.As(err, &exit) || exit.ExitCode() != 2 || !strings.Contains(string(out), c.want) {
					t.Errorf("%s: %v, want exit code 2 and a word about %q:\n%s", command, err, c.want, out)
				}
			}
		})
	}
}
