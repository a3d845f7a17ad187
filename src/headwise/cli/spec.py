"""`headwise spec`: print a spec with its parameters, costs and mask, or a whole model as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arguments import (
    CommandParser,
    add_json_argument,
    add_spec_arguments,
    load_model_description,
    parse_spec,
    print_model_page as model_page,
    print_page,
    to_json,
)

if TYPE_CHECKING:
    from ..spec.attention_spec import AttentionSpec

MASK_TOKENS = 16  # enough to recognise every pattern, small enough for a terminal


def main(argv: list[str]) -> int:
    """Print one spec, or a whole model."""
    parser = CommandParser(
        "spec",
        "Print a spec: its TOML, parameters by name, FLOPs, cache size, and mask. For a whole model (a folder, a "
        "config.json or a TOML file), print a table of its tensors.",
        "headwise spec gqa --set heads.kv=4 --set pattern='window(5) | first(2)'",
        "headwise spec path/to/config.json",
    )
    add_spec_arguments(parser)
    parser.add_argument(
        "--tokens", type=int, default=MASK_TOKENS, metavar="COUNT", help="tokens in the mask and in the FLOPs"
    )
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument(
        "--toml", action="store_true", help="print only the spec, as a TOML file that every command accepts"
    )
    add_json_argument(forms)
    args = parser.parse_args(argv)
    if (model := load_model_description(args.spec)) is not None and args.preset is None:
        print_page(model_page(model, args))
        return 0
    spec = parse_spec(args)
    from ..spec.serialization import to_toml

    if args.toml:
        print_page(to_toml(spec))
    elif args.json:
        print_page(to_json(spec_to_dict(spec, args.tokens)))
    else:
        print_page(format_spec(spec, args.tokens))
    return 0


def spec_to_dict(spec: AttentionSpec, tokens: int) -> dict[str, Any]:
    """Return everything about a spec as plain values; FLOPs are for one sequence of `tokens` tokens."""
    from .. import costs
    from ..spec.serialization import to_dict

    shapes = spec.shapes()
    work = costs.self_attention_work(spec, batch=1, queries=tokens)
    cached_numbers = costs.cached_numbers_per_token(spec)
    first, last = spec.pattern.retention
    return {
        "spec": to_dict(spec),
        "parameters": [
            {"name": name, "layout": str(param.layout), "shape": list(shapes[name]), "learned": param.trainable}
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
            "bytes_of_state": costs.cache_bytes(spec, batch=1, capacity=1) if spec.recurrent_part else 0,
            "keeps": {"first": first, "last": last},
        },
        "heads": {
            "score": spec.heads.q,
            "key": spec.heads.kv,
            "value": spec.heads.num_value_heads,
            "out": len(spec.score_head_of_output),
        },
    }


def format_spec(spec: AttentionSpec, tokens: int) -> str:
    """Format a spec as text: TOML, parameters, costs and mask."""
    from ..masking.patterns import draw_pattern
    from ..spec.serialization import to_toml

    data = spec_to_dict(spec, tokens)
    counts = data["counts"]
    constants = f" and {counts['constants']:,} constants" if counts["constants"] else ""
    lines = [to_toml(spec), "", *_format_parameters(data["parameters"]), ""]
    rows = [
        ("parameters", f"{counts['parameters']:,}{constants}"),
        (f"flops, {tokens} tokens", f"{counts['flops_asked']:,} asked, {counts['flops_counted']:,} counted"),
        ("cache", _format_cache(data["cache"])),
        (
            "keeps",
            _format_saved(data["cache"]["keeps"]) if data["cache"]["numbers_per_token"] else "one state, no tokens",
        ),
    ]
    lines += [f"{name:<18}{what}" for name, what in rows]
    return "\n".join([*lines, "", draw_pattern(spec.pattern, tokens, tokens)])


def _format_parameters(params: list[dict[str, Any]]) -> list[str]:
    head = ("parameter", "axes", "shape")
    rows = [
        (row["name"], row["layout"], " x ".join(map(str, row["shape"])) + ("" if row["learned"] else ", constant"))
        for row in params
    ]
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(2)]
    return [f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in (head, *rows)]


def _format_cache(cache: dict[str, Any]) -> str:
    if cache["bytes_of_state"]:
        return f"one state of {cache['bytes_of_state']:,} bytes a row in float32 at any length"
    bytes_per_token = cache["bytes_per_token"]
    return f"{bytes_per_token['float32']:,} bytes a token in float32, {bytes_per_token['bfloat16']:,} in bfloat16"


def _format_saved(retention: dict[str, Any]) -> str:
    if retention["last"] is None:
        return "every token"
    return (
        f"the first {retention['first']} and the last {retention['last']} tokens"
        if retention["first"]
        else f"the last {retention['last']} tokens"
    )
