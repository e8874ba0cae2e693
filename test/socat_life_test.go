//go:build linux

package test

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	. "shunt/test/harness"
)

func TestSocatConnectTimeoutEndsABlackHole(t *testing.T) {
	socat, shunt := realSocat(t)
	hole := BlackHole(t)
	for _, bin := range []string{socat, shunt} {
		for _, line := range []string{
			"TCP:" + hole + ",connect-timeout=0.3 -",
			"TCP:" + hole + ",connect-timeout=0.2,retry=1,interval=0.05 -",
		} {
			c := socatCase{line: line}
			got, r := c.observeRun(t, bin)
			if !strings.HasPrefix(got, "exit code 1;") || !strings.Contains(r.stderr.String(), "Connection timed out") {
				t.Errorf("%s %s: %s: %s", filepath.Base(bin), line, got, r.stderr.String())
			}
		}
		c := socatCase{line: l4 + " TCP:" + hole + ",connect-timeout=0.3", client: "tcp:127.0.0.1:{port}", send: "x", keep: true}
		if got := c.observe(t, bin); !strings.HasPrefix(got, `client: "", `) || strings.Contains(got, "no end") || !strings.Contains(got, "exit code 1;") {
			t.Errorf("%s: %s", filepath.Base(bin), got)
		}
	}
}

// TestSocatSyslog gives each program a /dev/log of its own.
func TestSocatSyslog(t *testing.T) {
	socat, shunt := realSocat(t)
	NeedProgram(t, "unshare")
	const script = `touch "$0/null" && mount --bind /dev/null "$0/null" && mount -t tmpfs none /dev && touch /dev/null /dev/log &&
		mount --bind "$0/null" /dev/null && mount --bind "$0/log" /dev/log && exec "$@"`
	dead := Port(t, nil)
	for _, flags := range []string{"-ly", "-lylocal3", "-d -d -lyuser -lpname"} {
		var got [2]string
		for i, bin := range []string{socat, shunt} {
			dir := shortDir(t)
			log, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: dir + "/log", Net: "unixgram"})
			if err != nil {
				t.Fatal(err)
			}
			defer log.Close()
			args := append([]string{"-m", "sh", "-c", script, dir, bin}, strings.Fields(flags)...)
			p := Run(t, nil, exec.Command("unshare", append(args, fmt.Sprintf("TCP:127.0.0.1:%d", dead), "-")...))
			// The error is the last but the line about the exit.
			want := regexp.MustCompile(`E connect\(.*: (Connection refused)`)
			var all []string
			log.SetReadDeadline(time.Now().Add(10 * time.Second))
			for b := make([]byte, 4096); ; {
				n, err := log.Read(b)
				if err != nil {
					t.Fatalf("%s %s: %v; so far %q; it wrote %q", filepath.Base(bin), flags, err, all, p.Output())
				}
				all = append(all, string(b[:n]))
				if want.Match(b[:n]) {
					break
				}
			}
			// <priority>date name[pid]: E connect(...): ...
			m := regexp.MustCompile(`^(<\d+>)\w{3} [ \d]\d \d\d:\d\d:\d\d (\w+)\[\d+\]: (E connect\().*?(Connection refused)\s*$`).FindStringSubmatch(all[len(all)-1])
			if m == nil {
				t.Fatalf("%s %s: %q", filepath.Base(bin), flags, all)
			}
			got[i] = strings.Replace(strings.Join(m[1:], " "), filepath.Base(bin), "PROGRAM", 1)
			if code, err := p.ExitCode(5 * time.Second); err != nil || code != 1 || p.Output() != "" {
				t.Errorf("%s %s: exit code %d, %v: %s", filepath.Base(bin), flags, code, err, p.Output())
			}
		}
		if got[0] != got[1] {
			t.Errorf("%s\nsocat: %s\nshunt: %s", flags, got[0], got[1])
		}
	}
}

// TestSocatRunsWithoutSyslog has no /dev/log, as containers.
func TestSocatRunsWithoutSyslog(t *testing.T) {
	_, shunt := realSocat(t)
	NeedProgram(t, "unshare")
	svc := startService(t, "tcp4", "127.0.0.1:0", "greet")
	cmd := exec.Command("unshare", "-m", "sh", "-c",
		`mount -t tmpfs none /run && touch "$0" && mount --bind /dev/null "$0" && mount -t tmpfs none /dev && touch /dev/null && mount --bind "$0" /dev/null && exec "$@"`,
		shortDir(t)+"/null", shunt, "-d", "-d", "-ly", "-u", "TCP:"+svc.addr.String(), "STDIO")
	p := Run(t, nil, cmd)
	code, err := p.ExitCode(5 * time.Second)
	if err != nil || code != 0 || !strings.Contains(p.Output(), "hello from the service") || strings.Count(p.Output(), " W no syslog") != 1 {
		t.Errorf("exit code %d, %v: %s", code, err, p.Output())
	}
}

