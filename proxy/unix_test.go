//go:build linux

package proxy

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// shortDir returns a folder whose path fits a UNIX socket's.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "px")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func listenAt(path string, set func(*UnixSocket)) option {
	return onListener(func(l *Listener) {
		l.Listen = "unix:" + path
		if set != nil {
			set(&l.Unix)
		}
	})
}

// dialUnix connects a client to a UNIX listener.
func dialUnix(t *testing.T, name string) *net.UnixConn {
	t.Helper()
	c, err := net.DialTimeout("unix", name, deadline)
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(deadline))
	t.Cleanup(func() { c.Close() })
	return c.(*net.UnixConn)
}

func TestUnixListenerServes(t *testing.T) {
	path := filepath.Join(shortDir(t), "l")
	for _, name := range []string{path, fmt.Sprintf("@shunt-test-%d", os.Getpid())} {
		r := newRig(t, nil, onListener(func(l *Listener) { l.Listen = "unix:" + name }))
		if a := r.srv.Addrs()[0]; a.Text != "unix:"+name || a.Addr.IsValid() {
			t.Errorf("%+v", a)
		}
		c := dialUnix(t, name)
		io.WriteString(c, "question")
		c.CloseWrite()
		service := r.accept()
		if b, err := io.ReadAll(service); err != nil || string(b) != "question" {
			t.Fatalf("%q, %v", b, err)
		}
		send(t, service, []byte("answer"))
		service.Close()
		if b, err := io.ReadAll(c); err != nil || string(b) != "answer" {
			t.Fatalf("%q, %v", b, err)
		}
		r.ended(causeClientFIN)
		for _, w := range []string{
			`"declined":"unix"`, `"down":"unix:"`, fmt.Sprintf(`"down_local":"unix:%s"`, name),
			fmt.Sprintf(`"down_pid":%d,"down_uid":%d,"down_gid":%d`, os.Getpid(), os.Getuid(), os.Getgid()),
		} {
			if !strings.Contains(r.log.String(), w) {
				t.Errorf("no %s in\n%s", w, r.log)
			}
		}
	}
}

func TestUnixSocketHasItsModeFromTheStart(t *testing.T) {
	// Whoever polls for the file sees no mode but one that lets nobody else in, and the one at the end.
	dir := shortDir(t)
	path := filepath.Join(dir, "l")
	stop, done := make(chan struct{}), make(chan map[fs.FileMode]bool)
	go func() {
		seen := map[fs.FileMode]bool{}
		for {
			if fi, err := os.Lstat(path); err == nil {
				seen[fi.Mode().Perm()] = true
			}
			select {
			case <-stop:
				done <- seen
				return
			default:
			}
		}
	}()
	old := syscall.Umask(0)
	defer syscall.Umask(old)
	for range 200 {
		ln, f, err := listenUnix(path, UnixSocket{Mode: 0o640, Unlink: true})
		if err != nil {
			t.Fatal(err)
		}
		fi, err := os.Lstat(path)
		if err != nil || fi.Mode() != fs.ModeSocket|0o640 {
			t.Fatalf("%v, %v", fi.Mode(), err)
		}
		if err := f.remove(); err != nil {
			t.Fatal(err)
		}
		ln.Close()
	}
	close(stop)
	for mode := range <-done {
		if mode != 0o600 && mode != 0o640 {
			t.Errorf("seen with mode %v", mode)
		}
	}
}

func TestUnixSocketHasItsOwner(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("missing root")
	}
	path := filepath.Join(shortDir(t), "l")
	newRig(t, nil, listenAt(path, func(u *UnixSocket) { u.Owner, u.Group, u.Mode = "65533", "65532", 0o660 }))
	fi, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	if st := fi.Sys().(*syscall.Stat_t); st.Uid != 65533 || st.Gid != 65532 || fi.Mode().Perm() != 0o660 {
		t.Errorf("uid %d, gid %d, mode %v", st.Uid, st.Gid, fi.Mode())
	}
	for _, u := range []UnixSocket{{Owner: "no-such-user-1"}, {Group: "no-such-group-1"}} {
		if _, _, err := listenUnix(path+"2", u); err == nil || !strings.Contains(err.Error(), "no-such-") {
			t.Errorf("%+v: %v", u, err)
		}
		if _, err := os.Lstat(path + "2"); err == nil {
			t.Errorf("%+v: a file is left", u)
		}
	}
}

