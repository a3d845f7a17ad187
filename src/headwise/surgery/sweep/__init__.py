"""Pruning curves: quality of a model against the number of heads kept, for several removal orders.

`pruning_curves` ranks heads, removes them step by step and measures each pruned model; `curve_report` tests what the
curves show and writes CURVES.md and curves.json; `curve_figures` draws them.
"""
