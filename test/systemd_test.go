//go:build linux

package test

import (
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

	"golang.org/x/sys/unix"

	. "shunt/test/harness"
)

// activate is a service manager's part of socket activation: LISTEN_PID is
// the process that the shell becomes.
var activate = []string{"sh", "-c", `LISTEN_PID=$$ exec "$@"`, "sh"}

// handOut returns the environment and the descriptors of sockets with names.
func handOut(t *testing.T, names string, sockets ...interface{ File() (*os.File, error) }) (env []string, files []*os.File) {
	t.Helper()
	for _, s := range sockets {
		f, err := s.File()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		files = append(files, f)
	}
	return []string{fmt.Sprintf("LISTEN_FDS=%d", len(files)), "LISTEN_FDNAMES=" + names}, files
}

func TestSocketActivation(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		t.Parallel()
		upstream := Serve(t, echo)
		cfg := Configure(p, "", upstream.Addr)
		first := cfg.Listeners[0]
		cfg.Listeners = nil
		var sockets []interface{ File() (*os.File, error) }
		// One is found by its name, the other, which has none of ours, by its address.
		for _, name := range []string{"named", "other"} {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			sockets = append(sockets, ln.(*net.TCPListener))
			l := first
			l.Name, l.Listen = name, ln.Addr().String()
			cfg.Listeners = append(cfg.Listeners, l)
		}
		// A client that comes before shunt does waits.
		early := DialFrom(t, nil, cfg.Listeners[0].Listen)
		env, files := handOut(t, "named:shunt.socket", sockets...)
		s := StartShunt(t, cfg, Launch{Prefix: activate, Env: env, Files: files, LogFile: true})
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", s.Pid()))
		if err != nil || !strings.Contains(string(b), "LISTEN_FDS=2") {
			t.Fatalf("the activator set %q, %v", b, err)
		}
		if err := converse(early, 3, 100); err != nil {
			t.Fatalf("the early client: %v", err)
		}
		early.Close()
		talk := func() {
			t.Helper()
			for _, l := range cfg.Listeners {
				if err := exchangeEcho(l.Listen, 20, 1000); err != nil {
					t.Fatal(err)
				}
			}
		}
		bypassed := func() {
			t.Helper()
			if !p.Bypass() {
				return
			}
			Until(t, 5*time.Second, "bypassed bytes", func() error {
				m, err := s.Metrics()
				if err == nil && m.Sum("shunt_bytes_total", "path", "bypass") < 30_000 {
					err = fmt.Errorf("%v of 80,000; declined: %v", m.Sum("shunt_bytes_total", "path", "bypass"), m.Declined())
				}
				return err
			})
		}
		talk()
		bypassed()
		// The sockets stay through a reload with other settings, and through an upgrade.
		for i := range cfg.Listeners {
			cfg.Listeners[i].Extra = map[string]string{"idle_timeout": `"10m"`}
		}
		if err := errors.Join(s.Rewrite(cfg), s.Reload(10*time.Second)); err != nil {
			t.Fatal(err)
		}
		talk()
		former, err := s.Upgrade(20 * time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if err := Gone(former, 10*time.Second); err != nil {
			t.Fatal(err)
		}
		talk()
		bypassed()
	})
}

