//go:build linux

package test

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	. "shunt/test/harness"
)

// socketsOf returns copies of the process's connected sockets, by whether their
// local port is the given one: the accepted one and the dialled one.
func socketsOf(t *testing.T, pid, port int) (accepted, dialled int) {
	t.Helper()
	accepted, dialled = -1, -1
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	names, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range names {
		n, _ := strconv.Atoi(e.Name())
		link, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", pid, n))
		if !strings.HasPrefix(link, "socket:") {
			continue
		}
		fd, err := unix.PidfdGetfd(pidfd, n, 0)
		if err != nil {
			continue
		}
		t.Cleanup(func() { unix.Close(fd) })
		local, err := unix.Getsockname(fd)
		if _, perr := unix.Getpeername(fd); err != nil || perr != nil {
			continue
		}
		switch sa := local.(type) {
		case *unix.SockaddrInet4:
			if sa.Port == port {
				accepted = fd
			} else {
				dialled = fd
			}
		case *unix.SockaddrInet6:
			if sa.Port == port {
				accepted = fd
			} else {
				dialled = fd
			}
		}
	}
	return accepted, dialled
}

// TestSocatSocketOptions sets each option on both addresses, and reads it from
// the connected sockets of both programs.
func TestSocatSocketOptions(t *testing.T) {
	socat, shunt := realSocat(t)
	for _, o := range []struct {
		option      string
		level, name int
		want        int // on both sockets
		shuntOnly   bool
		notAccepted bool // a listening socket's option doesn't reach accepted ones with socat
	}{
		{option: "nodelay", level: unix.IPPROTO_TCP, name: unix.TCP_NODELAY, want: 1},
		{option: "nodelay=0", level: unix.IPPROTO_TCP, name: unix.TCP_NODELAY, want: 0},
		{option: "keepalive", level: unix.SOL_SOCKET, name: unix.SO_KEEPALIVE, want: 1},
		{option: "keepalive=0", level: unix.SOL_SOCKET, name: unix.SO_KEEPALIVE, want: 0},
		{option: "keepalive,keepidle=77", level: unix.IPPROTO_TCP, name: unix.TCP_KEEPIDLE, want: 77},
		{option: "keepalive,keepintvl=7", level: unix.IPPROTO_TCP, name: unix.TCP_KEEPINTVL, want: 7},
		{option: "keepalive,tcp-keepcnt=4", level: unix.IPPROTO_TCP, name: unix.TCP_KEEPCNT, want: 4},
		{option: "rcvbuf=20000", level: unix.SOL_SOCKET, name: unix.SO_RCVBUF, want: 40000},
		{option: "so-sndbuf=20000", level: unix.SOL_SOCKET, name: unix.SO_SNDBUF, want: 40000},
		{option: "rcvbuf-late=30000", level: unix.SOL_SOCKET, name: unix.SO_RCVBUF, want: 60000},
		{option: "sndbuf-late=30000", level: unix.SOL_SOCKET, name: unix.SO_SNDBUF, want: 60000},
		{option: "tos=16", level: unix.IPPROTO_IP, name: unix.IP_TOS, want: 16},
		{option: "ttl=33", level: unix.IPPROTO_IP, name: unix.IP_TTL, want: 33},
		{option: "priority=5", level: unix.SOL_SOCKET, name: unix.SO_PRIORITY, want: 5, notAccepted: true},
		{option: "oobinline", level: unix.SOL_SOCKET, name: unix.SO_OOBINLINE, want: 1},
		{option: "dontroute", level: unix.SOL_SOCKET, name: unix.SO_DONTROUTE, want: 1},
		{option: "cork", level: unix.IPPROTO_TCP, name: unix.TCP_CORK, want: 1, notAccepted: true},
		{option: "linger2=9", level: unix.IPPROTO_TCP, name: unix.TCP_LINGER2, want: 9},
		{option: "syncnt=3", level: unix.IPPROTO_TCP, name: unix.TCP_SYNCNT, want: 3},
		{option: "window-clamp=30000", level: unix.IPPROTO_TCP, name: unix.TCP_WINDOW_CLAMP, want: 30000, notAccepted: true},
		{option: "reuseport", level: unix.SOL_SOCKET, name: unix.SO_REUSEPORT, want: 1},
		{option: "ip-transparent", level: unix.IPPROTO_IP, name: unix.IP_TRANSPARENT, want: 1},
		{option: "freebind", level: unix.IPPROTO_IP, name: unix.IP_FREEBIND, want: 1},
		{option: "mtudiscover=1", level: unix.IPPROTO_IP, name: unix.IP_MTU_DISCOVER, want: 1},
		{option: "mark=17", level: unix.SOL_SOCKET, name: unix.SO_MARK, want: 17, shuntOnly: true},
		{option: "user-timeout=12345", level: unix.IPPROTO_TCP, name: unix.TCP_USER_TIMEOUT, want: 12345, shuntOnly: true},
		{option: "setsockopt=6:18:i4321", level: unix.IPPROTO_TCP, name: unix.TCP_USER_TIMEOUT, want: 4321},
		{option: "setsockopt-int=6:18:4321", level: unix.IPPROTO_TCP, name: unix.TCP_USER_TIMEOUT, want: 4321},
	} {
		t.Run(o.option, func(t *testing.T) {
			t.Parallel()
			for _, bin := range []string{socat, shunt} {
				if bin == socat && o.shuntOnly {
					continue
				}
				flags := ""
				if bin == shunt {
					flags = "--bypass=off "
				}
				c := socatCase{line: flags + l4 + "," + o.option + " TCP:{tcp}," + o.option, client: "tcp:127.0.0.1:{port}", send: "x"}
				c.look = func(t *testing.T, r *socatRun) string {
					port, _ := strconv.Atoi(r.port)
					accepted, dialled := socketsOf(t, r.proc.Pid(), port)
					for what, fd := range map[string]int{"accepted": accepted, "dialled": dialled} {
						got, err := unix.GetsockoptInt(fd, o.level, o.name)
						if err != nil || got != o.want && !(bin == socat && what == "accepted" && o.notAccepted) {
							t.Errorf("%s, %s socket: %d, %v; want %d\n%s", filepath.Base(bin), what, got, err, o.want, r.stderr.String())
						}
					}
					return ""
				}
				if got := c.observe(t, bin); !strings.Contains(got, `client: "", EOF`) || !strings.Contains(got, "exit code 0") {
					t.Errorf("%s: %s", filepath.Base(bin), got)
				}
			}
		})
	}
}

