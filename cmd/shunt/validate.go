package main

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"shunt/proxy"
	"shunt/splice"
)

// The ranges of what a configuration may say.
const (
	minWindow, maxWindow         = 4 << 10, 1 << 30
	minQueueLimit, maxQueueLimit = splice.MinQueueLimit, 1 << 30
	minMaxSockets, maxMaxSockets = 4, 1 << 22 // four sockets make one connection
	maxMaxConnections            = 10_000_000
	maxSourceRate                = 1_000_000
	maxDuration                  = 365 * 24 * time.Hour
	// Linux takes TCP_KEEPIDLE and TCP_KEEPINTVL up to MAX_TCP_KEEPIDLE and
	// MAX_TCP_KEEPINTVL, TCP_KEEPCNT up to MAX_TCP_KEEPCNT (net/tcp.h).
	maxKeepAlive      = 32767 * time.Second
	maxKeepAliveCount = 127
	// sockaddr_un has 108 bytes, the last of them zero.
	maxUnixPath = 107
	maxName     = 128
	// minInterval keeps lookups and checks from being a load of their own.
	minInterval  = 100 * time.Millisecond
	maxThreshold = 1000
)

// validate notes everything wrong that one can know without opening a socket
// or a file.
func (fc *fileConfig) validate(d *document) {
	fc.validateTables(d)
	if len(fc.Listeners) == 0 && len(d.errs) == 0 {
		d.errorf(nil, "no [[listener]]: at least one is needed")
	}
	var addrs []netip.AddrPort // invalid where the listener has none
	for i := range fc.Listeners {
		p := path("listener").at(i + 1)
		l := &fc.Listeners[i]
		addr := l.validate(d, p)
		for j, other := range addrs {
			if overlap(addr, other) || strings.HasPrefix(l.Listen, "unix:") && l.Listen == fc.Listeners[j].Listen {
				at := ""
				if fc.Listeners[j].Name != fc.Listeners[j].Listen {
					at = fmt.Sprintf(" (%s)", fc.Listeners[j].Listen)
				}
				d.errorf(p.with("listen"), "%q is taken by listener %q%s", l.Listen, fc.Listeners[j].Name, at)
			} else if l.Name == fc.Listeners[j].Name && l.Name != "" {
				d.errorf(p.with("name"), "%q is the name of listener %d already", l.Name, j+1)
			}
		}
		addrs = append(addrs, addr)
	}
	for i := range fc.Listeners {
		if round := loop(fc.Listeners, addrs, i); round != nil && i == slices.Min(round) {
			p := path("listener").at(i + 1).with("upstream")
			if len(fc.Listeners[i].Upstreams) > 0 {
				p = path("listener").at(i + 1).with("upstreams")
			}
			if len(round) == 1 {
				at := slices.IndexFunc(fc.Listeners[i].upstreams(), func(s string) bool {
					return reaches(s, addrs[i]) || sameUnix(s, fc.Listeners[i].Listen)
				})
				d.errorf(p, "%q is the listener itself", fc.Listeners[i].upstreams()[at])
				continue
			}
			var names []string
			for _, j := range round {
				names = append(names, strconv.Quote(fc.Listeners[j].Name))
			}
			d.errorf(p, "connections would go round in a loop: %s and back", strings.Join(names, " -> "))
		}
	}
	if admin := fc.Admin.Listen; admin != "" {
		addr, _ := parseListen(admin)
		for i, other := range addrs {
			if overlap(addr, other) || strings.HasPrefix(admin, "unix:") && admin == fc.Listeners[i].Listen {
				d.errorf(path("admin", "listen"), "%q is taken by listener %q", admin, fc.Listeners[i].Name)
			}
		}
	}
}

