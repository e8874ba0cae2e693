//go:build linux

// Command guest is the init of a kernel test's guest: it mounts what the tests
// need, loads modules, runs the plan's test binaries, and reports over the second
// serial port.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"shunt/test/kernels/record"
)

func main() {
	if os.Getpid() != 1 {
		os.Exit(work())
	}
	if err := mounts(); err != nil {
		fmt.Println("guest:", err)
	}
	err := supervise()
	fmt.Println("guest: done:", err)
	unix.Sync()
	unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

func mounts() error {
	var errs []error
	mount := func(fs, at, options string) {
		err := os.MkdirAll(at, 0o755)
		if err == nil {
			err = unix.Mount(fs, at, fs, 0, options)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("mount %s at %s: %w", fs, at, err))
		}
	}
	mount("proc", "/proc", "")
	mount("sysfs", "/sys", "")
	mount("devtmpfs", "/dev", "")
	mount("devpts", "/dev/pts", "")
	mount("tmpfs", "/dev/shm", "")
	mount("tmpfs", "/tmp", "mode=1777")
	mount("tmpfs", "/run", "")
	mount("cgroup2", "/sys/fs/cgroup", "")
	mount("bpf", "/sys/fs/bpf", "")
	_ = unix.Mount("debugfs", "/sys/kernel/debug", "debugfs", 0, "") // not every kernel has it
	return errors.Join(errs...)
}

// supervise runs the work in a process of its own, and reaps what its children
// leave behind.
func supervise() error {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{"PATH=/bin:/sbin", "HOME=/tmp", "TMPDIR=/tmp"}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if pid == cmd.Process.Pid {
			return nil
		}
	}
}

// port is the second serial port.
type port struct {
	mu  sync.Mutex
	enc *json.Encoder
}

func (p *port) say(r record.Record) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.enc.Encode(r)
}

func (p *port) note(format string, args ...any) {
	p.say(record.Record{Kind: record.Note, Text: fmt.Sprintf(format, args...)})
}

func openPort() (*port, error) {
	f, err := os.OpenFile("/dev/ttyS1", os.O_WRONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	t, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	if err != nil {
		return nil, err
	}
	t.Oflag &^= unix.OPOST
	t.Cflag |= unix.CLOCAL
	if err := unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, t); err != nil {
		return nil, err
	}
	return &port{enc: json.NewEncoder(f)}, nil
}

func work() int {
	p, err := openPort()
	if err != nil {
		fmt.Println("guest:", err)
		return 1
	}
	var u unix.Utsname
	_ = unix.Uname(&u)
	p.say(record.Record{Kind: record.Begin, Text: unix.ByteSliceToString(u.Release[:]) + " " + unix.ByteSliceToString(u.Version[:])})

	var plan record.Plan
	b, err := os.ReadFile("/plan.json")
	if err == nil {
		err = json.Unmarshal(b, &plan)
	}
	if err != nil {
		p.note("plan: %v", err)
		return 1
	}
	for _, m := range plan.Modules {
		if err := load(m); err != nil {
			p.note("module %s: %v", filepath.Base(m), err)
		}
	}
	if out, err := exec.Command("/bin/busybox", "--install", "-s", "/bin").CombinedOutput(); err != nil {
		p.note("busybox: %v %s", err, out)
	}
	for _, f := range []struct{ file, value string }{
		{"/proc/sys/net/ipv6/conf/all/disable_ipv6", "0"},
		{"/proc/sys/kernel/printk", "4"}, // the console is slow
	} {
		_ = os.WriteFile(f.file, []byte(f.value), 0o644)
	}
	if out, err := exec.Command("/bin/busybox", "ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		p.note("lo: %v %s", err, out)
	}
	kmsg := follow(p)

	paths := "SHUNT_TEST_PATHS=off," + probe(p)
	for _, j := range plan.Jobs {
		j.Env = append(j.Env, paths)
		begin := time.Now()
		if err := run(p, j); err != nil {
			p.note("%s: %v", j.Suite, err)
		}
		p.note("%s took %v", j.Suite, time.Since(begin).Round(time.Second))
	}
	leaks(p)
	kmsg()
	p.say(record.Record{Kind: record.End})
	return 0
}

// load inserts a module that the host has unpacked.
func load(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && err != unix.EEXIST {
		return err
	}
	return nil
}

// probe asks shunt what this kernel can do, and returns the verdict that it chose, or one to be declined.
func probe(p *port) (verdict string) {
	verdict = "every"

	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/bin/shunt", "probe", "--json")
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	err := cmd.Run()
	if !json.Valid(out.Bytes()) {
		p.note("probe: %v: %s%s", err, out.Bytes(), stderr.Bytes())
		return verdict
	}
	var report struct {
		Possible bool
		Verdict  string
	}
	if json.Unmarshal(out.Bytes(), &report) == nil && report.Possible {
		verdict = report.Verdict
	}
	var one bytes.Buffer
	_ = json.Compact(&one, out.Bytes())
	p.say(record.Record{Kind: record.Probe, JSON: one.Bytes()})
	return verdict
}

