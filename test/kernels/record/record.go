// Package record is what the guest of a kernel test tells the host: one JSON
// object a line.
package record

import "encoding/json"

// The kinds of a Record.
const (
	// Begin says that the guest's init runs; Text is the kernel's version string.
	Begin = "begin"
	// Note is anything that a reader of the log may want to know.
	Note = "note"
	// Probe has what "shunt probe --json" printed.
	Probe = "probe"
	// Test is one test that ended; of a test with subtests, those alone count.
	Test = "test"
	// Warning is a line of the kernel log that tells of a fault.
	Warning = "warning"
	// End is the success marker: the guest did all that it was told.
	End = "end"
)

// A Record is one message.
type Record struct {
	Kind string          `json:"kind"`
	Text string          `json:"text,omitempty"`
	JSON json.RawMessage `json:"json,omitempty"`

	// Of a Test.
	Suite   string  `json:"suite,omitempty"`
	Name    string  `json:"name,omitempty"`
	Result  string  `json:"result,omitempty"` // pass, fail or skip
	Seconds float64 `json:"seconds,omitempty"`
}

// A Job is a test binary that the guest runs.
type Job struct {
	Suite   string   `json:"suite"`
	Binary  string   `json:"binary"`
	Dir     string   `json:"dir"`
	Args    []string `json:"args"`
	Env     []string `json:"env"`
	Seconds int      `json:"seconds"` // its bound
}

// A Plan is what the host tells the guest, in the file /plan.json.
type Plan struct {
	Modules []string `json:"modules"` // paths, in the order of their dependencies
	Jobs    []Job    `json:"jobs"`
}
