package proxy

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"
)

const deadline = 10 * time.Second

// logs is a log that tests can look into.
type logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// noLoop lets goroutines have every connection. All tests run once with it and once without.
var noLoop bool

func TestMain(m *testing.M) {
	code := m.Run()
	if noLoop = true; code == 0 && flag.Lookup("test.fuzz").Value.String() == "" {
		fmt.Println("once more without the event loop")
		code = m.Run()
	}
	os.Exit(code)
}

// rests says that nobody waits for the direction.
func (f *flow) rests() bool { return f.state == flowParked || f.state == flowLooped }

// rig is a service, a Server in front of it, and what both hold.
type rig struct {
	t    *testing.T
	svc  *net.TCPListener
	srv  *Server
	log  *logs
	addr string
}

type option func(*Config)

func onListener(f func(*Listener)) option { return func(c *Config) { f(&c.Listeners[0]) } }

// newRig starts a Server; at the test's end everything it held must be gone.
func newRig(t *testing.T, b Bypass, opts ...option) *rig {
	t.Helper()
	return newRigWith(t, nil, b, opts...)
}

// newRigWith is newRig with another resolver.
func newRigWith(t *testing.T, res resolver, b Bypass, opts ...option) *rig {
	t.Helper()
	checkLeaks(t)
	svc, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { svc.Close() })
	l := DefaultListener()
	l.Name, l.Listen, l.Upstream = "web", "127.0.0.1:0", svc.Addr().String()
	l.DialTimeout = 5 * time.Second
	cfg := Config{Listeners: []Listener{l}, AccessLog: true, Admin: "127.0.0.1:0"}
	for _, o := range opts {
		o(&cfg)
	}
	r := &rig{t: t, svc: svc, log: &logs{}}
	r.srv, err = New(cfg, b, zerolog.New(r.log))
	if err != nil {
		t.Fatal(err)
	}
	if res != nil {
		r.srv.resolveBy(res)
	}
	r.srv.noLoop = noLoop
	if err := r.srv.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		r.srv.Shutdown(ctx)
		if t.Failed() {
			all := r.log.String()
			t.Log(all[max(0, len(all)-2000):])
		}
	})
	r.addr = r.srv.Addrs()[0].Addr.String()
	return r
}

// dial connects a client.
func (r *rig) dial() *net.TCPConn {
	r.t.Helper()
	c, err := net.DialTimeout("tcp", r.addr, deadline)
	if err != nil {
		r.t.Fatal(err)
	}
	return r.keep(c.(*net.TCPConn))
}

// refused connects a client that is to be reset at once, maybe before it
// knows that it is connected.
func (r *rig) refused() {
	r.t.Helper()
	c, err := net.DialTimeout("tcp", r.addr, deadline)
	if err == nil {
		expectReset(r.t, r.keep(c.(*net.TCPConn)))
		c.Close()
	} else if !errors.Is(err, syscall.ECONNRESET) {
		r.t.Fatal(err)
	}
}

// accept takes the next connection at the service.
func (r *rig) accept() *net.TCPConn {
	r.t.Helper()
	r.svc.SetDeadline(time.Now().Add(deadline))
	c, err := r.svc.AcceptTCP()
	if err != nil {
		r.t.Fatal(err)
	}
	return r.keep(c)
}

func (r *rig) keep(c *net.TCPConn) *net.TCPConn {
	c.SetDeadline(time.Now().Add(deadline))
	r.t.Cleanup(func() { c.Close() })
	return c
}

// pair connects a client and takes its connection at the service.
func (r *rig) pair() (client, service *net.TCPConn) {
	r.t.Helper()
	client = r.dial()
	return client, r.accept()
}

// touch sends a byte through: the proxy has certainly finished dialling then.
func (r *rig) touch(client, service *net.TCPConn) {
	r.t.Helper()
	send(r.t, client, []byte("."))
	expect(r.t, service, ".")
}

// parked waits until both directions of the only connection are at rest, so that a
// test doesn't always meet running goroutines.
func (r *rig) parked() {
	r.t.Helper()
	if runtime.GOOS != "linux" {
		return
	}
	eventually(r.t, "both directions parked", func() bool {
		for _, c := range r.conns() {
			c.mu.Lock()
			ok := c.flows[0].rests() && c.flows[1].rests()
			c.mu.Unlock()
			return ok
		}
		return false
	})
}

func (r *rig) conns() []*conn {
	r.srv.mu.Lock()
	defer r.srv.mu.Unlock()
	var cs []*conn
	for _, c := range r.srv.conns {
		cs = append(cs, c)
	}
	return cs
}

// ended waits until no connection is left, and checks the last cause.
func (r *rig) ended(cause string) {
	r.t.Helper()
	eventually(r.t, "the connection's end", func() bool { return r.srv.liveCount() == 0 })
	want := fmt.Sprintf(`"end":%q`, cause)
	eventually(r.t, "access log with "+want, func() bool { return strings.Contains(r.log.String(), want) })
}

// eventually waits for ok.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	end := time.Now().Add(deadline)
	for !ok() {
		if time.Now().After(end) {
			t.Fatalf("no %s within %v", what, deadline)
		}
		time.Sleep(time.Millisecond)
	}
}

func send(t *testing.T, c net.Conn, b []byte) {
	t.Helper()
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
}

func expect(t *testing.T, c net.Conn, want string) {
	t.Helper()
	b := make([]byte, len(want))
	if n, err := io.ReadFull(c, b); err != nil || string(b) != want {
		t.Fatalf("read %q, %v; want %q", b[:n], err, want)
	}
}

func expectEOF(t *testing.T, c net.Conn) {
	t.Helper()
	if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Fatalf("read %d bytes, %v; want EOF", n, err)
	}
}

func expectReset(t *testing.T, c net.Conn) {
	t.Helper()
	if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("read %d bytes, %v; want ECONNRESET", n, err)
	}
}

func openFDs() int {
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	n := 0
	for _, e := range d {
		// Pipes of the net package's pool stay for the next transfer.
		if l, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && !strings.HasPrefix(l, "pipe:") {
			n++
		}
	}
	return n
}

// checkLeaks fails the test if goroutines or descriptors are left over.
func checkLeaks(t *testing.T) {
	t.Helper()
	gs, fds := runtime.NumGoroutine(), openFDs()
	t.Cleanup(func() {
		end := time.Now().Add(5 * time.Second)
		for {
			g, f := runtime.NumGoroutine(), openFDs()
			if g <= gs && f <= fds {
				return
			}
			if time.Now().After(end) {
				buf := make([]byte, 1<<20)
				t.Errorf("%d goroutines, %d descriptors; before: %d, %d\n%s", g, f, gs, fds, buf[:runtime.Stack(buf, true)])
				return
			}
			time.Sleep(time.Millisecond)
		}
	})
}
