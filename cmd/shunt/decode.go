package main

import (
	"errors"
	"fmt"
	"reflect"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
)

// document is a parsed configuration file, and what is wrong with it.
type document struct {
	name  string
	lines map[string]int // key path -> line, from 1
	names []string       // the listeners' names as far as they are known
	errs  []*configError
	bad   map[string]*configError // by key path: the first about the key, or in the table
}

// configError is a fault in a configuration file.
type configError struct {
	file string
	line int // 0: not known
	path string
	msg  string

	missing bool // the key isn't there
}

// Error implements error.
func (e *configError) Error() string {
	if e.line == 0 {
		return e.file + ": " + e.msg
	}
	return fmt.Sprintf("%s:%d: %s", e.file, e.line, e.msg)
}

// errorf notes and returns an error about the key at path, which it names the
// way the file's author would: listener "web": keepalive.idle: ... Only the
// first error about a key is kept: the others may follow from it.
func (d *document) errorf(path keyPath, format string, a ...any) error {
	e := &configError{file: d.name, line: d.line(path), path: path.String(), msg: d.describe(path) + fmt.Sprintf(format, a...)}
	if first := d.bad[e.path]; first != nil && first.path == e.path {
		return first
	}
	d.errs = append(d.errs, e)
	for ; len(path) > 0; path = path[:len(path)-1] {
		if at := path.String(); d.bad[at] == nil {
			d.bad[at] = e
		}
	}
	return e
}

// missing is errorf for a key that must be there. An error about another key
// of its table, which may be this one misspelt, goes first.
func (d *document) missing(path keyPath, format string, a ...any) {
	if e := d.bad[path[:len(path)-1].String()]; e == nil || e.missing {
		d.errorf(path, "missing: "+format, a...)
		d.errs[len(d.errs)-1].missing = true
	}
}

// err returns all errors in the order of the file, a line for each, or nil.
func (d *document) err() error {
	sort.SliceStable(d.errs, func(i, j int) bool { return d.errs[i].line < d.errs[j].line })
	var errs []error
	for _, e := range d.errs {
		errs = append(errs, e)
	}
	return errors.Join(errs...)
}

// line finds the line of path, or of the closest table around it.
func (d *document) line(path keyPath) int {
	for ; len(path) > 0; path = path[:len(path)-1] {
		if n := d.lines[path.String()]; n > 0 {
			return n
		}
	}
	return 0
}

func (d *document) describe(path keyPath) string {
	prefix := ""
	if len(path) > 0 && path[0].index > 0 {
		i := path[0].index
		prefix = fmt.Sprintf("listener %d: ", i)
		if i <= len(d.names) && d.names[i-1] != "" {
			prefix = fmt.Sprintf("listener %q: ", d.names[i-1])
		}
		path = path[1:]
	}
	if len(path) == 0 {
		return prefix
	}
	return prefix + path.String() + ": "
}

// keyPath leads to a value: bypass.window, listener#2.keepalive.idle.
type keyPath []pathElement

type pathElement struct {
	key   string
	index int // from 1 in an array of tables, else 0
}

func path(keys ...string) keyPath {
	var p keyPath
	for _, k := range keys {
		p = append(p, pathElement{key: k})
	}
	return p
}

func (p keyPath) with(key string) keyPath {
	return append(p[:len(p):len(p)], pathElement{key: key})
}

func (p keyPath) at(index int) keyPath {
	q := append(keyPath{}, p...)
	q[len(q)-1].index = index
	return q
}

func (p keyPath) String() string {
	var b strings.Builder
	for i, e := range p {
		if i > 0 {
			b.WriteByte('.')
		}
		b.WriteString(toml.Key{e.key}.String())
		if e.index > 0 {
			fmt.Fprintf(&b, "#%d", e.index)
		}
	}
	return b.String()
}

// decodeFile fills fc from data. It is stricter than the TOML package's own
// decoding: keys match by exact spelling, and every key must be known. The
// error is one of syntax; the document notes the others.
func decodeFile(name string, data []byte, fc *fileConfig) (*document, error) {
	d := &document{name: name, bad: map[string]*configError{}}
	tree := map[string]any{}
	if _, err := toml.Decode(string(data), &tree); err != nil {
		var pe toml.ParseError
		if errors.As(err, &pe) {
			return nil, &configError{file: name, line: pe.Position.Line, msg: syntaxMessage(pe)}
		}
		return nil, &configError{file: name, msg: err.Error()}
	}
	d.lines = keyLines(string(data))
	if list, ok := arrayOfTables(tree["listener"]); ok {
		for _, t := range list {
			s, _ := t["name"].(string)
			if s == "" {
				s, _ = t["listen"].(string)
			}
			d.names = append(d.names, s)
		}
	}
	w := walker{doc: d}
	w.table(nil, tree, reflect.ValueOf(fc).Elem())
	return d, nil
}

