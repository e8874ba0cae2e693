package proxy

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// looped says whether the event loop has the only connection, or had until it ended.
func (r *rig) looped() bool {
	cs := r.conns()
	if len(cs) != 1 {
		return false
	}
	cs[0].mu.Lock()
	defer cs[0].mu.Unlock()
	if cs[0].state < stateCopying {
		return false
	}
	for i := range cs[0].legs {
		s, ok := cs[0].legs[i].sock.(*socket)
		if !ok || s.known.Load() != nil {
			return false
		}
	}
	return true
}

func TestFewMessagesStayInTheLoop(t *testing.T) {
	if noLoop {
		return
	}
	r := newRig(t, nil)
	client, service := r.pair()
	for range loopTurns / 2 {
		send(t, client, []byte("ping"))
		expect(t, service, "ping")
		send(t, service, []byte("pong"))
		expect(t, client, "pong")
	}
	client.CloseWrite()
	expectEOF(t, service)
	send(t, service, []byte("reply after the end"))
	expect(t, client, "reply after the end")
	if !r.looped() {
		t.Error("not in the loop any more")
	}
	service.Close()
	expectEOF(t, client)
	r.ended(causeClientFIN)
}

func TestBusyConnectionLeavesTheLoop(t *testing.T) {
	if noLoop {
		return
	}
	r := newRig(t, nil)
	client, service := r.pair()
	for range loopTurns + 2 {
		send(t, client, []byte("ping"))
		expect(t, service, "ping")
	}
	if r.looped() {
		t.Error("still in the loop")
	}
	send(t, service, []byte("pong"))
	expect(t, client, "pong")
	client.Close()
	expectEOF(t, service)
	service.Close()
	r.ended(causeClientFIN)
}

// TestLoopLosesNothing has streams of many shapes leave the loop at many places.
func TestLoopLosesNothing(t *testing.T) {
	r := newRig(t, nil)
	for seed := range uint64(60) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		client, service := r.pair()
		both := make(chan error, 4)
		for i, ends := range [][2]*net.TCPConn{{client, service}, {service, client}} {
			data := make([]byte, rnd.IntN(1<<uint(8+rnd.IntN(13))))
			cha := rand.NewChaCha8([32]byte{byte(seed), byte(i)})
			cha.Read(data)
			piece := 1 + rnd.IntN(1<<uint(4+rnd.IntN(13)))
			nap := len(data) < 100*piece
			go func() {
				for b := data; len(b) > 0; {
					n := min(piece, len(b))
					if _, err := ends[0].Write(b[:n]); err != nil {
						both <- err
						return
					}
					if b = b[n:]; nap {
						time.Sleep(100 * time.Microsecond)
					}
				}
				both <- ends[0].CloseWrite()
			}()
			go func() {
				got, err := io.ReadAll(ends[1])
				if err == nil && sha256.Sum256(got) != sha256.Sum256(data) {
					err = errors.New("not what was sent")
				}
				both <- err
			}()
		}
		for range 4 {
			if err := <-both; err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
	}
}

func TestLoopKeepsWhatAFullQueueDoesNotTake(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) {
		addr := l.Upstream
		l.DialFunc = func(ctx context.Context, _ uint64, _ Stream, _ ControlFunc) (Stream, error) {
			return nil, errors.New("the loop didn't dial")
		}
		l.Direct = &Direct{Addr: netip.MustParseAddrPort(addr), Prepare: func(fd int) error {
			return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 1)
		}}
	}))
	if noLoop {
		return
	}
	raw, err := r.svc.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(fd uintptr) { unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 1) })
	client, s := r.pair()
	data := bytes.Repeat([]byte("0123456789abcdef"), 15<<10/16)
	send(t, client, data)
	client.CloseWrite()
	c := r.conns()[0]
	got, err := io.ReadAll(s)
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v; want %d", len(got), err, len(data))
	}
	if r.looped() {
		t.Error("still in the loop")
	}
	s.Close()
	r.ended(causeClientFIN)
	if n := c.flows[0].copied.Load(); n != uint64(len(data)) {
		t.Errorf("counted %d, want %d", n, len(data))
	}
}

