package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"shunt/proxy"
)

// phase is when a socket option is set.
type phase uint8

const (
	beforeBind phase = iota // of listening sockets, and of others before they connect
	early                   // the same, and again on accepted sockets
	late                    // only on connected sockets
	listening               // only on listening sockets
)

// sockOption is the socket option behind an address option.
type sockOption struct {
	level, name int
	phase       phase
}

var sockOptions = map[string]sockOption{
	"reuseaddr": {unix.SOL_SOCKET, unix.SO_REUSEADDR, beforeBind},
	"reuseport": {unix.SOL_SOCKET, unix.SO_REUSEPORT, beforeBind},
	"ipv6only":  {unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, beforeBind},
	"freebind":  {unix.IPPROTO_IP, unix.IP_FREEBIND, beforeBind},
	"syncnt":    {unix.IPPROTO_TCP, unix.TCP_SYNCNT, beforeBind},
	"mss":       {unix.IPPROTO_TCP, unix.TCP_MAXSEG, beforeBind},

	"defer-accept": {unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, listening},

	"keepidle":     {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, late},
	"keepintvl":    {unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, late},
	"keepcnt":      {unix.IPPROTO_TCP, unix.TCP_KEEPCNT, late},
	"keepalive":    {unix.SOL_SOCKET, unix.SO_KEEPALIVE, late},
	"nodelay":      {unix.IPPROTO_TCP, unix.TCP_NODELAY, late},
	"rcvbuf-late":  {unix.SOL_SOCKET, unix.SO_RCVBUF, late},
	"sndbuf-late":  {unix.SOL_SOCKET, unix.SO_SNDBUF, late},
	"mss-late":     {unix.IPPROTO_TCP, unix.TCP_MAXSEG, late},
	"quickack":     {unix.IPPROTO_TCP, unix.TCP_QUICKACK, late},
	"cork":         {unix.IPPROTO_TCP, unix.TCP_CORK, late},
	"rcvbuf":       {unix.SOL_SOCKET, unix.SO_RCVBUF, early},
	"sndbuf":       {unix.SOL_SOCKET, unix.SO_SNDBUF, early},
	"user-timeout": {unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, early},
	"tos":          {unix.IPPROTO_IP, unix.IP_TOS, early},
	"ttl":          {unix.IPPROTO_IP, unix.IP_TTL, early},
	"ipv6-tclass":  {unix.IPPROTO_IPV6, unix.IPV6_TCLASS, early},
	"unicast-hops": {unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, early},
	"priority":     {unix.SOL_SOCKET, unix.SO_PRIORITY, early},
	"mark":         {unix.SOL_SOCKET, unix.SO_MARK, early},
	"mtudiscover":  {unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, early},
	"oobinline":    {unix.SOL_SOCKET, unix.SO_OOBINLINE, early},
	"dontroute":    {unix.SOL_SOCKET, unix.SO_DONTROUTE, early},
	"debug":        {unix.SOL_SOCKET, unix.SO_DEBUG, early},
	"linger2":      {unix.IPPROTO_TCP, unix.TCP_LINGER2, early},
	"window-clamp": {unix.IPPROTO_TCP, unix.TCP_WINDOW_CLAMP, early},
}

// anyDue says whether a has options that setOptions would set.
func (a *address) anyDue(want func(phase) bool) bool {
	return slices.ContainsFunc(a.options, func(o setOption) bool { return o.due(a, want) })
}

// setOptions sets a's socket options for which want is true.
func (f *forwarding) setOptions(a *address, fd int, want func(phase) bool) error {
	for i := range a.options {
		o := &a.options[i]
		if err := setOneOption(a, o, fd, want); err != nil {
			if f.line.sloppy {
				f.log.printf('W', "%v", err)
				continue
			}
			return err
		}
	}
	return nil
}

// due says whether o is a socket option of a, of a phase that want takes.
func (o *setOption) due(a *address, want func(phase) bool) bool {
	switch name := o.opt.names[0]; name {
	case "linger":
		return want(early)
	case "so-bindtodevice":
		return want(beforeBind)
	case "ip-transparent":
		return want(beforeBind) && o.num != 0
	case "setsockopt-listen":
		return want(listening)
	case "setsockopt", "setsockopt-int", "setsockopt-string":
		return want(late)
	default:
		if name == "keepalive" && a.typ.kind&anyTCP != 0 && o.num == 0 {
			return false // keepAlive sees to it
		}
		s, ok := sockOptions[name]
		return ok && want(s.phase)
	}
}

