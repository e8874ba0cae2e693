package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"
)

var (
	errFamily = errors.New("transparent: the upstream's address is of the other family")
	errLoop   = errors.New("the connection would come back to shunt")
)

// fromClient is a ControlFunc that makes upstream sockets come from the
// client's address, before next sees them. A client without an address of
// that kind leaves them as they are.
func (c *conn) fromClient(next ControlFunc) ControlFunc {
	source := c.source().Addr()
	if !source.IsValid() {
		return next
	}
	return func(network, address string, raw syscall.RawConn) error {
		if err := bindTo(network, raw, source); err != nil || next == nil {
			return err
		}
		return next(network, address, raw)
	}
}

// originalDst returns where the client wanted to, before NAT or TPROXY brought
// it here.
func (c *conn) originalDst() (netip.AddrPort, error) {
	remote, local := addrOf(c.down().RemoteAddr()), addrOf(c.down().LocalAddr())
	if _, ours := c.l.srv.dialled.Load(remote); ours {
		return netip.AddrPort{}, fmt.Errorf("%w: %v is its own, exclude what it dials from the redirection", errLoop, remote)
	}
	dst := local // TPROXY leaves it as it was
	if tcp := tcpOf(c.down()); tcp != nil {
		if nat, ok := natDestination(tcp); ok {
			dst = nat
		}
	}
	if ln := c.l.ln.Load(); ln != nil && isOwn(addrOf((*ln).Addr()), dst) {
		return netip.AddrPort{}, fmt.Errorf("%w: original destination %v is the listener itself, nothing was redirected", errLoop, dst)
	}
	return dst, nil
}

// dialOriginal connects to where the client wanted to, within dial_timeout. A
// lack of descriptors is waited out.
func (c *conn) dialOriginal(ctx context.Context, control ControlFunc) (Stream, error) {
	l, a := c.l, address{tcp: c.head.original}
	ctx, cancel := context.WithTimeout(ctx, l.cfg.DialTimeout)
	defer cancel()
	for wait := 5 * time.Millisecond; ; wait = min(2*wait, 250*time.Millisecond) {
		up, err := l.dialAddress(ctx, a, l.cfg.DialTimeout, control)
		if err == nil {
			l.srv.dialled.Store(addrOf(up.LocalAddr()), struct{}{})
			return up, nil
		}
		if ctx.Err() != nil {
			err = errors.Join(ctx.Err(), err)
		}
		de := &dialError{dialKind(err), fmt.Errorf("dial upstream %s: %w", a, plainCause(err))}
		if de.kind != dialLimit {
			return nil, de
		}
		l.srv.limitWarn(l, "dial waits for a free descriptor", err)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, de
		}
	}
}

// forgetOriginal undoes what dialOriginal noted.
func (c *conn) forgetOriginal() {
	if up := c.legs[1].sock; up != nil && c.head != nil && c.head.original.IsValid() {
		c.l.srv.dialled.Delete(addrOf(up.LocalAddr()))
	}
}

// isOwn says whether connecting to a arrives at a listener's address.
func isOwn(listen, a netip.AddrPort) bool {
	switch {
	case listen.Port() != a.Port():
		return false
	case listen.Addr() == a.Addr():
		return true
	case !listen.Addr().IsUnspecified():
		return false
	case a.Addr().IsLoopback(), a.Addr().IsUnspecified():
		return true
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return true // rather one connection less than one too many
	}
	for _, i := range addrs {
		if p, err := netip.ParsePrefix(i.String()); err == nil && p.Addr().Unmap() == a.Addr().WithZone("") {
			return true
		}
	}
	return false
}
