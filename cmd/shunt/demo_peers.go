package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"
)

const (
	pingSize = 64
	bulkSize = 128 << 10
	// pingWarmUp is how many round trips pass before the first that counts.
	pingWarmUp = 200
	// maxPings bounds the samples of one measurement.
	maxPings = 1 << 21
	// demoIOTimeout ends a read or a write that hangs.
	demoIOTimeout = 5 * time.Second
)

// The kinds of measurement; the first byte that the client sends says which.
const (
	kindPing = "ping"
	kindBulk = "bulk"
)

// demoConn is a connection with reads and writes that block in the system
// call where the system allows it, so that the figures are the sockets' and
// not the runtime poller's.
type demoConn interface {
	io.ReadWriteCloser
	CloseWrite() error
}

// demoRequest asks the client for one measurement.
type demoRequest struct {
	Addr string        `json:"addr"`
	Kind string        `json:"kind"`
	Time time.Duration `json:"time"`
}

// demoResult is one measurement.
type demoResult struct {
	Error string        `json:"error,omitempty"`
	P50   time.Duration `json:"p50,omitempty"`
	P99   time.Duration `json:"p99,omitempty"`
	Bytes uint64        `json:"bytes,omitempty"`
	Took  time.Duration `json:"took,omitempty"`
}

// demoClientCommand measures what it is asked for on stdin, until EOF.
func demoClientCommand(_ context.Context, _ *command, _ []string, s streams) int {
	dec, enc := json.NewDecoder(s.in), json.NewEncoder(s.out)
	for {
		var r demoRequest
		switch err := dec.Decode(&r); {
		case errors.Is(err, io.EOF):
			return exitOK
		case err != nil:
			fmt.Fprintln(s.err, err)
			return exitFailure
		}
		result, err := measure(r)
		if err != nil {
			result.Error = err.Error()
		}
		if enc.Encode(result) != nil {
			return exitFailure
		}
	}
}

func measure(r demoRequest) (demoResult, error) {
	c, err := demoDial(r.Addr)
	if err != nil {
		return demoResult{}, err
	}
	defer c.Close()
	if _, err := c.Write([]byte{r.Kind[0]}); err != nil {
		return demoResult{}, err
	}
	if r.Kind == kindPing {
		return measurePing(c, r.Time)
	}
	return measureBulk(c, r.Time)
}

// measurePing sends pings one after the other for about d, and compares each
// answer.
func measurePing(c demoConn, d time.Duration) (demoResult, error) {
	out, in := make([]byte, pingSize), make([]byte, pingSize)
	rand.Read(out)
	samples := make([]time.Duration, 0, min(maxPings, int(d/time.Microsecond)+1))
	begin := time.Now()
	last := begin
	for n := uint64(0); ; n++ {
		binary.BigEndian.PutUint64(out, n)
		if _, err := c.Write(out); err != nil {
			return demoResult{}, err
		}
		if _, err := io.ReadFull(c, in); err != nil {
			return demoResult{}, fmt.Errorf("answer to ping %d: %w", n, err)
		}
		now := time.Now()
		if !bytes.Equal(in, out) {
			return demoResult{}, fmt.Errorf("answer to ping %d is %x, not %x", n, in, out)
		}
		if n >= pingWarmUp {
			samples = append(samples, now.Sub(last))
			if now.Sub(begin) >= d || len(samples) == maxPings {
				break
			}
		}
		last = now
	}
	slices.Sort(samples)
	return demoResult{P50: quantile(samples, 0.50), P99: quantile(samples, 0.99)}, nil
}

// quantile returns the smallest of the sorted samples that at least the share
// q of them don't exceed.
func quantile(sorted []time.Duration, q float64) time.Duration {
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}

// measureBulk writes for about d, and lets the service confirm the count. The
// time ends when the last byte has been read at the other end.
func measureBulk(c demoConn, d time.Duration) (demoResult, error) {
	chunk := make([]byte, bulkSize)
	rand.Read(chunk)
	var sent uint64
	begin := time.Now()
	for time.Since(begin) < d {
		n, err := c.Write(chunk)
		sent += uint64(n)
		if err != nil {
			return demoResult{}, err
		}
	}
	if err := c.CloseWrite(); err != nil {
		return demoResult{}, err
	}
	var got uint64
	if err := binary.Read(c, binary.BigEndian, &got); err != nil {
		return demoResult{}, fmt.Errorf("count of the service: %w", err)
	}
	took := time.Since(begin)
	if got != sent {
		return demoResult{}, fmt.Errorf("sent %d bytes, %d arrived", sent, got)
	}
	return demoResult{Bytes: sent, Took: took}, nil
}

// demoServiceCommand prints its address and serves until stdin ends.
func demoServiceCommand(_ context.Context, _ *command, _ []string, s streams) int {
	addr, accept, err := demoListen()
	if err != nil {
		fmt.Fprintln(s.err, err)
		return exitFailure
	}
	if _, err := fmt.Fprintln(s.out, addr); err != nil {
		return exitFailure
	}
	failed := make(chan error, 1)
	go func() {
		for {
			c, err := accept()
			if err != nil {
				failed <- err
				return
			}
			go func() {
				defer c.Close()
				if err := demoServe(c); err != nil {
					fmt.Fprintln(s.err, err)
				}
			}()
		}
	}()
	ended := make(chan struct{})
	go func() {
		io.Copy(io.Discard, s.in)
		close(ended)
	}()
	select {
	case <-ended:
		return exitOK
	case err := <-failed:
		fmt.Fprintln(s.err, err)
		return exitFailure
	}
}

// demoServe answers pings by echo and bulk by its length. It uses plain reads
// and writes: io.Copy between TCP connections would be splice(2).
func demoServe(c demoConn) error {
	buf := make([]byte, bulkSize)
	if _, err := io.ReadFull(c, buf[:1]); err != nil {
		return fmt.Errorf("read kind: %w", err)
	}
	echo := buf[0] == kindPing[0]
	var count uint64
	for {
		n, err := c.Read(buf)
		if echo && n > 0 {
			if _, err := c.Write(buf[:n]); err != nil {
				return fmt.Errorf("echo: %w", err)
			}
		}
		count += uint64(n)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	if echo {
		return nil
	}
	return binary.Write(c, binary.BigEndian, count)
}
