package proxy

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Refusals say in one stable word why a peer was closed right after accept.
// They label shunt_refused_total.
const (
	refusedACL         = "acl"          // allow, deny, or the Admit function
	refusedSourceLimit = "source-limit" // max_connections_per_source
	refusedSourceRate  = "source-rate"  // source_rate
	refusedLimit       = "limit"        // limits.max_connections
)

// refusals are all of them, in the order in which they are looked for.
var refusals = []string{refusedACL, refusedSourceLimit, refusedSourceRate, refusedLimit}

// Network is the addresses that an entry of an allow or deny list means.
type Network struct {
	// Prefix is masked; IPv4 networks aren't v4-mapped.
	Prefix netip.Prefix
	// Zone, unless empty, is the interface by which the addresses must have come.
	Zone string
}

// ParseNetwork reads an address or a CIDR network: "10.0.0.1", "10.0.0.0/8",
// "2001:db8::/32", "fe80::1%eth0" or "fe80::%eth0/64". Without a zone the
// addresses of every zone are meant.
func ParseNetwork(s string) (Network, error) {
	text, length, isPrefix := strings.Cut(s, "/")
	a, err := netip.ParseAddr(text)
	if err != nil {
		return Network{}, fmt.Errorf("%q is neither an address nor a network", s)
	}
	n := Network{Zone: a.Zone()}
	a = a.WithZone("")
	bits := a.BitLen()
	if isPrefix {
		if bits, err = strconv.Atoi(length); err != nil || bits < 0 || bits > a.BitLen() || strconv.Itoa(bits) != length {
			return Network{}, fmt.Errorf("%q: /%s: want a length from 0 to %d", s, length, a.BitLen())
		}
	}
	if a.Is4In6() {
		if bits < 96 {
			return Network{}, fmt.Errorf("%q is more than the v4-mapped addresses", s)
		}
		a, bits = a.Unmap(), bits-96
	}
	p := netip.PrefixFrom(a, bits)
	if n.Prefix = p.Masked(); n.Prefix != p {
		return Network{}, fmt.Errorf("%q has bits beyond its length; did you mean %q?", s, n)
	}
	return n, nil
}

// String returns the form that ParseNetwork reads.
func (n Network) String() string {
	a := n.Prefix.Addr().WithZone(n.Zone)
	if n.Prefix.IsSingleIP() {
		return a.String()
	}
	return fmt.Sprintf("%s/%d", a, n.Prefix.Bits())
}

// contains says whether a, unmapped, is in n.
func (n Network) contains(a netip.Addr) bool {
	return (n.Zone == "" || n.Zone == a.Zone()) && n.Prefix.Contains(a.WithZone(""))
}

func anyContains(ns []Network, a netip.Addr) bool {
	for _, n := range ns {
		if n.contains(a) {
			return true
		}
	}
	return false
}

// SourceRate bounds how many connections one source may make. PerSecond zero: no bound.
type SourceRate struct {
	// PerSecond is how many, on average.
	PerSecond int
	// Burst is how many at once; zero: as many as PerSecond.
	Burst int
}

// gate decides who may connect to a listener. Its methods are safe for concurrent use.
type gate struct {
	allow, deny []Network
	perSource   int
	rates       *rates // nil: no bound

	// Of the gates that a listener has one after the other the first's.
	mu   *sync.Mutex
	live map[netip.Addr]int // by source; no longer than the listener has connections
}

// newGate returns nil for a listener that everybody may connect to.
func newGate(cfg *Listener) *gate {
	g := &gate{allow: cfg.Allow, deny: cfg.Deny, perSource: cfg.MaxConnectionsPerSource, mu: new(sync.Mutex)}
	if g.perSource > 0 {
		g.live = map[netip.Addr]int{}
	}
	if cfg.SourceRate.PerSecond > 0 {
		g.rates = newRates(cfg.SourceRate)
	}
	if len(g.allow) == 0 && len(g.deny) == 0 && g.live == nil && g.rates == nil {
		return nil
	}
	return g
}

