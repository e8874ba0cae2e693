package main

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/BurntSushi/toml"

	"shunt/proxy"
	"shunt/splice"
)

func TestConfigMapsEveryKey(t *testing.T) {
	fc, err := parseConfig("f", []byte(`
[log]
level = "debug"
format = "json"
access = true
[process]
user = "nobody"
group = "nogroup"
[admin]
listen = "127.0.0.1:9901"
[dns]
servers = ["127.0.0.1:8600", "::1"]
[bypass]
cgroup = "/sys/fs/cgroup/a"
verdict = "window"
window = "64KiB"
queue_limit = "8MiB"
max_sockets = 1000
require = true
[limits]
max_connections = 500
[[listener]]
name = "web"
listen = "127.0.0.1:7000"
upstream = "web.internal:8000"
bypass = "on"
max_connections = 10
allow = ["10.0.0.0/8", "::1"]
deny = [
	"10.1.0.0/16", # but these
]
max_connections_per_source = 11
source_rate = { per_second = 12, burst = 13 }
dial_timeout = "1s"
idle_timeout = "2s"
half_open_timeout = "3s"
keepalive = { idle = "4s", interval = "5s", count = 6 }
drain_timeout = "7s"
proxy_protocol = { send = "v2", accept = "on", header_timeout = "8s", trusted = ["10.0.0.0/8", "::ffff:192.0.2.1"] }
transparent = true
[[listener]]
listen = ":7001"
upstreams = ["srv+_http._tcp.web", "[::1]:8000"]
balance = "source-hash"
resolve_interval = "8s"
eject = { failures = 9, duration = "10s" }
health = { interval = "11s", timeout = "12s", rise = 13, fall = 14 }
[listener.keepalive]
idle = "0s"
[[listener]]
listen = "unix:/run/a.sock"
unix = { mode = "0660", owner = "o", group = "g", unlink = false }
upstream = "[::1]:8000"
proxy_protocol = { accept = "on", trusted = ["unix:"] }
`))
	if err != nil {
		t.Fatal(err)
	}
	second := proxy.DefaultListener()
	second.Name, second.Listen, second.Upstreams = ":7001", ":7001", []string{"srv+_http._tcp.web", "[::1]:8000"}
	second.Balance, second.ResolveInterval = proxy.BalanceSourceHash, 8*time.Second
	second.Eject = proxy.Eject{Failures: 9, Duration: 10 * time.Second}
	second.Health = proxy.Health{Interval: 11 * time.Second, Timeout: 12 * time.Second, Rise: 13, Fall: 14}
	second.KeepAlive.Idle = 0
	third := proxy.DefaultListener()
	third.Name, third.Listen, third.Upstream = "unix:/run/a.sock", "unix:/run/a.sock", "[::1]:8000"
	third.Unix = proxy.UnixSocket{Mode: 0o660, Owner: "o", Group: "g"}
	third.ProxyProtocol.Accept, third.ProxyProtocol.TrustUnix = true, true
	first := proxy.DefaultListener()
	want := proxy.Config{
		DNSServers: []string{"127.0.0.1:8600", "[::1]:53"},
		Listeners: []proxy.Listener{{
			Name: "web", Listen: "127.0.0.1:7000", Unix: second.Unix, Upstream: "web.internal:8000", Bypass: proxy.BypassOn,
			Balance: first.Balance, Eject: first.Eject, Health: first.Health,
			MaxConnections: 10, MaxConnectionsPerSource: 11, SourceRate: proxy.SourceRate{PerSecond: 12, Burst: 13},
			Allow: networks([]string{"10.0.0.0/8", "::1"}), Deny: networks([]string{"10.1.0.0/16"}), DialTimeout: time.Second, IdleTimeout: 2 * time.Second, HalfOpenTimeout: 3 * time.Second,
			KeepAlive:    proxy.KeepAlive{Idle: 4 * time.Second, Interval: 5 * time.Second, Count: 6},
			DrainTimeout: 7 * time.Second,
			ProxyProtocol: proxy.ProxyProtocol{
				Send: proxy.HeaderV2, Accept: true, HeaderTimeout: 8 * time.Second,
				Trusted: networks([]string{"10.0.0.0/8", "192.0.2.1"}),
			},
			Transparent: true,
		}, second, third},
		Admin: "127.0.0.1:9901", AccessLog: true, MaxConnections: 500,
	}
	if got := fc.proxyConfig(); !reflect.DeepEqual(got, want) {
		t.Errorf("proxy configuration\n%+v\nwant\n%+v", got, want)
	}
	o := fc.spliceOptions()
	if o.Cgroup != "/sys/fs/cgroup/a" || o.Verdict != splice.VerdictWindow || o.Window != 64<<10 || o.QueueLimit != 8<<20 || o.MaxSockets != 1000 {
		t.Errorf("bypass options %+v", o)
	}
	if fc.Process != (processTable{"nobody", "nogroup"}) {
		t.Errorf("process %+v", fc.Process)
	}
	if !fc.Bypass.Require || fc.Log != (logTable{"debug", "json", true}) {
		t.Errorf("tables %+v %+v", fc.Bypass, fc.Log)
	}
}

