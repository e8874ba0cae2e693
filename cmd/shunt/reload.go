package main

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// Messages about a reload.
const (
	msgReloaded     = "configuration reloaded"
	msgReloadFailed = "configuration not reloaded: nothing was changed"
)

var errStdin = errors.New("it was read from stdin, which can't be read again: start shunt with a file")

// reload reads the file again and makes it the configuration, or changes
// nothing and says why.
func (s *service) reload() {
	if s.upgrade != nil {
		s.log.Warn().Msg("no reload: an upgrade is running, and reads the file too")
		return
	}
	began := time.Now()
	s.manager.tell(daemon.SdNotifyReloading, strings.TrimSpace(daemon.SdNotifyMonotonicUsec()))
	defer func() { s.manager.tell(daemon.SdNotifyReady, statusOf(s.server)) }()
	fc, err := s.readAgain()
	if err == nil {
		cfg := fc.proxyConfig()
		err = s.server.Reload(cfg)
	} else {
		s.server.ReloadFailed()
	}
	if err != nil {
		s.log.Error().Str("file", s.file).Err(err).Msg(msgReloadFailed)
		return
	}
	s.log.set(fc.Log)
	if keys := fixedKeys(s.fc, fc); len(keys) > 0 {
		s.log.Warn().Strs("keys", keys).Msg("changed keys that need a restart")
		fc.keep(s.fc)
	}
	if s.kernel == nil && fc.wantsBypass() && !s.fc.wantsBypass() {
		s.log.Warn().Str("reason", "the bypass is set up at the start only, and every listener had it off then: restart shunt").
			Msg("connections of new listeners are copied")
	}
	s.log.Info().Str("file", s.file).Int("listeners", len(fc.Listeners)).Dur("took_ms", time.Since(began)).Msg(msgReloaded)
	s.fc = fc
}

func (s *service) readAgain() (*fileConfig, error) {
	if s.file == "-" {
		return nil, errStdin
	}
	return loadConfig(s.file, nil)
}

// liveTables are those that a reload changes; the others need a restart.
var liveTables = []string{"log", "admin", "dns", "limits", "listener"}

// fixedKeys returns the keys that differ and that only a restart changes.
func fixedKeys(before, after *fileConfig) []string {
	var keys []string
	eachFixedTable(before, after, func(table string, a, b reflect.Value) {
		for i := range a.NumField() {
			if !reflect.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
				keys = append(keys, table+"."+tomlKey(a.Type().Field(i)))
			}
		}
	})
	return keys
}

// keep takes over what only a restart changes: it is what runs.
func (fc *fileConfig) keep(running *fileConfig) {
	eachFixedTable(fc, running, func(_ string, a, b reflect.Value) { a.Set(b) })
}

func eachFixedTable(a, b *fileConfig, f func(table string, a, b reflect.Value)) {
	va, vb := reflect.ValueOf(a).Elem(), reflect.ValueOf(b).Elem()
	for i := range va.NumField() {
		table := tomlKey(va.Type().Field(i))
		if table != "" && !slices.Contains(liveTables, table) {
			f(table, va.Field(i), vb.Field(i))
		}
	}
}

func tomlKey(f reflect.StructField) string {
	key, _, _ := strings.Cut(f.Tag.Get("toml"), ",")
	return key
}
