package harness

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// A Front is what the clients of a test connect to.
type Front struct {
	Path Path
	// Addr is the address to connect to, from ClientNetns.
	Addr string
	// Shunt is nil on paths without shunt.
	Shunt *Shunt
}

// An Option changes how [Open] starts what is in front of the service.
type Option func(*setup)

type setup struct {
	cfg    Config
	launch Launch
	host   string
	listen string
}

// WithBypass sets a key of the [bypass] table, with its value as TOML writes it.
func WithBypass(key, value string) Option {
	return func(s *setup) { s.cfg.Bypass[key] = value }
}

// WithProcess sets a key of the [process] table, with its value as TOML writes it.
func WithProcess(key, value string) Option {
	return func(s *setup) {
		if s.cfg.Process == nil {
			s.cfg.Process = map[string]string{}
		}
		s.cfg.Process[key] = value
	}
}

// WithListener sets a key of the listener, with its value as TOML writes it.
func WithListener(key, value string) Option {
	return func(s *setup) { s.cfg.Listeners[0].Extra[key] = value }
}

// WithDNS lets shunt resolve names by d.
func WithDNS(d *DNS) Option {
	return func(s *setup) { s.cfg.DNS = map[string]string{"servers": fmt.Sprintf("[%q]", d.Addr)} }
}

// WithMode replaces the listener's bypass key.
func WithMode(mode string) Option {
	return func(s *setup) { s.cfg.Listeners[0].Bypass = mode }
}

// WithLaunch says how the program is started.
func WithLaunch(l Launch) Option {
	return func(s *setup) { s.launch = l }
}

// WithListen listens on listen ("[::]", "") and lets clients connect to host ("127.0.0.1", "[::1]").
func WithListen(listen, host string) Option {
	return func(s *setup) { s.listen, s.host = listen, host }
}

// Configure returns the configuration that [Open] would give to shunt, for one listener.
func Configure(p Path, listen, upstream string) Config {
	cfg := Config{Bypass: map[string]string{}}
	mode := "off"
	if p.Bypass() {
		mode = "on"
		cfg.Bypass["verdict"] = fmt.Sprintf("%q", string(p))
		cfg.Bypass["require"] = "true"
	}
	cfg.Listeners = []Listener{{Name: "main", Listen: listen, Upstream: upstream, Bypass: mode, Extra: map[string]string{}}}
	return cfg
}