func TestConfigDefaultsAreTheCodes(t *testing.T) {
	fc, err := parseConfig("f", []byte(minimal))
	if err != nil {
		t.Fatal(err)
	}
	want := proxy.DefaultListener()
	want.Name, want.Listen, want.Upstream = "127.0.0.1:7000", "127.0.0.1:7000", "127.0.0.1:8000"
	if got := fc.proxyConfig(); !reflect.DeepEqual(got, proxy.Config{Listeners: []proxy.Listener{want}}) {
		t.Errorf("%+v", got)
	}
	o, def := fc.spliceOptions(), splice.DefaultOptions()
	def.Log = o.Log
	if !reflect.DeepEqual(o, def) {
		t.Errorf("%+v, want %+v", o, def)
	}
}

func TestWantsBypass(t *testing.T) {
	off := minimal + "bypass = \"off\"\n"
	for text, want := range map[string]bool{
		minimal:                            true,
		minimal + "bypass = \"on\"\n":      true,
		off:                                false,
		off + "[bypass]\nrequire = true\n": true,
		off + strings.ReplaceAll(minimal, "7000", "7001"): true,
	} {
		fc, err := parseConfig("f", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if got := fc.wantsBypass(); got != want {
			t.Errorf("wantsBypass is %v for\n%s", got, text)
		}
	}
}

// listener returns a second valid listener with one more line.
func listener(line string) string {
	return minimal + "[[listener]]\nname = \"b\"\nlisten = \"127.0.0.1:7001\"\nupstream = \"127.0.0.1:8000\"\n" + line + "\n"
}

// unixListener returns a listener at a UNIX socket with one more line.
func unixListener(line string) string {
	return "[[listener]]\nlisten = \"unix:/a\"\nupstream = \"127.0.0.1:8000\"\n" + line + "\n"
}

// several is listener with one line in place of its upstream.
func several(line string) string {
	return minimal + "[[listener]]\nname = \"b\"\nlisten = \"127.0.0.1:7001\"\n" + line + "\n"
}

func TestGoodConfigs(t *testing.T) {
	for _, text := range []string{
		minimal,
		"\ufeff" + minimal,
		strings.ReplaceAll(minimal, "\n", "\r\n"),
		`listener = [{ listen = ":0", upstream = "a:1" }, { name = "b", listen = ":0", upstream = "a:1" }]`,
		listener(`keepalive.idle = "10s"`),
		listener("keepalive = { }"),
		listener(`idle_timeout = "0"`),
		listener(`max_connections = 1_000`),
		listener(`allow = []`),
		unixListener(`unix = { mode = "660", owner = "nobody", group = "65534", unlink = false }`),
		strings.Replace(unixListener(""), "/a", "@a", 1),
		"[[listener]]\nlisten = \"unix:/" + strings.Repeat("a", 106) + "\"\nupstream = \"unix:@b\"\n",
		listener(`deny = ["::ffff:10.0.0.0/104", "fe80::1%eth0"]`),
		listener(`source_rate.per_second = 5`),
		listener("[bypass]\nwindow = 4096"),
		listener("[bypass]\nqueue_limit = \"65536\""),
		listener("[admin]\nlisten = \"[::1]:9901\""),
		listener("[admin]\nlisten = \"127.0.0.1:0\""),
		several(`upstreams = ["127.0.0.1:1", "a:1", "unix:/a", "unix:@a", "srv+a"]`),
		several("upstreams = []\nupstream = \"a:1\""),
		listener("[dns]\nservers = []"),
		`[[listener]]
listen = "127.0.0.1:7000"
upstream = "10.0.0.1:7000"`,
		`[[listener]]
listen = "127.0.0.1:7000"
upstream = "127.0.0.1:7001"
[[listener]]
listen = "127.0.0.1:7001"
upstream = "127.0.0.1:7002"`,
		`[[listener]]
listen = "0.0.0.0:7000"
upstream = "[::1]:7000"
[[listener]]
listen = "[::1]:7000"
upstream = "a:1"`,
	} {
		if _, err := parseConfig("f", []byte(text)); err != nil {
			t.Errorf("%v for\n%s", err, text)
		}
	}
}

func TestBadConfigs(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		// The file as a whole.
		{"", "f: no [[listener]]: at least one is needed"},
		{"# nothing\n", "f: no [[listener]]"},
		{"[log]\nlevel = \"info\"\n", "f: no [[listener]]"},
		{"listener = []", "f: no [[listener]]"},
		{"[[listener", "f:1: "},
		{"[log]\nlevel = warn\n", "f:2: log.level: expected value"},
		{"\xff", "f:1: invalid UTF-8"},
		{"[log]\nlevel = \"info\"\nlevel = \"warn\"\n", "f:3: Key 'log.level' has already been defined"},
		{"[log]\n[log]\n", "f:2: Key 'log' has already been defined"},

		// Unknown keys.
		{"[log]\nlevl = \"info\"\n", `f:2: log.levl: unknown key; did you mean "level"?`},
		{"[log]\nLevel = \"info\"\n", `f:2: log.Level: unknown key; did you mean "level"?`},
		{"[loging]\n", `f:1: loging: unknown key; did you mean "log"?`},
		{"[[listeners]]\n", `f:1: listeners: unknown key; did you mean "listener"?`},
		{"listen = \":7000\"\n", `f:1: listen: unknown key; listen belongs in [[listener]]`},
		{"[bypass]\nzzzzzz = 1\n", "f:2: bypass.zzzzzz: unknown key; known here: cgroup, max_sockets, queue_limit, require, verdict, window"},
		{"[bypass]\nuptsream = 1\n", `f:2: bypass.uptsream: unknown key; did you mean "upstream" in [[listener]]?`},
		{listener(`window = "64KiB"`), `f:8: listener "b": window: unknown key; window belongs in [bypass]`},
		{listener(`dail_timeout = "1s"`), `f:8: listener "b": dail_timeout: unknown key; did you mean "dial_timeout"?`},
		{listener(`keepalive = { idel = "1s" }`), `f:8: listener "b": keepalive.idel: unknown key; did you mean "idle"?`},
		{listener("[listener.keepalive]\ncuont = 1"), `f:9: listener "b": keepalive.cuont: unknown key; did you mean "count"?`},
		{"[[listener]]\nlisten = \"127.0.0.1:1\"\nuptsream = \"a:1\"\n" + minimal, `f:3: listener "127.0.0.1:1": uptsream: unknown key; did you mean "upstream"?`},
		{"[[listener]]\nupstrem = 1\n", `f:2: listener 1: upstrem: unknown key`},
		{"x = '''\n[log]\nlevl = 1\n'''\n", `f:1: x: unknown key; known here: admin, bypass, dns, limits, listener, log`},
		{"log.x-y.z = 1\n", "f:1: log.x-y: unknown key"},
		{"\"a b\" = 1\n", `f:1: "a b": unknown key`},

		// Wrong types.
		{"log = 1\n", "f:1: log: want a table, not the number 1"},
		{"[listener]\nlisten = \":1\"\n", "f:1: listener: want an array of tables, each written [[listener]], not a table"},
		{"listener = [1]\n", "f:1: listener: want an array of tables, each written [[listener]], not an array"},
		{"[log]\nlevel = 3\n", "f:2: log.level: want a string in quotes, not the number 3"},
		{"[log]\naccess = \"yes\"\n", `f:2: log.access: want true or false, not the string "yes"`},
		{listener("max_connections = \"9\""), `f:8: listener "b": max_connections: want a whole number, not the string "9"`},
		{listener("max_connections = 1.5"), `max_connections: want a whole number, not the number 1.5`},
		{listener("keepalive = true"), `f:8: listener "b": keepalive: want a table, not true`},
		{listener("dial_timeout = 10"), `f:8: listener "b": dial_timeout: want a duration in quotes, such as "500ms", "10s" or "5m", not the number 10; did you mean "10s"?`},
		{listener("dial_timeout = 1979-05-27"), `dial_timeout: want a duration in quotes, such as "500ms", "10s" or "5m", not a date`},
		{listener(`dial_timeout = "10"`), `dial_timeout: "10" is not a duration: want a duration in quotes`},
		{listener(`dial_timeout = "1d"`), `dial_timeout: "1d" is not a duration`},
		{"[bypass]\nwindow = true\n", "f:2: bypass.window: want a size: a whole number of bytes"},
		{"[bypass]\nwindow = -1\n", "bypass.window: want a size"},
		{"[bypass]\nqueue_limit = false\n", `f:2: bypass.queue_limit: want "auto" or a size`},

		// Ranges and words.
		{"[log]\nlevel = \"trace\"\n", `f:2: log.level: unknown value "trace": want one of debug, info, warn, error`},
		{"[log]\nlevel = \"INFO\"\n", `did you mean "info"?`},
		{"[log]\nformat = \"jason\"\n", `f:2: log.format: unknown value "jason": want one of auto, console, json; did you mean "json"?`},
		{"[bypass]\nverdict = \"always\"\n", `f:2: bypass.verdict: unknown value "always": want one of auto, every, window, permanent`},
		{"[bypass]\nwindow = \"4095\"\n", "f:2: bypass.window: 4095 is out of range: want 4KiB to 1GiB"},
		{"[bypass]\nwindow = \"8GiB\"\n", "f:2: bypass.window: 8GiB is out of range"},
		{"[bypass]\nwindow = \"256KB\"\n", `f:2: bypass.window: "256KB" is not a size: want a whole number of bytes ("4096") or of KiB, MiB or GiB ("256KiB"); did you mean "256KiB"?`},
		{"[bypass]\nwindow = \"auto\"\n", `f:2: bypass.window: "auto" is not a size`},
		{"[bypass]\nqueue_limit = \"1KiB\"\n", `f:2: bypass.queue_limit: 1KiB is out of range: want "auto", or 64KiB to 1GiB`},
		{"[bypass]\nqueue_limit = 0\n", `f:2: bypass.queue_limit: 0 is out of range; write "auto" for the default`},
		{"[bypass]\nqueue_limit = \"4M\"\n", `f:2: bypass.queue_limit: "4M" is not a size: want "auto" or a whole number of bytes ("4096") or of KiB, MiB or GiB ("256KiB"); did you mean "4MiB"?`},
		{"[bypass]\nqueue_limit = \"atuo\"\n", `"atuo" is not a size: want "auto" or a whole number of bytes ("4096") or of KiB, MiB or GiB ("256KiB")`},
		{"[bypass]\nmax_sockets = 3\n", "f:2: bypass.max_sockets: 3 is out of range: want 4 to 4194304"},
		{"[bypass]\nmax_sockets = -1\n", "bypass.max_sockets: -1 is out of range"},
		{"[bypass]\nmax_sockets = 9223372036854775807\n", "bypass.max_sockets: 9223372036854775807 is out of range"},
		{"[bypass]\ncgroup = \"sys/fs/cgroup\"\n", `f:2: bypass.cgroup: "sys/fs/cgroup": want the absolute path`},
		{listener("max_connections = -1"), `f:8: listener "b": max_connections: -1 is out of range: want 0 to 10000000`},
		{listener(`dial_timeout = "0s"`), `f:8: listener "b": dial_timeout: 0s is out of range: want 1ms to 8760h0m0s`},
		{listener(`idle_timeout = "-1s"`), `f:8: listener "b": idle_timeout: -1s is out of range: want 0s to 8760h0m0s`},
		{listener(`half_open_timeout = "-1ns"`), "half_open_timeout: -1ns is out of range"},
		{listener(`drain_timeout = "10000h"`), "drain_timeout: 10000h0m0s is out of range"},
		{listener(`keepalive = { idle = "100ms" }`), `f:8: listener "b": keepalive.idle: 100ms is out of range: want 1s to 9h6m7s, or 0s for no keepalive`},
		{listener(`keepalive = { interval = "0s" }`), "keepalive.interval: 0s is out of range: want 1s to 9h6m7s"},
		{listener(`keepalive.count = 0`), `f:8: listener "b": keepalive.count: 0 is out of range: want 1 to 127`},
		{listener(`keepalive = { count = 128 }`), "keepalive.count: 128 is out of range"},
		{listener(`bypass = "yes"`), `f:8: listener "b": bypass: unknown value "yes": want one of auto, on, off`},

		{"[limits]\nmax_connections = -1\n", "f:2: limits.max_connections: -1 is out of range: want 0 to 10000000"},
		{listener("max_connections_per_source = -1"), `f:8: listener "b": max_connections_per_source: -1 is out of range: want 0 to 10000000`},
		{listener("source_rate = { per_second = -1 }"), `f:8: listener "b": source_rate.per_second: -1 is out of range: want 0 to 1000000`},
		{listener("source_rate = { per_second = 1, burst = 1000001 }"), `source_rate.burst: 1000001 is out of range`},
		{listener("source_rate = { burst = 5 }"), `f:8: listener "b": source_rate.per_second: missing: a burst of 5 without a rate bounds nothing`},
		{listener("source_rate = 5"), `source_rate: want a table, not the number 5`},
		{listener(`allow = "10.0.0.0/8"`), `f:8: listener "b": allow: want an array of strings, such as ["a", "b"], not the string "10.0.0.0/8"; did you mean ["10.0.0.0/8"]?`},
		{listener(`allow = [10]`), `f:8: listener "b": allow: want an array of strings, such as ["a", "b"], not one with the number 10`},
		{listener(`allow = { }`), `allow: want an array of strings, such as ["a", "b"], not a table`},
		{listener(`allow = ["10.0.0.0/8", "10.0.0.1/8"]`), `f:8: listener "b": allow: want addresses and networks, such as "10.0.0.0/8", "192.0.2.7" or "2001:db8::/32": "10.0.0.1/8" has bits beyond its length; did you mean "10.0.0.0/8"?`},
		{listener(`deny = ["example.org"]`), `f:8: listener "b": deny: want addresses and networks, such as "10.0.0.0/8", "192.0.2.7" or "2001:db8::/32": "example.org" is neither an address nor a network`},
		{listener(`deny = ["10.0.0.0/40"]`), `: "10.0.0.0/40": /40: want a length from 0 to 32`},
		{listener(`denny = []`), `denny: unknown key; did you mean "deny"?`},

		// Addresses.
		{"[[listener]]\nupstream = \"a:1\"\n", `f:1: listener 1: listen: missing: want an address, such as "127.0.0.1:7000"`},
		{"[[listener]]\nlisten = \":1\"\n", `f:1: listener ":1": upstream: missing: want host:port`},
		{"[[listener]]\nlisten = \"7000\"\nupstream = \"a:1\"\n", `f:2: listener "7000": listen: "7000": want an address and a port`},
		{"[[listener]]\nlisten = \"localhost:7000\"\nupstream = \"a:1\"\n", `"localhost" is not an IP address: want an address and a port`},
		{"[[listener]]\nlisten = \"*:7000\"\nupstream = \"a:1\"\n", `"*" is not an IP address: want an address and a port, such as "127.0.0.1:7000", "[::1]:7000" or ":7000" for all addresses`},
		{"[[listener]]\nlisten = \"::1:7000\"\nupstream = \"a:1\"\n", `"::1:7000": want an address and a port`},
		{"[[listener]]\nlisten = \":65536\"\nupstream = \"a:1\"\n", `port "65536": want a number from 0 to 65535`},
		{"[[listener]]\nlisten = \":http\"\nupstream = \"a:1\"\n", `port "http": want a number`},
		{"[[listener]]\nlisten = \":1\"\nupstream = \"a\"\n", `f:3: listener ":1": upstream: "a": want host:port`},
		{"[[listener]]\nlisten = \":1\"\nupstream = \":80\"\n", `upstream: ":80": want host:port`},
		{"[[listener]]\nlisten = \":1\"\nupstream = \"http://a:80\"\n", `upstream: "http://a:80": want host:port`},
		{"[[listener]]\nlisten = \":1\"\nupstream = \"a b:80\"\n", `upstream: "a b:80": want host:port`},
		{"[[listener]]\nlisten = \":1\"\nupstream = \"a:0\"\n", `upstream: "a:0": port "0": want a number from 1 to 65535`},
		{"[process]\nuser = \"root\"\n", `f:2: process.user: "root": want an unprivileged one`},
		{"[process]\nuser = \"a b\"\n", `f:2: process.user: "a b": want a name or a number`},
		{"[process]\nuser = \"a\"\ngroup = \"0\"\n", `f:3: process.group: "0": want an unprivileged one`},
		{"[process]\ngroup = \"a\"\n", `f:2: process.group: "a" without process.user`},
		{"[process]\nuser = 1000\n", "f:2: process.user: want a string in quotes"},
		{"[admin]\nlisten = \"9901\"\n", `f:2: admin.listen: "9901": want an address and a port`},
		{"[admin]\nlisten = \"unix:admin.sock\"\n", `f:2: admin.listen: "unix:admin.sock": want unix: and an absolute path of at most 107 bytes`},
		{"[admin]\nlisten = \"unix:/" + strings.Repeat("a", 107) + "\"\n", "want unix: and an absolute path of at most 107 bytes"},
		{listener("[admin]\nlisten = \"127.0.0.1:7001\""), `f:9: admin.listen: "127.0.0.1:7001" is taken by listener "b"`},

		{"[[listener]]\nlisten = \"unix:a.sock\"\nupstream = \"a:1\"\n", `f:2: listener "unix:a.sock": listen: "unix:a.sock": want unix: and an absolute path, or @ and a name, of at most 107 bytes`},
		{"[[listener]]\nlisten = \"unix:@\"\nupstream = \"a:1\"\n", `want unix: and an absolute path`},
		{"[[listener]]\nlisten = \"unix:/" + strings.Repeat("a", 107) + "\"\nupstream = \"a:1\"\n", `want unix: and an absolute path`},
		{"[[listener]]\nlisten = \"/run/a.sock\"\nupstream = \"a:1\"\n", `or "unix:/path"`},
		{unixListener(`unix = { mode = "rw" }`), `f:4: listener "unix:/a": unix.mode: "rw" is not a mode: want octal digits in quotes, such as "0600" or "0660"`},
		{unixListener(`unix = { mode = "1777" }`), `unix.mode: "1777" is not a mode`},
		{unixListener(`unix = { mode = 600 }`), `unix.mode: want a string in quotes, not the number 600`},
		{unixListener(`unix = { owner = "a b" }`), `unix.owner: "a b": want a name or a number`},
		{unixListener(`unix = { user = "a" }`), `unix.user: unknown key`},
		{unixListener(`allow = ["10.0.0.0/8"]`), `f:4: listener "unix:/a": allow: the clients of a UNIX socket have no address: unix.mode, unix.owner and unix.group say who may connect`},
		{unixListener(`source_rate = { per_second = 1 }`), `source_rate: the clients of a UNIX socket have no address`},
		{strings.Replace(unixListener(`unix = { mode = "0666" }`), "/a", "@a", 1), `unix: an abstract socket has no mode, owner or group`},
		{listener(`unix = { mode = "0666" }`), `f:8: listener "b": unix: listen = "127.0.0.1:7001" is no UNIX socket, such as "unix:/run/app/web.sock"`},
		{unixListener("") + unixListener("name = \"b\""), `listener "b": listen: "unix:/a" is taken by listener "unix:/a"`},
		{unixListener("[admin]\nlisten = \"unix:/a\""), `admin.listen: "unix:/a" is taken by listener "unix:/a"`},
		{strings.Replace(unixListener(""), "127.0.0.1:8000", "unix:/a", 1), `upstream: "unix:/a" is the listener itself`},
		{listener(`upstreams = ["127.0.0.1:1"]`), `f:8: listener "b": upstreams: upstream is set too: want one of them`},
		{several(`upstreams = ["127.0.0.1:1", "127.0.0.1:1"]`), `f:7: listener "b": upstreams: "127.0.0.1:1" is there twice`},
		{several(`upstreams = ["127.0.0.1:1", "127.0.0.1"]`), `upstreams: "127.0.0.1": want host:port, such as`},
		{several(`upstreams = "a:1"`), `upstreams: want an array of strings, such as ["a", "b"], not the string "a:1"; did you mean ["a:1"]?`},
		{several(`upstreams = ["srv+web:80"]`), `"srv+web:80": want srv+ and a name without a port: the records have the ports`},
		{several(`upstreams = ["srv+"]`), `"srv+": want srv+ and a name, such as "srv+_http._tcp.web.internal"`},
		{several(`upstreams = ["unix:a"]`), `"unix:a": want unix: and an absolute path, or @ and a name, of at most 107 bytes`},
		{several(`upstreams = ["a:1", "127.0.0.1:7001"]`), `f:7: listener "b": upstreams: "127.0.0.1:7001" is the listener itself`},
		{several("upstreams = [\"a:1\", \"127.0.0.1:7002\"]\n[[listener]]\nname = \"c\"\nlisten = \":7002\"\nupstreams = [\"127.0.0.1:9\", \"127.0.0.1:7001\"]"),
			`f:7: listener "b": upstreams: connections would go round in a loop: "b" -> "c" and back`},
		{listener(`balance = "roundrobin"`), `f:8: listener "b": balance: unknown value "roundrobin": want one of round-robin, least-connections, source-hash, first; did you mean "round-robin"?`},
		{listener(`resolve_interval = "1ms"`), `f:8: listener "b": resolve_interval: 1ms is out of range: want 100ms to 8760h0m0s, or 0s`},
		{listener(`eject = { failures = -1 }`), `f:8: listener "b": eject.failures: -1 is out of range: want 0 to 1000`},
		{listener(`eject = { duration = "0s" }`), `f:8: listener "b": eject.duration: 0s is out of range: want 1ms to 8760h0m0s`},
		{listener(`health = { interval = "1ms" }`), `f:8: listener "b": health.interval: 1ms is out of range: want 100ms to 8760h0m0s, or 0s for no checks`},
		{listener(`health = { timeout = "0s" }`), `health.timeout: 0s is out of range`},
		{listener(`health.rise = 0`), `health.rise: 0 is out of range: want 1 to 1000`},
		{listener(`health.fall = 1001`), `health.fall: 1001 is out of range: want 1 to 1000`},
		{"[dns]\nservers = [\"ns.internal\"]\n", `f:2: dns.servers: "ns.internal": want an IP address, with a port if it isn't 53, such as "10.0.0.2" or "127.0.0.1:8600"`},

		// Listeners beside each other.
		{strings.Replace(listener(""), "7001", "7000", 1), `f:6: listener "b": listen: "127.0.0.1:7000" is taken by listener "127.0.0.1:7000"`},
		{strings.Replace(listener(""), "127.0.0.1:7001", ":7000", 1), `listen: ":7000" is taken by`},
		{strings.Replace(listener(""), "127.0.0.1:7001", "0.0.0.0:7000", 1), `listen: "0.0.0.0:7000" is taken by`},
		{strings.Replace(listener(""), "127.0.0.1:7001", "[::ffff:127.0.0.1]:7000", 1), `is taken by`},
		{minimal + "name = \"b\"\n" + listener("")[len(minimal):], `f:6: listener "b": name: "b" is the name of listener 1 already`},
		{"[[listener]]\nname = \"a\\nb\"\nlisten = \":1\"\nupstream = \"a:1\"\n", `f:2: listener "a\nb": name: "a\nb": want at most 128 printable characters`},
		{"[[listener]]\nname = \"" + strings.Repeat("a", 129) + "\"\nlisten = \":1\"\nupstream = \"a:1\"\n", "want at most 128 printable characters"},

		// Loops.
		{strings.Replace(minimal, "8000", "7000", 1), `f:3: listener "127.0.0.1:7000": upstream: "127.0.0.1:7000" is the listener itself`},
		{"[[listener]]\nlisten = \":7000\"\nupstream = \"localhost:7000\"\n", `upstream: "localhost:7000" is the listener itself`},
		{"[[listener]]\nlisten = \":7000\"\nupstream = \"127.0.0.9:7000\"\n", `is the listener itself`},
		{"[[listener]]\nlisten = \"0.0.0.0:7000\"\nupstream = \"0.0.0.0:7000\"\n", `is the listener itself`},
		{"[[listener]]\nlisten = \"[::1]:7000\"\nupstream = \"[::]:7000\"\n", `is the listener itself`},
		{"[[listener]]\nname = \"a\"\nlisten = \":1\"\nupstream = \"127.0.0.1:2\"\n[[listener]]\nname = \"b\"\nlisten = \":2\"\nupstream = \"127.0.0.1:1\"\n",
			`f:4: listener "a": upstream: connections would go round in a loop: "a" -> "b" and back`},
	} {
		_, err := parseConfig("f", []byte(c.text))
		switch {
		case err == nil:
			t.Errorf("no error, want %q, for\n%s", c.want, c.text)
		case !strings.Contains(err.Error(), c.want):
			t.Errorf("error\n  %v\nwant in it\n  %s\nfor\n%s", err, c.want, c.text)
		case strings.Contains(err.Error(), "\n"):
			t.Errorf("more than one error: %q", err)
		}
	}
}

