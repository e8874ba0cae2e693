package splice

import (
	"strings"
	"testing"

	"kernel.org/pub/linux/libs/security/libcap/cap"
)

func TestOpenBypassNeedsNoCapability(t *testing.T) {
	// [process] user gives them all up once the bypass is open.
	eachVerdict(t, func(t *testing.T, k *Kernel) {
		have := cap.GetProc()
		none, err := have.Dup()
		if err != nil {
			t.Fatal(err)
		}
		if err := none.ClearFlag(cap.Effective); err != nil {
			t.Fatal(err)
		}
		if err := none.SetProc(); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := have.SetProc(); err != nil {
				panic(err) // every later test would be another one
			}
		}()
		if k, r := open(DefaultOptions()); k != nil {
			k.Close()
			t.Error("a second bypass opens without capabilities")
		} else if !strings.Contains(r.Reason, "CAP_BPF") {
			t.Errorf("a second bypass: %s", r.Reason)
		}
		l := newLoop(t, k) // announces, claims, registers, pairs
		if err := l.both(l.checkContent); err != nil {
			t.Errorf("content: %v", err)
		}
		if err := l.both(func(d Direction) error { return l.checkBound(k, d) }); err != nil {
			t.Errorf("bounded queue: %v", err)
		}
		if err := l.checkSurvey(k); err != nil {
			t.Errorf("iterator: %v", err)
		}
		for role := range l.route.cookie {
			if v, err := k.inspect(l.route.cookie[role], l.route.addr[role]); err != nil || v.State == 0 {
				t.Errorf("inspect socket %d: state %d, %v", role+1, v.State, err)
			}
		}
		k.sweep()
		k.findStalled()
		k.reclaim()
		if err := k.refreshLocals(); err != nil {
			t.Error(err)
		}
	})
}
