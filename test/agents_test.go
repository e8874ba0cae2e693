//go:build linux

package test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	. "shunt/test/harness"
)

// agent is a foreign sockmap with a verdict that passes everything.
type agent struct{ sockets *ebpf.Map }

func newAgent(t *testing.T) *agent {
	t.Helper()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.SockHash, KeySize: 8, ValueSize: 8, MaxEntries: 16})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SkMsg, AttachType: ebpf.AttachSkMsgVerdict, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}, // SK_PASS
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { prog.Close() })
	if err := link.RawAttachProgram(link.RawAttachProgramOptions{Target: m.FD(), Program: prog, Attach: ebpf.AttachSkMsgVerdict}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = link.RawDetachProgram(link.RawDetachProgramOptions{Target: m.FD(), Program: prog, Attach: ebpf.AttachSkMsgVerdict})
	})
	return &agent{sockets: m}
}

func (a *agent) hold(fd int) error {
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		return err
	}
	return a.sockets.Update(cookie, uint64(fd), ebpf.UpdateNoExist)
}

func TestSocketOfAnotherAgentIsCopied(t *testing.T) {
	// The agent takes the service's sockets as they are born, as another
	// sock_ops program would; shunt comes second, and copies.
	EachBypass(t, func(t *testing.T, p Path) {
		NeedRoot(t)
		a := newAgent(t)
		s := Serve(t, echo)
		_, portText, err := net.SplitHostPort(s.Addr)
		if err != nil {
			t.Fatal(err)
		}
		var port int32
		if _, err := fmt.Sscan(portText, &port); err != nil {
			t.Fatal(err)
		}
		ops, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Type: ebpf.SockOps, AttachType: ebpf.AttachCGroupSockOps, License: "GPL",
			Instructions: sockOps(a.sockets, port),
		})
		if err != nil {
			t.Fatal(err)
		}
		defer ops.Close()
		// Attached before shunt's program, it runs before it.
		l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup2(t), Attach: ebpf.AttachCGroupSockOps, Program: ops})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		f := Open(t, p, s.Addr)
		for range 5 {
			if err := exchangeEcho(f.Addr, 20, 1000); err != nil {
				t.Fatal(err)
			}
		}
		f.CheckCopied(t, "busy", 5)
		f.CheckPath(t, 100_000, 100_000, 0)
	})
}

// sockOps puts every socket whose local port is port into m as it is
// accepted, keyed by its cookie.
func sockOps(m *ebpf.Map, port int32) asm.Instructions {
	const offOp, offLocalPort = 0, 68 // struct bpf_sock_ops
	const passiveEstablished = 5
	return asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R2, asm.R6, offOp, asm.Word),
		asm.JNE.Imm(asm.R2, passiveEstablished, "out"),
		asm.LoadMem(asm.R2, asm.R6, offLocalPort, asm.Word),
		asm.JNE.Imm(asm.R2, port, "out"),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.FnGetSocketCookie.Call(),
		asm.StoreMem(asm.RFP, -8, asm.R0, asm.DWord),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.LoadMapPtr(asm.R2, m.FD()),
		asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, -8),
		asm.Mov.Imm(asm.R4, 0),
		asm.FnSockHashUpdate.Call(),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("out"),
		asm.Return(),
	}
}

// cgroup2 returns the place of the cgroup2 mount.
func cgroup2(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(b), "\n") {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "cgroup2" {
			return f[1]
		}
	}
	Missing(t, AbilityBypass, "a cgroup2 mount")
	return ""
}

func TestEnrolledSocketRefusesAnotherAgent(t *testing.T) {
	// An agent that comes second gets an error of its own, or passes
	// everything on: the connection lives.
	EachBypass(t, func(t *testing.T, p Path) {
		a := newAgent(t)
		f := Open(t, p, Serve(t, echo).Addr)
		c := f.Dial(t)
		if err := converse(c, 20, 1000); err != nil {
			t.Fatal(err)
		}
		err := Raw(c, a.hold)
		t.Logf("a second map: %v", err)
		if err == nil {
			t.Error("an enrolled socket went into a second sockmap")
		}
		if err := converse(c, 20, 1000); err != nil {
			t.Fatal(err)
		}
	})
}

