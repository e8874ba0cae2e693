//go:build linux

package test

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	. "shunt/test/harness"
)

const (
	kib = 1 << 10
	mib = 1 << 20
)

var sizes = []int64{1, 64*kib - 1, 64 * kib, 64*kib + 1, Scaled[int64](8 * mib), Scaled[int64](64 * mib)}

// echo sends back what it gets, until the client has finished. It must not
// use io.Copy between the connection and itself, which is splice(2).
func echo(c *net.TCPConn) error {
	buf := make([]byte, 64*kib)
	for {
		n, err := c.Read(buf)
		if n > 0 {
			if _, err := c.Write(buf[:n]); err != nil {
				return fmt.Errorf("echo: %w", err)
			}
		}
		if err == io.EOF {
			return c.CloseWrite()
		}
		if err != nil {
			return fmt.Errorf("echo: %w", err)
		}
	}
}

// exchange sends n bytes of seed and receives m bytes of the next seed at once, and finishes its own direction.
func exchange(c *net.TCPConn, seed uint64, n, m int64, chunk int) error {
	sent := make(chan error, 1)
	go func() {
		err := Send(c, seed, n, chunk, nil)
		if err == nil {
			err = c.CloseWrite()
		}
		sent <- err
	}()
	err := Receive(c, seed+1, m)
	if err != nil {
		c.Close()
	}
	return errors.Join(err, <-sent)
}

func TestEverySizeArrivesBothWays(t *testing.T) {
	EachPath(t, func(t *testing.T, p Path) {
		for _, size := range sizes {
			t.Run(fmt.Sprint(size), func(t *testing.T) {
				s := Serve(t, func(c *net.TCPConn) error {
					// The service has the other seed of each pair.
					sent := make(chan error, 1)
					go func() {
						err := Send(c, 12, size, 128*kib, nil)
						if err == nil {
							err = c.CloseWrite()
						}
						sent <- err
					}()
					return errors.Join(Receive(c, 11, size), <-sent)
				})
				f := Open(t, p, s.Addr)
				Within(t, Patience, "exchange", func() error { return exchange(f.Dial(t), 11, size, size, 128*kib) })
				// A message that is alone may be copied as a whole; long streams may not.
				share := 0.0
				if size >= 4*mib || Small() && size >= mib {
					share = 0.1
				}
				f.CheckPath(t, size, size, share)
			})
		}
	})
}

func TestEchoKeepsOrder(t *testing.T) {
	EachPath(t, func(t *testing.T, p Path) {
		f := Open(t, p, Serve(t, echo).Addr)
		c := f.Dial(t)
		rng := rand.New(rand.NewPCG(1, 2))
		var off int64
		for range Scaled(5000) {
			n := 1 + rng.IntN(1<<(1+rng.IntN(15)))
			msg := make([]byte, n)
			Fill(msg, 5, off)
			if _, err := c.Write(msg); err != nil {
				t.Fatal(err)
			}
			if err := ReceiveN(c, 5, off, int64(n)); err != nil {
				t.Fatal(err)
			}
			off += int64(n)
		}
		if err := c.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Fatalf("after the end: %d bytes, %v; want EOF", n, err)
		}
		f.CheckPath(t, off, off, 0.9)
	})
}

func TestCutoverKeepsEarlyBytes(t *testing.T) {
	// Short bursts right after connecting hit every interleaving of the first
	// copied and the first redirected bytes.
	EachPath(t, func(t *testing.T, p Path) {
		const n = 96 * kib
		conns, share := Scaled(400), 0.1
		if Small() {
			conns, share = max(conns, 20), 0.02 // a slow machine copies most of so little
		}
		s := Serve(t, func(c *net.TCPConn) error {
			sent := make(chan error, 1)
			go func() {
				rng := rand.New(rand.NewPCG(9, 9))
				err := Send(c, 2, n, 4096, func() int { return 1 + rng.IntN(4096) })
				sent <- errors.Join(err, c.CloseWrite())
			}()
			return errors.Join(Receive(c, 1, n), <-sent)
		})
		f := Open(t, p, s.Addr)
		for i := range conns {
			c, err := DialErr(nil, f.Addr)
			if err != nil {
				t.Fatal(err)
			}
			sent := make(chan error, 1)
			go func() {
				rng := rand.New(rand.NewPCG(uint64(i), 3))
				err := Send(c, 1, n, 4096, func() int { return 1 + rng.IntN(1<<(1+rng.IntN(12))) })
				sent <- errors.Join(err, c.CloseWrite())
			}()
			if err := errors.Join(Receive(c, 2, n), <-sent); err != nil {
				t.Fatalf("connection %d: %v", i, err)
			}
			c.Close()
		}
		f.CheckPath(t, int64(conns)*n, int64(conns)*n, share)
	})
}

