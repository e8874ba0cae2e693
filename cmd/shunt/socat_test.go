package main

import (
	"bytes"
	"flag"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"shunt/proxy"
)

var update = flag.Bool("update", false, "write SOCAT.md anew")

const tableFile = "SOCAT.md"

// The part of SOCAT.md that is written by hand ends here.
const tableMark = "<!-- The rest is written by go test ./cmd/shunt -run TestSocatTable -update -->\n\n"

func TestSocatTableIsTheParsers(t *testing.T) {
	b, err := os.ReadFile(tableFile)
	if err != nil {
		t.Fatal(err)
	}
	head, table, ok := strings.Cut(string(b), tableMark)
	if !ok {
		t.Fatalf("%s: no mark", tableFile)
	}
	if table == socatTable() {
		return
	}
	if !*update {
		t.Fatalf("%s is not what the parser knows: run with -update", tableFile)
	}
	if err := os.WriteFile(tableFile, []byte(head+tableMark+socatTable()), 0o644); err != nil {
		t.Fatal(err)
	}
}

// goodValues is a valid value for each form.
var goodValues = map[valueType]string{
	noValue: "", boolValue: "=1", intValue: "=1", countValue: "=1", timeValue: "=0.5", textValue: "=x", modeValue: "=600",
	userValue: "=root", groupValue: "=0", rangeValue: "=127.0.0.0/8", familyValue: "=ip4", portValue: "=80",
	hostValue: "=127.0.0.1", sockValue: "=6:1:1", sockText: "=1:25:lo",
}

func exampleOf(a *addressType) string {
	s := a.names[0]
	for _, p := range a.params {
		s += ":" + map[string]string{"host": "127.0.0.1", "port": "80", "path": "/x", "name": "x", "cid": "2", "number": "3"}[p]
	}
	return s
}

func TestEveryWordOfTheTableParsesOrIsRefusedByName(t *testing.T) {
	for i := range addressTypes {
		a := &addressTypes[i]
		for _, name := range a.names {
			text := strings.Replace(exampleOf(a), a.names[0], name, 1)
			for _, text := range []string{text, strings.ToLower(text)} {
				got, err := parseAddress(text)
				if err != nil || got.typ != a {
					t.Errorf("%s: %v", text, err)
				}
			}
		}
		for _, o := range addressOptions {
			for _, name := range o.names {
				text := exampleOf(a) + "," + name + goodValues[o.value]
				switch {
				case name == "max-children" || name == "maxchildren":
					text += ",fork"
				case o.names[0] == "pf" && a.family == "6":
					text = strings.Replace(text, "ip4", "ip6", 1)
				}
				got, err := parseAddress(text)
				switch {
				case o.on.has(a.kind):
					if err != nil || got.get(o.names[0]) == nil {
						t.Errorf("%s: %v", text, err)
					}
				case err == nil:
					t.Errorf("%s: accepted", text)
				case !strings.Contains(err.Error(), `"`+name+`"`):
					t.Errorf("%s: the error doesn't name the option: %v", text, err)
				}
			}
		}
	}
	for _, r := range refusedOptions {
		for _, name := range strings.Fields(r.names) {
			if _, err := parseAddress("TCP:h:1," + strings.ToUpper(name) + "=1"); err == nil || !strings.Contains(err.Error(), r.why) {
				t.Errorf("option %s: %v", name, err)
			}
		}
	}
	for _, r := range refusedAddresses {
		for _, name := range strings.Fields(r.names) {
			if _, err := parseAddress(name + ":1:2"); err == nil || !strings.Contains(err.Error(), r.why) {
				t.Errorf("address %s: %v", name, err)
			}
		}
	}
	for _, f := range socatFlags {
		args := []string{f.name}
		switch arg := map[string]string{"--bypass": "off", "-t": "1", "-T": "2.5", "-b": "8192"}[f.name]; {
		case strings.HasPrefix(f.name, "--") && f.arg != "" && arg == "":
			args[0] += "=x"
		case strings.HasPrefix(f.name, "--") && f.arg != "":
			args[0] += "=" + arg
		case f.arg != "" && arg == "" && f.arg[0] != '[':
			args = append(args, "x")
		case f.arg != "" && f.arg[0] != '[':
			args = append(args, arg)
		}
		_, err := parseSocatLine(append(args, "-", "-"))
		if (f.status == optRefused) != (err != nil) {
			t.Errorf("%v: %v", args, err)
		}
		if err != nil && !strings.Contains(err.Error(), f.name) {
			t.Errorf("%v: the error doesn't name it: %v", args, err)
		}
	}
}

