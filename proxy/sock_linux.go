package proxy

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// States of the kernel's tcp_states.h.
const (
	tcpEstablished = 1
	tcpSynSent     = 2
	tcpClosed      = 7
	tcpCloseWait   = 8
)

// resetKeepsBytes says that unacked works, so that a reset can be held back
// until the bytes before it have arrived.
const resetKeepsBytes = true

// movesHaveTimes says that readTCPStats works.
const movesHaveTimes = true

// tcpStats is what the kernel knows about one leg.
type tcpStats struct {
	state    uint8
	received uint64        // bytes that came over TCP; a FIN counts as one
	acked    uint64        // bytes that the peer has acknowledged
	lastData time.Duration // since data came
	lastAck  time.Duration // since an ACK came
}

func control(c syscall.Conn, f func(fd int) error) error {
	if s, ok := c.(*socket); ok {
		return s.control(f)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = f(int(fd)) })
	if cerr != nil {
		return cerr
	}
	return err
}

// readTCPStats reads the kernel's view of c; not ok where c isn't TCP.
func readTCPStats(leg Stream) (s tcpStats, ok bool) {
	c := tcpOf(leg)
	if c == nil {
		return s, false
	}
	err := control(c, func(fd int) error {
		i, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil {
			return err
		}
		s = tcpStats{
			state: i.State, received: i.Bytes_received, acked: i.Bytes_acked,
			lastData: time.Duration(i.Last_data_recv) * time.Millisecond,
			lastAck:  time.Duration(i.Last_ack_recv) * time.Millisecond,
		}
		return nil
	})
	return s, err == nil
}

// isClosed says that c is in no state any more that can carry a byte; not ok where it isn't TCP.
func isClosed(leg Stream) (closed, ok bool) {
	c := tcpOf(leg)
	if c == nil {
		return false, false
	}
	err := control(c, func(fd int) error {
		state, err := tcpState(fd)
		closed = state == tcpClosed
		return err
	})
	return closed, err == nil
}

// tcpState returns a TCP socket's state.
func tcpState(fd int) (uint8, error) {
	var state [4]byte // the first bytes of TCP_INFO
	n := uint32(len(state))
	_, _, errno := unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.IPPROTO_TCP, unix.TCP_INFO,
		uintptr(unsafe.Pointer(&state)), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return 0, errno
	}
	return state[0], nil
}

// unacked is how many bytes, a FIN included, the peer hasn't acknowledged.
func unacked(s Stream) (n int, ok bool) {
	c := tcpOf(s)
	if c == nil {
		return 0, false
	}
	err := control(c, func(fd int) (err error) {
		n, err = unix.IoctlGetInt(fd, unix.SIOCOUTQ)
		return err
	})
	return n, err == nil
}

// takeError reads and clears the socket's pending error.
func takeError(s Stream) error {
	c, ok := s.(syscall.Conn)
	if !ok {
		return nil
	}
	var e int
	err := control(c, func(fd int) (err error) {
		e, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		return err
	})
	if err != nil || e == 0 {
		return err
	}
	return syscall.Errno(e)
}

// peerOf returns a UNIX client's credentials, or nil. The process was so when it connected.
func peerOf(s Stream) *credentials {
	c, ok := s.(*net.UnixConn)
	if !ok {
		return nil
	}
	var u *unix.Ucred
	err := control(c, func(fd int) (err error) {
		u, err = unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		return err
	})
	if err != nil {
		return nil
	}
	return &credentials{int(u.Pid), int(u.Uid), int(u.Gid)}
}

// waitHangUp blocks until the peer has reset c or c's read deadline has passed,
// and reads nothing. A FIN alone is no hang-up: the peer may still be reading.
func waitHangUp(c syscall.Conn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	return raw.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd)}}
		n, err := unix.Poll(p, 0)
		return err == nil && n > 0 && p[0].Revents&(unix.POLLERR|unix.POLLHUP) != 0
	}) == nil
}

// bytesBesideTCP says that read bytes came to a socket on which TCP received
// only received: some reached its queue through a sockmap, past TCP.
func bytesBesideTCP(read, received uint64) bool { return read > received }

const (
	// unsentLimit is how much of what a copy has written may wait unsent in a
	// leg's send queue; what is in flight comes on top.
	unsentLimit = 512 << 10
	// nearRTT is the round trip below which a fixed receive buffer of nearBuffer is
	// enough for any rate.
	nearRTT    = time.Millisecond
	nearBuffer = 1 << 20
)

// ownKeepAlive says that KeepAlive.Set works, and that accepted sockets have the
// options of the listening one. Package net would set four options on every
// socket, also on those of connections that are over before they matter.
const ownKeepAlive = true

// Set sets the options on a TCP socket, unless k turns keepalive off or the socket has it on already.
// Accepted sockets inherit those of a listening one.
func (k KeepAlive) Set(raw syscall.RawConn) (err error) {
	if k.Idle <= 0 {
		return nil
	}
	cerr := raw.Control(func(fd uintptr) { err = k.setOn(int(fd)) })
	return errors.Join(cerr, err)
}

func (k KeepAlive) setOn(fd int) error {
	if on, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE); err != nil || on != 0 {
		return os.NewSyscallError("getsockopt SO_KEEPALIVE", err)
	}
	seconds := func(d time.Duration) int { return int((d + time.Second - 1) / time.Second) }
	for _, o := range []struct {
		text               string
		level, name, value int
	}{
		{"SO_KEEPALIVE", unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{"TCP_KEEPIDLE", unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, seconds(k.Idle)},
		{"TCP_KEEPINTVL", unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, seconds(k.Interval)},
		{"TCP_KEEPCNT", unix.IPPROTO_TCP, unix.TCP_KEEPCNT, k.Count},
	} {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			return os.NewSyscallError("setsockopt "+o.text, err)
		}
	}
	return nil
}

// force sets them whatever the socket has inherited.
func (k KeepAlive) force(fd int) {
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 0)
	if k.Idle > 0 {
		_ = k.setOn(fd)
	}
}

// connectSocket is Connect's connect(2). It may take long where a sandbox's supervisor is asked first.
func connectSocket(raw syscall.RawConn, to netip.AddrPort) {
	if to.Addr().Zone() != "" {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.Connect(int(fd), sockaddr(to))
	})
}

// closeWrite is s.CloseWrite without its error. On one host shutdown(2) has the peer's side of the end
// to do too: longer than the runtime lets a system call have a processor that others
// could use. As it never waits, the runtime isn't told; it would wake up a thread for nothing.
func closeWrite(s Stream) {
	t := tcpOf(s)
	if t == nil {
		_ = s.CloseWrite()
		return
	}
	_ = control(t, func(fd int) error {
		unix.RawSyscall(unix.SYS_SHUTDOWN, uintptr(fd), unix.SHUT_WR, 0)
		return nil
	})
}

// boundQueues limits what a connection that is copied takes in for a receiver
// that doesn't read: without it the kernel grows the buffers of both legs as long as
// the sender is fast. Errors leave it at that.
// A receive buffer that was set by an option stays as it is.
func boundQueues(s Stream) {
	c := tcpOf(s)
	if c == nil {
		return
	}
	_ = control(c, func(fd int) error {
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, unsentLimit)
		i, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil || time.Duration(i.Rtt)*time.Microsecond >= nearRTT {
			return err
		}
		if locks, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK); err == nil && locks&unix.SOCK_RCVBUF_LOCK != 0 {
			return nil
		}
		// The unprivileged one is cut to net.core.rmem_max.
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, nearBuffer) != nil {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, nearBuffer)
		}
		return nil
	})
}
