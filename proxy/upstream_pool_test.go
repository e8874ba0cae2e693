//go:build linux

package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"shunt/test/harness"
)

// fleet is services at one port of 127.0.1.1, 127.0.1.2 and so on. Each greets with its number.
type fleet struct {
	t      *testing.T
	port   int
	wg     sync.WaitGroup
	lns    []net.Listener
	ends   atomic.Int64 // connections that ended with EOF
	resets atomic.Int64 // with anything else
}

func newFleet(t *testing.T, n int) *fleet {
	t.Helper()
	f := &fleet{t: t, lns: make([]net.Listener, n)}
	for try := 0; ; try++ {
		ok := true
		for i := range n {
			ln, err := net.Listen("tcp", f.addr(i))
			if ok = err == nil; !ok {
				break
			}
			f.lns[i] = ln
			f.port = ln.Addr().(*net.TCPAddr).Port
		}
		if ok {
			break
		}
		for i, ln := range f.lns {
			if ln != nil {
				ln.Close()
				f.lns[i] = nil
			}
		}
		if f.port = 0; try > 20 {
			t.Fatal("no port that is free on all addresses")
		}
	}
	t.Cleanup(func() {
		for i := range f.lns {
			f.stop(i)
		}
		f.wg.Wait()
	})
	for i := range n {
		f.serve(i)
	}
	return f
}

func (f *fleet) ip(i int) string   { return fmt.Sprintf("127.0.1.%d", i+1) }
func (f *fleet) addr(i int) string { return fmt.Sprintf("%s:%d", f.ip(i), f.port) }

func (f *fleet) addrs() (all []string) {
	for i := range f.lns {
		all = append(all, f.addr(i))
	}
	return all
}

func (f *fleet) serve(i int) {
	ln := f.lns[i]
	f.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			f.wg.Go(func() {
				defer c.Close()
				c.SetDeadline(time.Now().Add(deadline))
				c.Write([]byte{byte('a' + i)})
				if _, err := io.Copy(io.Discard, c); err == nil {
					f.ends.Add(1)
				} else {
					f.resets.Add(1)
				}
			})
		}
	})
}

func (f *fleet) stop(i int) {
	if f.lns[i] != nil {
		f.lns[i].Close()
		f.lns[i] = nil
	}
}

func (f *fleet) restart(i int) {
	f.t.Helper()
	ln, err := net.Listen("tcp", f.addr(i))
	if err != nil {
		f.t.Fatal(err)
	}
	f.lns[i] = ln
	f.serve(i)
	f.t.Cleanup(func() { f.stop(i) }) // before it is counted what the rig holds
}

// greeting returns the number of the service that answers on c.
func greeting(c net.Conn) (int, error) {
	b := make([]byte, 1)
	_, err := io.ReadFull(c, b)
	return int(b[0] - 'a'), err
}

// who connects and returns the number of the service, with the connection.
func (r *rig) who() (int, *net.TCPConn) {
	r.t.Helper()
	c := r.dial()
	n, err := greeting(c)
	if err != nil {
		r.t.Fatal(err)
	}
	return n, c
}

// spread counts where n connections go, one after the other.
func (r *rig) spread(n int) map[int]int {
	r.t.Helper()
	got := map[int]int{}
	for range n {
		i, c := r.who()
		c.Close()
		got[i]++
	}
	return got
}

func to(addrs []string, change func(*Listener)) option {
	return onListener(func(l *Listener) {
		l.Upstream, l.Upstreams = "", addrs
		if change != nil {
			change(l)
		}
	})
}

func (r *rig) pool() *pool { return r.srv.listeners[0].pool }

// states returns the state of each address.
func (r *rig) states() map[string]string {
	r.t.Helper()
	_, body := r.get("/upstreams")
	var us []UpstreamStatus
	if err := json.Unmarshal([]byte(body), &us); err != nil {
		r.t.Fatalf("%v: %s", err, body)
	}
	got := map[string]string{}
	for _, u := range us {
		got[u.Address] = u.State
	}
	return got
}

func TestRoundRobinTakesAllInTurn(t *testing.T) {
	f := newFleet(t, 3)
	r := newRig(t, nil, to(f.addrs(), nil))
	if got := r.spread(9); !maps.Equal(got, map[int]int{0: 3, 1: 3, 2: 3}) {
		t.Errorf("%v", got)
	}
	for i := range 3 {
		name := fmt.Sprintf(`{address="%s",listener="web",upstream="%s"}`, f.addr(i), f.addr(i))
		eventually(t, "the end of the last connection", func() bool { return r.metrics()["shunt_upstream_connections_active"+name] == 0 })
		m := r.metrics()
		if m["shunt_upstream_connections_total"+name] != 3 || m["shunt_upstream_up"+name] != 1 {
			t.Errorf("metrics of %s: %v", f.addr(i), m)
		}
		want := fmt.Sprintf(`"upstream":"%s","up":"%s"`, f.addr(i), f.addr(i))
		eventually(t, "access log with "+want, func() bool { return strings.Contains(r.log.String(), want) })
	}
}

