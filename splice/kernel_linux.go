package splice

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"shunt/bpf"
)

const (
	// claimWithin is how long a client's socket may stay enrolled without
	// this process having accepted the connection.
	claimWithin = time.Second
	// watchEvery is the period of what runs behind the calls.
	watchEvery = 500 * time.Millisecond
	// limitEvery is the period in which the automatic queue limit follows
	// the number of waiting receivers, while there are enough to matter.
	limitEvery = 50 * time.Millisecond
	// surveyAge is how old the view of all sockets may be that Stats uses.
	surveyAge = 200 * time.Millisecond
	// stallAfter is how long a receiver may leave its very first redirected
	// bytes untouched before it is said to be stalled.
	stallAfter = 10 * time.Second
	// stallMemory is how long later connections of a stalled peer are copied.
	stallMemory = 10 * time.Minute
	// appSndbuf is SO_SNDBUF of an application's socket that got onto the slow
	// path; the kernel doubles it. On loopback a segment has up to 64 KiB, and a
	// corked sender (MSG_MORE, TCP_CORK, sendfile) that has no room for two waits
	// for the kernel's 200 ms timer.
	appSndbuf      = 64 << 10
	socketsPerPair = 4
)

// Kernel is the bypass of this process: programs, maps and links. All methods
// are safe for concurrent use. Nothing is pinned: it ends with Close or with
// the process, and connections then go on over TCP or end with their sockets.
type Kernel struct {
	opt    Options
	report Report
	mode   bpf.ShuntMode

	obj        bpf.ShuntObjects
	links      []link.Link
	iter       *link.Iter
	mem        []byte
	pairs      []bpf.ShuntPair
	budget     uint64
	stallAfter time.Duration

	// mu guards the slots' ownership and the tables below.
	mu      sync.Mutex
	locals  map[[16]byte]bool // of followLocals alone, once started
	owned   []bool            // slot is claimed: by a Candidate or a Route
	claimed uint64            // candidates that were claimed or swept so far
	freed   []uint32
	listens map[bpf.ShuntListenKey][]bpf.ShuntListenValue
	routes  map[*Route]struct{}
	fresh   map[*Route]struct{} // not every receiver of these has taken bytes yet
	stalled map[stallKey]time.Time

	stallMu sync.Mutex // of findStalled

	surveyMu sync.Mutex
	surveyAt time.Time
	seen     map[uint64]view

	remote sync.Map // netip.Addr of upstreams that turned out not to be local

	crowd chan struct{} // a route was added, and there are many
	stop  chan struct{}
	done  sync.WaitGroup
}

// view is what the iterator saw of a socket. Left counts only when settled:
// between the verdict and the kernel's taking over what it said, the window is
// granted and not yet there.
type view struct {
	bpf.ShuntSight
	settled bool
}

// stallKey is a peer that did not take redirected bytes: a client's address
// or an upstream's address and port.
type stallKey struct {
	dir  Direction
	addr netip.AddrPort
}

// Open loads the programs, attaches them and tries them on a loopback pair. An
// error says what is missing; nothing is left attached then. Minimum kernel:
// see Probe.
func Open(o Options) (*Kernel, error) {
	k, r := open(o)
	if k == nil {
		return nil, errors.New(r.Reason)
	}
	return k, nil
}

// Report returns what the start-up checks found. The caller must not change it.
func (k *Kernel) Report() *Report { return &k.report }

