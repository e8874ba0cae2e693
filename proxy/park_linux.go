package proxy

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"shunt/splice"
)

// parking holds the sockets of directions on which nothing moves, so that
// they need no goroutine. It is an epoll set, itself waited for by the
// runtime's poller.
type parking struct {
	set  *os.File
	done chan struct{}
}

// newParking starts to wait. wake is called for each parked direction that
// has something to read, an end included; once for each call of park.
func newParking(wake func(id uint64, d splice.Direction)) (*parking, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll_create1: %w", err)
	}
	// Only a non-blocking file goes to the runtime's poller.
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("epoll: %w", err)
	}
	p := &parking{set: os.NewFile(uintptr(fd), "parking"), done: make(chan struct{})}
	raw, err := p.set.SyscallConn()
	if err != nil {
		p.set.Close()
		return nil, fmt.Errorf("epoll: %w", err)
	}
	go func() {
		defer close(p.done)
		events := make([]unix.EpollEvent, 128)
		n := 0
		ready := func(fd uintptr) bool {
			var err error
			n, err = unix.EpollWait(int(fd), events, 0)
			return err == nil && n > 0
		}
		for raw.Read(ready) == nil {
			for _, e := range events[:n] {
				key := uint64(uint32(e.Fd)) | uint64(uint32(e.Pad))<<32
				wake(key>>1, splice.Direction(key&1))
				// As in the accept loop: no pile of goroutines when many wake at once.
				runtime.Gosched()
			}
		}
	}()
	return p, nil
}

// park arms s for direction d of connection id; again says that it was parked
// before. The registration ends with the socket.
func (p *parking) park(s Stream, id uint64, d splice.Direction, again bool) error {
	key := id<<1 | uint64(d)
	c, ok := s.(syscall.Conn)
	if !ok {
		return errors.ErrUnsupported
	}
	op := unix.EPOLL_CTL_ADD
	if again {
		op = unix.EPOLL_CTL_MOD
	}
	return control(p.set, func(set int) error {
		return control(c, func(fd int) error {
			return unix.EpollCtl(set, op, fd, &unix.EpollEvent{
				Events: unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLONESHOT,
				Fd:     int32(uint32(key)), Pad: int32(uint32(key >> 32)),
			})
		})
	})
}

func (p *parking) close() {
	p.set.Close()
	<-p.done
}
