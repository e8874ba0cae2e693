// Package splice puts proxied TCP connections on the bypass and takes them off
// it: the two applications' sends land straight in each other's receive
// queues, through a BPF sockhash and an sk_msg verdict, and neither this
// process nor the TCP stack touches the bytes.
//
// # How a connection gets there
//
// Four sockets make one connection: C, the client's; A, accepted by this
// process; B, dialled by this process; S, the upstream's. A sock_ops program on
// a cgroup sees each of them being established and puts it into the sockhash
// before its owner can send or receive. Which C belongs to which A, and which S
// to which B, is told by the connection's two initial sequence numbers, which
// both ends know. A client is one of ours when it dials an address that this
// process listens on, or when one of its listeners has announced these numbers
// as it was about to answer a SYN: so REDIRECT, DNAT and TPROXY don't matter.
// Kernel.Claim finds what belongs to an accepted connection, Candidate.Pair
// completes it, and Route carries it. Until Pair succeeds, and whenever anything
// is missing, the connection is ordinary TCP, with a Reason.
//
// # One queue per receiver
//
// Redirected bytes are read before those that came over TCP. Order is kept by
// letting everything that C and S receive be redirected, this process's own
// writes included, from the first byte; and by redirecting an application's
// send only while nothing that it sent before is on its way over TCP: the
// verdict compares the sender's write_seq with the count of bytes that
// Route.Forward has handed on (flow.forwarded, in memory shared with the
// kernel).
//
// # Bounds
//
// A redirect is accepted however far behind the receiver is. So the verdict
// looks at the receiver's queue, its bytes and the kernel's 1 KiB for each
// message, and lets the send take TCP when it is over the limit; Route.Forward
// then waits for room before it writes on, and TCP holds the sender back in
// the ordinary way. An application's socket that gets onto this slow path gets a
// small send buffer, and Forward takes bytes off the socket only after they
// were handed on: so the sender waits for the handing on, and its next
// send finds nothing in flight and goes direct again.
//
// With VerdictWindow the bound is exceeded by what one window lets in: its
// bytes, and with them up to 4096 messages of the size of its first one. A program that
// means harm can follow a large message with tiny ones, and make the kernel
// hold 1 KiB for each byte of a window; VerdictEvery has no such gap.
//
// # Closing
//
// FIN and RST take TCP, and are passed on at once: a receiver reads what is
// queued before it sees the end, since sockets leave the map, and lose their
// queue, only when their owner closes them. So nothing may take C or S out of
// the map while redirected bytes wait there or are on their way. When this process is killed, the
// kernel sends its FINs, and both ends read what is queued and then EOF; the
// verdict, which lives on with the sockets, sees that A or B has no owner
// any more and lets further sends take TCP, which answers them with RST.
//
// An owner that only finishes sending will often wait in recv next, which for
// members of a sockmap returns EAGAIN at any wake-up without data, such as the
// acknowledgement of the FIN. So a blocking C or S leaves the map then, in the
// same system call, if its queue is empty and provably nothing is on its way
// there: either it never got anything, or nobody is in a system call on the
// sockets that send to it, and nobody holds a reference to it that a redirect
// under way would hold. From then on everything for it takes TCP. Kernels with
// the fix for CVE-2026-74589 let a sender keep that reference: there, an end that
// got something stays.
//
// # What is trusted
//
// The sequence numbers: 64 random bits that the kernel checks. Who can forge
// them (CAP_NET_ADMIN with TCP_REPAIR, or who sees and injects into the host's
// own traffic) can already take over the connection itself. The socket cookie:
// unique while the machine is up; the sockhash is keyed by it, so a redirect
// meets the right socket or none. Kernel addresses, stored at birth, are read
// through to see how full a queue is, and what is found counts only if the
// cookie found there is the expected one; they never choose where bytes go.
// Slots of the shared array are used again only after a grace period
// (membarrier), with a higher generation, and only for who holds the cookie
// that stands in them. Other processes have no access: nothing is pinned.
package splice
