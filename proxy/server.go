package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"shunt/splice"
)

// Server is a running proxy: its listeners, their connections, and the admin
// endpoint. Its methods are safe for concurrent use.
type Server struct {
	cfg         Config // the one that it was made with; Reload changes what is below
	bypass      Bypass
	log         zerolog.Logger
	resolver    atomic.Pointer[resolver]
	parking     *parking
	workers     workers
	loops       []*loop
	noLoop      bool // tests: goroutines have every connection
	pipes       budget
	tidy        tidy
	dns         []string // what resolver asks; guarded by changing
	metrics     *metrics
	derived     *slots        // of the listeners without a limit of their own
	fitting     int           // how many of these the open files allow
	most        int           // the same, with no pipes: more than a limit of a listener's own is not used
	adminSocket *Inherited    // until Open has used it
	dropped     []*socketFile // of former sockets that nothing wants, until Serve

	accessLog atomic.Bool

	dialled    sync.Map // netip.AddrPort of each socket that went to an original destination
	lastID     atomic.Uint64
	ready      atomic.Bool
	draining   atomic.Bool
	opened     atomic.Bool
	handedOver atomic.Bool
	live       sync.WaitGroup

	// changing is held while listeners are opened or closed; before mu.
	changing sync.Mutex

	mu             sync.Mutex
	conns          map[uint64]*conn
	listeners      []*listener      // never changed in place
	past           map[string]*past // of the listeners, and of former ones that have live connections
	admin          *admin
	maxConnections int // of all listeners together; 0: no limit
	reloads        reloads
	started        bool
	stopped        chan struct{} // closed when everything is; made by Shutdown

	acceptErrors atomic.Uint64
}

// New checks cfg and returns a Server that isn't started. A nil bypass means
// that every connection is copied.
func New(cfg Config, bypass Bypass, log zerolog.Logger) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, bypass: bypass, log: log,
		conns: map[uint64]*conn{},
		past:  map[string]*past{},
	}
	s.dns = cfg.DNSServers
	s.resolveBy(newResolver(s.dns))
	for _, lc := range cfg.Listeners {
		l := newListener(s, lc)
		s.listeners = append(s.listeners, l)
		s.past[lc.Name] = l.past
	}
	s.accessLog.Store(cfg.AccessLog)
	s.maxConnections = cfg.MaxConnections
	s.metrics = newMetrics(s)
	return s, nil
}

// Validate returns what is wrong with c, or nil.
func (c Config) Validate() error {
	if len(c.Listeners) == 0 {
		return errors.New("no listener")
	}
	names := map[string]bool{}
	for i, l := range c.Listeners {
		if l.Name == "" {
			return fmt.Errorf("listener %d: no name", i+1)
		}
		if names[l.Name] {
			return fmt.Errorf("listener %q: the name is used twice", l.Name)
		}
		names[l.Name] = true
		if err := l.validate(); err != nil {
			return fmt.Errorf("listener %q: %w", l.Name, err)
		}
	}
	if c.MaxConnections < 0 {
		return fmt.Errorf("max_connections %d: negative", c.MaxConnections)
	}
	for _, a := range c.DNSServers {
		if _, err := netip.ParseAddrPort(a); err != nil {
			return fmt.Errorf("dns server %q: not an IP address with a port", a)
		}
	}
	if c.Admin != "" {
		if path, ok := strings.CutPrefix(c.Admin, "unix:"); ok {
			if path == "" {
				return errors.New(`admin: "unix:" without a path`)
			}
		} else if _, err := net.ResolveTCPAddr("tcp", c.Admin); err != nil {
			return fmt.Errorf("admin: %w", err)
		}
	}
	return nil
}

