package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"shunt/proxy"
)

// fileStream carries bytes over one or two open descriptors of any kind. It
// leaves their blocking mode alone, for other processes have them too, and so
// waits in poll(2) with a descriptor of its own that ends the wait.
type fileStream struct {
	name       string
	in, out    int
	inKind     uint32 // S_IFMT of the descriptors
	outKind    uint32
	readOn     bool        // read again after the end
	keep       bool        // close nothing
	broken     func(error) // is told of failed writes; may be nil
	wake       int         // an eventfd
	mu         sync.Mutex
	busy       sync.WaitGroup // calls that use the descriptors
	closed     bool
	closedSend bool
}

// newFileStream takes the descriptors over, unless keep.
func newFileStream(name string, in, out int, readOn, keep bool) (*fileStream, error) {
	f := &fileStream{name: name, in: in, out: out, readOn: readOn, keep: keep}
	for _, end := range []struct {
		fd   int
		kind *uint32
	}{{in, &f.inKind}, {out, &f.outKind}} {
		var st unix.Stat_t
		if err := unix.Fstat(end.fd, &st); err != nil {
			return nil, os.NewSyscallError("fstat", err)
		}
		*end.kind = st.Mode & unix.S_IFMT
		unix.CloseOnExec(end.fd)
	}
	var err error
	if f.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, os.NewSyscallError("eventfd", err)
	}
	return f, nil
}

// use notes a call that is at work; Close waits for it.
func (f *fileStream) use() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return net.ErrClosed
	}
	f.busy.Add(1)
	return nil
}

// wait waits for one of the events on fd, or for Close.
func (f *fileStream) wait(fd int, events int16, timeout time.Duration) error {
	ms := -1
	if timeout > 0 {
		ms = int(timeout.Milliseconds())
	}
	for {
		p := []unix.PollFd{{Fd: int32(fd), Events: events}, {Fd: int32(f.wake), Events: unix.POLLIN}}
		_, err := unix.Poll(p, ms)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return os.NewSyscallError("poll", err)
		case p[1].Revents != 0:
			return net.ErrClosed
		}
		return nil
	}
}

// Read implements net.Conn.
func (f *fileStream) Read(b []byte) (int, error) {
	if err := f.use(); err != nil {
		return 0, err
	}
	defer f.busy.Done()
	for {
		if err := f.wait(f.in, unix.POLLIN, 0); err != nil {
			return 0, err
		}
		n, err := unix.Read(f.in, b)
		switch {
		case err == unix.EAGAIN || err == unix.EINTR:
			continue
		case err == unix.EIO && f.inKind == unix.S_IFCHR:
			return 0, io.EOF // a terminal that hung up
		case err != nil:
			return 0, os.NewSyscallError("read", err)
		case n > 0:
			return n, nil
		case !f.readOn:
			return 0, io.EOF
		}
		if err := f.wait(-1, 0, time.Second); err != nil {
			return 0, err
		}
	}
}

