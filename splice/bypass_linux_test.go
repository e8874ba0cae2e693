package splice

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"

	"shunt/bpf"
)

const step = 10 * time.Second

// openKernel is a bypass for one test, which fails or skips where there is
// none, and checks at its end that nothing is left.
func openKernel(t *testing.T, change func(*Options)) *Kernel {
	t.Helper()
	o := DefaultOptions()
	o.Log = zerolog.New(zerolog.NewTestWriter(t))
	if change != nil {
		change(&o)
	}
	fds := countFDs(t)
	goroutines := runtime.NumGoroutine()
	k, r := open(o)
	if k == nil {
		if strings.Contains(os.Getenv("SHUNT_TEST_REQUIRE"), "bypass") {
			t.Fatalf("no bypass here: %s", r.Reason)
		}
		t.Skipf("no bypass here: %s", r.Reason)
	}
	t.Cleanup(func() {
		eventually(t, "sockets left in the sockhash", func() bool {
			seen, err := k.survey(0)
			return err == nil && len(seen) == 0
		})
		k.mu.Lock()
		owned := 0
		for _, o := range k.owned {
			if o {
				owned++
			}
		}
		if owned != 0 || len(k.routes) != 0 || len(k.fresh) != 0 || len(k.listens) != 0 {
			t.Errorf("left: %d slots, %d routes, %d fresh, %d listeners", owned, len(k.routes), len(k.fresh), len(k.listens))
		}
		k.mu.Unlock()
		if err := k.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		eventually(t, "goroutines or descriptors left", func() bool {
			runtime.GC() // io.Copy keeps its pipes until then
			return countFDs(t) <= fds && runtime.NumGoroutine() <= goroutines
		})
	})
	return k
}

// short makes an amount smaller for slow machines.
func short(n int) int {
	if testing.Short() {
		return n / 64
	}
	return n
}

func countFDs(t *testing.T) int {
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range d {
		// The runtime keeps its poller.
		if l, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && !strings.HasPrefix(l, "anon_inode:[event") {
			n++
		}
	}
	return n
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(step)
	for !ok() {
		if time.Now().After(deadline) {
			t.Errorf("%s after %v", what, step)
			return
		}
		nap(2 * time.Millisecond)
	}
}

func newLoop(t *testing.T, k *Kernel) *loop {
	t.Helper()
	l, err := k.newLoop()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []*net.TCPConn{l.client, l.service, l.up, l.down} {
		c.SetDeadline(time.Now().Add(6 * step))
	}
	t.Cleanup(l.close)
	return l
}

// eachVerdict runs a test with every verdict that this machine can run. The
// race that makes "window" unsafe before its fix needs two threads on one
// socket, which the tests don't do.
func eachVerdict(t *testing.T, f func(t *testing.T, k *Kernel)) {
	for _, v := range []Verdict{VerdictEvery, VerdictWindow} {
		t.Run(string(v), func(t *testing.T) {
			f(t, openKernel(t, func(o *Options) { o.Verdict = v; o.QueueLimit = 4 << 20 }))
		})
	}
}

// legs are the connections that a proxy reads and writes for a direction.
func (l *loop) passFIN(t *testing.T, d Direction) {
	t.Helper()
	if err := <-l.ended[d]; err != nil {
		t.Errorf("forward %v: %v", d, err)
	}
	l.ended[d] = nil
	_, dst := l.route.legs(d)
	if err := dst.CloseWrite(); err != nil {
		t.Errorf("close write: %v", err)
	}
}

// stream sends size random bytes in random chunks and hashes them.
func stream(w io.Writer, seed uint64, size, chunk int) ([32]byte, error) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	src := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	h := sha256.New()
	buf := make([]byte, chunk)
	for size > 0 {
		b := buf[:min(1+rnd.IntN(chunk), size)]
		src.Read(b)
		h.Write(b)
		if _, err := w.Write(b); err != nil {
			return [32]byte{}, err
		}
		size -= len(b)
	}
	return [32]byte(h.Sum(nil)), nil
}

// drainHash reads until EOF.
func drainHash(r io.Reader, pause func(n int)) ([32]byte, int, error) {
	h := sha256.New()
	buf := make([]byte, 64<<10)
	total := 0
	for {
		n, err := r.Read(buf)
		h.Write(buf[:n])
		total += n
		if err == io.EOF {
			return [32]byte(h.Sum(nil)), total, nil
		}
		if err != nil {
			return [32]byte{}, total, err
		}
		if pause != nil {
			pause(total)
		}
	}
}

