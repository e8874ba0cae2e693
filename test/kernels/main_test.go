//go:build linux

package main

import (
	"os"
	"strings"
	"testing"

	"shunt/splice"
	"shunt/test/kernels/record"
)

func TestListNamesTheOldestAndTheNewest(t *testing.T) {
	list, err := readList("kernels.list")
	if err != nil {
		t.Fatal(err)
	}
	quick := 0
	seen := map[string]bool{}
	for _, k := range list {
		if seen[k.String()] {
			t.Errorf("%s stands there twice", k)
		}
		seen[k.String()] = true
		if k.quick {
			quick++
		}
	}
	if len(list) < 12 || quick != 2 {
		t.Errorf("%d kernels, %d of them for make test", len(list), quick)
	}
	bad := t.TempDir() + "/list"
	if err := os.WriteFile(bad, []byte("# fine\nsid linux-image\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := readList(bad); err == nil || !strings.Contains(err.Error(), "list:2:") {
		t.Errorf("a line that is too short: %v", err)
	}
}

func TestTableTellsFailuresFromWhatIsDeclined(t *testing.T) {
	one := func(suite, name, result, text string) record.Record {
		return record.Record{Kind: record.Test, Suite: suite, Name: name, Result: result, Text: text}
	}
	declined := &result{kernel: kernel{suite: "old", pkg: "linux-image-5", version: "5.10.1-1"}}
	declined.record(record.Record{Kind: record.Begin, Text: "5.10.0-1-amd64 #1"})
	declined.record(record.Record{Kind: record.Probe, JSON: []byte(`{"possible":false,"reason":"pairing: no","checks":[]}`)})
	declined.record(one("end to end", "TestEchoKeepsOrder/off", "pass", ""))
	declined.record(one("end to end", "TestEchoKeepsOrder/every", "skip", "    x_test.go:3: missing the bypass: pairing: no\n"))
	broken := &result{kernel: kernel{suite: "new", pkg: "linux-image-7", version: "7.3-1"}}
	broken.record(record.Record{Kind: record.Probe, JSON: []byte(`{"possible":true,"verdict":"window","checks":[{"name":"FIONREAD","result":"ok"}]}`)})
	broken.record(one("end to end", "TestEchoKeepsOrder/off", "fail", "no"))
	silent := &result{kernel: kernel{suite: "new", pkg: "linux-image-8", version: "8.0-1"}}
	if declined.bad() || !broken.bad() || !silent.bad() {
		t.Errorf("bad: %v, %v and %v; want false, true, true", declined.bad(), broken.bad(), silent.bad())
	}
	if got := skipReason(declined.tests[1].Text); got != "missing the bypass: pairing: no" {
		t.Errorf("reason %q", got)
	}
	table := summary([]*result{declined, broken}, "emulation")
	for _, want := range []string{"| 5.10.1-1 | old | no: pairing: no | - |", "| 5.10.1-1 | 0, 0, 0 | 1, 0, 1 | copied |", "| 7.3-1 | new | yes | window |", "1 FAILED"} {
		if !strings.Contains(table, want) {
			t.Errorf("no %q in\n%s", want, table)
		}
	}
	if declined.report.OfVerdict(splice.VerdictWindow) != nil {
		t.Error("a fault from nowhere")
	}
}

func TestProcessorFitsTheKernel(t *testing.T) {
	for version, want := range map[string]string{"6.1.192-3": "max,-cx16", "6.12.43-1~bpo12+1": "max,-cx16", "6.18.12-1": "max", "7.3.4-1": "max", "": "max"} {
		if got := tcg.cpuFor(version); got != want {
			t.Errorf("%q: %s, want %s", version, got, want)
		}
	}
	if got := kvm.cpuFor("6.1"); got != "host" {
		t.Errorf("KVM: %s", got)
	}
}