// load creates maps and programs.
func (k *Kernel) load() error {
	if err := rlimit.RemoveMemlock(); err != nil {
		return fmt.Errorf("remove memlock limit: %w", err)
	}
	spec, err := bpf.LoadShunt()
	if err != nil {
		return fmt.Errorf("read embedded programs: %w", err)
	}
	netns, err := netnsCookie()
	if err != nil {
		return fmt.Errorf("getsockopt SO_NETNS_COOKIE: %w", err)
	}
	slots := uint32(max(k.opt.MaxSockets/socketsPerPair, 1))
	for name, v := range map[string]any{
		bpf.ShuntVarVerdictMode: k.mode,
		bpf.ShuntVarWindow:      k.opt.Window,
		bpf.ShuntVarSlots:       slots,
		bpf.ShuntVarAppSndbuf:   uint32(appSndbuf),
		bpf.ShuntVarOwnNetns:    netns,
		bpf.ShuntVarQueueLimit:  uint32(k.report.QueueLimit),
	} {
		if err := spec.Variables[name].Set(v); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	spec.Maps[bpf.ShuntMapPairs].MaxEntries = slots
	spec.Maps[bpf.ShuntMapFreeSlots].MaxEntries = slots
	spec.Maps[bpf.ShuntMapHalves].MaxEntries = max(slots, 1024)
	spec.Maps[bpf.ShuntMapSocks].MaxEntries = slots * socketsPerPair
	if err := spec.LoadAndAssign(&k.obj, nil); err != nil {
		return err
	}
	size := int(slots) * int(unsafe.Sizeof(bpf.ShuntPair{}))
	k.mem, err = unix.Mmap(k.obj.Pairs.FD(), 0, roundUp(size, os.Getpagesize()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mmap pairs: %w", err)
	}
	k.pairs = unsafe.Slice((*bpf.ShuntPair)(unsafe.Pointer(&k.mem[0])), slots)
	k.owned = make([]bool, slots)
	return nil
}

func roundUp(n, to int) int { return (n + to - 1) / to * to }

// attach puts the programs where they run. The verdict goes first: a socket
// that is enrolled must find it.
func (k *Kernel) attach(cgroup *os.File) error {
	err := link.RawAttachProgram(link.RawAttachProgramOptions{
		Target:  k.obj.Socks.FD(),
		Program: k.obj.OnSend,
		Attach:  ebpf.AttachSkMsgVerdict,
	})
	if err != nil {
		return fmt.Errorf("attach verdict: %w", err)
	}
	k.iter, err = link.AttachIter(link.IterOptions{Program: k.obj.Survey, Map: k.obj.Socks})
	if err != nil {
		return fmt.Errorf("attach iterator: %w", err)
	}
	if err := k.attachCgroup(cgroup, k.obj.OnRelease, ebpf.AttachCgroupInetSockRelease); err != nil {
		return fmt.Errorf("attach sock_release: %w", err)
	}
	if err := k.attachCgroup(cgroup, k.obj.OnSockops, ebpf.AttachCGroupSockOps); err != nil {
		return fmt.Errorf("attach sock_ops: %w", err)
	}
	return nil
}

func (k *Kernel) attachCgroup(cgroup *os.File, p *ebpf.Program, at ebpf.AttachType) error {
	l, err := link.AttachRawLink(link.RawLinkOptions{Target: int(cgroup.Fd()), Program: p, Attach: at})
	if err != nil {
		return err
	}
	k.links = append(k.links, l)
	return nil
}

// Close detaches everything. Call it when no Route is left.
func (k *Kernel) Close() error {
	if k.stop != nil {
		close(k.stop)
		k.done.Wait()
		k.stop = nil
	}
	for _, l := range k.links {
		l.Close()
	}
	k.links = nil
	if k.iter != nil {
		k.iter.Close()
		k.iter = nil
	}
	if k.mem != nil {
		k.mu.Lock()
		k.pairs = nil
		k.mu.Unlock()
		if err := unix.Munmap(k.mem); err != nil {
			return fmt.Errorf("munmap pairs: %w", err)
		}
		k.mem = nil
	}
	return k.obj.Close()
}

func netnsCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
}

// sysctl reads the first number of a file under /proc/sys.
func sysctl(name string, otherwise uint64) uint64 {
	b, err := os.ReadFile("/proc/sys/" + name)
	if err != nil {
		return otherwise
	}
	f := strings.Fields(string(b))
	if len(f) == 0 {
		return otherwise
	}
	v, err := strconv.ParseUint(f[0], 10, 64)
	if err != nil {
		return otherwise
	}
	return v
}

// Listen makes connections from this host to ln candidates for the bypass. A
// wildcard listener matches this host's own addresses only, and a loopback
// address counts only in this process's network namespace. The function it
// returns withdraws it.
func (k *Kernel) Listen(ln *net.TCPListener) (func(), error) {
	a, ok := ln.Addr().(*net.TCPAddr)
	if !ok {
		return nil, fmt.Errorf("listen on %v: not a TCP address", ln.Addr())
	}
	ap := a.AddrPort()
	key := bpf.ShuntListenKey{Port: uint32(ap.Port())}
	value := bpf.ShuntListenValue{V4: 1, V6: 1}
	if !ap.Addr().IsUnspecified() {
		key.Addr = ap.Addr().WithZone("").As16()
	} else if ap.Addr().Is4() {
		value.V6 = 0
	} else if v6only(ln) {
		value.V4 = 0
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.listens[key] = append(k.listens[key], value)
	if err := k.putListen(key); err != nil {
		k.dropListen(key, value)
		return nil, fmt.Errorf("announce listener %v: %w", a, err)
	}
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.dropListen(key, value)
		if k.pairs != nil {
			k.putListen(key)
		}
	}, nil
}

func (k *Kernel) dropListen(key bpf.ShuntListenKey, value bpf.ShuntListenValue) {
	vs := k.listens[key]
	for i, v := range vs {
		if v == value {
			k.listens[key] = append(vs[:i], vs[i+1:]...)
			return
		}
	}
}

// putListen writes what all listeners on key cover together.
func (k *Kernel) putListen(key bpf.ShuntListenKey) error {
	vs := k.listens[key]
	if len(vs) == 0 {
		delete(k.listens, key)
		return k.obj.Listens.Delete(key)
	}
	var all bpf.ShuntListenValue
	for _, v := range vs {
		all.V4 |= v.V4
		all.V6 |= v.V6
	}
	return k.obj.Listens.Put(key, all)
}

func v6only(ln *net.TCPListener) bool {
	only := false
	rc, err := ln.SyscallConn()
	if err != nil {
		return false
	}
	rc.Control(func(fd uintptr) {
		v, err := unix.GetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_V6ONLY)
		only = err == nil && v == 1
	})
	return only
}