func TestManyWritersOnOneSocket(t *testing.T) {
	// Sends of several threads on one socket come in some order, each of them whole.
	EachPath(t, func(t *testing.T, p Path) {
		const writers, size = 4, 1000
		messages := Scaled(3000)
		s := Serve(t, func(c *net.TCPConn) error {
			var next [writers]uint32
			msg := make([]byte, size)
			for range writers * messages {
				if _, err := io.ReadFull(c, msg); err != nil {
					return err
				}
				w, i := msg[0], uint32(msg[1])|uint32(msg[2])<<8
				if int(w) >= writers || i != next[w] {
					return fmt.Errorf("writer %d: message %d where %d was due", w, i, next[w])
				}
				next[w]++
				for _, b := range msg[3:] {
					if b != w {
						return fmt.Errorf("writer %d: message %d is torn", w, i)
					}
				}
			}
			_, err := c.Write([]byte{1})
			return err
		})
		f := Open(t, p, s.Addr)
		c := f.Dial(t)
		errs := make(chan error, writers)
		for w := range writers {
			go func() {
				msg := make([]byte, size)
				for i := range msg {
					msg[i] = byte(w)
				}
				for i := range messages {
					msg[1], msg[2] = byte(i), byte(i>>8)
					// One write(2) each: a short write would let another writer in between.
					if _, err := c.Write(msg); err != nil {
						errs <- err
						return
					}
				}
				errs <- nil
			}()
		}
		for range writers {
			if err := <-errs; err != nil {
				t.Fatal(err)
			}
		}
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		c.Close()
		f.CheckPath(t, writers*size*int64(messages), 1, 0)
	})
}

func TestServerSpeaksFirst(t *testing.T) {
	EachPath(t, func(t *testing.T, p Path) {
		greeting := []byte("220 ready\r\n")
		s := Serve(t, func(c *net.TCPConn) error {
			if _, err := c.Write(greeting); err != nil {
				return err
			}
			return echo(c)
		})
		f := Open(t, p, s.Addr)
		late := 0
		for range 20 {
			c, err := DialErr(nil, f.Addr)
			if err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			got := make([]byte, len(greeting))
			if _, err := io.ReadFull(c, got); err != nil {
				t.Fatal(err)
			}
			if time.Since(begin) > 50*time.Millisecond {
				late++
			}
			if string(got) != string(greeting) {
				t.Fatalf("greeting %q", got)
			}
			// And the client's own first bytes, after that.
			if _, err := c.Write([]byte("EHLO x\r\n")); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(c, got[:8]); err != nil {
				t.Fatal(err)
			}
			c.Close()
		}
		// One greeting may meet a busy machine; being held up is a rule, not an accident.
		if late > 2 && !Small() {
			t.Fatalf("%d of 20 greetings took more than 50 ms", late)
		}
		f.CheckPath(t, 20*8, 20*int64(len(greeting)+8), 0)
	})
}

