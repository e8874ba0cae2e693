//go:build !unix

package main

import (
	"errors"
	"os"

	"shunt/proxy"
)

var upgradeSignal os.Signal // none

func streamPair() (ours, theirs *os.File, err error) { return nil, nil, errors.ErrUnsupported }

func streamFile(int) (*os.File, error) { return nil, errors.ErrUnsupported }

func activatedSockets() ([]proxy.Inherited, error) { return nil, nil }
