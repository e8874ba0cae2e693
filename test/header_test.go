//go:build linux

package test

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pires/go-proxyproto"
	"golang.org/x/sys/unix"

	. "shunt/test/harness"
)

// sendHeader and acceptHeader set the listener's proxy_protocol.
func sendHeader(version string) Option {
	return WithListener("proxy_protocol", fmt.Sprintf("{ send = %q }", version))
}

func acceptHeader(more string) Option {
	return WithListener("proxy_protocol", `{ accept = "on", trusted = ["127.0.0.0/8", "10.211.0.0/16"]`+more+" }")
}

const claimed = "192.0.2.1:4660"

// clientHeader is a header that claims an address, in either version.
func clientHeader(version byte) []byte {
	h := proxyproto.HeaderProxyFromAddrs(version, &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 4660}, &net.TCPAddr{IP: net.IPv4(198, 51, 100, 2), Port: 80})
	b, err := h.Format()
	if err != nil {
		panic(err)
	}
	return b
}

// readHeader reads the header that shunt sent, byte by byte, and returns the source in it.
func readHeader(c *net.TCPConn, version string) (string, error) {
	b := make([]byte, 16)
	if version == "v1" {
		for b = b[:0]; !bytes.HasSuffix(b, []byte("\n")); {
			b = append(b, 0)
			if _, err := io.ReadFull(c, b[len(b)-1:]); err != nil {
				return "", err
			}
		}
	} else {
		if _, err := io.ReadFull(c, b); err != nil {
			return "", err
		}
		rest := make([]byte, binary.BigEndian.Uint16(b[14:]))
		if _, err := io.ReadFull(c, rest); err != nil {
			return "", err
		}
		b = append(b, rest...)
	}
	h, err := proxyproto.Read(bufio.NewReader(bytes.NewReader(b)))
	if err != nil {
		return "", fmt.Errorf("header %q: %w", b, err)
	}
	if h.SourceAddr == nil {
		return "", nil
	}
	return h.SourceAddr.String(), nil
}

// crowd sends n messages of size bytes from each of several threads, and
// returns when all are sent.
func crowd(c *net.TCPConn, threads, n, size int) error {
	errs := make(chan error, threads)
	for i := range threads {
		go func() {
			b := bytes.Repeat([]byte{byte('a' + i)}, size)
			for range n {
				if _, err := c.Write(b); err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	var all []error
	for range threads {
		all = append(all, <-errs)
	}
	return errors.Join(all...)
}

// readCrowd reads what crowd sent.
func readCrowd(r io.Reader, threads, n, size int) error {
	b := make([]byte, threads*n*size)
	if _, err := io.ReadFull(r, b); err != nil {
		return err
	}
	for i := range threads {
		if got := bytes.Count(b, []byte{byte('a' + i)}); got != n*size {
			return fmt.Errorf("%d bytes of thread %d, want %d", got, i, n*size)
		}
	}
	return nil
}

func TestHeaderComesBeforeAnyPayload(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		for _, version := range []string{"v1", "v2"} {
			t.Run(version, func(t *testing.T) {
				t.Parallel()
				const threads, n, size, bulk, rounds = 4, 50, 100, 2 * mib, 15
				sources := make(chan string, rounds)
				s := Serve(t, func(c *net.TCPConn) error {
					source, err := readHeader(c, version)
					if err != nil {
						return err
					}
					sources <- source
					if err := readCrowd(c, threads, n, size); err != nil {
						return err
					}
					sent := make(chan error, 1)
					go func() { sent <- errors.Join(Send(c, 2, bulk, 64*kib, nil), c.CloseWrite()) }()
					return errors.Join(Receive(c, 1, bulk), <-sent)
				})
				f := Open(t, p, s.Addr, sendHeader(version))
				for range rounds {
					c, err := DialErr(nil, f.Addr)
					if err != nil {
						t.Fatal(err)
					}
					if err := crowd(c, threads, n, size); err != nil {
						t.Fatal(err)
					}
					sent := make(chan error, 1)
					go func() { sent <- errors.Join(Send(c, 1, bulk, 64*kib, nil), c.CloseWrite()) }()
					if err := errors.Join(Receive(c, 2, bulk), <-sent); err != nil {
						t.Fatal(err)
					}
					if got := <-sources; got != c.LocalAddr().String() {
						t.Errorf("the header says %q, the client is %v", got, c.LocalAddr())
					}
					c.Close()
				}
				f.CheckPath(t, rounds*(threads*n*size+bulk), rounds*bulk, 0.3)
			})
		}
	})
}

func TestServerThatSpeaksFirstGetsItsHeader(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		s := Serve(t, func(c *net.TCPConn) error {
			if _, err := c.Write([]byte("220 hello\r\n")); err != nil {
				return err
			}
			if _, err := readHeader(c, "v2"); err != nil {
				return err
			}
			return echo(c)
		})
		f := Open(t, p, s.Addr, sendHeader("v2"))
		for range 20 {
			c, err := DialErr(nil, f.Addr)
			if err != nil {
				t.Fatal(err)
			}
			greeting := make([]byte, 11)
			if _, err := io.ReadFull(c, greeting); err != nil || string(greeting) != "220 hello\r\n" {
				t.Fatalf("read %q, %v", greeting, err)
			}
			if err := converse(c, 20, 1000); err != nil {
				t.Fatal(err)
			}
			c.Close()
		}
		f.CheckPath(t, 400_000, 400_220, 0.3)
	})
}

