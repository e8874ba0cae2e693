package main

import (
	"fmt"
	"slices"
	"strings"
	"sync"
)

// kinds is a set of the address kinds that shunt opens.
type kinds uint16

const (
	tcpConnect kinds = 1 << iota
	tcpListen
	unixConnect
	unixListen
	abstractConnect
	abstractListen
	vsockConnect
	vsockListen
	stdio
	fdNumber
)

const (
	anyTCP     = tcpConnect | tcpListen
	anyConnect = tcpConnect | unixConnect | abstractConnect | vsockConnect
	anyListen  = tcpListen | unixListen | abstractListen | vsockListen
	anySocket  = anyConnect | anyListen
	anyFile    = stdio | fdNumber
	anyKind    = anySocket | anyFile
)

func (k kinds) has(one kinds) bool { return k&one != 0 }

// addressType is a keyword of socat's address table. Keywords are matched as
// a whole, in any case: socat's abbreviations are keywords of their own.
type addressType struct {
	names  []string // the first is the one that the table shows
	kind   kinds
	params []string // what follows the keyword, separated by colons
	family string   // "4", "6" or "": either
}

var addressTypes = []addressType{
	{names: []string{"TCP", "TCP-CONNECT", "INET"}, kind: tcpConnect, params: []string{"host", "port"}},
	{names: []string{"TCP4", "TCP4-CONNECT", "INET4"}, kind: tcpConnect, params: []string{"host", "port"}, family: "4"},
	{names: []string{"TCP6", "TCP6-CONNECT", "INET6"}, kind: tcpConnect, params: []string{"host", "port"}, family: "6"},
	{names: []string{"TCP-LISTEN", "TCP-L", "INET-LISTEN", "INET-L"}, kind: tcpListen, params: []string{"port"}},
	{names: []string{"TCP4-LISTEN", "TCP4-L", "INET4-LISTEN", "INET4-L"}, kind: tcpListen, params: []string{"port"}, family: "4"},
	{names: []string{"TCP6-LISTEN", "TCP6-L", "INET6-LISTEN", "INET6-L"}, kind: tcpListen, params: []string{"port"}, family: "6"},
	{names: []string{"UNIX-CONNECT", "UNIX-CLIENT", "UNIX", "LOCAL"}, kind: unixConnect, params: []string{"path"}},
	{names: []string{"UNIX-LISTEN", "UNIX-L"}, kind: unixListen, params: []string{"path"}},
	{names: []string{"ABSTRACT-CONNECT", "ABSTRACT-CLIENT", "ABSTRACT"}, kind: abstractConnect, params: []string{"name"}},
	{names: []string{"ABSTRACT-LISTEN", "ABSTRACT-L"}, kind: abstractListen, params: []string{"name"}},
	{names: []string{"VSOCK-CONNECT", "VSOCK"}, kind: vsockConnect, params: []string{"cid", "port"}},
	{names: []string{"VSOCK-LISTEN", "VSOCK-L"}, kind: vsockListen, params: []string{"port"}},
	{names: []string{"STDIO", "-"}, kind: stdio},
	{names: []string{"FD"}, kind: fdNumber, params: []string{"number"}},
}

