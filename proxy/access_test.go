//go:build linux

package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"shunt/test/harness"
)

// readmeTable returns the words in backquotes in the first column of the table
// whose head is head.
func readmeTable(t *testing.T, head string) (words []string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(b), "\n| "+head+" | meaning |\n|---|---|\n")
	if !found {
		t.Fatalf("no table of %s", head)
	}
	for line := range strings.Lines(table) {
		if !strings.HasPrefix(line, "|") {
			break
		}
		first, _, _ := strings.Cut(line[1:], "|")
		for _, w := range regexp.MustCompile("`[^`]*`").FindAllString(first, -1) {
			words = append(words, strings.Trim(w, "`"))
		}
	}
	return words
}

func TestREADMEHasEveryEndAndField(t *testing.T) {
	for head, want := range map[string][]string{"end": allCauses(), "field": accessFields} {
		got := readmeTable(t, head)
		slices.Sort(got)
		want = slices.Clone(want)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("README's table of %s has\n%q\nthe code\n%q", head, got, want)
		}
	}
}

// accessLine is the only line of the access log, and its fields in their order.
func (r *rig) accessLine() (fields map[string]any, order []string) {
	r.t.Helper()
	var line string
	eventually(r.t, "line of the access log", func() bool {
		for l := range strings.Lines(r.log.String()) {
			if strings.Contains(l, `"message":"connection"}`) {
				line = l
				return true
			}
		}
		return false
	})
	if err := json.Unmarshal([]byte(line), &fields); err != nil {
		r.t.Fatalf("%v: %s", err, line)
	}
	d := json.NewDecoder(bytes.NewReader([]byte(line)))
	d.Token() // {
	for d.More() {
		key, err := d.Token()
		if err != nil {
			r.t.Fatal(err)
		}
		d.Token() // no value is an object
		if k := key.(string); k != "level" && k != "message" {
			order = append(order, k)
		}
	}
	return fields, order
}

// failing is a leg whose Read fails.
type failing struct {
	Stream
	err error
}

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// failingListener accepts failing clients.
type failingListener struct {
	net.Listener
	err error
}

func (l failingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return failing{c.(Stream), l.err}, nil
}

// failingClients makes reading from clients fail, failingService from the upstream.
func failingClients(err error) option {
	return onListener(func(l *Listener) {
		l.ListenFunc = func(ctx context.Context) (net.Listener, error) {
			ln, lerr := net.Listen("tcp", "127.0.0.1:0")
			return failingListener{ln, err}, lerr
		}
	})
}

func failingService(err error) option {
	return onListener(func(l *Listener) {
		to := l.Upstream
		l.DialFunc = func(ctx context.Context, _ uint64, _ Stream, _ ControlFunc) (Stream, error) {
			c, derr := (&net.Dialer{}).DialContext(ctx, "tcp", to)
			if derr != nil {
				return nil, derr
			}
			return failing{c.(Stream), err}, nil
		}
	})
}

func upstreamAt(addr string) option { return onListener(func(l *Listener) { l.Upstream = addr }) }

func failingDial(err error) option {
	return onListener(func(l *Listener) {
		l.DialFunc = func(context.Context, uint64, Stream, ControlFunc) (Stream, error) { return nil, err }
	})
}

func acceptHeaders(trusted string) option {
	return onListener(func(l *Listener) {
		l.ProxyProtocol.Accept, l.ProxyProtocol.HeaderTimeout = true, 50*time.Millisecond
		l.ProxyProtocol.Trusted = nets(trusted)
	})
}

func checkedEvery(interval time.Duration) option {
	return onListener(func(l *Listener) { l.Health.Interval = interval })
}

