package splice

import (
	"errors"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"shunt/bpf"
)

// element is the part of union bpf_attr that is for BPF_MAP_*_ELEM, where pointers have 64 bits.
type element struct {
	fd         uint32
	_          uint32
	key, value unsafe.Pointer
	flags      uint64
}

// member reads what is known of the socket fd into m; the error is ENOENT if nothing is.
func (k *Kernel) member(fd int, m *bpf.ShuntMember) error {
	if unsafe.Sizeof(uintptr(0)) != 8 {
		err := k.obj.Members.Lookup(int32(fd), m)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			err = unix.ENOENT
		}
		return err
	}
	return k.onMember(unix.BPF_MAP_LOOKUP_ELEM, fd, m)
}

// setMember writes it.
func (k *Kernel) setMember(fd int, m *bpf.ShuntMember) error {
	if unsafe.Sizeof(uintptr(0)) != 8 {
		return k.obj.Members.Put(int32(fd), m)
	}
	return k.onMember(unix.BPF_MAP_UPDATE_ELEM, fd, m)
}

// onMember is bpf(2) without the library: every connection pays for it twice.
func (k *Kernel) onMember(cmd uintptr, fd int, m *bpf.ShuntMember) error {
	key := int32(fd)
	e := element{fd: uint32(k.obj.Members.FD()), key: unsafe.Pointer(&key), value: unsafe.Pointer(m)}
	var errno unix.Errno
	if Supervised() {
		_, _, errno = unix.Syscall(unix.SYS_BPF, cmd, uintptr(unsafe.Pointer(&e)), unsafe.Sizeof(e))
	} else {
		_, _, errno = unix.RawSyscall(unix.SYS_BPF, cmd, uintptr(unsafe.Pointer(&e)), unsafe.Sizeof(e))
	}
	if errno != 0 {
		return errno
	}
	return nil
}
