//go:build !linux

package proxy

import (
	"errors"

	"shunt/splice"
)

// parking does nothing here: an idle direction keeps its goroutine.
type parking struct{}

func newParking(func(uint64, splice.Direction)) (*parking, error) { return &parking{}, nil }

func (*parking) park(Stream, uint64, splice.Direction, bool) error {
	return errors.ErrUnsupported
}

func (*parking) close() {}
