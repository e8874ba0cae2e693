package main

import (
	"context"
	"errors"
	"fmt"
	"log/syslog"
	"net"
	"os"
	"os/signal"
	"os/user"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"shunt/proxy"
	"shunt/splice"
)

// forwarding is one run of two addresses. The proxy knows a connection as
// downstream and upstream: downstream is the address that listens, the left
// one if both do or neither.
type forwarding struct {
	line     *socatLine
	log      *socatLog
	down, up *address
	swapped  bool // the right address is downstream
	fork     bool
	dump     *dump

	first     proxy.Stream // of the left address, where it was opened before the right one listens
	listened  net.Listener // the downstream listener
	said      atomic.Bool  // an error was logged that ends the run
	lost      atomic.Bool  // a file or terminal took no more bytes
	accepting *time.Timer  // accept-timeout
	end       chan int     // the exit code of a run that ends by itself

	server atomic.Pointer[proxy.Server] // once it is there

	mu      sync.Mutex
	dropped map[dropKey]bool
	ends    []func() error
	fds     map[uint64][2]int // of live connections: left, right; kept where notices are shown
}

// forward runs the command line until its connection has ended, or a signal.
func forward(ctx context.Context, line *socatLine, s streams) int {
	log := newSocatLog(s.err, line.name)
	f := &forwarding{line: line, log: log, down: line.left, up: line.right, end: make(chan int, 4), dropped: map[dropKey]bool{}, fds: map[uint64][2]int{}}
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, end := range f.ends {
			end()
		}
	}()
	if err := f.setUp(s); err != nil {
		log.printf('E', "%v", err)
		return exitFailure
	}
	if !line.left.listens() && line.right.listens() {
		f.down, f.up, f.swapped = line.right, line.left, true
	}
	f.fork = f.down.on("fork")

	// Before anything is open: a signal meanwhile must not leave files behind.
	signals := make(chan os.Signal, 4)
	for _, sig := range []os.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT} {
		if !signal.Ignored(sig) { // by nohup, or by a shell that runs it in the background
			signal.Notify(signals, sig)
		}
	}
	defer signal.Stop(signals)
	defer f.statisticsOnSignal()()

	code, err := f.serve(ctx, signals)
	if err != nil {
		if !f.said.Load() {
			log.printf('E', "%v", err)
		}
		code = exitFailure
	}
	if line.statistics {
		f.printStatistics()
	}
	if code == exitOK {
		log.printf('N', "exiting with status 0")
	} else {
		log.printf('N', "exit(%d)", code)
	}
	return code
}

// statisticsOnSignal logs the statistics at each SIGUSR1 until the returned
// function is called.
func (f *forwarding) statisticsOnSignal() (stop func()) {
	usr1 := make(chan os.Signal, 1)
	signal.Notify(usr1, syscall.SIGUSR1)
	go func() {
		for range usr1 {
			f.printStatistics()
		}
	}()
	return func() {
		signal.Stop(usr1)
		close(usr1)
	}
}

// printStatistics logs the bytes of all connections, whatever the level.
func (f *forwarding) printStatistics() {
	var n [2]uint64 // from the left, from the right
	if s := f.server.Load(); s != nil {
		for d, bytes := range s.Bytes() {
			side := 0
			if f.fromRight(splice.Direction(d)) {
				side = 1
			}
			n[side] = bytes
		}
	}
	f.log.print('I', fmt.Sprintf("STATISTICS: left to right: %d byte(s)", n[0]))
	f.log.print('I', fmt.Sprintf("STATISTICS: right to left: %d byte(s)", n[1]))
}

// setUp opens what the options of the command line name.
func (f *forwarding) setUp(s streams) error {
	line, log := f.line, f.log
	log.level, log.micros = line.level, line.micros
	if line.hostname {
		if log.host = os.Getenv("HOSTNAME"); log.host == "" {
			log.host, _ = os.Hostname()
		}
	}
	if line.logFile != "" {
		w, err := os.OpenFile(line.logFile, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o664)
		if err != nil {
			return err
		}
		log.w = w
		f.atEnd(w.Close)
	}
	if line.syslog {
		f.openSyslog()
	}
	if !line.tapped() {
		return nil
	}
	f.dump = &dump{w: s.err, text: line.text, hex: line.hex, at: map[dumpKey]uint64{}}
	for side, name := range []string{line.rawRight, line.rawLeft} {
		if name == "" {
			continue
		}
		w, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o664)
		if err != nil {
			return err
		}
		f.dump.raw[side] = w
		f.atEnd(w.Close)
	}
	return nil
}

