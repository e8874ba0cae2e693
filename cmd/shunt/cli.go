package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"
)

// Exit codes of every subcommand.
const (
	exitOK       = 0
	exitFailure  = 1
	exitUsage    = 2 // bad usage or configuration
	exitCopyOnly = 3 // probe: this host can only copy
)

// streams are the standard streams of one invocation.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

// command is a subcommand. Hidden ones serve other subcommands.
type command struct {
	name    string
	args    string // what follows the name in the usage line
	summary string
	help    string // what -h prints under the usage line, before the flags
	hidden  bool
	run     func(ctx context.Context, c *command, args []string, s streams) int
}

// commands lists the subcommands in the order of the help text. It is a
// function because the commands refer to it.
func commands() []*command {
	return []*command{
		{name: "run", args: "--config FILE", summary: "proxy connections until SIGTERM or SIGINT",
			help: "Proxies connections as FILE says. The first SIGTERM or SIGINT stops accepting and\n" +
				"lets live connections finish, for drain_timeout at most; a second ends them. SIGHUP\n" +
				"reads FILE again; SIGUSR2 lets the program that is now at its path take over.",
			run: runCommand},
		{name: "check", args: "--config FILE", summary: "validate a configuration and print what it does",
			help: "Validates FILE and prints where shunt would listen and where connections would go.\n" +
				"Nothing is opened, resolved or changed.",
			run: checkCommand},
		{name: "probe", args: "[--json] [--config FILE]", summary: "say whether this host allows the bypass, and why not",
			help: "Does everything that the bypass needs, on loopback, takes it down again and prints\n" +
				"each check: ok; missing: the bypass needs it; differs: it works, but not quite as TCP does;\n" +
				"n/a: not available, and not needed, or not tried. Exit code 0: the bypass is possible; 3: shunt would copy.",
			run: probeCommand},
		{name: "demo", args: "[--time D] [--verdict V]", summary: "measure direct, copied and bypassed connections on loopback",
			help: "Starts an echo service, shunt in front of it and a client in processes of their own,\n" +
				"and prints round trip and bulk rate for each path.",
			run: demoCommand},
		{name: socatName, args: "[options] ADDRESS ADDRESS", summary: "forward as socat does; the word may be left out",
			help: "Connects the two addresses as socat does; -h lists options and addresses.",
			run:  socatCommand},
		{name: "translate", args: "[options] ADDRESS ADDRESS", summary: "print the configuration file for a socat command line",
			help: "Prints the configuration with which 'shunt run' does what socat does with these\n" +
				"addresses. What has no equivalent there is listed in comments, and on stderr.",
			run: translateCommand},
		{name: "version", summary: "print the version",
			help: "Prints the version of shunt, of Go, and the platform.",
			run:  versionCommand},
		{name: "help", args: "[COMMAND]", summary: "print this text, or a command's",
			help: "Prints the list of commands, or what COMMAND does.",
			run:  helpCommand},
		{name: demoServiceName, hidden: true, run: demoServiceCommand},
		{name: demoClientName, hidden: true, run: demoClientCommand},
	}
}

func lookup(name string) *command {
	for _, c := range commands() {
		if c.name == name {
			return c
		}
	}
	return nil
}

// run is the whole program without the process around it: it returns the exit
// code. Cancelling ctx has the effect of a first SIGTERM.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	s := streams{in: stdin, out: stdout, err: stderr}
	if len(args) == 0 {
		usage(s.err)
		return exitUsage
	}
	name := args[0]
	switch name {
	case "-h", "-help", "--help":
		name = "help"
	case "-version", "--version":
		name = "version"
	}
	if c := lookup(name); c != nil {
		return c.run(ctx, c, args[1:], s)
	}
	if looksLikeSocat(args) {
		return socatCommand(ctx, nil, args, s)
	}
	return notACommand(args, s)
}

// notACommand handles a first argument that names no subcommand.
func notACommand(args []string, s streams) int {
	what := "command"
	if strings.HasPrefix(args[0], "-") {
		what = "option"
	}
	hint := ""
	if near := nearest(args[0], append(visibleNames(), "--bypass", "--admin")); near != "" {
		hint = fmt.Sprintf("; did you mean %q?", near)
	}
	fmt.Fprintf(s.err, "shunt: unknown %s %q%s\nRun 'shunt help' for the list of commands.\n", what, args[0], hint)
	return exitUsage
}

