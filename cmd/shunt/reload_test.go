package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// startFile is startProcess with a configuration file.
func startFile(t *testing.T, config string) (p *process, file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "shunt.toml")
	rewrite(t, file, config)
	return startProcess(t, "", "--config", file), file
}

// rewrite replaces the file at once, as editors do.
func rewrite(t *testing.T, file, config string) {
	t.Helper()
	if err := os.WriteFile(file+".new", []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		t.Fatal(err)
	}
}

func (p *process) send(t *testing.T, sig os.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

func TestHangUpReloadsTheFile(t *testing.T) {
	first, second := echoService(t), echoService(t)
	p, file := startFile(t, copyConfig(first, ""))
	addr := waitReady(t, p.lines)
	c := dial(t, addr)
	exchange(t, c, "before")

	rewrite(t, file, strings.Replace(copyConfig(second, ""), "[log]", "[bypass]\nwindow = \"1MiB\"\n[log]\nlevel = \"debug\"\naccess = true", 1))
	p.send(t, syscall.SIGHUP)
	if keys := waitEntry(t, p.lines, "changed keys that need a restart")["keys"]; fmt.Sprint(keys) != "[bypass.window]" {
		t.Errorf("keys that need a restart: %v", keys)
	}
	waitEntry(t, p.lines, msgReloaded)
	exchange(t, c, "the live connection")
	late := dial(t, addr)
	exchange(t, late, "to the second upstream")
	late.Close()
	if e := waitEntry(t, p.lines, "connection"); e["upstream"] != second {
		t.Errorf("access log: %v", e)
	}
	if e := waitEntry(t, p.lines, "connection closed"); e["level"] != "debug" {
		t.Errorf("debug line: %v", e)
	}
	// The same again is no change of what needs a restart: what runs is what counts.
	p.send(t, syscall.SIGHUP)
	if keys := waitEntry(t, p.lines, "changed keys that need a restart")["keys"]; fmt.Sprint(keys) != "[bypass.window]" {
		t.Errorf("keys that need a restart: %v", keys)
	}
	c.Close()
	p.send(t, syscall.SIGTERM)
	if code := p.wait(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestBadFileChangesNothing(t *testing.T) {
	p, file := startFile(t, copyConfig(echoService(t), ""))
	addr := waitReady(t, p.lines)
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for _, c := range []struct{ config, want string }{
		{"[[listener", file},
		{string(good) + "upstraem = \"x\"\n", "upstraem"},
		{string(good) + fmt.Sprintf("[[listener]]\nlisten = %q\nupstream = \"127.0.0.1:1\"\n", taken.Addr()), "address already in use"},
		{"", "no [[listener]]"},
	} {
		rewrite(t, file, c.config)
		p.send(t, syscall.SIGHUP)
		e := waitEntry(t, p.lines, msgReloadFailed)
		if e["level"] != "error" || e["file"] != file || !strings.Contains(fmt.Sprint(e["error"]), c.want) {
			t.Errorf("%q: %v, want a word about %q", c.config, e, c.want)
		}
		exchange(t, dial(t, addr), "still here")
	}
	os.Remove(file)
	p.send(t, syscall.SIGHUP)
	if e := waitEntry(t, p.lines, msgReloadFailed); !strings.Contains(fmt.Sprint(e["error"]), "no such file") {
		t.Errorf("missing file: %v", e)
	}
	exchange(t, dial(t, addr), "still here")
}

func TestStdinCannotBeReadAgain(t *testing.T) {
	p := startProcess(t, copyConfig(echoService(t), ""))
	addr := waitReady(t, p.lines)
	p.send(t, syscall.SIGHUP)
	if e := waitEntry(t, p.lines, msgReloadFailed); e["error"] != errStdin.Error() {
		t.Errorf("%v", e)
	}
	exchange(t, dial(t, addr), "still here")
}

func TestBypassThatOnlyAReloadWantsIsDeclined(t *testing.T) {
	upstream := echoService(t)
	p, file := startFile(t, copyConfig(upstream, ""))
	addr := waitReady(t, p.lines)
	rewrite(t, file, strings.Replace(copyConfig(upstream, ""), `bypass = "off"`, `bypass = "on"`, 1))
	p.send(t, syscall.SIGHUP)
	if e := waitEntry(t, p.lines, "listening"); e["reason"] != "unsupported" || e["unsupported"] == nil {
		t.Errorf("%v", e)
	}
	waitEntry(t, p.lines, "connections of new listeners are copied")
	waitEntry(t, p.lines, msgReloaded)
	exchange(t, dial(t, addr), "copied")
}

func TestNoReloadWhileDraining(t *testing.T) {
	p, _ := startFile(t, copyConfig(echoService(t), ""))
	c := dial(t, waitReady(t, p.lines))
	exchange(t, c, "x")
	p.send(t, syscall.SIGTERM)
	waitEntry(t, p.lines, "draining")
	p.send(t, syscall.SIGHUP)
	waitEntry(t, p.lines, "signal ignored: shunt is draining")
	exchange(t, c, "y")
	c.Close()
	if code := p.wait(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestFixedKeysAreThoseOfTheOtherTables(t *testing.T) {
	a, b := defaultFile(), defaultFile()
	b.Log.Level, b.Admin.Listen = "debug", "127.0.0.1:1"
	b.Listeners = []listenerTable{defaultListener()}
	if keys := fixedKeys(&a, &b); keys != nil {
		t.Errorf("%v need a restart", keys)
	}
	b.Bypass.Cgroup, b.Bypass.MaxSockets, b.Bypass.Require = "/x", 8, true
	if keys := fixedKeys(&a, &b); !slices.Equal(keys, []string{"bypass.cgroup", "bypass.max_sockets", "bypass.require"}) {
		t.Errorf("%v need a restart", keys)
	}
	b.keep(&a)
	if b.Bypass != a.Bypass || b.Log.Level != "debug" {
		t.Errorf("kept %+v", b)
	}
}