// refusedAddresses are socat's other addresses, with what to do instead.
var refusedAddresses = []refusal{
	{"UDP UDP-CONNECT UDP-LISTEN UDP-L UDP-SENDTO UDP-SEND UDP-RECV UDP-RECVFROM UDP-DATAGRAM UDP-DGRAM UDP4 UDP4-CONNECT UDP4-LISTEN UDP4-L UDP4-SENDTO UDP4-SEND UDP4-RECV UDP4-RECVFROM UDP4-DATAGRAM UDP4-DGRAM UDP6 UDP6-CONNECT UDP6-LISTEN UDP6-L UDP6-SENDTO UDP6-SEND UDP6-RECV UDP6-RECVFROM UDP6-DATAGRAM UDP6-DGRAM UDPLITE-CONNECT UDPLITE-LISTEN UDPLITE-L UDPLITE-SENDTO UDPLITE-RECV UDPLITE-RECVFROM UDPLITE-DATAGRAM",
		"shunt carries streams, not datagrams: keep socat for it, or nginx's stream module"},
	{"UNIX-SENDTO UNIX-SEND UNIX-RECV UNIX-RECVFROM ABSTRACT-SENDTO ABSTRACT-RECV ABSTRACT-RECVFROM",
		"shunt carries streams, not datagrams: keep socat for it"},
	{"EXEC SYSTEM SHELL PTY", "shunt starts no programs: keep socat for it, or systemd socket activation"},
	{"OPENSSL OPENSSL-CONNECT OPENSSL-LISTEN SSL SSL-L OPENSSL-DTLS-CLIENT OPENSSL-DTLS-CONNECT OPENSSL-DTLS-SERVER OPENSSL-DTLS-LISTEN DTLS DTLS-C DTLS-L DTLS-CONNECT DTLS-LISTEN DTLS-CLIENT DTLS-SERVER",
		"shunt has no TLS: put stunnel or haproxy on the other side, or pass TLS through with TCP"},
	{"OPEN GOPEN CREATE CREAT FILE PIPE FIFO ECHO", "shunt opens no files: use STDIO or FD with the shell's redirection"},
	{"STDIN STDOUT STDERR", "use STDIO, with -u or -U for one direction"},
	{"PROXY PROXY-CONNECT SOCKS SOCKS4 SOCKS4A SOCKS5 SOCKS5-CONNECT SOCKS5-LISTEN", "shunt speaks no proxy protocol of this kind: keep socat for it"},
	{"SCTP SCTP-CONNECT SCTP-LISTEN SCTP-L SCTP4 SCTP4-CONNECT SCTP4-LISTEN SCTP4-L SCTP6 SCTP6-CONNECT SCTP6-LISTEN SCTP6-L DCCP DCCP-CONNECT DCCP-LISTEN DCCP-L",
		"shunt carries TCP, UNIX and VSOCK: keep socat for it"},
	{"IP IP-DATAGRAM IP-DGRAM IP-SENDTO IP-SEND IP-RECV IP-RECVFROM IP4 IP4-DATAGRAM IP4-DGRAM IP4-SENDTO IP4-SEND IP4-RECV IP4-RECVFROM IP6 IP6-DATAGRAM IP6-DGRAM IP6-SENDTO IP6-SEND IP6-RECV IP6-RECVFROM INTERFACE IF TUN",
		"shunt carries no raw packets: keep socat for it"},
	{"SOCKET-CONNECT SOCKET-LISTEN SOCKET-DATAGRAM SOCKET-SENDTO SENDTO DATAGRAM DGRAM SOCKET-RECV SOCKET-RECVFROM SOCKETPAIR",
		"shunt opens no sockets by number: use TCP, UNIX or VSOCK, or FD for an open one"},
	{"ACCEPT-FD ACCEPT", "not supported: use TCP-LISTEN or UNIX-LISTEN"},
	{"READLINE POSIXMQ-READ POSIXMQ-SEND POSIXMQ-RECV POSIXMQ-RECEIVE POSIXMQ-BIDIRECTIONAL POSIXMQ-WRITE", "not a stream between sockets: keep socat for it"},
}

// refusal is names that socat knows and shunt doesn't support, and what to use instead.
type refusal struct {
	names string // separated by spaces
	why   string
}

// valueType is the form of an option's value.
type valueType uint8

const (
	noValue     valueType = iota // the option's name alone
	boolValue                    // nothing, 1 or 0
	intValue                     // a number; nothing is 1
	countValue                   // a number that isn't negative
	timeValue                    // seconds, with a fraction
	textValue                    // any text
	modeValue                    // octal
	userValue                    // a name or a number
	groupValue                   // the same of a group
	rangeValue                   // address/bits or address:mask
	familyValue                  // ip4 or ip6
	portValue                    // a number or a service
	hostValue                    // host, host:port or :port; a path for UNIX sockets
	sockValue                    // level:option:number
	sockText                     // level:option:text
)

// String is what the table calls the form.
func (t valueType) String() string {
	return [...]string{"", "[=0 or 1]", "[=number]", "[=number]", "=seconds", "=text", "=octal", "=user", "=group", "=network", "=ip4 or ip6",
		"=port", "=address", "=level:option:number", "=level:option:text"}[t]
}

// optionStatus is how much of socat's option shunt has.
type optionStatus string

const (
	optSupported optionStatus = "supported"
	optDifferent optionStatus = "different"
	optRefused   optionStatus = "refused"
)