// start begins what runs behind the calls.
func (k *Kernel) start() {
	k.stop = make(chan struct{})
	k.done.Add(2)
	go k.watch()
	go k.followLocals(k.subscribe())
	if k.opt.QueueLimit == 0 {
		k.done.Add(1)
		go k.followLimit()
	}
}

func (k *Kernel) watch() {
	defer k.done.Done()
	t := time.NewTicker(watchEvery)
	defer t.Stop()
	for {
		select {
		case <-k.stop:
			return
		case <-t.C:
		}
		k.sweep()
		k.reclaim()
		k.findStalled()
	}
}

// sweep gives back client sockets that nobody accepted: a server in another
// namespace has the same address, or the accept backlog is slow.
func (k *Kernel) sweep() {
	var born uint64
	if err := k.obj.Candidates.Get(&born); err != nil {
		return
	}
	now := monotonic()
	k.mu.Lock()
	defer k.mu.Unlock()
	if born == k.claimed {
		return
	}
	var used uint32
	if err := k.obj.Fresh.Get(&used); err != nil {
		return
	}
	for slot := range min(int(used), len(k.pairs)) {
		p := &k.pairs[slot]
		if k.owned[slot] || atomic.LoadUint64(&p.End[bpf.ShuntRoleROLE_C].Cookie) == 0 {
			continue
		}
		if age := now - time.Duration(atomic.LoadUint64(&p.Born)); age > claimWithin {
			k.claimed++
			k.giveBack(uint32(slot), true)
		}
	}
}

func monotonic() time.Duration {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}

// giveBack ends a slot; k.mu is held. With takeOut, its sockets leave the
// sockhash and become plain TCP: only where nothing was ever redirected, since
// what is queued for them would be destroyed. Otherwise they leave by being closed.
func (k *Kernel) giveBack(slot uint32, takeOut bool) {
	p := &k.pairs[slot]
	k.owned[slot] = false
	atomic.StoreUint32((*uint32)(&p.Open), uint32(bpf.ShuntOpenOPEN_NOT))
	atomic.AddUint32(&p.Gen, 1)
	k.clearEnds(p, takeOut)
	k.freed = append(k.freed, slot)
}

func (k *Kernel) clearEnds(p *bpf.ShuntPair, takeOut bool) {
	for i := range p.End {
		// Without its cookie in the pair a socket belongs nowhere: its sends pass.
		c := atomic.SwapUint64(&p.End[i].Cookie, 0)
		if c != 0 && takeOut {
			// Gone already, or never there (EBUSY): nothing to do.
			k.obj.Socks.Delete(c)
		}
	}
}