func syntaxMessage(pe toml.ParseError) string {
	msg := strings.TrimSuffix(pe.Message, ".")
	if pe.LastKey != "" && !strings.Contains(msg, pe.LastKey) {
		msg = pe.LastKey + ": " + msg
	}
	return msg
}

// walker copies a TOML tree into the schema and notes what doesn't fit.
type walker struct{ doc *document }

func (w *walker) errorf(p keyPath, format string, a ...any) { w.doc.errorf(p, format, a...) }

func (w *walker) table(p keyPath, tree map[string]any, v reflect.Value) {
	known := map[string]reflect.Value{}
	for i := range v.NumField() {
		known[v.Type().Field(i).Tag.Get("toml")] = v.Field(i)
	}
	keys := make([]string, 0, len(tree))
	for k := range tree {
		keys = append(keys, k)
	}
	sort.Strings(keys) // so that errors on one line come in a fixed order
	for _, k := range keys {
		if f, ok := known[k]; ok {
			w.value(p.with(k), tree[k], f)
		} else {
			w.errorf(p.with(k), "unknown key%s", hint(k, p, known))
		}
	}
}

// hint says what an unknown key k in the table at p should have been.
func hint(k string, p keyPath, known map[string]reflect.Value) string {
	var here []string
	for name := range known {
		here = append(here, name)
	}
	sort.Strings(here)
	exact := map[string]string{}
	var elsewhere []string
	t := reflect.TypeFor[fileConfig]()
	for i := range t.NumField() {
		table, in := t.Field(i).Type, "["+t.Field(i).Tag.Get("toml")+"]"
		if table.Kind() == reflect.Slice {
			table, in = table.Elem(), "["+in+"]"
		}
		for j := range table.NumField() {
			name := table.Field(j).Tag.Get("toml")
			exact[name] = in
			elsewhere = append(elsewhere, name)
		}
	}
	if in, ok := exact[k]; ok {
		return fmt.Sprintf("; %s belongs in %s", k, in)
	}
	if near := nearest(k, here); near != "" {
		return fmt.Sprintf("; did you mean %q?", near)
	}
	if near := nearest(k, elsewhere); near != "" && len(p) > 0 {
		return fmt.Sprintf("; did you mean %q in %s?", near, exact[near])
	}
	return "; known here: " + strings.Join(here, ", ")
}

func (w *walker) value(p keyPath, from any, to reflect.Value) {
	switch to.Interface().(type) {
	case time.Duration:
		w.duration(p, from, to)
		return
	case size, autoSize:
		w.size(p, from, to)
		return
	}
	ok := false
	want := ""
	switch to.Kind() {
	case reflect.String:
		var s string
		want = "a string in quotes"
		if s, ok = from.(string); ok {
			to.SetString(s)
		}
	case reflect.Bool:
		var b bool
		want = "true or false"
		if b, ok = from.(bool); ok {
			to.SetBool(b)
		}
	case reflect.Int:
		var n int64
		want = "a whole number"
		if n, ok = from.(int64); ok {
			if to.OverflowInt(n) {
				w.errorf(p, "%d is out of range", n)
				return
			}
			to.SetInt(n)
		}
	case reflect.Struct:
		var t map[string]any
		want = "a table"
		if t, ok = from.(map[string]any); ok {
			w.table(p, t, to)
		}
	case reflect.Slice:
		if to.Type().Elem().Kind() == reflect.String {
			w.strings(p, from, to)
			return
		}
		var list []map[string]any
		want = fmt.Sprintf("an array of tables, each written [[%s]]", p)
		if list, ok = arrayOfTables(from); ok {
			for i, t := range list {
				e := reflect.ValueOf(defaultListener())
				elem := reflect.New(e.Type()).Elem()
				elem.Set(e)
				w.table(p.at(i+1), t, elem)
				to.Set(reflect.Append(to, elem))
			}
		}
	default:
		panic("schema type " + to.Type().String() + " of " + p.String())
	}
	if !ok {
		w.errorf(p, "want %s, not %s", want, typeName(from))
	}
}

// strings takes an array of strings; an empty one is like none.
func (w *walker) strings(p keyPath, from any, to reflect.Value) {
	const want = `an array of strings, such as ["a", "b"]`
	list, ok := from.([]any)
	if !ok {
		hint := ""
		if s, isString := from.(string); isString {
			hint = fmt.Sprintf("; did you mean [%q]?", s)
		}
		w.errorf(p, "want %s, not %s%s", want, typeName(from), hint)
		return
	}
	var all []string
	for _, e := range list {
		s, ok := e.(string)
		if !ok {
			w.errorf(p, "want %s, not one with %s", want, typeName(e))
			return
		}
		all = append(all, s)
	}
	to.Set(reflect.ValueOf(all))
}

