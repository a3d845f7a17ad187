"""Randomly initialised baselines of a model, and transformers models rebuilt as headwise models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...hub.checkpoint_weights import build_from_weights, wrap_tensors
from ...hub.transformers_loading import without_hub_kernels
from ...models import Transformer, build, families
from ...models.families import get_weight_names
from ...util.errors import SpecError


def make_random_baseline(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Return a model of the same architecture with freshly initialised weights: what a measure
    finds without any training.

    A headwise model is rebuilt from its spec, a transformers model from its config. Torch's global
    generator is not changed.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> make_random_baseline(net, seed=1).spec == net.spec
    True
    """
    parameter = next(model.parameters(), torch.empty(0))
    if isinstance(model, Transformer):
        baseline: nn.Module = build(model.spec, seed=seed)
        baseline.usage = model.usage
    else:
        config: Any = getattr(model, "config", None)
        from_config = getattr(type(model), "_from_config", None)
        if config is None or from_config is None:
            fact = (
                f"cannot rebuild {type(model).__name__} with random weights: it has neither a "
                "spec nor a config"
            )
            raise ValueError(f"{fact}; build a randomly initialised one yourself and measure both")
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            with without_hub_kernels():
                baseline = from_config(config)
    return baseline.to(parameter.device, parameter.dtype).eval()


def as_native_model(model: nn.Module) -> Transformer:
    """Return a transformers model as a headwise model with its current weights; a headwise model is
    returned as it is.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    ...     )
    ... )
    >>> as_native_model(net) is net
    True
    """
    if isinstance(model, Transformer):
        return model
    as_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if as_dict is None:
        fact = f"cannot read the weights of {type(model).__name__} by head: it has no config"
        raise SpecError(f"{fact}; use a model of hw.build, of hw.load or of transformers")
    config: dict[str, Any] = as_dict() | {"architectures": [type(model).__name__]}
    spec = families.read_model_spec(config)
    source = wrap_tensors(type(model).__name__, model.state_dict())
    return build_from_weights(spec, get_weight_names(spec.name), source, 0.0)
