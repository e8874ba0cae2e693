package main

import (
	"io"
	"os"
	"sync/atomic"
	"time"

	"github.com/mattn/go-isatty"
	"github.com/rs/zerolog"
)

func init() {
	// With milliseconds: zerolog's own has whole seconds.
	zerolog.TimeFieldFormat = "2006-01-02T15:04:05.000Z07:00"
}

// liveLog is a logger whose [log] table may change while it is in use, the
// loggers derived from it included.
type liveLog struct {
	zerolog.Logger
	to    io.Writer
	out   atomic.Pointer[io.Writer]
	level atomic.Int32
}

// newLog returns the logger that a [log] table asks for.
func newLog(t logTable, w io.Writer) *liveLog {
	l := &liveLog{to: w}
	l.set(t)
	l.Logger = zerolog.New(l).Sample(l).With().Timestamp().Logger()
	return l
}

// newLogger is newLog where nothing will change.
func newLogger(t logTable, w io.Writer) zerolog.Logger { return newLog(t, w).Logger }

// set makes t the table.
func (l *liveLog) set(t logTable) {
	level, err := zerolog.ParseLevel(t.Level)
	if err != nil {
		level = zerolog.InfoLevel
	}
	w := l.to
	if t.Format == "console" || t.Format == "auto" && isTerminal(w) {
		w = zerolog.ConsoleWriter{
			Out:        w,
			NoColor:    !isTerminal(w) || os.Getenv("NO_COLOR") != "",
			TimeFormat: time.TimeOnly + ".000",
		}
	}
	l.out.Store(&w)
	l.level.Store(int32(level))
}

// Sample implements zerolog.Sampler: a line below the level costs nothing more.
func (l *liveLog) Sample(level zerolog.Level) bool { return int32(level) >= l.level.Load() }

// Write implements io.Writer.
func (l *liveLog) Write(p []byte) (int, error) { return (*l.out.Load()).Write(p) }

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}
