// A client for an echo service: sends seeded bytes, checks what comes back.
// usage: client HOST PORT BYTES (blocking | poll | epoll-level | epoll-edge)
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static unsigned char at(uint64_t i)
{
	uint64_t z = (i / 8 + 1) * 0x9e3779b97f4a7c15u;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
	return (z ^ (z >> 31)) >> (i % 8 * 8);
}

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static uint64_t total, sent, got;
static unsigned char buf[65536];

// Sends what fits; 0 when the socket is full or all is sent.
static int put(int fd, int flags)
{
	size_t n = 1 + (sent * 7919) % sizeof(buf);
	ssize_t m;

	if (sent == total)
		return 0;
	if (n > total - sent)
		n = total - sent;
	for (size_t i = 0; i < n; i++)
		buf[i] = at(sent + i);
	m = send(fd, buf, n, flags | MSG_NOSIGNAL);
	if (m < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (m < 0)
		die("send");
	sent += m;
	if (sent == total && shutdown(fd, SHUT_WR))
		die("shutdown");
	return 1;
}

// Takes what is there; 0 when nothing is, -1 at the end.
static int take(int fd, int flags)
{
	ssize_t m = recv(fd, buf, sizeof(buf), flags);

	if (m < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (m < 0)
		die("recv");
	for (ssize_t i = 0; i < m; i++)
		if (buf[i] != at(got + i)) {
			fprintf(stderr, "byte %llu is wrong\n", (unsigned long long)(got + i));
			exit(1);
		}
	got += m;
	return m ? 1 : -1;
}

static void blocking(int fd)
{
	// In lock-step: a message, then its echo.
	while (sent < total) {
		put(fd, 0);
		while (got < sent)
			if (take(fd, 0) < 0)
				return;
	}
	while (take(fd, 0) >= 0)
		;
}

static void polling(int fd)
{
	for (;;) {
		struct pollfd p = { .fd = fd, .events = POLLIN | (sent < total ? POLLOUT : 0) };
		int n = poll(&p, 1, 30000);

		if (n < 0)
			die("poll");
		if (n == 0) {
			fprintf(stderr, "poll: nothing for 30 s\n");
			exit(1);
		}
		if (p.revents & (POLLIN | POLLHUP | POLLERR) && take(fd, MSG_DONTWAIT) < 0)
			return;
		if (p.revents & POLLOUT)
			put(fd, MSG_DONTWAIT);
	}
}

static void epolling(int fd, uint32_t edge)
{
	struct epoll_event ev = { .events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | edge };
	int ep = epoll_create1(0), end = 0;

	if (ep < 0 || epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev))
		die("epoll");
	while (!end) {
		int n = epoll_wait(ep, &ev, 1, 30000);

		if (n < 0)
			die("epoll_wait");
		if (n == 0) {
			fprintf(stderr, "epoll_wait: nothing for 30 s, sent %llu, got %llu\n",
				(unsigned long long)sent, (unsigned long long)got);
			exit(1);
		}
		if (!edge) {
			if (ev.events & ~EPOLLOUT && take(fd, MSG_DONTWAIT) < 0)
				return;
			if (ev.events & EPOLLOUT && !put(fd, MSG_DONTWAIT) && sent == total) {
				ev.events = EPOLLIN | EPOLLRDHUP;
				epoll_ctl(ep, EPOLL_CTL_MOD, fd, &ev);
			}
			continue;
		}
		// Edge: until both say EAGAIN.
		for (int in = 1, out = 1; in || out;) {
			in = take(fd, MSG_DONTWAIT);
			if (in < 0) {
				end = 1;
				break;
			}
			out = put(fd, MSG_DONTWAIT);
		}
	}
}

int main(int argc, char **argv)
{
	struct sockaddr_in addr = { .sin_family = AF_INET };
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	if (argc != 5 || fd < 0)
		return 2;
	addr.sin_port = htons(atoi(argv[2]));
	inet_pton(AF_INET, argv[1], &addr.sin_addr);
	total = strtoull(argv[3], NULL, 10);
	alarm(60);
	if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)))
		die("connect");
	if (!strcmp(argv[4], "blocking"))
		blocking(fd);
	else if (!strcmp(argv[4], "poll"))
		polling(fd);
	else if (!strcmp(argv[4], "epoll-level"))
		epolling(fd, 0);
	else if (!strcmp(argv[4], "epoll-edge"))
		epolling(fd, EPOLLET);
	else
		return 2;
	if (got != total) {
		fprintf(stderr, "EOF after %llu of %llu bytes\n", (unsigned long long)got, (unsigned long long)total);
		return 1;
	}
	return 0;
}
