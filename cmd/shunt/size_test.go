package main

import (
	"strings"
	"testing"
)

func TestParseSize(t *testing.T) {
	for s, want := range map[string]size{
		"0": 0, "1": 1, "4096": 4096, "4096B": 4096, "256KiB": 256 << 10, "4MiB": 4 << 20, "1GiB": 1 << 30, "007": 7,
		"9223372036854775807": 1<<63 - 1,
	} {
		if got, err := parseSize(s); err != nil || got != want {
			t.Errorf("parseSize(%q) = %d, %v, want %d", s, got, err, want)
		}
	}
	for s, want := range map[string]string{
		"":                           `"" is not a size`,
		"KiB":                        "is not a size",
		"256KB":                      `did you mean "256KiB"?`,
		"256k":                       `did you mean "256KiB"?`,
		"4mb":                        `did you mean "4MiB"?`,
		"1 GiB":                      `did you mean "1GiB"?`,
		"1.5GiB":                     "is not a size",
		"-1":                         "is not a size",
		"-5KB":                       "is not a size",
		"+5":                         "is not a size",
		"1e6":                        "is not a size",
		"0x10":                       "is not a size",
		"4TiB":                       "is not a size",
		"9223372036854775808":        "too large",
		"9007199254740993KiB":        "too large",
		"99999999999999999999999999": "too large",
	} {
		if got, err := parseSize(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("parseSize(%q) = %d, %v, want an error with %q", s, got, err, want)
		}
	}
}

func FuzzParseSize(f *testing.F) {
	for _, s := range []string{"0", "4096", "256KiB", "4MiB", "1GiB", "1 GiB", "256kb", "-1", "18446744073709551615GiB", "é", "١KiB"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := parseSize(s)
		if err != nil {
			return
		}
		if again, err := parseSize(n.String()); err != nil || again != n {
			t.Errorf("%q is %d, printed %q, which is %d, %v", s, n, n, again, err)
		}
	})
}