func TestStreamsArriveWhole(t *testing.T) {
	eachVerdict(t, func(t *testing.T, k *Kernel) {
		for i, size := range []int{1, 64<<10 - 1, 64 << 10, 64<<10 + 1, short(8 << 20), short(64 << 20)} {
			for _, chunk := range []int{100, 16 << 10, 1 << 20} {
				if size/chunk > short(100_000) {
					continue
				}
				t.Run(fmt.Sprintf("%d by %d", size, chunk), func(t *testing.T) {
					l := newLoop(t, k)
					var wg sync.WaitGroup
					var want, got [2][32]byte
					for _, d := range []Direction{Up, Down} {
						from, to := l.ends(d)
						wg.Add(2)
						go func() {
							defer wg.Done()
							var err error
							if want[d], err = stream(from, uint64(i)<<8|uint64(d), size, chunk); err != nil {
								t.Errorf("%v: write: %v", d, err)
							}
							from.CloseWrite()
							l.passFIN(t, d)
						}()
						go func() {
							defer wg.Done()
							var n int
							var err error
							if got[d], n, err = drainHash(to, nil); err != nil || n != size {
								t.Errorf("%v: read %d of %d: %v", d, n, size, err)
							}
						}()
					}
					wg.Wait()
					if want != got {
						t.Error("streams differ")
					}
					s := l.route.Stats()
					for _, d := range []Direction{Up, Down} {
						eventually(t, fmt.Sprintf("%v: counted %+v, sent %d", d, s[d], size), func() bool {
							s = l.route.Stats()
							return s[d].Bypassed+s[d].Forwarded == uint64(size)
						})
						// How much does depends on how busy the machine is.
						if s[d].Bypassed < uint64(size)/20 {
							t.Errorf("%v: hardly anything went direct: %+v", d, s[d])
						}
					}
				})
			}
		}
	})
}

func TestWindowRunsTheVerdictOncePerWindow(t *testing.T) {
	k := openKernel(t, func(o *Options) { o.Verdict = VerdictWindow; o.Window = 64 << 10; o.QueueLimit = 4 << 20 })
	l := newLoop(t, k)
	size := short(10<<20) + 17
	for _, d := range []Direction{Up, Down} {
		from, to := l.ends(d)
		buf := make([]byte, 1000)
		// In step, so that nothing is ever held back.
		for left := size; left > 0; left -= len(buf) {
			buf = buf[:min(len(buf), left)]
			if _, err := from.Write(buf); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(to, buf); err != nil {
				t.Fatal(err)
			}
		}
		s := l.route.Stats()[d]
		if most := uint64(size+64<<10-1)/(64<<10) + 1; s.VerdictRuns > most || s.Forwarded != 0 {
			t.Errorf("%v: %+v, want at most %d runs and nothing forwarded", d, s, most)
		}
	}
}

// front is a listener of the proxy's and a service behind it.
type front struct {
	t           *testing.T
	k           *Kernel
	front, back *net.TCPListener
}

func newFront(t *testing.T, k *Kernel, listen, back string) *front {
	t.Helper()
	f := &front{t: t, k: k}
	for _, l := range []struct {
		to   **net.TCPListener
		addr string
	}{{&f.front, listen}, {&f.back, back}} {
		var lc net.ListenConfig
		lc.SetMultipathTCP(false)
		network := "tcp"
		if strings.HasPrefix(l.addr, "0.0.0.0") {
			network = "tcp4"
		}
		ln, err := lc.Listen(context.Background(), network, l.addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ln.Close() })
		*l.to = ln.(*net.TCPListener)
		(*l.to).SetDeadline(time.Now().Add(6 * step))
	}
	withdraw, err := k.Listen(f.front)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(withdraw)
	return f
}

func port(a net.Addr) string {
	_, p, _ := net.SplitHostPort(a.String())
	return p
}

func (f *front) dial(addr string) *net.TCPConn {
	f.t.Helper()
	c, err := net.DialTimeout("tcp", addr, step)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(6 * step))
	return c.(*net.TCPConn)
}

func (f *front) accept(ln *net.TCPListener) *net.TCPConn {
	f.t.Helper()
	c, err := ln.AcceptTCP()
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(6 * step))
	return c
}

func (f *front) dialUp(c *Candidate) *net.TCPConn {
	f.t.Helper()
	d := net.Dialer{Timeout: step}
	d.SetMultipathTCP(false)
	if c != nil {
		d.Control = c.Control
	}
	up, err := d.Dial("tcp", f.back.Addr().String())
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { up.Close() })
	up.SetDeadline(time.Now().Add(6 * step))
	return up.(*net.TCPConn)
}

func expect(t *testing.T, r io.Reader, want string) {
	t.Helper()
	got := make([]byte, len(want))
	n, err := io.ReadFull(r, got)
	if err != nil || string(got) != want {
		t.Fatalf("read %q (%v), want %q", got[:n], err, want)
	}
}

func send(t *testing.T, w io.Writer, s string) {
	t.Helper()
	if _, err := io.WriteString(w, s); err != nil {
		t.Fatalf("write %q: %v", s, err)
	}
}

