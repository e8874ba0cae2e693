package splice

import (
	"errors"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"shunt/bpf"
)

// pairWithin is how long Pair waits for the upstream's end to be born. On one
// host that happens in the soft interrupt that also completes our connect.
const pairWithin = 2 * time.Millisecond

// Candidate is an accepted connection whose client is on this host. Exactly
// one of Pair and Release ends it; its methods are not safe for concurrent use.
type Candidate struct {
	k    *Kernel
	slot uint32
	gen  uint32
	down Socket
}

var whyReason = map[bpf.ShuntWhy]Reason{
	bpf.ShuntWhyWHY_MPTCP: ReasonMPTCP,
	bpf.ShuntWhyWHY_ULP:   ReasonULP,
	bpf.ShuntWhyWHY_BUSY:  ReasonBusy,
	bpf.ShuntWhyWHY_FULL:  ReasonTableFull,
	bpf.ShuntWhyWHY_OTHER: ReasonError,
}

// Claim finds the candidate that belongs to an accepted connection, right
// after accept. A nil Candidate comes with the reason; the kernel holds
// nothing of the connection then.
func (k *Kernel) Claim(down Socket) (*Candidate, Reason) {
	var m bpf.ShuntMember
	err := withFD(down, func(fd int) error { return k.member(fd, &m) })
	if errors.Is(err, unix.ENOENT) {
		return nil, ReasonDownstreamNotLocal
	}
	if err != nil {
		k.opt.Log.Debug().Err(err).Msg("claim")
		return nil, ReasonError
	}
	if m.Role != bpf.ShuntRoleROLE_A {
		// It is the upstream's end of another connection of this process.
		return nil, ReasonBusy
	}
	if m.Slot >= uint32(len(k.pairs)) {
		return nil, reasonOf(m.Why)
	}
	k.mu.Lock()
	p := &k.pairs[m.Slot]
	if atomic.LoadUint32(&p.Gen) != m.Gen || atomic.LoadUint64(&p.End[bpf.ShuntRoleROLE_A].Cookie) != m.Cookie || k.owned[m.Slot] {
		k.mu.Unlock()
		return nil, ReasonExpired
	}
	k.owned[m.Slot] = true
	k.claimed++
	k.mu.Unlock()
	c := &Candidate{k: k, slot: m.Slot, gen: m.Gen, down: down}
	if why := bpf.ShuntWhy(atomic.LoadUint32((*uint32)(&p.Why))); why != bpf.ShuntWhyWHY_NOTHING {
		c.Release()
		return nil, reasonOf(why)
	}
	if k.isStalled(stallKey{Down, netip.AddrPortFrom(addrOf(down.RemoteAddr()).Addr(), 0)}) {
		c.Release()
		return nil, ReasonDownstreamStalled
	}
	return c, ""
}

func reasonOf(why bpf.ShuntWhy) Reason {
	if r, ok := whyReason[why]; ok {
		return r
	}
	return ReasonError
}

