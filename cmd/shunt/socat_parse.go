package main

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"shunt/proxy"
)

// address is one parsed address.
type address struct {
	text    string // as it was written
	keyword string // as it was written, "FD" for a bare number
	typ     *addressType
	params  []string
	options []setOption
}

// setOption is one option of an address with its value, which is valid.
type setOption struct {
	opt   *addressOption
	name  string // as it was written
	value string
	set   bool // there was a value
	num   int64
}

// get returns the last setting of the option, or nil.
func (a *address) get(name string) *setOption {
	for i := len(a.options) - 1; i >= 0; i-- {
		if a.options[i].opt.names[0] == name {
			return &a.options[i]
		}
	}
	return nil
}

// on says whether a boolean option is set, and not to 0.
func (a *address) on(name string) bool { return a.onUnless(name, false) }

// onUnless is on, with what holds where the option isn't given.
func (a *address) onUnless(name string, otherwise bool) bool {
	if o := a.get(name); o != nil {
		return o.num != 0
	}
	return otherwise
}

// number returns the option's number, or what holds without it.
func (a *address) number(name string, otherwise int64) int64 {
	if o := a.get(name); o != nil {
		return o.num
	}
	return otherwise
}

// textOf returns the option's text, or "".
func (a *address) textOf(name string) string {
	if o := a.get(name); o != nil {
		return o.value
	}
	return ""
}

// seconds returns the option's duration, or zero.
func (a *address) seconds(name string) time.Duration {
	if o := a.get(name); o != nil {
		return time.Duration(o.num)
	}
	return 0
}

var errDual = errors.New("!!: two addresses for one side are not supported; use -u or -U with one address on each side")

// lexer reads an address the way socat does: within ” everything is plain, within ""
// everything but \, and brackets keep what is between them together.
type lexer struct {
	s   string
	pos int
}

var closers = map[byte]byte{'(': ')', '[': ']', '{': '}'}