func setOneOption(a *address, o *setOption, fd int, want func(phase) bool) error {
	if !o.due(a, want) {
		return nil
	}
	name := o.opt.names[0]
	wrap := func(err error) error {
		if err == nil {
			return nil
		}
		return &optionError{fmt.Sprintf("setsockopt(%d, %s)", fd, o.name), plainError(err)}
	}
	switch name {
	case "linger":
		return wrap(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: int32(o.num)}))
	case "so-bindtodevice":
		return wrap(unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, o.value))
	case "ip-transparent":
		// One of the two, as the socket's family is.
		err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TRANSPARENT, 1)
		if err6 := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_TRANSPARENT, 1); err6 == nil {
			err = nil
		}
		return wrap(err)
	case "setsockopt", "setsockopt-int", "setsockopt-listen", "setsockopt-string":
		level, opt, value, err := parseSockopt(o.value, name != "setsockopt-string")
		if err != nil {
			return err
		}
		if name == "setsockopt-string" {
			return wrap(unix.SetsockoptString(fd, level, opt, value))
		}
		n, err := parseNumber(value)
		if err != nil {
			return err
		}
		return wrap(unix.SetsockoptInt(fd, level, opt, int(n)))
	default:
		s := sockOptions[name]
		return wrap(unix.SetsockoptInt(fd, s.level, s.name, int(o.num)))
	}
}

// Which phases are due on which socket.
func onListening(p phase) bool  { return p != late }
func onDialling(p phase) bool   { return p == beforeBind || p == early }
func onAccepted(p phase) bool   { return p == early || p == late }
func onConnecting(p phase) bool { return p == late }

// setConnected sets what is left to set on a socket that is connected.
func (f *forwarding) setConnected(a *address, s proxy.Stream, want func(phase) bool) error {
	c, ok := s.(syscall.Conn)
	if !ok || !a.anyDue(want) {
		return nil
	}
	return withFD(c, func(fd int) error { return f.setOptions(a, fd, want) })
}

// keepAlive is the proxy's default unless the address turns it off.
func keepAlive(a *address) proxy.KeepAlive {
	if !a.onUnless("keepalive", true) {
		return proxy.KeepAlive{}
	}
	return proxy.DefaultListener().KeepAlive
}

// tunesKeepAlive says that a has keepalive options of its own.
func tunesKeepAlive(a *address) bool {
	return a.get("keepidle") != nil || a.get("keepintvl") != nil || a.get("keepcnt") != nil
}

// inNetns runs g on a thread that is in a's network namespace.
func inNetns(a *address, g func() error) error {
	name := a.textOf("netns")
	if name == "" {
		return g()
	}
	if !strings.Contains(name, "/") {
		name = filepath.Join("/run/netns", name)
	}
	there, err := os.Open(name)
	if err != nil {
		return fmt.Errorf("netns: %w", err)
	}
	defer there.Close()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		done <- func() error {
			here, err := os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
			if err != nil {
				runtime.UnlockOSThread()
				return fmt.Errorf("netns: %w", err)
			}
			defer here.Close()
			if err := unix.Setns(int(there.Fd()), unix.CLONE_NEWNET); err != nil {
				runtime.UnlockOSThread()
				return fmt.Errorf("netns %s: setns: %w", name, plainError(err))
			}
			err = g()
			if back := unix.Setns(int(here.Fd()), unix.CLONE_NEWNET); back != nil {
				// The thread stays locked, and dies with this goroutine.
				return errors.Join(err, fmt.Errorf("netns: back: %w", os.NewSyscallError("setns", back)))
			}
			runtime.UnlockOSThread()
			return err
		}()
	}()
	return <-done
}

