//go:build unix && !linux

package proxy

const abstractSockets, credentialsKnown = false, false
