package proxy

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// unread is how many bytes wait in c.
func unread(c *net.TCPConn) (n int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	cerr := raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), syscall.TIOCINQ) })
	if cerr != nil {
		return 0, cerr
	}
	return n, err
}
