package harness

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// A Netns is a network namespace. The nil Netns is the one the test runs in.
type Netns struct {
	// Name is what "ip netns" calls it.
	Name string
	// Addr is its address on the link that [NewLinked] made.
	Addr netip.Addr
	f    *os.File
}

var netnsCount atomic.Uint32

// NewNetns makes a network namespace with its loopback up, until the end of the test.
func NewNetns(t testing.TB) *Netns {
	t.Helper()
	NeedRoot(t)
	NeedProgram(t, "ip")
	ns, remove, err := MakeNetns()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(remove)
	return ns
}

// NeedVeth skips the test on kernels that can't join two namespaces.
func NeedVeth(t testing.TB) {
	t.Helper()
	NeedRoot(t)
	NeedProgram(t, "ip")
	name := fmt.Sprintf("vq%d", os.Getpid()%1000000)
	if err := ip("link", "add", name, "type", "veth", "peer", "name", name+"p"); err != nil {
		Missing(t, AbilityRoot, "veth: "+err.Error())
	}
	_ = ip("link", "delete", name)
}

// MakeNetns is NewNetns outside of tests.
func MakeNetns() (ns *Netns, remove func(), err error) {
	name := fmt.Sprintf("shunt-%d-%d", os.Getpid(), netnsCount.Add(1))
	if err := ip("netns", "add", name); err != nil {
		return nil, nil, err
	}
	del := func() { _ = ip("netns", "delete", name) }
	f, err := os.Open(filepath.Join("/run/netns", name))
	if err != nil {
		del()
		return nil, nil, err
	}
	if err := ip("-n", name, "link", "set", "lo", "up"); err != nil {
		f.Close()
		del()
		return nil, nil, err
	}
	return &Netns{Name: name, f: f}, func() { f.Close(); del() }, nil
}

// Link joins two namespaces by a veth pair with one address each, and gives
// each the other as its default route. subnet tells links of one test apart.
func Link(a, b *Netns, subnet uint8) error {
	va, vb := fmt.Sprintf("va%d-%d", os.Getpid()%100000, subnet), fmt.Sprintf("vb%d-%d", os.Getpid()%100000, subnet)
	if err := ip("link", "add", va, "netns", a.Name, "type", "veth", "peer", "name", vb, "netns", b.Name); err != nil {
		return err
	}
	for _, end := range []struct {
		ns   *Netns
		dev  string
		last byte
	}{{a, va, 1}, {b, vb, 2}} {
		addr := netip.AddrFrom4([4]byte{10, 211, subnet, end.last})
		if err := ip("-n", end.ns.Name, "address", "add", addr.String()+"/24", "dev", end.dev); err != nil {
			return err
		}
		v6 := fmt.Sprintf("fd00:5a::%d:%d/112", subnet, end.last)
		if err := ip("-n", end.ns.Name, "address", "add", v6, "dev", end.dev, "nodad"); err != nil {
			return err
		}
		if err := ip("-n", end.ns.Name, "link", "set", end.dev, "up"); err != nil {
			return err
		}
		end.ns.Addr = addr
	}
	return nil
}

// LinkAddr is the address that [Link] gave to its first (last 1) or second (2) namespace.
func LinkAddr(subnet, last uint8) netip.Addr { return netip.AddrFrom4([4]byte{10, 211, subnet, last}) }

// LinkAddr6 is LinkAddr for IPv6.
func LinkAddr6(subnet, last uint8) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf("fd00:5a::%d:%d", subnet, last))
}

func ip(args ...string) error {
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %v: %w: %s", args, err, out)
	}
	return nil
}

// Do runs f on a thread that is in the namespace. Only the network namespace
// changes: "ip netns exec" would remount /sys too, and hide the cgroup2
// mount from shunt. Sockets and processes that f makes belong to the
// namespace; goroutines that f starts don't.
func (ns *Netns) Do(f func() error) error {
	if ns == nil {
		return f()
	}
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			runtime.UnlockOSThread()
			result <- err
			return
		}
		defer home.Close()
		if err := unix.Setns(int(ns.f.Fd()), unix.CLONE_NEWNET); err != nil {
			runtime.UnlockOSThread()
			result <- fmt.Errorf("setns %s: %w", ns.Name, err)
			return
		}
		err = f()
		// A thread that can't go back stays locked, and ends with its goroutine.
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		result <- err
	}()
	return <-result
}

// Dial connects from the namespace, over plain TCP.
func (ns *Netns) Dial(d *net.Dialer, addr string) (*net.TCPConn, error) {
	var conn net.Conn
	err := ns.Do(func() (err error) {
		conn, err = d.Dial("tcp", addr)
		return err
	})
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}

// Listen listens in the namespace, over plain TCP.
func (ns *Netns) Listen(network, addr string) (*net.TCPListener, error) {
	var ln net.Listener
	err := ns.Do(func() (err error) {
		var lc net.ListenConfig
		lc.SetMultipathTCP(false)
		ln, err = lc.Listen(context.Background(), network, addr)
		return err
	})
	if err != nil {
		return nil, err
	}
	return ln.(*net.TCPListener), nil
}
