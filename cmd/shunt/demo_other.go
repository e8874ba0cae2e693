//go:build !linux

package main

import (
	"net"
	"syscall"
	"time"
)

func childAttr() *syscall.SysProcAttr { return nil }

// timedConn gives each read and write a deadline.
type timedConn struct{ *net.TCPConn }

// Read implements io.Reader.
func (c timedConn) Read(p []byte) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(demoIOTimeout)); err != nil {
		return 0, err
	}
	return c.TCPConn.Read(p)
}

// Write implements io.Writer.
func (c timedConn) Write(p []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(demoIOTimeout)); err != nil {
		return 0, err
	}
	return c.TCPConn.Write(p)
}

func demoDial(addr string) (demoConn, error) {
	c, err := net.DialTimeout("tcp", addr, demoIOTimeout)
	if err != nil {
		return nil, err
	}
	return timedConn{c.(*net.TCPConn)}, nil
}

// demoListen opens a listener on loopback; it lives as long as the process.
func demoListen() (addr string, accept func() (demoConn, error), err error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	return ln.Addr().String(), func() (demoConn, error) {
		c, err := ln.Accept()
		if err != nil {
			return nil, err
		}
		return timedConn{c.(*net.TCPConn)}, nil
	}, nil
}
