"""Bytes kept for the way back as published: formulas for one block, in half precision with masks of one byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..blueprint import BlockSpec, FeedForwardSpec
from ..errors import SpecError
from ..presets import design
from ..spec import AttentionSpec
from ..terms import Phase
from .around import NamedBytes
from .symbols import SymbolicInt

if TYPE_CHECKING:
    from .pricing import Workload

FORMULA_PROFILES = ("paper-2022", "zhihu-624740065")


def formula_layer_bytes(spec: AttentionSpec, load: Workload, how: tuple[str, str]) -> NamedBytes:
    """The attention's part, 11 b s h + 5 b s^2 a; `how` is the profile, and what is computed anew.

    >>> import headwise as hw
    >>> told = dict(formula_layer_bytes(hw.design(model=12288, heads=96), hw.Workload(1, 2048), ("paper-2022", "none")))
    >>> sum(told.values()) == 11 * 2048 * 12288 + 5 * 2048**2 * 96
    True
    """
    check_formula_applies(spec, load, how[0])
    yield from _formula_attention_bytes(_symbolic_sizes(spec.model, spec.heads.q, load), how)


def formula_block_bytes(described: BlockSpec, model: int, load: Workload, how: tuple[str, str]) -> NamedBytes:
    """A whole block, 34 b s h + 5 b s^2 a: its attention, a feed-forward 4 h wide, two norms, dropout everywhere."""
    (profile, checkpoint), spec, feed = how, described.attention, described.feed
    if not isinstance(spec, AttentionSpec) or described.cross is not None:
        raise SpecError(f"profile {profile} is of blocks with one self-attention; use profile='sdpa'")
    check_formula_applies(spec, load, profile)
    plain = isinstance(feed, FeedForwardSpec) and (feed.form, feed.hidden) == ("plain", 4 * model)
    if not plain or described.norm.kind != "layer" or described.placement not in ("pre", "post"):
        raise SpecError(
            f"profile {profile} is of GPT blocks: two layer norms and a plain feed-forward of 4 x {model}; "
            "use profile='sdpa'"
        )
    sizes = b, s, h, _ = _symbolic_sizes(model, spec.heads.q, load)
    yield from _formula_attention_bytes(sizes, how)
    if checkpoint != "block":
        yield "feed-forward", 19 * b * s * h
        yield "norms", 4 * b * s * h


def check_formula_applies(spec: AttentionSpec, load: Workload, profile: str) -> None:
    """Refuse what the formulas were not written for."""
    heads = spec.heads
    plain = design(model=spec.model, heads=heads.q, dim=heads.dim, pattern=spec.pattern)
    alike = (spec.project.uses_head_dims, type(spec.similarity), type(spec.normaliser), type(spec.merge), spec.source)
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


def _symbolic_sizes(model: int, heads: int, load: Workload) -> tuple[int, int, int, int]:
    told = {"b": load.batch, "s": load.context, "h": model, "a": heads}
    b, s, h, a = (SymbolicInt.of(size, letter) for letter, size in told.items())
    return b, s, h, a


def _formula_attention_bytes(sizes: tuple[int, int, int, int], how: tuple[str, str]) -> NamedBytes:
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