// validateTables checks what doesn't belong to a listener.
func (fc *fileConfig) validateTables(d *document) {
	oneOf(d, path("log", "level"), fc.Log.Level, logLevels...)
	oneOf(d, path("log", "format"), fc.Log.Format, logFormats...)
	fc.Process.validate(d)
	if admin := fc.Admin.Listen; strings.HasPrefix(admin, "unix:") {
		file := strings.TrimPrefix(admin, "unix:")
		if !strings.HasPrefix(file, "/") || len(file) > maxUnixPath || strings.ContainsRune(file, 0) {
			d.errorf(path("admin", "listen"), "%q: want unix: and an absolute path of at most %d bytes", admin, maxUnixPath)
		}
	} else if admin != "" {
		if _, err := parseListen(admin); err != nil {
			d.errorf(path("admin", "listen"), `%v, or "unix:/path", or "" for none`, err)
		}
	}
	for _, s := range fc.DNS.Servers {
		if _, err := parseServer(s); err != nil {
			d.errorf(path("dns", "servers"), "%v", err)
		}
	}
	b := &fc.Bypass
	if b.Cgroup != "" && (!strings.HasPrefix(b.Cgroup, "/") || strings.ContainsRune(b.Cgroup, 0)) {
		d.errorf(path("bypass", "cgroup"), `%q: want the absolute path of a cgroup2 directory, or "" for the root`, b.Cgroup)
	}
	oneOf(d, path("bypass", "verdict"), b.Verdict, verdicts...)
	if b.Window < minWindow || b.Window > maxWindow {
		d.errorf(path("bypass", "window"), "%v is out of range: want %v to %v", b.Window, size(minWindow), size(maxWindow))
	}
	if q := size(b.QueueLimit); q != 0 && (q < minQueueLimit || q > maxQueueLimit) {
		d.errorf(path("bypass", "queue_limit"), `%v is out of range: want "auto", or %v to %v`, q, size(minQueueLimit), size(maxQueueLimit))
	}
	within(d, path("bypass", "max_sockets"), b.MaxSockets, minMaxSockets, maxMaxSockets)
	within(d, path("limits", "max_connections"), fc.Limits.MaxConnections, 0, maxMaxConnections)
}

var (
	verdicts    = []string{string(splice.VerdictAuto), string(splice.VerdictEvery), string(splice.VerdictWindow), string(splice.VerdictPermanent)}
	bypassModes = []string{string(proxy.BypassAuto), string(proxy.BypassOn), string(proxy.BypassOff)}
	balances    = []string{string(proxy.BalanceRoundRobin), string(proxy.BalanceLeastConnections), string(proxy.BalanceSourceHash), string(proxy.BalanceFirst)}
	logLevels   = []string{"debug", "info", "warn", "error"}
	logFormats  = []string{"auto", "console", "json"}
)

// validate checks one listener and returns its address, which is invalid where
// there is none.
func (l *listenerTable) validate(d *document, p keyPath) (addr netip.AddrPort) {
	if l.Listen == "" {
		d.missing(p.with("listen"), `want an address, such as "127.0.0.1:7000"`)
	} else if strings.HasPrefix(l.Listen, "unix:") {
		l.validateUnix(d, p)
	} else if a, err := parseListen(l.Listen); err != nil {
		d.errorf(p.with("listen"), `%v, or "unix:/path" or "unix:@name"`, err)
	} else {
		addr = a
		if l.Unix != defaultListener().Unix {
			d.errorf(p.with("unix"), `listen = %q is no UNIX socket, such as "unix:/run/app/web.sock"`, l.Listen)
		}
	}
	if len(l.Name) > maxName || strings.ContainsFunc(l.Name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		d.errorf(p.with("name"), "%q: want at most %d printable characters", l.Name, maxName)
	}
	l.validateUpstreams(d, p)
	oneOf(d, p.with("bypass"), l.Bypass, bypassModes...)
	within(d, p.with("max_connections"), l.MaxConnections, 0, maxMaxConnections)
	l.validateSources(d, p)
	for _, t := range []struct {
		key      string
		value    time.Duration
		min, max time.Duration
	}{
		{"dial_timeout", l.DialTimeout, time.Millisecond, maxDuration},
		{"idle_timeout", l.IdleTimeout, 0, maxDuration},
		{"half_open_timeout", l.HalfOpenTimeout, 0, maxDuration},
		{"drain_timeout", l.DrainTimeout, 0, maxDuration},
		{"eject.duration", l.Eject.Duration, time.Millisecond, maxDuration},
		{"health.timeout", l.Health.Timeout, time.Millisecond, maxDuration},
	} {
		if t.value < t.min || t.value > t.max {
			key := p
			for _, k := range strings.Split(t.key, ".") {
				key = key.with(k)
			}
			d.errorf(key, "%v is out of range: want %v to %v", t.value, t.min, t.max)
		}
	}
	l.validateAddresses(d, p)
	within(d, p.with("eject").with("failures"), l.Eject.Failures, 0, maxThreshold)
	within(d, p.with("health").with("rise"), l.Health.Rise, 1, maxThreshold)
	within(d, p.with("health").with("fall"), l.Health.Fall, 1, maxThreshold)
	k := p.with("keepalive")
	if v := l.KeepAlive.Idle; v != 0 && (v < time.Second || v > maxKeepAlive) {
		d.errorf(k.with("idle"), "%v is out of range: want 1s to %v, or 0s for no keepalive", v, maxKeepAlive)
	}
	if v := l.KeepAlive.Interval; v < time.Second || v > maxKeepAlive {
		d.errorf(k.with("interval"), "%v is out of range: want 1s to %v", v, maxKeepAlive)
	}
	within(d, k.with("count"), l.KeepAlive.Count, 1, maxKeepAliveCount)
	return addr
}

