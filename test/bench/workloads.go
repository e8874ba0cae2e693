//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"shunt/test/harness"
)

// The workloads that targets refer to.
const (
	pingpong64       = "sockperf ping-pong 64 B, loopback" + onOneCPU
	pingpong1472ns   = "sockperf ping-pong 1472 B, netns to netns" + onOneCPU
	throughput1472ns = "sockperf throughput 1472 B, netns to netns"
	iperf16K         = "iperf3 16K writes"
	iperf128K        = "iperf3 128K writes"
	redisGet         = "redis-benchmark GET, 20 clients"
	nginx100         = "nginx 100 B to wrk, 16 connections"
	idleMemory       = "memory per idle connection"
	connections      = "connect, 1 B there and back, close"
)

// onOneCPU marks rows whose programs share one processor. A round trip between
// idle processors is mostly the time that they take to wake up, which
// depends on the machine (on a virtual one, tens of microseconds) and on where the scheduler
// happens to put the two ends.
const onOneCPU = ", one CPU"

// A workload is one row: a service, and a client that measures through a front.
type workload struct {
	name, unit string
	// netns puts client and service into two namespaces; the front is in the service's.
	netns bool
	// oneCPU keeps all programs of the row on one processor.
	oneCPU bool
	// paths, where it isn't nil, leaves out the others.
	paths []string
	// serve starts the service at host:port.
	serve func(b *bench, dir string, ns *harness.Netns, host string, port int) (stop func(), err error)
	// run measures through addr.
	run func(b *bench, c client) (value float64, raw string, err error)
}

// A client is what a workload's client needs to know.
type client struct {
	ctx        context.Context
	ns         *harness.Netns
	host, port string
	cgroup     *os.File
	// front is the program in front of the service, nil for none.
	front *harness.Process
}

// tool runs a load tool from the client's side.
func (c client) tool(argv ...string) (string, error) {
	cmd := exec.CommandContext(c.ctx, argv[0], argv[1:]...)
	if c.cgroup != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(c.cgroup.Fd())}
	}
	p, err := harness.StartProcess(c.ns, cmd)
	if err != nil {
		return "", err
	}
	if err := p.Wait(60 * time.Second); err != nil {
		p.End(time.Second)
		return p.Output(), fmt.Errorf("%s: %w: %s", argv[0], err, p.Output())
	}
	return p.Output(), nil
}

// program is a serve function for a program that listens by itself.
func program(argv func(dir, host, port string) ([]string, error)) func(*bench, string, *harness.Netns, string, int) (func(), error) {
	return func(_ *bench, dir string, ns *harness.Netns, host string, port int) (func(), error) {
		a, err := argv(dir, host, strconv.Itoa(port))
		if err != nil {
			return nil, err
		}
		p, err := harness.StartProcess(ns, exec.Command(a[0], a[1:]...))
		if err != nil {
			return nil, err
		}
		if err := harness.WaitListening(ns, net.JoinHostPort(host, strconv.Itoa(port)), p, 20*time.Second); err != nil {
			p.End(time.Second)
			return nil, err
		}
		return func() { p.End(5 * time.Second) }, nil
	}
}

func first(names ...string) string {
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return names[0]
}

func number1(re *regexp.Regexp, out string) (float64, error) {
	m := re.FindStringSubmatch(out)
	if m == nil {
		return 0, fmt.Errorf("no figure in the output: %s", out)
	}
	return strconv.ParseFloat(m[1], 64)
}

var (
	latency  = regexp.MustCompile(`Summary: Latency is ([0-9.]+) usec`)
	rate     = regexp.MustCompile(`Summary: Message Rate is ([0-9.]+)`)
	faults   = regexp.MustCompile(`# dropped messages = (\d+); # duplicated messages = (\d+); # out-of-order messages = (\d+)`)
	requests = regexp.MustCompile(`Requests/sec:\s+([0-9.]+)`)
	redisCSV = regexp.MustCompile(`"GET","([0-9.]+)"`)
)

