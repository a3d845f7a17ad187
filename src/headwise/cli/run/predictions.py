"""`headwise run` with a model that predicts classes (of texts, images or utterances) or masked tokens."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ...generation.single_pass import FilledText, Prediction, classify, fill_masks, require_class_names
from ...models import Transformer
from ..arguments import print_page, to_json
from ..command_parser import UsageError
from .inputs import InputLine, InputLines, make_input_reader

MAX_CLASSES_SHOWN = 5  # classes printed for a single input; for lines of stdin, one
BAR_WIDTH = 40  # columns of a bar for probability 1
MAX_TOKENS_SHOWN = 5  # tokens printed for each mask


def answer_classes(model: Transformer, args: argparse.Namespace) -> int:
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


def answer_masks(model: Transformer, args: argparse.Namespace) -> int:
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