// atEnd has end called when the run is over.
func (f *forwarding) atEnd(end func() error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ends = append(f.ends, end)
}

func (f *forwarding) openSyslog() {
	facility := syslog.LOG_DAEMON
	for i, name := range facilities {
		if name != f.line.facility {
			continue
		}
		if i >= 12 {
			i += 4 // local0 is 16
		}
		facility = syslog.Priority(i << 3)
	}
	// A run doesn't depend on whether somebody listens: syslog(3) drops messages, too.
	var w *syslog.Writer
	var said bool
	f.log.send = func(severity byte, text string) {
		if w == nil {
			var err error
			if w, err = syslog.New(facility|syslog.LOG_NOTICE, f.log.name); err != nil {
				if w = nil; !said {
					said = true
					f.log.write('W', "no syslog to write messages to: "+err.Error())
				}
				return
			}
		}
		put := map[byte]func(string) error{'F': w.Crit, 'E': w.Err, 'W': w.Warning, 'N': w.Notice, 'I': w.Info, 'D': w.Debug}[severity]
		put(string(severity) + " " + text)
	}
	f.atEnd(func() error {
		if w == nil {
			return nil
		}
		return w.Close()
	})
}

// noBypass says why this run can't take the bypass, or "".
func (f *forwarding) noBypass() string {
	drops := false
	for _, name := range privilegeOptions {
		drops = drops || f.down.get(name) != nil || f.up.get(name) != nil
	}
	switch {
	case f.line.bypass == proxy.BypassOff:
		return "--bypass=off"
	case f.line.tapped():
		return "-v, -x, -r and -R look at the payload"
	case f.line.onlyLeft || f.line.onlyRight:
		return "-u and -U carry one direction only"
	case drops:
		return "the process gives its privileges up"
	case f.down.textOf("netns") != "":
		return "the listening address is in another network namespace"
	case f.down.typ.kind != tcpListen || f.up.typ.kind != tcpConnect:
		return "only a TCP listener and a TCP connection can be bypassed"
	case f.swapped:
		return "the first address is connected before the second has a client"
	}
	return ""
}

// reason is the metrics' word for a run that can't take the bypass.
func (f *forwarding) reason() splice.Reason {
	kind := f.down.typ.kind | f.up.typ.kind
	switch {
	case kind&(unixConnect|unixListen|abstractConnect|abstractListen) != 0:
		return splice.ReasonUnix
	case kind&^anyTCP != 0:
		return splice.ReasonNotTCP
	}
	return splice.ReasonOff
}

// listener is the proxy's configuration of this run.
func (f *forwarding) listener() proxy.Listener {
	line := f.line
	l := proxy.DefaultListener()
	l.Name, l.Upstream, l.Bypass = f.down.text, f.up.text, line.bypass
	l.MaxConnections = int(f.down.number("max-children", 0))
	l.ListenFunc, l.DialFunc, l.Admit = f.openDown, f.openUp, f.admit
	l.Direct = f.direct()
	l.Once = !f.fork
	l.QuietEnds = true
	l.KeepAlive = keepAlive(f.up)
	l.IdleTimeout = line.idle
	if line.closeWait >= 0 {
		l.HalfOpenTimeout = max(line.closeWait, time.Millisecond)
	}
	l.BufferSize = line.buffer
	l.Down, l.Up = policyOf(f.down), policyOf(f.up)
	// A descriptor that is open one way only makes the run one way.
	onlyRight := line.onlyRight || accessOf(line.left) == unix.O_RDONLY || accessOf(line.right) == unix.O_WRONLY
	onlyLeft := line.onlyLeft || accessOf(line.left) == unix.O_WRONLY || accessOf(line.right) == unix.O_RDONLY
	switch {
	case onlyRight != f.swapped && (onlyRight || onlyLeft):
		l.Way = proxy.OnlyUp
	case onlyRight || onlyLeft:
		l.Way = proxy.OnlyDown
	}
	if f.dump != nil {
		l.Tap = func(conn uint64, d splice.Direction, b []byte) { f.dump.bytes(conn, f.fromRight(d), b) }
	}
	l.Trace = proxy.Trace{Listening: f.onListening, Accepted: f.onAccepted, Started: f.onStarted, Finished: f.onFinished, Closed: f.onClosed}
	return l
}

