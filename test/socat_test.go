//go:build linux

package test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	. "shunt/test/harness"
)

// socatCase is one command line that socat and shunt run. In its words {port}
// is a free port, {dir} a new folder, {tcp}, {tcp6}, {unix} and {abs} services
// of the kind, and {dead} a port on which nobody listens.
type socatCase struct {
	line    string
	client  string // where a client connects: "tcp:127.0.0.1:{port}", "unix:{dir}/l", "abstract:x"; empty: no client
	send    string // what the client sends
	keep    bool   // the client doesn't finish sending
	stdin   string // what the program reads
	service string // what services do: echo (the default), greet, late, sink, hold
	stop    bool   // ends with SIGTERM after the client has
	again   bool   // a second client after the first
	pre     func(t *testing.T, dir string)
	look    func(t *testing.T, r *socatRun) string // while the client is connected
	// differs is what shunt does where the table says that it differs: a
	// part of the observation, which socat's doesn't have.
	differs string
}

// socatRun is one of the two programs running a case.
type socatRun struct {
	c      *socatCase
	words  *strings.Replacer
	dir    string
	port   string
	proc   *Process
	stdout bytes.Buffer // of a process that has ended
	stderr bytes.Buffer
}

// streamService is a TCP or UNIX service inside of the test.
type streamService struct {
	addr net.Addr
	ln   net.Listener
}

func startService(t *testing.T, network, addr, what string) *streamService {
	t.Helper()
	ln, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	s := &streamService{addr: ln.Addr(), ln: ln}
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go serveStream(c, what)
		}
	}()
	return s
}

func serveStream(c net.Conn, what string) {
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	finish := func() { c.(interface{ CloseWrite() error }).CloseWrite() }
	switch what {
	case "greet":
		io.WriteString(c, "hello from the service")
		finish()
		io.Copy(io.Discard, OnlyReader(c))
	case "late", "very late": // the reply comes after the client's end
		b, _ := io.ReadAll(OnlyReader(c))
		pause := 200 * time.Millisecond
		if what != "late" {
			pause = time.Second // longer than socat's -t
		}
		time.Sleep(pause)
		fmt.Fprintf(c, "%s %s", what, b)
	case "sink":
		io.Copy(io.Discard, OnlyReader(c))
	case "hold":
		io.ReadFull(c, make([]byte, 1))
		time.Sleep(3 * time.Second)
	default:
		io.Copy(c, OnlyReader(c))
	}
}

const socatPatience = 6 * time.Second

// observe runs the case with a program and returns what can be seen from outside.
func (c *socatCase) observe(t *testing.T, bin string) string {
	t.Helper()
	seen, _ := c.observeRun(t, bin)
	return seen
}

