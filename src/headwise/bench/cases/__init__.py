"""The rows: one file for each kind of work, a module with `cases(quick)` that makes one case at a time."""
