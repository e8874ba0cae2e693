package proxy

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
)

// Inherited is a listening socket that was open before this process: the
// service manager's, or the former process's in an upgrade.
type Inherited struct {
	// Listener is the socket; the Server closes it.
	Listener net.Listener
	// Name is the service manager's name for it, or that of the former process's listener.
	Name string
	// Former says that it comes from a former process, which knew it by Name and Listen, or as its
	// admin endpoint. It is closed if the configuration has no such listener any
	// more; another one that no listener wants is an error.
	Former bool
	// Listen is the address in the former process's configuration.
	Listen string
	// Admin says that it is the admin endpoint's.
	Admin bool
	// Keep says that a UNIX socket's file is somebody else's to remove.
	Keep bool
	// Unlink says that a former process's file is to be removed with the socket.
	Unlink bool
}

// Handed is a listening socket for the process that takes over.
type Handed struct {
	Inherited
	// File is a duplicate, which the caller closes. Listener is not set.
	File *os.File
}

// adminName is what the service manager calls the admin endpoint's socket,
// unless a listener has the name.
const adminName = "admin"

// inherit gives the listeners and the admin endpoint the sockets that are theirs.
func (s *Server) inherit() error {
	named := map[string]int{}
	for _, in := range s.cfg.Inherited {
		named[in.Name]++
	}
	for i := range s.cfg.Inherited {
		in := &s.cfg.Inherited[i]
		l := s.heirOf(in, named[in.Name] == 1)
		switch {
		case l != nil && l.given != nil:
			return fmt.Errorf("inherited socket %s: listener %q has one already", in, l.cfg.Name)
		case l != nil:
			if _, unix := in.Listener.(*net.UnixListener); unix != strings.HasPrefix(l.cfg.Listen, "unix:") {
				return fmt.Errorf("inherited socket %s: of another type than what listener %q wants, %s", in, l.cfg.Name, l.cfg.Listen)
			}
			if !in.Former && !in.at(l.cfg.Listen) {
				s.log.Warn().Str("listener", l.cfg.Name).Str("listen", l.cfg.Listen).Str("addr", addrString(in.Listener.Addr())).
					Msg("the inherited socket has another address than the configuration")
			}
			// Package net gives what such a listener accepts a keepalive of its own.
			l.given, l.adjustKeepAlive = in.Listener, true
			if path, ok := strings.CutPrefix(l.cfg.Listen, "unix:"); ok {
				var err error
				if l.file, err = in.socketFile(path, l.cfg.Unix); err != nil {
					return fmt.Errorf("listener %q: %w", l.cfg.Name, err)
				}
			}
		case s.cfg.Admin != "" && s.adminSocket == nil && s.adminWants(in):
			if _, unix := in.Listener.(*net.UnixListener); unix != strings.HasPrefix(s.cfg.Admin, "unix:") {
				return fmt.Errorf("inherited socket %s: of another type than what the admin endpoint wants, %s", in, s.cfg.Admin)
			}
			s.adminSocket = in
		case in.Former:
			s.log.Info().Str("addr", addrString(in.Listener.Addr())).Str("listener", in.Name).Msg("listener removed")
			in.Listener.Close()
			if path, ok := strings.CutPrefix(in.Listen, "unix:"); ok && in.Unlink {
				if f := in.formerFile(path); f != nil {
					f.how.Unlink = true
					s.dropped = append(s.dropped, f)
				}
			}
		default:
			return fmt.Errorf("inherited socket %s: no listener has this name or this address", in)
		}
	}
	return nil
}

// heirOf returns the listener that in is for, or nil.
func (s *Server) heirOf(in *Inherited, nameCounts bool) *listener {
	if in.Former {
		for _, l := range s.listeners {
			if !in.Admin && sameListen(in.Name, in.Listen, l.cfg.Name, l.cfg.Listen) {
				return l
			}
		}
		return nil
	}
	for _, l := range s.listeners {
		if nameCounts && in.Name == l.cfg.Name {
			return l
		}
	}
	for _, l := range s.listeners {
		if in.at(l.cfg.Listen) {
			return l
		}
	}
	return nil
}

