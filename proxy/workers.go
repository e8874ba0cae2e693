package proxy

import (
	"slices"
	"sync"
	"time"

	"shunt/splice"
)

const (
	// maxIdleWorkers bounds the workers that wait for work: two for each of some connections that come
	// and go at the same time.
	maxIdleWorkers = 64
	// idleWorkerAge is how long one waits at least; at most twice as long.
	idleWorkerAge = time.Second
)

// workers run what connections do. Most connections are short, and much of what
// a goroutine costs is the growing of its stack: those that have grown theirs are used again.
type workers struct {
	mu     sync.Mutex
	idle   []chan job // the last to have worked comes last, and is the next to work
	unused int        // so many of idle, from the front, have waited since trim came last
	armed  bool       // trim is to come
	closed bool
}

// job is a connection to serve or, with moves, a direction of it to look after.
type job struct {
	c     *conn
	moves bool
	d     splice.Direction
	fresh bool

	// ended: nothing is left but to say so.
	ended bool

	// over: the direction has ended, with err.
	over  bool
	wrote bool
	err   error
}

func (j job) do() {
	switch {
	case j.ended:
		j.c.ended(j.d)
	case j.over:
		j.c.conclude(j.d, endOf(j.err), j.wrote, j.err)
	case j.moves:
		j.c.move(j.d, j.fresh)
	default:
		j.c.serve()
	}
}

// start lets a worker do j, at once.
func (w *workers) start(j job) {
	w.mu.Lock()
	n := len(w.idle) - 1
	if n < 0 {
		w.mu.Unlock()
		go w.work(j)
		return
	}
	c := w.idle[n]
	w.idle = w.idle[:n]
	w.unused = min(w.unused, n)
	w.mu.Unlock()
	c <- j
}

func (w *workers) work(j job) {
	c := make(chan job, 1)
	for ok := true; ok; j, ok = <-c {
		j.do()
		j = job{} // nothing of it is kept
		w.mu.Lock()
		if w.closed || len(w.idle) == maxIdleWorkers {
			w.mu.Unlock()
			return
		}
		w.idle = append(w.idle, c)
		if !w.armed {
			w.armed = true
			time.AfterFunc(idleWorkerAge, w.trim)
		}
		w.mu.Unlock()
	}
}

// trim ends the workers that have waited all the time since it came last.
func (w *workers) trim() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.idle[:w.unused] {
		close(c)
	}
	w.idle = slices.Delete(w.idle, 0, w.unused)
	w.unused = len(w.idle)
	if w.armed = len(w.idle) > 0; w.armed {
		time.AfterFunc(idleWorkerAge, w.trim)
	}
}

// close ends the workers that wait. Others end when they are done.
func (w *workers) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	for _, c := range w.idle {
		close(c)
	}
	w.idle, w.unused = nil, 0
}
