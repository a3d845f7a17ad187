"""The shape walk: what a layer really does to its input, one tensor operation after the other.

Nothing here knows a layer by name. A real layer runs on a real input, every tensor operation on the way is
noted, and the part whose method was running at that moment says which seam it belongs to.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..interfaces import Part
from ..spec.attention_spec import AttentionSpec
from .attention import Attention

WIDTH = 80
# Where these copy, they are two steps: the numbers are laid out anew, then seen in another shape.
RESHAPES = {Tensor.flatten: "flatten", Tensor.reshape: "reshape", torch.flatten: "flatten", torch.reshape: "reshape"}
ALIASES_INPUT = "given"
PRODUCTS = ("linear", "matmul", "einsum")  # each is a step of its own
PACKAGE_FOLDER = str(Path(__file__).parents[1])
BACKENDS = "headwise.backends."
COMBINING_METHODS = ("project_qkv",)  # methods of an interface that may call others of it, whose steps those are


@dataclass(frozen=True)
class OperationStep:
    """One or more neighbouring operations of one seam: what came out, and whether its memory is new.

    memory="view" is the input seen in another shape, decided by the address of its storage; "copy" has memory
    of its own; "given" is where the walk begins.
    """

    number: int
    interface: str
    part: str
    operations: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    memory: str

    @property
    def where(self) -> str:
        """The seam it belongs to, and the part that fills it: ``ask: Direct``."""
        return f"{self.interface}: {self.part}" if self.part else self.interface

    @property
    def text(self) -> str:
        """Its operations in a few words: ``mul, cat, 2 add``."""
        names = list(dict.fromkeys(self.operations))
        counts = [(self.operations.count(name), name) for name in names]
        return ", ".join(name if count == 1 else f"{count} {name}" for count, name in counts)


@dataclass(frozen=True)
class OperationTrace:
    """The steps of one call, in the order in which they ran; `rows` are the same as plain data.

    >>> import headwise as hw
    >>> steps = walk(hw.design(model=512, heads=8)).steps
    >>> list(dict.fromkeys(step.shape for step in steps))[:5]
    [(5, 10, 512), (5, 10, 8, 64), (5, 8, 10, 64), (5, 8, 64, 10), (5, 8, 10, 10)]
    """

    spec: AttentionSpec
    batch: int
    tokens: int
    source_tokens: int | None
    steps: tuple[OperationStep, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every step as plain values, ready for JSON."""
        return [{key: _plain(value) for key, value in asdict(step).items()} for step in self.steps]

    @property
    def to_dict(self) -> dict[str, Any]:
        """The whole walk as plain values."""
        read = {} if self.source_tokens is None else {"source_tokens": self.source_tokens}
        return {"batch": self.batch, "tokens": self.tokens, **read, "steps": self.rows}

    def json(self) -> str:
        """One JSON document."""
        return json.dumps(self.to_dict, indent=2)

    def __str__(self) -> str:
        head = ("#", "operations", "shape", "strides", "memory")
        cells = [(str(s.number), s.text, _sizes(s.shape), _sizes(s.strides), s.memory) for s in self.steps]
        wide = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        wide[1] = min(wide[1], max(WIDTH - sum(wide) + wide[1] - 2 * len(wide), 12))
        lines, before = _line(head, wide), ""
        for step, row in zip(self.steps, cells, strict=True):
            if step.memory != ALIASES_INPUT and step.where != before:
                lines += ["", step.where]
            before = step.where
            lines += _line(row, wide)
        return "\n".join(lines)


def walk(spec: AttentionSpec, batch: int = 5, tokens: int = 10, source_tokens: int | None = None) -> OperationTrace:
    """Every step of a layer of this spec on a random input [batch, tokens, model], in plain tensor operations.

    With `source_tokens`, or when the spec names the width of a source, it reads another sequence.
    """
    sizes = {"batch": batch, "tokens": tokens, "source_tokens": 1 if source_tokens is None else source_tokens}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r} gives nothing to walk with; use a whole number of at least 1")
    if source_tokens is None and spec.source is not None:
        source_tokens = tokens
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        layer = Attention(spec, backend="dense").eval()
        x_BTD = torch.randn(batch, tokens, spec.model)
        z_BSE = None if source_tokens is None else torch.randn(batch, source_tokens, spec.source or spec.model)
        recorder = _Recorder()
        recorder.begin("x", x_BTD)
        if z_BSE is not None:
            recorder.begin("source", z_BSE)
        with recorder:
            layer(x_BTD, source=z_BSE)
    return OperationTrace(spec, batch, tokens, source_tokens, _merge_neighbours(recorder.steps))