// repeat calls try again as retry, forever and interval say.
func (f *forwarding) repeat(ctx context.Context, a *address, try func() error) error {
	interval := time.Second
	if a.get("interval") != nil {
		interval = a.seconds("interval")
	}
	for left := a.number("retry", 0); ; left-- {
		err := try()
		if err == nil || ctx.Err() != nil || !a.on("forever") && left <= 0 {
			return err
		}
		f.log.printf('I', "%v", err)
		select {
		case <-time.After(interval):
		case <-ctx.Done():
			return err
		}
	}
}

// familyFor returns the family that a says, else what the command line and
// then the environment prefer; strict says that a says so.
func (f *forwarding) familyFor(a *address, env string) (family string, strict bool) {
	if family := a.family(); family != "" {
		return family, true
	}
	if f.line.family != "" {
		return f.line.family, false
	}
	switch v := os.Getenv(env); v {
	case "0", "4", "6":
		return v, false
	}
	return "4", false
}

// resolve returns the addresses of host, those of the preferred family
// alone where there are any.
func (f *forwarding) resolve(ctx context.Context, a *address, host string) ([]netip.Addr, error) {
	family, strict := f.familyFor(a, "SOCAT_PREFERRED_RESOLVE_IP")
	fits := func(ip netip.Addr) bool { return family == "0" || ip.Is4() == (family == "4") }
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if host == "" {
		if family == "6" {
			return []netip.Addr{netip.IPv6Loopback()}, nil
		}
		return []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}, nil
	}
	var all []netip.Addr
	if ip, err := netip.ParseAddr(host); err == nil {
		all = []netip.Addr{ip.Unmap()}
	} else if all, err = net.DefaultResolver.LookupNetIP(ctx, "ip", host); err != nil {
		return nil, plainError(err)
	}
	var preferred []netip.Addr
	for i := range all {
		all[i] = all[i].Unmap()
		if fits(all[i]) {
			preferred = append(preferred, all[i])
		}
	}
	switch {
	case len(preferred) > 0:
		return preferred, nil
	case strict:
		return nil, fmt.Errorf("%s: no address of IPv%s", host, family)
	}
	return all, nil
}

func resolvePort(ctx context.Context, port string) (uint16, error) {
	n, err := net.DefaultResolver.LookupPort(ctx, "tcp", strings.TrimSpace(port))
	if err != nil {
		return 0, fmt.Errorf("port %q: no such port or service", port)
	}
	return uint16(n), nil
}

// listen opens a listening socket.
func (f *forwarding) listen(ctx context.Context, a *address) (ln net.Listener, err error) {
	try := func() error {
		return inNetns(a, func() (err error) {
			switch a.typ.kind {
			case tcpListen:
				ln, err = f.listenTCP(ctx, a)
			case vsockListen:
				ln, err = f.listenVsock(a)
			default:
				ln, err = f.listenUnix(ctx, a)
			}
			return err
		})
	}
	if err = f.repeat(ctx, a, try); err != nil {
		return nil, err
	}
	if n := a.number("backlog", 0); n > 0 {
		// listen(2) again only changes the backlog.
		if err := withFD(ln.(syscall.Conn), func(fd int) error { return os.NewSyscallError("listen", unix.Listen(fd, int(n))) }); err != nil {
			ln.Close()
			return nil, err
		}
	}
	return ln, nil
}

func (f *forwarding) listenTCP(ctx context.Context, a *address) (net.Listener, error) {
	port, err := resolvePort(ctx, a.params[0])
	if err != nil {
		return nil, err
	}
	family, strict := f.familyFor(a, "SOCAT_DEFAULT_LISTEN_IP")
	ip := netip.IPv4Unspecified()
	if family != "4" {
		ip = netip.IPv6Unspecified()
	}
	if v := a.textOf("bind"); v != "" {
		host, p := splitBind(v)
		if p != "" {
			if port, err = resolvePort(ctx, p); err != nil {
				return nil, err
			}
		}
		if host != "" {
			ips, err := f.resolve(ctx, a, host)
			if err != nil {
				return nil, err
			}
			ip = ips[0]
		}
	}
	network := "tcp6"
	if ip.Is4() && !(family == "6" && strict) {
		network = "tcp4"
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		cerr := c.Control(func(fd uintptr) {
			if network == "tcp6" {
				// Dual stack unless ipv6only, as in socat.
				if err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0); err != nil {
					err = os.NewSyscallError("setsockopt IPV6_V6ONLY", err)
					return
				}
			}
			err = f.setOptions(a, int(fd), onListening)
		})
		return errors.Join(cerr, err, keepAlive(a).Set(c))
	}}
	lc.SetMultipathTCP(false)
	lc.KeepAlive = -1
	return lc.Listen(ctx, network, netip.AddrPortFrom(ip, port).String())
}