func TestDirectFailureIsLeftToDialFunc(t *testing.T) {
	calls := 0
	wrong := errors.New("wrong")
	for name, d := range map[string]*Direct{
		"refused":   {Addr: netip.MustParseAddrPort("127.0.0.1:1")},
		"prepare":   {Prepare: func(int) error { return wrong }},
		"connected": {Connected: func(int) error { return wrong }},
	} {
		t.Run(name, func(t *testing.T) {
			calls = 0
			r := newRig(t, nil, onListener(func(l *Listener) {
				addr := l.Upstream
				if !d.Addr.IsValid() {
					d.Addr = netip.MustParseAddrPort(addr)
				}
				l.Direct = d
				l.DialFunc = func(ctx context.Context, _ uint64, _ Stream, _ ControlFunc) (Stream, error) {
					calls++
					c, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
					if err != nil {
						return nil, err
					}
					return c.(*net.TCPConn), nil
				}
			}))
			client := r.dial()
			send(t, client, []byte("x"))
			service := r.accept()
			if name == "connected" && !noLoop { // that was the first one
				expectEOF(t, service)
				service = r.accept()
			}
			expect(t, service, "x")
			client.Close()
			expectEOF(t, service)
			service.Close()
			r.ended(causeClientFIN)
			if calls != 1 {
				t.Errorf("DialFunc was called %d times", calls)
			}
		})
	}
}

// TestFullBacklogIsWaitedFor: the handshake isn't over when connect(2) returns.
func TestFullBacklogIsWaitedFor(t *testing.T) {
	r := newRig(t, nil)
	raw, err := r.svc.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(fd uintptr) { err = unix.Listen(int(fd), 0) })
	if err != nil {
		t.Fatal(err)
	}
	filler, err := net.Dial("tcp", r.svc.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer filler.Close()
	client := r.dial()
	send(t, client, []byte("x"))
	eventually(t, "dial under way", func() bool {
		cs := r.conns()
		if len(cs) != 1 {
			return false
		}
		cs[0].mu.Lock()
		defer cs[0].mu.Unlock()
		return cs[0].state == stateDialling
	})
	r.accept().Close()
	service := r.accept()
	expect(t, service, "x")
	client.Close()
	expectEOF(t, service)
	service.Close()
	r.ended(causeClientFIN)
}

// TestNoDescriptorToLeaveTheLoopWith: a TCPConn would need another one for a moment.
func TestNoDescriptorToLeaveTheLoopWith(t *testing.T) {
	r := newRig(t, nil)
	client, service := r.pair()
	r.touch(client, service)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	low := limit
	low.Cur = 3
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &low); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	c := r.conns()[0]
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<20/16)
	go client.Write(data)
	got := make([]byte, len(data))
	if _, err := io.ReadFull(service, got); err != nil || !bytes.Equal(got, data) {
		t.Errorf("not what was sent, %v", err)
	}
	if s, ok := c.down().(*socket); ok && (s.known.Load() == nil || s.known.Load().tcp != nil) {
		t.Errorf("the socket has become %+v", s.known.Load())
	}
	eventually(t, "directions at rest", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.flows[0].rests() && c.flows[1].rests()
	})
	send(t, service, []byte("pong"))
	expect(t, client, "pong")
	unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	client.Close()
	expectEOF(t, service)
	service.Close()
	r.ended(causeClientFIN)
}

