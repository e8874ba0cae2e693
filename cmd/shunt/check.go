package main

import (
	"context"
	"flag"
	"fmt"
	"strings"
	"text/tabwriter"

	"shunt/proxy"
)

// configFlag declares --config.
func configFlag(path *string) func(*flag.FlagSet) {
	return func(fs *flag.FlagSet) {
		fs.StringVar(path, "config", "", "`FILE` to read the configuration from; - is stdin")
	}
}

// loadFlags parses the flags of a command that needs --config, and the file.
// Where it returns nil, the invocation ends with code.
func (c *command) loadFlags(args []string, s streams) (fc *fileConfig, file string, code int) {
	if code, ok := c.parse(args, s, configFlag(&file)); !ok {
		return nil, file, code
	}
	if file == "" {
		return nil, file, c.badUsage(s, "--config FILE is missing")
	}
	fc, err := loadConfig(file, s.in)
	if err != nil {
		c.printError(s, err)
		return nil, file, exitUsage
	}
	return fc, file, exitOK
}

func checkCommand(_ context.Context, c *command, args []string, s streams) int {
	fc, _, code := c.loadFlags(args, s)
	if fc == nil {
		return code
	}
	w := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "LISTENER\tLISTEN\tUPSTREAM\tBYPASS\n")
	for _, l := range fc.Listeners {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", l.Name, l.Listen, strings.Join(l.upstreams(), ","), l.Bypass)
	}
	if err := w.Flush(); err != nil {
		fmt.Fprintf(s.err, "shunt %s: %v\n", c.name, err)
		return exitFailure
	}
	admin := fc.Admin.Listen
	if admin == "" {
		admin = "off"
	}
	fmt.Fprintf(s.out, "admin: %s\n", admin)
	// Not errors: the file may be for another machine.
	_, err := fc.Process.identity()
	warnings := []error{err}
	for _, l := range fc.Listeners {
		warnings = append(warnings, l.Unix.unknown(l.Name)...)
	}
	for _, err := range warnings {
		if err != nil {
			fmt.Fprintf(s.err, "shunt %s: warning: %v\n", c.name, err)
		}
	}
	return exitOK
}

// unknown says which names of t, the listener's, this system doesn't have.
func (t unixTable) unknown(listener string) (errs []error) {
	if t.Owner != "" {
		if _, _, err := proxy.LookupUser(t.Owner); err != nil {
			errs = append(errs, fmt.Errorf("listener %q: unix.owner: %q: no such user on this system", listener, t.Owner))
		}
	}
	if t.Group != "" {
		if _, err := proxy.LookupGroup(t.Group); err != nil {
			errs = append(errs, fmt.Errorf("listener %q: unix.group: %q: no such group on this system", listener, t.Group))
		}
	}
	return errs
}
