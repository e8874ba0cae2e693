//go:build linux

package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"

	"shunt/test/harness"
)

func TestRefusedUpstreamResetsTheClient(t *testing.T) {
	r := newRig(t, nil)
	r.svc.Close()
	r.refused()
	r.ended("dial-refused")
	if n := r.metrics()[`shunt_dial_errors_total{kind="refused",listener="web"}`]; n != 1 {
		t.Errorf("dial errors: %v", n)
	}
}

func TestBlackHoleIsBoundedByTheDialTimeout(t *testing.T) {
	hole := harness.BlackHole(t)
	r := newRig(t, nil, onListener(func(l *Listener) { l.Upstream, l.DialTimeout = hole, 100*time.Millisecond }))
	r.refused()
	r.ended("dial-timeout")
}

func TestClientThatLeavesEndsTheDial(t *testing.T) {
	for _, finFirst := range []bool{false, true} {
		hole := harness.BlackHole(t)
		r := newRig(t, nil, onListener(func(l *Listener) { l.Upstream, l.DialTimeout = hole, time.Minute }))
		c := r.dial()
		eventually(t, "dial", func() bool { return r.srv.liveCount() == 1 })
		if finFirst {
			c.CloseWrite()
		}
		reset(c)
		r.ended(causeClientRST)
	}
}

func TestFINDuringTheDialIsNotLeaving(t *testing.T) {
	// The upstream's name has an address only after a while.
	gate := make(chan struct{})
	checkLeaks(t)
	r := newRigWith(t, fakeResolver(t, gate), nil, onListener(func(l *Listener) {
		l.Upstream = strings.Replace(l.Upstream, "127.0.0.1", "late.test", 1)
	}))
	c := r.dial()
	send(t, c, []byte("question"))
	c.CloseWrite()
	eventually(t, "dial", func() bool { return r.srv.liveCount() == 1 })
	tick := time.NewTimer(3 * leaveWatchAfter)
	<-tick.C
	close(gate)
	service := r.accept()
	expect(t, service, "question")
	expectEOF(t, service)
	send(t, service, []byte("answer"))
	service.Close()
	expect(t, c, "answer")
	expectEOF(t, c)
}

// fakeResolver answers every question for A with 127.0.0.2, where nobody listens, and
// 127.0.0.1 once gate is closed; a nil gate: with "no such name".
func fakeResolver(t *testing.T, gate chan struct{}) *net.Resolver {
	t.Helper()
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(func() { pc.Close(); wg.Wait() })
	wg.Go(func() {
		b := make([]byte, 1500)
		for {
			n, from, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			if gate != nil {
				<-gate
			}
			end := 12 // the question ends after name, type and class
			for b[end] != 0 {
				end += int(b[end]) + 1
			}
			a := b[end+2] == 1
			end += 5
			if n < end {
				continue
			}
			// Header: response, recursion available; one question; no additional records.
			ans := append([]byte(nil), b[:end]...)
			ans[2], ans[3] = 0x81, 0x80
			for i := 6; i < 12; i++ {
				ans[i] = 0
			}
			switch {
			case gate == nil:
				ans[3] |= 3
			case a:
				ans[7] = 2
				ans = append(ans, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4, 127, 0, 0, 2)
				ans = append(ans, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4, 127, 0, 0, 1)
			}
			pc.WriteTo(ans, from)
		}
	})
	addr := pc.LocalAddr().String()
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "udp", addr)
	}}
}

func TestUnknownNameIsAResolveError(t *testing.T) {
	r := newRigWith(t, fakeResolver(t, nil), nil, onListener(func(l *Listener) { l.Upstream = "nowhere.test:80" }))
	r.refused()
	r.ended("dial-resolve")
}

func TestEveryAddressIsTried(t *testing.T) {
	checkLeaks(t)
	gate := make(chan struct{})
	close(gate)
	b := &fakeBypass{}
	r := newRigWith(t, fakeResolver(t, gate), b, onListener(func(l *Listener) {
		l.Upstream = strings.Replace(l.Upstream, "127.0.0.1", "two.test", 1)
	}))
	r.touch(r.pair())
	if n := r.metrics()[`shunt_dial_errors_total{kind="refused",listener="web"}`]; n != 0 {
		t.Errorf("%v dial errors", n)
	}
}

func TestDialErrorsHaveKinds(t *testing.T) {
	for want, err := range map[string]error{
		dialRefused:  &net.OpError{Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)},
		dialTimeout:  &net.OpError{Err: os.NewSyscallError("connect", syscall.ETIMEDOUT)},
		dialNoRoute:  &net.OpError{Err: os.NewSyscallError("connect", syscall.EHOSTUNREACH)},
		dialResolve:  &net.DNSError{IsNotFound: true},
		dialLimit:    &net.OpError{Err: os.NewSyscallError("socket", syscall.EMFILE)},
		dialMissing:  &net.OpError{Err: os.NewSyscallError("connect", syscall.ENOENT)},
		dialCanceled: context.Canceled,
		dialOther:    errors.New("odd"),
	} {
		if got := dialKind(err); got != want {
			t.Errorf("%v: %s, want %s", err, got, want)
		}
	}
}