func (f *forwarding) listenUnix(ctx context.Context, a *address) (net.Listener, error) {
	path, named := a.params[0], a.typ.kind == unixListen
	if named {
		if a.on("unlink-early") || a.on("unlink") {
			if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
				return nil, err
			}
		}
		if _, err := os.Lstat(path); err == nil {
			return nil, fmt.Errorf("%q exists", path)
		}
		mask := -1
		if m := a.get("umask"); m != nil {
			mask = int(m.num)
		}
		if m := a.get("mode"); m != nil {
			mask = 0o777 &^ int(m.num)
		}
		if mask >= 0 {
			old := unix.Umask(mask)
			defer unix.Umask(old)
		}
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		cerr := c.Control(func(fd uintptr) { err = f.setOptions(a, int(fd), onListening) })
		return errors.Join(cerr, err)
	}}
	n, err := lc.Listen(ctx, "unix", unixName(a.typ.kind, path))
	if err != nil {
		return nil, err
	}
	ln := n.(*net.UnixListener)
	if !named {
		return ln, nil
	}
	// The file stays until the end of the run, though the listening socket may be closed before.
	ln.SetUnlinkOnClose(false)
	if err = setFile(a, path); err == nil && a.on("unlink-late") {
		err = os.Remove(path)
	}
	if err != nil {
		ln.Close()
		os.Remove(path)
		return nil, err
	}
	if a.onUnless("unlink-close", true) && !a.on("unlink-late") {
		f.atEnd(func() error { return os.Remove(path) })
	}
	return ln, nil
}

// setFile sets owner and mode of the socket's file.
func setFile(a *address, path string) error {
	uid, gid := -1, -1
	var err error
	if v := a.textOf("user"); v != "" {
		if uid, _, err = proxy.LookupUser(v); err != nil {
			return err
		}
	}
	if v := a.textOf("group"); v != "" {
		if gid, err = proxy.LookupGroup(v); err != nil {
			return err
		}
	}
	if uid >= 0 || gid >= 0 {
		if err := os.Chown(path, uid, gid); err != nil {
			return err
		}
	}
	if m := a.get("mode"); m != nil {
		return os.NewSyscallError("chmod", unix.Chmod(path, uint32(m.num)))
	}
	return nil
}

func vsockText(v *unix.SockaddrVM) string { return fmt.Sprintf("cid:%d port:%d", int32(v.CID), v.Port) }

// vsockNumber reads a CID or port; nothing is any.
func vsockNumber(s string) uint32 {
	n, err := parseNumber(s)
	if err != nil {
		return unix.VMADDR_CID_ANY
	}
	return uint32(n)
}

func (f *forwarding) vsockSocket(a *address, want func(phase) bool) (int, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket AF_VSOCK", err)
	}
	if err := f.setOptions(a, fd, want); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func (f *forwarding) listenVsock(a *address) (net.Listener, error) {
	fd, err := f.vsockSocket(a, onListening)
	if err != nil {
		return nil, err
	}
	sa := &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: vsockNumber(a.params[0])}
	if v := a.textOf("bind"); v != "" {
		sa.CID = vsockNumber(v)
	}
	if err = unix.Bind(fd, sa); err == nil {
		err = unix.Listen(fd, unix.SOMAXCONN)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("listen(AF=40 %s): %w", vsockText(sa), plainError(err))
	}
	return &vsockListener{file: os.NewFile(uintptr(fd), "vsock"), addr: vsockAddr(unix.Getsockname(fd))}, nil
}

// SyscallConn gives the socket to the backlog's setter.
func (l *vsockListener) SyscallConn() (syscall.RawConn, error) { return l.file.SyscallConn() }

