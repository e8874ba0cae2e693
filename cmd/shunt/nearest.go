package main

import "strings"

// nearest returns the candidate closest to word by edit distance, or "" where
// none is close enough to be what was meant. A beginning is close.
func nearest(word string, candidates []string) string {
	best, bestAt := "", len(word)/3+2
	for _, c := range candidates {
		if d := editDistance(word, c); d < bestAt && d < max(len(word), len(c)) {
			best, bestAt = c, d
		}
	}
	if best == "" && len(word) > 1 {
		for _, c := range candidates {
			if strings.HasPrefix(c, word) {
				return c
			}
		}
	}
	return best
}

// editDistance counts the insertions, deletions, replacements and swaps of
// neighbours that turn a into b. Words over 64 bytes count as far apart.
func editDistance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return max(len(a), len(b))
	}
	before, prev, cur := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		cur[0] = i
		for j := 1; j <= len(b); j++ {
			change := 1
			if a[i-1] == b[j-1] {
				change = 0
			}
			cur[j] = min(prev[j]+1, cur[j-1]+1, prev[j-1]+change)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				cur[j] = min(cur[j], before[j-2]+1)
			}
		}
		before, prev, cur = prev, cur, before
	}
	return prev[len(b)]
}
