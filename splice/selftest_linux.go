package splice

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"shunt/bpf"
)

// selfTestTimeout bounds each step of the self-test.
const selfTestTimeout = 10 * time.Second

// loop is one connection on the bypass with all four sockets in this process.
type loop struct {
	client, service *net.TCPConn // C and S
	down, up        *net.TCPConn // A and B
	route           *Route
	ended           [2]chan error
	close           func()
}

// newLoop makes a connection through the real programs, over loopback.
func (k *Kernel) newLoop() (l *loop, err error) {
	l = &loop{}
	var closers []io.Closer
	l.close = func() {
		for _, c := range closers {
			c.Close()
		}
		for _, e := range l.ended {
			if e != nil {
				<-e
			}
		}
		if l.route != nil {
			l.route.Close()
		}
	}
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	ctx, cancel := context.WithTimeout(context.Background(), selfTestTimeout)
	defer cancel()
	listen := func() (*net.TCPListener, error) {
		var lc net.ListenConfig
		lc.SetMultipathTCP(false)
		ln, err := lc.Listen(ctx, "tcp4", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		closers = append(closers, ln)
		return ln.(*net.TCPListener), nil
	}
	accept := func(ln *net.TCPListener) (*net.TCPConn, error) {
		ln.SetDeadline(time.Now().Add(selfTestTimeout))
		c, err := ln.AcceptTCP()
		if err == nil {
			closers = append(closers, c)
			c.SetDeadline(time.Now().Add(4 * selfTestTimeout))
		}
		return c, err
	}
	dial := func(ln *net.TCPListener, control func(string, string, syscall.RawConn) error) (*net.TCPConn, error) {
		d := net.Dialer{Control: control}
		d.SetMultipathTCP(false)
		c, err := d.DialContext(ctx, "tcp4", ln.Addr().String())
		if err != nil {
			return nil, err
		}
		closers = append(closers, c)
		c.SetDeadline(time.Now().Add(4 * selfTestTimeout))
		return c.(*net.TCPConn), nil
	}

	front, err := listen()
	if err != nil {
		return l, err
	}
	withdraw, err := k.Listen(front)
	if err != nil {
		return l, err
	}
	defer withdraw()
	back, err := listen()
	if err != nil {
		return l, err
	}
	if l.client, err = dial(front, nil); err != nil {
		return l, err
	}
	if l.down, err = accept(front); err != nil {
		return l, err
	}
	cand, reason := k.Claim(l.down)
	if cand == nil {
		return l, fmt.Errorf("the client's socket was not found: %s", reason)
	}
	if l.up, err = dial(back, cand.Control); err == nil {
		l.service, err = accept(back)
	}
	if err != nil {
		cand.Release()
		return l, err
	}
	if l.route, reason = cand.Pair(l.up, Ahead{}); l.route == nil {
		return l, fmt.Errorf("the service's socket was not found: %s", reason)
	}
	for _, d := range []Direction{Up, Down} {
		ended := make(chan error, 1)
		l.ended[d] = ended
		go func() {
			_, err := l.route.Forward(d)
			ended <- err
		}()
	}
	return l, nil
}

// ends are a direction's sender and receiver.
func (l *loop) ends(d Direction) (from, to *net.TCPConn) {
	if d == Up {
		return l.client, l.service
	}
	return l.service, l.client
}

// selfTest tries on loopback pairs what the bypass stands on. It returns
// whether every required check passed.
func (k *Kernel) selfTest(r *Report, cgroup *os.File) bool {
	l, err := k.newLoop()
	if errors.Is(err, unix.ENETUNREACH) {
		err = fmt.Errorf("%w (is the loopback interface up? ip link set lo up)", err)
	}
	if !r.add("pairing", true, plain(err), "both ends of a loopback connection found by their sequence numbers") {
		return false
	}
	defer func() {
		if l != nil {
			l.close()
		}
	}()
	if k.mode == bpf.ShuntModeMODE_PERMANENT {
		if !r.add("verdict permanent", true, l.checkPermanent(k), "one verdict for the connection") {
			return false
		}
	}
	ok := r.add("content and order", true, l.both(l.checkContent), "whole and in order, both directions, nothing copied")
	ok = r.add("MSG_PEEK and poll", true, l.both(l.checkPeek), "as with TCP") && ok
	err = l.both(l.checkFIONREAD)
	r.FIONREAD = err == nil
	r.compare("FIONREAD", err, "counts redirected bytes")
	r.compare("blocking recv", l.checkBlockingRecv(), "goes on waiting when a signal was handled")
	r.compare("MSG_WAITALL", l.checkWaitAll(), "recv waits for all of it")
	r.compare("splice(2) read", l.checkSpliceRead(), "takes redirected bytes")
	if k.mode != bpf.ShuntModeMODE_PERMANENT {
		ok = r.add("bounded queue", true, l.both(func(d Direction) error { return l.checkBound(k, d) }),
			"over the limit the sender is held back, and is direct again afterwards") && ok
	}
	if !ok {
		return false
	}
	ok = r.add("iterator", true, l.checkSurvey(k), "sees every socket on the bypass") && ok
	ok = r.add("end of stream", true, l.checkEnd(), "after the last byte") && ok
	l.close()
	l = nil
	if !ok {
		return false
	}
	how, err := k.refuseTLS(cgroup)
	return r.add("kTLS refused", true, err, how)
}

func (l *loop) both(f func(Direction) error) error {
	for _, d := range []Direction{Up, Down} {
		if err := f(d); err != nil {
			return fmt.Errorf("%v: %w", d, err)
		}
	}
	return nil
}

func pattern(n, seed int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte((i*7 + i>>8 + seed) & 0xff)
	}
	return b
}

