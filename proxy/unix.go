package proxy

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// DefaultUnixMode is for the process's own user alone.
const DefaultUnixMode fs.FileMode = 0o600

// UnixSocket is how the file of a listening UNIX socket is made.
type UnixSocket struct {
	// Mode is its permissions; whoever may write may connect.
	Mode fs.FileMode
	// Owner and Group are whose it is, by name or number; empty: as the process makes it.
	Owner, Group string
	// Unlink replaces a socket that nobody listens on any more, and removes the file when the listener is closed.
	Unlink bool
}

// ParseUnix reads "unix:/path" or "unix:@name", an abstract socket, and
// returns the path, or @ and the name; ok is false for what doesn't begin with unix:.
func ParseUnix(s string) (name string, ok bool, err error) {
	name, ok = strings.CutPrefix(s, "unix:")
	if ok && (len(name) < 2 || name[0] != '/' && name[0] != '@' || len(name) > maxUnixPath || strings.ContainsRune(name, 0)) {
		err = fmt.Errorf("%q: want unix: and an absolute path, or @ and a name, of at most %d bytes", s, maxUnixPath)
	}
	return name, ok, err
}

// socketFile is the file of a listening UNIX socket.
type socketFile struct {
	path string
	made fs.FileInfo
	how  UnixSocket
}

// listenUnix listens at name, a path or @ and an abstract name, which has no file.
func listenUnix(name string, how UnixSocket) (*net.UnixListener, *socketFile, error) {
	if name[0] == '@' {
		ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
		return ln, nil, err
	}
	uid, gid, err := how.ids()
	if err != nil {
		return nil, nil, err
	}
	if err := makeWay(name, how.Unlink); err != nil {
		return nil, nil, fmt.Errorf("listen unix %s: %w", name, err)
	}
	// Nobody else's until it has its owner, group and mode.
	ln, err := listenPrivate(name)
	if err != nil {
		return nil, nil, err
	}
	ln.SetUnlinkOnClose(false) // remove does it, if the file is still ours
	f := &socketFile{path: name, how: how}
	if f.made, err = os.Lstat(name); err == nil {
		if err = f.give(uid, gid); err == nil {
			return ln, f, nil
		}
		f.how.Unlink = true
		f.remove()
	}
	ln.Close()
	return nil, nil, err
}

// remove removes the file if that is asked for and it is still the same. It must be called before the
// listening socket is closed, which keeps the inode's number from being used again.
func (f *socketFile) remove() error {
	if f == nil || !f.how.Unlink || !f.ours() {
		return nil
	}
	return os.Remove(f.path)
}

// restore makes a former process's file again what it was when it was taken over.
func (f *socketFile) restore() error {
	if f == nil || !f.ours() {
		return nil
	}
	f.how.Mode = f.made.Mode().Perm()
	return f.give(ownerOf(f.made))
}

// ours says whether the file is still there and the same.
func (f *socketFile) ours() bool {
	fi, err := os.Lstat(f.path)
	return err == nil && os.SameFile(fi, f.made)
}

// change makes the file what how says, and returns it for the listener that takes the socket over.
func (f *socketFile) change(how UnixSocket) (*socketFile, error) {
	if f == nil {
		return nil, nil
	}
	next := &socketFile{path: f.path, made: f.made, how: how}
	uid, gid, err := how.ids()
	if err != nil {
		return nil, err
	}
	// An owner that isn't named is who made the file.
	if how.Owner == "" && f.how.Owner != "" {
		uid = os.Geteuid()
	}
	if how.Group == "" && f.how.Group != "" {
		gid = os.Getegid()
	}
	how.Unlink = f.how.Unlink
	if how == f.how || !f.ours() {
		return next, nil
	}
	return next, next.give(uid, gid)
}

// give sets the file's owner, group and mode, where they differ: that may take a right that
// this process hasn't any more. Through os.Root: a link that somebody
// put into the file's place leads no further than its folder.
func (f *socketFile) give(uid, gid int) error {
	dir, err := os.OpenRoot(filepath.Dir(f.path))
	if err != nil {
		return err
	}
	defer dir.Close()
	base := filepath.Base(f.path)
	fi, err := dir.Lstat(base)
	if err != nil {
		return err
	}
	if u, g := ownerOf(fi); uid >= 0 && uid != u || gid >= 0 && gid != g {
		if err := dir.Lchown(base, uid, gid); err != nil {
			return err
		}
	}
	// A system call filter may not know fchmodat2(2), and the default needs none.
	if fi.Mode().Perm() == f.how.Mode {
		return nil
	}
	return dir.Chmod(base, f.how.Mode)
}

// ids looks the owner and the group up; -1: as it is.
func (o UnixSocket) ids() (uid, gid int, err error) {
	uid, gid = -1, -1
	if o.Owner != "" {
		if uid, _, err = LookupUser(o.Owner); err != nil {
			return 0, 0, fmt.Errorf("unix.owner: %w", err)
		}
	}
	if o.Group != "" {
		if gid, err = LookupGroup(o.Group); err != nil {
			return 0, 0, fmt.Errorf("unix.group: %w", err)
		}
	}
	return uid, gid, nil
}

// makeWay says why nothing can listen at path. A socket on which nobody
// answers is a dead process's, and is removed if it may be.
func makeWay(path string, unlink bool) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if fi.Mode().Type() != fs.ModeSocket {
		return errors.New("the file exists and is no socket")
	}
	if !unlink {
		return errors.New("the file exists")
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err == nil {
		c.Close()
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case !errors.Is(err, syscall.ECONNREFUSED):
		// A full backlog, another kind of socket, no permission to ask.
		return errors.New("somebody else listens there")
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the stale socket: %w", err)
	}
	return nil
}

// LookupUser returns the ids of a user by name or number; gid is -1 for a number without a name.
func LookupUser(s string) (uid, gid int, err error) {
	u, err := user.Lookup(s)
	if err != nil {
		n, nerr := strconv.ParseUint(s, 10, 31)
		if nerr != nil {
			return 0, 0, err
		}
		if u, err = user.LookupId(s); err != nil {
			return int(n), -1, nil
		}
	}
	uid, err1 := strconv.Atoi(u.Uid)
	gid, err2 := strconv.Atoi(u.Gid)
	return uid, gid, errors.Join(err1, err2)
}

// LookupGroup returns the id of a group by name or number.
func LookupGroup(s string) (int, error) {
	if g, err := user.LookupGroup(s); err == nil {
		return strconv.Atoi(g.Gid)
	}
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil {
		return 0, fmt.Errorf("group: unknown group %s", s)
	}
	return int(n), nil
}