// run starts the forwarding of a route and ends it with the test.
func (f *front) run(r *Route) *loop {
	l := &loop{route: r, down: r.down.(*net.TCPConn), up: r.up.(*net.TCPConn)}
	for _, d := range []Direction{Up, Down} {
		ended := make(chan error, 1)
		l.ended[d] = ended
		go func() {
			_, err := r.Forward(d)
			ended <- err
		}()
	}
	f.t.Cleanup(func() {
		r.down.Close()
		r.up.Close()
		for _, e := range l.ended {
			if e != nil {
				<-e
			}
		}
		r.Close()
	})
	return l
}

func TestCutoverKeepsEarlyBytes(t *testing.T) {
	eachVerdict(t, func(t *testing.T, k *Kernel) {
		f := newFront(t, k, "127.0.0.1:0", "127.0.0.1:0")
		c := f.dial(f.front.Addr().String())
		send(t, c, "early ")
		a := f.accept(f.front)
		cand, why := k.Claim(a)
		if cand == nil {
			t.Fatal(why)
		}
		send(t, c, "before the upstream ")
		b := f.dialUp(cand)
		s := f.accept(f.back)
		send(t, s, "greeting ")
		r, why := cand.Pair(b, Ahead{})
		if r == nil {
			t.Fatal(why)
		}
		send(t, c, "open, not forwarded ")
		send(t, s, "still not ")
		f.run(r)
		expect(t, s, "early before the upstream open, not forwarded ")
		expect(t, c, "greeting still not ")
		// Caught up: from here on it is direct.
		eventually(t, "not direct", func() bool {
			send(t, c, "x")
			send(t, s, "y")
			expect(t, s, "x")
			expect(t, c, "y")
			st := r.Stats()
			return st[Up].Direct && st[Down].Direct
		})
	})
}

func TestManySendsDuringTheCutoverStayInOrder(t *testing.T) {
	eachVerdict(t, func(t *testing.T, k *Kernel) {
		for i := range short(200) {
			f := newFront(t, k, "127.0.0.1:0", "127.0.0.1:0")
			c := f.dial(f.front.Addr().String())
			const size = 300_000
			want := make(chan [32]byte, 1)
			go func() {
				h, err := stream(c, uint64(i), size, 3000)
				if err != nil {
					t.Error(err)
				}
				c.CloseWrite()
				want <- h
			}()
			cand, why := k.Claim(f.accept(f.front))
			if cand == nil {
				t.Fatal(why)
			}
			b := f.dialUp(cand)
			s := f.accept(f.back)
			r, why := cand.Pair(b, Ahead{})
			if r == nil {
				t.Fatal(why)
			}
			l := f.run(r)
			go l.passFIN(t, Up)
			got, n, err := drainHash(s, nil)
			if err != nil || got != <-want {
				t.Fatalf("round %d: %d bytes, %v", i, n, err)
			}
			b.Close()
			l.down.Close()
		}
	})
}

func TestSlowReaderIsBounded(t *testing.T) {
	eachVerdict(t, func(t *testing.T, k *Kernel) {
		for _, d := range []Direction{Up, Down} {
			for _, blocking := range []bool{false, true} {
				t.Run(fmt.Sprintf("%v blocking=%v", d, blocking), func(t *testing.T) {
					l := newLoop(t, k)
					from, to := l.ends(d)
					h := sha256.New()
					chunk := make([]byte, 48<<10)
					accepted := 0
					// A second, and on slow machines until the queue is full.
					begin := time.Now()
					goOn := func() bool {
						t := time.Since(begin)
						return t < time.Second || (accepted < 4<<20 || l.route.waits[d].Load() == 0) && t < step
					}
					if blocking {
						from.SetWriteDeadline(time.Now().Add(time.Second))
						for accepted < 1<<30 {
							rand.NewChaCha8([32]byte{byte(accepted >> 10)}).Read(chunk)
							n, err := from.Write(chunk)
							h.Write(chunk[:n])
							accepted += n
							if err != nil {
								if !errors.Is(err, os.ErrDeadlineExceeded) {
									t.Fatal(err)
								}
								if !goOn() {
									break
								}
								from.SetWriteDeadline(time.Now().Add(time.Second))
							}
						}
					} else {
						for accepted < 1<<30 && goOn() {
							rand.NewChaCha8([32]byte{byte(accepted >> 10)}).Read(chunk)
							n, err := sendNow(from, chunk)
							h.Write(chunk[:n])
							accepted += n
							if errors.Is(err, unix.EAGAIN) {
								nap(time.Millisecond)
							} else if err != nil {
								t.Fatal(err)
							}
						}
					}
					if accepted > 12<<20 || accepted < 4<<20 {
						t.Errorf("%d bytes accepted with a limit of 4 MiB", accepted)
					}
					if q := l.route.Stats()[d].Queued; q > 6<<20 {
						t.Errorf("%d bytes queued with a limit of 4 MiB", q)
					}
					from.CloseWrite()
					go l.passFIN(t, d)
					got, n, err := drainHash(to, nil)
					if err != nil || n != accepted || got != [32]byte(h.Sum(nil)) {
						t.Errorf("%d of %d bytes arrived, %v", n, accepted, err)
					}
					if l.route.Stats()[d].Waits == 0 {
						t.Error("no wait for room was counted")
					}
				})
			}
		}
	})
}

