"""The roofline: what each operation of a call computes and moves, and how long that takes at least."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..terms import CallSize
from .bills import cached_numbers
from .devices import Device, dtype_bytes
from .reading import ForwardCall, AttentionComponent
from .whole import ModelComponent

OPERATION_LABELS = {"feed": "feed-forward"}  # of what is not named by its role


@dataclass(frozen=True)
class RooflineOperation:
    """One part of a call: its FLOPs, the bytes it moves, and what follows on a machine."""

    name: str
    flops: int
    moved: int
    seconds: float
    bound: str

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.moved if self.moved else 0.0


class LayerOperation(NamedTuple):
    """One operation of one layer, and how many layers have it."""

    name: str
    flops: int
    bytes_moved: int
    num_layers: int


def list_operations(components: Iterable[ModelComponent], call: ForwardCall, dtype: str, device: str) -> tuple[RooflineOperation, ...]:
    """Every operation of a call, that of all layers as one; layers run one after another."""
    every = [part for piece in components for part in _component_operations(piece, call, dtype_bytes(dtype)) if part.flops or part.bytes_moved]
    machine = Device.from_name(device)
    return tuple(
        _combine_layers(name, [part for part in every if part.name == name], machine, dtype)
        for name in dict.fromkeys(part.name for part in every)
    )


def merge_operations(name: str, some: Iterable[RooflineOperation]) -> RooflineOperation:
    """Several operations one after another; they wait for what most of the time is waited for."""
    every = list(some)
    waits = {bound: sum(one.seconds for one in every if one.bound == bound) for bound in ("compute", "memory")}
    return RooflineOperation(
        name,
        sum(one.flops for one in every),
        sum(one.moved for one in every),
        sum(one.seconds for one in every),
        max(waits, key=waits.__getitem__),
    )


def _combine_layers(name: str, parts: list[LayerOperation], machine: Device, dtype: str) -> RooflineOperation:
    return merge_operations(
        name,
        [
            RooflineOperation(
                name,
                part.num_layers * part.flops,
                part.num_layers * part.bytes_moved,
                part.num_layers * machine.min_seconds(part.flops, part.bytes_moved, dtype),
                machine.limiting_resource(part.flops, part.bytes_moved, dtype),
            )
            for part in parts
        ],
    )


def _component_operations(piece: ModelComponent, call: ForwardCall, each: int) -> Iterator[LayerOperation]:
    if not isinstance(piece, AttentionComponent):
        flops = sum(one.flops for one in piece.required_products(call))
        yield LayerOperation(OPERATION_LABELS.get(piece.role, piece.role), flops, each * piece.numbers_moved(call), piece.times)
        return
    work, spec = piece.work(call), piece.spec
    every = list(piece.required_products(call))
    core = sum(one.flops for one in every if one.name.startswith("core"))
    around = sum(one.flops for one in every) - core
    spoken = work.queries * (spec.heads.q * spec.core.dim + len(spec.score_head_of_row) * spec.core.vdim)
    told = work.new_tokens * spec.source if spec.source else 0
    moved = each * (piece.num_weights_read(call) + work.batch * (work.queries * 2 * spec.model + told))
    yield LayerOperation(f"{piece.role} projections", around, moved, piece.times)
    read = work.batch * (_cached_bytes_read(piece, work, call, each) + each * spoken)
    yield LayerOperation(f"{piece.role} core", core, read, piece.times)


def _cached_bytes_read(piece: AttentionComponent, work: CallSize, call: ForwardCall, each: int) -> int:
    """Bytes that one row reads of what is remembered: each token once, or its state in and out."""
    spec, heads = piece.spec, piece.spec.heads
    kept = cached_numbers(spec).total
    if spec.is_recurrent and call.mode == "steps":
        return 2 * kept * max(each, 4) * work.queries
    return work.keys * each * (heads.kv * heads.dim + heads.num_value_heads * heads.vdim if spec.is_recurrent else kept)
