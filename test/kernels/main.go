//go:build linux

// Command kernels boots the kernels of kernels.list under QEMU, runs shunt's
// tests of the bypass in each, and writes what it found as a table.
//
// The kernels are Debian's own packages, downloaded and unpacked, never
// installed. Downloads and images stay in a cache outside of the tree:
// $SHUNT_KERNELS_CACHE, else "shunt-kernels" in the user's cache folder.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"shunt/test/kernels/record"
)

type flags struct {
	only      string
	quick     bool
	few       bool
	params    string
	parallel  int
	limit     time.Duration
	cpus      int
	tests     string
	seconds   int
	permanent bool
	build     bool
	out       string
}

func main() {
	var f flags
	flag.StringVar(&f.only, "kernel", "", "run only the kernels whose suite or package match this `regexp`")
	flag.BoolVar(&f.quick, "quick", false, "run only the newest and the oldest kernel that has the bypass, and fewer tests")
	flag.BoolVar(&f.few, "few", false, "run few tests on each kernel, those of -quick")
	flag.IntVar(&f.parallel, "parallel", 2, "guests at the same time")
	flag.IntVar(&f.cpus, "cpus", 1, "processors of a guest; with emulation, more than one is less reliable")
	flag.DurationVar(&f.limit, "limit", 0, "bound for one kernel; 0: what its test binaries may take")
	flag.StringVar(&f.tests, "run", "", "run only the tests that match this `regexp`, whatever the list says")
	flag.IntVar(&f.seconds, "seconds", 0, "bound for each test binary, in seconds; 0: what the list says")
	flag.StringVar(&f.params, "params", "", "added to the command line of the kernel with BPF_F_PERMANENT; \"kmemleak=on\" looks for lost memory at the end, and is slow")
	flag.BoolVar(&f.permanent, "permanent", false, "run only the kernel that \"make kernel-permanent\" has built")
	flag.BoolVar(&f.build, "build-permanent", false, "build the kernel with BPF_F_PERMANENT, and nothing else")
	flag.StringVar(&f.out, "table", "", "write the table to this `file`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	code, err := run(ctx, f)
	if err != nil {
		fmt.Fprintln(os.Stderr, "kernels:", err)
	}
	os.Exit(code)
}

// cacheDir is where downloads and images stay.
func cacheDir() (string, error) {
	dir := os.Getenv("SHUNT_KERNELS_CACHE")
	if dir == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			user = "/var/cache" // no HOME
		}
		dir = filepath.Join(user, "shunt-kernels")
	}
	return dir, os.MkdirAll(dir, 0o755)
}

// skip is the word by which the caller knows that nothing was run.
func skip(what error) (int, error) {
	fmt.Printf("skipped: missing %v\n", what)
	return 0, nil
}

