//go:build !linux

package proxy

import "shunt/splice"

// copy moves direction d's bytes until the source ends (an error other than
// nil says how) or the destination does (wrote).
func (c *conn) copy(d splice.Direction, fresh bool) (parked, wrote bool, err error) {
	wrote, err = c.copyPlain(d)
	return false, wrote, err
}
