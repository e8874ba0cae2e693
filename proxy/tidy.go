package proxy

import (
	"runtime/debug"
	"sync/atomic"
	"time"
)

const (
	// tidyAfter is how many directions come to rest before it pays to tidy up.
	tidyAfter = 256
	// tidyDelay is how long after that; tidyEvery, the least time between two.
	tidyDelay = time.Second
	tidyEvery = 30 * time.Second
)

// tidy gives memory and pipes back once most directions are at rest.
// The stacks of their goroutines, the garbage of their dials and the pipes in
// the net package's pool would otherwise stay until the collector runs by itself, which
// in an idle process is after minutes.
type tidy struct {
	rested  atomic.Int64 // since the last time
	armed   atomic.Bool
	last    atomic.Int64 // unix nanoseconds
	resting atomic.Int64 // directions that are parked now
	seen    int64        // of rested, when run came last; run's alone
}

// rest counts a direction that is parked.
func (t *tidy) rest() {
	t.resting.Add(1)
	if t.rested.Add(1) < tidyAfter || !t.armed.CompareAndSwap(false, true) {
		return
	}
	wait := time.Until(time.Unix(0, t.last.Load()).Add(tidyEvery))
	time.AfterFunc(max(wait, tidyDelay), t.run)
}

func (t *tidy) run() {
	if n := t.rested.Load(); n-t.seen >= tidyAfter {
		// Many more are on their way to rest, and the next time is far away.
		t.seen = n
		time.AfterFunc(tidyDelay, t.run)
		return
	}
	t.seen = 0
	t.armed.Store(false)
	if t.resting.Load() < tidyAfter/2 {
		return // they have moved on; the next ones to rest arm it again
	}
	t.rested.Store(0)
	t.last.Store(time.Now().UnixNano())
	debug.FreeOSMemory()
}
