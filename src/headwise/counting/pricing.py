"""What a layer or a model costs before it runs: items, bytes, and seconds at least on a machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError
from ..spec import AttentionSpec
from . import cache_bytes
from .bills import Bill, remembered
from .calls import Load, calls_of, counted, spent
from .devices import Device, bytes_of
from .nets import Way, kept_by
from .operations import Operation, joined, operations
from .reading import Call, On, Reader
from .scopes import unsaid
from .symbols import Symbol
from .whole import Described, Piece, active, parameters, pieces

__all__ = ["Load", "Price", "price"]


@dataclass(frozen=True)
class Price:
    """One layer, or one model, under one load.

    Bills say what is asked for; `spent` and `counted` the totals of the same calls as a backend executes and as torch's
    counter sees them. `kept` are numbers of one token (of a state, all of it), `told` of one token of a source;
    `kept_each` is bytes that one more token adds while no window is full, None where it adds none.
    """

    name: str
    described: Described
    load: Load
    whole: Call
    parameters: Bill
    active: int
    calls: Mapping[str, Bill]
    spent: Mapping[str, int | None]
    counted: Mapping[str, int | None]
    kept: Bill
    told: Bill
    kept_each: int | None
    kept_bytes: int
    operations: Mapping[str, tuple[Operation, ...]]
    notes: tuple[str, ...] = ()

    @property
    def prefill(self) -> Bill:
        """FLOPs of all tokens at once."""
        return self.calls["prefill"]

    @property
    def backward(self) -> Bill:
        """FLOPs of the gradients behind them."""
        return self.calls["backward"]

    @property
    def decode(self) -> Bill | None:
        """FLOPs of the last token alone, the others remembered; None where that is not the same."""
        return self.calls.get("decode")

    @property
    def flops(self) -> dict[str, int | None]:
        """FLOPs asked for in every call."""
        return _written({call: bill.total for call, bill in self.calls.items()})

    @property
    def told_each(self) -> int | None:
        """Bytes that every token of the source adds; None where nothing reads one."""
        return self.told.total * bytes_of(self.load.dtype) or None

    @property
    def specs(self) -> dict[str, AttentionSpec]:
        """Every attention that differs from those before it, by where it stands."""
        found = {p.spec: p for p in reversed(pieces(self.described)) if isinstance(p, Reader)}
        return {piece.name or self.name: spec for spec, piece in reversed(found.items())}

    def seconds(self, phase: str) -> float:
        """Seconds at least of a phase: its operations one after the other."""
        return self.step(phase).seconds

    def step(self, phase: str) -> Operation:
        """All operations of a phase as one."""
        return joined(phase, self.operations[phase])

    @property
    def core(self) -> Operation:
        """The cores of a decoding step, or of all tokens where there is none; without attention, all there is."""
        phase = "decode" if self.decode is not None else "prefill"
        cores = [one for one in self.operations[phase] if one.name.endswith("core")]
        return joined("core", cores or self.operations[phase])

    @property
    def weights_bytes(self) -> int:
        """Bytes of the learned numbers, as they are read."""
        return self.parameters.total * bytes_of(self.load.dtype)

    @property
    def activation_bytes(self) -> int | None:
        """Bytes kept for the gradients in training, as it usually runs there; None where a load names no such run."""
        try:
            return kept_by(self.described, self.load, Way(source=self.load.source)).total
        except SpecError:
            return None

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        bills = {"parameters": self.parameters, **self.calls, "cache": self.kept, "source_cache": self.told}
        operations = {
            phase: [{**vars(one), "intensity": one.intensity} for one in each]
            for phase, each in self.operations.items()
        }
        return {
            "name": self.name,
            "params": self.parameters.total,
            "active_params": self.active,
            "weights_bytes": self.weights_bytes,
            "flops": self.flops,
            "spent": dict(self.spent),
            "counted": dict(self.counted),
            "kv_bytes_per_token": self.kept_each,
            "kv_bytes_per_source_token": self.told_each,
            "kv_bytes": self.kept_bytes,
            "activation_bytes": self.activation_bytes,
            "seconds": {phase: self.seconds(phase) for phase in self.operations},
            "intensity": self.core.intensity,
            "bound": self.core.bound,
            "operations": operations,
            "notes": list(self.notes),
            "terms": [{"bill": bill, **term._asdict()} for bill, each in bills.items() for term in each.terms],
        }


def price(described: Described, load: Load, name: str = "") -> Price:
    """Everything that a layer or a model costs under a load; nothing is built.

    >>> import headwise as hw
    >>> gqa = price(hw.design(preset="gqa", model=4096, heads=32), Load(batch=16, context=32768))
    >>> gqa.kept.total * 2, gqa.operations["decode"][1].intensity  # bytes a token; 4 heads read each key
    (4096, 3.9995117783473697)
    """
    every = pieces(described)
    calls = calls_of(described, every, load, name)
    readers = [piece for piece in every if isinstance(piece, Reader) and not piece.early and "decode" in calls]
    own, told = ([piece for piece in readers if piece.role == role] for role in ("attention", "cross"))
    bills = {phase: _bill(*call) for phase, call in calls.items()}
    runs = On(Device.named(load.device).kind, load.dtype)
    prefill = calls["prefill"]
    return Price(
        name=name,
        described=described,
        load=load,
        whole=prefill[1],
        parameters=parameters(described),
        active=active(described),
        calls={"prefill": bills.pop("prefill"), "backward": _gradients(*prefill), **bills},
        spent=_written(spent(calls, runs)),
        counted=_written(counted(calls)),
        kept=_kept(own),
        told=_kept(told),
        kept_each=_kept(piece for piece in own if not piece.spec.stateful).total * bytes_of(load.dtype) or None,
        kept_bytes=_held(own, load, load.held) + _held(told, load, prefill[1].source),
        operations={
            phase: operations(*calls[phase], load.dtype, load.device)
            for phase in ("prefill", "decode")
            if phase in calls
        },
        notes=tuple(unsaid(described)),
    )


def _written(totals: Mapping[str, int | None]) -> dict[str, int | None]:
    """With the whole of a generation: its prompt, and its steps."""
    prompt, steps = totals.get("prompt"), totals.get("steps")
    whole = {} if "steps" not in totals else {"generate": None if prompt is None or steps is None else prompt + steps}
    return {**totals, **whole}


def _bill(some: Iterable[Piece], call: Call) -> Bill:
    """What is asked for in a call."""
    return Bill.repeated((_named(p.name, one.name), one.flops, p.times) for p in some for one in p.asked(call))


def _gradients(some: Iterable[Piece], call: Call) -> Bill:
    """What its gradients ask for: of each product as many as factors that have one."""
    products = ((piece, one) for piece in some for one in piece.asked(call))
    return Bill.repeated((_named(p.name, one.name), one.factors * one.flops, p.times) for p, one in products)


def _named(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _kept(some: Iterable[Reader]) -> Bill:
    """Numbers that attentions remember of one token."""
    return Bill.repeated(
        (_named(piece.name, term.name), Symbol.of(term.value, term.formula), piece.times)
        for piece in some
        for term in remembered(piece.spec).terms
    )


def _held(some: Iterable[Reader], load: Load, tokens: int) -> int:
    """Bytes that they hold of so many tokens: rings where patterns forget."""
    each = bytes_of(load.dtype)
    return sum(
        piece.times * cache_bytes(piece.spec, batch=load.batch, capacity=tokens, bytes_each=each) for piece in some
    )
