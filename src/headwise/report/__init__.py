"""Results as data, and every way to show them. This room knows no capability.

A capability returns `Estimate`, `Table`, `Figure` or `Page`; `headwise.report.render` turns these into
text, Markdown, HTML, JSON and CSV, `headwise.report.plots` into SVG, PNG and PDF. Numbers are formatted
by `headwise.report.numbers`, text is aligned by its width on a terminal by `headwise.report.text`.

>>> from headwise.report.data import Table
>>> from headwise.report.render import to_text
>>> print(to_text(Table("heads", ("site", "head", "sink"), [("decoder.0", 3, 0.5)])))
heads
<BLANKLINE>
site       head  sink
decoder.0     3  0.50
"""
