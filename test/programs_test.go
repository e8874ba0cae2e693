//go:build linux

package test

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	. "shunt/test/harness"
)

// tool runs a program to its end and returns what it wrote to standard output.
func tool(t *testing.T, limit time.Duration, argv ...string) string {
	t.Helper()
	var out, errs strings.Builder
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	p, err := StartProcess(nil, cmd)
	if err != nil {
		t.Fatal(err)
	}
	err = p.Wait(limit)
	if err != nil {
		p.End(time.Second)
		t.Fatalf("%s: %v\n%s%s", strings.Join(argv, " "), err, out.String(), errs.String())
	}
	return out.String()
}

// server starts a program and waits until it listens at addr.
func server(t *testing.T, addr string, attr *syscall.SysProcAttr, argv ...string) {
	t.Helper()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.SysProcAttr = attr
	p := Run(t, nil, cmd)
	if err := WaitListening(nil, addr, p, 20*time.Second); err != nil {
		t.Fatal(err)
	}
}

func loopback(t *testing.T) (addr, port string) {
	t.Helper()
	n := Port(t, nil)
	return fmt.Sprintf("127.0.0.1:%d", n), strconv.Itoa(n)
}

// portOf is the port of a front's address.
func portOf(f *Front) string { return f.Addr[strings.LastIndexByte(f.Addr, ':')+1:] }

// checkPrograms fails unless the bytes took the front's path; how many there are is the programs' business.
func checkPrograms(t *testing.T, f *Front, share float64) {
	t.Helper()
	if f.Shunt == nil {
		return
	}
	m, err := f.Moved()
	if err != nil {
		t.Fatal(err)
	}
	bypass, all := m.UpBypass+m.DownBypass, m.UpBypass+m.DownBypass+m.UpCopy+m.DownCopy
	if all == 0 || !f.Path.Bypass() && bypass > 0 || f.Path.Bypass() && float64(bypass) < share*float64(all) {
		s, _ := f.Shunt.Metrics()
		t.Errorf("%d of %d bytes took the bypass: %+v, declined %v", bypass, all, m, s.Declined())
	}
}

