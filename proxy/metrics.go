package proxy

import (
	"math"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"shunt/splice"
)

// metrics is the prometheus.Collector of a Server. Everything is read at the
// scrape: past connections' totals plus the live ones'.
type metrics struct {
	srv      *Server
	registry *prometheus.Registry

	connections, active, bytes, declined, runs, dialErrors, acceptErrors, waits, ends, refused, bypass *prometheus.Desc
	reloads, configured                                                                                *prometheus.Desc
	upUp, upActive, upConnections, upErrors, resolveErrors                                             *prometheus.Desc
}

func newMetrics(s *Server) *metrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("shunt_"+name, help, labels, nil)
	}
	m := &metrics{
		srv: s, registry: prometheus.NewRegistry(),
		connections:  desc("connections_total", "Connections accepted.", "listener"),
		active:       desc("connections_active", "Live connections, by path; path dialling: not decided yet.", "listener", "path"),
		bytes:        desc("bytes_total", "Bytes toward the upstream or the downstream, by path.", "listener", "direction", "path"),
		declined:     desc("bypass_declined_total", "Connections copied instead of bypassed, by reason.", "listener", "reason"),
		runs:         desc("verdict_runs_total", "Runs of the verdict for the applications' sends.", "listener"),
		dialErrors:   desc("dial_errors_total", "Connections for which the upstream was not reached, by kind.", "listener", "kind"),
		acceptErrors: desc("accept_errors_total", "Errors of accept."),
		waits:        desc("queue_waits_total", "Waits for room in a bypassed receiver's queue.", "listener"),
		ends:         desc("connections_ended_total", "Connections ended, by who ended them and how.", "listener", "cause"),
		refused:      desc("refused_total", "Peers closed right after accept, by reason; they are no connections.", "listener", "reason"),
		bypass:       desc("bypass_enabled", "Whether the listener's connections may be bypassed; if not, why.", "listener", "reason"),
		reloads:      desc("reloads_total", "Reloads of the configuration, by result.", "result"),
		configured:   desc("config_last_success_timestamp_seconds", "When the running configuration was taken, at the start or by a reload."),

		upUp:          desc("upstream_up", "Whether connections may be sent to the upstream address: not down by health checks, not ejected.", "listener", "upstream", "address"),
		upActive:      desc("upstream_connections_active", "Live connections to the upstream address, and dials.", "listener", "upstream", "address"),
		upConnections: desc("upstream_connections_total", "Connections made to the upstream address.", "listener", "upstream", "address"),
		upErrors:      desc("upstream_dial_errors_total", "Failed dials of the upstream address.", "listener", "upstream", "address"),
		resolveErrors: desc("resolve_errors_total", "Lookups of upstream names that gave no address.", "listener"),
	}
	m.registry.MustRegister(m, collectors.NewGoCollector(),
		processMetrics{collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})})
	return m
}

// processMetrics leaves the process_network metrics out, which count all
// traffic of the network namespace.
type processMetrics struct{ prometheus.Collector }

// Describe implements prometheus.Collector.
func (p processMetrics) Describe(ch chan<- *prometheus.Desc) {
	all := make(chan *prometheus.Desc)
	go func() { p.Collector.Describe(all); close(all) }()
	for d := range all {
		if !ofNamespace(d) {
			ch <- d
		}
	}
}

// Collect implements prometheus.Collector.
func (p processMetrics) Collect(ch chan<- prometheus.Metric) {
	all := make(chan prometheus.Metric)
	go func() { p.Collector.Collect(all); close(all) }()
	for m := range all {
		if !ofNamespace(m.Desc()) {
			ch <- m
		}
	}
}

func ofNamespace(d *prometheus.Desc) bool { return strings.Contains(d.String(), `"process_network_`) }

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.connections, m.active, m.bytes, m.declined, m.runs,
		m.dialErrors, m.acceptErrors, m.waits, m.ends, m.refused, m.bypass, m.reloads, m.configured,
		m.upUp, m.upActive, m.upConnections, m.upErrors, m.resolveErrors} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	s := m.srv
	// One hold of the mutex for all of it: a connection is live or past, never both or
	// neither.
	s.mu.Lock()
	defer s.mu.Unlock()
	type now struct {
		total counts
		paths map[string]int
	}
	by := map[*past]*now{}
	for _, p := range s.past {
		by[p] = &now{p.counts, map[string]int{"copy": 0, "bypass": 0, "dialling": 0}}
	}
	for _, c := range s.conns {
		n := by[c.l.past]
		c.mu.Lock()
		n.total.add(c.countsLocked())
		switch {
		case c.state < stateCopying:
			n.paths["dialling"]++
		case c.route != nil:
			n.paths["bypass"]++
		default:
			n.paths["copy"]++
		}
		c.mu.Unlock()
	}
	for name, p := range s.past {
		h := &p.high
		h.raise(by[p].total)
		counter(m.connections, p.connections, name)
		for path, n := range by[p].paths {
			gauge(m.active, float64(n), name, path)
		}
		for _, d := range []splice.Direction{splice.Up, splice.Down} {
			counter(m.bytes, h.copied[d], name, d.String(), "copy")
			bypassed := float64(h.bypassed[d])
			if h.uncounted[d] {
				bypassed = math.NaN() // unknown
			}
			ch <- prometheus.MustNewConstMetric(m.bytes, prometheus.CounterValue, bypassed, name, d.String(), "bypass")
		}
		for _, r := range splice.Reasons {
			counter(m.declined, p.declined[r], name, string(r))
		}
		counter(m.runs, h.runs, name)
		counter(m.waits, h.waits, name)
		for _, k := range dialKinds {
			counter(m.dialErrors, p.dialErrors[k], name, k)
		}
		for _, c := range allCauses() {
			counter(m.ends, p.ends[c], name, c)
		}
		for _, r := range refusals {
			counter(m.refused, p.refused[r].count.Load(), name, r)
		}
	}
	for _, l := range s.listeners {
		on := 0.0
		if l.noBypass == "" {
			on = 1
		}
		gauge(m.bypass, on, l.cfg.Name, string(l.noBypass))
	}
	counter(m.reloads, s.reloads.good, "ok")
	counter(m.reloads, s.reloads.bad, "error")
	gauge(m.configured, float64(s.reloads.at.UnixMilli())/1000)
	for _, l := range s.listeners {
		if l.pool == nil {
			continue
		}
		counter(m.resolveErrors, l.pool.lookupErrors(), l.cfg.Name)
		for _, u := range l.pool.status() {
			if u.Address == "" {
				continue
			}
			up := 0.0
			if u.State == "up" {
				up = 1
			}
			gauge(m.upUp, up, u.Listener, u.Upstream, u.Address)
			gauge(m.upActive, float64(u.Active), u.Listener, u.Upstream, u.Address)
			counter(m.upConnections, u.Connections, u.Listener, u.Upstream, u.Address)
			counter(m.upErrors, u.DialErrors, u.Listener, u.Upstream, u.Address)
		}
	}
	counter(m.acceptErrors, s.acceptErrors.Load())
}

// raise makes each total at least o's.
func (c *counts) raise(o counts) {
	for d := range c.copied {
		c.copied[d] = max(c.copied[d], o.copied[d])
		c.bypassed[d] = max(c.bypassed[d], o.bypassed[d])
		c.uncounted[d] = c.uncounted[d] || o.uncounted[d]
	}
	c.runs = max(c.runs, o.runs)
	c.waits = max(c.waits, o.waits)
}
