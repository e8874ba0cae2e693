//go:build linux

package test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	. "shunt/test/harness"
)

// withAccessLog makes shunt write it.
var withAccessLog = map[string]string{"level": `"debug"`, "format": `"json"`, "access": "true"}

// accessLines are the lines of a listener's connections that have ended.
func accessLines(s *Shunt, listener string) (lines []map[string]any) {
	for l := range strings.Lines(s.Output()) {
		var f map[string]any
		if json.Unmarshal([]byte(l), &f) == nil && f["message"] == "connection" && f["listener"] == listener {
			lines = append(lines, f)
		}
	}
	return lines
}

// waitAccessLine waits for the nth line of a listener, from 1.
func waitAccessLine(t *testing.T, s *Shunt, listener string, n int) (line map[string]any) {
	t.Helper()
	Until(t, 10*time.Second, fmt.Sprintf("line %d of the listener %s in the access log", n, listener), func() error {
		lines := accessLines(s, listener)
		if len(lines) < n {
			return fmt.Errorf("%d lines", len(lines))
		}
		line = lines[n-1]
		return nil
	})
	return line
}

// ender is a service that ends its connections as their first byte says:
// c waits for the client's end, s finishes first, r resets, h holds on.
func ender(c *net.TCPConn) error {
	how := make([]byte, 1)
	if _, err := io.ReadFull(c, how); err != nil {
		return err
	}
	if _, err := c.Write(how); err != nil {
		return err
	}
	switch how[0] {
	case 's':
		if err := c.CloseWrite(); err != nil {
			return err
		}
	case 'r':
		if _, err := io.ReadFull(c, how); err != nil {
			return err
		}
		return Abort(c)
	}
	_, err := io.Copy(io.Discard, OnlyReader(c))
	if how[0] == 'h' && err == nil {
		return hungUp(c)
	}
	if IsReset(err) {
		err = nil
	}
	return err
}

// hungUp waits for the reset of a connection whose peer has finished.
func hungUp(c *net.TCPConn) error {
	return Poll(Patience, func() error {
		return Raw(c, func(fd int) error {
			p := []unix.PollFd{{Fd: int32(fd)}}
			if n, err := unix.Poll(p, 0); err != nil || n == 0 || p[0].Revents&(unix.POLLERR|unix.POLLHUP) == 0 {
				return fmt.Errorf("no reset: %v", err)
			}
			return nil
		})
	})
}

// fullBacklog is an address at which connecting hangs: a backlog of zero that is full drops every further SYN.
func fullBacklog(t *testing.T) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), syscall.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	sa, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", sa.(*syscall.SockaddrInet4).Port)
	for range 3 {
		if c, err := net.DialTimeout("tcp", addr, 300*time.Millisecond); err == nil {
			t.Cleanup(func() { c.Close() })
		}
	}
	return addr
}

func TestAccessLogSaysWhoEndedAndHow(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		t.Parallel()
		service := Serve(t, ender).Addr
		hole := fullBacklog(t)
		upstreams := map[string]string{
			"main": service, "idle": service, "half": service, "drain": service,
			"refused": fmt.Sprintf("127.0.0.1:%d", Port(t, nil)), "missing": "unix:" + t.TempDir() + "/none",
			"timeout": hole, "hole": hole, "resolve": "no..name:80", "route": "224.0.0.1:9",
		}
		extra := map[string]map[string]string{
			"idle": {"idle_timeout": `"1s"`}, "half": {"half_open_timeout": `"1s"`},
			"drain": {"drain_timeout": `"0s"`}, "timeout": {"dial_timeout": `"200ms"`},
		}
		cfg := Configure(p, "", "")
		first := cfg.Listeners[0]
		cfg.Listeners, cfg.Log = nil, withAccessLog
		at := map[string]string{}
		for _, name := range slices.Sorted(maps.Keys(upstreams)) {
			l := first
			l.Name, l.Upstream, l.Extra = name, upstreams[name], extra[name]
			l.Listen = fmt.Sprintf("127.0.0.1:%d", Port(t, nil))
			at[name] = l.Listen
			cfg.Listeners = append(cfg.Listeners, l)
		}
		s := StartShunt(t, cfg, Launch{})

		var open []*net.TCPConn
		// begin connects and tells the service how to end.
		begin := func(listener string, how byte) *net.TCPConn {
			t.Helper()
			c := DialFrom(t, nil, at[listener])
			open = append(open, c)
			if _, err := c.Write([]byte{how}); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			return c
		}
		finish := func(c *net.TCPConn) {
			t.Helper()
			c.CloseWrite()
			if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
				t.Errorf("%d bytes, %v; want the end", n, err)
			}
			c.Close()
		}
		refused := func(listener string) {
			c, err := DialErr(nil, at[listener])
			if err != nil {
				return // the end came before connect(2) returned
			}
			defer c.Close()
			c.Read(make([]byte, 1))
		}
		lines := map[string]int{}
		for _, c := range []struct {
			listener, end string
			provoke       func()
			connected     bool
		}{
			{"main", "client-fin", func() { finish(begin("main", 'c')) }, true},
			{"main", "server-fin", func() {
				c := begin("main", 's')
				if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
					t.Errorf("%d bytes, %v; want the end", n, err)
				}
				c.Close()
			}, true},
			{"main", "client-rst", func() { Abort(begin("main", 'c')) }, true},
			{"main", "server-rst", func() {
				c := begin("main", 'r')
				c.Write([]byte("x"))
				if n, err := c.Read(make([]byte, 1)); n != 0 || !IsReset(err) {
					t.Errorf("%d bytes, %v; want a reset", n, err)
				}
			}, true},
			{"idle", "idle", func() { begin("idle", 'c') }, true},
			{"half", "half-open", func() { begin("half", 'h').CloseWrite() }, true},
			{"hole", "client-rst", func() {
				c := DialFrom(t, nil, at["hole"])
				waitListenerActive(t, s, "hole", 1)
				Abort(c)
			}, false},
			{"refused", "dial-refused", func() { refused("refused") }, false},
			{"missing", "dial-missing", func() { refused("missing") }, false},
			{"timeout", "dial-timeout", func() { refused("timeout") }, false},
			{"resolve", "dial-resolve", func() { refused("resolve") }, false},
			{"route", "dial-no-route", func() { refused("route") }, false},
		} {
			c.provoke()
			lines[c.listener]++
			line := waitAccessLine(t, s, c.listener, lines[c.listener])
			if line["end"] != c.end {
				t.Errorf("ended by %q, want %q: %v", line["end"], c.end, line)
			}
			if _, ok := line["up"]; ok != c.connected {
				t.Errorf("%s: upstream %v", c.end, line["up"])
			}
			if _, ok := line["dial_ms"].(float64); !ok {
				t.Errorf("%s: dial_ms %v", c.end, line["dial_ms"])
			}
			if c.connected && (line["declined"] != nil) != !p.Bypass() {
				t.Errorf("%s: declined %v", c.end, line["declined"])
			}
		}
		for _, c := range open {
			c.Close()
		}
		if err := s.CheckIdle(10 * time.Second); err != nil {
			t.Error(err)
		}
		bounded, stopped := begin("drain", 'c'), begin("main", 'c')
		defer bounded.Close()
		defer stopped.Close()
		s.Signal(syscall.SIGTERM)
		if line := waitAccessLine(t, s, "drain", 1); line["end"] != "drain" {
			t.Errorf("ended by %q, want drain", line["end"])
		}
		Until(t, 10*time.Second, "the second signal", func() error { // one that comes at once is the first again
			s.Signal(syscall.SIGTERM)
			return s.Wait(100 * time.Millisecond)
		})
		if line := waitAccessLine(t, s, "main", lines["main"]+1); line["end"] != "stop" {
			t.Errorf("ended by %q, want stop", line["end"])
		}
		if code, err := s.ExitCode(10 * time.Second); err != nil || code != 0 {
			t.Errorf("exit code %d, %v", code, err)
		}
	})
}

