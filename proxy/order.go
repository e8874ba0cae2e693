package proxy

import (
	"context"
	"net/netip"
	"sync"
	"syscall"
	"time"
)

// orderPatience is how long a connection waits at most for those that came before it.
const orderPatience = 50 * time.Millisecond

// order lets the connections of a listener reach the upstream in the order in which they came: programs
// that open several at once (iperf3, say) take the first that arrives for the first that was opened.
// One that isn't ready in time, since it looks a name up or waits for a PROXY header, loses its place.
type order struct {
	mu       sync.Mutex
	patience time.Duration            // orderPatience
	given    uint64                   // tickets
	first    uint64                   // all tickets below it are over
	over     map[uint64]struct{}      // others that are
	waiting  map[uint64]chan struct{} // closed when the ticket's turn has come
}

func newOrder() *order {
	return &order{patience: orderPatience, over: map[uint64]struct{}{}, waiting: map[uint64]chan struct{}{}}
}

// enter gives the next connection its place.
func (o *order) enter() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.given++
	return o.given - 1
}

// wait returns when all connections before ticket have left, or have had their time.
func (o *order) wait(ticket uint64) {
	o.mu.Lock()
	if ticket <= o.first {
		o.mu.Unlock()
		return
	}
	turn := make(chan struct{})
	o.waiting[ticket] = turn
	t := time.NewTimer(o.patience)
	o.mu.Unlock()
	defer t.Stop()
	select {
	case <-turn:
	case <-t.C:
		o.mu.Lock()
		o.advance(ticket)
		o.mu.Unlock()
	}
}

// leave says that nobody needs to wait for ticket, again or for the first time.
func (o *order) leave(ticket uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case ticket < o.first:
	case ticket == o.first:
		o.advance(ticket + 1)
	default:
		o.over[ticket] = struct{}{}
	}
}

// advance makes it to's turn at least. o.mu is held.
func (o *order) advance(to uint64) {
	for {
		if _, over := o.over[o.first]; o.first >= to && !over {
			return
		}
		delete(o.over, o.first)
		o.first++
		// Also those that are passed over: their time has come, too.
		if turn := o.waiting[o.first]; turn != nil {
			close(turn)
			delete(o.waiting, o.first)
		}
	}
}

type connKey struct{}

// InOrder runs connect, which must not wait for the network, when the connection that ctx was made for has
// its turn: in the order in which the clients were accepted, as far as that takes no waiting for long. ctx is
// what a DialFunc was given, or made from it; with any other, connect runs at once.
func InOrder(ctx context.Context, connect func()) {
	c, _ := ctx.Value(connKey{}).(*conn)
	if c == nil {
		connect()
		return
	}
	c.l.order.wait(c.ticket)
	connect()
	c.l.order.leave(c.ticket)
}

// Connect connects a non-blocking TCP socket, from a net.Dialer's Control
// and as its last act. Where the peer is on this host the handshake is over when connect(2)
// returns, though it says EINPROGRESS; package net's own connect(2) then finds the
// socket connected, and neither waits for the poller nor starts a goroutine for it. Where
// the peer is elsewhere nothing has changed for it. All errors are its to find.
// Not for a Dialer with a LocalAddr: that is bound after Control.
// It is done InOrder.
func Connect(ctx context.Context, raw syscall.RawConn, to netip.AddrPort) {
	InOrder(ctx, func() { connectSocket(raw, to) })
}