func TestCountsAreExactHoweverTheSenderEnds(t *testing.T) {
	eachVerdict(t, func(t *testing.T, k *Kernel) {
		for _, how := range []string{"shutdown", "close", "reset", "stays"} {
			for _, size := range []int{1, 777_777, int(k.opt.Window), int(k.opt.Window) * 3} {
				t.Run(fmt.Sprintf("%s %d", how, size), func(t *testing.T) {
					l := newLoop(t, k)
					go stream(l.client, 1, size, 9000)
					if _, err := io.CopyN(io.Discard, struct{ io.Reader }{l.service}, int64(size)); err != nil {
						t.Fatal(err)
					}
					switch how {
					case "shutdown":
						l.client.CloseWrite()
					case "close":
						l.client.Close()
					case "reset":
						l.client.SetLinger(0)
						l.client.Close()
					}
					if how != "stays" {
						<-l.ended[Up]
						l.ended[Up] = nil
					}
					l.down.Close()
					l.up.Close()
					for _, e := range l.ended {
						if e != nil {
							<-e
						}
					}
					l.ended = [2]chan error{}
					s := l.route.Close()
					l.route = nil
					if got := s[Up].Bypassed + s[Up].Forwarded; got != uint64(size) {
						t.Errorf("counted %d of %d: %+v", got, size, s[Up])
					}
				})
			}
		}
	})
}

func TestLiveCountNeverGoesBackNorAhead(t *testing.T) {
	k := openKernel(t, func(o *Options) { o.Verdict = VerdictWindow; o.Window = 4096 })
	l := newLoop(t, k)
	size := short(40 << 20)
	go stream(l.client, 1, size, 3000)
	read := 0
	last := uint64(0)
	buf := make([]byte, 64<<10)
	for read < size {
		n, err := l.service.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		read += n
		k.survey(0)
		s := l.route.Stats()[Up]
		if s.Bypassed < last {
			t.Fatalf("went from %d back to %d", last, s.Bypassed)
		}
		last = s.Bypassed
	}
	eventually(t, "count is not exact", func() bool {
		s := l.route.Stats()[Up]
		return s.Bypassed+s.Forwarded == uint64(size)
	})
}

// What is queued outlives FIN and RST in every order: sockets leave the map
// when they are closed by their owner, not by what arrives ("bpf, sockmap:
// Remove unhash handler for BPF sockmap usage", 5.16).
func TestQueuedBytesOutliveFINAndRST(t *testing.T) {
	eachVerdict(t, func(t *testing.T, k *Kernel) {
		for _, how := range []string{"fin", "fin after half-close", "half-close after fin", "rst", "rst after half-close"} {
			t.Run(how, func(t *testing.T) {
				l := newLoop(t, k)
				want := pattern(300_000, 4)
				if _, err := l.client.Write(want); err != nil {
					t.Fatal(err)
				}
				if strings.HasSuffix(how, "after half-close") {
					l.service.CloseWrite()
					l.passFIN(t, Down)
				}
				reset := strings.HasPrefix(how, "rst")
				if reset {
					l.client.SetLinger(0)
					l.client.Close()
					var end *EndError
					if err := <-l.ended[Up]; !errors.As(err, &end) || end.Write || !errors.Is(err, unix.ECONNRESET) {
						t.Errorf("forward: %v", err)
					}
					l.ended[Up] = nil
					l.up.SetLinger(0)
					l.up.Close()
				} else {
					l.client.CloseWrite()
					l.passFIN(t, Up)
				}
				if how == "half-close after fin" {
					l.service.CloseWrite()
					l.passFIN(t, Down)
				}
				// The end has arrived before the first byte is read.
				if err := closedByPeer(l.service); err != nil {
					t.Error(err)
				}
				got := make([]byte, len(want))
				if n, err := io.ReadFull(l.service, got); err != nil || !bytes.Equal(got, want) {
					t.Fatalf("%d of %d bytes, %v", n, len(want), err)
				}
				n, err := l.service.Read(got)
				if reset && !errors.Is(err, unix.ECONNRESET) || !reset && err != io.EOF || n != 0 {
					t.Errorf("after the last byte: %d, %v", n, err)
				}
			})
		}
	})
}