// event is a line of test2json's.
type event struct {
	Action, Test, Output string
	Elapsed              float64
}

// run runs one test binary, and says of each test how it ended.
func run(p *port, j record.Job) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(j.Seconds)*time.Second)
	defer cancel()
	args := append([]string{"-t", "-p", j.Suite, j.Binary, "-test.v=test2json", "-test.count=1"}, j.Args...)
	cmd := exec.CommandContext(ctx, "/bin/test2json", args...)
	cmd.Dir = j.Dir
	cmd.Env = append(os.Environ(), j.Env...)
	cmd.WaitDelay = 5 * time.Second
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	parents := map[string]bool{}
	running := map[string]bool{}
	output := map[string]*strings.Builder{}
	dec := json.NewDecoder(bufio.NewReaderSize(out, 64<<10))
	for {
		var e event
		if err := dec.Decode(&e); err != nil {
			break
		}
		switch e.Action {
		case "run":
			running[e.Test] = true
			if i := strings.LastIndexByte(e.Test, '/'); i > 0 {
				parents[e.Test[:i]] = true
			}
		case "output":
			b := output[e.Test]
			if b == nil {
				b = &strings.Builder{}
				output[e.Test] = b
			}
			if b.Len() < 8000 {
				b.WriteString(e.Output)
			}
		case "pass", "fail", "skip":
			if e.Test == "" {
				continue
			}
			delete(running, e.Test)
			r := record.Record{Kind: record.Test, Suite: j.Suite, Name: e.Test, Result: e.Action, Seconds: e.Elapsed}
			if b := output[e.Test]; b != nil && e.Action != "pass" {
				r.Text = b.String()
			}
			delete(output, e.Test)
			if !parents[e.Test] || e.Action == "fail" && r.Text != "" {
				p.say(r)
			}
		}
	}
	_, _ = io.Copy(io.Discard, out)
	err = cmd.Wait()
	// What was running when the binary ended did not pass.
	for name := range running {
		if !parents[name] {
			p.say(record.Record{Kind: record.Test, Suite: j.Suite, Name: name, Result: "fail", Text: fmt.Sprintf("did not end within the suite's %d s, or ended the test binary", j.Seconds)})
		}
	}
	var exit *exec.ExitError
	if ctx.Err() != nil {
		return fmt.Errorf("not done after %d s", j.Seconds)
	}
	if err != nil && !errors.As(err, &exit) {
		return err
	}
	return nil
}

// leaks asks a kernel with kmemleak for memory that nothing points to any more.
func leaks(p *port) {
	const file = "/sys/kernel/debug/kmemleak"
	if _, err := os.Stat(file); err != nil {
		return
	}
	// What was freed by RCU a moment ago still looks lost at the first scan.
	for range 2 {
		err := os.WriteFile(file, []byte("scan"), 0o644)
		if errors.Is(err, unix.EPERM) {
			return // switched off
		}
		if err != nil {
			p.note("kmemleak: %v", err)
			return
		}
		time.Sleep(3 * time.Second)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		p.note("kmemleak: %v", err)
		return
	}
	if len(b) > 0 {
		p.say(record.Record{Kind: record.Warning, Text: "kmemleak: " + string(b[:min(len(b), 3000)])})
		return
	}
	p.note("kmemleak: nothing was lost")
}

// follow passes on the kernel log's lines that tell of a fault, until the
// function that it returns was called.
func follow(p *port) (stop func()) {
	f, err := os.OpenFile("/dev/kmsg", os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		p.note("kernel log: %v", err)
		return func() {}
	}
	look := func() {
		buf := make([]byte, 8192)
		for {
			n, err := unix.Read(int(f.Fd()), buf)
			if err == unix.EPIPE {
				continue // the oldest were overwritten
			}
			if err != nil || n <= 0 {
				return
			}
			_, line, _ := strings.Cut(string(buf[:n]), ";")
			line, _, _ = strings.Cut(line, "\n")
			for _, word := range []string{"WARNING:", "BUG:", "BUG ", "Oops", "general protection fault", "refcount_t", "INFO: task", "soft lockup", "KASAN", "suspected memory leak"} {
				if strings.Contains(line, word) {
					p.say(record.Record{Kind: record.Warning, Text: line})
					break
				}
			}
		}
	}
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		t := time.NewTicker(time.Second)
		defer t.Stop()
		for {
			select {
			case <-end:
				look()
				return
			case <-t.C:
				look()
			}
		}
	}()
	return func() { close(end); <-ended; f.Close() }
}
