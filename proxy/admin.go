package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"shunt/splice"
)

// admin is the admin endpoint.
type admin struct {
	listen string // as configured
	addr   string
	path   string // of the UNIX socket, if it is one
	made   os.FileInfo
	ln     net.Listener
	http   *http.Server
}

// openAdmin listens at listen; serve answers.
func openAdmin(s *Server, listen string) (*admin, error) {
	a := &admin{listen: listen}
	var err error
	if path, ok := strings.CutPrefix(listen, "unix:"); ok {
		a.path, a.addr = path, listen
		a.ln, a.made, err = listenUnix(path)
	} else {
		var lc net.ListenConfig
		lc.SetMultipathTCP(false)
		if a.ln, err = lc.Listen(context.Background(), "tcp", listen); err != nil {
			return nil, listenError(listen, err)
		}
		a.addr = a.ln.Addr().String()
	}
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, adminIndex) })
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.metrics.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok\n") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		switch {
		case s.ready.Load():
			io.WriteString(w, "ready\n")
		case s.draining.Load():
			http.Error(w, "draining", http.StatusServiceUnavailable)
		default:
			http.Error(w, "starting", http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("GET /connections", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(s.Connections())
	})
	a.http = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, WriteTimeout: time.Minute, IdleTimeout: time.Minute}
	if why := a.exposed(); why != "" {
		s.log.Warn().Str("addr", a.addr).Str("reason", why).Msg("the admin endpoint has no authentication")
	}
	s.log.Info().Str("addr", a.addr).Msg("admin endpoint up")
	return a, nil
}

// exposed says how others than the user who started this process reach the
// endpoint, or come to stand in its place.
func (a *admin) exposed() string {
	if t, ok := a.ln.Addr().(*net.TCPAddr); ok {
		if !t.IP.IsLoopback() {
			return "it can be reached from other hosts"
		}
		return ""
	}
	dir := filepath.Dir(a.path)
	fi, err := os.Stat(dir)
	if err == nil && fi.Mode()&0o002 != 0 && fi.Mode()&os.ModeSticky == 0 {
		return "everybody can put another socket in its place: " + dir + " is writable for all"
	}
	return ""
}

func (a *admin) serve() { go a.http.Serve(a.ln) }

// adminIndex is the answer to GET /.
const adminIndex = `/metrics      counters and gauges, for Prometheus
/connections  live connections, as JSON
/healthz      200 while the process answers
/readyz       200 while connections are accepted, 503 while draining
`

// listenUnix listens at path, mode 0600. A socket that nobody answers on is
// a dead process's and is replaced.
func listenUnix(path string) (net.Listener, os.FileInfo, error) {
	if fi, err := os.Lstat(path); err == nil {
		if fi.Mode()&os.ModeSocket == 0 {
			return nil, nil, fmt.Errorf("listen unix %s: the file exists and is no socket", path)
		}
		c, err := net.DialTimeout("unix", path, time.Second)
		if err == nil {
			c.Close()
			return nil, nil, fmt.Errorf("listen unix %s: somebody else listens there", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, nil, fmt.Errorf("listen unix %s: remove the stale socket: %w", path, err)
		}
	}
	ln, err := listenPrivate(path)
	if err != nil {
		return nil, nil, err
	}
	ln.SetUnlinkOnClose(false) // close does it, if the file is still ours
	if err := os.Chmod(path, 0o600); err != nil {
		ln.Close()
		os.Remove(path)
		return nil, nil, err
	}
	fi, err := os.Lstat(path)
	if err != nil {
		ln.Close()
		return nil, nil, err
	}
	return ln, fi, nil
}

// close ends the endpoint, requests that are being answered included.
func (a *admin) close() {
	if a.path != "" {
		if fi, err := os.Lstat(a.path); err == nil && os.SameFile(fi, a.made) {
			os.Remove(a.path)
		}
	}
	a.ln.Close() // the HTTP server knows of it only while it serves
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := a.http.Shutdown(ctx); errors.Is(err, context.DeadlineExceeded) {
		a.http.Close()
	}
	a.ln.Close() // where it was never served
}

// Connection is a live connection, as /connections shows it.
type Connection struct {
	ID         uint64         `json:"id"`
	Listener   string         `json:"listener"`
	Upstream   string         `json:"upstream"`
	State      string         `json:"state"`
	Down       ConnectionLeg  `json:"down"`
	Client     string         `json:"client,omitempty"` // as the PROXY header says
	Up         *ConnectionLeg `json:"up,omitempty"`     // while dialling: none
	AgeSeconds float64        `json:"age_seconds"`
	Declined   string         `json:"declined,omitempty"` // why it is copied
	Upward     ConnectionFlow `json:"upstream_flow"`      // toward the upstream
	Downward   ConnectionFlow `json:"downstream_flow"`    // toward the client
}

// ConnectionLeg is the two addresses of one leg.
type ConnectionLeg struct {
	Local  string `json:"local"`
	Remote string `json:"remote"`
}

// ConnectionFlow is one direction of a live connection.
type ConnectionFlow struct {
	Path     string `json:"path"`           // bypass or copy: where bytes go now
	State    string `json:"state"`          // open; ended, after its sender finished
	Copied   uint64 `json:"copied_bytes"`   // through this process
	Bypassed uint64 `json:"bypassed_bytes"` // past it
	Queued   uint64 `json:"queued_bytes"`   // redirected, and not yet read by the receiver
}

// Connections returns the live connections, oldest first.
func (s *Server) Connections() []Connection {
	s.mu.Lock()
	cs := make([]*conn, 0, len(s.conns))
	for _, c := range s.conns {
		cs = append(cs, c)
	}
	s.mu.Unlock()
	slices.SortFunc(cs, func(a, b *conn) int {
		if a.id < b.id {
			return -1
		}
		return 1
	})
	out := make([]Connection, 0, len(cs))
	for _, c := range cs {
		out = append(out, c.describe(s.draining.Load()))
	}
	return out
}

func (c *conn) describe(draining bool) Connection {
	c.mu.Lock()
	defer c.mu.Unlock()
	legOf := func(t Stream) ConnectionLeg {
		return ConnectionLeg{Local: addrString(t.LocalAddr()), Remote: addrString(t.RemoteAddr())}
	}
	st := c.state
	d := Connection{
		ID: c.id, Listener: c.l.cfg.Name, Upstream: c.l.cfg.Upstream,
		Down: legOf(c.down()), AgeSeconds: time.Since(c.start).Seconds(),
	}
	if c.head != nil && c.head.source.IsValid() {
		d.Client = c.client()
	}
	if st >= stateCopying && st < stateClosed {
		d.Up = new(ConnectionLeg)
		*d.Up = legOf(c.legs[1].sock)
		d.Declined = string(c.reason)
		if draining {
			st = stateDraining
		}
	}
	d.State = st.String()
	n := c.countsLocked()
	for i, f := range []*ConnectionFlow{splice.Up: &d.Upward, splice.Down: &d.Downward} {
		f.Path, f.State = "copy", "open"
		if n.direct[i] || c.route != nil && n.copied[i] == 0 {
			f.Path = "bypass"
		}
		if c.flows[i].over {
			f.State = "ended"
		}
		f.Copied, f.Bypassed, f.Queued = n.copied[i], n.bypassed[i], min(n.queued[i], n.copied[i]+n.bypassed[i])
	}
	return d
}
