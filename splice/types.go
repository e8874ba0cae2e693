package splice

import (
	"errors"
	"net"
	"syscall"
)

// Socket is a connected TCP socket: a *net.TCPConn, or what behaves like one. Its addresses are *net.TCPAddr.
type Socket interface {
	net.Conn
	syscall.Conn
	// CloseWrite finishes sending.
	CloseWrite() error
}

// ErrWait is Route.Take's when there may be more to do, and that takes waiting.
var ErrWait = errors.New("this takes waiting")

// Direction names the way bytes travel through a connection.
type Direction uint8

const (
	// Up is from the client toward the upstream.
	Up Direction = iota
	// Down is from the upstream toward the client.
	Down
)

// String returns the word that metrics and logs use.
func (d Direction) String() string {
	if d == Up {
		return "upstream"
	}
	return "downstream"
}

// Reason says in one stable word why a connection is copied instead of
// bypassed. The empty Reason means that nothing was declined.
type Reason string

// The fixed list of reasons. They are label values of a metric: add to the
// list, never build one at run time.
const (
	// ReasonOff: the listener has bypass = "off".
	ReasonOff Reason = "off"
	// ReasonUnsupported: this kernel, these privileges or this cgroup don't allow it; the start-up log and "shunt probe" say which.
	ReasonUnsupported Reason = "unsupported"
	// ReasonFIONREAD: redirected bytes are invisible to FIONREAD on this kernel, and the listener didn't ask for the bypass in spite of it (bypass = "on").
	ReasonFIONREAD Reason = "fionread"
	// ReasonKernelFault: a fault of this kernel is known that the self-test can't find, and the listener didn't ask for the bypass in spite of it (bypass = "on").
	ReasonKernelFault Reason = "kernel-fault"
	// ReasonDownstreamNotLocal: no socket on this host is the client end of the connection.
	ReasonDownstreamNotLocal Reason = "downstream-not-local"
	// ReasonUpstreamNotLocal: no socket on this host turned out to be the upstream's end.
	ReasonUpstreamNotLocal Reason = "upstream-not-local"
	// ReasonMPTCP: an end is a subflow of an MPTCP connection.
	ReasonMPTCP Reason = "mptcp"
	// ReasonULP: an end has an upper layer protocol (kTLS or another) on its socket.
	ReasonULP Reason = "ulp"
	// ReasonBusy: another agent, or another shunt, has an end in a sockmap already.
	ReasonBusy Reason = "busy"
	// ReasonTableFull: bypass.max_sockets is reached.
	ReasonTableFull Reason = "table-full"
	// ReasonExpired: the connection waited too long in the accept backlog, and its ends were given back meanwhile.
	ReasonExpired Reason = "expired"
	// ReasonDownstreamStalled: clients at this address have not taken redirected bytes before (they read by splice(2), for instance).
	ReasonDownstreamStalled Reason = "downstream-stalled"
	// ReasonUpstreamStalled: the same for this upstream address.
	ReasonUpstreamStalled Reason = "upstream-stalled"
	// ReasonUnix: an end is a UNIX socket.
	ReasonUnix Reason = "unix"
	// ReasonNotTCP: an end is something else than a TCP or UNIX socket.
	ReasonNotTCP Reason = "not-tcp"
	// ReasonError: a system call of the bypass itself gave an error; the log has it.
	ReasonError Reason = "error"
)

// Reasons is the whole list, for metrics that start at zero and for tests.
var Reasons = []Reason{
	ReasonOff, ReasonUnsupported, ReasonFIONREAD, ReasonKernelFault, ReasonDownstreamNotLocal,
	ReasonUpstreamNotLocal, ReasonMPTCP, ReasonULP, ReasonBusy,
	ReasonTableFull, ReasonExpired, ReasonDownstreamStalled,
	ReasonUpstreamStalled, ReasonUnix, ReasonNotTCP, ReasonError,
}

// Ahead is what goes ahead of a connection's own bytes toward the upstream.
// None of it is counted.
type Ahead struct {
	// Taken is how many of the client's bytes this process has read for itself.
	Taken uint64
	// First is written to the upstream before everything else; at most a few KiB.
	First []byte
}

// DirectionStats counts one direction of a bypassed connection. All figures
// are totals since the connection began, but Queued.
type DirectionStats struct {
	// Bypassed is the bytes that the application's own sends put into the receiver's queue.
	Bypassed uint64
	// Uncounted is true from the first send on that went direct under
	// VerdictPermanent: nothing in the kernel counts what follows, and Bypassed is
	// the part that is known.
	Uncounted bool
	// Forwarded is the bytes that came over TCP and that shunt wrote on.
	Forwarded uint64
	// VerdictRuns is how often the verdict ran for the sending application.
	VerdictRuns uint64
	// Passed is how many of those runs let the bytes take TCP (before the cutover, or over the limit).
	Passed uint64
	// Waits is how often shunt waited for room in the receiver's queue.
	Waits uint64
	// Queued is the redirected bytes that wait unread for the receiver now.
	Queued uint64
	// Direct says whether the sender's last send went straight to the receiver.
	Direct bool
}

// RouteStats counts a bypassed connection, by Direction.
type RouteStats [2]DirectionStats

// EndError is why one direction of a connection ended in another way than by
// a FIN. Write tells the receiver's fault (true) from the sender's (false).
type EndError struct {
	Write bool
	Err   error
}

// Error implements error.
func (e *EndError) Error() string {
	if e.Write {
		return "write: " + e.Err.Error()
	}
	return "read: " + e.Err.Error()
}

// Unwrap returns the system call's error.
func (e *EndError) Unwrap() error { return e.Err }
