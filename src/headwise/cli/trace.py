"""`headwise trace`: record the queries, keys and values of every attention layer in one file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..files import read_text_file
from ..output_paths import check_output
from . import known_names
from .argument_checks import (
    check_choice,
    check_input_file,
    check_model_path,
    check_suffix,
    check_tokenizer,
)
from .arguments import (
    add_json_argument,
    add_overwrite_argument,
    existing_mode,
    parse_bytes,
    print_note,
    print_page,
    to_json,
)
from .command_parser import CommandParser, UsageError
from .text_arguments import add_tokenizer_argument

if TYPE_CHECKING:
    from ..traces import Trace

TRACE_SUFFIX = ".trace"
MAX_NEW_TOKENS = 64  # default of --new-tokens for encoder-decoder models
CAPTURE_OPTIONS = (
    "text",
    "data",
    "out",
    "new_tokens",
    "record",
    "sites",
    "budget",
    "precision",
    "tokenizer",
    "limit",
    "thumbnails",
)


def main(argv: list[str]) -> int:
    """Record a trace, or open one; optionally export its weights, and print a summary."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.min_weight >= 0:
        raise UsageError(f"--min-weight {args.min_weight} is not a weight; give 0 or more")
    _check_outputs(args)
    check_suffix("--export", args.export, known_names.EXPORT_SUFFIXES)
    if args.model.endswith(TRACE_SUFFIX):
        if unused := [
            name for name in CAPTURE_OPTIONS if getattr(args, name) != parser.get_default(name)
        ]:
            raise UsageError(
                f"--{unused[0].replace('_', '-')} applies when recording, but {args.model} is a "
                "trace; leave it out"
            )
        check_input_file("MODEL", args.model)
        from ..traces import load_trace

        trace = load_trace(args.model)
    else:
        trace = _capture_trace(args)
    _write(trace, args)
    print_page(to_json(trace.data) if args.json else str(trace))
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "trace",
        "Record the queries and keys of every head while a model reads a text, in one file that "
        "opens without the "
        "model and from which all attention weights can be recomputed. For a .trace file, print "
        "what it contains.",
        "headwise trace runs/dates --text '<zh>20 November 2026' --out dates.trace",
        "headwise trace dates.trace --export weights.csv --min-weight 0.01",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder with a model, or a .trace file")
    parser.add_argument("--text", action="append", metavar="TEXT", help="input text; repeatable")
    parser.add_argument(
        "--target", metavar="TEXT", help="target text, for an encoder-decoder model"
    )
    parser.add_argument("--data", metavar="FILE", help="a file with one text per line, or an image")
    parser.add_argument(
        "--limit",
        type=int,
        metavar="COUNT",
        help="use at most this many lines of --data (default: 8)",
    )
    parser.add_argument("--out", metavar="FILE", help="write the trace to this file")
    parser.add_argument(
        "--new-tokens",
        type=int,
        metavar="COUNT",
        help=(
            f"generate this many tokens and trace every step (default: {MAX_NEW_TOKENS}; 0 for "
            "decoder-only models)"
        ),
    )
    parser.add_argument(
        "--export", metavar="FILE", help="write attention weights to a .csv, .json or .npz file"
    )
    parser.add_argument(
        "--min-weight",
        type=float,
        default=0.0,
        metavar="WEIGHT",
        help="with --export, leave out smaller weights",
    )
    add_overwrite_argument(parser)
    add_json_argument(parser)
    expert = parser.add_expert_group("details of the recording")
    expert.add_argument(
        "--record", default="", metavar="v,z", help="also record v (values) and z (head outputs)"
    )
    expert.add_argument(
        "--sites",
        default="",
        metavar="A,B",
        help="record only these layers or site names (default: all)",
    )
    expert.add_argument(
        "--budget", metavar="MEMORY", help="memory limit for the trace (default: 1 GB)"
    )
    expert.add_argument(
        "--precision",
        default="own",
        metavar="KIND",
        help="own (that of the model) or half (16 bits)",
    )
    expert.add_argument(
        "--thumbnails",
        type=int,
        metavar="CELLS",
        help="size of the thumbnail of each head; 0 for none (default: 64)",
    )
    add_tokenizer_argument(expert)
    return parser