func (l Listener) validate() error {
	if l.ListenFunc == nil {
		if l.Listen == "" {
			return errors.New("listen: no address")
		}
		if err := l.validateListen(); err != nil {
			return fmt.Errorf("listen: %w", err)
		}
	}
	if l.DialFunc == nil {
		if _, err := l.parseUpstreams(); err != nil {
			return err
		}
		if err := l.validateChoice(); err != nil {
			return err
		}
	}
	if l.BufferSize < 0 {
		return fmt.Errorf("buffer size %d: negative", l.BufferSize)
	}
	switch l.Bypass {
	case BypassAuto, BypassOn, BypassOff:
	default:
		return fmt.Errorf("bypass %q: not auto, on or off", l.Bypass)
	}
	if l.MaxConnections < 0 {
		return fmt.Errorf("max_connections %d: negative", l.MaxConnections)
	}
	if n := l.MaxConnectionsPerSource; n < 0 {
		return fmt.Errorf("max_connections_per_source %d: negative", n)
	}
	if r := l.SourceRate; r.PerSecond < 0 || r.Burst < 0 || r.PerSecond == 0 && r.Burst > 0 {
		return fmt.Errorf("source_rate %+v: a negative number, or a burst without a rate", r)
	}
	if l.DialTimeout <= 0 && l.DialFunc == nil {
		return fmt.Errorf("dial_timeout %v: not positive", l.DialTimeout)
	}
	for _, t := range []struct {
		name string
		d    time.Duration
	}{
		{"idle_timeout", l.IdleTimeout}, {"half_open_timeout", l.HalfOpenTimeout},
		{"drain_timeout", l.DrainTimeout},
	} {
		if t.d < 0 {
			return fmt.Errorf("%s %v: negative", t.name, t.d)
		}
	}
	if k := l.KeepAlive; k.Idle > 0 && (k.Interval <= 0 || k.Count <= 0) {
		return errors.New("keepalive: interval and count must be positive")
	}
	return nil
}

func (l Listener) validateListen() error {
	name, ok, err := ParseUnix(l.Listen)
	switch {
	case err != nil:
		return err
	case !ok:
		_, err := net.ResolveTCPAddr("tcp", l.Listen)
		return err
	case len(l.Allow) > 0 || len(l.Deny) > 0 || l.MaxConnectionsPerSource > 0 || l.SourceRate.PerSecond > 0:
		return errors.New("the clients of a UNIX socket have no address to be judged by")
	case name[0] == '@' && (l.Unix.Mode != DefaultUnixMode || l.Unix.Owner != "" || l.Unix.Group != ""):
		return errors.New("an abstract socket has no mode, owner or group")
	}
	return nil
}

// Start is Open and Serve.
func (s *Server) Start() error {
	if err := s.Open(); err != nil {
		return err
	}
	s.Serve()
	return nil
}

// Open opens all listeners and the admin endpoint, or none of them; nothing
// is accepted before Serve. It raises RLIMIT_NOFILE to its hard limit first.
// It may be called once.
func (s *Server) Open() (err error) {
	s.changing.Lock()
	defer s.changing.Unlock()
	s.mu.Lock()
	again := s.started
	s.started = true
	s.mu.Unlock()
	if again {
		return errors.New("server was started before")
	}
	files, err := raiseFileLimit()
	if err != nil {
		return fmt.Errorf("getrlimit RLIMIT_NOFILE: %w", err)
	}
	defer func() {
		if err != nil {
			s.closeAll()
		}
	}()
	if s.parking, err = newParking(s.wake); err != nil {
		return err
	}
	// A connection's bytes and ends cost about as much as its accepting and dialling.
	for range max(runtime.GOMAXPROCS(0)/2, 1) {
		l, err := newLoop(s)
		if err != nil {
			return err
		}
		s.loops = append(s.loops, l)
	}
	if err := s.inherit(); err != nil {
		return err
	}
	for _, l := range s.listeners {
		if err := l.open(); err != nil {
			return fmt.Errorf("listener %q: %w", l.cfg.Name, err)
		}
	}
	if s.cfg.Admin != "" {
		a, err := openAdmin(s, s.cfg.Admin, s.adminSocket)
		if err != nil {
			return fmt.Errorf("admin: %w", err)
		}
		s.mu.Lock()
		s.admin = a
		s.mu.Unlock()
	}
	s.share(files)
	if s.cfg.Opened != nil {
		if err := s.cfg.Opened(); err != nil {
			return err
		}
	}
	s.opened.Store(true)
	return nil
}

