package splice

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Receive is recv(2) that doesn't wait, so the runtime isn't told of it. b must not be empty.
func Receive(fd int, b []byte, flags int) (n int, err error) {
	return message(unix.SYS_RECVFROM, fd, b, flags)
}

// Send is send(2) that doesn't wait, likewise. No signal comes where nobody reads any more.
func Send(fd int, b []byte) (n int, err error) {
	return message(unix.SYS_SENDTO, fd, b, unix.MSG_NOSIGNAL)
}

func message(call uintptr, fd int, b []byte, flags int) (n int, err error) {
	for {
		r, _, errno := unix.RawSyscall6(call, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), uintptr(flags|unix.MSG_DONTWAIT), 0, 0)
		switch errno {
		case 0:
			return int(r), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
