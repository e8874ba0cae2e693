// Command tiers runs all of shunt's tests and sums them up: the quick ones
// that need no privilege, those of the kernel part, and the end-to-end ones.
//
// It fails where a test failed, where a tier ran nothing, where something was
// skipped that this machine should be able to do, and where the kernel log
// has a new warning.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// limit bounds each tier.
const limit = 30 * time.Minute

// A tally counts tests and steps.
type tally struct{ passed, failed, skipped int }

func (t *tally) add(u tally) {
	t.passed += u.passed
	t.failed += u.failed
	t.skipped += u.skipped
}

// A step is one command of a tier. A step whose command is "go test" counts its tests, any other counts as one.
type step struct {
	name string
	argv []string
	env  []string
	// privileged steps are left out, as skipped, for other users than root.
	privileged bool
}

type tier struct {
	name  string
	steps []step
	// fetched says that what is tested comes from the network: a tier like that may skip everything.
	fetched bool
}

func tiers() []tier {
	quick := tier{name: "quick", steps: []step{
		{name: "lint", argv: []string{"make", "-s", "lint"}},
		{name: "unit tests with the race detector, and the seeds of the fuzz tests",
			argv: []string{"go", "test", "-race", "-timeout=15m", "./cmd/...", "./proxy/...", "./test/harness/...", "./test/tiers/...", "./test/kernels/..."}},
		{name: "Kubernetes manifests match the API's types", argv: []string{"go", "-C", "test/manifests", "run", ".", "../../cmd/shunt/deploy"}},
	}}
	for _, target := range []string{"linux/s390x", "linux/386", "darwin/arm64", "freebsd/amd64", "windows/amd64"} {
		system, arch, _ := strings.Cut(target, "/")
		quick.steps = append(quick.steps, step{
			name: "build for " + target, argv: []string{"sh", "-c", "go build ./... && go vet ./cmd/... ./proxy/... ./splice/... ./bpf/..."},
			env: []string{"GOOS=" + system, "GOARCH=" + arch, "CGO_ENABLED=0"},
		})
	}
	return []tier{
		quick,
		{name: "kernel", steps: []step{
			{name: "BPF objects match their sources", argv: []string{"go", "run", "./test/objects"}},
			{name: "tests of splice and bpf", argv: []string{"go", "test", "-count=1", "-timeout=15m", "./splice/...", "./bpf/..."}, privileged: true},
		}},
		{name: "end to end", steps: []step{
			{name: "end-to-end tests", argv: []string{"go", "test", "-count=1", "-timeout=29m", "./test"}},
		}},
		{name: "other kernels", fetched: true, steps: []step{
			{name: "the oldest and the newest that have the bypass, under QEMU",
				argv: []string{"sh", "-c", "test/kernels/setup.sh && go run ./test/kernels -quick"}},
		}},
	}
}

func main() {
	only := flag.String("only", "", "run only the tier of this name (quick, kernel, end to end, other kernels)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, *only))
}

func run(ctx context.Context, only string) int {
	begin := time.Now()
	require := abilities()
	fmt.Printf("this machine should be able to test: %s\n", strings.Join(append([]string{"copying"}, require...), ", "))
	before, logErr := kernelWarnings()
	var total tally
	bad := false
	for _, t := range tiers() {
		if only != "" && t.name != only {
			continue
		}
		sum := runTier(ctx, t, require)
		total.add(sum)
		if sum.passed == 0 && !(t.fetched && sum.failed == 0) {
			fmt.Printf("tier %q ran nothing\n", t.name)
			bad = true
		}
	}
	if logErr != nil {
		fmt.Printf("kernel log: not readable: %v\n", logErr)
		total.skipped++
	} else {
		after, err := kernelWarnings()
		fresh := after[min(len(before), len(after)):]
		switch {
		case err != nil:
			fmt.Printf("kernel log: %v\n", err)
			total.failed++
		case len(fresh) > 0:
			fmt.Printf("kernel log: %d new warnings:\n%s\n", len(fresh), strings.Join(fresh, "\n"))
			total.failed++
		default:
			fmt.Println("kernel log: no new warning")
			total.passed++
		}
	}
	fmt.Printf("took %v\n", time.Since(begin).Round(time.Second))
	fmt.Printf("%d passed, %d failed, %d skipped\n", total.passed, total.failed, total.skipped)
	if bad || total.failed > 0 || ctx.Err() != nil {
		return 1
	}
	return 0
}

func runTier(ctx context.Context, t tier, require []string) tally {
	fmt.Printf("\n== %s ==\n", t.name)
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	begin := time.Now()
	var sum tally
	for _, s := range t.steps {
		began := time.Now()
		var c tally
		var err error
		switch {
		case s.privileged && os.Geteuid() != 0:
			fmt.Printf("%s: skipped: missing root\n", s.name)
			sum.skipped++
			continue
		case s.argv[0] == "go" && s.argv[1] == "test":
			c, err = goTest(ctx, s, require)
		default:
			c, err = command(ctx, s)
		}
		sum.add(c)
		if err != nil {
			fmt.Printf("%s: FAILED: %v\n", s.name, err)
			if c.failed == 0 {
				sum.failed++
			}
			continue
		}
		fmt.Printf("%s: %d passed, %d failed, %d skipped (%v)\n", s.name, c.passed, c.failed, c.skipped, time.Since(began).Round(time.Second/10))
	}
	fmt.Printf("tier %s: %d passed, %d failed, %d skipped (%v)\n", t.name, sum.passed, sum.failed, sum.skipped, time.Since(begin).Round(time.Second))
	return sum
}

func environment(s step, require []string) []string {
	return append(append(os.Environ(), "SHUNT_TEST_REQUIRE="+strings.Join(require, ",")), s.env...)
}

func command(ctx context.Context, s step) (tally, error) {
	cmd := exec.CommandContext(ctx, s.argv[0], s.argv[1:]...)
	cmd.Env = environment(s, nil)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return tally{failed: 1}, fmt.Errorf("%w\n%s", err, out)
	}
	// "objects" and "kernels" say with exit code 0 and this word at the end that they did nothing.
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if last := lines[len(lines)-1]; strings.HasPrefix(last, "skipped") {
		fmt.Printf("%s: %s\n", s.name, last)
		return tally{skipped: 1}, nil
	}
	return tally{passed: 1}, nil
}

