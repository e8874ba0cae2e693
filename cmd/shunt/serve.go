package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

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
	fc, file, code := c.loadFlags(args, s)
	if fc == nil {
		return code
	}
	if err := fc.checkCgroup(); err != nil {
		fmt.Fprintf(s.err, "shunt %s: %v\n", c.name, err)
		return exitUsage
	}
	who, err := fc.Process.identity()
	if err != nil {
		fmt.Fprintf(s.err, "shunt %s: %v\n", c.name, err)
		return exitUsage
	}
	if err := serve(ctx, fc, file, who, newLog(fc.Log, s.err)); err != nil {
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
	fc     *fileConfig // the one that runs
	file   string      // where it was read; "-": stdin
	log    *liveLog
	server *proxy.Server
	kernel *splice.Kernel
}

// serve runs the proxy until a signal or the end of ctx, and drains it; as
// who, unless nil, from the moment on that everything is open. It logs the
// error that it returns.
func serve(ctx context.Context, fc *fileConfig, file string, who *identity, log *liveLog) (err error) {
	log.Info().Str("version", versionString()).Int("pid", os.Getpid()).Msg("shunt starts")
	defer func() {
		if err != nil {
			log.Error().Err(err).Msg("shunt failed")
		}
	}()

	// Before the bypass and the listeners come up: a signal meanwhile must not
	// kill the process half-way.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt, syscall.SIGHUP)
	defer signal.Stop(signals)
	// A log that nobody reads any more must not end live connections.
	signal.Ignore(syscall.SIGPIPE)
	defer signal.Reset(syscall.SIGPIPE)

	s := &service{fc: fc, file: file, log: log}
	cfg := fc.proxyConfig()
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
		cfg.Opened = func() error {
			if err := dropPrivileges(who, log.Logger); err != nil {
				return fmt.Errorf("drop privileges: %w", err)
			}
			return nil
		}
	}
	if s.server, err = proxy.New(cfg, bypass, log.Logger); err != nil {
		return err
	}
	if err := s.server.Start(); err != nil {
		return err
	}
	logReady(s.server, log.Logger)
	s.run(ctx, signals)
	return drain(s.server, signals, log.Logger)
}

// run handles signals until one of them, or the end of ctx, asks for the end.
func (s *service) run(ctx context.Context, signals <-chan os.Signal) {
	for {
		select {
		case sig := <-signals:
			if sig == syscall.SIGHUP {
				s.reload()
				continue
			}
			s.log.Info().Str("signal", sig.String()).Msg("asked to end")
			return
		case <-ctx.Done():
			return
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

// drain lets live connections finish; a second signal ends them.
func drain(server *proxy.Server, signals <-chan os.Signal, log zerolog.Logger) error {
	first := time.Now()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- server.Shutdown(ctx) }()
	for {
		select {
		case sig := <-signals:
			switch {
			case sig == syscall.SIGHUP:
				log.Warn().Str("signal", sig.String()).Msg("no reload: shunt is draining")
			case time.Since(first) < repeatedSignal:
				log.Debug().Str("signal", sig.String()).Msg("signal came twice")
			default:
				log.Warn().Str("signal", sig.String()).Msg("ending live connections")
				cancel()
			}
		case err := <-done:
			// That connections were ended, by the bound or by the second
			// signal, is what was asked for.
			if err != nil && ctx.Err() == nil {
				return fmt.Errorf("shut down: %w", err)
			}
			log.Info().Msg("shunt ends")
			return nil
		}
	}
}