func TestBadInheritedSocketsAreErrors(t *testing.T) {
	if testing.Short() {
		t.Skip("end-to-end test, not run with -short")
	}
	bin, err := Build()
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	second, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	conn, err := net.Dial("tcp", tcp.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	un, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer un.Close()
	config := filepath.Join(t.TempDir(), "c.toml")
	text := fmt.Sprintf("[[listener]]\nname = \"web\"\nlisten = %q\nupstream = \"127.0.0.1:1\"\nbypass = \"off\"\n", tcp.Addr())
	if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	type filer = interface{ File() (*os.File, error) }
	for what, c := range map[string]struct {
		names   string
		sockets []filer
		want    string
	}{
		"nobody's":      {"nobody", []filer{second.(filer)}, `"nobody" at ` + second.Addr().String() + ": no listener has this name or this address"},
		"two for one":   {"web:x", []filer{second.(filer), tcp.(filer)}, `listener "web" has one already`},
		"a connection":  {"web", []filer{conn.(filer)}, "a connection, not a listening socket"},
		"datagrams":     {"web", []filer{udp.(filer)}, "not a TCP or UNIX stream socket"},
		"a UNIX socket": {"web", []filer{un.(filer)}, "of another type"},
		"no socket":     {"web", []filer{self{}}, "SO_TYPE"},
	} {
		env, files := handOut(t, c.names, c.sockets...)
		cmd := exec.Command(activate[0], append(activate[1:], bin, "run", "--config", config)...)
		cmd.Env = append(os.Environ(), env...)
		cmd.ExtraFiles = files
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		text := strings.ReplaceAll(string(out), `\"`, `"`)
		if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(text, c.want) {
			t.Errorf("%s: %v, want exit code 1 and %q:\n%s", what, err, c.want, out)
		}
	}
}

// self is a descriptor that is no socket.
type self struct{}

func (self) File() (*os.File, error) { return os.Open(os.Args[0]) }

// manager is a service manager's notification socket.
type manager struct {
	t    *testing.T
	conn *net.UnixConn
}

func newManager(t *testing.T) (*manager, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	raw, err := conn.SyscallConn()
	if err == nil {
		cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSCRED, 1) })
		err = errors.Join(cerr, err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return &manager{t, conn}, path
}

// next returns the next message and who sent it.
func (m *manager) next() (text string, pid int) {
	m.t.Helper()
	buf, oob := make([]byte, 4096), make([]byte, 1024)
	_ = m.conn.SetReadDeadline(time.Now().Add(15 * time.Second))
	n, on, _, _, err := m.conn.ReadMsgUnix(buf, oob)
	if err != nil {
		m.t.Fatalf("no message for the service manager: %v", err)
	}
	cs, err := unix.ParseSocketControlMessage(oob[:on])
	if err != nil || len(cs) == 0 {
		m.t.Fatalf("no credentials: %v", err)
	}
	cred, err := unix.ParseUnixCredentials(&cs[0])
	if err != nil {
		m.t.Fatal(err)
	}
	return string(buf[:n]), int(cred.Pid)
}

// wait returns the next message that matches; in between only pings and status lines may come.
func (m *manager) wait(pattern string) (text string, pid int) {
	m.t.Helper()
	idle := regexp.MustCompile(`^(STATUS=[^\n]*|WATCHDOG=1|\n)*$`)
	for {
		text, pid = m.next()
		if regexp.MustCompile(pattern).MatchString(text) {
			return text, pid
		}
		if !idle.MatchString(text) {
			m.t.Fatalf("the service manager is told %q, want %s", text, pattern)
		}
	}
}

