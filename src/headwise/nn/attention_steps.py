"""The steps of multi-head attention as they are taught: an operation trace with queries, keys and values by name.

The numbers are those of the usual presentation: 1 projection, 2 split into heads, 3 exchange of heads and tokens,
4 attention of each head, 5 exchange back, 6 contiguous copy, 7 join of the heads, 8 output projection. Operations of
other parts, such as rotary embeddings, stand between them without a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import pluralise
from .op_trace import MEMORY_OF_INPUTS, PRODUCTS, OperationStep, OperationTrace

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
SPLITS, EXCHANGES = ("view", "unflatten"), ("transpose", "permute")
# Tensors that methods of the core return, by the symbols of the Transformer paper.
CORE_RESULTS = {"scores": "Q K^T", "score": "Q K^T", "normalise": "weights"}
MERGE_STEPS = {"contiguous": 6, **dict.fromkeys((*SPLITS, "flatten"), 7), **dict.fromkeys(PRODUCTS, 8)}


class AttentionStep(NamedTuple):
    """One step: its number (0 without one), what it does, the tensor, its shape, and whether its memory is new."""

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
        first_score = _first_index(operations, CORE_RESULTS)
        last_core = max(
            (step.number for step in operations if step.interface == "attend" and set(step.operations) & set(PRODUCTS)),
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
        heads, spec = self.trace.spec.heads, self.trace.spec
        kv = "" if heads.kv == heads.q else f" on {pluralise(heads.kv, 'key-value head')}"
        lines = [
            f"{pluralise(self.trace.batch, 'row')} of {pluralise(self.trace.tokens, 'token')}, width {spec.model}; "
            f"{pluralise(heads.q, 'head')} of {pluralise(heads.dim, 'channel')}{kv}",
            "",
            _format_row("", "step", "tensor", "shape", "memory"),
        ]
        previous: tuple[int, str] = (-1, "")
        for step in self.steps:
            is_new = (step.number, step.name) != previous
            previous = (step.number, step.name)
            number = str(step.number) if step.number and is_new else ""
            name = step.name if is_new else ""
            lines.append(_format_row(number, name, step.tensor, " ".join(map(str, step.shape)), step.memory))
        return "\n".join(lines)


def _first_index(operations: tuple[OperationStep, ...], interfaces: dict[str, str]) -> int:
    numbers = (step.number for step in operations if step.interface in interfaces or step.interface == "mix")
    return next(numbers, len(operations))


def _steps_before(operations: list[OperationStep]) -> Iterator[AttentionStep]:
    """Yield the steps until the scores: inputs, projections, splits, other parts, and the exchange of axes."""
    count = {"kv products": 0, "kv splits": 0}
    products = [step for step in operations if step.interface == "project_kv" and _is_product(step)]
    names = ["K", "V"] if len(products) == 2 else ["K, V"] * len(products)
    exchanged: list[OperationStep] = []
    for step in operations:
        is_query = step.interface == "project_query"
        if step.memory == MEMORY_OF_INPUTS:
            yield AttentionStep(0, "input", "X" if step.interface == "x" else "source", step.shape, step.memory)
        elif step.interface in ("project_query", "project_kv") and (_is_product(step) or _is_split(step)):
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
    """Put equal steps together, queries first; of another part's operations, only the last result counts."""
    unique: dict[tuple[int, str, str], AttentionStep] = {}
    for step in steps:
        key = (step.number, step.name, step.tensor if step.number or step.name == "input" else str(step.shape))
        unique[key] = step
    others = {step.name: step for step in unique.values() if not step.number and step.name != "input"}
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
    """Yield the steps that join the heads; the outputs of heads have the name Z until they are multiplied by W_O."""
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


def _is_split(step: OperationStep) -> bool:
    return step.memory == "view" and step.operations[-1] in SPLITS


def _format_row(number: str, name: str, tensor: str, shape: str, memory: str) -> str:
    return f"{number:>2}  {name:<30}{tensor:<18}{shape:<20}{memory}".rstrip()