// TestSocatSocketOptionsByEffect looks at options that aren't a number of the socket.
func TestSocatSocketOptionsByEffect(t *testing.T) {
	socat, shunt := realSocat(t)
	linger := func(fd int) string {
		l, err := getLinger(fd)
		return fmt.Sprint(l, err)
	}
	device := func(fd int) string {
		s, err := unix.GetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE)
		return fmt.Sprint(s, err)
	}
	local := func(fd int) string {
		sa, _ := unix.Getsockname(fd)
		return fmt.Sprint(sa.(*unix.SockaddrInet4).Addr)
	}
	lowPort := func(fd int) string {
		sa, _ := unix.Getsockname(fd)
		return fmt.Sprint(sa.(*unix.SockaddrInet4).Port < 1024)
	}
	spare := Port(t, nil)
	for _, o := range []struct {
		left, right string
		look        func(fd int) string
		accepted    string // empty: not looked at
		dialled     string
	}{
		{",linger=7", ",linger=7", linger, "[1 7] <nil>", "[1 7] <nil>"},
		{",so-bindtodevice=lo", ",interface=lo", device, "lo<nil>", "lo<nil>"},
		{"", ",bind=127.0.0.2", local, "[127 0 0 1]", "[127 0 0 2]"},
		{"", ",lowport", lowPort, "", "true"},
		{"", fmt.Sprintf(",sourceport=%d,reuseaddr", spare), func(fd int) string {
			sa, _ := unix.Getsockname(fd)
			return fmt.Sprint(sa.(*unix.SockaddrInet4).Port == spare)
		}, "", "true"},
		{"", fmt.Sprintf(",bind=127.0.0.1:%d,reuseaddr", spare+1), func(fd int) string {
			sa, _ := unix.Getsockname(fd)
			return fmt.Sprint(sa.(*unix.SockaddrInet4).Port == spare+1)
		}, "", "true"},
	} {
		for _, bin := range []string{socat, shunt} {
			c := socatCase{line: l4 + o.left + " TCP:{tcp}" + o.right, client: "tcp:127.0.0.1:{port}", send: "x"}
			c.look = func(t *testing.T, r *socatRun) string {
				port, _ := strconv.Atoi(r.port)
				accepted, dialled := socketsOf(t, r.proc.Pid(), port)
				if got := o.look(accepted); o.accepted != "" && got != o.accepted {
					t.Errorf("%s %s: accepted socket: %s, want %s", filepath.Base(bin), c.line, got, o.accepted)
				}
				if got := o.look(dialled); got != o.dialled {
					t.Errorf("%s %s: dialled socket: %s, want %s", filepath.Base(bin), c.line, got, o.dialled)
				}
				return ""
			}
			if got := c.observe(t, bin); !strings.Contains(got, "exit code 0") {
				t.Errorf("%s %s: %s", filepath.Base(bin), c.line, got)
			}
		}
	}
}

