package proxy

import (
	"net"

	"shunt/splice"
)

// Splice returns k as a Bypass; nil for a nil k.
func Splice(k *splice.Kernel) Bypass {
	if k == nil {
		return nil
	}
	return kernel{k}
}

type kernel struct{ k *splice.Kernel }

func (b kernel) Listen(ln *net.TCPListener) (func(), error) { return b.k.Listen(ln) }

func (b kernel) Claim(down splice.Socket) (Candidate, splice.Reason) {
	c, reason := b.k.Claim(down)
	if c == nil { // and no Candidate that holds a nil
		return nil, reason
	}
	return candidate{c}, ""
}

type candidate struct{ *splice.Candidate }

func (c candidate) Pair(up splice.Socket, ahead splice.Ahead) (Route, splice.Reason) {
	r, reason := c.Candidate.Pair(up, ahead)
	if r == nil {
		return nil, reason
	}
	return r, ""
}
