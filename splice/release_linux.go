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

// windowFixed lists, by series, the first release with "bpf, sockmap: Fix
// sk_redir use-after-free in send verdict" (CVE-2026-74589). Two threads that
// send on one socket under a cached verdict can corrupt the kernel before it,
// and a race can't be found by trying. From 7.2 on every release has it. (So
// has 5.15.216, where there is no bypass.)
var windowFixed = []version{{6, 1, 183}, {6, 6, 152}, {6, 12, 104}, {6, 18, 45}, {7, 1, 9}}

// windowIsSafe says whether a release is known to be fixed.
func windowIsSafe(v version) bool {
	if !v.before(version{7, 2, 0}) {
		return true
	}
	for _, f := range windowFixed {
		if f[0] == v[0] && f[1] == v[1] {
			return !v.before(f)
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
