package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// socatName is the subcommand that forwards between two addresses. The word
// may be left out, and it is implied where the program is called socat.
const socatName = "socat"

const socatUsage = `Usage: %[1]s [options] ADDRESS ADDRESS

Connects the two addresses as socat does, without a process for each connection
and, where both ends are TCP on this host, without carrying the bytes itself:

  %[1]s TCP-LISTEN:8080,fork,reuseaddr TCP:127.0.0.1:9090

`

// programArgs returns what run is to be called with: a program that is
// installed as socat takes socat's command line.
func programArgs(argv []string) []string {
	if len(argv) > 0 && isSocatName(argv[0]) {
		return append([]string{socatName}, argv[1:]...)
	}
	if len(argv) == 0 {
		return nil
	}
	return argv[1:]
}

// isSocatName says whether a program's path is socat's, maybe with a version:
// distributions install socat 1.8 as socat1.
func isSocatName(path string) bool {
	return strings.TrimRight(filepath.Base(path), "0123456789.-") == socatName
}

// looksLikeSocat says that a command line whose first word is no subcommand is socat's.
func looksLikeSocat(args []string) bool {
	word := args[0]
	if word == "-" || strings.HasPrefix(word, "-,") {
		return true
	}
	if strings.HasPrefix(word, "-") {
		_, _, err := findFlag(word)
		return err == nil || !strings.HasPrefix(word, "--") && len(args) > 1
	}
	if len(args) > 1 || strings.ContainsAny(word, ":,") {
		return true
	}
	n := socatNames()
	word = strings.ToLower(word)
	_, refused := n.refusedAddress[word]
	return n.address[word] != nil || refused
}

func socatCommand(ctx context.Context, _ *command, args []string, s streams) int {
	line, err := parseSocatLine(args)
	if err != nil {
		newSocatLog(s.err, "").printf('E', "%v", err)
		return exitFailure // socat's, for a bad command line too
	}
	switch {
	case line.help:
		socatHelp(s.out, line.helpLevel)
		return exitOK
	case line.version:
		socatVersion(s.out)
		return exitOK
	}
	return forward(ctx, line, s)
}

// Features in the words of socat -V, which scripts look for.
var (
	socatFeatures = []string{"STDIO", "FDNUM", "UNIX", "ABSTRACT_UNIXSOCKET", "IP4", "IP6", "TCP", "LISTEN", "VSOCK", "NAMESPACES", "RETRY", "STATS"}
	notFeatures   = []string{"FILE", "CREAT", "GOPEN", "TERMIOS", "PIPE", "SOCKETPAIR", "RAWIP", "GENERICSOCKET", "INTERFACE", "UDP", "SCTP", "DCCP", "UDPLITE",
		"SOCKS4", "SOCKS4A", "SOCKS5", "POSIXMQ", "PROXY", "SYSTEM", "SHELL", "EXEC", "READLINE", "TUN", "PTY", "OPENSSL", "FIPS", "LIBWRAP"}
)

func socatVersion(w io.Writer) {
	fmt.Fprintf(w, "shunt %s, in place of socat version 1.8\nfeatures:\n", versionString())
	for _, f := range socatFeatures {
		fmt.Fprintf(w, "  #define WITH_%s 1\n", f)
	}
	for _, f := range notFeatures {
		fmt.Fprintf(w, "  #undef WITH_%s\n", f)
	}
}

// socatHelp prints the command line's options, from level 2 on those of addresses too.
func socatHelp(w io.Writer, level int) {
	name := "shunt"
	if isSocatName(programName()) {
		name = programName()
	}
	fmt.Fprintf(w, socatUsage+"Options:\n\n", name)
	for _, f := range socatFlags {
		if f.status != optRefused {
			fmt.Fprintf(w, "  %-20s %s\n", f.form(), f.why)
		}
	}
	fmt.Fprint(w, "\nWithout -t a connection of which one side has finished goes on until the other side has\n"+
		"too, or nothing has moved for 5 minutes; socat's default of 0.5 s cuts replies.\n\nAddresses:\n\n")
	for _, t := range addressTypes {
		form := t.names[0]
		for _, p := range t.params {
			form += ":<" + p + ">"
		}
		fmt.Fprintf(w, "  %-32s %s\n", form, strings.Join(t.names[1:], " "))
	}
	if level < 2 {
		fmt.Fprintf(w, "\nOptions of addresses: %s -hh.\n", name)
		return
	}
	fmt.Fprint(w, "\nOptions of addresses:\n\n")
	for _, o := range addressOptions {
		list := o.names[:1]
		if level > 2 {
			list = o.names
		}
		fmt.Fprintf(w, "  %-32s %s (%s)\n", strings.Join(list, " ")+o.value.String(), o.why, shortKinds(o.on))
	}
}

// programName is what logs call the program.
func programName() string { return filepath.Base(os.Args[0]) }