// observeRun is observe, with the run itself.
func (c *socatCase) observeRun(t *testing.T, bin string) (string, *socatRun) {
	t.Helper()
	r := &socatRun{c: c}
	r.dir = shortDir(t)
	r.port = fmt.Sprint(Port(t, nil))
	dead := fmt.Sprint(Port(t, nil))
	pairs := []string{"{port}", r.port, "{dir}", r.dir, "{dead}", dead}
	for _, s := range []struct{ word, network, addr string }{
		{"{tcp}", "tcp4", "127.0.0.1:0"}, {"{tcp6}", "tcp6", "[::1]:0"},
		{"{unix}", "unix", r.dir + "/service"}, {"{abs}", "unix", "@shunt-test-" + r.port},
	} {
		if !strings.Contains(c.line, s.word) && !(s.word == "{tcp}" && strings.Contains(c.line, "{tcpport}")) {
			continue
		}
		svc := startService(t, s.network, s.addr, c.service)
		pairs = append(pairs, s.word, strings.TrimPrefix(svc.addr.String(), "@"))
		if a, ok := svc.addr.(*net.TCPAddr); ok {
			pairs = append(pairs, "{tcpport}", fmt.Sprint(a.Port))
		}
	}
	r.words = strings.NewReplacer(pairs...)
	if c.pre != nil {
		c.pre(t, r.dir)
	}
	var args []string
	for _, w := range strings.Fields(c.line) {
		args = append(args, r.words.Replace(w))
	}
	cmd := exec.Command(bin, args...)
	cmd.Stdin = strings.NewReader(c.stdin)
	cmd.Stdout, cmd.Stderr = &r.stdout, &r.stderr
	cmd.Dir = r.dir
	p, err := StartProcess(nil, cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer p.End(time.Second)
	r.proc = p

	var seen []string
	if c.client != "" {
		n := 1
		if c.again {
			n = 2
		}
		for range n {
			seen = append(seen, "client: "+r.client(t))
		}
	}
	if c.stop {
		p.Signal(syscall.SIGTERM)
	}
	code, err := p.ExitCode(socatPatience)
	if err != nil {
		seen = append(seen, "still running")
		p.End(time.Second)
	} else {
		seen = append(seen, fmt.Sprintf("exit code %d", code))
	}
	var left []string
	entries, _ := os.ReadDir(r.dir)
	for _, e := range entries {
		if e.Name() != "service" {
			left = append(left, e.Name())
		}
	}
	seen = append(seen, fmt.Sprintf("stdout %q", r.stdout.String()), fmt.Sprintf("files left %q", left))
	return strings.Join(seen, "; "), r
}

// shortDir is a folder whose name leaves room for a UNIX socket's.
func shortDir(t *testing.T) string {
	dir, err := os.MkdirTemp("", "sc")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func (r *socatRun) dial() (net.Conn, error) {
	network, addr, _ := strings.Cut(r.words.Replace(r.c.client), ":")
	switch network {
	case "abstract":
		return net.Dial("unix", "@"+addr)
	case "tcp":
		d := net.Dialer{}
		d.SetMultipathTCP(false)
		return d.DialContext(context.Background(), "tcp", addr)
	}
	return net.Dial(network, addr)
}

// client connects, and says what came back and how it ended.
func (r *socatRun) client(t *testing.T) string {
	t.Helper()
	var c net.Conn
	err := Poll(socatPatience, func() (err error) {
		select {
		case <-r.proc.Done():
			return nil
		default:
		}
		c, err = r.dial()
		return err
	})
	if err != nil {
		return "not connected"
	}
	if c == nil {
		return "the program has ended"
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(socatPatience))
	io.WriteString(c, r.c.send)
	var looked string
	if r.c.look != nil {
		if n := len(r.c.send); n > 0 {
			io.ReadFull(c, make([]byte, n)) // the connection is through
		}
		looked = " (" + r.c.look(t, r) + ")"
	}
	if !r.c.keep {
		c.(interface{ CloseWrite() error }).CloseWrite()
	}
	b, err := io.ReadAll(c)
	end := "EOF"
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		end = "no end"
	case err != nil:
		end = "reset"
	}
	return fmt.Sprintf("%q, %s%s", b, end, looked)
}

const l4 = "TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr"

var socatCases = []socatCase{
	// TCP, one connection.
	{line: l4 + " TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping"},
	{line: l4 + " TCP:{tcp}", client: "tcp:127.0.0.1:{port}"},
	{line: l4 + " TCP4:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping"},
	{line: "tcp-l:{port},bind=127.0.0.1,REUSEADDR tcp:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping"},
	{line: "TCP4-LISTEN:{port},reuseaddr TCP4-CONNECT:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping"},
	{line: "TCP4-L:{port},reuseaddr INET:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping"},
	{line: "TCP6-LISTEN:{port},reuseaddr TCP6:{tcp6}", client: "tcp:[::1]:{port}", send: "ping"},
	{line: "TCP6-LISTEN:{port},reuseaddr TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping"},
	{line: "TCP6-LISTEN:{port},reuseaddr,ipv6only=1,bind=[::1] TCP:{tcp}", client: "tcp:[::1]:{port}", send: "ping"},
	{line: "-6 TCP-LISTEN:{port},reuseaddr TCP4:{tcp}", client: "tcp:[::1]:{port}", send: "ping"},
	{line: "-4 TCP-LISTEN:{port},reuseaddr TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping"},
	{line: "TCP-LISTEN:{port},pf=ip6,reuseaddr TCP:{tcp}", client: "tcp:[::1]:{port}", send: "ping"},
	{line: "TCP-LISTEN:{port},pf=ip4,reuseaddr TCP:{tcp6},pf=ip6", client: "tcp:127.0.0.1:{port}", send: "ping"},
	{line: "TCP:{tcp} TCP-LISTEN:{port},reuseaddr", client: "tcp:127.0.0.1:{port}", send: "ping"},
	{line: l4 + " TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping", service: "greet"},
	{line: l4 + " TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping", service: "late"},
	{line: "-t 5 " + l4 + " TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping", service: "late"},
	{line: "-t 0.05 " + l4 + " TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping", service: "late"},
	{line: "-t0.05 " + l4 + " TCP:{tcp}", client: "tcp:127.0.0.1:{port}", service: "late"},
	{line: l4 + " TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping", keep: true, service: "greet"},
	{line: l4 + " TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping", service: "very late", differs: "very late ping"}, // -t
	{line: "-t 0.2 " + l4 + " TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping", keep: true, service: "greet"},
	{line: "-T 0.4 " + l4 + " TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping", keep: true, service: "sink"},
	{line: "-T0.4 " + l4 + " TCP:{tcp}", client: "tcp:127.0.0.1:{port}", keep: true, service: "sink"},
	{line: l4 + ",range=localhost TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping"},
	{line: l4 + ",setsockopt-listen=6:18:i99,setsockopt=1:9:i1 TCP:{tcp},sockopt=6:18:i4321", client: "tcp:127.0.0.1:{port}", send: "ping"},
	{line: l4 + " TCP:{tcp},ttl=300", client: "tcp:127.0.0.1:{port}", send: "ping"},
	{line: "-s TCP:{tcp},ttl=300 -", stdin: "ping"},
	{line: "-lf {dir}/log TCP:127.0.0.1:{dead} -"},
	{line: "-r {dir}/no/raw - TCP:{tcp}", stdin: "x"},
	{line: "-lynosuch TCP:127.0.0.1:{dead} -"},
	{line: "-b 3 " + l4 + " TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "a longer message"},

	{line: "TCP-LISTEN:{port},bind=localhost,reuseaddr TCP:localhost:{tcpport},connect-timeout=2.5", client: "tcp:127.0.0.1:{port}", send: "ping"},

	// Refused, unreachable, retried.
	{line: "TCP-LISTEN:{tcpport},bind=127.0.0.1 -"},
	{line: "TCP-LISTEN:{tcpport},bind=127.0.0.1,retry=1,interval=0.1 -", differs: "exit code 1"}, // 255
	{line: l4 + " TCP:127.0.0.1:{dead}", client: "tcp:127.0.0.1:{port}", send: "ping", keep: true},
	{line: l4 + " TCP:127.0.0.1:{dead},retry=1,interval=0.1", client: "tcp:127.0.0.1:{port}", keep: true},
	{line: "TCP:127.0.0.1:{dead} -"},
	{line: "TCP:127.0.0.1:{dead},retry=2,interval=0.05 -"},
	{line: "TCP:127.0.0.1:{dead},connect-timeout=1 -"},
	{line: "TCP6:[::1]:{dead} -"},
	{line: "TCP:no-such-name.invalid:80 -"},
	{line: "UNIX-CONNECT:{dir}/none -"},
	{line: "ABSTRACT-CONNECT:shunt-none-{port} -"},
	{line: "TCP-LISTEN:{port},bind=192.0.2.1 -"},
	{line: "TCP:{tcp},bind=192.0.2.1 -"},
	{line: "TCP-LISTEN:{port},accept-timeout=0.2,bind=127.0.0.1 -"},
	{line: l4 + ",range=10.0.0.0/8,accept-timeout=0.6 TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping", keep: true},
	{line: l4 + ",range=127.0.0.0/8 TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping"},
	{line: l4 + ",range=127.0.0.1:255.255.255.255 TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping"},
	{line: "TCP6-LISTEN:{port},reuseaddr,range=[::1]/128 TCP:{tcp}", client: "tcp:[::1]:{port}", send: "ping"},
	{line: l4 + ",lowport,accept-timeout=0.6 TCP:{tcp}", client: "tcp:127.0.0.1:{port}", keep: true},
	{line: l4 + ",sourceport=1,accept-timeout=0.6 TCP:{tcp}", client: "tcp:127.0.0.1:{port}", keep: true},

	// fork.
	{line: l4 + ",fork TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping", again: true, stop: true},
	{line: l4 + ",fork,max-children=1 TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping", again: true, stop: true},
	{line: l4 + ",fork,backlog=3 TCP:127.0.0.1:{dead}", client: "tcp:127.0.0.1:{port}", keep: true, again: true, stop: true},
	{line: "UNIX-LISTEN:{dir}/l,fork TCP:{tcp}", client: "unix:{dir}/l", send: "ping", again: true, stop: true},
	{line: "-u - TCP-LISTEN:{port},fork,reuseaddr", client: "tcp:127.0.0.1:{port}", stdin: "", stop: true},
	{line: "-U - TCP-LISTEN:{port},fork,reuseaddr", client: "tcp:127.0.0.1:{port}", send: "to stdout\n", again: true, stop: true},

	// UNIX, both ways.
	{line: "UNIX-LISTEN:{dir}/l UNIX-CONNECT:{unix}", client: "unix:{dir}/l", send: "ping"},
	{line: "UNIX-L:{dir}/l TCP:{tcp}", client: "unix:{dir}/l", send: "ping", service: "late"},
	{line: l4 + " UNIX:{unix}", client: "tcp:127.0.0.1:{port}", send: "ping"},
	{line: l4 + " UNIX-CLIENT:{unix}", client: "tcp:127.0.0.1:{port}", send: "ping", service: "greet"},
	{line: l4 + " ABSTRACT-CONNECT:{abs}", client: "tcp:127.0.0.1:{port}", send: "ping"},
	{line: "ABSTRACT-LISTEN:shunt-l-{port} TCP:{tcp}", client: "abstract:shunt-l-{port}", send: "ping"},
	{line: "UNIX-LISTEN:{dir}/l TCP:{tcp}", client: "unix:{dir}/l", send: "ping", look: modeOf("l")},
	{line: "UNIX-LISTEN:{dir}/l,mode=600 TCP:{tcp}", client: "unix:{dir}/l", send: "ping", look: modeOf("l")},
	{line: "UNIX-LISTEN:{dir}/l,perm=0666,user=nobody TCP:{tcp}", client: "unix:{dir}/l", send: "ping", look: modeOf("l")},
	{line: "UNIX-LISTEN:{dir}/l,umask=077,group=daemon TCP:{tcp}", client: "unix:{dir}/l", send: "ping", look: modeOf("l")},
	{line: "UNIX-LISTEN:{dir}/l -", pre: makeFile},
	{line: "UNIX-LISTEN:{dir}/l,unlink-early TCP:{tcp}", client: "unix:{dir}/l", send: "ping", pre: makeSocket},
	{line: "UNIX-LISTEN:{dir}/l,unlink-close=0 TCP:{tcp}", client: "unix:{dir}/l", send: "ping"},
	{line: "UNIX-LISTEN:{dir}/l,fork,unlink-close=0 TCP:{tcp}", client: "unix:{dir}/l", send: "ping", stop: true},
	{line: "UNIX-LISTEN:'{dir}/a,b' TCP:{tcp}", client: "unix:{dir}/a,b", send: "ping"},
	{line: "UNIX-LISTEN:{dir}/a\\,b TCP:{tcp}", client: "unix:{dir}/a,b", send: "ping"},
	{line: "UNIX-LISTEN:\"{dir}/a,b\" TCP:{tcp}", client: "unix:{dir}/a,b", send: "ping"},

	{line: "UNIX-CONNECT:{unix},bind={dir}/mine -", stdin: "x"},
	{line: l4 + " UNIX:{unix},bind={dir}/mine", client: "tcp:127.0.0.1:{port}", send: "ping", differs: "files left []"},
	{line: l4 + ",fork UNIX-CONNECT:{unix},bind={dir}/mine", client: "tcp:127.0.0.1:{port}", send: "ping", stop: true},
	{line: "UNIX-LISTEN:{dir}/l,unlink-late,accept-timeout=0.3 -"},
	{line: "UNIX-LISTEN:{dir}/l,user=65534,group=1,mode=0660 TCP:{tcp}", client: "unix:{dir}/l", send: "ping", look: modeOf("l")},
	{line: "UNIX-LISTEN:{dir}/no/such -"},

	// STDIO.
	{line: "- TCP:{tcp}", stdin: "from stdin\n"},
	{line: "STDIO TCP:{tcp}", stdin: "from stdin\n"},
	{line: "TCP:{tcp} -", stdin: "from stdin\n"},
	{line: "- UNIX:{unix}", stdin: "from stdin\n", service: "late"},
	{line: "-u TCP:{tcp} -", service: "greet"},
	{line: "-u - TCP:{tcp}", stdin: "one way", service: "sink"},
	{line: "-U - TCP:{tcp}", stdin: "not read", service: "greet"},
	{line: "TCP-LISTEN:{port},reuseaddr -", stdin: "from stdin\n", client: "tcp:127.0.0.1:{port}", send: "from the client\n"},
	{line: "- TCP-LISTEN:{port},reuseaddr", stdin: "from stdin\n", client: "tcp:127.0.0.1:{port}", send: "from the client\n"},
	{line: "- UNIX-LISTEN:{dir}/l", stdin: "from stdin\n", client: "unix:{dir}/l", send: "from the client\n"},
	{line: "FD:0 TCP:{tcp}", service: "greet", stdin: "x"},
	{line: "-T 0.3 TCP:{tcp} -,ignoreeof", stdin: "x", service: "sink"},
	{line: "-T 0.5 -,ignoreeof TCP:{tcp}", stdin: "x"},
	{line: l4 + ",ignoreeof TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "x", service: "greet"},
	{line: "-t 0.3 " + l4 + " TCP:{tcp},shut-none", client: "tcp:127.0.0.1:{port}", send: "x", service: "late"},
	{line: l4 + " TCP:{tcp},shut-down", client: "tcp:127.0.0.1:{port}", send: "x", service: "late"},
	{line: l4 + " TCP:{tcp},shut-close", client: "tcp:127.0.0.1:{port}", send: "x", service: "late", differs: "exit code 0"},
	{line: l4 + ",end-close TCP:{tcp},end-close", client: "tcp:127.0.0.1:{port}", send: "x"},

	// Connect to connect, listen to listen.
	{line: "-t 0.3 TCP:{tcp} UNIX:{unix}", service: "greet"},
	{line: "-u TCP:{tcp} TCP:127.0.0.1:{dead}", service: "greet"},

	{line: l4 + ",so-bindtodevice=no-such-dev TCP:{tcp}"},
	{line: "TCP:{tcp},so-bindtodevice=no-such-dev -"},
	{line: "-s " + l4 + ",so-bindtodevice=no-such-dev TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping"},

	// Wrong command lines.
	{line: "FOO:1 -"},
	{line: "TCP:h -"},
	{line: "TCP-LISTEN:1:2 -"},
	{line: "TCP-LISTEN:{port},nosuchoption -"},
	{line: "TCP:127.0.0.1:{dead},backlog=3 -"},
	{line: "TCP:127.0.0.1:{dead},umask=22 -"},
	{line: "UNIX-CONNECT:{dir}/x,nodelay -"},
	{line: "TCP-LISTEN:{port},backlog=x -"},
	{line: "TCP-LISTEN:{port},max-children=2 -"},
	{line: "TCP:127.0.0.1:{dead},pf=ip7 -"},
	{line: "TCP:127.0.0.1:{dead},su=no-such-user -"},
	{line: "TCP4:[::1]:{dead} -"},
	{line: "TCP6:127.0.0.1:{dead} -"},
	{line: "UNIX-LISTEN:{dir}/l,mode=9 -"},
	{line: "TCP:127.0.0.1:{dead},linger=x -"},
	{line: "TCP-LISTEN:nosuchservice -"},
	{line: "-Z - -"},
	{line: "-"},
	{line: "- - -"},
}

func makeFile(t *testing.T, dir string) {
	if err := os.WriteFile(filepath.Join(dir, "l"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

func makeSocket(t *testing.T, dir string) {
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "l"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	ln.Close()
}

// modeOf looks at the socket's file.
func modeOf(name string) func(*testing.T, *socatRun) string {
	return func(t *testing.T, r *socatRun) string {
		st := syscall.Stat_t{}
		if err := syscall.Stat(filepath.Join(r.dir, name), &st); err != nil {
			return "gone"
		}
		return fmt.Sprintf("mode %o, user %d, group %d", st.Mode&0o7777, st.Uid, st.Gid)
	}
}

// realSocat returns Debian's socat and shunt.
func realSocat(t *testing.T) (socat, shunt string) {
	t.Helper()
	NeedRoot(t)
	socat = NeedProgram(t, "socat")
	shunt, err := Build()
	if err != nil {
		t.Fatal(err)
	}
	return socat, shunt
}

func TestShuntDoesWhatSocatDoes(t *testing.T) {
	socat, shunt := realSocat(t)
	if len(socatCases) < 60 {
		t.Errorf("only %d command lines", len(socatCases))
	}
	for i := range socatCases {
		c := &socatCases[i]
		t.Run(strings.NewReplacer("/", "_", " ", "_").Replace(c.line), func(t *testing.T) {
			t.Parallel()
			want, got := c.observe(t, socat), c.observe(t, shunt)
			switch {
			case c.differs == "" && got != want:
				t.Errorf("%s\nsocat: %s\nshunt: %s", c.line, want, got)
			case c.differs != "" && (!strings.Contains(got, c.differs) || strings.Contains(want, c.differs)):
				t.Errorf("%s\nsocat: %s\nshunt: %s\nshunt alone should have %q", c.line, want, got, c.differs)
			}
		})
	}
}

// TestSocatMessages looks for what scripts wait for in the log.
func TestSocatMessages(t *testing.T) {
	socat, shunt := realSocat(t)
	for _, bin := range []string{socat, shunt} {
		t.Run(filepath.Base(bin), func(t *testing.T) {
			for level, want := range map[string][]string{
				"":     nil,
				"-d":   nil,
				"-d2":  {`N listening on AF=2 127\.0\.0\.1:\d+`, `N accepting connection from AF=2 127\.0\.0\.1:\d+ on AF=2 127\.0\.0\.1:\d+`, `N opening connection to AF=2 127`, `N successfully connected from local address AF=2 127`, `N starting data transfer loop with FDs \[\d+,\d+\] and \[\d+,\d+\]`, `N socket 1 .*is at EOF`, `N exiting with status 0`},
				"-dd3": {`I permitting connection from AF=2`},
			} {
				line := strings.ReplaceAll(strings.ReplaceAll(level, "d2", "d -d"), "dd3", "d -d -d") + " -lpname " + l4 + " TCP:{tcp}"
				c := socatCase{line: line, client: "tcp:127.0.0.1:{port}", send: "x"}
				_, r := c.observeRun(t, bin)
				out := r.stderr.String()
				if len(want) == 0 && out != "" {
					t.Errorf("%q: %s", level, out)
				}
				for _, w := range want {
					if !regexp.MustCompile(`(?m)^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d name\[\d+\] ` + w).MatchString(out) {
						t.Errorf("%q: no %q in\n%s", level, w, out)
					}
				}
			}
		})
	}
}
