"""What stands for each mask of a text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ...generation.fill_mask import FilledText, fill_masks
from ...models import Transformer
from ..arguments import print_page, to_json
from .inputs import InputLine, InputLines

MAX_TOKENS_SHOWN = 5  # tokens for each mask


def answer(net: Transformer, given: argparse.Namespace) -> int:
    """One text with what fits its masks, or every line of stdin filled in."""
    top = MAX_TOKENS_SHOWN if given.top_k is None else given.top_k
    if given.text is not None:
        filled = fill_masks(net, [given.text], top=top)[0]
        line = InputLine(1, given.text, filled)
        print_page(to_json(_masks_to_dict(net, [line])) if given.json else _format_masks(filled))
        return 0
    lines, told = InputLines(given.batch), list[InputLine[Any]]()
    for some in lines:
        lines.read(some, lambda text: fill_masks(net, [text], top=top)[0])
        told += some if given.json else []
        for line in some if not given.json else ():
            print_page(line.read.text if line.read else "")
    if given.json:
        print_page(to_json(_masks_to_dict(net, told)))
    return 2 if lines.num_failed else 0


def _format_masks(filled: FilledText) -> str:
    lines = [filled.text]
    for number, guesses in enumerate(filled.predictions, 1):
        side = max(len(guess.name) for guess in guesses)
        lines += ["", f"mask {number}"] if len(filled.predictions) > 1 else [""]
        lines += [f"  {name:<{side}}  {share:6.1%}" for name, share in guesses]
    return "\n".join(lines)


def _masks_to_dict(net: Transformer, lines: Sequence[InputLine[Any]]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for line in lines:
        said: dict[str, Any] = {"error": line.error} if line.error else {}
        if line.read:
            said = {
                "text": line.read.text,
                "masks": [[guess._asdict() for guess in own] for own in line.read.predictions],
            }
        rows.append({"line": line.number, "prompt": line.text, **said})
    return {"model": net.spec.name, "answers": rows}
