//go:build linux

package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"shunt/test/harness"
)

// Client and service of the connections row are one event loop each: they take as little of the machine as they
// can, since it is the front that is measured.

const (
	connectAtATime = 16
	connectPerUnit = 4000 // for each second that a measurement may take
)

// loop waits for sockets and calls ready for each that is.
func loop(epoll int, timeout time.Duration, ready func(fd int) (more bool, err error)) error {
	events := make([]unix.EpollEvent, 64)
	for {
		n, err := unix.EpollWait(epoll, events, int(timeout.Milliseconds()))
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return fmt.Errorf("epoll_wait: %w", err)
		case n == 0:
			return fmt.Errorf("nothing came for %v", timeout)
		}
		for _, e := range events[:n] {
			if more, err := ready(int(e.Fd)); err != nil || !more {
				return err
			}
		}
	}
}

func watch(epoll, fd int, events uint32) error {
	return unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)})
}

// serveConnections answers within this process.
func serveConnections(_ *bench, _ string, ns *harness.Netns, host string, port int) (func(), error) {
	ln, err := ns.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return nil, err
	}
	defer ln.Close()
	file, err := ln.File()
	if err != nil {
		return nil, err
	}
	listening := int(file.Fd())
	if err := unix.SetNonblock(listening, true); err != nil {
		file.Close()
		return nil, err
	}
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err == nil {
		if err = watch(epoll, listening, unix.EPOLLIN); err != nil {
			unix.Close(epoll)
		}
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer file.Close()
		defer unix.Close(epoll)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		buf := make([]byte, 1024)
		open := map[int]bool{}
		defer func() {
			for fd := range open {
				unix.Close(fd)
			}
		}()
		err := loop(epoll, -time.Millisecond, func(fd int) (bool, error) {
			if fd == listening {
				for {
					c, _, err := unix.Accept4(listening, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
					switch err {
					case nil:
					case unix.EAGAIN, unix.ECONNABORTED:
						return true, nil
					case unix.EINVAL: // it was shut down
						return false, nil
					default:
						return false, fmt.Errorf("accept4: %w", err)
					}
					open[c] = true
					if err := watch(epoll, c, unix.EPOLLIN); err != nil {
						return false, fmt.Errorf("epoll_ctl: %w", err)
					}
				}
			}
			n, err := unix.Read(fd, buf)
			if err == unix.EAGAIN {
				return true, nil
			}
			if err == nil && n > 0 {
				_, err = unix.Write(fd, buf[:n])
			}
			if err != nil || n == 0 {
				delete(open, fd)
				unix.Close(fd)
			}
			return true, nil
		})
		if err != nil {
			fmt.Fprintln(os.Stderr, "bench: the service of the connections row ended:", err)
		}
	}()
	return func() {
		unix.Shutdown(listening, unix.SHUT_RDWR)
		<-ended
	}, nil
}

// connect makes connections, connectAtATime of them at any time; each sends a byte, reads one and closes.
func connect(b *bench, c client) (float64, string, error) {
	ip, err := netip.ParseAddr(c.host)
	if err != nil {
		return 0, "", err
	}
	if !ip.Is4() {
		return 0, "", fmt.Errorf("%v: only IPv4", ip)
	}
	port, err := strconv.Atoi(c.port)
	if err != nil {
		return 0, "", err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return 0, "", err
	}
	defer unix.Close(epoll)
	total := connectPerUnit * b.seconds
	begun, ended := 0, 0
	written := map[int]bool{}
	defer func() {
		for fd := range written {
			unix.Close(fd)
		}
	}()
	to := &unix.SockaddrInet4{Addr: ip.As4(), Port: port}
	one := []byte{1}
	// say writes the byte, where the socket is connected already.
	say := func(fd int) error {
		_, err := unix.Write(fd, one)
		if err == unix.EAGAIN || err == unix.ENOTCONN {
			return nil
		}
		written[fd] = err == nil
		return err
	}
	begin := func() error {
		begun++
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		written[fd] = false
		if err := unix.Connect(fd, to); err != nil && err != unix.EINPROGRESS {
			return fmt.Errorf("connect: %w", err)
		}
		if err := say(fd); err != nil {
			return fmt.Errorf("write: %w", err)
		}
		events := uint32(unix.EPOLLIN)
		if !written[fd] {
			events |= unix.EPOLLOUT | unix.EPOLLET
		}
		return watch(epoll, fd, events)
	}
	start := time.Now()
	for range connectAtATime {
		if err := begin(); err != nil {
			return 0, "", err
		}
	}
	err = loop(epoll, 20*time.Second, func(fd int) (bool, error) {
		if !written[fd] {
			if err := say(fd); err != nil || !written[fd] {
				return true, err
			}
		}
		got := []byte{0}
		switch n, err := unix.Read(fd, got); {
		case err == unix.EAGAIN:
			return true, nil
		case err != nil:
			return false, fmt.Errorf("read: %w", err)
		case n == 0:
			return false, errors.New("the connection ended before the answer")
		case got[0] != one[0]:
			return false, fmt.Errorf("sent %v, read %v", one, got)
		}
		delete(written, fd)
		unix.Close(fd)
		ended++
		if begun < total {
			return true, begin()
		}
		return ended < total, nil
	})
	d := time.Since(start)
	return float64(ended) / d.Seconds(), fmt.Sprintf("%d connections in %v\n", ended, d), err
}
