package harness

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
)

// A Listener is a [[listener]] of a generated configuration.
type Listener struct {
	Name, Listen, Upstream, Bypass string
	// Extra holds further keys, with values as TOML writes them (`"5s"`, `100`).
	Extra map[string]string
}

// A Config is a generated configuration. The values of Bypass, DNS, Limits, Log and
// Process are written as TOML writes them.
type Config struct {
	Log, Bypass, DNS, Limits, Process map[string]string
	Admin                             string
	Listeners                         []Listener
}

func (c *Config) toml() string {
	var b strings.Builder
	table := func(head string, kv map[string]string) {
		fmt.Fprintf(&b, "%s\n", head)
		for _, k := range slices.Sorted(maps.Keys(kv)) {
			fmt.Fprintf(&b, "%s = %s\n", k, kv[k])
		}
	}
	table("[log]", c.Log)
	table("[admin]", map[string]string{"listen": fmt.Sprintf("%q", c.Admin)})
	table("[bypass]", c.Bypass)
	table("[process]", c.Process)
	table("[limits]", c.Limits)
	table("[dns]", c.DNS)
	for _, l := range c.Listeners {
		table("[[listener]]", map[string]string{
			"name": fmt.Sprintf("%q", l.Name), "listen": fmt.Sprintf("%q", l.Listen),
			"upstream": fmt.Sprintf("%q", l.Upstream), "bypass": fmt.Sprintf("%q", l.Bypass),
		})
		for _, k := range slices.Sorted(maps.Keys(l.Extra)) {
			fmt.Fprintf(&b, "%s = %s\n", k, l.Extra[k])
		}
	}
	return b.String()
}

// A Shunt is a running shunt.
type Shunt struct {
	*Process
	Config Config
	Netns  *Netns
	// File is the configuration file.
	File      string
	admin     *http.Client
	base      usage
	logFile   string
	successor int // the process that serves after an upgrade
}

// Usage is what a shunt holds that must be given back when its connections are gone.
type usage struct{ fds, goroutines, entries int }

// Launch says how shunt is started; the zero Launch is as root, with nothing special.
type Launch struct {
	Netns *Netns
	// Prefix is put before the command line: prlimit, setpriv.
	Prefix []string
	Env    []string
	Attr   *syscall.SysProcAttr
	// Program is started in place of the one that was built.
	Program string
	// Files are its descriptors from 3 on.
	Files []*os.File
	// LogFile lets it write to a file.
	LogFile bool
}

// NewShunt starts shunt with a configuration in a new folder and waits until it is ready.
func NewShunt(dir string, cfg Config, l Launch) (*Shunt, error) {
	bin, err := Build()
	if err != nil {
		return nil, err
	}
	sock := filepath.Join(dir, "admin.sock")
	cfg.Admin = "unix:" + sock
	if cfg.Log == nil {
		cfg.Log = map[string]string{"level": `"debug"`, "format": `"json"`}
	}
	file := filepath.Join(dir, "shunt.toml")
	if err := os.WriteFile(file, []byte(cfg.toml()), 0o644); err != nil {
		return nil, err
	}
	if l.Program != "" {
		bin = l.Program
	}
	argv := append(slices.Clone(l.Prefix), bin, "run", "--config", file)
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), l.Env...)
	cmd.ExtraFiles = l.Files
	if l.Attr != nil {
		cmd.SysProcAttr = l.Attr
	}
	s := &Shunt{Config: cfg, Netns: l.Netns, File: file}
	if l.LogFile {
		s.logFile = filepath.Join(dir, "log")
		f, err := os.Create(s.logFile)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		cmd.Stdout, cmd.Stderr = f, f
	}
	p, err := StartProcess(l.Netns, cmd)
	if err != nil {
		return nil, err
	}
	s.Process = p
	s.admin = adminClient(sock)
	gone := false
	err = Poll(20*time.Second, func() error {
		select {
		case <-p.Done():
			gone = true
			return nil
		default:
		}
		code, body, err := s.Get("/readyz")
		if err == nil && code != http.StatusOK {
			err = fmt.Errorf("/readyz: %d %s", code, body)
		}
		return err
	})
	if gone {
		return nil, fmt.Errorf("shunt ended: %v\n%s\nconfiguration:\n%s", p.err, s.Log(), cfg.toml())
	}
	if err == nil {
		err = s.warm()
	}
	if err != nil {
		p.End(time.Second)
		return nil, fmt.Errorf("shunt isn't ready: %w\n%s", err, tail(s.Log(), 4000))
	}
	return s, nil
}

// adminClient asks the admin endpoint at a UNIX socket.
func adminClient(sock string) *http.Client {
	return &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		// No idle connections: they would count as leaks.
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", sock)
		},
	}}
}

// warm notes what shunt holds before the first connection.
func (s *Shunt) warm() (err error) {
	// The first scrapes start what the HTTP server keeps.
	for range 2 {
		if _, err := s.Metrics(); err != nil {
			return err
		}
	}
	s.base, err = s.usage()
	return err
}

