//go:build linux

package test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	. "shunt/test/harness"
)

const nobody = 65534

var lastPrivileged atomic.Int32

// privilegedPort returns a free port below 1024, another one each time.
func privilegedPort(t *testing.T) int {
	t.Helper()
	for range 400 {
		port := 1023 - int(lastPrivileged.Add(1))
		if ln, err := net.Listen("tcp", fmt.Sprintf("0.0.0.0:%d", port)); err == nil {
			ln.Close()
			return port
		}
	}
	t.Fatal("no free port below 1024")
	return 0
}

// checkUnprivileged fails the test unless every thread of the process is
// uid's, with no group but gid and no way to a capability but those of keep.
func checkUnprivileged(t *testing.T, pid, uid, gid int, bounding bool, keep ...uintptr) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(files) < 2 {
		t.Fatalf("%d threads (%v): want several", len(files), err)
	}
	const none = "0000000000000000"
	want := map[string]string{
		"Uid": strings.Repeat(fmt.Sprintf("%d ", uid), 4), "Gid": strings.Repeat(fmt.Sprintf("%d ", gid), 4),
		"CapInh": none, "CapAmb": none, "NoNewPrivs": "1",
	}
	kept := uint64(0)
	for _, c := range keep {
		kept |= 1 << c
	}
	want["CapPrm"] = fmt.Sprintf("%016x", kept)
	want["CapEff"] = want["CapPrm"]
	if bounding {
		want["CapBnd"] = none
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
				continue // the thread has ended
			}
			t.Fatal(err)
		}
		for _, line := range strings.Split(string(b), "\n") {
			key, value, _ := strings.Cut(line, ":")
			got := strings.Join(strings.Fields(value), " ")
			if w, ok := want[key]; ok && got != strings.TrimSpace(w) {
				t.Errorf("%s: %s is %q, want %q", file, key, got, w)
			}
			if key == "Groups" && got != "" && got != fmt.Sprint(gid) {
				t.Errorf("%s: supplementary groups %s", file, got)
			}
		}
	}
}

func TestUnprivilegedUserServesEverything(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		NeedRoot(t)
		t.Parallel()
		read := make(chan struct{})
		const greeting = "slow"
		s := Serve(t, func(c *net.TCPConn) error {
			head := make([]byte, len(greeting))
			if _, err := io.ReadFull(c, head); err != nil || string(head) != greeting {
				_, werr := c.Write(head)
				if err == io.EOF || err == io.ErrUnexpectedEOF || IsReset(err) {
					return nil
				}
				return errors.Join(err, werr, ignoreReset(echo(c)))
			}
			<-read
			n, err := io.Copy(io.Discard, OnlyReader(c))
			if err == nil {
				_, err = fmt.Fprintf(c, "%d", n)
			}
			return err
		})
		cfg := Configure(p, fmt.Sprintf("127.0.0.1:%d", privilegedPort(t)), s.Addr)
		cfg.Process = map[string]string{"user": `"nobody"`}
		cfg.Bypass["queue_limit"] = `"1MiB"`
		idling := fmt.Sprintf("127.0.0.1:%d", Port(t, nil))
		cfg.Listeners = append(cfg.Listeners, Listener{Name: "idle", Listen: idling, Upstream: s.Addr,
			Bypass: cfg.Listeners[0].Bypass, Extra: map[string]string{"idle_timeout": `"500ms"`}})
		f := &Front{Path: p, Addr: cfg.Listeners[0].Listen}
		f.Shunt = StartShunt(t, cfg, Launch{})
		for _, word := range []string{`"privileges dropped"`, `"uid":65534`, `"capabilities":[]`, `"no_new_privs":true`} {
			Until(t, 5*time.Second, "log line", func() error {
				if !strings.Contains(f.Shunt.Output(), word) {
					return fmt.Errorf("the log doesn't say %s", word)
				}
				return nil
			})
		}

		if err := exchangeEcho(f.Addr, 200, 1000); err != nil {
			t.Fatal(err)
		}
		f.CheckPath(t, 200_000, 200_000, 0.3) // a busy machine cuts over late

		// A queue that is full is looked into from user space.
		c := f.Dial(t)
		if _, err := c.Write([]byte(greeting)); err != nil {
			t.Fatal(err)
		}
		fl := floodFrom(c, 1, false)
		if err := fl.settle(); err != nil {
			t.Fatal(err)
		}
		list, err := f.Shunt.Connections()
		if err != nil || len(list) != 1 || list[0]["up"] == nil {
			t.Errorf("/connections: %v, %v", list, err)
		}
		close(fl.stop)
		if err := <-fl.done; err != nil {
			t.Fatal(err)
		}
		sent := fl.accepted.Load()
		if sent > 12*mib {
			t.Errorf("%d bytes were accepted for a reader that doesn't read", sent)
		}
		close(read)
		if err := c.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(c); err != nil || string(b) != fmt.Sprint(sent) {
			t.Fatalf("the service read %s of %d bytes, %v", b, sent, err)
		}

		idle := DialFrom(t, nil, idling)
		if err := converse(idle, 1, 100); err != nil {
			t.Fatal(err)
		}
		if _, err := idle.Read(make([]byte, 1)); !IsReset(err) {
			t.Errorf("idle timeout: %v, want a reset", err)
		}

		m, err := f.Shunt.Metrics()
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"process_open_fds", "process_resident_memory_bytes", "shunt_connections_total"} {
			if m.Sum(name) == 0 {
				t.Errorf("metric %s is missing", name)
			}
		}
		reloadUnprivileged(t, f, s.Addr)
		f.Shunt.Signal(syscall.SIGUSR2)
		Until(t, 10*time.Second, "answer to SIGUSR2", func() error {
			if !strings.Contains(f.Shunt.Output(), "given its privileges up") {
				return errors.New("no refusal in the log")
			}
			return nil
		})
		checkUnprivileged(t, f.Shunt.Pid(), nobody, nobody, true)
		if err := f.Shunt.Stop(10 * time.Second); err != nil {
			t.Error(err)
		}
	})
}

