package splice

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"shunt/bpf"
)

// Probe does everything that Open does, and takes it down again. The kernel
// needs: bounded queues, that is redirected bytes counted in sk_rmem_alloc
// (6.1.123, 6.6.69, 6.12.8, 6.13 and later). The report is never nil.
func Probe(o Options) *Report {
	k, r := open(o)
	if k != nil {
		k.Close()
	}
	if o.Verdict != VerdictPermanent && r.Possible {
		r.add("verdict permanent", false, probePermanent(o), "this kernel has the patch")
	}
	return r
}

// open is Open, with the report also where it does not work out.
func open(o Options) (*Kernel, *Report) {
	release, v := kernelRelease()
	k := &Kernel{
		opt:        o,
		stallAfter: stallAfter,
		locals:     map[[16]byte]bool{},
		listens:    map[bpf.ShuntListenKey][]bpf.ShuntListenValue{},
		routes:     map[*Route]struct{}{},
		fresh:      map[*Route]struct{}{},
		stalled:    map[stallKey]time.Time{},
		report:     Report{Kernel: release, QueueLimit: uint64(o.QueueLimit)},
	}
	r := &k.report
	k.budget = budgetOf()
	r.Budget = k.budget
	if o.QueueLimit == 0 {
		r.QueueLimit = MaxQueueLimit
	}
	r.Known = knownIn(v)
	unsafe := r.OfVerdict(VerdictWindow)
	r.Verdict = o.Verdict
	if o.Verdict == VerdictAuto || o.Verdict == "" {
		r.Verdict = VerdictWindow
		if unsafe != nil {
			r.Verdict = VerdictEvery
		}
	}
	switch r.Verdict {
	case VerdictEvery:
		k.mode = bpf.ShuntModeMODE_EVERY
	case VerdictWindow:
		k.mode = bpf.ShuntModeMODE_WINDOW
	case VerdictPermanent:
		k.mode = bpf.ShuntModeMODE_PERMANENT
	default:
		r.add("options", true, fmt.Errorf("unknown verdict %q", o.Verdict), "")
		return nil, r
	}

	fail := func() (*Kernel, *Report) {
		rep := *r
		k.Close()
		return nil, &rep
	}
	missing := checkCapabilities(r)
	cgroup, at, err := openCgroup(o.Cgroup)
	if cgroup != nil {
		defer cgroup.Close()
	}
	r.add("cgroup2", true, err, at)
	if cgroup != nil && o.Cgroup == "" {
		r.add("cgroup of the host", false, wholeHierarchy(cgroup), "all sockets of this host are seen")
	}
	if len(missing) > 0 {
		r.add("load programs", true, fmt.Errorf("%w without these capabilities", errNotTried), "")
		if !initialUserNamespace() {
			r.Reason = "capabilities of a user namespace don't count for bpf(2)"
		} else {
			r.Reason = fmt.Sprintf("missing: %s (run as root, or setcap cap_bpf,cap_net_admin,cap_perfmon+ep shunt)", strings.Join(missing, ", "))
		}
		return fail()
	}
	if !r.add("load programs", true, plain(k.load()), "verdict, sock_ops, sock_release, setsockopt, inspect and iterator accepted") || cgroup == nil {
		return fail()
	}
	if !r.add("attach", true, plain(k.attach(cgroup)), "attached to "+at) {
		return fail()
	}
	if !r.add("addresses", true, k.refreshLocals(), fmt.Sprintf("%d addresses of this host", len(k.locals))) {
		return fail()
	}
	if !k.selfTest(r, cgroup) {
		return fail()
	}
	var windowErr error
	if unsafe != nil {
		windowErr = fmt.Errorf("a fault is known of %s, so \"auto\" means \"every\"", release)
	}
	r.add("verdict window", false, windowErr, "no fault is known of "+release)
	r.Possible = true
	k.start()
	return k, r
}

// probePermanent tries the flag on a route of its own: a kernel without it
// fails every later send on the socket.
func probePermanent(o Options) error {
	o.Verdict = VerdictPermanent
	k, r := open(o)
	if k == nil {
		return fmt.Errorf("no release of Linux has the patch for it (%s)", strings.TrimPrefix(r.Reason, "verdict permanent: "))
	}
	return k.Close()
}

// kernelTypes is where the kernel describes its types, by which programs fit themselves to it.
const kernelTypes = "/sys/kernel/btf/vmlinux"

// plain makes one readable line of the loader's errors.
func plain(err error) error {
	if err == nil {
		return nil
	}
	var ve *ebpf.VerifierError
	if errors.As(err, &ve) && len(ve.Log) > 0 {
		return fmt.Errorf("refused by the verifier: %w (%s)", ve.Cause, strings.TrimSpace(ve.Log[len(ve.Log)-1]))
	}
	if _, serr := os.Stat(kernelTypes); serr != nil && errors.Is(err, ebpf.ErrNotSupported) {
		return fmt.Errorf("%w; %s is missing: is /sys mounted, and the kernel built with BTF?", err, kernelTypes)
	}
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w (missing capability, or seccomp forbids bpf(2))", err)
	}
	return err
}

// neededCaps are the capabilities of the bypass and what each is for.
var neededCaps = []struct {
	name string
	bit  uint
	why  string
}{
	{"CAP_BPF", unix.CAP_BPF, "maps and programs"},
	{"CAP_NET_ADMIN", unix.CAP_NET_ADMIN, "the verdict and the cgroup programs"},
	{"CAP_PERFMON", unix.CAP_PERFMON, "reading the receiver's queue"},
}

// checkCapabilities returns the names of those that are not there.
func checkCapabilities(r *Report) (missing []string) {
	eff, err := effectiveCaps()
	if err == nil && !initialUserNamespace() {
		err = errors.New("held in a user namespace only, where it doesn't count for bpf(2)")
	}
	for _, c := range neededCaps {
		cerr := err
		// CAP_SYS_ADMIN stands for the other two in the kernel's checks.
		if cerr == nil && eff&(1<<c.bit) == 0 && (c.bit == unix.CAP_NET_ADMIN || eff&(1<<unix.CAP_SYS_ADMIN) == 0) {
			cerr = fmt.Errorf("not there; it is for %s", c.why)
		}
		if !r.add(c.name, true, cerr, "there, for "+c.why) {
			missing = append(missing, c.name)
		}
	}
	return missing
}

// initialUserNamespace says whether all user ids are mapped to themselves.
func initialUserNamespace() bool {
	b, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return true
	}
	f := strings.Fields(string(b))
	return len(f) == 3 && f[0] == "0" && f[1] == "0" && f[2] == "4294967295"
}

func effectiveCaps() (uint64, error) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	_, rest, ok := strings.Cut(string(b), "CapEff:")
	if !ok {
		return 0, errors.New("no CapEff in /proc/self/status")
	}
	f := strings.Fields(rest)
	if len(f) == 0 {
		return 0, errors.New("empty CapEff in /proc/self/status")
	}
	return strconv.ParseUint(f[0], 16, 64)
}
