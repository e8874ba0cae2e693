package main

import (
	"fmt"
	"strings"
	"unicode"

	"shunt/proxy"
)

// validate checks what doesn't depend on this system's users.
func (t processTable) validate(d *document) {
	for _, k := range []struct{ key, value string }{{"user", t.User}, {"group", t.Group}} {
		p := path("process", k.key)
		switch {
		case k.value == "root" || k.value == "0":
			d.errorf(p, `%q: want an unprivileged one, by name or number, or "" to stay`, k.value)
		case strings.ContainsFunc(k.value, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) || r == ':' }):
			d.errorf(p, "%q: want a name or a number", k.value)
		}
	}
	if t.Group != "" && t.User == "" {
		d.errorf(path("process", "group"), "%q without process.user", t.Group)
	}
}

// identity is whom the process becomes once everything is open.
type identity struct {
	user     string // as the configuration names it
	uid, gid int
}

// identity looks [process] up; nil where nobody is named. A number needn't be
// in the user database.
func (t processTable) identity() (*identity, error) {
	if t.User == "" {
		return nil, nil
	}
	who := &identity{user: t.User}
	var err error
	if who.uid, who.gid, err = proxy.LookupUser(t.User); err != nil {
		return nil, fmt.Errorf("process.user: %q: no such user on this system", t.User)
	}
	if t.Group != "" {
		if who.gid, err = proxy.LookupGroup(t.Group); err != nil {
			return nil, fmt.Errorf("process.group: %q: no such group on this system", t.Group)
		}
	}
	switch {
	case who.gid < 0:
		return nil, fmt.Errorf("process.group: missing: user %s is not in the user database, which would name its group", t.User)
	case who.uid == 0 || who.gid == 0:
		return nil, fmt.Errorf("process.user: %q has user id %d and group id %d: want unprivileged ones", t.User, who.uid, who.gid)
	}
	return who, nil
}
