package splice

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// openCgroup opens the cgroup v2 directory whose sockets are seen, and says
// which one that is.
func openCgroup(path string) (*os.File, string, error) {
	if path == "" {
		return rootCgroup()
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, "", fmt.Errorf("cgroup: %w", err)
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, "", fmt.Errorf("statfs %s: %w", path, err)
	}
	if st.Type != unix.CGROUP2_SUPER_MAGIC {
		f.Close()
		return nil, "", fmt.Errorf("%s is not in a cgroup2 file system (bypass.cgroup wants a directory of one, or \"\" for its root)", path)
	}
	return f, path, nil
}

// rootCgroup finds the cgroup2 mount by its type: on hybrid hosts it is not at
// /sys/fs/cgroup. Where none is in sight ("ip netns exec" hides it) a mount of
// its own is made that shows up nowhere.
func rootCgroup() (*os.File, string, error) {
	m, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, "", err
	}
	defer m.Close()
	if at := cgroupMount(m); at != "" {
		f, err := os.Open(at)
		if err == nil {
			return f, at, nil
		}
	}
	f, err := detachedCgroup()
	if errors.Is(err, unix.EPERM) {
		return nil, "", errors.New("no cgroup2 mount in sight (mount -t cgroup2 none DIR, or set bypass.cgroup; with CAP_SYS_ADMIN shunt makes one for itself)")
	}
	if err != nil {
		return nil, "", fmt.Errorf("no cgroup2 mount in sight, and none can be made: %w", err)
	}
	return f, "a mount of its own", nil
}

// cgroupMount returns the mount point of the first cgroup2 file system whose
// root is in sight.
func cgroupMount(mountinfo io.Reader) string {
	s := bufio.NewScanner(mountinfo)
	for s.Scan() {
		// 30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw
		mount, fs, ok := strings.Cut(s.Text(), " - ")
		f := strings.Fields(mount)
		if !ok || len(f) < 5 || !strings.HasPrefix(fs, "cgroup2 ") {
			continue
		}
		return unescape.Replace(f[4])
	}
	return ""
}

// wholeHierarchy says whether a root is the host's, and not one that a cgroup
// namespace shows.
func wholeHierarchy(root *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(root.Fd()), &st); err != nil {
		return err
	}
	if st.Ino != 1 { // the id of the first cgroup of a hierarchy
		return errors.New("only sockets of this container are seen: mount the host's cgroup2 into it and name that in bypass.cgroup")
	}
	return nil
}

// unescape undoes what the kernel does to blanks in mountinfo.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

func detachedCgroup() (*os.File, error) {
	fs, err := unix.Fsopen("cgroup2", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, err
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "cgroup2"), nil
}
