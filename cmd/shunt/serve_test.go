package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"shunt/splice"
)

const testWait = 20 * time.Second

// echoService answers with what it is sent until the test ends.
func echoService(t *testing.T) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(func() { ln.Close(); wg.Wait() })
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				c.SetDeadline(time.Now().Add(testWait))
				buf := make([]byte, 4096)
				for {
					n, err := c.Read(buf)
					if n > 0 {
						c.Write(buf[:n])
					}
					if err != nil {
						return
					}
				}
			})
		}
	})
	return ln.Addr().String()
}

// copyConfig is a configuration with one listener that copies.
func copyConfig(upstream, more string) string {
	return fmt.Sprintf("[log]\nformat = \"json\"\n[[listener]]\nname = \"web\"\nlisten = \"127.0.0.1:0\"\nupstream = %q\nbypass = \"off\"\n%s\n", upstream, more)
}

// logEntries decodes a JSON log line by line, as it comes.
func logEntries(t *testing.T, r io.Reader) <-chan map[string]any {
	lines := make(chan map[string]any, 1000)
	go func() {
		defer close(lines)
		scan := bufio.NewScanner(r)
		for scan.Scan() {
			var entry map[string]any
			if err := json.Unmarshal(scan.Bytes(), &entry); err != nil {
				entry = map[string]any{"message": scan.Text()}
			}
			lines <- entry
		}
	}()
	return lines
}

func waitEntry(t *testing.T, lines <-chan map[string]any, message string) map[string]any {
	t.Helper()
	timeout := time.After(testWait)
	for {
		select {
		case entry, ok := <-lines:
			if !ok {
				t.Fatalf("the log ended without %q", message)
			}
			if entry["message"] == message {
				return entry
			}
		case <-timeout:
			t.Fatalf("no %q in the log", message)
		}
	}
}

// waitReady returns the address of the listener "web".
func waitReady(t *testing.T, lines <-chan map[string]any) string {
	t.Helper()
	listeners, _ := waitEntry(t, lines, msgReady)["listeners"].(map[string]any)
	addr, _ := listeners["web"].(string)
	return addr
}

func exchange(t *testing.T, c net.Conn, text string) {
	t.Helper()
	c.SetDeadline(time.Now().Add(testWait))
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(text))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != text {
		t.Fatalf("got %q, %v, want %q", got, err, text)
	}
}

func dial(t *testing.T, addr string) *net.TCPConn {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, testWait)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

// openFiles counts the descriptors of this process; -1 where it can't.
func openFiles() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return -1
	}
	return len(entries)
}

// eventually waits for a condition that another goroutine brings about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(testWait); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not in time: %s", what)
		}
	}
}

func TestRunServesAndEndsWithItsContext(t *testing.T) {
	upstream := echoService(t)
	serveOnce := func() {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		r, w := io.Pipe()
		lines := logEntries(t, r)
		code := make(chan int, 1)
		go func() {
			code <- run(ctx, []string{"run", "--config", "-"}, strings.NewReader(copyConfig(upstream, "")), io.Discard, w)
			w.Close()
		}()
		if v := waitEntry(t, lines, "shunt starts")["version"]; v != versionString() {
			t.Errorf("version %v", v)
		}
		if waitEntry(t, lines, msgBypassOff)["reason"] == nil {
			t.Error("bypass off without a reason")
		}
		if up := waitEntry(t, lines, "listening"); up["listener"] != "web" || up["upstream"] != upstream {
			t.Errorf("listening: %v", up)
		}
		c := dial(t, waitReady(t, lines))
		exchange(t, c, "hello")
		c.Close()
		cancel()
		waitEntry(t, lines, "draining")
		waitEntry(t, lines, "shunt ends")
		if got := <-code; got != 0 {
			t.Errorf("exit code %d", got)
		}
		for range lines {
		}
	}
	serveOnce() // what is made once in a process is made now
	goroutines, files := runtime.NumGoroutine(), openFiles()
	serveOnce()
	eventually(t, "goroutines end", func() bool { return runtime.NumGoroutine() <= goroutines })
	eventually(t, "descriptors are closed", func() bool { return openFiles() <= files })
}

// process is a shunt in a process of its own.
type process struct {
	cmd   *exec.Cmd
	lines <-chan map[string]any
}

// startProcess gives config to its stdin; args replace "--config -".
func startProcess(t *testing.T, config string, args ...string) *process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if len(args) == 0 {
		args = []string{"--config", "-"}
	}
	p := &process{cmd: exec.Command(self, append([]string{"run"}, args...)...)}
	p.cmd.Stdin = strings.NewReader(config)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stderr = w
	p.lines = logEntries(t, r)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	t.Cleanup(func() {
		p.cmd.Process.Kill()
		p.cmd.Wait()
		for range p.lines {
		}
		r.Close()
	})
	return p
}