func run(ctx context.Context, f flags) (int, error) {
	begin := time.Now()
	cache, err := cacheDir()
	if err != nil {
		return 1, err
	}
	root, err := os.Getwd()
	if err != nil {
		return 1, err
	}
	if _, err := os.Stat(filepath.Join(root, "test/kernels/kernels.list")); err != nil {
		return 1, fmt.Errorf("start it in the module's root folder: %w", err)
	}
	for _, p := range []string{"apt-get", "dpkg", "xz"} {
		if _, err := exec.LookPath(p); err != nil {
			return skip(err)
		}
	}
	a, err := newApt(ctx, filepath.Join(cache, "apt"))
	if err != nil {
		return skip(err)
	}
	if f.build {
		if err := buildPermanent(ctx, a, root, cache); err != nil {
			return 1, err
		}
		return 0, nil
	}
	for _, p := range []string{"qemu-system-x86_64", "busybox", "cpio"} {
		if _, err := exec.LookPath(p); err != nil {
			return skip(err)
		}
	}
	list, err := choose(root, cache, f)
	if err != nil {
		return 1, err
	}
	work, err := os.MkdirTemp("", "shunt-kernels-")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(work)
	base := filepath.Join(work, "base")
	shared := filepath.Join(work, "base.cpio")
	err = stage(ctx, root, base)
	if err == nil {
		err = archive(ctx, base, shared)
	}
	if err != nil {
		return 1, err
	}

	results := make([]*result, len(list))
	for i, k := range list {
		results[i] = &result{kernel: k}
	}
	m := machine{f: f, apt: a, cache: cache, work: work, shared: shared}
	fetchCtx := ctx
	if f.quick {
		// A slow mirror must not eat up the time of the tests that come after.
		c, cancel := context.WithTimeout(ctx, 4*time.Minute)
		defer cancel()
		fetchCtx = c
	}
	// Fetched one after the other, while the first ones run already.
	slots := make(chan struct{}, max(f.parallel, 1))
	var wg sync.WaitGroup
	for _, r := range results {
		image, mods, err := m.get(fetchCtx, r)
		if err != nil {
			r.missing = err
			fmt.Printf("%s: missing: %v\n", r.kernel, err)
			continue
		}
		dir := filepath.Join(root, "test/results/kernels", r.kernel.pkg)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return 1, err
		}
		m.how.Do(func() { m.probeAccel(ctx, image, mods) })
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			break
		}
		wg.Go(func() {
			defer func() { <-slots }()
			m.run(ctx, r, image, mods, dir)
			r.print(os.Stdout)
		})
	}
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return 1, err
	}
	table := summary(results, m.accelName)
	fmt.Printf("\n%s\n", table)
	if f.out != "" {
		if err := os.WriteFile(f.out, []byte(table), 0o644); err != nil {
			return 1, err
		}
	}
	bad, ran := 0, 0
	for _, r := range results {
		if r.missing == nil {
			ran++
		}
		if r.bad() {
			bad++
		}
	}
	fmt.Printf("%d kernels: %d ran, %d of them with failures, %d missing; took %v\n", len(results), ran, bad, len(results)-ran, time.Since(begin).Round(time.Second))
	if ran == 0 {
		return skip(errors.New("every kernel: see above"))
	}
	if bad > 0 {
		return 1, nil
	}
	return 0, nil
}

// choose returns the kernels that the flags ask for.
func choose(root, cache string, f flags) ([]kernel, error) {
	built := kernel{suite: "built", pkg: "permanent", version: "6.1", built: permanentImage(cache)}
	_, noBuilt := os.Stat(built.built)
	if f.permanent {
		if noBuilt != nil {
			return nil, fmt.Errorf("no kernel with BPF_F_PERMANENT yet (make kernel-permanent): %w", noBuilt)
		}
		return []kernel{built}, nil
	}
	list, err := readList(filepath.Join(root, "test/kernels/kernels.list"))
	if err != nil {
		return nil, err
	}
	only, err := regexp.Compile(f.only)
	if err != nil {
		return nil, err
	}
	if !f.quick && noBuilt == nil {
		list = append(list, built)
	}
	var chosen []kernel
	for _, k := range list {
		if only.MatchString(k.String()) && (!f.quick || k.quick) {
			chosen = append(chosen, k)
		}
	}
	return chosen, nil
}

// machine is what all guests of a run share.
type machine struct {
	f         flags
	apt       *apt
	cache     string
	work      string
	shared    string
	how       sync.Once
	accel     accel
	accelName string
}

// lock keeps other runs out of the cache until unlock is called.
func lock(file string) (unlock func(), err error) {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", file, err)
	}
	return func() { f.Close() }, nil
}

// get makes a kernel's files available.
func (m *machine) get(ctx context.Context, r *result) (image string, mods []string, err error) {
	if r.kernel.built != "" {
		return r.kernel.built, nil, nil
	}
	unlock, err := lock(filepath.Join(m.cache, "lock"))
	if err != nil {
		return "", nil, err
	}
	k, debs, err := m.apt.fetch(ctx, r.kernel)
	unlock()
	r.kernel = k
	if err != nil {
		return "", nil, err
	}
	return unpack(ctx, debs, filepath.Join(m.work, "kernels", k.pkg))
}

func (m *machine) probeAccel(ctx context.Context, image string, mods []string) {
	dir := filepath.Join(m.work, "accel")
	err := os.MkdirAll(dir, 0o755)
	rd := ""
	if err == nil {
		rd, err = initramfs(ctx, m.shared, mods, nil, dir)
	}
	if err != nil {
		m.accel, m.accelName = tcg, "emulation"
		return
	}
	m.accel, m.accelName = chooseAccel(ctx, guest{image: image, initramfs: rd, cpus: 1, mib: memory, dir: dir, each: func(record.Record) {}})
	fmt.Println("guests run by", m.accelName)
}

