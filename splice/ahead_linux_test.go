package splice

import (
	"bytes"
	"io"
	"sync"
	"testing"

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