func TestNginxServesFilesWhole(t *testing.T) {
	nginx, curl, wrk := NeedProgram(t, "nginx", "/usr/sbin/nginx"), NeedProgram(t, "curl"), NeedProgram(t, "wrk")
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	hashes := map[string]string{}
	for i, size := range append([]int64{100, 1000, 200_000, mib}, sizes...) {
		name := fmt.Sprintf("f%d", size)
		data := Payload(uint64(i), int(size))
		sum := sha256.Sum256(data)
		hashes[name] = hex.EncodeToString(sum[:])
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	addr, _ := loopback(t)
	conf := filepath.Join(dir, "nginx.conf")
	text := fmt.Sprintf(`daemon off;
user root;
worker_processes 2;
pid %[1]s/pid;
error_log stderr;
events { worker_connections 1024; }
http {
    access_log off;
    sendfile on;
    keepalive_requests 1000000;
    client_body_temp_path %[1]s; proxy_temp_path %[1]s; fastcgi_temp_path %[1]s; uwsgi_temp_path %[1]s; scgi_temp_path %[1]s;
    server { listen %[2]s; root %[1]s; }
}
`, dir, addr)
	if os.Geteuid() != 0 {
		text = strings.Replace(text, "user root;\n", "", 1)
	}
	if err := os.WriteFile(conf, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	server(t, addr, nil, nginx, "-c", conf, "-p", dir)
	EachPath(t, func(t *testing.T, p Path) {
		f := Open(t, p, addr)
		for name, hash := range hashes {
			for _, option := range []string{"--http1.1", "--http1.0"} {
				file := filepath.Join(t.TempDir(), name)
				tool(t, Patience, curl, "-sS", "--fail", option, "-o", file, "http://"+f.Addr+"/"+name)
				got, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				if sum := sha256.Sum256(got); hex.EncodeToString(sum[:]) != hash {
					t.Errorf("%s (%s): %d bytes, hash differs", name, option, len(got))
				}
			}
		}
		for _, name := range []string{"f100", "f200000"} {
			out := tool(t, Patience, wrk, "-t2", "-c16", "-d2s", "http://"+f.Addr+"/"+name)
			if strings.Contains(out, "Socket errors") || strings.Contains(out, "Non-2xx") || !strings.Contains(out, "Requests/sec") {
				t.Errorf("wrk: %s", out)
			}
		}
		checkPrograms(t, f, 0.3)
	})
}

func TestRedisAnswersItsBenchmark(t *testing.T) {
	redis, bench := NeedProgram(t, "redis-server"), NeedProgram(t, "redis-benchmark")
	addr, port := loopback(t)
	server(t, addr, nil, redis, "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", t.TempDir())
	EachPath(t, func(t *testing.T, p Path) {
		f := Open(t, p, addr)
		for _, extra := range [][]string{
			{"-t", "set,get,lrange_100", "-c", "20"},
			{"-t", "set,get", "-c", "20", "-P", "16"},
			{"-t", "set,get", "-c", "5", "-d", "100000", "-n", "2000"},
		} {
			argv := append([]string{bench, "-h", "127.0.0.1", "-p", portOf(f), "-n", "20000", "-q"}, extra...)
			out := tool(t, Patience, argv...)
			if strings.Contains(strings.ToLower(out), "error") || !strings.Contains(out, "GET") {
				t.Errorf("redis-benchmark %v: %s", extra, out)
			}
		}
		checkPrograms(t, f, 0.3)
	})
}

func TestPostgreSQLKeepsItsTables(t *testing.T) {
	NeedRoot(t)
	dirs, err := filepath.Glob("/usr/lib/postgresql/*/bin")
	if err != nil || len(dirs) == 0 {
		Missing(t, AbilityPrograms, "the PostgreSQL server")
	}
	bin := dirs[len(dirs)-1]
	psql := NeedProgram(t, "psql")
	account, err := user.Lookup("postgres")
	if err != nil {
		Missing(t, AbilityPrograms, "the user postgres")
	}
	uid, err1 := strconv.Atoi(account.Uid)
	gid, err2 := strconv.Atoi(account.Gid)
	if err1 != nil || err2 != nil {
		t.Fatal(err1, err2)
	}
	attr := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	data, err := os.MkdirTemp("", "shunt-pg-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(data) })
	if err := os.Chown(data, uid, gid); err != nil {
		t.Fatal(err)
	}
	initdb := exec.Command(filepath.Join(bin, "initdb"), "-D", data, "-A", "trust", "-U", "test", "-N", "--locale=C", "-E", "UTF8")
	initdb.Dir, initdb.SysProcAttr = data, attr
	if out, err := initdb.CombinedOutput(); err != nil {
		t.Fatalf("initdb: %v\n%s", err, out)
	}
	addr, port := loopback(t)
	server(t, addr, attr, filepath.Join(bin, "postgres"), "-D", data, "-p", port, "-c", "listen_addresses=127.0.0.1",
		"-c", "unix_socket_directories=", "-c", "fsync=off", "-c", "full_page_writes=off")
	dsn := func(port string) string { return "host=127.0.0.1 user=test dbname=postgres port=" + port }
	Until(t, 20*time.Second, "PostgreSQL", func() error {
		out, err := exec.Command(psql, dsn(port), "-c", "select 1").CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
	tool(t, Patience, filepath.Join(bin, "pgbench"), "-i", "-q", "-h", "127.0.0.1", "-p", port, "-U", "test", "postgres")
	EachPath(t, func(t *testing.T, p Path) {
		f := Open(t, p, addr)
		out := tool(t, Patience, psql, dsn(portOf(f)), "-At", "-c", "select md5(string_agg(i::text, ',')) from generate_series(1, 500000) i",
			"-c", "select repeat('shunt', 2000000)")
		lines := strings.Split(strings.TrimSpace(out), "\n")
		if len(lines) != 2 || len(lines[0]) != 32 || lines[1] != strings.Repeat("shunt", 2_000_000) {
			t.Errorf("psql printed %d lines, %d bytes", len(lines), len(out))
		}
		for _, extra := range [][]string{{"-S"}, {"-N", "-M", "prepared"}} {
			argv := append([]string{filepath.Join(bin, "pgbench"), "-n", "-c", "8", "-j", "2", "-T", "2", "-h", "127.0.0.1", "-p", portOf(f), "-U", "test"}, extra...)
			out := tool(t, Patience, append(argv, "postgres")...)
			if !strings.Contains(out, "number of failed transactions: 0 ") {
				t.Errorf("pgbench %v: %s", extra, out)
			}
		}
		checkPrograms(t, f, 0.3)
	})
}

func TestSSHSpeaksFirst(t *testing.T) {
	NeedRoot(t)
	sshd, ssh, keygen := NeedProgram(t, "/usr/sbin/sshd"), NeedProgram(t, "ssh"), NeedProgram(t, "ssh-keygen")
	dir := t.TempDir()
	for _, key := range []string{"host", "user"} {
		tool(t, Patience, keygen, "-q", "-t", "ed25519", "-N", "", "-f", filepath.Join(dir, key))
	}
	// sshd insists on its folder for the separation of privileges.
	if err := os.MkdirAll("/run/sshd", 0o755); err != nil {
		t.Fatal(err)
	}
	addr, port := loopback(t)
	conf := filepath.Join(dir, "sshd_config")
	if err := os.WriteFile(conf, fmt.Appendf(nil, `Port %s
ListenAddress 127.0.0.1
HostKey %[2]s/host
AuthorizedKeysFile %[2]s/user.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
MaxStartups 100
`, port, dir), 0o644); err != nil {
		t.Fatal(err)
	}
	server(t, addr, nil, sshd, "-D", "-e", "-f", conf)
	EachPath(t, func(t *testing.T, p Path) {
		f := Open(t, p, addr)
		argv := []string{ssh, "-F", "none", "-i", filepath.Join(dir, "user"), "-p", portOf(f), "-o", "BatchMode=yes",
			"-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "root@127.0.0.1"}
		if out := tool(t, Patience, append(argv, "echo hello")...); out != "hello\n" {
			t.Errorf("ssh printed %q", out)
		}
		if out := tool(t, Patience, append(argv, "head -c 20000000 /dev/zero | tr '\\0' x")...); len(out) != 20_000_000 || strings.Trim(out, "x") != "" {
			t.Errorf("ssh printed %d bytes", len(out))
		}
		checkPrograms(t, f, 0.3)
	})
}

func TestIperf3BothWays(t *testing.T) {
	iperf := NeedProgram(t, "iperf3")
	addr, port := loopback(t)
	server(t, addr, nil, iperf, "-s", "-B", "127.0.0.1", "-p", port)
	EachPath(t, func(t *testing.T, p Path) {
		f := Open(t, p, addr)
		for _, extra := range [][]string{{}, {"-R"}, {"--bidir"}, {"-P", "4", "-l", "1K"}} {
			argv := append([]string{iperf, "-c", "127.0.0.1", "-p", portOf(f), "-t", "1", "--json"}, extra...)
			out := tool(t, 30*time.Second, argv...)
			var report struct {
				Error string
				End   struct {
					SumSent     struct{ Bytes float64 } `json:"sum_sent"`
					SumReceived struct{ Bytes float64 } `json:"sum_received"`
				}
			}
			if err := json.Unmarshal([]byte(out), &report); err != nil || report.Error != "" {
				t.Errorf("iperf3 %v: %v %s", extra, err, report.Error)
			}
			if report.End.SumReceived.Bytes < mib {
				t.Errorf("iperf3 %v: only %v bytes arrived", extra, report.End.SumReceived.Bytes)
			}
		}
		checkPrograms(t, f, 0.2)
	})
}

var sockperfErrors = regexp.MustCompile(`# dropped messages = (\d+); # duplicated messages = (\d+); # out-of-order messages = (\d+)`)

func TestSockperfLosesNoMessage(t *testing.T) {
	sockperf := NeedProgram(t, "sockperf")
	EachPath(t, func(t *testing.T, p Path) {
		for _, mode := range [][]string{{"ping-pong", "-m", "64"}, {"ping-pong", "-m", "1472"}, {"under-load", "-m", "64", "--mps", "20000"}, {"throughput", "-m", "1472"}} {
			t.Run(strings.Join(mode, " "), func(t *testing.T) {
				addr, port := loopback(t)
				server(t, addr, nil, sockperf, "server", "--tcp", "-i", "127.0.0.1", "-p", port)
				f := Open(t, p, addr)
				argv := append([]string{sockperf}, mode...)
				out := tool(t, 30*time.Second, append(argv, "--tcp", "-i", "127.0.0.1", "-p", portOf(f), "-t", "1")...)
				if mode[0] == "throughput" {
					if !strings.Contains(out, "Total of") {
						t.Errorf("sockperf: %s", out)
					}
				} else if m := sockperfErrors.FindStringSubmatch(out); m == nil || m[1] != "0" || m[2] != "0" || m[3] != "0" {
					t.Errorf("sockperf lost messages: %v\n%s", m, out)
				}
				checkPrograms(t, f, 0.1)
			})
		}
	})
}

func TestPythonEndpoints(t *testing.T) {
	python := NeedProgram(t, "python3")
	script, err := filepath.Abs("testdata/echo.py")
	if err != nil {
		t.Fatal(err)
	}
	EachPath(t, func(t *testing.T, p Path) {
		for _, way := range []string{"blocking", "select", "epoll-level", "epoll-edge"} {
			t.Run(way, func(t *testing.T) {
				addr, port := loopback(t)
				server(t, addr, nil, python, script, "serve", port, way)
				f := Open(t, p, addr)
				const n = 8 * mib
				tool(t, Patience, python, script, "ask", portOf(f), way, strconv.Itoa(n))
				f.CheckPath(t, n, n, 0.05)
			})
		}
	})
}

func TestCClients(t *testing.T) {
	gcc := NeedProgram(t, "gcc", "cc")
	bin := filepath.Join(t.TempDir(), "client")
	tool(t, Patience, gcc, "-O1", "-Wall", "-o", bin, "testdata/client.c")
	EachPath(t, func(t *testing.T, p Path) {
		f := Open(t, p, Serve(t, echo).Addr)
		var all int64
		for _, way := range []string{"blocking", "poll", "epoll-level", "epoll-edge"} {
			for _, n := range []int64{1, 100_000, 16 * mib} {
				tool(t, Patience, bin, "127.0.0.1", portOf(f), strconv.FormatInt(n, 10), way)
				all += n
			}
		}
		f.CheckPath(t, all, all, 0.05)
	})
}
