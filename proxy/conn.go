package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"shunt/splice"
)

// state is where a connection is in its life; see the package comment.
type state uint8

const (
	stateAccepted state = iota
	stateDialling
	stateCopying
	stateBypassed
	stateHalfClosed
	stateDraining
	stateClosed
)

// String returns the word that logs and the admin endpoint use.
func (s state) String() string {
	return [...]string{"accepted", "dialling", "copying", "bypassed", "half-closed", "draining", "closed"}[s]
}

// flowState is who looks after one direction.
type flowState uint8

const (
	flowMoving flowState = iota // a goroutine
	flowParked                  // the parking; nothing moves
	flowLooped                  // the event loop
	flowEnded                   // nobody: the end was passed on
)

// leg is one of a connection's two sockets.
type leg struct {
	sock    Stream
	sentFIN atomic.Bool                   // we finished sending on it
	failed  atomic.Pointer[syscall.Errno] // what the first failed write on it said
	dead    bool                          // the peer reset it or is lost; guarded by conn.mu
}

// flow is one direction.
type flow struct {
	copied atomic.Uint64 // bytes written to the far leg by the copy
	state  flowState     // guarded by conn.mu
	over   bool          // its sender has finished; guarded by conn.mu
	finned bool          // its sender's FIN was passed on; guarded by conn.mu

	// These belong to the goroutine that moves the direction.
	parkedOnce bool
	plain      bool // never splice(2): bytes come beside TCP

	// The event loop's, and then the goroutine's.
	turns   uint8
	resting bool   // counted by tidy; guarded by conn.mu
	rest    []byte // taken from the source, and still to be written
}

// conn is one proxied connection. One goroutine moves each direction, or none
// while it is parked or the event loop's; whoever ends the second one closes the connection.
type conn struct {
	id      uint64
	ticket  uint64 // its place in the listener's order
	l       *listener
	at      *endpoint // the upstream address, once dialled; nil where a DialFunc connects; guarded by mu
	start   time.Time
	peer    *credentials  // of a UNIX client, for the access log
	reason  splice.Reason // why it is copied; set before the legs are connected
	head    *head         // nil without PROXY headers
	dialled time.Duration // how long connecting the upstream took
	legs    [2]leg        // client's, upstream's: the source of direction d is legs[d], its destination legs[1-d]
	flows   [2]flow       // by splice.Direction

	// What express leaves to serve.
	cand    Candidate
	claimed bool
	begun   *attempt

	left bool // the event loop, for good; guarded by mu

	settled atomic.Bool

	mu     sync.Mutex
	state  state
	killed bool
	closed bool
	cause  string
	err    error              // what broke it
	cancel context.CancelFunc // of the dial, while it runs
	stop   chan struct{}      // closed by kill; made when first asked for
	route  Route
	final  *splice.RouteStats // set when the route is closed

	// The watch for timeouts; guarded by mu.
	timer    *time.Timer
	lastMove time.Time
	seen     sample
}

func (c *conn) down() Stream { return c.legs[0].sock }

// serve is an accepted connection's life; one direction gets a worker of its own.
func (c *conn) serve() {
	if !c.connected() {
		return
	}
	switch c.l.cfg.Way {
	case OnlyUp:
		c.move(splice.Up, true)
	case OnlyDown:
		c.move(splice.Down, true)
	default:
		c.l.srv.workers.start(job{c: c, moves: true, d: splice.Down, fresh: true})
		c.move(splice.Up, true)
	}
}

// connected gets the connection as far as that its two directions can start.
func (c *conn) connected() bool {
	defer c.l.order.leave(c.ticket)
	if c.l.pool.refuses() {
		c.mu.Lock()
		c.blame(causeNoUpstream)
		c.mu.Unlock()
		c.abandon()
		return false
	}
	if !c.claimed {
		c.cand, c.claimed = c.claim(), true
	}
	cand := c.cand
	c.cand = nil
	var up Stream
	var err error
	if c.l.needsHead() {
		if c.l.cfg.ProxyProtocol.Accept {
			c.l.order.leave(c.ticket) // the header can take any time
		}
		err = c.readHead()
	}
	if err == nil {
		up, err = c.dial(cand)
	}
	if err != nil {
		if cand != nil {
			cand.Release()
		}
		c.abandon()
		return false
	}
	return c.begin(cand, up)
}

