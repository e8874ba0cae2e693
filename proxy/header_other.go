//go:build !unix

package proxy

// readSome waits for bytes from s and reads at most as many into b as want
// says of those that have come, at least one.
func readSome(s Stream, b []byte, want func(b []byte) int) (n int, err error) {
	return readOne(s, b, want)
}
