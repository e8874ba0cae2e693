package splice

import (
	"errors"
	"io"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"shunt/bpf"
)

// bufSize is what Forward takes at a time; more than A's receive buffer.
const bufSize = 64 << 10

// fewBytes is far less than any send buffer: nobody waits for their acknowledgement.
const fewBytes = 1 << 10

var buffers = sync.Pool{New: func() any { b := make([]byte, bufSize); return &b }}

// Route is a connection on the bypass. It keeps both connections referenced.
// Forward may run once for each direction, concurrently with everything else.
type Route struct {
	k        *Kernel
	slot     uint32
	p        *bpf.ShuntPair
	down, up Socket
	downAddr netip.AddrPort
	upAddr   netip.AddrPort
	cookie   [4]uint64
	addr     [4]uint64
	kept     [2]uint64 // bytes of the sender's that this process took for itself
	added    [2]uint64 // bytes that it sent ahead of the sender's
	lost     error     // why those were not written

	rest [2][]byte // what Take took and couldn't write

	waits [2]atomic.Uint64
	high  [2]atomic.Uint64 // bypassed bytes shown so far

	// Of Kernel.findStalled alone.
	taken  [2]bool
	said   [2]bool
	sentAt [2]time.Time

	final atomic.Pointer[RouteStats]
}

// sender and receiver are a direction's application sockets.
func (r *Route) sender(d Direction) bpf.ShuntRole {
	if d == Up {
		return bpf.ShuntRoleROLE_C
	}
	return bpf.ShuntRoleROLE_S
}

func (r *Route) receiver(d Direction) bpf.ShuntRole { return r.sender(1 - d) }

func (r *Route) stallKey(d Direction) stallKey {
	if d == Up {
		return stallKey{Up, r.upAddr}
	}
	return stallKey{Down, netip.AddrPortFrom(r.downAddr.Addr(), 0)}
}

// legs are the connection that a direction is read from and the one that it is written to.
func (r *Route) legs(d Direction) (src, dst Socket) {
	if d == Up {
		return r.down, r.up
	}
	return r.up, r.down
}

// Forward carries what one direction's sender sends over TCP, until it has
// finished, and returns how many bytes those were. The error is nil after FIN,
// when every such byte is in the receiver's queue; otherwise it is an
// *EndError. The FIN itself is not passed on. Closing the connections ends it
// early, and so does a read deadline of the source, after which it may be
// called again.
//
// But for the first few, bytes are taken off the socket only after they were handed on and counted:
// the acknowledgement then wakes the sender, and its next send finds nothing in flight.
func (r *Route) Forward(d Direction) (sum uint64, _ error) {
	if d == Up && r.lost != nil {
		return 0, &EndError{Write: true, Err: r.lost}
	}
	src, dst := r.legs(d)
	flow := &r.p.Flow[d]
	if rest := r.rest[d]; len(rest) > 0 {
		if err := r.hand(d, dst, rest); err != nil {
			return sum, &EndError{Write: true, Err: err}
		}
		r.rest[d] = nil
		sum += uint64(len(rest))
		atomic.AddUint64(&flow.Forwarded, uint64(len(rest)))
	}
	rc, err := src.SyscallConn()
	if err != nil {
		return sum, &EndError{Err: err}
	}
	// First bytes are few, mostly: they are simply read.
	peek, most := 0, fewBytes
	if atomic.LoadUint64(&flow.Forwarded) > 0 {
		peek, most = unix.MSG_PEEK, bufSize
	}
	var buf *[]byte
	defer func() {
		if buf != nil {
			buffers.Put(buf)
		}
	}()
	for {
		var n int
		var rerr error
		err := rc.Read(func(fd uintptr) bool {
			if buf == nil {
				buf = buffers.Get().(*[]byte)
			}
			n, rerr = Receive(int(fd), (*buf)[:most], peek)
			if rerr == unix.EAGAIN {
				buffers.Put(buf)
				buf = nil
				return false
			}
			return true
		})
		if err == nil {
			err = rerr
		}
		if err != nil {
			return sum, &EndError{Err: err}
		}
		if n == 0 {
			return sum, nil
		}
		if err := r.hand(d, dst, (*buf)[:n]); err != nil {
			return sum, &EndError{Write: true, Err: err}
		}
		sum += uint64(n)
		atomic.AddUint64(&flow.Forwarded, uint64(n))
		if peek == 0 {
			peek, most = unix.MSG_PEEK, bufSize
			continue
		}
		if err := discard(src, n); err != nil {
			return sum, &EndError{Err: err}
		}
	}
}