// getLinger reads SO_LINGER's two numbers.
func getLinger(fd int) (l [2]int32, err error) {
	tv, err := unix.GetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_LINGER) // has room for them
	if err == nil {
		l = [2]int32{int32(tv.Sec), int32(tv.Sec >> 32)}
	}
	return l, err
}

// TestSocatDumps compares what -v, -x, -r and -R write.
func TestSocatDumps(t *testing.T) {
	socat, shunt := realSocat(t)
	date := regexp.MustCompile(`\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d+`)
	said := regexp.MustCompile(`(?m)^.* W bypass off: .*\n`)
	for _, flags := range []string{"-v", "-x", "-v -x", "-r raw -R back", "-v -r raw"} {
		var got [2]string
		for i, bin := range []string{socat, shunt} {
			c := socatCase{line: flags + " TCP:{tcp} -", stdin: "hello\nwor\tld\x01\r\n\\and a longer line to have several"}
			obs, r := c.observeRun(t, bin)
			err := date.ReplaceAllString(r.stderr.String(), "DATE")
			if bin == shunt {
				if !said.MatchString(err) {
					t.Errorf("%s: shunt doesn't say that the bypass is off: %s", flags, err)
				}
				err = said.ReplaceAllString(err, "")
			}
			raw, _ := os.ReadFile(filepath.Join(r.dir, "raw"))
			back, _ := os.ReadFile(filepath.Join(r.dir, "back"))
			got[i] = fmt.Sprintf("%s\n%s\n%q %q", obs, err, raw, back)
		}
		if got[0] != got[1] {
			t.Errorf("%s\nsocat: %s\nshunt: %s", flags, got[0], got[1])
		}
	}
}

// socatFork runs shunt's TCP-LISTEN with fork until the end of the test.
func socatFork(t *testing.T, bin string, args ...string) *Process {
	t.Helper()
	return Run(t, nil, exec.Command(bin, args...))
}

func roundTrip(addr, network string) error {
	c, err := net.Dial(network, addr)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.WriteString(c, "ping"); err != nil {
		return err
	}
	b := make([]byte, 4)
	if _, err := io.ReadFull(c, b); err != nil {
		return err
	}
	if string(b) != "ping" {
		return fmt.Errorf("got %q", b)
	}
	return nil
}

func TestSocatRetriesUntilTheServiceIsUp(t *testing.T) {
	socat, shunt := realSocat(t)
	for _, bin := range []string{socat, shunt} {
		port := Port(t, nil)
		addr := fmt.Sprintf("127.0.0.1:%d", port)
		cmd := exec.Command(bin, "-t", "2", "TCP:"+addr+",forever,interval=0.1", "-")
		cmd.Stdin = strings.NewReader("late but here")
		var out bytes.Buffer
		cmd.Stdout = &out
		p, err := StartProcess(nil, cmd)
		if err != nil {
			t.Fatal(err)
		}
		defer p.End(time.Second)
		if p.Wait(300*time.Millisecond) == nil {
			t.Fatalf("%s gave up", bin)
		}
		startService(t, "tcp4", addr, "echo")
		if code, err := p.ExitCode(5 * time.Second); err != nil || code != 0 || out.String() != "late but here" {
			t.Errorf("%s: code %d, %v, %q", bin, code, err, out.String())
		}
	}
}