func TestReceiverSeesWhatWaits(t *testing.T) {
	// MSG_PEEK, FIONREAD and poll agree with what was sent, from the first byte
	// on; FIONREAD only where the probe says so of this kernel.
	EachPath(t, func(t *testing.T, p Path) {
		counted := !p.Bypass() || Probe(t).FIONREAD
		step := make(chan struct{})
		s := Serve(t, func(c *net.TCPConn) error {
			for _, msg := range []string{"first", "second message"} {
				if _, err := c.Write([]byte(msg)); err != nil {
					return err
				}
				<-step
			}
			return echo(c)
		})
		f := Open(t, p, s.Addr)
		c := f.Dial(t)
		defer func() { c.Close() }()
		check := func(want string) {
			t.Helper()
			Until(t, 5*time.Second, "FIONREAD", func() error {
				if !counted {
					ok, err := Readable(c, 0)
					if err == nil && !ok {
						err = errors.New("not readable")
					}
					return err
				}
				n, err := Unread(c)
				if err == nil && n != len(want) {
					err = fmt.Errorf("%d, want %d", n, len(want))
				}
				return err
			})
			if ok, err := Readable(c, 0); err != nil || !ok {
				t.Fatalf("poll: readable %v, %v", ok, err)
			}
			buf := make([]byte, 100)
			for range 2 {
				if n, err := Peek(c, buf); err != nil || string(buf[:n]) != want {
					t.Fatalf("MSG_PEEK: %q, %v; want %q", buf[:max(n, 0)], err, want)
				}
			}
			if n, err := Peek(c, buf[:3]); err != nil || string(buf[:n]) != want[:3] {
				t.Fatalf("MSG_PEEK of 3: %q, %v", buf[:max(n, 0)], err)
			}
			if _, err := io.ReadFull(c, buf[:len(want)]); err != nil || string(buf[:len(want)]) != want {
				t.Fatalf("read %q, %v; want %q", buf[:len(want)], err, want)
			}
			if n, err := Unread(c); err != nil || n != 0 {
				t.Fatalf("FIONREAD of an empty queue: %d, %v", n, err)
			}
			if ok, err := Readable(c, 0); err != nil || ok {
				t.Fatalf("poll of an empty queue: readable %v, %v", ok, err)
			}
			if _, err := Peek(c, buf); err != unix.EAGAIN {
				t.Fatalf("MSG_PEEK of an empty queue: %v", err)
			}
		}
		check("first")
		step <- struct{}{}
		check("second message")
		step <- struct{}{}
		for i := range 20 {
			msg := fmt.Sprintf("message %d", i)
			if _, err := c.Write([]byte(msg)); err != nil {
				t.Fatal(err)
			}
			check(msg)
		}
	})
}

func TestWaitAllDoesNotHang(t *testing.T) {
	// recv(MSG_WAITALL) may return short on the bypass, but every byte comes, and a reader that already waits is woken.
	EachPath(t, func(t *testing.T, p Path) {
		const n = 64 * kib
		s := Serve(t, func(c *net.TCPConn) error {
			got := make(chan error, 1)
			go func() {
				got <- Raw(c, func(fd int) error {
					// A blocking recv; the deadline ends it.
					if err := unix.SetNonblock(fd, false); err != nil {
						return err
					}
					tv := unix.Timeval{Sec: 20}
					if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
						return err
					}
					v := NewVerifier(21)
					buf := make([]byte, n)
					for v.Bytes() < n {
						m, _, err := unix.Recvfrom(fd, buf[:n-v.Bytes()], unix.MSG_WAITALL)
						if err == unix.EINTR {
							continue
						}
						if err != nil {
							return fmt.Errorf("recv(MSG_WAITALL), after %d bytes: %w", v.Bytes(), err)
						}
						if m == 0 {
							return fmt.Errorf("EOF after %d of %d bytes", v.Bytes(), n)
						}
						if _, err := v.Write(buf[:m]); err != nil {
							return err
						}
					}
					return nil
				})
			}()
			if err := <-got; err != nil {
				return err
			}
			return Raw(c, func(fd int) error {
				_, err := unix.Write(fd, []byte{1})
				return err
			})
		})
		f := Open(t, p, s.Addr)
		for range 5 {
			c, err := DialErr(nil, f.Addr)
			if err != nil {
				t.Fatal(err)
			}
			// In pieces with pauses, so that the reader sleeps with some of its bytes.
			for off := int64(0); off < n; off += 8 * kib {
				part := make([]byte, 8*kib)
				Fill(part, 21, off)
				if _, err := c.Write(part); err != nil {
					t.Fatal(err)
				}
				time.Sleep(2 * time.Millisecond) // lets the reader fall asleep again
			}
			if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			c.Close()
		}
		f.CheckPath(t, 5*n, 5, 0)
	})
}

func TestIdleConnectionsSurviveManyConversations(t *testing.T) {
	// Early bytes and redirected ones alternate with silence.
	EachPath(t, func(t *testing.T, p Path) {
		f := Open(t, p, Serve(t, echo).Addr)
		var conns []*net.TCPConn
		for range 50 {
			conns = append(conns, f.Dial(t))
		}
		var off int64
		for range 20 {
			for _, c := range conns {
				msg := make([]byte, 100)
				Fill(msg, 4, off)
				if _, err := c.Write(msg); err != nil {
					t.Fatal(err)
				}
			}
			for _, c := range conns {
				if err := ReceiveN(c, 4, off, 100); err != nil {
					t.Fatal(err)
				}
			}
			off += 100
		}
		for _, c := range conns {
			c.Close()
		}
		f.CheckPath(t, 50*off, 50*off, 0.6)
	})
}
