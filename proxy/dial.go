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
	dialOther    = "other"
)

var dialKinds = []string{dialRefused, dialTimeout, dialNoRoute, dialResolve, dialMissing, dialLimit, dialCanceled, dialOther}

const (
	// minDialShare is what an address gets at least, while there is as much left.
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
	case errors.As(err, &addr):
		return dialResolve
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

// dial connects to the listener's upstream: it resolves the name, then tries
// every address in order, one at a time since control is for one socket at a
// time. A lack of descriptors is waited out. All of it within dial_timeout.
func (l *listener) dial(ctx context.Context, control ControlFunc) (Stream, error) {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.DialTimeout)
	defer cancel()
	for wait := 5 * time.Millisecond; ; wait = min(2*wait, 250*time.Millisecond) {
		up, err := l.dialOnce(ctx, control)
		if err == nil {
			return up, nil
		}
		var de *dialError
		if !errors.As(err, &de) || de.kind != dialLimit {
			return nil, err
		}
		l.srv.limitWarn(l, "dial waits for a free descriptor", err)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, err
		}
	}
}

func (l *listener) dialOnce(ctx context.Context, control ControlFunc) (Stream, error) {
	addrs, err := l.resolve(ctx)
	if err != nil {
		return nil, &dialError{dialKind(err), fmt.Errorf("resolve %s: %w", l.upstream, plainCause(err))}
	}
	var last *dialError
	for i, a := range addrs {
		end, _ := ctx.Deadline()
		left := time.Until(end)
		share := max(left/time.Duration(len(addrs)-i), min(minDialShare, left))
		up, err := l.dialAddress(ctx, a, share, control)
		if err == nil {
			return up, nil
		}
		// net hides the context's own error behind one of its kind.
		if ctx.Err() != nil {
			err = errors.Join(ctx.Err(), err)
		}
		last = &dialError{dialKind(err), fmt.Errorf("dial upstream %s: %w", a, plainCause(err))}
		if ctx.Err() != nil || last.kind == dialLimit {
			break
		}
	}
	return nil, last
}

// resolve returns the upstream's addresses, at least one.
func (l *listener) resolve(ctx context.Context) ([]address, error) {
	u := l.upstream
	if u.kind == upstreamFixed {
		return []address{u.addr}, nil
	}
	ips, err := l.srv.resolver.LookupNetIP(ctx, "ip", u.host)
	if err != nil {
		return nil, err
	}
	if len(ips) == 0 {
		return nil, &net.DNSError{Err: "no address", Name: u.host, IsNotFound: true}
	}
	addrs := make([]address, 0, len(ips))
	for _, ip := range ips {
		addrs = append(addrs, address{tcp: netip.AddrPortFrom(ip.Unmap(), u.port)})
	}
	return addrs, nil
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
