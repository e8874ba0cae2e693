package main

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"time"

	"shunt/proxy"
	"shunt/splice"
)

// fileConfig is the schema of the configuration file: a struct is a table, a
// slice an array of tables, and the toml tags are the keys. The types are
// what decode.go knows.
type fileConfig struct {
	Log       logTable        `toml:"log"`
	Process   processTable    `toml:"process"`
	Admin     adminTable      `toml:"admin"`
	DNS       dnsTable        `toml:"dns"`
	Bypass    bypassTable     `toml:"bypass"`
	Limits    limitsTable     `toml:"limits"`
	Listeners []listenerTable `toml:"listener"`
}

type logTable struct {
	Level  string `toml:"level"`
	Format string `toml:"format"`
	Access bool   `toml:"access"`
}

type processTable struct {
	User  string `toml:"user"`
	Group string `toml:"group"`
}

type adminTable struct {
	Listen string `toml:"listen"`
}

type dnsTable struct {
	Servers []string `toml:"servers"`
}

type bypassTable struct {
	Cgroup     string   `toml:"cgroup"`
	Verdict    string   `toml:"verdict"`
	Window     size     `toml:"window"`
	QueueLimit autoSize `toml:"queue_limit"`
	MaxSockets int      `toml:"max_sockets"`
	Require    bool     `toml:"require"`
}

type limitsTable struct {
	MaxConnections int `toml:"max_connections"`
}

type listenerTable struct {
	Name            string             `toml:"name"`
	Listen          string             `toml:"listen"`
	Unix            unixTable          `toml:"unix"`
	Upstream        string             `toml:"upstream"`
	Upstreams       []string           `toml:"upstreams"`
	Balance         string             `toml:"balance"`
	ResolveInterval time.Duration      `toml:"resolve_interval"`
	Eject           ejectTable         `toml:"eject"`
	Health          healthTable        `toml:"health"`
	Bypass          string             `toml:"bypass"`
	MaxConnections  int                `toml:"max_connections"`
	MaxPerSource    int                `toml:"max_connections_per_source"`
	SourceRate      sourceRateTable    `toml:"source_rate"`
	Allow           []string           `toml:"allow"`
	Deny            []string           `toml:"deny"`
	DialTimeout     time.Duration      `toml:"dial_timeout"`
	IdleTimeout     time.Duration      `toml:"idle_timeout"`
	HalfOpenTimeout time.Duration      `toml:"half_open_timeout"`
	KeepAlive       keepAliveTable     `toml:"keepalive"`
	DrainTimeout    time.Duration      `toml:"drain_timeout"`
	ProxyProtocol   proxyProtocolTable `toml:"proxy_protocol"`
	Transparent     bool               `toml:"transparent"`
}

type unixTable struct {
	Mode   string `toml:"mode"`
	Owner  string `toml:"owner"`
	Group  string `toml:"group"`
	Unlink bool   `toml:"unlink"`
}

type sourceRateTable struct {
	PerSecond int `toml:"per_second"`
	Burst     int `toml:"burst"`
}

type ejectTable struct {
	Failures int           `toml:"failures"`
	Duration time.Duration `toml:"duration"`
}

type healthTable struct {
	Interval time.Duration `toml:"interval"`
	Timeout  time.Duration `toml:"timeout"`
	Rise     int           `toml:"rise"`
	Fall     int           `toml:"fall"`
}

type keepAliveTable struct {
	Idle     time.Duration `toml:"idle"`
	Interval time.Duration `toml:"interval"`
	Count    int           `toml:"count"`
}

// autoSize is a size of which zero is written "auto".
type autoSize size

// defaultFile returns the configuration of an empty file, which has no listener.
func defaultFile() fileConfig {
	o := splice.DefaultOptions()
	return fileConfig{
		Log: logTable{Level: "info", Format: "auto"},
		Bypass: bypassTable{
			Cgroup:     o.Cgroup,
			Verdict:    string(o.Verdict),
			Window:     size(o.Window),
			QueueLimit: autoSize(o.QueueLimit),
			MaxSockets: o.MaxSockets,
		},
	}
}

// defaultListener returns a [[listener]] with no key set.
func defaultListener() listenerTable {
	l := proxy.DefaultListener()
	return listenerTable{
		Unix:            unixTable{Mode: fmt.Sprintf("%04o", l.Unix.Mode), Owner: l.Unix.Owner, Group: l.Unix.Group, Unlink: l.Unix.Unlink},
		Balance:         string(l.Balance),
		ResolveInterval: l.ResolveInterval,
		Eject:           ejectTable(l.Eject),
		Health:          healthTable(l.Health),
		Bypass:          string(l.Bypass),
		MaxConnections:  l.MaxConnections,
		DialTimeout:     l.DialTimeout,
		IdleTimeout:     l.IdleTimeout,
		HalfOpenTimeout: l.HalfOpenTimeout,
		KeepAlive:       keepAliveTable{Idle: l.KeepAlive.Idle, Interval: l.KeepAlive.Interval, Count: l.KeepAlive.Count},
		DrainTimeout:    l.DrainTimeout,
		ProxyProtocol: proxyProtocolTable{
			Send: string(l.ProxyProtocol.Send), Accept: acceptModes[l.ProxyProtocol.Accept], HeaderTimeout: l.ProxyProtocol.HeaderTimeout,
		},
	}
}

