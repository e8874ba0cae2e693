//go:build linux

package test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	. "shunt/test/harness"
)

// duplex is a TCP connection or one of a UNIX socket.
type duplex interface {
	net.Conn
	CloseWrite() error
}

// serveAt accepts at an address ("unix:/path", "unix:@name" or host:port) until the end of the test.
func serveAt(t *testing.T, addr string, handle func(c duplex) error) {
	t.Helper()
	network := "tcp"
	if name, ok := strings.CutPrefix(addr, "unix:"); ok {
		network, addr = "unix", name
	}
	ln, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(Patience))
				if err := handle(c.(duplex)); err != nil {
					t.Errorf("service: %v", err)
				}
			})
		}
	})
	t.Cleanup(func() { ln.Close(); wg.Wait() })
}

// dialAt connects to such an address.
func dialAt(t *testing.T, addr string) duplex {
	t.Helper()
	network := "tcp"
	if name, ok := strings.CutPrefix(addr, "unix:"); ok {
		network, addr = "unix", name
	}
	c, err := net.DialTimeout(network, addr, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(Patience))
	return c.(duplex)
}

// eachUnixWay starts shunt with a UNIX socket on one side or both. With the bypass it declines.
func eachUnixWay(t *testing.T, paths []Path, handle func(c duplex) error, f func(t *testing.T, s *Shunt, addr string)) {
	OnPaths(t, paths, func(t *testing.T, p Path) {
		for _, w := range []struct{ name, listen, upstream string }{
			{"TCP to UNIX", "tcp", "path"}, {"UNIX to TCP", "path", "tcp"}, {"UNIX to UNIX", "path", "abstract"}, {"abstract to UNIX", "abstract", "path"},
		} {
			t.Run(w.name, func(t *testing.T) {
				dir, err := os.MkdirTemp("", "shunt-unix-")
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { os.RemoveAll(dir) })
				addr := func(kind, name string) string {
					switch kind {
					case "tcp":
						return fmt.Sprintf("127.0.0.1:%d", Port(t, nil))
					case "abstract":
						return "unix:@" + filepath.Base(dir) + name
					}
					return "unix:" + filepath.Join(dir, name)
				}
				listen, upstream := addr(w.listen, "l"), addr(w.upstream, "s")
				serveAt(t, upstream, handle)
				cfg := Configure(p, listen, upstream)
				cfg.Log = map[string]string{"level": `"debug"`, "format": `"json"`, "access": "true"}
				s := StartShunt(t, cfg, Launch{})
				f(t, s, listen)
				if p.Bypass() {
					(&Front{Path: p, Shunt: s}).CheckCopied(t, "unix", 1)
				}
			})
		}
	})
}

func TestUnixTransfersAreWhole(t *testing.T) {
	const n = 16 * mib
	eachUnixWay(t, []Path{Off, Every}, func(c duplex) error {
		received := make(chan error, 1)
		go func() { received <- Receive(OnlyReader(c), 1, n) }()
		return errors.Join(Send(c, 2, n, 64*kib, nil), c.CloseWrite(), <-received)
	}, func(t *testing.T, s *Shunt, addr string) {
		c := dialAt(t, addr)
		sent := make(chan error, 1)
		go func() { sent <- errors.Join(Send(c, 1, n, 100_000, nil), c.CloseWrite()) }()
		if err := errors.Join(Receive(OnlyReader(c), 2, n), <-sent); err != nil {
			t.Fatal(err)
		}
		c.Close()
		(&Front{Path: Off, Shunt: s}).CheckPath(t, n, n, 0)
	})
}

func TestUnixHalfCloseOutlivesReply(t *testing.T) {
	for _, clientFirst := range []bool{true, false} {
		early := func(c duplex) error {
			return errors.Join(Send(c, 1, 1000, 1000, nil), c.CloseWrite(), Receive(OnlyReader(c), 2, mib))
		}
		late := func(c duplex) error {
			return errors.Join(Receive(OnlyReader(c), 1, 1000), Send(c, 2, mib, 64*kib, nil), c.CloseWrite())
		}
		client, service, cause := early, late, "client-fin"
		if !clientFirst {
			client, service, cause = late, early, "server-fin"
		}
		eachUnixWay(t, []Path{Off}, service, func(t *testing.T, s *Shunt, addr string) {
			c := dialAt(t, addr)
			if err := client(c); err != nil {
				t.Fatal(err)
			}
			c.Close()
			waitEnd(t, s, cause)
		})
	}
}

