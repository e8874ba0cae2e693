//go:build linux

package test

import (
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	. "shunt/test/harness"
)

// A flood writes a seed's stream until it is told to stop.
type flood struct {
	accepted atomic.Int64
	stop     chan struct{}
	done     chan error
}

// floodFrom begins to write to c for ever: with sends that block in the
// kernel, or with poll(2) and sends that don't block.
func floodFrom(c *net.TCPConn, seed uint64, blocking bool) *flood {
	f := &flood{stop: make(chan struct{}), done: make(chan error, 1)}
	ready := make(chan struct{})
	go func() {
		f.done <- Raw(c, func(fd int) error {
			if err := unix.SetNonblock(fd, !blocking); err != nil {
				return err
			}
			// Both kinds look at stop now and then.
			tv := unix.Timeval{Usec: 200_000}
			if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv); err != nil {
				return err
			}
			close(ready)
			buf := make([]byte, 64*kib)
			for {
				select {
				case <-f.stop:
					return nil
				default:
				}
				off := f.accepted.Load()
				Fill(buf, seed, off)
				n, err := unix.Write(fd, buf)
				if n > 0 {
					f.accepted.Add(int64(n))
				}
				switch err {
				case nil, unix.EINTR:
				case unix.EAGAIN:
					if blocking {
						continue // SO_SNDTIMEO has passed
					}
					fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
					if _, err := unix.Poll(fds, 200); err != nil && err != unix.EINTR {
						return err
					}
				default:
					return fmt.Errorf("send, after %d bytes: %w", off, err)
				}
			}
		})
	}()
	<-ready
	return f
}

// settle waits until nothing more has been accepted for a second.
func (f *flood) settle() error {
	last, since := int64(-1), time.Now()
	return Poll(30*time.Second, func() error {
		if n := f.accepted.Load(); n != last {
			last, since = n, time.Now()
		}
		select {
		case err := <-f.done:
			f.done <- err
			return nil
		default:
		}
		if d := time.Since(since); d < time.Second {
			return fmt.Errorf("%d bytes accepted, and still growing", last)
		}
		return nil
	})
}

func TestSlowReaderIsBounded(t *testing.T) {
	// The reader is idle and the sender writes for ever: the sender comes to
	// a halt, memory stays flat, other connections are unharmed, and when
	// the reader resumes every byte arrives.
	EachPath(t, func(t *testing.T, p Path) {
		for _, limit := range []string{"4MiB", "auto"} {
			for _, side := range []string{"client", "service"} {
				for _, blocking := range []bool{true, false} {
					if limit == "auto" && (side == "service" || blocking) {
						continue // the limit is found in one place; one combination shows it
					}
					t.Run(fmt.Sprintf("%s, %s sends, blocking %v", limit, side, blocking), func(t *testing.T) {
						slowReader(t, p, limit, side == "client", blocking)
					})
				}
			}
		}
	})
}

