"""Randomly initialised baselines of a model, and transformers models rebuilt as headwise models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...hub.checkpoint_weights import TensorInfo, build_from_weights
from ...hub.transformers_loading import without_hub_kernels
from ...models import Transformer, build, families
from ...models.families import get_weight_names
from ...util.errors import SpecError

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


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


class ModelTensorSource:
    """Tensors of a model in memory, with the interface of a checkpoint file."""

    def __init__(self, model: nn.Module) -> None:
        self.path = Path(type(model).__name__)
        self._tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo(
                tuple(tensor.shape), SAFETENSORS_DTYPES.get(tensor.dtype, str(tensor.dtype))
            )
            for name, tensor in self._tensors.items()
        }

    def iter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its name."""
        yield from self._tensors.items()


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
    return build_from_weights(spec, get_weight_names(spec.name), ModelTensorSource(model), 0.0)
