package harness

import (
	"bytes"
	"strings"
	"testing"
)

func TestFillAgreesAtEveryOffset(t *testing.T) {
	whole := Payload(7, 200)
	for off := range 40 {
		for n := range 40 {
			part := make([]byte, n)
			Fill(part, 7, int64(off))
			if !bytes.Equal(part, whole[off:off+n]) {
				t.Fatalf("Fill at %d, %d bytes: differs from the whole", off, n)
			}
		}
	}
	if bytes.Equal(Payload(7, 64), Payload(8, 64)) {
		t.Fatal("two seeds give the same stream")
	}
}

func TestReceiveNoticesEveryFault(t *testing.T) {
	good := Payload(3, 1000)
	swapped := bytes.Clone(good)
	copy(swapped[100:], good[200:300])
	copy(swapped[200:], good[100:200])
	for name, c := range map[string]struct {
		in   []byte
		want string
	}{
		"right":     {good, ""},
		"short":     {good[:999], "EOF after 999"},
		"long":      {Payload(3, 1001), "1001 bytes where 1000"},
		"reordered": {swapped, "byte 100 is wrong"},
		"doubled":   {append(bytes.Clone(good[:500]), good[400:]...), "byte 500 is wrong"},
	} {
		err := ReceiveChunks(bytes.NewReader(c.in), 3, 1000, 64, nil)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", name, err, c.want)
		}
	}
}
