package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rs/zerolog"

	"shunt/splice"
)

// listener is a Listener at work.
type listener struct {
	srv      *Server
	cfg      Listener
	log      zerolog.Logger
	given    net.Listener // an open listening socket that it takes over, or nil
	ln       atomic.Pointer[net.Listener]
	fast     atomic.Pointer[accepter] // accepts in ln's place, or nil
	file     *socketFile              // of a UNIX socket
	withdraw func()
	upstream string        // the configured ones
	pool     *pool         // nil where a DialFunc connects, and with original
	original bool          // the upstream is OriginalDst
	noBypass splice.Reason // why no connection is bypassed, or empty
	slots    *slots
	gate     *gate
	order    *order
	limitLog rate
	dialLog  rate
	oddLog   rate
	headLog  rate
	closing  chan struct{}
	closed   sync.Once
	loop     chan struct{} // closed when accept has returned; nil before it is started
	started  atomic.Bool
	pings    chan chan struct{} // the accept loop closes what it is sent
	past     *past              // shared with former listeners of the name

	// adjustKeepAlive: accepted sockets don't have the listener's keepalive yet.
	adjustKeepAlive bool
}

// past is what was of all listeners of one name, without the live
// connections; guarded by Server.mu.
type past struct {
	connections uint64
	live        int
	counts      counts
	declined    map[splice.Reason]uint64
	dialErrors  map[string]uint64
	ends        map[string]uint64
	refused     map[string]*refused // counts by itself
	high        counts              // the highest seen: counters never go back
	gone        bool                // no listener has the name any more
}

func newPast() *past {
	p := &past{
		declined:   map[splice.Reason]uint64{},
		dialErrors: map[string]uint64{},
		ends:       map[string]uint64{},
		refused:    map[string]*refused{},
	}
	for _, r := range refusals {
		p.refused[r] = &refused{}
	}
	return p
}

func newListener(s *Server, cfg Listener) *listener {
	l := &listener{
		srv: s, cfg: cfg, closing: make(chan struct{}), pings: make(chan chan struct{}, 1),
		log:  s.log.With().Str("listener", cfg.Name).Logger(),
		gate: newGate(&cfg), order: newOrder(), past: newPast(),
	}
	l.upstream = cfg.Upstream
	onlyUnix := false
	if cfg.DialFunc == nil {
		us, _ := cfg.parseUpstreams() // Validate has seen the error
		l.upstream = textOf(us)
		if l.original = us[0].kind == upstreamOriginal; !l.original {
			l.pool = newPool(l, us)
		}
		onlyUnix = !slices.ContainsFunc(us, func(u Upstream) bool { return !u.IsUnix() })
	}
	switch {
	case cfg.Bypass == BypassOff || cfg.Tap != nil || cfg.Way != BothWays:
		l.noBypass = splice.ReasonOff
	case cfg.NoBypass != "":
		l.noBypass = cfg.NoBypass
	case onlyUnix, cfg.ListenFunc == nil && strings.HasPrefix(cfg.Listen, "unix:"):
		l.noBypass = splice.ReasonUnix
	case s.bypass == nil:
		l.noBypass = splice.ReasonUnsupported
	case s.cfg.FIONREADWrong && cfg.Bypass == BypassAuto:
		l.noBypass = splice.ReasonFIONREAD
	case s.cfg.KernelFault && cfg.Bypass == BypassAuto:
		l.noBypass = splice.ReasonKernelFault
	}
	return l
}

// open listens, and announces the listener to the bypass.
func (l *listener) open() error {
	ln := l.given
	if ln == nil {
		listen := l.cfg.ListenFunc
		if listen == nil {
			listen = l.listen
		}
		var err error
		if ln, err = listen(context.Background()); err != nil {
			return err
		}
	}
	if l.cfg.Transparent {
		if err := openTransparent(ln); err != nil {
			if l.given == nil {
				ln.Close()
			}
			return fmt.Errorf("transparent: %w", err)
		}
	}
	tcp, _ := ln.(*net.TCPListener)
	if l.noBypass == "" && tcp == nil {
		l.noBypass = splice.ReasonNotTCP
		if _, ok := ln.(*net.UnixListener); ok {
			l.noBypass = splice.ReasonUnix
		}
	}
	if l.noBypass == "" {
		withdraw, err := l.srv.bypass.Listen(tcp)
		if err != nil {
			l.log.Warn().Err(err).Msg("bypass off for this listener: it can't be announced")
			l.noBypass = splice.ReasonError
		} else {
			l.withdraw = withdraw
		}
	}
	l.ln.Store(&ln)
	return nil
}