// event is a line of "go test -json".
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

// goTest runs tests and counts those that have no subtests.
func goTest(ctx context.Context, s step, require []string) (tally, error) {
	argv := slices.Insert(slices.Clone(s.argv[1:]), 1, "-json")
	cmd := exec.CommandContext(ctx, "go", argv...)
	cmd.Env = environment(s, require)
	cmd.Stderr = os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.StdoutPipe()
	if err != nil {
		return tally{}, err
	}
	if err := cmd.Start(); err != nil {
		return tally{}, err
	}
	c, readErr := count(bufio.NewReaderSize(out, 1<<20))
	err = errors.Join(cmd.Wait(), readErr)
	// splice and bpf know nothing of SHUNT_TEST_REQUIRE: their word for it is a skip.
	if s.privileged && slices.Contains(require, "bypass") && c.skipped > 0 {
		c.failed += c.skipped
		c.skipped = 0
		err = errors.Join(err, errors.New("tests were skipped that this machine should be able to run"))
	}
	return c, err
}

func count(r *bufio.Reader) (tally, error) {
	var c tally
	output := map[string][]string{}
	parents := map[string]bool{}
	skips := map[string]int{}
	dec := json.NewDecoder(r)
	for {
		var e event
		if err := dec.Decode(&e); err != nil {
			for reason, n := range skips {
				fmt.Printf("  skipped %d: %s\n", n, reason)
			}
			if err.Error() == "EOF" {
				return c, nil
			}
			return c, fmt.Errorf("go test -json: %w", err)
		}
		key := e.Package + " " + e.Test
		switch e.Action {
		case "run":
			if i := strings.LastIndexByte(e.Test, '/'); i > 0 {
				parents[e.Package+" "+e.Test[:i]] = true
			}
		case "output", "build-output":
			output[key] = append(output[key], e.Output)
		case "pass":
			if e.Test != "" && !parents[key] {
				c.passed++
			}
			delete(output, key)
		case "skip":
			if e.Test != "" && !parents[key] {
				c.skipped++
				skips[reason(output[key])]++
			}
			delete(output, key)
		case "fail", "build-fail":
			if e.Test != "" && parents[key] {
				fmt.Print(strings.Join(output[key], ""))
				continue
			}
			fmt.Printf("--- %s\n%s", key, strings.Join(output[key], ""))
			if e.Test != "" {
				c.failed++
			}
		}
	}
}

// reason is what a skipped test wrote, without its place.
func reason(lines []string) string {
	for _, l := range lines {
		l = strings.TrimSpace(l)
		if l == "" || strings.HasPrefix(l, "===") || strings.HasPrefix(l, "---") {
			continue
		}
		if _, text, ok := strings.Cut(l, ".go:"); ok {
			_, l, _ = strings.Cut(text, ": ")
		}
		return l
	}
	return "no reason"
}

// abilities is what a machine of this kind should be able to test: skips for the lack of them are failures.
func abilities() []string {
	if runtime.GOOS != "linux" || os.Geteuid() != 0 {
		return nil
	}
	list := []string{"root"}
	if _, err := exec.LookPath("apt-get"); err == nil {
		list = append(list, "programs") // setup.sh has installed them
	}
	// CAP_NET_ADMIN, CAP_PERFMON and CAP_BPF.
	const caps = 1<<12 | 1<<38 | 1<<39
	if effective()&caps == caps && mounted("cgroup2") {
		list = append(list, "bypass")
	}
	return list
}

func effective() (mask uint64) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	for _, line := range strings.Split(string(b), "\n") {
		if rest, ok := strings.CutPrefix(line, "CapEff:"); ok {
			_, _ = fmt.Sscanf(strings.TrimSpace(rest), "%x", &mask)
		}
	}
	return mask
}

func mounted(kind string) bool {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return false
	}
	for _, line := range strings.Split(string(b), "\n") {
		if f := strings.Fields(line); len(f) > 2 && f[2] == kind {
			return true
		}
	}
	return false
}

// kernelWarnings returns the lines of the kernel log that tell of a fault.
func kernelWarnings() ([]string, error) {
	out, err := exec.Command("dmesg").Output()
	if err != nil {
		return nil, err
	}
	var lines []string
	for _, line := range strings.Split(string(out), "\n") {
		for _, word := range []string{"WARNING:", "BUG:", "BUG ", "Oops", "general protection fault", "refcount_t", "INFO: task", "soft lockup", "KASAN"} {
			if strings.Contains(line, word) {
				lines = append(lines, line)
				break
			}
		}
	}
	return lines, nil
}