func TestLeastConnectionsFillsUp(t *testing.T) {
	f := newFleet(t, 3)
	r := newRig(t, nil, to(f.addrs(), func(l *Listener) { l.Balance = BalanceLeastConnections }))
	open := map[int][]*net.TCPConn{}
	for range 9 {
		i, c := r.who()
		open[i] = append(open[i], c)
	}
	for i := range 3 {
		if len(open[i]) != 3 {
			t.Fatalf("%d connections to %d", len(open[i]), i)
		}
	}
	for _, c := range open[1] {
		c.Close()
	}
	eventually(t, "ends", func() bool { return r.srv.liveCount() == 6 })
	for range 3 {
		if i, _ := r.who(); i != 1 {
			t.Errorf("went to %d, 1 has the fewest", i)
		}
	}
}

func TestFirstTakesTheNextOnlyWhenItMust(t *testing.T) {
	f := newFleet(t, 3)
	r := newRig(t, nil, to(f.addrs(), func(l *Listener) { l.Balance = BalanceFirst }))
	if got := r.spread(4); got[0] != 4 {
		t.Errorf("%v", got)
	}
	f.stop(0)
	if got := r.spread(4); got[1] != 4 {
		t.Errorf("without the first: %v", got)
	}
}

// members returns n of them, of weight 1.
func members(n int) []member {
	l := DefaultListener()
	l.Balance = BalanceSourceHash
	for i := range n {
		l.Upstreams = append(l.Upstreams, fmt.Sprintf("10.0.%d.%d:80", i/256, i%256))
	}
	us, _ := l.parseUpstreams()
	p := newPool(&listener{cfg: l}, us)
	p.rebuild()
	return *p.set.Load()
}

func TestSourceHashMovesOnlyWhatItMust(t *testing.T) {
	all := members(10)
	p := &pool{balance: BalanceSourceHash}
	few := slices.Delete(slices.Clone(all), 3, 4)
	const clients = 10000
	share := map[string]int{}
	for n := range clients {
		client := netip.AddrFrom4([4]byte{10, 1, byte(n / 256), byte(n)})
		i, _ := p.choose(all, nil, client)
		j, _ := p.choose(few, nil, client)
		before, after := all[i].text, few[j].text
		if before != all[3].text && before != after {
			t.Fatalf("%v moved from %s to %s", client, before, after)
		}
		share[before]++
		if mapped, _ := p.choose(all, nil, netip.AddrFrom16(client.As16()).Unmap()); mapped != i {
			t.Fatalf("%v: mapped goes elsewhere", client)
		}
	}
	for a, n := range share {
		if n < clients/10*8/10 || n > clients/10*12/10 {
			t.Errorf("%s has %d of %d clients", a, n, clients)
		}
	}
	// Known values: another shunt, or the next version, must choose the same.
	var got []int
	for n := range 8 {
		i, _ := p.choose(all, nil, netip.AddrFrom4([4]byte{192, 0, 2, byte(n)}))
		got = append(got, i)
	}
	if want := []int{0, 1, 1, 5, 9, 8, 2, 7}; !slices.Equal(got, want) {
		t.Errorf("chose %v, want %v", got, want)
	}
}

func TestSourceHashKeepsAClient(t *testing.T) {
	f := newFleet(t, 4)
	r := newRig(t, nil, to(f.addrs(), func(l *Listener) { l.Balance = BalanceSourceHash }))
	got := r.spread(8)
	if len(got) != 1 {
		t.Fatalf("%v", got)
	}
	for i := range got {
		f.stop(i)
	}
	if next := r.spread(8); len(next) != 1 {
		t.Errorf("without its first choice: %v", next)
	}
}

func TestWeightsAndPrioritiesShareOut(t *testing.T) {
	for _, b := range []Balance{BalanceRoundRobin, BalanceSourceHash, BalanceLeastConnections} {
		all := members(4)
		for i, w := range []float64{1, 3, 1, 1} {
			all[i].weight = w
		}
		all[2].priority = 1
		all[3].priority = 1
		p := &pool{balance: b}
		got := map[int]int{}
		for n := range 8000 {
			i, left := p.choose(all, nil, netip.AddrFrom4([4]byte{10, 1, byte(n / 256), byte(n)}))
			if left != 4 {
				t.Fatal(left)
			}
			got[i]++
		}
		if got[0] < 1800 || got[0] > 2200 || got[0]+got[1] != 8000 {
			t.Errorf("%s: %v", b, got)
		}
		// The next priority only when the first one is used up.
		var had tried
		had.add(0, 4)
		had.add(1, 4)
		if i, left := p.choose(all, had, netip.Addr{}); left != 2 || i < 2 {
			t.Errorf("%s: then %d, %d left", b, i, left)
		}
	}
}

