package proxy

import (
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"syscall"
)

// ending is how one side of a direction ended.
type ending uint8

const (
	endFIN   ending = iota // orderly
	endReset               // by a reset
	endLost                // the peer doesn't answer any more
	endOurs                // by our own close or deadline
	endOdd                 // by an error that isn't in the classifier's list
)

// endOf is the one classifier of ends. Everything but endOdd is an expected
// end of a connection, and no error of the proxy's.
func endOf(err error) ending {
	switch {
	case err == nil, errors.Is(err, io.EOF):
		return endFIN
	case errors.Is(err, net.ErrClosed), errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, os.ErrClosed):
		return endOurs
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE),
		errors.Is(err, syscall.ECONNABORTED), errors.Is(err, syscall.ENOTCONN):
		return endReset
	case errors.Is(err, syscall.ETIMEDOUT), errors.Is(err, syscall.EHOSTUNREACH),
		errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EHOSTDOWN), errors.Is(err, syscall.ENETDOWN):
		return endLost
	}
	return endOdd
}

// Causes say in one stable word who ended a connection and how. They are in
// the access log and label shunt_connections_ended_total.
const (
	causeClientFIN   = "client-fin"   // the client finished first, then the upstream
	causeServerFIN   = "server-fin"   // the upstream finished first, then the client
	causeClientRST   = "client-rst"   // the client reset, or closed with the upstream still sending
	causeServerRST   = "server-rst"   // the same of the upstream
	causeClientLost  = "client-lost"  // keepalive or retransmission gave the client up
	causeServerLost  = "server-lost"  // the same of the upstream
	causeClientError = "client-error" // an unexpected error on the client's leg
	causeServerError = "server-error" // the same on the upstream's
	causeIdle        = "idle"         // idle_timeout
	causeHalfOpen    = "half-open"    // half_open_timeout
	causeDrain       = "drain"        // drain_timeout
	causeStop        = "stop"         // Shutdown's context ended
	causeNoUpstream  = "no-upstream"  // health checks have all upstream addresses down

	causeUntrusted     = "untrusted"      // not one of those that may send a PROXY header
	causeBadHeader     = "bad-header"     // no PROXY header, or a malformed one
	causeHeaderTimeout = "header-timeout" // no whole PROXY header within header_timeout
)

// causes are all of them but those of failed dials.
var causes = []string{
	causeClientFIN, causeServerFIN, causeClientRST, causeServerRST,
	causeClientLost, causeServerLost, causeClientError, causeServerError,
	causeIdle, causeHalfOpen, causeDrain, causeStop, causeNoUpstream,
	causeUntrusted, causeBadHeader, causeHeaderTimeout,
}

// causeOfDial names a failed dial of a kind. One that was canceled has another
// cause: what canceled it.
func causeOfDial(kind string) string { return "dial-" + kind }

// allCauses returns every cause there is; README has them all.
func allCauses() []string {
	all := slices.Clone(causes)
	for _, kind := range dialKinds {
		if kind != dialCanceled {
			all = append(all, causeOfDial(kind))
		}
	}
	return all
}

// causeOf names the end of a leg.
func causeOf(upstream bool, e ending) string {
	client := [...]string{endFIN: causeClientFIN, endReset: causeClientRST, endLost: causeClientLost, endOurs: causeStop, endOdd: causeClientError}
	server := [...]string{endFIN: causeServerFIN, endReset: causeServerRST, endLost: causeServerLost, endOurs: causeStop, endOdd: causeServerError}
	if upstream {
		return server[e]
	}
	return client[e]
}