// maxConfigSize is far above any configuration that a person or a generator
// writes; it keeps a wrong file name from filling memory.
const maxConfigSize = 4 << 20

// loadConfig reads and validates the file at path; "-" is stdin. The error
// says where in the file what is wrong, a line for each mistake.
func loadConfig(path string, stdin io.Reader) (*fileConfig, error) {
	name, r := path, stdin
	if path == "-" {
		name = "stdin"
	} else {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		r = f
	}
	data, err := io.ReadAll(io.LimitReader(r, maxConfigSize+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxConfigSize {
		return nil, fmt.Errorf("%s: larger than %v: not a configuration", name, size(maxConfigSize))
	}
	return parseConfig(name, data)
}

// parseConfig decodes and validates data; name is what errors call the file.
func parseConfig(name string, data []byte) (*fileConfig, error) {
	fc := defaultFile()
	d, err := decodeFile(name, data, &fc)
	if err != nil {
		return nil, err
	}
	for i := range fc.Listeners {
		if l := &fc.Listeners[i]; l.Name == "" {
			l.Name = l.Listen
		}
	}
	fc.validate(d)
	if err := d.err(); err != nil {
		return nil, err
	}
	return &fc, nil
}

// proxyConfig returns what the proxy is to run.
func (fc *fileConfig) proxyConfig() proxy.Config {
	cfg := proxy.Config{DNSServers: fc.DNS.addresses(), Admin: fc.Admin.Listen, AccessLog: fc.Log.Access, MaxConnections: fc.Limits.MaxConnections}
	for _, l := range fc.Listeners {
		cfg.Listeners = append(cfg.Listeners, proxy.Listener{
			Name:                    l.Name,
			Listen:                  l.Listen,
			Unix:                    l.Unix.socket(),
			Upstream:                l.Upstream,
			Upstreams:               l.Upstreams,
			Balance:                 proxy.Balance(l.Balance),
			ResolveInterval:         l.ResolveInterval,
			Eject:                   proxy.Eject(l.Eject),
			Health:                  proxy.Health(l.Health),
			Bypass:                  proxy.BypassMode(l.Bypass),
			MaxConnections:          l.MaxConnections,
			MaxConnectionsPerSource: l.MaxPerSource,
			SourceRate:              proxy.SourceRate(l.SourceRate),
			Allow:                   networks(l.Allow),
			Deny:                    networks(l.Deny),
			DialTimeout:             l.DialTimeout,
			IdleTimeout:             l.IdleTimeout,
			HalfOpenTimeout:         l.HalfOpenTimeout,
			KeepAlive:               proxy.KeepAlive{Idle: l.KeepAlive.Idle, Interval: l.KeepAlive.Interval, Count: l.KeepAlive.Count},
			DrainTimeout:            l.DrainTimeout,
			ProxyProtocol:           l.ProxyProtocol.config(),
			Transparent:             l.Transparent,
		})
	}
	return cfg
}

// socket returns a table that was validated.
func (t unixTable) socket() proxy.UnixSocket {
	mode, _ := parseMode(t.Mode)
	return proxy.UnixSocket{Mode: mode, Owner: t.Owner, Group: t.Group, Unlink: t.Unlink}
}

// parseMode reads permissions in octal.
func parseMode(s string) (fs.FileMode, error) {
	n, err := strconv.ParseUint(s, 8, 32)
	if err != nil || n > 0o777 || len(s) > 4 {
		return 0, fmt.Errorf(`%q is not a mode: want octal digits in quotes, such as "0600" or "0660"`, s)
	}
	return fs.FileMode(n), nil
}

// networks returns a list that was validated.
func networks(list []string) (ns []proxy.Network) {
	for _, s := range list {
		if n, err := proxy.ParseNetwork(s); err == nil {
			ns = append(ns, n)
		}
	}
	return ns
}

// addresses returns the servers, each with its port.
func (t dnsTable) addresses() []string {
	var all []string
	for _, s := range t.Servers {
		a, _ := parseServer(s) // validate has seen the error
		all = append(all, a.String())
	}
	return all
}

// upstreams returns what the listener goes to, from either key.
func (l *listenerTable) upstreams() []string {
	if len(l.Upstreams) > 0 {
		return l.Upstreams
	}
	return []string{l.Upstream}
}

// spliceOptions returns the [bypass] table; the caller sets the logger.
func (fc *fileConfig) spliceOptions() splice.Options {
	o := splice.DefaultOptions()
	o.Cgroup = fc.Bypass.Cgroup
	o.Verdict = splice.Verdict(fc.Bypass.Verdict)
	o.Window = uint32(fc.Bypass.Window)
	o.QueueLimit = uint32(fc.Bypass.QueueLimit)
	o.MaxSockets = fc.Bypass.MaxSockets
	return o
}

// wantsBypass says whether the kernel path is to be set up at all.
func (fc *fileConfig) wantsBypass() bool {
	if fc.Bypass.Require {
		return true
	}
	for _, l := range fc.Listeners {
		if l.Bypass != string(proxy.BypassOff) {
			return true
		}
	}
	return false
}