func TestBlackHoleLeavesTimeForTheNext(t *testing.T) {
	f := newFleet(t, 1)
	b := &fakeBypass{}
	r := newRig(t, b, to([]string{harness.BlackHole(t), f.addr(0)}, func(l *Listener) { l.Balance, l.DialTimeout = BalanceFirst, 6*time.Second }))
	r.spread(1)
	controls := 0
	for _, c := range b.noted() {
		if c == "control" {
			controls++
		}
	}
	if controls != 2 {
		t.Errorf("calls of the bypass: %v, want two times control", b.noted())
	}
}

func TestAllUpstreamsRefusing(t *testing.T) {
	f := newFleet(t, 3)
	for i := range 3 {
		f.stop(i)
	}
	r := newRig(t, nil, to(f.addrs(), nil))
	for range 20 { // ejection has no say when nothing is left
		r.refused()
	}
	r.ended("dial-refused")
	if n := r.metrics()[`shunt_dial_errors_total{kind="refused",listener="web"}`]; n != 20 {
		t.Errorf("%v dial errors", n)
	}
	f.restart(1)
	if got := r.spread(4); got[1] != 4 {
		t.Errorf("%v", got)
	}
}

func TestFailuresEjectAnAddress(t *testing.T) {
	f := newFleet(t, 3)
	f.stop(2)
	r := newRig(t, nil, to(f.addrs(), func(l *Listener) { l.Eject = Eject{Failures: 2, Duration: time.Hour} }))
	name := fmt.Sprintf(`{address="%s",listener="web",upstream="%s"}`, f.addr(2), f.addr(2))
	for range 40 {
		if got := r.spread(1); got[2] != 0 {
			t.Fatal("the service is not there")
		}
	}
	m := r.metrics()
	if m["shunt_upstream_dial_errors_total"+name] != 2 || m["shunt_upstream_up"+name] != 0 {
		t.Errorf("dialled %v times, up %v", m["shunt_upstream_dial_errors_total"+name], m["shunt_upstream_up"+name])
	}
	if s := r.states(); s[f.addr(2)] != "ejected" || s[f.addr(1)] != "up" {
		t.Errorf("%v", s)
	}
	if n := strings.Count(r.log.String(), "upstream down"); n != 1 {
		t.Errorf("%d times logged", n)
	}
	// It is the last resort.
	f.restart(2)
	f.stop(0)
	f.stop(1)
	if got := r.spread(1); got[2] != 1 {
		t.Error(got)
	}
	eventually(t, "state up", func() bool { return r.states()[f.addr(2)] == "up" })
	if !strings.Contains(r.log.String(), "upstream up") {
		t.Error("not logged")
	}
}

func TestEjectionEnds(t *testing.T) {
	f := newFleet(t, 2)
	f.stop(0)
	r := newRig(t, nil, to(f.addrs(), func(l *Listener) { l.Eject = Eject{Failures: 1, Duration: 50 * time.Millisecond} }))
	r.spread(4)
	if !strings.Contains(r.log.String(), "upstream down") {
		t.Fatal("not ejected")
	}
	f.restart(0)
	eventually(t, "connection to the address that is back", func() bool { return r.spread(1)[0] == 1 })
}

func TestEjectionIsIgnoredBelowHalf(t *testing.T) {
	all := members(4)
	p := &pool{balance: BalanceRoundRobin}
	count := func() map[int]int {
		got := map[int]int{}
		for range 40 {
			i, _ := p.choose(all, nil, netip.Addr{})
			got[i]++
		}
		return got
	}
	all[0].ejected = time.Now().Add(time.Hour)
	all[1].ejected = all[0].ejected
	if got := count(); got[2] != 20 || got[3] != 20 {
		t.Errorf("half are ejected: %v", got)
	}
	all[2].ejected = all[0].ejected
	if got := count(); len(got) != 4 {
		t.Errorf("more than half: %v", got)
	}
	// What health checks have down isn't counted.
	all[0].down, all[1].down = true, true
	if got := count(); got[3] != 40 {
		t.Errorf("half of those that are up: %v", got)
	}
}

func checksOf(interval time.Duration) func(*Listener) {
	return func(l *Listener) {
		l.Health = Health{Interval: interval, Timeout: time.Second, Rise: 2, Fall: 2}
		l.Eject.Failures = 0
	}
}

