//go:build !linux

package splice

import (
	"fmt"
	"net"
	"runtime"
	"syscall"
)

// Kernel is the bypass of this process; there is none on this system.
type Kernel struct{}

// Candidate is an accepted connection whose client is on this host.
type Candidate struct{}

// Route is a connection on the bypass.
type Route struct{}

// Open reports that the bypass needs Linux.
func Open(Options) (*Kernel, error) {
	return nil, fmt.Errorf("%s: %w", runtime.GOOS, ErrUnsupported)
}

// Probe reports that the bypass needs Linux.
func Probe(Options) *Report {
	r := &Report{Kernel: runtime.GOOS, Known: []Fault{}}
	r.add("linux", true, ErrUnsupported, "")
	return r
}

// Report returns nil.
func (k *Kernel) Report() *Report { return nil }

// Close does nothing.
func (k *Kernel) Close() error { return nil }

// Listen does nothing.
func (k *Kernel) Listen(*net.TCPListener) (func(), error) { return nil, ErrUnsupported }

// Claim declines.
func (k *Kernel) Claim(Socket) (*Candidate, Reason) { return nil, ReasonUnsupported }

// Control does nothing.
func (c *Candidate) Control(string, string, syscall.RawConn) error { return nil }

// Pair declines.
func (c *Candidate) Pair(Socket, Ahead) (*Route, Reason) { return nil, ReasonUnsupported }

// Release does nothing.
func (c *Candidate) Release() {}

// Forward is never called.
func (r *Route) Forward(Direction) (uint64, error) { return 0, ErrUnsupported }

// Take is never called.
func (r *Route) Take(Direction, bool, []byte) (uint64, error) { return 0, ErrUnsupported }

// Stats is never called.
func (r *Route) Stats() RouteStats { return RouteStats{} }

// Close is never called.
func (r *Route) Close() RouteStats { return RouteStats{} }
