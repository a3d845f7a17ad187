"""Quality against the share of heads removed, in several orders.

`pruning_curves` measures, `curve_report` draws conclusions and writes the page, `curve_figures` the figures.
"""
