//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// A kernel is a line of the list, or a built one.
type kernel struct {
	suite, pkg, version string
	quick               bool   // one of those that "make test" boots
	built               string // bzImage of "make kernel-permanent"
}

func (k kernel) String() string {
	if k.built != "" {
		return k.pkg
	}
	return k.suite + " " + k.pkg
}

// readList reads the list of kernels: suite, package, version, and "quick" for those of "make test".
func readList(file string) ([]kernel, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var list []kernel
	s := bufio.NewScanner(bytes.NewReader(b))
	for n := 1; s.Scan(); n++ {
		line, _, _ := strings.Cut(s.Text(), "#")
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		if len(f) < 3 || len(f) > 4 || len(f) == 4 && f[3] != "quick" {
			return nil, fmt.Errorf("%s:%d: want: suite package version|- [quick]", file, n)
		}
		list = append(list, kernel{suite: f[0], pkg: f[1], version: f[2], quick: len(f) == 4})
	}
	return list, s.Err()
}

// apt asks Debian's archive about one suite at a time, with a configuration
// and lists of its own: nothing of the host's package system changes.
type apt struct {
	dir     string
	main    string // mirror of Debian
	updates string // mirror of its security updates
	mu      sync.Mutex
	suites  map[string]error // those whose lists were fetched
}

// newApt takes the mirrors from the host's own sources.
func newApt(ctx context.Context, dir string) (*apt, error) {
	if _, err := exec.LookPath("apt-get"); err != nil {
		return nil, err
	}
	out, err := exec.CommandContext(ctx, "apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI) $(COMPONENT)", "Created-By: Packages", "Origin: Debian").Output()
	if err != nil {
		return nil, fmt.Errorf("apt-get indextargets: %w", err)
	}
	a := &apt{dir: dir, suites: map[string]error{}}
	for _, line := range strings.Split(string(out), "\n") {
		f := strings.Fields(line)
		switch {
		case len(f) != 3 || f[2] != "main":
		case f[0] == "Debian" && a.main == "":
			a.main = f[1]
		case f[0] == "Debian-Security" && a.updates == "":
			a.updates = f[1]
		}
	}
	if a.main == "" {
		return nil, errors.New("this host's apt has no mirror of Debian, or no lists of it (apt-get update)")
	}
	return a, nil
}

// run runs an apt program for a suite.
func (a *apt) run(ctx context.Context, suite, dir, program string, args ...string) (string, error) {
	at := filepath.Join(a.dir, suite)
	mirror := a.main
	if strings.HasSuffix(suite, "-security") {
		mirror = a.updates
	}
	if mirror == "" {
		return "", errors.New("this host's apt has no mirror of Debian's security updates")
	}
	for _, d := range []string{"lists/partial", "cache/archives/partial", "state", "none"} {
		if err := os.MkdirAll(filepath.Join(at, d), 0o755); err != nil {
			return "", err
		}
	}
	list := filepath.Join(at, "sources.list")
	source := fmt.Sprintf("deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n", mirror, suite)
	if err := errors.Join(os.WriteFile(list, []byte(source), 0o644), os.WriteFile(filepath.Join(at, "status"), nil, 0o644)); err != nil {
		return "", err
	}
	argv := []string{"-q"}
	for _, o := range []string{
		"Dir::Etc::SourceList=" + list,
		"Dir::Etc::SourceParts=" + filepath.Join(at, "none"),
		"Dir::Etc::PreferencesParts=" + filepath.Join(at, "none"),
		"Dir::State=" + filepath.Join(at, "state"),
		"Dir::State::Lists=" + filepath.Join(at, "lists"),
		"Dir::State::Status=" + filepath.Join(at, "status"),
		"Dir::Cache=" + filepath.Join(at, "cache"),
		"APT::Architecture=amd64",
		"APT::Sandbox::User=root",
		"Acquire::Languages=none",
		"Acquire::http::Timeout=20",
		"Acquire::Retries=2",
		// An archived suite has lists whose time is up; the packages are as they were.
		"Acquire::Check-Valid-Until=false",
	} {
		argv = append(argv, "-o", o)
	}
	ctx, cancel := context.WithTimeout(ctx, 4*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, append(argv, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s, suite %s: %w: %s", program, strings.Join(args, " "), suite, err, lastLine(stderr.String()))
	}
	return string(out), nil
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}

// update fetches a suite's lists, once.
func (a *apt) update(ctx context.Context, suite string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	err, ok := a.suites[suite]
	if !ok {
		_, err = a.run(ctx, suite, "", "apt-get", "update")
		a.suites[suite] = err
	}
	return err
}

// depends returns what a package depends on and the suite offers.
func (a *apt) depends(ctx context.Context, suite, pkg string) ([]string, error) {
	out, err := a.run(ctx, suite, "", "apt-cache", "depends", "--important", pkg)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, line := range strings.Split(out, "\n") {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "Depends: "); ok && !strings.HasPrefix(name, "<") {
			names = append(names, name)
		}
	}
	return names, nil
}

// candidate returns the version of a package that the suite offers.
func (a *apt) candidate(ctx context.Context, suite, pkg string) (string, error) {
	out, err := a.run(ctx, suite, "", "apt-cache", "policy", pkg)
	if err != nil {
		return "", err
	}
	for _, line := range strings.Split(out, "\n") {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "Candidate: "); ok && v != "(none)" {
			return v, nil
		}
	}
	return "", fmt.Errorf("suite %s has no package %s", suite, pkg)
}

// fetch downloads the packages that make up a kernel into a folder of its own,
// unless they are there, and returns their paths and k with the names that
// were meant.
func (a *apt) fetch(ctx context.Context, k kernel) (kernel, []string, error) {
	if err := a.update(ctx, k.suite); err != nil {
		return k, nil, err
	}
	deps, err := a.depends(ctx, k.suite, k.pkg)
	if err != nil {
		return k, nil, err
	}
	for _, d := range deps {
		// A package without a version in its name depends on the newest one that has one.
		if strings.HasPrefix(d, "linux-image-") {
			k.pkg = d
			if deps, err = a.depends(ctx, k.suite, d); err != nil {
				return k, nil, err
			}
			break
		}
	}
	version, err := a.candidate(ctx, k.suite, k.pkg)
	if err != nil {
		return k, nil, err
	}
	if k.version != "-" && k.version != version {
		return k, nil, fmt.Errorf("suite %s has %s %s, want %s", k.suite, k.pkg, version, k.version)
	}
	k.version = version
	want := []string{k.pkg}
	for _, d := range deps {
		// Newer packages are split; the modules of superseded ones may be gone.
		if strings.HasPrefix(d, "linux-binary-") || strings.HasPrefix(d, "linux-modules-") {
			want = append(want, d)
		}
	}
	dir := filepath.Join(a.dir, "packages", k.pkg+"_"+safe(k.version))
	done := filepath.Join(dir, "complete")
	if _, err := os.Stat(done); err != nil {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return k, nil, err
		}
		for _, p := range want {
			if _, err := a.run(ctx, k.suite, dir, "apt-get", "download", p); err != nil {
				return k, nil, err
			}
		}
		if err := os.WriteFile(done, nil, 0o644); err != nil {
			return k, nil, err
		}
	}
	debs, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err == nil && len(debs) == 0 {
		err = fmt.Errorf("no package in %s", dir)
	}
	return k, debs, err
}

// safe makes a file name of a version.
func safe(version string) string {
	return strings.NewReplacer("/", "-", ":", "-", "~", "-").Replace(version)
}
