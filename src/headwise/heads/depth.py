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

from ..errors import suggest
from ..hub.readable import prepare_inputs
from ..models import Transformer
from ..models.block import Call, Layer
from ..module import Attention
from ..pattern import Pattern
from .folds import FoldedSums
from .scene import Example
from .table import Measure

HIDDEN_STATE_FIELDS = {"encoder_hidden_states": "encoder", "decoder_hidden_states": "decoder", "hidden_states": "states"}
PATH_CHOICES = ("with", "without")


def rank_one_residual(states: Tensor) -> float:
    """||X - 1 x^T|| / ||X|| of states [tokens, model], x their mean: 0 where all tokens are one, at most 1.

    >>> rank_one_residual(torch.ones(3, 2)), rank_one_residual(torch.tensor([[1.0], [-1.0]]))
    (0.0, 1.0)
    """
    x = states.double()
    return float((x - x.mean(0)).norm() / x.norm().clamp(min=1e-300))


def singular_value_ratio(states: Tensor) -> float:
    """The second singular value of states [tokens, model] over the first: 0 where all are one up to scale.

    >>> singular_value_ratio(torch.tensor([[1.0, 2.0], [2.0, 4.0]])) < 1e-9
    True
    """
    values = torch.linalg.svdvals(states.double())
    return float(values[1] / values[0].clamp(min=1e-300)) if len(values) > 1 else 0.0


class DepthSimilarity(NamedTuple):
    """The states of one stack behind so many layers: how far tokens are from their mean, and from one direction."""

    stack: str
    layers: int
    residual: Measure
    second: Measure


@dataclass(frozen=True)
class ForwardVariant:
    """A way through the layers of a model: what of them is there, and who reads whom instead of what the model says.

    `skip` is what each sublayer adds to, `feed` the feed-forward, `norm` all norms; each "with" or "without".
    """

    skip: str = "with"
    feed: str = "with"
    norm: str = "with"
    pattern: Pattern | None = None

    def __post_init__(self) -> None:
        for name in ("skip", "feed", "norm"):
            if (said := getattr(self, name)) not in PATH_CHOICES:
                raise ValueError(f"{name}={said!r} is unknown; {suggest(str(said), PATH_CHOICES)}")


def measure_rank_collapse(
    model: nn.Module, examples: Iterable[Example], *, variant: ForwardVariant | None = None, num_resamples: int = 1000, seed: int = 0
) -> tuple[DepthSimilarity, ...]:
    """How alike the states of a text's tokens are before any layer and behind each, as means over texts.

    Of models of ours and of transformers, which count a norm behind the last layer as part of it; a `path` other than
    the model's own is of ours alone, from its embeddings on. The chance of each is what the embeddings have.
    """
    if variant is not None and not isinstance(model, Transformer):
        raise ValueError(f"{type(model).__name__} runs on its own path alone; give a model of ours, as hw.load makes")
    kept: dict[tuple[str, int], FoldedSums] = {}
    for number, scene in enumerate(examples):
        for stack, states in _layer_states(model, scene, variant).items():
            for layers, each in enumerate(states):
                found = np.array([rank_one_residual(each), singular_value_ratio(each)])
                kept.setdefault((stack, layers), FoldedSums()).add(number, found, 1.0)
    rows: list[DepthSimilarity] = []
    for (stack, layers), folds in kept.items():
        told, first = folds.mean_intervals(num_resamples, seed), kept[stack, 0].mean
        rows.append(DepthSimilarity(stack, layers, told.measure_at(0, float(first[0])), told.measure_at(1, float(first[1]))))
    return tuple(rows)


def _layer_states(model: nn.Module, scene: Example, path: ForwardVariant | None) -> Mapping[str, list[Tensor]]:
    """The states [tokens, model] of each stack before any layer and behind each."""
    given = prepare_inputs(model, scene.model_inputs, 0)
    if isinstance(model, Transformer):
        with torch.inference_mode(), _record_layer_calls(model) as heard:
            model(*given.args, **given.kwargs)
            return {stack: _run_variant(calls, path) for stack, calls in heard.items() if calls}
    with torch.inference_mode():
        said: Any = model(*given.args, **given.kwargs, output_hidden_states=True)
    return {stack: [one[0] for one in said[key]] for key, stack in HIDDEN_STATE_FIELDS.items() if key in said}


class RecordedLayerCall(NamedTuple):
    """One layer, what it was called with, and what it said."""

    layer: Layer
    x: Tensor
    call: Call
    output: Tensor


@contextmanager
def _record_layer_calls(net: Transformer) -> Iterator[dict[str, list[RecordedLayerCall]]]:
    """What every layer of a model is called with while this lasts."""
    heard: dict[str, list[RecordedLayerCall]] = {stack: [] for stack in net.stacks}
    hooks: list[Any] = []
    for stack, layers in net.stacks.items():

        def hear(layer: Any, given: Any, said: Tensor, stack: str = stack) -> None:
            x, call = given
            heard[stack].append(RecordedLayerCall(layer, x, call, said))

        hooks += [layer.register_forward_hook(hear) for layer in layers.blocks]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def _run_variant(calls: list[RecordedLayerCall], variant: ForwardVariant | None) -> list[Tensor]:
    """The states on the model's own path, or on another."""
    if variant is None:
        return [calls[0].x[0], *(one.output[0] for one in calls)]
    states = [calls[0].x]
    for one in calls:
        states.append(_run_layer_variant(one, states[-1], variant))
    return [x[0] for x in states]


def _run_layer_variant(one: RecordedLayerCall, x: Tensor, path: ForwardVariant) -> Tensor:
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
        y = layer.feed(z) if name == "feed" else _run_attention_variant(one, name, z, path.pattern)
        x = x + y * layer.scale if path.skip == "with" else y * layer.scale
        x = norm(x) if layer.placement == "post" else x
    return x


def _run_attention_variant(one: RecordedLayerCall, name: str, z: Tensor, pattern: Pattern | None) -> Tensor:
    """What one attention gives, with another pattern than its own if that is said; cross-attentions keep theirs."""
    attention, call = one.layer.attentions[name], one.call
    if name == "attention":
        if pattern is not None:
            attention = Attention(replace(attention.spec, pattern=pattern), shared=attention.weights)
        return attention(z, tokens=call.at)
    source = call.source
    return attention(z, source=attention.project_source(source, sequence=call.told) if isinstance(source, Tensor) else source,
                     tokens=call.at)  # fmt: skip
