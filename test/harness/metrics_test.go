package harness

import (
	"strings"
	"testing"
)

func TestMetricsSumsByLabels(t *testing.T) {
	m, err := ParseMetrics(strings.NewReader(`# HELP x y
x{a="1",b="q\"}, {"} 2
x{a="2",b="z"} 3.5
x_total 7
y{} 1e3
`))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		got, want float64
	}{
		{m.Sum("x"), 5.5}, {m.Sum("x", "a", "1"), 2}, {m.Sum("x", "b", `q"}, {`), 2},
		{m.Sum("x", "a", "3"), 0}, {m.Sum("x_total"), 7}, {m.Sum("y"), 1000},
	} {
		if c.got != c.want {
			t.Errorf("got %v, want %v", c.got, c.want)
		}
	}
	if m.Has("z") || !m.Has("y") {
		t.Error("Has is wrong")
	}
}
