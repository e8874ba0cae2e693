package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/cap"
)

var dropped atomic.Bool

// droppedPrivileges says whether this process became [process] user: it can't
// load programs any more, nor start a process that can.
func droppedPrivileges() bool { return dropped.Load() }

// dropPrivileges makes the process, with all its threads, who's: without
// supplementary groups and capabilities, with none that could come back, and
// with no_new_privs.
//
// The bypass needs none any more: since Linux 5.19 ("bpf: refine
// kernel.unprivileged_bpf_disabled behaviour") only creating maps and loading
// programs does, all else goes by who holds the descriptor. Only transparent
// dials need one for each socket: the lesser of the two that will do stays.
func dropPrivileges(who *identity, transparent bool, log zerolog.Logger) error {
	keep, names := cap.NewSet(), []string{}
	if transparent {
		for _, c := range []cap.Value{cap.NET_RAW, cap.NET_ADMIN} {
			if there, _ := cap.GetProc().GetFlag(cap.Permitted, c); !there {
				continue
			}
			if err := errors.Join(keep.SetFlag(cap.Permitted, true, c), keep.SetFlag(cap.Effective, true, c)); err != nil {
				return fmt.Errorf("capabilities: %w", err)
			}
			names = append(names, strings.ToUpper(c.String()))
			break
		}
	}
	// Only with CAP_SETPCAP, which goes below. A service that was started as
	// its user lacks it, and no_new_privs does as much.
	if there, _ := cap.GetProc().GetFlag(cap.Effective, cap.SETPCAP); there {
		all := make([]cap.Value, cap.MaxBits())
		for i := range all {
			all[i] = cap.Value(i)
		}
		if err := cap.DropBound(all...); err != nil {
			return fmt.Errorf("prctl PR_CAPBSET_DROP: %w", err)
		}
	}
	if err := cap.ResetAmbient(); err != nil {
		return fmt.Errorf("prctl PR_CAP_AMBIENT: %w", err)
	}
	if err := who.become(); err != nil {
		return err
	}
	if err := keep.SetProc(); err != nil {
		return fmt.Errorf("capset: %w", err)
	}
	if _, err := cap.Prctlw(unix.PR_SET_NO_NEW_PRIVS, 1); err != nil {
		return fmt.Errorf("prctl PR_SET_NO_NEW_PRIVS: %w", err)
	}
	dropped.Store(true)
	log.Info().Str("user", who.user).Int("uid", who.uid).Int("gid", who.gid).Strs("capabilities", names).
		Bool("no_new_privs", true).Msg("privileges dropped")
	return nil
}

// become changes the groups and the user, unless they are who's already.
func (who *identity) become() error {
	groups, err := unix.Getgroups()
	if err != nil {
		return os.NewSyscallError("getgroups", err)
	}
	extra := slices.ContainsFunc(groups, func(g int) bool { return g != who.gid })
	r, e, s := unix.Getresgid()
	if extra || r != who.gid || e != who.gid || s != who.gid {
		if err := cap.SetGroups(who.gid); err != nil {
			return fmt.Errorf("setgroups %d: %w", who.gid, needs(err, "CAP_SETGID"))
		}
	}
	r, e, s = unix.Getresuid()
	if r != who.uid || e != who.uid || s != who.uid {
		if err := cap.SetUID(who.uid); err != nil {
			return fmt.Errorf("setuid %d: %w", who.uid, needs(err, "CAP_SETUID"))
		}
	}
	return nil
}

// needs names the capability that EPERM stands for.
func needs(err error, name string) error {
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w (process.user needs root, or %s)", err, name)
	}
	return err
}