func TestChecksEndAnEjection(t *testing.T) {
	f := newFleet(t, 2)
	r := newRig(t, nil, to(f.addrs(), checksOf(20*time.Millisecond)))
	p := r.srv.listeners[0].pool
	state := func() string { return r.states()[f.addr(0)] }
	p.mu.Lock()
	e := (*p.set.Load())[0].endpoint
	e.times, e.good, e.ejected = 3, 0, time.Now().Add(time.Hour)
	e.ailing.Store(true)
	p.mu.Unlock()
	ejected := func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return e.out(time.Now())
	}
	eventually(t, "end of the ejection", func() bool { return state() == "up" && !ejected() })
	p.mu.Lock()
	if e.times != 3 {
		t.Errorf("ejected %d times: the next one must not be as short as the first", e.times)
	}
	p.mu.Unlock()
	if got := r.spread(4); got[0] != 2 {
		t.Errorf("%v", got)
	}
	if !strings.Contains(r.log.String(), `"cause":"health"`) {
		t.Error("not logged")
	}
	// Checks that fail don't end one.
	f.stop(0)
	eventually(t, "state down", func() bool { return state() == "down" })
	p.mu.Lock()
	e.times, e.ejected = 1, time.Now().Add(time.Hour)
	e.ailing.Store(true)
	p.mu.Unlock()
	time.Sleep(100 * time.Millisecond)
	if !ejected() {
		t.Error("failed checks ended an ejection")
	}
	// Good ones say once that it is up, though it was down twice over.
	before := strings.Count(r.log.String(), "upstream up")
	f.restart(0)
	eventually(t, "state up", func() bool { return state() == "up" && !ejected() })
	time.Sleep(100 * time.Millisecond)
	if n := strings.Count(r.log.String(), "upstream up") - before; n != 1 {
		t.Errorf("said %d times that it is up", n)
	}
}

func TestChecksTakeDownAndBringUp(t *testing.T) {
	f := newFleet(t, 2)
	b := &fakeBypass{}
	r := newRig(t, b, to(f.addrs(), checksOf(20*time.Millisecond)))
	eventually(t, "checks of both", func() bool { return f.ends.Load() >= 6 })
	if s := r.states(); s[f.addr(0)] != "up" || s[f.addr(1)] != "up" {
		t.Errorf("%v", s)
	}
	f.stop(0)
	eventually(t, "state down", func() bool { return r.states()[f.addr(0)] == "down" })
	if got := r.spread(4); got[1] != 4 {
		t.Errorf("%v", got)
	}
	if n := r.metrics()[fmt.Sprintf(`shunt_upstream_dial_errors_total{address="%s",listener="web",upstream="%s"}`, f.addr(0), f.addr(0))]; n != 0 {
		t.Errorf("%v dials of an address that is down", n)
	}
	f.restart(0)
	eventually(t, "state up", func() bool { return r.states()[f.addr(0)] == "up" })
	if got := r.spread(4); got[0] != 2 {
		t.Errorf("%v", got)
	}
	for _, want := range []string{`"cause":"health"`, "upstream down", "upstream up"} {
		if !strings.Contains(r.log.String(), want) {
			t.Errorf("no log with %s", want)
		}
	}
	// The services spoke first, and yet none saw a reset. Four connections of the bypass, no more.
	if n := f.resets.Load(); n != 0 {
		t.Errorf("the services saw %d resets", n)
	}
	if n := len(slices.DeleteFunc(b.noted(), func(s string) bool { return s != "control" })); n != 8 {
		t.Errorf("%d sockets were given to the bypass, want 8", n)
	}
}

func TestNoUpstreamRefusesAtOnce(t *testing.T) {
	f := newFleet(t, 2)
	f.stop(0)
	f.stop(1)
	b := &fakeBypass{}
	r := newRig(t, b, to(f.addrs(), checksOf(20*time.Millisecond)))
	eventually(t, "both down", func() bool { return r.pool().refuses() })
	for range 10 {
		r.refused()
	}
	r.ended(causeNoUpstream)
	m := r.metrics()
	if m[`shunt_connections_ended_total{cause="no-upstream",listener="web"}`] != 10 || m[`shunt_dial_errors_total{kind="refused",listener="web"}`] != 0 {
		t.Errorf("%v", m)
	}
	if calls := b.noted(); len(calls) != 1 {
		t.Errorf("the bypass was asked: %v", calls)
	}
	if code, _ := r.get("/readyz"); code != 200 {
		t.Errorf("readyz: %d: a service that is down makes no proxy unready", code)
	}
	f.restart(1)
	eventually(t, "service again", func() bool { return !r.pool().refuses() })
	if got := r.spread(2); got[1] != 2 {
		t.Errorf("%v", got)
	}
}

// load connects from several goroutines until stop is called, which returns how many connections failed of how many.
func (r *rig) load(workers int) (stop func() (failed, all int64)) {
	var bad, all atomic.Int64
	var wg sync.WaitGroup
	done := make(chan struct{})
	for range workers {
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				all.Add(1)
				c, err := net.DialTimeout("tcp", r.addr, deadline)
				if err == nil {
					c.SetDeadline(time.Now().Add(deadline))
					_, err = greeting(c)
					c.Close()
				}
				if err != nil {
					bad.Add(1)
				}
			}
		})
	}
	return func() (int64, int64) {
		close(done)
		wg.Wait()
		return bad.Load(), all.Load()
	}
}

