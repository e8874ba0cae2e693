//go:build !linux

package main

import "context"

// forward reports that socat's addresses need Linux: their options are its socket options.
func forward(_ context.Context, line *socatLine, s streams) int {
	newSocatLog(s.err, line.name).printf('E', "forwarding between addresses needs Linux: use 'shunt run' with a configuration file")
	return exitFailure
}