// Take is Forward for an event loop, which must not wait. It carries what is there, if that is a few bytes,
// by way of buf, and returns no error or, after FIN, io.EOF. After ErrWait, Forward has to go on; other errors are
// *EndError. Without ending, less than was asked for counts as all: what comes later is another event
// of an edge-triggered caller's. Take and Forward of one direction don't run at the same time.
func (r *Route) Take(d Direction, ending bool, buf []byte) (sum uint64, _ error) {
	if d == Up && r.lost != nil {
		return 0, &EndError{Write: true, Err: r.lost}
	}
	src, dst := r.legs(d)
	flow := &r.p.Flow[d]
	b := buf[:min(len(buf), fewBytes)]
	for {
		if !r.roomForSure(d, len(b)) {
			return sum, ErrWait
		}
		// As in Forward.
		peek := 0
		if atomic.LoadUint64(&flow.Forwarded) > 0 {
			peek = unix.MSG_PEEK
		}
		var n, m int
		err := withFD(src, func(fd int) (err error) {
			n, err = Receive(fd, b, peek)
			return err
		})
		switch {
		case err == unix.EAGAIN:
			return sum, nil
		case err != nil:
			return sum, &EndError{Err: err}
		case n == 0:
			return sum, io.EOF
		}
		err = withFD(dst, func(fd int) (err error) {
			m, err = Send(fd, b[:n])
			return err
		})
		sum += uint64(m)
		atomic.AddUint64(&flow.Forwarded, uint64(m))
		if peek == 0 && m < n {
			r.rest[d] = append([]byte(nil), b[m:n]...)
		}
		switch {
		case err == unix.EAGAIN, err == unix.ENOMEM:
			return sum, ErrWait
		case err != nil:
			return sum, &EndError{Write: true, Err: err}
		case peek != 0:
			if err := discard(src, m); err != nil {
				return sum, &EndError{Err: err}
			}
		}
		switch {
		case m < n:
			return sum, ErrWait
		case n == len(b): // much, it seems
			return sum, ErrWait
		case !ending:
			return sum, nil
		}
	}
}

