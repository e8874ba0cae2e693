//go:build !unix

package proxy

import (
	"errors"
	"os"
	"syscall"
)

func duplicate(syscall.Conn, string) (*os.File, error) { return nil, errors.ErrUnsupported }
