/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The few kernel structures that the programs look into, with just the members
 * that they read. Offsets are relocated at load time from the running kernel's
 * BTF (CO-RE), so neither order nor completeness matters here.
 */
#ifndef SHUNT_KERNEL_H
#define SHUNT_KERNEL_H

#define kernel_type __attribute__((preserve_access_index))

typedef struct {
	int counter;
} atomic_t;

typedef struct {
	__s64 counter;
} atomic64_t;

struct list_head {
	struct list_head *next;
} kernel_type;

struct timer_list {
	struct {
		void *pprev; /* not 0: armed */
	} entry;
} kernel_type;

struct in6_addr {
	__u8 bytes[16];
};

struct sock_common {
	__be32 skc_rcv_saddr;
	__u16 skc_num;
	unsigned short skc_family;
	unsigned char skc_state;
	struct in6_addr skc_v6_rcv_saddr;
	atomic64_t skc_cookie;
	struct {
		atomic_t refs;
	} skc_refcnt;
	struct sock *skc_listener; /* of a request_sock */
} kernel_type;

struct file {
	unsigned int f_flags;
} kernel_type;

struct socket {
	struct file *file;
} kernel_type;

struct sock {
	struct sock_common __sk_common;
	struct {
		atomic_t rmem_alloc;
	} sk_backlog;
	struct {
		int owned; /* by a system call */
	} sk_lock;
	struct timer_list sk_timer;
	__u8 sk_userlocks : 4;
	void *sk_user_data;
	struct socket *sk_socket;
} kernel_type;

struct inet_sock {
	struct sock sk;
} kernel_type;

struct inet_connection_sock {
	struct inet_sock icsk_inet;
	struct timer_list icsk_retransmit_timer;
	struct timer_list icsk_delack_timer;
	const void *icsk_ulp_ops;
} kernel_type;

struct tcp_sock {
	struct inet_connection_sock inet_conn;
	__u32 write_seq;
	_Bool is_mptcp;
} kernel_type;

/* A connection of which the SYN has arrived; begins with a sock_common. */
struct tcp_request_sock {
	__u32 rcv_isn;
	__u32 snt_isn;
} kernel_type;

/* What a sock_ops program's context really is. */
struct bpf_sock_ops_kern {
	struct sock *sk;
} kernel_type;

/* include/linux/skmsg.h; sk_user_data of a sockmap member points to it. */
struct sk_psock {
	struct sock *sk;
	__u32 apply_bytes;
	__u32 eval;
	struct list_head ingress_msg;
} kernel_type;

/* What an sk_msg program's context really is. */
struct sk_msg {
	struct sock *sk_redir;
} kernel_type;

struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
} kernel_type;

struct bpf_iter__sockmap {
	struct bpf_iter_meta *meta;
	void *key;
	struct sock *sk;
} kernel_type;

#endif