var escapes = map[byte]byte{'0': 0, 'a': '\a', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t', 'v': '\v'}

// token reads up to one of the bytes in ends, which it leaves, or to the end.
func (l *lexer) token(ends string) (string, error) {
	var b strings.Builder
	var open []byte // closing brackets that are waited for
	for ; l.pos < len(l.s); l.pos++ {
		c := l.s[l.pos]
		switch {
		case c == '\\':
			if err := l.escape(&b); err != nil {
				return "", err
			}
		case c == '\'' || c == '"':
			if len(open) > 0 {
				b.WriteByte(c)
			}
			if err := l.quoted(c, &b); err != nil {
				return "", err
			}
			if len(open) > 0 {
				b.WriteByte(c)
			}
		case closers[c] != 0:
			open = append(open, closers[c])
			b.WriteByte(c)
		case len(open) > 0:
			if c == open[len(open)-1] {
				open = open[:len(open)-1]
			}
			b.WriteByte(c)
		case c == '!' && strings.HasPrefix(l.s[l.pos:], "!!"):
			return "", errDual
		case strings.IndexByte(ends, c) >= 0:
			return b.String(), nil
		default:
			b.WriteByte(c)
		}
	}
	if len(open) > 0 {
		return "", fmt.Errorf("%q: no closing %q", l.s, string(open[len(open)-1]))
	}
	return b.String(), nil
}

// escape reads a \ and what follows, and stays on its last byte.
func (l *lexer) escape(b *strings.Builder) error {
	l.pos++
	if l.pos == len(l.s) {
		return fmt.Errorf("%q: nothing after the last \\", l.s)
	}
	c := l.s[l.pos]
	if e, ok := escapes[c]; ok {
		c = e
	}
	b.WriteByte(c)
	return nil
}

// quoted reads a quoted string and stays on its closing quote.
func (l *lexer) quoted(quote byte, b *strings.Builder) error {
	for l.pos++; l.pos < len(l.s); l.pos++ {
		switch c := l.s[l.pos]; {
		case c == quote:
			return nil
		case c == '\\' && quote == '"':
			if err := l.escape(b); err != nil {
				return err
			}
		default:
			b.WriteByte(c)
		}
	}
	return fmt.Errorf("%q: no closing %c", l.s, quote)
}

// next says whether the byte at the position is c, and steps over it.
func (l *lexer) next(c byte) bool {
	if l.pos < len(l.s) && l.s[l.pos] == c {
		l.pos++
		return true
	}
	return false
}

// parseAddress reads one address. Nothing is opened, resolved or looked up.
func parseAddress(s string) (*address, error) {
	l := &lexer{s: s}
	keyword, err := l.token(":,")
	if err != nil {
		return nil, err
	}
	a := &address{text: s, keyword: keyword}
	for l.next(':') {
		p, err := l.token(":,")
		if err != nil {
			return nil, err
		}
		a.params = append(a.params, p)
	}
	if err := a.findType(); err != nil {
		return nil, err
	}
	if len(a.params) != len(a.typ.params) {
		return nil, fmt.Errorf("%s: wrong number of parameters (%d instead of %d)", a.keyword, len(a.params), len(a.typ.params))
	}
	for l.next(',') {
		name, err := l.token(",=")
		if err != nil {
			return nil, err
		}
		o := setOption{name: name}
		if l.next('=') {
			o.set = true
			if o.value, err = l.token(","); err != nil {
				return nil, err
			}
		}
		if name == "" && !o.set {
			continue
		}
		if err := a.addOption(o); err != nil {
			return nil, err
		}
	}
	return a, a.check()
}

func (a *address) findType() error {
	n := socatNames()
	word := strings.ToLower(a.keyword)
	if a.typ = n.address[word]; a.typ != nil {
		return nil
	}
	if why, ok := n.refusedAddress[word]; ok {
		return fmt.Errorf("address %s is not supported: %s", a.keyword, why)
	}
	if _, err := strconv.ParseUint(word, 10, 31); err == nil && len(a.params) == 0 {
		a.typ, a.params, a.keyword = n.address["fd"], []string{word}, "FD"
		return nil
	}
	if strings.Contains(word, "/") {
		return fmt.Errorf("address %q: shunt opens no files: use UNIX-CONNECT for a socket, STDIO or FD for a file", a.keyword)
	}
	hint := ""
	if near := nearest(word, n.addressWords()); near != "" {
		hint = fmt.Sprintf("; did you mean %q?", strings.ToUpper(near))
	}
	return fmt.Errorf("unknown device/address %q%s", a.keyword, hint)
}

func (a *address) addOption(o setOption) error {
	n := socatNames()
	word := strings.ToLower(o.name)
	o.opt = n.option[word]
	switch {
	case o.opt == nil:
		if why, ok := n.refusedOption[word]; ok {
			return fmt.Errorf("option %q is not supported: %s", o.name, why)
		}
		hint := ""
		if near := nearest(word, n.optionWords(a.typ.kind)); near != "" {
			hint = fmt.Sprintf("; did you mean %q?", near)
		}
		return fmt.Errorf("unknown option %q%s", o.name, hint)
	case !o.opt.on.has(a.typ.kind) && o.opt.offOn.has(a.typ.kind):
		return fmt.Errorf("option %q is not supported with %s: %s", o.name, a.keyword, o.opt.offWhy)
	case !o.opt.on.has(a.typ.kind):
		return fmt.Errorf("option %q not supported with this address type (%s)", o.name, a.keyword)
	}
	if err := o.parse(); err != nil {
		return err
	}
	a.options = append(a.options, o)
	return nil
}

// parse checks the value and sets num.
func (o *setOption) parse() error {
	bad := func(want string) error {
		if !o.set {
			return fmt.Errorf("option %q: value required: want %s", o.name, want)
		}
		return fmt.Errorf("option \"%s=%s\": want %s", o.name, o.value, want)
	}
	var err error
	switch o.opt.value {
	case noValue:
		if o.set {
			return fmt.Errorf("option %q: takes no value", o.name)
		}
		o.num = 1
	case boolValue, intValue, countValue:
		if o.num = 1; !o.set {
			return nil
		}
		o.num, err = parseNumber(o.value)
		if err != nil || o.num < math.MinInt32 || o.num > math.MaxInt32 || o.opt.value == countValue && o.num < 0 {
			return bad("a number")
		}
	case timeValue:
		d, err := parseSeconds(o.value)
		if err != nil {
			return bad("seconds")
		}
		o.num = int64(d)
	case modeValue:
		if o.num, err = strconv.ParseInt(o.value, 8, 32); err != nil || o.num < 0 || o.num > 0o7777 {
			return bad("an octal number")
		}
	case rangeValue:
		if _, err := parseRange(o.value); err != nil {
			return bad(err.Error())
		}
	case familyValue:
		if familyOf(o.value) == "" {
			return fmt.Errorf("unknown protocol family %q: want ip4 or ip6", o.value)
		}
	case portValue:
		if o.value == "" || !o.set {
			return bad("a port")
		}
	case sockValue, sockText:
		if o.opt.names[0] == "setsockopt" || o.opt.names[0] == "setsockopt-listen" {
			// i4321 is a number in socat's data language.
			if i := strings.LastIndex(o.value, ":i"); i >= 0 {
				o.value = o.value[:i+1] + o.value[i+2:]
			}
		}
		if _, _, _, err := parseSockopt(o.value, o.opt.value == sockValue); err != nil {
			return bad(err.Error())
		}
	default:
		if !o.set || o.value == "" || strings.ContainsRune(o.value, 0) {
			return bad("text")
		}
	}
	return nil
}

// parseNumber reads a C number: decimal, 0x... or 0....
func parseNumber(s string) (int64, error) {
	if strings.Contains(s, "_") {
		return 0, strconv.ErrSyntax
	}
	return strconv.ParseInt(s, 0, 64)
}

// parseSeconds reads seconds with a fraction.
func parseSeconds(s string) (time.Duration, error) {
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || strings.ContainsAny(s, "xXpP_nN") || f < 0 || f > maxDuration.Seconds() {
		return 0, strconv.ErrRange
	}
	return time.Duration(f * float64(time.Second)), nil
}

// familyOf returns "4" or "6" for the names that socat has for it, else "".
func familyOf(s string) string {
	switch strings.ToLower(s) {
	case "4", "ip4", "ipv4", "inet", "inet4", "pf_inet", "2":
		return "4"
	case "6", "ip6", "ipv6", "inet6", "pf_inet6", "10":
		return "6"
	}
	return ""
}

// parseRange reads address/bits, address:mask or one address. IPv6
// addresses may be in brackets.
func parseRange(s string) (netip.Prefix, error) {
	bad := errors.New("address/bits or address:mask")
	if p, err := netip.ParsePrefix(strings.NewReplacer("[", "", "]", "").Replace(s)); err == nil {
		return p.Masked(), nil
	}
	host, mask, ok := strings.Cut(s, ":")
	if !ok || strings.HasPrefix(s, "[") {
		return netip.Prefix{}, bad
	}
	ip, err := netip.ParseAddr(host)
	m, merr := netip.ParseAddr(mask)
	if err != nil || merr != nil || !ip.Is4() || !m.Is4() {
		return netip.Prefix{}, bad
	}
	b := m.As4()
	v := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	bits := 0
	for ; v&(1<<31) != 0; v <<= 1 {
		bits++
	}
	if v != 0 {
		return netip.Prefix{}, errors.New("a mask without gaps")
	}
	return netip.PrefixFrom(ip, bits).Masked(), nil
}

// unixName is how package net is told of a UNIX or abstract name.
func unixName(k kinds, name string) string {
	switch {
	case k == abstractConnect || k == abstractListen:
		return "@" + name
	case strings.HasPrefix(name, "@"):
		return "./" + name // package net would take it as abstract
	}
	return name
}

// parseSockopt reads level:option:value.
func parseSockopt(s string, number bool) (level, opt int, value string, err error) {
	f := strings.SplitN(s, ":", 3)
	if len(f) != 3 {
		return 0, 0, "", errors.New("level:option:value")
	}
	l, err1 := parseNumber(f[0])
	o, err2 := parseNumber(f[1])
	if err1 != nil || err2 != nil || l < 0 || o < 0 || l > math.MaxInt32 || o > math.MaxInt32 {
		return 0, 0, "", errors.New("level:option:value")
	}
	if number {
		if v, err := parseNumber(f[2]); err != nil || v < math.MinInt32 || v > math.MaxInt32 {
			return 0, 0, "", errors.New("level:option:number")
		}
	}
	return int(l), int(o), f[2], nil
}

// check looks for options that don't go together.
func (a *address) check() error {
	switch a.typ.kind {
	case unixConnect, unixListen, abstractConnect, abstractListen:
		if p := a.params[0]; p == "" || len(p) > maxUnixPath || strings.ContainsRune(p, 0) {
			return fmt.Errorf("%s: %q: want a name of at most %d bytes", a.keyword, p, maxUnixPath)
		}
	case fdNumber:
		if _, err := strconv.ParseUint(a.params[0], 10, 31); err != nil {
			return fmt.Errorf("%s: %q is not a file descriptor", a.keyword, a.params[0])
		}
	case vsockConnect, vsockListen:
		for _, p := range a.params {
			if n, err := parseNumber(p); p != "" && (err != nil || n < -1 || n > math.MaxUint32) {
				return fmt.Errorf("%s: %q is not a number", a.keyword, p)
			}
		}
	default:
		for i, p := range a.params {
			if strings.ContainsRune(p, 0) || p == "" && a.typ.params[i] == "port" {
				return fmt.Errorf("%s: %q: want a %s", a.keyword, p, a.typ.params[i])
			}
		}
	}
	if a.get("max-children") != nil && !a.on("fork") {
		return errors.New("option max-children not allowed without option fork")
	}
	for _, name := range []string{"cloexec", "unix-tightsocklen"} {
		if !a.onUnless(name, true) {
			return fmt.Errorf("option \"%s=0\" is not supported: shunt always has it on", name)
		}
	}
	shut := 0
	for _, name := range []string{"shut-none", "shut-down", "shut-close"} {
		if a.on(name) {
			shut++
		}
	}
	if shut > 1 {
		return errors.New("only one of shut-none, shut-down and shut-close can hold")
	}
	if f := a.family(); f != "" && a.typ.family != "" && f != a.typ.family {
		return fmt.Errorf("%s: pf=%s contradicts it", a.keyword, a.textOf("pf"))
	}
	return nil
}

// family returns "4", "6" or "" as the keyword or pf says.
func (a *address) family() string {
	if o := a.get("pf"); o != nil {
		return familyOf(o.value)
	}
	return a.typ.family
}

// listens says whether the address waits for connections.
func (a *address) listens() bool { return anyListen.has(a.typ.kind) }

// socatFlag is an option of the command line.
type socatFlag struct {
	name   string
	arg    string // what its argument is called; empty: it takes none
	status optionStatus
	why    string
}

// socatFlags are all that socat knows, and shunt's own.
var socatFlags = []socatFlag{
	{"--bypass", "auto|on|off", optSupported, "shunt's: whether connections may leave user space; auto unless given"},
	{"--admin", "ADDRESS", optSupported, "shunt's: serves /metrics and /connections there, host:port or unix:/path"},
	{"-d", "", optSupported, "-d warnings too, -dd notices (-d -d is the same), -ddd information, -dddd all; -d0 to -d4"},
	{"-v", "", optDifferent, "text dump of the data on stderr; bypass off"},
	{"-x", "", optDifferent, "hexadecimal dump of the data on stderr; bypass off"},
	{"-r", "FILE", optDifferent, "raw dump of the data from left to right; bypass off"},
	{"-R", "FILE", optDifferent, "raw dump of the data from right to left; bypass off"},
	{"-b", "SIZE", optDifferent, "bytes read at once where they are copied through a buffer; the default is shunt's choice"},
	{"-t", "SECONDS", optDifferent, "how long one side may be silent after the other has finished; the default is 5 minutes instead of socat's 0.5 s, which cuts replies"},
	{"-T", "SECONDS", optSupported, "ends a connection on which nothing has moved for so long; bypassed bytes count"},
	{"-u", "", optDifferent, "only from left to right; bypass off"},
	{"-U", "", optDifferent, "only from right to left; bypass off"},
	{"-4", "", optSupported, "IPv4 where the address doesn't say; the default"},
	{"-6", "", optSupported, "IPv6 where the address doesn't say"},
	{"-0", "", optSupported, "either, as names resolve; listens on both; socat 1.8"},
	{"-s", "", optSupported, "goes on where a socket option can't be set"},
	{"-lf", "FILE", optSupported, "log to FILE"},
	{"-ls", "", optSupported, "log to stderr; the default"},
	{"-ly", "[FACILITY]", optSupported, "log to syslog"},
	{"-lp", "NAME", optSupported, "the program's name in the log"},
	{"-lu", "", optSupported, "microseconds in the log"},
	{"-lh", "", optSupported, "the host's name in the log"},
	{"-V", "", optDifferent, "prints the version, and features in socat's words"},
	{"-h", "", optDifferent, "prints this list; -hh and -hhh the address options too; -? is the same; 'shunt -h' lists shunt's commands, and 'shunt socat -h' prints this"},
	{"--statistics", "", optDifferent, "logs the bytes of both directions at the end, as SIGUSR1 does meanwhile; there are no packets to count; socat 1.8"},
	{"-lm", "[FACILITY]", optRefused, "use -ls or -ly"},
	{"-D", "", optRefused, "use lsof(8) or ss(8)"},
	{"-g", "", optRefused, "every option is checked against its address"},
	{"-L", "FILE", optRefused, "use flock(1) around shunt"},
	{"-W", "FILE", optRefused, "use flock(1) around shunt"},
	{"-S", "MASK", optRefused, "signals are logged by name"},
	{"--experimental", "", optRefused, "nothing here is experimental"},
}

// form is how help and the table write the flag.
func (f socatFlag) form() string {
	switch {
	case f.arg == "":
		return f.name
	case strings.HasPrefix(f.name, "--"):
		return f.name + "=" + f.arg
	case strings.HasPrefix(f.arg, "["):
		return f.name + f.arg
	}
	return f.name + " " + f.arg
}

// socatLine is a parsed command line.
type socatLine struct {
	help, version bool
	helpLevel     int
	level         int // how many -d
	text, hex     bool
	rawRight      string // -r
	rawLeft       string // -R
	buffer        int
	closeWait     time.Duration // -t; negative: not given
	idle          time.Duration // -T
	onlyRight     bool          // -u
	onlyLeft      bool          // -U
	family        string        // -4, -6; "0" for -0
	sloppy        bool
	logFile       string
	syslog        bool
	facility      string
	name          string
	micros        bool
	hostname      bool
	statistics    bool
	bypass        proxy.BypassMode
	admin         string
	left, right   *address
}

// parseSocatLine reads what follows the program's name.
func parseSocatLine(args []string) (*socatLine, error) {
	l := &socatLine{closeWait: -1, bypass: proxy.BypassAuto}
	for len(args) > 0 && strings.HasPrefix(args[0], "-") && args[0] != "-" && !strings.HasPrefix(args[0], "-,") {
		word := args[0]
		f, rest, err := findFlag(word)
		if err != nil {
			return nil, err
		}
		args = args[1:]
		if f.arg != "" && rest == "" && !strings.HasPrefix(f.arg, "[") && !strings.Contains(word, "=") {
			if len(args) == 0 {
				return nil, fmt.Errorf("option %s: no %s", f.name, strings.ToLower(f.arg))
			}
			rest, args = args[0], args[1:]
		}
		if err := l.setFlag(f, rest); err != nil {
			return nil, err
		}
	}
	if l.help || l.version {
		return l, nil
	}
	if len(args) != 2 {
		return nil, fmt.Errorf(`exactly 2 addresses required (there are %d); use option "-h" for help`, len(args))
	}
	if l.onlyLeft && l.onlyRight {
		return nil, errors.New("-u and -U contradict each other")
	}
	var err error
	if l.left, err = parseAddress(args[0]); err != nil {
		return nil, err
	}
	if l.right, err = parseAddress(args[1]); err != nil {
		return nil, err
	}
	return l, l.check()
}

// findFlag returns the flag that word begins with, and the rest of it.
func findFlag(word string) (f *socatFlag, rest string, err error) {
	if strings.HasPrefix(word, "--") {
		name, value, has := strings.Cut(word, "=")
		var names []string
		for i := range socatFlags {
			f := &socatFlags[i]
			names = append(names, f.name)
			if f.name != name {
				continue
			}
			if has && f.arg == "" {
				return nil, "", fmt.Errorf("option %s takes no value", name)
			}
			return f, value, nil
		}
		hint := ""
		if near := nearest(name, names); near != "" {
			hint = fmt.Sprintf("; did you mean %q?", near)
		}
		return nil, "", fmt.Errorf("unknown option %q%s", word, hint)
	}
	if strings.HasPrefix(word, "-?") {
		word = strings.ReplaceAll(word, "?", "h")
	}
	for i := range socatFlags {
		f := &socatFlags[i]
		rest, ok := strings.CutPrefix(word, f.name)
		switch {
		case !ok:
		case f.arg != "" || rest == "":
			return f, rest, nil
		case f.name == "-d" && (strings.Trim(rest, "d") == "" || len(rest) == 1 && strings.Contains("01234", rest)),
			f.name == "-h" && strings.Trim(rest, "h") == "":
			return f, rest, nil
		}
	}
	return nil, "", fmt.Errorf(`unknown option %q; use option "-h" for help`, word)
}

func (l *socatLine) setFlag(f *socatFlag, v string) error {
	if f.status == optRefused {
		return fmt.Errorf("option %s is not supported: %s", f.name, f.why)
	}
	bad := func() error { return fmt.Errorf("option %s: bad value %q: want %s", f.name, v, strings.ToLower(f.arg)) }
	if f.arg != "" && v == "" && !strings.HasPrefix(f.arg, "[") {
		return bad()
	}
	var err error
	switch f.name {
	case "--bypass":
		switch l.bypass = proxy.BypassMode(v); l.bypass {
		case proxy.BypassAuto, proxy.BypassOn, proxy.BypassOff:
		default:
			return bad()
		}
	case "--admin":
		l.admin = v
	case "-d":
		if v != "" && v[0] != 'd' {
			l.level = int(v[0] - '0')
		} else {
			l.level = min(l.level+1+len(v), 4)
		}
	case "-v":
		l.text = true
	case "-x":
		l.hex = true
	case "-r":
		l.rawRight = v
	case "-R":
		l.rawLeft = v
	case "-b":
		n, err := parseNumber(v)
		if err != nil || n < 1 || n > 1<<30 {
			return bad()
		}
		l.buffer = int(n)
	case "-t":
		if l.closeWait, err = parseSeconds(v); err != nil {
			return bad()
		}
	case "-T":
		if l.idle, err = parseSeconds(v); err != nil {
			return bad()
		}
	case "-u":
		l.onlyRight = true
	case "-U":
		l.onlyLeft = true
	case "-4", "-6", "-0":
		l.family = f.name[1:]
	case "-s":
		l.sloppy = true
	case "-lf":
		l.logFile, l.syslog = v, false
	case "-ls":
		l.logFile, l.syslog = "", false
	case "-ly":
		if v != "" && !isFacility(v) {
			return bad()
		}
		l.logFile, l.syslog, l.facility = "", true, v
	case "-lp":
		l.name = v
	case "-lu":
		l.micros = true
	case "-lh":
		l.hostname = true
	case "--statistics":
		l.statistics = true
	case "-V":
		l.version = true
	case "-h":
		l.help, l.helpLevel = true, 1+len(v)
	}
	return nil
}

// check looks for what doesn't go together in two addresses.
func (l *socatLine) check() error {
	left, right := l.left, l.right
	if right.on("fork") {
		if left.listens() && left.on("fork") {
			return errors.New("fork on both addresses: only one can serve connections side by side")
		}
		if !anyFile.has(left.typ.kind) {
			return fmt.Errorf("fork on the second address would share the one connection of %s among all: put the listening address first", left.keyword)
		}
	}
	if left.on("fork") {
		for _, name := range []string{"su", "su-d", "su-e", "setuid", "setgid"} {
			if right.get(name) != nil {
				return fmt.Errorf("option %q changes the whole process: put it on the listening address", name)
			}
		}
	}
	return nil
}

// tapped says whether the payload is looked at.
func (l *socatLine) tapped() bool {
	return l.text || l.hex || l.rawRight != "" || l.rawLeft != ""
}

var facilities = []string{"kern", "user", "mail", "daemon", "auth", "syslog", "lpr", "news", "uucp", "cron", "authpriv", "ftp",
	"local0", "local1", "local2", "local3", "local4", "local5", "local6", "local7"}

func isFacility(s string) bool {
	for _, f := range facilities {
		if f == s {
			return true
		}
	}
	return false
}

// splitBind splits bind's value into host and port, both of which may be missing.
func splitBind(s string) (host, port string) {
	if strings.HasPrefix(s, "[") {
		host, rest, _ := strings.Cut(s[1:], "]")
		return host, strings.TrimPrefix(rest, ":")
	}
	if strings.Count(s, ":") > 1 {
		return s, ""
	}
	host, port, _ = strings.Cut(s, ":")
	return host, port
}
