"""`headwise spec`: a spec, its parameters by name, what it costs, and its mask; or a whole model as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .model import named_model
from .model import page as model_page
from .screen import Arguments, document, show, spec_of, take_form, take_spec

if TYPE_CHECKING:
    from ..spec import AttentionSpec

DRAWN = 16  # a mask of this many tokens shows every pattern's shape and leaves room on the screen


def main(argv: list[str]) -> int:
    """Show one spec."""
    parser = Arguments(
        "spec",
        "A spec: its text, its parameters by name, what a token costs, and its mask. Of a whole model, named by its "
        "folder, its config.json or its TOML file: every tensor, and what repeats.",
        "headwise spec gqa --set heads.kv=4 --set pattern='window(5) | first(2)'",
    )
    take_spec(parser)
    parser.add_argument("--tokens", type=int, default=DRAWN, help=f"tokens of the mask and of the counts ({DRAWN})")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--toml", action="store_true", help="the spec alone, as a file that every verb reads")
    take_form(forms)
    given = parser.parse_args(argv)
    if (model := named_model(given.spec)) is not None and given.preset is None:
        show(model_page(model, given))
        return 0
    spec = spec_of(given)
    from ..text import to_toml

    if given.toml:
        show(to_toml(spec))
    elif given.json:
        show(document(described(spec, given.tokens)))
    else:
        show(page(spec, given.tokens))
    return 0


def described(spec: AttentionSpec, tokens: int) -> dict[str, Any]:
    """Everything about a spec as plain values; counts are of one row of `tokens` tokens."""
    from .. import counting
    from ..text import to_dict

    shapes = spec.shapes()
    work = counting.work_of(spec, batch=1, queries=tokens)
    numbers = counting.cache_numbers(spec)
    first, last = spec.pattern.memory
    return {
        "spec": to_dict(spec),
        "parameters": [
            {"name": name, "layout": str(param.layout), "shape": list(shapes[name]), "learned": param.learned}
            for name, param in spec.params().items()
        ],
        "counts": {
            "parameters": counting.params(spec),
            "constants": counting.constants(spec),
            "tokens": tokens,
            "pairs": work.pairs,
            "flops_asked": counting.asked(spec, work),
            "flops_counted": counting.counted(spec, work),
        },
        "cache": {
            "entry": {name: list(shape) for name, shape in spec.entry().items()},
            "numbers_per_token": numbers,
            "bytes_per_token": {"float32": 4 * numbers, "bfloat16": 2 * numbers},
            "bytes_of_state": counting.cache_bytes(spec, batch=1, capacity=1) if spec.folder else 0,
            "keeps": {"first": first, "last": last},
        },
        "heads": {"score": spec.heads.q, "key": spec.heads.kv, "value": spec.heads.v, "out": len(spec.speaks)},
    }


def page(spec: AttentionSpec, tokens: int) -> str:
    """The same to be read."""
    from ..pattern import draw
    from ..text import to_toml

    told = described(spec, tokens)
    counts = told["counts"]
    constants = f" and {counts['constants']:,} constants" if counts["constants"] else ""
    lines = [to_toml(spec), "", *_parameters(told["parameters"]), ""]
    rows = [
        ("parameters", f"{counts['parameters']:,}{constants}"),
        (f"flops, {tokens} tokens", f"{counts['flops_asked']:,} asked, {counts['flops_counted']:,} counted"),
        ("cache", _cache(told["cache"])),
        ("keeps", _keeps(told["cache"]["keeps"]) if told["cache"]["numbers_per_token"] else "one state, no tokens"),
    ]
    lines += [f"{name:<18}{what}" for name, what in rows]
    return "\n".join([*lines, "", draw(spec.pattern, tokens, tokens)])


def _parameters(params: list[dict[str, Any]]) -> list[str]:
    head = ("parameter", "axes", "shape")
    rows = [
        (row["name"], row["layout"], " x ".join(map(str, row["shape"])) + ("" if row["learned"] else ", constant"))
        for row in params
    ]
    wide = [max(len(row[n]) for row in (head, *rows)) for n in range(2)]
    return [f"{row[0]:<{wide[0]}}  {row[1]:<{wide[1]}}  {row[2]}" for row in (head, *rows)]


def _cache(cache: dict[str, Any]) -> str:
    if cache["bytes_of_state"]:
        return f"one state of {cache['bytes_of_state']:,} bytes a row in float32 at any length"
    each = cache["bytes_per_token"]
    return f"{each['float32']:,} bytes a token in float32, {each['bfloat16']:,} in bfloat16"


def _keeps(keeps: dict[str, Any]) -> str:
    if keeps["last"] is None:
        return "every token"
    return (
        f"the first {keeps['first']} and the last {keeps['last']} tokens"
        if keeps["first"]
        else f"the last {keeps['last']} tokens"
    )
