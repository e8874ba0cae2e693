package splice

import (
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
)

// addressRefresh is how often this host's addresses are read again, also when
// nothing was heard of a change.
const addressRefresh = 30 * time.Second

// refreshLocals makes the kernel's table of this host's addresses equal to
// what the interfaces have now.
func (k *Kernel) refreshLocals() error {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	now := map[[16]byte]bool{}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			now[p.Addr().WithZone("").As16()] = true
		}
	}
	for a := range k.locals {
		if !now[a] {
			k.obj.Locals.Delete(a)
			delete(k.locals, a)
		}
	}
	for a := range now {
		if k.locals[a] {
			continue
		}
		if err := k.obj.Locals.Put(a, uint32(1)); err != nil {
			return fmt.Errorf("put local address: %w", err)
		}
		k.locals[a] = true
	}
	return nil
}

// subscribe asks for notice of address changes; nil where there is none.
func (k *Kernel) subscribe() <-chan netlink.AddrUpdate {
	changes := make(chan netlink.AddrUpdate, 64)
	if err := netlink.AddrSubscribe(changes, k.stop); err != nil {
		k.opt.Log.Warn().Err(err).Dur("every", addressRefresh).Msg("no notice of address changes, looking from time to time")
		return nil
	}
	return changes
}

// followLocals keeps the table up to date.
func (k *Kernel) followLocals(changes <-chan netlink.AddrUpdate) {
	defer k.done.Done()
	t := time.NewTicker(addressRefresh)
	defer t.Stop()
	for {
		select {
		case <-k.stop:
			return
		case _, ok := <-changes:
			if !ok {
				changes = nil
				continue
			}
			drain(changes)
		case <-t.C:
		}
		if err := k.refreshLocals(); err != nil {
			k.opt.Log.Warn().Err(err).Msg("addresses of this host")
		}
	}
}

func drain(c <-chan netlink.AddrUpdate) {
	for {
		select {
		case _, ok := <-c:
			if !ok {
				return
			}
		default:
			return
		}
	}
}
