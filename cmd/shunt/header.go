package main

import (
	"slices"
	"strings"
	"time"

	"shunt/proxy"
)

type proxyProtocolTable struct {
	Send          string        `toml:"send"`
	Accept        string        `toml:"accept"`
	HeaderTimeout time.Duration `toml:"header_timeout"`
	Trusted       []string      `toml:"trusted"`
}

// trustUnix in proxy_protocol.trusted stands for the clients of a UNIX socket.
const trustUnix = "unix:"

var (
	headerVersions = []string{string(proxy.HeaderOff), string(proxy.HeaderV1), string(proxy.HeaderV2)}
	acceptModes    = map[bool]string{false: "off", true: "on"}
)

// validateAddresses checks what the listener does with the client's address
// and the one that it connected to.
func (l *listenerTable) validateAddresses(d *document, p keyPath) {
	l.ProxyProtocol.validate(d, p.with("proxy_protocol"))
	if strings.HasPrefix(l.Listen, "unix:") {
		if t := &l.ProxyProtocol; t.Accept == acceptModes[true] && len(t.Trusted) > 0 && !slices.Contains(t.Trusted, trustUnix) {
			d.errorf(p.with("proxy_protocol").with("trusted"), "want %q, since listen = %q is a UNIX socket", trustUnix, l.Listen)
		}
		if slices.Contains(l.upstreams(), proxy.OriginalDst) {
			d.errorf(p.with("upstream"), "%q: want a TCP address to listen on: nothing is redirected to a UNIX socket", proxy.OriginalDst)
		}
	} else if slices.Contains(l.ProxyProtocol.Trusted, trustUnix) {
		d.errorf(p.with("proxy_protocol").with("trusted"), "%q stands for the clients of a UNIX socket, and listen = %q is none", trustUnix, l.Listen)
	}
	if l.Health.Interval > 0 && slices.Contains(l.upstreams(), proxy.OriginalDst) {
		d.errorf(p.with("health").with("interval"), "upstream = %q has no addresses to check: want 0s", proxy.OriginalDst)
	}
	if l.Transparent && slices.ContainsFunc(l.upstreams(), func(u string) bool { return strings.HasPrefix(u, "unix:") }) {
		d.errorf(p.with("transparent"), "a UNIX upstream sees no address; proxy_protocol.send tells it")
	}
}

// validate checks proxy_protocol, which is at p.
func (t *proxyProtocolTable) validate(d *document, p keyPath) {
	oneOf(d, p.with("send"), t.Send, headerVersions...)
	oneOf(d, p.with("accept"), t.Accept, acceptModes[false], acceptModes[true])
	if v := t.HeaderTimeout; v < time.Millisecond || v > maxDuration {
		d.errorf(p.with("header_timeout"), "%v is out of range: want 1ms to %v", v, maxDuration)
	}
	for _, s := range t.Trusted {
		if s == trustUnix {
			continue
		}
		if _, err := proxy.ParseNetwork(s); err != nil {
			d.errorf(p.with("trusted"), "%v; %q stands for the clients of a UNIX socket", err, trustUnix)
		}
	}
	if t.Accept == acceptModes[true] && len(t.Trusted) == 0 {
		d.missing(p.with("trusted"), `want the networks that headers are accepted from, such as ["10.0.0.0/8"]`)
	}
}

// config returns what the proxy is to do; t is valid.
func (t *proxyProtocolTable) config() proxy.ProxyProtocol {
	pp := proxy.ProxyProtocol{
		Send: proxy.HeaderVersion(t.Send), Accept: t.Accept == acceptModes[true], HeaderTimeout: t.HeaderTimeout,
	}
	pp.TrustUnix = slices.Contains(t.Trusted, trustUnix)
	pp.Trusted = networks(t.Trusted) // which skips that word
	return pp
}
