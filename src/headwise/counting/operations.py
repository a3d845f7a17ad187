"""The roofline: what each operation of a call computes and moves, and how long that takes at least."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..terms import Work
from .bills import remembered
from .devices import Device, bytes_of
from .reading import Call, Reader
from .whole import Piece

NAMES = {"feed": "feed-forward"}  # of what is not named by its role


@dataclass(frozen=True)
class Operation:
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


class Part(NamedTuple):
    """One operation of one layer, and how many layers have it."""

    name: str
    flops: int
    moved: int
    times: int


def operations(pieces: Iterable[Piece], call: Call, dtype: str, device: str) -> tuple[Operation, ...]:
    """Every operation of a call, that of all layers as one; layers run one after another."""
    every = [part for piece in pieces for part in _parts(piece, call, bytes_of(dtype)) if part.flops or part.moved]
    machine = Device.named(device)
    return tuple(
        _joined(name, [part for part in every if part.name == name], machine, dtype)
        for name in dict.fromkeys(part.name for part in every)
    )


def joined(name: str, some: Iterable[Operation]) -> Operation:
    """Several operations one after another; they wait for what most of the time is waited for."""
    every = list(some)
    waits = {bound: sum(one.seconds for one in every if one.bound == bound) for bound in ("compute", "memory")}
    return Operation(
        name,
        sum(one.flops for one in every),
        sum(one.moved for one in every),
        sum(one.seconds for one in every),
        max(waits, key=waits.__getitem__),
    )


def _joined(name: str, parts: list[Part], machine: Device, dtype: str) -> Operation:
    return joined(
        name,
        [
            Operation(
                name,
                part.times * part.flops,
                part.times * part.moved,
                part.times * machine.time(part.flops, part.moved, dtype),
                machine.bound(part.flops, part.moved, dtype),
            )
            for part in parts
        ],
    )


def _parts(piece: Piece, call: Call, each: int) -> Iterator[Part]:
    if not isinstance(piece, Reader):
        flops = sum(one.flops for one in piece.asked(call))
        yield Part(NAMES.get(piece.role, piece.role), flops, each * piece.numbers(call), piece.times)
        return
    work, spec = piece.work(call), piece.spec
    every = list(piece.asked(call))
    core = sum(one.flops for one in every if one.name.startswith("core"))
    around = sum(one.flops for one in every) - core
    spoken = work.queries * (spec.heads.q * spec.core.dim + len(spec.voices) * spec.core.vdim)
    told = work.remembered * spec.source if spec.source else 0
    moved = each * (piece.weights(call) + work.batch * (work.queries * 2 * spec.model + told))
    yield Part(f"{piece.role} projections", around, moved, piece.times)
    read = work.batch * (_read(piece, work, call, each) + each * spoken)
    yield Part(f"{piece.role} core", core, read, piece.times)


def _read(piece: Reader, work: Work, call: Call, each: int) -> int:
    """Bytes that one row reads of what is remembered: each token once, or its state in and out."""
    spec, heads = piece.spec, piece.spec.heads
    kept = remembered(spec).total
    if spec.stateful and call.way == "steps":
        return 2 * kept * max(each, 4) * work.queries
    return work.keys * each * (heads.kv * heads.dim + heads.v * heads.vdim if spec.stateful else kept)
