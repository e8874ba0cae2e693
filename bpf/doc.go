// Package bpf holds the BPF programs of the bypass: their C source, and the
// objects and Go bindings that "go generate" makes of it with clang. Package
// splice is its only user.
package bpf

//go:generate go tool bpf2go -cc clang -go-package bpf -output-stem shunt -target bpfel,bpfeb -type sight -type open -type role -type why -type out Shunt shunt.bpf.c -- -idirafter /usr/include/x86_64-linux-gnu -idirafter /usr/include/aarch64-linux-gnu -O2 -g -Wall -Werror -mcpu=v3