// TestSocatSignals compares exit codes, and what is logged.
func TestSocatSignals(t *testing.T) {
	socat, shunt := realSocat(t)
	svc := startService(t, "tcp4", "127.0.0.1:0", "echo")
	// Children inherit what is ignored, and socat alone doesn't mind: nohup and shells' background jobs ignore some.
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT)
	defer signal.Stop(caught)
	for _, fork := range []string{"", ",fork"} {
		for _, sig := range []syscall.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM} {
			for _, bin := range []string{socat, shunt} {
				port := Port(t, nil)
				p := socatFork(t, bin, "-d", "-d", "-lpname", fmt.Sprintf("TCP-LISTEN:%d,bind=127.0.0.1%s", port, fork), "TCP:"+svc.addr.String())
				if err := WaitListening(nil, fmt.Sprintf("127.0.0.1:%d", port), p, 10*time.Second); err != nil {
					t.Fatal(err)
				}
				p.Signal(sig)
				code, err := p.ExitCode(5 * time.Second)
				if err != nil || code != 128+int(sig) {
					t.Errorf("%s%s, %v: exit code %d, %v", filepath.Base(bin), fork, sig, code, err)
				}
				for _, want := range []string{fmt.Sprintf(` exiting on signal %d\n`, sig), fmt.Sprintf(` N exit\(%d\)\n`, code)} {
					if !regexp.MustCompile(want).MatchString(p.Output()) {
						t.Errorf("%s%s, %v: no %q in %s", filepath.Base(bin), fork, sig, want, p.Output())
					}
				}
			}
		}
	}
}

// TestSocatStatistics counts copied and bypassed bytes, of live connections and of past ones.
func TestSocatStatistics(t *testing.T) {
	_, shunt := realSocat(t)
	svc := startService(t, "tcp4", "127.0.0.1:0", "echo")
	port := Port(t, nil)
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	p := socatFork(t, shunt, "--statistics", fmt.Sprintf("TCP-LISTEN:%d,bind=127.0.0.1,fork", port), "TCP:"+svc.addr.String())
	if err := WaitListening(nil, addr, p, 10*time.Second); err != nil {
		t.Fatal(err)
	}
	c := DialFrom(t, nil, addr)
	for range 10 {
		if _, err := io.WriteString(c, "ping"); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
			t.Fatal(err)
		}
	}
	said := func(n int) error {
		for _, way := range []string{"left to right", "right to left"} {
			if !strings.Contains(p.Output(), fmt.Sprintf(" I STATISTICS: %s: %d byte(s)\n", way, n)) {
				return fmt.Errorf("%s", p.Output())
			}
		}
		return nil
	}
	Until(t, 5*time.Second, "the statistics", func() error { // copied bytes are counted after they were written
		p.Signal(syscall.SIGUSR1)
		return said(40)
	})
	c.Close()
	if err := roundTrip(addr, "tcp"); err != nil {
		t.Fatal(err)
	}
	p.Signal(syscall.SIGTERM)
	if code, err := p.ExitCode(5 * time.Second); err != nil || code != 143 {
		t.Errorf("exit code %d, %v", code, err)
	}
	if err := said(44); err != nil {
		t.Error(err)
	}
}

// TestSocatLifeInTheLog compares the notices of a connection's life, numbers aside.
func TestSocatLifeInTheLog(t *testing.T) {
	socat, shunt := realSocat(t)
	number := regexp.MustCompile(`\d+`)
	for _, c := range []socatCase{
		{line: "-d -d -lpname " + l4 + " TCP:{tcp}", client: "tcp:127.0.0.1:{port}", send: "ping"},
		{line: "-d -d -lpname - TCP:{tcp}", stdin: "ping", service: "late"},
		{line: "-d -d -lpname -u TCP:{tcp} -", service: "greet"},
		{line: "-d -d -lpname UNIX-LISTEN:{dir}/l UNIX-CONNECT:{unix}", client: "unix:{dir}/l", send: "ping"},
		{line: "-d -d -lpname -T 0.3 " + l4 + " TCP:{tcp}", client: "tcp:127.0.0.1:{port}", keep: true},
	} {
		var got [2]string
		for i, bin := range []string{socat, shunt} {
			_, r := c.observeRun(t, bin)
			for _, line := range strings.Split(strings.ReplaceAll(r.stderr.String(), r.dir, "DIR"), "\n") {
				if _, text, ok := strings.Cut(line, "] N "); ok {
					if strings.Contains(text, "AF=1") { // an unbound socket's name is written in several ways
						text = regexp.MustCompile(`(from|address) AF=1 .*?( on |$)`).ReplaceAllString(text, "$1 AF=1$2")
					}
					got[i] += number.ReplaceAllString(text, "N") + "\n"
				}
			}
		}
		if got[0] != got[1] {
			t.Errorf("%s\nsocat:\n%s\nshunt:\n%s", c.line, got[0], got[1])
		}
	}
}

