package splice

import (
	"strings"
	"testing"
)

func TestWindowIsSafeOnlyWhereTheFixIsKnown(t *testing.T) {
	for _, tc := range []struct {
		release, build string
		safe           bool
	}{
		{"6.18.44", "#1 SMP", false},
		{"6.18.45", "#1 SMP", true},
		{"6.18.44-fc-v657", "#1 SMP PREEMPT_DYNAMIC @0", false},
		{"6.18.100-rc1+", "", true},
		{"6.12.103", "", false},
		{"6.12.104", "", true},
		{"6.1.182", "", false},
		{"6.1.0-57-cloud-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.183-1 (2026-10-01)", true},
		{"6.1.0-50-cloud-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.158-1 (2026-02-01)", false},
		{"6.17.13", "", false},
		{"7.0.13", "", false},
		{"7.1.8", "", false},
		{"7.1.9", "", true},
		{"7.2.0", "", true},
		{"8.0", "", true},
		{"5.15.215", "", false},
		{"4.19.0", "", false},
		{"odd", "", false},
	} {
		if got := !knownFaults[0].in(parseRelease(tc.release, tc.build)); got != tc.safe {
			t.Errorf("%s (%s): %v, want %v", tc.release, tc.build, got, tc.safe)
		}
	}
}

func TestCgroupMountIsFoundByType(t *testing.T) {
	for _, tc := range []struct{ name, info, want string }{
		{"hybrid", "25 20 0:22 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n26 25 0:23 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw\n", "/sys/fs/cgroup/unified"},
		{"v2", "26 25 0:23 / /sys/fs/cgroup rw - cgroup2 cgroup rw,nsdelegate\n", "/sys/fs/cgroup"},
		{"v1", "26 25 0:23 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n", ""},
		{"blank in the path", `26 25 0:23 / /mnt/my\040group rw - cgroup2 none rw`, "/mnt/my group"},
		{"empty", "", ""},
		{"junk", "junk\n- cgroup2\n a - cgroup2 x", ""},
	} {
		if got := cgroupMount(strings.NewReader(tc.info)); got != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestKnownFaultsNameTheirFix(t *testing.T) {
	for _, f := range knownFaults {
		if f.Commit == "" || f.Effect == "" || len(f.fixed) == 0 {
			t.Errorf("incomplete: %+v", f)
		}
		for _, v := range f.fixed {
			last := v
			last[2]--
			if f.in(v) || !f.in(last) {
				t.Errorf("%s: %v has the fix, %v hasn't", f.Commit, v, last)
			}
		}
		// Series that nobody mended, before and after.
		if f.in(f.mainline) || f.in(version{99, 0, 0}) || !f.in(version{6, 16, 12}) || !f.in(version{}) {
			t.Errorf("%s: outside of the listed series", f.Commit)
		}
	}
	for _, f := range knownIn(version{6, 1, 155}) {
		if f.Verdict == "" && !strings.Contains(f.String(), "6.1.159") {
			t.Errorf("without its fix: %s", f)
		}
	}
}
