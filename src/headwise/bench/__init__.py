"""Benchmarks: our paths against peers and against the machine's limits, in one run, as ratios.

`cases` make the work, one module for each kind; `benchmark_case` times alternatives in turn and compares their
results; `session` measures the machine and gives verdicts; `runner` runs everything, `benchmark_report` shows it;
`reference_models` are peers.
"""
