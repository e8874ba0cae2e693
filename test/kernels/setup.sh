#!/bin/sh
# Installs, as root, the Debian packages that booting kernels needs and that
# are missing; with the argument "build", those for building one, too.
set -eu

PATH=$PATH:/usr/sbin:/sbin
needs="
qemu-system-x86_64:qemu-system-x86
busybox:busybox-static
cpio:cpio
xz:xz-utils
ip:iproute2
nft:nftables
"
if [ "${1-}" = build ]; then
	needs="$needs
gcc:gcc
make:make
patch:patch
flex:flex
bison:bison
bc:bc
pahole:dwarves
"
fi

missing=
for need in $needs; do
	command -v "${need%%:*}" >/dev/null 2>&1 || missing="$missing ${need##*:}"
done
if [ "${1-}" = build ]; then
	[ -e /usr/include/libelf.h ] || missing="$missing libelf-dev"
	[ -e /usr/include/stdio.h ] || missing="$missing libc6-dev"
fi
# A busybox with shared libraries doesn't run in the guest.
if command -v busybox >/dev/null 2>&1 && ldd "$(command -v busybox)" >/dev/null 2>&1; then
	missing="$missing busybox-static"
fi

[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
	echo "missing, and not installed without root and apt-get:$missing" >&2
	exit 0
fi
echo "installing:$missing"
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
opts="-o Acquire::http::Timeout=20 -o Acquire::Retries=2"
# shellcheck disable=SC2086 # lists of words
{
	timeout 300 apt-get update -q $opts >/dev/null &&
		timeout 600 apt-get install -y -q --no-install-recommends $opts $missing >/dev/null
} || echo "not installed:$missing" >&2