func workloads() []*workload {
	sockperfd := program(func(_, host, port string) ([]string, error) {
		return []string{"sockperf", "server", "--tcp", "-i", host, "-p", port}, nil
	})
	iperfd := program(func(_, host, port string) ([]string, error) {
		return []string{"iperf3", "-s", "-B", host, "-p", port}, nil
	})
	var list []*workload
	for _, ns := range []bool{false, true} {
		where := map[bool]string{false: "loopback", true: "netns to netns"}[ns]
		for _, size := range []int{64, 1472} {
			pingpong := &workload{name: fmt.Sprintf("sockperf ping-pong %d B, %s", size, where), unit: "us", netns: ns, serve: sockperfd,
				run: func(b *bench, c client) (float64, string, error) {
					out, err := c.tool("sockperf", "ping-pong", "--tcp", "-i", c.host, "-p", c.port, "-t", strconv.Itoa(b.seconds), "-m", strconv.Itoa(size))
					if err != nil {
						return 0, out, err
					}
					if m := faults.FindStringSubmatch(out); m == nil || m[1] != "0" || m[2] != "0" || m[3] != "0" {
						return 0, out, fmt.Errorf("sockperf: dropped, duplicated, out of order: %v", m)
					}
					v, err := number1(latency, out)
					return v, out, err
				}}
			pinned := *pingpong
			pinned.name, pinned.oneCPU = pingpong.name+onOneCPU, true
			list = append(list, pingpong, &pinned,
				&workload{name: fmt.Sprintf("sockperf throughput %d B, %s", size, where), unit: "msg/s", netns: ns, serve: sockperfd,
					run: func(b *bench, c client) (float64, string, error) {
						out, err := c.tool("sockperf", "throughput", "--tcp", "-i", c.host, "-p", c.port, "-t", strconv.Itoa(b.seconds), "-m", strconv.Itoa(size))
						if err != nil {
							return 0, out, err
						}
						v, err := number1(rate, out)
						return v, out, err
					}})
		}
	}
	for _, size := range []string{"64", "1K", "16K", "128K", "256K"} {
		name := fmt.Sprintf("iperf3 %s writes", size)
		if size == "64" {
			name = "iperf3 64 B writes"
		}
		list = append(list, &workload{name: name, unit: "Gbit/s", serve: iperfd,
			run: func(b *bench, c client) (float64, string, error) {
				out, err := c.tool("iperf3", "-c", c.host, "-p", c.port, "-t", strconv.Itoa(b.seconds), "-l", size, "--json")
				if err != nil {
					return 0, out, err
				}
				var report struct {
					Error string
					End   struct {
						SumReceived struct {
							BitsPerSecond float64 `json:"bits_per_second"`
						} `json:"sum_received"`
					}
				}
				if err := json.Unmarshal([]byte(out), &report); err != nil || report.Error != "" {
					return 0, out, fmt.Errorf("iperf3: %v %s", err, report.Error)
				}
				return report.End.SumReceived.BitsPerSecond / 1e9, out, nil
			}})
	}
	list = append(list,
		&workload{name: redisGet, unit: "req/s",
			serve: program(func(dir, host, port string) ([]string, error) {
				return []string{"redis-server", "--port", port, "--bind", host, "--save", "", "--appendonly", "no", "--dir", dir}, nil
			}),
			run: func(b *bench, c client) (float64, string, error) {
				out, err := c.tool("redis-benchmark", "-h", c.host, "-p", c.port, "-c", "20", "-t", "get", "-n", strconv.Itoa(60_000*b.seconds), "--csv")
				if err != nil {
					return 0, out, err
				}
				v, err := number1(redisCSV, out)
				return v, out, err
			}},
		&workload{name: nginx100, unit: "req/s",
			serve: program(func(dir, host, port string) ([]string, error) {
				conf := filepath.Join(dir, "nginx.conf")
				err := errors.Join(os.WriteFile(filepath.Join(dir, "f"), harness.Payload(1, 100), 0o644), os.Chmod(dir, 0o755),
					os.WriteFile(conf, fmt.Appendf(nil, `daemon off;
worker_processes 1;
pid %[1]s/pid;
error_log stderr;
events { worker_connections 1024; }
http {
    access_log off;
    keepalive_requests 100000000;
    client_body_temp_path %[1]s; proxy_temp_path %[1]s; fastcgi_temp_path %[1]s; uwsgi_temp_path %[1]s; scgi_temp_path %[1]s;
    server { listen %[2]s:%[3]s; root %[1]s; }
}
`, dir, host, port), 0o644))
				return []string{first("nginx", "/usr/sbin/nginx"), "-c", conf, "-p", dir}, err
			}),
			run: func(b *bench, c client) (float64, string, error) {
				out, err := c.tool("wrk", "-t1", "-c16", fmt.Sprintf("-d%ds", b.seconds), "http://"+net.JoinHostPort(c.host, c.port)+"/f")
				if err != nil {
					return 0, out, err
				}
				if strings.Contains(out, "Socket errors") || strings.Contains(out, "Non-2xx") {
					return 0, out, errors.New("wrk saw errors")
				}
				v, err := number1(requests, out)
				return v, out, err
			}},
		&workload{name: connections, unit: "conn/s", serve: serveConnections, run: connect},
		&workload{name: idleMemory, unit: "KiB", serve: serveEcho, run: idle,
			paths: []string{"every", "window", "off", "haproxy", "socat", "as-socat"}},
	)
	return list
}