// start begins to accept.
func (l *listener) start() {
	ln := *l.ln.Load()
	if l.pool != nil {
		l.pool.start()
	}
	e := l.log.Info().Str("addr", addrString(ln.Addr())).Str("upstream", l.upstream).Bool("bypass", l.noBypass == "")
	if l.noBypass != "" {
		e = e.Str("reason", string(l.noBypass))
		if l.noBypass == splice.ReasonUnsupported && l.srv.cfg.BypassUnsupported != "" {
			e = e.Str("unsupported", l.srv.cfg.BypassUnsupported)
		}
	}
	e.Msg("listening")
	if f := l.cfg.Trace.Listening; f != nil {
		f(ln.Addr())
	}
	l.loop = make(chan struct{})
	l.fast.Store(l.newAccepter(ln))
	l.started.Store(true)
	go l.accept()
}

// listen is the ListenFunc of a listener without one.
func (l *listener) listen(ctx context.Context) (net.Listener, error) {
	if name, ok, err := ParseUnix(l.cfg.Listen); err != nil {
		return nil, err
	} else if ok {
		ln, file, err := listenUnix(name, l.cfg.Unix)
		if err != nil { // and no Listener that holds a nil
			return nil, err
		}
		l.file = file
		return ln, nil
	}
	var lc net.ListenConfig
	// The bypass doesn't take MPTCP, and a plain connection is what was asked for.
	lc.SetMultipathTCP(false)
	if ownKeepAlive {
		// Accepted sockets inherit it.
		lc.KeepAlive = -1
		lc.Control = func(_, _ string, raw syscall.RawConn) error { return l.cfg.KeepAlive.Set(raw) }
	} else {
		l.cfg.KeepAlive.apply(&lc.KeepAlive, &lc.KeepAliveConfig)
	}
	ln, err := lc.Listen(ctx, "tcp", l.cfg.Listen)
	if err != nil {
		return nil, listenError(l.cfg.Listen, err)
	}
	return ln, nil
}

// policy returns the policy of the leg that sends in direction d.
func (l *listener) policy(d splice.Direction) LegPolicy {
	if d == splice.Up {
		return l.cfg.Down
	}
	return l.cfg.Up
}

// close stops accepting and closes the listening socket; it returns when the
// accept loop has, if it ran.
func (l *listener) close() { l.end(false) }

// retire stops accepting, and leaves the listening socket, its backlog
// included, to the listener that takes it over and has announced it.
func (l *listener) retire() { l.end(true) }

func (l *listener) end(keep bool) {
	l.closed.Do(func() {
		close(l.closing)
		if l.pool != nil {
			l.pool.close()
		}
		p := l.ln.Load()
		if p == nil {
			return
		}
		ln := *p
		if !keep {
			l.unannounce()
			if err := l.file.remove(); err != nil {
				l.log.Info().Err(err).Msg("the socket's file stays")
			}
			ln.Close()
			l.fast.Load().close()
		} else {
			l.interrupt(true)
		}
		if l.loop != nil {
			<-l.loop
		}
		if keep {
			l.interrupt(false)
			l.fast.Load().close()
			l.unannounce()
		}
	})
}

func (l *listener) unannounce() {
	if l.withdraw != nil {
		l.withdraw()
		l.withdraw = nil
	}
}

// interrupt lets Accept return at once, or wait again.
func (l *listener) interrupt(now bool) {
	at := time.Time{}
	if now {
		at = time.Unix(1, 0)
	}
	if a := l.fast.Load(); a != nil {
		a.file.SetDeadline(at)
	} else if d, ok := (*l.ln.Load()).(interface{ SetDeadline(time.Time) error }); ok {
		d.SetDeadline(at)
	}
}

// accept is the accept loop. At the limit of connections it doesn't accept:
// the next ones wait in the backlog until one ends.
func (l *listener) accept() {
	defer close(l.loop)
	ln := *l.ln.Load()
	fast := l.fast.Load()
	var wait time.Duration
	for {
		for waited := false; !l.slots.try(waited); waited = true {
			select {
			case <-l.slots.freed:
			case p := <-l.pings:
				close(p)
			case <-l.closing:
				return
			}
		}
		var down Stream
		var err error
		if fast != nil {
			down, err = fast.accept()
		} else {
			down, err = l.acceptStream(ln)
		}
		if err == nil {
			wait = 0
			c := l.admit(down)
			if c == nil {
				l.slots.give()
				continue
			}
			if l.cfg.Once {
				ln.Close()
				fast.close()
			}
			c.ticket = l.order.enter()
			if fast != nil && c.express() {
				if l.cfg.Once {
					return
				}
				continue
			}
			l.srv.workers.start(job{c: c})
			if l.cfg.Once {
				return
			}
			// In a burst let those that are here get on first: goroutines that
			// pile up in their dials cost memory that idle connections don't.
			runtime.Gosched()
			continue
		}
		l.slots.give()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if l.interrupted() {
				return
			}
			continue
		}
		l.srv.acceptErrors.Add(1)
		msg := "accept failed"
		if isLimit(err) {
			msg = "accept waits for a free descriptor"
		}
		l.srv.limitWarn(l, msg, err)
		wait = min(max(2*wait, 5*time.Millisecond), 500*time.Millisecond)
		select {
		case <-time.After(wait):
		case p := <-l.pings:
			close(p)
		case <-l.closing:
			return
		}
	}
}

