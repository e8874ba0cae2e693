package main

import (
	"bytes"
	"strings"
	"testing"
)

func TestLogEscapesWhatPeersChoose(t *testing.T) {
	for _, format := range []string{"json", "console"} {
		var out bytes.Buffer
		log := newLogger(logTable{Level: "info", Format: format}, &out)
		log.Info().Str("down", "unix:/a\n12:00:00 INF forged\r\x1b[31m\u202e\xff").Msg("connection")
		line, rest, _ := strings.Cut(out.String(), "\n")
		if rest != "" || strings.ContainsAny(line, "\r\x1b") || !strings.Contains(line, "connection") {
			t.Errorf("%s: %q", format, out.String())
		}
	}
}