// begin goes on with both legs connected; false: the connection was killed.
func (c *conn) begin(cand Candidate, up Stream) bool {
	c.legs[1].sock = up
	route := c.pair(cand)
	c.mu.Lock()
	c.route = route
	if c.killed { // during Pair: kill knew of one leg at most
		c.mu.Unlock()
		reset(up)
		c.abandon()
		return false
	}
	c.state = stateCopying
	if route != nil {
		c.state = stateBypassed
	}
	c.lastMove = time.Now()
	c.armLocked()
	for _, d := range []splice.Direction{splice.Up, splice.Down} {
		if !c.l.cfg.Way.carries(d) {
			c.flows[d].state = flowEnded
		}
	}
	c.mu.Unlock()
	if f := c.l.cfg.Trace.Started; f != nil {
		f(c.id, c.down(), up, c.reason)
	}
	return true
}

// settle does to the sockets what a connection needs that lasts or carries much, once.
// Both directions call it, when they have been silent for a while or moved some bytes.
func (c *conn) settle() {
	if c.settled.Load() || !c.settled.CompareAndSwap(false, true) {
		return
	}
	up := c.legs[1].sock
	if t := tcpOf(up); t != nil && ownKeepAlive {
		raw, err := t.SyscallConn()
		if err == nil {
			err = c.l.cfg.KeepAlive.Set(raw)
		}
		if err != nil {
			c.l.log.Debug().Uint64("conn", c.id).Err(err).Msg("no keepalive on the upstream's leg")
		}
	}
	if c.route == nil {
		boundQueues(c.down())
		boundQueues(up)
	}
}

// pair completes the bypass, where there is a candidate and both legs are TCP.
// Either way the upstream has got what goes ahead.
func (c *conn) pair(cand Candidate) Route {
	var route Route
	if cand != nil {
		up := c.legs[1].sock
		if c.reason = notTCP(up); c.reason != "" {
			cand.Release()
		} else {
			route, c.reason = cand.Pair(tcpOf(up), c.ahead())
		}
		if route == nil {
			c.l.declined(c.reason)
		}
	}
	if route == nil {
		c.sendHead()
	}
	return route
}

// claim asks the bypass for the connection.
func (c *conn) claim() Candidate {
	l := c.l
	if l.noBypass != "" {
		c.reason = l.noBypass
		l.declined(c.reason)
		return nil
	}
	down := tcpOf(c.down())
	if down == nil {
		c.reason = notTCP(c.down())
		l.declined(c.reason)
		return nil
	}
	cand, reason := l.srv.bypass.Claim(down)
	if cand == nil {
		c.reason = reason
		l.declined(reason)
	}
	return cand
}

// dial connects the upstream. On an error the cause is set, and nothing is
// left over but the client's leg.
func (c *conn) dial(cand Candidate) (Stream, error) {
	ctx, cancel := context.WithCancel(context.WithValue(context.Background(), connKey{}, c))
	defer cancel()
	c.mu.Lock()
	c.state, c.cancel = stateDialling, cancel
	killed := c.killed
	c.mu.Unlock()
	if killed {
		return nil, net.ErrClosed
	}
	var control ControlFunc
	if cand != nil {
		control = func(network, address string, raw syscall.RawConn) error {
			c.register(cand, network, address, raw)
			return nil
		}
	}
	if c.l.cfg.Transparent {
		control = c.fromClient(control)
	}
	stop := watchLeave(c.down(), cancel)
	begin := time.Now()
	up, at, err := c.connect(ctx, control)
	left := stop()

	c.mu.Lock()
	defer c.mu.Unlock()
	c.dialled = time.Since(begin)
	c.cancel, c.at = nil, at
	if err == nil && (left || c.killed) {
		reset(up)
		err = &dialError{dialCanceled, net.ErrClosed}
	}
	if err == nil {
		return up, nil
	}
	kind := dialOther
	var de *dialError
	if errors.As(err, &de) {
		kind = de.kind
	}
	cause := causeOfDial(kind)
	if left {
		cause, kind = causeClientRST, dialCanceled
	}
	if kind == dialNone {
		c.blame(causeNoUpstream)
		return nil, err
	}
	c.blame(cause)
	c.err = err
	c.l.dialFailed(kind)
	if kind != dialCanceled {
		c.l.srv.dialWarn(c.l, kind, err)
	}
	return nil, err
}

