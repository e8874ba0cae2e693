package proxy

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"shunt/splice"
)

// accepter accepts without package net.
type accepter struct {
	l    *listener
	file *os.File // a second descriptor of the listening socket
	raw  syscall.RawConn
	// local is the address that accepted sockets have; nil if that is to be asked for.
	local *net.TCPAddr
}

// newAccepter returns nil where it isn't for l.
func (l *listener) newAccepter(ln net.Listener) *accepter {
	t, ok := ln.(*net.TCPListener)
	if !ok || l.srv.noLoop || !l.loops() {
		return nil
	}
	file, err := duplicate(t, "listener")
	if err != nil {
		l.log.Debug().Err(err).Msg("no event loop")
		return nil
	}
	raw, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return nil
	}
	// With a time to linger, close(2) waits.
	lingers := false
	_ = raw.Control(func(fd uintptr) {
		o, err := unix.GetsockoptLinger(int(fd), unix.SOL_SOCKET, unix.SO_LINGER)
		lingers = err != nil || o.Onoff != 0 && o.Linger > 0
	})
	if lingers {
		file.Close()
		return nil
	}
	// Accepted sockets inherit it; package net sets it on all of its own.
	_ = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) })
	a := &accepter{l: l, file: file, raw: raw}
	if at, ok := t.Addr().(*net.TCPAddr); ok && !at.IP.IsUnspecified() {
		a.local = at
	}
	return a
}

// accept is a TCPListener's Accept. The error is net.ErrClosed after close, or os.ErrDeadlineExceeded when interrupted.
func (a *accepter) accept() (Stream, error) {
	var fd int
	var from syscall.Sockaddr
	var aerr error
	err := a.raw.Read(func(listening uintptr) bool {
		for {
			fd, from, aerr = syscall.Accept4(int(listening), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			switch aerr {
			case unix.EINTR, unix.ECONNABORTED:
				continue
			}
			return aerr != unix.EAGAIN
		}
	})
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, err
	case err != nil: // the file is closed
		return nil, net.ErrClosed
	case aerr != nil:
		return nil, os.NewSyscallError("accept4", aerr)
	}
	if a.l.adjustKeepAlive {
		a.l.cfg.KeepAlive.force(fd)
	}
	s := &socket{fd: fd, remote: tcpAddr(from), local: a.local}
	s.LocalAddr()
	return s, nil
}

func (a *accepter) close() {
	if a != nil {
		a.file.Close()
	}
}

// loops says whether the event loop can have l's connections: with a TCP upstream on the loopback interface, and nothing asked for
// beyond passing bytes and ends on.
func (l *listener) loops() bool {
	c := &l.cfg
	if c.Way != BothWays || c.Tap != nil || c.BufferSize > 0 || c.Transparent || l.needsHead() || l.original ||
		c.Down != (LegPolicy{}) || c.Up != (LegPolicy{}) {
		return false
	}
	if c.DialFunc != nil {
		return c.Direct != nil && c.Direct.Addr.Addr().Unmap().IsLoopback()
	}
	us, _ := c.parseUpstreams()
	for _, u := range us {
		if u.kind != upstreamFixed || !u.addr.tcp.Addr().IsLoopback() {
			return false
		}
	}
	return true
}

// attempt is a dial that express has begun.
type attempt struct {
	set     []member
	i, left int
	sock    *socket // connecting
	err     error   // or why it isn't
}

// express gets the connection its upstream and hands it to the event loop, if that takes no time. false: serve has to, and goes on
// from what was begun.
func (c *conn) express() bool {
	l := c.l
	if !l.order.alone(c.ticket) || l.pool.refuses() {
		return false
	}
	var to Direct
	var begun *attempt
	if l.pool == nil {
		to = *l.cfg.Direct
	} else {
		begun = &attempt{set: *l.pool.set.Load()}
		if len(begun.set) == 0 {
			return false
		}
		if begun.i, begun.left = l.pool.choose(begun.set, nil, c.chooser()); begun.left == 0 {
			return false
		}
		to.Addr = begun.set[begun.i].addr.tcp
	}
	c.cand, c.claimed = c.claim(), true
	c.mu.Lock()
	c.state = stateDialling
	c.mu.Unlock()
	begin := time.Now()
	up, connected, err := c.connectNow(to)
	l.order.leave(c.ticket)
	if !connected {
		if begun != nil {
			begun.sock, begun.err = up, err
			c.begun = begun
		} else if up != nil {
			up.Close() // DialFunc knows better what to do
		}
		return false
	}
	var at *endpoint
	if begun != nil {
		at = begun.set[begun.i].endpoint
		l.pool.reached(at)
	}
	c.mu.Lock()
	c.dialled, c.at = time.Since(begin), at
	killed := c.killed
	c.mu.Unlock()
	cand := c.cand
	c.cand = nil
	switch {
	case killed:
		reset(up)
		if cand != nil {
			cand.Release()
		}
		c.abandon()
	case c.begin(cand, up):
		c.enterLoop()
	}
	return true
}

