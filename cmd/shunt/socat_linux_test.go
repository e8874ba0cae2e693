package main

import (
	"io"
	"strings"
	"testing"
)

// TestWhatIsDirect: everything that takes more than a connect(2), or is logged on the way, goes through the dialler.
func TestWhatIsDirect(t *testing.T) {
	for _, c := range []struct {
		line   string
		direct bool
	}{
		{"TCP-LISTEN:1,fork TCP:127.0.0.1:9", true},
		{"TCP-LISTEN:1,fork TCP6:[::1]:9", true},
		{"TCP-LISTEN:1,fork TCP:127.0.0.1:9,nodelay,sndbuf=8192,retry=3,forever,interval=1,connect-timeout=2", true},
		{"-d TCP-LISTEN:1,fork TCP:127.0.0.1:9", true},
		{"-d -d TCP-LISTEN:1,fork TCP:127.0.0.1:9", false},
		{"TCP-LISTEN:1,fork TCP:localhost:9", false},
		{"TCP-LISTEN:1,fork TCP:127.0.0.1:http", false},
		{"TCP-LISTEN:1,fork TCP:[::1]:9,pf=ip4", false},
		{"TCP-LISTEN:1,fork TCP:127.0.0.1:9,bind=127.0.0.2", false},
		{"TCP-LISTEN:1,fork TCP:127.0.0.1:9,sourceport=77", false},
		{"TCP-LISTEN:1,fork TCP:127.0.0.1:9,lowport", false},
		{"TCP-LISTEN:1,fork TCP:127.0.0.1:9,netns=x", false},
		{"TCP-LISTEN:1,fork TCP:127.0.0.1:9,linger=3", false},
		{"TCP-LISTEN:1,fork,linger=3 TCP:127.0.0.1:9", false},
		{"TCP-LISTEN:1,fork,setsockopt=1:13:i1 TCP:127.0.0.1:9", false},
		{"TCP-LISTEN:1,fork TCP:127.0.0.1:9,so-bindtodevice=lo", false},
		{"TCP-LISTEN:1,fork TCP:127.0.0.1:9,ip-transparent", false},
		{"TCP-LISTEN:1,fork TCP:127.0.0.1:9,keepidle=5", false},
		{"TCP-LISTEN:1,fork UNIX:/x", false},
	} {
		line, err := parseSocatLine(strings.Fields(c.line))
		if err != nil {
			t.Errorf("%s: %v", c.line, err)
			continue
		}
		log := newSocatLog(io.Discard, "socat")
		log.level = line.level
		f := &forwarding{line: line, log: log, down: line.left, up: line.right}
		if got := f.direct() != nil; got != c.direct {
			t.Errorf("%s: direct %v, want %v", c.line, got, c.direct)
		}
	}
}