// serveEcho answers within this process.
func serveEcho(_ *bench, _ string, ns *harness.Netns, host string, port int) (func(), error) {
	ln, err := ns.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := ln.AcceptTCP()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				buf := make([]byte, 1024)
				for {
					n, err := c.Read(buf)
					if err != nil {
						return
					}
					if _, err := c.Write(buf[:n]); err != nil {
						return
					}
				}
			}()
		}
	}()
	return func() { ln.Close() }, nil
}

// open connects and lets one byte travel both ways.
func open(addr string) (net.Conn, error) {
	c, err := net.DialTimeout("tcp", addr, 10*time.Second)
	if err != nil {
		return nil, err
	}
	one := []byte{1}
	err = c.SetDeadline(time.Now().Add(20 * time.Second))
	if err == nil {
		_, err = c.Write(one)
	}
	if err == nil {
		_, err = io.ReadFull(c, one)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// idle is the memory of the front's processes for each of many connections
// that have been used once and do nothing.
func idle(_ *bench, c client) (float64, string, error) {
	const conns = 3000
	// What the first connections bring in stays for all of them.
	for range 100 {
		conn, err := open(net.JoinHostPort(c.host, c.port))
		if err != nil {
			return 0, "", err
		}
		conn.Close()
	}
	before, err := settled(c.front.Pid())
	if err != nil {
		return 0, "", err
	}
	slab := slabBytes()
	list := make([]net.Conn, 0, conns)
	defer func() {
		for _, conn := range list {
			conn.Close()
		}
	}()
	for range conns {
		conn, err := open(net.JoinHostPort(c.host, c.port))
		if err != nil {
			return 0, "", fmt.Errorf("connection %d: %w", len(list), err)
		}
		list = append(list, conn)
	}
	after, err := settled(c.front.Pid())
	if err != nil {
		return 0, "", err
	}
	raw := fmt.Sprintf("%d connections: anonymous memory %d -> %d bytes, kernel slab per connection (all four sockets) %d bytes\n",
		conns, before, after, (slabBytes()-slab)/conns)
	return float64(after-before) / conns / 1024, raw, nil
}

// settled is the memory of a process and its children once it has not become
// less for three seconds.
func settled(pid int) (int64, error) {
	least, err := memory(pid)
	for quiet := 0; quiet < 3 && err == nil; quiet++ {
		time.Sleep(time.Second)
		var now int64
		if now, err = memory(pid); now < least {
			least, quiet = now, -1
		}
	}
	return least, err
}

// memory adds up the anonymous memory of a process and its children, shared
// pages by their share.
func memory(pid int) (int64, error) {
	pids := []int{pid}
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0, err
	}
	for _, file := range stats {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // gone meanwhile
		}
		f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
		child, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err == nil && len(f) > 1 && f[1] == strconv.Itoa(pid) {
			pids = append(pids, child)
		}
	}
	var sum int64
	for _, p := range pids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", p))
		if err != nil {
			continue // gone meanwhile
		}
		sum += field(string(b), "Pss_Anon:")
	}
	return sum, nil
}