// TestEveryMistakeIsTold counts each once, in the order of the file.
func TestEveryMistakeIsTold(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"[log]\nlevl = \"info\"\n[[listener]]\nlisten = 7\nupstream = \"a\"\ndial_timeout = \"0s\"\nkeepalive = { count = 0, idle = \"1ms\" }\n[bypass]\nwindow = 1\n",
			`f:2: log.levl: unknown key; did you mean "level"?
f:4: listener 1: listen: want a string in quotes, not the number 7
f:5: listener 1: upstream: "a": want host:port, such as "127.0.0.1:8000", "[::1]:8000" or "db.internal:5432", or "unix:/path", "unix:@name", "srv+name" or "original-dst"
f:6: listener 1: dial_timeout: 0s is out of range: want 1ms to 8760h0m0s
f:7: listener 1: keepalive.idle: 1ms is out of range: want 1s to 9h6m7s, or 0s for no keepalive
f:7: listener 1: keepalive.count: 0 is out of range: want 1 to 127
f:9: bypass.window: 1 is out of range: want 4KiB to 1GiB`},
		{"[[listener]]\n", `f:1: listener 1: listen: missing: want an address, such as "127.0.0.1:7000"
f:1: listener 1: upstream: missing: want host:port, such as "127.0.0.1:8000", or upstreams = ["..."]`},
		// A misspelt key isn't missing too, and a loop has one mistake.
		{"[[listener]]\nlsten = \":1\"\n[[listener]]\nlisten = \":2\"\nupstream = \"127.0.0.1:3\"\n[[listener]]\nlisten = \":3\"\nupstream = \"127.0.0.1:2\"\n[[listener]]\nlisten = \":2\"\nupstream = \"a:1\"\n",
			`f:2: listener 1: lsten: unknown key; did you mean "listen"?
f:5: listener ":2": upstream: connections would go round in a loop: ":2" -> ":3" and back
f:10: listener ":2": listen: ":2" is taken by listener ":2"`},
	} {
		if _, err := parseConfig("f", []byte(c.text)); err == nil || err.Error() != c.want {
			t.Errorf("got\n%v\nwant\n%s\nfor\n%s", err, c.want, c.text)
		}
	}
}

