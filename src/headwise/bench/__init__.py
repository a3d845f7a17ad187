"""Our paths against peers and against the machine's limits, in one run, as ratios."""