// validateUnix checks a UNIX socket that is listened on.
func (l *listenerTable) validateUnix(d *document, p keyPath) {
	name, _, err := proxy.ParseUnix(l.Listen)
	if err != nil {
		d.errorf(p.with("listen"), "%v", err)
	}
	u := p.with("unix")
	mode, err := parseMode(l.Unix.Mode)
	if err != nil {
		d.errorf(u.with("mode"), "%v", err)
	}
	for _, k := range []struct{ key, value string }{{"owner", l.Unix.Owner}, {"group", l.Unix.Group}} {
		if strings.ContainsFunc(k.value, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) || r == ':' }) {
			d.errorf(u.with(k.key), "%q: want a name or a number", k.value)
		}
	}
	if strings.HasPrefix(name, "@") && (mode != proxy.DefaultUnixMode || l.Unix.Owner != "" || l.Unix.Group != "") {
		d.errorf(u, `an abstract socket has no mode, owner or group: everybody in its network namespace may connect; want a path, such as "unix:/run/app/web.sock"`)
	}
}

// validateSources checks who may connect.
func (l *listenerTable) validateSources(d *document, p keyPath) {
	if strings.HasPrefix(l.Listen, "unix:") {
		for key, set := range map[string]bool{
			"allow": len(l.Allow) > 0, "deny": len(l.Deny) > 0,
			"max_connections_per_source": l.MaxPerSource != 0, "source_rate": l.SourceRate != sourceRateTable{},
		} {
			if set {
				d.errorf(p.with(key), "the clients of a UNIX socket have no address: unix.mode, unix.owner and unix.group say who may connect")
			}
		}
	}
	within(d, p.with("max_connections_per_source"), l.MaxPerSource, 0, maxMaxConnections)
	r := p.with("source_rate")
	within(d, r.with("per_second"), l.SourceRate.PerSecond, 0, maxSourceRate)
	within(d, r.with("burst"), l.SourceRate.Burst, 0, maxSourceRate)
	if l.SourceRate.PerSecond == 0 && l.SourceRate.Burst > 0 {
		d.errorf(r.with("per_second"), "missing: a burst of %d without a rate bounds nothing", l.SourceRate.Burst)
	}
	for _, list := range []struct {
		key     string
		entries []string
	}{{"allow", l.Allow}, {"deny", l.Deny}} {
		for _, s := range list.entries {
			if _, err := proxy.ParseNetwork(s); err != nil {
				d.errorf(p.with(list.key), `want addresses and networks, such as "10.0.0.0/8", "192.0.2.7" or "2001:db8::/32": %v`, err)
			}
		}
	}
}

// validateUpstreams checks where the connections go and how they are shared out.
func (l *listenerTable) validateUpstreams(d *document, p keyPath) {
	key := p.with("upstream")
	switch {
	case len(l.Upstreams) > 0 && l.Upstream != "":
		d.errorf(p.with("upstreams"), "upstream is set too: want one of them")
		return
	case len(l.Upstreams) > 0:
		key = p.with("upstreams")
	case l.Upstream == "":
		d.missing(key, `want host:port, such as "127.0.0.1:8000", or upstreams = ["..."]`)
		return
	}
	for i, s := range l.upstreams() {
		if _, err := proxy.ParseUpstream(s); err != nil {
			d.errorf(key, "%v", err)
		} else if s == proxy.OriginalDst && len(l.Upstreams) > 1 {
			d.errorf(key, "%q can't be one of several", s)
		} else if slices.Contains(l.upstreams()[:i], s) {
			d.errorf(key, "%q is there twice", s)
		}
	}
	oneOf(d, p.with("balance"), l.Balance, balances...)
	if v := l.ResolveInterval; v != 0 && (v < minInterval || v > maxDuration) {
		d.errorf(p.with("resolve_interval"), "%v is out of range: want %v to %v, or 0s", v, minInterval, maxDuration)
	}
	if v := l.Health.Interval; v != 0 && (v < minInterval || v > maxDuration) {
		d.errorf(p.with("health").with("interval"), "%v is out of range: want %v to %v, or 0s for no checks", v, minInterval, maxDuration)
	}
}

