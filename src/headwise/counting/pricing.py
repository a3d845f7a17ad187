"""What a layer costs before it runs: items, bytes, and seconds at least on a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..backends import Job, linear
from ..errors import SpecError
from ..spec import AttentionSpec
from ..terms import Work
from . import cache_bytes, work_of
from .bills import Bill, Term, backward, forward, parameters, remembered
from .devices import Device, bytes_of

LARGEST = 2**62  # tokens, rows: beyond it nobody can mean what they say


@dataclass(frozen=True)
class Load:
    """How much is asked of a layer: rows, tokens before the last one, precision, and the machine."""

    batch: int = 1
    context: int = 2048
    dtype: str = "bf16"
    device: str = "h200"

    def __post_init__(self) -> None:
        for name in ("batch", "context"):
            size = getattr(self, name)
            if type(size) is not int or not 1 <= size <= LARGEST:
                raise SpecError(f"{name}={size!r} is no load; give a whole number from 1 to {LARGEST}")
        bytes_of(self.dtype)
        Device.named(self.device)


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


@dataclass(frozen=True)
class Price:
    """One layer under one load."""

    name: str
    spec: AttentionSpec
    load: Load
    parameters: Bill
    prefill: Bill
    backward: Bill
    decode: Bill | None
    kept: Bill
    kept_bytes: int
    operations: Mapping[str, tuple[Operation, ...]]

    def seconds(self, phase: str) -> float:
        """Seconds at least of a phase: its operations one after the other."""
        return sum(operation.seconds for operation in self.operations[phase])

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        flops = {"prefill": self.prefill.total, "backward": self.backward.total}
        bills = {"parameters": self.parameters, "prefill": self.prefill, "backward": self.backward, "cache": self.kept}
        if self.decode is not None:
            flops["decode"], bills["decode"] = self.decode.total, self.decode
        core = self.operations["decode" if self.decode is not None else "prefill"][-1]
        return {
            "name": self.name,
            "params": self.parameters.total,
            "flops": flops,
            "kv_bytes_per_token": None if self._fixed else self.kept.total * bytes_of(self.load.dtype),
            "kv_bytes": self.kept_bytes,
            "intensity": core.intensity,
            "bound": core.bound,
            "operations": {
                phase: [{**vars(one), "intensity": one.intensity} for one in each]
                for phase, each in self.operations.items()
            },
            "terms": [{"bill": bill, **term._asdict()} for bill, each in bills.items() for term in each.terms],
        }

    @property
    def _fixed(self) -> bool:
        """Whether what is kept does not grow with the tokens, or nothing can be kept at all."""
        return self.spec.stateful or self.decode is None


def price(spec: AttentionSpec, load: Load, name: str = "") -> Price:
    """Everything a layer costs under a load; nothing is built.

    >>> import headwise as hw
    >>> gqa = price(hw.design(preset="gqa", model=4096, heads=32), Load(batch=16, context=32768))
    >>> gqa.kept.total * 2, gqa.operations["decode"][1].intensity  # bytes a token; 4 heads read each key
    (4096, 3.9995117783473697)
    """
    if spec.source is not None:
        raise SpecError(f"source={spec.source} is a sequence of a length that no load says; price the spec without it")
    whole = work_of(spec, batch=load.batch, queries=load.context)
    decodes = spec.pattern.opening == 0
    step = work_of(spec, batch=load.batch, queries=1, past=load.context - 1) if decodes else None
    held = cache_bytes(spec, batch=load.batch, capacity=load.context, bytes_each=bytes_of(load.dtype))
    phases = {"prefill": _operations(spec, whole, load)}
    if step is not None:
        phases["decode"] = _operations(spec, step, load)
    return Price(
        name=name,
        spec=spec,
        load=load,
        parameters=parameters(spec),
        prefill=_asked(spec, whole),
        backward=_asked(spec, whole, backward),
        decode=None if step is None else _asked(spec, step),
        kept=remembered(spec),
        kept_bytes=held if decodes else 0,
        operations=phases,
    )


def _asked(spec: AttentionSpec, work: Work, way: Callable[[AttentionSpec, Work], Bill] = forward) -> Bill:
    """What the spec asks for, in sums over tokens where these are the same function."""
    bill = way(spec, work)
    one = work.queries == 1
    job = Job(spec, spec.core_of(spec.form(one)), one=one, stated=one and spec.stateful)
    if spec.folder is None or linear.refuses(job):
        return bill
    # Backwards a product of two things that learn is two products; shares that no token has a say in do not learn.
    times = 2 if way is backward and spec.folder[1].features(job.core) else 1
    rest = tuple(term for term in bill.terms if not term.name.startswith("core"))
    how = "a reading of the state, and each chunk of tokens among itself"
    return Bill((*rest, Term("core (sums)", how, times * linear.spent(job, work))))


def _operations(spec: AttentionSpec, work: Work, load: Load) -> tuple[Operation, ...]:
    """Projections, which read weights, and the core, which reads what is remembered."""
    each, device = bytes_of(load.dtype), Device.named(load.device)
    bill, weights = _asked(spec, work), parameters(spec).total
    core = sum(term.value for term in bill.terms if term.name.startswith("core"))
    spoken = work.queries * (spec.heads.q * spec.core.dim + len(spec.voices) * spec.core.vdim)
    parts = [
        ("projections", bill.total - core, each * (weights + work.batch * work.queries * 2 * spec.model)),
        ("core", core, work.batch * (_read(spec, work, each) + each * spoken)),
    ]
    times = (
        (device.time(flops, moved, load.dtype), device.bound(flops, moved, load.dtype)) for _, flops, moved in parts
    )
    return tuple(Operation(*part, *time) for part, time in zip(parts, times, strict=True))


def _read(spec: AttentionSpec, work: Work, each: int) -> int:
    """Bytes that one row reads of what is remembered: each token once, or its state in and out."""
    kept, heads = remembered(spec).total, spec.heads
    if spec.stateful and work.queries == 1:
        return 2 * kept * max(each, 4)
    first, last = spec.pattern.memory
    keys = work.keys if last is None or work.queries > 1 else min(work.keys, first + last)
    return keys * each * (heads.kv * heads.dim + heads.v * heads.vdim if spec.stateful else kept)
