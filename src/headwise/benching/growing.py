"""Calls that grow along one axis at a time: kinds of layers, and every backend that takes them, timed in turns."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..backends import Job
from ..cache import Cache
from ..counting.here import where
from ..errors import SpecError, nearest
from ..module import Attention
from ..presets import design
from ..spec import AttentionSpec
from .case import Case, Run
from .rows import OURS, Bench
from .turns import Pace

MODEL, DIM = 32, 64  # narrow models of wide heads: hardly anything but the core is timed
PACE = Pace(sample=0.005, least=3, most=7, budget=0.5)
SLOW = 0.08  # seconds of a call, beyond which a backend is not asked for a larger one
COMPILED = "flex"  # a kernel for every shape, seconds each
SHAPES = {("tokens", 512), ("tokens", 1024), ("tokens", 2048)}  # so only for these


class Size(NamedTuple):
    """How large a call is."""

    tokens: int = 512
    heads: int = 8
    rows: int = 1
    layers: int = 1


AXES = {
    "tokens": (32, 64, 128, 256, 512, 1024, 2048, 4096),
    "heads": (2, 4, 8, 16),
    "rows": (1, 2, 4, 8),
    "layers": (1, 2, 4),
}


class Kind(NamedTuple):
    """A kind of layer: how it is designed, and whether one query reads so many tokens, or each of them."""

    said: Mapping[str, Any]
    one: bool = False
    grad: bool = False


KINDS = {
    "plain heads, causal": Kind({"preset": "mha", "pattern": "causal()"}),
    "plain heads, causal, with gradients": Kind({"preset": "mha", "pattern": "causal()"}, grad=True),
    "a window of 128": Kind({"preset": "mha", "pattern": "window(128)"}),
    "a window of 128, with gradients": Kind({"preset": "mha", "pattern": "window(128)"}, grad=True),
    "one query, heads in fours": Kind({"preset": "gqa", "modifiers": (), "pattern": "causal()"}, one=True),
    "one query, heads apart": Kind({"preset": "mha", "pattern": "causal()"}, one=True),
    "talking heads, causal": Kind({"preset": "talking", "pattern": "causal()"}),
    "dcmha": Kind({"preset": "dcmha"}),
    "moh": Kind({"preset": "moh"}),
    "entmax, causal": Kind({"preset": "entmax", "pattern": "causal()"}),
    "linear": Kind({"preset": "linear"}),
}


def chosen(names: Sequence[str]) -> list[str]:
    """The kinds that have a piece of one of these names, or all."""
    for name in names:
        if not any(name in kind for kind in KINDS):
            raise SpecError(f"there is no kind of layer {name!r}; {nearest(name, KINDS)}")
    return [kind for kind in KINDS if not names or any(name in kind for name in names)]


def listed() -> dict[str, str]:
    """Every kind, and along what it is measured."""
    return {name: "tokens" if kind.grad else ", ".join(AXES) for name, kind in KINDS.items()}


def measured(bench: Bench, kind: str) -> Iterator[dict[str, Any]]:
    """Every axis of a kind; gradients are measured along tokens alone, and so is what compiles."""
    for axis, sizes in AXES.items():
        slow: set[str] = set()
        for at in sizes if axis == "tokens" or not KINDS[kind].grad else ():
            size = Size()._replace(**{axis: at})
            spec = designed(kind, size)
            takes = [name for name, refused in why(kind, spec).items() if not refused]
            names = [name for name in takes if name not in slow and (name != COMPILED or (axis, at) in SHAPES)]
            if not names:
                break
            row = bench.row(_case(kind, spec, size, names), kind)
            seconds = {names[0]: row["ours_s"], **row["peers"]} if row["ours_s"] else {}
            broken = ({names[0]: row["failed"]} if row["failed"] else {}) | row["absent"]
            slow |= {name for name, took in seconds.items() if took > SLOW} | set(broken)
            spread = {names[0] if name == OURS else name: wide for name, wide in row["spread"].items()}
            yield {
                "kind": kind, "axis": axis, "at": at, "seconds": seconds, "spread": spread, "runs": takes[0],
                "absent": broken, "differs": row["differs"],
            }  # fmt: skip


def designed(kind: str, size: Size) -> AttentionSpec:
    """The layer of this kind, with so many heads."""
    return design(model=MODEL, heads=size.heads, dim=DIM, **KINDS[kind].said)


def why(kind: str, spec: AttentionSpec) -> dict[str, list[str]]:
    """Every backend with its reasons to refuse such a call here."""
    told = KINDS[kind]
    core = spec.core_of(spec.form(told.one))
    return backends.why(Job(spec, core, device=where(), one=told.one, grad=told.grad))


def _case(kind: str, spec: AttentionSpec, size: Size, names: Sequence[str]) -> Case:
    first, *rest = (_run(KINDS[kind], spec, size, name) for name in names)
    return Case(kind, first, dict(zip(names[1:], rest, strict=True)))


def _run(kind: Kind, spec: AttentionSpec, size: Size, name: str) -> Run:
    """All layers in a row, on a backend of this name."""
    torch.manual_seed(0)
    layers = [Attention(spec, backend=name).to(where()).eval() for _ in range(size.layers)]
    x = torch.randn(size.rows, size.tokens, MODEL, device=where(), requires_grad=kind.grad)
    caches = [_Filled(layer, x) for layer in layers] if kind.one else []

    def run() -> Any:
        with torch.set_grad_enabled(kind.grad):
            y = x[:, -1:] if kind.one else x
            for n, layer in enumerate(layers):
                y = layer(y, cache=caches[n].cache) if kind.one else layer(y)
        return torch.autograd.grad(y.sum(), [x, *layers[0].parameters()]) if kind.grad else y

    return run


class _Filled:
    """A cache of so many tokens, and a few more with every call; it begins anew before it is an eighth longer."""

    def __init__(self, layer: Attention, x: Tensor) -> None:
        rows, tokens, _ = x.shape
        anyone = Attention(layer.spec).to(x.device)  # what reads a token at a time may refuse to read many
        anyone.load_state_dict(layer.state_dict())
        self._most = tokens + max(tokens // 8, 16)
        self._full = layer.cache(batch=rows, capacity=self._most)
        with torch.no_grad():
            anyone(x, cache=self._full)
        self._now = copy.deepcopy(self._full)

    @property
    def cache(self) -> Cache:
        """With room for one token more."""
        if self._now.used == self._most:
            self._now = copy.deepcopy(self._full)
        return self._now
