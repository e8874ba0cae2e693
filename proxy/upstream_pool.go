package proxy

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cespare/xxhash/v2"
)

// Balance says how a connection's upstream address is chosen.
type Balance string

const (
	// BalanceRoundRobin takes them in turn.
	BalanceRoundRobin Balance = "round-robin"
	// BalanceLeastConnections takes the one with the fewest live connections.
	BalanceLeastConnections Balance = "least-connections"
	// BalanceSourceHash takes the same one for each client address, for as long as that one is there
	// (rendezvous hashing): an address that comes or goes moves only its own share of the clients.
	BalanceSourceHash Balance = "source-hash"
	// BalanceFirst takes the first that can be had.
	BalanceFirst Balance = "first"
)

// Eject takes an upstream address out of the choice after failed dials. While less than half of the
// addresses are left, ejection is ignored: it is a guess, and what is left would get all the load.
type Eject struct {
	// Failures in a row that eject; 0: never.
	Failures int
	// Duration is how long; as many times longer as the address was ejected without a good dial between,
	// up to five minutes.
	Duration time.Duration
}

// Defaults of ejection and of health checks.
const (
	DefaultEjectFailures = 3
	DefaultEjectDuration = 10 * time.Second
	DefaultHealthTimeout = 2 * time.Second
	DefaultHealthRise    = 2
	DefaultHealthFall    = 3
)

const (
	// maxAddresses bounds what a listener uses, and with it the metrics' labels.
	maxAddresses = 1024
	// changeLogAfter is how often a change of the addresses is logged, at the debug level excepted.
	changeLogAfter = time.Minute
	// maxEjected bounds how long repeated ejections get.
	maxEjected = 5 * time.Minute
)

// errNoUpstream: health checks have all addresses down.
var errNoUpstream = errors.New("no upstream is up")

// pool is the addresses of a listener's upstreams, and what is known of each.
type pool struct {
	l        *listener
	sources  []*source
	balance  Balance
	perConn  bool          // the only source is looked up for each connection
	interval time.Duration // else: between lookups
	grace    time.Duration // notFoundGrace
	ctx      context.Context
	cancel   context.CancelFunc
	checks   chan struct{} // places for health checks
	dead     atomic.Bool   // health checks have all addresses down

	set     atomic.Pointer[[]member]
	settled chan struct{} // closed when there are addresses, or every source was looked up once
	settle  func()

	mu            sync.Mutex
	known         map[address]*endpoint // those in set, and others that still have connections
	lookups       uint64                // that were begun
	resolveErrors uint64
	changed       time.Time // when a change of the set was last worth a line
	turn          int       // of equals
	scratch       []int     // choose's
}

// source is a configured upstream. Its fields are guarded by pool.mu.
type source struct {
	Upstream
	found   []target  // the last good answer
	number  uint64    // of the lookup that err, or else found, is from
	asked   bool      // a lookup has ended
	err     error     // of the last lookup
	missing time.Time // since when there have been no addresses
	warned  time.Time // when a failure was last logged
	retry   time.Time // when the resolver is asked again
}

// endpoint is an address of a pool. The fields without a word are guarded by pool.mu.
type endpoint struct {
	addr     address
	text     string // addr's
	upstream string // the configured one
	hash     uint64 // of text

	*tally
	ailing atomic.Bool // the fields of ejection aren't zero

	// Ejection.
	failures int       // in a row
	ejected  time.Time // until then; zero: not
	times    int       // ejected, without a good dial between
	lastErr  error     // of a dial or a check

	// Health checks.
	checked bool
	down    bool
	streak  int // checks in a row that spoke against down, or for it
	good    int // checks in a row that connected, since the last failed dial
	stop    context.CancelFunc

	current float64 // of round robin
}

// tally counts for an address, over reloads.
type tally struct {
	active     atomic.Int64 // connections, and dials that are under way
	total      atomic.Uint64
	dialErrors atomic.Uint64
}

// member is an endpoint with its place in a set. A set doesn't change.
type member struct {
	*endpoint
	priority uint16
	weight   float64
}

