package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// childAttr lets a child die with its parent.
func childAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}

// blockingConn is a TCP socket in blocking mode. The os.File of a blocking
// descriptor isn't given to the runtime's poller.
type blockingConn struct{ *os.File }

// Read implements io.Reader. On the bypass, a signal ends a blocking read that
// waits with EAGAIN, where TCP restarts it (tcp_msg_wait_data waits once,
// net/ipv4/tcp_bpf.c), and the Go runtime preempts by signals. Only with the
// time used up, EAGAIN is the time-out.
func (c blockingConn) Read(p []byte) (int, error) {
	var begin time.Time
	for {
		n, err := c.File.Read(p)
		if !errors.Is(err, unix.EAGAIN) {
			return n, err
		}
		if begin.IsZero() {
			begin = time.Now()
		}
		if time.Since(begin) >= demoIOTimeout {
			return n, os.ErrDeadlineExceeded
		}
	}
}

// CloseWrite sends FIN.
func (c blockingConn) CloseWrite() error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	if err := raw.Control(func(fd uintptr) { serr = unix.Shutdown(int(fd), unix.SHUT_WR) }); err != nil {
		return err
	}
	return os.NewSyscallError("shutdown", serr)
}

// newBlockingConn takes the descriptor over.
func newBlockingConn(fd int) (demoConn, error) {
	t := unix.NsecToTimeval(demoIOTimeout.Nanoseconds())
	for _, set := range []struct {
		name string
		err  error
	}{
		{"TCP_NODELAY", unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)},
		{"SO_RCVTIMEO", unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &t)},
		{"SO_SNDTIMEO", unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &t)},
	} {
		if set.err != nil {
			unix.Close(fd)
			return nil, fmt.Errorf("setsockopt %s: %w", set.name, set.err)
		}
	}
	return blockingConn{os.NewFile(uintptr(fd), "tcp")}, nil
}

func demoDial(addr string) (demoConn, error) {
	sa, err := sockaddr(addr)
	if err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := unix.Connect(fd, sa); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("dial %s: %w", addr, os.NewSyscallError("connect", err))
	}
	return newBlockingConn(fd)
}

// demoListen opens a listener on loopback; it lives as long as the process.
func demoListen() (addr string, accept func() (demoConn, error), err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", nil, os.NewSyscallError("socket", err)
	}
	fail := func(call string, err error) (string, func() (demoConn, error), error) {
		unix.Close(fd)
		return "", nil, os.NewSyscallError(call, err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return fail("bind", err)
	}
	if err := unix.Listen(fd, 128); err != nil {
		return fail("listen", err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return fail("getsockname", err)
	}
	v4, ok := sa.(*unix.SockaddrInet4)
	if !ok {
		return fail("getsockname", unix.EAFNOSUPPORT)
	}
	ap := netip.AddrPortFrom(netip.AddrFrom4(v4.Addr), uint16(v4.Port))
	return ap.String(), func() (demoConn, error) {
		for {
			c, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
			switch err {
			case nil:
				return newBlockingConn(c)
			case unix.EINTR, unix.ECONNABORTED:
			default:
				return nil, os.NewSyscallError("accept4", err)
			}
		}
	}, nil
}

func sockaddr(addr string) (unix.Sockaddr, error) {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil || !ap.Addr().Is4() {
		return nil, &net.AddrError{Err: "not an IPv4 address and port", Addr: addr}
	}
	return &unix.SockaddrInet4{Addr: ap.Addr().As4(), Port: int(ap.Port())}, nil
}