func TestMPTCPClientIsServed(t *testing.T) {
	// shunt's own sockets have MPTCP off, so such a client falls back to TCP.
	EachPath(t, func(t *testing.T, p Path) {
		f := Open(t, p, Serve(t, echo).Addr)
		const conns = 5
		for range conns {
			c, is, err := DialMPTCP(f.Addr)
			if err != nil {
				t.Fatal(err)
			}
			if is {
				t.Error("the connection to the front is MPTCP")
			}
			if err := converse(c, 20, 1000); err != nil {
				t.Fatal(err)
			}
			c.Close()
		}
		f.CheckPath(t, conns*20_000, conns*20_000, 0)
		if on, err := os.ReadFile("/proc/sys/net/mptcp/enabled"); p.Bypass() && err == nil && on[0] == '1' {
			f.CheckCopied(t, "mptcp", conns)
		}
	})
}

func TestMPTCPServiceIsServed(t *testing.T) {
	// Go's listeners have MPTCP on by default: a service like that gets plain
	// TCP from shunt, and is bypassed like any other.
	EachPath(t, func(t *testing.T, p Path) {
		SkipForFault(t, p, "mptcp")
		var lc net.ListenConfig
		lc.SetMultipathTCP(true)
		ln, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		s := ServeListener(t, ln.(*net.TCPListener), echo)
		f := Open(t, p, s.Addr)
		for range 5 {
			if err := exchangeEcho(f.Addr, 20, 1000); err != nil {
				t.Fatal(err)
			}
		}
		f.CheckPath(t, 100_000, 100_000, 0.3)
	})
}

func TestReceiverBySpliceIsSaidAndLeft(t *testing.T) {
	// A service that reads by splice(2) sees nothing of redirected bytes.
	// shunt says so, counts it, and copies later connections to it.
	EachBypass(t, func(t *testing.T, p Path) {
		s := Serve(t, func(c *net.TCPConn) error {
			_, _ = io.Copy(c, c) // splice(2), as Go does it between two TCP connections
			return nil
		})
		// The bytes that the first connection leaves untaken hold up its end until this bound.
		f := Open(t, p, s.Addr, WithListener("half_open_timeout", `"2s"`))
		c := f.Dial(t)
		// Longer than it takes to be noticed; the first connection may be lost.
		_ = c.SetDeadline(time.Now().Add(15 * time.Second))
		err := converse(c, 20, 1000)
		t.Logf("the first connection: %v", err)
		var healed bool
		if err := Poll(25*time.Second, func() error {
			c, err := DialErr(nil, f.Addr)
			if err != nil {
				return err
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(time.Second))
			return converse(c, 20, 1000)
		}); err == nil {
			healed = true
		}
		c.Close()
		m, err := f.Shunt.Metrics()
		if err != nil {
			t.Fatal(err)
		}
		declined := m.Declined()
		if !healed || declined["upstream-stalled"] == 0 {
			t.Errorf("later connections work: %v; declined: %v", healed, declined)
		}
		if out := f.Shunt.Output(); !strings.Contains(out, `"level":"warn"`) {
			t.Error("shunt's log doesn't warn")
		}
	})
}

func TestKTLSOnAnEnrolledSocketIsHarmless(t *testing.T) {
	EachPath(t, func(t *testing.T, p Path) {
		s := Serve(t, func(c *net.TCPConn) error {
			if err := trySetULP(t, c); err != nil {
				return err
			}
			return echo(c)
		})
		f := Open(t, p, s.Addr)
		c := f.Dial(t)
		if err := converse(c, 5, 1000); err != nil {
			t.Fatal(err)
		}
		if err := trySetULP(t, c); err != nil {
			t.Fatal(err)
		}
		if err := converse(c, 20, 1000); err != nil {
			t.Fatal(err)
		}
	})
}

// trySetULP asks for kTLS without giving keys: refused, or without effect.
func trySetULP(t *testing.T, c *net.TCPConn) error {
	return Raw(c, func(fd int) error {
		err := unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_ULP, "tls")
		t.Logf("TCP_ULP tls: %v", err)
		return nil
	})
}

