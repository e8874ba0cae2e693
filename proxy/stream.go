package proxy

import (
	"context"
	"net"
	"net/netip"
	"syscall"

	"shunt/splice"
)

// Stream is one leg of a connection: a *net.TCPConn, a *net.UnixConn, or
// anything else that carries bytes both ways and can end one way by itself.
// Streams that are syscall.Conn must be sockets or files of the runtime's
// poller with working read deadlines. Only two TCP connections are bypassed.
type Stream interface {
	net.Conn
	// CloseWrite ends the direction toward the peer.
	CloseWrite() error
}

// ControlFunc registers a TCP socket with the bypass before it connects; it is called
// for one socket at a time.
type ControlFunc = func(network, address string, c syscall.RawConn) error

// ListenFunc opens a listening socket. Its Accept returns Streams.
type ListenFunc func(ctx context.Context) (net.Listener, error)

// DialFunc connects a connection's upstream within ctx. A TCP socket is given to
// control, where that isn't nil, before it connects. The goroutine that it runs in serves other connections later: it must
// not leave its thread locked.
type DialFunc func(ctx context.Context, conn uint64, down Stream, control ControlFunc) (Stream, error)

// Direct is an upstream that can be connected without waiting, since nothing has to be looked up.
type Direct struct {
	// Addr is on the loopback interface; others are left to DialFunc.
	Addr netip.AddrPort
	// Prepare and Connected, unless nil, set options on the socket before and after it is connected. They must not wait. After an
	// error the socket is closed, and DialFunc called.
	Prepare, Connected func(fd int) error
}

// Way is the directions that carry bytes.
type Way uint8

const (
	// BothWays is an ordinary connection.
	BothWays Way = iota
	// OnlyUp carries bytes from the client toward the upstream alone.
	OnlyUp
	// OnlyDown carries bytes from the upstream toward the client alone.
	OnlyDown
)

func (w Way) carries(d splice.Direction) bool {
	return w == BothWays || (w == OnlyUp) == (d == splice.Up)
}

// FINPolicy is what becomes of an end toward a leg when the other leg has finished.
type FINPolicy uint8

const (
	// PassFIN finishes sending on the leg.
	PassFIN FINPolicy = iota
	// KeepFIN leaves the leg as it is: its peer isn't told.
	KeepFIN
	// CloseOnFIN closes the leg, and with it the connection.
	CloseOnFIN
)

// LegPolicy is how the ends of one leg are treated.
type LegPolicy struct {
	// IgnoreFIN goes on after the leg's peer has finished, without telling the other leg, until the other direction ends.
	IgnoreFIN bool
	// OnFIN is what the leg gets when the other one has finished.
	OnFIN FINPolicy
}

// Trace is told of connections as things happen to them. Its functions may be nil; they are called for different
// connections at the same time, hold the connection up while they run, and may hold others up, too: they must not wait.
type Trace struct {
	// Listening: the listening socket is open.
	Listening func(addr net.Addr)
	// Accepted: a client is connected.
	Accepted func(conn uint64, down Stream)
	// Started: both legs are connected. The reason says why it is copied; empty: it is bypassed.
	Started func(conn uint64, down, up Stream, reason splice.Reason)
	// Finished: the sender of a direction has finished, and all that it sent was carried on.
	Finished func(conn uint64, d splice.Direction)
	// Closed: both legs are closed. The cause is the access log's word; err is what broke the connection, or nil.
	Closed func(conn uint64, cause string, err error)
}

// tcpOf returns s as a TCP connection, or nil.
func tcpOf(s Stream) splice.Socket {
	switch s := s.(type) {
	case *net.TCPConn:
		return s
	case interface { // a socket
		splice.Socket
		isTCP()
	}:
		return s
	}
	return nil
}

// notTCP is the reason why s can't be bypassed; empty for TCP.
func notTCP(s Stream) splice.Reason {
	if tcpOf(s) != nil {
		return ""
	}
	if _, ok := s.(*net.UnixConn); ok {
		return splice.ReasonUnix
	}
	return splice.ReasonNotTCP
}
