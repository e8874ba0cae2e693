package proxy

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"
)

// upstreamKind is what an Upstream's text stands for.
type upstreamKind uint8

const (
	upstreamFixed    upstreamKind = iota // one address
	upstreamName                         // a host name and a port
	upstreamSRV                          // the name of SRV records
	upstreamOriginal                     // what the client wanted
)

// OriginalDst as an upstream is where each client wanted to, before NAT on this host or TPROXY brought it to the listener.
const OriginalDst = "original-dst"

// Upstream is a configured upstream: something that stands for addresses.
type Upstream struct {
	text string
	kind upstreamKind
	addr address // of upstreamFixed
	host string  // the name to look up
	port uint16  // of upstreamName
}

const (
	// maxUnixPath is what sockaddr_un holds beside a zero.
	maxUnixPath = 107
	// maxHost is the longest name that DNS can say.
	maxHost = 253

	upstreamForm = `want host:port, such as "127.0.0.1:8000", "[::1]:8000" or "db.internal:5432", or "unix:/path", "unix:@name", "srv+name" or "original-dst"`
)

// ParseUpstream reads host:port, unix:/path, unix:@name (an abstract socket), srv+name (SRV
// records), or OriginalDst.
func ParseUpstream(s string) (Upstream, error) {
	u := Upstream{text: s}
	if s == OriginalDst {
		u.kind = upstreamOriginal
		return u, nil
	}
	if name, ok, err := ParseUnix(s); ok {
		u.addr = address{unix: name}
		return u, err
	}
	if name, ok := strings.CutPrefix(s, "srv+"); ok {
		if strings.ContainsRune(name, ':') {
			return u, fmt.Errorf("%q: want srv+ and a name without a port: the records have the ports", s)
		}
		if !isHost(name) {
			return u, fmt.Errorf(`%q: want srv+ and a name, such as "srv+_http._tcp.web.internal"`, s)
		}
		u.kind, u.host = upstreamSRV, name
		return u, nil
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil || !isHost(host) {
		return u, fmt.Errorf("%q: %s", s, upstreamForm)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return u, fmt.Errorf("%q: port %q: want a number from 1 to %d", s, port, math.MaxUint16)
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		u.addr = address{tcp: netip.AddrPortFrom(ip.Unmap(), uint16(n))}
		return u, nil
	}
	u.kind, u.host, u.port = upstreamName, host, uint16(n)
	return u, nil
}

// isHost says that s can be a name or an IP address. Names are not held to what DNS allows:
// /etc/hosts may know them.
func isHost(s string) bool {
	return s != "" && len(s) <= maxHost && !strings.ContainsFunc(s, func(r rune) bool {
		return unicode.IsSpace(r) || !unicode.IsPrint(r) || strings.ContainsRune("/@[]?#", r)
	})
}

// parseUpstreams parses what l goes to.
func (l Listener) parseUpstreams() ([]Upstream, error) {
	texts, key := l.Upstreams, "upstreams"
	if len(texts) == 0 {
		texts, key = []string{l.Upstream}, "upstream"
	} else if l.Upstream != "" {
		return nil, errors.New("upstream and upstreams: want one of them")
	}
	us := make([]Upstream, len(texts))
	for i, s := range texts {
		u, err := ParseUpstream(s)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		if u.kind == upstreamOriginal && len(texts) > 1 {
			return nil, fmt.Errorf("%s: %q can't be one of several", key, s)
		}
		if slices.Contains(us[:i], u) {
			return nil, fmt.Errorf("%s: %q is there twice", key, s)
		}
		us[i] = u
	}
	return us, nil
}

// validateChoice checks what the choice of an upstream address depends on.
func (l Listener) validateChoice() error {
	switch l.Balance {
	case BalanceRoundRobin, BalanceLeastConnections, BalanceSourceHash, BalanceFirst:
	default:
		return fmt.Errorf("balance %q: not round-robin, least-connections, source-hash or first", l.Balance)
	}
	h := l.Health
	switch {
	case l.ResolveInterval < 0:
		return fmt.Errorf("resolve_interval %v: negative", l.ResolveInterval)
	case l.Eject.Failures < 0 || l.Eject.Failures > 0 && l.Eject.Duration <= 0:
		return errors.New("eject: failures must not be negative, duration must be positive")
	case h.Interval < 0 || h.Interval > 0 && (h.Timeout <= 0 || h.Rise <= 0 || h.Fall <= 0):
		return errors.New("health: interval must not be negative; timeout, rise and fall must be positive")
	}
	return nil
}

// String returns the text that u was read from.
func (u Upstream) String() string { return u.text }

// IsUnix says whether u is a UNIX socket.
func (u Upstream) IsUnix() bool { return u.addr.unix != "" }

// address is what one dial goes to: a TCP address, or a UNIX socket.
type address struct {
	tcp  netip.AddrPort
	unix string // path, or @name
}

func (a address) String() string {
	if a.unix != "" {
		return "unix:" + a.unix
	}
	return a.tcp.String()
}

// dialAddress connects to a within timeout. control is for TCP only, and may be nil.
func (l *listener) dialAddress(ctx context.Context, a address, timeout time.Duration, control ControlFunc) (Stream, error) {
	d := net.Dialer{Timeout: timeout}
	if a.unix != "" {
		var c net.Conn
		var err error
		InOrder(ctx, func() { c, err = d.DialContext(ctx, "unix", a.unix) })
		if err != nil {
			return nil, err
		}
		return c.(*net.UnixConn), nil
	}
	d.FallbackDelay = -1
	d.Control = func(network, address string, raw syscall.RawConn) error {
		if control != nil {
			if err := control(network, address, raw); err != nil {
				return err
			}
		}
		return Connect(ctx, raw, a.tcp)
	}
	d.SetMultipathTCP(false)
	if ownKeepAlive {
		d.KeepAlive = -1 // when the connection settles
	} else {
		l.cfg.KeepAlive.apply(&d.KeepAlive, &d.KeepAliveConfig)
	}
	c, err := d.DialContext(ctx, "tcp", a.tcp.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}