// newPool returns a pool that holds the fixed addresses. Nothing runs before start.
func newPool(l *listener, upstreams []Upstream) *pool {
	p := &pool{
		l: l, balance: l.cfg.Balance, interval: l.cfg.ResolveInterval, grace: notFoundGrace,
		known: map[address]*endpoint{}, checks: make(chan struct{}, maxChecks), settled: make(chan struct{}),
	}
	p.set.Store(&[]member{})
	p.settle = sync.OnceFunc(func() { close(p.settled) })
	p.ctx, p.cancel = context.WithCancel(context.Background())
	// Checks go on between connections, and so must what they check.
	p.perConn = len(upstreams) == 1 && upstreams[0].kind == upstreamName && p.interval == 0 && l.cfg.Health.Interval == 0
	if p.interval == 0 {
		p.interval = DefaultResolveInterval
	}
	for _, u := range upstreams {
		s := &source{Upstream: u}
		if u.kind == upstreamFixed {
			s.asked, s.found = true, []target{{addr: u.addr, weight: 1}}
		}
		p.sources = append(p.sources, s)
	}
	return p
}

// start begins to look names up and to check addresses.
func (p *pool) start() {
	p.mu.Lock()
	p.rebuild()
	p.mu.Unlock()
	if p.perConn {
		p.settle()
		return
	}
	for _, s := range p.sources {
		if s.kind != upstreamFixed {
			go p.keepResolved(s)
		}
	}
}

// close ends what start began. Live connections may still use the pool.
func (p *pool) close() { p.cancel() }

// takeOver takes what another listener's pool knows, before start.
func (p *pool) takeOver(old *pool) {
	if p == nil || old == nil {
		return
	}
	old.mu.Lock()
	defer old.mu.Unlock()
	for _, s := range p.sources {
		for _, o := range old.sources {
			if s.Upstream == o.Upstream && s.kind != upstreamFixed {
				s.found, s.asked, s.err, s.missing, s.warned, s.retry = o.found, o.asked, o.err, o.missing, o.warned, o.retry
			}
		}
	}
	p.resolveErrors, p.changed = old.resolveErrors, old.changed
	for a, o := range old.known {
		e := &endpoint{addr: a, text: o.text, hash: o.hash, tally: o.tally, current: o.current}
		if p.l.cfg.Eject.Failures > 0 {
			e.failures, e.ejected, e.times, e.lastErr = o.failures, o.ejected, o.times, o.lastErr
			e.ailing.Store(o.ailing.Load())
		}
		if p.l.cfg.Health.Interval > 0 {
			e.checked, e.down, e.lastErr = o.checked, o.down, o.lastErr
		}
		p.known[a] = e
	}
}

// rebuild makes the set of what the sources found. p.mu is held.
func (p *pool) rebuild() {
	old := map[*endpoint]bool{}
	for _, m := range *p.set.Load() {
		old[m.endpoint] = true
	}
	had, dropped := len(old), 0
	set := []member{}
	seen := map[address]bool{}
	for _, s := range p.sources {
		for _, t := range s.found {
			if seen[t.addr] {
				continue
			}
			if len(set) == maxAddresses {
				dropped++
				continue
			}
			seen[t.addr] = true
			e := p.known[t.addr]
			if e == nil {
				text := t.addr.String()
				// So that not all proxies of a fleet begin with the same one.
				e = &endpoint{
					addr: t.addr, text: text, hash: xxhash.Sum64String(text),
					tally: new(tally), current: t.weight * rand.Float64(),
				}
				p.known[t.addr] = e
			}
			if e.upstream == "" {
				e.upstream = s.text
			}
			if e.stop == nil && p.l.cfg.Health.Interval > 0 && p.ctx.Err() == nil {
				var ctx context.Context
				ctx, e.stop = context.WithCancel(p.ctx)
				go p.watch(ctx, e)
			}
			delete(old, e)
			set = append(set, member{e, t.priority, t.weight})
		}
	}
	for e := range old {
		if e.stop != nil {
			e.stop()
			e.stop, e.checked, e.down, e.streak, e.good = nil, false, false, 0, 0
		}
	}
	for a, e := range p.known {
		if !seen[a] && e.active.Load() == 0 {
			delete(p.known, a)
		}
	}
	p.set.Store(&set)
	p.noteDead()
	if len(set) > 0 {
		p.settle()
	}
	if dropped > 0 {
		p.l.log.Warn().Int("used", len(set)).Int("left_out", dropped).Msg("too many upstream addresses")
	}
	if added := len(set) - (had - len(old)); (added > 0 || len(old) > 0) && !p.fixed() {
		// Some servers give a part of the addresses, another one each time.
		ev := p.l.log.Debug()
		if now := time.Now(); now.Sub(p.changed) >= changeLogAfter {
			ev, p.changed = p.l.log.Info(), now
		}
		ev.Int("added", added).Int("removed", len(old)).Int("addresses", len(set)).Msg("upstream addresses changed")
	}
}