// accessOf returns how a descriptor is open: O_RDONLY, O_WRONLY or O_RDWR, as all other addresses are.
func accessOf(a *address) int {
	if a.typ.kind == fdNumber {
		n, _ := parseNumber(a.params[0])
		if flags, err := unix.FcntlInt(uintptr(n), unix.F_GETFL, 0); err == nil {
			return flags & unix.O_ACCMODE
		}
	}
	return unix.O_RDWR
}

func policyOf(a *address) (p proxy.LegPolicy) {
	// What files do at their end is fileStream's.
	p.IgnoreFIN = a.on("ignoreeof") && !anyFile.has(a.typ.kind)
	switch {
	case a.on("shut-none"):
		p.OnFIN = proxy.KeepFIN
	case a.on("shut-close"):
		p.OnFIN = proxy.CloseOnFIN
	}
	return p
}

// fromRight says whether what goes in direction d comes from the right address.
func (f *forwarding) fromRight(d splice.Direction) bool { return (d == splice.Up) == f.swapped }

// begun is a proxy that runs.
type begun struct {
	server *proxy.Server
	kernel *splice.Kernel // nil without the bypass
	err    error
}

// serve runs the proxy.
func (f *forwarding) serve(ctx context.Context, signals <-chan os.Signal) (code int, err error) {
	started := make(chan begun, 1)
	go func() { started <- f.begin(ctx) }() // opening may wait for a peer
	var b begun
	defer func() {
		if b.kernel != nil {
			b.kernel.Close()
		}
	}()
	for {
		select {
		case b = <-started:
			if b.err != nil {
				return 0, b.err
			}
			continue
		case code = <-f.end:
		case sig := <-signals:
			f.log.printf('W', "exiting on signal %d", sig)
			code = 128 + int(sig.(syscall.Signal))
		case <-ctx.Done():
		}
		if b.server == nil {
			return code, nil
		}
		return code, f.stop(b.server, signals, f.fork)
	}
}

// begin opens the downstream side and starts the proxy.
func (f *forwarding) begin(ctx context.Context) (b begun) {
	cfg := proxy.Config{Admin: f.line.admin, Listeners: []proxy.Listener{f.listener()}}
	why := f.noBypass()
	if why != "" {
		cfg.Listeners[0].NoBypass = f.reason()
	}
	if f.dump != nil && f.line.bypass != proxy.BypassOff {
		// Whoever measures with -v should know that it is another path.
		f.log.print('W', "bypass off: "+why)
	} else if why != "" {
		f.log.printf('I', "bypass off: %s", why)
	}
	var bypass proxy.Bypass
	if why == "" {
		if !f.fork && f.line.bypass == proxy.BypassAuto {
			// Setting the bypass up takes a while, and scripts connect soon after the start. A client that comes
			// meanwhile waits in the backlog, and is copied. With fork, connections may last, and being copied would too.
			ln, err := f.openDown(ctx)
			if err != nil {
				return begun{err: err}
			}
			cfg.Listeners[0].ListenFunc = func(context.Context) (net.Listener, error) { return ln, nil }
		}
		fc := defaultFile()
		fc.Listeners = []listenerTable{{Bypass: string(f.line.bypass)}}
		if b.kernel, b.err = openBypass(&fc, &cfg, f.log.logger()); b.err != nil {
			return b
		}
		if b.kernel != nil {
			bypass = proxy.Splice(b.kernel)
		}
	}
	if b.server, b.err = proxy.New(cfg, bypass, f.log.logger()); b.err == nil {
		f.server.Store(b.server)
		b.err = b.server.Start()
	}
	return b
}

// stop shuts the server down; where drain is true, live connections may
// finish, until the drain timeout or another signal.
func (f *forwarding) stop(server *proxy.Server, signals <-chan os.Signal, drain bool) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if !drain {
		cancel()
	}
	done := make(chan error, 1)
	go func() { done <- server.Shutdown(ctx) }()
	for {
		select {
		case <-signals:
			cancel()
		case err := <-done:
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
	}
}

