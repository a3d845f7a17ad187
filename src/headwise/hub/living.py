"""A model of transformers that is already in memory, copied into one of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SpecError
from ..families import read_model_spec as described_by
from ..models import Transformer
from .hindering import unprunable_reason, unhookable_reason
from .maps import get_weight_names
from .reading import DTYPES, build_from_weights
from .tensors import TensorInfo


class LiveTensors:
    """The tensors of a live module, under the names that its files would have."""

    def __init__(self, where: str, held: Mapping[str, Tensor]) -> None:
        self.path, self._held = Path(where), held
        words = {dtype: word for word, dtype in DTYPES.items()}
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo(tuple(tensor.shape), words.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")))
            for name, tensor in held.items()
        }

    def iter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, one at a time."""
        for name, tensor in self._held.items():
            yield name, tensor.detach().cpu().contiguous()


def copy_live_model(model: nn.Module) -> Transformer:
    """A model of ours that says what a live one of transformers says, with tensors of its own, on the CPU.

    One whose files no map reads, or whose weights are not plain numbers, is refused with the reason.

    >>> copy_live_model(nn.Linear(2, 2))
    Traceback (most recent call last):
    headwise.errors.SpecError: Linear has no config that says what it is; give a model of transformers, or its folder
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or getattr(config, "model_type", None) is None:
        raise SpecError(f"{name} has no config that says what it is; give a model of transformers, or its folder")
    if why := unhookable_reason(model, [model]) or unprunable_reason([model]):
        raise SpecError(f"{name} cannot be copied: {why}")
    keys: dict[str, Any] = config.to_dict() | {"architectures": [name]}
    described = described_by(keys)
    names = get_weight_names(described.name)
    with torch.no_grad():
        return build_from_weights(described, names, LiveTensors(name, _named_as_in_files(model)), 0.0)


def _named_as_in_files(model: Any) -> Mapping[str, Tensor]:
    """Its tensors by the names of its files, which are others than in memory for some."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before its fifth version, files and memory used the same names
        return model.state_dict()
    return revert_weight_conversion(model, model.state_dict())
