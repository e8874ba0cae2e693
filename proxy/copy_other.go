//go:build !linux

package proxy

import (
	"io"

	"shunt/splice"
)

// copy moves direction d's bytes until the source ends (an error other than
// nil says how) or the destination does (wrote).
func (c *conn) copy(d splice.Direction, fresh bool) (parked, wrote bool, err error) {
	src, dst := c.legs[d].tcp, c.legs[1-d].tcp
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for {
		n, err := src.Read(*buf)
		if n > 0 {
			w, err := dst.Write((*buf)[:n])
			c.flows[d].copied.Add(uint64(w))
			if err != nil {
				return false, true, err
			}
		}
		if err == io.EOF {
			return false, false, nil
		}
		if err != nil {
			return false, false, err
		}
	}
}
