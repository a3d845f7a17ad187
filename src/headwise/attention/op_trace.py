"""Operation trace: every tensor operation that a layer applies to its input, with shapes, strides
and copies.

A real layer runs on a random input under a `TorchFunctionMode`. Each operation belongs to the part
that has a method on the call stack at that moment, so this module names no part.

`AttentionSteps` numbers the steps of multi-head attention as they are taught: 1 projection, 2 split
into heads, 3 exchange of heads and tokens, 4 attention of each head, 5 exchange back, 6 contiguous
copy, 7 join of the heads, 8 output projection. Operations of other parts, such as rotary
embeddings, stand between them without a number.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..kernels.capabilities import assume_points, points_of_class
from ..report.data import Table
from ..report.notebook import NotebookResult
from ..util.errors import pluralise
from .attention import Attention
from .bound_parts import BoundParts, QKTransforms
from .interfaces import Part, Project
from .spec.attention_spec import AttentionSpec

WIDTH = 80
# If one of these copies, it is recorded as two steps: `contiguous`, then a view.
RESHAPES = {
    Tensor.flatten: "flatten",
    Tensor.reshape: "reshape",
    torch.flatten: "flatten",
    torch.reshape: "reshape",
}
MEMORY_OF_INPUTS = "input"
PRODUCTS = ("linear", "matmul", "einsum")  # never merged with neighbouring operations
PACKAGE_FOLDER = str(Path(__file__).parents[1])
BACKENDS = "headwise.attention.backends."


# of a tensor; parts that make several times larger ones still stay below the sizes of torch
MAX_NUMBERS = 2**54


@dataclass(frozen=True)
class OperationStep:
    """One or more neighbouring operations of one interface method: their result, and whether its
    memory is new.

    `memory` is "view" if the result shares the storage of an operand, "copy" if it has its own, and
    "input" for the inputs of the layer.
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
        """The interface method and the part that implements it: ``project_query:
        LinearProjection``.
        """
        return f"{self.interface}: {self.part}" if self.part else self.interface

    @property
    def text(self) -> str:
        """The names of the operations, repeated ones counted: ``mul, cat, 2 add``."""
        names = list(dict.fromkeys(self.operations))
        counts = [(self.operations.count(name), name) for name in names]
        return ", ".join(name if count == 1 else f"{count} {name}" for count, name in counts)


