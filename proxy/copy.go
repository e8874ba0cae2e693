package proxy

import (
	"io"
	"sync"
	"sync/atomic"
	"time"

	"shunt/splice"
)

const (
	// bufferSize is how much is read at once. A read that fills it is bulk.
	bufferSize = 32 << 10
	// quietPeriod is how long a direction may be silent before it is parked,
	// at least; at most twice as long.
	quietPeriod = 250 * time.Millisecond
	// freshPeriod is the same for a connection that has just begun: most speak
	// at once, and the others shouldn't cost two goroutines for long.
	freshPeriod = 5 * time.Millisecond
	// quietRead is how long a peer that is refused has for what it is just sending.
	quietRead = 5 * time.Millisecond
)

// buffers are for bytes on their way; nothing waits with one in hand.
var buffers = sync.Pool{New: func() any { b := make([]byte, bufferSize); return &b }}

// budget is how many pipes may be in use at once: descriptors that the
// connections' own sockets don't need.
type budget struct{ left atomic.Int64 }

func (b *budget) take() bool {
	if b.left.Add(-1) >= 0 {
		return true
	}
	b.left.Add(1)
	return false
}

func (b *budget) give() { b.left.Add(1) }

// copyPlain moves direction d's bytes with reads and writes until the source ends
// (an error other than nil says how) or the destination does (wrote).
func (c *conn) copyPlain(d splice.Direction) (wrote bool, err error) {
	src, dst := c.legs[d].sock, c.legs[1-d].sock
	src.SetReadDeadline(time.Time{})
	c.settle()
	var b []byte
	if n := c.l.cfg.BufferSize; n > 0 {
		b = make([]byte, n)
	} else {
		buf := buffers.Get().(*[]byte)
		defer buffers.Put(buf)
		b = *buf
	}
	for {
		n, err := src.Read(b)
		if n > 0 {
			if tap := c.l.cfg.Tap; tap != nil {
				tap(c.id, d, b[:n])
			}
			w, err := dst.Write(b[:n])
			c.flows[d].copied.Add(uint64(w))
			if err != nil {
				return true, err
			}
		}
		if err == io.EOF {
			return false, nil
		}
		if err != nil {
			return false, err
		}
	}
}