func (p *process) signal(t *testing.T) {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
}

// wait returns the exit code.
func (p *process) wait(t *testing.T) int {
	t.Helper()
	kill := time.AfterFunc(testWait, func() { p.cmd.Process.Kill() })
	defer kill.Stop()
	err := p.cmd.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return p.cmd.ProcessState.ExitCode()
}

func TestSigtermLetsConnectionsFinish(t *testing.T) {
	p := startProcess(t, copyConfig(echoService(t), `drain_timeout = "1m"`))
	addr := waitReady(t, p.lines)
	c := dial(t, addr)
	exchange(t, c, "before")
	p.signal(t)
	waitEntry(t, p.lines, "draining")
	eventually(t, "accepting stops", func() bool {
		late, err := net.DialTimeout("tcp", addr, time.Second)
		if err == nil {
			late.Close()
		}
		return err != nil
	})
	exchange(t, c, "after")
	c.CloseWrite()
	if rest, err := io.ReadAll(c); err != nil || len(rest) > 0 {
		t.Errorf("after the half-close: %q, %v", rest, err)
	}
	c.Close()
	if code := p.wait(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestDrainTimeoutEndsConnections(t *testing.T) {
	p := startProcess(t, copyConfig(echoService(t), `drain_timeout = "100ms"`))
	c := dial(t, waitReady(t, p.lines))
	exchange(t, c, "before")
	p.signal(t)
	if code := p.wait(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("the connection goes on")
	}
}

func TestSecondSignalEndsNow(t *testing.T) {
	p := startProcess(t, copyConfig(echoService(t), `drain_timeout = "10m"`))
	c := dial(t, waitReady(t, p.lines))
	exchange(t, c, "before")
	p.signal(t)
	first := time.Now()
	waitEntry(t, p.lines, "draining")
	// One that comes as soon as this is the same signal again, and changes nothing.
	p.signal(t)
	if time.Since(first) < repeatedSignal/2 {
		exchange(t, c, "after two of a kind")
	}
	time.Sleep(time.Until(first.Add(repeatedSignal + 100*time.Millisecond))) // the rule is about this time
	p.signal(t)
	waitEntry(t, p.lines, "ending live connections")
	if code := p.wait(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestAddressInUseIsAFailure(t *testing.T) {
	addr := echoService(t)
	code, _, stderr := runArgs(t, strings.Replace(copyConfig(addr, ""), "127.0.0.1:0", strings.Replace(addr, "127.0.0.1", "", 1), 1), "check", "--config", "-")
	if code != 2 || !strings.Contains(stderr, "is the listener itself") {
		t.Errorf("check: exit code %d, %s", code, stderr)
	}
	code, _, stderr = runArgs(t, strings.Replace(copyConfig("127.0.0.1:1", ""), "127.0.0.1:0", addr, 1), "run", "--config", "-")
	if code != 1 || !strings.Contains(stderr, addr) || !strings.Contains(stderr, "address already in use") || !strings.Contains(stderr, `"level":"error"`) {
		t.Errorf("run: exit code %d, %s", code, stderr)
	}
}

func TestProbe(t *testing.T) {
	code, stdout, stderr := runArgs(t, "", "probe", "--json")
	var r splice.Report
	dec := json.NewDecoder(strings.NewReader(stdout))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&r); err != nil {
		t.Fatalf("%v in %s", err, stdout)
	}
	if want := map[bool]int{true: 0, false: 3}[r.Possible]; code != want || stderr != "" {
		t.Errorf("exit code %d, want %d; stderr %q", code, want, stderr)
	}
	if len(r.Checks) == 0 || r.Kernel == "" || r.Possible == (r.Reason != "") {
		t.Errorf("report %+v", r)
	}
	for _, c := range r.Checks {
		if c.Name == "" || c.Detail == "" {
			t.Errorf("check %+v has no reason", c)
		}
	}
	// A second probe need not find the same: each is held to its own exit code.
	code, stdout, _ = runArgs(t, "", "probe")
	if !strings.Contains(stdout, r.Checks[0].Name) {
		t.Errorf("%s isn't in the table:\n%s", r.Checks[0].Name, stdout)
	}
	if want := map[int]string{0: "bypass: possible", 3: "bypass: impossible"}[code]; want == "" || !strings.Contains(stdout, want) {
		t.Errorf("exit code %d, no %q in\n%s", code, want, stdout)
	}
}

func TestPrintReport(t *testing.T) {
	checks := []splice.Check{
		{Name: "cgroup", Result: splice.ResultOK, OK: true, Required: true, Detail: "/sys/fs/cgroup"},
		{Name: "permanent", Result: splice.ResultNA, Detail: "sends fail with EACCES"},
		{Name: "load", Result: splice.ResultMissing, Required: true, Detail: "operation not permitted"},
	}
	for _, c := range []struct {
		report splice.Report
		want   string
	}{
		{splice.Report{Checks: checks, Kernel: "6.1.0", Reason: "load: operation not permitted"}, `cgroup     ok       /sys/fs/cgroup
permanent  n/a      sends fail with EACCES
load       missing  operation not permitted

bypass: impossible on kernel 6.1.0: load: operation not permitted
Connections are copied.
`},
		{splice.Report{Checks: checks[:2], Kernel: "6.18.44", Possible: true, Verdict: splice.VerdictEvery, QueueLimit: 4 << 20, Budget: 1 << 30, FIONREAD: true}, `cgroup     ok   /sys/fs/cgroup
permanent  n/a  sends fail with EACCES

bypass: possible on kernel 6.18.44
verdict: every
queue limit: 4MiB per receiver, 1024MiB in all
FIONREAD: right for redirected bytes
`},
	} {
		var out bytes.Buffer
		if err := printReport(streams{out: &out}, &c.report); err != nil || out.String() != c.want {
			t.Errorf("%v, got\n%s\nwant\n%s", err, out.String(), c.want)
		}
	}
}

func TestRequireRefusesToStart(t *testing.T) {
	// Not a cgroup, so that the bypass is impossible wherever this runs.
	config := copyConfig("127.0.0.1:1", "") + fmt.Sprintf("[bypass]\nrequire = true\ncgroup = %q\n", t.TempDir())
	code, _, stderr := runArgs(t, config, "run", "--config", "-")
	if code != 1 || !strings.Contains(stderr, "bypass.require is true, but the bypass is impossible: ") ||
		runtime.GOOS == "linux" && !strings.Contains(stderr, "; shunt probe shows every check") {
		t.Errorf("exit code %d, %s", code, stderr)
	}
}

func TestLogger(t *testing.T) {
	for _, c := range []struct {
		table     logTable
		want, not string
	}{
		{logTable{Level: "info", Format: "json"}, `"level":"info"`, "debug"},
		{logTable{Level: "debug", Format: "auto"}, `"level":"debug"`, "\x1b"}, // a buffer is no terminal
		{logTable{Level: "info", Format: "console"}, "INF", "{"},
		{logTable{Level: "info", Format: "console"}, "a message", "\x1b"},
		{logTable{Level: "error", Format: "json"}, "", "message"},
	} {
		var out bytes.Buffer
		log := newLogger(c.table, &out)
		log.Debug().Msg("a message")
		log.Info().Msg("a message")
		if s := out.String(); !strings.Contains(s, c.want) || strings.Contains(s, c.not) {
			t.Errorf("%+v wrote %q", c.table, s)
		}
	}
}

func TestDemo(t *testing.T) {
	files := openFiles()
	goroutines := runtime.NumGoroutine()
	code, stdout, stderr := runArgs(t, "", "demo", "--time", "120ms", "--rounds", "2", "--grace", "1m")
	if code != 0 || stderr != "" {
		t.Fatalf("exit code %d, stderr %q, stdout\n%s", code, stderr, stdout)
	}
	for _, want := range []string{"direct", "copy", "bypass", "us ", "Gbit/s", "1.00", "Medians of 2 rounds"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}
	if !strings.Contains(stdout, "The bypass is impossible here: ") && !strings.Contains(stdout, "Verdict \"") {
		t.Errorf("nothing said of the bypass in\n%s", stdout)
	}
	eventually(t, "descriptors are closed", func() bool { return openFiles() <= files })
	// os/signal keeps one once it was used.
	eventually(t, "goroutines end", func() bool { return runtime.NumGoroutine() <= goroutines+1 })
}

func TestDemoEndsItsChildrenWhenInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(300*time.Millisecond, cancel)
	var out, errs bytes.Buffer
	begin := time.Now()
	code := run(ctx, []string{"demo", "--time", "1m"}, nil, &out, &errs)
	if code != 1 || errs.String() != "shunt demo: interrupted\n" {
		t.Errorf("exit code %d, stderr %q", code, errs.String())
	}
	if took := time.Since(begin); took > testWait {
		t.Errorf("took %v", took)
	}
	for _, pid := range ownChildren(t) {
		t.Errorf("process %s is still there", pid)
	}
}

// ownChildren lists the children of this process, where /proc shows them.
func ownChildren(t *testing.T) []string {
	lists, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		t.Fatal(err)
	}
	var pids []string
	for _, list := range lists {
		b, _ := os.ReadFile(list) // a thread may have ended since
		pids = append(pids, strings.Fields(string(b))...)
	}
	return pids
}

func TestDemoClientFindsWrongBytes(t *testing.T) {
	for _, c := range []struct {
		kind, want string
		serve      func(c net.Conn)
	}{
		{kindPing, "answer to ping 0 is", func(c net.Conn) { c.Write(make([]byte, pingSize)); io.Copy(io.Discard, c) }},
		{kindPing, "answer to ping 0: unexpected EOF", func(c net.Conn) { io.ReadFull(c, make([]byte, 1+pingSize)); c.Write([]byte("x")) }},
		{kindBulk, "1 arrived", func(c net.Conn) { io.Copy(io.Discard, c); c.Write([]byte{0, 0, 0, 0, 0, 0, 0, 1}) }},
		{kindBulk, "count of the service: ", func(c net.Conn) { io.Copy(io.Discard, c) }},
	} {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			if conn, err := ln.Accept(); err == nil {
				c.serve(conn)
				conn.Close()
			}
		}()
		_, err = measure(demoRequest{Addr: ln.Addr().String(), Kind: c.kind, Time: 10 * time.Millisecond})
		ln.Close()
		<-done
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q in it", c.kind, err, c.want)
		}
	}
}

