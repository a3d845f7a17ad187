"""Commands and their help, as a user sees them."""

from __future__ import annotations

import contextlib
import io
import re

from headwise import cli


def printed(arguments: list[str]) -> str:
    """Return what a command prints."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.suppress(SystemExit):
        cli.main(arguments)
    return stream.getvalue()


def list_commands() -> list[str]:
    section = printed(["--help"]).split("commands:")[1].split("\n\n")[0]
    return re.findall(r"^  ([a-z]+) ", section, re.MULTILINE)
