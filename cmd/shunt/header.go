package main

import (
	"fmt"
	"net/netip"
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

// validate checks proxy_protocol, which is at p.
func (t *proxyProtocolTable) validate(d *document, p keyPath) error {
	if err := oneOf(d, p.with("send"), t.Send, headerVersions...); err != nil {
		return err
	}
	if err := oneOf(d, p.with("accept"), t.Accept, acceptModes[false], acceptModes[true]); err != nil {
		return err
	}
	if v := t.HeaderTimeout; v < time.Millisecond || v > maxDuration {
		return d.errorf(p.with("header_timeout"), "%v is out of range: want 1ms to %v", v, maxDuration)
	}
	for _, s := range t.Trusted {
		if s == trustUnix {
			continue
		}
		if _, err := parseNetwork(s); err != nil {
			return d.errorf(p.with("trusted"), `%v, or %q for the clients of a UNIX socket`, err, trustUnix)
		}
	}
	if t.Accept == acceptModes[true] && len(t.Trusted) == 0 {
		return d.errorf(p.with("trusted"), `empty: want the networks that headers may come from, such as ["10.0.0.0/8"]; clients elsewhere are reset`)
	}
	return nil
}

// config returns what the proxy is to do; t is valid.
func (t *proxyProtocolTable) config() proxy.ProxyProtocol {
	pp := proxy.ProxyProtocol{
		Send: proxy.HeaderVersion(t.Send), Accept: t.Accept == acceptModes[true], HeaderTimeout: t.HeaderTimeout,
	}
	for _, s := range t.Trusted {
		if s == trustUnix {
			pp.TrustUnix = true
		} else if n, err := parseNetwork(s); err == nil {
			pp.Trusted = append(pp.Trusted, n)
		}
	}
	return pp
}

// parseNetwork reads a network in CIDR form, or one address. IPv4 in IPv6
// form (::ffff:10.0.0.0/104) is the IPv4 network.
func parseNetwork(s string) (netip.Prefix, error) {
	const want = `want a network such as "10.0.0.0/8" or "fd00::/8", or an address`
	p, err := netip.ParsePrefix(s)
	if err != nil {
		a, aerr := netip.ParseAddr(s)
		if aerr != nil || a.Zone() != "" {
			return netip.Prefix{}, fmt.Errorf("%q: %s", s, want)
		}
		p = netip.PrefixFrom(a, a.BitLen())
	}
	if p.Addr().Is4In6() {
		if p.Bits() < 96 {
			return netip.Prefix{}, fmt.Errorf("%q: more than the IPv4 addresses; %s", s, want)
		}
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	if p != p.Masked() {
		return netip.Prefix{}, fmt.Errorf("%q: bits are set beyond the prefix: want %q", s, p.Masked())
	}
	return p, nil
}
