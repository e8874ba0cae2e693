//go:build linux

package test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	. "shunt/test/harness"
)

func TestHalfCloseOutlivesReply(t *testing.T) {
	// One direction ends; the other answers ten seconds later, whichever side began.
	EachPath(t, func(t *testing.T, p Path) {
		t.Parallel()
		const wait = 10 * time.Second
		const reply = 256 * kib
		late := func(c *net.TCPConn) error {
			if err := Receive(c, 1, 1000); err != nil {
				return err
			}
			time.Sleep(wait) // the rule is about a reply that is this late
			return errors.Join(Send(c, 2, reply, 64*kib, nil), c.CloseWrite())
		}
		early := func(c *net.TCPConn) error {
			if err := errors.Join(Send(c, 1, 1000, 1000, nil), c.CloseWrite()); err != nil {
				return err
			}
			return Receive(c, 2, reply)
		}
		t.Run("client first", func(t *testing.T) {
			t.Parallel()
			f := Open(t, p, Serve(t, late).Addr)
			if err := early(f.Dial(t)); err != nil {
				t.Fatal(err)
			}
			f.CheckPath(t, 1000, reply, 0)
		})
		t.Run("service first", func(t *testing.T) {
			t.Parallel()
			f := Open(t, p, Serve(t, early).Addr)
			if err := late(f.Dial(t)); err != nil {
				t.Fatal(err)
			}
			f.CheckPath(t, reply, 1000, 0)
		})
	})
}

func TestServiceEndReachesSilentClient(t *testing.T) {
	EachPath(t, func(t *testing.T, p Path) {
		s := Serve(t, func(c *net.TCPConn) error {
			_, err := c.Write([]byte("bye\n"))
			return err
		})
		f := Open(t, p, s.Addr)
		for range 20 {
			c, err := DialErr(nil, f.Addr)
			if err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			got, err := io.ReadAll(c)
			if err != nil || string(got) != "bye\n" {
				t.Fatalf("read %q, %v", got, err)
			}
			if d := time.Since(begin); d > time.Second {
				t.Fatalf("EOF after %v", d)
			}
			c.Close()
		}
	})
}

func TestResetStaysReset(t *testing.T) {
	EachPath(t, func(t *testing.T, p Path) {
		t.Run("service mid-stream", func(t *testing.T) {
			s := Serve(t, func(c *net.TCPConn) error {
				if err := errors.Join(ReceiveN(c, 3, 0, 1), Send(c, 1, mib, 64*kib, nil)); err != nil {
					return err
				}
				// The client reads on: what is behind the RST may be lost, the RST may not.
				return Abort(c)
			})
			f := Open(t, p, s.Addr)
			c := f.Dial(t)
			if err := Send(c, 3, 1, 1, nil); err != nil {
				t.Fatal(err)
			}
			_, err := io.Copy(NewVerifier(1), OnlyReader(c))
			if !IsReset(err) {
				t.Fatalf("the client read to %v, want a reset", err)
			}
		})
		t.Run("service, idle", func(t *testing.T) {
			s := Serve(t, func(c *net.TCPConn) error {
				if err := ReceiveN(c, 1, 0, 10); err != nil {
					return err
				}
				return Abort(c)
			})
			f := Open(t, p, s.Addr)
			c := f.Dial(t)
			if err := Send(c, 1, 10, 10, nil); err != nil {
				t.Fatal(err)
			}
			if n, err := c.Read(make([]byte, 1)); n != 0 || !IsReset(err) {
				t.Fatalf("the client read %d bytes, %v; want a reset", n, err)
			}
		})
		t.Run("client", func(t *testing.T) {
			ended := make(chan error, 1)
			s := Serve(t, func(c *net.TCPConn) error {
				if _, err := c.Write([]byte("x")); err != nil {
					return err
				}
				_, err := io.Copy(NewVerifier(1), OnlyReader(c))
				ended <- err
				return nil
			})
			f := Open(t, p, s.Addr)
			c := f.Dial(t)
			if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(Send(c, 1, 1000, 1000, nil), Abort(c)); err != nil {
				t.Fatal(err)
			}
			Within(t, 5*time.Second, "the service's end", func() error {
				if err := <-ended; !IsReset(err) {
					return fmt.Errorf("the service read to %v, want a reset", err)
				}
				return nil
			})
		})
	})
}

