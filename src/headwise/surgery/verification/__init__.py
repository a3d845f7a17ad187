"""Comparison of a model before and after a change: equality of outputs, quality, size and speed.

`model_comparison` compares outputs and hidden states, `quality_metrics` losses and task scores with
confidence intervals, `evaluation_tasks` the perplexity of a text file and tasks of
lm-evaluation-harness, `efficiency` parameters, FLOPs, cache and speed. `verify` runs all of them,
and renders the result as VERIFICATION.md and for the terminal.
"""