@dataclass(frozen=True, repr=False)
class OperationTrace(NotebookResult):
    """The steps of one call in execution order; `rows` has the same steps as plain data.

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
        return [asdict(step, dict_factory=_plain_dict) for step in self.steps]

    @property
    def to_dict(self) -> dict[str, Any]:
        """The trace as plain values."""
        read = {} if self.source_tokens is None else {"source_tokens": self.source_tokens}
        return {"batch": self.batch, "tokens": self.tokens, **read, "steps": self.rows}

    def json(self) -> str:
        """The trace as one JSON document."""
        return json.dumps(self.to_dict, indent=2)

    @property
    def report_items(self) -> Sequence[Table]:
        """The table of steps."""
        rows = [
            (str(s.number), s.text, _sizes(s.shape), _sizes(s.strides), s.memory)
            for s in self.steps
        ]
        title = f"{pluralise(len(rows), 'operation')} of a layer of width {self.spec.model}"
        return [Table(title, ("#", "operations", "shape", "strides", "memory"), rows)]

    def __str__(self) -> str:
        (table,) = self.report_items
        head: Any = table.columns
        cells: Any = table.rows
        wide = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        wide[1] = min(wide[1], max(WIDTH - sum(wide) + wide[1] - 2 * len(wide), 12))
        lines = _line(head, wide)
        before = ""
        for step, row in zip(self.steps, cells, strict=True):
            if step.memory != MEMORY_OF_INPUTS and step.where != before:
                lines += ["", step.where]
            before = step.where
            lines += _line(row, wide)
        return "\n".join(lines)


def walk(
    spec: AttentionSpec, batch: int = 5, tokens: int = 10, source_tokens: int | None = None
) -> OperationTrace:
    """Trace a layer of this spec on an input [batch, tokens, model], run by the `dense` backend.

    The tensors have shapes and no values, so layers of any size take no memory.

    Products and norms are torch's operations, so that the steps are the same on every machine. With
    `source_tokens`, or if the spec has a source width, the layer attends to a second sequence.
    """
    sizes = {
        "batch": batch,
        "tokens": tokens,
        "source_tokens": 1 if source_tokens is None else source_tokens,
    }
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(
                f"cannot trace a layer with {name}={size!r}; give an integer of at least 1"
            )
    if source_tokens is None and spec.source is not None:
        source_tokens = tokens
    keys = tokens if source_tokens is None else source_tokens
    count = batch * max(max(tokens, keys) * spec.model, spec.heads.rows * tokens * keys)
    if count > MAX_NUMBERS:
        raise ValueError(
            f"cannot trace a layer with tensors of {count:.3g} numbers; use fewer tokens or a "
            f"smaller batch, for at most {MAX_NUMBERS:.3g}"
        )
    torch_operations = points_of_class("other")
    with torch.device("meta"), torch.no_grad(), assume_points(torch_operations):
        layer = Attention(spec, backend="dense").eval()
        layer.parts = _SeparateProjections(spec, layer.weights)
        x_BTD = torch.empty(batch, tokens, spec.model)
        z_BSE = None
        if source_tokens is not None:
            z_BSE = torch.empty(batch, source_tokens, spec.source or spec.model)
        recorder = _Recorder()
        recorder.begin("x", x_BTD)
        if z_BSE is not None:
            recorder.begin("source", z_BSE)
        with recorder:
            layer(x_BTD, source=z_BSE)
    return OperationTrace(spec, batch, tokens, source_tokens, _merge_neighbours(recorder.steps))


class _SeparateProjections(BoundParts):
    """Parts that project queries apart from keys and values, so that each is a step."""

    def project_qkv(
        self, project: Project, x_BTD: Tensor, transforms: QKTransforms
    ) -> tuple[Tensor, dict[str, Tensor]]:
        entry = self.project_kv(project, x_BTD, transforms)
        q_BTHK = project.project_query(x_BTD, transforms, self.weights["project"])
        return q_BTHK, entry | self.row_factors(x_BTD, q_BTHK)


class _Recorder(TorchFunctionMode):
    """Records every operation on tensors computed from the input, not those on masks, positions or
    weights alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[OperationStep] = []
        self._tracked: dict[int, Tensor] = {}  # references keep ids unique

    def begin(self, name: str, tensor: Tensor) -> None:
        """Track an input of the layer."""
        self._record(name, "", name, (), tensor)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        operands = [t for t in _tensors([*args, *kwargs.values()]) if id(t) in self._tracked]
        if not operands:
            return func(*args, **kwargs)
        method, part = _current_part_method()
        if func in RESHAPES and not _shares_storage(func(*args, **kwargs), operands[:1]):
            copy = args[0].contiguous()
            self._record(method, part, "contiguous", operands, copy)
            args = (copy, *args[1:])
            operands = [copy]
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func)).strip("_").replace("getitem", "index")
        for tensor in _tensors([out]):
            if tensor.is_floating_point() and id(tensor) not in self._tracked:
                self._record(
                    method, part, "view" if name in RESHAPES.values() else name, operands, tensor
                )
        return out

    def _record(
        self, method: str, part: str, name: str, operands: Sequence[Tensor], out: Tensor
    ) -> None:
        self._tracked[id(out)] = out
        memory = (
            MEMORY_OF_INPUTS
            if not operands
            else "view"
            if _shares_storage(out, operands)
            else "copy"
        )
        number = len(self.steps)
        self.steps.append(
            OperationStep(
                number, method, part, (name,), tuple(out.shape), tuple(out.stride()), memory
            )
        )


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += _tensors(value)
    return tensors


def _shares_storage(out: Tensor, operands: Sequence[Tensor]) -> bool:
    # storages of tensors without values have no address
    has_same_storage: Any = getattr(torch._C, "_is_alias_of")  # noqa: B009 - pyright lacks it
    return any(has_same_storage(out, tensor) for tensor in operands)


def _current_part_method() -> tuple[str, str]:
    """The interface method on the call stack and its part's name; ("attend", "") in a backend, else
    ("layer", "").
    """
    frame = sys._getframe(2)
    while frame is not None and not isinstance(frame.f_locals.get("self"), Part):
        if frame.f_globals.get("__name__", "").startswith(BACKENDS):
            return "attend", ""
        frame = frame.f_back
    if frame is None:
        return "layer", ""
    owner = frame.f_locals["self"]
    method = ""
    while frame is not None:
        name = frame.f_code.co_name
        ours = frame.f_code.co_filename.startswith(PACKAGE_FOLDER)
        if frame.f_locals.get("self") is owner:
            method = name  # the outermost method of the part, not a helper that it calls
        elif ours and not name.startswith("<"):
            break
        frame = frame.f_back
    return method, type(owner).__name__


