"""Results as data, and every way to show them. This room does not depend on any capability.

A capability returns an `Estimate`, `Table`, `Figure` or `Page` of `data`. `render` turns these into
text, Markdown, HTML, JSON and CSV, `plots` into SVG, PNG and PDF. `text` formats numbers and aligns
text by its width on a terminal; `notebook` is the base of results in notebooks; `progress` prints
how much of a long run is done.

>>> from headwise.report.data import Table
>>> from headwise.report.render import to_text
>>> print(to_text(Table("heads", ("site", "head", "sink"), [("decoder.0", 3, 0.5)])))
heads
<BLANKLINE>
site       head  sink
decoder.0     3  0.50
"""
