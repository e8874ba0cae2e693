package proxy

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"shunt/splice"
)

// unixRig is a Server that listens on a UNIX socket and dials another.
func unixRig(t *testing.T, opts ...option) (r *rig, listen, service string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "px")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	listen, service = filepath.Join(dir, "l"), filepath.Join(dir, "s")
	opts = append([]option{onListener(func(l *Listener) {
		l.ListenFunc = func(ctx context.Context) (net.Listener, error) {
			return (&net.ListenConfig{}).Listen(ctx, "unix", listen)
		}
		l.DialFunc = func(ctx context.Context, _ uint64, _ Stream, _ ControlFunc) (Stream, error) {
			c, err := (&net.Dialer{}).DialContext(ctx, "unix", service)
			if err != nil {
				return nil, err
			}
			return c.(*net.UnixConn), nil
		}
	})}, opts...)
	return newRig(t, nil, opts...), listen, service
}

// unixPair connects a client through the rig.
func unixPair(t *testing.T, listen, service string) (client, up *net.UnixConn) {
	t.Helper()
	ln, err := net.Listen("unix", service)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	c, err := net.Dial("unix", listen)
	if err != nil {
		t.Fatal(err)
	}
	ln.(*net.UnixListener).SetDeadline(time.Now().Add(deadline))
	s, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []net.Conn{c, s} {
		c.SetDeadline(time.Now().Add(deadline))
		t.Cleanup(func() { c.Close() })
	}
	return c.(*net.UnixConn), s.(*net.UnixConn)
}

func mustRead(t *testing.T, c io.Reader, want string) {
	t.Helper()
	b := make([]byte, len(want))
	if _, err := io.ReadFull(c, b); err != nil || string(b) != want {
		t.Fatalf("read %q, %v; want %q", b, err, want)
	}
}

func TestUnixHalfCloseOutlivesReply(t *testing.T) {
	_, listen, service := unixRig(t)
	client, up := unixPair(t, listen, service)
	io.WriteString(client, "question")
	client.CloseWrite()
	if b, err := io.ReadAll(up); err != nil || string(b) != "question" {
		t.Fatalf("%q, %v", b, err)
	}
	time.Sleep(2 * quietPeriod) // both directions rest meanwhile
	io.WriteString(up, "answer")
	up.Close()
	if b, err := io.ReadAll(client); err != nil || string(b) != "answer" {
		t.Fatalf("%q, %v", b, err)
	}
}

func TestUnixIdleTimeoutCountsBytes(t *testing.T) {
	const idle = 400 * time.Millisecond
	ended := make(chan string, 1)
	_, listen, service := unixRig(t, onListener(func(l *Listener) {
		l.IdleTimeout, l.QuietEnds = idle, true
		l.Trace.Closed = func(_ uint64, cause string, _ error) { ended <- cause }
	}))
	client, up := unixPair(t, listen, service)
	begin := time.Now()
	for range 8 {
		io.WriteString(client, "x")
		mustRead(t, up, "x")
		time.Sleep(idle / 4)
	}
	if b, err := io.ReadAll(client); err != nil || len(b) > 0 {
		t.Errorf("%q, %v", b, err)
	}
	if d := time.Since(begin); d < 2*idle {
		t.Errorf("ended after %v, with bytes moving", d)
	}
	if cause := <-ended; cause != causeIdle {
		t.Errorf("cause %q", cause)
	}
}

func TestUnixIsDeclined(t *testing.T) {
	r, listen, service := unixRig(t)
	unixPair(t, listen, service)
	if r.srv.Addrs()[0].Addr.IsValid() {
		t.Error("a UNIX listener has a TCP address")
	}
	l := newListener(&Server{bypass: &fakeBypass{}}, r.srv.listeners[0].cfg)
	l.cfg.ListenFunc = func(ctx context.Context) (net.Listener, error) {
		return (&net.ListenConfig{}).Listen(ctx, "unix", listen+"2")
	}
	if err := l.open(); err != nil || l.noBypass != splice.ReasonUnix {
		t.Errorf("%v, reason %q", err, l.noBypass)
	}
	l.close()
}

func TestOnceClosesTheListeningSocket(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) { l.Once = true }))
	client, service := r.pair()
	if c, err := net.Dial("tcp", r.addr); err == nil {
		c.Close()
		t.Error("a second connection was accepted")
	}
	send(t, client, []byte("x"))
	expect(t, service, "x")
}

func TestAdmitRefusesWithAnEnd(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) {
		l.QuietEnds = true
		l.Admit = func(Stream) error { return errors.New("not you") }
	}))
	c := r.dial()
	send(t, c, []byte("x"))
	if b, err := io.ReadAll(c); err != nil || len(b) > 0 {
		t.Errorf("%q, %v", b, err)
	}
}

func TestOneWayCarriesNothingBack(t *testing.T) {
	for _, way := range []Way{OnlyUp, OnlyDown} {
		r := newRig(t, nil, onListener(func(l *Listener) { l.Way = way }))
		from, to := r.pair()
		if way == OnlyDown {
			from, to = to, from
		}
		send(t, to, []byte("lost"))
		send(t, from, []byte("kept"))
		expect(t, to, "kept")
		from.CloseWrite()
		from.SetReadDeadline(time.Now().Add(deadline))
		if b, _ := io.ReadAll(from); len(b) > 0 {
			t.Errorf("way %d: %q came back", way, b)
		}
	}
}

func TestTapSeesBothDirections(t *testing.T) {
	var mu sync.Mutex
	var seen [2]string
	r := newRig(t, &fakeBypass{}, onListener(func(l *Listener) {
		l.Tap = func(_ uint64, d splice.Direction, b []byte) {
			mu.Lock()
			defer mu.Unlock()
			seen[d] += string(b)
		}
	}))
	client, service := r.pair()
	send(t, client, []byte("up"))
	expect(t, service, "up")
	send(t, service, []byte("down"))
	expect(t, client, "down")
	mu.Lock()
	defer mu.Unlock()
	if seen != [2]string{"up", "down"} {
		t.Errorf("%q", seen)
	}
	if l := r.srv.listeners[0]; l.noBypass != splice.ReasonOff {
		t.Errorf("reason %q", l.noBypass)
	}
}

func TestLegPolicies(t *testing.T) {
	for name, c := range map[string]struct {
		set  func(*Listener)
		want func(t *testing.T, client, service *net.TCPConn)
	}{
		"ignored": {func(l *Listener) { l.Down.IgnoreFIN = true }, func(t *testing.T, client, service *net.TCPConn) {
			service.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
			if _, err := service.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("the service was told: %v", err)
			}
			send(t, service, []byte("still"))
			expect(t, client, "still")
			service.Close()
			expectEOF(t, client)
		}},
		"kept": {func(l *Listener) { l.Up.OnFIN = KeepFIN }, func(t *testing.T, client, service *net.TCPConn) {
			service.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
			if _, err := service.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("the service was told: %v", err)
			}
			service.Close()
			expectEOF(t, client)
		}},
		"closed": {func(l *Listener) { l.Up.OnFIN = CloseOnFIN }, func(t *testing.T, client, service *net.TCPConn) {
			expectEOF(t, service)
			expectEOF(t, client)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil, onListener(c.set))
			client, service := r.pair()
			send(t, client, []byte("x"))
			expect(t, service, "x")
			client.CloseWrite()
			c.want(t, client, service)
		})
	}
}
