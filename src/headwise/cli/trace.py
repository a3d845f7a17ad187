"""`headwise trace`: record the queries, keys and values of every attention layer in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..util.files import read_text_file
from .arguments import (
    TokenizerOptions,
    attach_named_tokenizer,
    check_input_file,
    check_model_path,
    load_on_device,
    parse_bytes,
    print_result,
)
from .options import (
    Count,
    InputFile,
    Natural,
    NotNegative,
    UsageError,
    check_choice,
    options,
)

if TYPE_CHECKING:
    from ..observe.traces import Trace

TRACE_SUFFIX = ".trace"
MAX_NEW_TOKENS = 64  # default of --new-tokens for encoder-decoder models


@options
class TraceOptions(TokenizerOptions):
    """Record the queries and keys of every head while a model reads a text, in one file that opens
    without the model and from which all attention weights can be recomputed. For a .trace file,
    print what it contains.

    MODEL  a folder, a Hub id (org/name, org/name@revision), a .gguf file, FILE.py:FACTORY, or
        a .trace file
    --text TEXT  input text; repeatable
    --target TEXT  target text, for an encoder-decoder model
    --data FILE  a file with one text per line, or an image
    --limit COUNT  use at most this many lines of --data (default: 8)
    --out FILE  write the trace to this file
    --new-tokens COUNT  generate this many tokens and trace every step (default: 64; 0 for
        decoder-only models)
    --export FILE  write attention weights to a .csv, .json or .npz file
    --min-weight WEIGHT  with --export, leave out smaller weights
    --overwrite  replace an earlier output of this command
    --json  print one JSON document instead of text

    details of the recording:
    --record v,z  also record v (values) and z (head outputs)
    --sites A,B  record only these layers or site names (default: all)
    --budget MEMORY  memory limit for the trace (default: 1 GB)
    --precision KIND  own (that of the model) or half (16 bits)
    --thumbnails CELLS  size of the thumbnail of each head; 0 for none (default: 64)

    examples:
    headwise trace runs/dates --text '<zh>20 November 2026' --out dates.trace
    headwise trace dates.trace --export weights.csv --min-weight 0.01
    """

    command = "trace"
    choices = {"precision": "observe.inspect.trace_capture:PRECISIONS"}
    outputs = {
        "out": "observe.traces.trace_file:TRACE_FILE",
        "export": "observe.traces.import_export:WEIGHT_FILE",
    }
    model: str
    text: tuple[str, ...] = ()
    target: str | None = None
    data: InputFile | None = None
    limit: Count | None = None
    out: str | None = None
    new_tokens: Natural | None = None
    export: str | None = None
    min_weight: NotNegative = 0.0
    overwrite: bool = False
    json: bool = False
    record: str = ""
    sites: str = ""
    budget: str | None = None
    precision: str = "own"
    thumbnails: Natural | None = None

    def check(self) -> None:
        """Refuse impossible options before anything is loaded."""
        from ..observe.traces.import_export import EXPORT_SUFFIXES

        if self.export is not None and Path(self.export).suffix.lower() not in EXPORT_SUFFIXES:
            fact = f"--export {self.export} has none of the suffixes {', '.join(EXPORT_SUFFIXES)}"
            raise UsageError(f"{fact}; give one of these")
        if self.model.endswith(TRACE_SUFFIX):
            for name, flag in self.options_set.items():
                if name not in ("model", "export", "min_weight", "overwrite", "json"):
                    raise UsageError(
                        f"{flag} applies when recording, but {self.model} is a trace; leave it out"
                    )
            check_input_file("MODEL", self.model)
            return
        if bool(self.text) == (self.data is not None):
            raise UsageError("give exactly one input: --text TEXT, or --data FILE")
        if self.out is None and self.export is None:
            raise UsageError("give an output file: --out FILE.trace, or --export FILE.csv")
        check_model_path("MODEL", self.model)
        if self.target is not None and len(self.text) != 1:
            raise UsageError("--target needs exactly one --text; give one")
        for name in filter(None, self.record.split(",")):
            check_choice("--record", name, ["observe.inspect.trace_capture:EXTRA_TENSORS"])


def main(argv: list[str]) -> int:
    """Record or open a trace, optionally export its weights, and print a summary."""
    args = TraceOptions.parse(argv)
    if args.model.endswith(TRACE_SUFFIX):
        from ..observe.traces import load_trace

        trace = load_trace(args.model)
    else:
        trace = _capture_trace(args)
    from ..observe.traces import export_weights, save_trace

    if args.out is not None:
        save_trace(trace, args.out, overwrite=args.overwrite)
    if args.export is not None:
        export_weights(trace, args.export, min_weight=args.min_weight, overwrite=args.overwrite)
    print_result(args, trace)
    return 0


def _capture_trace(args: TraceOptions) -> Trace:
    from ..observe.inspect.trace_capture import Capture, trace

    budget = {"budget": parse_bytes(args.budget)} if args.budget else {}
    sites = tuple(filter(None, args.sites.split(",")))
    extra = tuple(name for name in args.record.split(",") if name)
    options = Capture(extra=extra, sites=sites, precision=args.precision, **budget)
    model, inputs, steps = _capture_inputs(args)
    captured = trace(model, inputs, max_new_tokens=steps, capture=options)
    cells = 64 if args.thumbnails is None else args.thumbnails
    return captured.with_thumbnails(cells) if cells and args.out else captured


def _capture_inputs(args: TraceOptions) -> tuple[Any, Any, int]:
    """Return the model, its inputs, and the number of tokens to generate."""
    from ..hub.pretrained_models import load_original
    from ..models import Transformer
    from ..observe.inspect.model_inputs import is_encoder_decoder

    model = load_on_device(load_original, args.model, args).eval()
    attach_named_tokenizer(model, args)
    if args.target is not None:
        return model, {"source": args.text[0], "text": args.target}, 0
    embedding = model.spec.stacks[0].embedding if isinstance(model, Transformer) else None
    if isinstance(model, Transformer) and embedding is not None and embedding.patches is not None:
        from .run.answers import make_input_reader

        reader = make_input_reader(model)
        x, tokens = reader.collate([reader.read(args.data or args.text[0])])
        return model, {"x": x} | ({} if tokens is None else {"sequence": tokens}), 0
    encoder_decoder = is_encoder_decoder(model)
    steps = (
        args.new_tokens if args.new_tokens is not None else MAX_NEW_TOKENS if encoder_decoder else 0
    )
    return model, list(args.text) or _read_lines(args), steps


def _read_lines(args: Any) -> list[str]:
    """Return the first lines of --data that are not empty."""
    lines = [line for line in read_text_file(args.data).splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"{args.data} has no text; give at least one line")
    return lines[: 8 if args.limit is None else args.limit]