// openDown opens the downstream side: the proxy's ListenFunc.
func (f *forwarding) openDown(ctx context.Context) (net.Listener, error) {
	ln, err := f.openFirst(ctx)
	if err != nil {
		f.said.Store(true)
		f.log.printf('E', "%v", plainListenError(err))
	}
	return ln, err
}

func (f *forwarding) openFirst(ctx context.Context) (ln net.Listener, err error) {
	if f.swapped {
		// socat opens the left address before the right one.
		if !f.fork {
			if f.first, err = f.open(ctx, f.up, nil); err != nil {
				return nil, err
			}
		}
	}
	if !f.down.listens() {
		s, err := f.open(ctx, f.down, nil)
		if err != nil {
			return nil, err
		}
		return newOneStream(s), nil
	}
	if err := f.dropEarly(f.down); err != nil {
		return nil, err
	}
	if ln, err = f.listen(ctx, f.down); err != nil {
		return nil, err
	}
	f.listened = ln
	return ln, nil
}

// openUp opens the upstream side of a connection: the proxy's DialFunc.
func (f *forwarding) openUp(ctx context.Context, _ uint64, _ proxy.Stream, control proxy.ControlFunc) (proxy.Stream, error) {
	if f.first != nil {
		return f.first, nil
	}
	s, err := f.open(ctx, f.up, control)
	if err != nil && ctx.Err() == nil {
		f.log.printf('E', "%v", plainListenError(err))
	}
	return s, err
}

