package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"shunt/proxy"
)

// The hidden subcommands that demo runs in processes of their own.
const (
	demoServiceName = "demo-service"
	demoClientName  = "demo-client"
)

const (
	demoTime   = 9 * time.Second // what the measurements take together
	demoRounds = 5
	// demoGrace is how long everything but the measurements may take.
	demoGrace = 10 * time.Second
)

// demoOptions are the flags of demo.
type demoOptions struct {
	time    time.Duration
	grace   time.Duration
	rounds  int
	verdict string
}

// leg is a way to the service: one row of the table.
type leg struct {
	name string
	addr string
	pings,
	bulks []demoResult
}

func demoCommand(ctx context.Context, c *command, args []string, s streams) int {
	o := demoOptions{}
	code, ok := c.parse(args, s, func(fs *flag.FlagSet) {
		fs.DurationVar(&o.time, "time", demoTime, "`D`uration of the measurements together (default 9s)")
		fs.StringVar(&o.verdict, "verdict", defaultFile().Bypass.Verdict, "`V`erdict: "+strings.Join(verdicts, ", ")+" (default auto)")
		fs.IntVar(&o.rounds, "rounds", demoRounds, "")
		fs.DurationVar(&o.grace, "grace", demoGrace, "")
	})
	if !ok {
		return code
	}
	switch {
	case !slices.Contains(verdicts, o.verdict):
		return c.badUsage(s, "--verdict %q: want one of %s", o.verdict, strings.Join(verdicts, ", "))
	case o.time < 10*time.Millisecond || o.time > time.Hour:
		return c.badUsage(s, "--time %v is out of range: want 10ms to 1h", o.time)
	case o.rounds < 1 || o.rounds > 1000:
		return c.badUsage(s, "--rounds %d is out of range: want 1 to 1000", o.rounds)
	}
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, os.Interrupt)
	defer stop()
	bounded, cancel := context.WithTimeout(ctx, o.time+o.grace)
	defer cancel()
	err := demo(bounded, o, s)
	switch {
	case ctx.Err() != nil: // whatever failed, failed because of it
		fmt.Fprintf(s.err, "shunt %s: interrupted\n", c.name)
		return exitFailure
	case err != nil && bounded.Err() != nil:
		fmt.Fprintf(s.err, "shunt %s: not done after %v: %v\n", c.name, o.time+o.grace, err)
		return exitFailure
	case err != nil:
		fmt.Fprintf(s.err, "shunt %s: %v\n", c.name, err)
		return exitFailure
	}
	return exitOK
}

func demo(ctx context.Context, o demoOptions, s streams) (err error) {
	p := progress{w: s.err, on: isTerminal(s.err)}
	defer p.clear()
	var family children
	defer func() { err = errors.Join(err, family.stop()) }()

	p.show("starting")
	service, err := family.startService(ctx)
	if err != nil {
		return err
	}
	shunt, err := family.startShunt(ctx, demoConfig(service.addr, o.verdict))
	if err != nil {
		return err
	}
	client, err := family.startClient(ctx)
	if err != nil {
		return err
	}

	legs := []*leg{{name: "direct", addr: service.addr}, {name: "copy", addr: shunt.addrs["copy"]}}
	if shunt.bypassReason == "" {
		legs = append(legs, &leg{name: "bypass", addr: shunt.addrs["bypass"]})
	}
	each := o.time / time.Duration(2*len(legs)*o.rounds)
	for round := range o.rounds {
		for i := range legs {
			// Another leg goes first in each round, so that a drift of the
			// machine falls on all of them.
			l := legs[(i+round)%len(legs)]
			p.show("round %d of %d: %s", round+1, o.rounds, l.name)
			ping, err := client.measure(demoRequest{Addr: l.addr, Kind: kindPing, Time: each})
			if err != nil {
				return fmt.Errorf("round trips, %s: %w", l.name, err)
			}
			bulk, err := client.measure(demoRequest{Addr: l.addr, Kind: kindBulk, Time: each})
			if err != nil {
				return fmt.Errorf("bulk, %s: %w", l.name, err)
			}
			l.pings, l.bulks = append(l.pings, ping), append(l.bulks, bulk)
		}
	}
	p.show("reading the counters")
	paths, err := shunt.paths(ctx)
	if err != nil {
		return err
	}
	p.clear()
	if err := printLegs(s.out, legs); err != nil {
		return err
	}
	fmt.Fprintf(s.out, "Medians of %d rounds, each path for %v in turn.\n", o.rounds, each.Round(time.Millisecond))
	return verdictOn(s.out, shunt, paths)
}

