package proxy

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

	"shunt/splice"
)

const (
	// loopBuffer is how much the event loop reads at once; who fills it sends more than the loop carries.
	loopBuffer = 16 << 10
	// loopTurns is how often a direction may have something to carry before its connection leaves the loop.
	loopTurns = 16
)

// loop is the event loop, for connections that last short or rest: one goroutine carries their few bytes and their ends. It never
// waits for a connection. Whatever may take time or doesn't happen every day is left to other goroutines, which go on from there.
type loop struct {
	srv   *Server
	epoll int
	set   *os.File // epoll's owner, itself waited for by the runtime's poller
	done  chan struct{}
	buf   []byte
	young young
}

func newLoop(s *Server) (*loop, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll_create1: %w", err)
	}
	// Only a non-blocking file goes to the runtime's poller.
	if err := unix.SetNonblock(epoll, true); err != nil {
		unix.Close(epoll)
		return nil, fmt.Errorf("epoll: %w", err)
	}
	l := &loop{srv: s, epoll: epoll, set: os.NewFile(uintptr(epoll), "event loop"), done: make(chan struct{}), buf: make([]byte, loopBuffer), young: young{srv: s}}
	raw, err := l.set.SyscallConn()
	if err != nil {
		l.set.Close()
		return nil, fmt.Errorf("epoll: %w", err)
	}
	go l.run(raw)
	return l, nil
}

// add has key come whenever there is something new to read from fd, an end included.
func (l *loop) add(fd int, key uint64) error {
	return unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{
		// With urgent data there, one read isn't all.
		Events: unix.EPOLLIN | unix.EPOLLPRI | unix.EPOLLRDHUP | unix.EPOLLET&0xffffffff,
		Fd:     int32(uint32(key)), Pad: int32(uint32(key >> 32)),
	})
}

func (l *loop) run(raw syscall.RawConn) {
	defer close(l.done)
	events := make([]unix.EpollEvent, 64)
	conns := make([]*conn, len(events))
	// All of it within one Read: what comes while it is busy lets the wait that follows end at once.
	_ = raw.Read(func(fd uintptr) bool {
		for {
			n, err := unix.EpollWait(int(fd), events, 0)
			if err == unix.EINTR {
				continue
			}
			n = max(n, 0)
			l.srv.mu.Lock()
			for i, e := range events[:n] {
				conns[i] = l.srv.conns[keyOf(e)>>1]
			}
			l.srv.mu.Unlock()
			for i, e := range events[:n] {
				if c := conns[i]; c != nil {
					conns[i] = nil
					c.turn(splice.Direction(keyOf(e)&1), e.Events&^unix.EPOLLIN != 0, l.buf)
				}
			}
			if n < len(events) {
				return false
			}
		}
	})
}

func keyOf(e unix.EpollEvent) uint64 { return uint64(uint32(e.Fd)) | uint64(uint32(e.Pad))<<32 }

// close ends it; no connection may be its any more.
func (l *loop) close() {
	l.set.Close()
	<-l.done
}

// enterLoop hands both directions to the loop, or to goroutines where it doesn't take them.
func (c *conn) enterLoop() {
	c.mu.Lock()
	killed := c.killed
	if !killed {
		c.flows[0].state, c.flows[1].state = flowLooped, flowLooped
	}
	c.mu.Unlock()
	if killed {
		c.ended(splice.Up)
		c.ended(splice.Down)
		return
	}
	l := c.l.srv.loops[c.id%uint64(len(c.l.srv.loops))]
	for d := range c.legs {
		s := c.legs[d].sock.(*socket)
		if s.enter(l, c.id<<1|uint64(d)) != nil {
			c.leaveLoop()
			return
		}
	}
	l.young.add(c.id)
}

// leaveLoop hands the directions that the loop has to goroutines.
func (c *conn) leaveLoop() {
	for d := range c.flows {
		c.mu.Lock()
		c.left = true
		looped := c.flows[d].state == flowLooped
		if looped {
			c.flows[d].state = flowMoving
			c.unrest(d)
		}
		c.mu.Unlock()
		if looped {
			c.l.srv.workers.start(job{c: c, moves: true, d: splice.Direction(d), fresh: true})
		}
	}
}

// grown does what a connection needs that has been in the loop for a while.
func (c *conn) grown() {
	looped := false
	c.mu.Lock()
	for d := range c.flows {
		if f := &c.flows[d]; f.state == flowLooped && !f.resting {
			f.resting, looped = true, true
			c.l.srv.tidy.rest()
		}
	}
	c.mu.Unlock()
	if looped {
		c.settle()
	}
}

