"""`headwise run` with a masked language model: fill in each [MASK]."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ...generation.fill_mask import FilledText, fill_masks
from ...models import Transformer
from ..arguments import print_page, to_json
from .inputs import InputLine, InputLines

MAX_TOKENS_SHOWN = 5  # tokens printed for each mask


def answer(model: Transformer, args: argparse.Namespace) -> int:
    """Print the likeliest tokens for each mask of TEXT, or every line of stdin with its masks filled in."""
    top = MAX_TOKENS_SHOWN if args.top_k is None else args.top_k
    if args.text is not None:
        filled = fill_masks(model, [args.text], top=top)[0]
        line = InputLine(1, args.text, filled)
        print_page(to_json(_masks_to_dict(model, [line])) if args.json else _format_masks(filled))
        return 0
    lines, answered = InputLines(args.batch), list[InputLine[Any]]()
    for batch in lines:
        lines.read(batch, lambda text: fill_masks(model, [text], top=top)[0])
        answered += batch if args.json else []
        for line in batch if not args.json else ():
            print_page(line.read.text if line.read else "")
    if args.json:
        print_page(to_json(_masks_to_dict(model, answered)))
    return 2 if lines.num_failed else 0


def _format_masks(filled: FilledText) -> str:
    lines = [filled.text]
    for number, predictions in enumerate(filled.predictions, 1):
        width = max(len(guess.name) for guess in predictions)
        lines += ["", f"mask {number}"] if len(filled.predictions) > 1 else [""]
        lines += [f"  {name:<{width}}  {share:6.1%}" for name, share in predictions]
    return "\n".join(lines)


def _masks_to_dict(model: Transformer, lines: Sequence[InputLine[Any]]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for line in lines:
        result: dict[str, Any] = {"error": line.error} if line.error else {}
        if line.read:
            result = {
                "text": line.read.text,
                "masks": [[guess._asdict() for guess in predictions] for predictions in line.read.predictions],
            }
        rows.append({"line": line.number, "prompt": line.text, **result})
    return {"model": model.spec.name, "answers": rows}
