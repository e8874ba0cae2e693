package proxy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"shunt/splice"
)

// setTransparent lets a socket use addresses that aren't this host's. The
// option is one, whatever the family that sets it.
func setTransparent(fd int) error {
	err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1)
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("setsockopt IP_TRANSPARENT: %w: needs CAP_NET_ADMIN or CAP_NET_RAW", err)
	}
	return os.NewSyscallError("setsockopt IP_TRANSPARENT", err)
}

// openTransparent makes a listening socket that takes what TPROXY brings. For others
// than TCP it only says whether dialling will work.
func openTransparent(ln net.Listener) error {
	if tcp, ok := ln.(*net.TCPListener); ok {
		return control(tcp, setTransparent)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	return setTransparent(fd)
}

// bindTo makes a socket that isn't connected come from source, with a port of
// the kernel's choice.
func bindTo(network string, raw syscall.RawConn, source netip.Addr) error {
	if source.Is4() != strings.HasSuffix(network, "4") {
		return fmt.Errorf("%w: the client is %v", errFamily, source)
	}
	var sa unix.Sockaddr
	if source.Is4() {
		sa = &unix.SockaddrInet4{Addr: source.As4()}
	} else {
		v6 := &unix.SockaddrInet6{Addr: source.As16()}
		if zone := source.Zone(); zone != "" {
			dev, err := net.InterfaceByName(zone)
			if err != nil {
				return err
			}
			v6.ZoneId = uint32(dev.Index)
		}
		sa = v6
	}
	var err error
	cerr := raw.Control(func(fd uintptr) {
		if err = setTransparent(int(fd)); err != nil {
			return
		}
		// The port is chosen by connect, when it needs to be free for this upstream only.
		_ = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
		if err = unix.Bind(int(fd), sa); err != nil {
			err = fmt.Errorf("bind %v: %w", source, err)
		}
	})
	if cerr != nil {
		return cerr
	}
	return err
}

const soOriginalDst = 80 // SO_ORIGINAL_DST, and IP6T_SO_ORIGINAL_DST

// natDestination returns where c's client wanted to before this host
// translated it; false where nothing was translated, or nothing is known of it.
func natDestination(c splice.Socket) (dst netip.AddrPort, ok bool) {
	v4 := addrOf(c.LocalAddr()).Addr().Is4()
	err := control(c, func(fd int) error {
		if v4 {
			// A sockaddr_in: 16 bytes, of which 2 to 8 are port and address.
			m, err := unix.GetsockoptIPv6Mreq(fd, unix.SOL_IP, soOriginalDst)
			if err != nil {
				return err
			}
			b := m.Multiaddr
			dst = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:]))
			return nil
		}
		m, err := unix.GetsockoptIPv6MTUInfo(fd, unix.SOL_IPV6, soOriginalDst)
		if err != nil {
			return err
		}
		port := binary.NativeEndian.AppendUint16(nil, m.Addr.Port)
		dst = netip.AddrPortFrom(netip.AddrFrom16(m.Addr.Addr), binary.BigEndian.Uint16(port))
		return nil
	})
	return dst, err == nil && dst.IsValid() && dst.Port() != 0
}
