//go:build linux

package test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	. "shunt/test/harness"
)

func deployFile(t *testing.T, name string) string {
	t.Helper()
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(root, "cmd", "shunt", "deploy", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// filter runs a program under a seccomp filter: argv is the error number for
// what isn't listed, 0 to kill, then the calls, then the address families that
// sockets may have, empty for any, then the program.
const filter = `
import os, sys, seccomp
errno, calls, families = int(sys.argv[1]), sys.argv[2].split(), sys.argv[3].split()
f = seccomp.SyscallFilter(seccomp.ERRNO(errno) if errno else seccomp.KILL_PROCESS)
for name in calls:
    if name == "socket" and families:
        for family in families:
            f.add_rule(seccomp.ALLOW, name, seccomp.Arg(0, seccomp.EQ, int(family)))
        continue
    try:
        f.add_rule(seccomp.ALLOW, name)
    except (OSError, RuntimeError):
        pass # another architecture's
f.load()
os.execv(sys.argv[4], sys.argv[4:])
`

// setting returns a setting of the unit, by its words.
func setting(t *testing.T, unit, key string) []string {
	t.Helper()
	m := regexp.MustCompile(`(?m)^` + key + `=(.+)$`).FindStringSubmatch(unit)
	if m == nil {
		t.Fatalf("the unit has no %s", key)
	}
	return strings.Fields(m[1])
}

// systemCalls resolves systemd's groups.
func systemCalls(t *testing.T, names []string) (calls []string) {
	t.Helper()
	for _, name := range names {
		if !strings.HasPrefix(name, "@") {
			calls = append(calls, name)
			continue
		}
		out, err := exec.Command("systemd-analyze", "syscall-filter", name).Output()
		if err != nil {
			t.Fatalf("systemd-analyze syscall-filter %s: %v", name, err)
		}
		members := strings.Fields(regexp.MustCompile(`(?m)^\s*#.*$`).ReplaceAllString(string(out), ""))
		calls = append(calls, systemCalls(t, members[1:])...)
	}
	return calls
}

func TestDocumentedPrivilegesAreEnough(t *testing.T) {
	// What the deploy files grant and take, put together by hand: the capabilities,
	// no_new_privs, a hierarchy that is read-only, and a filter of system calls.
	if testing.Short() {
		t.Skip("end-to-end test, not run with -short")
	}
	NeedRoot(t)
	NeedProgram(t, "unshare")
	NeedProgram(t, "setpriv")
	NeedProgram(t, "systemd-analyze")
	const python = "/usr/bin/python3" // Debian's, which has Debian's modules
	if exec.Command(python, "-c", "import seccomp").Run() != nil {
		Missing(t, AbilityPrograms, "Debian's package python3-seccomp")
	}
	var documented []string
	for _, line := range strings.Split(deployFile(t, "syscalls.txt"), "\n") {
		line, _, _ = strings.Cut(line, "#")
		documented = append(documented, strings.Fields(line)...)
	}
	unit := deployFile(t, "shunt.service")
	ofUnit := systemCalls(t, setting(t, unit, "SystemCallFilter"))
	if len(documented) < 30 || len(ofUnit) < 100 {
		t.Fatalf("%d documented system calls, %d of the unit", len(documented), len(ofUnit))
	}
	families := ""
	for _, name := range setting(t, unit, "RestrictAddressFamilies") {
		n, ok := map[string]int{"AF_INET": unix.AF_INET, "AF_INET6": unix.AF_INET6, "AF_UNIX": unix.AF_UNIX, "AF_NETLINK": unix.AF_NETLINK}[name]
		if !ok {
			t.Fatalf("address family %s", name)
		}
		families += fmt.Sprint(n, " ")
	}
	caps := strings.ToLower(strings.ReplaceAll(strings.Join(setting(t, unit, "AmbientCapabilities"), ",+"), "CAP_", ""))
	for _, c := range []struct {
		name    string
		setpriv string // its options
		filter  []string
		cgroup  bool // the hierarchy is elsewhere
		process map[string]string
	}{
		{"systemd unit", "--reuid 65534 --regid 65534 --clear-groups --inh-caps -all,+" + caps + " --ambient-caps -all,+" + caps + " --bounding-set -all,+" + caps,
			[]string{fmt.Sprint(int(unix.EPERM)), strings.Join(ofUnit, " "), families}, false, nil},
		{"container", "--inh-caps -all --bounding-set -all,+bpf,+net_admin,+perfmon,+setuid,+setgid,+setpcap",
			[]string{"0", strings.Join(documented, " "), ""}, true, map[string]string{"user": `"65532"`, "group": `"65532"`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			EachShuntPath(t, func(t *testing.T, p Path) {
				t.Parallel()
				cfg := Configure(p, fmt.Sprintf("127.0.0.1:%d", Port(t, nil)), Serve(t, echo).Addr)
				cfg.Process = c.process
				mounted := cgroup2(t)
				mounts := fmt.Sprintf("mount --bind %s %s && mount -o remount,bind,ro %s", mounted, mounted, mounted)
				if c.cgroup {
					at := t.TempDir()
					mounts = fmt.Sprintf("mount --bind %s %s && mount -o remount,bind,ro %s && umount -l %s", mounted, at, at, mounted)
					cfg.Bypass["cgroup"] = fmt.Sprintf("%q", at)
				}
				prefix := []string{"unshare", "--mount", "--cgroup", "--propagation", "private", "--", "sh", "-c",
					mounts + " && exec setpriv --no-new-privs " + c.setpriv + ` -- "$@"`, "sh", python, "-c", filter}
				launch := Launch{Prefix: append(prefix, c.filter...)}
				f := &Front{Path: p, Addr: cfg.Listeners[0].Listen, Shunt: StartShunt(t, cfg, launch)}
				for range 3 {
					if err := exchangeEcho(f.Addr, 100, 1000); err != nil {
						t.Fatal(err)
					}
				}
				f.CheckPath(t, 300_000, 300_000, 0.3) // a busy machine cuts over late
				if c.process != nil {
					checkUnprivileged(t, f.Shunt.Pid(), 65532, 65532, true)
				}
			})
		})
	}
}

func TestUnitsAreValid(t *testing.T) {
	if testing.Short() {
		t.Skip("end-to-end test, not run with -short")
	}
	verify := NeedProgram(t, "systemd-analyze")
	bin, err := Build()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	files := []string{"shunt.service", "shunt.socket"}
	args := []string{"verify", "--man=no", "--recursive-errors=no"}
	for _, name := range files {
		text := strings.ReplaceAll(deployFile(t, name), "/usr/local/bin/shunt", bin)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		args = append(args, filepath.Join(dir, name))
	}
	out, err := exec.Command(verify, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("systemd-analyze: %v\n%s", err, out)
	}
	for _, line := range strings.Split(string(out), "\n") {
		if strings.Contains(line, dir) || strings.HasPrefix(line, "shunt.") {
			t.Error(line)
		}
	}
	out, err = exec.Command(verify, "security", "--offline=true", "--threshold=25", filepath.Join(dir, files[0])).CombinedOutput()
	if err != nil {
		t.Errorf("more exposed than 2.5 of 10: %v\n%s", err, out)
	}
}

func TestImageIsBuiltFromWhatItNeeds(t *testing.T) {
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	want := regexp.MustCompile(`(?m)^go (\S+)$`).FindSubmatch(mod)
	have := regexp.MustCompile(`(?m)^ARG GO_VERSION=(\S+)$`).FindStringSubmatch(deployFile(t, "Dockerfile"))
	if want == nil || have == nil || string(want[1]) != have[1] {
		t.Errorf("go.mod has %q, the Dockerfile %q", want, have)
	}
	cmd := exec.Command(NeedProgram(t, "go"), "list", "-deps", "./cmd/shunt")
	cmd.Dir = root
	deps, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^shunt/([a-z]+)`).FindAllStringSubmatch(string(deps), -1) {
		if line := fmt.Sprintf("COPY %s %s\n", m[1], m[1]); !strings.Contains(deployFile(t, "Dockerfile"), line) {
			t.Errorf("the Dockerfile doesn't copy the folder %s", m[1])
		}
	}
}

func TestInstallKeepsAConfigurationThatIsThere(t *testing.T) {
	if testing.Short() {
		t.Skip("end-to-end test, not run with -short")
	}
	install := NeedProgram(t, "make")
	bin, err := Build()
	if err != nil {
		t.Fatal(err)
	}
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	// A copy of what is installed: the binary in the repository's root is the developer's.
	from, to := t.TempDir(), t.TempDir()
	for name, file := range map[string]string{
		"Makefile": "Makefile", "config.example.toml": "config.example.toml",
		"cmd/shunt/deploy/shunt.service": "cmd/shunt/deploy/shunt.service", "cmd/shunt/deploy/shunt.socket": "cmd/shunt/deploy/shunt.socket",
	} {
		b, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			t.Fatal(err)
		}
		at := filepath.Join(from, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(at), 0o755), os.WriteFile(at, b, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(bin, filepath.Join(from, "shunt")); err != nil {
		t.Fatal(err)
	}
	run := func(target string) {
		t.Helper()
		cmd := exec.Command(install, "-s", "-C", from, target, "DESTDIR="+to, "PREFIX=/opt/shunt")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("make %s: %v\n%s", target, err, out)
		}
	}
	want := map[string]os.FileMode{
		"opt/shunt/bin/shunt": 0o755, "opt/shunt/lib/systemd/system/shunt.service": 0o644,
		"opt/shunt/lib/systemd/system/shunt.socket": 0o644, "etc/shunt/config.toml": 0o644,
	}
	run("install")
	for name, mode := range want {
		if fi, err := os.Stat(filepath.Join(to, name)); err != nil || fi.Mode() != mode {
			t.Errorf("%s: %v, %v; want %v", name, fi, err, mode)
		}
	}
	config := filepath.Join(to, "etc/shunt/config.toml")
	if out, err := exec.Command(filepath.Join(to, "opt/shunt/bin/shunt"), "check", "--config", config).CombinedOutput(); err != nil {
		t.Errorf("shunt check: %v\n%s", err, out)
	}
	unit, err := os.ReadFile(filepath.Join(to, "opt/shunt/lib/systemd/system/shunt.service"))
	if err != nil || !strings.Contains(string(unit), "ExecStart=/opt/shunt/bin/shunt run --config /etc/shunt/config.toml\n") {
		t.Errorf("%v, or the unit starts another program", err)
	}
	if err := os.WriteFile(config, []byte("# mine\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	run("install")
	if b, err := os.ReadFile(config); err != nil || string(b) != "# mine\n" {
		t.Errorf("the configuration became %q, %v", b, err)
	}
	run("uninstall")
	for name := range want {
		_, err := os.Stat(filepath.Join(to, name))
		if (err == nil) != (name == "etc/shunt/config.toml") {
			t.Errorf("after uninstall, %s: %v", name, err)
		}
	}
}

func TestOwnCgroupOfAContainerIsSaid(t *testing.T) {
	// In a cgroup namespace the mount shows the container's own cgroup as the
	// root: every connection with somebody else is copied, and the log says why.
	OnPaths(t, []Path{Every}, func(t *testing.T, p Path) {
		NeedRoot(t)
		NeedProgram(t, "unshare")
		own := filepath.Join(cgroup2(t), fmt.Sprintf("shunt-test-%d", os.Getpid()))
		if err := os.Mkdir(own, 0o755); err != nil {
			t.Skipf("no cgroup can be made: %v", err)
		}
		t.Cleanup(func() {
			Until(t, 10*time.Second, "end of the cgroup", func() error { return os.Remove(own) })
		})
		f := Open(t, p, Serve(t, echo).Addr, WithLaunch(Launch{Prefix: []string{"sh", "-c",
			"echo $$ >" + own + "/cgroup.procs && exec unshare --mount --cgroup --propagation private -- sh -c '" +
				"umount -l " + cgroup2(t) + " && mount -t cgroup2 -o ro none " + cgroup2(t) + ` && exec "$@"' sh "$@"`, "sh"}}))
		if err := exchangeEcho(f.Addr, 20, 1000); err != nil {
			t.Fatal(err)
		}
		f.CheckCopied(t, "downstream-not-local", 1)
		if !strings.Contains(f.Shunt.Output(), "only sockets of this container are seen") {
			t.Error("the log doesn't say why")
		}
	})
}
