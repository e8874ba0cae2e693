//go:build unix

package proxy

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// duplicate returns a second descriptor of c's. Unlike the File methods of package net it leaves the
// socket non-blocking when the descriptor is used: both have that in common.
func duplicate(c syscall.Conn, name string) (f *os.File, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	cerr := raw.Control(func(fd uintptr) {
		var n int
		if n, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0); err == nil {
			f = os.NewFile(uintptr(n), name)
		}
	})
	if cerr != nil {
		return nil, cerr
	}
	return f, os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
}
