"""Texts of the library in Chinese: one catalogue for the commands, the page and errors, and the
layout of wide text.

`language` holds the language in which a command writes, and `localise`, which every text that it
prints passes through; it finds the translation of a sentence in `sentences_zh.toml`.
`terminal_text` pads and wraps text by its width in columns, because a Chinese character takes two,
and draws heat maps.
"""
