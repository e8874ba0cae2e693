package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// size is a number of bytes, written "4096", "256KiB", "4MiB" or "1GiB".
type size uint64

var sizeUnits = []struct {
	name  string
	bytes uint64
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"B", 1}}

const sizeForm = `a whole number of bytes ("4096") or of KiB, MiB or GiB ("256KiB")`

// parseSize reads a size. Only binary units are taken, spelled exactly:
// "256KB" and "256k" mean 1000 to some and 1024 to others.
func parseSize(s string) (size, error) {
	digits := strings.TrimRight(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
	unit := s[len(digits):]
	factor := uint64(1)
	if unit != "" {
		factor = 0
		for _, u := range sizeUnits {
			if u.name == unit {
				factor = u.bytes
			}
		}
	}
	number := digits != "" && strings.Trim(digits, "0123456789") == ""
	if factor == 0 || !number {
		hint := ""
		if want := binaryUnit(unit); number && want != "" {
			hint = fmt.Sprintf("; did you mean %q?", digits+want)
		}
		return 0, fmt.Errorf("%q is not a size: want %s%s", s, sizeForm, hint)
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil || n > math.MaxInt64/factor {
		return 0, fmt.Errorf("%q is too large for a size", s)
	}
	return size(n * factor), nil
}

// binaryUnit guesses which unit a misspelled one means; empty: none.
func binaryUnit(unit string) string {
	u := strings.ToLower(strings.TrimSpace(unit))
	switch u {
	case "k", "kb", "kib":
		return "KiB"
	case "m", "mb", "mib":
		return "MiB"
	case "g", "gb", "gib":
		return "GiB"
	case "b", "byte", "bytes":
		return "B"
	}
	return ""
}

// String returns the shortest exact form; parseSize reads it back.
func (s size) String() string {
	for i := 2; i >= 0; i-- {
		if u := sizeUnits[i]; s > 0 && uint64(s)%u.bytes == 0 {
			return strconv.FormatUint(uint64(s)/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatUint(uint64(s), 10)
}
