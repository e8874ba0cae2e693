//go:build linux

// Command bench measures shunt beside no proxy at all, haproxy and socat.
//
// Every workload runs on every path in turn, round after round, so that
// whatever disturbs the machine disturbs all of them; the table shows medians
// and ratios. Raw output is kept under test/results.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"shunt/test/harness"
)

func main() {
	o := options{}
	flag.IntVar(&o.rounds, "rounds", 3, "how often everything is measured")
	flag.IntVar(&o.seconds, "seconds", 2, "length of one measurement, where the tool takes one")
	short := flag.Bool("short", false, "one round of one second each")
	only := flag.String("only", "", "regular `expression` that picks workloads")
	paths := flag.String("paths", "", "comma separated `list` of paths instead of all: "+strings.Join(allPaths, ","))
	flag.StringVar(&o.markdown, "markdown", "", "write the table to this `FILE` too")
	flag.Parse()
	if *short {
		o.rounds, o.seconds = 1, 1
	}
	o.only = regexp.MustCompile(*only)
	o.paths = allPaths
	if *paths != "" {
		o.paths = strings.Split(*paths, ",")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

type options struct {
	rounds, seconds int
	only            *regexp.Regexp
	paths           []string
	markdown        string
}

// unpaired is shunt with the bypass on, and a service outside of the cgroup
// that it watches: the client is enrolled, and then the connection is copied.
const unpaired = "unpaired"

var allPaths = []string{"direct", "every", "window", "off", unpaired, "haproxy", "socat", "as-socat"}

// results maps a workload's name and a path to its values, one per round.
type results map[string]map[string][]float64

func (r results) median(workload, path string) (float64, bool) {
	v := slices.Sorted(slices.Values(r[workload][path]))
	if len(v) == 0 {
		return 0, false
	}
	return v[len(v)/2], true
}

func run(ctx context.Context, o options) error {
	if _, err := harness.Build(); err != nil {
		return err
	}
	root, err := harness.Root()
	if err != nil {
		return err
	}
	raw := filepath.Join(root, "test", "results", time.Now().UTC().Format("20060102-150405"))
	if err := os.MkdirAll(raw, 0o755); err != nil {
		return err
	}
	b := &bench{options: o, raw: raw, results: results{}}
	var picked []*workload
	for _, w := range workloads() {
		if o.only.MatchString(w.name) {
			picked = append(picked, w)
		}
	}
	begin := time.Now()
	for round := range o.rounds {
		for _, w := range picked {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			fmt.Fprintf(os.Stderr, "round %d of %d: %s\n", round+1, o.rounds, w.name)
			if err := b.measure(ctx, w, round); err != nil {
				return fmt.Errorf("%s: %w", w.name, err)
			}
		}
	}
	var out strings.Builder
	fmt.Fprintf(&out, "%s, %s; %d rounds, %v\n\n", machine(), kernel(), o.rounds, time.Since(begin).Round(time.Second))
	table(&out, b.results, picked, o.paths)
	targets(&out, b.results)
	for _, e := range b.errors {
		fmt.Fprintf(&out, "\nerror: %s\n", e)
	}
	fmt.Print(out.String())
	fmt.Fprintf(os.Stderr, "\nraw output: %s\n", strings.TrimPrefix(raw, root+"/"))
	if err := os.WriteFile(filepath.Join(raw, "table.md"), []byte(out.String()), 0o644); err != nil {
		return err
	}
	if o.markdown != "" {
		if err := os.WriteFile(o.markdown, []byte(out.String()), 0o644); err != nil {
			return err
		}
	}
	if len(b.errors) > 0 {
		return fmt.Errorf("%d measurements failed or lost messages", len(b.errors))
	}
	return nil
}

func machine() string {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "unknown machine"
	}
	n, model := 0, "unknown processor"
	for _, line := range strings.Split(string(b), "\n") {
		key, value, _ := strings.Cut(line, ":")
		switch strings.TrimSpace(key) {
		case "processor":
			n++
		case "model name":
			model = strings.TrimSpace(value)
		}
	}
	return fmt.Sprintf("%d cores of %s", n, model)
}

func kernel() string {
	out, err := exec.Command("uname", "-sr").Output()
	if err != nil {
		return "unknown kernel"
	}
	return strings.TrimSpace(string(out))
}

// table writes medians with their ratio to direct and to haproxy.
func table(out *strings.Builder, r results, picked []*workload, paths []string) {
	fmt.Fprintf(out, "Medians; in parentheses the ratio to direct, and to haproxy.\n\n| | unit | %s |\n|---|---|%s\n",
		strings.Join(paths, " | "), strings.Repeat("---|", len(paths)))
	for _, w := range picked {
		fmt.Fprintf(out, "| %s | %s |", w.name, w.unit)
		direct, okDirect := r.median(w.name, "direct")
		peer, okPeer := r.median(w.name, "haproxy")
		for _, p := range paths {
			v, ok := r.median(w.name, p)
			if !ok {
				fmt.Fprint(out, " - |")
				continue
			}
			ratio := func(base float64, ok bool) string {
				if !ok || base == 0 {
					return "-"
				}
				return fmt.Sprintf("%.2f", v/base)
			}
			fmt.Fprintf(out, " %s (%s, %s) |", number(v), ratio(direct, okDirect), ratio(peer, okPeer))
		}
		fmt.Fprintln(out)
	}
}

func number(v float64) string {
	switch {
	case v >= 1e6:
		return fmt.Sprintf("%.2fM", v/1e6)
	case v >= 1e4:
		return fmt.Sprintf("%.1fk", v/1e3)
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	default:
		return fmt.Sprintf("%.2f", v)
	}
}

// targets writes what is to be reached and whether it was.
func targets(out *strings.Builder, r results) {
	fmt.Fprintf(out, "\n| target | ratio | wanted | reached |\n|---|---|---|---|\n")
	for _, t := range []struct {
		workload, path, base string
		below                bool
		bound                float64
		enough               float64 // a value that will do, whatever the ratio
	}{
		{pingpong64, "window", "direct", true, 0.70, 0},
		{pingpong64, "every", "direct", true, 0.80, 0},
		{pingpong64, "window", "haproxy", true, 0.35, 0},
		{pingpong64, "every", "haproxy", true, 0.35, 0},
		{pingpong1472ns, "window", "direct", true, 0.55, 0},
		{pingpong1472ns, "every", "direct", true, 0.55, 0},
		{throughput1472ns, "window", "direct", false, 1.7, 0},
		{throughput1472ns, "every", "direct", false, 1.7, 0},
		{iperf16K, "window", "direct", false, 1.0, 0},
		{iperf16K, "every", "direct", false, 1.0, 0},
		{iperf128K, "window", "direct", false, 1.5, 0},
		{iperf128K, "every", "direct", false, 1.5, 0},
		{iperf128K, unpaired, "off", false, 0.95, 0},
		{redisGet, "window", "direct", false, 1.2, 0},
		{redisGet, "every", "direct", false, 1.2, 0},
		{nginx100, "window", "direct", false, 1.1, 0},
		{nginx100, "every", "direct", false, 1.1, 0},
		{idleMemory, "off", "haproxy", true, 1.0, 0},
		{pingpong64, "as-socat", "socat", true, 0.25, 0},
		{connections, "as-socat", "socat", false, 10, 5000},
		{idleMemory, "as-socat", "socat", true, 0.05, 0},
	} {
		v, ok1 := r.median(t.workload, t.path)
		base, ok2 := r.median(t.workload, t.base)
		if !ok1 || !ok2 || base == 0 {
			continue
		}
		ratio, sign, reached := v/base, ">=", "no"
		if t.below {
			sign = "<="
		}
		bound := fmt.Sprintf("%s %.2f", sign, t.bound)
		if t.enough > 0 {
			bound += fmt.Sprintf(", or %s", number(t.enough))
		}
		if t.enough > 0 && v >= t.enough || t.below && ratio <= t.bound || !t.below && ratio >= t.bound {
			reached = "yes"
		}
		fmt.Fprintf(out, "| %s, %s / %s | %.2f | %s | %s |\n", t.workload, t.path, t.base, ratio, bound, reached)
	}
}