// memory is each guest's, in MiB.
const memory = 1536

func (m *machine) run(ctx context.Context, r *result, image string, mods []string, dir string) {
	begin := time.Now()
	defer func() { r.took = time.Since(begin) }()
	jobs := jobsFor(m.f, r.kernel)
	limit := m.f.limit
	if limit == 0 {
		limit = 2 * time.Minute // for the boot and the probe
		for _, j := range jobs {
			limit += time.Duration(j.Seconds) * time.Second
		}
	}
	rd, err := initramfs(ctx, m.shared, mods, jobs, dir)
	if err != nil {
		r.died = err
		return
	}
	defer os.Remove(rd)
	g := guest{image: image, initramfs: rd, accel: m.accel, version: r.kernel.version, cpus: m.f.cpus, mib: memory, dir: dir, limit: limit, each: r.record}
	if r.kernel.built != "" {
		// A socket that is used after its last reference is found by its poison.
		g.params = strings.TrimSpace("slub_debug=FZPU,TCP,TCPv6 " + m.f.params)
	}
	r.died = g.boot(ctx)
}

// scale makes the tests smaller, to what an emulated processor can do.
const scale = "256"

// The tests that are about what kernels do, and not about shunt's own options,
// other programs or great numbers. An emulated processor does a tenth of what
// a real one does.
var (
	// quickOwn and quickEnd are for "make test", of splice and end to end.
	quickOwn = []string{"Known", "PermanentVerdict", "CutoverKeeps", "QueuedBytes", "SenderMeets", "TLS"}
	quickEnd = []string{"EchoKeepsOrder", "ReceiverSees", "AutoDeclines", "KnownFault", "Vsock"}
	// own and end are for every kernel.
	own = append([]string{"StreamsArrive", "WindowRuns", "SlowReader", "CountsAreExact", "Corked", "TinySends", "Disconnected", "MPTCP"}, quickOwn...)
	end = append([]string{"CutoverKeeps", "ManyWriters", "WaitAll", "PeerFinished", "EndComes", "KilledShunt", "MPTCPService"}, quickEnd...)
	// moreEnd is for the oldest and the newest kernel that has the bypass, with
	// all of splice: the addresses, namespaces and hierarchies that shunt meets.
	moreEnd = append([]string{"NamespaceTo", "ListenersOf", "Wildcard", "Translated", "Hierarchies", "ResetStays", "ServiceEnd", "KTLS"}, end...)
)

// jobsFor are the test binaries that a kernel's guest runs.
func jobsFor(f flags, k kernel) []record.Job {
	env := []string{"SHUNT_TEST_BIN=/bin/shunt", "SHUNT_TEST_SCALE=" + scale, "GOMAXPROCS=2"}
	job := func(suite, binary, dir string, seconds int, tests ...string) record.Job {
		if f.tests != "" {
			tests = []string{f.tests}
		}
		if f.seconds > 0 {
			seconds = f.seconds
		}
		j := record.Job{Suite: suite, Binary: binary, Dir: dir, Env: env, Seconds: seconds}
		if len(tests) > 0 {
			j.Args = append(j.Args, "-test.run="+strings.Join(tests, "|"))
		}
		return j
	}
	// The bounds are for machines that have other work, too.
	ofSplice := func(seconds int, tests ...string) record.Job {
		j := job("splice", "/tests/splice.test", "/src", seconds, tests...)
		j.Args = append(j.Args, "-test.short")
		return j
	}
	ofAll := func(seconds int, tests ...string) record.Job {
		return job("end to end", "/tests/end.test", "/src/test", seconds, tests...)
	}
	switch {
	case f.quick || f.few && k.built == "":
		return []record.Job{ofSplice(240, quickOwn...), ofAll(360, quickEnd...)}
	case f.few:
		return []record.Job{job("permanent", "/tests/splice.test", "/src", 1500, "PermanentVerdict"), ofAll(360, quickEnd...)}
	case k.built != "":
		// The verdict of this kernel at full size.
		return []record.Job{job("permanent", "/tests/splice.test", "/src", 1500, "PermanentVerdict"), ofSplice(600, own...), ofAll(600, end...)}
	case k.quick:
		return []record.Job{ofSplice(900), ofAll(900, moreEnd...)}
	}
	return []record.Job{ofSplice(600, own...), ofAll(600, end...)}
}