// reloadUnprivileged adds listeners: one as anybody may, and one that takes a capability.
func reloadUnprivileged(t *testing.T, f *Front, upstream string) {
	t.Helper()
	good, err := os.ReadFile(f.Shunt.File)
	if err != nil {
		t.Fatal(err)
	}
	with := func(name, listen string) string {
		return string(good) + fmt.Sprintf("[[listener]]\nname = %q\nlisten = %q\nupstream = %q\nbypass = \"on\"\n", name, listen, upstream)
	}
	more := fmt.Sprintf("127.0.0.1:%d", Port(t, nil))
	if err := errors.Join(f.Shunt.RewriteText(with("more", more)), f.Shunt.Reload(10*time.Second), exchangeEcho(more, 200, 1000)); err != nil {
		t.Errorf("a new listener: %v", err)
	}
	Until(t, 5*time.Second, "path of the new listener", func() error {
		m, err := f.Shunt.Metrics()
		if n := m.Sum("shunt_bytes_total", "listener", "more", "path", "bypass"); err == nil && (n > 0) != f.Path.Bypass() {
			err = fmt.Errorf("%v bytes took the bypass", n)
		}
		return err
	})
	low := fmt.Sprintf("127.0.0.1:%d", privilegedPort(t))
	err = f.Shunt.RewriteText(with("low", low))
	if err == nil {
		err = f.Shunt.Reload(10 * time.Second)
	}
	if err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("a new port below 1024: %v; want a refusal", err)
	}
	Until(t, 10*time.Second, "why a port below 1024 is refused", func() error {
		if !strings.Contains(f.Shunt.Output(), "CAP_NET_BIND_SERVICE") {
			return errors.New("the log doesn't name the capability")
		}
		return nil
	})
	if err := exchangeEcho(more, 2, 100); err != nil {
		t.Errorf("after a refused reload: %v", err)
	}
}

func ignoreReset(err error) error {
	if IsReset(err) {
		return nil
	}
	return err
}

