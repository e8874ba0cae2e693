//go:build linux

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"shunt/test/kernels/record"
)

// initWithin is how long a guest may take until its init runs.
const initWithin = 2 * time.Minute

// tries is how often a guest is started that dies before its init runs: QEMU's
// emulation does that now and then.
const tries = 4

// accel is how QEMU runs the guest's instructions.
type accel struct{ name, cpu string }

var (
	kvm = accel{"kvm", "host"}
	tcg = accel{"tcg,thread=multi", "max"}
)

// cpuFor is the processor to emulate for a kernel. With cx16, a third of the
// boots of 6.12 failed in QEMU 7.2; without it BPF gets no memory for its socket
// storage from 6.19 on (kmalloc_nolock needs cmpxchg16b).
func (a accel) cpuFor(version string) string {
	var major, minor int
	if n, _ := fmt.Sscanf(version, "%d.%d", &major, &minor); a == tcg && n == 2 && major*100+minor < 618 {
		return a.cpu + ",-cx16"
	}
	return a.cpu
}

// A guest is a kernel with what it is to do.
type guest struct {
	image, initramfs string
	accel            accel
	version          string // of the kernel
	cpus, mib        int
	dir              string // for its logs
	limit            time.Duration
	params           string // added to the kernel's command line
	each             func(record.Record)
}

var errBeforeInit = errors.New("the guest ended before its init ran")

// boot runs the guest until it has said record.End, has ended, or the limit is over.
func (g *guest) boot(ctx context.Context) (err error) {
	for n := range tries {
		err = g.try(ctx, n)
		if !errors.Is(err, errBeforeInit) || ctx.Err() != nil {
			return err
		}
	}
	return fmt.Errorf("%w, %d times; the last lines of its console:\n%s", err, tries, consoleTail(filepath.Join(g.dir, "console.log")))
}

func (g *guest) try(ctx context.Context, n int) error {
	ctx, cancel := context.WithTimeout(ctx, g.limit)
	defer cancel()
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer read.Close()
	console, err := os.Create(filepath.Join(g.dir, "console.log"))
	if err != nil {
		write.Close()
		return err
	}
	defer console.Close()
	report, err := os.Create(filepath.Join(g.dir, "report.jsonl"))
	if err != nil {
		write.Close()
		return err
	}
	defer report.Close()
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64",
		"-accel", g.accel.name, "-cpu", g.accel.cpuFor(g.version), "-M", "q35", "-m", fmt.Sprint(g.mib), "-smp", fmt.Sprint(g.cpus),
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-monitor", "none",
		"-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
		"-chardev", "file,id=report,path=/dev/fd/3", "-serial", "chardev:report",
		"-kernel", g.image, "-initrd", g.initramfs,
		"-append", "console=ttyS0 panic=-1 loglevel=5 "+g.params)
	cmd.ExtraFiles = []*os.File{write}
	cmd.Stdout, cmd.Stderr = console, console
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Start(); err != nil {
		write.Close()
		return err
	}
	write.Close()
	early := time.AfterFunc(initWithin, cancel)
	defer early.Stop()
	begun, ended := false, false
	s := bufio.NewScanner(read)
	s.Buffer(nil, 4<<20)
	for s.Scan() {
		var r record.Record
		if err := json.Unmarshal(s.Bytes(), &r); err != nil {
			continue // cut off by the guest's end
		}
		fmt.Fprintf(report, "%s\n", s.Bytes())
		switch r.Kind {
		case record.Begin:
			begun = true
			early.Stop()
		case record.End:
			ended = true
		}
		g.each(r)
	}
	waitErr := cmd.Wait()
	switch {
	case ended:
		return nil
	case !begun:
		return fmt.Errorf("%w (try %d, %v)", errBeforeInit, n+1, waitErr)
	case ctx.Err() != nil:
		return fmt.Errorf("not done after %v", g.limit)
	}
	// QEMU exits with 0 also when the guest has panicked.
	return fmt.Errorf("the guest died (%v); the last lines of its console:\n%s", waitErr, consoleTail(filepath.Join(g.dir, "console.log")))
}

func consoleTail(file string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-12):], "\n")
}

// chooseAccel boots a guest with KVM: that the device is there doesn't say that it works.
func chooseAccel(ctx context.Context, g guest) (accel, string) {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return tcg, fmt.Sprintf("emulation (%v)", err)
	}
	f.Close()
	g.accel, g.limit = kvm, 10*time.Second
	if err := g.try(ctx, 0); err != nil {
		return tcg, "emulation (KVM is there and doesn't boot a guest)"
	}
	return kvm, "KVM"
}