func TestSenderMeetsAClosedReceiver(t *testing.T) {
	eachVerdict(t, func(t *testing.T, k *Kernel) {
		l := newLoop(t, k)
		send(t, l.client, "x")
		expect(t, l.service, "x")
		l.service.Close()
		l.passFIN(t, Down)
		// Over TCP, through us, the sender meets what it would meet without us. It
		// may wait for room in its send buffer meanwhile.
		closed := make(chan error, 1)
		go func(ended chan error) {
			e := <-ended
			l.down.SetLinger(0)
			l.down.Close()
			closed <- e
		}(l.ended[Up])
		l.ended[Up] = nil
		var err error
		for deadline := time.Now().Add(step); err == nil && time.Now().Before(deadline); {
			_, err = l.client.Write(make([]byte, 1000))
		}
		if !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("the sender got %v", err)
		}
		l.client.Close()
		var end *EndError
		// Nothing came over TCP where the kernel itself told the sender.
		if e := <-closed; e != nil && (!errors.As(e, &end) || !end.Write) {
			t.Errorf("forward: %v, want a write error", e)
		}
	})
}

func TestUnclaimedCandidateIsGivenBack(t *testing.T) {
	k := openKernel(t, nil)
	f := newFront(t, k, "127.0.0.1:0", "127.0.0.1:0")
	c := f.dial(f.front.Addr().String())
	a := f.accept(f.front)
	eventually(t, "still enrolled", func() bool {
		seen, err := k.survey(0)
		return err == nil && len(seen) == 0
	})
	if cand, why := k.Claim(a); cand != nil || why != ReasonExpired {
		t.Errorf("claim after that: %v", why)
	}
	// It is plain TCP, and loses nothing.
	want := make(chan [32]byte, 1)
	go func() {
		h, err := stream(c, 3, 8<<20, 64<<10)
		if err != nil {
			t.Error(err)
		}
		c.CloseWrite()
		want <- h
	}()
	got, _, err := drainHash(a, nil)
	if err != nil || got != <-want {
		t.Errorf("stream differs (%v)", err)
	}
	if n := sndbuf(t, c); n < 100_000 {
		t.Errorf("send buffer %d of a socket that is not on the bypass", n)
	}
}

