"""Keys and values as whole numbers of 8 bits, each head of each token with a scale of its own."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ..errors import SpecError, suggest
from ..spec.attention_spec import AttentionSpec
from .kv_cache import KVEntry

STORAGE_FORMATS = ("int8",)
INT8_MAX = 127  # -128 is left out, so that numbers and their negatives are rounded alike
SCALE_SUFFIX = ".scale"


def check_storage_format(spec: AttentionSpec, store: str | None) -> None:
    """Refuse a form in which nothing can be kept."""
    if store is None:
        return
    if store not in STORAGE_FORMATS:
        raise SpecError(f"store={store!r} is unknown; {suggest(str(store), STORAGE_FORMATS)}")
    if spec.is_recurrent:
        raise SpecError(
            f"this layer remembers all past tokens as one state, whose sums of thousands do not fit {store}; "
            "leave store out"
        )


def quantise(entry: KVEntry, names: Collection[str]) -> KVEntry:
    """These of its tensors in 8 bits, with the scale of each head's vector: its largest number is 127 of them."""
    told = KVEntry(entry)
    for name in names:
        exact = entry[name].to(torch.promote_types(entry[name].dtype, torch.float32))
        scale = exact.abs().amax(-1) / INT8_MAX if exact.shape[-1] else exact.sum(-1)
        # A vector of zeros stays one; one with an infinity or NaN is NaN throughout: times its scale.
        told[name] = (exact / scale[..., None]).nan_to_num(0.0).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
        told[name + SCALE_SUFFIX] = scale.to(torch.float32)
    return told


def dequantise(entry: KVEntry, names: Collection[str], dtype: torch.dtype) -> KVEntry:
    """The numbers that are kept, in full again."""
    told = {
        name: held
        for name, held in entry.items()
        if not name.endswith(SCALE_SUFFIX) or name[: -len(SCALE_SUFFIX)] not in names
    }
    return told | {name: _dequantise_tensor(entry[name], entry[name + SCALE_SUFFIX], dtype) for name in names}


def _dequantise_tensor(held: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (held * scale[..., None]).to(dtype)
