"""A single HTML file of what is open: it opens from a disk, needs no network, and shows the same page as the server.

The file contains the built page (`static/report.js` and its styles) and the answers of the server as JSON, with binary
answers as base64. Its content security policy allows exactly these scripts and styles, by their checksums, and no
request at all. Tokens and other texts are data: no character of them can end the element that holds them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import SpecError
from ..escaping import escape_html, make_visible

STATIC = Path(__file__).with_name("static")
DATA_ID, MOUNT_ID = "headwise-data", "app"
SCRIPT_FILE, STYLE_FILE = "report.js", "app.css"
NOT_BUILT = "cannot show the page: it is not built; run: make web (needs Node >= 20), or install a wheel of headwise"
POLICY = {
    "default-src": "'none'",
    "script-src": "",  # the checksum of the script
    "style-src": "",
    "img-src": "data: blob:",
    "base-uri": "'none'",
    "form-action": "'none'",
}


class PageAssets(NamedTuple):
    """Script and styles of the built page."""

    script: str
    style: str


def load_assets(folder: Path = STATIC) -> PageAssets:
    """Read the built page; raise SpecError if it has not been built."""
    try:
        script, style = ((folder / name).read_text(encoding="utf-8") for name in (SCRIPT_FILE, STYLE_FILE))
    except OSError:
        raise SpecError(NOT_BUILT) from None
    return PageAssets(_protect_script(script), _protect_style(style))


def _protect_script(script: str) -> str:
    """The script without the sequences that HTML reads inside a script element; they only occur in its strings."""
    return re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)


def _protect_style(style: str) -> str:
    if re.search("</style", style, re.IGNORECASE):
        raise SpecError(f"cannot export: {STYLE_FILE} contains </style; build the page again with make web")
    return style


def escape_json(value: Any) -> str:
    """JSON in ASCII that is safe inside an HTML script element.

    >>> escape_json({"token": "</script>\\u2028"})
    '{"token":"\\\\u003c/script\\\\u003e\\\\u2028"}'
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def encode_answers(answers: Mapping[str, bytes | Mapping[str, Any]]) -> dict[str, Any]:
    """The answers of the server by their address: JSON as it is, binary answers as {"base64": ...}.

    >>> encode_answers({"/api/row": b"ab", "/api/document": {"version": 1}})
    {'/api/row': {'base64': 'YWI='}, '/api/document': {'version': 1}}
    """
    return {
        address: {"base64": base64.b64encode(answer).decode()} if isinstance(answer, bytes) else dict(answer)
        for address, answer in answers.items()
    }


def content_policy(assets: PageAssets) -> str:
    """The content security policy of a file with these assets."""
    checksums = {"script-src": assets.script, "style-src": assets.style}
    rules = {**POLICY, **{name: f"'sha256-{_checksum(text)}'" for name, text in checksums.items()}}
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _checksum(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def render_html(data: Mapping[str, Any], title: str, assets: PageAssets | None = None, language: str = "") -> str:
    """Return the HTML file; `data` is what the page reads, as `encode_answers` gives it.

    It opens in the given language; without one, in the last one that was chosen, or in that of the browser.
    """
    assets = load_assets() if assets is None else assets
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="{language}" data-language="{language}">' if language else '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape_html(content_policy(assets))}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape_html(make_title(title))}</title>",
            f"<style>{assets.style}</style>",
            "</head>",
            "<body>",
            f'<div id="{MOUNT_ID}"></div>',
            "<noscript>This report needs JavaScript. It is contained in the file; nothing is loaded.</noscript>",
            f'<script type="application/json" id="{DATA_ID}">{escape_json(data)}</script>',
            f"<script>{assets.script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


TITLE_END = " · headwise"


def make_title(name: str) -> str:
    """Title of the page; characters that cannot be printed are written as their code.

    >>> make_title("dates"), make_title("a\\u202eb")
    ('dates · headwise', 'a\\\\u202eb · headwise')
    """
    return make_visible(name) + TITLE_END
