"""`headwise run`: what a trained model says of a text, an image, or every line of stdin.

One module for each kind of work; which one follows from what the model is.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ..arguments import CommandParser, UsageError, add_json_argument

if TYPE_CHECKING:
    from ...models import Transformer

# Options that are words of hw.DecodingConfig, with the kind of their values and what they say.
DECODING_OPTIONS: dict[str, tuple[type, str, str]] = {
    "top-k": (int, "K", "draw from the K likeliest tokens; of classes and masks, tell K"),
    "top-p": (float, "SHARE", "draw from the likeliest that have this share together"),
    "min-p": (float, "SHARE", "draw from those at least this share as likely as the first"),
    "repetition": (float, "PENALTY", "what tokens seen before are pushed down by (1: not)"),
    "beams": (int, "COUNT", "follow so many answers at once"),
    "length-penalty": (float, "POWER", "sums of beams are over length to this power (1)"),
    "best": (int, "COUNT", "tell so many of the beams, with their scores"),
    "window": (int, "TOKENS", "read the last tokens of a text alone"),
    "compile": (str, "WHEN", "compile steps of one token: off (usual), on, or auto where it pays"),
}
# Options that every kind of work knows, by the names that argparse gives them.
COMMON_OPTIONS = ("model", "text", "batch", "device", "tokenizer", "json", "top_k")
MODULES = {"texts": "generated_text"}  # where a kind of answer is not the name of its module
SERVING_OPTIONS = ("budget", "rows", "chunk")


def main(argv: list[str]) -> int:
    """Answer, line by line; 2 at the end if a line could not be answered."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.batch < 1:
        raise UsageError(f"--batch {given.batch} is no count; give 1 or more")
    if given.requests is None and (said := [name for name in SERVING_OPTIONS if getattr(given, name) is not None]):
        raise UsageError(f"--{said[0]} is for requests that are answered together; give them with --requests FILE")
    net = _load_model(given)
    kind = task_kind(net)
    if kind != "texts":
        _check_unused(given, parser, net, kind)
    elif given.requests is not None:
        kind = "requests"
    return import_module(f"{__name__}.{MODULES.get(kind, kind)}").answer(net, given)


def task_kind(net: Transformer) -> str:
    """The module that knows what to do with such a model: "texts", "masks" or "classes"."""
    from ...errors import SpecError

    described = net.spec
    if not described.heads:
        raise SpecError(f"{described.name} has no head, so it says nothing; train it on a task, or give another model")
    if described.heads[0].at != "each":
        return "classes"
    return "masks" if described.kind == "encoder" else "texts"


def _parser() -> CommandParser:
    parser = CommandParser(
        "run",
        "What a model says: behind a text, or in another language, token by token; the class of a text or an image; "
        "what stands for each [MASK]. Without TEXT every line of stdin is answered by a line, in order.",
        "headwise run runs/dates '<zh>20 November 2026'",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder with a model")
    parser.add_argument("text", nargs="?", metavar="TEXT", help="a text, or an image: a png, jpg, pgm or .npy")
    parser.add_argument("--max-new-tokens", type=int, metavar="COUNT", help="how long an answer may be (64)")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0: the likeliest token (usual); 1: drawn as likely"
    )
    for name, (kind, metavar, what) in DECODING_OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=what)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end an answer before this; may be repeated")
    parser.add_argument("--seed", type=int, metavar="INT", help="line n draws from stream n of this seed")
    parser.add_argument("--score", metavar="REF", help="reckon BLEU and chrF against the lines of this file")
    parser.add_argument("--score-tokenize", metavar="NAME", help="as sacreBLEU names it: 13a (usual), zh, char, intl")
    parser.add_argument("--batch", type=int, default=32, metavar="COUNT", help="lines answered together (32)")
    parser.add_argument(
        "--requests",
        metavar="FILE",
        help='answer the lines of this file together, each as in {"prompt": "Once", "max_new_tokens": 9}; - for stdin',
    )
    parser.add_argument("--budget", metavar="MEMORY", help="what requests are remembered in (1 GiB)")
    parser.add_argument("--rows", type=int, metavar="COUNT", help="requests answered at once, at most (64)")
    parser.add_argument("--chunk", type=int, metavar="TOKENS", help="of prompts, that one step takes (256)")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json, or bytes, for a model without one")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:1, say")
    add_json_argument(parser)
    return parser


def _load_model(given: argparse.Namespace) -> Transformer:
    """The model, on its device, with the tokenizer that was said."""
    import headwise as hw

    from ...training.run_setup import resolve_device

    device = resolve_device(given.device)
    net = hw.load(given.model)
    first = net.spec.stacks[0].embedding
    if first and first.tokens and net.usage.tokenizer is None and given.tokenizer is None:
        raise UsageError(f"{net.spec.name} has no tokenizer; give --tokenizer FILE, or --tokenizer bytes")
    if given.tokenizer is not None:
        attach_tokenizer(net, given.tokenizer)
    return net.to(device)


def attach_tokenizer(net: Transformer, name: str) -> None:
    """Give a model the tokenizer in a file, or "bytes"."""
    from dataclasses import replace

    net.usage = replace(net.usage, tokenizer=_tokenizer_document(name), source_tokenizer=None)


def _tokenizer_document(name: str) -> str:
    """What a file says of a tokenizer, or what makes every byte a token."""
    from ...data.vocabulary import ByteVocabulary

    if name == "bytes":
        return ByteVocabulary().document
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{name!r} cannot be read: {error}; give a tokenizer.json, or bytes") from None


def _check_unused(given: argparse.Namespace, parser: argparse.ArgumentParser, net: Transformer, kind: str) -> None:
    """Refuse options that speak of answers that are written, where none is."""
    for name, value in vars(given).items():
        if name not in COMMON_OPTIONS and value != parser.get_default(name):
            says = {"classes": "tells classes", "masks": "fills in masks"}[kind]
            raise UsageError(f"--{name.replace('_', '-')} is for answers that are written, and {net.spec.name} {says}")
