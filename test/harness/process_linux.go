package harness

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A Process is a program that a test or a load test started.
type Process struct {
	Cmd    *exec.Cmd
	output *lockedBuffer
	done   chan struct{}
	err    error
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// StartProcess starts a program in the namespace; it dies with the test
// process at the latest.
func StartProcess(ns *Netns, cmd *exec.Cmd) (*Process, error) {
	p := &Process{Cmd: cmd, output: &lockedBuffer{}, done: make(chan struct{})}
	if cmd.Stdout == nil {
		cmd.Stdout = p.output
	}
	if cmd.Stderr == nil {
		cmd.Stderr = p.output
	}
	// A grandchild that keeps the pipe open must not hold up Wait.
	cmd.WaitDelay = 5 * time.Second
	if err := ns.Do(cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// Run starts a program for the rest of the test. Where it wrote something
// and the test fails, that is logged.
func Run(t testing.TB, ns *Netns, cmd *exec.Cmd) *Process {
	t.Helper()
	p, err := StartProcess(ns, cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.End(5 * time.Second)
		if out := p.Output(); t.Failed() && out != "" {
			t.Logf("%s wrote:\n%s", filepath.Base(cmd.Path), tail(out, 4000))
		}
	})
	return p
}

func tail(s string, n int) string {
	if len(s) > n {
		return "..." + s[len(s)-n:]
	}
	return s
}

// Pid is the process's id.
func (p *Process) Pid() int { return p.Cmd.Process.Pid }

// Output is what the process wrote so far to its standard output and error.
func (p *Process) Output() string { return p.output.String() }

// Signal sends a signal; to a process that has ended it does nothing.
func (p *Process) Signal(sig os.Signal) { _ = p.Cmd.Process.Signal(sig) }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait waits for the process to end by itself.
func (p *Process) Wait(limit time.Duration) error {
	timer := time.NewTimer(patient(limit))
	defer timer.Stop()
	select {
	case <-p.done:
		return p.err
	case <-timer.C:
		return fmt.Errorf("%s (pid %d): still running after %v", filepath.Base(p.Cmd.Path), p.Pid(), limit)
	}
}

// End ends the process: SIGTERM, then SIGKILL when that wasn't enough.
func (p *Process) End(limit time.Duration) {
	p.Signal(syscall.SIGTERM)
	if p.Wait(limit) != nil {
		select {
		case <-p.done:
		default:
			p.Signal(syscall.SIGKILL)
			<-p.done
		}
	}
}

// ExitCode waits for the end of the process and returns its exit code, -1 where a signal ended it.
func (p *Process) ExitCode(limit time.Duration) (int, error) {
	err := p.Wait(limit)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return 0, err
	}
	return p.Cmd.ProcessState.ExitCode(), nil
}

// FreePort returns a port that nothing in the namespace listens on. It lies
// below the range of ephemeral ports, so no connection takes it meanwhile.
func FreePort(ns *Netns) (int, error) {
	for range 200 {
		port := 11000 + rand.IntN(21000)
		free := ns.Do(func() error {
			for _, addr := range []string{"0.0.0.0", "[::]"} {
				ln, err := net.Listen("tcp", fmt.Sprintf("%s:%d", addr, port))
				if err != nil {
					return err
				}
				ln.Close()
			}
			return nil
		})
		if free == nil {
			return port, nil
		}
	}
	return 0, errors.New("no free port in 200 tries")
}

// Port is FreePort in a test.
func Port(t testing.TB, ns *Netns) int {
	t.Helper()
	port, err := FreePort(ns)
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// WaitListening waits until something listens at addr, or p (unless it is
// nil) has ended. It doesn't connect: a service behind addr would see that.
func WaitListening(ns *Netns, addr string, p *Process, limit time.Duration) error {
	gone := false
	err := Poll(limit, func() error {
		if p != nil {
			select {
			case <-p.done:
				gone = true
				return nil
			default:
			}
		}
		return ns.Do(func() error { return listening(addr) })
	})
	if gone {
		return fmt.Errorf("%s ended: %v\n%s", filepath.Base(p.Cmd.Path), p.err, tail(p.Output(), 4000))
	}
	return err
}

// listening looks for a listener on addr's port in this thread's namespace.
func listening(addr string) error {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return err
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return err
	}
	for _, file := range []string{"tcp", "tcp6"} {
		b, err := os.ReadFile("/proc/thread-self/net/" + file)
		if err != nil && !os.IsNotExist(err) {
			return err
		}
		for _, line := range strings.Split(string(b), "\n") {
			// sl, local address:port, remote address:port, state (0A is LISTEN)
			f := strings.Fields(line)
			if len(f) > 3 && f[3] == "0A" && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", n)) {
				return nil
			}
		}
	}
	return fmt.Errorf("nothing listens at %s", addr)
}

// Status returns a field in kB of /proc/PID/status ("VmRSS", "VmHWM"), in bytes.
func Status(pid int, field string) (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for _, line := range strings.Split(string(b), "\n") {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			kb, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return kb << 10, err
		}
	}
	return 0, fmt.Errorf("no %s in the status of process %d", field, pid)
}

// CPUTime returns the CPU time that a process has used, in user and kernel mode.
func CPUTime(pid int) (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The name in parentheses may hold anything; utime and stime are fields 14 and 15.
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	utime, err1 := strconv.ParseInt(fields[11], 10, 64)
	stime, err2 := strconv.ParseInt(fields[12], 10, 64)
	const tick = 10 * time.Millisecond // USER_HZ is 100 on every Linux that Go knows
	return time.Duration(utime+stime) * tick, errors.Join(err1, err2)
}

// FDs counts the open file descriptors of a process.
func FDs(pid int) (int, error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return len(entries), err
}

// SockstatPages returns the pages that all TCP sockets of this namespace's host hold ("mem" in /proc/net/sockstat).
func SockstatPages() (int64, error) {
	b, err := os.ReadFile("/proc/net/sockstat")
	if err != nil {
		return 0, err
	}
	for _, line := range strings.Split(string(b), "\n") {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] != "TCP:" {
			continue
		}
		for i := 1; i+1 < len(f); i += 2 {
			if f[i] == "mem" {
				return strconv.ParseInt(f[i+1], 10, 64)
			}
		}
	}
	return 0, errors.New("no TCP mem in /proc/net/sockstat")
}