func TestSocatTellsOfAMissingSocketOnce(t *testing.T) {
	_, shunt := realSocat(t)
	c := socatCase{line: "-d -d -d -d UNIX-LISTEN:{dir}/l UNIX-CONNECT:{dir}/none", client: "unix:{dir}/l", keep: true}
	got, r := c.observeRun(t, shunt)
	if !strings.Contains(got, "exit code 1") || strings.Count(r.stderr.String(), "o such file or directory") != 1 {
		t.Errorf("%s: %s", got, r.stderr.String())
	}
}

// TestSocatUnixDialsShareAProcess opens many connections at once, whose dials change what the process has once.
func TestSocatUnixDialsShareAProcess(t *testing.T) {
	_, shunt := realSocat(t)
	dir := shortDir(t)
	svc := startService(t, "unix", dir+"/s", "greet")
	port := Port(t, nil)
	p := Run(t, nil, exec.Command(shunt, fmt.Sprintf("TCP4-LISTEN:%d,bind=127.0.0.1,fork,reuseaddr", port),
		"UNIX-CONNECT:"+svc.addr.String()+",umask=0077,bind="+dir+"/b"))
	umask := func() string {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Pid()))
		if err != nil {
			t.Fatal(err)
		}
		m := regexp.MustCompile(`(?m)^Umask:\s*(\d+)$`).FindSubmatch(b)
		if m == nil {
			t.Fatalf("no umask in %s", b)
		}
		return string(m[1])
	}
	before := umask()
	if before == "0077" {
		t.Fatal("the test has that umask itself")
	}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			for range 10 {
				var c net.Conn
				err := Poll(5*time.Second, func() (err error) {
					c, err = net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
					return err
				})
				if err != nil {
					t.Error(err)
					return
				}
				c.SetDeadline(time.Now().Add(10 * time.Second))
				c.(*net.TCPConn).CloseWrite()
				if b, err := io.ReadAll(c); err != nil || !strings.Contains(string(b), "hello from the service") {
					t.Errorf("%q, %v", b, err)
				}
				c.Close()
			}
		})
	}
	wg.Wait()
	if got := umask(); got != before {
		t.Errorf("umask %s, it was %s", got, before)
	}
}