func (s *Server) adminWants(in *Inherited) bool {
	if in.Former {
		return in.Admin && in.Listen == s.cfg.Admin
	}
	return in.Name == adminName || in.at(s.cfg.Admin)
}

// at says whether the socket is at a configuration's address.
func (in *Inherited) at(listen string) bool {
	if p := addrOf(in.Listener.Addr()); p.IsValid() {
		return p == listenAddr(listen)
	}
	return "unix:"+in.Listener.Addr().String() == listen
}

// socketFile returns the file of a UNIX socket that a former process made, nil for another; it becomes what how says.
func (in *Inherited) socketFile(path string, how UnixSocket) (*socketFile, error) {
	return in.formerFile(path).change(how)
}

// formerFile returns the file of a UNIX socket that a former process made, nil for another.
func (in *Inherited) formerFile(path string) *socketFile {
	if !in.Former || in.Keep || path == "" || path[0] == '@' {
		return nil
	}
	made, err := os.Lstat(path)
	if err != nil {
		return nil // somebody has removed it
	}
	return &socketFile{path: path, made: made}
}

// removeDropped removes the files of former sockets that nothing serves any more. The former process still has
// them open.
func (s *Server) removeDropped() {
	for _, f := range s.dropped {
		if err := f.remove(); err != nil {
			s.log.Info().Err(err).Msg("the socket's file stays")
		}
	}
	s.dropped = nil
}

// giveBack leaves the files of the UNIX sockets that were handed over to the former process: this one
// doesn't serve after all.
func (s *Server) giveBack() {
	back := func(f *socketFile) {
		if err := f.restore(); err != nil {
			s.log.Warn().Str("path", f.path).Err(err).Msg("the former process's socket isn't what it was")
		}
	}
	for _, l := range s.listeners {
		if l.given != nil {
			back(l.file)
			l.file = nil
		}
	}
	if s.admin != nil && s.adminSocket != nil {
		back(s.admin.file)
		s.admin.file = nil
	}
}

// String returns how errors call it.
func (in *Inherited) String() string {
	return fmt.Sprintf("%q at %s", in.Name, addrString(in.Listener.Addr()))
}

// Sockets returns duplicates of all listening sockets, for another process.
func (s *Server) Sockets() (hs []Handed, err error) {
	s.changing.Lock()
	defer s.changing.Unlock()
	defer func() {
		if err != nil {
			for _, h := range hs {
				h.File.Close()
			}
		}
	}()
	add := func(ln net.Listener, in Inherited) error {
		c, ok := ln.(syscall.Conn)
		if !ok {
			return errors.ErrUnsupported
		}
		file, err := duplicate(c, in.Name)
		if err != nil {
			return err
		}
		in.Former = true
		hs = append(hs, Handed{in, file})
		return nil
	}
	for _, l := range s.listeners {
		if err := add(*l.ln.Load(), Inherited{Name: l.cfg.Name, Listen: l.cfg.Listen, Keep: l.file == nil, Unlink: l.file != nil && l.file.how.Unlink}); err != nil {
			return hs, fmt.Errorf("listener %q: duplicate the socket: %w", l.cfg.Name, err)
		}
	}
	if a := s.admin; a != nil {
		if err := add(a.ln, Inherited{Name: adminName, Listen: a.listen, Admin: true, Keep: a.file == nil, Unlink: a.file != nil && a.file.how.Unlink}); err != nil {
			return hs, fmt.Errorf("admin: duplicate the socket: %w", err)
		}
	}
	return hs, nil
}

// HandOver says that another process has the sockets now: Shutdown, which is
// to follow, leaves the files of UNIX sockets to it, and closes the admin endpoint at once.
func (s *Server) HandOver() { s.handedOver.Store(true) }
