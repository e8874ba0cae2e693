package splice

import (
	"fmt"
	"strings"
)

// Fault is a fault of the running kernel that no check can find out safely. What
// is known goes by the release alone, and a distribution may have backported the
// fix: bypass = "on" and an explicit verdict are taken in spite of it.
type Fault struct {
	// Commit is the title of the commit that mends it.
	Commit string `json:"commit"`
	CVE    string `json:"cve,omitempty"`
	// Effect is what happens.
	Effect string `json:"effect"`
	// Fixed are the first releases, by series, that have the fix.
	Fixed []string `json:"fixed"`
	// Verdict is the one that has the fault; empty: the whole bypass.
	Verdict Verdict `json:"verdict,omitempty"`
}

// String names the fault and the releases without it.
func (f Fault) String() string {
	name := fmt.Sprintf("%q", f.Commit)
	if f.CVE != "" {
		name += " (" + f.CVE + ")"
	}
	return fmt.Sprintf("%s is missing, fixed in %s: %s", name, strings.Join(f.Fixed, ", "), f.Effect)
}

// OfBypass returns the first fault that is the whole bypass's, or nil.
func (r *Report) OfBypass() *Fault {
	for i := range r.Known {
		if r.Known[i].Verdict == "" {
			return &r.Known[i]
		}
	}
	return nil
}

// OfVerdict returns the first fault of a verdict, or nil.
func (r *Report) OfVerdict(v Verdict) *Fault {
	for i := range r.Known {
		if r.Known[i].Verdict == v {
			return &r.Known[i]
		}
	}
	return nil
}
