//go:build !linux

package proxy

import (
	"net/netip"
	"syscall"
	"time"
)

const tcpClosed = 7

// resetKeepsBytes is false: what the peer has acknowledged can't be asked for
// here, so a direction that carried bytes ends with a FIN instead of a reset.
const resetKeepsBytes = false

const movesHaveTimes = false

type tcpStats struct {
	state             uint8
	received, acked   uint64
	lastData, lastAck time.Duration
}

func readTCPStats(Stream) (s tcpStats, ok bool) { return s, false }

func isClosed(Stream) (closed, ok bool) { return false, false }

func unacked(Stream) (n int, ok bool) { return 0, false }

func takeError(Stream) error { return nil }

// waitHangUp can't see a reset without reading here.
func waitHangUp(syscall.Conn) bool { return false }

// boundQueues leaves the kernel's own limits.
func boundQueues(Stream) {}

const ownKeepAlive = false

// Set does nothing: package net sets the options.
func (k KeepAlive) Set(syscall.RawConn) error { return nil }

// connectSocket does nothing: package net connects, next.
func connectSocket(syscall.RawConn, netip.AddrPort) {}

func closeWrite(s Stream) { _ = s.CloseWrite() }

// peerOf doesn't know.
func peerOf(Stream) *credentials { return nil }