func TestFlappingUpstreamLosesNoConnection(t *testing.T) {
	f := newFleet(t, 3)
	r := newRig(t, nil, to(f.addrs(), func(l *Listener) {
		checksOf(10 * time.Millisecond)(l)
		l.Eject = Eject{Failures: 2, Duration: 10 * time.Millisecond}
	}))
	served := func() float64 { return r.metrics()[`shunt_connections_total{listener="web"}`] }
	more := func() {
		t.Helper()
		before := served()
		eventually(t, "more connections", func() bool { return served() > before+10 })
	}
	stop := r.load(4)
	for range 10 {
		f.stop(0)
		f.stop(1)
		more()
		f.restart(0)
		f.restart(1)
		more()
	}
	bad, all := stop()
	eventually(t, "last end", func() bool { return r.srv.liveCount() == 0 })
	m := r.metrics()
	// A listening socket that is closed resets what was in its backlog: those connections had been made.
	if made := m[`shunt_connections_ended_total{cause="server-rst",listener="web"}`]; float64(bad) > made {
		t.Errorf("%d of %d connections failed, %v of them after they were made", bad, all, made)
	}
	for _, k := range dialKinds {
		if n := m[fmt.Sprintf(`shunt_dial_errors_total{kind="%s",listener="web"}`, k)]; n != 0 {
			t.Errorf("%v dials ended in %s", n, k)
		}
	}
}

func named(f *fleet, name string) string { return fmt.Sprintf("%s:%d", name, f.port) }

func TestEveryAddressOfANameIsUsed(t *testing.T) {
	f := newFleet(t, 3)
	d := harness.ServeDNS(t)
	d.Set("web.test", f.ip(0), f.ip(1), f.ip(2))
	for _, interval := range []time.Duration{0, time.Hour} {
		r := newRigWith(t, newResolver([]string{d.Addr}), nil, onListener(func(l *Listener) {
			l.Upstream, l.ResolveInterval = named(f, "web.test"), interval
		}))
		if got := r.spread(6); !maps.Equal(got, map[int]int{0: 2, 1: 2, 2: 2}) {
			t.Errorf("%v", got)
		}
		want := fmt.Sprintf(`"upstream":"%s","up":"%s"`, named(f, "web.test"), f.addr(0))
		eventually(t, "access log with "+want, func() bool { return strings.Contains(r.log.String(), want) })
	}
}

func TestChangedNameIsUsedByTheNextConnection(t *testing.T) {
	f := newFleet(t, 2)
	d := harness.ServeDNS(t)
	r := newRigWith(t, newResolver([]string{d.Addr}), nil, onListener(func(l *Listener) { l.Upstream = named(f, "web.test") }))
	for n := range 20 {
		d.Set("web.test", f.ip(n%2))
		if got := r.spread(1); got[n%2] != 1 {
			t.Fatalf("the name has address %d, the connection went to %v", n%2, got)
		}
	}
}

func TestLastGoodAnswerOutlivesTheResolver(t *testing.T) {
	for _, interval := range []time.Duration{0, 20 * time.Millisecond} {
		f := newFleet(t, 2)
		d := harness.ServeDNS(t)
		d.Set("web.test", f.ip(0))
		r := newRigWith(t, newResolver([]string{d.Addr}), nil, onListener(func(l *Listener) {
			l.Upstream, l.ResolveInterval, l.DialTimeout = named(f, "web.test"), interval, 2*time.Second
		}))
		r.spread(1)
		for name, fail := range map[string][2]func(){
			"refused":  {d.Stop, d.Restart},
			"SERVFAIL": {func() { d.Fail(true) }, func() { d.Fail(false) }},
		} {
			fail[0]()
			for range 5 {
				if got := r.spread(1); got[0] != 1 {
					t.Fatalf("%s: %v", name, got)
				}
			}
			eventually(t, "failed lookup", func() bool { return r.metrics()[`shunt_resolve_errors_total{listener="web"}`] > 0 })
			fail[1]()
		}
		d.Set("web.test", f.ip(1))
		eventually(t, "the new address", func() bool { return r.spread(1)[1] == 1 })
		if n := strings.Count(r.log.String(), "not resolved"); n == 0 || n > 4 {
			t.Errorf("failures were logged %d times", n)
		}
	}
}

