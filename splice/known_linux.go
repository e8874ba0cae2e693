package splice

import (
	"fmt"
	"os"
)

// fault is a row of the table of known faults.
type fault struct {
	Fault
	// fixed lists, by series, the first release with the fix. From mainline on
	// every release has it, and a series that is not listed has it nowhere.
	fixed    []version
	mainline version
	// applies says, where it isn't nil, whether this host can meet the fault at all.
	applies func() bool
}

// The fixed releases are those that carry the commit's title in their change logs.
var knownFaults = []fault{
	{
		// 5.15.216 has it too, where there is no bypass.
		Fault: Fault{
			Commit:  "bpf, sockmap: Fix sk_redir use-after-free in send verdict",
			CVE:     "CVE-2026-74589",
			Effect:  "two threads that send on one socket under a verdict for several sends can corrupt the kernel",
			Verdict: VerdictWindow,
		},
		fixed:    []version{{6, 1, 183}, {6, 6, 152}, {6, 12, 104}, {6, 18, 45}, {7, 1, 9}},
		mainline: version{7, 2, 0},
	},
	{
		// accept compares sk_prot to tell the two apart, and a sockmap has replaced it.
		Fault: Fault{
			Commit: "mptcp: Fix proto fallback detection with BPF",
			Effect: "an MPTCP listener of this host (Go's are, unless told otherwise) that accepts a connection on the bypass takes it for MPTCP: a panic on 6.1, a warning and a broken socket on later ones",
		},
		fixed:    []version{{6, 1, 159}, {6, 6, 118}, {6, 12, 60}, {6, 17, 10}},
		mainline: version{6, 18, 0},
		applies:  hasMPTCP,
	},
}

func hasMPTCP() bool {
	_, err := os.Stat("/proc/sys/net/mptcp/enabled")
	return err == nil
}

// in says whether a release has the fault.
func (f *fault) in(v version) bool {
	if !v.before(f.mainline) {
		return false
	}
	for _, fixed := range f.fixed {
		if fixed[0] == v[0] && fixed[1] == v[1] {
			return v.before(fixed)
		}
	}
	return true
}

// knownIn returns the rows that apply to a release.
func knownIn(v version) []Fault {
	known := []Fault{}
	for i := range knownFaults {
		f := &knownFaults[i]
		if !f.in(v) || f.applies != nil && !f.applies() {
			continue
		}
		row := f.Fault
		for _, w := range append(f.fixed[:len(f.fixed):len(f.fixed)], f.mainline) {
			row.Fixed = append(row.Fixed, w.String())
		}
		known = append(known, row)
	}
	return known
}

// String writes a version as the kernel does; the first of a series without its zero.
func (v version) String() string {
	if v[2] == 0 {
		return fmt.Sprintf("%d.%d", v[0], v[1])
	}
	return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2])
}