func TestCleanEndBeforeAbortLosesNothing(t *testing.T) {
	// 1 MiB and FIN, and only then the socket is aborted: all of it was accepted before.
	EachPath(t, func(t *testing.T, p Path) {
		read := make(chan struct{})
		s := Serve(t, func(c *net.TCPConn) error {
			if err := errors.Join(Send(c, 1, mib, 64*kib, nil), c.CloseWrite()); err != nil {
				return err
			}
			<-read
			return Abort(c)
		})
		f := Open(t, p, s.Addr)
		for range 10 {
			c, err := DialErr(nil, f.Addr)
			if err != nil {
				t.Fatal(err)
			}
			if err := Receive(c, 1, mib); err != nil {
				t.Fatal(err)
			}
			read <- struct{}{}
			c.Close()
		}
		f.CheckPath(t, 0, 10*mib, 0)
	})
}

func TestLateLargeReplyIsWhole(t *testing.T) {
	EachPath(t, func(t *testing.T, p Path) {
		reply := Scaled[int64](50 * mib)
		s := Serve(t, func(c *net.TCPConn) error {
			if err := Receive(c, 1, 100); err != nil {
				return err
			}
			time.Sleep(200 * time.Millisecond) // the rule is about a reply that is this late
			return errors.Join(Send(c, 2, reply, 128*kib, nil), c.CloseWrite())
		})
		f := Open(t, p, s.Addr)
		c := f.Dial(t)
		if err := errors.Join(Send(c, 1, 100, 100, nil), c.CloseWrite(), Receive(c, 2, reply)); err != nil {
			t.Fatal(err)
		}
		f.CheckPath(t, 100, reply, 0.3)
	})
}

func TestWriteAndEndInOneSegment(t *testing.T) {
	// The last write and the FIN come together, 100,000 times over all paths and directions.
	EachPath(t, func(t *testing.T, p Path) {
		each := Scaled(100_000) / (2 * len(Paths()))
		const workers = 8
		up := Serve(t, func(c *net.TCPConn) error {
			if err := Receive(c, 1, 100); err != nil {
				return err
			}
			_, err := c.Write([]byte{1})
			return err
		})
		down := Serve(t, func(c *net.TCPConn) error {
			return Send(c, 1, 100, 100, nil) // and closed by the caller
		})
		for name, s := range map[string]*Service{"client": up, "service": down} {
			t.Run(name, func(t *testing.T) {
				f := Open(t, p, s.Addr)
				errs := make(chan error, workers)
				var left atomic.Int64
				left.Store(int64(each))
				for range workers {
					go func() {
						for left.Add(-1) >= 0 {
							if err := oneShot(f.Addr, s == up); err != nil {
								errs <- err
								return
							}
						}
						errs <- nil
					}()
				}
				for range workers {
					if err := <-errs; err != nil {
						t.Fatal(err)
					}
				}
				n := int64(each)
				if s == up {
					f.CheckPath(t, 100*n, n, 0)
				} else {
					f.CheckPath(t, 0, 100*n, 0)
				}
			})
		}
	})
}

