"""`headwise spec`: a spec, its parameters by name, what it costs, and its mask; or a whole model as a table."""

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

MASK_TOKENS = 16  # a mask of this many tokens shows every pattern's shape and leaves room on the screen


def main(argv: list[str]) -> int:
    """Show one spec."""
    parser = CommandParser(
        "spec",
        "A spec: its text, its parameters by name, what a token costs, and its mask. Of a whole model, named by its "
        "folder, its config.json or its TOML file: every tensor, and what repeats.",
        "headwise spec gqa --set heads.kv=4 --set pattern='window(5) | first(2)'",
    )
    add_spec_arguments(parser)
    parser.add_argument(
        "--tokens", type=int, default=MASK_TOKENS, help=f"tokens of the mask and of the counts ({MASK_TOKENS})"
    )
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--toml", action="store_true", help="the spec alone, as a file that every verb reads")
    add_json_argument(forms)
    given = parser.parse_args(argv)
    if (model := load_model_description(given.spec)) is not None and given.preset is None:
        print_page(model_page(model, given))
        return 0
    spec = parse_spec(given)
    from ..spec.serialization import to_toml

    if given.toml:
        print_page(to_toml(spec))
    elif given.json:
        print_page(to_json(spec_to_dict(spec, given.tokens)))
    else:
        print_page(format_spec(spec, given.tokens))
    return 0


def spec_to_dict(spec: AttentionSpec, tokens: int) -> dict[str, Any]:
    """Everything about a spec as plain values; counts are of one row of `tokens` tokens."""
    from .. import costs
    from ..spec.serialization import to_dict

    shapes = spec.shapes()
    work = costs.self_attention_work(spec, batch=1, queries=tokens)
    numbers = costs.cached_numbers_per_token(spec)
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
            "numbers_per_token": numbers,
            "bytes_per_token": {"float32": 4 * numbers, "bfloat16": 2 * numbers},
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
    """The same to be read."""
    from ..masking.patterns import draw_pattern
    from ..spec.serialization import to_toml

    told = spec_to_dict(spec, tokens)
    counts = told["counts"]
    constants = f" and {counts['constants']:,} constants" if counts["constants"] else ""
    lines = [to_toml(spec), "", *_format_parameters(told["parameters"]), ""]
    rows = [
        ("parameters", f"{counts['parameters']:,}{constants}"),
        (f"flops, {tokens} tokens", f"{counts['flops_asked']:,} asked, {counts['flops_counted']:,} counted"),
        ("cache", _format_cache(told["cache"])),
        (
            "keeps",
            _format_saved(told["cache"]["keeps"]) if told["cache"]["numbers_per_token"] else "one state, no tokens",
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
    wide = [max(len(row[n]) for row in (head, *rows)) for n in range(2)]
    return [f"{row[0]:<{wide[0]}}  {row[1]:<{wide[1]}}  {row[2]}" for row in (head, *rows)]


def _format_cache(cache: dict[str, Any]) -> str:
    if cache["bytes_of_state"]:
        return f"one state of {cache['bytes_of_state']:,} bytes a row in float32 at any length"
    each = cache["bytes_per_token"]
    return f"{each['float32']:,} bytes a token in float32, {each['bfloat16']:,} in bfloat16"


def _format_saved(keeps: dict[str, Any]) -> str:
    if keeps["last"] is None:
        return "every token"
    return (
        f"the first {keeps['first']} and the last {keeps['last']} tokens"
        if keeps["first"]
        else f"the last {keeps['last']} tokens"
    )
