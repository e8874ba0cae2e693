#!/bin/sh
# Installs, as root, the Debian packages that the tests and the load tests
# need and that are missing; for other users it names them.
set -eu

# command:package; sbin folders aren't on every user's PATH.
PATH=$PATH:/usr/sbin:/sbin
needs="
clang:clang
llvm-strip:llvm
bpftool:bpftool
ip:iproute2
prlimit:util-linux
setpriv:util-linux
gcc:gcc
python3:python3
curl:curl
make:make
systemd-analyze:systemd
nginx:nginx-light
wrk:wrk
redis-server:redis-server
redis-benchmark:redis-tools
iperf3:iperf3
sockperf:sockperf
socat:socat
haproxy:haproxy
nft:nftables
sshd:openssh-server
ssh:openssh-client
"

missing=
for need in $needs; do
	command -v "${need%%:*}" >/dev/null 2>&1 || missing="$missing ${need##*:}"
done
ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="$missing postgresql"
command -v psql >/dev/null 2>&1 || missing="$missing postgresql-client"
[ -e /usr/include/bpf/bpf_helpers.h ] || missing="$missing libbpf-dev"
/usr/bin/python3 -c 'import seccomp' 2>/dev/null || missing="$missing python3-seccomp"
[ -e /usr/include/stdio.h ] || missing="$missing libc6-dev"

[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
	echo "missing, and not installed without root and apt-get:$missing" >&2
	exit 0
fi
echo "installing:$missing"
# RUNLEVEL=1 keeps maintainer scripts from starting the services; the tests start their own.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
apt-get update -q >/dev/null
# shellcheck disable=SC2086 # a list of names
apt-get install -y -q --no-install-recommends $missing >/dev/null
