package splice

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestPermanentVerdict runs where the kernel has the flag ("make
// kernel-permanent" builds one); on every other kernel the flag must be
// declined with its reason.
func TestPermanentVerdict(t *testing.T) {
	r := Probe(DefaultOptions())
	if !r.Possible {
		t.Skipf("no bypass here: %s", r.Reason)
	}
	for _, c := range r.Checks {
		if c.Name != "verdict permanent" || c.Result == ResultOK {
			continue
		}
		o := DefaultOptions()
		o.Verdict = VerdictPermanent
		if r := Probe(o); r.Possible || !strings.Contains(r.Reason, "does not have the flag") {
			t.Errorf("verdict permanent without the flag: possible %v, reason %q", r.Possible, r.Reason)
		}
		// What was tried must leave nothing behind.
		if r := Probe(DefaultOptions()); !r.Possible {
			t.Errorf("after that: %s", r.Reason)
		}
		return
	}
	for name, f := range map[string]func(*testing.T, *Kernel){
		"one for a million messages": oneVerdict,
		"ends with its target":       endsWithTarget,
		"holds no socket for ever":   holdsNoSocket,
	} {
		t.Run(name, func(t *testing.T) {
			f(t, openKernel(t, func(o *Options) { o.Verdict = VerdictPermanent }))
		})
	}
}

func oneVerdict(t *testing.T, k *Kernel) {
	l := newLoop(t, k)
	for _, c := range []*net.TCPConn{l.client, l.service, l.up, l.down} {
		c.SetDeadline(time.Now().Add(20 * time.Minute))
	}
	messages := short(1_000_000)
	const batch = 500
	var wg sync.WaitGroup
	for _, d := range []Direction{Up, Down} {
		from, to := l.ends(d)
		// Nothing bounds the queue: the receiver says when it has taken a batch.
		taken := make(chan int, 1)
		sent, got := sha256.New(), sha256.New()
		wg.Add(2)
		go func() {
			defer wg.Done()
			defer func() {
				from.CloseWrite()
				for range taken { // the reader must not wait for us
				}
			}()
			content := pattern(1024, int(d))
			due := 0
			for i := range messages {
				m := content[i%1013:][:1+i%8]
				if _, err := from.Write(m); err != nil {
					t.Errorf("%v: message %d: %v", d, i, err)
					return
				}
				sent.Write(m)
				if due += len(m); i%batch == batch-1 {
					for due > 0 {
						n, ok := <-taken
						if !ok {
							return
						}
						due -= n
					}
				}
			}
		}()
		go func() {
			defer wg.Done()
			defer close(taken)
			buf := make([]byte, 64<<10)
			for {
				n, err := to.Read(buf)
				got.Write(buf[:n])
				if n > 0 {
					taken <- n
				}
				if err == io.EOF {
					break
				}
				if err != nil {
					t.Errorf("%v: read: %v", d, err)
					return
				}
			}
			if string(got.Sum(nil)) != string(sent.Sum(nil)) {
				t.Errorf("%v: other bytes arrived than were sent", d)
			}
		}()
		go l.passFIN(t, d)
	}
	wg.Wait()
	for d, s := range l.route.Stats() {
		t.Logf("%v: %d messages, %d verdict runs", Direction(d), messages, s.VerdictRuns)
		if s.VerdictRuns != 1 || s.Passed != 0 || s.Forwarded != 0 || !s.Uncounted {
			t.Errorf("%v: %+v, want one run, and bytes that nothing counts", Direction(d), s)
		}
	}
}

func endsWithTarget(t *testing.T, k *Kernel) {
	for _, d := range []Direction{Up, Down} {
		l := newLoop(t, k)
		from, to := l.ends(d)
		if _, err := from.Write([]byte("a")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(to, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		to.Close()
		var err error
		for deadline := time.Now().Add(step); err == nil && time.Now().Before(deadline); {
			_, err = from.Write(make([]byte, 100))
		}
		if !errors.Is(err, unix.EPIPE) {
			t.Errorf("%v: a sender whose target has closed gets %v, want EPIPE", d, err)
		}
		// The error ends it: the verdict is asked again, and lets TCP find out.
		if _, err := from.Write([]byte("b")); err != nil {
			t.Errorf("%v: the send after that: %v", d, err)
		}
		if s := l.route.Stats()[d]; s.VerdictRuns != 2 || s.Passed != 1 {
			t.Errorf("%v: %+v, want a second run that passes", d, s)
		}
	}
}

// socketsInUse is the count of struct sock in this namespace; it goes down
// with the last reference, not with close.
func socketsInUse(t *testing.T) (n int) {
	t.Helper()
	b, err := os.ReadFile("/proc/net/sockstat")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscanf(string(b), "sockets: used %d", &n); err != nil {
		t.Fatalf("/proc/net/sockstat: %v", err)
	}
	return n
}

func holdsNoSocket(t *testing.T, k *Kernel) {
	rounds := short(1000)
	round := func(i int) {
		l, err := k.newLoop()
		if err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
		defer l.close()
		// Two senders on each socket race the close of one target, or of both.
		var wg sync.WaitGroup
		for _, d := range []Direction{Up, Down} {
			from, _ := l.ends(d)
			for range 2 {
				wg.Go(func() {
					for range 20 {
						sendNow(from, make([]byte, 500))
					}
				})
			}
		}
		switch i % 4 {
		case 0:
			l.service.Close()
		case 1:
			l.client.Close()
		case 2:
			l.client.Close()
			l.service.Close()
		}
		wg.Wait()
		k.reclaim()
	}
	for i := range 20 {
		round(i)
	}
	before := socketsInUse(t)
	for i := range rounds {
		round(i)
	}
	const slack = 20 // of sockets that are just closing
	eventually(t, fmt.Sprintf("%d sockets before, %d after %d rounds", before, socketsInUse(t), rounds), func() bool {
		return socketsInUse(t) <= before+slack
	})
}