// addressOption is an option that shunt has.
type addressOption struct {
	names  []string // the first is the one that the code knows it by
	value  valueType
	on     kinds
	status optionStatus
	why    string // for the table: what it does here, or what is different
	offOn  kinds  // socat has it there too, but shunt not
	offWhy string
}

// addressOptions are all that shunt has; SOCAT.md is made of it.
var addressOptions = []addressOption{
	{names: []string{"fork"}, value: boolValue, on: anyListen, status: optDifferent, why: "serves connections side by side, in one process instead of one for each",
		offOn: anyConnect, offWhy: "a connecting address opens one connection: use a loop in the shell"},
	{names: []string{"max-children", "maxchildren"}, value: countValue, on: anyListen, status: optSupported, why: "most live connections; the next ones wait in the backlog"},
	{names: []string{"backlog"}, value: countValue, on: anyListen, status: optDifferent, why: "the default is net.core.somaxconn instead of 5"},
	{names: []string{"accept-timeout", "listen-timeout"}, value: timeValue, on: anyListen, status: optSupported, why: "ends with status 0 when nobody has connected for so long"},
	{names: []string{"range"}, value: rangeValue, on: tcpListen, status: optSupported, why: "clients outside are refused; v4-mapped addresses count as IPv4"},
	{names: []string{"bind"}, value: hostValue, on: anySocket &^ (unixListen | abstractListen), status: optSupported, why: "local address, with or without a port; the file of a UNIX socket goes when it is connected"},
	{names: []string{"sourceport", "sp"}, value: portValue, on: anyTCP, status: optSupported, why: "the local port; of a listening address, the port that clients must have"},
	{names: []string{"lowport"}, value: boolValue, on: anyTCP, status: optSupported, why: "a free local port of 640 to 1023; of a listening address, clients must have a port below 1024"},
	{names: []string{"connect-timeout"}, value: timeValue, on: anyConnect, status: optSupported, why: "for each attempt; without it the kernel's limit holds"},
	{names: []string{"retry"}, value: countValue, on: anySocket, status: optDifferent, why: "further attempts; status 1 when the last one to listen has failed too, where socat says 255"},
	{names: []string{"forever"}, value: boolValue, on: anySocket, status: optSupported, why: "attempts without end; a client that resets its connection ends them"},
	{names: []string{"interval", "intervall"}, value: timeValue, on: anySocket, status: optSupported, why: "between attempts; 1 second unless given"},
	{names: []string{"reuseaddr", "so-reuseaddr"}, value: intValue, on: anyTCP, status: optDifferent, why: "on for listening sockets unless 0 is given"},
	{names: []string{"reuseport", "so-reuseport"}, value: intValue, on: anyTCP, status: optSupported, why: "SO_REUSEPORT"},
	{names: []string{"pf", "protocol-family"}, value: familyValue, on: anyTCP, status: optSupported, why: "IPv4 or IPv6"},
	{names: []string{"ipv6only", "ipv6-v6only", "v6only"}, value: intValue, on: anyTCP, status: optSupported, why: "IPV6_V6ONLY"},
	{names: []string{"nodelay", "tcp-nodelay"}, value: intValue, on: anyTCP, status: optDifferent, why: "on unless 0 is given"},
	{names: []string{"keepalive", "so-keepalive"}, value: intValue, on: anySocket, status: optDifferent, why: "on for TCP unless 0 is given: 30 s idle, every 10 s, 3 times"},
	{names: []string{"keepidle", "tcp-keepidle"}, value: intValue, on: anyTCP, status: optSupported, why: "TCP_KEEPIDLE, seconds"},
	{names: []string{"keepintvl", "tcp-keepintvl"}, value: intValue, on: anyTCP, status: optSupported, why: "TCP_KEEPINTVL, seconds"},
	{names: []string{"keepcnt", "tcp-keepcnt"}, value: intValue, on: anyTCP, status: optSupported, why: "TCP_KEEPCNT"},
	{names: []string{"linger", "so-linger"}, value: countValue, on: anySocket, status: optSupported, why: "SO_LINGER, seconds"},
	{names: []string{"user-timeout", "tcp-user-timeout"}, value: countValue, on: anyTCP, status: optSupported, why: "TCP_USER_TIMEOUT, milliseconds"},
	{names: []string{"rcvbuf", "so-rcvbuf"}, value: countValue, on: anySocket, status: optSupported, why: "SO_RCVBUF, before connecting; bypassed bytes use no socket buffer"},
	{names: []string{"sndbuf", "so-sndbuf"}, value: countValue, on: anySocket, status: optSupported, why: "SO_SNDBUF, before connecting; bypassed bytes use no socket buffer"},
	{names: []string{"rcvbuf-late", "so-rcvbuf-late"}, value: countValue, on: anySocket, status: optSupported, why: "SO_RCVBUF of the connected socket"},
	{names: []string{"sndbuf-late", "so-sndbuf-late"}, value: countValue, on: anySocket, status: optSupported, why: "SO_SNDBUF of the connected socket"},
	{names: []string{"mss", "maxseg", "tcp-maxseg"}, value: countValue, on: anyTCP, status: optSupported, why: "TCP_MAXSEG, before connecting"},
	{names: []string{"mss-late", "maxseg-late", "tcp-maxseg-late"}, value: countValue, on: anyTCP, status: optSupported, why: "TCP_MAXSEG of the connected socket"},
	{names: []string{"tos", "iptos", "ip-tos"}, value: intValue, on: anyTCP, status: optSupported, why: "IP_TOS"},
	{names: []string{"ttl", "ipttl", "ip-ttl"}, value: intValue, on: anyTCP, status: optSupported, why: "IP_TTL"},
	{names: []string{"ipv6-tclass"}, value: intValue, on: anyTCP, status: optSupported, why: "IPV6_TCLASS"},
	{names: []string{"unicast-hops", "ipv6-unicast-hops"}, value: intValue, on: anyTCP, status: optSupported, why: "IPV6_UNICAST_HOPS"},
	{names: []string{"priority", "so-priority"}, value: intValue, on: anySocket, status: optSupported, why: "SO_PRIORITY"},
	{names: []string{"mark", "so-mark"}, value: countValue, on: anySocket, status: optSupported, why: "SO_MARK; needs CAP_NET_ADMIN"},
	{names: []string{"so-bindtodevice", "bindtodevice", "interface", "if"}, value: textValue, on: anyTCP, status: optSupported, why: "SO_BINDTODEVICE"},
	{names: []string{"ip-transparent", "transparent"}, value: boolValue, on: anyTCP, status: optSupported, why: "IP_TRANSPARENT; needs CAP_NET_ADMIN"},
	{names: []string{"freebind", "ipfreebind", "ip-freebind"}, value: intValue, on: anyTCP, status: optSupported, why: "IP_FREEBIND"},
	{names: []string{"mtudiscover", "mtu-discover", "ipmtudiscover", "ip-mtu-discover"}, value: intValue, on: anyTCP, status: optSupported, why: "IP_MTU_DISCOVER"},
	{names: []string{"oobinline", "so-oobinline"}, value: intValue, on: anySocket, status: optDifferent, why: "SO_OOBINLINE where bytes are copied; urgent data isn't bypassed"},
	{names: []string{"dontroute", "so-dontroute"}, value: intValue, on: anySocket, status: optSupported, why: "SO_DONTROUTE"},
	{names: []string{"debug", "so-debug"}, value: intValue, on: anySocket, status: optSupported, why: "SO_DEBUG; needs CAP_NET_ADMIN"},
	{names: []string{"cork", "tcp-cork"}, value: intValue, on: anyTCP, status: optSupported, why: "TCP_CORK"},
	{names: []string{"defer-accept", "tcp-defer-accept"}, value: intValue, on: tcpListen, status: optDifferent, why: "TCP_DEFER_ACCEPT; such connections are copied"},
	{names: []string{"linger2", "tcp-linger2"}, value: intValue, on: anyTCP, status: optSupported, why: "TCP_LINGER2"},
	{names: []string{"quickack", "tcp-quickack"}, value: intValue, on: anyTCP, status: optSupported, why: "TCP_QUICKACK"},
	{names: []string{"syncnt", "tcp-syncnt"}, value: countValue, on: anyTCP, status: optSupported, why: "TCP_SYNCNT"},
	{names: []string{"window-clamp", "tcp-window-clamp"}, value: countValue, on: anyTCP, status: optSupported, why: "TCP_WINDOW_CLAMP"},
	{names: []string{"setsockopt-int", "sockopt-int"}, value: sockValue, on: anySocket, status: optSupported, why: "any socket option of the connected socket"},
	{names: []string{"setsockopt-string", "sockopt-string"}, value: sockText, on: anySocket, status: optSupported, why: "the same, with text"},
	{names: []string{"setsockopt", "sockopt"}, value: sockValue, on: anySocket, status: optDifferent, why: "as setsockopt-int; of socat's data language only numbers, i4321"},
	{names: []string{"setsockopt-listen", "sockopt-listen"}, value: sockValue, on: anyListen, status: optDifferent, why: "of the listening socket; of socat's data language only numbers, i4321"},
	{names: []string{"user", "uid", "owner"}, value: userValue, on: unixListen, status: optSupported, why: "owner of the socket's file", offOn: anyKind, offWhy: "only a UNIX-LISTEN socket has an owner"},
	{names: []string{"group", "gid"}, value: groupValue, on: unixListen, status: optSupported, why: "group of the socket's file", offOn: anyKind, offWhy: "only a UNIX-LISTEN socket has a group"},
	{names: []string{"mode", "perm"}, value: modeValue, on: unixListen, status: optSupported, why: "permissions of the socket's file, from its birth", offOn: anyKind, offWhy: "only a UNIX-LISTEN socket has permissions"},
	{names: []string{"umask"}, value: modeValue, on: unixConnect | unixListen, status: optDifferent, why: "for the socket's file alone"},
	{names: []string{"unlink-early", "new"}, value: boolValue, on: unixListen, status: optSupported, why: "removes what is in the way first"},
	{names: []string{"unlink", "delete", "remove"}, value: boolValue, on: unixListen, status: optSupported, why: "as unlink-early"},
	{names: []string{"unlink-close"}, value: boolValue, on: unixListen, status: optSupported, why: "removes the file at the end; on unless 0 is given", offOn: unixConnect, offWhy: "the file of bind never stays"},
	{names: []string{"unlink-late"}, value: boolValue, on: unixListen, status: optDifferent, why: "removes the file as soon as it listens, where socat 1.7 ends with the first client"},
	{names: []string{"unix-tightsocklen", "tightsocklen"}, value: boolValue, on: unixConnect | unixListen | abstractConnect | abstractListen, status: optDifferent, why: "only 1, which is the default"},
	{names: []string{"ignoreeof", "ignoreof"}, value: boolValue, on: anyKind, status: optSupported, why: "goes on after the end; files and terminals are read again every second"},
	{names: []string{"shut-none"}, value: noValue, on: anyKind, status: optSupported, why: "isn't told when the other side has finished"},
	{names: []string{"shut-down"}, value: noValue, on: anyKind, status: optSupported, why: "FIN when the other side has finished, as by default"},
	{names: []string{"shut-close"}, value: noValue, on: anyKind, status: optDifferent, why: "closed when the other side has finished, which ends the connection with status 0 instead of 1"},
	{names: []string{"end-close", "close"}, value: noValue, on: anyKind, status: optSupported, why: "what shunt always does: it closes and shuts nothing down first"},
	{names: []string{"cool-write", "coolwrite"}, value: boolValue, on: anyKind, status: optDifferent, why: "a peer that has left is never an error here"},
	{names: []string{"cloexec"}, value: boolValue, on: anyKind, status: optDifferent, why: "only 1, which is the default"},
	{names: []string{"su", "substuser"}, value: userValue, on: anyKind, status: optDifferent, why: "changes the whole process, after the address is open; not on the second address beside fork; bypass off"},
	{names: []string{"su-d", "substuser-delayed"}, value: userValue, on: anyKind, status: optDifferent, why: "as su, with the name looked up first"},
	{names: []string{"su-e", "substuser-early"}, value: userValue, on: anyKind, status: optDifferent, why: "as su, before the address is opened"},
	{names: []string{"setuid"}, value: userValue, on: anyKind, status: optDifferent, why: "as su, without the groups"},
	{names: []string{"setgid"}, value: groupValue, on: anyKind, status: optDifferent, why: "of the whole process, as su"},
	{names: []string{"netns"}, value: textValue, on: anySocket, status: optSupported, why: "a name under /run/netns or a path; a listening address with it is not bypassed; socat 1.8"},
}

