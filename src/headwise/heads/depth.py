"""Whether the states of a text's tokens become one over depth: of a model as it is, and along paths through it.

Attention alone brings all tokens together, doubly exponentially fast; what a layer adds to, feed-forwards, masks and
norms stand against that (2103.03404, 2405.18781).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import nearest
from ..hub.readable import readable
from ..models import Transformer
from ..models.block import Call, Layer
from ..module import Attention
from ..pattern import Pattern
from .folds import Folds
from .scene import Scene
from .table import Measure

STATES = {"encoder_hidden_states": "encoder", "decoder_hidden_states": "decoder", "hidden_states": "states"}
WITH = ("with", "without")


def residual(states: Tensor) -> float:
    """||X - 1 x^T|| / ||X|| of states [tokens, model], x their mean: 0 where all tokens are one, at most 1.

    >>> residual(torch.ones(3, 2)), residual(torch.tensor([[1.0], [-1.0]]))
    (0.0, 1.0)
    """
    x = states.double()
    return float((x - x.mean(0)).norm() / x.norm().clamp(min=1e-300))


def second(states: Tensor) -> float:
    """The second singular value of states [tokens, model] over the first: 0 where all are one up to scale.

    >>> second(torch.tensor([[1.0, 2.0], [2.0, 4.0]])) < 1e-9
    True
    """
    values = torch.linalg.svdvals(states.double())
    return float(values[1] / values[0].clamp(min=1e-300)) if len(values) > 1 else 0.0


class Depth(NamedTuple):
    """The states of one stack behind so many layers: how far tokens are from their mean, and from one direction."""

    stack: str
    layers: int
    residual: Measure
    second: Measure


@dataclass(frozen=True)
class Path:
    """A way through the layers of a model: what of them is there, and who reads whom instead of what the model says.

    `skip` is what each sublayer adds to, `feed` the feed-forward, `norm` all norms; each "with" or "without".
    """

    skip: str = "with"
    feed: str = "with"
    norm: str = "with"
    pattern: Pattern | None = None

    def __post_init__(self) -> None:
        for name in ("skip", "feed", "norm"):
            if (said := getattr(self, name)) not in WITH:
                raise ValueError(f"{name}={said!r} is unknown; {nearest(str(said), WITH)}")


def collapse(
    model: nn.Module, scenes: Iterable[Scene], *, path: Path | None = None, resamples: int = 1000, seed: int = 0
) -> tuple[Depth, ...]:
    """How alike the states of a text's tokens are before any layer and behind each, as means over texts.

    Of models of ours and of transformers, which count a norm behind the last layer as part of it; a `path` other than
    the model's own is of ours alone, from its embeddings on. The chance of each is what the embeddings have.
    """
    if path is not None and not isinstance(model, Transformer):
        raise ValueError(f"{type(model).__name__} runs on its own path alone; give a model of ours, as hw.load makes")
    kept: dict[tuple[str, int], Folds] = {}
    for number, scene in enumerate(scenes):
        for stack, states in _states(model, scene, path).items():
            for layers, each in enumerate(states):
                found = np.array([residual(each), second(each)])
                kept.setdefault((stack, layers), Folds()).add(number, found, 1.0)
    rows: list[Depth] = []
    for (stack, layers), folds in kept.items():
        told, first = folds.told(resamples, seed), kept[stack, 0].mean
        rows.append(Depth(stack, layers, told.at(0, float(first[0])), told.at(1, float(first[1]))))
    return tuple(rows)


def _states(model: nn.Module, scene: Scene, path: Path | None) -> Mapping[str, list[Tensor]]:
    """The states [tokens, model] of each stack before any layer and behind each."""
    given = readable(model, scene.given, 0)
    if isinstance(model, Transformer):
        with torch.inference_mode(), _listening(model) as heard:
            model(*given.places, **given.names)
            return {stack: _along(calls, path) for stack, calls in heard.items() if calls}
    with torch.inference_mode():
        said: Any = model(*given.places, **given.names, output_hidden_states=True)
    return {stack: [one[0] for one in said[key]] for key, stack in STATES.items() if key in said}


class Heard(NamedTuple):
    """One layer, what it was called with, and what it said."""

    layer: Layer
    x: Tensor
    call: Call
    said: Tensor


@contextmanager
def _listening(net: Transformer) -> Iterator[dict[str, list[Heard]]]:
    """What every layer of a model is called with while this lasts."""
    heard: dict[str, list[Heard]] = {stack: [] for stack in net.stacks}
    hooks: list[Any] = []
    for stack, layers in net.stacks.items():

        def hear(layer: Any, given: Any, said: Tensor, stack: str = stack) -> None:
            x, call = given
            heard[stack].append(Heard(layer, x, call, said))

        hooks += [layer.register_forward_hook(hear) for layer in layers.blocks]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def _along(calls: list[Heard], path: Path | None) -> list[Tensor]:
    """The states on the model's own path, or on another."""
    if path is None:
        return [calls[0].x[0], *(one.said[0] for one in calls)]
    states = [calls[0].x]
    for one in calls:
        states.append(_passed(one, states[-1], path))
    return [x[0] for x in states]


def _passed(one: Heard, x: Tensor, path: Path) -> Tensor:
    """What one layer makes of states on a path."""
    layer, norms = one.layer, path.norm == "with"
    if layer.placement not in ("pre", "post"):
        raise ValueError(f"norms of {layer.name} stand {layer.placement!r}; paths are of layers with 'pre' or 'post'")
    for name in layer.sublayers:
        if name == "feed" and path.feed == "without":
            continue
        if name in layer.still:
            raise ValueError(f"{layer.name}.{name} was cut away; paths are of layers that attend")
        norm: nn.Module = layer.get_submodule(f"{name}_norm") if norms else nn.Identity()
        z = norm(x) if layer.placement == "pre" else x
        y = layer.feed(z) if name == "feed" else _attended(one, name, z, path.pattern)
        x = x + y * layer.scale if path.skip == "with" else y * layer.scale
        x = norm(x) if layer.placement == "post" else x
    return x


def _attended(one: Heard, name: str, z: Tensor, pattern: Pattern | None) -> Tensor:
    """What one attention gives, with another pattern than its own if that is said; cross-attentions keep theirs."""
    attention, call = one.layer.attentions[name], one.call
    if name == "attention":
        if pattern is not None:
            attention = Attention(replace(attention.spec, pattern=pattern), shares=attention.weights)
        return attention(z, tokens=call.at)
    source = call.source
    return attention(z, source=attention.remember(source, tokens=call.told) if isinstance(source, Tensor) else source,
                     tokens=call.at)  # fmt: skip
