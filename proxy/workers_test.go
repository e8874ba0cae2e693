package proxy

import (
	"context"
	"net"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
)

// working counts the workers of this process.
func working() int {
	b := make([]byte, 8<<20)
	return strings.Count(string(b[:runtime.Stack(b, true)]), "proxy.(*workers).work(")
}

// TestWorkersAreNoBoundAndFewWait lets more connections dial at once than workers may wait afterwards; those don't wait for long.
func TestWorkersAreNoBoundAndFewWait(t *testing.T) {
	const many = maxIdleWorkers + 20
	var dialling atomic.Int32
	proceed := make(chan struct{})
	var upstream string
	r := newRig(t, nil, onListener(func(l *Listener) {
		upstream = l.Upstream
		l.DialFunc = func(ctx context.Context, _ uint64, _ Stream, _ ControlFunc) (Stream, error) {
			dialling.Add(1)
			<-proceed
			var d net.Dialer
			c, err := d.DialContext(ctx, "tcp", upstream)
			if err != nil {
				return nil, err
			}
			return c.(*net.TCPConn), nil
		}
	}))
	others := working()
	var clients []*net.TCPConn
	for range many {
		clients = append(clients, r.dial())
	}
	eventually(t, "dial of every connection", func() bool { return dialling.Load() == many })
	if n := working() - others; n != many {
		t.Errorf("%d workers for %d connections that dial", n, many)
	}
	close(proceed)
	for range clients {
		r.accept().Close()
	}
	for _, c := range clients {
		c.Close()
	}
	eventually(t, "rest", func() bool { return working()-others == maxIdleWorkers })
	c, s := r.pair()
	r.touch(c, s)
	if n := working() - others; n > maxIdleWorkers {
		t.Errorf("%d workers, want one that waited to be used again", n)
	}
	eventually(t, "end of those that are not needed", func() bool { return working()-others == 0 })
}