func TestClientsOwnHeaderDoesNotKeepItOffTheBypass(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		sources := make(chan string, 1)
		s := Serve(t, func(c *net.TCPConn) error {
			source, err := readHeader(c, "v1")
			if err != nil {
				return err
			}
			sources <- source
			return echo(c)
		})
		f := Open(t, p, s.Addr, acceptHeader(`, send = "v1"`))
		for i := range 20 {
			c, err := DialErr(nil, f.Addr)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.Write(clientHeader(byte(1 + i%2))); err != nil {
				t.Fatal(err)
			}
			if err := converse(c, 20, 1000); err != nil {
				t.Fatal(err)
			}
			if got := <-sources; got != claimed {
				t.Errorf("the service is told %q, want %q", got, claimed)
			}
			c.Close()
		}
		f.CheckPath(t, 400_000, 400_000, 0.3)
	})
}

func TestHeaderGoesThroughTwoShunts(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		sources := make(chan string, 1)
		s := Serve(t, func(c *net.TCPConn) error {
			source, err := readHeader(c, "v1")
			if err != nil {
				return err
			}
			sources <- source
			return echo(c)
		})
		inner := Open(t, p, s.Addr, acceptHeader(`, send = "v1"`))
		outer := Open(t, p, inner.Addr, sendHeader("v2"))
		for range 10 {
			c, err := DialErr(nil, outer.Addr)
			if err != nil {
				t.Fatal(err)
			}
			if err := converse(c, 20, 1000); err != nil {
				t.Fatal(err)
			}
			if got := <-sources; got != c.LocalAddr().String() {
				t.Errorf("the service is told %q, the client is %v", got, c.LocalAddr())
			}
			c.Close()
		}
		// A socket can't be in two bypasses: one of them copies.
		inner.CheckPath(t, 200_000, 200_000, 0)
		outer.CheckPath(t, 200_000, 200_000, 0)
	})
}

// sent waits until the peer's kernel has what was written to c.
func sent(c *net.TCPConn) error {
	return Poll(5*time.Second, func() error {
		return Raw(c, func(fd int) error {
			n, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
			if err == nil && n > 0 {
				err = fmt.Errorf("%d bytes aren't acknowledged", n)
			}
			return err
		})
	})
}