func sndbuf(t *testing.T, c *net.TCPConn) (n int) {
	t.Helper()
	if err := withFD(c, func(fd int) (err error) {
		n, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestSendBufferIsSmallOnTheSlowPathOnly(t *testing.T) {
	for _, own := range []bool{false, true} {
		k := openKernel(t, func(o *Options) { o.QueueLimit = 64 << 10 })
		l := newLoop(t, k)
		before := sndbuf(t, l.client)
		if own {
			if err := l.client.SetWriteBuffer(50_000); err != nil {
				t.Fatal(err)
			}
			before = 100_000
		}
		send(t, l.client, "direct")
		expect(t, l.service, "direct")
		if n := sndbuf(t, l.client); n != before {
			t.Errorf("send buffer %d, was %d", n, before)
		}
		go stream(l.client, 1, 8<<20, 1<<20)
		eventually(t, "never over the limit", func() bool { return l.route.Stats()[Up].Waits > 0 })
		if _, err := io.CopyN(io.Discard, struct{ io.Reader }{l.service}, 8<<20); err != nil {
			t.Fatal(err)
		}
		if n := sndbuf(t, l.client); own != (n == before) || !own && n != 2*appSndbuf {
			t.Errorf("application's own size %v: send buffer %d, was %d", own, n, before)
		}
	}
}

func TestSlotsAreUsedAgain(t *testing.T) {
	k := openKernel(t, func(o *Options) { o.MaxSockets = 4 })
	full := 0
	for i := range 12 {
		var l *loop
		eventually(t, "no slot comes back", func() bool {
			var err error
			if l, err = k.newLoop(); err != nil {
				if !strings.Contains(err.Error(), string(ReasonTableFull)) {
					t.Errorf("round %d: %v", i, err)
					return true
				}
				full++
			}
			return err == nil
		})
		if t.Failed() {
			return
		}
		if err := l.both(l.checkContent); err != nil {
			t.Fatal(err)
		}
		l.close()
	}
	if full == 0 {
		t.Error("4 sockets never ran out")
	}
}

func TestSecondKernelMeetsBusySockets(t *testing.T) {
	k1 := openKernel(t, nil)
	k2 := openKernel(t, nil)
	f := newFront(t, k1, "127.0.0.1:0", "127.0.0.1:0")
	withdraw, err := k2.Listen(f.front)
	if err != nil {
		t.Fatal(err)
	}
	defer withdraw()
	f.dial(f.front.Addr().String())
	a := f.accept(f.front)
	c1, why1 := k1.Claim(a)
	c2, why2 := k2.Claim(a)
	if (c1 == nil) == (c2 == nil) {
		t.Fatalf("claimed by %v (%s) and %v (%s), want one", c1, why1, c2, why2)
	}
	for _, c := range []*Candidate{c1, c2} {
		if c != nil {
			c.Release()
		}
	}
	if why1+why2 != ReasonBusy {
		t.Errorf("reasons %q and %q, want one %q", why1, why2, ReasonBusy)
	}
}

func TestWhichClientsAreLocal(t *testing.T) {
	k := openKernel(t, nil)
	for _, tc := range []struct{ listen, dial string }{
		{"127.0.0.1:0", "127.0.0.1"},
		{"127.0.0.9:0", "127.0.0.9"},
		{"[::1]:0", "[::1]"},
		{"0.0.0.0:0", "127.0.0.1"},
		{"0.0.0.0:0", "127.7.7.7"},
		{"[::]:0", "127.0.0.1"},
		{"[::]:0", "[::1]"},
		{"[::]:0", "[::ffff:127.0.0.1]"},
	} {
		t.Run(tc.listen+" "+tc.dial, func(t *testing.T) {
			f := newFront(t, k, tc.listen, "127.0.0.1:0")
			c := f.dial(tc.dial + ":" + port(f.front.Addr()))
			cand, why := k.Claim(f.accept(f.front))
			if cand == nil {
				t.Fatal(why)
			}
			r, why := cand.Pair(f.dialUp(cand), Ahead{})
			if r == nil {
				t.Fatal(why)
			}
			s := f.accept(f.back)
			f.run(r)
			send(t, c, "hello")
			expect(t, s, "hello")
			send(t, s, "back")
			expect(t, c, "back")
			eventually(t, "not direct", func() bool { // the view that counts windows has an age
				st := r.Stats()
				return st[Up].Bypassed == 5 && st[Down].Bypassed == 4
			})
		})
	}
	t.Run("another port", func(t *testing.T) {
		f := newFront(t, k, "127.0.0.1:0", "127.0.0.1:0")
		c := f.dial(f.back.Addr().String())
		if seen, err := k.survey(0); err != nil || len(seen) != 0 {
			t.Errorf("a connection that is not the listener's was enrolled (%v)", err)
		}
		c.Close()
	})
}

// A listener with TCP_DEFER_ACCEPT has no socket for a connection before its
// first byte, so that there is none to pair with.
func TestDeferredServiceIsCopied(t *testing.T) {
	k := openKernel(t, nil)
	f := newFront(t, k, "127.0.0.1:0", "127.0.0.1:0")
	if err := withFD(f.back, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, 5)
	}); err != nil {
		t.Fatal(err)
	}
	c := f.dial(f.front.Addr().String())
	a := f.accept(f.front)
	cand, why := k.Claim(a)
	if cand == nil {
		t.Fatal(why)
	}
	b := f.dialUp(cand)
	r, why := cand.Pair(b, Ahead{})
	if r != nil || why != ReasonUpstreamNotLocal {
		t.Fatalf("pair: %v", why)
	}
	// Everything is plain TCP: splice(2) works, and the late socket is not enrolled.
	go io.Copy(b, a)
	send(t, c, "hello")
	s := f.accept(f.back)
	expect(t, s, "hello")
	seen, err := k.survey(0)
	if err != nil || len(seen) != 0 {
		t.Errorf("%d sockets enrolled, %v", len(seen), err)
	}
	c.Close()
}

func TestReleasedCandidateIsPlainTCP(t *testing.T) {
	k := openKernel(t, nil)
	f := newFront(t, k, "127.0.0.1:0", "127.0.0.1:0")
	c := f.dial(f.front.Addr().String())
	a := f.accept(f.front)
	cand, why := k.Claim(a)
	if cand == nil {
		t.Fatal(why)
	}
	cand.Release()
	go func() {
		io.Copy(a, a)
		a.CloseWrite()
	}()
	send(t, c, "echo")
	expect(t, c, "echo")
	c.CloseWrite()
	if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("%d %v", n, err)
	}
}

func TestMPTCPClientIsCopied(t *testing.T) {
	k := openKernel(t, nil)
	f := newFront(t, k, "127.0.0.1:0", "127.0.0.1:0")
	d := net.Dialer{}
	d.SetMultipathTCP(true)
	c, err := d.Dial("tcp", f.front.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if b, err := os.ReadFile("/proc/sys/net/mptcp/enabled"); err != nil || b[0] != '1' {
		t.Skip("this kernel has no MPTCP, or it is switched off (net.mptcp.enabled)")
	}
	cand, why := k.Claim(f.accept(f.front))
	if cand != nil || why != ReasonMPTCP {
		t.Errorf("claim: %v", why)
	}
}

func TestReceiverThatCannotSeeRedirectedBytesIsSaid(t *testing.T) {
	var log bytes.Buffer
	var mu sync.Mutex
	k := openKernel(t, func(o *Options) {
		o.Log = zerolog.New(writerFunc(func(b []byte) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			return log.Write(b)
		}))
	})
	k.mu.Lock()
	k.stallAfter = 100 * time.Millisecond
	k.mu.Unlock()
	f := newFront(t, k, "127.0.0.1:0", "127.0.0.1:0")
	connect := func() (c, b, s *net.TCPConn, r *Route, why Reason) {
		c = f.dial(f.front.Addr().String())
		cand, why := k.Claim(f.accept(f.front))
		if cand == nil {
			return c, nil, nil, nil, why
		}
		b = f.dialUp(cand)
		s = f.accept(f.back)
		r, why = cand.Pair(b, Ahead{})
		return
	}
	c, _, s, r, why := connect()
	if r == nil {
		t.Fatal(why)
	}
	f.run(r)
	// A service that reads by splice(2).
	other := f.dial(f.back.Addr().String())
	f.accept(f.back)
	go io.Copy(other, s)
	send(t, c, "never seen")
	eventually(t, "nothing is said", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return strings.Contains(log.String(), "has not taken its first redirected bytes")
	})
	if _, _, _, r, why := connect(); r != nil || why != ReasonUpstreamStalled {
		t.Errorf("the next connection: %v", why)
	}
	s.CloseRead()
	s.SetDeadline(time.Now())
}