// refusedOptions are socat's other options, with what to do instead.
var refusedOptions = []refusal{
	{"tcpwrappers tcpwrap tcpwrapper libwrap wrap tcpwrap-etc tcpwrap-dir tcpwrap-hosts-allow-table hosts-allow allow-table tcpwrap-hosts-deny-table hosts-deny deny-table", "use range, or a firewall"},
	{"crnl crlf cr", "shunt changes no payload: use sed or tr"},
	{"readbytes bytes escape", "shunt doesn't look into the payload: use head -c before it"},
	{"null-eof shut-null", "for datagrams, which shunt doesn't carry"},
	{"lockfile lock-file waitlock", "use flock(1) around shunt"},
	{"flock flock-ex flock-ex-nb flock-nb flock-sh flock-sh-nb f-setlk f-setlk-rd f-setlk-wr f-setlkw f-setlkw-rd f-setlkw-wr setlk setlk-rd setlk-wr setlkw setlkw-rd setlkw-wr lock lockw", "locks are for files: use flock(1) around shunt"},
	{"append o-append async o-async nonblock ndelay o-nonblock o-ndelay o_ndelay creat create o-creat o-create o_create direct o-direct o_direct directory o-directory o_directory dsync o-dsync o_dsync excl o-excl o_excl largefile o-largefile o_largefile noatime o-noatime noctty o-noctty o_noctty nofollow o-nofollow o_nofollow rdonly o-rdonly o_rdonly rdwr o-rdwr o_rdwr rsync o-rsync o_rsync sync o-sync o_sync trunc o-trunc wronly o-wronly o_wronly cfsetispeed", "flags for opening files, which shunt doesn't: use the shell's redirection"},
	{"seek seek-cur seek-end seek-set lseek lseek32 lseek32-cur lseek32-end lseek32-set lseek64 lseek64-cur lseek64-end lseek64-set truncate ftruncate ftruncate32 ftruncate64", "for files, which shunt doesn't open: use the shell's redirection"},
	{"fs-append fs-compr compr fs-dirsync dirsync fs-immutable immutable fs-journal-data journal-data journal fs-noatime fs-nodump nodump fs-notail fs-secrm secrm fs-sync fs-topdir topdir fs-unrm unrm ext2-append ext2-compr ext2-dirsync ext2-immutable ext2-journal-data ext2-noatime ext2-nodump ext2-notail ext2-secrm ext2-sync ext2-topdir ext2-unrm ext3-append ext3-compr ext3-dirsync ext3-immutable ext3-journal-data ext3-noatime ext3-nodump ext3-notail ext3-secrm ext3-sync ext3-topdir ext3-unrm", "for files, which shunt doesn't open: use chattr(1)"},
	{"ioctl ioctl-void ioctl-int ioctl-intp ioctl-bin ioctl-string fiosetown siocspgrp", "shunt passes no ioctls on: use setsockopt-int where there is a socket option"},
	{"user-early uid-e user-late uid-l", "use user"},
	{"group-early gid-e group-late gid-l", "use group"},
	{"perm-early perm-late", "use mode"},
	{"setuid-early", "use su-e"},
	{"setgid-early", "use setgid, or setpriv(1)"},
	{"chroot chroot-early", "use chroot(1), or RootDirectory= of systemd"},
	{"setsid sid setpgid pgid", "use setsid(1)"},
	{"path dash login nofork fdin fdout pipes pty openpty ptmx stderr sighup sigint sigquit ctty tiocsctty tty setctty children-shutup", "for programs that socat starts; shunt starts none"},
	{"type so-type socktype protocol so-protocol prototype so-prototype sctp-nodelay sctp-maxseg", "shunt opens SOCK_STREAM with the default protocol only"},
	{"acceptconn so-acceptconn error so-error tcp-info info peercred so-peercred ip-mtu ipmtu mtu", "can only be read: use ss(8)"},
	{"attach-filter attachfilter so-attach-filter detach-filter detachfilter so-detach-filter", "use nft(8)"},
	{"broadcast so-broadcast timestamp so-timestamp no-check nocheck so-no-check bsdcompat so-bsdcompat", "for datagrams, which shunt doesn't carry"},
	{"passcred so-passcred", "shunt reads no ancillary data"},
	{"rcvlowat so-rcvlowat sndlowat so-sndlowat", "would hold small messages back"},
	{"security-authentication securityauthentication so-security-authentication security-encryption-network securityencryptionnetwork so-security-encryption-network security-encryption-transport securityencryptiontransport so-security-encryption-transport", "Linux doesn't have it"},
	{"tcp-md5sig", "takes a key by address: use a VPN or TLS"},
	{"setsockopt-bin sockopt-bin", "use setsockopt-int or setsockopt-string"},
	{"ip-add-membership add-membership membership ip-membership ip-multicast-if multicast-if ip-multicast-loop multicast-loop multicastloop ipmulticastloop ip-multicast-ttl multicast-ttl multicastttl ipmulticastttl ipv6-join-group join-group ipv6-add-membership ip-add-source-membership ipv6-join-source-group", "multicast is for datagrams, which shunt doesn't carry"},
	{"ip-options ipoptions ip-hdrincl hdrincl iphdrincl ip-router-alert routeralert iprouteralert ip-retopts retopts ipretopts", "shunt sets no IP options: use setsockopt-int where it has to be"},
	{"ip-pktinfo pktinfo ippktinfo ip-pktoptions pktoptions pktopts ippktoptions ip-recverr recverr iprecverr ip-recvopts recvopts iprecvopts ip-recvtos recvtos iprecvtos ip-recvttl recvttl iprecvttl ip-recvdstaddr ip-recvif ipv6-authhdr authhdr ipv6-dstopts dstopts ipv6-hoplimit hoplimit ipv6-hopopts hopopts ipv6-pktinfo ipv6-recvdstopts recvdstopts ipv6-recverr ipv6-recvhoplimit recvhoplimit ipv6-recvhopopts recvhopopts ipv6-recvpathmtu ipv6-recvpktinfo recvpktinfo ipv6-recvrthdr recvrthdr ipv6-recvtclass ipv6-rthdr rthdr ipv6-flowinfo", "shunt reads no ancillary data"},
	{"res-debug res-defnames defnames res-dnsrch dnsrch res-igntc igntc res-recurse recurse res-stayopen stayopen res-usevc usevc res-aaonly aaonly res-primary res-retrans res-retry res-nsaddr ai-addrconfig addrconfig ai-passive ai-v4mapped ai-all", "the resolver follows /etc/resolv.conf: set it there"},
	{"proxy-authorization proxy-auth proxyauth proxy-authorization-file proxyauthfile proxy-resolve resolve resolv proxyport ignorecr http-version socksport socksuser sockspass", "for proxy clients, which shunt hasn't: keep socat for it"},
	{"openssl-cafile cafile openssl-capath capath openssl-certificate certificate cert openssl-cipherlist cipherlist cipher ciphers openssl-commonname commonname cn openssl-compress compress openssl-dhparam openssl-dhparams dhparam dhparams dh openssl-egd egd openssl-key key openssl-max-proto-version max-version openssl-min-proto-version min-version openssl-method method openssl-fips fips openssl-no-sni no-sni nosni openssl-pseudo pseudo openssl-snihost snihost openssl-verify verify openssl-maxfraglen openssl-maxsendfrag", "shunt has no TLS: put stunnel or haproxy beside it"},
	{"tun-device tun-name tun-no-pi no-pi iff-no-pi tun-type iff-allmulti allmulti iff-automedia automedia iff-broadcast iff-debug iff-loopback loopback iff-master master iff-multicast multicast iff-noarp noarp iff-notrailers notrailers iff-pointopoint pointopoint iff-portsel portsel iff-promisc promisc iff-running running iff-slave slave iff-up up retrieve-vlan", "for network interfaces: use ip(8)"},
	{"symbolic-link link pty-interval pty-intervall pty-wait-slave wait-slave waitslave b0 b50 b75 b110 b134 b150 b200 b300 b600 b900 b1200 b1800 b2400 b4800 b9600 b19200 b38400 b57600 b115200 b230400 b460800 b500000 b576000 b921600 b1000000 b1152000 b1500000 b2000000 b2500000 b3000000 b3500000 b4000000 brkint bs0 bs1 bsdly cfmakeraw clocal cr0 cr1 cr2 cr3 crdly cread crterase crtkill crtscts cs5 cs6 cs7 cs8 csize cstopb ctlecho discard echo echoctl echoe echok echoke echonl echoprt eof eol eol2 erase ff0 ff1 ffdly flusho hup hupcl icanon icrnl iexten ignbrk igncr ignpar imaxbel inlcr inpck intr isig ispeed istrip iuclc iutf8 ixany ixoff ixon kill lnext min nl0 nl1 nldly noflsh ocrnl ofdel ofill olcuc onlcr onlret onocr opost ospeed parenb parmrk parodd pendin prterase quit raw rawer reprint rprnt sane start stop susp swtc swtch tab0 tab1 tab2 tab3 tabdly tandem termios-cfmakeraw termios-rawer time tostop vdiscard veof veol veol2 verase vintr vkill vlnext vmin vquit vreprint vstart vstop vsusp vswtc vt0 vt1 vtdly vtime vwerase werase xcase xtabs", "for terminals: use stty(1)"},
}

