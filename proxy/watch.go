package proxy

import "time"

// sample is what movement on a connection is told by.
type sample struct {
	received, acked [2]uint64 // by leg
	other           uint64    // without a time of its own
}

// armLocked sets the timer for the next look, if there is a timeout to
// watch for. c.mu is held.
func (c *conn) armLocked() {
	idle, half := c.limitsLocked()
	limit := idle
	if half > 0 && (limit == 0 || half < limit) {
		limit = half
	}
	if limit <= 0 || c.killed || c.closed {
		return
	}
	// No look yet: most connections have ended by then. What TCP moved tells its
	// time itself; counters that moved before the first look count as moved by then.
	wait := time.Until(c.lastMove.Add(limit))
	if c.needsCounts() {
		// Counters don't say when they moved.
		wait = min(wait, limit/8)
	}
	wait = max(wait, time.Millisecond)
	if c.timer == nil {
		c.timer = time.AfterFunc(wait, c.look)
	} else {
		c.timer.Reset(wait)
	}
}

// needsCounts says that TCP_INFO doesn't tell all movement.
func (c *conn) needsCounts() bool {
	return c.route != nil || !movesHaveTimes || tcpOf(c.legs[0].sock) == nil || tcpOf(c.legs[1].sock) == nil
}

// limitsLocked returns the timeouts that count now; zero: none.
func (c *conn) limitsLocked() (idle, half time.Duration) {
	idle = c.l.cfg.IdleTimeout
	if c.flows[0].over || c.flows[1].over {
		half = c.l.cfg.HalfOpenTimeout
	}
	if half == 0 && (c.legs[0].dead || c.legs[1].dead) {
		// What a dead peer left behind isn't delivered for ever.
		half = DefaultHalfOpenTimeout
	}
	return idle, half
}

// look ends the connection if nothing has moved for too long.
func (c *conn) look() {
	c.mu.Lock()
	if c.killed || c.closed {
		c.mu.Unlock()
		return
	}
	now := time.Now()
	c.lookLocked(now)
	still := now.Sub(c.lastMove)
	idle, half := c.limitsLocked()
	cause := ""
	switch {
	case half > 0 && still >= half:
		cause = causeHalfOpen
	case idle > 0 && still >= idle:
		cause = causeIdle
	default:
		c.armLocked()
	}
	if cause != "" && (c.legs[0].dead || c.legs[1].dead) {
		cause = "" // the death was the cause
	}
	end := half > 0 && still >= half || idle > 0 && still >= idle
	c.mu.Unlock()
	if end {
		c.kill(cause, !c.l.cfg.QuietEnds)
	}
}

// lookLocked brings lastMove up to date.
func (c *conn) lookLocked(now time.Time) {
	s := c.seen
	anyDead := c.legs[0].dead || c.legs[1].dead
	for i := range c.legs {
		if c.legs[i].dead {
			continue
		}
		t, ok := readTCPStats(c.legs[i].sock)
		if !ok {
			continue
		}
		// Once one leg is dead only delivery to the other counts: what it still sends is thrown away.
		if t.received != s.received[i] && !anyDead {
			s.received[i] = t.received
			c.moved(now.Add(-t.lastData))
		}
		if t.acked != s.acked[i] {
			s.acked[i] = t.acked
			c.moved(now.Add(-t.lastAck))
		}
	}
	s.other = 0
	if c.needsCounts() {
		n := c.countsLocked()
		for d := range n.copied {
			// A queue that shrinks is a reader that reads.
			s.other += n.copied[d] + 2*n.bypassed[d] - n.queued[d]
			// What can't be seen to stand still counts as moving, until its sender has finished.
			if n.uncounted[d] && !c.flows[d].over {
				c.moved(now)
			}
		}
		if s.other != c.seen.other {
			c.moved(now)
		}
	}
	c.seen = s
}

func (c *conn) moved(t time.Time) {
	if t.After(c.lastMove) {
		c.lastMove = t
	}
}
