"""The class of a text, an image or an utterance."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ...models import Transformer
from ...models.labelling import Guess, check_labels, classify
from ..screen import Wrong, document, show
from .inputs import inputs_of
from .lines import Line, Lines

SHOWN = 5  # classes of one input; of a line the likeliest alone
BAR = 40  # columns of a bar that stands for all


def answer(net: Transformer, given: argparse.Namespace) -> int:
    """The classes of one input by their shares, or a line for each line of stdin."""
    names = check_labels(net)
    if given.top_k is not None and not 1 <= given.top_k <= len(names):
        raise Wrong(f"--top-k {given.top_k} of {len(names)} classes cannot be told; give 1..{len(names)}")
    inputs, told = inputs_of(net), list[Line[Any]]()
    if given.text is not None:
        own = classify(net, *inputs.together([inputs.read(given.text)]))[0][: given.top_k or SHOWN]
        show(document(_data(net, [Line(1, given.text, own)])) if given.json else _page(own))
        return 0
    lines = Lines(given.batch)
    for some in lines:
        ready = lines.read(some, inputs.read)
        found = classify(net, *inputs.together([line.read for line in ready])) if ready else []
        for line, own in zip(ready, found, strict=True):
            line.read = own[: given.top_k or 1]
        told += some if given.json else []
        for line in some if not given.json else ():
            show("\t".join(f"{guess.name}\t{guess.share:.4f}" for guess in line.read or ()))
    if given.json:
        show(document(_data(net, told)))
    return 2 if lines.refused else 0


def _page(own: Sequence[Guess]) -> str:
    side = max(len(guess.name) for guess in own)
    return "\n".join(f"{name:<{side}}  {share:6.1%}  {'█' * round(BAR * share)}".rstrip() for name, share in own)


def _data(net: Transformer, lines: Sequence[Line[Any]]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for line in lines:
        said = {"error": line.wrong} if line.wrong else {"classes": [guess._asdict() for guess in line.read or ()]}
        rows.append({"line": line.number, "input": line.text, **said})
    return {"model": net.described.name, "answers": rows}
