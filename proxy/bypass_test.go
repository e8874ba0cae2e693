package proxy

import (
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"

	"shunt/splice"
)

// fakeBypass is a Bypass whose routes copy, and which notes what it is asked.
type fakeBypass struct {
	mu      sync.Mutex
	calls   []string
	decline splice.Reason // of Claim
	refuse  splice.Reason // of Pair
	hold    chan struct{} // WaitTaken waits for it
}

func (b *fakeBypass) note(s string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls = append(b.calls, s)
}

func (b *fakeBypass) noted() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.calls)
}

func (b *fakeBypass) Listen(*net.TCPListener) (func(), error) {
	b.note("listen")
	return func() { b.note("withdraw") }, nil
}

func (b *fakeBypass) Claim(down *net.TCPConn) (Candidate, splice.Reason) {
	b.note("claim")
	if b.decline != "" {
		return nil, b.decline
	}
	return &fakeCandidate{b, down}, ""
}

type fakeCandidate struct {
	b    *fakeBypass
	down *net.TCPConn
}

func (c *fakeCandidate) Control(string, string, syscall.RawConn) error {
	c.b.note("control")
	return nil
}

func (c *fakeCandidate) Pair(up *net.TCPConn) (Route, splice.Reason) {
	c.b.note("pair")
	if c.b.refuse != "" {
		return nil, c.b.refuse
	}
	return &fakeRoute{b: c.b, legs: [2]*net.TCPConn{c.down, up}}, ""
}

func (c *fakeCandidate) Release() { c.b.note("release") }

type fakeRoute struct {
	b    *fakeBypass
	legs [2]*net.TCPConn
	mu   sync.Mutex
	n    [2]uint64
}

func (r *fakeRoute) Forward(d splice.Direction) error {
	b := make([]byte, 4096)
	for {
		n, err := r.legs[d].Read(b)
		if err == io.EOF {
			r.b.note("forwarded " + d.String())
			return nil
		}
		if err != nil {
			return &splice.EndError{Err: err}
		}
		if _, err := r.legs[1-d].Write(b[:n]); err != nil {
			return &splice.EndError{Write: true, Err: err}
		}
		r.mu.Lock()
		r.n[d] += uint64(n)
		r.mu.Unlock()
	}
}

func (r *fakeRoute) WaitTaken(d splice.Direction, stop <-chan struct{}) error {
	r.b.note("waiting " + d.String())
	if r.b.hold != nil {
		select {
		case <-r.b.hold:
		case <-stop:
			return errors.New("stopped")
		}
	}
	r.b.note("taken " + d.String())
	return nil
}

func (r *fakeRoute) Stats() (s splice.RouteStats) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for d := range s {
		s[d] = splice.DirectionStats{Bypassed: r.n[d], Forwarded: 1, VerdictRuns: 2, Waits: 3, Direct: true}
	}
	return s
}

func (r *fakeRoute) Close() splice.RouteStats {
	for _, c := range r.legs {
		if _, err := c.Write([]byte("x")); !errors.Is(err, net.ErrClosed) && !errors.Is(err, os.ErrClosed) {
			r.b.note("closed too early")
		}
	}
	r.b.note("close")
	return r.Stats()
}

func TestBypassIsAskedInOrder(t *testing.T) {
	b := &fakeBypass{hold: make(chan struct{})}
	r := newRig(t, b)
	client, service := r.pair()
	send(t, client, []byte("123"))
	expect(t, service, "123")
	client.CloseWrite()
	eventually(t, "wait for the receiver", func() bool { return slices.Contains(b.noted(), "waiting upstream") })
	// Nothing has passed the FIN on.
	if s, _ := r.stateOf(); s != stateHalfClosed {
		t.Errorf("state %v", s)
	}
	for _, c := range r.conns() {
		if c.legs[1].sentFIN.Load() {
			t.Error("FIN before the receiver has read everything")
		}
	}
	close(b.hold)
	expectEOF(t, service)
	service.Close()
	expectEOF(t, client)
	r.ended(causeClientFIN)
	want := []string{"listen", "claim", "control", "pair", "forwarded upstream", "waiting upstream", "taken upstream",
		"forwarded downstream", "waiting downstream", "taken downstream", "close"}
	if got := b.noted(); !slices.Equal(got, want) {
		t.Errorf("calls %q\nwant %q", got, want)
	}
	m := r.metrics()
	for name, want := range map[string]float64{
		`shunt_bytes_total{direction="upstream",listener="web",path="bypass"}`: 3,
		`shunt_bytes_total{direction="upstream",listener="web",path="copy"}`:   1,
		`shunt_verdict_runs_total{listener="web"}`:                             4,
		`shunt_queue_waits_total{listener="web"}`:                              6,
	} {
		if m[name] != want {
			t.Errorf("%s: %v, want %v", name, m[name], want)
		}
	}
}

