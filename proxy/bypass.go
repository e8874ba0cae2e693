package proxy

import (
	"net"
	"syscall"

	"shunt/splice"
)

// Bypass is what the proxy needs of the kernel path. Its methods are safe for
// concurrent use. A nil Bypass means that every connection is copied.
type Bypass interface {
	// Listen announces a listening socket before anything is accepted on
	// it. The function it returns withdraws it again, and may be called once.
	Listen(ln *net.TCPListener) (withdraw func(), err error)

	// Claim takes over what is known of an accepted connection; it is
	// called once for each connection of an announced listener, right after
	// accept and before a byte is read or written. A nil Candidate comes
	// with the reason why the connection must be copied, and the kernel
	// holds nothing of the connection any more.
	Claim(down splice.Socket) (Candidate, splice.Reason)
}

// Candidate is an accepted connection whose client is on this host. Exactly
// one of Pair and Release ends it.
type Candidate interface {
	// Control registers an upstream socket; it is for net.Dialer.Control,
	// for every socket that is dialled, one after the other.
	Control(network, address string, c syscall.RawConn) error

	// Pair completes the route once the upstream is connected, before a
	// byte is written to either connection; it writes what goes ahead. A nil
	// Route comes with the reason; both connections are then ordinary TCP
	// again, and nothing was written. It may wait up to a few milliseconds for
	// the upstream's end to show up.
	Pair(up splice.Socket, ahead splice.Ahead) (Route, splice.Reason)

	// Release gives the candidate up: there is no upstream.
	Release()
}

// Route is a connection on the bypass: the applications' sends land straight
// in each other's queues, and Forward carries what still comes over TCP. The
// receivers' TCP queues must stay empty: nothing but Forward may write to
// either connection, and each connection is closed by the owner of the Route.
type Route interface {
	// Forward carries one direction until its sender has finished, and returns
	// how many bytes it carried. The error is nil after FIN, when every byte
	// that came over TCP was handed to the receiver, or an
	// *splice.EndError. It doesn't pass the FIN on. Closing the connections
	// ends it early, and so does a read deadline of the source; after that
	// one, Forward may be called again and goes on.
	Forward(dir splice.Direction) (n uint64, err error)

	// Take is Forward of the event loop, which must not wait. It carries what is there, if that is a few bytes, by way
	// of buf, and returns no error or, after FIN, io.EOF; without ending, it doesn't look for more than it got. After splice.ErrWait, Forward has to go on. It and
	// Forward don't run at the same time for one direction.
	Take(dir splice.Direction, ending bool, buf []byte) (n uint64, err error)

	// Stats reads the counters; cheap enough for every scrape.
	Stats() splice.RouteStats

	// Close ends the route after both connections were closed, and returns
	// the final counters. It may be called once.
	Close() splice.RouteStats
}
