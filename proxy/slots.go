package proxy

import "sync"

// slots are places for connections; the listeners without a limit of their
// own have them in common. Their number may change while they are in use.
type slots struct {
	mu    sync.Mutex
	limit int
	used  int
	freed chan struct{} // wakes one of those that wait for a place
}

func newSlots(limit int) *slots {
	return &slots{limit: limit, freed: make(chan struct{}, 1)}
}

// try takes a place, if there is one. Who gets none waits for freed, and says
// so in the next call.
func (s *slots) try(waited bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used >= s.limit {
		return false
	}
	s.used++
	if waited && s.used < s.limit {
		s.wake() // freed holds one wake-up only, and others may wait too
	}
	return true
}

// give gives a place back.
func (s *slots) give() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used--
	if s.used == s.limit-1 {
		s.wake()
	}
}

// resize changes how many there are; places in use stay.
func (s *slots) resize(limit int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = limit
	if s.used < limit {
		s.wake()
	}
}

func (s *slots) wake() {
	select {
	case s.freed <- struct{}{}:
	default:
	}
}
