package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"shunt/proxy"
)

// An upgrade is a new process, of the program that is now at this one's path,
// with the same command line. It gets the listening sockets as descriptors, and one end of
// a stream over which the two agree:
//
//	new: ready      everything is open, nothing is accepted yet
//	old: go         the new one accepts from here on, both do
//	new: serving    the old one stops accepting, and drains
//	old: (end)      the new one speaks to the service manager from here on
//
// Until "go" nothing is lost when either gives up. "failed" and a reason may
// come in place of "ready".
const (
	sayReady   = "ready"
	sayGo      = "go"
	sayServing = "serving"
	sayFailed  = "failed "
)

// upgradeEnv tells the new process which sockets it got: a JSON list of handed.
const upgradeEnv = "SHUNT_UPGRADE"

// firstFD is the stream's descriptor in the new process; the sockets follow.
const firstFD = 3

// How long the new process may take to be ready, and then to serve.
const (
	upgradeTimeout = time.Minute
	serveTimeout   = 5 * time.Second
)

// handed describes a socket to the new process.
type handed struct {
	Name   string `json:"name"`
	Listen string `json:"listen"`
	Admin  bool   `json:"admin,omitempty"`
	Keep   bool   `json:"keep,omitempty"`
	Unlink bool   `json:"unlink,omitempty"`
}

// upgrade is a new process that is on its way.
type upgrade struct {
	cmd    *exec.Cmd
	stream *os.File
	from   *bufio.Reader
	ready  chan error // one value: nil when it is ready
	ended  chan error // one value: how it ended
}

// startUpgrade starts program, which has timeout to be ready.
func startUpgrade(program string, args []string, sockets []proxy.Handed, timeout time.Duration) (*upgrade, error) {
	ours, theirs, err := streamPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	cmd := exec.Command(program, args[1:]...)
	cmd.Args[0] = args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{theirs}
	list := []handed{}
	for _, h := range sockets {
		list = append(list, handed{h.Name, h.Listen, h.Admin, h.Keep, h.Unlink})
		cmd.ExtraFiles = append(cmd.ExtraFiles, h.File)
	}
	text, err := json.Marshal(list)
	if err != nil {
		ours.Close()
		return nil, err
	}
	// The watchdog is whoever serves.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "WATCHDOG_PID=") || strings.HasPrefix(v, upgradeEnv+"=")
	})
	cmd.Env = append(cmd.Env, upgradeEnv+"="+string(text))
	if err := cmd.Start(); err != nil {
		ours.Close()
		return nil, err
	}
	u := &upgrade{cmd: cmd, stream: ours, from: bufio.NewReader(ours), ready: make(chan error, 1), ended: make(chan error, 1)}
	go func() { u.ended <- cmd.Wait() }()
	ours.SetDeadline(time.Now().Add(timeout))
	go func() { u.ready <- u.await(sayReady) }()
	return u, nil
}

func (u *upgrade) pid() int { return u.cmd.Process.Pid }

// await waits for the new process to say word. Where it doesn't, it is ended.
func (u *upgrade) await(word string) error {
	line, err := u.from.ReadString('\n')
	line = strings.TrimSuffix(line, "\n")
	if err == nil && line == word {
		return nil
	}
	reason, failed := strings.CutPrefix(line, sayFailed)
	timedOut := errors.Is(err, os.ErrDeadlineExceeded)
	if !failed {
		// One that hangs, or says what it shouldn't. One that ended has ended.
		if timedOut || err == nil {
			u.cmd.Process.Kill()
		}
	}
	state := u.end()
	switch {
	case failed:
		return errors.New(reason)
	case timedOut:
		return fmt.Errorf("it wasn't %s in time", word)
	case err == nil:
		return fmt.Errorf("it said %q", line)
	case state != nil:
		return fmt.Errorf("it ended before it was %s: %w", word, state)
	}
	return fmt.Errorf("it ended before it was %s", word)
}

