"""Benchmarks of headwise against other libraries and against the machine's limits (`headwise
bench`).

`benchmark_case` defines a case, compares the results of all implementations, and times them in
alternation. `session` measures memory bandwidth and matrix-multiplication rate, and turns timings
into verdicts. `runner` selects and runs cases, and measures how every backend scales. `calibration`
measures the take-over points of this machine and keeps them. `benchmark_report` prints a report and
writes it as JSON and as a chart. `reference_models` has baselines in plain PyTorch, and
CTranslate2. `cases` has one module of cases for each kind of work.
"""