func slowReader(t *testing.T, p Path, limit string, clientSends, blocking bool) {
	bound := int64(12 * mib)
	if limit == "auto" && p.Bypass() {
		bound = Probe(t).QueueBudget
	}
	services := make(chan *net.TCPConn, 1)
	end := make(chan struct{})
	s := Serve(t, func(c *net.TCPConn) error {
		first := make([]byte, 1)
		if _, err := c.Read(first); err != nil {
			return err
		}
		if first[0] == 'e' {
			return echo(c)
		}
		services <- c
		<-end
		return nil
	})
	f := Open(t, p, s.Addr, WithBypass("queue_limit", fmt.Sprintf("%q", limit)))
	client := f.Dial(t)
	if _, err := client.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	service := <-services
	defer close(end)
	sender, receiver := client, service
	if !clientSends {
		sender, receiver = service, client
	}

	other := f.Dial(t)
	if _, err := other.Write([]byte("e")); err != nil {
		t.Fatal(err)
	}
	var otherOff int64
	others := func(rounds int) {
		t.Helper()
		for range rounds {
			msg := make([]byte, 1000)
			Fill(msg, 8, otherOff)
			_ = other.SetDeadline(time.Now().Add(5 * time.Second))
			if _, err := other.Write(msg); err != nil {
				t.Fatalf("another connection: %v", err)
			}
			if err := ReceiveN(other, 8, otherOff, 1000); err != nil {
				t.Fatalf("another connection: %v", err)
			}
			otherOff += 1000
		}
	}
	others(10)

	fl := floodFrom(sender, 6, blocking)
	if err := fl.settle(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-fl.done:
		t.Fatalf("the sender ended: %v", err)
	default:
	}
	accepted := fl.accepted.Load()
	if accepted > bound {
		t.Errorf("%d bytes were accepted for a reader that reads nothing, want at most %d", accepted, bound)
	}
	var rss, pages int64
	measure := func() (int64, int64) {
		t.Helper()
		n, err := SockstatPages()
		if err != nil {
			t.Fatal(err)
		}
		if f.Shunt == nil {
			return 0, n
		}
		r, err := Status(f.Shunt.Pid(), "VmRSS")
		if err != nil {
			t.Fatal(err)
		}
		return r, n
	}
	rss, pages = measure()
	others(500)
	rss2, pages2 := measure()
	if more := fl.accepted.Load() - accepted; more > 256*kib {
		t.Errorf("the halted sender got rid of another %d bytes", more)
	}
	if rss2 > rss+8*mib {
		t.Errorf("shunt's memory grew from %d to %d bytes", rss, rss2)
	}
	// The whole machine's figure: other programs move it a little, a sender without bound by gigabytes.
	if pages2 > pages+16*mib/4096 {
		t.Errorf("TCP memory grew from %d to %d pages", pages, pages2)
	}

	// The reader resumes, the sender goes on a little and ends.
	result := make(chan error, 1)
	total := make(chan int64, 1)
	go func() {
		v := NewVerifier(6)
		buf := make([]byte, 128*kib)
		want := int64(-1)
		for {
			select {
			case want = <-total:
			default:
			}
			if want >= 0 && v.Bytes() >= want {
				result <- nil
				return
			}
			_ = receiver.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
			n, err := receiver.Read(buf)
			if _, bad := v.Write(buf[:n]); bad != nil {
				result <- bad
				return
			}
			if err != nil && !isTimeout(err) {
				result <- fmt.Errorf("after %d bytes: %w", v.Bytes(), err)
				return
			}
			if isTimeout(err) && want >= 0 {
				result <- fmt.Errorf("stuck after %d of %d bytes", v.Bytes(), want)
				return
			}
		}
	}()
	Until(t, 20*time.Second, "the resumed sender", func() error {
		if n := fl.accepted.Load(); n < accepted+4*mib {
			return fmt.Errorf("%d bytes accepted, %d before the reader resumed", n, accepted)
		}
		return nil
	})
	close(fl.stop)
	if err := <-fl.done; err != nil {
		t.Fatal(err)
	}
	total <- fl.accepted.Load()
	select {
	case err := <-result:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the reader didn't get everything")
	}
	others(10)
	sent := fl.accepted.Load()
	client.Close()
	other.Close()
	service.Close()
	if clientSends {
		f.CheckPath(t, sent+otherOff+2, otherOff, 0.05)
	} else {
		f.CheckPath(t, otherOff+2, sent+otherOff, 0.05)
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

func TestStreamComesBackToTheBypass(t *testing.T) {
	// A bulk sender outruns its receiver again and again; many of its bytes
	// are redirected all the same.
	EachBypass(t, func(t *testing.T, p Path) {
		n := Scaled[int64](256 * mib)
		for _, chunk := range []int{16 * kib, 128 * kib} {
			t.Run(fmt.Sprint(chunk), func(t *testing.T) {
				s := Serve(t, func(c *net.TCPConn) error {
					if err := Receive(c, 1, n); err != nil {
						return err
					}
					_, err := c.Write([]byte{1})
					return err
				})
				f := Open(t, p, s.Addr, WithBypass("queue_limit", `"4MiB"`))
				c := f.Dial(t)
				if err := errors.Join(Send(c, 1, n, chunk, nil), c.CloseWrite()); err != nil {
					t.Fatal(err)
				}
				if _, err := c.Read(make([]byte, 1)); err != nil {
					t.Fatal(err)
				}
				c.Close()
				f.CheckPath(t, n, 1, 0.2)
			})
		}
	})
}

func TestVerdictRunsOncePerWindow(t *testing.T) {
	OnPaths(t, pathsOf(Window), func(t *testing.T, p Path) {
		const window = mib
		n := Scaled[int64](64 * mib)
		s := Serve(t, func(c *net.TCPConn) error {
			return ReceiveN(c, 1, 0, n)
		})
		// The queue holds everything, and the pair is on the bypass before the stream begins.
		f := Open(t, p, s.Addr, WithBypass("window", `"1MiB"`), WithBypass("queue_limit", `"256MiB"`))
		c := f.Dial(t)
		if err := Send(c, 1, n, 64*kib, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Fatal("a byte from nowhere")
		}
		c.Close()
		f.CheckPath(t, n, 0, 0.3)
		m, err := f.Shunt.Metrics()
		if err != nil {
			t.Fatal(err)
		}
		moved, err := f.Moved()
		if err != nil {
			t.Fatal(err)
		}
		// A run for each window that was bypassed. Each run that passes costs one
		// more: at least one before the cutover, and one per send that was copied.
		least := float64(moved.UpBypass / window)
		most := float64(n/window + 1 + moved.UpCopy/(64*kib) + 1)
		if runs := m.Sum("shunt_verdict_runs_total"); runs < least || runs > most {
			t.Fatalf("the verdict ran %v times for windows of %d bytes, want %v to %v (%+v)", runs, window, least, most, moved)
		}
	})
}

func TestVerdictRunsForEverySend(t *testing.T) {
	OnPaths(t, pathsOf(Every), func(t *testing.T, p Path) {
		const sends = 1000
		f := Open(t, p, Serve(t, echo).Addr)
		c := f.Dial(t)
		for i := range int64(sends) {
			msg := make([]byte, 100)
			Fill(msg, 1, 100*i)
			if _, err := c.Write(msg); err != nil {
				t.Fatal(err)
			}
			if err := ReceiveN(c, 1, 100*i, 100); err != nil {
				t.Fatal(err)
			}
		}
		c.Close()
		f.CheckPath(t, 100*sends, 100*sends, 0.9)
		m, err := f.Shunt.Metrics()
		if err != nil {
			t.Fatal(err)
		}
		if runs := m.Sum("shunt_verdict_runs_total"); runs < 2*sends-10 || runs > 2*sends+10 {
			t.Fatalf("the verdict ran %v times for %d sends", runs, 2*sends)
		}
	})
}

// pathsOf returns p if SHUNT_TEST_PATHS doesn't exclude it.
func pathsOf(p Path) []Path {
	for _, q := range Paths() {
		if q == p {
			return []Path{p}
		}
	}
	return nil
}
