// Package harness is what the end-to-end tests and the load tests stand on:
// it builds shunt, starts it on free ports in a network namespace of the
// caller's choice, reads its admin endpoint, and checks at the end that the
// process gave everything back.
//
// A test's clients connect to a [Front]. The same test runs with shunt
// copying, with each verdict of the bypass, and, to check the test itself,
// with no proxy at all or with another program in shunt's place; see [Path].
package harness