// Serve starts to accept, after Open.
func (s *Server) Serve() {
	s.changing.Lock()
	defer s.changing.Unlock()
	s.removeDropped()
	if s.admin != nil {
		s.admin.serve()
	}
	for _, l := range s.listeners {
		l.start()
	}
	s.mu.Lock()
	s.reloads.at = time.Now()
	s.mu.Unlock()
	s.ready.Store(true)
}

// closeAll closes what Open opened.
func (s *Server) closeAll() {
	s.giveBack()
	for _, l := range s.listeners {
		l.close()
	}
	if s.admin != nil {
		s.admin.close()
	}
	if s.parking != nil {
		s.parking.close()
		s.workers.close()
	}
	for _, l := range s.loops {
		l.close()
	}
}

// wake is the parking's.
func (s *Server) wake(id uint64, d splice.Direction) {
	s.mu.Lock()
	c := s.conns[id]
	s.mu.Unlock()
	if c != nil {
		c.wake(d)
	}
}

// Files that a connection takes, and what is left for everything else.
const (
	filesPerConn = 2  // its sockets
	filesPerPipe = 2  // splice(2) goes through a pipe
	filesSpare   = 16 // the resolver, the admin endpoint's clients, sockets on their way from one place to another
)

// share divides the files up. A connection has two sockets and, on average,
// one pipe; a direction that gets no pipe copies without.
func (s *Server) share(files uint64) {
	// A listener may take a second descriptor of its socket.
	free := int64(min(files, 1<<30)) - openFiles() - filesSpare - int64(len(s.listeners))
	conns := max(free/(filesPerConn+filesPerPipe), 1)
	s.fitting = int(conns)
	s.most = int(max(free/filesPerConn, 1))
	s.derived = newSlots(s.places(s.listeners))
	for _, l := range s.listeners {
		if l.cfg.MaxConnections == 0 {
			l.slots = s.derived
			continue
		}
		l.slots = newSlots(s.limitOf(l))
	}
	s.pipes.left.Store(max((free-conns*filesPerConn)/filesPerPipe, 0))
}

// limitOf is how many places a listener with a limit of its own has. With more than the files allow,
// accepted connections would leave none for their own dials.
func (s *Server) limitOf(l *listener) int {
	n := l.cfg.MaxConnections
	if n > s.most {
		l.log.Warn().Int("max_connections", n).Int("used", s.most).Msg("max_connections is more than the open files allow")
	}
	return min(n, s.most)
}

// places is how many derived has for these listeners. Each accept loop holds one while it waits: with fewer places
// than loops, some would never accept. Too many are no harm: who finds no descriptor waits for one.
func (s *Server) places(ls []*listener) int {
	loops := 0
	for _, l := range ls {
		if l.cfg.MaxConnections == 0 {
			loops++
		}
	}
	return max(s.fitting, loops)
}

// openFiles is how many descriptors are in use, or a guess.
func openFiles() int64 {
	for _, dir := range []string{"/proc/self/fd", "/dev/fd"} {
		if d, err := os.Open(dir); err == nil {
			names, err := d.Readdirnames(-1)
			d.Close()
			if err == nil {
				return int64(len(names))
			}
		}
	}
	return 16
}

// Addrs returns the listening addresses, with real ports after Start; the
// address of a listener that isn't TCP is invalid.
func (s *Server) Addrs() []ListenAddr {
	var a []ListenAddr
	for _, l := range s.current() {
		if ln := l.ln.Load(); ln != nil {
			a = append(a, ListenAddr{Name: l.cfg.Name, Addr: addrOf((*ln).Addr()), Text: addrString((*ln).Addr())})
		}
	}
	return a
}