func TestAnswerOfOneQueryDoesNotHideThatTheOtherFailed(t *testing.T) {
	f := newFleet(t, 1)
	d := harness.ServeDNS(t)
	d.Set("web.test", f.ip(0))
	r := newRigWith(t, newResolver([]string{d.Addr}), nil, onListener(func(l *Listener) {
		l.Upstream, l.ResolveInterval = named(f, "web.test"), 10*time.Millisecond
	}))
	p := r.pool()
	p.mu.Lock()
	p.grace = 0
	p.mu.Unlock()
	r.spread(1)
	// There are no AAAA, as before; a server that has that in its cache goes on to say so.
	d.FailFor(dnsmessage.TypeA)
	errs := p.lookupErrors()
	eventually(t, "failed lookups", func() bool { return p.lookupErrors() > errs+20 })
	r.spread(1)
	d.FailFor(dnsmessage.TypeAAAA)
	errs = p.lookupErrors()
	asked := d.Asked()
	eventually(t, "lookups", func() bool { return d.Asked() > asked+20 })
	if n := p.lookupErrors(); n > errs+1 { // one may have been under way
		t.Errorf("%d of the lookups that had an address failed", n-errs)
	}
	r.spread(1)
}

func TestMuteResolverLeavesTimeToDial(t *testing.T) {
	f := newFleet(t, 1)
	d := harness.ServeDNS(t)
	d.Set("web.test", f.ip(0))
	r := newRigWith(t, newResolver([]string{d.Addr}), nil, onListener(func(l *Listener) {
		l.Upstream, l.DialTimeout = named(f, "web.test"), time.Second
	}))
	r.spread(1)
	d.Mute(true)
	r.spread(3)
	d.Mute(false)
}

func TestNamesWithoutAddressesAreDroppedInTheEnd(t *testing.T) {
	for what, gone := range map[string]func(*harness.DNS){
		"no such name": func(d *harness.DNS) { d.Remove("web.test") },
		"no address":   func(d *harness.DNS) { d.Set("web.test") },
	} {
		f := newFleet(t, 1)
		d := harness.ServeDNS(t)
		d.Set("web.test", f.ip(0))
		r := newRigWith(t, newResolver([]string{d.Addr}), nil, onListener(func(l *Listener) {
			l.Upstream, l.ResolveInterval = named(f, "web.test"), 10*time.Millisecond
		}))
		p := r.pool()
		r.spread(1)
		asked := d.Asked()
		gone(d)
		eventually(t, "lookups", func() bool { return d.Asked() > asked+4 })
		r.spread(1)
		p.mu.Lock()
		p.grace = time.Millisecond
		p.mu.Unlock()
		eventually(t, what, func() bool { return len(*p.set.Load()) == 0 })
		r.refused()
		r.ended("dial-resolve")
		if s := r.states(); s[""] != "unresolved" {
			t.Errorf("%v", s)
		}
		if m := r.metrics(); slices.ContainsFunc(slices.Collect(maps.Keys(m)), func(k string) bool { return strings.Contains(k, f.addr(0)) }) {
			t.Errorf("%s: the address still has metrics: %v", what, m)
		}
		d.Set("web.test", f.ip(0))
		eventually(t, "the address again", func() bool { return len(*p.set.Load()) == 1 })
		r.spread(1)
	}
}

func TestResolverThatComesUpLaterIsUsed(t *testing.T) {
	f := newFleet(t, 1)
	d := harness.ServeDNS(t)
	d.Set("web.test", f.ip(0))
	d.Stop()
	r := newRigWith(t, newResolver([]string{d.Addr}), nil, to([]string{named(f, "web.test"), named(f, "other.test")}, nil))
	r.refused()
	r.ended("dial-resolve")
	d.Restart()
	eventually(t, "addresses", func() bool { return r.states()[f.addr(0)] == "up" })
	r.spread(2)
}

// TestChecksNeedLookupsBetweenConnections: else a name that moved while all its addresses were down would never be seen to.
func TestChecksNeedLookupsBetweenConnections(t *testing.T) {
	for _, c := range []struct {
		upstreams        []string
		interval, checks time.Duration
		perConn          bool
	}{
		{[]string{"a:1"}, 0, 0, true},
		{[]string{"a:1"}, time.Second, 0, false},
		{[]string{"a:1"}, 0, time.Second, false},
		{[]string{"a:1", "b:1"}, 0, 0, false},
		{[]string{"srv+a"}, 0, 0, false},
		{[]string{"127.0.0.1:1"}, 0, 0, false},
	} {
		l := Listener{Upstreams: c.upstreams, ResolveInterval: c.interval, Health: Health{Interval: c.checks}}
		us, err := l.parseUpstreams()
		if err != nil {
			t.Fatal(err)
		}
		if p := newPool(&listener{cfg: l}, us); p.perConn != c.perConn {
			t.Errorf("%+v: resolved for each connection: %v", c, p.perConn)
		}
	}
	f := newFleet(t, 2)
	f.stop(0)
	d := harness.ServeDNS(t)
	d.Set("web.test", f.ip(0))
	r := newRigWith(t, newResolver([]string{d.Addr}), nil, onListener(func(l *Listener) {
		l.Upstream, l.ResolveInterval = named(f, "web.test"), 50*time.Millisecond
		checksOf(20 * time.Millisecond)(l)
	}))
	eventually(t, "all down", func() bool { return r.pool().refuses() })
	d.Set("web.test", f.ip(1))
	eventually(t, "the new address", func() bool { return !r.pool().refuses() })
	r.spread(2)
}

