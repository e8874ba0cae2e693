//go:build linux

package main

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"shunt/test/kernels/record"
)

// modules are what the tests need of a kernel and Debian doesn't build in.
var modules = []string{
	"veth", "inet_diag", "tcp_diag", "unix_diag", "tls",
	"vsock_loopback",
	"nft_chain_nat", "nft_nat", "nft_redir", "nft_masq",
}

// programs of the host that go into the guest, with their libraries; those
// that aren't there are left out, and the tests that need them skip.
var programs = []string{"ip", "nft", "prlimit", "setpriv"}

// unpack takes a kernel and its modules out of Debian's packages; it returns
// the kernel's file and the modules in the order of their dependencies.
func unpack(ctx context.Context, debs []string, dir string) (image string, mods []string, err error) {
	if err := os.RemoveAll(dir); err != nil {
		return "", nil, err
	}
	tree := filepath.Join(dir, "tree")
	if err := os.MkdirAll(tree, 0o755); err != nil {
		return "", nil, err
	}
	defer os.RemoveAll(tree)
	for _, deb := range debs {
		if out, err := exec.CommandContext(ctx, "dpkg", "-x", deb, tree).CombinedOutput(); err != nil {
			return "", nil, fmt.Errorf("dpkg -x %s: %w: %s", filepath.Base(deb), err, out)
		}
	}
	found := map[string]string{} // module -> file
	kernel := ""
	err = filepath.WalkDir(tree, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name := d.Name()
		if strings.HasPrefix(name, "vmlinuz") {
			kernel = path
		}
		if base, _, ok := strings.Cut(name, ".ko"); ok {
			found[moduleName(base)] = path
		}
		return nil
	})
	if err != nil {
		return "", nil, err
	}
	if kernel == "" {
		return "", nil, errors.New("no kernel in the package")
	}
	image = filepath.Join(dir, "vmlinuz")
	if err := os.Rename(kernel, image); err != nil {
		return "", nil, err
	}
	done := map[string]bool{}
	var add func(name string) error
	add = func(name string) error {
		name = moduleName(name)
		file, ok := found[name]
		if !ok || done[name] {
			return nil // built in, or gone with the package of modules
		}
		done[name] = true
		content, err := expand(ctx, file)
		if err != nil {
			return fmt.Errorf("module %s: %w", name, err)
		}
		deps, err := dependencies(content)
		if err != nil {
			return fmt.Errorf("module %s: %w", name, err)
		}
		for _, d := range deps {
			if err := add(d); err != nil {
				return err
			}
		}
		to := filepath.Join(dir, name+".ko")
		mods = append(mods, to)
		return os.WriteFile(to, content, 0o644)
	}
	for _, m := range modules {
		if err := add(m); err != nil {
			return "", nil, err
		}
	}
	return image, mods, nil
}

// moduleName is how the kernel writes a module's name.
func moduleName(name string) string { return strings.ReplaceAll(name, "-", "_") }

// expand reads a module, uncompressed.
func expand(ctx context.Context, file string) ([]byte, error) {
	switch filepath.Ext(file) {
	case ".xz":
		return exec.CommandContext(ctx, "xz", "-dc", file).Output()
	case ".zst":
		return exec.CommandContext(ctx, "zstd", "-qdc", file).Output()
	}
	return os.ReadFile(file)
}

// dependencies reads a module's "depends" field.
func dependencies(module []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(module))
	if err != nil {
		return nil, err
	}
	s := f.Section(".modinfo")
	if s == nil {
		return nil, errors.New("no .modinfo")
	}
	info, err := s.Data()
	if err != nil {
		return nil, err
	}
	for _, field := range strings.Split(string(info), "\x00") {
		if list, ok := strings.CutPrefix(field, "depends="); ok && list != "" {
			return strings.Split(list, ","), nil
		}
	}
	return nil, nil
}

// binary is one that is built for the guest.
type binary struct {
	out  string
	args []string // of go
}

var binaries = []binary{
	{"init", []string{"build", "./test/kernels/guest"}},
	{"bin/shunt", []string{"build", "./cmd/shunt"}},
	{"bin/test2json", []string{"build", "cmd/test2json"}},
	{"tests/splice.test", []string{"test", "-c", "./splice"}},
	{"tests/end.test", []string{"test", "-c", "./test"}},
}

