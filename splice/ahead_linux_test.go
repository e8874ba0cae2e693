package splice

import (
	"bytes"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"shunt/bpf"
)

func TestAheadComesBeforeEverySend(t *testing.T) {
	eachVerdict(t, func(t *testing.T, k *Kernel) {
		const threads, each = 4, 200
		taken, first := []byte("for shunt itself "), bytes.Repeat([]byte("header "), 30)
		for range 20 {
			f := newFront(t, k, "127.0.0.1:0", "127.0.0.1:0")
			c := f.dial(f.front.Addr().String())
			send(t, c, string(taken))
			a := f.accept(f.front)
			cand, why := k.Claim(a)
			if cand == nil {
				t.Fatal(why)
			}
			expect(t, a, string(taken))
			b := f.dialUp(cand)
			s := f.accept(f.back)
			var wg sync.WaitGroup
			for range threads {
				wg.Go(func() {
					for range each {
						if _, err := c.Write([]byte("x")); err != nil {
							t.Error(err)
						}
					}
				})
			}
			r, why := cand.Pair(b, Ahead{Taken: uint64(len(taken)), First: first})
			if r == nil {
				t.Fatal(why)
			}
			f.run(r)
			got := make([]byte, len(first)+threads*each)
			if _, err := io.ReadFull(s, got); err != nil || !bytes.HasPrefix(got, first) || bytes.Count(got, []byte("x")) != threads*each {
				t.Fatalf("read %q, %v", got, err)
			}
			wg.Wait()
			// The header that was taken doesn't keep it from going direct.
			sent := uint64(threads * each)
			eventually(t, "not direct", func() bool {
				send(t, c, "y")
				expect(t, s, "y")
				sent++
				return r.Stats()[Up].Direct
			})
			if k.mode == bpf.ShuntModeMODE_EVERY {
				if st := r.Stats()[Up]; st.Bypassed+st.Forwarded != sent {
					t.Errorf("counted %d + %d bytes, want %d", st.Bypassed, st.Forwarded, sent)
				}
			}
		}
	})
}

func TestApplicationsWaitForWhatGoesAhead(t *testing.T) {
	// The moment of Pair in which only its own write is redirected, held still.
	eachVerdict(t, func(t *testing.T, k *Kernel) {
		f := newFront(t, k, "127.0.0.1:0", "127.0.0.1:0")
		c := f.dial(f.front.Addr().String())
		a := f.accept(f.front)
		cand, why := k.Claim(a)
		if cand == nil {
			t.Fatal(why)
		}
		b := f.dialUp(cand)
		s := f.accept(f.back)
		p := &k.pairs[cand.slot]
		eventually(t, "no service", func() bool { return atomic.LoadUint64(&p.End[bpf.ShuntRoleROLE_S].Cookie) != 0 })
		atomic.StoreUint32((*uint32)(&p.Open), uint32(bpf.ShuntOpenOPEN_OWN))
		send(t, c, "from the client")
		send(t, s, "from the service")
		expect(t, a, "from the client")
		expect(t, b, "from the service")
		send(t, b, "header")
		expect(t, s, "header")
		err := withFD(s, func(fd int) error {
			i, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
			if err == nil && i.Bytes_received != 0 {
				err = fmt.Errorf("%d bytes came over TCP", i.Bytes_received)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
		if up := atomic.LoadUint64(&p.Flow[Up].Runs); up != 0 {
			t.Errorf("%d verdicts for the client", up)
		}
		b.Close()
		a.Close()
		c.Close()
		s.Close()
		k.mu.Lock()
		k.giveBack(cand.slot, false)
		k.mu.Unlock()
	})
}

func TestUpstreamThatIsGoneGetsNothingAhead(t *testing.T) {
	eachVerdict(t, func(t *testing.T, k *Kernel) {
		f := newFront(t, k, "127.0.0.1:0", "127.0.0.1:0")
		c := f.dial(f.front.Addr().String())
		a := f.accept(f.front)
		cand, why := k.Claim(a)
		if cand == nil {
			t.Fatal(why)
		}
		b := f.dialUp(cand)
		s := f.accept(f.back)
		s.SetLinger(0)
		s.Close()
		r, why := cand.Pair(b, Ahead{First: []byte("header")})
		if r == nil {
			t.Fatal(why)
		}
		send(t, c, "payload")
		n, err := r.Forward(Up)
		if e, ok := err.(*EndError); n != 0 || !ok || !e.Write {
			t.Errorf("forwarded %d, %v; want the upstream's error", n, err)
		}
		b.Close()
		a.Close()
		c.Close()
		if st := r.Close()[Up]; st.Bypassed+st.Forwarded != 0 {
			t.Errorf("counted %+v", st)
		}
	})
}