// AdminAddr returns where the admin endpoint listens: "host:port" with the
// real port, "unix:/path", or "" where there is none.
func (s *Server) AdminAddr() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.admin == nil {
		return ""
	}
	return s.admin.addr
}

// current returns the listeners that accept.
func (s *Server) current() []*listener {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.listeners
}

// Shutdown drains the server: it isn't ready any more, stops accepting, and
// lets live connections finish until their listener's drain timeout resets
// them. It returns nil when everything is closed. When ctx ends first, the
// rest is reset at once, and ctx's error is returned, also then with everything closed.
// Later calls wait for the same end, and their contexts count too.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	first := s.stopped == nil
	if first {
		s.stopped = make(chan struct{})
	}
	s.mu.Unlock()
	if first {
		if !s.opened.Load() {
			close(s.stopped)
			return nil
		}
		s.draining.Store(true)
		served := s.ready.Swap(false)
		s.log.Info().Int("connections", s.liveCount()).Msg("draining")
		go s.drain(served)
	}
	select {
	case <-s.stopped:
		return nil
	case <-ctx.Done():
	}
	select {
	case <-s.stopped:
		return nil
	default:
	}
	s.killAll(nil, causeStop)
	<-s.stopped
	return ctx.Err()
}

func (s *Server) drain(served bool) {
	s.changing.Lock()
	if !served {
		s.giveBack()
	}
	if s.handedOver.Load() {
		for _, l := range s.listeners {
			l.file = nil
		}
		if s.admin != nil {
			s.admin.file = nil
			s.admin.close()
		}
	}
	for _, l := range s.listeners {
		l.close()
	}
	s.changing.Unlock()
	// Only after the accept loops: no connection is missed, nor one of a listener that was changed or removed meanwhile.
	s.mu.Lock()
	draining := map[*listener]bool{}
	for _, c := range s.conns {
		draining[c.l] = true
	}
	s.mu.Unlock()
	var timers []*time.Timer
	for l := range draining {
		timers = append(timers, time.AfterFunc(l.cfg.DrainTimeout, func() { s.killAll(l, causeDrain) }))
	}
	s.live.Wait()
	for _, t := range timers {
		t.Stop()
	}
	s.parking.close()
	for _, l := range s.loops {
		l.close()
	}
	s.workers.close()
	if s.admin != nil {
		s.admin.close()
	}
	close(s.stopped)
}

// killAll resets the connections of l, or all.
func (s *Server) killAll(l *listener, cause string) {
	s.mu.Lock()
	var cs []*conn
	for _, c := range s.conns {
		if l == nil || c.l == l {
			cs = append(cs, c)
		}
	}
	s.mu.Unlock()
	for _, c := range cs {
		c.kill(cause, true)
	}
}

func (s *Server) liveCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// rate lets one through in each second, and counts the others.
type rate struct {
	mu      sync.Mutex
	last    time.Time
	skipped int
}

func (r *rate) allow() (skipped int, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if now.Sub(r.last) < time.Second {
		r.skipped++
		return 0, false
	}
	skipped, r.skipped, r.last = r.skipped, 0, now
	return skipped, true
}

// suppressed adds how many lines like e were left out before it, if any.
func suppressed(e *zerolog.Event, n int) *zerolog.Event {
	if n > 0 {
		e = e.Int("suppressed", n)
	}
	return e
}

func (s *Server) limitWarn(l *listener, msg string, err error) {
	if n, ok := l.limitLog.allow(); ok {
		suppressed(l.log.Warn(), n).Err(err).Msg(msg)
	}
}

func (s *Server) dialWarn(l *listener, kind string, err error) {
	if n, ok := l.dialLog.allow(); ok {
		suppressed(l.log.Warn(), n).Err(err).Str("kind", kind).Msg("upstream not reached")
	}
}