// waitListenerActive waits for n live connections of a listener.
func waitListenerActive(t *testing.T, s *Shunt, listener string, n int) {
	t.Helper()
	Until(t, 5*time.Second, "active connections", func() error {
		m, err := s.Metrics()
		if err == nil && int(m.Sum("shunt_connections_active", "listener", listener)) != n {
			err = fmt.Errorf("%v, want %d", m.Sum("shunt_connections_active", "listener", listener), n)
		}
		return err
	})
}

func TestAccessLogSaysWhoIsLost(t *testing.T) {
	// The link to a client and the link to a service go down: keepalive finds out, on the bypass too.
	EachShuntPath(t, func(t *testing.T, p Path) {
		t.Parallel()
		client, middle, service := NewNetns(t), NewNetns(t), NewNetns(t)
		if err := errors.Join(Link(client, middle, 1), Link(middle, service, 2)); err != nil {
			t.Fatal(err)
		}
		cfg := Configure(p, "", "")
		near, far := cfg.Listeners[0], cfg.Listeners[0]
		// The ends close with a reset at the test's end: nothing else frees them while the link is down.
		end := make(chan struct{})
		defer close(end)
		arrived := make(chan struct{}, 1)
		reads := func(c *net.TCPConn) error {
			if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
				return err
			}
			arrived <- struct{}{}
			<-end
			return Abort(c)
		}
		greets := func(c *net.TCPConn) error {
			if _, err := c.Write([]byte("x")); err != nil {
				return err
			}
			<-end
			return Abort(c)
		}
		near.Name, near.Upstream = "near", ServeOn(t, middle, "127.0.0.1:0", reads).Addr
		near.Listen = fmt.Sprintf("%s:%d", LinkAddr(1, 2), Port(t, middle))
		far.Name, far.Upstream = "far", ServeOn(t, service, LinkAddr(2, 2).String()+":0", greets).Addr
		far.Listen = fmt.Sprintf("127.0.0.1:%d", Port(t, middle))
		near.Extra = map[string]string{"keepalive": `{ idle = "1s", interval = "1s", count = 1 }`}
		far.Extra = near.Extra
		cfg.Listeners, cfg.Log = []Listener{near, far}, withAccessLog
		s := StartShunt(t, cfg, Launch{Netns: middle})
		// Nothing that shunt has sent may be unacknowledged then: that would be retransmitted for a quarter of an hour.
		lost := DialFrom(t, client, near.Listen)
		defer Abort(lost)
		if _, err := lost.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		<-arrived
		other := DialFrom(t, middle, far.Listen)
		defer Abort(other)
		if _, err := io.ReadFull(other, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		for _, ns := range []*Netns{client, service} {
			out, err := exec.Command("ip", "-n", ns.Name, "-o", "link", "show", "type", "veth").CombinedOutput()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			dev, _, _ := strings.Cut(strings.Fields(string(out))[1], "@")
			if out, err := exec.Command("ip", "-n", ns.Name, "link", "set", dev, "down").CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
		for name, want := range map[string]string{"near": "client-lost", "far": "server-lost"} {
			line := waitAccessLine(t, s, name, 1)
			if line["end"] != want {
				t.Errorf("ended by %q, want %q: %v", line["end"], want, line)
			}
			if (line["declined"] != nil) != !p.Bypass() {
				t.Errorf("%s: declined %v", want, line["declined"])
			}
		}
	})
}
