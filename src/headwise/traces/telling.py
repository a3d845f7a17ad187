"""A trace as a table in a terminal; strings of tokens are shown so that none of them can act."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .trace import Trace

MAX_SHOWN = 12  # tokens of a row


def format_trace(trace: Trace) -> str:
    """What a trace holds."""
    lines = [f"{trace.model.get('name', 'a model')}: {format_bytes(trace.nbytes)} of {len(trace.layers)} sites"]
    for name, rows in trace.streams.items():
        for row in rows[:3]:
            words = " ".join(escape_token(word) for word in row.words[:MAX_SHOWN])
            more = f" and {len(row.words) - MAX_SHOWN} more" if len(row.words) > MAX_SHOWN else ""
            lines.append(f"{name}: {words}{more}")
        if len(rows) > 3:
            lines.append(f"{name}: {len(rows) - 3} rows more")
    wide = max((len(one.name) for one in trace.layers), default=0)
    for one in trace.layers:
        kept = " ".join(sorted({name.partition(".")[0] for name in one.arrays}))
        steps = f", {len(one.calls)} calls" if len(one.calls) > 1 else ""
        lines.append(f"{one.name.ljust(wide)}  {one.heads} heads, {one.num_queries} x {one.num_keys}{steps}  {kept}")
    return "\n".join([*lines, *(f"{name}: not kept, {why}" for name, why in trace.skipped.items())])


def escape_token(token: str) -> str:
    """A string on one line, whatever it holds.

    >>> escape_token("a\\x1b[2J b")
    'a\\\\x1b[2J·b'
    """
    shown = token.replace(" ", "·")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


def format_bytes(num_bytes: float) -> str:
    """A number of bytes in a unit that can be read.

    >>> format_bytes(302_000_000)
    '302.0 MB'
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
