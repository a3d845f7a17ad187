"""Bytes that a block, or a whole model, keeps for the way back, put together from what its pieces keep."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..blueprint import Block, Experts, Model, Stack
from ..errors import SpecError
from ..spec import AttentionSpec
from . import around, textbook
from .around import Items, Place
from .bills import Bill
from .keeping import activations, layer, usual
from .symbols import Symbol

if TYPE_CHECKING:
    from .pricing import Load


@dataclass(frozen=True)
class Way:
    """How a model is trained: the profile of its attentions, what is computed anew, and how much is dropped.

    Without a profile each attention runs as it usually does on the device of the load. `source` is how many tokens
    an encoder reads for a decoder, if not as many.
    """

    profile: str = ""
    checkpoint: str = "none"
    dropout: float = 0.0
    source: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise SpecError(f"dropout={self.dropout!r} is no rate; give 0.1, say, or 0 for none")
        if self.source is not None and (type(self.source) is not int or self.source < 1):
            raise SpecError(f"source={self.source!r} is no length of a source; give a whole number of at least 1")


PLAIN = Way()
# Norms before a sublayer and behind it, by where a block has them.
PLACED = {"pre": (1, 0), "parallel": (0, 0), "abreast": (1, 0), "post": (0, 1), "after": (0, 1), "sandwich": (1, 1)}


def kept_by_block(described: Block, model: int, load: Load, way: Way = PLAIN) -> Bill:
    """What one block of this width keeps.

    A GPT block under a fused kernel, 16 b s h elements and a few numbers of each token (2205.05198 has 34 b s h
    bytes, with two masks of one byte):

    >>> import headwise as hw
    >>> from headwise.blueprint import Dense
    >>> block = Block(hw.design(model=64, heads=4, bias="qkvo"), feed=Dense(256, bias="ud"))
    >>> told = kept_by_block(block, 64, hw.Load(2, 10, "fp32"), Way("sdpa"))
    >>> told.total == 4 * 16 * 2 * 10 * 64 + 4 * 2 * 4 * 10 + 4 * 2 * 10 * 4
    True
    """
    if way.profile in textbook.PROFILES:
        _undropped(way)
        return Bill.of(textbook.items(described, model, load, (way.profile, way.checkpoint)))
    return Bill.of(_merged(_block(described, Symbol.of(model, "model"), load, way)))


def kept_by(described: AttentionSpec | Model, load: Load, way: Way = PLAIN) -> Bill:
    """What a layer keeps, or a whole model under the cross-entropy of its first head; equal blocks are one term.

    With checkpoint="block" every block keeps its input alone, and `peak` says what the way back adds.

    GPT-3 as the paper counts it, 96 (34 b s h + 5 b s^2 a) bytes:

    >>> import headwise as hw
    >>> gpt3 = {"model_type": "gpt2", "n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048}
    >>> kept_by(hw.families.read(gpt3), hw.Load(1, 2048), Way("paper-2022")).total
    275414777856
    """
    if isinstance(described, AttentionSpec):
        if way.dropout:
            raise SpecError(f"dropout={way.dropout} stands behind the branches of a block, and a layer alone has none")
        source = way.source if described.source else None
        return activations(described, load, way.profile, source=source, checkpoint=way.checkpoint)
    if way.profile in textbook.PROFILES:
        return _published(described, load, way)
    return Bill.of(_merged(_model(described, load, way)))


def peak(described: AttentionSpec | Model, load: Load, way: Way = PLAIN) -> int:
    """Bytes kept at the fullest moment of the way back: with checkpoints, the dearest block has all of its own again.

    >>> import headwise as hw
    >>> spec, load = hw.design(model=64, heads=4), hw.Load(1, 100)
    >>> peak(spec, load, Way("dense", "block")) == kept_by(spec, load, Way("dense")).total
    True
    """
    total, full, part, model = kept_by(described, load, way).total, replace(way, checkpoint="none"), way, described
    if way.checkpoint == "none":
        return total
    if isinstance(model, AttentionSpec):
        return kept_by(model, load, full).total
    rows = [(s, loaded(model, s, load, way), b) for s in model.stacks for b in dict.fromkeys(s.layers)]
    each = [kept_by_block(b, s.model, of, full).total - kept_by_block(b, s.model, of, part).total for s, of, b in rows]
    return total + max(each, default=0)


def _undropped(way: Way) -> None:
    if way.dropout:
        raise SpecError(f"profile {way.profile} has dropout everywhere already; leave dropout={way.dropout} out")


def _published(model: Model, load: Load, way: Way) -> Bill:
    _undropped(way)
    (stack, *more) = model.stacks
    if more or stack.embedding is None or stack.embedding.patches:
        raise SpecError(f"profile {way.profile} is of one stack of GPT blocks over tokens; use profile='sdpa'")
    return Bill.of(_merged(_layers(stack, load, way)))


def _block(described: Block, model: int, load: Load, way: Way) -> Items:
    """In the order of the way forth; what enters is the input of whoever keeps it first."""
    at = Place.of(load, load.context, way.profile or _profile(described, load), way.dropout)
    if way.checkpoint == "block":
        yield "input of the block", at.each * at.count * model
        return
    before, after = PLACED[described.placement]
    if described.placement == "parallel" and described.norms:
        yield from _norm("norm", described, model, at)
    branches = [name for name in described.sublayers if name not in described.still]
    for name in described.still:
        if f"{name}_norm" in described.norms:
            yield from _norm(f"{name}_norm", described, model, at)
    for name in branches:
        if before:
            held = list(_norm(f"{name}_norm", described, model, at))
            yield from held[1:] if described.placement == "abreast" and name != branches[0] else held
        alone = described.placement != "parallel" or name == branches[0]
        yield from _branch(name, described, model, (load, way, at), alone)
        if at.dropped:
            yield f"{name}.dropout mask", at.drop(at.count, model)
        if after:
            yield from _norm(f"{name}_norm" + "_after" * before, described, model, at)


def _profile(described: Block, load: Load) -> str:
    """How norms and masks are kept: as on the device of its attentions."""
    return next((usual(spec, load) for spec in described.specs.values()), "sdpa")


def _norm(name: str, described: Block, model: int, at: Place) -> Items:
    return ((f"{name}.{item}", size) for item, size in around.norm(described.norm, model, at.count, at))


def _branch(name: str, described: Block, model: int, how: tuple[Load, Way, Place], alone: bool) -> Items:
    """One branch; its input too, unless another has kept it. What a decoder reads is one for all its layers."""
    load, way, at = how
    if name == "feed":
        kept = _feed(described, model, at)
    else:
        spec, source = described.specs[name], None
        if name == "cross":
            spec, source = replace(spec, source=spec.source or spec.model), way.source
        kept = layer(spec, load, (way.profile or usual(spec, load), way.checkpoint), source).items()
    shared = {"source"} if alone else {"source", "input"}
    yield from ((f"{name}.{item}", size) for item, size in kept if item not in shared)


def _feed(described: Block, model: int, at: Place) -> Items:
    if isinstance(described.feed, Experts):
        yield from around.experts(described.feed, model, at)
    elif described.feed:
        yield "input", at.each * at.count * model
        yield from around.feed(described.feed, at.count, at)


def loaded(model: Model, stack: Stack, load: Load, way: Way) -> Load:
    """The load of one stack: an image has as many tokens as patches, an encoder as many as its source."""
    if stack.embedding and stack.embedding.patches:
        return replace(load, context=stack.embedding.patches.count + stack.embedding.first)
    if len(model.stacks) > 1 and stack is model.stacks[0]:
        return replace(load, context=way.source or load.context)
    return load


def _layers(stack: Stack, load: Load, way: Way) -> Items:
    """Every block, equal ones at once."""
    for block, times in Counter(stack.layers).items():
        if way.profile in textbook.PROFILES:
            items = textbook.items(block, stack.model, load, (way.profile, way.checkpoint))
        else:
            items = _block(block, Symbol.of(stack.model, "model"), load, way)
        yield from ((f"{stack.name}.*.{name}", Symbol.of(times, "layer") * size) for name, size in items if size)


def _model(model: Model, load: Load, way: Way) -> Items:
    for stack in model.stacks:
        told, width = loaded(model, stack, load, way), Symbol.of(stack.model, "model")
        profile = way.profile or next((usual(spec, told) for _, spec in model.specs()), "sdpa")
        at = Place.of(told, told.context, profile, way.dropout)
        if stack.embedding:
            yield from _under(f"{stack.name}.embedding", around.embedding(stack.embedding, width, at))
        yield from _layers(stack, told, way)
        if stack.norm:
            yield from _under(f"{stack.name}.norm", around.norm(stack.norm, width, at.count, at))
        if stack is not model.stacks[-1] and any(block.cross for block in model.stacks[-1].layers):
            yield f"{stack.name}.read by every layer", at.each * at.rows * Symbol.of(told.context, "t") * width
    for described in model.heads[:1]:
        yield from _under(f"head.{described.name}", around.head(described, width, at))


def _under(where: str, items: Items) -> Items:
    return ((f"{where}.{name}", size) for name, size in items)


def _merged(items: Items) -> Items:
    """Items of one name at once."""
    found: dict[str, int] = {}
    for name, size in items:
        found[name] = found[name] + size if name in found else size
    yield from found.items()


def profiles(described: AttentionSpec | Model, load: Load, way: Way = PLAIN) -> str:
    """The profile, or the profiles, that its attentions run under.

    >>> import headwise as hw
    >>> profiles(hw.design(preset="dcmha"), hw.Load())
    'composed'
    """
    if way.profile:
        return way.profile
    specs = [described] if isinstance(described, AttentionSpec) else [spec for _, spec in described.specs()]
    return " and ".join(dict.fromkeys(usual(spec, load) for spec in specs)) or "no attention"
