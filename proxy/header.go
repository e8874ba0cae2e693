package proxy

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/pires/go-proxyproto"

	"shunt/splice"
)

// HeaderVersion is the version of the PROXY protocol whose header goes to an upstream.
type HeaderVersion string

const (
	// HeaderOff sends none.
	HeaderOff HeaderVersion = "off"
	// HeaderV1 is the line of text.
	HeaderV1 HeaderVersion = "v1"
	// HeaderV2 is the binary header.
	HeaderV2 HeaderVersion = "v2"
)

// ProxyProtocol says what a listener does with the PROXY protocol's header
// (https://www.haproxy.org/download/3.4/doc/proxy-protocol.txt). A header is no
// payload: no counter of bytes includes it.
type ProxyProtocol struct {
	// Send is the header that upstreams get before anything else; empty: off.
	Send HeaderVersion
	// Accept demands a header, of either version, of each client: a connection without one is reset.
	Accept bool
	// HeaderTimeout bounds how long a client may take for the whole of it.
	HeaderTimeout time.Duration
	// Trusted is where clients may connect from, with Accept; all others are reset.
	Trusted []Network
	// TrustUnix adds the clients of a UNIX listening socket.
	TrustUnix bool
}

// Limits of a header, in bytes.
const (
	maxHeaderV1  = 107
	fixedV2      = 16   // what stands before the length that a v2 header gives
	maxHeaderV2  = 4096 // of that length
	usualHeader  = 256  // v1, and v2 without many TLVs
	tlvHeader    = 3
	lengthOfCRC  = 4
	commandProxy = 1
)

// head is what a connection has ahead of its payload, in and out. Its fields
// are set before the upstream is dialled, but lost.
type head struct {
	source, dest netip.AddrPort // as the client's header says; invalid where it doesn't
	original     netip.AddrPort // where the client wanted to, with OriginalDst
	tlvs         []proxyproto.TLV
	taken        uint64 // bytes of the client's header
	first        []byte // the header for the upstream, until it is written
	lost         error  // why it couldn't be
}

var (
	errHeader    = errors.New("no PROXY header")
	castagnoli   = crc32.MakeTable(crc32.Castagnoli)
	signatureV1  = []byte("PROXY ")
	addressBytes = map[byte]int{1: 12, 2: 36, 3: 216} // of a v2 header, by address family
)

// headerLength returns the length of the header that b begins with, or 0
// while b is too short to say. An error means that it is none.
func headerLength(b []byte) (int, error) {
	prefix := func(sig []byte) bool { return bytes.Equal(b[:min(len(b), len(sig))], sig[:min(len(b), len(sig))]) }
	switch {
	case prefix(signatureV1):
		b = b[:min(len(b), maxHeaderV1)]
		if i := bytes.IndexByte(b, '\n'); i >= 0 {
			return i + 1, nil
		}
		if len(b) == maxHeaderV1 {
			return 0, fmt.Errorf("%w: no end of line within %d bytes", errHeader, maxHeaderV1)
		}
	case prefix(proxyproto.SIGV2):
		if n := len(proxyproto.SIGV2); len(b) > n && b[n]>>4 != 2 {
			return 0, fmt.Errorf("%w: version %d", errHeader, b[n]>>4)
		}
		if len(b) < fixedV2 {
			return 0, nil
		}
		n := int(binary.BigEndian.Uint16(b[fixedV2-2:]))
		if n > maxHeaderV2 {
			return 0, fmt.Errorf("%w: %d bytes, more than %d", errHeader, n, maxHeaderV2)
		}
		return fixedV2 + n, nil
	default:
		return 0, fmt.Errorf("%w: begins with %q", errHeader, b[:min(len(b), 12)])
	}
	return 0, nil
}

