"""What the transformers anchors stand on: a site is one attention layer of a model, beside ours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import headwise as hw


@dataclass
class Site:
    """One attention layer: what reads its input, what writes its output, and the layer as we spell
    it.

    `attends` is the part of the model that says its weights: "attentions" and the depth in it.
    """

    reads: nn.Module
    writes: nn.Module
    spec: hw.AttentionSpec
    weights: dict[str, Tensor]
    attends: tuple[str, int]
    inputs: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def layer(self) -> hw.Attention:
        """Our layer with the model's weights, in the precision of what it saw; a name too many is
        an error.
        """
        layer = hw.Attention(self.spec).to(self.inputs[0].dtype).eval()
        constants = {
            name: tensor for name, tensor in layer.named_buffers() if name not in self.weights
        }
        layer.load_state_dict(self.weights | constants)
        return layer

    def _read(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.inputs.append(args[0] if args else named["hidden_states"])
        source = named.get("key_value_states")
        if source is not None:
            self.sources.append(source)

    def _written(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.outputs.append(output[0] if isinstance(output, tuple) else output)

    def hooks(self) -> Iterator[RemovableHandle]:
        """What keeps what passes, call by call."""
        yield self.reads.register_forward_pre_hook(self._read, with_kwargs=True)
        yield self.writes.register_forward_hook(self._written)


@dataclass
class Model:
    """A model with its sites. `off` is how far it may be from us, relative to the largest number of
    an output.
    """

    model: nn.Module
    sites: list[Site]
    off: float

    @contextmanager
    def run_with_hooks(self) -> Iterator[None]:
        """Every site keeps what passes."""
        hooks = [hook for site in self.sites for hook in site.hooks()]
        yield
        for hook in hooks:
            hook.remove()


def randomised(model: nn.Module) -> nn.Module:
    """The model in float64 with numbers that matter: fresh biases are zero, and fresh weights so
    small that attention is nearly even.
    """
    model = model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, dtype=parameter.dtype)
            flat = parameter.dim() < 2 or "relative_attention_bias" in name
            parameter.copy_(
                parameter + 0.4 * noise if flat else noise * 1.5 / math.sqrt(parameter.shape[-1])
            )
    return model


def far(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    if ours.shape != theirs.shape:
        raise ValueError(f"ours is {tuple(ours.shape)} and theirs {tuple(theirs.shape)}")
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def linear(ours: str, theirs: nn.Module) -> dict[str, Tensor]:
    """One linear map under our name, with its bias if it has one."""
    bias = {} if theirs.bias is None else {f"{ours}_bias": theirs.bias.detach()}
    return {ours: theirs.weight.detach()} | bias


def projections(
    attention: nn.Module, names: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj")
) -> dict[str, Tensor]:
    ours = ("project.q", "project.k", "project.v", "output.o")
    return {
        k: w
        for our, name in zip(ours, names, strict=True)
        for k, w in linear(our, getattr(attention, name)).items()
    }


def blocks(model: nn.Module, spec: Any, weights: Any) -> list[Site]:
    """The sites of a decoder whose layers are `model.layers[n].self_attn`;
    `spec` takes the depth.
    """
    each = enumerate(layer.self_attn for layer in model.layers)
    return [Site(a, a, spec(depth), weights(a), ("attentions", depth)) for depth, a in each]