func TestRefusedDialsLeaveNoDescriptor(t *testing.T) {
	r := newRig(t, nil) // checks descriptors and goroutines at its end
	r.svc.Close()
	for range 300 {
		r.refused()
	}
}

// With 64 descriptors and 200 clients all are served in the end.
func TestFewDescriptorsServeAllInTheEnd(t *testing.T) {
	if addr := os.Getenv("PROXY_TEST_UPSTREAM"); addr != "" {
		serveWithFewDescriptors(addr, os.Getenv("PROXY_TEST_MAX") != "")
	}
	for _, overbooked := range []bool{false, true} { // max_connections is more than there are files for
		checkLeaks(t)
		svc, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		var echo sync.WaitGroup
		echo.Go(func() {
			for {
				c, err := svc.Accept()
				if err != nil {
					return
				}
				echo.Go(func() { defer c.Close(); io.Copy(c, c) })
			}
		})
		cmd := exec.Command(os.Args[0], "-test.run=^TestFewDescriptorsServeAllInTheEnd$")
		cmd.Env = append(os.Environ(), "PROXY_TEST_UPSTREAM="+svc.Addr().String())
		if overbooked {
			cmd.Env = append(cmd.Env, "PROXY_TEST_MAX=1")
		}
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var addr string
		if _, err := fmt.Fscanln(out, &addr); err != nil {
			t.Fatal(err)
		}
		// The first ones do nothing for longer than a dial may take.
		hold := make(chan struct{})
		time.AfterFunc(1500*time.Millisecond, func() { close(hold) })
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() {
				c, err := net.Dial("tcp", addr)
				if err != nil {
					t.Error(err)
					return
				}
				defer c.Close()
				<-hold
				c.SetDeadline(time.Now().Add(20 * time.Second))
				fmt.Fprintf(c, "%03d", i)
				b := make([]byte, 3)
				if _, err := io.ReadFull(c, b); err != nil || string(b) != fmt.Sprintf("%03d", i) {
					t.Errorf("client %d: %q, %v", i, b, err)
				}
			})
		}
		wg.Wait()
		in.Close() // ends it
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
		if busy := cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(); busy > 3*time.Second {
			t.Errorf("%v of CPU", busy)
		}
		svc.Close()
		echo.Wait()
	}
}

// serveWithFewDescriptors is the subprocess; it ends with its standard input.
func serveWithFewDescriptors(upstream string, overbooked bool) {
	lim := unix.Rlimit{Cur: 64, Max: 64}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	l := DefaultListener()
	l.Name, l.Listen, l.Upstream = "web", "127.0.0.1:0", upstream
	l.DialTimeout = time.Second
	if overbooked {
		l.MaxConnections = 1000
	}
	s, err := New(Config{Listeners: []Listener{l}}, nil, zerolog.Nop())
	if err == nil {
		err = s.Start()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(s.Addrs()[0].Addr)
	io.Copy(io.Discard, os.Stdin)
	runtime.KeepAlive(s)
	os.Exit(0)
}

func TestOurSocketsHaveKeepaliveAndNoMPTCP(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) {
		l.KeepAlive = KeepAlive{Idle: 7 * time.Second, Interval: 3 * time.Second, Count: 5}
	}))
	client, service := r.pair()
	send(t, client, []byte("x"))
	expect(t, service, "x")
	send(t, service, []byte("x"))
	expect(t, client, "x")
	for _, c := range r.conns() {
		// A connection that is over at once doesn't need them.
		eventually(t, "keepalive on the upstream's leg", func() (on bool) {
			control(tcpOf(c.legs[1].sock), func(fd int) error {
				n, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPCNT)
				on = err == nil && n == 5
				return nil
			})
			return on
		})
		for i := range c.legs {
			tcp := tcpOf(c.legs[i].sock)
			for opt, want := range map[int]int{unix.TCP_KEEPIDLE: 7, unix.TCP_KEEPINTVL: 3, unix.TCP_KEEPCNT: 5, unix.TCP_NODELAY: 1} {
				control(tcp, func(fd int) error {
					if got, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, opt); err != nil || got != want {
						t.Errorf("leg %d, option %d: %d, %v; want %d", i, opt, got, err, want)
					}
					if got, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL); err != nil || got != unix.IPPROTO_TCP {
						t.Errorf("leg %d, protocol %d, %v", i, got, err)
					}
					return nil
				})
			}
			s, _ := streamOf(c.legs[i].sock)
			if mp, err := s.(*net.TCPConn).MultipathTCP(); err != nil || mp {
				t.Errorf("leg %d: MPTCP %v, %v", i, mp, err)
			}
		}
	}
	if !strings.Contains(r.addr, "127.0.0.1:") {
		t.Error(r.addr)
	}
}

func TestHalfOpenConnectionsHaveKeepaliveToo(t *testing.T) {
	r := newRig(t, nil, onListener(func(l *Listener) { l.KeepAlive = KeepAlive{Idle: 7 * time.Second, Interval: 3 * time.Second, Count: 5} }))
	client, service := r.pair()
	r.touch(client, service)
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	expectEOF(t, service)
	up := tcpOf(r.conns()[0].legs[1].sock)
	eventually(t, "keepalive on the upstream's leg", func() (on bool) {
		control(up, func(fd int) error {
			n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE)
			on = err == nil && n == 1
			return nil
		})
		return on
	})
}
