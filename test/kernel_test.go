//go:build linux

package test

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	. "shunt/test/harness"
)

func TestCgroupHierarchiesOfEveryKind(t *testing.T) {
	// Hybrid hosts have cgroup2 elsewhere, others have only v1 mounts: shunt finds the one, and makes up for the other.
	if testing.Short() {
		t.Skip("end-to-end test, not run with -short")
	}
	NeedRoot(t)
	NeedBypass(t)
	NeedProgram(t, "unshare")
	const bare = `umount -l /sys/fs/cgroup; mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/v1 /sys/fs/cgroup/unified && `
	const v1 = `mount -t cgroup -o none,name=shunt-test none /sys/fs/cgroup/v1 && `
	for _, c := range []struct{ name, mounts string }{
		{"unified", ""},
		{"hybrid", bare + v1 + `mount -t cgroup2 none /sys/fs/cgroup/unified && `},
		{"v1 only", bare + v1},
		{"none", bare},
	} {
		t.Run(c.name, func(t *testing.T) {
			run := []string{"unshare", "--mount", "--", "sh", "-c", c.mounts + `exec "$@"`, "sh"}
			if out, err := exec.Command(run[0], append(run[1:], "true")...).CombinedOutput(); err != nil {
				t.Skipf("missing mounts of this kind: %v: %s", err, out)
			}
			cfg := Configure(Every, fmt.Sprintf("127.0.0.1:%d", Port(t, nil)), Serve(t, echo).Addr)
			s := StartShunt(t, cfg, Launch{Prefix: run})
			f := &Front{Path: Every, Addr: cfg.Listeners[0].Listen, Shunt: s}
			for range 3 {
				if err := exchangeEcho(f.Addr, 20, 1000); err != nil {
					t.Fatal(err)
				}
			}
			f.CheckPath(t, 60_000, 60_000, 0.3)
		})
	}
}

func TestAutoDeclinesWhatTheProbeSays(t *testing.T) {
	// Where a check doesn't pass, or a fault is known, shunt declines by itself and says so.
	if testing.Short() {
		t.Skip("end-to-end test, not run with -short")
	}
	NeedRoot(t)
	r := Probe(t)
	reason := ""
	switch {
	case !r.Possible:
		reason = "unsupported"
	case !r.FIONREAD:
		reason = "fionread"
	case r.FaultOfBypass() != "":
		reason = "kernel-fault"
	}
	cfg := Configure(Off, fmt.Sprintf("127.0.0.1:%d", Port(t, nil)), Serve(t, echo).Addr)
	cfg.Listeners[0].Bypass = "auto"
	f := &Front{Path: Off, Addr: cfg.Listeners[0].Listen, Shunt: StartShunt(t, cfg, Launch{})}
	for range 3 {
		if err := exchangeEcho(f.Addr, 20, 1000); err != nil {
			t.Fatal(err)
		}
	}
	if reason != "" {
		f.CheckCopied(t, reason, 3)
	} else {
		f.Path = Every
	}
	f.CheckPath(t, 60_000, 60_000, 0.3)
	t.Logf("probe: %v %q; declined: %q", r.Possible, r.Reason, reason)
}

func TestKnownFaultIsTakenWhenAskedFor(t *testing.T) {
	// What a distribution has backported isn't known: an explicit key wins over the table, and the log names the fault.
	if testing.Short() {
		t.Skip("end-to-end test, not run with -short")
	}
	NeedRoot(t)
	NeedBypass(t)
	known := Probe(t).Known
	if len(known) == 0 {
		t.Skip("no fault is known of this kernel")
	}
	for _, fault := range known {
		p := Every
		if fault.Verdict != "" {
			p = Path(fault.Verdict)
		}
		f := Open(t, p, Serve(t, echo).Addr) // bypass = "on", and this verdict
		if err := exchangeEcho(f.Addr, 20, 1000); err != nil {
			t.Fatal(err)
		}
		f.CheckPath(t, 20_000, 20_000, 0.3)
		if out := f.Shunt.Output(); !strings.Contains(out, "in spite of a known fault") || !strings.Contains(out, fault.Commit) {
			t.Errorf("the log doesn't say that %q is missing", fault.Commit)
		}
	}
}
