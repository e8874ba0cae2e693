package proxy

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

const (
	// DefaultResolveInterval is the age at which the addresses of a name are looked up again, where that
	// isn't done for each connection.
	DefaultResolveInterval = 5 * time.Second

	// lookupTimeout bounds one lookup in the background.
	lookupTimeout = 10 * time.Second
	// retryLookup is when a lookup that failed is tried again, at the latest. Connections use the last
	// good answer meanwhile.
	retryLookup = time.Second
	// notFoundGrace is how long addresses are used after the servers began to say that there are none:
	// they say so for a moment while they restart.
	notFoundGrace = 30 * time.Second
	// lookupWarnAfter is when a lookup that goes on failing is logged again.
	lookupWarnAfter = time.Minute
	// srvLookups is how many targets of one SRV answer are looked up at once.
	srvLookups = 8
)

// errNotOffered is the SRV target ".": the service is decidedly not there (RFC 2782).
var errNotOffered = errors.New(`the SRV record's target is ".": the service isn't offered`)

// resolver looks names up, as *net.Resolver does.
type resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
	LookupSRV(ctx context.Context, service, proto, name string) (cname string, addrs []*net.SRV, err error)
}

// newResolver asks the DNS servers, or, without any, those of the system. Both read the system's
// files: hosts, nsswitch.conf, and resolv.conf for its search list.
func newResolver(servers []string) resolver {
	if len(servers) == 0 {
		return careful{&net.Resolver{Dial: dialServer}}
	}
	var all nameServers
	for _, s := range servers {
		all = append(all, careful{&net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return dialServer(ctx, network, s)
		}}})
	}
	return all
}

// dialServer connects to a DNS server. net waits for the answer until its own timeout, whatever becomes of ctx.
func dialServer(ctx context.Context, network, server string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, server)
	if err == nil {
		context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	}
	return c, err
}

// resolveBy makes r what names are looked up by.
func (s *Server) resolveBy(r resolver) { s.resolver.Store(&r) }

// lookUp looks u up.
func (s *Server) lookUp(ctx context.Context, u Upstream) ([]target, error) {
	return lookUp(ctx, *s.resolver.Load(), u)
}

// careful asks again when the answer is that there is nothing: one query of several may have said so, such as the one
// for AAAA or for another name of the search list, while the one that counts failed.
type careful struct{ *net.Resolver }

func (c careful) LookupNetIP(ctx context.Context, network, host string) (ips []netip.Addr, err error) {
	ips, err = c.Resolver.LookupNetIP(ctx, network, host)
	if network != "ip" || !notFound(err) {
		return ips, err
	}
	for _, family := range []string{"ip4", "ip6"} {
		more, ferr := c.Resolver.LookupNetIP(ctx, family, host)
		ips = append(ips, more...)
		if ferr != nil && !notFound(ferr) {
			err = ferr
		}
	}
	if len(ips) > 0 {
		return ips, nil
	}
	return nil, err
}

func (c careful) LookupSRV(ctx context.Context, service, proto, name string) (string, []*net.SRV, error) {
	cname, srvs, err := c.Resolver.LookupSRV(ctx, service, proto, name)
	if notFound(err) {
		// Not at first: it gives up where another name of the search list would have done.
		strict := net.Resolver{PreferGo: c.PreferGo, StrictErrors: true, Dial: c.Dial}
		return strict.LookupSRV(ctx, service, proto, name)
	}
	return cname, srvs, err
}

// nameServers are asked in order, until one answers. Each has a fair share of the time.
type nameServers []careful

func (n nameServers) LookupNetIP(ctx context.Context, network, host string) (ips []netip.Addr, err error) {
	err = n.each(ctx, func(ctx context.Context, r careful) (err error) {
		ips, err = r.LookupNetIP(ctx, network, host)
		return err
	})
	return ips, err
}

func (n nameServers) LookupSRV(ctx context.Context, service, proto, name string) (cname string, srvs []*net.SRV, err error) {
	err = n.each(ctx, func(ctx context.Context, r careful) (err error) {
		cname, srvs, err = r.LookupSRV(ctx, service, proto, name)
		return err
	})
	return cname, srvs, err
}