func TestNoWordIsInTheTableTwice(t *testing.T) {
	seen := map[string]bool{}
	add := func(words []string) {
		for _, w := range words {
			w = strings.ToLower(w)
			if seen[w] {
				t.Errorf("%s is there twice", w)
			}
			seen[w] = true
		}
	}
	for _, o := range addressOptions {
		add(o.names)
	}
	for _, r := range refusedOptions {
		add(strings.Fields(r.names))
	}
	seen = map[string]bool{}
	for _, a := range addressTypes {
		add(a.names)
	}
	for _, r := range refusedAddresses {
		add(strings.Fields(r.names))
	}
}

func TestAddressGrammar(t *testing.T) {
	for _, c := range []struct {
		text    string
		params  []string
		options string // names and values
		err     string
	}{
		{"TCP:localhost:80", []string{"localhost", "80"}, "", ""},
		{"tcp-l:80,fork,,reuseaddr,", []string{"80"}, "fork reuseaddr", ""},
		{"TCP6:[::1]:80,FORK=0", nil, "", `option "FORK" is not supported with TCP6`},
		{"TCP6:[::1]:80", []string{"[::1]", "80"}, "", ""},
		{`TCP:"a:b":80`, []string{"a:b", "80"}, "", ""},
		{`TCP:a\:b:80`, []string{"a:b", "80"}, "", ""},
		{`UNIX:'/tmp/a,b:c!!d'`, []string{"/tmp/a,b:c!!d"}, "", ""},
		{`UNIX:/tmp/a\,b`, []string{"/tmp/a,b"}, "", ""},
		{`UNIX:"a\"b'c"`, []string{`a"b'c`}, "", ""},
		{`UNIX:/tmp/{a,b:c}`, []string{"/tmp/{a,b:c}"}, "", ""},
		{`UNIX:/tmp/(a,[b:c],d)`, []string{"/tmp/(a,[b:c],d)"}, "", ""},
		{"TCP-LISTEN:80,bind=[::1]:81,range=[::1]/128", []string{"80"}, "bind=[::1]:81 range=[::1]/128", ""},
		{"3,ignoreeof", []string{"3"}, "ignoreeof", ""},
		{"-", nil, "", ""},
		{"-,ignoreeof", nil, "ignoreeof", ""},
		{"TCP-LISTEN:80!!TCP:h:80", nil, "", "!!: two addresses"},
		{"TCP:h:'80", nil, "", "no closing '"},
		{`TCP:h:"80`, nil, "", `no closing "`},
		{"TCP6:[::1:80", nil, "", `no closing "]"`},
		{`TCP:h:80\`, nil, "", "nothing after the last"},
		{"TCP:h", nil, "", "wrong number of parameters (1 instead of 2)"},
		{"TCP-LISTEN:", nil, "", "want a port"},
		{"TCP-LISTN:80", nil, "", `did you mean "TCP-LISTEN"?`},
		{"TCP-LISTEN:80,reusaddr", nil, "", `unknown option "reusaddr"; did you mean "reuseaddr"?`},
		{"TCP-LISTEN:80,reuseaddr=x", nil, "", `option "reuseaddr=x": want a number`},
		{"TCP-LISTEN:80,max-children=3", nil, "", "max-children not allowed without option fork"},
		{"TCP:h:80,backlog=3", nil, "", `option "backlog" not supported with this address type`},
		{"TCP:h:80,connect-timeout", nil, "", "value required: want seconds"},
		{"TCP:h:80,connect-timeout=nan", nil, "", "want seconds"},
		{"TCP:h:80,shut-none,shut-close", nil, "", "only one of"},
		{"TCP:h:80,shut-none=1", nil, "", "takes no value"},
		{"TCP4:h:80,pf=ip6", nil, "", "contradicts"},
		{"TCP:h:80,pf=ip7", nil, "", `unknown protocol family "ip7"`},
		{"TCP-LISTEN:80,range=10.0.0.0:255.0.255.0", nil, "", "mask without gaps"},
		{"TCP-LISTEN:80,range=10.1.2.3:255.0.0.0", []string{"80"}, "range=10.1.2.3:255.0.0.0", ""},
		{"UNIX-LISTEN:/x,mode=9", nil, "", "octal"},
		{"UNIX-LISTEN:" + strings.Repeat("x", 108), nil, "", "at most 107 bytes"},
		{"TCP:h:80,mode=600", nil, "", "only a UNIX-LISTEN socket has permissions"},
		{"TCP:h:80,cafile=/x", nil, "", "shunt has no TLS"},
		{"EXEC:cat", nil, "", "shunt starts no programs"},
		{"/tmp/file", nil, "", "UNIX-CONNECT for a socket"},
		{"99x", nil, "", "unknown device/address"},
		{"", nil, "", `unknown device/address ""`},
		{"FD:x", nil, "", "not a file descriptor"},
		{"TCP:h:80,cloexec=0", nil, "", "always has it on"},
	} {
		a, err := parseAddress(c.text)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: error %v, want %q", c.text, err, c.err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.text, err)
			continue
		}
		var options []string
		for _, o := range a.options {
			s := o.name
			if o.set {
				s += "=" + o.value
			}
			options = append(options, s)
		}
		if !slices.Equal(a.params, c.params) || strings.Join(options, " ") != c.options {
			t.Errorf("%s: parameters %q, options %q", c.text, a.params, options)
		}
	}
}

func TestSocatCommandLine(t *testing.T) {
	l, err := parseSocatLine([]string{"-d", "-d", "-t5", "-T", "1.5", "-b8192", "-lf/x", "-lpname", "-lu", "-6", "--bypass=off", "--admin", "127.0.0.1:1", "TCP-L:1,fork", "-"})
	if err != nil {
		t.Fatal(err)
	}
	if l.level != 2 || l.closeWait != 5*time.Second || l.idle != 1500*time.Millisecond || l.buffer != 8192 || l.logFile != "/x" ||
		l.name != "name" || !l.micros || l.family != "6" || l.bypass != proxy.BypassOff || l.admin != "127.0.0.1:1" || l.right.typ.kind != stdio {
		t.Errorf("%+v", l)
	}
	for text, want := range map[string]string{
		"-u -U - -":                    "contradict",
		"-dx - -":                      `unknown option "-dx"`,
		"-b 0 - -":                     "bad value",
		"-t":                           "no seconds",
		"-t x - -":                     "bad value",
		"-lyfoo - -":                   "bad value",
		"-L x - -":                     "flock(1)",
		"--bypass=no - -":              "bad value",
		"- TCP-LISTEN:1,fork -":        "exactly 2 addresses",
		"TCP:h:1 TCP-LISTEN:1,fork":    "put the listening address first",
		"TCP-L:1,fork TCP-L:2,fork":    "fork on both",
		"TCP-L:1,fork TCP:h:1,su=root": "put it on the listening address",
	} {
		if _, err := parseSocatLine(strings.Fields(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", text, err, want)
		}
	}
	for _, args := range [][]string{{"-dddd", "-", "-"}, {"-d4", "-", "-"}, {"-d", "-ddd", "-", "-"}, {"-ddddd", "-", "-"}} {
		if l, err := parseSocatLine(args); err != nil || l.level != 4 {
			t.Errorf("%v: %v %+v", args, err, l)
		}
	}
}

func TestProgramNamedSocat(t *testing.T) {
	for _, c := range []struct{ argv, want []string }{
		{[]string{"/usr/bin/socat", "run", "x"}, []string{"socat", "run", "x"}},
		{[]string{"/usr/bin/shunt", "run", "x"}, []string{"run", "x"}},
		{[]string{"/usr/bin/socat1", "-V"}, []string{"socat", "-V"}},
		{[]string{"socat-1.8.0.3", "-V"}, []string{"socat", "-V"}},
		{[]string{"socat-mux", "run"}, []string{"run"}},
		{nil, nil},
	} {
		if got := programArgs(c.argv); !slices.Equal(got, c.want) {
			t.Errorf("%q: %q", c.argv, got)
		}
	}
}

func TestTranslate(t *testing.T) {
	for _, c := range []struct{ line, want string }{
		{"TCP-LISTEN:8080,fork,reuseaddr TCP:127.0.0.1:9090", `[[listener]]
listen = "0.0.0.0:8080"
upstream = "127.0.0.1:9090"
`},
		{"-d -d -T 60 -t 5 --bypass=off --admin=127.0.0.1:9901 TCP6-LISTEN:8080,fork,max-children=7,keepidle=9 TCP:[::1]:9090,connect-timeout=2.5,nodelay", `[log]
level = "info"

[admin]
listen = "127.0.0.1:9901"

[[listener]]
listen = "[::]:8080"
upstream = "[::1]:9090"
bypass = "off"
max_connections = 7
dial_timeout = "2.5s"
idle_timeout = "1m0s"
half_open_timeout = "5s"
keepalive = { idle = "9s", interval = "10s", count = 3 }
`},
		{"-v TCP:db:5432,keepalive=0 TCP-LISTEN:1,bind=127.0.0.1,mss=1000", `# No equivalent here: no fork: the configuration serves connections until it is stopped.
# No equivalent here: option mss of TCP-LISTEN.
# No equivalent here: option -v.

[[listener]]
listen = "127.0.0.1:1"
upstream = "db:5432"
keepalive = { idle = "0s" }
`},
		{"TCP-LISTEN:1,fork,range=10.0.0.0:255.0.0.0 UNIX:/run/app.sock", `[[listener]]
listen = "0.0.0.0:1"
allow = ["10.0.0.0/8"]
upstream = "unix:/run/app.sock"
`},
		{"UNIX-LISTEN:/run/in.sock,fork,mode=660,user=root,group=nogroup,unlink-close=0 TCP:db:5432", `[[listener]]
listen = "unix:/run/in.sock"
unix = { mode = "0660", owner = "root", group = "nogroup", unlink = false }
upstream = "db:5432"
`},
		{"socat ABSTRACT-LISTEN:in,fork ABSTRACT-CONNECT:out", `[[listener]]
listen = "unix:@in"
upstream = "unix:@out"
`},
	} {
		code, stdout, stderr := runArgs(t, "", append([]string{"translate"}, strings.Fields(c.line)...)...)
		// What is in the comments is on stderr too, where a pipe doesn't hide it.
		said := strings.ReplaceAll(stderr, "shunt translate: no equivalent in a configuration file: ", "")
		commented := ""
		for _, line := range strings.Split(c.want, "\n") {
			if what, ok := strings.CutPrefix(line, "# No equivalent here: "); ok {
				commented += strings.TrimSuffix(what, ".") + "\n"
			}
		}
		if code != 0 || stdout != c.want || said != commented {
			t.Errorf("%s: code %d, stderr %q, stdout:\n%s", c.line, code, stderr, stdout)
		}
		if _, err := parseConfig("translated", []byte(stdout)); err != nil {
			t.Errorf("%s: %v", c.line, err)
		}
	}
	// A file without it would let in more than the command line does.
	code, stdout, stderr := runArgs(t, "", "translate", "TCP-LISTEN:1,fork,lowport", "TCP:db:5432")
	if code != 2 || stdout != "" || !strings.Contains(stderr, "option lowport of TCP-LISTEN restricts") {
		t.Errorf("lowport: code %d, stderr %q, stdout:\n%s", code, stderr, stdout)
	}
	code, stdout, stderr = runArgs(t, "", "translate", "-u", "TCP-LISTEN:1,fork", "TCP:db:5432")
	if code != 2 || stdout != "" || !strings.Contains(stderr, "both ways only") {
		t.Errorf("-u: code %d, stderr %q, stdout:\n%s", code, stderr, stdout)
	}
}

func TestDumps(t *testing.T) {
	b := []byte("hello\nwor\tld\x01\r\\ and more to have two lines")
	var out bytes.Buffer
	dumpText(&out, b[:16])
	if got, want := out.String(), "hello\nwor\tld.\\r\\\\ "; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	out.Reset()
	dumpBoth(&out, b[:24])
	want := " 68 65 6c 6c 6f 0a                                hello.\n" +
		" 77 6f 72 09 6c 64 01 0d 5c 20 61 6e 64 20 6d 6f  wor.ld..\\ and mo\n" +
		" 72 65                                            re\n--\n"
	if out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}

func FuzzSocatAddress(f *testing.F) {
	for _, s := range []string{
		"TCP-LISTEN:8080,fork,reuseaddr", "TCP:[::1]:80,bind=[::1]:1,connect-timeout=0.5", `UNIX:'/a,b':"c\"d"`, "-,ignoreeof",
		"3", "TCP-L:1,range=10.0.0.0:255.0.0.0,su=nobody", `ABSTRACT:\0x`, "TCP:h:1!!TCP:h:2", "VSOCK:2:0x10,setsockopt-int=6:1:1",
		"TCP:({[h]}):80", "UNIX-LISTEN:/x,mode=0600,,unlink-early=1,", ",", ":", "=", "\\", "'", "\"", "FD:1,=x",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := parseAddress(s)
		if err != nil {
			if strings.TrimSpace(err.Error()) == "" {
				t.Error("an error without words")
			}
			return
		}
		if len(a.params) != len(a.typ.params) {
			t.Errorf("%q: %d parameters", s, len(a.params))
		}
		for _, o := range a.options {
			if !o.opt.on.has(a.typ.kind) {
				t.Errorf("%q: option %s on %s", s, o.name, a.keyword)
			}
		}
		// What is quoted whole comes out as it was.
		if q, err := parseAddress("UNIX:'" + strings.ReplaceAll(s, "'", "") + "'"); err == nil && q.params[0] != strings.ReplaceAll(s, "'", "") {
			t.Errorf("%q: quoted, it becomes %q", s, q.params[0])
		}
	})
}

func FuzzSocatLine(f *testing.F) {
	for _, s := range []string{
		"-d -d TCP-LISTEN:8080,fork TCP:127.0.0.1:9090", "-t0.5 -T 5 -u - TCP:h:1", "-lf/x -lyuser -lpy -b8192 - -", "-hhh", "-V", "-?", "--bypass=off --admin=x - -", "-v -x -r a -R b FD:3 4", "- -- -", "-d9 -",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		l, err := parseSocatLine(strings.Split(s, " "))
		if err == nil && !l.help && !l.version {
			_, _, _ = translate(l)
		}
	})
}

// TestEveryWordOfTheInstalledSocatIsKnown asks socat for its words: each is supported or refused by name.
func TestEveryWordOfTheInstalledSocatIsKnown(t *testing.T) {
	bin, err := exec.LookPath("socat")
	if err != nil {
		if slices.Contains(strings.Split(os.Getenv("SHUNT_TEST_REQUIRE"), ","), "programs") {
			t.Fatal("this machine should be able to run this: missing the program socat")
		}
		t.Skip("missing the program socat")
	}
	out, err := exec.Command(bin, "-hhh").Output()
	if err != nil {
		t.Fatal(err)
	}
	addresses, options, _ := strings.Cut(string(out), "   opts:\n")
	_, addresses, _ = strings.Cut(addresses, "address-head:\n")
	n := socatNames()
	count := 0
	for _, line := range strings.Split(addresses, "\n") {
		word, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		word, _, _ = strings.Cut(word, "\t")
		word, _, _ = strings.Cut(word, ":")
		word, _, _ = strings.Cut(word, "[")
		if word == "" || word[0] == '<' {
			continue
		}
		count++
		if _, refused := n.refusedAddress[word]; n.address[word] == nil && !refused {
			t.Errorf("address %q is unknown", word)
		}
	}
	for _, line := range strings.Split(options, "\n") {
		if !strings.Contains(line, "groups=") && !strings.Contains(line, "is an alias for") {
			continue
		}
		word := strings.Fields(line)[0]
		count++
		if _, refused := n.refusedOption[word]; n.option[word] == nil && !refused {
			t.Errorf("option %q is unknown", word)
		}
	}
	if count < 500 {
		t.Errorf("only %d words in socat's help", count)
	}

	_, ours, _ := runArgs(t, "", "socat", "-V")
	if !regexp.MustCompile(`socat version 1\.\d`).MatchString(ours) {
		t.Errorf("-V: %s", ours)
	}
	theirs, err := exec.Command(bin, "-V").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`WITH_\w+`).FindAllString(string(theirs), -1) {
		switch m {
		case "WITH_SYCLS", "WITH_FILAN", "WITH_MSGLEVEL": // of its build
			continue
		}
		if !regexp.MustCompile(`(?m)^  #(define ` + m + ` 1|undef ` + m + `)$`).MatchString(ours) {
			t.Errorf("-V doesn't know %s", m)
		}
	}
}

func TestOptionThatCannotBeSetIsNamed(t *testing.T) {
	for _, args := range [][]string{
		{"TCP-LISTEN:0,bind=127.0.0.1,ttl=999", "TCP:127.0.0.1:1"},
		{"TCP:127.0.0.1:1,ttl=999", "TCP:127.0.0.1:1"},
	} {
		code, _, stderr := runArgs(t, "", append([]string{"--bypass=off"}, args...)...)
		if code != 1 || !strings.Contains(stderr, " E setsockopt(") || !strings.Contains(stderr, ", ttl): Invalid argument") {
			t.Errorf("%q: exit code %d, %s", args, code, stderr)
		}
	}
}
