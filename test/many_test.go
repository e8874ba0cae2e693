//go:build linux

package test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	. "shunt/test/harness"
)

// A plan is what a client asks of the service, in a header of fixed length.
type plan struct {
	Seed     uint64
	Up, Down int64
	// End says who ends how.
	End end
}

type end int64

const (
	clientFirst  end = iota // the client finishes, the service after it has read that
	serviceFirst            // the service finishes, the client after it has read that
	clientAborts            // the client aborts once everything has been confirmed
	serviceAborts
	ends
)

const planSize = 32

func (p plan) bytes() []byte {
	b, err := binary.Append(nil, binary.BigEndian, p)
	if err != nil {
		panic(err)
	}
	return b
}

// planFor draws the i-th connection: sizes are spread over the orders of
// magnitude from 1 B to 8 MiB.
func planFor(i int) (plan, *rand.Rand) {
	rng := rand.New(rand.NewPCG(uint64(i), 77))
	size := func() int64 { return int64(math.Exp(rng.Float64() * math.Log(float64(Scaled(8*mib))))) }
	p := plan{Seed: rng.Uint64(), Up: size(), Down: size(), End: end(rng.IntN(int(ends)))}
	// One direction is small in most connections, as in life.
	switch rng.IntN(4) {
	case 0, 1:
		p.Up = min(p.Up, 1000)
	case 2:
		p.Down = min(p.Down, 1000)
	}
	return p, rng
}

// transfer sends and receives at once, in random pieces.
func transfer(c *net.TCPConn, rng *rand.Rand, mySeed uint64, mine int64, theirSeed uint64, theirs int64, endWith func() error) error {
	// Small pieces for small transfers: a large one in pieces of 64 bytes measures patience only.
	chunk := max(1<<(6+rng.IntN(12)), int(mine/128))
	sendRng := rand.New(rand.NewPCG(rng.Uint64(), 1))
	sent := make(chan error, 1)
	go func() {
		err := Send(c, mySeed, mine, chunk, func() int { return 1 + sendRng.IntN(chunk) })
		if err == nil && endWith != nil {
			err = endWith()
		}
		sent <- err
	}()
	v := NewVerifier(theirSeed)
	buf := make([]byte, 1<<(8+rng.IntN(10)))
	var err error
	for v.Bytes() < theirs && err == nil {
		var n int
		n, err = c.Read(buf[:min(int64(len(buf)), theirs-v.Bytes())])
		if _, bad := v.Write(buf[:n]); bad != nil {
			err = bad
		}
	}
	if err != nil {
		err = fmt.Errorf("after %d of %d bytes: %w", v.Bytes(), theirs, err)
		c.Close()
	}
	return errors.Join(err, <-sent)
}

// wantEnd reads once more and tells FIN from RST.
func wantEnd(c *net.TCPConn, reset bool) error {
	n, err := c.Read(make([]byte, 1))
	if reset && !IsReset(err) || !reset && err != io.EOF || n != 0 {
		return fmt.Errorf("the end: %d bytes, %v; want a reset: %v", n, err, reset)
	}
	return nil
}

const confirm = 'k'

// follow is the service's side of a plan.
func follow(c *net.TCPConn) error {
	_ = c.SetDeadline(time.Now().Add(2 * Patience))
	head := make([]byte, planSize)
	if _, err := io.ReadFull(c, head); err != nil {
		return err
	}
	p := plan{
		Seed: binary.BigEndian.Uint64(head), Up: int64(binary.BigEndian.Uint64(head[8:])),
		Down: int64(binary.BigEndian.Uint64(head[16:])), End: end(binary.BigEndian.Uint64(head[24:])),
	}
	rng := rand.New(rand.NewPCG(p.Seed, 5))
	var endWith func() error
	if p.End == serviceFirst {
		endWith = c.CloseWrite
	}
	if err := transfer(c, rng, p.Seed+1, p.Down, p.Seed, p.Up, endWith); err != nil {
		return fmt.Errorf("service, plan %+v: %w", p, err)
	}
	var err error
	switch p.End {
	case clientFirst, serviceFirst:
		err = wantEnd(c, false)
	case clientAborts:
		if _, err = c.Write([]byte{confirm}); err == nil {
			err = wantEnd(c, true)
		}
	case serviceAborts:
		one := make([]byte, 1)
		if _, err = io.ReadFull(c, one); err == nil {
			err = Abort(c)
		}
	}
	if err != nil {
		err = fmt.Errorf("service, plan %+v: %w", p, err)
	}
	return err
}

