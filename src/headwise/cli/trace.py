"""`headwise trace`: what every attention worked with in one run, in one file that opens without the model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import CommandParser, UsageError, add_json_argument, print_page, to_json

if TYPE_CHECKING:
    from ..traces import Trace

TRACE_SUFFIX = ".trace"
MAX_NEW_TOKENS = 64  # tokens that a model of two stacks writes, unless said
CAPTURE_OPTIONS = (
    "text",
    "data",
    "out",
    "new_tokens",
    "also",
    "sites",
    "budget",
    "numbers",
    "tokenizer",
    "limit",
    "thumbnails",
)


def main(argv: list[str]) -> int:
    """Trace a run, or describe and give out what a trace holds."""
    parser = _parser()
    given = parser.parse_args(argv)
    if not given.least >= 0:
        raise UsageError(f"--least {given.least} is no weight; give 0 or more")
    if given.model.endswith(TRACE_SUFFIX):
        if said := [name for name in CAPTURE_OPTIONS if getattr(given, name) != parser.get_default(name)]:
            raise UsageError(f"--{said[0].replace('_', '-')} is for a run; {given.model} is one that was traced")
        from ..traces import load_trace

        trace = load_trace(given.model)
    else:
        trace = _capture_trace(given)
    _export(trace, given)
    print_page(to_json(trace.data) if given.json else str(trace))
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "trace",
        "What every attention of a model works with while it reads a text: queries and keys of every head, so that any "
        "weights can be computed again, in one file that opens without the model. Of a .trace: what it holds.",
        "headwise trace runs/dates --text '<zh>20 November 2026' --out dates.trace",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder of a model, or a .trace")
    parser.add_argument("--text", action="append", metavar="TEXT", help="what is read; may be repeated")
    parser.add_argument("--target", metavar="TEXT", help="what is written meanwhile, of a model with two stacks")
    parser.add_argument("--data", metavar="FILE", help="what is read, a text a line; or an image")
    parser.add_argument("--limit", type=int, metavar="COUNT", help="of the lines of --data, the first so many (8)")
    parser.add_argument("--out", metavar="FILE", help="write the trace there")
    parser.add_argument("--new-tokens", type=int, metavar="COUNT", help="say so many more, and trace every step")
    parser.add_argument("--also", default="", metavar="v,z", help="keep values, and what heads say")
    parser.add_argument("--sites", default="", metavar="A,B", help="of these layers or names alone")
    parser.add_argument("--budget", metavar="MEMORY", help="what may be kept (1 GB)")
    parser.add_argument("--numbers", default="own", metavar="KIND", help="own, or half: sixteen bits of each")
    parser.add_argument("--thumbnails", type=int, metavar="CELLS", help="how large pictures of heads are (64; 0: none)")
    parser.add_argument("--export", metavar="FILE", help="write weights as .csv, .json or .npz")
    parser.add_argument("--least", type=float, default=0.0, metavar="WEIGHT", help="of --export: no smaller ones")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json, or bytes, for a model without one")
    add_json_argument(parser)
    return parser


def _capture_trace(given: argparse.Namespace) -> Trace:
    if (given.text is None) == (given.data is None):
        raise UsageError("say what is read: --text TEXT, or --data FILE")
    if given.out is None and given.export is None:
        raise UsageError("say where it goes: --out FILE.trace, or --export FILE.csv")
    for name, least in (("limit", 1), ("new_tokens", 0), ("thumbnails", 0)):
        said = getattr(given, name)
        if said is not None and said < least:
            raise UsageError(f"--{name.replace('_', '-')} {said} is no count; give {least} or more")
    for path in filter(None, (given.out, given.export)):
        if not Path(path).absolute().parent.is_dir():
            raise UsageError(f"{path} lies in no folder that is there; make it first")
    from ..costs.serving_capacity import parse_bytes
    from ..inspect.trace_capture import Capture, trace

    names = {"budget": parse_bytes(given.budget)} if given.budget else {}
    sites = tuple(int(one) if one.isdigit() else one for one in given.sites.split(",") if one)
    also = tuple(one for one in given.also.split(",") if one)
    how = Capture(extra=also, sites=sites, precision=given.numbers, **names)
    model, inputs, steps = _capture_inputs(given)
    found = trace(model, inputs, max_new_tokens=steps, capture=how, log=lambda said: print(said, file=sys.stderr))
    size = 64 if given.thumbnails is None else given.thumbnails
    return found.with_thumbnails(size) if size and given.out else found


def _capture_inputs(given: argparse.Namespace) -> tuple[Any, Any, int]:
    """The model, what it reads, and how many tokens it says then."""
    from ..hub.model_import import load_original
    from ..inspect.model_inputs import is_encoder_decoder
    from ..models import Transformer

    model = load_original(given.model).eval()
    if given.tokenizer is not None:
        if not isinstance(model, Transformer):
            raise UsageError("--tokenizer is for models of headwise; put a tokenizer.json beside the others")
        from .run import attach_tokenizer

        attach_tokenizer(model, given.tokenizer)
    if given.target is not None:
        if given.text is None or len(given.text) != 1:
            raise UsageError("--target is written while one --text is read; give one")
        return model, {"source": given.text[0], "text": given.target}, 0
    first = model.spec.stacks[0].embedding if isinstance(model, Transformer) else None
    if isinstance(model, Transformer) and first is not None and first.patches is not None:
        from .run.inputs import make_input_reader

        reading = make_input_reader(model)
        x, tokens = reading.collate([reading.read(given.data or given.text[0])])
        return model, {"x": x} | ({} if tokens is None else {"sequence": tokens}), 0
    two = is_encoder_decoder(model)
    steps = given.new_tokens if given.new_tokens is not None else MAX_NEW_TOKENS if two else 0
    return model, given.text or _read_lines(given), steps


def _read_lines(given: argparse.Namespace) -> list[str]:
    """The first lines of a file that hold anything."""
    try:
        text = Path(given.data).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{given.data} cannot be read as text: {error}; give a file of lines in UTF-8") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"{given.data} holds no line; give at least one")
    return lines[: 8 if given.limit is None else given.limit]


def _export(trace: Trace, given: argparse.Namespace) -> None:
    if given.out is not None:
        trace.save(given.out)
    if given.export is not None:
        trace.export_weights(given.export, min_weight=given.least)