def _merge_neighbours(steps: Sequence[OperationStep]) -> tuple[OperationStep, ...]:
    """Merge neighbouring operations of one interface method with equal result shape and strides."""
    merged: list[OperationStep] = []
    for step in steps:
        last = merged[-1] if merged else None
        is_same = last and replace(step, number=last.number, operations=last.operations) == last
        if last and is_same and step.memory == "copy" and step.operations[0] not in PRODUCTS:
            merged[-1] = replace(last, operations=(*last.operations, *step.operations))
        else:
            merged.append(replace(step, number=len(merged)))
    return tuple(merged)


# --- as text --------------------------------------------------------------------------------------


def _plain_dict(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in items}


def _sizes(sizes: tuple[int, ...]) -> str:
    return " ".join(map(str, sizes))


def _line(row: Sequence[str], wide: Sequence[int]) -> list[str]:
    """The lines of one table row; operations that do not fit continue on the next line."""
    first, *more = textwrap.wrap(row[1], wide[1]) or [""]
    cells = [
        row[0].rjust(wide[0]),
        first.ljust(wide[1]),
        *(c.ljust(w) for c, w in zip(row[2:], wide[2:], strict=True)),
    ]
    indent = " " * (wide[0] + 2)
    return ["  ".join(cells).rstrip(), *(indent + line for line in more)]


STEP_NAMES = {
    1: "project",
    2: "split into heads",
    3: "exchange heads and tokens",
    4: "attention of each head",
    5: "exchange back",
    6: "copy to contiguous memory",
    7: "join the heads",
    8: "multiply by W_O",
}
SPLITS = ("view", "unflatten")
EXCHANGES = ("transpose", "permute")
# Tensors that methods of the core return, by the symbols of the Transformer paper.
CORE_RESULTS = {"scores": "Q K^T", "score": "Q K^T", "normalise": "weights"}
MERGE_STEPS = {
    "contiguous": 6,
    **dict.fromkeys((*SPLITS, "flatten"), 7),
    **dict.fromkeys(PRODUCTS, 8),
}


class AttentionStep(NamedTuple):
    """One step: number (0 without one), action, tensor, shape, and True if its memory is new."""

    number: int
    name: str
    tensor: str
    shape: tuple[int, ...]
    memory: str


@dataclass(frozen=True)
class AttentionSteps:
    """The numbered steps of one call of a layer, from its operation trace.

    >>> import headwise as hw
    >>> steps = AttentionSteps(hw.walk(hw.design(model=512, heads=8))).steps
    >>> [(step.tensor, step.shape) for step in steps if step.number == 2]
    [('Q', (5, 10, 8, 64)), ('K', (5, 10, 8, 64)), ('V', (5, 10, 8, 64))]
    """

    trace: OperationTrace

    @property
    def steps(self) -> list[AttentionStep]:
        """The steps in their order; projections of queries, keys and values stand together."""
        operations = self.trace.steps
        numbers = (
            step.number
            for step in operations
            if step.interface in CORE_RESULTS or step.interface == "mix"
        )
        first_score = next(numbers, len(operations))
        last_core = max(
            (
                step.number
                for step in operations
                if step.interface == "attend" and set(step.operations) & set(PRODUCTS)
            ),
            default=first_score,
        )
        before = [step for step in operations if step.number < first_score]
        core = [step for step in operations if first_score <= step.number <= last_core]
        after = [step for step in operations if step.number > last_core]
        return [*_order(_steps_before(before)), *_core_steps(core), *_steps_after(after)]

    @property
    def to_dict(self) -> dict[str, Any]:
        """The steps as plain values."""
        return {
            "batch": self.trace.batch,
            "tokens": self.trace.tokens,
            "steps": [{**step._asdict(), "shape": list(step.shape)} for step in self.steps],
        }

    def __str__(self) -> str:
        heads = self.trace.spec.heads
        spec = self.trace.spec
        kv = "" if heads.kv == heads.q else f" on {pluralise(heads.kv, 'key-value head')}"
        lines = [
            f"{pluralise(self.trace.batch, 'row')} of {pluralise(self.trace.tokens, 'token')}, "
            f"width {spec.model}; "
            f"{pluralise(heads.q, 'head')} of {pluralise(heads.dim, 'channel')}{kv}",
            "",
            _format_row("", "step", "tensor or part", "shape", "memory"),
        ]
        previous: tuple[int, str] = (-1, "")
        for step in self.steps:
            is_new = (step.number, step.name) != previous
            previous = (step.number, step.name)
            number = str(step.number) if step.number and is_new else ""
            name, tensor = step.name if is_new else "", step.tensor
            if ": " in (tensor or name):  # a method of a part: its name, and the part
                name, tensor = (tensor or name).split(": ")
            lines.append(
                _format_row(number, name, tensor, " ".join(map(str, step.shape)), step.memory)
            )
        return "\n".join(lines)


