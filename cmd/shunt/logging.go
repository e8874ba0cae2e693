package main

import (
	"io"
	"os"
	"time"

	"github.com/mattn/go-isatty"
	"github.com/rs/zerolog"
)

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
