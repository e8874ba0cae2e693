package proxy

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// socket is a TCP connection that the event loop looks after: package net and the runtime's poller don't know it, which
// is half of what a short connection costs otherwise. The first thing that has to wait on it makes it one that they know.
type socket struct {
	remote, local *net.TCPAddr
	known         atomic.Pointer[known] // what it has become

	mu   sync.Mutex
	fd   int   // -1: closed, or in known; used only under mu
	loop *loop // whose set it is in, or nil
}

// known is a socket of the runtime's poller.
type known struct {
	pollable
	tcp *net.TCPConn // the same, unless there was no descriptor to make it with
}

// pollable is what net.TCPConn and os.File have in common.
type pollable interface {
	io.ReadWriteCloser
	syscall.Conn
	SetDeadline(time.Time) error
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
}

// isTCP marks it, for tcpOf.
func (s *socket) isTCP() {}

// control runs f, which must neither wait nor use s, on the descriptor.
func (s *socket) control(f func(fd int) error) error {
	s.mu.Lock()
	if s.fd >= 0 {
		defer s.mu.Unlock()
		return f(s.fd)
	}
	s.mu.Unlock()
	k := s.known.Load()
	if k == nil {
		return net.ErrClosed
	}
	return control(k.pollable, f)
}

// netOptions are what package net sets on a socket that it makes a TCPConn of.
var netOptions = [...]struct{ level, name int }{
	{unix.IPPROTO_TCP, unix.TCP_NODELAY},
	{unix.SOL_SOCKET, unix.SO_KEEPALIVE},
	{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE},
	{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL},
	{unix.IPPROTO_TCP, unix.TCP_KEEPCNT},
}

// wait makes s one that can be waited on. The error is net.ErrClosed. No direction may be the loop's any more.
func (s *socket) wait() (*known, error) {
	if k := s.known.Load(); k != nil {
		return k, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.known.Load(); k != nil {
		return k, nil
	}
	if s.fd < 0 {
		return nil, net.ErrClosed
	}
	fd := s.fd
	if s.loop != nil {
		// The set would keep the socket, as long as it has any descriptor.
		_ = unix.EpollCtl(s.loop.epoll, unix.EPOLL_CTL_DEL, fd, nil)
		s.loop = nil
	}
	var had [len(netOptions)]int
	for i, o := range netOptions {
		had[i], _ = unix.GetsockoptInt(fd, o.level, o.name)
	}
	f := os.NewFile(uintptr(fd), "socket") // owns fd from here on
	k := &known{pollable: f}
	// It takes a second descriptor. Without, there is no splice(2).
	if c, err := net.FileConn(f); err == nil {
		k.tcp = c.(*net.TCPConn)
		k.pollable = k.tcp
		for i, o := range netOptions {
			_ = unix.SetsockoptInt(fd, o.level, o.name, had[i])
		}
		f.Close()
	}
	s.fd = -1
	s.known.Store(k)
	return k, nil
}

// enter puts s into l's set.
func (s *socket) enter(l *loop, key uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return net.ErrClosed
	}
	s.loop = l
	return l.add(s.fd, key)
}

// Close closes it; later calls do nothing.
func (s *socket) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd >= 0 {
		err := unix.Close(s.fd)
		s.fd, s.loop = -1, nil
		return os.NewSyscallError("close", err)
	}
	if k := s.known.Load(); k != nil {
		return k.Close()
	}
	return net.ErrClosed
}

func (s *socket) CloseWrite() error {
	return s.control(func(fd int) error { return os.NewSyscallError("shutdown", unix.Shutdown(fd, unix.SHUT_WR)) })
}

func (s *socket) SetLinger(seconds int) error {
	return s.control(func(fd int) error {
		l := unix.Linger{Linger: int32(max(seconds, 0))}
		if seconds >= 0 {
			l.Onoff = 1
		}
		return os.NewSyscallError("setsockopt SO_LINGER", unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &l))
	})
}

// LocalAddr must have been called before s is closed or waited on, unless local is set.
func (s *socket) LocalAddr() net.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.local == nil && s.fd >= 0 {
		if sa, err := syscall.Getsockname(s.fd); err == nil {
			s.local = tcpAddr(sa)
		}
	}
	if s.local == nil {
		return &net.TCPAddr{}
	}
	return s.local
}

func (s *socket) RemoteAddr() net.Addr { return s.remote }

func (s *socket) Read(b []byte) (int, error) {
	k, err := s.wait()
	if err != nil {
		return 0, err
	}
	return k.Read(b)
}

func (s *socket) Write(b []byte) (int, error) {
	k, err := s.wait()
	if err != nil {
		return 0, err
	}
	return k.Write(b)
}

func (s *socket) SetDeadline(at time.Time) error {
	k, err := s.wait()
	if err != nil {
		return err
	}
	return k.SetDeadline(at)
}

func (s *socket) SetReadDeadline(at time.Time) error {
	k, err := s.wait()
	if err != nil {
		return err
	}
	return k.SetReadDeadline(at)
}

func (s *socket) SetWriteDeadline(at time.Time) error {
	k, err := s.wait()
	if err != nil {
		return err
	}
	return k.SetWriteDeadline(at)
}

func (s *socket) SyscallConn() (syscall.RawConn, error) { return (*rawSocket)(s), nil }

// rawSocket is a socket's syscall.RawConn.
type rawSocket socket

func (r *rawSocket) Control(f func(fd uintptr)) error {
	return (*socket)(r).control(func(fd int) error { f(uintptr(fd)); return nil })
}

func (r *rawSocket) Read(f func(fd uintptr) bool) error {
	raw, err := r.raw()
	if err == nil {
		err = closedOr(raw.Read(f))
	}
	return err
}

func (r *rawSocket) Write(f func(fd uintptr) bool) error {
	raw, err := r.raw()
	if err == nil {
		err = closedOr(raw.Write(f))
	}
	return err
}

func (r *rawSocket) raw() (syscall.RawConn, error) {
	k, err := (*socket)(r).wait()
	if err != nil {
		return nil, err
	}
	return k.SyscallConn()
}

// closedOr is the error of waiting for the poller. A file's says in words of its own that it was closed.
func closedOr(err error) error {
	if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	return net.ErrClosed
}

// tcpAddr is what package net makes of an address; nil for anything but TCP's.
func tcpAddr(sa syscall.Sockaddr) *net.TCPAddr {
	switch sa := sa.(type) {
	case *syscall.SockaddrInet4:
		return &net.TCPAddr{IP: sa.Addr[:], Port: sa.Port}
	case *syscall.SockaddrInet6:
		a := &net.TCPAddr{IP: sa.Addr[:], Port: sa.Port}
		if sa.ZoneId != 0 {
			if i, err := net.InterfaceByIndex(int(sa.ZoneId)); err == nil {
				a.Zone = i.Name
			}
		}
		return a
	}
	return nil
}

func sockaddr(p netip.AddrPort) unix.Sockaddr {
	if a := p.Addr().Unmap(); a.Is4() {
		return &unix.SockaddrInet4{Port: int(p.Port()), Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Port: int(p.Port()), Addr: p.Addr().As16()}
}

// streamOf is what package net can use splice(2) with; false: nothing.
func streamOf(s Stream) (Stream, bool) {
	o, ok := s.(*socket)
	if !ok {
		return s, true
	}
	k, err := o.wait()
	if err != nil || k.tcp == nil {
		return nil, false
	}
	return k.tcp, true
}