// end waits for the process, and helps when it stays.
func (u *upgrade) end() error {
	u.stream.Close()
	help := time.AfterFunc(serveTimeout, func() { u.cmd.Process.Kill() })
	defer help.Stop()
	return <-u.ended
}

// abort ends a new process that may not have been told to go.
func (u *upgrade) abort() {
	u.cmd.Process.Kill()
	<-u.ready
	u.stream.Close()
}

// let tells the new process to go, and waits until it serves.
func (u *upgrade) let() error {
	u.stream.SetDeadline(time.Now().Add(serveTimeout))
	if _, err := io.WriteString(u.stream, sayGo+"\n"); err != nil {
		u.cmd.Process.Kill()
		return errors.Join(fmt.Errorf("write to the new process: %w", err), u.end())
	}
	return u.await(sayServing)
}

// program returns what to start in an upgrade: the path by which this
// process was started, so that a symlink is followed anew.
func program(name string) string {
	self, err := os.Executable()
	if err != nil { // without /proc
		self = name
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return self
	}
	if path, err = filepath.Abs(path); err != nil {
		return self
	}
	a, err1 := os.Stat(path)
	b, err2 := os.Stat(self)
	if err1 != nil || err2 != nil || !os.SameFile(a, b) {
		return self
	}
	return path
}

// former is the process that this one takes over from.
type former struct {
	stream  *os.File
	from    *bufio.Reader
	sockets []proxy.Inherited
}

// formerProcess returns nil where this process isn't an upgrade.
func formerProcess() (*former, error) {
	text, ok := os.LookupEnv(upgradeEnv)
	if !ok {
		return nil, nil
	}
	os.Unsetenv(upgradeEnv)
	var list []handed
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		return nil, fmt.Errorf("%s: %w", upgradeEnv, err)
	}
	stream, err := streamFile(firstFD)
	if err != nil {
		return nil, fmt.Errorf("%s: descriptor %d: %w", upgradeEnv, firstFD, err)
	}
	f := &former{stream: stream, from: bufio.NewReader(stream)}
	for i, h := range list {
		ln, err := listenerOf(os.NewFile(uintptr(firstFD+1+i), h.Name))
		if err != nil {
			return nil, fmt.Errorf("%s: socket %q: %w", upgradeEnv, h.Name, err)
		}
		f.sockets = append(f.sockets, proxy.Inherited{Listener: ln, Name: h.Name, Former: true, Listen: h.Listen, Admin: h.Admin, Keep: h.Keep, Unlink: h.Unlink})
	}
	return f, nil
}

func listenerOf(f *os.File) (net.Listener, error) {
	defer f.Close()
	return net.FileListener(f)
}

// fail says why this process doesn't take over.
func (f *former) fail(reason string) {
	if f == nil {
		return
	}
	fmt.Fprintf(f.stream, "%s%s\n", sayFailed, strings.ReplaceAll(strings.TrimSpace(reason), "\n", "; "))
	f.stream.Close()
}

// ready says that everything is open, and returns what the former process says to that.
func (f *former) ready() <-chan error {
	answer := make(chan error, 1)
	go func() {
		if _, err := io.WriteString(f.stream, sayReady+"\n"); err != nil {
			answer <- fmt.Errorf("write to the former process: %w", err)
			return
		}
		line, err := f.from.ReadString('\n')
		if err == nil && line != sayGo+"\n" {
			err = fmt.Errorf("it said %q", line)
		}
		if err != nil {
			err = fmt.Errorf("the former process gave the upgrade up: %w", err)
		}
		answer <- err
	}()
	return answer
}

// serving says that this process accepts; the channel is closed when the
// former one has told the service manager so.
func (f *former) serving() <-chan struct{} {
	over := make(chan struct{})
	go func() {
		defer close(over)
		defer f.stream.Close()
		if _, err := io.WriteString(f.stream, sayServing+"\n"); err == nil {
			io.Copy(io.Discard, f.from)
		}
	}()
	return over
}
