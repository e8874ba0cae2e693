package harness

import (
	"os"
	"strings"
	"testing"
)

// Path names the way a test's bytes take between client and service.
type Path string

const (
	// Direct is no proxy at all: what a test expects must hold there too.
	Direct Path = "direct"
	// Off is shunt with bypass = "off": every byte is copied.
	Off Path = "off"
	// Every is the bypass with a verdict for each send.
	Every Path = "every"
	// Window is the bypass with one verdict for each window of bytes.
	Window Path = "window"
	// Socat and HAProxy put these programs in shunt's place. They are known
	// to break some of the rules, and show that the tests can fail.
	Socat   Path = "socat"
	HAProxy Path = "haproxy"
	// AsSocat is shunt with socat's command line.
	AsSocat Path = "as-socat"
)

// Shunt says whether the path goes through shunt.
func (p Path) Shunt() bool { return p == Off || p.Bypass() }

// Bypass says whether the path is the bypass.
func (p Path) Bypass() bool { return p == Every || p == Window }

// Paths returns the paths that a test runs on: off, every and window, or
// those that the environment variable SHUNT_TEST_PATHS lists.
func Paths() []Path {
	list := os.Getenv("SHUNT_TEST_PATHS")
	if list == "" {
		return []Path{Off, Every, Window}
	}
	var paths []Path
	for _, name := range strings.Split(list, ",") {
		paths = append(paths, Path(strings.TrimSpace(name)))
	}
	return paths
}

// EachPath runs f once for each of [Paths], as a subtest of that name.
func EachPath(t *testing.T, f func(t *testing.T, p Path)) {
	t.Helper()
	OnPaths(t, Paths(), f)
}

// EachShuntPath is EachPath without the paths that don't go through shunt.
func EachShuntPath(t *testing.T, f func(t *testing.T, p Path)) {
	t.Helper()
	var paths []Path
	for _, p := range Paths() {
		if p.Shunt() {
			paths = append(paths, p)
		}
	}
	OnPaths(t, paths, f)
}

// EachBypass is EachPath with the bypass paths only.
func EachBypass(t *testing.T, f func(t *testing.T, p Path)) {
	t.Helper()
	var paths []Path
	for _, p := range Paths() {
		if p.Bypass() {
			paths = append(paths, p)
		}
	}
	OnPaths(t, paths, f)
}

// OnPaths runs f as a subtest on each of paths.
func OnPaths(t *testing.T, paths []Path, f func(t *testing.T, p Path)) {
	t.Helper()
	if testing.Short() {
		t.Skip("end-to-end test, not run with -short")
	}
	if len(paths) == 0 {
		t.Skip("no path of SHUNT_TEST_PATHS fits this test")
	}
	for _, p := range paths {
		t.Run(string(p), func(t *testing.T) {
			if p.Bypass() {
				NeedBypass(t)
			}
			f(t, p)
		})
	}
}