func visibleNames() []string {
	var names []string
	for _, c := range commands() {
		if !c.hidden {
			names = append(names, c.name)
		}
	}
	return names
}

func usage(w io.Writer) {
	fmt.Fprint(w, "shunt is a TCP proxy that takes itself out of the path of local connections.\n\nUsage:\n\n")
	for _, c := range commands() {
		if !c.hidden {
			fmt.Fprintf(w, "  shunt %-9s %s\n", c.name, c.summary)
		}
	}
	fmt.Fprint(w, "\nIn place of socat: shunt [options] ADDRESS ADDRESS ('shunt socat -h' lists options and addresses, -hh those of addresses too).\n"+
		"Without -t a half-closed connection lives until its other side has finished, or nothing has moved for 5 minutes.\n")
	fmt.Fprint(w, "\nExit codes: 0 ok, 1 failure, 2 bad usage or configuration; in place of socat, as socat: 0, 1, or 128 and a signal's number.\nRun 'shunt help COMMAND' for one command.\n")
}

func helpCommand(_ context.Context, c *command, args []string, s streams) int {
	switch {
	case len(args) == 0:
		usage(s.out)
		return exitOK
	case len(args) > 1:
		return c.badUsage(s, "more than one command")
	}
	if strings.HasPrefix(args[0], "-") {
		args[0] = "help"
	}
	of := lookup(args[0])
	if of == nil || of.hidden {
		return notACommand(args, s)
	}
	if of.name == "help" {
		of.printHelp(s.out, nil)
		return exitOK
	}
	return of.run(context.Background(), of, []string{"-h"}, s)
}

// printHelp writes what -h prints; fs may be nil.
func (c *command) printHelp(w io.Writer, fs *flag.FlagSet) {
	fmt.Fprintf(w, "Usage: shunt %s\n", strings.TrimSpace(c.name+" "+c.args))
	if c.help != "" {
		fmt.Fprintf(w, "\n%s\n", c.help)
	}
	first := true
	if fs == nil {
		return
	}
	fs.VisitAll(func(f *flag.Flag) {
		if f.Usage == "" { // a hidden flag
			return
		}
		if first {
			fmt.Fprint(w, "\nOptions:\n\n")
			first = false
		}
		arg, text := flag.UnquoteUsage(f)
		fmt.Fprintf(w, "  %-18s %s\n", strings.TrimSpace("--"+f.Name+" "+arg), text)
	})
}

func (c *command) badUsage(s streams, format string, a ...any) int {
	fmt.Fprintf(s.err, "shunt %s: %s\nRun 'shunt help %s' for its usage.\n", c.name, fmt.Sprintf(format, a...), c.name)
	return exitUsage
}

// flagError rewords package flag's message where a flag isn't known.
func flagError(fs *flag.FlagSet, err error) string {
	name, ok := strings.CutPrefix(err.Error(), "flag provided but not defined: -")
	if !ok {
		return err.Error()
	}
	var known []string
	fs.VisitAll(func(f *flag.Flag) {
		if f.Usage != "" {
			known = append(known, f.Name)
		}
	})
	hint := ""
	if near := nearest(strings.TrimLeft(name, "-"), known); near != "" {
		hint = ": did you mean --" + near + "?"
	}
	return "unknown flag --" + strings.TrimLeft(name, "-") + hint
}

// printError writes err, which may be several lines.
func (c *command) printError(s streams, err error) {
	for _, line := range strings.Split(err.Error(), "\n") {
		fmt.Fprintf(s.err, "shunt %s: %s\n", c.name, line)
	}
}

// parse reads the flags that define declares. Where it returns false, the
// invocation is over and ends with code.
func (c *command) parse(args []string, s streams, define func(*flag.FlagSet)) (code int, ok bool) {
	fs := flag.NewFlagSet(c.name, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	if define != nil {
		define(fs)
	}
	switch err := fs.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		c.printHelp(s.out, fs)
		return exitOK, false
	case err != nil:
		return c.badUsage(s, "%s", flagError(fs, err)), false
	case fs.NArg() > 0:
		return c.badUsage(s, "unexpected argument %q", fs.Arg(0)), false
	}
	return exitOK, true
}