// checkContent sends in chunks of many sizes, and demands that all of it went direct.
func (l *loop) checkContent(d Direction) error {
	from, to := l.ends(d)
	want := pattern(96<<10, int(d))
	before := l.route.Stats()[d]
	sent := make(chan error, 1)
	go func() {
		rest := want
		for n := 1; len(rest) > 0; n = n*3 + 1 {
			n = min(n, len(rest))
			if _, err := from.Write(rest[:n]); err != nil {
				sent <- err
				return
			}
			rest = rest[n:]
		}
		sent <- nil
	}()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(to, got); err != nil {
		<-sent
		return fmt.Errorf("read: %w", err)
	}
	if err := <-sent; err != nil {
		return fmt.Errorf("write: %w", err)
	}
	if !bytes.Equal(got, want) {
		return errors.New("bytes were lost, changed or reordered")
	}
	after := l.route.Stats()[d]
	if after.Forwarded != before.Forwarded {
		return fmt.Errorf("%d bytes took TCP", after.Forwarded-before.Forwarded)
	}
	return nil
}

// checkPeek looks at waiting bytes without taking them.
func (l *loop) checkPeek(d Direction) error {
	from, to := l.ends(d)
	want := pattern(1000, 3)
	if _, err := from.Write(want); err != nil {
		return err
	}
	got := make([]byte, len(want))
	err := withFD(to, func(fd int) error {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if n, err := unix.Poll(p, int(selfTestTimeout.Milliseconds())); err != nil || n != 1 || p[0].Revents&unix.POLLIN == 0 {
			return fmt.Errorf("poll doesn't say readable (%v)", err)
		}
		n, _, err := unix.Recvfrom(fd, got, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		if err != nil {
			return fmt.Errorf("peek: %w", err)
		}
		if !bytes.Equal(got[:n], want[:n]) || n == 0 {
			return errors.New("peek shows other bytes")
		}
		return nil
	})
	if err != nil {
		return err
	}
	if _, err := io.ReadFull(to, got); err != nil || !bytes.Equal(got, want) {
		return fmt.Errorf("read after peek (%v)", err)
	}
	return nil
}

func (l *loop) checkFIONREAD(d Direction) error {
	from, to := l.ends(d)
	b := pattern(777, 5)
	for range 2 {
		if _, err := from.Write(b); err != nil {
			return err
		}
	}
	var n int
	err := withFD(to, func(fd int) (err error) {
		n, err = unix.IoctlGetInt(fd, unix.TIOCINQ)
		return err
	})
	if _, rerr := io.ReadFull(to, make([]byte, 2*len(b))); rerr != nil {
		return rerr
	}
	if err != nil {
		return err
	}
	if n != 2*len(b) {
		return fmt.Errorf("says %d with %d redirected bytes waiting: nginx, Java and .NET size their reads by it", n, 2*len(b))
	}
	return nil
}

// checkBlockingRecv interrupts a thread that waits in recv. The kernel's code
// for sockmap members waits once, and makes EAGAIN of any wake-up without data.
func (l *loop) checkBlockingRecv() error {
	return withFD(l.client, func(fd int) error {
		restore, err := blocking(fd)
		if err != nil {
			return err
		}
		defer restore()
		tid := make(chan int)
		got := make(chan error, 1)
		go func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			tid <- unix.Gettid()
			n, _, err := unix.Recvfrom(fd, make([]byte, 1), 0)
			if err == nil && n != 1 {
				err = io.ErrUnexpectedEOF
			}
			got <- err
		}()
		who := <-tid
		for range 10 {
			nap(500 * time.Microsecond)
			// The runtime's own preemption signal, handled with SA_RESTART.
			unix.Tgkill(unix.Getpid(), who, unix.SIGURG)
		}
		if _, err := l.service.Write([]byte{1}); err != nil {
			return err
		}
		err = <-got
		if err == nil {
			return nil
		}
		// The byte is still there, and would be in the way of what comes next.
		// A signal of the runtime's own may end this one, too.
		deadline := time.Now().Add(selfTestTimeout)
		for n := 0; n != 1; {
			var rerr error
			n, _, rerr = unix.Recvfrom(fd, make([]byte, 1), 0)
			if rerr != nil && rerr != unix.EAGAIN && rerr != unix.EINTR || time.Now().After(deadline) {
				return fmt.Errorf("recv after %w: %v", err, rerr)
			}
		}
		if errors.Is(err, unix.EAGAIN) {
			err = errors.New("ends with EAGAIN when it is woken without data: by a signal, a reset, another thread on the socket")
		}
		return err
	})
}