func TestSocatMaxChildrenWait(t *testing.T) {
	socat, shunt := realSocat(t)
	for _, bin := range []string{socat, shunt} {
		svc := startService(t, "tcp4", "127.0.0.1:0", "echo")
		addr := fmt.Sprintf("127.0.0.1:%d", Port(t, nil))
		_, port, _ := net.SplitHostPort(addr)
		p := socatFork(t, bin, "TCP-LISTEN:"+port+",bind=127.0.0.1,reuseaddr,fork,max-children=1", "TCP:"+svc.addr.String())
		if err := WaitListening(nil, addr, p, 5*time.Second); err != nil {
			t.Fatal(err)
		}
		first, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(first, "x")
		if _, err := io.ReadFull(first, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- roundTrip(addr, "tcp") }()
		select {
		case err := <-done:
			t.Errorf("%s: a second connection was served beside the first: %v", bin, err)
		case <-time.After(300 * time.Millisecond):
		}
		first.Close()
		if err := <-done; err != nil {
			t.Errorf("%s: %v", bin, err)
		}
	}
}

func TestSocatChangesTheUser(t *testing.T) {
	socat, shunt := realSocat(t)
	for _, c := range []struct{ option, user string }{
		{"su=nobody", "65534"}, {"su-d=nobody", "65534"}, {"setuid=65534", "65534"}, {"su-e=nobody", "65534"},
	} {
		for _, bin := range []string{socat, shunt} {
			run := socatCase{line: l4 + "," + c.option + " TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "x"}
			run.look = func(t *testing.T, r *socatRun) string {
				b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.proc.Pid()))
				if err != nil || !regexp.MustCompile(`Uid:\s+`+c.user+`\s+`+c.user).Match(b) {
					t.Errorf("%s %s: not user %s: %v", filepath.Base(bin), c.option, c.user, err)
				}
				return ""
			}
			if got := run.observe(t, bin); !strings.Contains(got, "exit code 0") {
				t.Errorf("%s %s: %s", filepath.Base(bin), c.option, got)
			}
		}
	}
}

