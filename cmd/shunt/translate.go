package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"shunt/proxy"
)

// translateCommand prints the configuration that does what a socat command line does.
func translateCommand(_ context.Context, c *command, args []string, s streams) int {
	if len(args) == 1 && (args[0] == "-h" || args[0] == "--help" || args[0] == "-help") {
		c.printHelp(s.out, nil)
		return exitOK
	}
	if len(args) > 1 && isSocatName(args[0]) { // a whole command line
		args = args[1:]
	}
	line, err := parseSocatLine(args)
	if err == nil && (line.help || line.version) {
		err = errors.New("nothing to translate")
	}
	var text string
	var missing []string
	if err == nil {
		text, missing, err = translate(line)
	}
	if err != nil {
		fmt.Fprintf(s.err, "shunt %s: %v\n", c.name, err)
		return exitUsage
	}
	for _, m := range missing {
		fmt.Fprintf(s.err, "shunt %s: no equivalent in a configuration file: %s\n", c.name, m)
	}
	fmt.Fprint(s.out, text)
	return exitOK
}

// translation collects what a command line means in TOML.
type translation struct {
	listener []string
	missing  []string // what has no key
}

// translate returns a configuration file, and what has no key there, which is
// listed in its comments too.
func translate(l *socatLine) (text string, missing []string, err error) {
	if l.onlyRight || l.onlyLeft {
		return "", nil, errors.New("-u and -U: a configuration file has connections of both ways only")
	}
	down, up := l.left, l.right
	if !down.listens() {
		down, up = up, down
	}
	t := &translation{}
	if err := t.ends(l, down, up); err != nil {
		return "", nil, err
	}
	if l.bypass != proxy.BypassAuto {
		t.set("bypass", strconv.Quote(string(l.bypass)))
	}
	if n := down.number("max-children", 0); n > 0 {
		t.set("max_connections", strconv.FormatInt(n, 10))
	}
	if d := up.seconds("connect-timeout"); d > 0 {
		t.set("dial_timeout", strconv.Quote(d.String()))
	}
	if l.idle > 0 {
		t.set("idle_timeout", strconv.Quote(l.idle.String()))
	}
	if l.closeWait >= 0 {
		t.set("half_open_timeout", strconv.Quote(max(l.closeWait, time.Millisecond).String()))
	}
	t.keepAlive(down, up)
	if !down.on("fork") {
		t.missing = append(t.missing, "no fork: the configuration serves connections until it is stopped")
	}
	for _, a := range []*address{l.left, l.right} {
		if err := t.options(a); err != nil {
			return "", nil, err
		}
	}
	t.flags(l)

	var b strings.Builder
	for _, m := range t.missing {
		fmt.Fprintf(&b, "# No equivalent here: %s.\n", m)
	}
	if len(t.missing) > 0 {
		b.WriteByte('\n')
	}
	if l.level > 0 {
		fmt.Fprintf(&b, "[log]\nlevel = %q\n\n", []string{"error", "warn", "info", "info", "debug"}[l.level])
	}
	if l.admin != "" {
		fmt.Fprintf(&b, "[admin]\nlisten = %q\n\n", l.admin)
	}
	fmt.Fprintf(&b, "[[listener]]\n%s\n", strings.Join(t.listener, "\n"))
	return b.String(), t.missing, nil
}

func (t *translation) set(key, value string) {
	t.listener = append(t.listener, key+" = "+value)
}

// ends translates what is listened on and what is connected to.
func (t *translation) ends(l *socatLine, down, up *address) error {
	switch down.typ.kind {
	case tcpListen:
		listen, err := listenAddress(l, down)
		if err != nil {
			return err
		}
		t.set("listen", strconv.Quote(listen))
		if v := down.textOf("range"); v != "" {
			p, err := parseRange(v)
			if err != nil {
				return fmt.Errorf("range=%s: want %w", v, err)
			}
			t.set("allow", fmt.Sprintf("[%q]", proxy.Network{Prefix: p}))
		}
	case unixListen, abstractListen:
		name, err := unixAddress(down)
		if err != nil {
			return err
		}
		t.set("listen", name)
		if keys := unixKeys(down); keys != "" {
			t.set("unix", keys)
		}
	default:
		return fmt.Errorf("%s and %s: a configuration file has TCP and UNIX listeners only", l.left.keyword, l.right.keyword)
	}
	switch up.typ.kind {
	case tcpConnect:
		port, err := net.LookupPort("tcp", up.params[1])
		if err != nil || port == 0 {
			return fmt.Errorf("%s: no such port", up.params[1])
		}
		host := strings.Trim(up.params[0], "[]")
		if host == "" {
			host = "127.0.0.1"
		}
		t.set("upstream", strconv.Quote(net.JoinHostPort(host, strconv.Itoa(port))))
	case unixConnect, abstractConnect:
		name, err := unixAddress(up)
		if err != nil {
			return err
		}
		t.set("upstream", name)
	default:
		return fmt.Errorf("%s and %s: a configuration file has TCP and UNIX upstreams only", l.left.keyword, l.right.keyword)
	}
	return nil
}

// unixAddress returns a UNIX socket as the file writes it.
func unixAddress(a *address) (string, error) {
	name := "unix:" + unixName(a.typ.kind, a.params[0])
	if _, _, err := proxy.ParseUnix(name); err != nil {
		return "", err
	}
	return strconv.Quote(name), nil
}

