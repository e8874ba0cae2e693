package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"shunt/splice"
	"shunt/test/kernels/record"
)

// result is what one kernel's guest has told.
type result struct {
	kernel  kernel
	missing error // could not be fetched
	died    error
	took    time.Duration

	mu       sync.Mutex
	uname    string
	report   *splice.Report
	tests    []record.Record
	warnings []string
	notes    []string
}

func (r *result) record(m record.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch m.Kind {
	case record.Begin:
		r.uname = m.Text
	case record.Probe:
		var rep splice.Report
		if err := json.Unmarshal(m.JSON, &rep); err != nil {
			r.notes = append(r.notes, "probe: "+err.Error())
			return
		}
		r.report = &rep
	case record.Test:
		r.tests = append(r.tests, m)
	case record.Warning:
		r.warnings = append(r.warnings, m.Text)
	case record.Note:
		r.notes = append(r.notes, m.Text)
	}
}

// count counts a suite's tests, or all for an empty name.
func (r *result) count(suite string) (passed, failed, skipped int) {
	for _, t := range r.tests {
		if suite != "" && t.Suite != suite {
			continue
		}
		switch t.Result {
		case "pass":
			passed++
		case "skip":
			skipped++
		default:
			failed++
		}
	}
	return passed, failed, skipped
}

func (r *result) bad() bool {
	if r.missing != nil {
		return false
	}
	passed, failed, _ := r.count("")
	return r.died != nil || r.report == nil || failed > 0 || passed == 0 || len(r.warnings) > 0
}

// print says for people what happened.
func (r *result) print(w io.Writer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	passed, failed, skipped := r.count("")
	fmt.Fprintf(&b, "== %s: %s\n", r.kernel, r.uname)
	if r.report != nil {
		if r.report.Possible {
			fmt.Fprintf(&b, "   bypass possible, verdict %s\n", r.report.Verdict)
		} else {
			fmt.Fprintf(&b, "   copied: %s\n", r.report.Reason)
		}
	}
	fmt.Fprintf(&b, "   %d passed, %d failed, %d skipped (%v)\n", passed, failed, skipped, r.took.Round(time.Second))
	for _, n := range r.notes {
		fmt.Fprintf(&b, "   note: %s\n", n)
	}
	if r.died != nil {
		fmt.Fprintf(&b, "   DIED: %v\n", r.died)
	}
	for _, t := range r.warnings {
		fmt.Fprintf(&b, "   kernel: %s\n", t)
	}
	for _, t := range r.tests {
		if t.Result == "fail" {
			fmt.Fprintf(&b, "--- FAIL %s: %s (%.1f s)\n%s\n", t.Suite, t.Name, t.Seconds, t.Text)
		}
	}
	skips := map[string]int{}
	for _, t := range r.tests {
		if t.Result == "skip" {
			skips[skipReason(t.Text)]++
		}
	}
	for reason, n := range skips {
		fmt.Fprintf(&b, "   skipped %d: %s\n", n, reason)
	}
	_, _ = io.WriteString(w, b.String())
}

// skipReason is what a skipped test wrote, without its place.
func skipReason(out string) string {
	for _, l := range strings.Split(out, "\n") {
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

// check finds a check of the probe by its name.
func check(r *splice.Report, name string) string {
	if r == nil {
		return "?"
	}
	for _, c := range r.Checks {
		if c.Name == name {
			if c.OK {
				return "yes"
			}
			return "no"
		}
	}
	return "-"
}

// summary is the table of all kernels.
func summary(results []*result, how string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "| suite | kernel | bypass | verdict |\n|---|---|---|---|\n")
	for _, r := range results {
		fmt.Fprintf(&b, "| %s | %s |\n", r.kernel.suite, r.kernel.pkg)
	}
	return b.String()
}