// stage makes the folder that all guests share: test binaries, busybox and
// the host's programs.
func stage(ctx context.Context, root, dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	for _, d := range []string{"bin", "sbin", "tests", "proc", "sys", "dev", "tmp", "run", "etc", "src/test", "modules"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	for _, b := range binaries {
		args := []string{b.args[0], "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(dir, b.out)}
		args = append(args, b.args[1:]...)
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64", "GOFLAGS=")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
		}
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return err
	}
	if err := copyFile(busybox, filepath.Join(dir, "bin/busybox")); err != nil {
		return err
	}
	for _, p := range programs {
		path, err := lookPath(p)
		if err != nil {
			continue
		}
		if err := copyFile(path, filepath.Join(dir, "bin", p)); err != nil {
			return err
		}
		if err := libraries(path, dir); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
	}
	// Names and users, as the tests and the programs look them up.
	for name, content := range map[string]string{
		"etc/passwd":        "root:x:0:0:root:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n",
		"etc/group":         "root:x:0:\nnogroup:x:65534:\n",
		"etc/hosts":         "127.0.0.1 localhost\n::1 localhost ip6-localhost\n",
		"etc/nsswitch.conf": "hosts: files\n",
		"etc/services":      "http 80/tcp\n",
		"src/go.mod":        "module shunt\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// lookPath also finds what is in the folders of the administrator.
func lookPath(program string) (string, error) {
	path, err := exec.LookPath(program)
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if err == nil {
			break
		}
		path, err = exec.LookPath(filepath.Join(dir, program))
	}
	return path, err
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// libraries copies a program's shared libraries and its loader to where it looks for them.
func libraries(program, dir string) error {
	f, err := elf.Open(program)
	if err != nil {
		return err
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			b, err := io.ReadAll(p.Open())
			if err != nil {
				return err
			}
			loader := strings.TrimRight(string(b), "\x00")
			if err := copyFile(loader, filepath.Join(dir, loader)); err != nil {
				return err
			}
		}
	}
	names, err := f.ImportedLibraries()
	if err != nil {
		return err
	}
	for _, name := range names {
		found := false
		for _, in := range []string{"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"} {
			path := filepath.Join(in, name)
			if _, err := os.Stat(path); err != nil {
				continue
			}
			found = true
			to := filepath.Join(dir, path)
			if _, err := os.Stat(to); err == nil {
				break
			}
			if err := copyFile(path, to); err != nil {
				return err
			}
			if err := libraries(path, dir); err != nil {
				return err
			}
			break
		}
		if !found {
			return fmt.Errorf("no %s", name)
		}
	}
	return nil
}

// archive writes a folder as an initramfs; uncompressed, since the guest would
// have to undo it in emulation.
func archive(ctx context.Context, dir, out string) error {
	f, err := os.Create(out)
	if err != nil {
		return err
	}
	defer f.Close()
	var names []string
	err = filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if rel != "." {
			names = append(names, rel)
		}
		return err
	})
	if err != nil {
		return err
	}
	slices.Sort(names)
	cmd := exec.CommandContext(ctx, "cpio", "--quiet", "--create", "--format=newc", "--owner=0:0")
	cmd.Dir = dir
	cmd.Stdin = strings.NewReader(strings.Join(names, "\n") + "\n")
	cmd.Stdout = f
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("cpio: %w: %s", err, stderr.Bytes())
	}
	return nil
}

// initramfs joins the shared archive with a kernel's modules and its plan.
func initramfs(ctx context.Context, shared string, mods []string, jobs []record.Job, dir string) (string, error) {
	tree := filepath.Join(dir, "extra")
	if err := os.RemoveAll(tree); err != nil {
		return "", err
	}
	plan := record.Plan{Jobs: jobs}
	for _, m := range mods {
		at := filepath.Join("/modules", filepath.Base(m))
		if err := copyFile(m, filepath.Join(tree, at)); err != nil {
			return "", err
		}
		plan.Modules = append(plan.Modules, at)
	}
	b, err := json.Marshal(plan)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(tree, 0o755); err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(tree, "plan.json"), b, 0o644); err != nil {
		return "", err
	}
	own := filepath.Join(dir, "extra.cpio")
	if err := archive(ctx, tree, own); err != nil {
		return "", err
	}
	out := filepath.Join(dir, "initramfs")
	f, err := os.Create(out)
	if err != nil {
		return "", err
	}
	defer f.Close()
	for _, part := range []string{shared, own} {
		p, err := os.Open(part)
		if err != nil {
			return "", err
		}
		_, err = io.Copy(f, p)
		p.Close()
		if err != nil {
			return "", err
		}
	}
	return out, nil
}