// connectNow connects to an address on the loopback interface, where the handshake is over when connect(2) returns: connected. Where it
// isn't, the socket is still connecting. After an error there is none.
func (c *conn) connectNow(to Direct) (s *socket, connected bool, err error) {
	family := unix.AF_INET6
	if to.Addr.Addr().Unmap().Is4() {
		family = unix.AF_INET
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return nil, false, os.NewSyscallError("socket", err)
	}
	s = &socket{fd: fd, remote: net.TCPAddrFromAddrPort(to.Addr)}
	fail := func(err error) (*socket, bool, error) {
		s.Close()
		return nil, false, err
	}
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) // as package net does
	if to.Prepare != nil {
		if err := to.Prepare(fd); err != nil {
			return fail(err)
		}
	}
	if c.cand != nil {
		c.register(c.cand, "tcp", to.Addr.String(), (*rawSocket)(s))
	}
	if err := connect(fd, to.Addr); err != 0 && err != unix.EINPROGRESS {
		return fail(os.NewSyscallError("connect", err))
	}
	s.LocalAddr()
	state, err := tcpState(fd)
	switch {
	case err != nil:
		return fail(os.NewSyscallError("getsockopt TCP_INFO", err))
	case state == tcpClosed:
		return fail(os.NewSyscallError("connect", pendingError(fd)))
	case state != tcpEstablished && state != tcpCloseWait:
		return s, false, nil
	}
	if addrOf(s.LocalAddr()) == addrOf(s.remote) {
		return fail(os.NewSyscallError("connect", unix.ECONNREFUSED)) // it met itself
	}
	if to.Connected != nil {
		if err := to.Connected(fd); err != nil {
			return fail(err)
		}
	}
	return s, true, nil
}

// pendingError takes a socket's error.
func pendingError(fd int) error {
	switch e, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); {
	case err != nil:
		return err
	case e != 0:
		return syscall.Errno(e)
	}
	return unix.ECONNREFUSED
}

// finish waits for what express has begun, within timeout.
func (a *attempt) finish(ctx context.Context, timeout time.Duration) (Stream, error) {
	err := a.err
	if a.sock != nil {
		if err = a.wait(ctx, timeout); err == nil {
			return a.sock, nil
		}
		a.sock.Close()
	}
	return nil, &net.OpError{Op: "dial", Net: "tcp", Addr: net.TCPAddrFromAddrPort(a.set[a.i].addr.tcp), Err: err}
}

// drop gives it up.
func (a *attempt) drop() {
	a.set[a.i].active.Add(-1)
	if a.sock != nil {
		a.sock.Close()
	}
}

func (a *attempt) wait(ctx context.Context, timeout time.Duration) error {
	t, err := a.sock.wait()
	if err != nil {
		return err
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return err
	}
	t.SetWriteDeadline(time.Now().Add(timeout))
	defer t.SetWriteDeadline(time.Time{})
	stop := context.AfterFunc(ctx, func() { t.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	var cerr error
	err = raw.Write(func(fd uintptr) bool {
		state, err := tcpState(int(fd))
		switch {
		case err != nil:
			cerr = os.NewSyscallError("getsockopt TCP_INFO", err)
		case state == tcpClosed:
			cerr = os.NewSyscallError("connect", pendingError(int(fd)))
		case state == tcpSynSent:
			return false
		}
		return true
	})
	if err == nil && !stop() {
		err = ctx.Err()
	}
	return errors.Join(err, cerr)
}

// connect is connect(2). On the loopback interface it takes longer than the runtime lets a system call have a processor that
// others could use, though it never waits: the runtime is told only where something else may hold it up.
func connect(fd int, to netip.AddrPort) (err syscall.Errno) {
	if splice.Supervised() || !to.Addr().Unmap().Is4() {
		switch err := unix.Connect(fd, sockaddr(to)).(type) {
		case nil:
			return 0
		case syscall.Errno:
			return err
		}
		return unix.EINVAL
	}
	port := [2]byte{byte(to.Port() >> 8), byte(to.Port())}
	sa := unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: to.Addr().Unmap().As4(), Port: *(*uint16)(unsafe.Pointer(&port))}
	_, _, err = unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&sa)), unsafe.Sizeof(sa))
	return err
}
