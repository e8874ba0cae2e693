package harness

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"
)

// WithLogFile lets shunt write to a file, as one must that is to be upgraded:
// the new processes are not the test's children, and outlive the first.
func WithLogFile() Option {
	return func(s *setup) { s.launch.LogFile = true }
}

// Pid is the id of the process that serves.
func (s *Shunt) Pid() int {
	if s.successor != 0 {
		return s.successor
	}
	return s.Process.Pid()
}

// Signal sends a signal to the process that serves.
func (s *Shunt) Signal(sig syscall.Signal) {
	if s.successor != 0 {
		_ = syscall.Kill(s.successor, sig)
		return
	}
	s.Process.Signal(sig)
}

// Log returns what shunt and its successors logged.
func (s *Shunt) Log() string {
	if s.logFile == "" {
		return s.Output()
	}
	b, err := os.ReadFile(s.logFile)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// Entries returns the log lines with the message, as JSON objects.
func (s *Shunt) Entries(message string) []map[string]any {
	var found []map[string]any
	sc := bufio.NewScanner(strings.NewReader(s.Log()))
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		if !bytes.Contains(sc.Bytes(), []byte(message)) {
			continue
		}
		var e map[string]any
		if json.Unmarshal(sc.Bytes(), &e) == nil && e["message"] == message {
			found = append(found, e)
		}
	}
	return found
}

// Upgrade sends SIGUSR2 and waits until another process serves. It returns the former one's id.
func (s *Shunt) Upgrade(limit time.Duration) (former int, err error) {
	const over = "handed over"
	former = s.Pid()
	before := len(s.Entries(over))
	s.Signal(syscall.SIGUSR2)
	err = Poll(limit, func() error {
		es := s.Entries(over)
		if len(es) <= before {
			if failed := s.Entries("upgrade failed: this process goes on"); len(failed) > 0 {
				return fmt.Errorf("%v", failed[len(failed)-1])
			}
			return errors.New("not handed over")
		}
		pid, _ := es[len(es)-1]["new_pid"].(float64)
		s.successor = int(pid)
		return nil
	})
	return former, err
}

// Gone waits for the end of a process that needn't be a child of the test's.
func Gone(pid int, limit time.Duration) error {
	return Poll(limit, func() error {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || bytes.HasPrefix(b[bytes.LastIndexByte(b, ')')+1:], []byte(" Z")) {
			return nil
		}
		return fmt.Errorf("process %d still runs", pid)
	})
}

// Rewrite replaces the configuration file at once.
func (s *Shunt) Rewrite(cfg Config) error {
	cfg.Admin, cfg.Log = s.Config.Admin, s.Config.Log
	return s.RewriteText(cfg.toml())
}

// RewriteText is Rewrite with any text.
func (s *Shunt) RewriteText(text string) error {
	if err := os.WriteFile(s.File+".new", []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(s.File+".new", s.File)
}

// Reload sends SIGHUP and waits for its result.
func (s *Shunt) Reload(limit time.Duration) error {
	m, err := s.Metrics()
	if err != nil {
		return err
	}
	good, bad := m.Sum("shunt_reloads_total", "result", "ok"), m.Sum("shunt_reloads_total", "result", "error")
	s.Signal(syscall.SIGHUP)
	failed := false
	err = Poll(limit, func() error {
		m, err := s.Metrics()
		if err != nil {
			return err
		}
		failed = m.Sum("shunt_reloads_total", "result", "error") > bad
		if !failed && m.Sum("shunt_reloads_total", "result", "ok") == good {
			return errors.New("not reloaded")
		}
		return nil
	})
	if err == nil && failed {
		err = errors.New("the reload was refused")
	}
	return err
}
