"""`build_spec`, which makes a spec of the arguments of `design` that are not a preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..util.errors import SpecError, suggest
from ..util.size_limits import MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH, check_size
from .interfaces import Merge, Modifier, Part, Project
from .interfaces.part import field_defaults
from .masking.patterns import Full, parse_pattern
from .parts.dot_product import DotProduct
from .parts.linear_projection import LinearProjection
from .parts.merges import ConcatMerge
from .parts.softmax import Softmax
from .spec.attention_spec import AttentionSpec
from .spec.heads import Heads

# The parts of a spec that does not choose others.
DEFAULT_CHOICES: dict[str, Any] = {
    "project": LinearProjection(),
    "similarity": DotProduct(),
    "pattern": Full(),
    "normaliser": Softmax(),
    "merge": ConcatMerge(),
}


# The arguments of `design` with their defaults; None where the default is derived from other
# arguments.
DESIGN_KEYWORDS: dict[str, Any] = {
    **DEFAULT_CHOICES,
    **dict.fromkeys(("model", "heads", "kv", "dim", "vdim", "bias", "source")),
    "modifiers": (),
}


def build_spec(options: dict[str, Any]) -> AttentionSpec:
    """Build the spec that these arguments of `design` describe."""
    for name in options:
        if name not in DESIGN_KEYWORDS:
            raise SpecError(f"design has no {name!r}; {suggest(name, DESIGN_KEYWORDS)}")
    options = DESIGN_KEYWORDS | options
    check_sizes({name: options[name] for name in ("model", "heads")})
    if not isinstance(options["modifiers"], (tuple, list)):
        raise SpecError(
            f"modifiers={options['modifiers']!r} is not a tuple; write modifiers=(Rotary(),) with "
            "the comma"
        )
    options = options | {"modifiers": tuple(options["modifiers"])}
    slots = {slot: options[slot] for slot in ("project", "similarity", "normaliser", "merge")}
    heads = _plain_heads(options)
    by_phase = sorted(
        options["modifiers"], key=lambda part: part.phase if isinstance(part, Modifier) else 0
    )
    for part in (*slots.values(), *by_phase):
        heads = part.fit_heads(heads) if isinstance(part, Part) else heads
    heads = heads if options["vdim"] is None else replace(heads, vdim=options["vdim"])
    if options["bias"] is not None:
        slots |= _with_biases(options["bias"], slots["project"], slots["merge"])
    pattern = (
        parse_pattern(options["pattern"])
        if isinstance(options["pattern"], str)
        else options["pattern"]
    )
    others = {
        "model": options["model"],
        "source": options["source"],
        "modifiers": options["modifiers"],
    }
    return AttentionSpec(heads=heads, pattern=pattern, **slots, **others)


LARGEST_SIZES = {"model": MAX_WIDTH, "heads": MAX_HEADS, "dim": MAX_HEAD_DIM}


def check_sizes(options: Mapping[str, object]) -> None:
    """Raise SpecError if one of these sizes is not a whole number of at least 1, or too large."""
    for name in LARGEST_SIZES:
        size = options.get(name, 1)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise SpecError(
                f"design needs {name}, a whole number of at least 1, not {size!r}; try {name}=8"
            )
        check_size(name, size, LARGEST_SIZES[name])


def _plain_heads(options: dict[str, Any]) -> Heads:
    model = options["model"]
    heads = options["heads"]
    dim = options["dim"]
    if dim is None and model % heads:
        divisors = [n for n in range(1, min(model, MAX_HEADS) + 1) if model % n == 0]
        raise SpecError(
            f"model={model} does not divide among {heads} heads; use heads in {divisors}, or give "
            "dim="
        )
    return Heads.grouped(
        q=heads, kv=options["kv"], dim=model // heads if dim is None else dim, vdim=options["vdim"]
    )


def _with_biases(bias: object, project: Project, merge: Merge) -> dict[str, Part]:
    if not isinstance(bias, str):
        raise SpecError(
            f"bias={bias!r} is of type {type(bias).__name__}; give text, such as bias='qkvo'"
        )
    unknown = sorted(set(bias) - set("qkvo"))
    if unknown:
        raise SpecError(
            f"bias={bias!r} has the unknown letter {unknown[0]!r}; use letters of 'qkvo'"
        )
    inner = "".join(letter for letter in "qkv" if letter in bias)
    letters_of_slot: dict[str, tuple[Part, str]] = {
        "project": (project, inner),
        "merge": (merge, "o" if "o" in bias else ""),
    }
    parts: dict[str, Part] = {}
    for slot, (part, letters) in letters_of_slot.items():
        if "bias" not in field_defaults(type(part)) and letters:
            raise SpecError(
                f"{type(part).__name__} has no biases; leave {letters!r} out of bias={bias!r}"
            )
        parts[slot] = replace(part, bias=letters) if "bias" in field_defaults(type(part)) else part
    return parts
