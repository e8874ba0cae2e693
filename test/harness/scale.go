package harness

import (
	"os"
	"strconv"
	"sync"
	"time"
)

var scale = sync.OnceValue(func() int64 {
	n, err := strconv.ParseInt(os.Getenv("SHUNT_TEST_SCALE"), 10, 64)
	if err != nil || n < 1 {
		return 1
	}
	return n
})

// Scaled is n divided by the environment variable SHUNT_TEST_SCALE, but at
// least 1: amounts of bytes, connections and rounds, for slow machines.
func Scaled[T int | int64](n T) T { return max(n/T(scale()), 1) }

// patient lengthens a bound where everything is small because it is slow.
func patient(d time.Duration) time.Duration {
	if Small() {
		return 5 * d
	}
	return d
}

// Small says that SHUNT_TEST_SCALE is set: what is about the size of a load has no place here.
func Small() bool { return scale() > 1 }
