// Command objects checks that the committed BPF objects are what their
// sources compile to: it repeats "go generate" on a copy of the bpf folder
// and compares. Objects depend on the compiler, so with another clang than
// the one that the objects name it says so, and compares nothing.
package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"shunt/test/harness"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// recorded is the clang that the committed objects were made by; the objects
// themselves don't tell. Debian 12 has it.
const recorded = "14.0.6"

var clangVersion = regexp.MustCompile(`clang version (\d+(?:\.\d+)*)`)

func run() error {
	root, err := harness.Root()
	if err != nil {
		return err
	}
	objects, err := filepath.Glob(filepath.Join(root, "bpf", "*.o"))
	if err != nil {
		return err
	}
	if len(objects) == 0 {
		return fmt.Errorf("no objects in bpf")
	}
	installed, err := exec.Command("clang", "--version").Output()
	if err != nil {
		fmt.Println("skipped: missing clang:", err)
		return nil
	}
	have := clangVersion.FindSubmatch(installed)
	if have == nil || string(have[1]) != recorded {
		fmt.Printf("skipped: the objects were made by clang %s, this is %s", recorded, installed)
		return nil
	}
	if err := os.MkdirAll(filepath.Join(root, "test", "bin"), 0o755); err != nil {
		return err
	}
	// Inside the module, so that "go tool" finds the generator.
	parent, err := os.MkdirTemp(filepath.Join(root, "test", "bin"), "objects-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(parent)
	dir := filepath.Join(parent, "bpf")
	if err := os.CopyFS(dir, os.DirFS(filepath.Join(root, "bpf"))); err != nil {
		return err
	}
	generated, err := filepath.Glob(filepath.Join(dir, "*_bpfe[lb].*"))
	if err != nil {
		return err
	}
	for _, file := range generated {
		if err := os.Remove(file); err != nil {
			return err
		}
	}
	cmd := exec.Command("go", "generate", ".")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("generate: %w\n%s", err, out)
	}
	var different []string
	for _, file := range generated {
		fresh, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		committed, err := os.ReadFile(filepath.Join(root, "bpf", filepath.Base(file)))
		if err != nil {
			return err
		}
		if !bytes.Equal(fresh, committed) {
			different = append(different, filepath.Base(file))
		}
	}
	if len(different) > 0 {
		return fmt.Errorf("not what the sources compile to: %s (run \"make generate\" and commit)", strings.Join(different, ", "))
	}
	fmt.Printf("%d files match\n", len(generated))
	return nil
}
