package proxy

import (
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestUpstreamForms(t *testing.T) {
	for _, good := range []string{
		"127.0.0.1:80", "[::1]:80", "[fe80::1%lo]:80", "db.internal:5432", "under_score:1", "unix:/run/a.sock", "unix:@name",
		"unix:/" + strings.Repeat("a", 106),
	} {
		if u, err := ParseUpstream(good); err != nil || u.String() != good {
			t.Errorf("%s: %v, %v", good, u, err)
		}
	}
	for bad, want := range map[string]string{
		"":                                  "want host:port",
		"a":                                 "want host:port",
		":80":                               "want host:port",
		"http://a:80":                       "want host:port",
		"a b:80":                            "want host:port",
		strings.Repeat("a", 254) + ":80":    "want host:port",
		"a:0":                               "want a number from 1 to 65535",
		"a:http":                            "want a number from 1 to 65535",
		"unix:":                             "want unix: and an absolute path",
		"unix:@":                            "want unix: and an absolute path",
		"unix:a.sock":                       "want unix: and an absolute path",
		"unix:/a\x00b":                      "want unix: and an absolute path",
		"unix:/" + strings.Repeat("a", 107): "want unix: and an absolute path",
	} {
		if _, err := ParseUpstream(bad); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if u, _ := ParseUpstream("[::ffff:127.0.0.1]:80"); u.addr.String() != "127.0.0.1:80" {
		t.Errorf("v4-mapped address: %v", u.addr)
	}
}

func TestUnixUpstreamsAreCopied(t *testing.T) {
	for name, gone := range map[string]string{
		filepath.Join(t.TempDir(), "s"): "dial-missing", "@shunt-test-" + t.TempDir(): "dial-refused",
	} {
		ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		b := &fakeBypass{}
		r := newRig(t, b, onListener(func(l *Listener) { l.Upstream = "unix:" + name }))
		client := r.dial()
		ln.SetDeadline(time.Now().Add(deadline))
		service, err := ln.AcceptUnix()
		if err != nil {
			t.Fatal(err)
		}
		service.SetDeadline(time.Now().Add(deadline))
		send(t, client, []byte("question"))
		client.CloseWrite()
		expect(t, service, "question")
		expectEOF(t, service)
		send(t, service, []byte("answer"))
		service.Close()
		expect(t, client, "answer")
		expectEOF(t, client)
		r.ended(causeClientFIN)
		if n := r.metrics()[`shunt_bypass_declined_total{listener="web",reason="unix"}`]; n != 1 {
			t.Errorf("declined: %v", n)
		}
		ln.Close()
		r.refused()
		r.ended(gone)
	}
}