// open opens one stream of any address; a listening one accepts once.
func (f *forwarding) open(ctx context.Context, a *address, control proxy.ControlFunc) (s proxy.Stream, err error) {
	if err := f.dropEarly(a); err != nil {
		return nil, err
	}
	switch {
	case a.typ.kind == stdio:
		f.log.printf('N', "%s", f.fileUse(a))
		s, err = newFileStream("STDIO", 0, 1, a.on("ignoreeof"), f.fork)
	case a.typ.kind == fdNumber:
		n, _ := parseNumber(a.params[0])
		f.log.printf('N', "%s", f.fileUse(a))
		s, err = newFileStream("FD:"+a.params[0], int(n), int(n), a.on("ignoreeof"), f.fork)
	case a.listens():
		s, err = f.acceptOne(ctx, a)
	default:
		s, err = f.connect(ctx, a, control)
		if err == nil && f.log.shows('N') {
			f.log.printf('N', "successfully connected from local address %s", addrText(s.LocalAddr()))
		}
	}
	if err != nil {
		return nil, err
	}
	if file, ok := s.(*fileStream); ok {
		file.broken = func(err error) {
			f.log.printf('E', "%v", err)
			f.lost.Store(true)
		}
	}
	if err := f.drop(a); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// fileUse says how an open file is used.
func (f *forwarding) fileUse(a *address) string {
	name, in, out := "", "stdin", "stdout"
	if a.typ.kind == fdNumber {
		name = "file descriptor " + a.params[0]
		in, out = name, name
	}
	switch left := a == f.line.left; {
	case left && f.line.onlyRight, !left && f.line.onlyLeft:
		return "using " + in + " for reading"
	case left && f.line.onlyLeft, !left && f.line.onlyRight:
		return "using " + out + " for writing"
	case name == "":
		return "reading from and writing to stdio"
	}
	return "using " + name + " for reading and writing"
}

// acceptOne listens for the first client that may connect.
func (f *forwarding) acceptOne(ctx context.Context, a *address) (proxy.Stream, error) {
	ln, err := f.listen(ctx, a)
	if err != nil {
		return nil, err
	}
	defer ln.Close()
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	defer stop()
	f.log.printf('N', "listening on %s", addrText(ln.Addr()))
	if d := a.seconds("accept-timeout"); d > 0 {
		t := time.AfterFunc(d, func() {
			f.end <- exitOK
			ln.Close()
		})
		defer t.Stop()
	}
	for {
		c, err := ln.Accept()
		if err != nil {
			return nil, err
		}
		s := c.(proxy.Stream)
		if err := f.admitTo(a, s); err != nil {
			s.Close()
			continue
		}
		f.log.printf('N', "accepting connection from %s on %s", addrText(s.RemoteAddr()), addrText(s.LocalAddr()))
		return s, nil
	}
}

func (f *forwarding) admit(s proxy.Stream) error {
	if !f.down.listens() {
		return nil
	}
	return f.admitTo(f.down, s)
}

// admitTo checks a client of a and sets its socket's options.
func (f *forwarding) admitTo(a *address, s proxy.Stream) error {
	if t, ok := s.RemoteAddr().(*net.TCPAddr); ok {
		if err := permitted(a, t); err != nil {
			f.log.printf('W', "refusing connection from %s %v", addrText(t), err)
			return err
		}
	}
	if err := f.setConnected(a, s, onAccepted); err != nil {
		f.log.printf('E', "%v", err)
		if !f.fork {
			f.fail()
		}
		return err
	}
	return nil
}

var errRange = errors.New("due to range option")

// permitted says whether a client may connect.
func permitted(a *address, t *net.TCPAddr) error {
	from := t.AddrPort()
	if v := a.textOf("range"); v != "" {
		p, err := parseRange(v)
		if err != nil || !p.Contains(from.Addr().Unmap().WithZone("")) {
			return errRange
		}
	}
	if v := a.textOf("sourceport"); v != "" {
		if port, err := resolvePort(context.Background(), v); err != nil || port != from.Port() {
			return errors.New("due to sourceport option")
		}
	}
	if a.on("lowport") && from.Port() >= 1024 {
		return errors.New("due to lowport option")
	}
	return nil
}

// fail ends the run with the code of an error that was logged.
func (f *forwarding) fail() {
	f.said.Store(true)
	select {
	case f.end <- exitFailure:
	default:
	}
}

func (f *forwarding) onListening(addr net.Addr) {
	if f.listened == nil {
		return
	}
	f.log.printf('N', "listening on %s", addrText(addr))
	if err := f.drop(f.down); err != nil {
		f.log.printf('E', "%v", err)
		f.fail()
	}
	if d := f.down.seconds("accept-timeout"); d > 0 {
		f.accepting = time.AfterFunc(d, func() {
			f.log.printf('I', "nobody connected for %v", d)
			f.end <- exitOK
		})
	}
}

func (f *forwarding) onAccepted(conn uint64, down proxy.Stream) {
	if f.listened == nil {
		return
	}
	if f.log.shows('N') { // the texts cost more than the rest of it
		f.log.printf('N', "accepting connection from %s on %s", addrText(down.RemoteAddr()), addrText(down.LocalAddr()))
		f.log.printf('I', "permitting connection from %s", addrText(down.RemoteAddr()))
	}
	if f.accepting != nil {
		f.accepting.Stop()
		if f.fork {
			f.accepting.Reset(f.down.seconds("accept-timeout"))
		}
	}
}

func (f *forwarding) onStarted(conn uint64, down, up proxy.Stream, reason splice.Reason) {
	if !f.log.shows('N') {
		return
	}
	left, right := down, up
	if f.swapped {
		left, right = up, down
	}
	path := "bypass on"
	if reason != "" {
		path = "copying, " + string(reason)
	}
	l, r := fdsOf(left), fdsOf(right)
	f.mu.Lock()
	f.fds[conn] = [2]int{l[0], r[0]}
	f.mu.Unlock()
	f.log.printf('N', "starting data transfer loop with FDs [%d,%d] and [%d,%d]", l[0], l[1], r[0], r[1])
	f.log.printf('I', "connection %d: %s", conn, path)
}

// fdsOf returns the descriptors of a stream: the one that is read, the one that is written.
func fdsOf(s proxy.Stream) (fds [2]int) {
	switch s := s.(type) {
	case *fileStream:
		return [2]int{s.in, s.out}
	case syscall.Conn:
		withFD(s, func(fd int) error { fds = [2]int{fd, fd}; return nil })
	}
	return fds
}

func (f *forwarding) onFinished(conn uint64, d splice.Direction) {
	if !f.log.shows('N') {
		return
	}
	side := 0
	if f.fromRight(d) {
		side = 1
	}
	f.mu.Lock()
	fd := f.fds[conn][side]
	f.mu.Unlock()
	of := ""
	if f.fork {
		of = fmt.Sprintf(", connection %d", conn)
	}
	f.log.printf('N', "socket %d (fd %d) is at EOF%s", side+1, fd, of)
}

func (f *forwarding) onClosed(conn uint64, cause string, err error) {
	if f.dump != nil {
		f.dump.forget(conn)
	}
	if f.log.shows('N') {
		f.mu.Lock()
		delete(f.fds, conn)
		f.mu.Unlock()
	}
	dial := strings.HasPrefix(cause, "dial-")
	switch {
	case cause == "idle":
		f.log.printf('N', "inactivity timeout triggered")
	case err != nil && !dial:
		f.log.printf('W', "connection %d: %s: %v", conn, cause, err)
	}
	code := exitOK
	if dial || !f.fork && f.lost.Load() {
		code = exitFailure
	}
	if f.fork {
		f.log.printf('N', "connection %d closed (%s): exiting with status %d", conn, cause, code)
		return
	}
	select {
	case f.end <- code:
	default: // a signal or an error was first
	}
}

// plainListenError strips what package net says again of a listening address.
func plainListenError(err error) error {
	var op *net.OpError
	var option *optionError
	if errors.As(err, &option) {
		return option
	}
	if errors.As(err, &op) && op.Op == "listen" {
		return fmt.Errorf("bind(%s): %w", addrText(op.Addr), plainError(op.Err))
	}
	return err
}

// privilegeOptions change the user or group of the process.
var privilegeOptions = []string{"su-e", "su-d", "su", "setgid", "setuid"}

// dropEarly changes the user before a is opened.
func (f *forwarding) dropEarly(a *address) error {
	if v := a.textOf("su-e"); v != "" && f.once(dropKey{a, true}) {
		return becomeUser(v, true)
	}
	for _, name := range privilegeOptions {
		// A name that doesn't exist is no reason to open anything.
		if o := a.get(name); o != nil && o.opt.value == userValue {
			if _, _, err := proxy.LookupUser(o.value); err != nil {
				return err
			}
		}
	}
	return nil
}

// once says whether something that changes the process is still due.
func (f *forwarding) once(key dropKey) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.dropped[key] {
		return false
	}
	f.dropped[key] = true
	return true
}

