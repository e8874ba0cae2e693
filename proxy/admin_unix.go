//go:build unix

package proxy

import (
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
