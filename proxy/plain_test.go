//go:build linux

package proxy

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"shunt/test/harness"
)

func TestDialErrorsAreSaidOnceAndPlainly(t *testing.T) {
	r := newRig(t, nil)
	upstream := r.svc.Addr().String()
	r.svc.Close()
	r.refused()
	r.ended("dial-refused")
	if want := `"error":"dial upstream ` + upstream + `: connection refused","kind":"refused","message"`; !strings.Contains(r.log.String(), want) {
		t.Errorf("no %s in\n%s", want, r.log)
	}

	hole := harness.BlackHole(t)
	slow := newRig(t, nil, onListener(func(l *Listener) { l.Upstream, l.DialTimeout = hole, 100*time.Millisecond }))
	slow.refused()
	slow.ended("dial-timeout")
	if want := `"error":"dial upstream ` + hole + `: timed out","kind":"timeout","message"`; !strings.Contains(slow.log.String(), want) {
		t.Errorf("no %s in\n%s", want, slow.log)
	}
}

func TestPlainCauseKeepsTheKind(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{&net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.EHOSTUNREACH)}, "no route to host"},
		{errors.Join(context.DeadlineExceeded, &net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}), "timed out"},
		{errors.Join(context.Canceled, &net.OpError{Op: "dial", Err: errors.New("operation was canceled")}), "context canceled"},
		{&net.DNSError{Err: "no such host", Name: "nowhere.test", IsNotFound: true}, "lookup nowhere.test: no such host"},
		{errors.New("odd"), "odd"},
	} {
		got := plainCause(c.err)
		if got.Error() != c.want || dialKind(got) != dialKind(c.err) {
			t.Errorf("%v: %v (%s), want %s (%s)", c.err, got, dialKind(got), c.want, dialKind(c.err))
		}
	}
}

func TestListenErrorsSayWhatHelps(t *testing.T) {
	op := func(errno syscall.Errno) error {
		return &net.OpError{Op: "listen", Net: "tcp", Err: os.NewSyscallError("bind", errno)}
	}
	for _, c := range []struct {
		addr string
		err  error
		want string
	}{
		{"127.0.0.1:7000", op(syscall.EADDRINUSE), "listen 127.0.0.1:7000: address already in use (ss -ltnp 'sport = :7000' shows by whom)"},
		{":80", op(syscall.EACCES), "listen :80: permission denied (a port below 1024 needs root, CAP_NET_BIND_SERVICE, or a lower net.ipv4.ip_unprivileged_port_start)"},
		{":8080", op(syscall.EACCES), "listen :8080: permission denied"},
		{"192.0.2.1:80", op(syscall.EADDRNOTAVAIL), "listen 192.0.2.1:80: cannot assign requested address (this host has no such address)"},
	} {
		if got := listenError(c.addr, c.err); got.Error() != c.want || !errors.Is(got, errors.Unwrap(errors.Unwrap(c.err))) {
			t.Errorf("%v\nwant\n%s", got, c.want)
		}
	}
}

func TestSuppressedLinesAreCountedWhereThereAreAny(t *testing.T) {
	r := newRig(t, nil)
	l := r.srv.listeners[0]
	for _, last := range []time.Time{{}, time.Now().Add(time.Hour), {}} {
		l.limitLog.mu.Lock()
		l.limitLog.last = last
		l.limitLog.mu.Unlock()
		r.srv.limitWarn(l, "odd", errors.New("x"))
	}
	if log := r.log.String(); strings.Count(log, `"suppressed":1`) != 1 || strings.Contains(log, `"suppressed":0`) {
		t.Error(log)
	}
}

func TestAdminIndexHasEveryPath(t *testing.T) {
	r := newRig(t, nil)
	code, body := r.get("/")
	if code != 200 {
		t.Errorf("/: %d", code)
	}
	for _, line := range strings.Split(strings.TrimSpace(body), "\n") {
		if code, _ := r.get(strings.Fields(line)[0]); code != 200 {
			t.Errorf("%s: %d", line, code)
		}
	}
	if code, _ := r.get("/nothing"); code != 404 {
		t.Errorf("/nothing: %d", code)
	}
	for name := range r.metrics() {
		if strings.HasPrefix(name, "process_network_") {
			t.Errorf("%s counts the namespace's bytes", name)
		}
	}
}
