"""Proof that a changed model still works: equality, quality, size and speed, before and after.

`model_comparison` compares outputs, `quality_metrics` losses and task scores, `efficiency` parameters, cache and
speed; `proof` runs them all, `proof_report` writes the result as a page and for the terminal.
"""
