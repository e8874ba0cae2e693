package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"text/tabwriter"

	"github.com/rs/zerolog"

	"shunt/splice"
)

func probeCommand(_ context.Context, c *command, args []string, s streams) int {
	var asJSON bool
	var file string
	code, ok := c.parse(args, s, func(fs *flag.FlagSet) {
		fs.BoolVar(&asJSON, "json", false, "print the report as JSON")
		fs.StringVar(&file, "config", "", "`FILE` whose [bypass] table is probed; without it, the defaults are")
	})
	if !ok {
		return code
	}
	fc := defaultFile()
	if file != "" {
		loaded, err := loadConfig(file, s.in)
		if err == nil {
			err = loaded.checkCgroup()
		}
		if err != nil {
			c.printError(s, err)
			return exitUsage
		}
		fc = *loaded
	}
	o := fc.spliceOptions()
	o.Log = zerolog.Nop()
	r := splice.Probe(o)

	var err error
	if asJSON {
		enc := json.NewEncoder(s.out)
		enc.SetIndent("", "  ")
		err = enc.Encode(r)
	} else {
		err = printReport(s, r)
	}
	switch {
	case err != nil:
		fmt.Fprintf(s.err, "shunt %s: %v\n", c.name, err)
		return exitFailure
	case !r.Possible:
		return exitCopyOnly
	}
	return exitOK
}

// printReport writes a probe's report for people.
func printReport(s streams, r *splice.Report) error {
	w := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', 0)
	for _, check := range r.Checks {
		fmt.Fprintf(w, "%s\t%s\t%s\n", check.Name, check.Result, check.Detail)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(s.out)
	for _, f := range r.Known {
		if _, err := fmt.Fprintf(s.out, "known fault: %s\n", f); err != nil {
			return err
		}
	}
	if !r.Possible {
		_, err := fmt.Fprintf(s.out, "bypass: impossible on kernel %s: %s\nConnections are copied.\n", r.Kernel, r.Reason)
		return err
	}
	fionread := "right for redirected bytes"
	if !r.FIONREAD {
		fionread = `wrong for redirected bytes: bypass = "auto" copies, "on" doesn't`
	}
	_, err := fmt.Fprintf(s.out, "bypass: possible on kernel %s\nverdict: %s\nqueue limit: %s per receiver, %dMiB in all\nFIONREAD: %s\n",
		r.Kernel, r.Verdict, size(r.QueueLimit), r.Budget>>20, fionread)
	if f := r.OfBypass(); err == nil && f != nil {
		_, err = fmt.Fprintln(s.out, `bypass = "auto" copies for the known fault, "on" doesn't`)
	}
	return err
}