// names are the table's words, in lower case.
type names struct {
	address        map[string]*addressType
	refusedAddress map[string]string
	option         map[string]*addressOption
	refusedOption  map[string]string
}

var socatNames = sync.OnceValue(func() names {
	n := names{map[string]*addressType{}, map[string]string{}, map[string]*addressOption{}, map[string]string{}}
	for i := range addressTypes {
		for _, name := range addressTypes[i].names {
			n.address[strings.ToLower(name)] = &addressTypes[i]
		}
	}
	for i := range addressOptions {
		for _, name := range addressOptions[i].names {
			n.option[name] = &addressOptions[i]
		}
	}
	for _, r := range refusedAddresses {
		for _, name := range strings.Fields(r.names) {
			n.refusedAddress[strings.ToLower(name)] = r.why
		}
	}
	for _, r := range refusedOptions {
		for _, name := range strings.Fields(r.names) {
			n.refusedOption[name] = r.why
		}
	}
	return n
})

func (n names) addressWords() []string {
	var all []string
	for _, t := range addressTypes {
		for _, name := range t.names {
			all = append(all, strings.ToLower(name))
		}
	}
	return all
}

func (n names) optionWords(k kinds) []string {
	var all []string
	for _, o := range addressOptions {
		if o.on.has(k) {
			all = append(all, o.names...)
		}
	}
	return all
}

