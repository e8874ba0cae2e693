package main

import (
	"os"
	"os/user"
	"strconv"
	"strings"
	"testing"
)

func TestProcessUserIsFoundByNameAndNumber(t *testing.T) {
	u, err := user.Lookup("nobody")
	if err != nil {
		t.Skip("missing the user nobody")
	}
	uid, err1 := strconv.Atoi(u.Uid)
	gid, err2 := strconv.Atoi(u.Gid)
	if err1 != nil || err2 != nil {
		t.Skip("user ids are no numbers here")
	}
	for _, c := range []struct {
		table    processTable
		uid, gid int
		wrong    string
	}{
		{processTable{User: "nobody"}, uid, gid, ""},
		{processTable{User: u.Uid}, uid, gid, ""},
		{processTable{User: "nobody", Group: "54321"}, uid, 54321, ""},
		{processTable{User: "54321", Group: "54322"}, 54321, 54322, ""},
		{processTable{User: "54321"}, 0, 0, "process.group: missing"},
		{processTable{User: "no-such-user"}, 0, 0, `process.user: "no-such-user": no such user`},
		{processTable{User: "nobody", Group: "no-such-group"}, 0, 0, `process.group: "no-such-group": no such group`},
		{processTable{User: "-1"}, 0, 0, "no such user"},
		{processTable{User: "4294967296"}, 0, 0, "no such user"},
		{processTable{User: "00", Group: "1"}, 0, 0, "unprivileged"},
		{processTable{User: "nobody", Group: "00"}, 0, 0, "unprivileged"},
	} {
		who, err := c.table.identity()
		if c.wrong != "" {
			if err == nil || !strings.Contains(err.Error(), c.wrong) {
				t.Errorf("%+v: %v, want %q", c.table, err, c.wrong)
			}
			continue
		}
		if err != nil || who.uid != c.uid || who.gid != c.gid {
			t.Errorf("%+v: %+v, %v; want %d and %d", c.table, who, err, c.uid, c.gid)
		}
	}
	if who, err := (processTable{}).identity(); who != nil || err != nil {
		t.Errorf("without a user: %v, %v", who, err)
	}
}

func TestCheckWarnsOfAnUnknownUser(t *testing.T) {
	code, out, stderr := runArgs(t, minimal+"[process]\nuser = \"no-such-user\"\n", "check", "--config", "-")
	if code != exitOK || !strings.Contains(stderr, "warning: process.user") || !strings.Contains(out, "127.0.0.1:8000") {
		t.Errorf("exit code %d\n%s%s", code, out, stderr)
	}
	code, _, stderr = runArgs(t, minimal+"[process]\nuser = \"no-such-user\"\n", "run", "--config", "-")
	if code != exitUsage || !strings.Contains(stderr, "no-such-user") {
		t.Errorf("run: exit code %d, %s", code, stderr)
	}
	if droppedPrivileges() || os.Geteuid() != os.Getuid() {
		t.Error("this process changed")
	}
}

func TestCheckWarnsOfAnUnknownOwner(t *testing.T) {
	listener := "[[listener]]\nname = \"web\"\nlisten = \"unix:" + t.TempDir() + "/s\"\nupstream = \"127.0.0.1:9000\"\n"
	code, _, stderr := runArgs(t, listener+"[listener.unix]\nowner = \"no-such-user\"\ngroup = \"no-such-group\"\n", "check", "--config", "-")
	for _, want := range []string{
		`warning: listener "web": unix.owner: "no-such-user": no such user on this system`,
		`warning: listener "web": unix.group: "no-such-group": no such group on this system`,
	} {
		if code != exitOK || !strings.Contains(stderr, want) {
			t.Errorf("exit code %d, want 0 and %q\n%s", code, want, stderr)
		}
	}
	if code, _, stderr := runArgs(t, listener+"[listener.unix]\nowner = \"nobody\"\ngroup = \"12345\"\n", "check", "--config", "-"); code != exitOK || stderr != "" {
		t.Errorf("names that there are: exit code %d, %s", code, stderr)
	}
}
