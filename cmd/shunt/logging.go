package main

import (
	"io"
	"os"
	"time"

	"github.com/mattn/go-isatty"
	"github.com/rs/zerolog"
)

func init() {
	// With milliseconds: zerolog's own has whole seconds.
	zerolog.TimeFieldFormat = "2006-01-02T15:04:05.000Z07:00"
}

// newLogger returns the logger that a [log] table asks for.
func newLogger(t logTable, w io.Writer) zerolog.Logger {
	level, err := zerolog.ParseLevel(t.Level)
	if err != nil {
		level = zerolog.InfoLevel
	}
	if t.Format == "console" || t.Format == "auto" && isTerminal(w) {
		w = zerolog.ConsoleWriter{
			Out:        w,
			NoColor:    !isTerminal(w) || os.Getenv("NO_COLOR") != "",
			TimeFormat: time.TimeOnly + ".000",
		}
	}
	return zerolog.New(w).Level(level).With().Timestamp().Logger()
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}
