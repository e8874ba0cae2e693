package splice

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shunt/bpf"
)

// shutAndRecv finishes sending on a blocking socket, and reads until the end.
// It returns what came, and how often recv said EAGAIN.
func shutAndRecv(t *testing.T, c *net.TCPConn) (got []byte, again int) {
	t.Helper()
	err := withFD(c, func(fd int) error {
		restore, err := blocking(fd)
		if err != nil {
			return err
		}
		defer restore()
		if err := unix.Shutdown(fd, unix.SHUT_WR); err != nil {
			return err
		}
		b := make([]byte, 64<<10)
		for {
			n, _, err := unix.Recvfrom(fd, b, 0)
			switch {
			case errors.Is(err, unix.EAGAIN):
				if again++; again > 1000 {
					return err
				}
			case errors.Is(err, unix.EINTR):
			case err != nil:
				return err
			case n == 0:
				return nil
			default:
				got = append(got, b[:n]...)
			}
		}
	})
	if err != nil {
		t.Error(err)
	}
	return got, again
}

// keepsTarget says that the kernel's senders hold on to whom they have sent to last: an idle receiver looks as if
// something were on its way.
func keepsTarget() bool {
	_, v := kernelRelease()
	return !knownFaults[0].in(v)
}

// A thread that finishes sending and waits for the answer is woken by the acknowledgement of its FIN. Where
// an end has got nothing yet that is certain not to show; where its queue is just empty, it takes that nobody is in a
// system call on the others, and a kernel whose senders don't hold on to it.
func TestHalfCloseDoesNotWakeItsOwnReader(t *testing.T) {
	eachVerdict(t, func(t *testing.T, k *Kernel) {
		for _, d := range []Direction{Up, Down} {
			for _, before := range []int{0, 1000} {
				if before > 0 && k.opt.Verdict == VerdictWindow {
					continue // the rest of its peer's window would be lost: it stays
				}
				t.Run(fmt.Sprintf("%v after %d bytes", d, before), func(t *testing.T) {
					const rounds = 8
					again := 0
					for range rounds {
						l, err := k.newLoop()
						if err != nil {
							t.Fatal(err)
						}
						from, to := l.ends(d)
						if before > 0 {
							send(t, to, string(make([]byte, before)))
							expect(t, from, string(make([]byte, before)))
						}
						send(t, from, "question")
						expect(t, to, "question")
						var wg sync.WaitGroup
						wg.Go(func() {
							l.passFIN(t, d)
							// A delayed acknowledgement takes 40 ms.
							nap(50 * time.Millisecond)
							send(t, to, "answer")
							to.CloseWrite()
							l.passFIN(t, 1-d)
						})
						got, n := shutAndRecv(t, from)
						wg.Wait()
						if string(got) != "answer" {
							t.Errorf("read %q", got)
						}
						again += n
						if left := l.route.p.End[l.route.sender(d)].Out == bpf.ShuntOutOUT_LEFT; left && n > 0 || before == 0 && !left {
							t.Errorf("left the map: %v; recv said EAGAIN %d times", left, n)
						}
						s := l.route.Stats()
						if s[1-d].Bypassed+s[1-d].Forwarded != uint64(before+len("answer")) || s[d].Bypassed+s[d].Forwarded != uint64(len("question")) {
							t.Errorf("counted %+v", s)
						}
						l.close()
					}
					if again > rounds/2 && !keepsTarget() {
						t.Errorf("recv said EAGAIN %d times in %d rounds", again, rounds)
					}
				})
			}
		}
	})
}

// The end that finishes may leave the map while the other one sends as fast as it can.
func TestHalfCloseLosesNothingOfAStream(t *testing.T) {
	eachVerdict(t, func(t *testing.T, k *Kernel) {
		for _, d := range []Direction{Up, Down} {
			t.Run(fmt.Sprint(d), func(t *testing.T) {
				left := 0
				for round := range short(40) {
					l, err := k.newLoop()
					if err != nil {
						t.Fatal(err)
					}
					from, to := l.ends(d)
					size, chunk := short(4<<20), []int{64, 1500, 64 << 10}[round%3]
					if chunk == 64 {
						size /= 8
					}
					var wg sync.WaitGroup
					var want, sum [32]byte
					wg.Go(func() {
						var err error
						if want, err = stream(to, uint64(round), size, chunk); err != nil {
							t.Errorf("write: %v", err)
						}
						to.CloseWrite()
						l.passFIN(t, 1-d)
					})
					send(t, from, "go")
					wg.Go(func() { l.passFIN(t, d) })
					r := &blockingReader{t: t, c: from, finishAt: rand.IntN(size)}
					var n int
					if sum, n, err = drainHash(r, nil); err != nil || n != size {
						t.Errorf("read %d of %d: %v", n, size, err)
					}
					wg.Wait()
					if sum != want {
						t.Fatalf("round %d: streams differ", round)
					}
					if s := l.route.Stats(); s[1-d].Bypassed+s[1-d].Forwarded != uint64(size) {
						t.Errorf("round %d: counted %+v, sent %d", round, s[1-d], size)
					}
					if l.route.p.End[l.route.sender(d)].Out == bpf.ShuntOutOUT_LEFT {
						left++
					}
					l.close()
				}
				if left == 0 && !keepsTarget() && short(40) == 40 && k.opt.Verdict == VerdictEvery {
					t.Error("no end left the map: nothing was tested")
				}
				t.Logf("%d ends left the map", left)
			})
		}
	})
}

// blockingReader reads a blocking socket, and finishes sending on it after finishAt bytes.
type blockingReader struct {
	t        *testing.T
	c        *net.TCPConn
	finishAt int
	read     int
	finished bool
}

func (r *blockingReader) Read(b []byte) (n int, err error) {
	cerr := withFD(r.c, func(fd int) error {
		restore, err := blocking(fd)
		if err != nil {
			return err
		}
		defer restore()
		if !r.finished && r.read >= r.finishAt {
			r.finished = true
			if err := unix.Shutdown(fd, unix.SHUT_WR); err != nil {
				return err
			}
		}
		for {
			n, _, err = unix.Recvfrom(fd, b, 0)
			if err != unix.EAGAIN && err != unix.EINTR {
				return err
			}
		}
	})
	if cerr != nil {
		return 0, cerr
	}
	r.read += n
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}