// TestSocketBehavesLikeATCPConn compares the two before and after a socket becomes one.
func TestSocketBehavesLikeATCPConn(t *testing.T) {
	ln, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Skip("missing: IPv6 on the loopback interface")
	}
	defer ln.Close()
	for _, closed := range []bool{false, true} {
		peer, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer peer.Close()
		accepted, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		f, err := accepted.(*net.TCPConn).File()
		if err != nil {
			t.Fatal(err)
		}
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.SetNonblock(fd, true)
		f.Close()
		sa, err := syscall.Getpeername(fd)
		if err != nil {
			t.Fatal(err)
		}
		s := &socket{fd: fd, remote: tcpAddr(sa)}
		for _, a := range [][2]net.Addr{{s.RemoteAddr(), accepted.RemoteAddr()}, {s.LocalAddr(), accepted.LocalAddr()}} {
			if a[0].String() != a[1].String() || addrOf(a[0]) != addrOf(a[1]) {
				t.Errorf("address %v, want %v", a[0], a[1])
			}
		}
		accepted.Close()
		if closed {
			s.Close()
			if _, err := s.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
				t.Errorf("read after close: %v", err)
			}
			if err := s.CloseWrite(); !errors.Is(err, net.ErrClosed) {
				t.Errorf("CloseWrite after close: %v", err)
			}
			if err := s.Close(); !errors.Is(err, net.ErrClosed) {
				t.Errorf("second close: %v", err)
			}
			continue
		}
		if err := s.SetReadDeadline(time.Now().Add(deadline)); err != nil {
			t.Fatal(err)
		}
		peer.Write([]byte("ping"))
		b := make([]byte, 4)
		if _, err := io.ReadFull(s, b); err != nil || string(b) != "ping" {
			t.Errorf("read %q, %v", b, err)
		}
		if s.LocalAddr().String() != ln.Addr().String() {
			t.Errorf("local address %v, want %v", s.LocalAddr(), ln.Addr())
		}
		if err := s.CloseWrite(); err != nil {
			t.Error(err)
		}
		peer.SetReadDeadline(time.Now().Add(deadline))
		if n, err := peer.Read(b); err != io.EOF {
			t.Errorf("peer read %d, %v", n, err)
		}
		s.Close()
		if _, err := s.Write(b); !errors.Is(err, net.ErrClosed) {
			t.Errorf("write after close: %v", err)
		}
	}
}

// TestLeavingTheLoopKeepsTheOptions: package net sets some on what it takes over.
func TestLeavingTheLoopKeepsTheOptions(t *testing.T) {
	for _, idle := range []time.Duration{0, 77 * time.Second} {
		r := newRig(t, nil, onListener(func(l *Listener) { l.KeepAlive.Idle = idle }))
		client, service := r.pair()
		r.touch(client, service)
		c := r.conns()[0]
		for i := range c.legs {
			control(c.legs[i].sock.(syscall.Conn), func(fd int) error {
				return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 0)
			})
		}
		if idle > 0 {
			eventually(t, "keepalive on the upstream's leg", c.settled.Load)
		}
		read := func() (got [2][5]int) {
			for i := range c.legs {
				control(c.legs[i].sock.(syscall.Conn), func(fd int) error {
					for j, name := range [][2]int{{unix.SOL_SOCKET, unix.SO_KEEPALIVE}, {unix.IPPROTO_TCP, unix.TCP_NODELAY}, {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE}, {unix.IPPROTO_TCP, unix.TCP_KEEPINTVL}, {unix.IPPROTO_TCP, unix.TCP_KEEPCNT}} {
						got[i][j], _ = unix.GetsockoptInt(fd, name[0], name[1])
					}
					return nil
				})
			}
			return got
		}
		before := read()
		send(t, client, make([]byte, 100<<10))
		if _, err := io.ReadFull(service, make([]byte, 100<<10)); err != nil {
			t.Fatal(err)
		}
		if r.looped() {
			t.Error("still in the loop")
		}
		if after := read(); after != before || before[0][1] != 0 || (before[0][0] != 0) != (idle > 0) {
			t.Errorf("idle %v: options before %v, after %v", idle, before, after)
		}
		client.Close()
		expectEOF(t, service)
		service.Close()
		r.ended(causeClientFIN)
	}
}

// TestUrgentDataHidesNothing: a read ends before it, whatever comes after.
func TestUrgentDataHidesNothing(t *testing.T) {
	sent := make(chan struct{})
	r := newRig(t, nil, onListener(func(l *Listener) {
		addr := l.Upstream
		l.Direct = &Direct{Addr: netip.MustParseAddrPort(addr), Prepare: func(int) error { <-sent; return nil }}
		l.DialFunc = func(ctx context.Context, _ uint64, _ Stream, _ ControlFunc) (Stream, error) {
			<-sent
			c, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
			if err != nil {
				return nil, err
			}
			return c.(*net.TCPConn), nil
		}
	}))
	client := r.dial()
	send(t, client, []byte("abc"))
	control(client, func(fd int) error { return unix.Sendto(fd, []byte("X"), unix.MSG_OOB, nil) })
	send(t, client, []byte("def"))
	close(sent)
	service := r.accept()
	expect(t, service, "abcdef")
	client.Close()
	expectEOF(t, service)
	service.Close()
	r.ended(causeClientFIN)
}
