"""Named specs, and `design`, which fills in what is not said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .errors import SpecError, nearest
from .heads import Heads
from .parts.average import Average
from .parts.concat import Concat
from .parts.direct import Direct
from .parts.dot import Dot
from .parts.latent import Latent
from .parts.rotary import Rotary
from .parts.softmax import Softmax
from .parts.values import Values
from .pattern import Full, parse
from .registry import defaults
from .seams import Merge, Part, Project
from .spec import AttentionSpec
from .text import from_json as _from_json
from .text import from_toml as _from_toml

# What a spec that does not choose is given.
USUAL: dict[str, Any] = {
    "project": Direct(),
    "similarity": Dot(),
    "pattern": Full(),
    "normaliser": Softmax(),
    "merge": Concat(),
}


# Every word that `design` knows; None where something follows from the others.
WORDS: dict[str, Any] = {
    **USUAL,
    **dict.fromkeys(("model", "heads", "kv", "dim", "vdim", "bias", "source")),
    "modifiers": (),
}


def design(*, preset: str | None = None, **said: Any) -> AttentionSpec:
    """A spec from the few words that matter.

    model, heads; kv (as many as heads), dim (model / heads), vdim (dim); pattern, as text or as a pattern;
    modifiers; bias, the letters of "qkvo" that have one; source, the width of what cross-attention reads; and
    project, similarity, normaliser, merge. `preset` starts from a named spec instead.

    >>> design(model=512, heads=8, kv=2).heads
    Heads.grouped(q=8, kv=2, dim=64)
    """
    if preset is not None:
        if preset not in PRESETS:
            raise SpecError(f"there is no preset {preset!r}; {nearest(preset, PRESETS)}")
        return PRESETS[preset](**said)
    word = _words(said)
    slots = {slot: word[slot] for slot in ("project", "similarity", "normaliser", "merge")}
    heads = _heads(word)
    for part in (*slots.values(), *word["modifiers"]):
        heads = part.fitted(heads) if isinstance(part, Part) else heads
    heads = heads if word["vdim"] is None else replace(heads, vdim=word["vdim"])
    if word["bias"] is not None:
        slots |= _biased(word["bias"], slots["project"], slots["merge"])
    pattern = parse(word["pattern"]) if isinstance(word["pattern"], str) else word["pattern"]
    rest = {"model": word["model"], "source": word["source"], "modifiers": word["modifiers"]}
    return AttentionSpec(heads=heads, pattern=pattern, **slots, **rest)


def _words(said: dict[str, Any]) -> dict[str, Any]:
    for name in said:
        if name not in WORDS:
            raise SpecError(f"design has no {name!r}; {nearest(name, WORDS)}")
    word = WORDS | said
    for name in ("model", "heads"):
        size = word[name]
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise SpecError(f"design needs {name}, a whole number of at least 1, not {size!r}; say {name}=8")
    if not isinstance(word["modifiers"], (tuple, list)):
        raise SpecError(f"modifiers={word['modifiers']!r} is no list; write modifiers=(Rotary(),) with the comma")
    return word | {"modifiers": tuple(word["modifiers"])}


def _heads(word: dict[str, Any]) -> Heads:
    model, heads, dim = word["model"], word["heads"], word["dim"]
    if dim is None and model % heads:
        ways = [n for n in range(1, model + 1) if model % n == 0]
        raise SpecError(f"a model of {model} does not divide among {heads} heads; use heads in {ways}, or say dim=")
    return Heads.grouped(q=heads, kv=word["kv"], dim=model // heads if dim is None else dim, vdim=word["vdim"])


def _biased(bias: object, project: Project, merge: Merge) -> dict[str, Part]:
    if not isinstance(bias, str):
        raise SpecError(f"bias={bias!r} is of type {type(bias).__name__}; name those that have one, as in bias='qkvo'")
    if unknown := sorted(set(bias) - set("qkvo")):
        raise SpecError(f"bias={bias!r} names {unknown[0]!r}; use letters of 'qkvo'")
    inner, outer = ("".join(letter for letter in letters if letter in bias) for letters in ("qkv", "o"))
    told: dict[str, tuple[Part, str]] = {"project": (project, inner), "merge": (merge, outer)}
    out: dict[str, Part] = {}
    for slot, (part, letters) in told.items():
        if "bias" not in defaults(type(part)) and letters:
            raise SpecError(f"{type(part).__name__} has no bias of its own; leave {letters!r} out of bias={bias!r}")
        out[slot] = replace(part, bias=letters) if "bias" in defaults(type(part)) else part
    return out


def mha(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """Multi-head attention as first published: every head has keys and values of its own (1706.03762)."""
    return design(model=model, heads=heads, **said)


def gqa(*, model: int = 512, heads: int = 8, kv: int = 2, **said: Any) -> AttentionSpec:
    """Grouped queries: some heads share a key-value head; causal, with rotary positions (2305.13245)."""
    said = {"pattern": "causal()", "modifiers": (Rotary(),)} | said
    return design(model=model, heads=heads, kv=kv, **said)


def mqa(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """One key-value head for all (1911.02150)."""
    return gqa(model=model, heads=heads, **({"kv": 1} | said))


def mla(*, model: int = 2048, heads: int = 16, **said: Any) -> AttentionSpec:
    """Latent attention in the sizes of DeepSeek-V2-Lite (2405.04434): rank 512, 64 turned and 128 other channels."""
    usual = {
        "pattern": "causal()",
        "project": Latent(rank=512, rope=64),
        "dim": 128,
        "modifiers": (Rotary(pairs="interleaved"),),
    }
    return design(model=model, heads=heads, **(usual | said))


def average(*, model: int = 512, heads: int = 8, **said: Any) -> AttentionSpec:
    """The mean of the values so far, in constant memory: merged attention's other branch (1908.11365)."""
    usual = {"project": Values(), "normaliser": Average(), "pattern": "causal()"}
    return design(model=model, heads=heads, **(usual | said))


PRESETS: dict[str, Callable[..., AttentionSpec]] = {"mha": mha, "gqa": gqa, "mqa": mqa, "mla": mla, "average": average}


def from_toml(text: str) -> AttentionSpec:
    """The spec that a TOML document describes; a choice it does not make is the usual one.

    >>> from_toml("model = 8\\nheads = {q = 2, dim = 4}") == design(model=8, heads=2)
    True
    """
    return _from_toml(text, USUAL)


def from_json(text: str) -> AttentionSpec:
    """The spec that a JSON document describes; a choice it does not make is the usual one."""
    return _from_json(text, USUAL)
