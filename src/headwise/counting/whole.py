"""What is priced, in pieces: an attention alone, or every attention, map and table of a model, equal ones once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..blueprint import Block, Embedding, Head, Model, Stack, Weight
from ..spec import AttentionSpec
from . import bills
from .bills import Bill, Product
from .reading import Call, On, Reader
from .symbols import Symbol

Described = AttentionSpec | Model

# Of which tokens of a call a head is asked: of each, or of one a row.
SCORED: dict[str, Callable[[Call], int]] = {
    "each": lambda call: 1 if call.way == "prompt" else call.tokens,
    "first": lambda call: 0 if call.way == "steps" else 1,
    "last": lambda call: call.tokens if call.way == "steps" else 1,
    "mean": lambda call: call.tokens if call.way == "steps" else 1,
}


@dataclass(frozen=True)
class Maps:
    """Matrices that tokens are multiplied with one by one, and tables that they are looked up in.

    `tokens` says how many of a row, `met` how many numbers so many tokens read; `looked` is how many numbers are
    looked up for each token. `factors` is 1 where what is multiplied has no gradient, such as pixels.
    """

    name: str
    role: str
    matrices: tuple[Weight, ...]
    tokens: Callable[[Call], int]
    met: Callable[[int], int]
    times: int = 1
    early: bool = False
    looked: int = 0
    factors: int = 2

    def asked(self, call: Call) -> Iterator[Product]:
        """One product for each matrix."""
        new = Symbol.of(self._seen(call), "s")
        for matrix in self.matrices:
            sizes = {axis: Symbol.of(size, axis) for axis, size in matrix.sizes.items()}
            flops = 2 * matrix.layout.numel(sizes) * Symbol.of(call.batch, "b") * new
            yield Product(matrix.name, flops, self.factors)

    def counted(self, call: Call) -> list[Product]:
        """What torch's counter sees: the same."""
        return list(self.asked(call))

    def spent(self, call: Call, on: On) -> int:
        """What is executed: the same, on whatever."""
        return sum(one.flops for one in self.asked(call))

    def spent_back(self, call: Call, on: On) -> int:
        """The same of gradients."""
        return sum(one.factors * one.flops for one in self.asked(call))

    def numbers(self, call: Call) -> int:
        """Numbers that it reads and writes: weights that are met, and what goes into and out of every matrix."""
        tokens = call.batch * self._seen(call)
        return self.met(tokens) + tokens * (sum(map(_ends, self.matrices)) + 2 * self.looked) if tokens else 0

    def _seen(self, call: Call) -> int:
        return self.tokens(call.before if self.early else call)


def _ends(matrix: Weight) -> int:
    """How many numbers go into a matrix and come out of it, for one token."""
    sizes = dict(matrix.sizes)
    often, out = sizes.pop("active", 1), sizes[next(axis for axis in matrix.layout.axes if axis != "active")]
    return often * (out + matrix.numel // (often * out))


Piece = Reader | Maps


def pieces(described: Described) -> list[Piece]:
    """Everything that runs, in order."""
    if isinstance(described, AttentionSpec):
        return [Reader("", described, "attention" if described.source is None else "cross")]
    found: list[Piece] = []
    for stack in described.stacks:
        early = stack is not described.stacks[-1]
        found += [_table(stack, stack.embedding, early)] if stack.embedding else []
        blocks: Counter[Block] = Counter()
        for run in stack.runs:
            blocks.update({block: run.times * run.blocks.count(block) for block in run.blocks})
        for block, times in blocks.items():
            found += _block(stack, block, times, early)
    return found + [_head(described, head) for head in described.heads]


def _block(stack: Stack, block: Block, times: int, early: bool) -> Iterator[Piece]:
    for role, spec in block.specs.items():
        said = replace(spec, source=spec.source or spec.model) if role == "cross" else spec
        yield Reader(f"{stack.name}.*.{role}", said, role, times, early)
    if feed := block.feed:
        yield Maps(
            f"{stack.name}.*.feed",
            "feed",
            tuple(feed.products(stack.model)),
            lambda call: call.tokens,
            lambda tokens: feed.met(stack.model, tokens),
            times,
            early,
        )


def _table(stack: Stack, embedding: Embedding, early: bool) -> Maps:
    patches, matrices = embedding.patches, tuple(embedding.products(stack.model))
    return Maps(
        f"{stack.name}.embedding",
        "embedding",
        matrices,
        lambda call: call.tokens and patches.count if patches else call.tokens,
        lambda _: sum(matrix.numel for matrix in matrices),
        early=early,
        looked=0 if patches else stack.model,
        factors=1,
    )


def _head(model: Model, head: Head) -> Maps:
    matrices = tuple(head.products(model.stacks[-1].model))
    numbers = sum(matrix.numel for matrix in matrices)
    return Maps(f"head.{head.name}", "head", matrices, SCORED[head.at], lambda _: numbers)


def parameters(described: Described) -> Bill:
    """Learned numbers, tensor by tensor; layers that have the same tensor are one term.

    >>> from headwise.families import read
    >>> for term in parameters(read({"model_type": "gpt2", "n_layer": 2})).terms[:3]:
    ...     print(*term)
    decoder.embedding.tokens token model 38597376
    decoder.embedding.positions position model 786432
    decoder.*.attention.project.q 2 · q dim model 1179648
    """
    if isinstance(described, AttentionSpec):
        return bills.parameters(described)
    times: Counter[tuple[str, tuple[tuple[str, int], ...]]] = Counter()
    found: dict[tuple[str, tuple[tuple[str, int], ...]], Weight] = {}
    for w in described.weights():
        if w.learned:
            line = (re.sub(r"^(\w+)\.\d+\.", r"\1.*.", w.name), tuple((axis, w.sizes[axis]) for axis in _axes(w)))
            times[line] += 1
            found[line] = w
    return Bill.repeated((line[0], _numel(w), times[line]) for line, w in found.items())


def _axes(w: Weight) -> list[str]:
    return [name for axis in w.layout.axes for name in axis.split("|")]


def _numel(w: Weight) -> int:
    told = {"source": "model"} if w.role == "attention" else {}  # what reads its own stack is told of no other width
    return w.layout.numel({axis: Symbol.of(w.sizes[axis], told.get(axis, axis)) for axis in _axes(w)})


def active(described: Described) -> int:
    """The learned numbers of which one token meets some: all, but for the experts that it does not choose."""
    total = parameters(described).total
    if isinstance(described, AttentionSpec):
        return total
    feeds = [(stack.model, block.feed) for stack in described.stacks for block in stack.layers if block.feed]
    return total - sum(sum(w.numel for w in feed.weights(model)) - feed.met(model, 1) for model, feed in feeds)