// young are connections that have just come to the loop.
type young struct {
	srv   *Server
	mu    sync.Mutex
	ids   [2][]uint64 // those since the last turn, and those of the turn before
	armed bool
}

func (y *young) add(id uint64) {
	y.mu.Lock()
	defer y.mu.Unlock()
	y.ids[0] = append(y.ids[0], id)
	if !y.armed {
		y.armed = true
		time.AfterFunc(quietPeriod, y.turn)
	}
}

func (y *young) turn() {
	y.mu.Lock()
	due := y.ids[1]
	y.ids[0], y.ids[1] = nil, y.ids[0]
	if y.armed = len(y.ids[1]) > 0; y.armed {
		time.AfterFunc(quietPeriod, y.turn)
	}
	y.mu.Unlock()
	for _, id := range due {
		y.srv.mu.Lock()
		c := y.srv.conns[id]
		y.srv.mu.Unlock()
		if c != nil {
			c.grown()
		}
	}
}

// turn is the loop's, when direction d has something to read. ending says that its end may have come, too.
func (c *conn) turn(d splice.Direction, ending bool, buf []byte) {
	c.mu.Lock()
	if c.flows[d].state != flowLooped {
		c.mu.Unlock()
		return
	}
	c.flows[d].state = flowMoving
	c.mu.Unlock()

	wrote, err := c.take(d, ending, buf)
	if err == nil {
		c.mu.Lock()
		switch {
		case c.killed:
			err = net.ErrClosed
		case c.left: // the sockets aren't in the set any more
			err = splice.ErrWait
		default:
			c.flows[d].state = flowLooped
		}
		c.mu.Unlock()
		if err == nil {
			return
		}
	}
	c.mu.Lock()
	c.unrest(int(d))
	c.mu.Unlock()
	switch {
	case err == io.EOF && c.mayBeReset(d):
		c.l.srv.workers.start(job{c: c, d: d, over: true})
		c.leaveLoop()
	case err == io.EOF, errors.Is(err, net.ErrClosed):
		if err == io.EOF {
			c.finish(d)
		}
		if c.l.logsEnds() {
			// Whoever reads the log may not be as fast.
			c.l.srv.workers.start(job{c: c, d: d, ended: true})
		} else {
			c.ended(d)
		}
	case err == splice.ErrWait:
		c.l.srv.workers.start(job{c: c, moves: true, d: d, fresh: true})
		c.leaveLoop()
	default:
		c.l.srv.workers.start(job{c: c, d: d, over: true, wrote: wrote, err: err})
		c.leaveLoop()
	}
}

// mayBeReset says that d's end of file needs judgeEOF, which may wait.
func (c *conn) mayBeReset(d splice.Direction) bool {
	src := &c.legs[d]
	if src.sentFIN.Load() {
		return false
	}
	closed, ok := isClosed(src.sock)
	return ok && closed
}

// take carries what is there in direction d, if that is little. No error: that was all. io.EOF: after FIN.
// splice.ErrWait: a goroutine has to go on. Another one: the source's end, or the destination's (wrote).
func (c *conn) take(d splice.Direction, ending bool, buf []byte) (wrote bool, err error) {
	if c.flows[d].turns++; c.flows[d].turns > loopTurns {
		return false, splice.ErrWait
	}
	if c.route != nil {
		_, err := c.route.Take(d, ending, buf)
		if e := (*splice.EndError)(nil); errors.As(err, &e) {
			return e.Write, e
		}
		return false, err
	}
	src, dst := c.legs[d].sock.(*socket), c.legs[1-d].sock.(*socket)
	f := &c.flows[d]
	for {
		var n, w int
		err := src.control(func(fd int) (err error) {
			n, err = splice.Receive(fd, buf, 0)
			return err
		})
		switch {
		case err == unix.EAGAIN:
			return false, nil
		case err != nil:
			return false, err
		case n == 0:
			return false, io.EOF
		}
		err = dst.control(func(fd int) (err error) {
			w, err = splice.Send(fd, buf[:n])
			return err
		})
		f.copied.Add(uint64(w))
		if w < n && (err == nil || err == unix.EAGAIN) {
			f.rest = append([]byte(nil), buf[w:n]...)
			return false, splice.ErrWait
		}
		switch {
		case err != nil:
			return true, err
		case n == len(buf), f.copied.Load() >= bufferSize:
			return false, splice.ErrWait
		case !ending:
			// Less than was asked for: whatever comes later comes with another event.
			return false, nil
		}
	}
}
