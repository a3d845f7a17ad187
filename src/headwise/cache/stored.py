"""Keys and values as whole numbers of 8 bits, each head of each token with a scale of its own."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ..errors import SpecError, nearest
from ..spec import AttentionSpec
from .base import Entry

STORES = ("int8",)
LARGEST = 127  # -128 is left out, so that numbers and their negatives are rounded alike
SCALE = ".scale"


def check_store(spec: AttentionSpec, store: str | None) -> None:
    """Refuse a form in which nothing can be kept."""
    if store is None:
        return
    if store not in STORES:
        raise SpecError(f"store={store!r} is unknown; {nearest(str(store), STORES)}")
    if spec.stateful:
        raise SpecError(
            f"this layer remembers all past tokens as one state, whose sums of thousands do not fit {store}; "
            "leave store out"
        )


def rounded(entry: Entry, names: Collection[str]) -> Entry:
    """These of its tensors in 8 bits, with the scale of each head's vector: its largest number is 127 of them."""
    told = Entry(entry)
    for name in names:
        exact = entry[name].to(torch.promote_types(entry[name].dtype, torch.float32))
        scale = exact.abs().amax(-1) / LARGEST if exact.shape[-1] else exact.sum(-1)
        # A vector of zeros stays one; one with an infinity or NaN is NaN throughout: times its scale.
        told[name] = (exact / scale[..., None]).nan_to_num(0.0).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        told[name + SCALE] = scale.to(torch.float32)
    return told


def opened(entry: Entry, names: Collection[str], dtype: torch.dtype) -> Entry:
    """The numbers that are kept, in full again."""
    told = {name: held for name, held in entry.items() if not name.endswith(SCALE) or name[: -len(SCALE)] not in names}
    return told | {name: _opened(entry[name], entry[name + SCALE], dtype) for name in names}


def _opened(held: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (held * scale[..., None]).to(dtype)