// TestSocatUnixBindSurvivesARefusal has a service that isn't there yet, and a file of somebody else's.
func TestSocatUnixBindSurvivesARefusal(t *testing.T) {
	_, shunt := realSocat(t)
	dir := shortDir(t)
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: dir + "/s", Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	dead.Close()
	port := Port(t, nil)
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	p := Run(t, nil, exec.Command(shunt, fmt.Sprintf("TCP4-LISTEN:%d,bind=127.0.0.1,fork,reuseaddr", port),
		"UNIX-CONNECT:"+dir+"/s,bind="+dir+"/b"))
	if err := WaitListening(nil, addr, p, 10*time.Second); err != nil {
		t.Fatal(err)
	}
	answer := func() string {
		c := DialFrom(t, nil, addr)
		defer c.Close()
		b, _ := io.ReadAll(c)
		return string(b)
	}
	if got := answer(); got != "" {
		t.Errorf("%q from nobody", got)
	}
	if err := os.Remove(dir + "/s"); err != nil {
		t.Fatal(err)
	}
	startService(t, "unix", dir+"/s", "greet")
	if got := answer(); !strings.Contains(got, "hello from the service") {
		t.Errorf("after a refusal: %q; it wrote %s", got, p.Output())
	}
	if err := os.WriteFile(dir+"/b", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := answer(); got != "" {
		t.Errorf("%q with a name that is taken", got)
	}
	if _, err := os.Lstat(dir + "/b"); err != nil {
		t.Errorf("somebody else's file: %v", err)
	}
}

// TestSocatDefersAccept has no connection before the first byte.
func TestSocatDefersAccept(t *testing.T) {
	socat, shunt := realSocat(t)
	for _, bin := range []string{socat, shunt} {
		svc := startService(t, "tcp4", "127.0.0.1:0", "echo")
		port := Port(t, nil)
		p := socatFork(t, bin, "-d", "-d", fmt.Sprintf("TCP-LISTEN:%d,bind=127.0.0.1,defer-accept=30", port), "TCP:"+svc.addr.String())
		addr := fmt.Sprintf("127.0.0.1:%d", port)
		if err := WaitListening(nil, addr, p, 10*time.Second); err != nil {
			t.Fatal(err)
		}
		conn := DialFrom(t, nil, addr)
		if p.Wait(300*time.Millisecond) == nil || strings.Contains(p.Output(), "accepting connection") {
			t.Errorf("%s accepts a silent connection: %s", filepath.Base(bin), p.Output())
		}
		io.WriteString(conn, "ping")
		conn.CloseWrite()
		if b, err := io.ReadAll(conn); err != nil || string(b) != "ping" {
			t.Errorf("%s: %q, %v", filepath.Base(bin), b, err)
		}
	}
}

// TestSocatOptionsOnBypassedSockets reads many options at once from the sockets of a bypassed connection.
func TestSocatOptionsOnBypassedSockets(t *testing.T) {
	_, shunt := realSocat(t)
	NeedBypass(t)
	const options = ",keepalive,keepidle=77,keepintvl=7,keepcnt=4,tos=16,ttl=33,priority=5,mark=17,user-timeout=12345,linger=7,mtudiscover=1,linger2=9,rcvbuf=50000,sndbuf=60000"
	svc := startService(t, "tcp4", "127.0.0.1:0", "echo")
	port, admin := Port(t, nil), AdminSocket(shortDir(t))
	p := socatFork(t, shunt, "--bypass=on", "--admin=unix:"+admin,
		fmt.Sprintf("TCP-LISTEN:%d,bind=127.0.0.1,fork%s", port, options), "TCP:"+svc.addr.String()+options)
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	if err := WaitListening(nil, addr, p, 10*time.Second); err != nil {
		t.Fatal(err)
	}
	c := DialFrom(t, nil, addr)
	for range 3 {
		io.WriteString(c, "ping")
		if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
			t.Fatal(err)
		}
	}
	if m, err := Scrape(admin); err != nil || m.Sum("shunt_bytes_total", "path", "bypass") == 0 {
		t.Errorf("not bypassed: %v", err)
	}
	accepted, dialled := socketsOf(t, p.Pid(), port)
	for what, fd := range map[string]int{"accepted": accepted, "dialled": dialled} {
		for _, o := range []struct{ level, name, want int }{
			{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1}, {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 77}, {unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 7},
			{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 4}, {unix.IPPROTO_IP, unix.IP_TOS, 16}, {unix.IPPROTO_IP, unix.IP_TTL, 33},
			{unix.SOL_SOCKET, unix.SO_PRIORITY, 5}, {unix.SOL_SOCKET, unix.SO_MARK, 17}, {unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 12345},
			{unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, 1}, {unix.IPPROTO_TCP, unix.TCP_LINGER2, 9}, {unix.SOL_SOCKET, unix.SO_RCVBUF, 100000}, {unix.SOL_SOCKET, unix.SO_SNDBUF, 120000},
		} {
			if got, err := unix.GetsockoptInt(fd, o.level, o.name); err != nil || got != o.want {
				t.Errorf("%s: option %d:%d is %d, %v; want %d", what, o.level, o.name, got, err, o.want)
			}
		}
		if l, err := getLinger(fd); err != nil || l != [2]int32{1, 7} {
			t.Errorf("%s: linger %v, %v", what, l, err)
		}
	}
}

