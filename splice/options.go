package splice

import (
	"errors"

	"github.com/rs/zerolog"
)

// Verdict says how often the verdict runs for a sender.
type Verdict string

const (
	// VerdictAuto is VerdictWindow where the running kernel is known to carry
	// "bpf, sockmap: Fix sk_redir use-after-free in send verdict", else VerdictEvery.
	VerdictAuto Verdict = "auto"
	// VerdictEvery runs it for each send; safe on every supported kernel.
	VerdictEvery Verdict = "every"
	// VerdictWindow runs it once for Options.Window bytes.
	VerdictWindow Verdict = "window"
	// VerdictPermanent runs it once for a connection: no bound on the queue,
	// no way back to TCP, bypassed bytes not counted; needs a patched kernel.
	VerdictPermanent Verdict = "permanent"
)

// Limits and defaults of Options.
const (
	DefaultWindow     = 256 << 10
	DefaultMaxSockets = 65536
	// MaxQueueLimit is the auto limit of one receiver's queue, in bytes.
	MaxQueueLimit = 4 << 20
	// MinQueueLimit is as low as the auto limit goes, in bytes.
	MinQueueLimit = 64 << 10
)

// Options configure the bypass of a process.
type Options struct {
	// Cgroup is the cgroup v2 directory whose sockets are seen; empty: the
	// root of the cgroup2 mount, wherever that is.
	Cgroup string
	// Verdict: see the type.
	Verdict Verdict
	// Window is the bytes that one verdict is good for, with VerdictWindow.
	Window uint32
	// QueueLimit is the most redirected bytes that may wait unread for one
	// receiver before its sender is held back, give or take one window or
	// message; 0: auto, MaxQueueLimit or less where many wait.
	QueueLimit uint32
	// MaxSockets is the most sockets on the bypass; a connection has four.
	MaxSockets int
	// Log gets what happens behind the calls: stalled receivers, lost watches.
	Log zerolog.Logger
}

// DefaultOptions returns the defaults that the configuration file documents.
func DefaultOptions() Options {
	return Options{Verdict: VerdictAuto, Window: DefaultWindow, MaxSockets: DefaultMaxSockets, Log: zerolog.Nop()}
}

// Result is how a Check came out.
type Result string

const (
	// ResultOK: as it should be.
	ResultOK Result = "ok"
	// ResultMissing: the bypass needs it.
	ResultMissing Result = "missing"
	// ResultDiffers: the bypass works, and an application can see the difference from TCP.
	ResultDiffers Result = "differs"
	// ResultNA: not available, and not needed, or not tried.
	ResultNA Result = "n/a"
)

// errNotTried is a check's that depends on one that did not pass.
var errNotTried = errors.New("not tried")

// Check is one thing that the bypass needs or can use. Its JSON, and that of
// Report, is for programs too: keys and results stay as they are.
type Check struct {
	Name     string `json:"name"`
	Result   Result `json:"result"`
	OK       bool   `json:"ok"`
	Required bool   `json:"required"`
	// Detail is what was found, or why the check did not pass.
	Detail string `json:"detail"`
}

// Report is what this kernel, these privileges and this cgroup allow, found
// out by doing it.
type Report struct {
	// Possible is true where connections can be bypassed.
	Possible bool `json:"possible"`
	// Reason is the first required check that did not pass.
	Reason string  `json:"reason,omitempty"`
	Checks []Check `json:"checks"`
	// Verdict is the one in use, never VerdictAuto where Possible.
	Verdict Verdict `json:"verdict"`
	// QueueLimit is the most bytes that wait for one receiver.
	QueueLimit uint64 `json:"queue_limit"`
	// Budget is the bytes that all receivers together may have waiting, with
	// an automatic QueueLimit.
	Budget uint64 `json:"queue_budget"`
	// Known are the faults of the running kernel that no check can find out.
	Known []Fault `json:"known_faults"`
	// FIONREAD is true where it counts redirected bytes.
	FIONREAD bool `json:"fionread"`
	// Kernel is the running release.
	Kernel string `json:"kernel"`
}

func (r *Report) add(name string, required bool, err error, ok string) bool {
	c := Check{Name: name, Result: ResultOK, OK: err == nil, Required: required, Detail: ok}
	if err != nil {
		c.Detail = err.Error()
		if required && r.Reason == "" {
			r.Reason = name + ": " + c.Detail + fixes[name]
		}
		c.Result = ResultNA
		if required && !errors.Is(err, errNotTried) {
			c.Result = ResultMissing
		}
	}
	r.Checks = append(r.Checks, c)
	return c.OK
}

// fixes says what would make checks pass whose errors don't.
var fixes = map[string]string{
	"load programs": " (needs " + kernels + ", with BPF, and a seccomp profile that allows bpf(2))",
	"attach":        " (bypass.cgroup can name another cgroup)",
	"bounded queue": " (needs " + kernels + ")",
}

const kernels = "Linux 6.1.123, 6.6.69, 6.12.8, 6.13 or later"

// compare adds a check of what an application sees.
func (r *Report) compare(name string, err error, ok string) {
	if !r.add(name, false, err, ok) {
		r.Checks[len(r.Checks)-1].Result = ResultDiffers
	}
}

// ErrUnsupported is wrapped by Open's error on systems without the bypass.
var ErrUnsupported = errors.New("the bypass needs Linux")
