//go:build !linux

package proxy

import (
	"errors"
	"net"
)

// unread doesn't know.
func unread(*net.TCPConn) (int, error) { return 0, errors.ErrUnsupported }
