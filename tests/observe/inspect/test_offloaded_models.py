"""Models whose weights are loaded for the call of each module, as accelerate offloads them to the
host or to the disk: their parameters are on the meta device between calls.
"""

from __future__ import annotations

from functools import partial, update_wrapper
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from support.transformers_models import ZOO

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
TEXTS = ["a, b", "two to", "two x", "is it", "no one", "nine"]


def build() -> Any:
    llama = ZOO["llama"]
    keys = llama.keys | {"vocab_size": 256, "eos_token_id": None}
    return llama._replace(keys=keys).build().double()


def offload(model: nn.Module) -> nn.Module:
    """Offload every parameter with the attributes that hooks of accelerate 1.15 have
    (AlignDevicesHook).
    """
    for module in model.modules():
        weights = {name: p.detach() for name, p in module.named_parameters(recurse=False)}
        if not weights:
            continue

        def set_weights(module: nn.Module, tensors: dict[str, Tensor]) -> None:
            for name, tensor in tensors.items():
                module._parameters[name] = nn.Parameter(tensor, requires_grad=False)

        empty = {name: tensor.to("meta") for name, tensor in weights.items()}

        def forward(
            module: nn.Module, call: Any, weights: Any, empty: Any, *args: Any, **kwargs: Any
        ) -> Any:
            set_weights(module, weights)
            result = call(*args, **kwargs)
            set_weights(module, empty)
            return result

        own: Any = module
        own._hf_hook = SimpleNamespace(offload=True, place_submodules=False)
        own.forward = update_wrapper(
            partial(forward, module, module.forward, weights, empty), module.forward
        )
        set_weights(module, empty)
    return model


def ablated(model: nn.Module) -> Any:
    with hw.ablate(model, [(0, 1), (1, 2)]):
        return hw.run_model(model, {"input_ids": IDS}).logits


def traced(model: nn.Module) -> Any:
    trace = hw.trace(model, {"input_ids": IDS})
    return [
        trace.head_weights(layer.name, head)
        for layer in trace.layers
        for head in range(layer.heads)
    ]


def measured(model: nn.Module) -> Any:
    return [[*head.measures.values()] for head in hw.heads(model, TEXTS, tokenizer="bytes").heads]


@pytest.mark.parametrize("call", [ablated, traced, measured])
def test_offloaded_models_are_observed_and_ablated(call: Any):
    model = offload(build())
    assert all(parameter.is_meta for parameter in model.parameters())
    for own, expected in zip(call(model), call(build()), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-9, atol=1e-9)


def test_offloaded_weights_are_not_changed():
    model = offload(build())
    with pytest.raises(ValueError, match=r"is on the meta device; load the model without offload"):
        hw.prune(model, 0.5, TEXTS, tokenizer="bytes")
    with pytest.raises(ValueError, match="is on the meta device"):
        hw.get_circuits(model)


def test_a_model_without_weights_is_not_observed():
    model = build().to("meta")
    assert not any(site.observe.possible for site in hw.sites(model))
    with pytest.raises(ValueError, match="its weights are on the meta device"):
        hw.trace(model, {"input_ids": IDS})