// register tells the bypass of the upstream's socket.
func (c *conn) register(cand Candidate, network, address string, raw syscall.RawConn) {
	if err := cand.Control(network, address, raw); err != nil {
		// Nothing fails because the bypass isn't there: Pair will decline.
		c.l.log.Debug().Uint64("conn", c.id).Err(err).Msg("upstream not registered for the bypass")
	}
}

// connect gets the connection its upstream.
func (c *conn) connect(ctx context.Context, control ControlFunc) (Stream, *endpoint, error) {
	l := c.l
	if l.cfg.DialFunc != nil {
		up, err := l.cfg.DialFunc(ctx, c.id, c.down(), control)
		if err != nil {
			if ctx.Err() != nil {
				err = errors.Join(ctx.Err(), err)
			}
			return nil, nil, &dialError{dialKind(err), err}
		}
		return up, nil, nil
	}
	if l.original {
		up, err := c.dialOriginal(ctx, control)
		return up, nil, err
	}
	begun := c.begun
	c.begun = nil
	return l.dial(ctx, c.chooser(), control, begun)
}

// chooser is who is told apart by the choice of an upstream; invalid where that doesn't matter.
func (c *conn) chooser() netip.Addr {
	if c.l.cfg.Balance == BalanceSourceHash {
		return c.source().Addr()
	}
	return netip.Addr{}
}

// upstream is the configured upstream that the connection went to; before that, all of them.
func (c *conn) upstream() string {
	if c.at != nil {
		return c.at.upstream
	}
	return c.l.upstream
}

// abandon ends a connection whose directions never started.
func (c *conn) abandon() {
	if c.begun != nil {
		c.begun.drop()
		c.begun = nil
	}
	if c.cand != nil {
		c.cand.Release()
		c.cand = nil
	}
	c.mu.Lock()
	quiet := c.l.cfg.QuietEnds && !c.killed
	c.mu.Unlock()
	if quiet {
		quietClose(c.down())
	} else {
		reset(c.down())
	}
	c.mu.Lock()
	c.flows[0].state, c.flows[1].state = flowEnded, flowEnded
	c.mu.Unlock()
	c.closeIfEnded()
}

// move looks after one direction until it has ended or is parked. fresh says
// that the connection has just begun.
func (c *conn) move(d splice.Direction, fresh bool) {
	var end ending
	var wrote bool // the destination's end, not the source's
	var err error
	if c.route != nil {
		var parked bool
		parked, err = c.forward(d, fresh)
		if parked {
			return
		}
		end = endOf(err)
		var ee *splice.EndError
		if errors.As(err, &ee) {
			wrote = ee.Write
			if end == endFIN {
				end = endOdd
			}
		}
	} else if err = c.lostHead(d); err != nil {
		wrote, end = true, endOf(err)
	} else if err = c.writeRest(d); err != nil {
		wrote, end = true, endOf(err)
	} else {
		var parked bool
		parked, wrote, err = c.copy(d, fresh)
		if parked {
			return
		}
		end = endOf(err)
	}
	c.conclude(d, end, wrote, err)
}

// writeRest writes what the event loop took and couldn't write.
func (c *conn) writeRest(d splice.Direction) error {
	f := &c.flows[d]
	if len(f.rest) == 0 {
		return nil
	}
	n, err := c.legs[1-d].sock.Write(f.rest)
	f.copied.Add(uint64(n))
	f.rest = nil
	return err
}

