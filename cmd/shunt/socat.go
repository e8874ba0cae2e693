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

const socatUsage = `Usage: shunt [options] ADDRESS ADDRESS

Connects the two addresses as socat does, without a process for each connection
and, where both ends are TCP on this host, without carrying the bytes itself:

  shunt TCP-LISTEN:8080,fork,reuseaddr TCP:127.0.0.1:9090

`

// programArgs returns what run is to be called with: a program that is
// installed as socat takes socat's command line.
func programArgs(argv []string) []string {
	if len(argv) > 0 && filepath.Base(argv[0]) == socatName {
		return append([]string{socatName}, argv[1:]...)
	}
	if len(argv) == 0 {
		return nil
	}
	return argv[1:]
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
		fmt.Fprintf(s.out, "shunt %s, in place of socat 1.7 and 1.8\n", versionString())
		return exitOK
	}
	return forward(ctx, line, s)
}

// socatHelp prints the command line's options, from level 2 on those of addresses too.
func socatHelp(w io.Writer, level int) {
	fmt.Fprint(w, socatUsage, "Options:\n\n")
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
		fmt.Fprint(w, "\nOptions of addresses: shunt -hh.\n")
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
