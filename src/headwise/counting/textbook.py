"""Bytes kept for the way back as published: formulas for one block, in half precision with masks of one byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..blueprint import Block, Dense
from ..errors import SpecError
from ..presets import design
from ..spec import AttentionSpec
from ..terms import Phase
from .around import Items
from .symbols import Symbol

if TYPE_CHECKING:
    from .pricing import Load

PROFILES = ("paper-2022", "zhihu-624740065")


def layer(spec: AttentionSpec, load: Load, how: tuple[str, str]) -> Items:
    """The attention's part, 11 b s h + 5 b s^2 a; `how` is the profile, and what is computed anew.

    >>> import headwise as hw
    >>> told = dict(layer(hw.design(model=12288, heads=96), hw.Load(1, 2048), ("paper-2022", "none")))
    >>> sum(told.values()) == 11 * 2048 * 12288 + 5 * 2048**2 * 96
    True
    """
    check(spec, load, how[0])
    yield from _attention(_letters(spec.model, spec.heads.q, load), how)


def items(described: Block, model: int, load: Load, how: tuple[str, str]) -> Items:
    """A whole block, 34 b s h + 5 b s^2 a: its attention, a feed-forward 4 h wide, two norms, dropout everywhere."""
    (profile, checkpoint), spec, feed = how, described.attention, described.feed
    if not isinstance(spec, AttentionSpec) or described.cross is not None:
        raise SpecError(f"profile {profile} is of blocks with one self-attention; use profile='sdpa'")
    check(spec, load, profile)
    plain = isinstance(feed, Dense) and (feed.form, feed.hidden) == ("plain", 4 * model)
    if not plain or described.norm.kind != "layer" or described.placement not in ("pre", "post"):
        raise SpecError(
            f"profile {profile} is of GPT blocks: two layer norms and a plain feed-forward of 4 x {model}; "
            "use profile='sdpa'"
        )
    sizes = b, s, h, _ = _letters(model, spec.heads.q, load)
    yield from _attention(sizes, how)
    if checkpoint != "block":
        yield "feed-forward", 19 * b * s * h
        yield "norms", 4 * b * s * h


def check(spec: AttentionSpec, load: Load, profile: str) -> None:
    """Refuse what the formulas were not written for."""
    heads = spec.heads
    plain = design(model=spec.model, heads=heads.q, dim=heads.dim, pattern=spec.pattern)
    alike = (spec.project.plain, type(spec.similarity), type(spec.normaliser), type(spec.merge), spec.source)
    drops = all(modifier.phase is Phase.WEIGHTS and not modifier.params(spec) for modifier in spec.modifiers)
    usual = (True, type(plain.similarity), type(plain.normaliser), type(plain.merge), None)
    if (
        alike != usual
        or heads.kv != heads.q
        or heads.q * heads.dim != spec.model
        or heads.vdim != heads.dim
        or not drops
    ):
        raise SpecError(
            f"profile {profile} is of plain multi-head attention, as wide as its model; "
            "use profile='dense', 'sdpa' or 'flash-cuda'"
        )
    if load.dtype == "fp32":
        raise SpecError(f"profile {profile} is of numbers of 2 bytes, not fp32; use dtype='bf16' or 'fp16'")


def _letters(model: int, heads: int, load: Load) -> tuple[int, int, int, int]:
    told = {"b": load.batch, "s": load.context, "h": model, "a": heads}
    b, s, h, a = (Symbol.of(size, letter) for letter, size in told.items())
    return b, s, h, a


def _attention(sizes: tuple[int, int, int, int], how: tuple[str, str]) -> Items:
    """2205.05198, section 4.1; the article keeps what goes into the softmax where the paper keeps what comes out."""
    (b, s, h, a), (profile, checkpoint) = sizes, how
    yield "input", 2 * b * s * h
    if checkpoint == "block":
        return
    yield "queries and keys", 4 * b * s * h
    yield "values", 2 * b * s * h
    if checkpoint == "none":
        side = "output" if profile == "paper-2022" else "input"
        yield f"softmax {side}", 2 * b * s**2 * a
        yield "softmax dropout mask", b * s**2 * a
        yield "dropped weights", 2 * b * s**2 * a
    yield "input of the projection", 2 * b * s * h
    yield "dropout mask", b * s * h
