// Shunt is a TCP proxy that gets out of the way: where both ends of a
// connection live on this host, the applications' sends land straight in each
// other's receive queues. Everywhere else it copies.
package main

import (
	"context"
	"os"
)

func main() {
	os.Exit(run(context.Background(), programArgs(os.Args), os.Stdin, os.Stdout, os.Stderr))
}
