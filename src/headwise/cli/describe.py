"""Commands that describe a layer or a model: `headwise spec`, `walk`, `sites` and `why`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..util.model_names import parse_factory, parse_hub_id
from .arguments import (
    DESCRIPTION_SUFFIXES,
    LoadingOptions,
    SpecOptions,
    print_page,
    print_result,
    resolve_target,
)
from .options import Options, UsageError, options

if TYPE_CHECKING:
    from ..attention.spec.attention_spec import AttentionSpec

MASK_TOKENS = 16  # enough to recognise every pattern, small enough for a terminal


@options
class DescriptionOptions(SpecOptions):
    """Print a spec: its TOML, parameters by name, FLOPs, cache size, and mask. For a whole model (a
    folder, a config.json or a TOML file), print a table of its tensors.

    --tokens COUNT  tokens in the mask and in the FLOPs
    --toml  print only the spec, as a file for cost, train, why, walk, sites
    --json  print one JSON document instead of text

    examples:
    headwise spec gqa --set heads.kv=4 --set pattern='window(5) | first(2)'
    headwise spec path/to/config.json
    """

    command = "spec"
    excludes = ("json toml",)
    tokens: int = MASK_TOKENS
    toml: bool = False
    json: bool = False


def spec_main(argv: list[str]) -> int:
    """Print one spec, or a whole model."""
    args = DescriptionOptions.parse(argv)
    target = args.resolve()
    from ..attention.spec import serialization
    from ..models import model_spec

    if isinstance(target, model_spec.ModelSpec):
        table = model_spec.ModelTable(target)
        data = {"model": model_spec.to_dict(target), "table": table.to_dict}
        print_result(args, model_spec.to_toml(target).rstrip() if args.toml else table, data)
    elif args.toml:
        print_page(serialization.to_toml(target))
    else:
        data = spec_to_dict(target, args.tokens)
        print_result(args, "" if args.json else format_spec(target, data), data)
    return 0


def spec_to_dict(spec: AttentionSpec, tokens: int) -> dict[str, Any]:
    """Return everything about a spec as plain values; FLOPs are for one sequence of `tokens`
    tokens.
    """
    from .. import costs
    from ..attention.spec.serialization import to_dict

    shapes = spec.shapes()
    work = costs.self_attention_work(spec, batch=1, queries=tokens)
    cached_numbers = costs.cached_numbers_per_token(spec)
    first, last = spec.pattern.retention
    return {
        "spec": to_dict(spec),
        "parameters": [
            {
                "name": name,
                "layout": str(param.layout),
                "shape": list(shapes[name]),
                "learned": param.trainable,
            }
            for name, param in spec.params().items()
        ],
        "counts": {
            "parameters": costs.count_parameters(spec),
            "constants": costs.count_constants(spec),
            "tokens": tokens,
            "pairs": work.pairs,
            "flops_asked": costs.required_flops(spec, work),
            "flops_counted": costs.counted_flops(spec, work),
        },
        "cache": {
            "entry": {name: list(shape) for name, shape in spec.kv_entry_shapes().items()},
            "numbers_per_token": cached_numbers,
            "bytes_per_token": {"float32": 4 * cached_numbers, "bfloat16": 2 * cached_numbers},
            "bytes_of_state": costs.cache_bytes(spec, batch=1, capacity=1)
            if spec.recurrent_part
            else 0,
            "keeps": {"first": first, "last": last},
        },
        "heads": {
            "score": spec.heads.q,
            "key": spec.heads.kv,
            "value": spec.heads.num_value_heads,
            "out": len(spec.score_head_of_output),
        },
    }


def format_spec(spec: AttentionSpec, data: dict[str, Any]) -> str:
    """Format a spec as text: TOML, parameters, costs and mask."""
    from ..attention.masking.patterns import draw_pattern
    from ..attention.spec.serialization import to_toml
    from ..report.data import Table
    from ..report.render import to_text

    parameters: list[tuple[str, str, str]] = []
    for row in data["parameters"]:
        shape = " x ".join(map(str, row["shape"]))
        parameters.append((row["name"], row["layout"], shape + ", constant" * (not row["learned"])))
    counts = data["counts"]
    tokens = counts["tokens"]
    cache = data["cache"]
    retention = cache["keeps"]
    constants = f" and {counts['constants']:,} constants" if counts["constants"] else ""
    flops = f"{counts['flops_asked']:,} required, {counts['flops_counted']:,} counted"
    sizes = [f"{size:,}" for size in cache["bytes_per_token"].values()]
    stored = f"{sizes[0]} bytes a token in float32, {sizes[1]} in bfloat16"
    first = f"the first {retention['first']} and " if retention["first"] else ""
    keeps = (
        "every token"
        if retention["last"] is None
        else f"{first}the last {retention['last']} tokens"
    )
    if cache["bytes_of_state"]:
        stored = f"one state of {cache['bytes_of_state']:,} bytes a row in float32 at any length"
        keeps = "one state, no tokens"
    rows = [
        ("parameters", f"{counts['parameters']:,}{constants}"),
        (f"flops, {tokens} tokens", flops),
        ("cache", stored),
        ("keeps", keeps),
    ]
    table = to_text(Table("", ("parameter", "axes", "shape"), parameters))
    lines = [f"{name:<18}{what}" for name, what in rows]
    mask = draw_pattern(spec.pattern, tokens, tokens)
    return "\n".join([to_toml(spec), "", table, "", *lines, "", mask])


@options
class WalkOptions(SpecOptions):
    """Run a layer once on random input and list the steps of attention by number, with the shapes
    of queries, keys and values, and whether a step copies or makes a view.

    --layer PLACE  attention of a model, as in decoder.3.cross (default: first)
    --batch COUNT  batch size
    --tokens COUNT  tokens per sequence
    --source COUNT  cross-attention to this many source tokens (default: self-attention)
    --ops  every tensor operation by part, with strides
    --json  print one JSON document instead of text

    examples:
    headwise walk mha --batch 5 --tokens 10
    headwise walk transformer-base --layer decoder.0.cross --ops
    """

    command = "walk"
    layer: str | None = None
    batch: int = 5
    tokens: int = 10
    source: int | None = None
    ops: bool = False
    json: bool = False


def walk_main(argv: list[str]) -> int:
    """Run a layer once, on tensors without values, and print its tensor operations."""
    args = WalkOptions.parse(argv)
    place, spec = _select_attention(args)
    from ..attention.op_trace import AttentionSteps, walk

    source = args.tokens if args.source is None and place.endswith(".cross") else args.source
    trace = walk(spec, args.batch, args.tokens, source)
    page = trace if args.ops else AttentionSteps(trace)
    title = f"{args.spec}, {place}\n" if place else ""
    print_result(args, f"{title}{page}", page.to_dict)
    return 0


def _select_attention(args: WalkOptions | WhyOptions) -> tuple[str, AttentionSpec]:
    """Return the place and spec of --layer, or of the first attention. A layer has no place."""
    target = args.resolve()
    from ..attention.spec.attention_spec import AttentionSpec
    from ..costs.workload import select_layer

    if isinstance(target, AttentionSpec):
        if args.layer is not None:
            raise UsageError(f"--layer {args.layer} is for models; leave it out")
        return "", target
    place = args.layer or next((name for name, _ in target.attention_specs()), "")
    if not place:
        raise UsageError(f"{args.spec} has no attention; give another model")
    spec = select_layer(target, place)
    if not isinstance(spec, AttentionSpec):  # a block
        place = f"{place}.attention"
        spec = select_layer(target, place)
    assert isinstance(spec, AttentionSpec)
    return place, spec


@options
class SitesOptions(Options):
    """List every attention layer of a model: its path, number of heads and attention pattern, and
    whether its heads can be traced, ablated, pruned and converted, with the reason if not. A
    description without weights works.

    MODEL  a folder, a Hub id (org/name, org/name@revision), FILE.py:FACTORY, a .toml or .json file,
        or a preset
    --json  print one JSON document instead of text

    examples:
    headwise sites runs/dates
    headwise sites path/to/model --json
    """

    command = "sites"
    model: str
    json: bool = False


def sites_main(argv: list[str]) -> int:
    """Print the table of attention layers."""
    args = SitesOptions.parse(argv)
    from ..observe.inspect.attention_sites import sites

    name = args.model
    path = Path(name)
    is_named = parse_hub_id(name) is not None or parse_factory(name) is not None
    if is_named or path.is_dir() or (path.is_file() and path.suffix not in DESCRIPTION_SUFFIXES):
        from ..hub.pretrained_models import load_original

        table = sites(load_original(name))
    else:
        import torch

        from ..attention.attention import Attention
        from ..attention.spec.attention_spec import AttentionSpec
        from ..models import build

        target = resolve_target(name, {}, [])
        with torch.device("meta"):
            table = sites(Attention(target) if isinstance(target, AttentionSpec) else build(target))
    print_result(args, table, table.to_dict)
    return 0


@options
class WhyOptions(SpecOptions, LoadingOptions):
    """Show which backend would run a layer, and why the others would not. Runs nothing and needs no
    device, so that --device may name one that is not there.

    --layer PLACE  attention of a model, as in 3.attention or decoder.3.cross (default: first)
    --want RESULT  intermediate result that must be available, such as weights; repeatable
    --dtype NAME  float32, bf16, fp16 or float64
    --tokens COUNT  queries per sequence: a number, many, or one (decoding from a cache)
    --when STATE  assume grad (gradients are enabled), training, mask (a tensor passed as mask=),
        paged (a paged KV cache), or packed (several sequences per row); repeatable
    --json  print one JSON document instead of text

    examples:
    headwise why mla --tokens one --when paged
    headwise why llama-3-8b --layer 3.attention
    """

    command = "why"
    layer: str | None = None
    want: tuple[str, ...] = ()
    device: str = "auto"
    dtype: str = "float32"
    tokens: str = "many"
    when: tuple[str, ...] = ()
    json: bool = False


def why_main(argv: list[str]) -> int:
    """Print the chosen backend, and why each other backend refuses."""
    args = WhyOptions.parse(argv)
    place, spec = _select_attention(args)
    from ..attention.backends.backend_report import why
    from ..kernels.devices import resolve_device

    device = str(resolve_device("auto")) if args.device == "auto" else args.device
    want, when = (list(filter(None, ",".join(one).split(","))) for one in (args.want, args.when))
    call = {"device": device, "dtype": args.dtype}
    report = why(spec, want=want, tokens=args.tokens, when=when, **call)
    title = f"{args.spec}, {place}\n\n" if place else ""
    print_result(args, f"{title}{report}{_other_layers(args, place, spec)}", report.data)
    return 0


def _other_layers(args: WhyOptions, place: str, spec: AttentionSpec) -> str:
    """Return a note on the first layer of a model that differs from the one that is explained."""
    if not place or args.layer is not None:
        return ""
    target: Any = args.resolve()
    others = (name for name, other in target.attention_specs() if other != spec)
    other = next(others, "")
    return f"\n\nLayers differ: add --layer {other} for another kind." if other else ""
