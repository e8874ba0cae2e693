package proxy

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"syscall"
	"time"
)

// ErrDraining is Reload's error once Shutdown was called, and before Serve.
var ErrDraining = errors.New("the server doesn't accept connections")

// reloads counts the reloads; guarded by Server.mu.
type reloads struct {
	good, bad uint64
	at        time.Time // when the running configuration was taken
}

// ReloadFailed counts a reload for which there was no usable configuration.
func (s *Server) ReloadFailed() {
	s.mu.Lock()
	s.reloads.bad++
	s.mu.Unlock()
}

// Reload makes cfg the configuration, or changes nothing and returns why. What
// is to be opened is opened before anything is closed. A listener whose address
// stays keeps its listening socket and what waits in its backlog; an unchanged
// one isn't touched. New connections get the new settings, live ones go on
// under their old ones, drain timeout included, also where their listener is gone.
// An address that overlaps one that is given up is in use still.
//
// BypassUnsupported, FIONREADWrong and KernelFault stay what they were.
func (s *Server) Reload(cfg Config) (err error) {
	s.changing.Lock()
	defer s.changing.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if err != nil {
			s.reloads.bad++
			return
		}
		s.reloads.good++
		s.reloads.at = time.Now()
	}()
	if !s.ready.Load() {
		return ErrDraining
	}
	if err := cfg.Validate(); err != nil {
		return err
	}
	next, err := s.openNext(cfg.Listeners)
	if err != nil {
		return err
	}
	oldAdmin, newAdmin := s.admin, s.admin
	if !sameAdmin(oldAdmin, cfg.Admin) {
		newAdmin = nil
		if cfg.Admin != "" {
			if newAdmin, err = openAdmin(s, cfg.Admin, nil); err != nil {
				next.discard()
				return fmt.Errorf("admin: %w", err)
			}
			newAdmin.serve()
		}
	}
	s.accessLog.Store(cfg.AccessLog)
	if !slices.Equal(s.dns, cfg.DNSServers) {
		s.dns = cfg.DNSServers
		s.resolveBy(newResolver(s.dns))
	}
	s.swap(next)
	s.mu.Lock()
	s.admin = newAdmin
	s.maxConnections = cfg.MaxConnections
	s.mu.Unlock()
	if oldAdmin != nil && oldAdmin != newAdmin {
		oldAdmin.close()
	}
	return nil
}

// nextListeners is what a reload changes the listeners to.
type nextListeners struct {
	all   []*listener
	fresh []*listener             // of all, those that don't run yet
	heir  map[*listener]*listener // who takes over a running one's socket
	kept  map[*listener]bool      // running ones that stay as they are
}

// openNext makes the listeners of cs, and opens those that take no socket over.
func (s *Server) openNext(cs []Listener) (_ *nextListeners, err error) {
	n := &nextListeners{heir: map[*listener]*listener{}, kept: map[*listener]bool{}}
	for _, c := range cs {
		old := s.onAddress(c, n)
		if old != nil && reflect.DeepEqual(old.cfg, c) {
			n.all = append(n.all, old)
			n.kept[old] = true
			continue
		}
		l := newListener(s, c)
		if old != nil {
			n.heir[old] = l
			l.given = *old.ln.Load()
			if l.file, err = old.file.change(c.Unix); err != nil {
				n.discard()
				return nil, fmt.Errorf("listener %q: %w", c.Name, err)
			}
		}
		if err := l.open(); err != nil {
			n.discard()
			return nil, fmt.Errorf("listener %q: %w%s", c.Name, err, s.holder(c, err))
		}
		l.adjustKeepAlive = old != nil && (old.adjustKeepAlive || old.cfg.KeepAlive != c.KeepAlive)
		n.all = append(n.all, l)
		n.fresh = append(n.fresh, l)
	}
	return n, nil
}

// holder says which running listener's socket is in the way of c, if one is.
func (s *Server) holder(c Listener, err error) string {
	a := listenAddr(c.Listen)
	if !errors.Is(err, syscall.EADDRINUSE) || !a.IsValid() {
		return ""
	}
	for _, l := range s.listeners {
		if listenAddr(l.cfg.Listen).Port() == a.Port() {
			return fmt.Sprintf(" (listener %q has %s until the reload is done: remove it in a reload before this one)", l.cfg.Name, l.cfg.Listen)
		}
	}
	return ""
}