// TestSocatOptionsComparedWithSocats reads options whose value depends on the kernel from both programs' sockets.
func TestSocatOptionsComparedWithSocats(t *testing.T) {
	socat, shunt := realSocat(t)
	const l6 = "TCP6-LISTEN:{port},bind=[::1],reuseaddr"
	number := func(level, name int) func(fd int) string {
		return func(fd int) string {
			n, err := unix.GetsockoptInt(fd, level, name)
			return fmt.Sprint(n, err)
		}
	}
	congestion := func(fd int) string {
		s, err := unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION)
		return fmt.Sprint(s, err)
	}
	for _, o := range []struct {
		option string
		six    bool
		look   func(fd int) string
	}{
		{"mss=700", false, number(unix.IPPROTO_TCP, unix.TCP_MAXSEG)},
		{"mss-late=700", false, number(unix.IPPROTO_TCP, unix.TCP_MAXSEG)},
		{"maxseg=900", true, number(unix.IPPROTO_TCP, unix.TCP_MAXSEG)},
		{"ipv6-tclass=8", true, number(unix.IPPROTO_IPV6, unix.IPV6_TCLASS)},
		{"unicast-hops=9", true, number(unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS)},
		{"setsockopt-string=6:13:reno", false, congestion},
		{"debug", false, number(unix.SOL_SOCKET, unix.SO_DEBUG)},
	} {
		t.Run(o.option, func(t *testing.T) {
			t.Parallel()
			var got [2][]string
			for i, bin := range []string{socat, shunt} {
				c := socatCase{line: l4 + "," + o.option + " TCP:{tcp}," + o.option, client: "tcp:127.0.0.1:{port}", send: "x"}
				if o.six {
					c = socatCase{line: l6 + "," + o.option + " TCP6:{tcp6}," + o.option, client: "tcp:[::1]:{port}", send: "x"}
				}
				if bin == shunt {
					c.line = "--bypass=off " + c.line
				}
				c.look = func(t *testing.T, r *socatRun) string {
					port, _ := strconv.Atoi(r.port)
					accepted, dialled := socketsOf(t, r.proc.Pid(), port)
					got[i] = append(got[i], "accepted: "+o.look(accepted), "dialled: "+o.look(dialled))
					return ""
				}
				if seen := c.observe(t, bin); !strings.Contains(seen, "exit code 0") {
					t.Errorf("%s: %s", filepath.Base(bin), seen)
				}
			}
			if fmt.Sprint(got[0]) != fmt.Sprint(got[1]) {
				t.Errorf("socat: %q\nshunt: %q", got[0], got[1])
			}
		})
	}
}

// TestSocatQuickAck reads the option before the first byte, which may change what the kernel says of it.
func TestSocatQuickAck(t *testing.T) {
	_, shunt := realSocat(t) // socat sets it before it connects, where it has no effect
	for _, want := range []int{0, 1} {
		svc := startService(t, "tcp4", "127.0.0.1:0", "echo")
		port, option := Port(t, nil), fmt.Sprintf(",quickack=%d", want)
		p := socatFork(t, shunt, fmt.Sprintf("TCP-LISTEN:%d,bind=127.0.0.1%s", port, option), "TCP:"+svc.addr.String()+option)
		addr := fmt.Sprintf("127.0.0.1:%d", port)
		if err := WaitListening(nil, addr, p, 10*time.Second); err != nil {
			t.Fatal(err)
		}
		DialFrom(t, nil, addr)
		Until(t, 5*time.Second, option, func() error {
			accepted, dialled := socketsOf(t, p.Pid(), port)
			for what, fd := range map[string]int{"accepted": accepted, "dialled": dialled} {
				if got, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_QUICKACK); err != nil || got != want {
					return fmt.Errorf("%s: %d, %w", what, got, err)
				}
			}
			return nil
		})
	}
}

// TestSocatEnvironment has socat's two variables about families.
func TestSocatEnvironment(t *testing.T) {
	socat, shunt := realSocat(t)
	for _, e := range []struct{ env, line, client string }{
		{"SOCAT_DEFAULT_LISTEN_IP=6", "TCP-LISTEN:{port},reuseaddr TCP:{tcp}", "tcp:[::1]:{port}"},
		{"SOCAT_DEFAULT_LISTEN_IP=4", "TCP-LISTEN:{port},reuseaddr TCP:{tcp}", "tcp:127.0.0.1:{port}"},
		{"SOCAT_PREFERRED_RESOLVE_IP=6", l4 + " TCP:localhost:{tcpport}", "tcp:127.0.0.1:{port}"},
		{"SOCAT_PREFERRED_RESOLVE_IP=0", l4 + " TCP:{tcp}", "tcp:127.0.0.1:{port}"},
	} {
		name, value, _ := strings.Cut(e.env, "=")
		if err := os.Setenv(name, value); err != nil {
			t.Fatal(err)
		}
		c := socatCase{line: "-lpname -d -d " + e.line, client: e.client, send: "ping"}
		var family [2]string
		for i, bin := range []string{socat, shunt} {
			_, r := c.observeRun(t, bin)
			for _, what := range []string{"listening on", "opening connection to"} {
				family[i] += what + " " + regexp.MustCompile(what+` (AF=\d+)`).FindString(r.stderr.String()) + "; "
			}
		}
		os.Unsetenv(name)
		if family[0] != family[1] || !strings.Contains(family[0], "AF=") {
			t.Errorf("%s: socat %s; shunt %s", e.env, family[0], family[1])
		}
	}
}