const (
	capNetAdmin = uintptr(unix.CAP_NET_ADMIN)
	capSysAdmin = uintptr(unix.CAP_SYS_ADMIN)
	capPerfmon  = uintptr(unix.CAP_PERFMON)
	capBPF      = uintptr(unix.CAP_BPF)
)

func TestMissingPrivilegesMeanCopying(t *testing.T) {
	// Each set of capabilities: shunt runs, serves, and says what is missing,
	// in its log and as a probe.
	if testing.Short() {
		t.Skip("end-to-end test, not run with -short")
	}
	NeedRoot(t)
	if b, err := os.ReadFile("/proc/sys/kernel/unprivileged_bpf_disabled"); err == nil {
		t.Logf("kernel.unprivileged_bpf_disabled is %s", b)
	}
	bin, err := Build()
	if err != nil {
		t.Fatal(err)
	}
	names := map[uintptr]string{capBPF: "CAP_BPF", capNetAdmin: "CAP_NET_ADMIN", capPerfmon: "CAP_PERFMON"}
	for _, c := range []struct {
		name    string
		caps    []uintptr
		missing []uintptr
	}{
		{"none", nil, []uintptr{capBPF, capNetAdmin, capPerfmon}},
		{"BPF", []uintptr{capBPF}, []uintptr{capNetAdmin, capPerfmon}},
		{"NET_ADMIN", []uintptr{capNetAdmin}, []uintptr{capBPF, capPerfmon}},
		{"PERFMON", []uintptr{capPerfmon}, []uintptr{capBPF, capNetAdmin}},
		{"BPF and NET_ADMIN", []uintptr{capBPF, capNetAdmin}, []uintptr{capPerfmon}},
		{"BPF and PERFMON", []uintptr{capBPF, capPerfmon}, []uintptr{capNetAdmin}},
		{"NET_ADMIN and PERFMON", []uintptr{capNetAdmin, capPerfmon}, []uintptr{capBPF}},
		{"SYS_ADMIN", []uintptr{capSysAdmin}, []uintptr{capNetAdmin}}, // it stands for the other two
		{"all three", []uintptr{capBPF, capNetAdmin, capPerfmon}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cfg := Configure(Off, fmt.Sprintf("127.0.0.1:%d", Port(t, nil)), Serve(t, echo).Addr)
			cfg.Listeners[0].Bypass = "on"
			if c.missing == nil {
				NeedBypass(t)
			}
			attr := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}, AmbientCaps: c.caps}
			s := StartShunt(t, cfg, Launch{Attr: attr})
			f := &Front{Path: Off, Addr: cfg.Listeners[0].Listen, Shunt: s}
			if c.missing == nil {
				f.Path = Every
			}
			for range 5 {
				if err := exchangeEcho(f.Addr, 100, 1000); err != nil {
					t.Fatal(err)
				}
			}
			f.CheckPath(t, 500_000, 500_000, 0.3)
			if c.missing != nil {
				f.CheckCopied(t, "unsupported", 5)
			}
			cmd := exec.Command(bin, "probe")
			cmd.SysProcAttr = attr
			probe, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				t.Fatal(err)
			}
			if want := map[bool]int{true: 0, false: 3}[c.missing == nil]; cmd.ProcessState.ExitCode() != want {
				t.Errorf("shunt probe: exit code %d, want %d", cmd.ProcessState.ExitCode(), want)
			}
			for what, out := range map[string]string{"the log": s.Output(), "shunt probe": string(probe)} {
				_, reason, ok := strings.Cut(out, "missing: ")
				if ok != (c.missing != nil) {
					t.Errorf("%s says that something is missing: %v\n%s", what, ok, out)
				}
				reason, _, _ = strings.Cut(reason, "(")
				for bit, name := range names {
					if want := slices.Contains(c.missing, bit); strings.Contains(reason, name) != want {
						t.Errorf("%s names %s as missing: %v; want %v\n%s", what, name, !want, want, out)
					}
				}
			}
		})
	}
}

