package proxy

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

func random(seed uint64, n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	r.Read(b)
	return b
}

func TestReplyAfterFINArrives(t *testing.T) {
	r := newRig(t, nil)
	client, service := r.pair()
	send(t, client, []byte("request"))
	client.CloseWrite()
	expect(t, service, "request")
	expectEOF(t, service)
	r.parkedDown()
	reply := random(1, 8<<20)
	go func() { service.Write(reply); service.Close() }()
	got, err := io.ReadAll(client)
	if err != nil || !bytes.Equal(got, reply) {
		t.Fatalf("read %d bytes, %v; want %d", len(got), err, len(reply))
	}
	r.ended(causeClientFIN)
}

// parkedDown waits until the direction to the client is at rest.
func (r *rig) parkedDown() {
	if runtime.GOOS != "linux" {
		return
	}
	eventually(r.t, "downstream direction parked", func() bool {
		cs := r.conns()
		if len(cs) != 1 {
			return false
		}
		cs[0].mu.Lock()
		defer cs[0].mu.Unlock()
		return cs[0].flows[1].rests()
	})
}

func TestHalfCloseByTheServiceLetsTheClientGoOn(t *testing.T) {
	r := newRig(t, nil)
	client, service := r.pair()
	send(t, service, []byte("bye"))
	service.CloseWrite()
	expect(t, client, "bye")
	expectEOF(t, client)
	send(t, client, []byte("more"))
	expect(t, service, "more")
	client.Close()
	expectEOF(t, service)
	r.ended(causeServerFIN)
}

func TestCloseWithoutReadingIsSeenWithinASecond(t *testing.T) {
	r := newRig(t, nil)
	client, service := r.pair()
	r.parked()
	send(t, service, []byte("1234"))
	service.Close()
	client.SetDeadline(time.Now().Add(time.Second))
	expect(t, client, "1234")
	expectEOF(t, client)
}

func TestServerSpeaksFirst(t *testing.T) {
	r := newRig(t, nil)
	client, service := r.pair()
	send(t, service, []byte("220 hello"))
	expect(t, client, "220 hello")
}

func TestResetStaysReset(t *testing.T) {
	for _, rest := range []bool{false, true} {
		for _, byClient := range []bool{false, true} {
			r := newRig(t, nil)
			client, service := r.pair()
			r.touch(client, service)
			if rest {
				r.parked()
			}
			from, to, cause := service, client, causeServerRST
			if byClient {
				from, to, cause = client, service, causeClientRST
			}
			reset(from)
			expectReset(t, to)
			r.ended(cause)
		}
	}
}

func TestResetComesAfterTheBytes(t *testing.T) {
	const size = 1 << 20
	r := newRig(t, nil)
	client, service := r.pair()
	data := random(2, size)
	go func() {
		service.Write(data)
		// Only what the proxy has taken is there to be passed on.
		for {
			if n, ok := unacked(service); !ok || n == 0 {
				break
			}
			time.Sleep(time.Millisecond)
		}
		reset(service)
	}()
	// The client reads only when the reset has long come.
	eventually(t, "the reset's arrival", func() bool {
		for _, c := range r.conns() {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.legs[1].dead || c.flows[1].copied.Load() > 0
		}
		return false
	})
	got := make([]byte, size)
	if n, err := io.ReadFull(client, got); err != nil || !bytes.Equal(got, data) {
		t.Fatalf("read %d of %d bytes, %v", n, size, err)
	}
	expectReset(t, client)
	r.ended(causeServerRST)
}

// The client goes on sending to a service that has answered and gone.
func TestReplyBeforeAWriteErrorArrives(t *testing.T) {
	for range 20 {
		r := newRig(t, nil)
		client, service := r.pair()
		reply := random(3, 200<<10)
		send(t, client, []byte("x"))
		expect(t, service, "x")
		go func() {
			service.Write(reply)
			for {
				if n, ok := unacked(service); !ok || n == 0 {
					break
				}
				time.Sleep(time.Millisecond)
			}
			service.Close()
		}()
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			junk := make([]byte, 16<<10)
			for {
				if _, err := client.Write(junk); err != nil {
					return
				}
			}
		}()
		got := make([]byte, len(reply))
		if n, err := io.ReadFull(client, got); err != nil || !bytes.Equal(got, reply) {
			t.Fatalf("read %d of %d bytes, %v", n, len(reply), err)
		}
		<-sent // it gets an error in the end
		r.ended(causeServerRST)
	}
}

