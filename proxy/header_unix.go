//go:build unix

package proxy

import (
	"io"
	"syscall"

	"golang.org/x/sys/unix"
)

// readSome waits for bytes from s and reads at most as many into b as want
// says of those that have come, at least one; the others stay in the socket.
func readSome(s Stream, b []byte, want func(b []byte) int) (n int, err error) {
	c, ok := s.(syscall.Conn)
	if !ok {
		return readOne(s, b, want)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	recv := func(fd uintptr, b []byte, flags int) (n int, err error) {
		for {
			if n, _, err = unix.Recvfrom(int(fd), b, flags|unix.MSG_DONTWAIT); err != unix.EINTR {
				return n, err
			}
		}
	}
	var rerr error
	err = raw.Read(func(fd uintptr) bool {
		if n, rerr = recv(fd, b, unix.MSG_PEEK); rerr == nil && n > 0 {
			n, rerr = recv(fd, b[:want(b[:n])], 0)
		}
		return rerr != unix.EAGAIN
	})
	switch {
	case err != nil:
		return 0, err
	case rerr != nil:
		return 0, rerr
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}
