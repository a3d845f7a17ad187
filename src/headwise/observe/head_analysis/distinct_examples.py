"""Examples without repetitions: a text that is given twice is no further evidence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from torch import Tensor

from ...util.errors import pluralise
from .annotated_examples import Example


class DistinctExamples:
    """The examples whose inputs differ from those of all earlier ones; counts of both kinds after
    the iteration.

    >>> examples = DistinctExamples([Example({"x": n % 2}, {}) for n in range(5)])
    >>> len(list(examples)), examples.notes
    (2, ('left out 3 texts that repeat an earlier one',))
    """

    def __init__(self, examples: Iterable[Example]) -> None:
        self.num_distinct = self.num_repeated = 0
        self._examples = examples

    def __iter__(self) -> Iterator[Example]:
        self.num_distinct = self.num_repeated = 0
        digests: set[bytes] = set()
        for example in self._examples:
            digest = blake2b("".join(_describe(example.inputs)).encode(), digest_size=16).digest()
            if digest in digests:
                self.num_repeated += 1
                continue
            digests.add(digest)
            self.num_distinct += 1
            yield example

    @property
    def notes(self) -> tuple[str, ...]:
        """A note on the examples that were left out; none if there are none."""
        if not self.num_repeated:
            return ()
        if self.num_repeated == 1:
            return ("left out 1 text that repeats an earlier one",)
        return (f"left out {self.num_repeated} texts that repeat an earlier one",)

    def check_min_count(self, minimum: int = 2) -> None:
        """Raise ValueError if there were fewer than `minimum` distinct examples."""
        if self.num_distinct < minimum:
            if self.num_repeated:
                num_texts = self.num_distinct + self.num_repeated
                raise ValueError(
                    "cannot compute confidence intervals from equal texts "
                    f"(different: {self.num_distinct} of {num_texts}); give different texts"
                )
            num_texts = pluralise(self.num_distinct, "text")
            raise ValueError(
                f"cannot compute confidence intervals from {num_texts}; give at least two"
            )


def _describe(inputs: Any) -> Iterator[str]:
    """Texts that are equal for equal inputs only."""
    if isinstance(inputs, Tensor):
        yield f"{inputs.dtype}{tuple(inputs.shape)}"
        yield repr(inputs.detach().cpu().flatten().tolist())
    elif isinstance(inputs, Mapping):
        for name in sorted(inputs):
            yield f"{name}:"
            yield from _describe(inputs[name])
    elif isinstance(inputs, Sequence) and not isinstance(inputs, str):
        for value in inputs:
            yield from _describe(value)
            yield ";"
    else:
        yield repr(inputs)
