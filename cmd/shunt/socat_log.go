package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
)

// socatLog writes messages in the form of socat's: time, program, process,
// severity (one of F, E, W, N, I, D), text.
type socatLog struct {
	mu     sync.Mutex
	w      io.Writer
	level  int
	name   string
	host   string
	micros bool
	// send, unless nil, takes the messages instead of w.
	send func(severity byte, text string)
}

func newSocatLog(w io.Writer, name string) *socatLog {
	if name == "" {
		name = programName()
	}
	return &socatLog{w: w, name: name}
}

// severities in the order of -d.
const severities = "FEWNID"

func (l *socatLog) shows(severity byte) bool {
	return strings.IndexByte(severities, severity) <= l.level+1
}

func (l *socatLog) printf(severity byte, format string, a ...any) {
	if l.shows(severity) {
		l.print(severity, fmt.Sprintf(format, a...))
	}
}

// print writes a message whatever the level.
func (l *socatLog) print(severity byte, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.send != nil {
		l.send(severity, text)
		return
	}
	l.write(severity, text)
}

// write writes a message to w.
func (l *socatLog) write(severity byte, text string) {
	form := "2006/01/02 15:04:05"
	if l.micros {
		form += ".000000"
	}
	host := ""
	if l.host != "" {
		host = l.host + " "
	}
	fmt.Fprintf(l.w, "%s %s%s[%d] %c %s\n", time.Now().Format(form), host, l.name, os.Getpid(), severity, text)
}

// logger returns a logger for the proxy whose lines come out as messages.
func (l *socatLog) logger() zerolog.Logger {
	return zerolog.New(proxyLines{l}).Level([]zerolog.Level{
		zerolog.ErrorLevel, zerolog.WarnLevel, zerolog.WarnLevel, zerolog.InfoLevel, zerolog.DebugLevel}[l.level])
}

type proxyLines struct{ log *socatLog }

func (p proxyLines) Write(b []byte) (int, error) { return p.WriteLevel(zerolog.NoLevel, b) }

// WriteLevel implements zerolog.LevelWriter.
func (p proxyLines) WriteLevel(level zerolog.Level, b []byte) (int, error) {
	severity := map[zerolog.Level]byte{zerolog.DebugLevel: 'D', zerolog.InfoLevel: 'I', zerolog.WarnLevel: 'W', zerolog.ErrorLevel: 'E'}[level]
	if severity == 0 {
		severity = 'I'
	}
	text := string(bytes.TrimSpace(b))
	fields := map[string]any{}
	if json.Unmarshal(b, &fields) == nil {
		text = fmt.Sprint(fields[zerolog.MessageFieldName])
		if text == "listening" || text == "upstream not reached" {
			return len(b), nil // said in socat's words
		}
		delete(fields, zerolog.MessageFieldName)
		delete(fields, zerolog.LevelFieldName)
		delete(fields, "listener") // there is one
		for _, k := range slices.Sorted(maps.Keys(fields)) {
			if f, ok := fields[k].(float64); ok && f == math.Trunc(f) {
				fields[k] = int64(f)
			}
			text += fmt.Sprintf(" %s=%v", k, fields[k])
		}
	}
	p.log.printf(severity, "%s", text)
	return len(b), nil
}

// dump is what -v, -x, -r and -R write.
type dump struct {
	mu        sync.Mutex
	w         io.Writer
	text, hex bool
	raw       [2]io.Writer // by side that sends: left, right
	at        map[dumpKey]uint64
}

type dumpKey struct {
	conn  uint64
	right bool
}

// bytes writes b, which the right or the left side sent.
func (d *dump) bytes(conn uint64, right bool, b []byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	side, mark := 0, '>'
	if right {
		side, mark = 1, '<'
	}
	if w := d.raw[side]; w != nil {
		w.Write(b)
	}
	if !d.text && !d.hex {
		return
	}
	key := dumpKey{conn, right}
	from := d.at[key]
	d.at[key] = from + uint64(len(b))
	var out bytes.Buffer
	now := time.Now()
	fmt.Fprintf(&out, "%c %s.%09d  length=%d from=%d to=%d\n", mark, now.Format("2006/01/02 15:04:05"), now.Nanosecond(), len(b), from, from+uint64(len(b))-1)
	switch {
	case d.text && d.hex:
		dumpBoth(&out, b)
	case d.hex:
		for _, c := range b {
			fmt.Fprintf(&out, " %02x", c)
		}
		out.WriteByte('\n')
	default:
		dumpText(&out, b)
	}
	d.w.Write(out.Bytes())
}

// forget drops what is known of a connection.
func (d *dump) forget(conn uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.at, dumpKey{conn, false})
	delete(d.at, dumpKey{conn, true})
}

var textForms = map[byte]string{'\a': `\a`, '\b': `\b`, '\v': `\v`, '\f': `\f`, '\r': `\r`, '\\': `\\`, '\t': "\t", '\n': "\n"}

func printable(c byte) bool { return c >= ' ' && c < 0x7f }

func dumpText(out *bytes.Buffer, b []byte) {
	for _, c := range b {
		switch form, ok := textForms[c]; {
		case ok:
			out.WriteString(form)
		case printable(c):
			out.WriteByte(c)
		default:
			out.WriteByte('.')
		}
	}
}

// dumpBoth writes lines of up to 16 bytes, which end with a newline in the data too.
func dumpBoth(out *bytes.Buffer, b []byte) {
	for len(b) > 0 {
		n := min(len(b), 16)
		if i := bytes.IndexByte(b[:n], '\n'); i >= 0 {
			n = i + 1
		}
		hex, text := "", make([]byte, n)
		for i, c := range b[:n] {
			hex += fmt.Sprintf(" %02x", c)
			if text[i] = '.'; printable(c) {
				text[i] = c
			}
		}
		fmt.Fprintf(out, "%-48s  %s\n", hex, text)
		b = b[n:]
	}
	out.WriteString("--\n")
}