// The memory of a FIN counts like redirected bytes.
func TestReceiverThatThinksIsNotStalled(t *testing.T) {
	k := openKernel(t, nil)
	k.mu.Lock()
	k.stallAfter = 10 * time.Millisecond
	k.mu.Unlock()
	l := newLoop(t, k)
	send(t, l.client, "request")
	l.client.CloseWrite()
	l.passFIN(t, Up)
	expect(t, l.service, "request")
	if err := closedByPeer(l.service); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		k.findStalled()
		nap(20 * time.Millisecond)
	}
	if k.isStalled(l.route.stallKey(Up)) {
		t.Error("a service that took the request, and not yet the FIN, is said to be stalled")
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func TestTLSIsRefusedOnlyOnEnrolledSockets(t *testing.T) {
	k := openKernel(t, nil)
	if err := k.tryTLS(); err == nil {
		t.Error("kTLS on an enrolled socket")
	}
	f := newFront(t, k, "127.0.0.1:0", "127.0.0.1:0")
	c := f.dial(f.back.Addr().String())
	err := withFD(c, func(fd int) error { return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_ULP, "tls") })
	if errors.Is(err, unix.EPERM) {
		t.Error("kTLS is refused on a socket that is none of ours")
	}
}

func TestCandidatesGoneBeforeTheClaim(t *testing.T) {
	k := openKernel(t, nil)
	f := newFront(t, k, "127.0.0.1:0", "127.0.0.1:0")
	for _, reset := range []bool{false, true} {
		c := f.dial(f.front.Addr().String())
		send(t, c, "bye")
		if reset {
			c.SetLinger(0)
		}
		c.Close()
		a := f.accept(f.front)
		cand, why := k.Claim(a)
		if cand == nil {
			// Its reset took the accepted socket's place in the map along.
			t.Logf("reset=%v: %v", reset, why)
			continue
		}
		b := f.dialUp(cand)
		s := f.accept(f.back)
		r, why := cand.Pair(b, Ahead{})
		if r == nil {
			t.Fatal(why)
		}
		l := f.run(r)
		expect(t, s, "bye")
		err := <-l.ended[Up]
		l.ended[Up] = nil
		if !reset && err != nil || reset && !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("reset=%v: forward: %v", reset, err)
		}
	}
}

func TestAutoLimitDividesTheBudget(t *testing.T) {
	k := openKernel(t, nil)
	k.surveyMu.Lock()
	k.seen, k.surveyAt = map[uint64]view{}, time.Now().Add(time.Hour)
	for i := range uint64(1000) {
		k.seen[i] = view{ShuntSight: bpf.ShuntSight{Queued: 4 << 20}}
	}
	k.surveyMu.Unlock()
	if got := k.limitFor(1 << 30); got > 1<<30/1000 || got < MinQueueLimit {
		t.Errorf("limit %d for 1000 waiting receivers of 1 GiB", got)
	}
	k.surveyMu.Lock()
	k.seen = nil
	k.surveyMu.Unlock()
	if got := k.limitFor(1 << 30); got != MaxQueueLimit {
		t.Errorf("limit %d with nobody waiting", got)
	}
}

func TestProbeSaysWhatItFound(t *testing.T) {
	k := openKernel(t, nil) // the same checks; skips where there is no bypass
	o := DefaultOptions()
	r := Probe(o)
	if !r.Possible || r.Reason != "" {
		t.Fatalf("not possible: %s", r.Reason)
	}
	if r.Verdict != k.report.Verdict || r.QueueLimit != MaxQueueLimit || r.Budget < MaxQueueLimit || r.Kernel == "" {
		t.Errorf("report %+v", r)
	}
	seen := map[string]bool{}
	for _, c := range r.Checks {
		if c.Name == "" || c.Detail == "" || seen[c.Name] {
			t.Errorf("check %+v", c)
		}
		if c.Required && !c.OK {
			t.Errorf("%s did not pass, and the bypass is possible", c.Name)
		}
		seen[c.Name] = true
	}
	for _, name := range []string{"pairing", "content and order", "MSG_PEEK and poll", "FIONREAD", "blocking recv",
		"bounded queue", "end of stream", "kTLS refused", "verdict window", "verdict permanent"} {
		if !seen[name] {
			t.Errorf("no check %q", name)
		}
	}
	o.Cgroup = t.TempDir()
	if r := Probe(o); r.Possible || !strings.Contains(r.Reason, "cgroup2") {
		t.Errorf("with a cgroup that is none: %v %q", r.Possible, r.Reason)
	}
}

