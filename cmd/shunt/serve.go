package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/rs/zerolog"

	"shunt/proxy"
	"shunt/splice"
)

// Messages that the demo waits for in the log of the shunt that it runs.
const (
	msgBypassOn  = "bypass on"
	msgBypassOff = "bypass off"
	msgReady     = "ready"
)

func runCommand(ctx context.Context, c *command, args []string, s streams) int {
	from, err := formerProcess()
	if err != nil {
		fmt.Fprintf(s.err, "shunt %s: %v\n", c.name, err)
		return exitFailure
	}
	// What goes wrong before there is a log is told to the former process too.
	var said bytes.Buffer
	heard := streams{s.in, s.out, io.MultiWriter(s.err, &said)}
	fc, file, code := c.loadFlags(args, heard)
	if fc == nil {
		from.fail(said.String())
		return code
	}
	usage := func(err error) int {
		fmt.Fprintf(s.err, "shunt %s: %v\n", c.name, err)
		from.fail(err.Error())
		return exitUsage
	}
	if err := fc.checkCgroup(); err != nil {
		return usage(err)
	}
	who, err := fc.Process.identity()
	if err != nil {
		return usage(err)
	}
	if err := serve(ctx, fc, file, who, from, newLog(fc.Log, s.err)); err != nil {
		from.fail(err.Error())
		return exitFailure
	}
	return exitOK
}

// checkCgroup looks for the directory that the configuration names. A host
// without cgroup2 is no fault, a wrong name is one.
func (fc *fileConfig) checkCgroup() error {
	if fc.Bypass.Cgroup == "" || !fc.wantsBypass() || runtime.GOOS != "linux" {
		return nil
	}
	info, err := os.Stat(fc.Bypass.Cgroup)
	if err != nil {
		return fmt.Errorf("bypass.cgroup: %w", err)
	}
	if !info.IsDir() {
		return fmt.Errorf("bypass.cgroup: %s: not a directory", fc.Bypass.Cgroup)
	}
	return nil
}

// service is a running shunt, as far as its signals change it.
type service struct {
	fc      *fileConfig // the one that runs
	file    string      // where it was read; "-": stdin
	program string      // what an upgrade starts
	log     *liveLog
	server  *proxy.Server
	kernel  *splice.Kernel
	manager *notifier
	upgrade *upgrade // while one is on its way
}

// serve runs the proxy until a signal or the end of ctx, and drains it; as
// who, unless nil, from the moment on that everything is open; in place of a former process,
// unless that is nil. It logs the error that it returns.
func serve(ctx context.Context, fc *fileConfig, file string, who *identity, from *former, log *liveLog) (err error) {
	e := log.Info().Str("version", versionString()).Int("pid", os.Getpid())
	if from != nil {
		e = e.Int("in_place_of", os.Getppid())
	}
	e.Msg("shunt starts")
	defer func() {
		if err != nil {
			log.Error().Err(err).Msg("shunt failed")
		}
	}()

	// Before the bypass and the listeners come up: a signal meanwhile must not
	// kill the process half-way.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt, syscall.SIGHUP)
	if upgradeSignal != nil {
		signal.Notify(signals, upgradeSignal)
	}
	defer signal.Stop(signals)
	// A log that nobody reads any more must not end live connections.
	signal.Ignore(syscall.SIGPIPE)
	defer signal.Reset(syscall.SIGPIPE)

	s := &service{fc: fc, file: file, log: log, manager: &notifier{log: log.Logger}}
	s.program = program(os.Args[0])
	cfg := fc.proxyConfig()
	if from != nil {
		cfg.Inherited = from.sockets
	} else if cfg.Inherited, err = activatedSockets(); err != nil {
		return err
	}
	if s.kernel, err = openBypass(fc, &cfg, log.Logger); err != nil {
		return err
	}
	var bypass proxy.Bypass
	if s.kernel != nil {
		// After the server is shut down: its routes live in the kernel's maps.
		defer func() {
			if cerr := s.kernel.Close(); cerr != nil {
				log.Warn().Err(cerr).Msg("bypass not taken down cleanly")
			}
		}()
		bypass = proxy.Splice(s.kernel)
	}

	if who != nil {
		transparent := slices.ContainsFunc(fc.Listeners, func(l listenerTable) bool { return l.Transparent })
		cfg.Opened = func() error {
			if err := dropPrivileges(who, transparent, log.Logger); err != nil {
				return fmt.Errorf("drop privileges: %w", err)
			}
			return nil
		}
	}
	if s.server, err = proxy.New(cfg, bypass, log.Logger); err != nil {
		return err
	}
	if err := s.server.Open(); err != nil {
		return err
	}
	if from != nil {
		if err := s.awaitGo(ctx, from, signals); err != nil {
			ended, cancel := context.WithCancel(context.Background())
			cancel()
			s.server.Shutdown(ended)
			return err
		}
	}
	s.server.Serve()
	defer s.manager.close()
	if from != nil {
		<-from.serving()
	}
	s.manager.start(s.server)
	logReady(s.server, log.Logger)
	again := s.run(ctx, signals)
	return s.drain(signals, again)
}