// parse takes in a whole header. Where it gives no address of a TCP client,
// the connection's own is what counts.
func (h *head) parse(b []byte) error {
	var tlvs []byte
	if b[0] == proxyproto.SIGV2[0] {
		command, family, transport := b[12]&0xf, b[13]>>4, b[13]&0xf
		switch {
		case command == 0:
			// LOCAL: everything else is to be ignored, whatever it is. The library would look at the family.
			return nil
		case command != commandProxy, family > 3, transport > 2:
			return fmt.Errorf("%w: command %#x, family %#x", errHeader, b[12], b[13])
		case family == 0 || transport == 0:
			// The library refuses what the specification asks to accept.
			return nil
		}
		tlvs = b[min(len(b), fixedV2+addressBytes[family]):]
		if err := checkCRC(b, tlvs); err != nil {
			return err
		}
	}
	// From memory: the library takes a v1 line only when it comes in one piece.
	p, err := proxyproto.Read(bufio.NewReaderSize(bytes.NewReader(b), len(b)))
	if err != nil {
		return fmt.Errorf("%w: %w", errHeader, err)
	}
	if src, dst, ok := p.TCPAddrs(); ok && !src.IP.IsUnspecified() {
		h.source, h.dest = addrOf(src), addrOf(dst)
	}
	h.tlvs, err = p.TLVs()
	if err != nil {
		return fmt.Errorf("%w: %w", errHeader, err)
	}
	// These two belong to that one header.
	h.tlvs = slices.DeleteFunc(h.tlvs, func(t proxyproto.TLV) bool {
		return t.Type == proxyproto.PP2_TYPE_CRC32C || t.Type == proxyproto.PP2_TYPE_NOOP
	})
	return nil
}

// checkCRC verifies the checksum in header's TLVs, if there is one; tlvs is
// the end of header.
func checkCRC(header, tlvs []byte) error {
	seen := false
	for len(tlvs) >= tlvHeader {
		n := int(binary.BigEndian.Uint16(tlvs[1:]))
		if len(tlvs) < tlvHeader+n {
			break // the library says so
		}
		if proxyproto.PP2Type(tlvs[0]) == proxyproto.PP2_TYPE_CRC32C {
			if n != lengthOfCRC || seen {
				return fmt.Errorf("%w: malformed checksum", errHeader)
			}
			seen = true
			at := len(header) - len(tlvs) + tlvHeader
			sum := crc32.Update(0, castagnoli, header[:at])
			sum = crc32.Update(sum, castagnoli, make([]byte, lengthOfCRC))
			sum = crc32.Update(sum, castagnoli, header[at+lengthOfCRC:])
			if sum != binary.BigEndian.Uint32(header[at:]) {
				return fmt.Errorf("%w: wrong checksum", errHeader)
			}
		}
		tlvs = tlvs[tlvHeader+n:]
	}
	return nil
}

// format returns the header that says src and dst; addresses that aren't
// TCP's are invalid, and then it says that nothing is known.
func format(v HeaderVersion, src, dst netip.AddrPort, tlvs []proxyproto.TLV) ([]byte, error) {
	version := byte(2)
	if v == HeaderV1 {
		version = 1
	}
	var from, to net.Addr
	if src.IsValid() && dst.IsValid() {
		from, to = net.TCPAddrFromAddrPort(src), net.TCPAddrFromAddrPort(dst)
	}
	h := proxyproto.HeaderProxyFromAddrs(version, from, to)
	if version == 2 {
		if err := h.SetTLVs(tlvs); err != nil {
			return nil, err
		}
	}
	return h.Format()
}

// needsHead says that a connection has something ahead of its payload.
func (l *listener) needsHead() bool {
	return l.cfg.ProxyProtocol.Accept || l.cfg.ProxyProtocol.sends() || l.original
}

func (p *ProxyProtocol) sends() bool { return p.Send == HeaderV1 || p.Send == HeaderV2 }

// trusts says whether a header may come from the address.
func (p *ProxyProtocol) trusts(a net.Addr) bool {
	if _, ok := a.(*net.UnixAddr); ok {
		return p.TrustUnix
	}
	return anyContains(p.Trusted, addrOf(a).Addr())
}

// source is the client's address: what its header says, or else the
// connection's own; invalid where it isn't TCP. It is known once the header has been read.
func (c *conn) source() netip.AddrPort {
	if c.head != nil && c.head.source.IsValid() {
		return c.head.source
	}
	return addrOf(c.down().RemoteAddr())
}

// client is source for people.
func (c *conn) client() string {
	if p := c.source(); p.IsValid() {
		return p.String()
	}
	return addrString(c.down().RemoteAddr())
}

