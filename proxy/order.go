package proxy

import (
	"context"
	"net/netip"
	"sync"
	"syscall"
	"time"
)

// orderPatience is how long a connection waits at most for those that came before it and aren't ready; for
// those that are, it waits as long again.
const orderPatience = 50 * time.Millisecond

// maxOver bounds what is remembered of connections that left before their turn.
const maxOver = 4096

// order lets the connections of a listener reach the upstream in the order in which they came: programs
// that open several at once (iperf3, say) take the first that arrives for the first that was opened.
// One that isn't ready in time, since it looks a name up or waits for a PROXY header, loses its place; the
// others keep theirs.
type order struct {
	mu       sync.Mutex
	patience time.Duration            // orderPatience
	given    uint64                   // tickets
	first    uint64                   // all tickets below it are over
	busy     bool                     // first has its turn
	due      uint64                   // nobody waits any more for tickets below it that aren't ready
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

// wait returns when all connections before ticket have left, or have had their time. Where end, the end of
// the dial, isn't zero, it takes an eighth of what is left at most.
func (o *order) wait(ticket uint64, end time.Time) {
	o.mu.Lock()
	if ticket <= o.first {
		o.busy = o.busy || ticket == o.first
		o.mu.Unlock()
		return
	}
	turn := make(chan struct{})
	o.waiting[ticket] = turn
	patience := o.patience
	if !end.IsZero() {
		patience = min(patience, time.Until(end)/16)
	}
	o.mu.Unlock()
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case <-turn:
		return
	case <-t.C:
	}
	o.mu.Lock()
	o.due = max(o.due, ticket)
	o.advance()
	o.mu.Unlock()
	t.Reset(patience)
	select {
	case <-turn:
	case <-t.C:
		o.mu.Lock()
		o.pass(ticket)
		o.mu.Unlock()
	}
}

// alone says that nobody comes before ticket.
func (o *order) alone(ticket uint64) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return ticket == o.first
}

// leave says that nobody needs to wait for ticket, again or for the first time.
func (o *order) leave(ticket uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case ticket < o.first:
	case ticket == o.first:
		o.next()
		o.advance()
	default:
		o.over[ticket] = struct{}{}
		if len(o.over) > maxOver { // of connections that need no turn
			o.pass(o.first + 1)
		}
	}
}

// next goes on to the ticket after first. A connection that waited for it has its turn. o.mu is held.
func (o *order) next() {
	o.first++
	delete(o.over, o.first-1)
	turn := o.waiting[o.first]
	if o.busy = turn != nil; o.busy {
		close(turn)
		delete(o.waiting, o.first)
	}
}

// advance passes over what is over, or due and not ready. o.mu is held.
func (o *order) advance() {
	for !o.busy {
		if _, over := o.over[o.first]; !over && o.first >= o.due {
			return
		}
		o.next()
	}
}

// pass makes it to's turn at least. o.mu is held.
func (o *order) pass(to uint64) {
	for o.first < to {
		o.next()
	}
	o.advance()
}

type connKey struct{}

// InOrder runs connect, which must not wait for the network, when the connection that ctx was made for has
// its turn: in the order in which the clients were accepted, as far as that takes no waiting for long. Only its first
// call for a connection waits. ctx is what a DialFunc was given, or made from it; with any other, connect runs at once.
func InOrder(ctx context.Context, connect func()) {
	c, _ := ctx.Value(connKey{}).(*conn)
	if c == nil {
		connect()
		return
	}
	end, _ := ctx.Deadline()
	c.l.order.wait(c.ticket, end)
	connect()
	c.l.order.leave(c.ticket)
}

// Connect connects a non-blocking TCP socket, from a net.Dialer's Control
// and as its last act, InOrder. Where the peer is on this host the handshake is over when connect(2)
// returns, though it says EINPROGRESS; package net's own connect(2) then finds the
// socket connected, and neither waits for the poller nor starts a goroutine for it. Where
// the peer is elsewhere nothing has changed for it. All errors are its to find, but that ctx ended before.
// Not for a Dialer with a LocalAddr: that is bound after Control.
func Connect(ctx context.Context, raw syscall.RawConn, to netip.AddrPort) error {
	InOrder(ctx, func() {
		if ctx.Err() == nil {
			connectSocket(raw, to)
		}
	})
	return ctx.Err()
}