// waitEnd waits for a connection that ended for the cause.
func waitEnd(t *testing.T, s *Shunt, cause string) {
	t.Helper()
	Until(t, 10*time.Second, "a connection that ends by "+cause, func() error {
		m, err := s.Metrics()
		if err == nil && m.Sum("shunt_connections_ended_total", "cause", cause) == 0 {
			ends := map[string]float64{}
			for _, x := range m {
				if x.Name == "shunt_connections_ended_total" && x.Value > 0 {
					ends[x.Labels["cause"]] = x.Value
				}
			}
			err = fmt.Errorf("ended: %v", ends)
		}
		return err
	})
}

func TestUnixPeersThatVanish(t *testing.T) {
	// The service closes with the client's bytes unread, and the other way round: the other end isn't left hanging.
	greeted := make(chan struct{}, 1)
	eachUnixWay(t, []Path{Off}, func(c duplex) error {
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			return err
		}
		greeted <- struct{}{}
		return nil
	}, func(t *testing.T, s *Shunt, addr string) {
		c := dialAt(t, addr)
		if _, err := c.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		<-greeted
		var err error
		for err == nil {
			_, err = c.Write(make([]byte, 64*kib))
		}
		if !IsReset(err) {
			t.Errorf("writing to a service that is gone: %v", err)
		}
		waitEnd(t, s, "server-rst")
	})
	gone := make(chan error, 1)
	eachUnixWay(t, []Path{Off}, func(c duplex) error {
		var err error
		for err == nil {
			_, err = c.Write(make([]byte, 64*kib))
		}
		gone <- err
		return nil
	}, func(t *testing.T, s *Shunt, addr string) {
		c := dialAt(t, addr)
		if _, err := io.ReadFull(c, make([]byte, mib)); err != nil {
			t.Fatal(err)
		}
		c.Close()
		if err := <-gone; !IsReset(err) {
			t.Errorf("writing to a client that is gone: %v", err)
		}
		waitEnd(t, s, "client-rst")
	})
}

// connectAs connects to a UNIX socket with the rights of a user and group, without capabilities.
func connectAs(uid, gid int, path string) error {
	result := make(chan error, 1)
	go func() {
		// File access goes by the thread, which ends with the goroutine.
		runtime.LockOSThread()
		if _, err := unix.SetfsgidRetGid(gid); err != nil {
			result <- err
			return
		}
		if _, err := unix.SetfsuidRetUid(uid); err != nil {
			result <- err
			return
		}
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
			unix.Close(fd)
		}
		result <- err
	}()
	return <-result
}

func TestUnixListenerOfSomebodyElse(t *testing.T) {
	OnPaths(t, []Path{Off}, func(t *testing.T, p Path) {
		NeedRoot(t)
		dir, err := os.MkdirTemp("", "shunt-unix-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, "l")
		cfg := Configure(p, "unix:"+path, Serve(t, echo).Addr)
		cfg.Listeners[0].Extra = map[string]string{"unix": `{ mode = "0660", owner = "root", group = "65531" }`}
		s := StartShunt(t, cfg, Launch{})
		fi, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		if st := fi.Sys().(*syscall.Stat_t); fi.Mode() != os.ModeSocket|0o660 || st.Uid != 0 || st.Gid != 65531 {
			t.Errorf("%v, uid %d, gid %d", fi.Mode(), st.Uid, st.Gid)
		}
		// Who isn't of the group is kept out by the kernel.
		for gid, want := range map[int]error{65531: nil, 65530: unix.EACCES} {
			if err := connectAs(65530, gid, path); err != want {
				t.Errorf("connecting as group %d: %v", gid, err)
			}
		}
		s.Signal(syscall.SIGTERM)
		if code, err := s.ExitCode(10 * time.Second); err != nil || code != 0 {
			t.Fatalf("exit code %d, %v", code, err)
		}
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("the socket after the end: %v", err)
		}
	})
}