// connect opens a connecting address.
func (f *forwarding) connect(ctx context.Context, a *address, control proxy.ControlFunc) (s proxy.Stream, err error) {
	try := func() error {
		ctx := ctx
		if d := a.seconds("connect-timeout"); d > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, d)
			defer cancel()
		}
		switch a.typ.kind {
		case tcpConnect:
			s, err = f.connectTCP(ctx, a, control)
		case vsockConnect:
			s, err = f.connectVsock(ctx, a)
		default:
			s, err = f.connectUnix(ctx, a)
		}
		return err
	}
	if err := f.repeat(ctx, a, try); err != nil {
		return nil, err
	}
	if err := f.setConnected(a, s, onConnecting); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// dialer returns a dialer from local, where that is valid, that sets a's options.
func (f *forwarding) dialer(ctx context.Context, a *address, local, to netip.AddrPort, control proxy.ControlFunc) *net.Dialer {
	// Package net has the words for what is wrong with the two, and knows zones; but it binds after Control.
	late := local.IsValid() && (local.Addr().Is4() != to.Addr().Is4() || local.Addr().Zone() != "")
	d := &net.Dialer{FallbackDelay: -1, KeepAlive: -1, Control: func(network, addr string, c syscall.RawConn) (err error) {
		if a.anyDue(onDialling) {
			cerr := c.Control(func(fd uintptr) { err = f.setOptions(a, int(fd), onDialling) })
			err = errors.Join(cerr, err)
		}
		if err == nil && to.IsValid() && (a == f.down || tunesKeepAlive(a)) {
			// What a sets itself comes when it is connected. The upstream gets the defaults from the proxy.
			err = keepAlive(a).Set(c)
		}
		if err == nil && control != nil {
			err = control(network, addr, c)
		}
		if err == nil && local.IsValid() && !late {
			err = bindTo(c, local)
		}
		if err == nil && to.IsValid() && !late {
			err = proxy.Connect(ctx, c, to)
		}
		return err
	}}
	if late {
		d.LocalAddr = net.TCPAddrFromAddrPort(local)
	}
	d.SetMultipathTCP(false)
	return d
}

// bindTo gives a socket its local address, which has no zone.
func bindTo(c syscall.RawConn, local netip.AddrPort) error {
	var sa unix.Sockaddr = &unix.SockaddrInet6{Addr: local.Addr().As16(), Port: int(local.Port())}
	if local.Addr().Is4() {
		sa = &unix.SockaddrInet4{Addr: local.Addr().As4(), Port: int(local.Port())}
	}
	var err error
	cerr := c.Control(func(fd uintptr) { err = os.NewSyscallError("bind", unix.Bind(int(fd), sa)) })
	return errors.Join(cerr, err)
}

func (f *forwarding) connectTCP(ctx context.Context, a *address, control proxy.ControlFunc) (proxy.Stream, error) {
	port, err := resolvePort(ctx, a.params[1])
	if err != nil {
		return nil, err
	}
	ips, err := f.resolve(ctx, a, a.params[0])
	if err != nil {
		return nil, err
	}
	var last error
	for _, ip := range ips {
		to := netip.AddrPortFrom(ip, port)
		if f.log.shows('N') {
			f.log.printf('N', "opening connection to %s", addrPortText(to))
		}
		locals, err := f.locals(ctx, a, ip)
		if err != nil {
			return nil, err
		}
		for _, local := range locals {
			d := f.dialer(ctx, a, local, to, control)
			var c net.Conn
			last = inNetns(a, func() (err error) {
				c, err = d.DialContext(ctx, "tcp", to.String())
				return err
			})
			if last == nil {
				return c.(*net.TCPConn), nil
			}
			if !errors.Is(last, syscall.EADDRINUSE) || ctx.Err() != nil {
				break
			}
		}
		var option *optionError
		if last = plainError(last); !errors.As(last, &option) {
			last = fmt.Errorf("connect(%s): %w", addrPortText(to), last)
		}
	}
	return nil, last
}

// directOptions are those beside socket options that an upstream may have which is connected at once.
var directOptions = []string{"retry", "forever", "interval", "connect-timeout", "pf"}