def _steps_before(operations: list[OperationStep]) -> Iterator[AttentionStep]:
    """Yield the steps until the scores: inputs, projections, splits, other parts, and the exchange
    of axes.
    """
    count = {"kv products": 0, "kv splits": 0}
    products = [step for step in operations if step.interface == "project_kv" and _is_product(step)]
    names = ["K", "V"] if len(products) == 2 else ["K, V"] * len(products)
    exchanged: list[OperationStep] = []
    for step in operations:
        is_query = step.interface == "project_query"
        if step.memory == MEMORY_OF_INPUTS:
            yield AttentionStep(
                0, "input", "X" if step.interface == "x" else "source", step.shape, step.memory
            )
        elif step.interface in ("project_query", "project_kv") and (
            _is_product(step) or (step.memory == "view" and step.operations[-1] in SPLITS)
        ):
            kind = "kv products" if _is_product(step) else "kv splits"
            tensor = "Q" if is_query else names[count[kind] % len(names)] if names else "K, V"
            count[kind] += not is_query
            number = 1 if _is_product(step) else 2
            yield AttentionStep(number, STEP_NAMES[number], tensor, step.shape, step.memory)
        elif step.interface == "attend":
            exchanged += [step] if set(step.operations) & set(EXCHANGES) else []
        elif step.part:
            yield AttentionStep(0, f"{step.interface}: {step.part}", "", step.shape, step.memory)
    shapes = list(dict.fromkeys((step.shape, step.memory) for step in exchanged))
    tensors = ["Q, K, V"] if len(shapes) == 1 else ["Q", *["K, V"] * (len(shapes) - 1)]
    for tensor, (shape, memory) in zip(tensors, shapes, strict=True):
        yield AttentionStep(3, STEP_NAMES[3], tensor, shape, memory)


def _order(steps: Iterator[AttentionStep]) -> list[AttentionStep]:
    """Put equal steps together, queries first; of another part's operations, only the last result
    counts.
    """
    unique: dict[tuple[int, str, str], AttentionStep] = {}
    for step in steps:
        key = (
            step.number,
            step.name,
            step.tensor if step.number or step.name == "input" else str(step.shape),
        )
        unique[key] = step
    others = {
        step.name: step for step in unique.values() if not step.number and step.name != "input"
    }
    numbered = [step for step in unique.values() if step.number or step.name == "input"]

    def rank(step: AttentionStep) -> tuple[float, int]:
        position = 2.5 if step.name in others else step.number
        tensors = ("X", "Q", "K", "V")
        return position, tensors.index(step.tensor) if step.tensor in tensors else len(tensors)

    return sorted([*numbered, *others.values()], key=rank)


def _core_steps(operations: list[OperationStep]) -> Iterator[AttentionStep]:
    """Yield the result of every part of the core: scores, weights, and the outputs of the heads."""
    for number, step in enumerate(operations):
        is_last = number + 1 == len(operations) or operations[number + 1].where != step.where
        if step.interface == "attend":
            if _is_product(step):
                yield AttentionStep(4, STEP_NAMES[4], "Z", step.shape, step.memory)
        elif is_last:
            tensor = CORE_RESULTS.get(step.interface, f"{step.interface}: {step.part}")
            yield AttentionStep(4, STEP_NAMES[4], tensor, step.shape, step.memory)


def _steps_after(operations: list[OperationStep]) -> Iterator[AttentionStep]:
    """Yield the steps that join the heads; the outputs of heads have the name Z until they are
    multiplied by W_O.
    """
    for number, step in enumerate(operations):
        is_last = number + 1 == len(operations) or operations[number + 1].where != step.where
        merged = MERGE_STEPS.get(step.operations[-1], 0) if step.interface == "merge" else 0
        if step.interface == "attend":
            if set(step.operations) & set(EXCHANGES):
                yield AttentionStep(5, STEP_NAMES[5], "Z", step.shape, step.memory)
        elif merged:
            tensor = "output" if merged == 8 else "Z"
            yield AttentionStep(merged, STEP_NAMES[merged], tensor, step.shape, step.memory)
        elif is_last and step.part:
            yield AttentionStep(0, f"{step.interface}: {step.part}", "", step.shape, step.memory)


def _is_product(step: OperationStep) -> bool:
    return bool(set(step.operations) & set(PRODUCTS))


def _format_row(number: str, name: str, tensor: str, shape: str, memory: str) -> str:
    return f"{number:>2}  {name:<28}{tensor:<20}{shape:<20}{memory}".rstrip()
