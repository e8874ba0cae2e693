// Package test holds shunt's end-to-end tests. They run on Linux, each on
// every path (see harness.Path); namespaces and the bypass need root.
package test
