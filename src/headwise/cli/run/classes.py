"""The class of a text, an image or an utterance."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ...generation.classification import Prediction, classify, require_class_names
from ...models import Transformer
from ..arguments import UsageError, print_page, to_json
from .inputs import InputLine, InputLines, make_input_reader

MAX_CLASSES_SHOWN = 5  # classes of one input; of a line the likeliest alone
BAR_WIDTH = 40  # columns of a bar that stands for all


def answer(net: Transformer, given: argparse.Namespace) -> int:
    """The classes of one input by their shares, or a line for each line of stdin."""
    names = require_class_names(net)
    if given.top_k is not None and not 1 <= given.top_k <= len(names):
        raise UsageError(f"--top-k {given.top_k} of {len(names)} classes cannot be told; give 1..{len(names)}")
    inputs, told = make_input_reader(net), list[InputLine[Any]]()
    if given.text is not None:
        own = classify(net, *inputs.collate([inputs.read(given.text)]))[0][: given.top_k or MAX_CLASSES_SHOWN]
        print_page(
            to_json(_classes_to_dict(net, [InputLine(1, given.text, own)])) if given.json else _format_classes(own)
        )
        return 0
    lines = InputLines(given.batch)
    for some in lines:
        ready = lines.read(some, inputs.read)
        found = classify(net, *inputs.collate([line.read for line in ready])) if ready else []
        for line, own in zip(ready, found, strict=True):
            line.read = own[: given.top_k or 1]
        told += some if given.json else []
        for line in some if not given.json else ():
            print_page("\t".join(f"{guess.name}\t{guess.share:.4f}" for guess in line.read or ()))
    if given.json:
        print_page(to_json(_classes_to_dict(net, told)))
    return 2 if lines.num_failed else 0


def _format_classes(own: Sequence[Prediction]) -> str:
    side = max(len(guess.name) for guess in own)
    return "\n".join(f"{name:<{side}}  {share:6.1%}  {'█' * round(BAR_WIDTH * share)}".rstrip() for name, share in own)


def _classes_to_dict(net: Transformer, lines: Sequence[InputLine[Any]]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for line in lines:
        said = {"error": line.error} if line.error else {"classes": [guess._asdict() for guess in line.read or ()]}
        rows.append({"line": line.number, "input": line.text, **said})
    return {"model": net.spec.name, "answers": rows}