func oneShot(addr string, up bool) error {
	c, err := DialErr(nil, addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if !up {
		return Receive(c, 1, 100)
	}
	if err := errors.Join(Send(c, 1, 100, 100, nil), c.CloseWrite()); err != nil {
		return err
	}
	got, err := io.ReadAll(c)
	if err == nil && len(got) != 1 {
		err = fmt.Errorf("the service confirmed with %d bytes", len(got))
	}
	return err
}

func TestEndComesAfterTheLastByte(t *testing.T) {
	// The reader is slow, and the writer's FIN is there while bytes are queued, 10,000 times.
	EachPath(t, func(t *testing.T, p Path) {
		runs := Scaled(10_000) / len(Paths())
		const workers = 16
		const n = 40_000
		s := Serve(t, func(c *net.TCPConn) error {
			return Send(c, 1, n, 5000, nil) // and closed by the caller
		})
		f := Open(t, p, s.Addr)
		errs := make(chan error, workers)
		var left atomic.Int64
		left.Store(int64(runs))
		for range workers {
			go func() {
				errs <- func() error {
					for left.Add(-1) >= 0 {
						c, err := DialErr(nil, f.Addr)
						if err != nil {
							return err
						}
						err = ReceiveChunks(c, 1, n, 8000, func(off int64) {
							if off%16_000 == 0 {
								time.Sleep(time.Millisecond) // a slow reader
							}
						})
						c.Close()
						if err != nil {
							return err
						}
					}
					return nil
				}()
			}()
		}
		for range workers {
			if err := <-errs; err != nil {
				t.Fatal(err)
			}
		}
		f.CheckPath(t, 0, int64(runs)*n, 0)
	})
}

func TestBothHalfClosedWithUnreadData(t *testing.T) {
	// Both sides have written much and finished while the other hasn't read
	// yet; nothing of it may be lost, whoever finishes or reads first.
	EachPath(t, func(t *testing.T, p Path) {
		for _, n := range []int64{100 * kib, 3 * mib, 24 * mib} {
			for _, order := range []string{"client reads first", "service reads first", "both slow"} {
				t.Run(fmt.Sprintf("%d, %s", n, order), func(t *testing.T) {
					t.Parallel()
					readClient, readService := make(chan struct{}), make(chan struct{})
					side := func(c *net.TCPConn, mine, theirs uint64, read <-chan struct{}) error {
						sent := make(chan error, 1)
						go func() {
							sent <- errors.Join(Send(c, mine, n, 64*kib, nil), c.CloseWrite())
						}()
						<-read
						slow := func(off int64) {
							if order == "both slow" && off%(256*kib) < 32*kib {
								time.Sleep(2 * time.Millisecond) // a slow reader
							}
						}
						return errors.Join(ReceiveChunks(c, theirs, n, 32*kib, slow), <-sent)
					}
					s := Serve(t, func(c *net.TCPConn) error { return side(c, 2, 1, readService) })
					f := Open(t, p, s.Addr, WithBypass("queue_limit", `"4MiB"`))
					client := make(chan error, 1)
					c := f.Dial(t)
					go func() { client <- side(c, 1, 2, readClient) }()
					// Long enough for the queues to fill, and for the small ones to end.
					time.Sleep(300 * time.Millisecond)
					switch order {
					case "client reads first":
						close(readClient)
						time.Sleep(200 * time.Millisecond)
						close(readService)
					case "service reads first":
						close(readService)
						time.Sleep(200 * time.Millisecond)
						close(readClient)
					default:
						close(readClient)
						close(readService)
					}
					if err := <-client; err != nil {
						t.Fatal(err)
					}
					c.Close()
					f.CheckPath(t, n, n, 0)
				})
			}
		}
	})
}

func TestPeerFinishedLongBefore(t *testing.T) {
	// The service has finished its direction at once; the client then sends
	// much, finishes, and the slow service loses nothing. And the other way round.
	EachPath(t, func(t *testing.T, p Path) {
		n := Scaled[int64](10 * mib)
		finished := func(c *net.TCPConn) error {
			if err := c.CloseWrite(); err != nil {
				return err
			}
			return ReceiveChunks(c, 1, n, 64*kib, func(off int64) {
				if off%mib < 64*kib {
					time.Sleep(20 * time.Millisecond) // a slow reader
				}
			})
		}
		sender := func(c *net.TCPConn) error {
			// The peer's FIN is here before the first byte leaves.
			if got, err := c.Read(make([]byte, 1)); got != 0 || err != io.EOF {
				return fmt.Errorf("read %d bytes, %v; want EOF", got, err)
			}
			return errors.Join(Send(c, 1, n, 64*kib, nil), c.Close())
		}
		t.Run("service", func(t *testing.T) {
			done := make(chan error, 1)
			f := Open(t, p, Serve(t, func(c *net.TCPConn) error { done <- finished(c); return nil }).Addr)
			if err := errors.Join(sender(f.Dial(t)), <-done); err != nil {
				t.Fatal(err)
			}
			f.CheckPath(t, n, 0, 0.3)
		})
		t.Run("client", func(t *testing.T) {
			f := Open(t, p, Serve(t, sender).Addr)
			if err := finished(f.Dial(t)); err != nil {
				t.Fatal(err)
			}
			f.CheckPath(t, 0, n, 0.3)
		})
	})
}

func TestTrickleAfterEndSurvivesHalfOpenTimeout(t *testing.T) {
	// A byte each second for three times the bound: it moves, so it lives.
	EachShuntPath(t, func(t *testing.T, p Path) {
		t.Parallel()
		const bytes = 9
		s := Serve(t, func(c *net.TCPConn) error {
			if err := Receive(c, 1, 10); err != nil {
				return err
			}
			for i := range int64(bytes) {
				time.Sleep(time.Second) // the rule is about this pace
				one := make([]byte, 1)
				Fill(one, 2, i)
				if _, err := c.Write(one); err != nil {
					return err
				}
			}
			return c.CloseWrite()
		})
		f := Open(t, p, s.Addr, WithListener("half_open_timeout", `"3s"`))
		c := f.Dial(t)
		if err := errors.Join(Send(c, 1, 10, 10, nil), c.CloseWrite(), Receive(c, 2, bytes)); err != nil {
			t.Fatal(err)
		}
	})
}

func TestSilentHalfOpenConnectionEnds(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		t.Parallel()
		ended := make(chan struct{})
		s := Serve(t, func(c *net.TCPConn) error {
			// It reads the client's FIN, and then says nothing.
			err := Receive(c, 1, 10)
			<-ended
			return err
		})
		defer close(ended)
		f := Open(t, p, s.Addr, WithListener("half_open_timeout", `"2s"`))
		c := f.Dial(t)
		begin := time.Now()
		if err := errors.Join(Send(c, 1, 10, 10, nil), c.CloseWrite()); err != nil {
			t.Fatal(err)
		}
		_, err := c.Read(make([]byte, 1))
		if err == nil || time.Since(begin) > 10*time.Second {
			t.Fatalf("ended with %v after %v, want an end after 2 s", err, time.Since(begin))
		}
		if d := time.Since(begin); d < 1900*time.Millisecond {
			t.Fatalf("ended after %v, before the bound of 2 s", d)
		}
	})
}

func TestIdleTimeoutCountsBothDirections(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		t.Parallel()
		f := Open(t, p, Serve(t, func(c *net.TCPConn) error {
			buf := make([]byte, 10)
			if _, err := io.ReadFull(c, buf); err != nil {
				return err
			}
			for range 6 {
				time.Sleep(500 * time.Millisecond) // the rule is about this pace
				if _, err := c.Write(buf[:1]); err != nil {
					return err
				}
			}
			_, _ = c.Read(buf)
			return nil
		}).Addr, WithListener("idle_timeout", `"1500ms"`))
		c := f.Dial(t)
		if err := Send(c, 1, 10, 10, nil); err != nil {
			t.Fatal(err)
		}
		// Three seconds of one direction only: longer than the bound, and alive.
		if _, err := io.ReadFull(c, make([]byte, 6)); err != nil {
			t.Fatalf("a connection that moves was ended: %v", err)
		}
		begin := time.Now()
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Fatal("a byte from nowhere")
		}
		if d := time.Since(begin); d < time.Second || d > 8*time.Second {
			t.Fatalf("the idle connection ended after %v, want 1.5 s", d)
		}
	})
}