func TestSlowReaderGetsAllBeforeTheEnd(t *testing.T) {
	for _, end := range []func(*net.TCPConn){func(c *net.TCPConn) { c.Close() }, func(c *net.TCPConn) { c.CloseWrite() }} {
		r := newRig(t, nil, onListener(func(l *Listener) { l.HalfOpenTimeout = 2 * time.Second }))
		client, service := r.pair()
		client.SetReadBuffer(256 << 10) // loopback's segments are 64 KiB
		data := random(5, 4<<20)
		go func() { service.Write(data); end(service) }()
		got := make([]byte, 0, len(data))
		b := make([]byte, 10_000)
		for len(got) < len(data) {
			n, err := client.Read(b)
			got = append(got, b[:n]...)
			if err != nil {
				t.Fatalf("after %d of %d bytes: %v", len(got), len(data), err)
			}
			runtime.Gosched()
		}
		if !bytes.Equal(got, data) {
			t.Error("other bytes")
		}
		expectEOF(t, client)
	}
}

func TestClientGoneWhileTheServiceSends(t *testing.T) {
	r := newRig(t, nil)
	client, service := r.pair()
	failed := make(chan error, 1)
	go func() {
		b := make([]byte, 64<<10)
		for {
			if _, err := service.Write(b); err != nil {
				failed <- err
				return
			}
		}
	}()
	io.ReadFull(client, make([]byte, 1<<20))
	client.Close() // with bytes unread: a reset
	err := <-failed
	if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
		t.Fatal(err)
	}
	r.ended(causeClientRST)
}

func TestWriteAndFINAtOnceLoseNothing(t *testing.T) {
	r := newRig(t, nil)
	for i := range 500 {
		client, service := r.pair()
		if i%2 == 0 {
			client, service = service, client
		}
		send(t, client, []byte("all of it"))
		client.CloseWrite()
		expect(t, service, "all of it")
		expectEOF(t, service)
		service.Close()
		expectEOF(t, client)
		client.Close()
	}
}

func TestHalfOpenTimeoutEndsASilentHalf(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) { l.HalfOpenTimeout = 50 * time.Millisecond }))
	client, service := r.pair()
	client.CloseWrite()
	expectEOF(t, service)
	expectReset(t, client)
	// After a FIN a reset shows only to a sender.
	eventually(t, "error of the service's write", func() bool {
		_, err := service.Write([]byte("x"))
		return err != nil
	})
	r.ended(causeHalfOpen)
}

func TestHalfOpenTimeoutIsResetByEachByte(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) { l.HalfOpenTimeout = 300 * time.Millisecond }))
	client, service := r.pair()
	client.CloseWrite()
	expectEOF(t, service)
	begin := time.Now()
	tick := time.NewTicker(30 * time.Millisecond)
	defer tick.Stop()
	for time.Since(begin) < 900*time.Millisecond {
		<-tick.C
		send(t, service, []byte("."))
		expect(t, client, ".")
	}
	service.Close()
	expectEOF(t, client)
	r.ended(causeClientFIN)
}

func TestIdleTimeoutCountsBothDirectionsAsOne(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) { l.IdleTimeout = time.Second }))
	client, service := r.pair()
	begin := time.Now()
	tick := time.NewTicker(30 * time.Millisecond)
	defer tick.Stop()
	for time.Since(begin) < 1500*time.Millisecond {
		<-tick.C
		send(t, service, []byte("."))
		expect(t, client, ".")
	}
	expectReset(t, client)
	expectReset(t, service)
	r.ended(causeIdle)
}

