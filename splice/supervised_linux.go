package splice

import (
	"os"
	"strings"
	"sync"
)

// Supervised says that a seccomp filter is on this process, so that any system call may be held up: a filter can ask a
// supervisor first (SECCOMP_RET_USER_NOTIF). Without one, the runtime need not be told of calls that don't wait. No filter can
// come later from outside: only the process's own threads can set one.
var Supervised = sync.OnceValue(func() bool {
	status, err := os.ReadFile("/proc/thread-self/status")
	return err != nil || !strings.Contains(string(status), "\nSeccomp:\t0\n")
})