// awaitGo waits until the former process lets this one serve.
func (s *service) awaitGo(ctx context.Context, from *former, signals <-chan os.Signal) error {
	answer := from.ready()
	for {
		select {
		case err := <-answer:
			return err
		case sig := <-signals:
			if sig == syscall.SIGTERM || sig == os.Interrupt {
				return fmt.Errorf("%v before the former process had handed over", sig)
			}
			s.log.Warn().Str("signal", sig.String()).Msg("signal ignored: shunt isn't ready")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// run handles signals until one of them, the end of ctx, or a new process asks for the
// end. It returns when a repeated signal means that live connections are to be ended, too.
func (s *service) run(ctx context.Context, signals <-chan os.Signal) (again time.Time) {
	for {
		var ready <-chan error
		if s.upgrade != nil {
			ready = s.upgrade.ready
		}
		select {
		case sig := <-signals:
			switch sig {
			case syscall.SIGHUP:
				s.reload()
				continue
			case upgradeSignal:
				s.startUpgrade()
				continue
			}
			s.log.Info().Str("signal", sig.String()).Msg("asked to end")
			s.abortUpgrade()
			s.manager.tell(daemon.SdNotifyStopping)
			return time.Now().Add(repeatedSignal)
		case err := <-ready:
			if s.finishUpgrade(err) {
				// Nobody has asked this process to end yet.
				return time.Time{}
			}
		case <-ctx.Done():
			s.abortUpgrade()
			s.manager.tell(daemon.SdNotifyStopping)
			return time.Now()
		}
	}
}

// openBypass sets up the kernel path where a listener may take it. A nil
// Kernel without an error means that everything is copied; cfg says why.
func openBypass(fc *fileConfig, cfg *proxy.Config, log zerolog.Logger) (*splice.Kernel, error) {
	if !fc.wantsBypass() {
		cfg.BypassUnsupported = "every listener had it off when shunt started"
		log.Info().Str("reason", "every listener has it off").Msg(msgBypassOff)
		return nil, nil
	}
	o := fc.spliceOptions()
	o.Log = log
	kernel, err := splice.Open(o)
	if err != nil {
		if fc.Bypass.Require {
			return nil, fmt.Errorf("bypass.require is true, but the bypass is impossible: %w; shunt probe shows every check", err)
		}
		cfg.BypassUnsupported = err.Error()
		log.Warn().Str("reason", err.Error()).Msg(msgBypassOff)
		return nil, nil
	}
	r := kernel.Report()
	cfg.FIONREADWrong = !r.FIONREAD
	fault := r.OfBypass()
	cfg.KernelFault = fault != nil
	e := log.Info().Str("kernel", r.Kernel).Str("verdict", string(r.Verdict))
	if r.Verdict == splice.VerdictWindow {
		e = e.Stringer("window", fc.Bypass.Window)
	}
	var differs []string
	for _, c := range r.Checks {
		if c.Result == splice.ResultDiffers {
			differs = append(differs, c.Name+": "+c.Detail)
		}
	}
	if len(differs) > 0 {
		e = e.Strs("differs_from_tcp", differs)
	}
	if f := r.OfVerdict(r.Verdict); f != nil {
		log.Warn().Str("verdict", string(r.Verdict)).Stringer("fault", f).Msg("verdict chosen in spite of a known fault of this kernel")
	}
	for _, c := range r.Checks {
		if c.Name == "cgroup of the host" && !c.OK {
			log.Warn().Str("reason", c.Detail).Msg("connections with other containers are copied")
		}
	}
	e.Uint64("queue_limit", r.QueueLimit).Uint64("queue_budget", r.Budget).Msg(msgBypassOn)
	var auto, on []string
	for _, l := range cfg.Listeners {
		switch l.Bypass {
		case proxy.BypassAuto:
			auto = append(auto, l.Name)
		case proxy.BypassOn:
			on = append(on, l.Name)
		}
	}
	if cfg.FIONREADWrong && len(auto) > 0 {
		log.Warn().Strs("listeners", auto).
			Str("reason", `redirected bytes are invisible to FIONREAD on this kernel; bypass = "on" takes the bypass in spite of it`).
			Msg("bypass declined")
	}
	if fault != nil && len(auto) > 0 {
		log.Warn().Strs("listeners", auto).Stringer("fault", fault).
			Str("reason", `a fault of this kernel is known; bypass = "on" takes the bypass in spite of it`).
			Msg("bypass declined")
	}
	if fault != nil && len(on) > 0 {
		log.Warn().Strs("listeners", on).Stringer("fault", fault).Msg("bypass taken in spite of a known fault of this kernel")
	}
	return kernel, nil
}

// logReady says what is open, with the ports that the kernel chose.
func logReady(server *proxy.Server, log zerolog.Logger) {
	listeners := zerolog.Dict()
	for _, a := range server.Addrs() {
		listeners.Str(a.Name, a.Text)
	}
	log.Info().Dict("listeners", listeners).Str("admin", server.AdminAddr()).Msg(msgReady)
}

// repeatedSignal is how soon after the first a second signal is the same one
// again: timeout(1) signals its child, and then its group.
const repeatedSignal = 200 * time.Millisecond

// drain lets live connections finish; a second signal ends them. One before again is the first
// once more, and where nobody has asked for the end yet, the first is still to come.
func (s *service) drain(signals <-chan os.Signal, again time.Time) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- s.server.Shutdown(ctx) }()
	for {
		select {
		case sig := <-signals:
			e := s.log.Warn().Str("signal", sig.String())
			switch {
			case sig == syscall.SIGHUP || sig == upgradeSignal:
				e.Msg("signal ignored: shunt is draining")
			case again.IsZero():
				again = time.Now().Add(repeatedSignal)
				e.Msg("draining already")
			case time.Now().Before(again):
				e.Msg("signal came twice: it counts once")
			default:
				e.Msg("ending live connections")
				cancel()
			}
		case err := <-done:
			// That connections were ended, by the bound or by the second
			// signal, is what was asked for.
			if err != nil && ctx.Err() == nil {
				return fmt.Errorf("shut down: %w", err)
			}
			s.log.Info().Msg("shunt ends")
			return nil
		}
	}
}

// Why there is no upgrade.
var (
	errUpgrading = errors.New("one is running")
	errDropped   = errors.New("shunt has given its privileges up (process.user), so a new one could not set up the bypass: " +
		"let systemd open the sockets (socket activation), and restart")
)

// startUpgrade starts the new process, or says why not.
func (s *service) startUpgrade() {
	err := func() error {
		switch {
		case s.upgrade != nil:
			return errUpgrading
		case s.file == "-":
			return errStdin
		case droppedPrivileges():
			return errDropped
		}
		sockets, err := s.server.Sockets()
		if err != nil {
			return err
		}
		defer func() {
			for _, h := range sockets {
				h.File.Close()
			}
		}()
		s.upgrade, err = startUpgrade(s.program, os.Args, sockets, upgradeTimeout)
		return err
	}()
	if err != nil {
		s.log.Error().Err(err).Msg("no upgrade")
		return
	}
	s.log.Info().Str("program", s.program).Int("new_pid", s.upgrade.pid()).Msg("upgrade: new process started")
}

// finishUpgrade lets the new process take over, if err is nil, and says whether it did.
func (s *service) finishUpgrade(err error) bool {
	u := s.upgrade
	s.upgrade = nil
	if err == nil {
		err = u.let()
	}
	if err != nil {
		s.log.Error().Int("new_pid", u.pid()).Err(err).Msg("upgrade failed: this process goes on")
		return false
	}
	s.server.HandOver()
	s.manager.handOver(u.pid())
	u.stream.Close()
	s.log.Info().Int("new_pid", u.pid()).Msg("handed over")
	return true
}

func (s *service) abortUpgrade() {
	if s.upgrade != nil {
		s.upgrade.abort()
		s.log.Warn().Int("new_pid", s.upgrade.pid()).Msg("upgrade given up")
		s.upgrade = nil
	}
}
