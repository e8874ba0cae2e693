//go:build unix

package main

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/coreos/go-systemd/v22/activation"
	"golang.org/x/sys/unix"

	"shunt/proxy"
)

// upgradeSignal asks for an upgrade.
var upgradeSignal os.Signal = syscall.SIGUSR2

// streamPair returns a connected pair of streams; this process's end has deadlines.
func streamPair() (ours, theirs *os.File, err error) {
	syscall.ForkLock.RLock() // so that no other child gets them
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err == nil {
		unix.CloseOnExec(fds[0])
		unix.CloseOnExec(fds[1])
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fds[0]), "upgrade"), os.NewFile(uintptr(fds[1]), "upgrade"), nil
}

// streamFile takes over an inherited descriptor.
func streamFile(fd int) (*os.File, error) {
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fd), "upgrade"), nil
}

// activatedSockets returns the sockets that the service manager has opened
// (LISTEN_FDS), and forgets the variables.
func activatedSockets() ([]proxy.Inherited, error) {
	var in []proxy.Inherited
	for _, f := range activation.Files(true) {
		if err := checkListening(int(f.Fd())); err != nil {
			return nil, fmt.Errorf("inherited socket %q (descriptor %d): %w", f.Name(), f.Fd(), err)
		}
		name := f.Name()
		ln, err := listenerOf(f)
		if err != nil {
			return nil, fmt.Errorf("inherited socket %q: %w", name, err)
		}
		in = append(in, proxy.Inherited{Listener: ln, Name: name})
	}
	return in, nil
}

// checkListening says what is wrong with a descriptor that should be a
// listening TCP or UNIX stream socket.
func checkListening(fd int) error {
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil {
		return fmt.Errorf("getsockopt SO_TYPE: %w", err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return fmt.Errorf("getsockname: %w", err)
	}
	stream := kind == unix.SOCK_STREAM
	switch sa.(type) {
	case *unix.SockaddrInet4, *unix.SockaddrInet6, *unix.SockaddrUnix:
	default:
		stream = false
	}
	if !stream {
		return errors.New("not a TCP or UNIX stream socket (in a socket unit: ListenStream)")
	}
	listening, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	if err != nil {
		return fmt.Errorf("getsockopt SO_ACCEPTCONN: %w", err)
	}
	if listening == 0 {
		return errors.New("a connection, not a listening socket (in a socket unit: Accept=no)")
	}
	return nil
}