func (n nameServers) each(ctx context.Context, ask func(context.Context, careful) error) (err error) {
	for i, r := range n {
		share := lookupTimeout
		if end, ok := ctx.Deadline(); ok {
			share = time.Until(end)
		}
		share /= time.Duration(len(n) - i)
		askCtx, cancel := context.WithTimeout(ctx, share)
		err = ask(askCtx, r)
		cancel()
		if err == nil || notFound(err) || ctx.Err() != nil {
			break
		}
	}
	return err
}

// notFound says that err is an answer: there is no such name, or it has no addresses.
func notFound(err error) bool {
	var dns *net.DNSError
	return errors.As(err, &dns) && dns.IsNotFound
}

// target is an address with its place among the others of its upstream.
type target struct {
	addr     address
	priority uint16
	weight   float64 // relative; 1 on average
}

// lookUp returns what u stands for, in an order that depends on nothing but the set.
func lookUp(ctx context.Context, r resolver, u Upstream) ([]target, error) {
	if u.kind == upstreamSRV {
		return lookUpSRV(ctx, r, u)
	}
	ips, err := lookUpHost(ctx, r, u.host)
	if err != nil {
		return nil, err
	}
	found := make([]target, 0, len(ips))
	for _, ip := range ips {
		found = append(found, target{addr: address{tcp: netip.AddrPortFrom(ip, u.port)}, weight: 1})
	}
	return found, nil
}

// lookUpHost returns the addresses of a name, at least one. The family that the resolver puts first, by
// RFC 6724, stays first; within a family the order of an answer means nothing.
func lookUpHost(ctx context.Context, r resolver, host string) ([]netip.Addr, error) {
	ips, err := r.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	if len(ips) == 0 {
		return nil, &net.DNSError{Err: "no address", Name: host, IsNotFound: true}
	}
	for i := range ips {
		ips[i] = ips[i].Unmap()
	}
	first4 := ips[0].Is4()
	slices.SortFunc(ips, func(a, b netip.Addr) int {
		if a.Is4() != b.Is4() {
			if a.Is4() == first4 {
				return -1
			}
			return 1
		}
		return a.Compare(b)
	})
	return slices.Compact(ips), nil
}

// lookUpSRV looks up the records and then their targets. A target without an address is left out; one
// that can't be looked up makes all of it fail, so that the last answer stays.
func lookUpSRV(ctx context.Context, r resolver, u Upstream) ([]target, error) {
	_, records, err := r.LookupSRV(ctx, "", "", u.host)
	// With some malformed records there are both.
	if len(records) == 0 {
		if err == nil {
			err = &net.DNSError{Err: "no SRV record", Name: u.host, IsNotFound: true}
		}
		return nil, err
	}
	if len(records) == 1 && records[0].Target == "." {
		return nil, errNotOffered
	}
	records = slices.DeleteFunc(records, func(s *net.SRV) bool { return s.Target == "." || s.Port == 0 })
	if len(records) > maxAddresses {
		slices.SortFunc(records, func(a, b *net.SRV) int {
			return cmp.Or(cmp.Compare(a.Priority, b.Priority), cmp.Compare(a.Target, b.Target), cmp.Compare(a.Port, b.Port))
		})
		records = records[:maxAddresses] // the same ones each time
	}
	ips := make([][]netip.Addr, len(records))
	errs := make([]error, len(records))
	var wg sync.WaitGroup
	next := make(chan int)
	for range min(srvLookups, len(records)) {
		wg.Go(func() {
			for i := range next {
				ips[i], errs[i] = lookUpHost(ctx, r, records[i].Target)
			}
		})
	}
	for i := range records {
		next <- i
	}
	close(next)
	wg.Wait()

	var found []target
	var missing error
	scale := srvScale(records)
	for i, s := range records {
		if errs[i] != nil {
			if !notFound(errs[i]) {
				return nil, errs[i]
			}
			missing = errs[i]
			continue
		}
		for _, ip := range ips[i] {
			found = append(found, target{
				addr:     address{tcp: netip.AddrPortFrom(ip, s.Port)},
				priority: s.Priority,
				weight:   scale(s) / float64(len(ips[i])),
			})
		}
	}
	if len(found) == 0 {
		if missing == nil {
			missing = &net.DNSError{Err: "no SRV record with a target and a port", Name: u.host, IsNotFound: true}
		}
		return nil, missing
	}
	slices.SortFunc(found, func(a, b target) int {
		return cmp.Or(cmp.Compare(a.priority, b.priority), cmp.Compare(b.weight, a.weight), a.addr.tcp.Compare(b.addr.tcp))
	})
	return found, nil
}

