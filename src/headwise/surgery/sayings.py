"""What a model says of one text: its output, and its states behind every layer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..heads.saying import output_of
from ..hub.readable import Readable
from ..hub.running import Run
from ..models import Transformer


class Saying(NamedTuple):
    """The output of a model, and its states behind every layer by the layer's name, "decoder.3"."""

    output: Tensor
    states: Mapping[str, Tensor]


def saying(net: Transformer, given: Readable) -> Saying:
    """Both, of one call.

    >>> import headwise as hw
    >>> from headwise.hub.readable import readable
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2}), seed=0).eval()
    >>> said = saying(net, readable(net, torch.tensor([[3, 1, 4]]), 0))
    >>> said.output.shape, {name: states.shape for name, states in said.states.items()}
    (torch.Size([1, 3, 50257]), {'decoder.0': torch.Size([1, 3, 8]), 'decoder.1': torch.Size([1, 3, 8])})
    """
    states: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for stack in net.stacks.values():
            for layer in stack.blocks:
                hooks.callback(layer.register_forward_hook(partial(_keep, states, layer.name)).remove)
        return Saying(output(net, given), states)


def output(model: nn.Module, given: Readable) -> Tensor:
    """What a model says, if all of it is finite: of numbers that are not, nothing can be proven."""
    with torch.inference_mode():
        found = output_of(Run(model, given).said())
    if not bool(found.isfinite().all()):
        raise ValueError(f"{type(model).__name__} says numbers that are not finite; mend the model, or leave the text")
    return found


def _keep(states: dict[str, Tensor], name: str, module: nn.Module, given: Any, said: Tensor) -> None:
    states[name] = said