func slabBytes() int64 {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	return field(string(b), "Slab:")
}

func field(text, key string) int64 {
	for _, line := range strings.Split(text, "\n") {
		if f := strings.Fields(line); len(f) > 1 && f[0] == key {
			kb, _ := strconv.ParseInt(f[1], 10, 64)
			return kb << 10
		}
	}
	return 0
}

type bench struct {
	options
	raw     string
	results results
	errors  []string
}

// measure runs one workload on each path.
func (b *bench) measure(ctx context.Context, w *workload, round int) error {
	var clientNS, serviceNS *harness.Netns
	host := "127.0.0.1"
	if w.netns {
		var err error
		var remove func()
		if clientNS, remove, err = harness.MakeNetns(); err != nil {
			return err
		}
		defer remove()
		if serviceNS, remove, err = harness.MakeNetns(); err != nil {
			return err
		}
		defer remove()
		if err := harness.Link(clientNS, serviceNS, 200); err != nil {
			return err
		}
		host = harness.LinkAddr(200, 2).String()
	}
	if w.oneCPU {
		restore, err := keepOnOneCPU()
		if err != nil {
			return err
		}
		defer restore()
	}
	// Each round begins with another path.
	for i := range b.paths {
		path := b.paths[(i+round)%len(b.paths)]
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if w.paths != nil && !slices.Contains(w.paths, path) || path == unpaired && w.name != iperf128K {
			continue
		}
		value, raw, err := b.one(ctx, w, path, clientNS, serviceNS, host)
		name := strings.NewReplacer(" ", "-", ",", "").Replace(fmt.Sprintf("%s_%s_%d.txt", w.name, path, round))
		if err := os.WriteFile(filepath.Join(b.raw, name), []byte(raw), 0o644); err != nil {
			return err
		}
		if err != nil {
			b.errors = append(b.errors, fmt.Sprintf("%s, %s, round %d: %.300v", w.name, path, round+1, err))
			continue
		}
		fmt.Fprintf(os.Stderr, "  %-10s %s %s\n", path, number(value), w.unit)
		if b.results[w.name] == nil {
			b.results[w.name] = map[string][]float64{}
		}
		b.results[w.name][path] = append(b.results[w.name][path], value)
	}
	return nil
}

// keepOnOneCPU keeps this process, and what it starts, on one of its
// processors until the returned function is called.
func keepOnOneCPU() (restore func(), err error) {
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return nil, fmt.Errorf("sched_getaffinity: %w", err)
	}
	// The last one: interrupts mostly go to the first.
	for cpu := range 8 * int(unsafe.Sizeof(all)) {
		if all.IsSet(cpu) {
			one.Zero()
			one.Set(cpu)
		}
	}
	return func() { setAffinity(&all) }, setAffinity(&one)
}

// setAffinity sets it for every thread: new ones inherit theirs.
func setAffinity(set *unix.CPUSet) error {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	for _, t := range tasks {
		tid, err := strconv.Atoi(t.Name())
		if err != nil {
			continue
		}
		if err := unix.SchedSetaffinity(tid, set); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("sched_setaffinity: %w", err)
		}
	}
	return nil
}

