package proxy

import (
	"encoding/binary"
	"io"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"
)

func TestOrder(t *testing.T) {
	o := newOrder()
	o.patience = deadline
	const n = 50
	var mu sync.Mutex
	var got []uint64
	var wg sync.WaitGroup
	for range n {
		ticket := o.enter()
		wg.Go(func() {
			if ticket%5 == 3 { // needs no turn
				o.leave(ticket)
				return
			}
			time.Sleep(time.Duration(n-ticket) * 20 * time.Microsecond) // the last ones come first
			o.wait(ticket, time.Time{})
			mu.Lock()
			got = append(got, ticket)
			mu.Unlock()
			o.leave(ticket)
			o.leave(ticket)
		})
	}
	wg.Wait()
	if len(got) != n*4/5 || !slices.IsSorted(got) {
		t.Errorf("order %v", got)
	}
	if o.first != n || len(o.over) > 0 || len(o.waiting) > 0 {
		t.Errorf("left over: first %d, %d over, %d waiting", o.first, len(o.over), len(o.waiting))
	}
}

func TestOrderDoesNotWaitLong(t *testing.T) {
	o := newOrder()
	slow, second, third := o.enter(), o.enter(), o.enter()
	begin := time.Now()
	var wg sync.WaitGroup
	for _, ticket := range []uint64{third, second} {
		wg.Go(func() {
			o.wait(ticket, time.Time{})
			o.leave(ticket)
		})
	}
	wg.Wait()
	if d := time.Since(begin); d < orderPatience/2 || d > deadline {
		t.Errorf("waited %v", d)
	}
	// From now on nobody waits for the slow one, not even before it is over.
	next := o.enter()
	done := make(chan struct{})
	go func() {
		o.wait(next, time.Time{})
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(deadline):
		t.Fatal("still waits for one that lost its place")
	}
	o.wait(slow, time.Time{})
	o.leave(slow)
	o.leave(next)
	if o.first != 4 || len(o.over) > 0 || len(o.waiting) > 0 {
		t.Errorf("left over: first %d, %d over, %d waiting", o.first, len(o.over), len(o.waiting))
	}
}

// Those that are ready behind one that isn't keep their order.
func TestOrderBehindASlowOne(t *testing.T) {
	o := newOrder()
	o.patience = time.Second // busy machines
	o.enter()
	const n = 30
	tickets := make([]uint64, n)
	for i := range tickets {
		tickets[i] = o.enter()
	}
	var mu sync.Mutex
	var got []uint64
	var wg sync.WaitGroup
	for _, ticket := range slices.Backward(tickets) {
		wg.Go(func() {
			o.wait(ticket, time.Time{})
			mu.Lock()
			got = append(got, ticket)
			mu.Unlock()
			o.leave(ticket)
		})
		time.Sleep(50 * time.Microsecond)
	}
	wg.Wait()
	if !slices.IsSorted(got) {
		t.Errorf("order %v", got)
	}
}

func TestOrderForgetsThoseThatNeedNoTurn(t *testing.T) {
	o := newOrder()
	o.enter() // hangs
	for range 3 * maxOver {
		o.leave(o.enter())
	}
	if len(o.over) > maxOver {
		t.Errorf("remembers %d", len(o.over))
	}
}

// A wait for others leaves time for the dial.
func TestOrderLeavesTimeForTheDial(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) { l.DialTimeout = 500 * time.Millisecond }))
	o := r.srv.listeners[0].order
	o.mu.Lock()
	o.patience = deadline
	o.mu.Unlock()
	o.enter() // hangs
	client, service := r.pair()
	send(t, client, []byte("x"))
	expect(t, service, "x")
}

// TestConnectionsKeepTheirOrder opens many connections one after the other, without waiting for the service.
func TestConnectionsKeepTheirOrder(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			var ln net.Listener
			r := newRig(t, nil, onListener(func(l *Listener) {
				if network == "unix" {
					path := filepath.Join(t.TempDir(), "s")
					var err error
					if ln, err = net.Listen("unix", path); err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { ln.Close() })
					l.Upstream = "unix:" + path
				}
			}))
			if ln == nil {
				ln = r.svc
			}
			o := r.srv.listeners[0].order
			o.mu.Lock()
			o.patience = deadline
			o.mu.Unlock()
			const n = 400
			go func() {
				for i := range uint32(n) {
					c, err := net.Dial("tcp", r.addr)
					if err != nil {
						t.Error(err)
						return
					}
					t.Cleanup(func() { c.Close() })
					c.Write(binary.BigEndian.AppendUint32(nil, i))
				}
			}()
			for i := range uint32(n) {
				c, err := ln.Accept()
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { c.Close() })
				c.SetDeadline(time.Now().Add(deadline))
				var b [4]byte
				if _, err := io.ReadFull(c, b[:]); err != nil {
					t.Fatal(err)
				}
				if got := binary.BigEndian.Uint32(b[:]); got != i {
					t.Fatalf("connection %d of the service is the client's %d", i, got)
				}
			}
		})
	}
}
