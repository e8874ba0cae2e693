//go:build !linux

package main

import (
	"errors"

	"github.com/rs/zerolog"
)

func droppedPrivileges() bool { return false }

func dropPrivileges(*identity, bool, zerolog.Logger) error {
	return errors.New("process.user needs Linux")
}
