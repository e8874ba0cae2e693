package proxy

// Bytes returns how many bytes went in each direction, by splice.Direction,
// those of live connections included.
func (s *Server) Bytes() (total [2]uint64) {
	var sum counts
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.listeners {
		sum.add(l.past.counts)
	}
	for _, c := range s.conns {
		c.mu.Lock()
		sum.add(c.countsLocked())
		c.mu.Unlock()
	}
	for d := range total {
		total[d] = sum.copied[d] + sum.bypassed[d]
	}
	return total
}