func TestSocatNetns(t *testing.T) {
	_, shunt := realSocat(t)
	ns := NewNetns(t)
	svc := ServeOn(t, ns, "127.0.0.1:0", func(c *net.TCPConn) error { _, err := io.Copy(c, OnlyReader(c)); return err })
	port := Port(t, nil)
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	p := socatFork(t, shunt, fmt.Sprintf("TCP-LISTEN:%d,bind=127.0.0.1,fork", port), "TCP:"+svc.Addr+",netns="+ns.Name)
	if err := WaitListening(nil, addr, p, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := roundTrip(addr, "tcp"); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSocatNetnsListens listens inside of a namespace.
func TestSocatNetnsListens(t *testing.T) {
	_, shunt := realSocat(t)
	ns := NewNetns(t)
	svc := startService(t, "tcp4", "127.0.0.1:0", "echo")
	port := Port(t, ns)
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	p := socatFork(t, shunt, fmt.Sprintf("TCP-LISTEN:%d,bind=127.0.0.1,fork,netns=%s", port, ns.Name), "TCP:"+svc.addr.String())
	if err := WaitListening(ns, addr, p, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	c := DialFrom(t, ns, addr)
	io.WriteString(c, "ping")
	c.CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "ping" {
		t.Errorf("%q, %v", b, err)
	}
}

// TestSocatTellsOfBrokenPipe writes to a pipe that nobody reads any more.
func TestSocatTellsOfBrokenPipe(t *testing.T) {
	socat, shunt := realSocat(t)
	for _, bin := range []string{socat, shunt} {
		svc := startService(t, "tcp4", "127.0.0.1:0", "greet")
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		r.Close()
		cmd := exec.Command(bin, "-u", "TCP:"+svc.addr.String(), "-")
		cmd.Stdout = w
		p, err := StartProcess(nil, cmd)
		w.Close()
		if err != nil {
			t.Fatal(err)
		}
		code, err := p.ExitCode(5 * time.Second)
		if err != nil || code != 1 || !strings.Contains(p.Output(), "Broken pipe") {
			t.Errorf("%s: exit code %d, %v: %s", bin, code, err, p.Output())
		}
	}
}

// TestSocatListensOnBothSides joins two clients.
func TestSocatListensOnBothSides(t *testing.T) {
	socat, shunt := realSocat(t)
	for _, bin := range []string{socat, shunt} {
		dir, port := shortDir(t), Port(t, nil)
		p := socatFork(t, bin, "-t", "2", fmt.Sprintf("TCP-LISTEN:%d,bind=127.0.0.1,reuseaddr", port), "UNIX-LISTEN:"+dir+"/l")
		addr := fmt.Sprintf("127.0.0.1:%d", port)
		if err := WaitListening(nil, addr, p, 5*time.Second); err != nil {
			t.Fatal(err)
		}
		left := DialFrom(t, nil, addr)
		var right net.Conn
		Until(t, 5*time.Second, "the second address", func() (err error) {
			right, err = net.Dial("unix", dir+"/l")
			return err
		})
		right.SetDeadline(time.Now().Add(5 * time.Second))
		io.WriteString(left, "to the right")
		left.CloseWrite()
		if b, err := io.ReadAll(right); err != nil || string(b) != "to the right" {
			t.Errorf("%s: %q, %v", bin, b, err)
		}
		io.WriteString(right, "to the left")
		right.Close()
		if b, err := io.ReadAll(left); err != nil || string(b) != "to the left" {
			t.Errorf("%s: %q, %v", bin, b, err)
		}
		if code, err := p.ExitCode(5 * time.Second); err != nil || code != 0 {
			t.Errorf("%s: exit code %d, %v", bin, code, err)
		}
	}
}

// TestSocatFD passes a pipe and a socket by number.
func TestSocatFD(t *testing.T) {
	socat, shunt := realSocat(t)
	for _, bin := range []string{socat, shunt} {
		for _, spec := range []string{"FD:3", "3"} {
			svc := startService(t, "tcp4", "127.0.0.1:0", "late")
			pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			theirs, ours := os.NewFile(uintptr(pair[0]), "theirs"), os.NewFile(uintptr(pair[1]), "ours")
			defer ours.Close()
			cmd := exec.Command(bin, "-t", "2", "-u", spec, "TCP:"+svc.addr.String())
			if spec == "FD:3" {
				cmd = exec.Command(bin, "-t", "2", spec, "TCP:"+svc.addr.String())
			}
			cmd.ExtraFiles = []*os.File{theirs}
			p := Run(t, nil, cmd)
			theirs.Close()
			io.WriteString(ours, "ping")
			unix.Shutdown(pair[1], unix.SHUT_WR)
			want := "late ping"
			if spec != "FD:3" {
				want = ""
			}
			if b, err := io.ReadAll(ours); err != nil || string(b) != want {
				t.Errorf("%s %s: %q, %v", bin, spec, b, err)
			}
			if code, err := p.ExitCode(5 * time.Second); err != nil || code != 0 {
				t.Errorf("%s %s: exit code %d, %v: %s", bin, spec, code, err, p.Output())
			}
		}
	}
}

// TestSocatKeepsEveryByte sends more than any buffer holds through what isn't TCP on both sides.
func TestSocatKeepsEveryByte(t *testing.T) {
	socat, shunt := realSocat(t)
	want := Payload(7, 8<<20)
	for _, bin := range []string{socat, shunt} {
		for _, line := range []string{"-t 5 - TCP:{tcp}", "-t 5 - UNIX:{unix}", "-t 5 -b 100000 - TCP:{tcp}", "-t 5 -r {dir}/raw - TCP:{tcp}"} {
			c := socatCase{line: line, stdin: string(want)}
			_, r := c.observeRun(t, bin)
			if !bytes.Equal(r.stdout.Bytes(), want) {
				t.Errorf("%s %s: %d bytes of %d, or not the same", filepath.Base(bin), line, r.stdout.Len(), len(want))
			}
		}
		dir := shortDir(t)
		svc := startService(t, "tcp4", "127.0.0.1:0", "echo")
		p := socatFork(t, bin, "-t", "5", "UNIX-LISTEN:"+dir+"/l,fork", "TCP:"+svc.addr.String())
		var c net.Conn
		Until(t, 5*time.Second, "the UNIX socket", func() (err error) {
			c, err = net.Dial("unix", dir+"/l")
			return err
		})
		go func() {
			c.Write(want)
			c.(*net.UnixConn).CloseWrite()
		}()
		c.SetDeadline(time.Now().Add(10 * time.Second))
		if b, err := io.ReadAll(c); err != nil || !bytes.Equal(b, want) {
			t.Errorf("%s: UNIX to TCP: %d bytes, %v", filepath.Base(bin), len(b), err)
		}
		p.End(time.Second)
	}
}

// needVsock skips the test where VSOCK sockets of this host can't reach each other.
func needVsock(t *testing.T) {
	t.Helper()
	err := func() error {
		listen, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM, 0)
		if err != nil {
			return fmt.Errorf("socket: %w", err)
		}
		defer unix.Close(listen)
		if err := unix.Bind(listen, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: unix.VMADDR_PORT_ANY}); err != nil {
			return fmt.Errorf("bind: %w", err)
		}
		if err := unix.Listen(listen, 1); err != nil {
			return fmt.Errorf("listen: %w", err)
		}
		addr, err := unix.Getsockname(listen)
		if err != nil {
			return fmt.Errorf("getsockname: %w", err)
		}
		fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return fmt.Errorf("socket: %w", err)
		}
		defer unix.Close(fd)
		err = unix.Connect(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_LOCAL, Port: addr.(*unix.SockaddrVM).Port})
		if err != unix.EINPROGRESS {
			return err
		}
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		if n, err := unix.Poll(p, 5000); err != nil || n == 0 {
			return fmt.Errorf("a connection to this host stays unanswered (%v)", err)
		}
		e, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && e != 0 {
			err = syscall.Errno(e)
		}
		return err
	}()
	if err != nil {
		Missing(t, AbilityVsock, fmt.Sprintf("VSOCK within this host (vsock_loopback): %v", err))
	}
}

