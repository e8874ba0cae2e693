package proxy

import (
	"errors"
	"io"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"shunt/splice"
)

// fakeBypass is a Bypass whose routes copy, and which notes what it is asked.
type fakeBypass struct {
	mu      sync.Mutex
	calls   []string
	decline splice.Reason // of Claim
	refuse  splice.Reason // of Pair
	// uncounted is said of both directions.
	uncounted bool
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

func (b *fakeBypass) Claim(down splice.Socket) (Candidate, splice.Reason) {
	b.note("claim")
	if b.decline != "" {
		return nil, b.decline
	}
	return &fakeCandidate{b, down}, ""
}

type fakeCandidate struct {
	b    *fakeBypass
	down splice.Socket
}

func (c *fakeCandidate) Control(string, string, syscall.RawConn) error {
	c.b.note("control")
	return nil
}

func (c *fakeCandidate) Pair(up splice.Socket, ahead splice.Ahead) (Route, splice.Reason) {
	c.b.note("pair")
	if c.b.refuse != "" {
		return nil, c.b.refuse
	}
	up.Write(ahead.First)
	return &fakeRoute{b: c.b, legs: [2]splice.Socket{c.down, up}}, ""
}

func (c *fakeCandidate) Release() { c.b.note("release") }

type fakeRoute struct {
	b    *fakeBypass
	legs [2]splice.Socket
	mu   sync.Mutex
	n    [2]uint64
}

func (r *fakeRoute) Forward(d splice.Direction) (sum uint64, _ error) {
	b := make([]byte, 4096)
	for {
		n, err := r.legs[d].Read(b)
		if err == io.EOF {
			r.b.note("forwarded " + d.String())
			return sum, nil
		}
		if err != nil {
			return sum, &splice.EndError{Err: err}
		}
		if _, err := r.legs[1-d].Write(b[:n]); err != nil {
			return sum, &splice.EndError{Write: true, Err: err}
		}
		sum += uint64(n)
		r.mu.Lock()
		r.n[d] += uint64(n)
		r.mu.Unlock()
	}
}

func (r *fakeRoute) Take(splice.Direction, bool, []byte) (uint64, error) { return 0, splice.ErrWait }

func (r *fakeRoute) Stats() (s splice.RouteStats) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for d := range s {
		s[d] = splice.DirectionStats{Bypassed: r.n[d], Uncounted: r.b.uncounted, Forwarded: 1, VerdictRuns: 2, Waits: 3, Direct: true}
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
	b := &fakeBypass{}
	r := newRig(t, b)
	client, service := r.pair()
	send(t, client, []byte("123"))
	expect(t, service, "123")
	client.CloseWrite()
	expectEOF(t, service)
	service.Close()
	expectEOF(t, client)
	r.ended(causeClientFIN)
	want := []string{"listen", "claim", "control", "pair", "forwarded upstream", "forwarded downstream", "close"}
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

func TestForcedEndsResetBypassedConnections(t *testing.T) {
	r := newRig(t, &fakeBypass{})
	client, service := r.pair()
	client.CloseWrite()
	expectEOF(t, service)
	r.srv.killAll(nil, causeStop)
	expectReset(t, client)
	r.ended(causeStop)
}

func TestHalfOpenTimeoutEndsBypassedConnections(t *testing.T) {
	r := newRig(t, &fakeBypass{}, onListener(func(l *Listener) { l.HalfOpenTimeout = 50_000_000 }))
	client, service := r.pair()
	client.CloseWrite()
	expectEOF(t, service)
	expectReset(t, client)
	r.ended(causeHalfOpen)
}

func TestUncountedBytesAreUnknownNotNone(t *testing.T) {
	const idle = 100 * time.Millisecond
	r := newRig(t, &fakeBypass{uncounted: true}, onListener(func(l *Listener) { l.IdleTimeout = idle }))
	client, service := r.pair()
	send(t, client, []byte("123"))
	expect(t, service, "123")
	for _, c := range r.srv.Connections() {
		if c.Upward.Bypassed != nil || c.Downward.Bypassed != nil {
			t.Errorf("/connections gives a figure: %+v", c)
		}
	}
	if v := r.metrics()[`shunt_bytes_total{direction="upstream",listener="web",path="bypass"}`]; !math.IsNaN(v) {
		t.Errorf("/metrics: %v, want NaN", v)
	}
	// What isn't seen to move may be moving: no idle timeout.
	time.Sleep(3 * idle)
	send(t, client, []byte("456"))
	expect(t, service, "456")
	client.CloseWrite()
	expectEOF(t, service)
	service.Close()
	r.ended(causeClientFIN)
	if out := r.log.String(); !strings.Contains(out, `"upstream_bypassed":null`) {
		t.Errorf("the access log gives a figure:\n%s", out)
	}
}

func TestBypassedDirectionsAreParked(t *testing.T) {
	r := newRig(t, &fakeBypass{})
	client, service := r.pair()
	for range 3 {
		eventually(t, "both directions parked", func() bool {
			for _, c := range r.conns() {
				c.mu.Lock()
				defer c.mu.Unlock()
				return c.flows[0].rests() && c.flows[1].rests()
			}
			return false
		})
		send(t, client, []byte("ping"))
		expect(t, service, "ping")
		send(t, service, []byte("pong"))
		expect(t, client, "pong")
	}
	client.Close()
	expectEOF(t, service)
	service.Close()
	r.ended(causeClientFIN)
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
		splice.ReasonOff:         onListener(func(l *Listener) { l.Bypass = BypassOff }),
		splice.ReasonFIONREAD:    func(c *Config) { c.FIONREADWrong = true },
		splice.ReasonKernelFault: func(c *Config) { c.KernelFault = true },
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
