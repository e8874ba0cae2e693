package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// asShunt makes the test binary act as the program: the demo and the tests run
// it under their own name.
const asShunt = "SHUNT_TEST_AS_SHUNT"

func TestMain(m *testing.M) {
	// A fuzzing worker is a child too.
	if os.Getenv(asShunt) != "" && len(os.Args) > 1 && !strings.HasPrefix(os.Args[1], "-test.") {
		main()
	}
	os.Setenv(asShunt, "1")
	os.Exit(m.Run())
}

// runArgs runs the program in this process and returns what it printed.
func runArgs(t *testing.T, stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = run(context.Background(), args, strings.NewReader(stdin), &out, &err)
	return code, out.String(), err.String()
}

func writeConfig(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "shunt.toml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// minimal is the shortest valid configuration.
const minimal = "[[listener]]\nlisten = \"127.0.0.1:7000\"\nupstream = \"127.0.0.1:8000\"\n"
