//go:build !linux

package proxy

import (
	"errors"
	"net"
	"net/netip"
	"syscall"

	"shunt/splice"
)

func openTransparent(net.Listener) error { return errors.New("IP_TRANSPARENT needs Linux") }

func bindTo(string, syscall.RawConn, netip.Addr) error { return errors.ErrUnsupported }

func natDestination(splice.Socket) (netip.AddrPort, bool) { return netip.AddrPort{}, false }
