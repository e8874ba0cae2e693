package main

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/rs/zerolog"

	"shunt/proxy"
)

// statusEvery is how often a service manager without a watchdog gets a new status line.
const statusEvery = 10 * time.Second

// notifier tells the service manager how this process is (sd_notify). Where
// there is none, it does nothing.
type notifier struct {
	log    zerolog.Logger
	mu     sync.Mutex
	silent bool // another process speaks now, or none listens
	stop   chan struct{}
	done   sync.WaitGroup
}

// tell returns whether there is somebody who listens.
func (n *notifier) tell(states ...string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.silent {
		return false
	}
	sent, err := daemon.SdNotify(false, strings.Join(states, "\n"))
	if err != nil {
		n.log.Warn().Err(err).Msg("service manager not told")
	}
	n.silent = !sent && err == nil
	return !n.silent
}

// start says that the server is ready, and goes on to say how it is until
// close is called; to a watchdog only while it really works.
func (n *notifier) start(server *proxy.Server) {
	status := statusOf(server)
	if !n.tell(daemon.SdNotifyReady, status) {
		return
	}
	watchdog, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		n.log.Warn().Err(err).Msg("watchdog off")
	}
	n.stop = make(chan struct{})
	n.done.Go(func() { n.follow(server, watchdog, status) })
}

func (n *notifier) follow(server *proxy.Server, watchdog time.Duration, status string) {
	every := statusEvery
	if watchdog > 0 {
		every = min(every, watchdog/2)
	}
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		select {
		case <-n.stop:
			return
		case <-t.C:
		}
		var states []string
		if s := statusOf(server); s != status {
			status = s
			states = append(states, s)
		}
		if watchdog > 0 {
			ctx, cancel := context.WithTimeout(context.Background(), watchdog/4)
			err := server.Alive(ctx)
			cancel()
			if err != nil {
				n.log.Error().Err(err).Msg("not alive: the watchdog isn't told")
			} else {
				states = append(states, daemon.SdNotifyWatchdog)
			}
		}
		if len(states) > 0 {
			n.tell(states...)
		}
	}
}

// statusOf returns the STATUS= line.
func statusOf(server *proxy.Server) string {
	word := "serving"
	if server.Draining() {
		word = "draining"
	}
	v := server.Numbers()
	return fmt.Sprintf("STATUS=%s: %d live connections, %d accepted, %d listeners", word, v.Connections, v.Accepted, v.Listeners)
}

// handOver lets another process speak.
func (n *notifier) handOver(pid int) {
	n.tell(fmt.Sprintf("MAINPID=%d", pid))
	n.mu.Lock()
	n.silent = true
	n.mu.Unlock()
}

func (n *notifier) close() {
	if n.stop != nil {
		close(n.stop)
		n.done.Wait()
		n.stop = nil
	}
}