// direct is the upstream where it has a numeric address, and nothing is asked for that takes more than a system call; or nil.
func (f *forwarding) direct() *proxy.Direct {
	a := f.up
	if f.swapped || a.typ.kind != tcpConnect || f.log.shows('N') || slices.ContainsFunc([]string{"linger", "setsockopt", "setsockopt-int", "setsockopt-string"}, func(name string) bool { return f.down.get(name) != nil }) {
		return nil // a socket that lingers holds its closer up
	}
	for i := range a.options {
		name := a.options[i].opt.names[0]
		if _, ok := sockOptions[name]; !ok && !slices.Contains(directOptions, name) {
			return nil
		}
	}
	ip, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(a.params[0], "["), "]"))
	if err != nil {
		return nil
	}
	port, err := strconv.ParseUint(a.params[1], 10, 16)
	if err != nil || port == 0 {
		return nil
	}
	d := &proxy.Direct{Addr: netip.AddrPortFrom(ip.Unmap(), uint16(port))}
	if ips, err := f.resolve(context.Background(), a, a.params[0]); err != nil || len(ips) != 1 || ips[0] != d.Addr.Addr() {
		return nil
	}
	if a.anyDue(onDialling) {
		d.Prepare = func(fd int) error { return f.setOptions(a, fd, onDialling) }
	}
	if tunesKeepAlive(a) {
		return nil
	}
	if a.anyDue(onConnecting) {
		d.Connected = func(fd int) error { return f.setOptions(a, fd, onConnecting) }
	}
	return d
}

// lowports is the range that lowport takes a port from.
const lowestPort, highestPort = 640, 1023

// locals returns the local addresses to try; an invalid one lets the kernel choose.
func (f *forwarding) locals(ctx context.Context, a *address, to netip.Addr) ([]netip.AddrPort, error) {
	ip, port := netip.IPv4Unspecified(), uint16(0)
	if to.Is6() {
		ip = netip.IPv6Unspecified()
	}
	bound := false
	if v := a.textOf("bind"); v != "" {
		host, p := splitBind(v)
		if p != "" {
			n, err := resolvePort(ctx, p)
			if err != nil {
				return nil, err
			}
			port = n
		}
		if host != "" {
			ips, err := f.resolve(ctx, a, host)
			if err != nil {
				return nil, err
			}
			ip = ips[0]
		}
		bound = true
	}
	if v := a.textOf("sourceport"); v != "" {
		n, err := resolvePort(ctx, v)
		if err != nil {
			return nil, err
		}
		port, bound = n, true
	}
	if port == 0 && a.on("lowport") {
		var list []netip.AddrPort
		for _, i := range rand.Perm(highestPort - lowestPort + 1) {
			list = append(list, netip.AddrPortFrom(ip, uint16(lowestPort+i)))
		}
		return list, nil
	}
	if !bound {
		return []netip.AddrPort{{}}, nil
	}
	return []netip.AddrPort{netip.AddrPortFrom(ip, port)}, nil
}