func TestOnlyADeadSocketIsReplaced(t *testing.T) {
	dir := shortDir(t)
	at := func(name string) string { return filepath.Join(dir, name) }
	leave := func(name, network string) {
		t.Helper()
		fd, err := syscall.Socket(syscall.AF_UNIX, map[string]int{"stream": syscall.SOCK_STREAM, "dgram": syscall.SOCK_DGRAM}[network], 0)
		if err == nil {
			err = syscall.Bind(fd, &syscall.SockaddrUnix{Name: at(name)})
		}
		if err != nil {
			t.Fatal(err)
		}
		syscall.Close(fd)
	}
	leave("dead", "stream")
	if err := os.WriteFile(at("file"), []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(at("dir"), 0o700); err != nil {
		t.Fatal(err)
	}
	leave("target", "stream")
	if err := os.Symlink(at("target"), at("link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(at("nothing"), at("dangling")); err != nil {
		t.Fatal(err)
	}
	live, err := net.Listen("unix", at("live"))
	if err != nil {
		t.Fatal(err)
	}
	defer live.Close()
	pc, err := net.ListenPacket("unixgram", at("dgram"))
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	for name, want := range map[string]string{
		"dead": "", "file": "is no socket", "dir": "is no socket", "link": "is no socket", "dangling": "is no socket",
		"live": "somebody else", "dgram": "somebody else", "none/l": "no such file",
	} {
		before, _ := os.Lstat(at(name))
		ln, f, err := listenUnix(at(name), UnixSocket{Mode: 0o600, Unlink: true})
		if want == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			f.remove()
			ln.Close()
			continue
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
		if after, _ := os.Lstat(at(name)); before != nil && (after == nil || !os.SameFile(before, after)) {
			t.Errorf("%s: the file was replaced", name)
		}
	}
	leave("again", "stream")
	if _, _, err := listenUnix(at("again"), UnixSocket{Mode: 0o600}); err == nil || !strings.Contains(err.Error(), "exists") {
		t.Errorf("a dead socket without unlink: %v", err)
	}
}

func TestUnixSocketIsRemovedIfItIsOurs(t *testing.T) {
	for name, c := range map[string]struct {
		unlink   bool
		meddle   func(path string) error
		wantThem bool // a file is there afterwards
	}{
		"ours":     {true, nil, false},
		"kept":     {false, nil, true},
		"gone":     {true, os.Remove, false},
		"replaced": {true, func(path string) error { os.Remove(path); return os.WriteFile(path, nil, 0o600) }, true},
	} {
		path := filepath.Join(shortDir(t), "l")
		r := newRig(t, nil, listenAt(path, func(u *UnixSocket) { u.Unlink = c.unlink }))
		if c.meddle != nil {
			if err := c.meddle(path); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.srv.Shutdown(context.Background()); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(path); (err == nil) != c.wantThem {
			t.Errorf("%s: after the end: %v", name, err)
		}
	}
}

func TestNamesInLogsAreEscaped(t *testing.T) {
	// A client names its own socket, with whatever bytes it likes.
	dir := shortDir(t)
	path := filepath.Join(dir, "l")
	r := newRig(t, nil, listenAt(path, nil))
	evil := filepath.Join(dir, "a\n{\"end\":\"forged\"}\x1b[31m")
	c, err := net.DialUnix("unix", &net.UnixAddr{Name: evil, Net: "unix"}, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	service := r.accept()
	c.Close()
	expectEOF(t, service)
	service.Close()
	r.ended(causeClientFIN)
	for line := range strings.Lines(r.log.String()) {
		if !strings.HasPrefix(line, `{"level"`) || strings.ContainsAny(strings.TrimSuffix(line, "\n"), "\n\x1b") {
			t.Errorf("line %q", line)
		}
	}
}

func TestReloadKeepsAUnixSocket(t *testing.T) {
	dir := shortDir(t)
	path := filepath.Join(dir, "l")
	r := newRig(t, nil, listenAt(path, nil))
	made, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	check := func(mode fs.FileMode) {
		t.Helper()
		fi, err := os.Lstat(path)
		if err != nil || !os.SameFile(fi, made) || fi.Mode().Perm() != mode {
			t.Fatalf("%v, %v; want the same file with mode %v", fi, err, mode)
		}
	}
	r.mustReload(func(c *Config) { c.Listeners[0].Unix.Mode = 0o660 })
	check(0o660)
	cfg := r.srv.cfg
	cfg.Listeners = append([]Listener(nil), cfg.Listeners...)
	cfg.Listeners[0].Unix.Mode = 0o666
	bad := cfg.Listeners[0]
	bad.Name, bad.Listen = "bad", "unix:"+filepath.Join(dir, "none", "l")
	cfg.Listeners = append(cfg.Listeners, bad)
	if err := r.srv.Reload(cfg); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("a listener that can't be opened: %v", err)
	}
	check(0o660)
	cfg.Listeners = cfg.Listeners[:1]
	cfg.Listeners[0].Unix.Owner = "no-such-user-1"
	if err := r.srv.Reload(cfg); err == nil || !strings.Contains(err.Error(), "no-such-user-1") {
		t.Errorf("an owner that isn't there: %v", err)
	}
	check(0o660)
	c := dialUnix(t, path)
	service := r.accept()
	io.WriteString(c, "x")
	expect(t, service, "x")
	// The listener is gone, and so is its file.
	r.mustReload(func(c *Config) { c.Listeners[0].Listen = "127.0.0.1:0" })
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("the file after its listener: %v", err)
	}
}

func TestUnixSocketThatIsRightIsLeftAlone(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("missing root")
	}
	path := filepath.Join(shortDir(t), "l")
	how := UnixSocket{Mode: 0o640, Owner: "65533", Group: "65532", Unlink: true}
	ln, f, err := listenUnix(path, how)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	changed := func() int64 {
		fi, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		return fi.Sys().(*syscall.Stat_t).Ctim.Nano()
	}
	before := changed()
	// A process that takes the socket over knows only the file.
	if f, err = (&socketFile{path: path, made: f.made}).change(how); err != nil || changed() != before {
		t.Errorf("%v, changed at %d, before %d", err, changed(), before)
	}
	f.remove()
}
