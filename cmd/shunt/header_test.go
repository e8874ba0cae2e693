package main

import (
	"strings"
	"testing"
)

func TestProxyProtocolErrorsSayWhatIsRight(t *testing.T) {
	for line, want := range map[string]string{
		`proxy_protocol = { send = "V1" }`:                           `did you mean "v1"?`,
		`proxy_protocol = { accept = "yes" }`:                        "want one of off, on",
		`proxy_protocol = { accept = true }`:                         "want a string in quotes",
		`proxy_protocol = { accept = "on" }`:                         "proxy_protocol.trusted: missing: want the networks",
		`proxy_protocol = { accept = "on", trusted = [] }`:           "proxy_protocol.trusted: missing: want the networks",
		`proxy_protocol = { header_timeout = "0s" }`:                 "want 1ms to",
		`proxy_protocol = { accept = "on", trusted = "10.0.0.0/8" }`: `did you mean ["10.0.0.0/8"]?`,
		`proxy_protocol = { trusted = ["10.0.0.1/8"] }`:              `did you mean "10.0.0.0/8"?`,
		`proxy_protocol = { trusted = ["10.0.0.0/33"] }`:             "want a length from 0 to 32",
		`proxy_protocol = { trusted = ["lb.internal"] }`:             "neither an address nor a network",
		`proxy_protocol = { trusted = ["::ffff:0.0.0.0/64"] }`:       "more than the v4-mapped addresses",
		`proxy_protocol = { trust = ["10.0.0.0/8"] }`:                `did you mean "trusted"?`,
	} {
		_, err := parseConfig("f", []byte(listener(line)))
		if err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "f:8: listener \"b\": proxy_protocol") {
			t.Errorf("%s\n%v\nwant %q", line, err, want)
		}
	}
	for _, line := range []string{
		`proxy_protocol = { }`,
		`proxy_protocol.send = "v1"`,
		`proxy_protocol = { accept = "on", trusted = ["0.0.0.0/0", "::/0"] }`,
		`proxy_protocol = { accept = "on", trusted = ["::ffff:10.0.0.0/104", "fd00::1"] }`,
		"[listener.proxy_protocol]\naccept = \"on\"\ntrusted = [\"127.0.0.1\"]",
	} {
		if _, err := parseConfig("f", []byte(listener(line))); err != nil {
			t.Errorf("%v for\n%s", err, line)
		}
	}
}

func TestAddressKeysThatCannotWorkTogether(t *testing.T) {
	for text, want := range map[string]string{
		"listen = \"unix:/s\"\nupstream = \"a:1\"\nproxy_protocol = { accept = \"on\", trusted = [\"10.0.0.0/8\"] }": `proxy_protocol.trusted: want "unix:"`,
		"listen = \":7000\"\nupstream = \"a:1\"\nproxy_protocol = { trusted = [\"unix:\"] }":                         `proxy_protocol.trusted: "unix:" stands for the clients of a UNIX socket, and listen = ":7000" is none`,
		"listen = \":7000\"\nupstream = \"original-dst\"\nhealth = { interval = \"1s\" }":                            `health.interval: upstream = "original-dst" has no addresses to check`,
		"listen = \"unix:/s\"\nupstream = \"original-dst\"":                                                          "upstream: \"original-dst\": want a TCP address to listen on",
		"listen = \":7000\"\nupstream = \"unix:/s\"\ntransparent = true":                                             "transparent: a UNIX upstream sees no address",
		"listen = \":7000\"\nupstreams = [\"original-dst\", \"a:1\"]":                                                `upstreams: "original-dst" can't be one of several`,
		"listen = \":7000\"\nupstream = \"original_dst\"":                                                            `or "original-dst"`,
	} {
		_, err := parseConfig("f", []byte("[[listener]]\n"+text+"\n"))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s\n%v\nwant %q", text, err, want)
		}
	}
	if _, err := parseConfig("f", []byte("[[listener]]\nlisten = \":7000\"\nupstream = \"original-dst\"\ntransparent = true\n")); err != nil {
		t.Error(err)
	}
}
