"""`headwise run` with a classifier: classes of texts, images or utterances."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ...generation.classification import Prediction, classify, require_class_names
from ...models import Transformer
from ..arguments import print_page, to_json
from ..command_parser import UsageError
from .inputs import InputLine, InputLines, make_input_reader

MAX_CLASSES_SHOWN = 5  # classes printed for a single input; for lines of stdin, one
BAR_WIDTH = 40  # columns of a bar for probability 1


def answer(model: Transformer, args: argparse.Namespace) -> int:
    """Print the likeliest classes of TEXT with their probabilities, or one line for each line of stdin."""
    names = require_class_names(model)
    if args.top_k is not None and not 1 <= args.top_k <= len(names):
        raise UsageError(f"--top-k {args.top_k} is not between 1 and the {len(names)} classes; give 1..{len(names)}")
    inputs, answered = make_input_reader(model), list[InputLine[Any]]()
    if args.text is not None:
        predictions = classify(model, *inputs.collate([inputs.read(args.text)]))[0][: args.top_k or MAX_CLASSES_SHOWN]
        print_page(
            to_json(_classes_to_dict(model, [InputLine(1, args.text, predictions)]))
            if args.json
            else _format_classes(predictions)
        )
        return 0
    lines = InputLines(args.batch)
    for batch in lines:
        ready = lines.read(batch, inputs.read)
        results = classify(model, *inputs.collate([line.read for line in ready])) if ready else []
        for line, predictions in zip(ready, results, strict=True):
            line.read = predictions[: args.top_k or 1]
        answered += batch if args.json else []
        for line in batch if not args.json else ():
            print_page("\t".join(f"{guess.name}\t{guess.share:.4f}" for guess in line.read or ()))
    if args.json:
        print_page(to_json(_classes_to_dict(model, answered)))
    return 2 if lines.num_failed else 0


def _format_classes(predictions: Sequence[Prediction]) -> str:
    width = max(len(guess.name) for guess in predictions)
    return "\n".join(
        f"{name:<{width}}  {share:6.1%}  {'█' * round(BAR_WIDTH * share)}".rstrip() for name, share in predictions
    )


def _classes_to_dict(model: Transformer, lines: Sequence[InputLine[Any]]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for line in lines:
        result = {"error": line.error} if line.error else {"classes": [guess._asdict() for guess in line.read or ()]}
        rows.append({"line": line.number, "input": line.text, **result})
    return {"model": model.spec.name, "answers": rows}