// onAddress returns the running listener whose socket c takes over, or nil.
func (s *Server) onAddress(c Listener, n *nextListeners) *listener {
	if c.ListenFunc != nil {
		return nil
	}
	for _, l := range s.listeners {
		if l.cfg.ListenFunc == nil && n.heir[l] == nil && !n.kept[l] &&
			sameListen(l.cfg.Name, l.cfg.Listen, c.Name, c.Listen) {
			return l
		}
	}
	return nil
}

// discard closes what was opened for nothing.
func (n *nextListeners) discard() {
	for old, heir := range n.heir {
		if heir.file != nil {
			heir.file.change(old.cfg.Unix)
		}
	}
	for _, l := range n.fresh {
		if l.given != nil {
			l.unannounce() // its socket is another's
		} else {
			l.close()
		}
	}
}

// swap lets the next listeners take the running ones' place.
func (s *Server) swap(n *nextListeners) {
	s.mu.Lock()
	for _, l := range n.fresh {
		if p := s.past[l.cfg.Name]; p != nil {
			l.past = p
		} else {
			s.past[l.cfg.Name] = l.past
		}
	}
	before := s.listeners
	s.mu.Unlock()
	s.derived.resize(s.places(n.all))
	for _, l := range n.fresh {
		s.place(l, before)
	}
	for _, old := range before {
		if n.kept[old] {
			continue
		}
		if heir := n.heir[old]; heir != nil {
			// Connections that come between the two wait in the backlog.
			old.retire()
			heir.start()
			continue
		}
		old.close()
		old.log.Info().Msg("listener removed")
	}
	for _, l := range n.fresh {
		if l.given == nil {
			l.start()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listeners = n.all
	current := map[string]bool{}
	for _, l := range n.all {
		current[l.cfg.Name] = true
		l.past.gone = false
	}
	for _, l := range before {
		if !current[l.cfg.Name] {
			l.past.gone = true
			s.forget(l)
		}
	}
}

// place gives l its places for connections. Live connections go on to count for the
// limits of their listener's name.
func (s *Server) place(l *listener, before []*listener) {
	for _, old := range before {
		if old.cfg.Name == l.cfg.Name {
			l.gate.takeOver(old.gate)
			l.pool.takeOver(old.pool)
		}
	}
	if l.cfg.MaxConnections == 0 {
		l.slots = s.derived
		return
	}
	for _, old := range before {
		if old.cfg.Name == l.cfg.Name && old.slots != s.derived {
			l.slots = old.slots
			l.slots.resize(s.limitOf(l))
			return
		}
	}
	l.slots = newSlots(s.limitOf(l))
}

// forget drops the counters of a name that no listener has and no connection. s.mu
// is held.
func (s *Server) forget(l *listener) {
	if l.past.gone && l.past.live == 0 {
		delete(s.past, l.cfg.Name)
	}
}

// sameListen says whether two listeners mean the same listening socket. Of an address whose
// port the kernel chooses there are as many as names.
func sameListen(name1, listen1, name2, listen2 string) bool {
	a, b := listenAddr(listen1), listenAddr(listen2)
	if !a.IsValid() || !b.IsValid() {
		return listen1 == listen2
	}
	return a == b && (a.Port() != 0 || name1 == name2)
}

// listenAddr parses a TCP listening address. All addresses of both families are "::".
func listenAddr(listen string) netip.AddrPort {
	t, err := net.ResolveTCPAddr("tcp", listen)
	if err != nil {
		return netip.AddrPort{}
	}
	if len(t.IP) == 0 {
		return netip.AddrPortFrom(netip.IPv6Unspecified(), uint16(t.Port))
	}
	p := t.AddrPort()
	return netip.AddrPortFrom(p.Addr().Unmap(), p.Port())
}

func sameAdmin(a *admin, listen string) bool {
	if a == nil {
		return listen == ""
	}
	return a.listen == listen
}