func (b *bench) one(ctx context.Context, w *workload, path string, clientNS, serviceNS *harness.Netns, host string) (float64, string, error) {
	dir, err := os.MkdirTemp("", "shunt-bench-")
	if err != nil {
		return 0, "", err
	}
	defer os.RemoveAll(dir)
	port, err := harness.FreePort(serviceNS)
	if err != nil {
		return 0, "", err
	}
	stop, err := w.serve(b, dir, serviceNS, host, port)
	if err != nil {
		return 0, "", err
	}
	defer stop()
	upstream := net.JoinHostPort(host, strconv.Itoa(port))
	c := client{ctx: ctx, ns: clientNS, host: host, port: strconv.Itoa(port)}
	if path == "direct" {
		return w.run(b, c)
	}
	front, err := harness.FreePort(serviceNS)
	if err != nil {
		return 0, "", err
	}
	c.port = strconv.Itoa(front)
	listen := net.JoinHostPort(host, c.port)
	p := harness.Path(path)
	if path == unpaired {
		p = harness.Every
		var remove func()
		if c.cgroup, remove, err = childCgroup(); err != nil {
			return 0, "", err
		}
		defer remove()
	}
	if !p.Shunt() {
		proc, err := harness.StartPeer(p, dir, listen, upstream, serviceNS)
		if err != nil {
			return 0, "", err
		}
		defer proc.End(5 * time.Second)
		if err := harness.WaitListening(serviceNS, listen, proc, 5*time.Second); err != nil {
			return 0, "", err
		}
		c.front = proc
		value, raw, err := w.run(b, c)
		if err != nil || p != harness.AsSocat {
			return value, raw, err
		}
		m, err := harness.Scrape(harness.AdminSocket(dir))
		if err == nil && m.Sum("shunt_bytes_total", "path", "bypass") == 0 {
			err = fmt.Errorf("nothing was bypassed, declined %v", m.Declined())
		}
		return value, raw, err
	}
	cfg := harness.Configure(p, listen, upstream)
	cfg.Log = map[string]string{"level": `"warn"`}
	cfg.Bypass["queue_limit"] = `"4MiB"`
	launch := harness.Launch{Netns: serviceNS}
	if c.cgroup != nil {
		cfg.Bypass["cgroup"] = strconv.Quote(c.cgroup.Name())
		launch.Attr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(c.cgroup.Fd())}
	}
	s, err := harness.NewShunt(dir, cfg, launch)
	if err != nil {
		return 0, "", err
	}
	defer s.End(5 * time.Second)
	c.front = s.Process
	value, raw, err := w.run(b, c)
	if err != nil {
		return 0, raw, err
	}
	// What was measured must be what the column says.
	m, err := s.Metrics()
	if err != nil {
		return 0, raw, err
	}
	bypass, copied := m.Sum("shunt_bytes_total", "path", "bypass"), m.Sum("shunt_bytes_total", "path", "copy")
	raw += fmt.Sprintf("\nshunt: %.0f bytes bypassed, %.0f copied, %.0f verdict runs, %.0f waits, declined %v\n",
		bypass, copied, m.Sum("shunt_verdict_runs_total"), m.Sum("shunt_queue_waits_total"), m.Declined())
	if (path == unpaired || !p.Bypass()) && bypass > 0 || path != unpaired && p.Bypass() && bypass == 0 {
		return 0, raw, fmt.Errorf("the wrong path: %.0f bytes bypassed, %.0f copied, declined %v", bypass, copied, m.Declined())
	}
	return value, raw, nil
}

// childCgroup makes a cgroup below the root of the cgroup2 hierarchy.
func childCgroup() (*os.File, func(), error) {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, nil, err
	}
	for _, line := range strings.Split(string(b), "\n") {
		f := strings.Fields(line)
		if len(f) < 3 || f[2] != "cgroup2" {
			continue
		}
		dir, err := os.MkdirTemp(f[1], "shunt-bench-")
		if err != nil {
			return nil, nil, err
		}
		file, err := os.Open(dir)
		if err != nil {
			return nil, nil, errors.Join(err, os.Remove(dir))
		}
		return file, func() {
			file.Close()
			// The last process may still be leaving.
			_ = harness.Poll(5*time.Second, func() error { return os.Remove(dir) })
		}, nil
	}
	return nil, nil, errors.New("no cgroup2 mount")
}