// Write implements net.Conn.
func (f *fileStream) Write(b []byte) (done int, err error) {
	if err := f.use(); err != nil {
		return 0, err
	}
	defer f.busy.Done()
	for len(b) > 0 {
		if err := f.wait(f.out, unix.POLLOUT, 0); err != nil {
			return done, err
		}
		part := b
		if f.outKind == unix.S_IFIFO && len(part) > 4096 {
			part = part[:4096] // PIPE_BUF: what poll promises room for
		}
		var n int
		if f.outKind == unix.S_IFSOCK {
			n, err = unix.SendmsgN(f.out, part, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		} else {
			n, err = unix.Write(f.out, part)
		}
		switch {
		case err == unix.EAGAIN || err == unix.EINTR:
			continue
		case err != nil:
			if f.broken != nil {
				f.broken(fmt.Errorf("write(%d): %w", f.out, plainError(err)))
			}
			return done, os.NewSyscallError("write", err)
		}
		done += n
		b = b[n:]
	}
	return done, nil
}

// CloseWrite tells whoever reads the output that nothing follows.
func (f *fileStream) CloseWrite() error {
	if f.keep {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed || f.closedSend {
		return net.ErrClosed
	}
	switch {
	case f.outKind == unix.S_IFSOCK:
		return os.NewSyscallError("shutdown", unix.Shutdown(f.out, unix.SHUT_WR))
	case f.in == f.out:
		return nil // a terminal or a file: there is no half of it to close
	}
	f.closedSend = true
	return unix.Close(f.out)
}

// Close ends the calls at work and closes the descriptors.
func (f *fileStream) Close() error {
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return net.ErrClosed
	}
	f.closed = true
	f.mu.Unlock()
	unix.Write(f.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	// A write to a descriptor in blocking mode may take for ever, and a
	// descriptor that is in use must not be closed.
	go func() {
		f.busy.Wait()
		unix.Close(f.wake)
		if f.keep {
			return
		}
		unix.Close(f.in)
		if f.out != f.in && !f.closedSend {
			unix.Close(f.out)
		}
	}()
	return nil
}

type plainAddr struct{ network, text string }

func (a plainAddr) Network() string { return a.network }
func (a plainAddr) String() string  { return a.text }

func (f *fileStream) LocalAddr() net.Addr              { return plainAddr{"file", f.name} }
func (f *fileStream) RemoteAddr() net.Addr             { return plainAddr{"file", f.name} }
func (f *fileStream) SetDeadline(time.Time) error      { return os.ErrNoDeadline }
func (f *fileStream) SetReadDeadline(time.Time) error  { return os.ErrNoDeadline }
func (f *fileStream) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }

// vsockStream is a connected AF_VSOCK socket, which package net doesn't know.
type vsockStream struct {
	*os.File
	local, remote net.Addr
}

func (v *vsockStream) LocalAddr() net.Addr  { return v.local }
func (v *vsockStream) RemoteAddr() net.Addr { return v.remote }

// CloseWrite implements proxy.Stream.
func (v *vsockStream) CloseWrite() error {
	return withFD(v.File, func(fd int) error { return os.NewSyscallError("shutdown", unix.Shutdown(fd, unix.SHUT_WR)) })
}

func vsockAddr(sa unix.Sockaddr, err error) net.Addr {
	if v, ok := sa.(*unix.SockaddrVM); ok && err == nil {
		return plainAddr{"vsock", vsockText(v)}
	}
	return plainAddr{"vsock", "?"}
}

func newVsockStream(fd int) *vsockStream {
	return &vsockStream{
		File:  os.NewFile(uintptr(fd), "vsock"),
		local: vsockAddr(unix.Getsockname(fd)), remote: vsockAddr(unix.Getpeername(fd)),
	}
}

// vsockListener accepts AF_VSOCK connections.
type vsockListener struct {
	file *os.File
	addr net.Addr
}

// Accept implements net.Listener.
func (l *vsockListener) Accept() (net.Conn, error) {
	raw, err := l.file.SyscallConn()
	if err != nil {
		return nil, err
	}
	var fd int
	var aerr error
	err = raw.Read(func(s uintptr) bool {
		fd, _, aerr = unix.Accept4(int(s), unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
		return aerr != unix.EAGAIN && aerr != unix.EINTR
	})
	switch {
	case errors.Is(err, os.ErrClosed):
		return nil, net.ErrClosed
	case err != nil:
		return nil, err
	case aerr != nil:
		return nil, os.NewSyscallError("accept4", aerr)
	}
	return newVsockStream(fd), nil
}

func (l *vsockListener) Close() error   { return l.file.Close() }
func (l *vsockListener) Addr() net.Addr { return l.addr }

// oneStream is a listener of one connection that exists already.
type oneStream struct {
	stream proxy.Stream
	taken  sync.Once
	closed chan struct{}
	once   sync.Once
}

func newOneStream(s proxy.Stream) *oneStream {
	return &oneStream{stream: s, closed: make(chan struct{})}
}

// Accept returns the stream, and after that nothing until Close.
func (o *oneStream) Accept() (c net.Conn, err error) {
	o.taken.Do(func() { c = o.stream })
	if c != nil {
		return c, nil
	}
	<-o.closed
	return nil, net.ErrClosed
}

// Close implements net.Listener; the stream is its taker's.
func (o *oneStream) Close() error {
	o.once.Do(func() { close(o.closed) })
	o.taken.Do(func() { o.stream.Close() })
	return nil
}

func (o *oneStream) Addr() net.Addr { return o.stream.LocalAddr() }

// withFD runs f with c's descriptor.
func withFD(c syscall.Conn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	if cerr := raw.Control(func(fd uintptr) { err = f(int(fd)) }); cerr != nil {
		return cerr
	}
	return err
}
