"""Int8 storage of keys and values, with one scale per head and token."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ..errors import SpecError, suggest
from ..spec.attention_spec import AttentionSpec
from .kv_cache import KVEntry

STORAGE_FORMATS = ("int8",)
INT8_MAX = 127  # symmetric range without -128, so that x and -x are rounded alike
SCALE_SUFFIX = ".scale"


def check_storage_format(spec: AttentionSpec, store: str | None) -> None:
    """Raise SpecError for an unknown storage format, or one that the layer does not support."""
    if store is None:
        return
    if store not in STORAGE_FORMATS:
        raise SpecError(f"storage_format={store!r} is unknown; {suggest(str(store), STORAGE_FORMATS)}")
    if spec.is_recurrent:
        raise SpecError(
            f"{store} storage does not support a recurrent state, whose sums over thousands of tokens do not fit; "
            "leave storage_format out"
        )


def quantise(entry: KVEntry, names: Collection[str]) -> KVEntry:
    """Quantise the named tensors to int8; each head's vector gets a scale of its largest magnitude / 127."""
    quantised = KVEntry(entry)
    for name in names:
        exact = entry[name].to(torch.promote_types(entry[name].dtype, torch.float32))
        scale = exact.abs().amax(-1) / INT8_MAX if exact.shape[-1] else exact.sum(-1)
        # A zero vector stays zero; a vector with an infinity or NaN becomes NaN when it is multiplied by its scale.
        quantised[name] = (exact / scale[..., None]).nan_to_num(0.0).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
        quantised[name + SCALE_SUFFIX] = scale.to(torch.float32)
    return quantised


def dequantise(entry: KVEntry, names: Collection[str], dtype: torch.dtype) -> KVEntry:
    """Convert quantised tensors back to `dtype` and drop their scales."""
    unquantised = {
        name: tensor
        for name, tensor in entry.items()
        if not name.endswith(SCALE_SUFFIX) or name[: -len(SCALE_SUFFIX)] not in names
    }
    return unquantised | {name: _dequantise_tensor(entry[name], entry[name + SCALE_SUFFIX], dtype) for name in names}


def _dequantise_tensor(quantised: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (quantised * scale[..., None]).to(dtype)