// enter says why an accepted peer must be refused, or counts it, until leave.
// What deny has is refused, then what a list of allow doesn't have.
func (g *gate) enter(peer Stream) (refusal string) {
	if g == nil {
		return ""
	}
	a := addrOf(peer.RemoteAddr()).Addr()
	if anyContains(g.deny, a) || len(g.allow) > 0 && !anyContains(g.allow, a) {
		return refusedACL
	}
	if g.live == nil && g.rates == nil {
		return ""
	}
	source := sourceOf(a)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.live != nil && g.live[source] >= g.perSource {
		return refusedSourceLimit
	}
	if g.rates != nil && !g.rates.take(source, time.Since(g.rates.epoch)) {
		return refusedSourceRate
	}
	if g.live != nil {
		g.live[source]++
	}
	return ""
}

// takeOver goes on with what old, the gate of the listener's former settings,
// knows of the sources.
func (g *gate) takeOver(old *gate) {
	if g == nil || old == nil {
		return
	}
	g.mu = old.mu
	if g.live != nil && old.live != nil {
		g.live = old.live
	}
	if g.rates != nil && old.rates != nil && g.rates.interval == old.rates.interval && g.rates.capacity == old.rates.capacity {
		g.rates = old.rates
	}
}

// leave ends what enter has counted.
func (g *gate) leave(peer Stream) {
	if g == nil || g.live == nil {
		return
	}
	source := sourceOf(addrOf(peer.RemoteAddr()).Addr())
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.live[source]--; g.live[source] <= 0 {
		delete(g.live, source)
	}
}

// sourceOf returns what counts as one source: an IPv4 address; the /64 of a public IPv6
// address, since a single host may use all of one; each other IPv6 address by itself,
// since private networks put many hosts into a /64.
func sourceOf(a netip.Addr) netip.Addr {
	if a.Is6() && a.IsGlobalUnicast() && !a.IsPrivate() {
		p, err := a.WithZone("").Prefix(64)
		if err == nil {
			return p.Addr()
		}
	}
	return a
}

// maxRated is how many sources one of the two tables of rates holds.
const maxRated = 1 << 14

// rates is a token bucket for each source. A bucket is the time at which it
// will be full again. One that is full is as good as none, so sources are forgotten after
// the time that an empty bucket takes to fill. With more than maxRated sources in that time, those
// that came least recently are forgotten early, and have a full bucket again: memory is bounded.
type rates struct {
	epoch    time.Time
	interval time.Duration // for one connection
	capacity time.Duration // for a full bucket
	period   time.Duration // after which the tables are turned, at least capacity
	turned   time.Duration // when they were
	young    map[netip.Addr]time.Duration
	old      map[netip.Addr]time.Duration
}

func newRates(r SourceRate) *rates {
	burst := r.Burst
	if burst == 0 {
		burst = r.PerSecond
	}
	interval := time.Second / time.Duration(r.PerSecond)
	capacity := interval * time.Duration(burst)
	return &rates{epoch: time.Now(), interval: interval, capacity: capacity, period: max(capacity, time.Second),
		young: map[netip.Addr]time.Duration{}}
}

// take says whether source may connect now, a time since the epoch.
func (r *rates) take(source netip.Addr, now time.Duration) bool {
	if now-r.turned >= r.period || len(r.young) >= maxRated {
		if now-r.turned >= 2*r.period {
			r.young = nil // nobody came for a period
		}
		r.old, r.young, r.turned = r.young, map[netip.Addr]time.Duration{}, now
	}
	full, ok := r.young[source]
	if !ok {
		full = r.old[source]
	}
	full = max(full, now)
	ok = full+r.interval-now <= r.capacity
	if ok {
		full += r.interval
	}
	r.young[source] = full
	return ok
}
