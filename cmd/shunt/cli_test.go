package main

import (
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

func TestExitCodes(t *testing.T) {
	good := writeConfig(t, minimal)
	bad := writeConfig(t, "[[listener]]\n")
	missing := filepath.Join(t.TempDir(), "none.toml")
	noCgroup := writeConfig(t, minimal+"[bypass]\ncgroup = \"/no/such/cgroup\"\n")
	for _, c := range []struct {
		args   []string
		code   int
		stdout string // substring
		stderr string
	}{
		{nil, 2, "", "shunt demo"},
		{[]string{"help"}, 0, "shunt probe", ""},
		{[]string{"-h"}, 0, "shunt probe", ""},
		{[]string{"--help"}, 0, "shunt probe", ""},
		{[]string{"help", "run"}, 0, "Usage: shunt run --config FILE", ""},
		{[]string{"help", "help"}, 0, "Usage: shunt help [COMMAND]", ""},
		{[]string{"help", "-h"}, 0, "Usage: shunt help [COMMAND]", ""},
		{[]string{"help", "prob"}, 2, "", `did you mean "probe"?`},
		{[]string{"help", "run", "check"}, 2, "", "more than one command"},
		{[]string{"help", demoServiceName}, 2, "", "unknown command"},
		{[]string{"run", "-h"}, 0, "--config FILE", ""},
		{[]string{"check", "--help"}, 0, "--config FILE", ""},
		{[]string{"probe", "-h"}, 0, "--json", ""},
		{[]string{"demo", "-h"}, 0, "--verdict V", ""},
		{[]string{"version", "-h"}, 0, "Usage: shunt version", ""},
		{[]string{"version"}, 0, runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH, ""},
		{[]string{"--version"}, 0, "shunt ", ""},
		{[]string{"version", "now"}, 2, "", `unexpected argument "now"`},
		{[]string{"vers"}, 2, "", `did you mean "version"?`},
		{[]string{"chekc"}, 2, "", `did you mean "check"?`},
		{[]string{"TCP-LISTEN:8080", "TPC:127.0.0.1:9090"}, 1, "", `unknown device/address "TPC"; did you mean "TCP"?`},
		{[]string{"TCP-LISTEN:8080"}, 1, "", "exactly 2 addresses required (there are 1)"},
		{[]string{"-d", "-d", "-"}, 1, "", "exactly 2 addresses required (there are 1)"},
		{[]string{"--admn", "-", "-"}, 2, "", `unknown option "--admn"; did you mean "--admin"?`},
		{[]string{"-V"}, 0, "in place of socat", ""},
		{[]string{"-hh"}, 0, "max-children", ""},
		{[]string{"help", "socat"}, 0, "UNIX-CLIENT", ""},
		{[]string{"help", "translate"}, 0, "Usage: shunt translate", ""},
		{[]string{"translate", "TCP-LISTEN:8080", "VSOCK-CONNECT:1:1"}, 2, "", "TCP and UNIX upstreams only"},
		{[]string{"--config", good}, 2, "", `unknown option "--config"`},
		{[]string{"run"}, 2, "", "--config FILE is missing"},
		{[]string{"run", "--conf", good}, 2, "", "unknown flag --conf: did you mean --config?"},
		{[]string{"run", "-confg", good}, 2, "", "unknown flag --confg: did you mean --config?"},
		{[]string{"run", "--zzz"}, 2, "", "unknown flag --zzz\n"},
		{[]string{"run", "--config", bad}, 2, "", bad + `:1: listener 1: listen: missing`},
		{[]string{"run", "--config", missing}, 2, "", "no such file"},
		{[]string{"check", "--config", good, "more"}, 2, "", `unexpected argument "more"`},
		{[]string{"check", "-config", good}, 0, "127.0.0.1:8000", ""},
		{[]string{"check", "--config=" + good}, 0, "admin: off", ""},
		{[]string{"check", "--config", bad}, 2, "", "listen: missing"},
		{[]string{"check", "--config", noCgroup}, 0, "127.0.0.1:8000", ""},
		{[]string{"probe", "--config", bad}, 2, "", "listen: missing"},
		{[]string{"demo", "--verdict", "sometimes"}, 2, "", "want one of auto, every, window, permanent"},
		{[]string{"demo", "--time", "1ns"}, 2, "", "out of range"},
		{[]string{"demo", "--time", "5"}, 2, "", "-time: parse error"},
		{[]string{"demo", "--rounds", "0"}, 2, "", "out of range"},
	} {
		code, stdout, stderr := runArgs(t, "", c.args...)
		if code != c.code {
			t.Errorf("shunt %q: exit code %d, want %d; stderr: %s", c.args, code, c.code, stderr)
		}
		if !strings.Contains(stdout, c.stdout) || c.stdout == "" && stdout != "" {
			t.Errorf("shunt %q: stdout %q, want %q in it", c.args, stdout, c.stdout)
		}
		if !strings.Contains(stderr, c.stderr) || c.stderr == "" && stderr != "" {
			t.Errorf("shunt %q: stderr %q, want %q in it", c.args, stderr, c.stderr)
		}
	}
	if runtime.GOOS == "linux" {
		if code, _, stderr := runArgs(t, "", "run", "--config", noCgroup); code != 2 || !strings.Contains(stderr, "bypass.cgroup: stat /no/such/cgroup") {
			t.Errorf("a cgroup that isn't there: exit code %d, stderr %q", code, stderr)
		}
	}
}

func TestHelpHidesWhatIsInternal(t *testing.T) {
	_, all, _ := runArgs(t, "", "help")
	_, demo, _ := runArgs(t, "", "help", "demo")
	for _, word := range []string{demoServiceName, demoClientName, "rounds", "grace"} {
		if strings.Contains(all+demo, word) {
			t.Errorf("help shows %q", word)
		}
	}
	for _, c := range commands() {
		if !c.hidden && (c.summary == "" || c.help == "") {
			t.Errorf("%s has no help", c.name)
		}
	}
}

func TestCheckPrintsWhereConnectionsGo(t *testing.T) {
	code, stdout, _ := runArgs(t, `
[admin]
listen = "unix:/run/shunt/admin.sock"
[[listener]]
name = "web"
listen = ":7000"
upstream = "web.internal:80"
[[listener]]
listen = "[::1]:7001"
upstream = "[::1]:5432"
bypass = "off"
`, "check", "--config", "-")
	want := `LISTENER    LISTEN      UPSTREAM         BYPASS
web         :7000       web.internal:80  auto
[::1]:7001  [::1]:7001  [::1]:5432       off
admin: unix:/run/shunt/admin.sock
`
	if code != 0 || stdout != want {
		t.Errorf("exit code %d, stdout:\n%s\nwant:\n%s", code, stdout, want)
	}
}

func TestNearest(t *testing.T) {
	words := []string{"listen", "upstream", "max_connections", "dial_timeout", "idle_timeout"}
	for word, want := range map[string]string{
		"listne": "listen", "Listen": "listen", "upstrem": "upstream", "max_connection": "max_connections",
		"maxconnections": "max_connections", "dail_timeout": "dial_timeout", "idletimeout": "idle_timeout",
		"max": "max_connections", "xyz": "", "": "", "q": "", strings.Repeat("l", 10000): "",
	} {
		if got := nearest(word, words); got != want {
			t.Errorf("nearest(%.20q) = %q, want %q", word, got, want)
		}
	}
	for _, c := range []struct {
		a, b string
		d    int
	}{{"", "", 0}, {"", "abc", 3}, {"abc", "acb", 1}, {"kitten", "sitting", 3}, {"ca", "abc", 3}} {
		if d := editDistance(c.a, c.b); d != c.d || editDistance(c.b, c.a) != d {
			t.Errorf("editDistance(%q, %q) = %d, want %d", c.a, c.b, d, c.d)
		}
	}
}