func (r *rig) stateOf() (state, bool) {
	for _, c := range r.conns() {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.state, true
	}
	return 0, false
}

func TestResetWaitsUntilTheReceiverHasRead(t *testing.T) {
	b := &fakeBypass{hold: make(chan struct{})}
	r := newRig(t, b)
	client, service := r.pair()
	r.touch(client, service)
	reset(service)
	eventually(t, "wait for the receiver", func() bool { return slices.Contains(b.noted(), "waiting downstream") })
	if n := r.srv.liveCount(); n != 1 {
		t.Fatalf("%d connections", n)
	}
	close(b.hold)
	expectReset(t, client)
	r.ended(causeServerRST)
}

func TestForcedEndsDoNotWaitForTheReceiver(t *testing.T) {
	b := &fakeBypass{hold: make(chan struct{})}
	r := newRig(t, b)
	client, service := r.pair()
	client.CloseWrite()
	eventually(t, "wait for the receiver", func() bool { return slices.Contains(b.noted(), "waiting upstream") })
	r.srv.killAll(nil, causeStop)
	expectReset(t, service)
	r.ended(causeStop)
}

func TestHalfOpenTimeoutBoundsTheWaitForTheReceiver(t *testing.T) {
	b := &fakeBypass{hold: make(chan struct{})}
	r := newRig(t, b, onListener(func(l *Listener) { l.HalfOpenTimeout = 50_000_000 }))
	client, service := r.pair()
	client.CloseWrite()
	expectReset(t, service)
	r.ended(causeHalfOpen)
}

func TestFailedDialReleasesTheCandidate(t *testing.T) {
	b := &fakeBypass{}
	r := newRig(t, b)
	r.svc.Close()
	r.refused()
	r.ended("dial-refused")
	if got, want := b.noted(), []string{"listen", "claim", "control", "release"}; !slices.Equal(got, want) {
		t.Errorf("calls %q, want %q", got, want)
	}
}

func TestDeclinedConnectionsAreCopiedAndCounted(t *testing.T) {
	for _, b := range []*fakeBypass{{decline: splice.ReasonMPTCP}, {refuse: splice.ReasonMPTCP}} {
		r := newRig(t, b)
		client, service := r.pair()
		send(t, client, []byte("x"))
		expect(t, service, "x")
		client.Close()
		expectEOF(t, service)
		service.Close()
		r.ended(causeClientFIN)
		if n := r.metrics()[`shunt_bypass_declined_total{listener="web",reason="mptcp"}`]; n != 1 {
			t.Errorf("declined: %v", n)
		}
	}
	for reason, o := range map[splice.Reason]option{
		splice.ReasonOff:      onListener(func(l *Listener) { l.Bypass = BypassOff }),
		splice.ReasonFIONREAD: func(c *Config) { c.FIONREADWrong = true },
	} {
		b := &fakeBypass{}
		r := newRig(t, b, o)
		r.pair()
		if n := r.metrics()[`shunt_bypass_declined_total{listener="web",reason="`+string(reason)+`"}`]; n != 1 {
			t.Errorf("declined for %s: %v", reason, n)
		}
		if got := b.noted(); len(got) != 0 {
			t.Errorf("calls %q", got)
		}
	}
}

func TestSpliceOfNilIsNoBypass(t *testing.T) {
	if Splice(nil) != nil {
		t.Error("a Bypass that holds nil")
	}
}