// unixKeys returns the table of a UNIX listener's file, or "" where it is the default.
func unixKeys(a *address) string {
	var keys []string
	mode := a.get("mode")
	if mode != nil {
		keys = append(keys, fmt.Sprintf("mode = \"%04o\"", mode.num&0o777))
	} else if m := a.get("umask"); m != nil {
		keys = append(keys, fmt.Sprintf("mode = \"%04o\"", 0o777&^m.num))
	}
	for _, k := range []struct{ option, key string }{{"user", "owner"}, {"group", "group"}} {
		if v := a.textOf(k.option); v != "" {
			keys = append(keys, fmt.Sprintf("%s = %q", k.key, v))
		}
	}
	// With both, the file that is kept must be replaced at the next start.
	if !a.onUnless("unlink-close", true) && !a.on("unlink-early") && !a.on("unlink") {
		keys = append(keys, "unlink = false")
	}
	if len(keys) == 0 {
		return ""
	}
	return "{ " + strings.Join(keys, ", ") + " }"
}

// listenAddress returns the listening address as the file writes it.
func listenAddress(l *socatLine, a *address) (string, error) {
	port, host := a.params[0], ""
	if v := a.textOf("bind"); v != "" {
		h, p := splitBind(v)
		if host = h; p != "" {
			port = p
		}
	}
	n, err := net.LookupPort("tcp", port)
	if err != nil {
		return "", fmt.Errorf("%s: no such port", port)
	}
	family := a.family()
	if family == "" {
		family = l.family
	}
	switch {
	case host == "" && (family == "6" || family == "0"):
		host = "::"
	case host == "":
		host = "0.0.0.0"
	}
	if _, err := netip.ParseAddr(host); err != nil {
		return "", fmt.Errorf("bind=%s: a configuration file wants an address, not a name", host)
	}
	return net.JoinHostPort(host, strconv.Itoa(n)), nil
}

// keepAlive translates the options of both legs, which the file doesn't tell apart.
func (t *translation) keepAlive(down, up *address) {
	k := proxy.DefaultListener().KeepAlive
	idle, interval, count := int64(k.Idle/time.Second), int64(k.Interval/time.Second), int64(k.Count)
	given, off := false, false
	for _, a := range []*address{down, up} {
		for _, name := range []string{"keepidle", "keepintvl", "keepcnt"} {
			given = given || a.get(name) != nil
		}
		off = off || !a.onUnless("keepalive", true)
		idle, interval, count = a.number("keepidle", idle), a.number("keepintvl", interval), a.number("keepcnt", count)
	}
	switch {
	case off:
		t.set("keepalive", `{ idle = "0s" }`)
	case given:
		t.set("keepalive", fmt.Sprintf(`{ idle = "%ds", interval = "%ds", count = %d }`, idle, interval, count))
	}
}

// translated are the options that have a key, or are what shunt does anyway.
var translated = map[string]bool{
	"fork": true, "max-children": true, "reuseaddr": true, "connect-timeout": true, "pf": true,
	"keepalive": true, "keepidle": true, "keepintvl": true, "keepcnt": true,
	"shut-down": true, "end-close": true, "cool-write": true, "cloexec": true,
}

// unixOptions are those of a UNIX listener that have a key, or are what shunt does anyway.
var unixOptions = map[string]bool{
	"mode": true, "umask": true, "user": true, "group": true, "unlink": true, "unlink-early": true, "unlink-close": true,
}

// restricting are the options that say who may connect, or as whom shunt runs:
// a file without them would be open to more than the command line is.
var restricting = map[string]bool{
	"range": true, "sourceport": true, "lowport": true, "tcpwrap": true,
	"su": true, "su-d": true, "setuid": true, "setgid": true, "user": true, "group": true, "mode": true, "umask": true,
	"netns": true, "so-bindtodevice": true,
}

func (t *translation) options(a *address) error {
	for i := range a.options {
		o := &a.options[i]
		name := o.opt.names[0]
		if translated[name] || name == "bind" && a.listens() || name == "nodelay" && o.num != 0 {
			continue
		}
		if a.typ.kind == tcpListen && name == "range" || a.typ.kind == unixListen && unixOptions[name] {
			continue
		}
		if restricting[name] {
			return fmt.Errorf("option %s of %s restricts what a configuration file can't: use a firewall or the service manager, or run the command line", o.name, a.keyword)
		}
		t.missing = append(t.missing, fmt.Sprintf("option %s of %s", o.name, a.keyword))
	}
	return nil
}

func (t *translation) flags(l *socatLine) {
	for _, f := range []struct {
		set  bool
		name string
	}{
		{l.text, "-v"}, {l.hex, "-x"}, {l.rawRight != "", "-r"}, {l.rawLeft != "", "-R"}, {l.buffer > 0, "-b"},
		{l.sloppy, "-s"}, {l.logFile != "", "-lf"}, {l.syslog, "-ly"},
		{l.name != "", "-lp"}, {l.micros, "-lu"}, {l.hostname, "-lh"},
	} {
		if f.set {
			t.missing = append(t.missing, "option "+f.name)
		}
	}
}
