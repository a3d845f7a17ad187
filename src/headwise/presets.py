"""Named specs, and `design`, which fills in what is not said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .errors import SpecError, nearest
from .heads import Heads
from .parts.concat import Concat
from .parts.direct import Direct
from .parts.dot import Dot
from .parts.latent import Latent
from .parts.rotary import Rotary
from .parts.softmax import Softmax
from .pattern import Full, Pattern, parse
from .seams import Merge, Modifier, Normaliser, Project, Similarity
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


def design(*, preset: str | None = None, **said: Any) -> AttentionSpec:
    """A spec from the few words that matter: model, heads, kv, dim, vdim, pattern, modifiers, bias, and any slot.

    `dim` is model / heads unless given, `kv` as many as heads, `pattern` text or a pattern, `bias` the letters
    of "qkvo" that have one. `preset` starts from a named spec.

    >>> design(model=512, heads=8, kv=2).heads
    Heads.grouped(q=8, kv=2, dim=64)
    """
    if preset is None:
        return _design(**_known(said, set(_design.__kwdefaults__ or {}) | {"model", "heads"}))
    if preset not in PRESETS:
        raise SpecError(f"there is no preset {preset!r}; {nearest(preset, PRESETS)}")
    return PRESETS[preset](**said)


def _design(
    *,
    model: int,
    heads: int,
    kv: int | None = None,
    dim: int | None = None,
    vdim: int | None = None,
    pattern: str | Pattern = "full()",
    modifiers: Sequence[Modifier] = (),
    bias: str | None = None,
    source: int | None = None,
    project: Project = USUAL["project"],
    similarity: Similarity = USUAL["similarity"],
    normaliser: Normaliser = USUAL["normaliser"],
    merge: Merge = USUAL["merge"],
) -> AttentionSpec:
    shape = _heads(model, heads, kv, dim, vdim)
    for part in (project, similarity, normaliser, merge, *modifiers):
        shape = part.fitted(shape) if vdim is None else shape
    if bias is not None:
        project, merge = _biased(bias, project, merge)
    return AttentionSpec(
        model=model,
        heads=shape,
        project=project,
        similarity=similarity,
        pattern=parse(pattern) if isinstance(pattern, str) else pattern,
        normaliser=normaliser,
        merge=merge,
        modifiers=tuple(modifiers),
        source=source,
    )


def _heads(model: int, heads: int, kv: int | None, dim: int | None, vdim: int | None) -> Heads:
    for name, size in (("model", model), ("heads", heads)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise SpecError(f"{name}={size!r} is not a size; give a whole number of at least 1")
    if dim is None and model % heads:
        ways = [n for n in range(1, model + 1) if model % n == 0]
        raise SpecError(f"a model of {model} does not divide among {heads} heads; use heads in {ways}, or say dim=")
    return Heads.grouped(q=heads, kv=kv, dim=model // heads if dim is None else dim, vdim=vdim)


def _biased(bias: str, project: Project, merge: Merge) -> tuple[Project, Merge]:
    if unknown := set(bias) - set("qkvo"):
        raise SpecError(f"bias={bias!r} names {sorted(unknown)[0]!r}; use letters of 'qkvo'")
    inner = "".join(letter for letter in "qkv" if letter in bias)
    fields = project.__dataclass_fields__
    if inner and "bias" not in fields:
        raise SpecError(f"{type(project).__name__} has no biases of its own; use bias='o' or bias=''")
    project = replace(project, bias=inner) if "bias" in fields else project  # pyright: ignore[reportCallIssue]
    return project, replace(merge, bias="o" if "o" in bias else "")  # pyright: ignore[reportCallIssue]


def _known(said: dict[str, Any], known: set[str]) -> dict[str, Any]:
    for name in said:
        if name not in known:
            raise SpecError(f"design has no {name!r}; {nearest(name, known)}")
    if missing := [name for name in ("model", "heads") if name not in said]:
        raise SpecError(f"design needs {' and '.join(missing)}; say {missing[0]}=...")
    return said


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


PRESETS: dict[str, Callable[..., AttentionSpec]] = {"mha": mha, "gqa": gqa, "mqa": mqa, "mla": mla}


def from_toml(text: str) -> AttentionSpec:
    """The spec that a TOML document describes; a choice it does not make is the usual one.

    >>> from_toml('model = 8\\nheads = {q = 2, dim = 4}') == design(model=8, heads=2)
    True
    """
    return _from_toml(text, USUAL)


def from_json(text: str) -> AttentionSpec:
    """The spec that a JSON document describes; a choice it does not make is the usual one."""
    return _from_json(text, USUAL)