func TestConfigReadsNoMoreThanItMust(t *testing.T) {
	file := writeConfig(t, strings.Repeat("# a comment\n", maxConfigSize/12+1))
	if _, err := loadConfig(file, nil); err == nil || !strings.Contains(err.Error(), "not a configuration") {
		t.Errorf("%v", err)
	}
	if _, err := loadConfig(t.TempDir(), nil); err == nil {
		t.Error("a directory was read as a configuration")
	}
}

// TestExampleHoldsEveryKeyAtItsDefault reads the file by its own means: the
// loader under test could skip a key in both.
func TestExampleHoldsEveryKeyAtItsDefault(t *testing.T) {
	file := filepath.Join("..", "..", "config.example.toml")
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	fc, err := loadConfig(file, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(fc.Listeners) != 1 {
		t.Fatalf("%d listeners, want one", len(fc.Listeners))
	}

	var tree map[string]any
	if _, err := toml.Decode(string(data), &tree); err != nil {
		t.Fatal(err)
	}
	var every func(at string, tree map[string]any, v reflect.Value)
	every = func(at string, tree map[string]any, v reflect.Value) {
		for i := range v.NumField() {
			key := v.Type().Field(i).Tag.Get("toml")
			value, ok := tree[key]
			if !ok {
				t.Errorf("%s%s is missing", at, key)
				continue
			}
			if list, ok := value.([]map[string]any); ok && len(list) > 0 {
				every(at+key+".", list[0], reflect.ValueOf(defaultListener()))
			}
			if table, ok := value.(map[string]any); ok {
				every(at+key+".", table, v.Field(i))
			}
		}
	}
	every("", tree, reflect.ValueOf(defaultFile()))

	want := defaultFile()
	l := defaultListener()
	// The three keys that no default can stand for.
	l.Name, l.Listen, l.Upstream = "web", "127.0.0.1:7000", "127.0.0.1:8000"
	want.Listeners = []listenerTable{l}
	if !reflect.DeepEqual(*fc, want) {
		t.Errorf("the example is\n%+v\nthe defaults are\n%+v", *fc, want)
	}
}

func FuzzConfig(f *testing.F) {
	example, err := os.ReadFile(filepath.Join("..", "..", "config.example.toml"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(example)
	for _, s := range []string{
		"", minimal, listener("keepalive = { idle = \"1s\" }"), "[[listener]]\n[listener.keepalive]\ncount = 1\n",
		"[listener]\n", "listener = [[]]", "listener = [{}]\n[log]", "a.b.c = 1", "'' = ''", "x = \"\"\"\n[log]\n\"\"\"\n",
		"[[listener.x]]\n", "[bypass]\nwindow = 1e400", "[[listener]]\nlisten = \"[fe80::1%a]:1\"\nupstream = \"[fe80::1%a]:1\"",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		fc, err := parseConfig("f", data)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "f:") {
				t.Errorf("error without a place: %v", err)
			}
			return
		}
		names := map[string]bool{}
		for _, l := range fc.proxyConfig().Listeners {
			if l.Name == "" || names[l.Name] || l.Listen == "" || (l.Upstream == "") == (len(l.Upstreams) == 0) || l.DialTimeout <= 0 || l.IdleTimeout < 0 || l.MaxConnections < 0 {
				t.Errorf("accepted %+v", l)
			}
			names[l.Name] = true
		}
		if o := fc.spliceOptions(); len(names) == 0 || uint64(o.Window) != uint64(fc.Bypass.Window) || uint64(o.QueueLimit) != uint64(fc.Bypass.QueueLimit) {
			t.Errorf("accepted %+v", fc)
		}
	})
}
