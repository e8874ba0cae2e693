//go:build !linux

package proxy

import (
	"context"
	"errors"
	"net"
	"time"
)

// loop does nothing here: goroutines have every connection.
type loop struct{}

func newLoop(*Server) (*loop, error) { return &loop{}, nil }

func (*loop) close() {}

// accepter is never made.
type accepter struct {
	file interface{ SetDeadline(time.Time) error }
}

func (*listener) newAccepter(net.Listener) *accepter { return nil }

func (*accepter) accept() (Stream, error) { return nil, net.ErrClosed }

func (*accepter) close() {}

// attempt is never made.
type attempt struct {
	set     []member
	i, left int
}

func (*attempt) finish(context.Context, time.Duration) (Stream, error) {
	return nil, errors.ErrUnsupported
}

func (*attempt) drop() {}

func streamOf(s Stream) (Stream, bool) { return s, true }

func (*conn) express() bool { return false }