// verdictOn says what the counters tell of the paths that were measured. It
// returns an error where a row of the table isn't what its name says.
func verdictOn(w io.Writer, shunt *demoShunt, paths map[string]pathCount) error {
	if c := paths["copy"]; c.bypassed != 0 || c.copied == 0 {
		return fmt.Errorf("the copy row is wrong: %d bytes copied, %d bypassed", c.copied, c.bypassed)
	}
	if shunt.bypassReason != "" {
		fmt.Fprintf(w, "The bypass is impossible here: %s\n", shunt.bypassReason)
		return nil
	}
	c := paths["bypass"]
	if c.bypassed == 0 && len(c.declined) == 0 {
		return errors.New("the bypass row is wrong: no byte was bypassed, and no reason was given")
	}
	if len(c.declined) > 0 {
		return fmt.Errorf("the bypass row is wrong: connections were copied, declined for %s; 'shunt probe' says more",
			strings.Join(c.declined, ", "))
	}
	fmt.Fprintf(w, "Verdict %q; %.2f %% of the bytes of the bypass row never came to shunt.\n",
		shunt.verdict, 100*float64(c.bypassed)/float64(c.bypassed+c.copied))
	return nil
}

// demoConfig returns the configuration of the shunt that is measured: one
// listener for each of its paths.
func demoConfig(upstream, verdict string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "[log]\nlevel = \"info\"\nformat = \"json\"\n[admin]\nlisten = \"127.0.0.1:0\"\n[bypass]\nverdict = %q\n", verdict)
	for _, l := range []struct {
		name string
		mode proxy.BypassMode
	}{{"copy", proxy.BypassOff}, {"bypass", proxy.BypassOn}} {
		fmt.Fprintf(&b, "[[listener]]\nname = %q\nlisten = \"127.0.0.1:0\"\nupstream = %q\nbypass = %q\ndrain_timeout = \"1s\"\n", l.name, upstream, l.mode)
	}
	return b.String()
}

func printLegs(out io.Writer, legs []*leg) error {
	type figures struct{ p50, p99, rate float64 }
	of := func(l *leg) (f figures) {
		var p50, p99, rate []float64
		for i := range l.pings {
			p50 = append(p50, float64(l.pings[i].P50))
			p99 = append(p99, float64(l.pings[i].P99))
			rate = append(rate, float64(l.bulks[i].Bytes)/l.bulks[i].Took.Seconds())
		}
		return figures{median(p50), median(p99), median(rate)}
	}
	direct := of(legs[0])
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "\tround trip p50\tp99\tp50 / direct\tbulk rate\t/ direct\t\n")
	for _, l := range legs {
		f := of(l)
		fmt.Fprintf(w, "%s\t%.1f us\t%.1f us\t%.2f\t%.1f Gbit/s\t%.2f\t\n", l.name,
			f.p50/1e3, f.p99/1e3, f.p50/direct.p50, f.rate*8/1e9, f.rate/direct.rate)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "\nRound trip: %d bytes there and back, one at a time. Bulk: one way, in writes of %v.\n", pingSize, size(bulkSize))
	return err
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}

// progress is a line that overwrites itself.
type progress struct {
	w  io.Writer
	on bool
}

func (p progress) show(format string, a ...any) {
	if p.on {
		fmt.Fprintf(p.w, "\r\x1b[K"+format, a...)
	}
}

func (p progress) clear() { p.show("") }