class _Recorder(TorchFunctionMode):
    """Notes every operation on numbers that come from the input; masks, positions and weights alone pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[OperationStep] = []
        self._followed: dict[int, Tensor] = {}  # kept alive, so that no id is used twice

    def begin(self, name: str, tensor: Tensor) -> None:
        """Follow an input."""
        self._note(name, "", name, (), tensor)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [t for t in _tensors([*args, *kwargs.values()]) if id(t) in self._followed]
        if not given:
            return func(*args, **kwargs)
        seam, part = _current_part_method()
        if func in RESHAPES and not _shares(func(*args, **kwargs), given[:1]):
            laid = args[0].contiguous()
            self._note(seam, part, "contiguous", given, laid)
            args, given = (laid, *args[1:]), [laid]
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func)).strip("_").replace("getitem", "index")
        for tensor in _tensors([out]):
            if tensor.is_floating_point() and id(tensor) not in self._followed:
                self._note(seam, part, "view" if name in RESHAPES.values() else name, given, tensor)
        return out

    def _note(self, seam: str, part: str, name: str, given: Sequence[Tensor], out: Tensor) -> None:
        self._followed[id(out)] = out
        memory = ALIASES_INPUT if not given else "view" if _shares(out, given) else "copy"
        number = len(self.steps)
        self.steps.append(OperationStep(number, seam, part, (name,), tuple(out.shape), tuple(out.stride()), memory))


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _shares(out: Tensor, given: Sequence[Tensor]) -> bool:
    address = out.untyped_storage().data_ptr()
    return any(address == tensor.untyped_storage().data_ptr() for tensor in given)


def _current_part_method() -> tuple[str, str]:
    """The seam and the part whose method is running: asked of the interpreter, so that no part is named here."""
    frame = sys._getframe(2)
    while frame is not None and not isinstance(frame.f_locals.get("self"), Part):
        if frame.f_globals.get("__name__", "").startswith(BACKENDS):
            return "attend", ""
        frame = frame.f_back
    if frame is None:
        return "layer", ""
    owner, seam = frame.f_locals["self"], ""
    while frame is not None:
        name, ours = frame.f_code.co_name, frame.f_code.co_filename.startswith(PACKAGE_FOLDER)
        if frame.f_locals.get("self") is owner:
            if name not in COMBINING_METHODS or not seam:
                seam = name  # the outermost counts: helpers work for the method that called them
        elif ours and not name.startswith("<"):
            break
        frame = frame.f_back
    return seam, type(owner).__name__


def _merge_neighbours(steps: Sequence[OperationStep]) -> tuple[OperationStep, ...]:
    """Neighbouring operations of one seam that leave the shape alone become one step."""
    joined: list[OperationStep] = []
    for step in steps:
        last = joined[-1] if joined else None
        alike = last and replace(step, number=last.number, operations=last.operations) == last
        if last and alike and step.memory == "copy" and step.operations[0] not in PRODUCTS:
            joined[-1] = replace(last, operations=(*last.operations, *step.operations))
        else:
            joined.append(replace(step, number=len(joined)))
    return tuple(joined)


# --- as text -------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _sizes(sizes: tuple[int, ...]) -> str:
    return " ".join(map(str, sizes))


def _line(row: Sequence[str], wide: Sequence[int]) -> list[str]:
    """One row; operations that do not fit go on below."""
    first, *more = textwrap.wrap(row[1], wide[1]) or [""]
    cells = [row[0].rjust(wide[0]), first.ljust(wide[1]), *(c.ljust(w) for c, w in zip(row[2:], wide[2:], strict=True))]
    indent = " " * (wide[0] + 2)
    return ["  ".join(cells).rstrip(), *(indent + line for line in more)]
