"""Names and texts of models as text of a terminal, HTML, SVG or Markdown: one function for each.

Control characters, characters that change the direction of text, and characters without width are
shown as their code, because a hostile name could otherwise hide or rearrange what is around it.
Markup is escaped.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable

# Invisible characters that `str.isprintable` counts as printable: joiners, fillers, blanks and
# variation selectors.
INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
MARKDOWN_MARKUP = re.compile(r"([\\`*\[\]|])")
Escape = Callable[[str], str]
STYLE = re.compile(r"(\x1b\[[0-9;]*m)")  # colours and bold on a terminal
MAX_QUOTED = 300  # characters of foreign text in a message


def make_visible(text: str, keep: str = "") -> str:
    """Return a text with every character that is not visible as its code, except those in `keep`.

    >>> make_visible("a\\x1b[2J\\u202eb\\u200b")
    'a\\\\x1b[2J\\\\u202eb\\\\u200b'
    """
    return "".join(
        char
        if char in keep or (char.isprintable() and not INVISIBLE.match(char))
        else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def escape_terminal(text: str, max_length: int | None = None) -> str:
    """Return a text on one line of a terminal, cut to `max_length` characters.

    >>> escape_terminal("a\\n  b\\x07", 5)
    'a b\\\\…'
    """
    line = make_visible(re.sub(r"\s+", " ", text).strip())
    return line if max_length is None or len(line) <= max_length else f"{line[: max_length - 1]}…"


def escape_page(text: str) -> str:
    """Return a page for a terminal: lines, tabs, colours and bold stay.

    >>> escape_page("\\x1b[1mbold\\x1b[0m \\x1b[2J")
    '\\x1b[1mbold\\x1b[0m \\\\x1b[2J'
    """
    return "".join(
        part if STYLE.fullmatch(part) else make_visible(part, keep="\n\t")
        for part in STYLE.split(text)
    )


def escape_html(text: str) -> str:
    """Return a text for an element or attribute of HTML; line breaks and tabs stay.

    >>> escape_html("<b>\\u202e")
    '&lt;b&gt;\\\\u202e'
    """
    return html.escape(make_visible(text, keep="\n\t"))


def escape_svg(text: str) -> str:
    """Return a text for an element or a double-quoted attribute of SVG, on one line.

    XML does not allow most control characters.

    >>> escape_svg('"a"\\x00')
    '&quot;a&quot;\\\\x00'
    """
    return html.escape(escape_terminal(text)).replace("&#x27;", "'")


def escape_markdown(text: str) -> str:
    """Return a text for a paragraph or table of Markdown, on one line.

    >>> escape_markdown("a|b <i>*")
    'a\\\\|b &lt;i>\\\\*'
    """
    line = MARKDOWN_MARKUP.sub(r"\\\1", escape_terminal(text))
    return line.replace("&", "&amp;").replace("<", "&lt;")


def shorten_message(message: str) -> str:
    """Return an error message on one line of a terminal, with quoted texts, lists, tables and long
    words cut.

    >>> shorten_message(f"there is no {'x' * 999!r}; give a name")[-25:]
    "xxxxxxxxxx…'; give a name"
    """
    line = _cut_lists(escape_terminal(message))
    for long in (rf"('[^']{{{MAX_QUOTED}}})[^']+'", rf'("[^"]{{{MAX_QUOTED}}})[^"]+"'):
        line = re.sub(long, lambda match: f"{match[1]}…{match[1][0]}", line)
    # A quoted text of one word has up to 4 characters more: quotes, the dots, and a sign after
    # them.
    return re.sub(rf"(\S{{{MAX_QUOTED}}})\S{{5,}}?([:;,]?)(?!\S)", r"\1…\2", line)


def _cut_lists(line: str) -> str:
    """Return a line with lists and tables in brackets cut; those inside each other count as one.

    >>> _cut_lists(f"{list(range(500))} is long")[-16:]
    ' 76, 7…] is long'
    """
    pieces = list[str]()
    depth = 0
    begin = 0
    done = 0
    for n, char in enumerate(line):
        if char in "[{":
            begin = begin if depth else n
            depth = depth + 1
        elif char in "]}" and depth:
            depth -= 1
            if not depth and n - begin > MAX_QUOTED:
                pieces.append(f"{line[done : begin + MAX_QUOTED]}…")
                done = n
    return "".join(pieces) + line[done:]