// Get asks the admin endpoint.
func (s *Shunt) Get(path string) (code int, body string, err error) {
	resp, err := s.admin.Get("http://shunt" + path)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// Scrape reads the metrics of a shunt whose admin endpoint is at a UNIX socket.
func Scrape(sock string) (Metrics, error) {
	return (&Shunt{admin: adminClient(sock)}).Metrics()
}

// Metrics scrapes shunt.
func (s *Shunt) Metrics() (Metrics, error) {
	code, body, err := s.Get("/metrics")
	if err != nil {
		return nil, err
	}
	if code != http.StatusOK {
		return nil, fmt.Errorf("/metrics: %d %s", code, body)
	}
	return ParseMetrics(strings.NewReader(body))
}

// Connections returns the live connections as shunt shows them.
func (s *Shunt) Connections() ([]map[string]any, error) {
	code, body, err := s.Get("/connections")
	if err != nil {
		return nil, err
	}
	if code != http.StatusOK {
		return nil, fmt.Errorf("/connections: %d %s", code, body)
	}
	var list []map[string]any
	if err := json.Unmarshal([]byte(body), &list); err != nil {
		return nil, fmt.Errorf("/connections: %w: %s", err, body)
	}
	return list, nil
}

func (s *Shunt) usage() (u usage, err error) {
	m, err := s.Metrics()
	if err != nil {
		return u, err
	}
	u.goroutines = int(m.Sum("go_goroutines"))
	if u.fds, err = FDs(s.Pid()); err != nil {
		return u, err
	}
	u.entries, err = s.sockhashEntries()
	return u, err
}

// sockhashEntries counts the entries of the sockhashes that the process holds.
func (s *Shunt) sockhashEntries() (int, error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", s.Pid()))
	if err != nil {
		return 0, err
	}
	total := 0
	seen := map[ebpf.MapID]bool{}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // closed meanwhile
		}
		var kind, id uint32
		for _, line := range strings.Split(string(b), "\n") {
			key, value, _ := strings.Cut(line, ":")
			switch key {
			case "map_type":
				fmt.Sscan(value, &kind)
			case "map_id":
				fmt.Sscan(value, &id)
			}
		}
		if ebpf.MapType(kind) != ebpf.SockHash || seen[ebpf.MapID(id)] {
			continue
		}
		seen[ebpf.MapID(id)] = true
		n, err := countEntries(ebpf.MapID(id))
		if err != nil {
			return 0, fmt.Errorf("sockhash %d: %w", id, err)
		}
		total += n
	}
	return total, nil
}

func countEntries(id ebpf.MapID) (int, error) {
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		return 0, err
	}
	defer m.Close()
	n := 0
	var key any
	next := make([]byte, m.KeySize())
	for n < int(m.MaxEntries()) {
		if err := m.NextKey(key, next); err != nil {
			return n, nil // ErrKeyNotExist is the end
		}
		key = slices.Clone(next)
		n++
	}
	return n, nil
}

// CheckIdle waits until shunt holds no more than before its first connection:
// file descriptors, goroutines, entries of its sockhash, active connections.
func (s *Shunt) CheckIdle(limit time.Duration) error {
	return Poll(limit, func() error {
		m, err := s.Metrics()
		if err != nil {
			return err
		}
		if n := m.Sum("shunt_connections_active"); n != 0 {
			return fmt.Errorf("%v connections are still active", n)
		}
		u, err := s.usage()
		if err != nil {
			return err
		}
		// A scrape that is just ending holds a descriptor and a few goroutines;
		// splice(2) keeps pipes for reuse until the garbage collector runs.
		const slackFDs, slackGoroutines = 24, 6
		if u.fds > s.base.fds+slackFDs || u.goroutines > s.base.goroutines+slackGoroutines || u.entries > s.base.entries {
			return fmt.Errorf("leak: file descriptors %d, goroutines %d, sockhash entries %d; before the first connection %d, %d, %d",
				u.fds, u.goroutines, u.entries, s.base.fds, s.base.goroutines, s.base.entries)
		}
		return nil
	})
}

// Stop asks shunt to end and returns an error unless it exits with 0 within limit.
func (s *Shunt) Stop(limit time.Duration) error {
	s.Signal(syscall.SIGTERM)
	code, err := s.ExitCode(limit)
	if err != nil {
		return err
	}
	if code != 0 {
		return fmt.Errorf("exit code %d (%v)", code, s.err)
	}
	return nil
}

// StartShunt is NewShunt in a test. At the end of the test shunt must have
// given everything back and exit with 0, unless the test ended it itself.
func StartShunt(t testing.TB, cfg Config, l Launch) *Shunt {
	t.Helper()
	if _, err := Build(); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "shunt-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	// For whoever shunt runs as; sticky, as a folder for a socket should be.
	if err := os.Chmod(dir, 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	s, err := NewShunt(dir, cfg, l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		defer func() {
			out := s.Log()
			if strings.Contains(out, "panic:") || strings.Contains(out, "fatal error:") {
				t.Errorf("shunt crashed")
			}
			if t.Failed() {
				t.Logf("shunt wrote:\n%s", tail(out, 6000))
			}
		}()
		if s.successor != 0 {
			if Gone(s.successor, 0) == nil {
				return // the test ended it
			}
			if err := s.CheckIdle(10 * time.Second); err != nil {
				t.Errorf("shunt after the test: %v", err)
			}
			s.Signal(syscall.SIGTERM)
			if err := Gone(s.successor, 15*time.Second); err != nil {
				t.Errorf("stop shunt: %v", err)
				s.Signal(syscall.SIGKILL)
			}
			if err := Gone(s.Process.Pid(), 15*time.Second); err != nil {
				t.Errorf("the first shunt: %v", err)
				s.End(time.Second)
			}
			return
		}
		select {
		case <-s.Done():
		default:
			if err := s.CheckIdle(10 * time.Second); err != nil {
				t.Errorf("shunt after the test: %v", err)
			}
			if err := s.Stop(15 * time.Second); err != nil {
				t.Errorf("stop shunt: %v", err)
				s.End(time.Second)
			}
		}
	})
	return s
}