func (w *walker) duration(p keyPath, from any, to reflect.Value) {
	const want = `a duration in quotes, such as "500ms", "10s" or "5m"`
	s, ok := from.(string)
	if !ok {
		hint := ""
		if n, isInt := from.(int64); isInt && n >= 0 {
			hint = fmt.Sprintf("; did you mean \"%ds\"?", n)
		}
		w.errorf(p, "want %s, not %s%s", want, typeName(from), hint)
		return
	}
	v, err := time.ParseDuration(s)
	if err != nil {
		w.errorf(p, "%q is not a duration: want %s", s, want)
		return
	}
	to.SetInt(int64(v))
}

func (w *walker) size(p keyPath, from any, to reflect.Value) {
	_, auto := to.Interface().(autoSize)
	want := "a size: " + sizeForm
	if auto {
		want = `"auto" or ` + want
	}
	if n, isInt := from.(int64); isInt && n >= 0 {
		from = strconv.FormatInt(n, 10) // a bare number is in bytes
	}
	s, ok := from.(string)
	if !ok {
		w.errorf(p, "want %s, not %s", want, typeName(from))
		return
	}
	if auto && s == "auto" {
		to.SetUint(0)
		return
	}
	n, err := parseSize(s)
	switch {
	case err != nil && auto:
		w.errorf(p, "%s", strings.Replace(err.Error(), sizeForm, `"auto" or `+sizeForm, 1))
		return
	case err != nil:
		w.errorf(p, "%v", err)
		return
	case auto && n == 0:
		w.errorf(p, `0 is out of range; write "auto" for the default`)
		return
	}
	to.SetUint(uint64(n))
}

// arrayOfTables takes both forms that TOML has for one.
func arrayOfTables(v any) ([]map[string]any, bool) {
	switch v := v.(type) {
	case []map[string]any:
		return v, true
	case []any:
		list := make([]map[string]any, 0, len(v))
		for _, e := range v {
			t, ok := e.(map[string]any)
			if !ok {
				return nil, false
			}
			list = append(list, t)
		}
		return list, true
	}
	return nil, false
}

func typeName(v any) string {
	switch v := v.(type) {
	case string:
		return fmt.Sprintf("the string %q", v)
	case int64:
		return fmt.Sprintf("the number %d", v)
	case float64:
		return fmt.Sprintf("the number %v", v)
	case bool:
		return fmt.Sprintf("%v", v)
	case time.Time:
		return "a date"
	case map[string]any:
		return "a table"
	case []map[string]any:
		return "an array of tables"
	case []any:
		return "an array"
	}
	return fmt.Sprintf("%T", v)
}

// keyLines maps each key path of a valid TOML text to the line it is on. The
// TOML package keeps one position per dotted key and so loses those of all
// but the last [[listener]]. Keys inside inline tables aren't found: the
// table's line stands for them.
func keyLines(text string) map[string]int {
	lines := map[string]int{}
	counts := map[string]int{} // of each array of tables
	var table keyPath
	quotes := "" // the delimiter of the multi-line string that is open
	for i, line := range strings.Split(text, "\n") {
		if quotes != "" {
			if _, rest, closed := strings.Cut(line, quotes); closed {
				quotes = openQuotes(rest)
			}
			continue
		}
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "[["):
			name, _, _ := strings.Cut(line[2:], "]]")
			table = path(splitKey(name)...)
			n := counts[table.String()] + 1
			counts[table.String()] = n
			if n == 1 {
				note(lines, table, i+1)
			}
			if len(table) > 0 {
				table = table.at(n)
			}
			note(lines, table, i+1)
		case strings.HasPrefix(line, "["):
			name, _, _ := strings.Cut(line[1:], "]")
			table = nil
			for _, k := range splitKey(name) {
				table = table.with(k)
				if n := counts[table.String()]; n > 0 {
					table = table.at(n)
				}
			}
			note(lines, table, i+1)
		case line == "" || line[0] == '#':
		default:
			key, value, ok := strings.Cut(line, "=")
			if ok {
				p := table
				for _, k := range splitKey(key) {
					p = p.with(k)
					note(lines, p, i+1)
				}
			} else {
				value = line
			}
			quotes = openQuotes(value)
		}
	}
	return lines
}

func note(lines map[string]int, p keyPath, line int) {
	if k := p.String(); lines[k] == 0 {
		lines[k] = line
	}
}

// openQuotes returns the delimiter of a multi-line string that s leaves open.
func openQuotes(s string) string {
	for {
		basic, literal := strings.Index(s, `"""`), strings.Index(s, `'''`)
		q := `"""`
		at := basic
		if basic < 0 || literal >= 0 && literal < basic {
			q, at = `'''`, literal
		}
		if at < 0 {
			return ""
		}
		_, rest, closed := strings.Cut(s[at+3:], q)
		if !closed {
			return q
		}
		s = rest
	}
}

// splitKey splits a dotted key; quotes around its parts are dropped.
func splitKey(s string) []string {
	var keys []string
	for _, k := range strings.Split(s, ".") {
		keys = append(keys, strings.Trim(strings.TrimSpace(k), `"'`))
	}
	return keys
}