// shortKinds is how the table writes kinds.
func shortKinds(k kinds) string {
	switch k {
	case anyKind:
		return "all"
	case anySocket:
		return "sockets"
	case anyListen:
		return "listening"
	case anyConnect:
		return "connecting"
	case anyTCP:
		return "TCP"
	}
	words := []string{"TCP", "TCP-LISTEN", "UNIX", "UNIX-LISTEN", "ABSTRACT", "ABSTRACT-LISTEN", "VSOCK", "VSOCK-LISTEN", "STDIO", "FD"}
	var s []string
	for i, w := range words {
		if k.has(1 << i) {
			s = append(s, w)
		}
	}
	return strings.Join(s, ", ")
}

// socatTable is the text of SOCAT.md after its introduction.
func socatTable() string {
	var b strings.Builder
	b.WriteString("## Addresses\n\n| address | other spellings | parameters |\n|---|---|---|\n")
	for _, t := range addressTypes {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", t.names[0], strings.Join(t.names[1:], ", "), strings.Join(t.params, ", "))
	}
	b.WriteString("\nRefused, by name:\n\n| address | why, or what instead |\n|---|---|\n")
	for _, r := range refusedAddresses {
		fmt.Fprintf(&b, "| %s | %s |\n", strings.Join(strings.Fields(r.names), ", "), r.why)
	}
	b.WriteString("\n## Address options\n\n| option | value | on | | in a word |\n|---|---|---|---|---|\n")
	for _, o := range addressOptions {
		why := o.why
		if o.offWhy != "" {
			why += "; elsewhere refused: " + o.offWhy
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", strings.Join(o.names, ", "), o.value, shortKinds(o.on), o.status, why)
	}
	for _, r := range refusedOptions {
		list := strings.Fields(r.names)
		slices.Sort(list)
		fmt.Fprintf(&b, "| %s | | | %s | %s |\n", strings.Join(list, ", "), optRefused, r.why)
	}
	b.WriteString("\n## Command line\n\n| option | | in a word |\n|---|---|---|\n")
	for _, f := range socatFlags {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", strings.ReplaceAll(f.form(), "|", `\|`), f.status, f.why)
	}
	return b.String()
}