func TestDrainLetsLiveConnectionsFinish(t *testing.T) {
	r := newRig(t, nil)
	client, service := r.pair()
	send(t, client, []byte("a"))
	expect(t, service, "a")
	done := make(chan error, 1)
	go func() { done <- r.srv.Shutdown(context.Background()) }()
	eventually(t, "refusal of new connections", func() bool {
		c, err := net.Dial("tcp", r.addr)
		if err == nil {
			c.Close()
		}
		return err != nil
	})
	if code, _ := r.get("/readyz"); code != 503 {
		t.Errorf("readyz while draining: %d", code)
	}
	if _, body := r.get("/connections"); !strings.Contains(body, `"state":"draining"`) {
		t.Errorf("connections while draining: %s", body)
	}
	send(t, service, []byte("b"))
	expect(t, client, "b")
	client.Close()
	expectEOF(t, service)
	service.Close()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestDrainTimeoutEndsTheRest(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) { l.DrainTimeout = 50 * time.Millisecond }))
	client, service := r.pair()
	if err := r.srv.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	expectReset(t, client)
	_ = service
	r.ended(causeDrain)
}

func TestSecondStopEndsNow(t *testing.T) {
	r := newRig(t, nil)
	client, service := r.pair()
	r.parked()
	first := make(chan error, 1)
	go func() { first <- r.srv.Shutdown(context.Background()) }()
	eventually(t, "draining", func() bool { return r.srv.draining.Load() })
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := r.srv.Shutdown(ctx); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if err := <-first; err != nil {
		t.Fatal(err)
	}
	expectReset(t, client)
	expectReset(t, service)
	r.ended(causeStop)
}

func TestConnectionLimitLeavesTheNextInTheBacklog(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) { l.MaxConnections = 1 }))
	client, service := r.pair()
	second := r.dial()
	send(t, second, []byte("2"))
	send(t, client, []byte("1"))
	expect(t, service, "1")
	if n := r.srv.liveCount(); n != 1 {
		t.Fatalf("%d connections with a limit of one", n)
	}
	client.Close()
	service.Close()
	expect(t, r.accept(), "2")
}

func TestGarbageCollectionTakesNoConnection(t *testing.T) {
	r := newRig(t, nil)
	stop := make(chan struct{})
	var collector sync.WaitGroup
	collector.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				debug.FreeOSMemory()
			case <-stop:
				return
			}
		}
	})
	integrity(t, r, 60)
	close(stop)
	collector.Wait()
}

func TestEveryHashIsEqual(t *testing.T) { integrity(t, newRig(t, nil), 300) }

// integrity sends n connections' random payloads both ways, in random chunks,
// with the end first on a random side.
func integrity(t *testing.T, r *rig, n int) {
	var service sync.WaitGroup
	defer service.Wait()
	r.svc.SetDeadline(time.Now().Add(30 * time.Second))
	go func() {
		for range n {
			c, err := r.svc.AcceptTCP()
			if err != nil {
				return
			}
			service.Go(func() { // sends everything back
				defer c.Close()
				c.SetDeadline(time.Now().Add(30 * time.Second))
				io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
			})
		}
	}()
	sizes := []int{1, 64<<10 - 1, 64 << 10, 64<<10 + 1, bufferSize, bufferSize + 1, 3, 1 << 20}
	sem := make(chan struct{}, 32)
	var wg sync.WaitGroup
	for i := range n {
		sem <- struct{}{}
		wg.Go(func() {
			defer func() { <-sem }()
			rnd := rand.New(rand.NewPCG(uint64(i), 7))
			size := sizes[i%len(sizes)]
			if i%50 == 49 {
				size = 8 << 20
			}
			data := random(uint64(i), size)
			c, err := net.Dial("tcp", r.addr)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(30 * time.Second))
			go func() {
				for rest := data; len(rest) > 0; {
					k := min(1+rnd.IntN(100_000), len(rest))
					if _, err := c.Write(rest[:k]); err != nil {
						return
					}
					rest = rest[k:]
				}
				c.(*net.TCPConn).CloseWrite()
			}()
			h := sha256.New()
			m, err := io.Copy(h, c)
			want := sha256.Sum256(data)
			if err != nil || !bytes.Equal(h.Sum(nil), want[:]) {
				t.Errorf("connection %d: %d of %d bytes, %v, or another hash", i, m, size, err)
			}
		})
	}
	wg.Wait()
}
