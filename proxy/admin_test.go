package proxy

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/rs/zerolog"
)

func (r *rig) get(path string) (int, string) {
	r.t.Helper()
	tr := &http.Transport{DisableKeepAlives: true}
	if p, ok := strings.CutPrefix(r.srv.AdminAddr(), "unix:"); ok {
		tr.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", p)
		}
	}
	hc := &http.Client{Transport: tr, Timeout: deadline}
	host := r.srv.AdminAddr()
	if strings.HasPrefix(host, "unix:") {
		host = "admin"
	}
	res, err := hc.Get("http://" + host + path)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

// metric returns each sample of /metrics.
func (r *rig) metrics() map[string]float64 {
	r.t.Helper()
	_, body := r.get("/metrics")
	m := map[string]float64{}
	for sc := bufio.NewScanner(strings.NewReader(body)); sc.Scan(); {
		line := sc.Text()
		if strings.HasPrefix(line, "#") {
			continue
		}
		i := strings.LastIndexByte(line, ' ')
		v, err := strconv.ParseFloat(line[i+1:], 64)
		if err != nil {
			r.t.Fatal(err)
		}
		m[line[:i]] = v
	}
	return m
}

func TestAdminEndpointsAnswer(t *testing.T) {
	r := newRig(t, nil)
	for _, p := range []string{"/healthz", "/readyz"} {
		if code, body := r.get(p); code != 200 {
			t.Errorf("%s: %d %s", p, code, body)
		}
	}
	client, service := r.pair()
	send(t, client, []byte("12345"))
	expect(t, service, "12345")
	send(t, service, []byte("123"))
	expect(t, client, "123")
	eventually(t, "count of the last bytes", func() bool { // bytes are counted after they were written
		cs := r.srv.Connections()
		return len(cs) == 1 && cs[0].Upward.Copied == 5 && cs[0].Downward.Copied == 3
	})
	_, body := r.get("/connections")
	var cs []Connection
	if err := json.Unmarshal([]byte(body), &cs); err != nil || len(cs) != 1 {
		t.Fatalf("%v: %s", err, body)
	}
	c := cs[0]
	if c.Listener != "web" || c.State != "copying" || c.Declined != "unsupported" || c.Up == nil ||
		c.Down.Remote != client.LocalAddr().String() || c.Up.Remote != service.LocalAddr().String() ||
		c.Upward.Copied != 5 || c.Downward.Copied != 3 || c.Upward.Path != "copy" {
		t.Errorf("connection: %s", body)
	}
	m := r.metrics()
	for name, want := range map[string]float64{
		`shunt_connections_total{listener="web"}`:                              1,
		`shunt_connections_active{listener="web",path="copy"}`:                 1,
		`shunt_bytes_total{direction="upstream",listener="web",path="copy"}`:   5,
		`shunt_bytes_total{direction="downstream",listener="web",path="copy"}`: 3,
		`shunt_bytes_total{direction="upstream",listener="web",path="bypass"}`: 0,
		`shunt_bypass_declined_total{listener="web",reason="unsupported"}`:     1,
		`shunt_verdict_runs_total{listener="web"}`:                             0,
		`shunt_queue_waits_total{listener="web"}`:                              0,
		`shunt_dial_errors_total{kind="refused",listener="web"}`:               0,
		`shunt_accept_errors_total`:                                            0,
		`shunt_bypass_enabled{listener="web",reason="unsupported"}`:            0,
		`shunt_connections_ended_total{cause="client-fin",listener="web"}`:     0,
	} {
		if got, ok := m[name]; !ok || got != want {
			t.Errorf("%s: %v (there: %v), want %v", name, got, ok, want)
		}
	}
	for _, name := range []string{"go_goroutines", "process_open_fds"} {
		if _, ok := m[name]; !ok {
			t.Errorf("no %s", name)
		}
	}
	client.Close()
	expectEOF(t, service)
	service.Close()
	r.ended(causeClientFIN)
	if got := r.metrics()[`shunt_bytes_total{direction="upstream",listener="web",path="copy"}`]; got != 5 {
		t.Errorf("%v bytes after the end", got)
	}
}

func TestCountersNeverGoBack(t *testing.T) {
	r := newRig(t, nil)
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() { defer close(done); integrity(t, r, 100); close(stop) }()
	last := map[string]float64{}
	for live := true; live; {
		select {
		case <-stop:
			live = false
		default:
		}
		now := r.metrics()
		for k, v := range last {
			if strings.HasPrefix(k, "shunt_") && strings.Contains(k, "_total") && now[k] < v {
				t.Errorf("%s went from %v to %v", k, v, now[k])
			}
		}
		last = now
	}
	<-done
}

func TestAdminSocketIsPrivateAndRemoved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "admin.sock")
	// A dead process's socket.
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	ln.Close()
	r := newRig(t, nil, func(c *Config) { c.Admin = "unix:" + path })
	fi, err := os.Stat(path)
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("%v, %v", fi, err)
	}
	if code, _ := r.get("/healthz"); code != 200 {
		t.Errorf("healthz: %d", code)
	}
	// Somebody answers there: a second one must not take it away.
	cfg := r.srv.cfg
	other, err := New(cfg, nil, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err == nil || !strings.Contains(err.Error(), "somebody else") {
		t.Errorf("second start: %v", err)
	}
	if err := r.srv.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("socket after the end: %v", err)
	}
}

