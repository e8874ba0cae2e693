package harness

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
)

// word is the i-th eight bytes of the stream of a seed (splitmix64): any
// offset can be computed alone, and no part of a stream resembles another.
func word(seed, i uint64) uint64 {
	z := seed + (i+1)*0x9e3779b97f4a7c15
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9
	z = (z ^ (z >> 27)) * 0x94d049bb133111eb
	return z ^ (z >> 31)
}

// Fill sets p to the bytes of the seed's stream that begin at off.
func Fill(p []byte, seed uint64, off int64) {
	i := uint64(off) / 8
	if skip := int(off % 8); skip != 0 {
		var w [8]byte
		binary.LittleEndian.PutUint64(w[:], word(seed, i))
		p = p[copy(p, w[skip:]):]
		i++
	}
	for ; len(p) >= 8; p, i = p[8:], i+1 {
		binary.LittleEndian.PutUint64(p, word(seed, i))
	}
	if len(p) > 0 {
		var w [8]byte
		binary.LittleEndian.PutUint64(w[:], word(seed, i))
		copy(p, w[:])
	}
}

// Payload returns the first n bytes of the seed's stream.
func Payload(seed uint64, n int) []byte {
	p := make([]byte, n)
	Fill(p, seed, 0)
	return p
}

// Hash returns the SHA-256 of the first n bytes of the seed's stream.
func Hash(seed uint64, n int64) string {
	h := sha256.New()
	buf := make([]byte, 64<<10)
	for off := int64(0); off < n; {
		part := buf[:min(n-off, int64(len(buf)))]
		Fill(part, seed, off)
		h.Write(part)
		off += int64(len(part))
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Send writes the first n bytes of the seed's stream to w, in writes of chunk
// bytes, or of the length that next returns where it isn't nil.
func Send(w io.Writer, seed uint64, n int64, chunk int, next func() int) error {
	buf := make([]byte, max(chunk, 1))
	for off := int64(0); off < n; {
		size := chunk
		if next != nil {
			size = max(1, min(next(), chunk))
		}
		part := buf[:min(n-off, int64(size))]
		Fill(part, seed, off)
		m, err := w.Write(part)
		off += int64(m)
		if err != nil {
			return fmt.Errorf("send, %d of %d bytes accepted: %w", off, n, err)
		}
	}
	return nil
}

// A Verifier is a writer that compares what it is given with a seed's stream,
// byte for byte: unlike a hash it names the first byte that is wrong.
type Verifier struct {
	seed uint64
	off  int64
	buf  []byte
}

// NewVerifier returns a Verifier at the beginning of the seed's stream.
func NewVerifier(seed uint64) *Verifier { return &Verifier{seed: seed} }

// Bytes is how many bytes were right so far.
func (v *Verifier) Bytes() int64 { return v.off }

// Write implements io.Writer.
func (v *Verifier) Write(p []byte) (int, error) {
	if len(v.buf) < len(p) {
		v.buf = make([]byte, len(p))
	}
	want := v.buf[:len(p)]
	Fill(want, v.seed, v.off)
	if !bytes.Equal(want, p) {
		i := 0
		for want[i] == p[i] {
			i++
		}
		end := min(len(p), i+16)
		return i, fmt.Errorf("byte %d is wrong: got %x, want %x", v.off+int64(i), p[i:end], want[i:end])
	}
	v.off += int64(len(p))
	return len(p), nil
}

// Receive reads r to its end and fails unless that gave exactly the first n
// bytes of the seed's stream.
func Receive(r io.Reader, seed uint64, n int64) error {
	return ReceiveChunks(r, seed, n, 128<<10, nil)
}

// ReceiveChunks is Receive with reads of at most chunk bytes; before, where
// it isn't nil, runs ahead of each read.
func ReceiveChunks(r io.Reader, seed uint64, n int64, chunk int, before func(off int64)) error {
	v := NewVerifier(seed)
	buf := make([]byte, chunk)
	for {
		if before != nil {
			before(v.off)
		}
		m, err := r.Read(buf)
		if _, bad := v.Write(buf[:m]); bad != nil {
			return bad
		}
		if err == io.EOF && v.off == n {
			return nil
		}
		if err == io.EOF {
			return fmt.Errorf("receive, EOF after %d of %d bytes", v.off, n)
		}
		if err != nil {
			return fmt.Errorf("receive, after %d of %d bytes: %w", v.off, n, err)
		}
		if v.off > n {
			return fmt.Errorf("receive, %d bytes where %d were sent", v.off, n)
		}
	}
}

// ReceiveN reads exactly n bytes and compares them with the seed's stream, which begins at off.
func ReceiveN(r io.Reader, seed uint64, off, n int64) error {
	v := &Verifier{seed: seed, off: off}
	if _, err := io.CopyN(v, onlyReader{r}, n); err != nil {
		return fmt.Errorf("receive, after %d of %d bytes: %w", v.off-off, n, err)
	}
	return nil
}

// onlyReader hides every method but Read, so that io.Copy can't take
// splice(2) or another short cut.
type onlyReader struct{ io.Reader }

// OnlyReader returns r with no method but Read: an endpoint that reads by
// splice(2) isn't supported on the bypass, and Go's io.Copy does so unasked.
func OnlyReader(r io.Reader) io.Reader { return onlyReader{r} }