// Open puts the path's program in front of the service at upstream until the end of the test.
func Open(t testing.TB, p Path, upstream string, opts ...Option) *Front {
	t.Helper()
	s := setup{cfg: Configure(p, "", upstream), host: "127.0.0.1", listen: "127.0.0.1"}
	for _, opt := range opts {
		opt(&s)
	}
	port := Port(t, s.launch.Netns)
	f := &Front{Path: p, Addr: fmt.Sprintf("%s:%d", s.host, port)}
	listen := fmt.Sprintf("%s:%d", s.listen, port)
	if p.Shunt() {
		s.cfg.Listeners[0].Listen = listen
		f.Shunt = StartShunt(t, s.cfg, s.launch)
		return f
	}
	if p == Direct {
		f.Addr = upstream
		return f
	}
	proc, err := StartPeer(p, t.TempDir(), listen, upstream, s.launch.Netns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { proc.End(2 * time.Second) })
	if err := WaitListening(s.launch.Netns, f.Addr, proc, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	return f
}

// AdminSocket is where the shunt that [StartPeer] starts for AsSocat in dir serves its metrics.
func AdminSocket(dir string) string { return filepath.Join(dir, "admin.sock") }

// StartPeer starts socat or haproxy in shunt's place, with nothing but the plain configuration, or shunt with socat's.
func StartPeer(p Path, dir, listen, upstream string, ns *Netns) (*Process, error) {
	var cmd *exec.Cmd
	switch p {
	case Socat, AsSocat:
		host, port, err := net.SplitHostPort(listen)
		if err != nil {
			return nil, err
		}
		line := []string{fmt.Sprintf("TCP-LISTEN:%s,bind=%s,fork,reuseaddr,backlog=1024,nodelay", port, host), "TCP:" + upstream + ",nodelay"}
		bin := "socat"
		if p == AsSocat {
			if bin, err = Build(); err != nil {
				return nil, err
			}
			line = append([]string{"--admin=unix:" + AdminSocket(dir)}, line...)
		}
		cmd = exec.Command(bin, line...)
	case HAProxy:
		file := filepath.Join(dir, "haproxy.cfg")
		if err := os.WriteFile(file, fmt.Appendf(nil, `global
    maxconn 9000
    nbthread 2
defaults
    mode tcp
    timeout connect 10s
    timeout client 5m
    timeout server 5m
frontend f
    bind %s
    default_backend b
backend b
    server s %s
`, listen, upstream), 0o644); err != nil {
			return nil, err
		}
		cmd = exec.Command("haproxy", "-db", "-f", file)
	default:
		return nil, fmt.Errorf("no program for the path %q", p)
	}
	return StartProcess(ns, cmd)
}

// Moved is the bytes that shunt counted, by direction and path.
type Moved struct{ UpBypass, UpCopy, DownBypass, DownCopy int64 }

// Moved reads the byte counters.
func (f *Front) Moved() (Moved, error) {
	m, err := f.Shunt.Metrics()
	if err != nil {
		return Moved{}, err
	}
	get := func(dir, path string) int64 {
		return int64(m.Sum("shunt_bytes_total", "direction", dir, "path", path))
	}
	return Moved{
		UpBypass: get("upstream", "bypass"), UpCopy: get("upstream", "copy"),
		DownBypass: get("downstream", "bypass"), DownCopy: get("downstream", "copy"),
	}, nil
}

// CheckPath fails the test unless shunt counted exactly up and down bytes in
// the two directions, and they took the front's path: none was redirected
// where bypass is off; with the bypass at least share (0 to 1) of all was. The
// first bytes of a direction, and what comes while a queue is full, are
// copied legitimately. It does nothing on paths without shunt.
func (f *Front) CheckPath(t testing.TB, up, down int64, share float64) {
	t.Helper()
	if f.Shunt == nil {
		return
	}
	if Small() {
		share /= 2 // the beginning, which is copied, is a larger part of it
	}
	// The last bytes are counted just after the peer has read them.
	Until(t, 5*time.Second, "byte counters", func() error {
		m, err := f.Moved()
		if err != nil {
			return err
		}
		if m.UpBypass+m.UpCopy != up || m.DownBypass+m.DownCopy != down {
			return fmt.Errorf("counted %+v; sent %d up and %d down", m, up, down)
		}
		bypass, all := m.UpBypass+m.DownBypass, up+down
		if !f.Path.Bypass() && bypass != 0 {
			return fmt.Errorf("%d of %d bytes were redirected, with bypass off", bypass, all)
		}
		if f.Path.Bypass() && float64(bypass) < share*float64(all) {
			return fmt.Errorf("%d of %d bytes took the bypass, want a share of at least %v: %+v", bypass, all, share, m)
		}
		return nil
	})
}

// CheckCopied fails the test unless connections were declined for the reason, and nothing was redirected.
func (f *Front) CheckCopied(t testing.TB, reason string, connections int) {
	t.Helper()
	Until(t, 5*time.Second, "declined for "+reason, func() error {
		m, err := f.Shunt.Metrics()
		if err != nil {
			return err
		}
		if n := m.Sum("shunt_bypass_declined_total", "reason", reason); int(n) != connections {
			return fmt.Errorf("%v connections were declined for %q, want %d; all reasons: %v", n, reason, connections, m.Declined())
		}
		if n := m.Sum("shunt_bytes_total", "path", "bypass"); n != 0 {
			return fmt.Errorf("%v bytes were redirected", n)
		}
		return nil
	})
}

// Declined returns the reasons for which connections were copied, with their counts.
func (m Metrics) Declined() map[string]int {
	reasons := map[string]int{}
	for _, s := range m {
		if s.Name == "shunt_bypass_declined_total" && s.Value != 0 {
			reasons[s.Labels["reason"]] += int(s.Value)
		}
	}
	return reasons
}
