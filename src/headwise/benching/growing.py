"""Calls that grow along one axis at a time: kinds of layers, and every backend that takes them, timed in turns."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..backends import CallSignature
from ..cache import KVCache
from ..counting.here import accelerator_type
from ..errors import SpecError, suggest
from ..module import Attention
from ..presets import design
from ..spec import AttentionSpec
from .case import BenchmarkCase, TimedCall
from .rows import HEADWISE, CaseTimer
from .turns import TimingPace

MODEL_WIDTH, HEAD_DIM = 32, 64  # narrow models of wide heads: hardly anything but the core is timed
SCALING_PACE = TimingPace(min_sample_seconds=0.005, min_samples=3, max_samples=7, max_seconds=0.5)
MAX_CALL_SECONDS = 0.08  # seconds of a call, beyond which a backend is not asked for a larger one
COMPILED_BACKEND = "flex"  # a kernel for every shape, seconds each
COMPILED_SIZES = {("tokens", 512), ("tokens", 1024), ("tokens", 2048)}  # so only for these


class CallSize(NamedTuple):
    """How large a call is."""

    tokens: int = 512
    heads: int = 8
    rows: int = 1
    layers: int = 1


SCALING_AXES = {
    "tokens": (32, 64, 128, 256, 512, 1024, 2048, 4096),
    "heads": (2, 4, 8, 16),
    "rows": (1, 2, 4, 8),
    "layers": (1, 2, 4),
}


class ScalingLayer(NamedTuple):
    """A kind of layer: how it is designed, and whether one query reads so many tokens, or each of them."""

    design_args: Mapping[str, Any]
    single_query: bool = False
    needs_grad: bool = False


SCALING_LAYERS = {
    "plain heads, causal": ScalingLayer({"preset": "mha", "pattern": "causal()"}),
    "plain heads, causal, with gradients": ScalingLayer({"preset": "mha", "pattern": "causal()"}, needs_grad=True),
    "a window of 128": ScalingLayer({"preset": "mha", "pattern": "window(128)"}),
    "a window of 128, with gradients": ScalingLayer({"preset": "mha", "pattern": "window(128)"}, needs_grad=True),
    "one query, heads in fours": ScalingLayer({"preset": "gqa", "modifiers": (), "pattern": "causal()"}, single_query=True),
    "one query, heads apart": ScalingLayer({"preset": "mha", "pattern": "causal()"}, single_query=True),
    "talking heads, causal": ScalingLayer({"preset": "talking", "pattern": "causal()"}),
    "dcmha": ScalingLayer({"preset": "dcmha"}),
    "moh": ScalingLayer({"preset": "moh"}),
    "entmax, causal": ScalingLayer({"preset": "entmax", "pattern": "causal()"}),
    "linear": ScalingLayer({"preset": "linear"}),
}


def select_layers(names: Sequence[str]) -> list[str]:
    """The kinds that have a piece of one of these names, or all."""
    for name in names:
        if not any(name in kind for kind in SCALING_LAYERS):
            raise SpecError(f"there is no kind of layer {name!r}; {suggest(name, SCALING_LAYERS)}")
    return [kind for kind in SCALING_LAYERS if not names or any(name in kind for name in names)]


def list_layers() -> dict[str, str]:
    """Every kind, and along what it is measured."""
    return {name: "tokens" if kind.needs_grad else ", ".join(SCALING_AXES) for name, kind in SCALING_LAYERS.items()}


def measure_scaling(bench: CaseTimer, kind: str) -> Iterator[dict[str, Any]]:
    """Every axis of a kind; gradients are measured along tokens alone, and so is what compiles."""
    for axis, sizes in SCALING_AXES.items():
        slow: set[str] = set()
        for at in sizes if axis == "tokens" or not SCALING_LAYERS[kind].needs_grad else ():
            size = CallSize()._replace(**{axis: at})
            spec = design_layer(kind, size)
            takes = [name for name, refused in unsupported_reasons(kind, spec).items() if not refused]
            names = [name for name in takes if name not in slow and (name != COMPILED_BACKEND or (axis, at) in COMPILED_SIZES)]
            if not names:
                break
            row = bench.time_case(_scaling_case(kind, spec, size, names), kind)
            seconds = {names[0]: row["ours_s"], **row["peers"]} if row["ours_s"] else {}
            broken = ({names[0]: row["failed"]} if row["failed"] else {}) | row["absent"]
            slow |= {name for name, took in seconds.items() if took > MAX_CALL_SECONDS} | set(broken)
            spread = {names[0] if name == HEADWISE else name: wide for name, wide in row["spread"].items()}
            yield {
                "kind": kind, "axis": axis, "at": at, "seconds": seconds, "spread": spread, "runs": takes[0],
                "absent": broken, "differs": row["differs"],
            }  # fmt: skip


def design_layer(kind: str, size: CallSize) -> AttentionSpec:
    """The layer of this kind, with so many heads."""
    return design(model=MODEL_WIDTH, heads=size.heads, dim=HEAD_DIM, **SCALING_LAYERS[kind].design_args)


def unsupported_reasons(kind: str, spec: AttentionSpec) -> dict[str, list[str]]:
    """Every backend with its reasons to refuse such a call here."""
    told = SCALING_LAYERS[kind]
    core = spec.core_of(spec.projection_form(told.single_query))
    return backends.unsupported_reasons_by_backend(CallSignature(spec, core, device=accelerator_type(), single_query=told.single_query, needs_grad=told.needs_grad))


def _scaling_case(kind: str, spec: AttentionSpec, size: CallSize, names: Sequence[str]) -> BenchmarkCase:
    first, *rest = (_layer_run(SCALING_LAYERS[kind], spec, size, name) for name in names)
    return BenchmarkCase(kind, first, dict(zip(names[1:], rest, strict=True)))


def _layer_run(kind: ScalingLayer, spec: AttentionSpec, size: CallSize, name: str) -> TimedCall:
    """All layers in a row, on a backend of this name."""
    torch.manual_seed(0)
    layers = [Attention(spec, backend=name).to(accelerator_type()).eval() for _ in range(size.layers)]
    x = torch.randn(size.rows, size.tokens, MODEL_WIDTH, device=accelerator_type(), requires_grad=kind.needs_grad)
    caches = [_FilledCache(layer, x) for layer in layers] if kind.single_query else []

    def run() -> Any:
        with torch.set_grad_enabled(kind.needs_grad):
            y = x[:, -1:] if kind.single_query else x
            for n, layer in enumerate(layers):
                y = layer(y, cache=caches[n].cache) if kind.single_query else layer(y)
        return torch.autograd.grad(y.sum(), [x, *layers[0].parameters()]) if kind.needs_grad else y

    return run


class _FilledCache:
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
    def cache(self) -> KVCache:
        """With room for one token more."""
        if self._now.used == self._most:
            self._now = copy.deepcopy(self._full)
        return self._now
