//go:build unix

package proxy

import (
	"io/fs"
	"net"
	"sync"
	"syscall"
)

// umaskMu is held while the process's umask is another.
var umaskMu sync.Mutex

// listenPrivate listens at path; the socket is never anybody else's to use.
func listenPrivate(path string) (*net.UnixListener, error) {
	umaskMu.Lock()
	defer umaskMu.Unlock()
	old := syscall.Umask(0o177)
	defer syscall.Umask(old)
	return net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
}

// ownerOf returns whose a file is.
func ownerOf(fi fs.FileInfo) (uid, gid int) {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return -1, -1
	}
	return int(st.Uid), int(st.Gid)
}