func TestHeaderInPieces(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		f := Open(t, p, Serve(t, echo).Addr, acceptHeader(""))
		rounds := int64(0)
		for version := byte(1); version <= 2; version++ {
			header := clientHeader(version)
			for i := 1; i <= len(header); i++ {
				c, err := DialErr(nil, f.Addr)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := c.Write(header[:i]); err != nil {
					t.Fatal(err)
				}
				if err := sent(c); err != nil {
					t.Fatal(err)
				}
				payload := []byte("payload that comes with the rest")
				if _, err := c.Write(append(bytes.Clone(header[i:]), payload...)); err != nil {
					t.Fatal(err)
				}
				got := make([]byte, len(payload))
				if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, payload) {
					t.Fatalf("v%d in pieces of %d and %d bytes: read %q, %v", version, i, len(header)-i, got, err)
				}
				c.Close()
				rounds += int64(len(payload))
			}
		}
		f.CheckPath(t, rounds, rounds, 0)
	})
}

func TestHostileHeadersLeaveNothingBehind(t *testing.T) {
	// What they leave would be found when shunt is checked at the end of the test.
	EachShuntPath(t, func(t *testing.T, p Path) {
		s := Serve(t, func(c *net.TCPConn) error { return errors.New("a client without a good header was let through") })
		f := Open(t, p, s.Addr, acceptHeader(`, header_timeout = "300ms"`))
		v2 := clientHeader(2)
		bad := [][]byte{
			[]byte("GET / HTTP/1.1\r\n\r\n"),
			[]byte("PROXY TCP4 192.0.2.1 198.51.100.2 1 2\n"),
			[]byte("PROXY TCP4 192.0.2.1 198.51.100.2 1 99999\r\n"),
			[]byte("PROXY UNKNOWN" + strings.Repeat(" x", 100)),
			append(bytes.Clone(v2[:12]), 0x11, 0x11, 0, 12),
			append(bytes.Clone(v2[:12]), 0x21, 0x11, 0xff, 0xff),
			append(bytes.Clone(v2[:12]), 0x21, 0x11, 0, 1, 'x'),
		}
		const workers, each = 8, 125
		var wg sync.WaitGroup
		for w := range workers {
			wg.Go(func() {
				for i := range each {
					c, err := DialErr(nil, f.Addr)
					if err != nil {
						t.Error(err)
						return
					}
					b := bad[(w+i)%len(bad)]
					_, err = c.Write(b)
					if err == nil {
						_, err = c.Read(make([]byte, 1))
					}
					if !IsReset(err) {
						t.Errorf("%q: %v, want a reset", b, err)
					}
					c.Close()
				}
			})
		}
		wg.Wait()
		// One that begins well and stops.
		c := f.Dial(t)
		if _, err := c.Write(v2[:20]); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); !IsReset(err) {
			t.Errorf("half a header: %v, want a reset", err)
		}
		Until(t, 5*time.Second, "causes", func() error {
			m, err := f.Shunt.Metrics()
			if err != nil {
				return err
			}
			bad, late := m.Sum("shunt_connections_ended_total", "cause", "bad-header"), m.Sum("shunt_connections_ended_total", "cause", "header-timeout")
			if bad != workers*each || late != 1 {
				return fmt.Errorf("counted %v bad and %v late headers", bad, late)
			}
			return nil
		})
	})
}

func TestUntrustedSourceIsReset(t *testing.T) {
	EachShuntPath(t, func(t *testing.T, p Path) {
		s := Serve(t, func(c *net.TCPConn) error { return errors.New("an untrusted client was let through") })
		f := Open(t, p, s.Addr, WithListener("proxy_protocol", `{ accept = "on", trusted = ["192.0.2.0/24"] }`))
		// The reset may come before the client knows that it is connected.
		c, err := DialErr(nil, f.Addr)
		if err == nil {
			defer c.Close()
			if _, err = c.Write(clientHeader(1)); err == nil {
				_, err = c.Read(make([]byte, 1))
			}
		}
		if !IsReset(err) {
			t.Errorf("%v, want a reset", err)
		}
		Until(t, 5*time.Second, "cause", func() error {
			m, err := f.Shunt.Metrics()
			if err == nil && m.Sum("shunt_connections_ended_total", "cause", "untrusted") != 1 {
				err = errors.New("not counted")
			}
			return err
		})
	})
}