func TestServiceUserGivesItsCapabilitiesUp(t *testing.T) {
	// Started as its user with ambient capabilities, as by a service manager.
	OnPaths(t, []Path{Every}, func(t *testing.T, p Path) {
		NeedRoot(t)
		f := Open(t, p, Serve(t, echo).Addr, WithProcess("user", `"65534"`), WithProcess("group", `"65534"`),
			WithLaunch(Launch{Attr: &syscall.SysProcAttr{
				Credential:  &syscall.Credential{Uid: nobody, Gid: nobody},
				AmbientCaps: []uintptr{capBPF, capNetAdmin, capPerfmon},
			}}))
		if err := exchangeEcho(f.Addr, 200, 1000); err != nil {
			t.Fatal(err)
		}
		f.CheckPath(t, 200_000, 200_000, 0.3) // a busy machine cuts over late
		checkUnprivileged(t, f.Shunt.Pid(), nobody, nobody, false)
	})
}

func TestUserThatCannotBeTakenEndsTheStart(t *testing.T) {
	if testing.Short() {
		t.Skip("end-to-end test, not run with -short")
	}
	NeedRoot(t)
	bin, err := Build()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, user string
		root       bool
		code       int
		words      []string
	}{
		{"no privilege", "daemon", false, 1, []string{"drop privileges", "CAP_SETGID"}},
		{"unknown", "no-such-user", true, 2, []string{"process.user", "no-such-user"}},
		{"no group", "54321", true, 2, []string{"process.group"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.Chmod(dir, 0o755)); err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(dir, "c.toml")
			text := fmt.Sprintf("[process]\nuser = %q\n[[listener]]\nlisten = \"127.0.0.1:0\"\nupstream = \"127.0.0.1:1\"\n", c.user)
			if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			cmd := exec.Command(bin, "run", "--config", file)
			cmd.Stdout, cmd.Stderr = &out, &out
			if !c.root {
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
			}
			p, err := StartProcess(nil, cmd)
			if err != nil {
				t.Fatal(err)
			}
			defer p.End(time.Second)
			if code, err := p.ExitCode(20 * time.Second); err != nil || code != c.code {
				t.Errorf("exit code %d, %v; want %d", code, err, c.code)
			}
			for _, word := range c.words {
				if !strings.Contains(out.String(), word) {
					t.Errorf("the error doesn't say %q:\n%s", word, out.String())
				}
			}
		})
	}
}

func TestAdminSocketIsItsUsersAlone(t *testing.T) {
	OnPaths(t, []Path{Off}, func(t *testing.T, p Path) {
		NeedRoot(t)
		curl := NeedProgram(t, "curl")
		f := Open(t, p, Serve(t, echo).Addr)
		sock := strings.TrimPrefix(f.Shunt.Config.Admin, "unix:")
		ask := func(uid uint32) error {
			cmd := exec.Command(curl, "-s", "-f", "--max-time", "10", "--unix-socket", sock, "http://shunt/healthz")
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
			return cmd.Run()
		}
		if err := ask(0); err != nil {
			t.Errorf("its own user: %v", err)
		}
		var exit *exec.ExitError
		if err := ask(65533); !errors.As(err, &exit) || exit.ExitCode() != 7 { // can't connect
			t.Errorf("another user: %v, want curl's exit code 7", err)
		}
		if fi, err := os.Stat(sock); err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("%v, %v: want mode 0600", fi.Mode(), err)
		}
	})
}

func TestTransparentUserKeepsOneCapability(t *testing.T) {
	OnPaths(t, []Path{Off, Every}, func(t *testing.T, p Path) {
		NeedRoot(t)
		s := Serve(t, func(c *net.TCPConn) error {
			_, err := fmt.Fprint(c, c.RemoteAddr().(*net.TCPAddr).IP)
			return err
		})
		f := Open(t, p, s.Addr, WithListener("transparent", "true"), WithProcess("user", `"nobody"`))
		const client = "127.0.0.9"
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(client)}, Timeout: 10 * time.Second}
		for range 3 { // sockets that the running process makes
			c, err := d.DialContext(t.Context(), "tcp", f.Addr)
			if err != nil {
				t.Fatal(err)
			}
			_ = c.SetDeadline(time.Now().Add(Patience))
			if b, err := io.ReadAll(c); err != nil || string(b) != client {
				t.Errorf("the service sees %s, %v; want %s", b, err, client)
			}
			c.Close()
		}
		checkUnprivileged(t, f.Shunt.Pid(), nobody, nobody, true, unix.CAP_NET_RAW)
	})
}