func (f *forwarding) connectUnix(ctx context.Context, a *address) (proxy.Stream, error) {
	name := unixName(a.typ.kind, a.params[0])
	f.log.printf('N', "opening connection to AF=1 %q", a.params[0])
	d := f.dialer(ctx, a, netip.AddrPort{}, netip.AddrPort{}, nil)
	if v := a.textOf("bind"); v != "" {
		d.LocalAddr = &net.UnixAddr{Name: unixName(a.typ.kind, v), Net: "unix"}
	}
	var c net.Conn
	err := inNetns(a, func() (err error) {
		proxy.InOrder(ctx, func() { c, err = f.dialUnix(ctx, a, d, name) })
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("connect(AF=1 %q): %w", a.params[0], plainError(err))
	}
	return c.(*net.UnixConn), nil
}

// unixDial is held where a dial changes what all share: the umask, and the name that it binds.
var unixDial sync.Mutex

func (f *forwarding) dialUnix(ctx context.Context, a *address, d *net.Dialer, name string) (net.Conn, error) {
	mask, bound := a.get("umask"), a.textOf("bind")
	if mask != nil || bound != "" {
		unixDial.Lock()
		defer unixDial.Unlock()
	}
	if mask != nil {
		old := unix.Umask(int(mask.num))
		defer unix.Umask(old)
	}
	c, err := d.DialContext(ctx, "unix", name)
	var failed *os.SyscallError
	if isBound := err == nil || errors.As(err, &failed) && failed.Syscall == "connect"; isBound && bound != "" && a.typ.kind == unixConnect {
		os.Remove(bound) // the peer knows the name by now, if it ever will, and the next connection needs it
	}
	return c, err
}

func (f *forwarding) connectVsock(ctx context.Context, a *address) (proxy.Stream, error) {
	sa := &unix.SockaddrVM{CID: vsockNumber(a.params[0]), Port: vsockNumber(a.params[1])}
	f.log.printf('N', "opening connection to AF=40 %s", vsockText(sa))
	fd := -1
	err := inNetns(a, func() (err error) {
		fd, err = f.vsockSocket(a, onDialling)
		return err
	})
	if err != nil {
		return nil, err
	}
	if v := a.textOf("bind"); v != "" {
		cid, port := splitBind(v)
		if port == "" {
			port = "-1"
		}
		if err := unix.Bind(fd, &unix.SockaddrVM{CID: vsockNumber(cid), Port: vsockNumber(port)}); err != nil {
			unix.Close(fd)
			return nil, fmt.Errorf("bind(vsock %s): %w", v, err)
		}
	}
	err = unix.Connect(fd, sa)
	file := os.NewFile(uintptr(fd), "vsock")
	if err == unix.EINPROGRESS {
		err = awaitConnect(ctx, file)
	}
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("connect(AF=40 %s): %w", vsockText(sa), plainError(err))
	}
	return &vsockStream{File: file, local: vsockAddr(unix.Getsockname(fd)), remote: vsockAddr(sa, nil)}, nil
}

// awaitConnect waits for the end of a non-blocking connect.
func awaitConnect(ctx context.Context, file *os.File) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { file.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	var serr error
	err = raw.Write(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		if n, err := unix.Poll(p, 0); err != nil || n == 0 {
			return false
		}
		e, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if serr = err; err == nil && e != 0 {
			serr = syscall.Errno(e)
		}
		return true
	})
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return err
	}
	return serr
}

// strerror is an errno with the C library's words, which scripts look for:
// "Connection refused".
type strerror struct{ syscall.Errno }

// Error implements error.
func (e strerror) Error() string {
	s := e.Errno.Error()
	return strings.ToUpper(s[:1]) + s[1:]
}

// Unwrap returns the errno.
func (e strerror) Unwrap() error { return e.Errno }

// optionError is a socket option that can't be set: no fault of the call that it was set for.
type optionError struct {
	call string
	err  error
}

func (e *optionError) Error() string { return e.call + ": " + e.err.Error() }
func (e *optionError) Unwrap() error { return e.err }

// plainError strips what package net says again of the addresses.
func plainError(err error) error {
	var errno syscall.Errno
	var dns *net.DNSError
	var option *optionError
	switch {
	case errors.As(err, &option):
		return option
	case errors.As(err, &errno):
		return strerror{errno}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return strerror{syscall.ETIMEDOUT}
	case errors.As(err, &dns) && dns.IsNotFound:
		return fmt.Errorf("getaddrinfo(%q): Name or service not known", dns.Name)
	}
	return err
}

// addrPortText writes an address as socat's messages do.
func addrPortText(p netip.AddrPort) string {
	ip := p.Addr().Unmap()
	if ip.Is4() {
		return fmt.Sprintf("AF=2 %s:%d", ip, p.Port())
	}
	return fmt.Sprintf("AF=10 [%s]:%d", ip.WithZone("").StringExpanded(), p.Port())
}

func addrText(a net.Addr) string {
	switch a := a.(type) {
	case *net.TCPAddr:
		return addrPortText(a.AddrPort())
	case *net.UnixAddr:
		return fmt.Sprintf("AF=1 %q", a.Name)
	case plainAddr:
		if a.network == "vsock" {
			return "AF=40 " + a.text
		}
		return a.text
	}
	return fmt.Sprint(a)
}