// lead is the client's side of a plan.
func lead(c *net.TCPConn, p plan, rng *rand.Rand) error {
	if _, err := c.Write(p.bytes()); err != nil {
		return err
	}
	var endWith func() error
	if p.End == clientFirst {
		endWith = c.CloseWrite
	}
	if err := transfer(c, rng, p.Seed, p.Up, p.Seed+1, p.Down, endWith); err != nil {
		return err
	}
	switch p.End {
	case clientFirst:
		return wantEnd(c, false)
	case serviceFirst:
		if err := wantEnd(c, false); err != nil {
			return err
		}
		return c.CloseWrite()
	case clientAborts:
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			return err
		}
		return Abort(c)
	default:
		if _, err := c.Write([]byte{confirm}); err != nil {
			return err
		}
		return wantEnd(c, true)
	}
}

func TestTenThousandConnections(t *testing.T) {
	// Random sizes, pieces and order of closing: every byte right, and every
	// end seen as it was meant.
	EachPath(t, func(t *testing.T, p Path) {
		const workers = 200
		conns := Scaled(10_000)
		f := Open(t, p, Serve(t, follow).Addr)
		var next, up, down atomic.Int64
		var wg sync.WaitGroup
		errs := make(chan error, workers)
		begin := time.Now()
		for range workers {
			wg.Go(func() {
				for {
					i := int(next.Add(1) - 1)
					if i >= conns || len(errs) > 5 {
						return
					}
					p, rng := planFor(i)
					up.Add(planSize + p.Up)
					down.Add(p.Down)
					switch p.End {
					case clientAborts:
						down.Add(1)
					case serviceAborts:
						up.Add(1)
					}
					c, err := DialErr(nil, f.Addr)
					if err == nil {
						_ = c.SetDeadline(time.Now().Add(2 * Patience))
						err = lead(c, p, rng)
						c.Close()
					}
					if err != nil {
						errs <- fmt.Errorf("connection %d, plan %+v: %w", i, p, err)
						return
					}
				}
			})
		}
		wg.Wait()
		close(errs)
		for err := range errs {
			t.Error(err)
		}
		if t.Failed() {
			return
		}
		t.Logf("%d connections, %d MiB up and %d MiB down in %v", conns, up.Load()/mib, down.Load()/mib, time.Since(begin).Round(time.Second/10))
		f.CheckPath(t, up.Load(), down.Load(), 0.3)
	})
}

func TestThousandsAtOnce(t *testing.T) {
	// 4,000 connections are open together and each of them still moves.
	EachPath(t, func(t *testing.T, p Path) {
		conns := Scaled(4000)
		f := Open(t, p, Serve(t, echo).Addr)
		list := make([]*net.TCPConn, conns)
		defer func() {
			for _, c := range list {
				if c != nil {
					c.Close()
				}
			}
		}()
		var err error
		for i := range list {
			if list[i], err = DialErr(nil, f.Addr); err != nil {
				t.Fatalf("connection %d: %v", i, err)
			}
		}
		for round := range int64(2) {
			for i, c := range list {
				msg := make([]byte, 200)
				Fill(msg, uint64(i), 200*round)
				if _, err := c.Write(msg); err != nil {
					t.Fatalf("connection %d: %v", i, err)
				}
			}
			for i, c := range list {
				if err := ReceiveN(c, uint64(i), 200*round, 200); err != nil {
					t.Fatalf("connection %d: %v", i, err)
				}
			}
		}
		if f.Shunt != nil {
			live, err := f.Shunt.Connections()
			if err != nil {
				t.Fatal(err)
			}
			if len(live) != conns {
				t.Errorf("/connections shows %d connections, %d are open", len(live), conns)
			}
		}
		order := rand.New(rand.NewPCG(3, 3)).Perm(conns)
		for _, i := range order {
			list[i].Close()
		}
		f.CheckPath(t, 400*int64(conns), 400*int64(conns), 0.3)
	})
}