// acceptStream accepts by package net.
func (l *listener) acceptStream(ln net.Listener) (Stream, error) {
	s, err := ln.Accept()
	if err != nil {
		return nil, err
	}
	if t, ok := s.(*net.TCPConn); l.adjustKeepAlive && ok {
		l.cfg.KeepAlive.set(t)
	}
	return s.(Stream), nil // as ListenFunc promises
}

// interrupted is the accept loop's answer to interrupt: it ends, or answers a
// ping and goes on.
func (l *listener) interrupted() (end bool) {
	// Before it looks for why: what comes later interrupts again.
	l.interrupt(false)
	select {
	case <-l.closing:
		return true
	case p := <-l.pings:
		close(p)
	default:
	}
	return false
}

// admit makes an accepted socket a connection; nil: the peer is refused, and closed.
func (l *listener) admit(down Stream) *conn {
	if admit := l.cfg.Admit; admit != nil {
		if err := admit(down); err != nil {
			l.refuse(down, refusedACL, err)
			return nil
		}
	}
	if why := l.gate.enter(down); why != "" {
		l.refuse(down, why, nil)
		return nil
	}
	c := l.add(down)
	if c == nil {
		l.gate.leave(down)
		l.refuse(down, refusedLimit, nil)
	}
	return c
}

// refused counts and logs the peers that are refused for one reason.
type refused struct {
	count atomic.Uint64
	log   rate
}

// refuse closes a peer that is no connection. Nothing of it is left: a client's
// socket that the bypass has enrolled is dropped by it when nobody claims it.
func (l *listener) refuse(down Stream, why string, err error) {
	r := l.past.refused[why]
	r.count.Add(1)
	if err != nil { // Admit has said it
		l.log.Debug().Err(err).Str("down", addrString(down.RemoteAddr())).Msg("peer refused")
	} else if n, ok := r.log.allow(); ok {
		suppressed(l.log.Info(), n).Str("reason", why).Str("down", addrString(down.RemoteAddr())).Msg("peer refused")
	}
	if l.cfg.QuietEnds {
		go quietClose(down)
	} else {
		reset(down)
	}
}

// add makes an accepted socket a connection, unless there are too many.
func (l *listener) add(down Stream) *conn {
	s := l.srv
	c := &conn{l: l, start: time.Now()}
	c.legs[0].sock = down
	if s.accessLog.Load() {
		c.peer = peerOf(down)
	}
	s.mu.Lock()
	if n := s.maxConnections; n > 0 && len(s.conns) >= n {
		s.mu.Unlock()
		return nil
	}
	s.live.Add(1)
	c.id = s.lastID.Add(1)
	s.conns[c.id] = c
	l.past.connections++
	l.past.live++
	s.mu.Unlock()
	if f := l.cfg.Trace.Accepted; f != nil {
		f(c.id, down)
	}
	return c
}

// logsEnds says that finished writes something.
func (l *listener) logsEnds() bool {
	return l.srv.accessLog.Load() || l.log.GetLevel() <= zerolog.DebugLevel && zerolog.GlobalLevel() <= zerolog.DebugLevel
}

// finished takes a closed connection out of the live ones.
func (l *listener) finished(c *conn) {
	s := l.srv
	n := c.counts()
	if c.at != nil {
		c.at.active.Add(-1)
	}
	s.mu.Lock()
	delete(s.conns, c.id)
	l.past.counts.add(n)
	l.past.ends[c.cause]++
	l.past.live--
	s.forget(l)
	s.mu.Unlock()
	if s.accessLog.Load() {
		c.logAccess(n)
	}
	l.log.Debug().Uint64("conn", c.id).Str("cause", c.cause).Msg("connection closed")
	l.gate.leave(c.down())
	c.forgetOriginal()
	l.slots.give()
	if f := l.cfg.Trace.Closed; f != nil {
		f(c.id, c.cause, c.err)
	}
	s.live.Done()
}

func (l *listener) declined(r splice.Reason) {
	l.srv.mu.Lock()
	l.past.declined[r]++
	l.srv.mu.Unlock()
}

func (l *listener) dialFailed(kind string) {
	l.srv.mu.Lock()
	l.past.dialErrors[kind]++
	l.srv.mu.Unlock()
}

// counts are a connection's bytes, by splice.Direction, and the bypass's
// counters. queued and direct are of the moment, the others totals.
type counts struct {
	copied, bypassed [2]uint64
	runs, waits      uint64
	queued           [2]uint64
	direct           [2]bool
	uncounted        [2]bool // bypassed is only a part
}

func (c *counts) add(o counts) {
	for d := range c.copied {
		c.copied[d] += o.copied[d]
		c.bypassed[d] += o.bypassed[d]
		c.uncounted[d] = c.uncounted[d] || o.uncounted[d]
	}
	c.runs += o.runs
	c.waits += o.waits
}
