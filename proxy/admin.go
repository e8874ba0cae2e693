package proxy

import (
	"context"
	"encoding/json"
	"errors"
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
	file   *socketFile // of the UNIX socket, if it is one and ours
	ln     net.Listener
	http   *http.Server
}

// openAdmin listens at listen, on the inherited socket where there is one; serve answers.
func openAdmin(s *Server, listen string, in *Inherited) (*admin, error) {
	a := &admin{listen: listen}
	var err error
	path, isUnix := strings.CutPrefix(listen, "unix:")
	how := UnixSocket{Mode: DefaultUnixMode, Unlink: true}
	if isUnix {
		a.addr = listen
	}
	if in != nil {
		a.ln = in.Listener
		if isUnix {
			a.file, err = in.socketFile(path, how)
		} else {
			a.addr = a.ln.Addr().String()
		}
	} else if isUnix {
		a.ln, a.file, err = listenUnix(path, how)
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
	mux.HandleFunc("GET /upstreams", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(s.Upstreams())
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
	// Not of file: an inherited socket's may be somebody else's.
	dir := filepath.Dir(strings.TrimPrefix(a.listen, "unix:"))
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
/upstreams    upstream addresses and their state, as JSON
/healthz      200 while the process answers
/readyz       200 while connections are accepted, 503 while draining
`

// close ends the endpoint, requests that are being answered included.
func (a *admin) close() {
	a.file.remove()
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
	Path     string  `json:"path"`           // bypass or copy: where bytes go now
	State    string  `json:"state"`          // open; ended, after its sender finished
	Copied   uint64  `json:"copied_bytes"`   // through this process
	Bypassed *uint64 `json:"bypassed_bytes"` // past it; null: unknown
	Queued   uint64  `json:"queued_bytes"`   // redirected, and not yet read by the receiver
}

// Upstreams returns the addresses of the listeners' upstreams, and what is known of each.
func (s *Server) Upstreams() []UpstreamStatus {
	all := []UpstreamStatus{}
	for _, l := range s.current() {
		all = append(all, l.pool.status()...)
	}
	return all
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
		ID: c.id, Listener: c.l.cfg.Name, Upstream: c.upstream(),
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
		f.Copied, f.Queued = n.copied[i], n.queued[i]
		if !n.uncounted[i] {
			f.Bypassed, f.Queued = &n.bypassed[i], min(n.queued[i], n.copied[i]+n.bypassed[i])
		}
	}
	return d
}