func TestStartOpensAllOrNothing(t *testing.T) {
	checkLeaks(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	a, b := DefaultListener(), DefaultListener()
	a.Name, a.Listen, a.Upstream = "a", "127.0.0.1:0", "127.0.0.1:1"
	b.Name, b.Listen, b.Upstream = "b", taken.Addr().String(), "127.0.0.1:1"
	for _, cfg := range []Config{
		{Listeners: []Listener{a, b}},
		{Listeners: []Listener{a}, Admin: taken.Addr().String()},
	} {
		s, err := New(cfg, nil, zerolog.Nop())
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Start(); err == nil || !strings.Contains(err.Error(), "address already in use") {
			t.Errorf("start: %v", err)
		}
		if err := s.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	}
}

func TestConfigErrorsNameTheField(t *testing.T) {
	good := DefaultListener()
	good.Name, good.Listen, good.Upstream = "a", "127.0.0.1:0", "127.0.0.1:1"
	for want, change := range map[string]func(*Config){
		"no listener":     func(c *Config) { c.Listeners = nil },
		"used twice":      func(c *Config) { c.Listeners = append(c.Listeners, c.Listeners[0]) },
		"listen":          func(c *Config) { c.Listeners[0].Listen = "127.0.0.1" },
		"upstream":        func(c *Config) { c.Listeners[0].Upstream = ":80" },
		"want a number":   func(c *Config) { c.Listeners[0].Upstream = "h:0" },
		"bypass":          func(c *Config) { c.Listeners[0].Bypass = "maybe" },
		"max_connections": func(c *Config) { c.Listeners[0].MaxConnections = -1 },
		"dial_timeout":    func(c *Config) { c.Listeners[0].DialTimeout = 0 },
		"idle_timeout":    func(c *Config) { c.Listeners[0].IdleTimeout = -1 },
		"keepalive":       func(c *Config) { c.Listeners[0].KeepAlive.Count = 0 },
		"admin":           func(c *Config) { c.Admin = "unix:" },
	} {
		cfg := Config{Listeners: []Listener{good}}
		change(&cfg)
		if _, err := New(cfg, nil, zerolog.Nop()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	if _, err := New(Config{Listeners: []Listener{good}}, nil, zerolog.Nop()); err != nil {
		t.Error(err)
	}
}

func TestDualStackUnmapsAddresses(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) { l.Listen = ":0" }))
	_, port, _ := net.SplitHostPort(r.srv.Addrs()[0].Addr.String())
	for _, host := range []string{"127.0.0.1", "::1"} {
		c, err := net.Dial("tcp", net.JoinHostPort(host, port))
		if err != nil {
			if host == "::1" {
				t.Skipf("no IPv6 loopback: %v", err)
			}
			t.Fatal(err)
		}
		r.keep(c.(*net.TCPConn))
		r.accept().Close()
		if got := r.srv.Connections(); len(got) > 0 && got[len(got)-1].Down.Remote != c.LocalAddr().String() {
			t.Errorf("client shown as %s, is %s", got[len(got)-1].Down.Remote, c.LocalAddr())
		}
	}
}

func TestExposedAdminEndpointIsWarnedAbout(t *testing.T) {
	open := t.TempDir()
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ listen, word string }{
		{"127.0.0.1:0", ""},
		{"0.0.0.0:0", "other hosts"},
		{":0", "other hosts"},
		{"unix:" + filepath.Join(t.TempDir(), "a"), ""},
		{"unix:" + filepath.Join(open, "a"), "writable for all"},
	} {
		t.Run(c.listen, func(t *testing.T) {
			r := newRig(t, nil, func(cfg *Config) { cfg.Admin = c.listen })
			if warned := strings.Contains(r.log.String(), "no authentication"); warned != (c.word != "") || !strings.Contains(r.log.String(), c.word) {
				t.Errorf("warned: %v, want %q\n%s", warned, c.word, r.log.String())
			}
		})
	}
}

func TestOpenedComesBeforeAnythingIsServed(t *testing.T) {
	// An error of it ends the start, and closes everything.
	fault := errors.New("fault")
	l := DefaultListener()
	l.Name, l.Listen, l.Upstream = "web", "127.0.0.1:0", "127.0.0.1:1"
	var s *Server
	var addrs []string
	s, err := New(Config{Listeners: []Listener{l}, Admin: "127.0.0.1:0", Opened: func() error {
		addrs = append(addrs, s.Addrs()[0].Addr.String(), s.AdminAddr())
		for _, a := range addrs {
			c, err := net.Dial("tcp", a)
			if err != nil {
				t.Errorf("%s is not open: %v", a, err)
				continue
			}
			defer c.Close()
		}
		return fault
	}}, nil, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(); !errors.Is(err, fault) {
		t.Errorf("start: %v", err)
	}
	if len(addrs) != 2 {
		t.Fatal("not called once")
	}
	for _, a := range addrs {
		if c, err := net.Dial("tcp", a); err == nil {
			c.Close()
			t.Errorf("%s is still open", a)
		}
	}
}
