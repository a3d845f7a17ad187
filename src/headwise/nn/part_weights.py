"""The tensors of one part, named as the part declared them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from torch import Tensor, nn

from ..errors import SpecError, suggest
from ..interfaces import Part
from ..interfaces.core_types import Param
from ..spec.attention_spec import AttentionSpec

NO_SHARED: Mapping[str, PartWeights] = MappingProxyType({})


def check_shared(spec: AttentionSpec, shares: Mapping[str, PartWeights]) -> None:
    """Raise SpecError if shared weights of another layer do not have the shapes that this spec declares."""
    parts = dict(spec.parts())
    for shared, owner in shares.items():
        name, _, tensor_name = shared.partition(".")
        declared = parts[name].params(spec) if name in parts else {}
        if name not in parts or (tensor_name and tensor_name not in declared):
            raise SpecError(f"this layer has no {shared!r} to share; {suggest(shared, [*parts, *spec.params()])}")
        sizes = spec.sizes_of(parts[name])
        for key, param in declared.items() if not tensor_name else [(tensor_name, declared[tensor_name])]:
            expected, actual = param.layout.shape(sizes), tuple(owner[key].shape) if key in owner else None
            if actual != expected:
                raise SpecError(
                    f"cannot share {name}.{key}: it is {list(expected)} in this layer and "
                    f"{actual and list(actual)} in the layer that owns it; use specs that declare equal shapes"
                )


def shared_within(shared: Mapping[str, PartWeights], part: str) -> dict[str, PartWeights]:
    """The single tensors of one part that are shared, by their names within the part."""
    return {name.removeprefix(f"{part}."): owner for name, owner in shared.items() if name.startswith(f"{part}.")}


class PartWeights(nn.Module):
    """Parameters and constants of one part; see `PartParams` for how parts read them.

    Tensors named in `borrowed` belong to another layer: they are used here, but saved and moved there.
    """

    def __init__(self, spec: AttentionSpec, part: Part, borrowed: Mapping[str, PartWeights] = NO_SHARED) -> None:
        super().__init__()
        self.sizes: Mapping[str, int] = spec.sizes_of(part)
        self._borrowed = dict(borrowed)
        params = part.params(spec)
        self._by_head = [name for name, param in params.items() if param.layout.dims[:1] == (("q",),)]
        self._scalars = [name for name in self._by_head if params[name].layout.axes == ("q",)]
        for name, param in params.items():
            if name not in borrowed:
                self._add(name, param)

    def _add(self, name: str, param: Param) -> None:
        tensor = param.init(param.layout.shape(self.sizes))
        if param.trainable:
            self.register_parameter(name, nn.Parameter(tensor))
        else:
            self.register_buffer(name, tensor)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._borrowed:
            return self._borrowed[name][name]
        tensor = self._parameters[name] if name in self._parameters else self._buffers[name]
        assert tensor is not None
        return tensor

    def trainable(self) -> list[Tensor]:
        """All parameters, including borrowed ones."""
        own = [t for t in self._parameters.values() if t is not None]
        return own + [owner[name] for name, owner in self._borrowed.items()]

    @property
    def first_parameter(self) -> Tensor:
        """The first parameter, from which callers read dtype and device."""
        return cast(Tensor, next(iter(self._parameters.values())))

    def __contains__(self, name: str) -> bool:
        return name in self._parameters or name in self._buffers or name in self._borrowed

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self._parameters, *self._buffers, *self._borrowed)

    def extra_repr(self) -> str:
        """Names and shapes, as `print(layer)` shows them."""
        every = {**self._parameters, **self._buffers}
        return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in every.items() if tensor is not None)

    def head(self, h: Any) -> Mapping[str, Tensor]:
        """All tensors; those with a leading axis of score heads are indexed by h."""
        return {n: self[n][h] if n in self._by_head else self[n] for n in self._names}

    def broadcast_over_scores(self) -> Mapping[str, Tensor]:
        """All tensors; those with one number per score head are shaped [H, 1, 1], to broadcast over s_BHTS."""
        return {n: self[n][:, None, None] if n in self._scalars else self[n] for n in self._names}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Constants move between devices but keep their dtype: angles and slopes rounded to bfloat16 would stand for
        # other positions.
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, before in exact.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self