def _capture_trace(args: argparse.Namespace) -> Trace:
    if (args.text is None) == (args.data is None):
        raise UsageError("give exactly one input: --text TEXT, or --data FILE")
    if args.out is None and args.export is None:
        raise UsageError("give an output file: --out FILE.trace, or --export FILE.csv")
    for name, minimum in (("limit", 1), ("new_tokens", 0), ("thumbnails", 0)):
        value = getattr(args, name)
        if value is not None and value < minimum:
            raise UsageError(
                f"--{name.replace('_', '-')} {value} is too small; give {minimum} or more"
            )
    check_model_path(args.model)
    check_input_file("--data", args.data)
    check_tokenizer(args.tokenizer)
    if args.target is not None and (args.text is None or len(args.text) != 1):
        raise UsageError("--target needs exactly one --text; give one")
    check_choice("--precision", args.precision, known_names.TRACE_PRECISIONS)
    for name in filter(None, args.record.split(",")):
        check_choice("--record", name, known_names.TRACE_EXTRA_TENSORS)
    from ..inspect.trace_capture import Capture, trace

    budget = {"budget": parse_bytes(args.budget)} if args.budget else {}
    sites = tuple(int(name) if name.isdigit() else name for name in args.sites.split(",") if name)
    extra = tuple(name for name in args.record.split(",") if name)
    options = Capture(extra=extra, sites=sites, precision=args.precision, **budget)
    model, inputs, steps = _capture_inputs(args)
    captured = trace(model, inputs, max_new_tokens=steps, capture=options, log=print_note)
    cells = 64 if args.thumbnails is None else args.thumbnails
    return captured.with_thumbnails(cells) if cells and args.out else captured


def _capture_inputs(args: argparse.Namespace) -> tuple[Any, Any, int]:
    """Return the model, its inputs, and the number of tokens to generate."""
    from ..hub.pretrained_models import load_original
    from ..inspect.model_inputs import is_encoder_decoder
    from ..models import Transformer

    model = load_original(args.model).eval()
    if args.tokenizer is not None:
        if not isinstance(model, Transformer):
            raise UsageError(
                "--tokenizer applies to headwise models; put a tokenizer.json in the folder instead"
            )
        from .run import attach_tokenizer

        attach_tokenizer(model, args.tokenizer)
    if args.target is not None:
        return model, {"source": args.text[0], "text": args.target}, 0
    embedding = model.spec.stacks[0].embedding if isinstance(model, Transformer) else None
    if isinstance(model, Transformer) and embedding is not None and embedding.patches is not None:
        from .run.inputs import make_input_reader

        reader = make_input_reader(model)
        x, tokens = reader.collate([reader.read(args.data or args.text[0])])
        return model, {"x": x} | ({} if tokens is None else {"sequence": tokens}), 0
    encoder_decoder = is_encoder_decoder(model)
    steps = (
        args.new_tokens if args.new_tokens is not None else MAX_NEW_TOKENS if encoder_decoder else 0
    )
    return model, args.text or _read_lines(args), steps


def _read_lines(args: argparse.Namespace) -> list[str]:
    """Return the first lines of --data that are not empty."""
    lines = [line for line in read_text_file(args.data).splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"{args.data} has no text; give at least one line")
    return lines[: 8 if args.limit is None else args.limit]


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuse paths that may not be written, before anything is loaded."""
    from ..traces.import_export import WEIGHT_FILE
    from ..traces.trace_file import TRACE_FILE

    if args.out is not None:
        check_output(args.out, TRACE_FILE, existing_mode(args))
    if args.export is not None:
        check_output(args.export, WEIGHT_FILE, existing_mode(args))


def _write(trace: Trace, args: argparse.Namespace) -> None:
    from ..traces import export_weights, save_trace

    if args.out is not None:
        save_trace(trace, args.out, overwrite=args.overwrite)
    if args.export is not None:
        export_weights(trace, args.export, min_weight=args.min_weight, overwrite=args.overwrite)
