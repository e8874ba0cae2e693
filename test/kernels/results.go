//go:build linux

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

// count counts a suite's tests, or all for an empty name. What the kernel with
// BPF_F_PERMANENT runs at full size is splice's, too.
func (r *result) count(suite string) (passed, failed, skipped int) {
	for _, t := range r.tests {
		if of := strings.Replace(t.Suite, "permanent", "splice", 1); suite != "" && of != suite {
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

// check says how a check of the probe came out: in the words that are given
// for ok and for any other result.
func (r *result) check(name, yes, no string) string {
	if r.report != nil {
		for _, c := range r.report.Checks {
			if c.Name != name {
				continue
			}
			if c.Result == splice.ResultOK {
				return yes
			}
			return no
		}
	}
	return "-"
}

// group counts the tests of a rule: those whose names begin with one of the prefixes.
func (r *result) group(prefixes ...string) string {
	var passed, failed, skipped int
	for _, t := range r.tests {
		for _, p := range prefixes {
			if !strings.HasPrefix(t.Name, p) {
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
			break
		}
	}
	switch {
	case failed > 0:
		return fmt.Sprintf("%d FAILED", failed)
	case passed == 0:
		return "-"
	case skipped > 0 && (r.report == nil || !r.report.Possible):
		return "copied"
	}
	return "ok"
}

// The rules of the table, by the tests of both suites that check them.
var rules = []struct {
	name     string
	prefixes []string
}{
	{"content, order", []string{"TestStreamsArriveWhole", "TestEverySize", "TestEchoKeepsOrder", "TestCutover", "TestManySends", "TestManyWriters", "TestCounts"}},
	{"bounded queue", []string{"TestSlowReader", "TestTinySends", "TestCorkedSender"}},
	{"close", []string{"TestQueuedBytesOutlive", "TestSenderMeets", "TestHalfClose", "TestService", "TestResetStays", "TestCleanEnd", "TestLateLarge", "TestWriteAndEnd", "TestEndComes", "TestBothHalf", "TestPeerFinished", "TestTrickle", "TestSilent"}},
	{"namespaces, NAT, cgroups", []string{"TestNamespace", "TestListenersOf", "TestWildcard", "TestTranslated", "TestCgroup", "TestWhichClients", "TestNoCgroup"}},
	{"VSOCK", []string{"TestSocatVsock"}},
}

// summary is the table of all kernels.
func summary(results []*result, how string) string {
	var b strings.Builder
	b.WriteString("# Kernels\n\nWritten by `make test-kernels`; the list is [kernels.list](kernels.list). ")
	fmt.Fprintf(&b, "These guests were run by %s.\n\n", how)
	b.WriteString("## What the kernel does\n\nAs `shunt probe` in the guest says; the verdict is what `auto` chose.\n\n")
	b.WriteString("| kernel | suite | bypass | verdict | `permanent` | FIONREAD | MSG_PEEK | MSG_WAITALL | splice(2) read | kTLS refused | known faults |\n|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range results {
		if r.report == nil {
			continue
		}
		bypass, verdict := "yes", string(r.report.Verdict)
		if !r.report.Possible {
			bypass, verdict = "no: "+r.report.Reason, "-"
		}
		faults := "-"
		for _, f := range r.report.Known {
			what := "bypass"
			if f.Verdict != "" {
				what = "`" + string(f.Verdict) + "`"
			}
			if faults == "-" {
				faults = ""
			} else {
				faults += "; "
			}
			faults += fmt.Sprintf("%s: \"%s\"", what, f.Commit)
		}
		tls := "-"
		for _, c := range r.report.Checks {
			if c.Name == "kTLS refused" {
				tls, _, _ = strings.Cut(c.Detail, " (")
			}
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", r.name(), r.kernel.suite, bypass, verdict,
			r.check("verdict permanent", "yes", "declined"), r.check("FIONREAD", "right", "wrong"), r.check("MSG_PEEK and poll", "ok", "FAILED"),
			r.check("MSG_WAITALL", "whole", "short"), r.check("splice(2) read", "ok", "sees nothing"), tls, faults)
	}
	b.WriteString("\n## The tests\n\nThe test binaries of `splice` and of `test` (end to end), sizes divided by " + scale + " and a choice of them; a dash: not run there. Where the bypass is impossible everything must be copied, and the tests of the bypass are skipped with the probe's reason.\n\n")
	b.WriteString("| kernel | splice: passed, failed, skipped | end to end: passed, failed, skipped |")
	for _, rule := range rules {
		fmt.Fprintf(&b, " %s |", rule.name)
	}
	b.WriteString(" kernel warnings |\n|---|---|---|" + strings.Repeat("---|", len(rules)) + "---|\n")
	for _, r := range results {
		if r.missing != nil {
			continue
		}
		fmt.Fprintf(&b, "| %s |", r.name())
		for _, suite := range []string{"splice", "end to end"} {
			passed, failed, skipped := r.count(suite)
			fmt.Fprintf(&b, " %d, %d, %d |", passed, failed, skipped)
		}
		for _, rule := range rules {
			fmt.Fprintf(&b, " %s |", r.group(rule.prefixes...))
		}
		warnings := "none"
		if len(r.warnings) > 0 {
			warnings = fmt.Sprintf("%d: %s", len(r.warnings), cell(r.warnings[0]))
		}
		if r.died != nil {
			warnings += "; " + cell(r.died.Error())
		}
		fmt.Fprintf(&b, " %s |\n", warnings)
	}
	first := true
	for _, r := range results {
		if r.missing == nil {
			continue
		}
		if first {
			b.WriteString("\n## Not to be had\n\n")
			first = false
		}
		fmt.Fprintf(&b, "* %s: %v\n", r.kernel, r.missing)
	}
	return b.String()
}

// name is the kernel's version, as the distribution's package has it.
func (r *result) name() string {
	if r.kernel.built != "" {
		release, _, _ := strings.Cut(r.uname, " ")
		return release
	}
	return r.kernel.version
}

// cell makes one line of a text, for a table.
func cell(s string) string {
	s, _, _ = strings.Cut(strings.ReplaceAll(s, "|", "/"), "\n")
	return s
}
