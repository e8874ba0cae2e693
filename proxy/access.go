package proxy

import (
	"time"

	"shunt/splice"
)

// accessFields are the fields of the access log's line, beside level, time and
// message, in their order. A name stays; what doesn't apply to a connection is left out.
var accessFields = []string{
	"listener", "conn", "start", "duration_seconds",
	"down", "down_local", "down_pid", "down_uid", "down_gid", "client",
	"upstream", "up", "up_local", "dial_ms",
	"upstream_path", "upstream_copied", "upstream_bypassed",
	"downstream_path", "downstream_copied", "downstream_bypassed",
	"declined", "end",
}

// credentials are whose process a UNIX client is.
type credentials struct{ pid, uid, gid int }

// path is how a direction's bytes went; none: it never started.
func (c *conn) path(n *counts, d splice.Direction) string {
	switch {
	case c.legs[1].sock == nil:
		return "none"
	case c.route == nil:
		return "copy"
	case n.copied[d] > 0 && n.bypassed[d] > 0:
		return "both"
	case n.copied[d] > 0:
		return "copy"
	}
	return "bypass"
}

// logAccess writes the one line about a connection that has ended.
func (c *conn) logAccess(n counts) {
	e := c.l.log.Info().Uint64("conn", c.id).Time("start", c.start).Float64("duration_seconds", time.Since(c.start).Seconds()).
		Str("down", addrString(c.down().RemoteAddr())).Str("down_local", addrString(c.down().LocalAddr()))
	if p := c.peer; p != nil {
		e = e.Int("down_pid", p.pid).Int("down_uid", p.uid).Int("down_gid", p.gid)
	}
	if c.l.cfg.ProxyProtocol.Accept {
		e = e.Str("client", c.client())
	}
	e = e.Str("upstream", c.upstream())
	if up := c.legs[1].sock; up != nil {
		e = e.Str("up", addrString(up.RemoteAddr())).Str("up_local", addrString(up.LocalAddr()))
	}
	if c.dialled > 0 {
		e = e.Float64("dial_ms", milliseconds(c.dialled))
	}
	for _, d := range []splice.Direction{splice.Up, splice.Down} {
		name := d.String()
		e = e.Str(name+"_path", c.path(&n, d)).Uint64(name+"_copied", n.copied[d])
		if n.uncounted[d] {
			e = e.RawJSON(name+"_bypassed", []byte("null")) // unknown
		} else {
			e = e.Uint64(name+"_bypassed", n.bypassed[d])
		}
	}
	if c.reason != "" {
		e = e.Str("declined", string(c.reason))
	}
	e.Str("end", c.cause).Msg("connection")
}

// milliseconds has three decimals at most.
func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