// reclaim makes given-back slots usable again once no program can still be
// working with what it read of them before.
func (k *Kernel) reclaim() {
	k.mu.Lock()
	slots := k.freed
	k.freed = nil
	k.mu.Unlock()
	if len(slots) == 0 {
		return
	}
	if err := gracePeriod(); err != nil {
		// One period of the watch is far longer than a program runs.
		select {
		case <-k.stop:
			return
		case <-time.After(watchEvery):
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, slot := range slots {
		p := &k.pairs[slot]
		// A program that had passed its generation check may have enrolled one more end since.
		k.clearEnds(p, true)
		gen := atomic.LoadUint32(&p.Gen)
		*p = bpf.ShuntPair{}
		atomic.StoreUint32(&p.Gen, gen)
		if err := k.obj.FreeSlots.Put(nil, slot); err != nil {
			k.opt.Log.Warn().Err(err).Uint32("slot", slot).Msg("bypass slot lost")
		}
	}
}

// gracePeriod returns when every BPF program that was running has ended:
// MEMBARRIER_CMD_GLOBAL is synchronize_rcu().
func gracePeriod() error {
	const cmdGlobal = 1
	_, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, cmdGlobal, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// survey returns a view of every socket in the map, by cookie, not older than
// surveyAge. The map must not be changed.
func (k *Kernel) survey(maxAge time.Duration) (map[uint64]view, error) {
	k.surveyMu.Lock()
	defer k.surveyMu.Unlock()
	if k.seen != nil && time.Since(k.surveyAt) < maxAge {
		return k.seen, nil
	}
	it, err := k.iter.Open()
	if err != nil {
		return nil, fmt.Errorf("open iterator: %w", err)
	}
	defer it.Close()
	const size = int(unsafe.Sizeof(bpf.ShuntSight{}))
	seen := make(map[uint64]view, len(k.seen))
	buf := make([]byte, 2048*size)
	have := 0
	for {
		n, err := it.Read(buf[have:])
		have += n
		for _, s := range unsafe.Slice((*bpf.ShuntSight)(unsafe.Pointer(&buf[0])), have/size) {
			before, ok := k.seen[s.Cookie]
			seen[s.Cookie] = view{s, s.Left != 0 || ok && before.Granted == s.Granted}
		}
		rest := have % size
		copy(buf, buf[have-rest:have])
		have = rest
		if err != nil || n == 0 {
			break
		}
	}
	k.seen, k.surveyAt = seen, time.Now()
	return seen, nil
}

// inspect looks at one socket now. State 0 means that it is gone.
func (k *Kernel) inspect(cookie, addr uint64) (bpf.ShuntSight, error) {
	v := bpf.ShuntSight{Cookie: cookie, Addr: addr}
	_, err := k.obj.Inspect.Run(&ebpf.RunOptions{Context: &v, ContextOut: &v})
	if err != nil {
		return v, fmt.Errorf("run inspect: %w", err)
	}
	return v, nil
}

// messageCost is what the kernel allocates for each send that waits, beside its
// bytes: struct sk_msg.
const messageCost = 1 << 10

// cost is the memory that what waits for a receiver takes, in bytes.
func cost(s bpf.ShuntSight) uint64 { return uint64(s.Queued) + uint64(s.Messages)*messageCost }

// limit is the queue limit in force, in bytes.
func (k *Kernel) limit() uint32 {
	var v uint32
	if err := k.obj.QueueLimit.Get(&v); err != nil {
		return MinQueueLimit
	}
	return v
}

// budgetOf is the bytes that all receivers together may have waiting: half of
// what the kernel's TCP may use before it feels pressure, an eighth of the
// memory that is free now, whichever is less.
func budgetOf() uint64 {
	b := sysctl("net/ipv4/tcp_mem", 0) * uint64(os.Getpagesize()) / 2
	if m := memAvailable() / 8; b == 0 || m < b {
		b = m
	}
	return max(b, MaxQueueLimit)
}

func memAvailable() uint64 {
	b, _ := os.ReadFile("/proc/meminfo")
	for _, line := range strings.Split(string(b), "\n") {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == "MemAvailable:" {
			v, _ := strconv.ParseUint(f[1], 10, 64)
			return v << 10
		}
	}
	return 1 << 30
}

// crowded says whether the receivers could have more waiting than the budget.
// k.mu is held.
func (k *Kernel) crowded() bool {
	return k.opt.QueueLimit == 0 && 2*uint64(len(k.routes))*k.report.QueueLimit > k.budget
}

// followLimit keeps the automatic limit times the waiting receivers within the
// budget, from the moment on that there are enough receivers to exceed it.
func (k *Kernel) followLimit() {
	defer k.done.Done()
	t := time.NewTicker(limitEvery)
	defer t.Stop()
	t.Stop()
	current := uint32(k.report.QueueLimit)
	set := func(limit uint32) {
		if limit != current {
			current = limit
			k.obj.QueueLimit.Set(limit)
		}
	}
	budget, budgetAt := k.budget, time.Now()
	for {
		select {
		case <-k.stop:
			return
		case <-k.crowd:
			t.Reset(limitEvery)
		case <-t.C:
		}
		k.mu.Lock()
		crowded := k.crowded()
		k.mu.Unlock()
		if !crowded {
			set(uint32(k.report.QueueLimit))
			t.Stop()
			continue
		}
		if time.Since(budgetAt) > time.Second {
			budget, budgetAt = min(k.budget, budgetOf()), time.Now()
		}
		set(k.limitFor(budget))
	}
}

// limitFor divides the budget among the receivers that have bytes waiting,
// and leaves as much again for those that will have by the next look.
func (k *Kernel) limitFor(budget uint64) uint32 {
	seen, err := k.survey(limitEvery)
	if err != nil {
		return MinQueueLimit
	}
	var waiting uint64
	for _, s := range seen {
		if cost(s.ShuntSight) > MinQueueLimit/2 {
			waiting++
		}
	}
	return uint32(min(max(budget/(2*waiting+1), MinQueueLimit), k.report.QueueLimit))
}

// findStalled looks for receivers that never took their first redirected
// bytes, though they were there for stallAfter.
func (k *Kernel) findStalled() {
	k.stallMu.Lock()
	defer k.stallMu.Unlock()
	k.mu.Lock()
	if len(k.fresh) == 0 {
		k.mu.Unlock()
		return
	}
	check := make([]*Route, 0, len(k.fresh))
	for r := range k.fresh {
		check = append(check, r)
	}
	k.mu.Unlock()
	now := time.Now()
	var seen map[uint64]view
	for _, r := range check {
		open := false
		for _, d := range []Direction{Up, Down} {
			if r.taken[d] {
				continue
			}
			open = true
			if r.sent(d) == 0 {
				continue
			}
			if seen == nil {
				var err error
				if seen, err = k.survey(surveyAge); err != nil {
					return
				}
			}
			s, in := seen[r.cookie[r.receiver(d)]]
			if !in || s.Messages == 0 || uint64(s.Queued) < r.sentTo(d, seen) {
				r.taken[d] = true
				k.unstall(r, d)
				continue
			}
			if r.sentAt[d].IsZero() {
				r.sentAt[d] = now
			}
			if now.Sub(r.sentAt[d]) > k.stallAfter && !r.said[d] {
				r.said[d] = true
				k.sayStalled(r, d, s.Queued)
			}
		}
		if !open {
			k.mu.Lock()
			delete(k.fresh, r)
			k.mu.Unlock()
		}
	}
}

func (k *Kernel) sayStalled(r *Route, d Direction, queued uint32) {
	key := r.stallKey(d)
	k.mu.Lock()
	k.stalled[key] = time.Now()
	k.mu.Unlock()
	who := "upstream"
	if d == Down {
		who = "client"
	}
	k.opt.Log.Warn().Str("receiver", who).Stringer("down", r.downAddr).Stringer("up", r.upAddr).Uint32("queued", queued).
		Dur("for", k.stallAfter).Msg("receiver has not taken its first redirected bytes: it may read by splice(2), which can't see them; later connections of this peer are copied")
}

func (k *Kernel) unstall(r *Route, d Direction) {
	if !r.said[d] {
		return
	}
	k.mu.Lock()
	delete(k.stalled, r.stallKey(d))
	k.mu.Unlock()
}

// isStalled says whether a peer failed to take redirected bytes lately.
func (k *Kernel) isStalled(key stallKey) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	at, ok := k.stalled[key]
	if ok && time.Since(at) > stallMemory {
		delete(k.stalled, key)
		return false
	}
	return ok
}

// withFD runs f on a connection's descriptor.
func withFD(c syscall.Conn, f func(fd int) error) error {
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	if err := rc.Control(func(fd uintptr) { ferr = f(int(fd)) }); err != nil {
		return err
	}
	return ferr
}