// checkBound lets a receiver fall behind.
func (l *loop) checkBound(k *Kernel, d Direction) error {
	const limit = 64 << 10
	most := limit + 2<<20
	if k.mode == bpf.ShuntModeMODE_WINDOW {
		most += int(k.opt.Window)
	}
	usual := k.limit()
	if err := k.obj.QueueLimit.Set(uint32(limit)); err != nil {
		return err
	}
	defer k.obj.QueueLimit.Set(usual)
	from, to := l.ends(d)
	want := pattern(most, 9)
	sent := 0
	// Held back for good: nothing accepted for a while, with the receiver asleep.
	quiet := 0
	for sent < len(want) && quiet < 10 {
		n, err := sendNow(from, want[sent:min(len(want), sent+16<<10)])
		sent += n
		switch {
		case errors.Is(err, unix.EAGAIN):
			quiet++
			nap(2 * time.Millisecond)
		case err != nil:
			return err
		default:
			quiet = 0
		}
	}
	if sent == len(want) {
		return fmt.Errorf("%d bytes accepted with a limit of %d", sent, limit)
	}
	got := make([]byte, sent)
	if _, err := io.ReadFull(to, got); err != nil {
		return err
	}
	if !bytes.Equal(got, want[:sent]) {
		return errors.New("bytes were lost, changed or reordered")
	}
	deadline := time.Now().Add(selfTestTimeout)
	for !l.route.Stats()[d].Direct {
		if time.Now().After(deadline) {
			return errors.New("does not go direct again")
		}
		nap(time.Millisecond)
		if _, err := from.Write([]byte{1}); err != nil {
			return err
		}
		if _, err := io.ReadFull(to, got[:1]); err != nil {
			return err
		}
	}
	return nil
}

