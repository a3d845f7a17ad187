"""Other models for one: with the same architecture and fresh weights, or with its weights as one of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import families
from ..errors import SpecError
from ..families import get_weight_names
from ..hub.checkpoint_weights import TensorInfo, build_from_weights
from ..models import Transformer, build

SAFETENSORS_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def make_random_baseline(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """The same architecture with weights as they are before training: what a measure says of no training at all.

    A model of ours is built anew from its description, one of transformers from its config; torch's own generator is
    left as it was.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... )
    >>> make_random_baseline(net, seed=1).spec == net.spec
    True
    """
    like = next(model.parameters(), torch.empty(0))
    if isinstance(model, Transformer):
        other: nn.Module = build(model.spec, seed=seed)
        other.usage = model.usage
    else:
        config: Any = getattr(model, "config", None)
        make = getattr(type(model), "_from_config", None)
        if config is None or make is None:
            fact = f"{type(model).__name__} keeps no description that it could be built from anew"
            raise ValueError(f"{fact}; make one with fresh weights and measure that beside it")
        cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(cards):
            torch.manual_seed(seed)
            other = make(config)
    return other.to(like.device, like.dtype).eval()


class ModelTensorSource:
    """The tensors of a model in memory, as if they lay in a file."""

    def __init__(self, model: nn.Module) -> None:
        self.path = Path(type(model).__name__)
        self._held = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo(tuple(tensor.shape), SAFETENSORS_DTYPES.get(tensor.dtype, str(tensor.dtype)))
            for name, tensor in self._held.items()
        }

    def iter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor."""
        yield from self._held.items()


def as_native_model(model: nn.Module) -> Transformer:
    """A model of transformers as one of ours with the same numbers, whatever was done to them since it was loaded; ours
    as it is.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}))
    >>> as_native_model(net) is net
    True
    """
    if isinstance(model, Transformer):
        return model
    as_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if as_dict is None:
        fact = f"the weights of {type(model).__name__} are not known by head: it keeps no config"
        raise SpecError(f"{fact}; give a model of hw.build or hw.load, or one of transformers")
    told: dict[str, Any] = as_dict() | {"architectures": [type(model).__name__]}
    described = families.read_model_spec(told)
    return build_from_weights(described, get_weight_names(described.name), ModelTensorSource(model), 0.0)
