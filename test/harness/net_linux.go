package harness

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Patience bounds each connection of a test: whatever takes longer hangs.
var Patience = patient(60 * time.Second)

// A Service is a TCP server inside of the test process.
type Service struct {
	Addr string
	ln   *net.TCPListener
	wg   sync.WaitGroup
	mu   sync.Mutex
	errs []error
}

// Serve accepts on a free loopback port until the end of the test, and runs
// handle for each connection, which it closes afterwards. An error that handle returns fails the test.
func Serve(t testing.TB, handle func(c *net.TCPConn) error) *Service {
	t.Helper()
	return ServeOn(t, nil, "127.0.0.1:0", handle)
}

// ServeOn is Serve at an address in a namespace.
func ServeOn(t testing.TB, ns *Netns, addr string, handle func(c *net.TCPConn) error) *Service {
	t.Helper()
	ln, err := ns.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	return ServeListener(t, ln, handle)
}

// ServeListener is Serve with a listener that exists.
func ServeListener(t testing.TB, ln *net.TCPListener, handle func(c *net.TCPConn) error) *Service {
	t.Helper()
	s := &Service{Addr: ln.Addr().String(), ln: ln}
	s.wg.Go(func() {
		for {
			c, err := ln.AcceptTCP()
			if err != nil {
				return
			}
			s.wg.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(Patience))
				if err := handle(c); err != nil {
					s.mu.Lock()
					s.errs = append(s.errs, err)
					s.mu.Unlock()
				}
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		patience := 2 * Patience
		if t.Failed() {
			patience = time.Second
		}
		if err := WithinErr(patience, func() error { s.wg.Wait(); return nil }); err != nil && !t.Failed() {
			t.Errorf("service: %v", err)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		for i, err := range s.errs {
			if i == 5 {
				t.Errorf("service: %d further errors", len(s.errs)-i)
				break
			}
			t.Errorf("service: %v", err)
		}
	})
	return s
}

// Dial connects a client to the front from this namespace, over plain TCP.
func (f *Front) Dial(t testing.TB) *net.TCPConn {
	t.Helper()
	return DialFrom(t, nil, f.Addr)
}

// DialFrom connects a client from a namespace, over plain TCP.
func DialFrom(t testing.TB, ns *Netns, addr string) *net.TCPConn {
	t.Helper()
	c, err := DialErr(ns, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// DialErr is DialFrom for other goroutines than the test's: the caller closes.
func DialErr(ns *Netns, addr string) (*net.TCPConn, error) {
	c, err := ns.Dial(&net.Dialer{Timeout: 10 * time.Second}, addr)
	if err != nil {
		return nil, err
	}
	return c, c.SetDeadline(time.Now().Add(Patience))
}

// DialMPTCP connects a client over MPTCP, where the kernel has it.
func DialMPTCP(addr string) (*net.TCPConn, bool, error) {
	d := net.Dialer{Timeout: 10 * time.Second}
	d.SetMultipathTCP(true)
	conn, err := d.DialContext(context.Background(), "tcp", addr)
	if err != nil {
		return nil, false, err
	}
	c := conn.(*net.TCPConn)
	is, err := c.MultipathTCP()
	return c, is, errors.Join(err, c.SetDeadline(time.Now().Add(Patience)))
}

// Abort closes c with a RST.
func Abort(c *net.TCPConn) error {
	return errors.Join(c.SetLinger(0), c.Close())
}

// Raw runs f with the connection's file descriptor.
func Raw(c *net.TCPConn, f func(fd int) error) error {
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := rc.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}

// Unread returns what FIONREAD says.
func Unread(c *net.TCPConn) (n int, err error) {
	err = Raw(c, func(fd int) (err error) {
		n, err = unix.IoctlGetInt(fd, unix.TIOCINQ)
		return err
	})
	return n, err
}

// Peek reads without taking, and without waiting.
func Peek(c *net.TCPConn, p []byte) (n int, err error) {
	err = Raw(c, func(fd int) (err error) {
		n, _, err = unix.Recvfrom(fd, p, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		return err
	})
	return n, err
}

// Readable asks poll(2) whether c can be read, for at most wait.
func Readable(c *net.TCPConn, wait time.Duration) (ok bool, err error) {
	err = Raw(c, func(fd int) error {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		for {
			n, err := unix.Poll(fds, int(wait.Milliseconds()))
			if err == unix.EINTR {
				continue
			}
			ok = n == 1 && fds[0].Revents&unix.POLLIN != 0
			return err
		}
	})
	return ok, err
}

// IsReset says whether an error is the peer's RST.
func IsReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// BlackHole is an address at which connecting hangs: a listener whose
// backlog is full.
func BlackHole(t testing.TB) string {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", sa.(*unix.SockaddrInet4).Port)
	for range 8 {
		c, err := net.DialTimeout("tcp", addr, 200*time.Millisecond)
		if err != nil {
			return addr
		}
		t.Cleanup(func() { c.Close() })
	}
	t.Fatal("the backlog doesn't fill")
	return ""
}
