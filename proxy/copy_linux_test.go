package proxy

import "testing"

func TestBytesBesideTCPAreTold(t *testing.T) {
	for _, c := range []struct {
		read, received uint64
		want           bool
	}{{1, 0, true}, {10, 9, true}, {10, 10, false}, {10, 11, false}, {10, 500, false}} {
		if got := bytesBesideTCP(c.read, c.received); got != c.want {
			t.Errorf("read %d, received %d: %v", c.read, c.received, got)
		}
	}
}