func TestCountPaths(t *testing.T) {
	got := countPaths(`# HELP shunt_bytes_total Bytes.
shunt_bytes_total{direction="upstream",listener="bypass",path="bypass"} 1e+06
shunt_bytes_total{direction="downstream",listener="bypass",path="bypass"} 5
shunt_bytes_total{direction="upstream",listener="bypass",path="copy"} 7
shunt_bypass_declined_total{listener="bypass",reason="busy"} 2
shunt_bypass_declined_total{listener="bypass",reason="mptcp"} 0
shunt_accept_errors_total 3
`)
	want := map[string]pathCount{"bypass": {bypassed: 1000005, copied: 7, declined: []string{"busy (2)"}}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestDemoSaysWhenARowIsWrong(t *testing.T) {
	good := pathCount{copied: 10}
	for _, c := range []struct {
		shunt demoShunt
		paths map[string]pathCount
		want  string // of the error; empty: none
	}{
		{demoShunt{bypassReason: "no BPF"}, map[string]pathCount{"copy": good}, ""},
		{demoShunt{verdict: "every"}, map[string]pathCount{"copy": good, "bypass": {bypassed: 5}}, ""},
		{demoShunt{}, map[string]pathCount{"copy": {copied: 1, bypassed: 1}, "bypass": {bypassed: 5}}, "the copy row is wrong"},
		{demoShunt{}, map[string]pathCount{"copy": good, "bypass": {copied: 5, declined: []string{"busy (1)"}}}, "declined for busy (1)"},
		{demoShunt{}, map[string]pathCount{"copy": good, "bypass": {copied: 5}}, "no byte was bypassed"},
	} {
		var out bytes.Buffer
		err := verdictOn(&out, &c.shunt, c.paths)
		if c.want == "" && (err != nil || out.Len() == 0) || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: %v, %q", c.paths, err, out.String())
		}
	}
}

func TestQuantiles(t *testing.T) {
	d := make([]time.Duration, 100)
	for i := range d {
		d[i] = time.Duration(i + 1)
	}
	if p50, p99, one := quantile(d, 0.5), quantile(d, 0.99), quantile(d[:1], 0.99); p50 != 50 || p99 != 99 || one != 1 {
		t.Errorf("p50 %d, p99 %d, of one sample %d", p50, p99, one)
	}
	if a, b := median([]float64{3, 1, 2}), median([]float64{4, 1, 2, 3}); a != 2 || b != 2.5 {
		t.Errorf("medians %v and %v", a, b)
	}
}

// TestProbeJSONKeepsItsKeys holds what programs rely on.
func TestProbeJSONKeepsItsKeys(t *testing.T) {
	_, stdout, _ := runArgs(t, "", "probe", "--json")
	var report map[string]any
	if err := json.Unmarshal([]byte(stdout), &report); err != nil {
		t.Fatal(err)
	}
	delete(report, "reason") // where there is one
	if got := strings.Join(slices.Sorted(maps.Keys(report)), " "); got != "checks fionread kernel known_faults possible queue_budget queue_limit verdict" {
		t.Errorf("keys: %s", got)
	}
	for _, c := range report["checks"].([]any) {
		c := c.(map[string]any)
		if got := strings.Join(slices.Sorted(maps.Keys(c)), " "); got != "detail name ok required result" {
			t.Errorf("%v: keys %s", c["name"], got)
		}
		switch r := c["result"]; r {
		case "ok", "missing", "differs", "n/a":
			if (r == "ok") != c["ok"].(bool) || r == "missing" && !c["required"].(bool) {
				t.Errorf("%v", c)
			}
		default:
			t.Errorf("%v: result %v", c["name"], r)
		}
	}
}