// fixed says that no name has to be looked up.
func (p *pool) fixed() bool {
	for _, s := range p.sources {
		if s.kind != upstreamFixed {
			return false
		}
	}
	return true
}

// noteDead brings dead up to date. p.mu is held.
func (p *pool) noteDead() {
	set := *p.set.Load()
	dead := len(set) > 0
	for _, m := range set {
		dead = dead && m.down
	}
	if dead && !p.dead.Swap(true) {
		p.l.log.Error().Msg("no upstream is up: connections are refused")
	} else if !dead {
		p.dead.Store(false)
	}
}

// refuses says that a connection needs no dial to be refused.
func (p *pool) refuses() bool { return p != nil && p.dead.Load() }

// addresses returns what a connection may be dialled to, at least one.
func (p *pool) addresses(ctx context.Context) ([]member, error) {
	if p.perConn {
		p.resolveNow(ctx, p.sources[0])
	} else if len(*p.set.Load()) == 0 {
		select {
		case <-p.settled:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-p.ctx.Done():
			// The listener is gone before its first lookup was done; the connection isn't.
			for _, s := range p.sources {
				if s.kind != upstreamFixed {
					p.resolveNow(ctx, s)
				}
			}
		}
	}
	if set := *p.set.Load(); len(set) > 0 {
		return set, nil
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.sources {
		if s.err != nil {
			return nil, s.err
		}
	}
	return nil, errNoUpstream
}

// tried are the members that one dial has had, by their index.
type tried []uint64

func (t *tried) add(i, of int) {
	if *t == nil {
		*t = make(tried, (of+63)/64)
	}
	(*t)[i/64] |= 1 << (i % 64)
}

func (t tried) has(i int) bool { return t != nil && t[i/64]&(1<<(i%64)) != 0 }

// choose returns the index of the address to try next for client, whose active it raises, and how many
// are left, this one included; 0: none.
func (p *pool) choose(set []member, had tried, client netip.Addr) (index, left int) {
	if len(set) == 1 {
		if had != nil {
			return 0, 0
		}
		set[0].active.Add(1)
		return 0, 1
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	up, in := 0, 0
	for _, m := range set {
		if !m.down {
			up++
			if !m.out(now) {
				in++
			}
		}
	}
	// Envoy's panic threshold.
	ignore := 2*in < up
	best := math.MaxInt
	among := p.scratch[:0]
	for i, m := range set {
		if m.down || had.has(i) {
			continue
		}
		left++
		rank := int(m.priority)
		if !ignore && m.out(now) {
			rank += math.MaxUint16 + 1 // the last resort
		}
		if rank < best {
			best, among = rank, among[:0]
		}
		if rank == best {
			among = append(among, i)
		}
	}
	p.scratch = among
	if left == 0 {
		return 0, 0
	}
	index = p.among(set, among, client)
	set[index].active.Add(1)
	return index, left
}

// among chooses between equals. p.mu is held.
func (p *pool) among(set []member, among []int, client netip.Addr) int {
	balance := p.balance
	if balance == BalanceSourceHash && !client.IsValid() {
		balance = BalanceRoundRobin // a UNIX socket
	}
	switch balance {
	case BalanceFirst:
		return among[0]
	case BalanceLeastConnections:
		p.turn++
		best, fewest := 0, math.Inf(1)
		for n := range among {
			i := among[(n+p.turn)%len(among)]
			if load := float64(set[i].active.Load()+1) / set[i].weight; load < fewest {
				best, fewest = i, load
			}
		}
		return best
	case BalanceSourceHash:
		best, highest := among[0], math.Inf(-1)
		for _, i := range among {
			if s := score(client, set[i]); s > highest {
				best, highest = i, s
			}
		}
		return best
	}
	// Nginx's smooth weighted round robin.
	best, sum := among[0], 0.0
	for _, i := range among {
		set[i].current += set[i].weight
		sum += set[i].weight
		if set[i].current > set[best].current {
			best = i
		}
	}
	set[best].current -= sum
	return best
}

// score is weighted rendezvous hashing: the highest of a client's scores wins. It depends on the two
// addresses and the weight alone.
func score(client netip.Addr, m member) float64 {
	var b [24]byte
	ip := client.As16()
	copy(b[:], ip[:])
	binary.LittleEndian.PutUint64(b[16:], m.hash)
	// In (0, 1), with the 53 bits that a float64 has.
	h := (float64(xxhash.Sum64(b[:])>>11) + 0.5) / (1 << 53)
	return -m.weight / math.Log(h)
}

// out says that the address is ejected.
func (e *endpoint) out(now time.Time) bool { return now.Before(e.ejected) }

// reached notes a good dial.
func (p *pool) reached(e *endpoint) {
	e.total.Add(1)
	if !e.ailing.Load() {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !e.ejected.IsZero() {
		p.l.log.Info().Str("upstream", e.upstream).Str("up", e.text).Str("cause", "dial").Msg("upstream up")
	}
	e.failures, e.times, e.ejected = 0, 0, time.Time{}
	e.ailing.Store(false)
}

// missed notes a dial that failed at the address, not for a want of ours.
func (p *pool) missed(e *endpoint, err error, several bool) {
	e.dialErrors.Add(1)
	p.mu.Lock()
	defer p.mu.Unlock()
	e.ailing.Store(true)
	e.failures++
	e.lastErr, e.good = err, 0
	eject := p.l.cfg.Eject
	now := time.Now()
	if !several || eject.Failures == 0 || e.failures < eject.Failures || e.out(now) {
		return
	}
	news := e.ejected.IsZero()
	e.times++
	e.ejected = now.Add(min(time.Duration(e.times)*eject.Duration, max(maxEjected, eject.Duration)))
	// Afterwards one failure is enough.
	e.failures = eject.Failures - 1
	ev := p.l.log.Debug()
	if news {
		ev = p.l.log.Warn()
	}
	ev.Str("upstream", e.upstream).Str("up", e.text).Str("cause", "dial").Err(err).Dur("ejected", e.ejected.Sub(now)).Msg("upstream down")
}

// UpstreamStatus is an address of a listener's upstreams, as /upstreams shows it, or an upstream that has none.
type UpstreamStatus struct {
	Listener    string  `json:"listener"`
	Upstream    string  `json:"upstream"` // as configured
	Address     string  `json:"address,omitempty"`
	State       string  `json:"state"` // up; down, by health checks; ejected, by failed dials; unresolved
	Priority    uint16  `json:"priority"`
	Weight      float64 `json:"weight"`
	Active      int64   `json:"connections_active"` // and dials
	Connections uint64  `json:"connections"`
	DialErrors  uint64  `json:"dial_errors"`
	Failures    int     `json:"dial_failures_in_a_row"`
	LastError   string  `json:"last_error,omitempty"` // of a dial or a check; of an upstream without addresses: of the last lookup
}

// lookupErrors is how many lookups gave no address.
func (p *pool) lookupErrors() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.resolveErrors
}

// status returns every address, and the upstreams without any.
func (p *pool) status() []UpstreamStatus {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	var all []UpstreamStatus
	for _, m := range *p.set.Load() {
		u := UpstreamStatus{
			Listener: p.l.cfg.Name, Upstream: m.upstream, Address: m.text, State: "up", Priority: m.priority, Weight: m.weight,
			Active: m.active.Load(), Connections: m.total.Load(), DialErrors: m.dialErrors.Load(), Failures: m.failures,
		}
		switch {
		case m.down:
			u.State = "down"
		case m.out(now):
			u.State = "ejected"
		}
		if m.lastErr != nil {
			u.LastError = m.lastErr.Error()
		}
		all = append(all, u)
	}
	for _, s := range p.sources {
		if len(s.found) == 0 {
			u := UpstreamStatus{Listener: p.l.cfg.Name, Upstream: s.text, State: "unresolved"}
			if s.err != nil {
				u.LastError = s.err.Error()
			}
			all = append(all, u)
		}
	}
	return all
}

// textOf joins the configured upstreams.
func textOf(upstreams []Upstream) string {
	texts := make([]string, len(upstreams))
	for i, u := range upstreams {
		texts[i] = u.text
	}
	return strings.Join(texts, ", ")
}
