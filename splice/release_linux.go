package splice

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// version is a kernel version: major, minor, patch.
type version [3]int

func (v version) before(w version) bool {
	for i := range v {
		if v[i] != w[i] {
			return v[i] < w[i]
		}
	}
	return false
}

// kernelRelease returns the running release and its version. Debian's release
// names an ABI, and its package version stands in the version string.
func kernelRelease() (string, version) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown", version{}
	}
	release := unix.ByteSliceToString(u.Release[:])
	return release, parseRelease(release, unix.ByteSliceToString(u.Version[:]))
}

func parseRelease(release, build string) version {
	s := release
	if _, deb, ok := strings.Cut(build, "Debian "); ok {
		s = deb
	}
	var v version
	fmt.Sscanf(s, "%d.%d.%d", &v[0], &v[1], &v[2])
	return v
}