func sendNow(c *net.TCPConn, b []byte) (n int, err error) {
	cerr := withFD(c, func(fd int) error {
		n, err = unix.SendmsgN(fd, b, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		n = max(n, 0)
		return nil
	})
	if cerr != nil {
		return 0, cerr
	}
	return n, err
}

// checkPermanent sends twice: a kernel without the flag takes neither.
func (l *loop) checkPermanent(k *Kernel) error {
	before := l.route.Stats()[Up].VerdictRuns
	for range 3 {
		if _, err := l.client.Write([]byte{1}); err != nil {
			return fmt.Errorf("this kernel does not have the flag: %w", err)
		}
	}
	if _, err := io.ReadFull(l.service, make([]byte, 3)); err != nil {
		return err
	}
	if n := l.route.Stats()[Up].VerdictRuns - before; n != 1 {
		return fmt.Errorf("this kernel does not have the flag: %d verdict runs for 3 sends", n)
	}
	return nil
}

// checkWaitAll asks for more than is there, and sends the rest when recv waits.
func (l *loop) checkWaitAll() error {
	return withFD(l.client, func(fd int) error {
		restore, err := blocking(fd)
		if err != nil {
			return err
		}
		defer restore()
		const all = 200
		if _, err := l.service.Write(pattern(all/2, 1)); err != nil {
			return err
		}
		type result struct {
			n   int
			err error
		}
		b := make([]byte, all)
		// Signals of the runtime may end the wait before all is there.
		recv := func(from int) (got result) {
			got.n, _, got.err = unix.Recvfrom(fd, b[from:], unix.MSG_WAITALL)
			got.n = max(got.n, 0)
			return got
		}
		first := make(chan result, 1)
		go func() { first <- recv(0) }()
		var got result
		returned := false
		select {
		case got = <-first:
			returned = true
		case <-time.After(100 * time.Millisecond):
		}
		if _, err := l.service.Write(pattern(all, 1)[all/2:]); err != nil {
			return err
		}
		if !returned {
			got = <-first
		}
		short := got.n
		for deadline := time.Now().Add(selfTestTimeout); got.n < all; {
			if got.err != nil && got.err != unix.EAGAIN && got.err != unix.EINTR || time.Now().After(deadline) {
				return fmt.Errorf("recv: %w", got.err)
			}
			more := recv(got.n)
			got.n, got.err = got.n+more.n, more.err
		}
		if !bytes.Equal(b, pattern(all, 1)) {
			return errors.New("other bytes")
		}
		if short < all {
			return errors.New("returns short, with what is there")
		}
		return nil
	})
}

// checkSpliceRead moves what waits into a pipe, which kernels don't do for sockmap members.
func (l *loop) checkSpliceRead() error {
	const size = 100
	if _, err := l.service.Write(pattern(size, 2)); err != nil {
		return err
	}
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return err
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	var n int
	var err error
	cerr := withFD(l.client, func(fd int) error {
		m, serr := unix.Splice(fd, nil, pipe[1], nil, size, unix.SPLICE_F_NONBLOCK)
		n, err = max(int(m), 0), serr // m's type is the platform's
		return nil
	})
	if cerr != nil {
		return cerr
	}
	if _, err := io.ReadFull(l.client, make([]byte, size-n)); err != nil {
		return err
	}
	if n != size {
		return fmt.Errorf("sees %d of %d redirected bytes (%v): programs that read their socket by splice(2) need bypass = \"off\"", n, size, err)
	}
	return nil
}

// blocking makes a socket block, for at most selfTestTimeout, until restore is called.
func blocking(fd int) (restore func(), err error) {
	if err := unix.SetNonblock(fd, false); err != nil {
		return nil, err
	}
	bound := unix.NsecToTimeval(int64(selfTestTimeout))
	restore = func() {
		_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{})
		_ = unix.SetNonblock(fd, true)
	}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &bound); err != nil {
		restore()
		return nil, err
	}
	return restore, nil
}