// conclude is what follows the end of direction d: its source's or, with wrote, its destination's.
func (c *conn) conclude(d splice.Direction, end ending, wrote bool, err error) {
	src, dst := &c.legs[d], &c.legs[1-d]
	switch {
	case end == endOurs:
	case wrote:
		dst.noteFailed(err)
		c.destinationDied(d, end, err)
	case end == endFIN:
		fin, rst := c.judgeEOF(src)
		if fin {
			c.finish(d)
		}
		if rst {
			c.sourceDied(d, endReset, nil)
		}
	default:
		c.sourceDied(d, end, err)
	}
	c.ended(d)
}

// ended closes the connection if the other direction has ended, too.
func (c *conn) ended(d splice.Direction) {
	c.mu.Lock()
	c.flows[d].state = flowEnded
	c.mu.Unlock()
	c.closeIfEnded()
}

// forward carries what direction d sends over TCP, until it is parked or has ended.
func (c *conn) forward(d splice.Direction, fresh bool) (parked bool, err error) {
	src := c.legs[d].sock
	period := quietPeriod
	if fresh {
		period = freshPeriod
	}
	for {
		src.SetReadDeadline(time.Now().Add(period))
		n, err := c.route.Forward(d)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return false, err
		}
		period = quietPeriod
		c.settle()
		if n > 0 {
			continue
		}
		if c.park(d) {
			return true, nil
		}
		// It waits here then; a closed socket ends that too.
		src.SetReadDeadline(time.Time{})
		if _, err := c.route.Forward(d); !errors.Is(err, os.ErrDeadlineExceeded) {
			return false, err
		}
	}
}

// finish does with d's FIN, after every byte, what the policies of the two legs say.
func (c *conn) finish(d splice.Direction) {
	from, to := c.l.cfg.Down, c.l.cfg.Up
	if d == splice.Down {
		from, to = to, from
	}
	if f := c.l.cfg.Trace.Finished; f != nil {
		f(c.id, d)
	}
	switch {
	case from.IgnoreFIN:
	case to.OnFIN == KeepFIN:
		c.over(d, causeOf(d == splice.Down, endFIN))
	case to.OnFIN == CloseOnFIN:
		c.passFIN(d)
		c.kill("", false)
	default:
		c.passFIN(d)
	}
}

// passFIN passes d's FIN on.
func (c *conn) passFIN(d splice.Direction) {
	c.over(d, causeOf(d == splice.Down, endFIN))
	dst := &c.legs[1-d]
	dst.sentFIN.Store(true)
	// An error means that dst is dead already; its reader will find that out.
	closeWrite(dst.sock)
	c.mu.Lock()
	c.flows[d].finned = true
	orphaned := c.legs[d].dead
	c.mu.Unlock()
	if orphaned {
		// The source took no more bytes while we were reading its last ones; the
		// other direction's goroutine left the reset to us.
		c.resetAfterDrain(1 - d)
	}
}

// sourceDied ends the connection after d's source has: what it sent is
// delivered first.
func (c *conn) sourceDied(d splice.Direction, end ending, err error) {
	c.died(d, end, err)
	c.over(d, "")
	c.resetAfterDrain(1 - d)
}

// destinationDied is called when d's destination takes no more bytes. What
// it sent before may still be on its way to d's source, so the source must
// not be reset yet; it is read on, into nothing, for it might otherwise never
// get to reading.
func (c *conn) destinationDied(d splice.Direction, end ending, err error) {
	c.died(1-d, end, err)
	c.over(d, "")
	c.mu.Lock()
	finned := c.flows[1-d].finned
	c.mu.Unlock()
	if finned || c.l.cfg.Way != BothWays || c.l.policy(1-d).IgnoreFIN {
		// The other direction is over; nobody else will do it.
		go c.discard(d)
		c.resetAfterDrain(d)
		return
	}
	c.discard(d)
}

