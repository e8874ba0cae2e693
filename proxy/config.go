package proxy

import (
	"net/netip"
	"time"

	"shunt/splice"
)

// Defaults of a Listener; a zero or empty field of a hand-made Listener is
// not replaced by them, DefaultListener returns them.
const (
	DefaultDialTimeout       = 10 * time.Second
	DefaultHalfOpenTimeout   = 5 * time.Minute
	DefaultKeepAliveIdle     = 30 * time.Second
	DefaultKeepAliveInterval = 10 * time.Second
	DefaultKeepAliveCount    = 3
	DefaultDrainTimeout      = 30 * time.Second
	DefaultHeaderTimeout     = 3 * time.Second
)

// BypassMode says whether a listener's connections may take the bypass.
type BypassMode string

const (
	// BypassAuto takes it where nothing speaks against it.
	BypassAuto BypassMode = "auto"
	// BypassOn takes it also where redirected bytes are invisible to FIONREAD, or a fault of the kernel is known.
	BypassOn BypassMode = "on"
	// BypassOff never takes it.
	BypassOff BypassMode = "off"
)

// KeepAlive sets TCP keepalive on both legs of a connection. An Idle of zero
// or less turns it off.
type KeepAlive struct {
	// Idle is how long a leg may be silent before the first probe.
	Idle time.Duration
	// Interval is the time between probes.
	Interval time.Duration
	// Count is how many unanswered probes end the connection.
	Count int
}

// Listener is one listening address and where its connections go.
type Listener struct {
	// Name is the listener's label in logs and metrics; unique.
	Name string
	// Listen is the TCP address: "127.0.0.1:7000", "[::1]:7000", ":7000" or "[::]:7000" (both dual stack); or what ParseUnix takes.
	Listen string
	// Unix is how a UNIX socket's file is made.
	Unix UnixSocket
	// Upstream is what ParseUpstream takes.
	Upstream string
	// Upstreams, unless empty, are used in place of Upstream.
	Upstreams []string
	// Balance is how one of their addresses is chosen; the others are tried if it can't be dialled.
	Balance Balance
	// ResolveInterval is the greatest age of a name's addresses, and of SRV records; 0: the name of a single upstream without
	// health checks is looked up for each connection, others every DefaultResolveInterval.
	ResolveInterval time.Duration
	// Eject: see Eject.
	Eject Eject
	// Health: see Health.
	Health Health
	// Bypass: see BypassMode.
	Bypass BypassMode
	// MaxConnections is the most live connections; 0 derives it from RLIMIT_NOFILE.
	MaxConnections int
	// Allow, unless empty, is who may connect: nobody else. Deny is who may not, though Allow has them. The addresses
	// are those of the TCP peers, v4-mapped ones unmapped.
	Allow, Deny []Network
	// MaxConnectionsPerSource is the most live connections of one source; 0: no limit. A source is an IPv4 address, the /64
	// of a public IPv6 address, or another IPv6 address.
	MaxConnectionsPerSource int
	// SourceRate bounds how fast one source may connect.
	SourceRate SourceRate
	// DialTimeout bounds name resolution and connecting, over all addresses together; each has a fair share of what is left.
	DialTimeout time.Duration
	// IdleTimeout ends a connection on which nothing moved in either direction; 0: none.
	IdleTimeout time.Duration
	// HalfOpenTimeout ends a connection of which one direction has ended and on which nothing has moved since; 0: none.
	HalfOpenTimeout time.Duration
	// KeepAlive is for both legs.
	KeepAlive KeepAlive
	// DrainTimeout bounds how long live connections may go on after Shutdown was asked for.
	DrainTimeout time.Duration
	// Transparent dials from the client's own address (IP_TRANSPARENT), and takes what TPROXY brings. Linux, CAP_NET_ADMIN or CAP_NET_RAW.
	Transparent bool
	// ProxyProtocol is the client's address in headers, in and out.
	ProxyProtocol ProxyProtocol

	// The rest has no default but its zero value, and no key in the configuration file.

	// ListenFunc, unless nil, opens the listening socket; Listen is ignored.
	ListenFunc ListenFunc
	// DialFunc, unless nil, connects upstreams, and bounds its own time; Upstream only names them, DialTimeout is ignored.
	DialFunc DialFunc
	// Direct, unless nil, is where DialFunc connects to if it can be done at once. DialFunc is called where that
	// doesn't succeed.
	Direct *Direct
	// NoBypass, unless empty, is why none of its connections can be bypassed.
	NoBypass splice.Reason
	// Admit, unless nil, is called for each accepted connection before anything else; an error refuses it, as Deny does.
	Admit func(down Stream) error
	// Once closes the listening socket after the first connection that was admitted.
	Once bool
	// Way is the directions that carry bytes; unless both do, the bypass is off.
	Way Way
	// Down and Up treat the ends of the two legs.
	Down, Up LegPolicy
	// QuietEnds ends connections that time out, or whose upstream isn't reached, with FIN instead of RST.
	QuietEnds bool
	// BufferSize, unless zero, is how much is read at once where bytes are copied; splice(2) isn't used then.
	BufferSize int
	// Tap, unless nil, sees the bytes of each direction before they are written on; the bypass is off then. It is called for
	// both directions at the same time, and mustn't keep b.
	Tap func(conn uint64, d splice.Direction, b []byte)
	// Trace is told of the connections' lives.
	Trace Trace
}

