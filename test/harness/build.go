package harness

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
)

// Root returns the module's root folder: the nearest one above the working
// directory that has a go.mod.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", fmt.Errorf("no go.mod above the working directory")
		}
		dir = parent
	}
}

// Build builds shunt as it is released, once, and returns the binary's path.
// The environment variable SHUNT_TEST_BIN names one that is built already.
var Build = sync.OnceValues(func() (string, error) {
	if bin := os.Getenv("SHUNT_TEST_BIN"); bin != "" {
		return filepath.Abs(bin)
	}
	root, err := Root()
	if err != nil {
		return "", err
	}
	bin := filepath.Join(root, "test", "bin", "shunt")
	cmd := exec.Command("go", "build", "-trimpath", "-o", bin, "./cmd/shunt")
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build shunt: %w\n%s", err, out)
	}
	return bin, nil
})
