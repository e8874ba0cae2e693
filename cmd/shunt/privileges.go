package main

import (
	"errors"
	"fmt"
	"os/user"
	"strconv"
	"strings"
	"unicode"
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

// identity looks [process] up; nil where nobody is named. Names are looked
// up in the user database, numbers needn't be there.
func (t processTable) identity() (*identity, error) {
	if t.User == "" {
		return nil, nil
	}
	who := &identity{user: t.User, gid: -1}
	u, err := user.Lookup(t.User)
	if err != nil {
		n, nerr := strconv.ParseUint(t.User, 10, 31)
		if nerr != nil {
			return nil, fmt.Errorf("process.user: %q: no such user on this system", t.User)
		}
		who.uid = int(n)
		u, err = user.LookupId(t.User)
	}
	if err == nil {
		var err1, err2 error
		who.uid, err1 = strconv.Atoi(u.Uid)
		who.gid, err2 = strconv.Atoi(u.Gid)
		if err := errors.Join(err1, err2); err != nil {
			return nil, fmt.Errorf("process.user: %q: %w", t.User, err)
		}
	}
	if t.Group != "" {
		if who.gid, err = groupID(t.Group); err != nil {
			return nil, err
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

func groupID(name string) (int, error) {
	g, err := user.LookupGroup(name)
	if err == nil {
		return strconv.Atoi(g.Gid)
	}
	n, err := strconv.ParseUint(name, 10, 31)
	if err != nil {
		return 0, fmt.Errorf("process.group: %q: no such group on this system", name)
	}
	return int(n), nil
}