// DefaultListener returns a Listener with every optional field at its default.
func DefaultListener() Listener {
	return Listener{
		Unix:            UnixSocket{Mode: DefaultUnixMode, Unlink: true},
		Balance:         BalanceRoundRobin,
		Eject:           Eject{Failures: DefaultEjectFailures, Duration: DefaultEjectDuration},
		Health:          Health{Timeout: DefaultHealthTimeout, Rise: DefaultHealthRise, Fall: DefaultHealthFall},
		Bypass:          BypassAuto,
		DialTimeout:     DefaultDialTimeout,
		HalfOpenTimeout: DefaultHalfOpenTimeout,
		KeepAlive:       KeepAlive{Idle: DefaultKeepAliveIdle, Interval: DefaultKeepAliveInterval, Count: DefaultKeepAliveCount},
		DrainTimeout:    DefaultDrainTimeout,
		ProxyProtocol:   ProxyProtocol{Send: HeaderOff, HeaderTimeout: DefaultHeaderTimeout},
	}
}

// Config is what a Server runs.
type Config struct {
	// Listeners, at least one.
	Listeners []Listener
	// DNSServers, unless empty, are asked instead of the system's, in order: host:port with IP addresses.
	DNSServers []string
	// Admin is the admin endpoint's address, "host:port" or "unix:/path"; empty: none.
	Admin string
	// MaxConnections is the most live connections of all listeners together: beyond it, peers are refused; 0: no limit.
	MaxConnections int
	// AccessLog writes one line for each connection at its close.
	AccessLog bool
	// Inherited are listening sockets that exist already. A listener or the admin endpoint that finds its own there doesn't open one.
	Inherited []Inherited
	// BypassUnsupported says, where the Server has no Bypass, why not; it is shown in logs and on the admin endpoint.
	BypassUnsupported string
	// Opened, unless nil, is called by Open once everything is open, before anything is accepted; an error ends Open.
	Opened func() error
	// FIONREADWrong says that redirected bytes are invisible to FIONREAD on this kernel: listeners with BypassAuto then copy.
	FIONREADWrong bool
	// KernelFault says that a fault of this kernel's bypass is known: listeners with BypassAuto then copy.
	KernelFault bool
}

// ListenAddr is a resolved listening address.
type ListenAddr struct {
	Name string
	// Addr is invalid for a listener that isn't TCP.
	Addr netip.AddrPort
	// Text is Addr, or "unix:" and the path, or @ and the name, of a UNIX socket.
	Text string
}