// readHead reads the client's header where the listener wants one, finds out
// where the client wanted to, and prepares the upstream's header. On an error
// the cause is set.
func (c *conn) readHead() error {
	pp := &c.l.cfg.ProxyProtocol
	h := &head{}
	if pp.Accept {
		if !pp.trusts(c.down().RemoteAddr()) {
			return c.refuseHead(causeUntrusted, fmt.Errorf("%v isn't in proxy_protocol.trusted", addrString(c.down().RemoteAddr())))
		}
		c.down().SetReadDeadline(time.Now().Add(pp.HeaderTimeout))
		b, err := readHeader(c.down())
		h.taken = uint64(len(b))
		if err == nil {
			err = h.parse(b)
		}
		switch {
		case err == nil:
			c.down().SetReadDeadline(time.Time{})
		case errors.Is(err, os.ErrDeadlineExceeded):
			return c.refuseHead(causeHeaderTimeout, fmt.Errorf("no PROXY header within %v, only %d bytes", pp.HeaderTimeout, len(b)))
		case errors.Is(err, errHeader), err == io.EOF && len(b) > 0:
			return c.refuseHead(causeBadHeader, err)
		default:
			// It left, or we close it.
			c.end(causeOf(false, endOf(err)), err)
			return err
		}
	}
	if c.l.original {
		var err error
		if h.original, err = c.originalDst(); err != nil {
			c.end("dial-"+dialLoop, err)
			c.l.dialFailed(dialLoop)
			c.l.srv.dialWarn(c.l, dialLoop, err)
			return err
		}
	}
	if pp.sends() {
		src, dst := h.source, h.dest
		if !src.IsValid() {
			src, dst = addrOf(c.down().RemoteAddr()), h.original
			if !dst.IsValid() {
				dst = addrOf(c.down().LocalAddr())
			}
		}
		var err error
		if h.first, err = format(pp.Send, src, dst, h.tlvs); err != nil {
			return c.refuseHead(causeBadHeader, err)
		}
	}
	c.mu.Lock()
	c.head = h
	c.mu.Unlock()
	return nil
}

// refuseHead notes and logs why a connection is refused, and returns err.
func (c *conn) refuseHead(cause string, err error) error {
	c.end(cause, err)
	if n, ok := c.l.headLog.allow(); ok {
		suppressed(c.l.log.Warn(), n).Err(err).Str("cause", cause).Str("down", addrString(c.down().RemoteAddr())).
			Msg("connection refused for its PROXY header")
	}
	return err
}

// end notes why a connection that never started ends.
func (c *conn) end(cause string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.blame(cause)
	if c.err == nil {
		c.err = err
	}
}

// readHeader reads a header from s and nothing that comes after it. It
// returns what it has read also when it gives up.
func readHeader(s Stream) ([]byte, error) {
	b, n := make([]byte, usualHeader), 0
	for {
		var full int
		var bad error
		m, err := readSome(s, b[n:], func(more []byte) int {
			full, bad = headerLength(b[:n+len(more)])
			if bad == nil && full > 0 {
				return min(full-n, len(more))
			}
			return len(more)
		})
		n += m
		switch {
		case bad != nil:
			return b[:n], bad
		case err != nil:
			return b[:n], err
		case full > 0 && n == full:
			return b[:n], nil
		case full > len(b):
			b = append(b[:n], make([]byte, full-n)...)
		}
	}
}

// ahead is what the bypass must know of the connection's head.
func (c *conn) ahead() splice.Ahead {
	if c.head == nil {
		return splice.Ahead{}
	}
	return splice.Ahead{Taken: c.head.taken, First: c.head.first}
}

// taken is how many bytes of direction d's sender are no payload.
func (c *conn) taken(d splice.Direction) uint64 {
	if c.head == nil || d != splice.Up {
		return 0
	}
	return c.head.taken
}

// sendHead writes the header for the upstream of a connection that is copied.
// A fresh socket has room for it. An error comes out as the upstream's, once
// its direction is moved: what the upstream has sent is still delivered.
func (c *conn) sendHead() {
	if h := c.head; h != nil && len(h.first) > 0 {
		_, h.lost = c.legs[1].sock.Write(h.first)
		h.first = nil
	}
}

// lostHead is why direction d can't begin.
func (c *conn) lostHead(d splice.Direction) error {
	if c.head == nil || d != splice.Up {
		return nil
	}
	return c.head.lost
}

// readOne is readSome for streams that can't be looked into.
func readOne(s Stream, b []byte, want func(b []byte) int) (n int, err error) {
	if n, err = s.Read(b[:1]); n > 0 {
		want(b[:n])
		return n, nil
	}
	return 0, err
}