func addrOf(a net.Addr) netip.AddrPort {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	ap := t.AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// Control registers an upstream socket before it connects; for
// net.Dialer.Control. An error of the bypass never fails a dial.
func (c *Candidate) Control(_, _ string, rc syscall.RawConn) error {
	m := bpf.ShuntMember{Slot: c.slot, Gen: c.gen, Role: bpf.ShuntRoleROLE_B}
	return rc.Control(func(fd uintptr) {
		if err := c.k.setMember(int(fd), &m); err != nil {
			c.k.opt.Log.Debug().Err(err).Msg("register upstream socket")
		}
	})
}

// Release gives the candidate up: its sockets are plain TCP from here on.
func (c *Candidate) Release() {
	c.k.mu.Lock()
	defer c.k.mu.Unlock()
	if c.k.pairs != nil {
		c.k.giveBack(c.slot, true)
	}
}

// Pair completes the route to a connected upstream, before a byte was written
// to either connection. A nil Route comes with the reason; both connections
// are plain TCP then, and nothing of ahead was written. It waits up to
// pairWithin for the upstream's end. When ahead.First can't be written, Forward(Up)
// will say so.
func (c *Candidate) Pair(up Socket, ahead Ahead) (*Route, Reason) {
	k := c.k
	p := &k.pairs[c.slot]
	upAddr := addrOf(up.RemoteAddr())
	decline := func(r Reason) (*Route, Reason) {
		c.Release()
		return nil, r
	}
	if k.isStalled(stallKey{Up, upAddr}) {
		return decline(ReasonUpstreamStalled)
	}
	var cookie uint64
	err := withFD(up, func(fd int) (err error) {
		cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
		return err
	})
	if err != nil {
		return decline(ReasonError)
	}
	if why := bpf.ShuntWhy(atomic.LoadUint32((*uint32)(&p.Why))); why != bpf.ShuntWhyWHY_NOTHING {
		return decline(reasonOf(why))
	}
	if atomic.LoadUint64(&p.End[bpf.ShuntRoleROLE_B].Cookie) != cookie {
		// No callback for it: this process's own cgroup is outside the configured one.
		return decline(ReasonUpstreamNotLocal)
	}
	if !k.awaitService(p, upAddr.Addr()) {
		if why := bpf.ShuntWhy(atomic.LoadUint32((*uint32)(&p.Why))); why != bpf.ShuntWhyWHY_NOTHING {
			return decline(reasonOf(why))
		}
		return decline(ReasonUpstreamNotLocal)
	}
	if why := bpf.ShuntWhy(atomic.LoadUint32((*uint32)(&p.Why))); why != bpf.ShuntWhyWHY_NOTHING {
		return decline(reasonOf(why))
	}
	r := &Route{k: k, slot: c.slot, p: p, down: c.down, up: up, downAddr: addrOf(c.down.RemoteAddr()), upAddr: upAddr, kept: [2]uint64{Up: ahead.Taken}, added: [2]uint64{Up: uint64(len(ahead.First))}}
	for i := range p.End {
		r.cookie[i] = p.End[i].Cookie
		r.addr[i] = p.End[i].Addr
	}
	open := (*uint32)(&p.Open)
	atomic.StoreUint64(&p.Flow[Up].Forwarded, ahead.Taken)
	if len(ahead.First) > 0 {
		// Nothing of the client's may come before it: only this process's own
		// writes are redirected yet. The queue is empty, so there is room.
		atomic.StoreUint32(open, uint32(bpf.ShuntOpenOPEN_OWN))
		_, r.lost = up.Write(ahead.First)
	}
	k.mu.Lock()
	k.routes[r] = struct{}{}
	k.fresh[r] = struct{}{}
	if k.crowded() {
		select {
		case k.crowd <- struct{}{}:
		default:
		}
	}
	k.mu.Unlock()
	if r.lost == nil {
		// From here on the verdict redirects.
		atomic.StoreUint32(open, uint32(bpf.ShuntOpenOPEN_ALL))
	}
	return r, ""
}

// awaitService waits for S. An upstream address that was not local the last
// time is looked at only once.
func (k *Kernel) awaitService(p *bpf.ShuntPair, upstream netip.Addr) bool {
	born := func() bool { return atomic.LoadUint64(&p.End[bpf.ShuntRoleROLE_S].Cookie) != 0 }
	if born() {
		k.remote.Delete(upstream)
		return true
	}
	if _, remote := k.remote.Load(upstream); remote {
		return false
	}
	deadline := time.Now().Add(pairWithin)
	for time.Now().Before(deadline) {
		nap(50 * time.Microsecond)
		if born() {
			return true
		}
		if atomic.LoadUint32((*uint32)(&p.Why)) != 0 {
			return false
		}
	}
	k.remote.Store(upstream, struct{}{})
	return false
}

// nap sleeps in the kernel: the runtime's timers have a millisecond's grain
// where the process is otherwise idle.
func nap(d time.Duration) {
	ts := unix.NsecToTimespec(int64(d))
	unix.Nanosleep(&ts, nil)
}
