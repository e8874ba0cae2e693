//go:build unix

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// script is a program in a new folder.
func script(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(file, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestUpgradeWaitsForOneThatServes(t *testing.T) {
	for what, c := range map[string]struct {
		text    string
		timeout time.Duration
		ready   string // the error's words; empty: none
		serving string
	}{
		"hangs":             {"exec sleep 60", 50 * time.Millisecond, "it wasn't ready in time", ""},
		"ends":              {"exit 3", testWait, "it ended before it was ready: exit status 3", ""},
		"ends well":         {"exit 0", testWait, "it ended before it was ready", ""},
		"says why":          {"echo failed no luck >&3; exit 1", testWait, "no luck", ""},
		"ends when told go": {"echo ready >&3; read x <&3; exit 4", testWait, "", "it ended before it was serving: exit status 4"},
		"serves":            {"echo ready >&3; read x <&3; [ $x = go ] && echo serving >&3; read x <&3", testWait, "", ""},
	} {
		t.Run(what, func(t *testing.T) {
			u, err := startUpgrade(script(t, c.text), []string{"program"}, nil, c.timeout)
			if err != nil {
				t.Fatal(err)
			}
			check := func(err error, want string) {
				t.Helper()
				if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
					t.Errorf("%v, want %q", err, want)
				}
			}
			err = <-u.ready
			check(err, c.ready)
			if err == nil {
				err = u.let()
				check(err, c.serving)
			}
			if err == nil {
				u.stream.Close()
				if err := <-u.ended; err != nil && !strings.Contains(err.Error(), "exit status") {
					t.Error(err)
				}
			}
			if u.cmd.ProcessState == nil {
				t.Error("the process is left")
			}
		})
	}
}

func TestUpgradeThatIsGivenUpLeavesNothing(t *testing.T) {
	files := openFiles()
	u, err := startUpgrade(script(t, "exec sleep 60"), []string{"program"}, nil, testWait)
	if err != nil {
		t.Fatal(err)
	}
	u.abort()
	if u.cmd.ProcessState == nil {
		t.Error("the process is left")
	}
	eventually(t, "descriptors are closed", func() bool { return openFiles() <= files })
}

func TestProgramFollowsTheNameItWasStartedBy(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "current")
	if err := os.Symlink(self, link); err != nil {
		t.Fatal(err)
	}
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		self: self,
		link: link,
		// A name that somebody made up, or that is another program's.
		"no-such-program-1": self,
		sh:                  self,
	} {
		if got := program(name); got != want {
			t.Errorf("%s: %s; want %s", name, got, want)
		}
	}
}
