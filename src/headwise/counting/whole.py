"""What a whole model costs, as named terms: each a formula over named axes, and its number."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from ..blueprint import Model, Weight


class Term(NamedTuple):
    """One line of a sum: what it is, how it is worked out, and what it comes to."""

    name: str
    formula: str
    value: int


def params_terms(model: Model) -> list[Term]:
    """The learned numbers of a model; layers that have the same tensor are one term.

    >>> from headwise.families import read
    >>> for term in params_terms(read({"model_type": "gpt2", "n_layer": 2}))[:3]:
    ...     print(*term)
    decoder.embedding.tokens token·model = 50257·768 38597376
    decoder.embedding.positions position·model = 1024·768 786432
    decoder.*.attention.project.q 2·q·dim·model = 2·12·64·768 1179648
    """
    times: Counter[tuple[str, str]] = Counter()
    numbers: dict[tuple[str, str], Weight] = {}
    for w in model.weights():
        if w.learned:
            line = (re.sub(r"^(\w+)\.\d+\.", r"\1.*.", w.name), _sizes(w))
            times[line] += 1
            numbers[line] = w
    return [Term(line[0], _formula(w, times[line]), times[line] * w.numel) for line, w in numbers.items()]


def _sizes(w: Weight) -> str:
    return "·".join(str(size) for size in w.layout.opened(w.sizes))


def _formula(w: Weight, times: int) -> str:
    each = f"{times}·" if times > 1 else ""
    axes = "·".join(f"({axis.replace('|', '+')})" if "|" in axis else axis for axis in w.layout.axes)
    return f"{each}{axes} = {each}{_sizes(w)}"