func TestNamesThatChangeUnderLoad(t *testing.T) {
	f := newFleet(t, 4)
	d := harness.ServeDNS(t)
	d.Set("web.test", f.ip(0))
	r := newRigWith(t, newResolver([]string{d.Addr}), nil, onListener(func(l *Listener) {
		l.Upstream, l.ResolveInterval = named(f, "web.test"), time.Millisecond
		checksOf(5 * time.Millisecond)(l)
	}))
	stop := r.load(4)
	for n := range 60 {
		d.Set("web.test", f.ip(n%4), f.ip((n+n/4)%4))
		asked := d.Asked()
		eventually(t, "lookup", func() bool { return d.Asked() > asked+2 })
	}
	if bad, all := stop(); bad != 0 {
		t.Errorf("%d of %d connections failed", bad, all)
	}
	eventually(t, "no connection", func() bool { return r.srv.liveCount() == 0 })
	asked := d.Asked()
	eventually(t, "lookup", func() bool { return d.Asked() > asked+4 })
	p := r.pool()
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.known) > 4 {
		t.Errorf("%d addresses are kept", len(p.known))
	}
}

func TestThousandAddresses(t *testing.T) {
	f := newFleet(t, 1)
	d := harness.ServeDNS(t)
	// All of 127/8 is this host; nobody listens at most of it.
	var ips []string
	for i := range maxAddresses + 100 {
		ips = append(ips, fmt.Sprintf("127.0.%d.%d", 2+i/250, 1+i%250))
	}
	ips[700] = f.ip(0)
	d.Set("web.test", ips...)
	r := newRigWith(t, newResolver([]string{d.Addr}), nil, onListener(func(l *Listener) {
		l.Upstream, l.ResolveInterval = named(f, "web.test"), 50*time.Millisecond
		checksOf(time.Minute)(l)
		l.Health.Fall = 1
	}))
	if got := r.spread(3); got[0] != 3 {
		t.Error(got)
	}
	if n := len(*r.pool().set.Load()); n != maxAddresses {
		t.Errorf("%d addresses are used", n)
	}
	if !strings.Contains(r.log.String(), "too many upstream addresses") {
		t.Error("not logged")
	}
	eventually(t, "checks of all", func() bool {
		up := 0
		for _, s := range r.pool().status() {
			if s.State == "up" {
				up++
			}
		}
		return up == 1
	})
	r.spread(3)
	d.Set("web.test", f.ip(0))
	eventually(t, "one address", func() bool { return len(r.states()) == 1 })
}

func TestSRVRecordsDriveTheSet(t *testing.T) {
	f := newFleet(t, 4)
	d := harness.ServeDNS(t)
	for i := range 4 {
		d.Set(fmt.Sprintf("n%d.test", i), f.ip(i))
	}
	port := uint16(f.port)
	const name = "_web._tcp.web.test"
	d.SetSRV(name,
		harness.SRV{Priority: 1, Weight: 3, Port: port, Target: "n0.test"},
		harness.SRV{Priority: 1, Weight: 1, Port: port, Target: "n1.test"},
		harness.SRV{Priority: 2, Weight: 5, Port: port, Target: "n2.test"},
		harness.SRV{Priority: 1, Weight: 9, Port: port, Target: "missing.test"})
	r := newRigWith(t, newResolver([]string{d.Addr}), nil, onListener(func(l *Listener) {
		l.Upstream, l.ResolveInterval = "srv+"+name, 20*time.Millisecond
	}))
	if got := r.spread(8); !maps.Equal(got, map[int]int{0: 6, 1: 2}) {
		t.Errorf("%v", got)
	}
	f.stop(0)
	f.stop(1)
	if got := r.spread(3); got[2] != 3 {
		t.Errorf("the next priority: %v", got)
	}
	d.SetSRV(name, harness.SRV{Priority: 9, Port: port, Target: "n3.test"})
	eventually(t, "the new record", func() bool { s := r.states(); return len(s) == 1 && s[f.addr(3)] == "up" })
	r.spread(2)
	// The service isn't offered, says the record: at once.
	d.SetSRV(name, harness.SRV{Target: "."})
	eventually(t, "no address", func() bool { return r.states()[""] == "unresolved" })
	r.refused()
	r.ended("dial-resolve")
}

func TestSRVTargetThatCantBeLookedUpKeepsTheSet(t *testing.T) {
	r := &fakeLookups{}
	_, err := lookUp(t.Context(), r, Upstream{kind: upstreamSRV, host: "x"})
	if err == nil || notFound(err) {
		t.Errorf("%v", err)
	}
}