// hand writes b, which the verdict redirects into the receiver's queue. There
// must be room first: the kernel would take it in any case.
func (r *Route) hand(d Direction, dst Socket, b []byte) error {
	for len(b) > 0 {
		if !r.roomForSure(d, len(b)) {
			if err := r.waitRoom(d); err != nil {
				return err
			}
		}
		n, err := dst.Write(b)
		b = b[n:]
		if errors.Is(err, unix.ENOMEM) {
			// The kernel's TCP memory is short; a redirect says so instead of waiting.
			r.waits[d].Add(1)
			time.Sleep(5 * time.Millisecond)
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// discard takes n bytes that are there off the socket, without copying them.
func discard(src Socket, n int) error {
	return withFD(src, func(fd int) error {
		for n > 0 {
			m, _, errno := unix.Syscall6(unix.SYS_RECVFROM, uintptr(fd), 0, uintptr(n), unix.MSG_TRUNC|unix.MSG_DONTWAIT, 0, 0)
			if errno == unix.EINTR {
				continue
			}
			if errno != 0 {
				return errno
			}
			if m == 0 {
				return io.ErrUnexpectedEOF
			}
			n -= int(m)
		}
		// The sender may be waiting for this acknowledgement, with less than a
		// segment in its small buffer: delayed, it would come after 40 ms. It is no
		// matter if this doesn't work.
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_QUICKACK, 1)
		return nil
	})
}

// backoff is the waiting between looks at a queue: short naps while the
// receiver is likely to be at work, then timers, which cost no thread.
type backoff struct{ n int }

// nappers bounds the threads that sleep in the kernel.
var nappers = make(chan struct{}, 4)

func (b *backoff) wait() {
	b.n++
	if b.n <= 20 {
		select {
		case nappers <- struct{}{}:
			nap(50 * time.Microsecond)
			<-nappers
			return
		default:
		}
	}
	time.Sleep(time.Duration(min(max(b.n-19, 1), 20)) * time.Millisecond)
}

// look reads what waits for a direction's receiver, in bytes of memory; gone is
// true when that doesn't matter any more.
func (r *Route) look(d Direction) (waiting uint64, gone bool, err error) {
	role := r.receiver(d)
	if atomic.LoadUint32(&r.p.End[role].Gone) != 0 {
		return 0, true, nil
	}
	v, err := r.k.inspect(r.cookie[role], r.addr[role])
	if err != nil {
		return 0, false, err
	}
	return cost(v), v.State == 0 || v.State == unix.BPF_TCP_CLOSE, nil
}

// roomForSure says that n more bytes would be within the limit if nothing had been taken yet,
// and each byte were a message.
func (r *Route) roomForSure(d Direction, n int) bool {
	return (r.sent(d)+uint64(n))*(messageCost+1) <= uint64(r.k.limit())
}

// waitRoom blocks while the receiver's queue is over the limit.
func (r *Route) waitRoom(d Direction) error {
	var b backoff
	for {
		waiting, gone, err := r.look(d)
		if err != nil {
			return err
		}
		if gone || waiting <= uint64(r.k.limit()) {
			return nil
		}
		if b.n == 0 {
			r.waits[d].Add(1)
		}
		b.wait()
		// The owner may have closed the connections meanwhile.
		if err := withFD(r.up, func(int) error { return nil }); err != nil {
			return err
		}
	}
}

// forwarded is the bytes that came over TCP and were written on.
func (r *Route) forwarded(d Direction) uint64 {
	return atomic.LoadUint64(&r.p.Flow[d].Forwarded) - r.kept[d]
}

// sent is the bytes that went to a direction's receiver, give or take a window.
func (r *Route) sent(d Direction) uint64 {
	return atomic.LoadUint64(&r.p.Flow[d].Granted) + r.forwarded(d) + r.added[d]
}

// sentTo is the exact figure, with a view of the sockets.
func (r *Route) sentTo(d Direction, seen map[uint64]view) uint64 {
	return r.bypassed(d, seen) + r.forwarded(d) + r.added[d]
}

// bypassed is what verdicts granted, less what is left of the last window. It
// never goes down; while a window begins it may be one window behind.
func (r *Route) bypassed(d Direction, seen map[uint64]view) uint64 {
	granted := atomic.LoadUint64(&r.p.Flow[d].Granted)
	if r.k.mode != bpf.ShuntModeMODE_WINDOW {
		return granted
	}
	n := uint64(0)
	e := &r.p.End[r.sender(d)]
	if r.left(r.sender(d)) {
		n = granted - uint64(atomic.LoadUint32(&e.Left))
	} else if v, ok := seen[r.cookie[r.sender(d)]]; ok && v.Granted != 0 {
		n = v.Granted - uint64(v.Left)
		if !v.settled {
			n -= min(uint64(r.k.opt.Window), n)
		}
	}
	for {
		high := r.high[d].Load()
		if n <= high {
			return high
		}
		if r.high[d].CompareAndSwap(high, n) {
			return n
		}
	}
}

// left says whether a sender has left the map, and with it what is left of its window is known.
func (r *Route) left(role bpf.ShuntRole) bool {
	e := &r.p.End[role]
	return atomic.LoadUint32(&e.Gone) != 0 || bpf.ShuntOut(atomic.LoadUint32((*uint32)(&e.Out))) == bpf.ShuntOutOUT_LEFT
}

// uncounted says whether sends of a direction pass by every counter.
func (r *Route) uncounted(d Direction) bool {
	return r.k.mode == bpf.ShuntModeMODE_PERMANENT && atomic.LoadUint64(&r.p.Flow[d].Granted) != 0
}

// Stats reads the counters.
func (r *Route) Stats() RouteStats {
	if s := r.final.Load(); s != nil {
		return *s
	}
	seen, _ := r.k.survey(surveyAge)
	return r.stats(seen)
}

func (r *Route) stats(seen map[uint64]view) (s RouteStats) {
	for _, d := range []Direction{Up, Down} {
		f := &r.p.Flow[d]
		s[d] = DirectionStats{
			Bypassed:    r.bypassed(d, seen),
			Uncounted:   r.uncounted(d),
			Forwarded:   r.forwarded(d),
			VerdictRuns: atomic.LoadUint64(&f.Runs),
			Passed:      atomic.LoadUint64(&f.Passed),
			Waits:       r.waits[d].Load(),
			Queued:      uint64(seen[r.cookie[r.receiver(d)]].Queued),
			Direct:      atomic.LoadUint32(&f.Direct) != 0,
		}
	}
	return s
}

// Close ends the route after both connections were closed, and returns the
// final counters. The application's sockets leave the map when they are closed.
func (r *Route) Close() RouteStats {
	k := r.k
	seen := map[uint64]view{}
	if k.mode == bpf.ShuntModeMODE_WINDOW {
		for _, d := range []Direction{Up, Down} {
			r.settle(d, seen)
		}
	}
	s := r.stats(seen)
	r.final.Store(&s)
	k.mu.Lock()
	delete(k.routes, r)
	delete(k.fresh, r)
	if k.pairs != nil {
		k.giveBack(r.slot, false)
	}
	k.mu.Unlock()
	return s
}

// settle reads the rest of a living sender's window. The sender has finished, or meets a closed connection.
func (r *Route) settle(d Direction, seen map[uint64]view) {
	role := r.sender(d)
	if r.left(role) {
		return // it said so itself
	}
	f := &r.p.Flow[d]
	for range 4 {
		granted := atomic.LoadUint64(&f.Granted)
		v, err := r.k.inspect(r.cookie[role], r.addr[role])
		if err != nil || v.State == 0 || v.Member == 0 {
			return
		}
		if granted == atomic.LoadUint64(&f.Granted) {
			v.Granted = granted
			seen[r.cookie[role]] = view{v, true}
			return
		}
	}
}
