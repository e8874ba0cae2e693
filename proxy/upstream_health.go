package proxy

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"syscall"
	"time"
)

// Health is the active checks of upstream addresses: a connect that is ended at once. An address is up
// until its first check, which decides alone.
type Health struct {
	// Interval between two checks of an address, give or take a tenth; 0: no checks.
	Interval time.Duration
	// Timeout of a connect.
	Timeout time.Duration
	// Rise is how many good checks in a row bring an address up, Fall how many bad ones take it down.
	Rise, Fall int
}

const (
	// maxChecks is how many connects of checks may be under way, of one listener.
	maxChecks = 32
	// firstCheckWithin spreads the first checks.
	firstCheckWithin = time.Second
	// checkLinger is how long a check waits for the service to close first, so that it sees an
	// end and no reset.
	checkLinger = time.Second
)

// watch checks e until ctx ends.
func (p *pool) watch(ctx context.Context, e *endpoint) {
	h := p.l.cfg.Health
	wait := time.Duration(rand.Float64() * float64(min(h.Interval, firstCheckWithin)))
	for p.sleep(ctx, wait) {
		select {
		case p.checks <- struct{}{}:
		case <-ctx.Done():
			return
		}
		c, err := p.connect(ctx, e)
		<-p.checks
		// An interrupted check and a lack of our own say nothing about the address.
		if ctx.Err() == nil && !isLimit(err) && !errors.Is(err, syscall.EADDRNOTAVAIL) {
			p.checked(ctx, e, err)
		}
		if c != nil {
			hangUp(ctx, c)
		}
		wait = jitter(h.Interval)
	}
}

// connect is a check. No control: the bypass doesn't hear of it.
func (p *pool) connect(ctx context.Context, e *endpoint) (Stream, error) {
	ctx, cancel := context.WithTimeout(ctx, p.l.cfg.Health.Timeout)
	defer cancel()
	return p.l.dialAddress(ctx, e.addr, p.l.cfg.Health.Timeout, nil)
}

// hangUp ends a check's connection. What a service that speaks first has sent is read: unread, it would
// make a reset of the close.
func hangUp(ctx context.Context, c Stream) {
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	if c.CloseWrite() == nil {
		c.SetReadDeadline(time.Now().Add(checkLinger))
		io.CopyN(io.Discard, onlyReader{c}, bufferSize)
	}
}

// onlyReader hides what io.Copy would use in place of Read.
type onlyReader struct{ io.Reader }

// checked takes a check's result.
func (p *pool) checked(ctx context.Context, e *endpoint, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ctx.Err() != nil { // e has left the pool meanwhile
		return
	}
	h := p.l.cfg.Health
	if err != nil {
		e.lastErr, e.good = err, 0
	} else if e.good++; e.good >= h.Rise && e.out(time.Now()) {
		// The guess is out of date. A dial that fails makes it anew, and for longer.
		e.ejected = time.Time{}
		if !e.down { // or else that is about to be said
			p.l.log.Info().Str("upstream", e.upstream).Str("up", e.text).Str("cause", "health").Msg("upstream up")
		}
	}
	need := h.Fall
	switch {
	case !e.checked:
		e.checked, need = true, 1
	case e.down:
		need = h.Rise
	}
	if e.down == (err != nil) {
		e.streak = 0
		return
	}
	if e.streak++; e.streak < need {
		return
	}
	e.streak, e.down = 0, err != nil
	if e.down {
		p.l.log.Warn().Str("upstream", e.upstream).Str("up", e.text).Str("cause", "health").Err(err).Msg("upstream down")
	} else {
		p.l.log.Info().Str("upstream", e.upstream).Str("up", e.text).Str("cause", "health").Msg("upstream up")
	}
	p.noteDead()
}