// The kernel allocates about 1 KiB for each send that waits, however small.
func TestTinySendsAreBoundedByTheirMemory(t *testing.T) {
	eachVerdict(t, func(t *testing.T, k *Kernel) {
		const limit = 256 << 10
		if err := k.obj.QueueLimit.Set(uint32(limit)); err != nil {
			t.Fatal(err)
		}
		for _, d := range []Direction{Up, Down} {
			l := newLoop(t, k)
			from, to := l.ends(d)
			sent, quiet := 0, 0
			// Each send looks at the queue, which takes long where everything is slow.
			for quiet < 20 && sent < short(1<<20) {
				n, err := sendNow(from, []byte{byte(sent)})
				sent += n
				if errors.Is(err, unix.EAGAIN) {
					quiet++
					nap(2 * time.Millisecond)
				} else if err != nil {
					t.Fatal(err)
				} else {
					quiet = 0
				}
			}
			role := l.route.receiver(d)
			v, err := k.inspect(l.route.cookie[role], l.route.addr[role])
			if err != nil {
				t.Fatal(err)
			}
			most := uint32(limit/messageCost + 64)
			if k.mode == bpf.ShuntModeMODE_WINDOW {
				most += 4096
			}
			if v.Messages > most || v.Messages < 100 {
				t.Errorf("%v: %d messages wait, want at most %d", d, v.Messages, most)
			}
			got := make([]byte, sent)
			if _, err := io.ReadFull(to, got); err != nil {
				t.Fatal(err)
			}
			for i, b := range got {
				if b != byte(i) {
					t.Fatalf("%v: byte %d of %d differs", d, i, sent)
				}
			}
		}
	})
}

// A sender whose small buffer held less than a segment would wait for the
// kernel's 200 ms timer at every piece.
func TestCorkedSenderGoesOnOverTheLimit(t *testing.T) {
	k := openKernel(t, func(o *Options) { o.QueueLimit = MinQueueLimit })
	for _, d := range []Direction{Up, Down} {
		l := newLoop(t, k)
		from, to := l.ends(d)
		if err := withFD(from, func(fd int) error {
			return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_CORK, 1)
		}); err != nil {
			t.Fatal(err)
		}
		size := short(32 << 20)
		from.SetDeadline(time.Now().Add(2 * step))
		want := make(chan [32]byte, 1)
		go func() {
			h, err := stream(from, 1, size, 16<<10)
			if err != nil {
				t.Errorf("%v: write: %v", d, err)
			}
			from.CloseWrite()
			want <- h
		}()
		eventually(t, "never over the limit", func() bool { return l.route.Stats()[d].Passed > 0 })
		go l.passFIN(t, d)
		got, n, err := drainHash(to, nil)
		if err != nil || got != <-want {
			t.Errorf("%v: %d of %d bytes, %v", d, n, size, err)
		}
	}
}

// A socket that is disconnected and connected to somebody else must not read
// what was sent to its former self, nor what is still sent.
func TestDisconnectedSocketTakesNothingAlong(t *testing.T) {
	eachVerdict(t, func(t *testing.T, k *Kernel) {
		f := newFront(t, k, "127.0.0.1:0", "127.0.0.1:0")
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		connect := func(ln *net.TCPListener) error {
			return unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: ln.Addr().(*net.TCPAddr).Port})
		}
		if err := connect(f.front); err != nil {
			t.Fatal(err)
		}
		cand, why := k.Claim(f.accept(f.front))
		if cand == nil {
			t.Fatal(why)
		}
		r, why := cand.Pair(f.dialUp(cand), Ahead{})
		if r == nil {
			t.Fatal(why)
		}
		f.run(r)
		s := f.accept(f.back)
		send(t, s, "old secret")
		eventually(t, "not queued", func() bool {
			v, err := k.inspect(r.cookie[bpf.ShuntRoleROLE_C], r.addr[bpf.ShuntRoleROLE_C])
			return err == nil && v.Messages > 0
		})
		// connect(AF_UNSPEC), which the package has no name for.
		if _, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&unix.RawSockaddr{Family: unix.AF_UNSPEC})), unix.SizeofSockaddrInet4); errno != 0 {
			t.Fatal(errno)
		}
		if err := connect(f.back); err != nil {
			t.Fatal(err)
		}
		other := f.accept(f.back)
		s.Write([]byte("still sent"))
		send(t, other, "new")
		tv := unix.NsecToTimeval(int64(step))
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
		buf := make([]byte, 100)
		n, err := unix.Read(fd, buf)
		if err != nil || string(buf[:n]) != "new" {
			t.Errorf("read %q, %v", buf[:max(n, 0)], err)
		}
	})
}
