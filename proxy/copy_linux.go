package proxy

import (
	"errors"
	"io"
	"os"
	"syscall"
	"time"

	"shunt/splice"
)

// copy moves direction d's bytes until its source is parked, the source ends
// (an error other than nil says how), or the destination does (wrote).
//
// One read deadline serves for everything: at each one that passes, a
// direction that has moved something gets another, one that hasn't is parked.
// So an io.Copy that runs dry gives its pipe back, data costs no
// system call more than plain copying, and the byte counters of a bulk
// transfer lag by no more than a period and what is in the pipe.
func (c *conn) copy(d splice.Direction, fresh bool) (parked, wrote bool, err error) {
	src, dst := &c.legs[d], &c.legs[1-d]
	f := &c.flows[d]
	sc, ok := src.sock.(syscall.Conn)
	if !ok || c.l.cfg.Tap != nil || c.l.cfg.BufferSize > 0 {
		wrote, err = c.copyPlain(d)
		return false, wrote, err
	}
	if tcpOf(src.sock) == nil || tcpOf(dst.sock) == nil {
		f.plain = true
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false, false, err
	}
	var buf *[]byte
	var n int
	var rerr error
	read := func(fd uintptr) bool {
		buf = buffers.Get().(*[]byte)
		for {
			n, rerr = syscall.Read(int(fd), *buf)
			if rerr != syscall.EINTR {
				break
			}
		}
		if n > 0 {
			return true
		}
		buffers.Put(buf) // never held while waiting
		return rerr != syscall.EAGAIN
	}
	period := quietPeriod
	if fresh {
		period = freshPeriod
	}
	src.sock.SetReadDeadline(time.Now().Add(period))
	last := f.copied.Load()
	endless := false // the parking had no room
	for {
		switch err := raw.Read(read); {
		case errors.Is(err, os.ErrDeadlineExceeded):
			c.settle()
			if now := f.copied.Load(); now == last {
				if c.park(d) {
					return true, false, nil
				}
				// It waits here then; a closed socket ends that too.
				src.sock.SetReadDeadline(time.Time{})
				endless = true
			} else {
				last = now
				src.sock.SetReadDeadline(time.Now().Add(quietPeriod))
			}
			continue
		case err != nil:
			return false, false, err
		case rerr != nil:
			return false, false, os.NewSyscallError("read", rerr)
		case n <= 0:
			return false, false, nil
		}
		if endless {
			endless = false
			src.sock.SetReadDeadline(time.Now().Add(quietPeriod))
		}
		full := n == len(*buf)
		if full || f.copied.Load() >= 2*bufferSize {
			c.settle()
		}
		w, err := dst.sock.Write((*buf)[:n])
		buffers.Put(buf)
		f.copied.Add(uint64(w))
		if err != nil {
			return false, true, err
		}
		if !full || f.plain {
			continue
		}
		if s, ok := readTCPStats(src.sock); !ok || bytesBesideTCP(f.copied.Load()+c.taken(d), s.received) {
			f.plain = true
			continue
		}
		from, ok := streamOf(src.sock)
		to, ok2 := streamOf(dst.sock)
		if !ok || !ok2 {
			f.plain = true
			continue
		}
		if !c.l.srv.pipes.take() {
			continue
		}
		m, err := io.Copy(to, from)
		c.l.srv.pipes.give()
		f.copied.Add(uint64(m))
		switch {
		case err == nil:
			return false, false, nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			// Not read again before the deadline is set anew.
			src.sock.SetReadDeadline(time.Now().Add(quietPeriod))
		default:
			return false, c.writeFailed(src, dst, err), err
		}
	}
}

// writeFailed says whose error an io.Copy between two sockets returned:
// the destination's (true), or the source's.
func (c *conn) writeFailed(src, dst *leg, err error) bool {
	if errors.Is(err, syscall.EPIPE) {
		return true
	}
	s, ok := readTCPStats(src.sock)
	if ok && s.state == tcpClosed {
		// Where both are closed there is nobody left to deliver to.
		return false
	}
	t, ok := readTCPStats(dst.sock)
	return ok && t.state == tcpClosed
}