func TestRequireRefusesToStartWithoutBypass(t *testing.T) {
	if testing.Short() {
		t.Skip("end-to-end test, not run with -short")
	}
	NeedRoot(t)
	bin, err := Build()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	file := dir + "/c.toml"
	if err := os.WriteFile(file, fmt.Appendf(nil, "[bypass]\nrequire = true\n[[listener]]\nname = \"a\"\nlisten = \"127.0.0.1:%d\"\nupstream = \"127.0.0.1:1\"\n", Port(t, nil)), 0o644); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	cmd := exec.Command("setpriv", "--bounding-set=-bpf,-net_admin,-perfmon,-sys_admin", "--inh-caps=-all", "--", bin, "run", "--config", file)
	cmd.Stdout, cmd.Stderr = &out, &out
	p, err := StartProcess(nil, cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer p.End(time.Second)
	if code, err := p.ExitCode(10 * time.Second); err != nil || code != 1 {
		t.Fatalf("exit code %d, %v; want 1\n%s", code, err, out.String())
	}
	if !strings.Contains(out.String(), "CAP_") {
		t.Errorf("the error doesn't name the capability:\n%s", out.String())
	}
}

func TestNoCgroup2MountMeansCopying(t *testing.T) {
	// In a mount namespace without any cgroup mount: with CAP_SYS_ADMIN shunt
	// may find the hierarchy in a way of its own, without it shunt copies and says why.
	if testing.Short() {
		t.Skip("end-to-end test, not run with -short")
	}
	NeedRoot(t)
	NeedProgram(t, "unshare")
	NeedProgram(t, "setpriv")
	for _, drop := range []string{"", "setpriv --bounding-set=-sys_admin --"} {
		t.Run(drop, func(t *testing.T) {
			cfg := Configure(Off, fmt.Sprintf("127.0.0.1:%d", Port(t, nil)), Serve(t, echo).Addr)
			cfg.Listeners[0].Bypass = "on"
			s := StartShunt(t, cfg, Launch{Prefix: []string{
				"unshare", "--mount", "--", "sh", "-c", `umount -l /sys/fs/cgroup && exec ` + drop + ` "$@"`, "sh"}})
			f := &Front{Path: Off, Addr: cfg.Listeners[0].Listen, Shunt: s}
			if err := exchangeEcho(f.Addr, 20, 1000); err != nil {
				t.Fatal(err)
			}
			m, err := f.Moved()
			if err != nil {
				t.Fatal(err)
			}
			if drop == "" && m.UpBypass > 0 {
				return
			}
			f.CheckPath(t, 20_000, 20_000, 0)
			f.CheckCopied(t, "unsupported", 1)
			if out := s.Output(); !strings.Contains(out, "cgroup") {
				t.Error("the log doesn't name cgroup2")
			}
		})
	}
}

func TestSIGKILLLeavesNothingInTheKernel(t *testing.T) {
	// No program stays attached to the cgroup: sockets born afterwards are plain.
	EachBypass(t, func(t *testing.T, p Path) {
		programs := func() (n int) {
			q, err := link.QueryPrograms(link.QueryOptions{Target: cgroupFD(t), Attach: ebpf.AttachCGroupSockOps})
			if err != nil {
				t.Fatal(err)
			}
			return len(q.Programs)
		}
		before := programs()
		f := Open(t, p, Serve(t, echo).Addr)
		if err := exchangeEcho(f.Addr, 2, 100); err != nil {
			t.Fatal(err)
		}
		if programs() <= before {
			t.Fatal("no program is attached while shunt runs")
		}
		f.Shunt.Signal(syscall.SIGKILL)
		if err := f.Shunt.Wait(5 * time.Second); err == nil {
			t.Fatal("shunt survived SIGKILL")
		}
		Until(t, 5*time.Second, "detaching", func() error {
			if n := programs(); n != before {
				return fmt.Errorf("%d programs are attached, %d before", n, before)
			}
			return nil
		})
	})
}

func cgroupFD(t *testing.T) int {
	t.Helper()
	f, err := os.Open(cgroup2(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return int(f.Fd())
}
