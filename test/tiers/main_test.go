package main

import (
	"bufio"
	"strings"
	"testing"
)

func TestCountLeavesOutParents(t *testing.T) {
	in := `{"Action":"run","Package":"p","Test":"A"}
{"Action":"run","Package":"p","Test":"A/x"}
{"Action":"run","Package":"p","Test":"A/y"}
{"Action":"pass","Package":"p","Test":"A/x"}
{"Action":"output","Package":"p","Test":"A/y","Output":"    a_test.go:3: missing z\n"}
{"Action":"skip","Package":"p","Test":"A/y"}
{"Action":"pass","Package":"p","Test":"A"}
{"Action":"run","Package":"p","Test":"B"}
{"Action":"fail","Package":"p","Test":"B"}
{"Action":"fail","Package":"p"}
`
	c, err := count(bufio.NewReader(strings.NewReader(in)))
	if err != nil || c != (tally{passed: 1, failed: 1, skipped: 1}) {
		t.Fatalf("counted %+v, %v", c, err)
	}
}

func TestReasonIsWhatTheTestSaid(t *testing.T) {
	if r := reason([]string{"=== RUN X\n", "    a_test.go:3: missing: z\n"}); r != "missing: z" {
		t.Fatal(r)
	}
}