// dropKey is an address's change of the user, before or after it is open.
type dropKey struct {
	a     *address
	early bool
}

// drop changes the user and group after a was opened.
func (f *forwarding) drop(a *address) error {
	if !f.once(dropKey{a, false}) {
		return nil
	}
	if v := a.textOf("setgid"); v != "" {
		gid, err := proxy.LookupGroup(v)
		if err != nil {
			return err
		}
		if err := syscall.Setgid(gid); err != nil {
			return os.NewSyscallError("setgid", err)
		}
	}
	for _, name := range []string{"su", "su-d", "setuid"} {
		if v := a.textOf(name); v != "" {
			if err := becomeUser(v, name != "setuid"); err != nil {
				return err
			}
		}
	}
	return nil
}

// becomeUser makes the whole process the user's, with the user's groups too if asked for.
func becomeUser(name string, groups bool) error {
	uid, gid, err := proxy.LookupUser(name)
	if err != nil {
		return err
	}
	if groups && gid >= 0 {
		list, err := groupsOf(name, gid)
		if err != nil {
			return err
		}
		if err := syscall.Setgroups(list); err != nil {
			return os.NewSyscallError("setgroups", err)
		}
		if err := syscall.Setgid(gid); err != nil {
			return os.NewSyscallError("setgid", err)
		}
	}
	return os.NewSyscallError("setuid", syscall.Setuid(uid))
}

// groupsOf returns the ids of the user's groups.
func groupsOf(name string, gid int) ([]int, error) {
	u, err := user.Lookup(name)
	if err != nil {
		if u, err = user.LookupId(name); err != nil {
			return []int{gid}, nil
		}
	}
	ids, err := u.GroupIds()
	if err != nil {
		return nil, err
	}
	list := []int{gid}
	for _, id := range ids {
		n, err := strconv.Atoi(id)
		if err != nil {
			return nil, err
		}
		if n != gid {
			list = append(list, n)
		}
	}
	return list, nil
}