func (l *loop) checkSurvey(k *Kernel) error {
	seen, err := k.survey(0)
	if err != nil {
		return err
	}
	for role, c := range l.route.cookie {
		if _, ok := seen[c]; !ok {
			return fmt.Errorf("socket %d of 4 is not in the sockhash", role+1)
		}
	}
	return nil
}

// checkEnd closes both directions while bytes are queued for both receivers: a
// kernel that took sockets out of the map when they close for good, and not
// when their owner closes them, would lose those (before "bpf, sockmap: Remove
// unhash handler for BPF sockmap usage", 5.16).
func (l *loop) checkEnd() error {
	want := pattern(5000, 1)
	for _, d := range []Direction{Up, Down} {
		from, _ := l.ends(d)
		if _, err := from.Write(want); err != nil {
			return err
		}
	}
	for _, d := range []Direction{Up, Down} {
		from, _ := l.ends(d)
		if err := from.CloseWrite(); err != nil {
			return err
		}
		select {
		case err := <-l.ended[d]:
			l.ended[d] = nil
			if err != nil {
				return fmt.Errorf("forward: %w", err)
			}
		case <-time.After(selfTestTimeout):
			return fmt.Errorf("%v: forwarding does not end", d)
		}
		_, dst := l.route.legs(d)
		if err := dst.CloseWrite(); err != nil {
			return err
		}
	}
	return l.both(func(d Direction) error {
		_, to := l.ends(d)
		if err := closedByPeer(to); err != nil {
			return err
		}
		got := make([]byte, len(want))
		if n, err := io.ReadFull(to, got); err != nil || !bytes.Equal(got, want) {
			return fmt.Errorf("%d of %d bytes that were queued at the end (%v)", n, len(want), err)
		}
		if n, err := to.Read(got); n != 0 || err != io.EOF {
			return fmt.Errorf("read after the end: %d bytes, %v", n, err)
		}
		return nil
	})
}

// closedByPeer waits until the peer's FIN or RST has arrived.
func closedByPeer(c *net.TCPConn) error {
	return withFD(c, func(fd int) error {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		if n, err := unix.Poll(p, int(selfTestTimeout.Milliseconds())); n != 1 {
			return fmt.Errorf("the end does not arrive (%v)", err)
		}
		return nil
	})
}

// refuseTLS makes sure that no socket on the bypass can get kTLS, which old
// kernels don't see to themselves, and says who refuses it.
func (k *Kernel) refuseTLS(cgroup *os.File) (string, error) {
	err := k.tryTLS()
	if err == nil || errors.Is(err, unix.ENOENT) {
		// ENOENT: not there now, but the module may come later.
		if err := k.attachCgroup(cgroup, k.obj.OnSetsockopt, ebpf.AttachCGroupSetsockopt); err != nil {
			return "", plain(fmt.Errorf("attach setsockopt: %w", err))
		}
		if err = k.tryTLS(); errors.Is(err, unix.EPERM) {
			return "by a setsockopt program", nil
		}
		return "", fmt.Errorf("setsockopt TCP_ULP on an enrolled socket: %v, want EPERM", err)
	}
	return fmt.Sprintf("by the kernel (%v)", err), nil
}

// tryTLS returns what a client on the bypass gets when it asks for kTLS.
func (k *Kernel) tryTLS() error {
	// There may be no more than one slot.
	k.reclaim()
	l, err := k.newLoop()
	if err != nil {
		return fmt.Errorf("pair: %w", err)
	}
	defer l.close()
	return withFD(l.client, func(fd int) error {
		return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_ULP, "tls")
	})
}
