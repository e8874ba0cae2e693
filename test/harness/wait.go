package harness

import (
	"fmt"
	"testing"
	"time"
)

// Until calls ok until it returns nil, and fails the test with its last error when that takes longer than limit.
func Until(t testing.TB, limit time.Duration, what string, ok func() error) {
	t.Helper()
	if err := Poll(limit, ok); err != nil {
		t.Fatalf("%s: not within %v: %v", what, limit, err)
	}
}

// Poll calls ok until it returns nil, for at most limit, and returns its last error.
func Poll(limit time.Duration, ok func() error) error {
	deadline := time.Now().Add(patient(limit))
	pause := time.Millisecond
	for {
		err := ok()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return err
		}
		time.Sleep(pause)
		pause = min(2*pause, 50*time.Millisecond)
	}
}

// Within runs f and fails the test when it returns an error or takes longer
// than limit; f then goes on by itself, so it needs deadlines of its own.
func Within(t testing.TB, limit time.Duration, what string, f func() error) {
	t.Helper()
	if err := WithinErr(limit, f); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// WithinErr is Within for other goroutines than the test's.
func WithinErr(limit time.Duration, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	timer := time.NewTimer(patient(limit))
	defer timer.Stop()
	select {
	case err := <-done:
		return err
	case <-timer.C:
		return fmt.Errorf("still not done after %v", limit)
	}
}