// TestEveryEndHasItsWord provokes each cause, where bytes are copied and where they are bypassed.
func TestEveryEndHasItsWord(t *testing.T) {
	connect := func(r *rig) {
		c, err := net.DialTimeout("tcp", r.addr, deadline)
		if err != nil {
			return // the end came before connect(2) returned
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(deadline))
		c.Read(make([]byte, 1))
	}
	shutdown := func(r *rig, ctx context.Context) {
		r.touch(r.pair())
		r.srv.Shutdown(ctx)
	}
	canceled, cancel := context.WithCancel(context.Background())
	cancel()
	hole := harness.BlackHole(t)
	odd := errors.New("odd")
	table := map[string]struct {
		set     option
		provoke func(r *rig)
	}{
		causeClientFIN: {nil, func(r *rig) {
			client, service := r.pair()
			client.Close()
			expectEOF(t, service)
			service.Close()
		}},
		causeServerFIN: {nil, func(r *rig) {
			client, service := r.pair()
			service.Close()
			expectEOF(t, client)
			client.Close()
		}},
		causeClientRST: {nil, func(r *rig) {
			client, service := r.pair()
			r.touch(client, service)
			reset(client)
			expectReset(t, service)
		}},
		causeServerRST: {nil, func(r *rig) {
			client, service := r.pair()
			r.touch(client, service)
			reset(service)
			expectReset(t, client)
		}},
		causeClientLost:  {failingClients(syscall.ETIMEDOUT), connect},
		causeServerLost:  {failingService(syscall.EHOSTUNREACH), connect},
		causeClientError: {failingClients(odd), connect},
		causeServerError: {failingService(odd), connect},
		causeIdle:        {onListener(func(l *Listener) { l.IdleTimeout = 50 * time.Millisecond }), func(r *rig) { r.pair() }},
		causeHalfOpen: {onListener(func(l *Listener) { l.HalfOpenTimeout = 50 * time.Millisecond }), func(r *rig) {
			client, service := r.pair()
			client.CloseWrite()
			expectEOF(t, service)
		}},
		causeDrain: {onListener(func(l *Listener) { l.DrainTimeout = 50 * time.Millisecond }), func(r *rig) { shutdown(r, context.Background()) }},
		causeStop:  {nil, func(r *rig) { shutdown(r, canceled) }},

		causeUntrusted: {acceptHeaders("192.0.2.1"), connect},
		causeBadHeader: {acceptHeaders("127.0.0.0/8"), func(r *rig) {
			c := r.dial()
			send(t, c, []byte("GET / HTTP/1.1\r\n"))
			io.Copy(io.Discard, c)
		}},
		causeHeaderTimeout: {acceptHeaders("127.0.0.0/8"), connect},

		causeNoUpstream: {checkedEvery(10 * time.Millisecond), func(r *rig) {
			r.svc.Close()
			eventually(r.t, "failed check", func() bool { return r.pool().refuses() })
			connect(r)
		}},

		"dial-refused":  {nil, func(r *rig) { r.svc.Close(); r.refused() }},
		"dial-missing":  {upstreamAt("unix:" + filepath.Join(t.TempDir(), "none")), connect},
		"dial-timeout":  {onListener(func(l *Listener) { l.Upstream, l.DialTimeout = hole, 50*time.Millisecond }), connect},
		"dial-resolve":  {upstreamAt("no..name:80"), connect},
		"dial-no-route": {upstreamAt("224.0.0.1:9"), connect},
		"dial-limit":    {failingDial(syscall.EMFILE), connect},
		"dial-loop":     {upstreamAt(OriginalDst), connect},
		"dial-family":   {failingDial(errFamily), connect},
		"dial-other":    {failingDial(odd), connect},
	}
	for _, cause := range allCauses() {
		if _, ok := table[cause]; !ok {
			t.Errorf("nothing provokes %q: it needs a row here", cause)
		}
	}
	for cause, c := range table {
		for name, b := range map[string]Bypass{"copy": nil, "bypass": &fakeBypass{}} {
			t.Run(cause+"/"+name, func(t *testing.T) {
				var opts []option
				if c.set != nil {
					opts = append(opts, c.set)
				}
				r := newRig(t, b, opts...)
				c.provoke(r)
				fields, order := r.accessLine()
				if fields["end"] != cause {
					t.Errorf("ended by %q, want %q", fields["end"], cause)
				}
				at := 0
				for _, f := range order {
					i := slices.Index(accessFields[at:], f)
					if i < 0 {
						t.Fatalf("field %s isn't where it belongs: %q", f, order)
					}
					at += i + 1
				}
				_, connected := fields["up"]
				if none := fields["upstream_path"] == "none" && fields["downstream_path"] == "none"; connected == none {
					t.Errorf("connected: %v, but %v", connected, fields)
				}
				if _, dialled := fields["dial_ms"]; dialled != (connected || strings.HasPrefix(cause, "dial-") && cause != "dial-loop") {
					t.Errorf("dial_ms: %v of %v", dialled, fields)
				}
			})
		}
	}
}