// died records that a leg is dead.
func (c *conn) died(which splice.Direction, end ending, err error) {
	c.mu.Lock()
	c.legs[which].dead = true
	if c.err == nil {
		c.err = err
	}
	c.blame(causeOf(which == splice.Down, end))
	c.mu.Unlock()
	if end == endOdd {
		if n, ok := c.l.oddLog.allow(); ok {
			suppressed(c.l.log.Warn(), n).Uint64("conn", c.id).Err(err).Msg("connection ended by an unexpected error")
		}
	}
}

// over says that d's sender has finished. cause is the FIN's, or empty.
func (c *conn) over(d splice.Direction, cause string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.flows[d].over = true
	if cause != "" && c.cause == "" {
		c.cause = cause
	}
	if c.state == stateCopying || c.state == stateBypassed {
		c.state = stateHalfClosed
	}
	c.lastMove = time.Now()
	c.armLocked()
}

// blame sets the cause; the first that isn't a plain FIN stays. c.mu is held.
func (c *conn) blame(cause string) {
	if c.cause == "" || c.cause == causeClientFIN || c.cause == causeServerFIN {
		c.cause = cause
	}
}

// resetAfterDrain resets the leg, and with it the whole connection, when its
// peer has acknowledged everything. The half-open watch bounds the wait.
func (c *conn) resetAfterDrain(which splice.Direction) {
	to := &c.legs[which]
	if !resetKeepsBytes && c.flows[1-which].copied.Load() > 0 {
		_ = to.sock.CloseWrite()
		c.kill("", false)
		return
	}
	stop := c.stopped()
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		n, ok := unacked(to.sock)
		if !ok || n == 0 {
			break
		}
		if s, ok := readTCPStats(to.sock); !ok || s.state == tcpClosed {
			break
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
			continue
		case <-stop:
			t.Stop()
			return
		}
	}
	c.kill("", true)
}

// discard reads d's source into nothing until it ends.
func (c *conn) discard(d splice.Direction) {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	c.legs[d].sock.SetReadDeadline(time.Time{})
	for {
		if _, err := c.legs[d].sock.Read(*buf); err != nil {
			return
		}
	}
}

// judgeEOF says what an end of file on from means. After a reset whose error
// a write on the same socket has already taken, read says end of file too; and
// a peer that finished and then reset wants both passed on.
func (c *conn) judgeEOF(from *leg) (fin, rst bool) {
	closed, ok := isClosed(from.sock)
	// We didn't finish on this leg ourselves, so it isn't simply over: the order
	// of these two matters.
	if !ok || !closed || from.sentFIN.Load() {
		return true, false
	}
	if err := takeError(from.sock); err != nil {
		// The kernel says EPIPE for a reset that came after the FIN.
		return errors.Is(err, syscall.EPIPE), true
	}
	// A write has the error, or will have noted it in a moment.
	for range 20 {
		if e := from.failed.Load(); e != nil {
			return *e == syscall.EPIPE, true
		}
		select {
		case <-c.stopped():
			return false, true
		case <-time.After(time.Millisecond):
		}
	}
	return false, true
}

func (l *leg) noteFailed(err error) {
	var e syscall.Errno
	if errors.As(err, &e) {
		l.failed.CompareAndSwap(nil, &e)
	}
}

// stopped returns the channel that kill closes.
func (c *conn) stopped() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stop == nil {
		c.stop = make(chan struct{})
		if c.killed {
			close(c.stop)
		}
	}
	return c.stop
}

// kill closes both legs at once, with a reset if asked for. cause may be
// empty if it is known. Goroutines that are busy with the connection see
// closed sockets and end; parked directions end here.
func (c *conn) kill(cause string, rst bool) {
	c.mu.Lock()
	if c.killed || c.closed {
		c.mu.Unlock()
		return
	}
	c.killed = true
	if cause != "" {
		c.cause = cause
	}
	if c.stop != nil {
		close(c.stop)
	}
	if c.cancel != nil {
		c.cancel()
	}
	for i := range c.legs {
		if i == 1 && c.state < stateCopying {
			break // still serve's
		}
		if rst {
			reset(c.legs[i].sock)
		} else {
			c.legs[i].sock.Close()
		}
	}
	for d := range c.flows {
		if s := c.flows[d].state; s == flowParked || s == flowLooped {
			c.flows[d].state = flowEnded
			if s == flowParked {
				c.l.srv.tidy.resting.Add(-1)
			}
			c.unrest(d)
		}
	}
	c.mu.Unlock()
	c.closeIfEnded()
}

