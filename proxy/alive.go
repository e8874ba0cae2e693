package proxy

import (
	"context"
	"fmt"
	"time"
)

// Alive returns nil if the accept loops answer, and what every connection
// needs can be had, before ctx ends.
func (s *Server) Alive(ctx context.Context) error {
	for !s.mu.TryLock() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("lock connections: %w", ctx.Err())
		case <-time.After(time.Millisecond):
		}
	}
	listeners := s.listeners
	s.mu.Unlock()
	for _, l := range listeners {
		if err := l.ping(ctx); err != nil {
			return fmt.Errorf("listener %q: accept loop: %w", l.cfg.Name, err)
		}
	}
	return nil
}

// ping waits for the accept loop's answer. A loop that has ended, or that can't be
// interrupted, counts as having answered.
func (l *listener) ping(ctx context.Context) error {
	ln := *l.ln.Load()
	if _, ok := ln.(interface{ SetDeadline(time.Time) error }); !ok || !l.started.Load() {
		return nil
	}
	answer := make(chan struct{})
	select {
	case l.pings <- answer:
	case <-l.closing:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
	l.interrupt(true)
	select {
	case <-answer:
		return nil
	case <-l.closing:
		// Whoever takes the socket over lets Accept wait again, now or once it is interrupted.
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Numbers are what a status line says.
type Numbers struct {
	Listeners, Connections int
	Accepted               uint64
}

// Numbers returns how many there are, and were since the start.
func (s *Server) Numbers() Numbers {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Numbers{len(s.listeners), len(s.conns), s.lastID.Load()}
}

// Draining says whether Shutdown was called.
func (s *Server) Draining() bool { return s.draining.Load() }