func TestReloadKeepsWhatIsKnownOfUpstreams(t *testing.T) {
	f := newFleet(t, 2)
	d := harness.ServeDNS(t)
	d.Set("web.test", f.ip(0), f.ip(1))
	r := newRigWith(t, newResolver([]string{d.Addr}), nil, to([]string{named(f, "web.test")}, func(l *Listener) {
		l.ResolveInterval = 20 * time.Millisecond
		l.Eject = Eject{Failures: 1, Duration: time.Hour}
	}))
	_, held := r.who()
	f.stop(1)
	r.spread(3)
	d.Stop()
	cfg := r.srv.cfg
	cfg.Listeners = slices.Clone(cfg.Listeners)
	cfg.Listeners[0].DialTimeout += time.Second
	if err := r.srv.Reload(cfg); err != nil {
		t.Fatal(err)
	}
	if s := r.states(); s[f.addr(0)] != "up" || s[f.addr(1)] != "ejected" {
		t.Errorf("%v", s)
	}
	r.spread(2)
	held.Close()
	name := fmt.Sprintf(`{address="%s",listener="web",upstream="%s"}`, f.addr(0), named(f, "web.test"))
	eventually(t, "all connections' ends", func() bool {
		m := r.metrics()
		return m["shunt_upstream_connections_active"+name] == 0 && m["shunt_upstream_connections_total"+name] >= 5
	})
	// Other servers, for the listener that stays as it is, too.
	other := harness.ServeDNS(t)
	other.Set("web.test", f.ip(0))
	cfg.DNSServers = []string{other.Addr}
	if err := r.srv.Reload(cfg); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the other server's answer", func() bool { return len(r.states()) == 1 })
}

func TestReloadBeforeTheFirstAnswerLosesNoConnection(t *testing.T) {
	f := newFleet(t, 1)
	slow := &slowLookups{ip: netip.MustParseAddr(f.ip(0)), gate: make(chan struct{})}
	r := newRigWith(t, slow, nil, to([]string{named(f, "web.test")}, nil))
	c := r.dial()
	eventually(t, "dial", func() bool { return r.srv.liveCount() == 1 && slow.asked.Load() > 0 })
	cfg := r.srv.cfg
	cfg.Listeners = slices.Clone(cfg.Listeners)
	cfg.Listeners[0].DialTimeout += time.Second
	if err := r.srv.Reload(cfg); err != nil {
		t.Fatal(err)
	}
	close(slow.gate)
	if _, err := greeting(c); err != nil {
		t.Error(err)
	}
}

// slowLookups answers once gate is closed.
type slowLookups struct {
	fakeLookups
	ip    netip.Addr
	gate  chan struct{}
	asked atomic.Int64
}

func (s *slowLookups) LookupNetIP(ctx context.Context, _, _ string) ([]netip.Addr, error) {
	s.asked.Add(1)
	select {
	case <-s.gate:
		return []netip.Addr{s.ip}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func TestNextNameServerIsAsked(t *testing.T) {
	f := newFleet(t, 1)
	dead, alive := harness.ServeDNS(t), harness.ServeDNS(t)
	dead.Stop()
	alive.Set("web.test", f.ip(0))
	r := newRigWith(t, newResolver([]string{dead.Addr, alive.Addr}), nil, onListener(func(l *Listener) { l.Upstream = named(f, "web.test") }))
	r.spread(2)
}

func TestSeveralUpstreamsOfSeveralKinds(t *testing.T) {
	f := newFleet(t, 2)
	d := harness.ServeDNS(t)
	d.Set("web.test", f.ip(0), f.ip(1))
	path := t.TempDir() + "/s"
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	f.lns = append(f.lns, ln)
	f.serve(2)
	b := &fakeBypass{}
	r := newRigWith(t, newResolver([]string{d.Addr}), b, to([]string{"unix:" + path, named(f, "web.test"), f.addr(0)}, nil))
	eventually(t, "addresses", func() bool { return len(*r.pool().set.Load()) == 3 })
	if got := r.spread(6); !maps.Equal(got, map[int]int{0: 2, 1: 2, 2: 2}) {
		t.Errorf("%v", got)
	}
	eventually(t, "two connections declined", func() bool {
		return r.metrics()[`shunt_bypass_declined_total{listener="web",reason="unix"}`] == 2
	})
	os.Remove(path)
}

// fakeLookups has SRV records, and one target that fails.
type fakeLookups struct{}

func (fakeLookups) LookupSRV(context.Context, string, string, string) (string, []*net.SRV, error) {
	return "", []*net.SRV{{Target: "a.", Port: 1}, {Target: "b.", Port: 1}}, nil
}

func (fakeLookups) LookupNetIP(_ context.Context, _, host string) ([]netip.Addr, error) {
	if host == "a." {
		return nil, &net.DNSError{Err: "server misbehaving", IsTemporary: true}
	}
	return nil, &net.DNSError{IsNotFound: true}
}
