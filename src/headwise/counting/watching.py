"""What autograd keeps of a run until the way back: each memory once, under the step that kept it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .. import backends
from ..seams import Part
from ..spec import AttentionSpec

BACKENDS_PREFIX = f"{backends.__name__}."


@dataclass
class SavedTensor:
    """One memory that is kept: who kept it, its dtype, the shape of what lies in it, its bytes.

    `core` says that it was kept between queries, keys and values and what is read of them, and nowhere else.
    """

    step: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    in_core: bool

    @staticmethod
    def from_tensor(tensor: Tensor, step: str, core: bool = False) -> SavedTensor:
        """All that lies in the memory of this tensor, of which it may be a part."""
        return SavedTensor(step, tensor.dtype, _storage_shape(tensor), tensor.untyped_storage().nbytes(), core)


class SavedTensorRecorder:
    """Notes what is kept while it is on. Parameters and constants are there anyway and do not count.

    >>> import headwise as hw
    >>> layer, x = hw.Attention(hw.design(model=8, heads=2), backend="dense"), torch.randn(3, 5, 8)
    >>> with SavedTensorRecorder.over(layer) as watch:
    ...     y = layer(x)
    >>> watch.total == 4 * (5 * 3 * 5 * 8 + 2 * 3 * 2 * 5 * 5) + 2 * 5 * 5  # x, q, k, v, o; weights, masks
    True
    """

    def __init__(self, owned: Iterable[Tensor], steps: Mapping[int, str]) -> None:
        self.saved: dict[int, SavedTensor] = {}
        self.named: dict[int, str] = {}  # memories whose name is known better than by who kept them
        self._owned = {storage_address(tensor): tensor for tensor in owned}
        self.handed: Sequence[Tensor] = ()  # what a backend was handed
        self._steps, self._alive = steps, list[Tensor]()  # alive, so that no address is used twice
        self._hooks = saved_tensors_hooks(self._record, _identity)

    @staticmethod
    def for_module(net: nn.Module, spec: AttentionSpec | None = None) -> SavedTensorRecorder:
        """A watch over a module; with the spec of a layer, steps go by the names of its parts."""
        parts = {} if spec is None else {id(part): name for name, part in spec.parts()}
        return SavedTensorRecorder([*net.parameters(), *net.buffers()], parts)

    def __enter__(self) -> SavedTensorRecorder:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    @property
    def total_bytes(self) -> int:
        """All bytes that are kept."""
        return sum(saved.nbytes for saved in self.saved.values())

    def label_storage(self, tensor: Tensor, name: str) -> None:
        """Call this memory so, whoever keeps it."""
        self.named[storage_address(tensor)] = name
        self._alive.append(tensor)

    def _record(self, tensor: Tensor) -> Tensor:
        where = storage_address(tensor)
        if where in self._owned:
            return tensor
        step, core = self._current_part()
        if where in self.saved:
            self.saved[where].in_core &= core
            return tensor
        self._alive.append(tensor)
        self.saved[where] = SavedTensor.from_tensor(tensor, step, core)
        return tensor

    def tensors_by_step(self) -> list[SavedTensor]:
        """What was kept, in order, by the best name there is."""
        for where, saved in self.saved.items():
            saved.step = self.named.get(where, saved.step)
        return list(self.saved.values())

    def tensors_outside_core(self) -> list[SavedTensor]:
        """What would be kept if the core were computed anew on the way back: all but its own, and what it is handed."""
        self.tensors_by_step()
        kept = {where: saved for where, saved in self.saved.items() if not saved.in_core}
        handed = {storage_address(tensor): tensor for tensor in self.handed}
        return [
            *kept.values(),
            *(SavedTensor.from_tensor(handed[w], "core.inputs") for w in handed if w not in kept and w not in self._owned),
        ]

    def _current_part(self) -> tuple[str, bool]:
        """The part and the method of it that is running, asked of the interpreter; and whether in a backend."""
        frame, owner, step, core = sys._getframe(2), None, "", False
        while frame is not None:
            me = frame.f_locals.get("self")
            if isinstance(me, Part) and owner in (None, id(me)):
                owner = id(me)
                step = f"{self._steps.get(owner, type(me).__name__)}.{frame.f_code.co_name}"
            if frame.f_globals.get("__name__", "").startswith(BACKENDS_PREFIX):
                core = True
                self.handed = self.handed or iter_tensors(frame.f_locals.get("inputs"))
            frame = frame.f_back
        return step or ("attend" if core else "layer"), core


def storage_address(tensor: Tensor) -> int:
    """What tells one memory from another, on devices that have none too."""
    return tensor.untyped_storage()._cdata


def iter_tensors(told: Any) -> list[Tensor]:
    """Every tensor in what a call was handed."""
    if isinstance(told, Tensor):
        return [told]
    inside = told.values() if isinstance(told, Mapping) else told if isinstance(told, tuple) else ()
    return [tensor for item in inside for tensor in iter_tensors(item)]


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _storage_shape(tensor: Tensor) -> tuple[int, ...]:
    """The axes of all that lies in the memory of a tensor, of which it may be a part."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    base = tensor._base
    for told in (tensor, *(() if base is None else (base,))):
        if told.numel() == count:
            return tuple(told.shape)
    return (count,)