// oneOf and within note a value that isn't allowed.
func oneOf(d *document, p keyPath, value string, allowed ...string) {
	if slices.Contains(allowed, value) {
		return
	}
	hint := ""
	if near := nearest(strings.ToLower(value), allowed); near != "" {
		hint = fmt.Sprintf("; did you mean %q?", near)
	}
	d.errorf(p, "unknown value %q: want one of %s%s", value, strings.Join(allowed, ", "), hint)
}

func within(d *document, p keyPath, value, low, high int) {
	if value < low || value > high {
		d.errorf(p, "%d is out of range: want %d to %d", value, low, high)
	}
}

const listenForm = `want an address and a port, such as "127.0.0.1:7000", "[::1]:7000" or ":7000" for all addresses`

// parseListen reads a listening address. Names are refused: one can stand for
// several addresses, of which a listener would take one by chance. Port 0 lets
// the kernel choose. All addresses of both families are "::".
func parseListen(s string) (netip.AddrPort, error) {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("%q: %s", s, listenForm)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("%q: port %q: want a number from 0 to %d", s, port, math.MaxUint16)
	}
	if host == "" {
		return netip.AddrPortFrom(netip.IPv6Unspecified(), uint16(n)), nil
	}
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("%q: %q is not an IP address: %s", s, host, listenForm)
	}
	return netip.AddrPortFrom(ip.Unmap(), uint16(n)), nil
}

// parseServer reads the address of a DNS server; the port may be left out.
func parseServer(s string) (netip.AddrPort, error) {
	if ip, err := netip.ParseAddr(s); err == nil {
		return netip.AddrPortFrom(ip.Unmap(), 53), nil
	}
	a, err := netip.ParseAddrPort(s)
	if err != nil || a.Port() == 0 {
		return netip.AddrPort{}, fmt.Errorf(`%q: want an IP address, with a port if it isn't 53, such as "10.0.0.2" or "127.0.0.1:8600"`, s)
	}
	return a, nil
}

// overlap says whether one of two listeners would find its address in use.
func overlap(a, b netip.AddrPort) bool {
	if a.Port() != b.Port() || a.Port() == 0 {
		return false
	}
	covers := func(a, b netip.Addr) bool {
		return a.IsUnspecified() && (a.Is6() || b.Is4())
	}
	return a.Addr() == b.Addr() || covers(a.Addr(), b.Addr()) || covers(b.Addr(), a.Addr())
}

// loop follows the upstreams from listener i as far as they are other
// listeners by address. It returns a shortest round that leads back to i, or nil.
func loop(ls []listenerTable, addrs []netip.AddrPort, i int) []int {
	seen := make([]bool, len(ls))
	rounds := [][]int{{i}}
	for len(rounds) > 0 {
		round := rounds[0]
		rounds = rounds[1:]
		for _, up := range ls[round[len(round)-1]].upstreams() {
			for next, a := range addrs {
				switch {
				case !reaches(up, a) && !sameUnix(up, ls[next].Listen):
				case next == i:
					return round
				case !seen[next]:
					seen[next] = true
					rounds = append(rounds, append(slices.Clone(round), next))
				}
			}
		}
	}
	return nil
}

// sameUnix says whether an upstream is the UNIX socket that a listener has.
func sameUnix(upstream, listen string) bool {
	return strings.HasPrefix(upstream, "unix:") && upstream == listen
}

// reaches says whether dialling upstream arrives at a listener on addr, as far
// as one can tell from the text.
func reaches(upstream string, addr netip.AddrPort) bool {
	host, port, err := net.SplitHostPort(upstream)
	if err != nil || port != strconv.Itoa(int(addr.Port())) {
		return false
	}
	v4, v6 := netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()
	var dialled []netip.Addr
	if host == "localhost" {
		dialled = []netip.Addr{v4, v6}
	} else if ip, err := netip.ParseAddr(host); err == nil {
		switch ip = ip.Unmap(); {
		case !ip.IsUnspecified():
			dialled = []netip.Addr{ip}
		case ip.Is4(): // the unspecified address dials this host
			dialled = []netip.Addr{v4}
		default:
			dialled = []netip.Addr{v6}
		}
	}
	for _, ip := range dialled {
		switch at := addr.Addr(); {
		case at == ip:
			return true
		case at.IsUnspecified() && ip.IsLoopback() && (at.Is6() || ip.Is4()):
			return true
		}
	}
	return false
}