// srvScale returns the weight of each record, so that those of one priority are 1 on average, like an
// address without a record. A weight of 0 beside others is a very small one (RFC 2782).
func srvScale(records []*net.SRV) func(*net.SRV) float64 {
	sum, count := map[uint16]float64{}, map[uint16]float64{}
	for _, s := range records {
		sum[s.Priority] += float64(s.Weight)
		count[s.Priority]++
	}
	return func(s *net.SRV) float64 {
		mean := sum[s.Priority] / count[s.Priority]
		switch {
		case mean == 0:
			return 1
		case s.Weight == 0:
			return 0.01
		}
		return float64(s.Weight) / mean
	}
}

// resolveNow looks s up for one connection. While the resolver fails, connections don't wait for it if
// there is an answer from before.
func (p *pool) resolveNow(ctx context.Context, s *source) {
	p.mu.Lock()
	known := len(s.found) > 0
	wait := !known || !time.Now().Before(s.retry)
	p.mu.Unlock()
	if !wait {
		return
	}
	limit := p.l.cfg.DialTimeout
	if known {
		limit /= 2 // time to dial must be left
	}
	p.look(ctx, s, limit)
}

// look looks s up. A ctx that is canceled says nothing about the resolver.
func (p *pool) look(ctx context.Context, s *source, limit time.Duration) (err error) {
	p.mu.Lock()
	p.lookups++
	number := p.lookups
	p.mu.Unlock()
	ask, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	found, err := p.l.srv.lookUp(ask, s.Upstream)
	if !errors.Is(ctx.Err(), context.Canceled) {
		p.answered(s, number, found, err)
	}
	return err
}

// keepResolved looks s up again and again.
func (p *pool) keepResolved(s *source) {
	for {
		wait := p.interval
		if p.look(p.ctx, s, lookupTimeout) != nil {
			wait = min(wait, retryLookup)
		}
		if !p.sleep(p.ctx, jitter(wait)) {
			return
		}
	}
}

// jitter returns d, give or take a tenth.
func jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.9 + 0.2*rand.Float64()))
}

// sleep waits for d, and says whether ctx is still alive.
func (p *pool) sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// answered takes the result of a lookup; of two, the one that began later stays.
func (p *pool) answered(s *source, number uint64, found []target, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if number < s.number {
		return
	}
	s.number = number
	now := time.Now()
	before := len(s.found)
	s.asked = true
	if err == nil {
		if s.err != nil && !s.warned.IsZero() {
			p.l.log.Info().Str("upstream", s.text).Int("addresses", len(found)).Msg("upstream name resolved again")
		}
		s.err, s.missing, s.warned, s.retry = nil, time.Time{}, time.Time{}, time.Time{}
		if !slices.Equal(found, s.found) {
			s.found = found
			p.rebuild()
		}
	} else {
		p.resolveErrors++
		s.err = err
		switch {
		case errors.Is(err, errNotOffered):
			s.found = nil
		case notFound(err):
			if s.missing.IsZero() {
				s.missing = now
			}
			if now.Sub(s.missing) >= p.grace {
				s.found = nil
			}
		default:
			s.retry = now.Add(retryLookup)
		}
		if now.Sub(s.warned) >= lookupWarnAfter || len(s.found) != before {
			s.warned = now
			p.l.log.Warn().Str("upstream", s.text).Err(err).Int("addresses", len(s.found)).Msg("upstream name not resolved")
		}
		if len(s.found) != before {
			p.rebuild()
		}
	}
	if !slices.ContainsFunc(p.sources, func(s *source) bool { return !s.asked }) {
		p.settle()
	}
}
