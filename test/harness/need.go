package harness

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// What a test may need of the machine. The environment variable
// SHUNT_TEST_REQUIRE lists, separated by commas, what this machine should
// have been able to do: missing it then fails the test instead of skipping it.
const (
	// AbilityBypass is BPF, cgroup2 and the capabilities for the bypass.
	AbilityBypass = "bypass"
	// AbilityRoot is the right to make namespaces, limits and users.
	AbilityRoot = "root"
	// AbilityNAT is address translation by nft.
	AbilityNAT = "nat"
	// AbilityVsock is VSOCK connections within this host.
	AbilityVsock = "vsock"
	// AbilityPrograms is the real programs of the suite.
	AbilityPrograms = "programs"
)

// Missing skips the test, or fails it where the machine should have had the ability.
func Missing(t testing.TB, ability, what string) {
	t.Helper()
	if slices.Contains(strings.Split(os.Getenv("SHUNT_TEST_REQUIRE"), ","), ability) {
		t.Fatalf("this machine should be able to run this: missing %s", what)
	}
	t.Skipf("missing %s", what)
}

// NeedBypass skips the test where "shunt probe" says that only copying is possible.
func NeedBypass(t testing.TB) {
	t.Helper()
	r, err := report()
	switch {
	case err != nil:
		Missing(t, AbilityBypass, "the bypass: shunt probe: "+err.Error())
	case !r.Possible:
		Missing(t, AbilityBypass, "the bypass: "+r.Reason)
	}
}

// NeedRoot skips the test for other users than root.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Missing(t, AbilityRoot, "root")
	}
}

// NeedProgram returns the path of the first program that exists, and skips
// the test where none does. Names with a slash are taken as they are.
func NeedProgram(t testing.TB, names ...string) string {
	t.Helper()
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	Missing(t, AbilityPrograms, "the program "+names[0])
	return ""
}

// Report is what "shunt probe --json" says of this machine, as far as tests want to know.
type Report struct {
	Possible    bool   `json:"possible"`
	Reason      string `json:"reason"`
	Verdict     string `json:"verdict"`
	QueueBudget int64  `json:"queue_budget"`
	FIONREAD    bool   `json:"fionread"`
	Checks      []struct {
		Name   string `json:"name"`
		OK     bool   `json:"ok"`
		Detail string `json:"detail"`
	} `json:"checks"`
	Known []struct {
		Commit  string `json:"commit"`
		Verdict string `json:"verdict"`
	} `json:"known_faults"`
}

// FaultOfBypass is the commit that the running kernel's bypass lacks, or empty.
func (r Report) FaultOfBypass() string {
	for _, f := range r.Known {
		if f.Verdict == "" {
			return f.Commit
		}
	}
	return ""
}

var report = sync.OnceValues(func() (r Report, _ error) {
	bin, err := Build()
	if err != nil {
		return r, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, bin, "probe", "--json").Output()
	// Exit status 3 says that only copying is possible.
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.ExitCode() == 3 {
		err = nil
	}
	if err == nil {
		err = json.Unmarshal(out, &r)
	}
	return r, err
})

// Probe returns the report of "shunt probe", asked once.
func Probe(t testing.TB) Report {
	t.Helper()
	r, err := report()
	if err != nil {
		t.Fatalf("shunt probe --json: %v", err)
	}
	return r
}

// SkipForFault skips a test on the bypass that would meet a fault of this
// kernel that shunt knows of, with a commit whose title has this word.
func SkipForFault(t testing.TB, p Path, word string) {
	t.Helper()
	if !p.Bypass() {
		return
	}
	for _, f := range Probe(t).Known {
		if strings.Contains(f.Commit, word) {
			t.Skipf("known fault of this kernel, where the bypass is declined unless asked for: %s is missing", f.Commit)
		}
	}
}
