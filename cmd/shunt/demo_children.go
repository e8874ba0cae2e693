package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// childEnd is how long a child may take to end before it is killed.
const childEnd = 5 * time.Second

// child is a process of this program's own binary.
type child struct {
	name   string
	cmd    *exec.Cmd
	stdin  io.WriteCloser // nil: ended by SIGTERM instead of EOF
	stdout io.ReadCloser
	tail   tail // what it said on stderr last
	waited chan struct{}
	err    error // of Wait; read it after waited is closed
}

// children are the processes that one demo has started.
type children struct{ list []*child }

// start runs the binary itself with args. The process is killed when ctx ends,
// and where the system can, when this process dies. Without a stdin it has a
// pipe that stays open until stop. What it says on stderr goes to watch too.
func (f *children) start(ctx context.Context, name string, args []string, stdin io.Reader, watch io.Writer) (*child, error) {
	fail := func(err error) (*child, error) { return nil, fmt.Errorf("start %s: %w", name, err) }
	self, err := os.Executable()
	if err != nil {
		return fail(err)
	}
	c := &child{name: name, cmd: exec.CommandContext(ctx, self, args...), waited: make(chan struct{})}
	c.cmd.SysProcAttr = childAttr()
	c.cmd.WaitDelay = childEnd
	c.cmd.Stderr = io.MultiWriter(&c.tail, watch)
	if stdin != nil {
		c.cmd.Stdin = stdin
	} else if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		return fail(err)
	}
	// Not StdoutPipe: Wait would close it under the reader.
	r, w, err := os.Pipe()
	if err != nil {
		return fail(err)
	}
	c.cmd.Stdout, c.stdout = w, r
	err = c.cmd.Start()
	w.Close()
	if err != nil {
		r.Close()
		return fail(err)
	}
	f.list = append(f.list, c)
	go func() {
		c.err = c.cmd.Wait()
		close(c.waited)
	}()
	return c, nil
}

// stop ends all children, the last started first, and waits for them.
func (f *children) stop() error {
	var errs []error
	for _, c := range slices.Backward(f.list) {
		if c.stdin != nil {
			c.stdin.Close()
		} else {
			c.cmd.Process.Signal(syscall.SIGTERM)
		}
		kill := time.AfterFunc(childEnd, func() { c.cmd.Process.Kill() })
		<-c.waited
		c.stdout.Close()
		if !kill.Stop() {
			errs = append(errs, fmt.Errorf("%s did not end and was killed", c.name))
		}
	}
	return errors.Join(errs...)
}

// fault describes why a child that should still be there isn't, or err.
func (c *child) fault(err error) error {
	select {
	case <-c.waited:
	case <-time.After(time.Second):
		return fmt.Errorf("%s: %w", c.name, err)
	}
	if c.err != nil {
		err = c.err
	}
	if said := c.tail.String(); said != "" {
		return fmt.Errorf("%s: %w: %s", c.name, err, said)
	}
	return fmt.Errorf("%s: %w", c.name, err)
}

// tail is a writer that keeps the end of what is written.
type tail struct {
	mu sync.Mutex
	b  []byte
}

const tailSize = 2048

// Write implements io.Writer.
func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	t.b = t.b[max(0, len(t.b)-tailSize):]
	return len(p), nil
}

// String returns what was kept.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.b))
}

type demoService struct{ addr string }

func (f *children) startService(ctx context.Context) (*demoService, error) {
	c, err := f.start(ctx, "service", []string{demoServiceName}, nil, io.Discard)
	if err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(c.stdout).ReadString('\n')
	if err != nil {
		return nil, c.fault(err)
	}
	return &demoService{addr: strings.TrimSpace(line)}, nil
}

// demoClient is the measuring process. It takes requests and gives results as
// lines of JSON.
type demoClient struct {
	child *child
	enc   *json.Encoder
	dec   *json.Decoder
}

func (f *children) startClient(ctx context.Context) (*demoClient, error) {
	c, err := f.start(ctx, "client", []string{demoClientName}, nil, io.Discard)
	if err != nil {
		return nil, err
	}
	return &demoClient{child: c, enc: json.NewEncoder(c.stdin), dec: json.NewDecoder(c.stdout)}, nil
}