func TestServiceManagerIsTold(t *testing.T) {
	OnPaths(t, []Path{Off}, func(t *testing.T, p Path) {
		m, path := newManager(t)
		f := Open(t, p, Serve(t, echo).Addr, WithLaunch(Launch{LogFile: true, Env: []string{
			"NOTIFY_SOCKET=" + path, "WATCHDOG_USEC=400000"}}))
		first := f.Shunt.Pid()
		from := func(got, want int) {
			t.Helper()
			if got != want {
				t.Errorf("sent by process %d, want %d", got, want)
			}
		}
		_, pid := m.wait(`^READY=1\nSTATUS=serving: 0 live connections`)
		from(pid, first)
		c := f.Dial(t)
		if err := converse(c, 1, 100); err != nil {
			t.Fatal(err)
		}
		_, pid = m.wait(`STATUS=serving: 1 live connections, 1 accepted, 1 listeners`)
		from(pid, first)
		for range 3 {
			_, pid = m.wait(`WATCHDOG=1`)
			from(pid, first)
		}
		f.Shunt.Signal(syscall.SIGHUP)
		m.wait(`^RELOADING=1\nMONOTONIC_USEC=[0-9]+$`)
		m.wait(`^READY=1\n`)
		if err := f.Shunt.RewriteText("bad"); err != nil {
			t.Fatal(err)
		}
		f.Shunt.Signal(syscall.SIGHUP)
		m.wait(`^RELOADING=1\n`)
		m.wait(`^READY=1\n`) // it serves on
		if err := f.Shunt.Rewrite(f.Shunt.Config); err != nil {
			t.Fatal(err)
		}
		// An upgrade: the old process names the new one, which alone speaks from there on.
		if _, err := f.Shunt.Upgrade(20 * time.Second); err != nil {
			t.Fatal(err)
		}
		second := f.Shunt.Pid()
		_, pid = m.wait(fmt.Sprintf("^MAINPID=%d$", second))
		from(pid, first)
		_, pid = m.wait(`^READY=1\n`)
		from(pid, second)
		for range 3 {
			_, pid = m.wait(`WATCHDOG=1`)
			from(pid, second)
		}
		c.Close()
		if err := Gone(first, 10*time.Second); err != nil {
			t.Error(err)
		}
		c = f.Dial(t)
		if err := converse(c, 1, 100); err != nil {
			t.Fatal(err)
		}
		f.Shunt.Signal(syscall.SIGTERM)
		_, pid = m.wait(`^STOPPING=1$`)
		from(pid, second)
		m.wait(`WATCHDOG=1`) // while it drains, too
		c.Close()
		if err := Gone(second, 10*time.Second); err != nil {
			t.Error(err)
		}
		if _, err := io.WriteString(c, "x"); err == nil {
			t.Error("the connection outlived its process")
		}
	})
}

func TestTwoShuntsOnOneListeningSocket(t *testing.T) {
	// What an upgrade is for a moment: both have announced the address, and both accept. A client that
	// one has enrolled and the other accepted is copied, for a reason that says so.
	EachBypass(t, func(t *testing.T, p Path) {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		cfg := Configure(p, ln.Addr().String(), Serve(t, echo).Addr)
		env, files := handOut(t, "main", ln.(*net.TCPListener))
		l := Launch{Prefix: activate, Env: env, Files: files}
		shunts := []*Shunt{StartShunt(t, cfg, l), StartShunt(t, cfg, l)}
		declined := map[string]int{}
		var accepted, bypassed, active float64
		look := func() error {
			declined, accepted, bypassed, active = map[string]int{}, 0, 0, 0
			for _, s := range shunts {
				m, err := s.Metrics()
				if err != nil {
					return err
				}
				for reason, n := range m.Declined() {
					declined[reason] += n
				}
				accepted += m.Sum("shunt_connections_total")
				bypassed += m.Sum("shunt_bytes_total", "path", "bypass")
				active += m.Sum("shunt_connections_active")
			}
			return nil
		}
		// At the same time, so that both are busy accepting.
		errs := make(chan error, 8)
		for range cap(errs) {
			go func() {
				for range 10 {
					if err := exchangeEcho(ln.Addr().String(), 5, 1000); err != nil {
						errs <- err
						return
					}
				}
				errs <- nil
			}()
		}
		for range cap(errs) {
			if err := <-errs; err != nil {
				t.Fatal(err)
			}
		}
		Until(t, 5*time.Second, "the ends", func() error {
			err := look()
			if err == nil && (accepted != 80 || active != 0) {
				err = fmt.Errorf("%v accepted, %v active", accepted, active)
			}
			return err
		})
		for reason := range declined {
			if reason != "busy" && reason != "downstream-not-local" {
				t.Errorf("declined: %v", declined)
			}
		}
		t.Logf("80 connections, declined %v, %v bytes bypassed", declined, bypassed)
	})
}
