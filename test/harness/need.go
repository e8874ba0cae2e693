package harness

import (
	"context"
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

var probe = sync.OnceValues(func() (string, error) {
	bin, err := Build()
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, bin, "probe").CombinedOutput()
	return string(out), err
})

// NeedBypass skips the test where "shunt probe" says that only copying is possible.
func NeedBypass(t testing.TB) {
	t.Helper()
	if out, err := probe(); err != nil {
		Missing(t, AbilityBypass, "the bypass: shunt probe: "+err.Error()+"\n"+out)
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
