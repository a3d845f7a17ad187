"""A spec or a model as those see it who serve it: attentions that are alike, other matrices, and all numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..blueprint import Block, Dense, Experts, Model, Nearly, Run
from ..blueprint.stack import LAYERS
from ..errors import SpecError
from ..spec import AttentionSpec
from .devices import stored

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Layers:
    """Attentions that are alike: so many layers have one. `reads` says of whom: "own" tokens, or a "source"."""

    name: str
    spec: AttentionSpec
    times: int = 1
    reads: str = "own"

    @property
    def shapes(self) -> Shapes:
        """The learned tensors of one that answered tokens meet; of a source, only its reading."""
        params, shapes = self.spec.params().items(), self.spec.shapes()
        early = "source" if self.reads == "source" else None
        return tuple(shapes[name] for name, p in params if p.learned and (not p.applied or p.applied != early))


@dataclass(frozen=True)
class Matrices:
    """What tokens meet outside attention: tensors that each token meets, and `active` of `count` experts."""

    name: str
    times: int
    always: Shapes
    each: Shapes = ()
    count: int = 0
    active: int = 0
    inside: int = 0  # numbers of one token that are alive in between, its input among them

    def flops(self, tokens: int) -> int:
        """Two for each number of a matrix and each token that meets it."""
        return 2 * tokens * (_numbers(self.always) + self.active * _numbers(self.each))

    def moved(self, tokens: int, dtype: str) -> int:
        """Bytes of the tensors that so many tokens meet, if no two choose the same expert while others are idle.

        >>> experts = Matrices("experts", 1, (), ((2, 5),), count=4, active=2)  # 40 bytes each
        >>> [experts.moved(tokens, "fp32") for tokens in (1, 2, 3)]
        [80, 160, 160]
        """
        return _bytes(self.always, dtype) + min(self.count, tokens * self.active) * _bytes(self.each, dtype)

    @property
    def flowing(self) -> int:
        """Numbers of one token that go into every matrix and come out of it."""
        return _ends(self.always) + self.active * _ends(self.each)


def attentions(described: AttentionSpec | Model, layers: int = 1) -> tuple[Layers, ...]:
    """The attentions that answer a token, alike ones together: a spec so many times, or a model's last stack.

    >>> import headwise as hw
    >>> [(each.name, each.times) for each in attentions(hw.design(preset="gqa"), layers=32)]
    [('attention', 32)]
    """
    if type(layers) is not int or not 1 <= layers <= LAYERS:
        raise SpecError(f"layers={layers!r} is no number of layers; give 1 to {LAYERS}")
    if isinstance(described, AttentionSpec):
        return (Layers("attention", described, layers, "own" if described.source is None else "source"),)
    if layers != 1:
        raise SpecError(f"layers={layers}, but {described.name} says its own layers; leave layers out")
    if described.kind not in ("decoder", "encoder-decoder"):
        raise SpecError(f"{described.name} is of kind {described.kind} and answers no token by token; give a decoder")
    stack = described.stacks[-1]
    found = Counter((name, spec) for block in stack.layers for name, spec in block.specs.items())
    return tuple(
        Layers(name, spec, times, "source" if name == "cross" else "own") for (name, spec), times in found.items()
    )


def matrices(described: AttentionSpec | Model) -> tuple[Matrices, ...]:
    """Feed-forwards of a model's last stack, alike ones together, and the first of its heads; a spec has none."""
    if isinstance(described, AttentionSpec):
        return ()
    stack = described.stacks[-1]
    feeds = Counter(block.feed for block in stack.layers if block.feed is not None)
    return (*(_feed(feed, times, stack.model) for feed, times in feeds.items()), *_head(described))


def _feed(feed: Dense | Experts, times: int, model: int) -> Matrices:
    if isinstance(feed, Dense):
        return Matrices("feed-forward", times, _shapes(feed, model), inside=model + _inside(feed))
    always = tuple(w.shape for w in feed.weights(model) if not w.name.startswith("each."))
    inside = model + max(feed.active * _inside(feed.each), _inside(feed.shared) if feed.shared else 0)
    each = _shapes(feed.each, model)
    return Matrices("experts", times, always, each, feed.count, feed.active, inside)


def _inside(feed: Dense) -> int:
    """Numbers of one token behind the first maps: what goes up, and beside it what gates it."""
    return feed.hidden * (len(feed.maps) - 1)


def _shapes(feed: Dense, model: int) -> Shapes:
    return tuple(w.shape for w in feed.weights(model))


def _head(model: Model) -> Iterator[Matrices]:
    for head in model.heads[:1]:
        width = head.transform.hidden if head.transform else model.stacks[-1].model
        table = ((head.outputs, width),) if head.table else ()
        own = tuple(w.shape for w in head.weights(model.stacks[-1].model) if w.learned)
        inside = model.stacks[-1].model + head.outputs
        yield Matrices("head", 1, (*own, *table), inside=inside)


def alive(spec: AttentionSpec) -> int:
    """Numbers of one token inside an attention, at least: its input, queries, what is remembered, what heads give."""
    core = spec.core
    kept = sum(math.prod(shape) for shape in spec.entry().values())
    return spec.model + len(core.keys) * core.dim + kept + len(core.values) * core.vdim


class Held(NamedTuple):
    """Learned numbers, and the bytes they take."""

    numbers: int
    bytes: int


def held(described: AttentionSpec | Model, dtype: str, layers: int = 1) -> Held:
    """All learned numbers of a spec in so many layers, or of a model: embeddings and encoders too.

    >>> import headwise as hw
    >>> held(hw.design(preset="gqa", model=4096, heads=32, kv=8), "bf16", layers=32)
    Held(numbers=1342177280, bytes=2684354560)
    """
    if isinstance(described, AttentionSpec):
        shapes, times = _learned(described), layers
    else:
        shapes, times = tuple(w.shape for w in described.weights() if w.learned), 1
    return Held(times * sum(map(math.prod, shapes)), times * sum(stored(shape, dtype) for shape in shapes))


def changed(
    described: AttentionSpec | Model, change: Callable[[AttentionSpec], AttentionSpec]
) -> AttentionSpec | Model:
    """The same with every attention that remembers its own tokens changed so."""
    if isinstance(described, AttentionSpec):
        return change(described)
    *before, last = described.stacks
    runs = tuple(Run(run.times, tuple(_changed(block, change) for block in run.blocks)) for run in last.runs)
    return replace(described, stacks=(*before, replace(last, runs=runs)))


def _changed(block: Block, change: Callable[[AttentionSpec], AttentionSpec]) -> Block:
    own = block.attention
    if isinstance(own, Nearly):
        return replace(block, attention=replace(own, like=change(own.like)))
    return replace(block, attention=own and change(own))


def _learned(spec: AttentionSpec) -> Shapes:
    params = spec.params()
    return tuple(shape for name, shape in spec.shapes().items() if params[name].learned)


def _numbers(shapes: Shapes) -> int:
    """Numbers of the matrices among them; vectors are added or scale."""
    return sum(math.prod(shape) for shape in shapes if len(shape) > 1)


def _ends(shapes: Shapes) -> int:
    return sum(math.prod(shape[:-1]) + shape[-1] for shape in shapes if len(shape) > 1)


def _bytes(shapes: Shapes, dtype: str) -> int:
    return sum(stored(shape, dtype) for shape in shapes)
