//go:build linux

package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

const (
	permanentSuite   = "bookworm-security"
	permanentPackage = "linux-source-6.1"
)

// permanentImage is where "make kernel-permanent" leaves its kernel.
func permanentImage(cache string) string { return filepath.Join(cache, "permanent", "bzImage") }

// buildPermanent builds Debian's 6.1 with the patch of test/kernels/permanent,
// unless the kernel that is there came from the same sources, patch and configuration.
func buildPermanent(ctx context.Context, a *apt, root, cache string) error {
	begin := time.Now()
	for _, p := range []string{"gcc", "make", "patch", "flex", "bison", "bc", "pahole", "xz", "tar"} {
		if _, err := exec.LookPath(p); err != nil {
			return err
		}
	}
	patch := filepath.Join(root, "test/kernels/permanent/permanent.patch")
	config := filepath.Join(root, "test/kernels/permanent/kernel.config")
	if err := a.update(ctx, permanentSuite); err != nil {
		return err
	}
	version, err := a.candidate(ctx, permanentSuite, permanentPackage)
	if err != nil {
		return err
	}
	sum := sha256.New()
	fmt.Fprintln(sum, version)
	for _, file := range []string{patch, config} {
		b, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		sum.Write(b)
	}
	made := fmt.Sprintf("%x", sum.Sum(nil))
	dir := filepath.Join(cache, "permanent")
	stamp := filepath.Join(dir, "made-of")
	image := permanentImage(cache)
	if b, err := os.ReadFile(stamp); err == nil && string(b) == made {
		if _, err := os.Stat(image); err == nil {
			fmt.Println("up to date:", image)
			return nil
		}
	}

	src, obj := filepath.Join(dir, "src"), filepath.Join(dir, "obj")
	for _, d := range []string{src, obj} {
		if err := errors.Join(os.RemoveAll(d), os.MkdirAll(d, 0o755)); err != nil {
			return err
		}
	}
	sh := func(dir, name string, args ...string) error {
		fmt.Printf("%s %s\n", name, strings.Join(args, " "))
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "KBUILD_BUILD_USER=shunt", "KBUILD_BUILD_HOST=shunt")
		out, err := cmd.CombinedOutput()
		if err != nil {
			lines := strings.Split(strings.TrimSpace(string(out)), "\n")
			return fmt.Errorf("%s: %w\n%s", name, err, strings.Join(lines[max(0, len(lines)-30):], "\n"))
		}
		return nil
	}
	if _, err := a.run(ctx, permanentSuite, dir, "apt-get", "download", permanentPackage); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(dir, permanentPackage+"_*.deb"))
	if err != nil || len(debs) == 0 {
		return fmt.Errorf("no package in %s (%v)", dir, err)
	}
	deb := debs[len(debs)-1]
	unpacked := filepath.Join(dir, "package")
	defer os.RemoveAll(unpacked)
	tarball := filepath.Join(unpacked, "usr/src", permanentPackage+".tar.xz")
	jobs := fmt.Sprintf("-j%d", runtime.NumCPU())
	for _, step := range [][]string{
		{dir, "dpkg", "-x", deb, unpacked},
		{dir, "tar", "-xf", tarball, "-C", src, "--strip-components=1"},
		{src, "patch", "-p1", "--no-backup-if-mismatch", "-i", patch},
		{src, "make", "-s", "O=" + obj, "tinyconfig"},
		{src, "scripts/kconfig/merge_config.sh", "-m", "-O", obj, filepath.Join(obj, ".config"), config},
		{src, "make", "-s", "O=" + obj, "olddefconfig"},
		{src, "nice", "make", "-s", "O=" + obj, jobs, "bzImage"},
	} {
		if err := sh(step[0], step[1], step[2:]...); err != nil {
			return err
		}
	}
	if err := copyFile(filepath.Join(obj, "arch/x86/boot/bzImage"), image); err != nil {
		return err
	}
	if err := os.WriteFile(stamp, []byte(made), 0o644); err != nil {
		return err
	}
	fmt.Printf("built %s from %s %s in %v\n", image, permanentPackage, version, time.Since(begin).Round(time.Second))
	return errors.Join(os.RemoveAll(src), os.RemoveAll(obj), os.Remove(deb))
}