func (c *demoClient) measure(r demoRequest) (demoResult, error) {
	var result demoResult
	if err := c.enc.Encode(r); err != nil {
		return result, c.child.fault(err)
	}
	if err := c.dec.Decode(&result); err != nil {
		return result, c.child.fault(err)
	}
	if result.Error != "" {
		return result, errors.New(result.Error)
	}
	return result, nil
}

// demoShunt is the proxy that is measured.
type demoShunt struct {
	child        *child
	addrs        map[string]string // by listener
	admin        string
	verdict      string
	bypassReason string // why the bypass is off; empty: it is on
}

// logLine is what the demo reads of shunt's log.
type logLine struct {
	Level     string            `json:"level"`
	Message   string            `json:"message"`
	Listeners map[string]string `json:"listeners"`
	Admin     string            `json:"admin"`
	Verdict   string            `json:"verdict"`
	Reason    string            `json:"reason"`
	Error     string            `json:"error"`
}

// logWatch reads shunt's log as it is written.
type logWatch struct {
	shunt *demoShunt
	ready chan struct{} // closed once the log has said that shunt is up
	mu    sync.Mutex
	rest  []byte // of a line that isn't complete
	fault string // of the last error line
}

// Write implements io.Writer.
func (w *logWatch) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rest = append(w.rest, p...)
	for {
		line, rest, ok := bytes.Cut(w.rest, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		w.line(line)
		w.rest = rest
	}
}

func (w *logWatch) line(text []byte) {
	var l logLine
	if json.Unmarshal(text, &l) != nil {
		return
	}
	if l.Level == "error" {
		w.fault = l.Message + ": " + l.Error
	}
	select {
	case <-w.ready:
		return
	default:
	}
	switch l.Message {
	case msgBypassOn:
		w.shunt.verdict = l.Verdict
	case msgBypassOff:
		w.shunt.bypassReason = l.Reason
	case msgReady:
		w.shunt.addrs, w.shunt.admin = l.Listeners, l.Admin
		close(w.ready)
	}
}

// startShunt runs "shunt run" and waits until it has said what it listens on.
func (f *children) startShunt(ctx context.Context, config string) (*demoShunt, error) {
	s := &demoShunt{}
	watch := &logWatch{shunt: s, ready: make(chan struct{})}
	c, err := f.start(ctx, "shunt", []string{"run", "--config", "-"}, strings.NewReader(config), watch)
	if err != nil {
		return nil, err
	}
	s.child = c
	select {
	case <-watch.ready:
		return s, nil
	case <-c.waited:
		watch.mu.Lock()
		defer watch.mu.Unlock()
		if watch.fault != "" {
			return nil, fmt.Errorf("shunt: %s", watch.fault)
		}
		return nil, c.fault(errors.New("ended at once"))
	}
}

// pathCount is what a listener's counters say.
type pathCount struct {
	bypassed, copied uint64
	declined         []string // reasons
}

// paths reads the counters, by listener.
func (s *demoShunt) paths(ctx context.Context) (map[string]pathCount, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.admin+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, s.child.fault(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	if err != nil {
		return nil, s.child.fault(err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("get /metrics: %s", resp.Status)
	}
	return countPaths(string(text)), nil
}

// countPaths reads what the demo needs of a metrics page in the Prometheus
// text format. The label values in question need no unquoting.
func countPaths(text string) map[string]pathCount {
	paths := map[string]pathCount{}
	for line := range strings.Lines(text) {
		name, rest, ok := strings.Cut(line, "{")
		labels, value, ok2 := strings.Cut(rest, "}")
		n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if !ok || !ok2 || err != nil || n == 0 {
			continue
		}
		label := map[string]string{}
		for pair := range strings.SplitSeq(labels, ",") {
			k, v, _ := strings.Cut(pair, "=")
			label[strings.TrimSpace(k)] = strings.Trim(v, `"`)
		}
		c := paths[label["listener"]]
		switch {
		case name == "shunt_bytes_total" && label["path"] == "bypass":
			c.bypassed += uint64(n)
		case name == "shunt_bytes_total" && label["path"] == "copy":
			c.copied += uint64(n)
		case name == "shunt_bypass_declined_total":
			c.declined = append(c.declined, fmt.Sprintf("%s (%.0f)", label["reason"], n))
		}
		paths[label["listener"]] = c
	}
	return paths
}
