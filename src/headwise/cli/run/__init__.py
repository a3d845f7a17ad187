"""`headwise run`: run a trained model on a text, an image, or every line of stdin.

`main` loads the model and calls the function for its kind: of `answers` for models that generate
text, classify or fill in masks, of `requests` with --requests. `inputs` reads lines and images.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from ...files import read_text_file
from ..argument_checks import (
    check_choice,
    check_input_file,
    check_minimum,
    check_model_path,
    check_positive,
    check_share,
    check_tokenizer,
)
from ..arguments import add_json_argument, parse_bytes
from ..command_parser import CommandParser, UsageError
from ..known_names import COMPILE_MODES
from ..text_arguments import add_tokenizer_argument

if TYPE_CHECKING:
    from ...models import Transformer

# Options that set fields of hw.DecodingConfig: type, metavar and help text.
EVERYDAY_DECODING: dict[str, tuple[type, str, str]] = {
    "top-k": (
        int,
        "K",
        "sample from the K likeliest tokens; for classes and masks, print the K likeliest",
    ),
    "top-p": (
        float,
        "SHARE",
        "nucleus sampling: sample from the likeliest tokens with this total probability",
    ),
    "beams": (int, "COUNT", "beam search with this many beams (default: 1)"),
}
EXPERT_DECODING: dict[str, tuple[type, str, str]] = {
    "min-p": (float, "SHARE", "sample from tokens at least this share as likely as the likeliest"),
    "repetition": (
        float,
        "PENALTY",
        "penalty for tokens that were generated before; 1 is none (default: 1)",
    ),
    "length-penalty": (
        float,
        "POWER",
        "divide the score of a beam by its length to this power (default: 1)",
    ),
    "best": (int, "COUNT", "print this many of the beams, with their scores (default: 1)"),
    "window": (int, "TOKENS", "use only the last tokens of the context (default: all)"),
    "compile": (
        str,
        "WHEN",
        "compile the decode step: off, on, or auto if it is faster (default: off)",
    ),
}
DECODING_OPTIONS = EVERYDAY_DECODING | EXPERT_DECODING
# Options that apply to every kind of model, by their argparse names.
COMMON_OPTIONS = ("model", "text", "batch", "device", "tokenizer", "json", "top_k")
ANSWER_FUNCTIONS = {  # module and function by kind
    "texts": ("answers", "answer"),
    "requests": ("requests", "answer"),
    "classes": ("answers", "answer_classes"),
    "masks": ("answers", "answer_masks"),
}
SERVING_OPTIONS = ("budget", "rows", "chunk")


def main(argv: list[str]) -> int:
    """Run the model on TEXT or on every input line; return 2 if a line failed."""
    parser = _parser()
    args = parser.parse_args(argv)
    _check_arguments(args)
    model = load_model(args)
    kind = task_kind(model)
    if kind != "texts":
        _check_unused(args, parser, model, kind)
    elif args.requests is not None:
        kind = "requests"
    module, function = ANSWER_FUNCTIONS[kind]
    return getattr(import_module(f"{__name__}.{module}"), function)(model, args)


def _check_arguments(args: argparse.Namespace) -> None:
    """Refuse what cannot work before the model is loaded."""
    if args.requests is None and (
        unused := [name for name in SERVING_OPTIONS if getattr(args, name) is not None]
    ):
        raise UsageError(
            f"--{unused[0]} applies to --requests only; add --requests FILE, or leave it out"
        )
    check_model_path(args.model)
    for name in ("batch", "max_new_tokens", "top_k", "beams", "best", "window", "rows", "chunk"):
        check_minimum(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    check_minimum("--temperature", args.temperature, 0)
    check_share("--top-p", args.top_p)
    check_share("--min-p", args.min_p)
    check_positive("--repetition", args.repetition)
    if (args.best or 1) > (args.beams or 1):
        raise UsageError(
            f"--best {args.best} is more than --beams {args.beams or 1}; give --beams {args.best}"
        )
    check_choice("--compile", args.compile, COMPILE_MODES)
    check_input_file("--score", args.score)
    check_minimum("--logprobs", args.logprobs, 0)
    if args.logprobs is not None and args.requests is not None:
        raise UsageError("--logprobs does not support --requests; leave one out")
    check_input_file("--requests", args.requests)
    check_tokenizer(args.tokenizer)
    if args.score_tokenize is not None and args.score is None:
        raise UsageError("--score-tokenize needs --score; add --score REF")
    if args.budget is not None:
        parse_bytes(args.budget)


def task_kind(model: Transformer) -> str:
    """Return what the model does: "texts" (generates), "masks" (fills in) or "classes"
    (classifies).
    """
    from ...errors import SpecError

    spec = model.spec
    if not spec.heads:
        raise SpecError(
            f"{spec.name} has no output head; train it on a task, or give another model"
        )
    if spec.heads[0].at != "each":
        return "classes"
    return "masks" if spec.kind == "encoder" else "texts"


def _parser() -> CommandParser:
    parser = CommandParser(
        "run",
        "Run a trained model: continue or translate a text, classify a text or an image, or fill "
        "in each [MASK]. "
        "Without TEXT, answers every line of stdin with one line, in order.",
        "headwise run runs/dates '<zh>20 November 2026'",
        "headwise run runs/dates --beams 4 < sentences.txt",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder with a model")
    parser.add_argument(
        "text",
        nargs="?",
        metavar="TEXT",
        help="a text, or an image file: .png, .jpg, .pgm or .npy (default: lines of stdin)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="COUNT",
        help="generate at most this many tokens (default: 64)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="sampling temperature; 0 takes the likeliest token (default: 0)",
    )
    _add_decoding_options(parser, EVERYDAY_DECODING)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop before this text; repeatable"
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="INT",
        help="random seed; line n samples from stream n of it (default: a random seed)",
    )
    parser.add_argument("--batch", type=int, default=32, metavar="COUNT", help="lines per batch")
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1, ..."
    )
    add_json_argument(parser)
    expert = parser.add_expert_group("details of decoding")
    _add_decoding_options(expert, EXPERT_DECODING)
    expert.add_argument(
        "--logprobs",
        type=int,
        metavar="K",
        help="print every token with its log-probability and the K likeliest",
    )
    add_tokenizer_argument(expert)
    scores = parser.add_expert_group("scores of translations")
    scores.add_argument(
        "--score", metavar="REF", help="print BLEU and chrF against the lines of this file"
    )
    scores.add_argument(
        "--score-tokenize",
        metavar="NAME",
        help=(
            "sacreBLEU tokenizer for --score: 13a, zh, char or intl (default: by the script of REF)"
        ),
    )
    serving = parser.add_expert_group("continuous batching")
    serving.add_argument(
        "--requests",
        metavar="FILE",
        help=(
            'serve the requests in this file together, one per line, as {"prompt": "Once", '
            '"max_new_tokens": 9}'
        ),
    )
    serving.add_argument(
        "--budget", metavar="MEMORY", help="KV cache size for --requests (default: 1 GiB)"
    )
    serving.add_argument(
        "--rows", type=int, metavar="COUNT", help="most concurrent requests (default: 64)"
    )
    serving.add_argument(
        "--chunk", type=int, metavar="TOKENS", help="most prompt tokens per step (default: 256)"
    )
    return parser


def _add_decoding_options(
    parser: argparse._ActionsContainer, options: Mapping[str, tuple[type, str, str]]
) -> None:
    for name, (kind, metavar, help_text) in options.items():
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=help_text)


def load_model(args: argparse.Namespace) -> Transformer:
    """Load the model onto its device, with the tokenizer of --tokenizer."""
    import headwise as hw

    from ...training.run_setup import resolve_device

    device = resolve_device(args.device)
    model = hw.load(args.model)
    embedding = model.spec.stacks[0].embedding
    if embedding and embedding.tokens and model.usage.tokenizer is None and args.tokenizer is None:
        raise UsageError(
            f"{model.spec.name} has no tokenizer; give --tokenizer FILE, or --tokenizer bytes"
        )
    if args.tokenizer is not None:
        attach_tokenizer(model, args.tokenizer)
    return model.to(device)


def attach_tokenizer(model: Transformer, name: str) -> None:
    """Attach the tokenizer in a file, or the byte tokenizer for "bytes", to a model."""
    from dataclasses import replace

    model.usage = replace(model.usage, tokenizer=_tokenizer_document(name), source_tokenizer=None)


def _tokenizer_document(name: str) -> str:
    """Return the tokenizer.json text of a file, or of the byte tokenizer."""
    from ...data.vocabulary import ByteVocabulary

    if name == "bytes":
        return ByteVocabulary().document
    return read_text_file(name)


def _check_unused(
    args: argparse.Namespace, parser: argparse.ArgumentParser, model: Transformer, kind: str
) -> None:
    """Raise if options for text generation are given to a model that does not generate text."""
    for name, value in vars(args).items():
        if name not in COMMON_OPTIONS and value != parser.get_default(name):
            output = {"classes": "classifies", "masks": "fills in masks"}[kind]
            raise UsageError(
                f"--{name.replace('_', '-')} is for text generation, but {model.spec.name} "
                f"{output}; leave it out"
            )
