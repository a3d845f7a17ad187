"""What a model says of one text: its output, and its states behind every layer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..heads.saying import get_output_tensor
from ..hub.readable import ModelInputs
from ..hub.running import ModelRun
from ..models import Transformer


class OutputAndStates(NamedTuple):
    """The output of a model, and its states behind every layer by the layer's name, "decoder.3"."""

    output: Tensor
    states: Mapping[str, Tensor]


def compute_output_and_states(net: Transformer, given: ModelInputs) -> OutputAndStates:
    """Both, of one call.

    >>> import headwise as hw
    >>> from headwise.hub.num_readable import readable
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2}), seed=0).eval()
    >>> said = compute_output_and_states(net, readable(net, torch.tensor([[3, 1, 4]]), 0))
    >>> said.output.shape, {name: states.shape for name, states in said.states.items()}
    (torch.Size([1, 3, 50257]), {'decoder.0': torch.Size([1, 3, 8]), 'decoder.1': torch.Size([1, 3, 8])})
    """
    states: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for stack in net.stacks.values():
            for layer in stack.blocks:
                hooks.callback(layer.register_forward_hook(partial(_store_state, states, layer.name)).remove)
        return OutputAndStates(compute_output(net, given), states)


def compute_output(model: nn.Module, given: ModelInputs) -> Tensor:
    """What a model says, if all of it is finite: of numbers that are not, nothing can be proven."""
    with torch.inference_mode():
        found = get_output_tensor(ModelRun(model, given).run())
    if not bool(found.isfinite().all()):
        raise ValueError(f"{type(model).__name__} says numbers that are not finite; mend the model, or leave the text")
    return found


def _store_state(states: dict[str, Tensor], name: str, module: nn.Module, given: Any, said: Tensor) -> None:
    states[name] = said
