package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"time"
)

// Kinds of failed dials, label values of shunt_dial_errors_total.
const (
	dialRefused  = "refused"  // the last address refused, or reset at once
	dialTimeout  = "timeout"  // dial_timeout passed
	dialNoRoute  = "no-route" // no route, or the network says unreachable
	dialResolve  = "resolve"  // the name has no address
	dialMissing  = "missing"  // the UNIX socket's file isn't there
	dialLimit    = "limit"    // no file descriptor or port was free for all of dial_timeout
	dialCanceled = "canceled" // the client left, or the server stopped
	dialLoop     = "loop"     // an original destination that leads back to shunt
	dialFamily   = "family"   // transparent, and the client's address is of another family than the upstream's
	dialOther    = "other"

	// dialNone: nothing was dialled, since health checks have all addresses down. The cause is no-upstream, and it isn't counted
	// as a failed dial.
	dialNone = "none"
)

var dialKinds = []string{dialRefused, dialTimeout, dialNoRoute, dialResolve, dialMissing, dialLimit, dialCanceled, dialLoop, dialFamily, dialOther}

const (
	// minDialShare is what an address gets at least, while there is as much left; a quarter of dial_timeout, if that is less.
	minDialShare = 2 * time.Second
	// leaveWatchAfter is how long a dial may take before the client is watched.
	leaveWatchAfter = 20 * time.Millisecond
)

// dialError is a failed dial: its kind and, wrapped, the last address's error.
type dialError struct {
	kind string
	err  error
}

func (e *dialError) Error() string { return e.err.Error() }
func (e *dialError) Unwrap() error { return e.err }

// dialKind classifies the error of resolving or of one address.
func dialKind(err error) string {
	var dns *net.DNSError
	var addr *net.AddrError
	switch {
	case errors.Is(err, errFamily):
		return dialFamily
	case isLimit(err), errors.Is(err, syscall.EADDRNOTAVAIL), errors.Is(err, syscall.EAGAIN):
		return dialLimit
	case errors.Is(err, context.Canceled):
		return dialCanceled
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT):
		return dialTimeout
	case errors.As(err, &dns):
		if dns.IsTimeout {
			return dialTimeout
		}
		return dialResolve
	case errors.As(err, &addr), errors.Is(err, errNotOffered):
		return dialResolve
	case errors.Is(err, errNoUpstream):
		return dialNone
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		return dialRefused
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH),
		errors.Is(err, syscall.EHOSTDOWN), errors.Is(err, syscall.ENETDOWN):
		return dialNoRoute
	case errors.Is(err, syscall.ENOENT):
		return dialMissing
	}
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() {
		return dialTimeout
	}
	return dialOther
}

// isLimit says that err is a lack of descriptors or memory, which passes.
func isLimit(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) ||
		errors.Is(err, syscall.ENOBUFS) || errors.Is(err, syscall.ENOMEM)
}

// dial connects to one of the listener's upstreams, trying their addresses one after the other, since
// control is for one socket at a time. A lack of descriptors is waited out. All of it within
// dial_timeout. The endpoint counts the connection until its active is lowered again.
func (l *listener) dial(ctx context.Context, client netip.Addr, control ControlFunc, begun *attempt) (Stream, *endpoint, error) {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.DialTimeout)
	defer cancel()
	for wait := 5 * time.Millisecond; ; wait = min(2*wait, 250*time.Millisecond) {
		up, at, err := l.dialOnce(ctx, client, control, begun)
		begun = nil
		if err == nil {
			return up, at, nil
		}
		var de *dialError
		if !errors.As(err, &de) || de.kind != dialLimit {
			return nil, nil, err
		}
		l.srv.limitWarn(l, "dial waits for a free descriptor", err)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, nil, err
		}
	}
}

func (l *listener) dialOnce(ctx context.Context, client netip.Addr, control ControlFunc, begun *attempt) (Stream, *endpoint, error) {
	set, err := l.addresses(ctx, begun)
	if err != nil {
		return nil, nil, &dialError{dialKind(err), fmt.Errorf("resolve %s: %w", l.upstream, plainCause(err))}
	}
	var last, limit *dialError
	var had tried
	for {
		var i, left int
		if begun != nil {
			i, left = begun.i, begun.left
		} else if i, left = l.pool.choose(set, had, client); left == 0 {
			break
		}
		end, _ := ctx.Deadline()
		budget := time.Until(end)
		fair := max(budget/time.Duration(left), min(minDialShare, l.cfg.DialTimeout/4))
		e := set[i].endpoint
		var up Stream
		if begun != nil {
			up, err = begun.finish(ctx, min(fair, budget))
			begun = nil
		} else {
			up, err = l.dialAddress(ctx, e.addr, min(fair, budget), control)
		}
		if err == nil {
			l.pool.reached(e)
			return up, e, nil
		}
		e.active.Add(-1)
		// net hides the context's own error behind one of its kind.
		if ctx.Err() != nil {
			err = errors.Join(ctx.Err(), err)
		}
		last = &dialError{dialKind(err), fmt.Errorf("dial upstream %s: %w", e.text, plainCause(err))}
		switch {
		case last.kind == dialLimit:
			limit = last
		case last.kind == dialCanceled, last.kind == dialTimeout && budget < fair:
			// It had no fair chance.
		default:
			l.pool.missed(e, err, len(set) > 1)
		}
		if ctx.Err() != nil || isLimit(err) {
			break
		}
		had.add(i, len(set))
	}
	switch {
	case limit != nil: // one that may pass
		return nil, nil, limit
	case last != nil:
		return nil, nil, last
	}
	return nil, nil, &dialError{dialNone, errNoUpstream}
}

// addresses are those to choose from: the ones that a dial was begun with.
func (l *listener) addresses(ctx context.Context, begun *attempt) ([]member, error) {
	if begun != nil {
		return begun.set, nil
	}
	return l.pool.addresses(ctx)
}

// apply sets the net package's two keepalive fields.
func (k KeepAlive) apply(d *time.Duration, c *net.KeepAliveConfig) {
	if k.Idle <= 0 {
		*d = -1
		return
	}
	*c = net.KeepAliveConfig{Enable: true, Idle: k.Idle, Interval: k.Interval, Count: k.Count}
}

// set sets it on a connected socket.
func (k KeepAlive) set(c *net.TCPConn) {
	if k.Idle <= 0 {
		c.SetKeepAlive(false)
		return
	}
	c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: k.Idle, Interval: k.Interval, Count: k.Count})
}

// watchLeave calls left if the client resets down before the returned stop
// is called; stop says whether it did. It reads nothing from down.
// Other streams than TCP can't say a reset from an end.
func watchLeave(s Stream, left func()) (stop func() bool) {
	down := tcpOf(s)
	if down == nil {
		return func() bool { return false }
	}
	var gone atomic.Bool
	done := make(chan struct{})
	t := time.AfterFunc(leaveWatchAfter, func() {
		defer close(done)
		if waitHangUp(down) {
			gone.Store(true)
			left()
		}
	})
	return func() bool {
		if !t.Stop() {
			down.SetReadDeadline(time.Unix(1, 0))
			<-done
			down.SetReadDeadline(time.Time{})
		}
		return gone.Load()
	}
}