func TestSocatVsock(t *testing.T) {
	NeedRoot(t)
	shunt, err := Build()
	if err != nil {
		t.Fatal(err)
	}
	needVsock(t)
	svc := startService(t, "tcp4", "127.0.0.1:0", "late")
	port, tcp := Port(t, nil), Port(t, nil)
	socatFork(t, shunt, fmt.Sprintf("VSOCK-LISTEN:%d,fork", port), "TCP:"+svc.addr.String())
	p := socatFork(t, shunt, fmt.Sprintf("TCP-LISTEN:%d,bind=127.0.0.1,fork", tcp), fmt.Sprintf("VSOCK-CONNECT:1:%d,retry=20,interval=0.1", port))
	addr := fmt.Sprintf("127.0.0.1:%d", tcp)
	if err := WaitListening(nil, addr, p, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	c := DialFrom(t, nil, addr)
	io.WriteString(c, "ping")
	c.CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "late ping" {
		t.Errorf("%q, %v", b, err)
	}
}

// TestSocatNamedSocat installs shunt under socat's name.
func TestSocatNamedSocat(t *testing.T) {
	_, shunt := realSocat(t)
	link := filepath.Join(t.TempDir(), "socat")
	if err := os.Symlink(shunt, link); err != nil {
		t.Fatal(err)
	}
	svc := startService(t, "tcp4", "127.0.0.1:0", "echo")
	cmd := exec.Command(link, "-d", "-d", "-lu", "TCP:"+svc.addr.String(), "STDIO")
	cmd.Stdin = strings.NewReader("ping")
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	if err := cmd.Run(); err != nil || out.String() != "ping" {
		t.Errorf("%v: %q", err, out.String())
	}
	if !regexp.MustCompile(`\.\d{6} socat\[\d+\] N `).MatchString(log.String()) {
		t.Errorf("log: %s", log.String())
	}
}

func TestSocatLogsWhereItIsTold(t *testing.T) {
	_, shunt := realSocat(t)
	file := filepath.Join(t.TempDir(), "log")
	cmd := exec.Command(shunt, "-d", "-d", "-lf", file, "-lh", fmt.Sprintf("TCP:127.0.0.1:%d", Port(t, nil)), "-")
	cmd.Env = append(os.Environ(), "HOSTNAME=thishost")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err == nil || stderr.Len() > 0 {
		t.Errorf("%v, stderr %q", err, stderr.String())
	}
	b, err := os.ReadFile(file)
	if err != nil || !regexp.MustCompile(`thishost \S+\[\d+\] E connect\(.*Connection refused`).Match(b) {
		t.Errorf("%v: %s", err, b)
	}
}

// TestSocatTakesTheBypass reads the admin endpoint.
func TestSocatTakesTheBypass(t *testing.T) {
	_, shunt := realSocat(t)
	NeedBypass(t)
	svc := startService(t, "tcp4", "127.0.0.1:0", "echo")
	for _, c := range []struct {
		flags  []string
		left   string
		bypass bool
	}{
		{[]string{"--bypass=on"}, ",fork", true},
		{[]string{"--bypass=off"}, ",fork", false},
		{[]string{"--bypass", "on", "-v"}, ",fork", false},
		{[]string{"--bypass=on", "-T", "0.5"}, ",fork", true},
		{[]string{"--bypass=on"}, ",fork,su=nobody", false},
	} {
		port, admin := Port(t, nil), Port(t, nil)
		args := append(c.flags, fmt.Sprintf("--admin=127.0.0.1:%d", admin), fmt.Sprintf("TCP-LISTEN:%d,bind=127.0.0.1%s", port, c.left), "TCP:"+svc.addr.String())
		p := socatFork(t, shunt, args...)
		addr := fmt.Sprintf("127.0.0.1:%d", port)
		if err := WaitListening(nil, addr, p, 10*time.Second); err != nil {
			t.Fatal(err)
		}
		conn := DialFrom(t, nil, addr)
		// For longer than -T: bypassed bytes count.
		for range 20 {
			if _, err := io.WriteString(conn, "ping"); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(conn, make([]byte, 4)); err != nil {
				t.Fatalf("%v: %v", args, err)
			}
			time.Sleep(40 * time.Millisecond)
		}
		m, err := adminMetrics(admin)
		if err != nil {
			t.Fatal(err)
		}
		bypass, copied := m.Sum("shunt_bytes_total", "path", "bypass"), m.Sum("shunt_bytes_total", "path", "copy")
		if c.bypass != (bypass > 0) || bypass+copied != 160 {
			t.Errorf("%v: %v bytes bypassed, %v copied", args, bypass, copied)
		}
		conn.Close()
		p.Signal(syscall.SIGTERM)
		if code, err := p.ExitCode(5 * time.Second); err != nil || code != 143 {
			t.Errorf("%v: exit code %d, %v", args, code, err)
		}
	}
}

func adminMetrics(port int) (Metrics, error) {
	resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", port))
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return ParseMetrics(resp.Body)
}

func TestSocatSaysWhyItCopies(t *testing.T) {
	_, shunt := realSocat(t)
	dir := shortDir(t)
	svc := startService(t, "unix", dir+"/s", "echo")
	port := Port(t, nil)
	p := socatFork(t, shunt, "--admin=unix:"+AdminSocket(dir), fmt.Sprintf("TCP-LISTEN:%d,bind=127.0.0.1,fork", port), "UNIX:"+svc.addr.String())
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	if err := WaitListening(nil, addr, p, 10*time.Second); err != nil {
		t.Fatal(err)
	}
	if err := roundTrip(addr, "tcp"); err != nil {
		t.Fatal(err)
	}
	m, err := Scrape(AdminSocket(dir))
	if err != nil || m.Declined()["unix"] != 1 || len(m.Declined()) != 1 {
		t.Errorf("%v: declined %v", err, m.Declined())
	}
}

func TestSocatLetsConnectionsFinish(t *testing.T) {
	_, shunt := realSocat(t)
	svc := startService(t, "tcp4", "127.0.0.1:0", "echo")
	port := Port(t, nil)
	p := socatFork(t, shunt, fmt.Sprintf("TCP-LISTEN:%d,bind=127.0.0.1,fork", port), "TCP:"+svc.addr.String())
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	if err := WaitListening(nil, addr, p, 10*time.Second); err != nil {
		t.Fatal(err)
	}
	c := DialFrom(t, nil, addr)
	io.WriteString(c, "x")
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	p.Signal(syscall.SIGTERM)
	if p.Wait(200*time.Millisecond) == nil {
		t.Fatal("ended with a live connection")
	}
	io.WriteString(c, "y")
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	c.Close()
	if code, err := p.ExitCode(5 * time.Second); err != nil || code != 143 {
		t.Errorf("exit code %d, %v", code, err)
	}
}
