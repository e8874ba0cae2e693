package proxy

import (
	"net/netip"
	"testing"
)

func TestOwnAddressesAreKnown(t *testing.T) {
	for _, c := range []struct {
		listen, a string
		own       bool
	}{
		{"127.0.0.1:7000", "127.0.0.1:7000", true},
		{"127.0.0.1:7000", "127.0.0.1:7001", false},
		{"127.0.0.1:7000", "127.0.0.2:7000", false},
		{"0.0.0.0:7000", "127.0.0.2:7000", true},
		{"[::]:7000", "127.0.0.1:7000", true},
		{"[::]:7000", "[::1]:7000", true},
		{"[::]:7000", "192.0.2.1:7000", false}, // TPROXY may bring it
		{"[::]:7000", "192.0.2.1:80", false},
	} {
		if got := isOwn(netip.MustParseAddrPort(c.listen), netip.MustParseAddrPort(c.a)); got != c.own {
			t.Errorf("%s at %s: %v", c.a, c.listen, got)
		}
	}
}
