package main

import "context"

const (
	demoServiceName = "demo-service"
	demoClientName  = "demo-client"
)

func demoCommand(context.Context, *command, []string, streams) int        { return exitFailure }
func demoServiceCommand(context.Context, *command, []string, streams) int { return exitFailure }
func demoClientCommand(context.Context, *command, []string, streams) int  { return exitFailure }
