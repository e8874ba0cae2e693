package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
)

// plainCause strips from err what package net says again of addresses and
// system calls: "connection refused" is left.
func plainCause(err error) error {
	var dns *net.DNSError
	var errno syscall.Errno
	switch {
	case errors.Is(err, context.Canceled):
		return context.Canceled
	case errors.As(err, &dns):
		return err
	case errors.As(err, &errno):
		return errno
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return errTimedOut
	}
	var op *net.OpError
	if errors.As(err, &op) {
		if op.Timeout() {
			return errTimedOut
		}
		return op.Err
	}
	return err
}

// errTimedOut is context.DeadlineExceeded in plain words.
var errTimedOut error = timedOut{}

type timedOut struct{}

func (timedOut) Error() string { return "timed out" }
func (timedOut) Unwrap() error { return context.DeadlineExceeded }

// listenError says of an address that can't be listened on what would help.
func listenError(addr string, err error) error {
	cause, hint := plainCause(err), ""
	at, perr := netip.ParseAddrPort(addr)
	if perr != nil {
		if t, terr := net.ResolveTCPAddr("tcp", addr); terr == nil {
			at = t.AddrPort()
		}
	}
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		hint = fmt.Sprintf(" (ss -ltnp 'sport = :%d' shows by whom)", at.Port())
	case errors.Is(err, syscall.EACCES) && at.Port() > 0 && at.Port() < 1024:
		hint = " (a port below 1024 needs root, CAP_NET_BIND_SERVICE, or a lower net.ipv4.ip_unprivileged_port_start)"
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		hint = " (this host has no such address)"
	}
	return fmt.Errorf("listen %s: %w%s", addr, cause, hint)
}