// reset closes s so that its peer sees a reset, where it can.
func reset(s Stream) {
	if t, ok := s.(interface{ SetLinger(int) error }); ok {
		t.SetLinger(0)
	}
	s.Close()
}

// quietClose closes s so that its peer sees an end. Unread bytes would make a reset of it.
func quietClose(s Stream) {
	if tcpOf(s) != nil && s.CloseWrite() == nil {
		s.SetReadDeadline(time.Now().Add(quietRead))
		io.CopyN(io.Discard, s, bufferSize)
	}
	s.Close()
}

// park hands direction d to the parking; false: it has to wait itself.
func (c *conn) park(d splice.Direction) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.killed {
		return false
	}
	f := &c.flows[d]
	// wake takes the mutex, so it can't come between these.
	if c.l.srv.parking.park(c.legs[d].sock, c.id, d, f.parkedOnce) != nil {
		return false
	}
	f.parkedOnce = true
	f.state = flowParked
	c.l.srv.tidy.rest()
	return true
}

// wake takes direction d out of the parking.
func (c *conn) wake(d splice.Direction) {
	c.mu.Lock()
	parked := c.flows[d].state == flowParked
	if parked {
		c.flows[d].state = flowMoving
		c.l.srv.tidy.resting.Add(-1)
	}
	c.mu.Unlock()
	if parked {
		c.l.srv.workers.start(job{c: c, moves: true, d: d})
	}
}

// unrest is called for a direction of the loop's that isn't any more. c.mu is held.
func (c *conn) unrest(d int) {
	if c.flows[d].resting {
		c.flows[d].resting = false
		c.l.srv.tidy.resting.Add(-1)
	}
}

// closeIfEnded closes the connection once both directions have ended.
func (c *conn) closeIfEnded() {
	c.mu.Lock()
	if c.closed || c.flows[0].state != flowEnded || c.flows[1].state != flowEnded {
		c.mu.Unlock()
		return
	}
	c.closed = true
	c.state = stateClosed
	if c.timer != nil {
		c.timer.Stop()
	}
	for i := range c.legs {
		if t := c.legs[i].sock; t != nil {
			t.Close()
		}
	}
	if c.route != nil {
		s := c.route.Close()
		c.final = &s
	}
	c.mu.Unlock()
	c.l.finished(c)
}

// counts returns the connection's bytes and the bypass's counters.
func (c *conn) counts() (n counts) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.countsLocked()
}

func (c *conn) countsLocked() (n counts) {
	var s splice.RouteStats
	switch {
	case c.final != nil:
		s = *c.final
	case c.route != nil:
		s = c.route.Stats()
	}
	for d := range n.copied {
		n.copied[d] = c.flows[d].copied.Load() + s[d].Forwarded
		n.bypassed[d] = s[d].Bypassed
		n.uncounted[d] = s[d].Uncounted
		n.runs += s[d].VerdictRuns
		n.waits += s[d].Waits
		n.queued[d] = s[d].Queued
		n.direct[d] = s[d].Direct
	}
	return n
}

// addrOf returns a's address with v4-mapped ones unmapped.
func addrOf(a net.Addr) netip.AddrPort {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	p := t.AddrPort()
	return netip.AddrPortFrom(p.Addr().Unmap(), p.Port())
}

// addrString is how logs name an address. A UNIX socket without a name, as a
// client's are, is "unix:".
func addrString(a net.Addr) string {
	if p := addrOf(a); p.IsValid() {
		return p.String()
	}
	if u, ok := a.(*net.UnixAddr); ok {
		if u.Name == "@" {
			return "unix:"
		}
		return "unix:" + u.Name
	}
	return fmt.Sprint(a)
}
