package main

import (
	"context"
	"errors"
	"path/filepath"
)

// permanentImage is where "make kernel-permanent" leaves its kernel.
func permanentImage(cache string) string { return filepath.Join(cache, "permanent", "bzImage") }

func buildPermanent(ctx context.Context, a *apt, root, cache string) error {
	return errors.New("not yet")
}
