"""The CTranslate2 reference model pauses after every token, tested with a substitute library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headwise.bench.reference_models import CTranslate2Stepper

ROWS, WORDS = 3, 7


class Library:
    """Of a batch, every row is told of in turn; one that the callback ends is told of no more."""

    def __init__(self) -> None:
        self.steps = 0

    def Generator(self, path: str, **how: Any) -> Any:
        return SimpleNamespace(generate_batch=self.generate)

    def generate(
        self, words: list[list[str]], max_length: int, callback: Callable[[Any], bool], **how: Any
    ) -> None:
        going = [*range(len(words))]
        while going and self.steps < max_length:
            self.steps += 1
            logits = np.full((len(words), WORDS), self.steps, np.float32)
            going = [
                row for row in going if not callback(SimpleNamespace(batch_id=row, logits=logits))
            ]


def test_each_call_is_a_step_of_all_rows():
    library = Library()
    stepped = CTranslate2Stepper(
        library, Path("nowhere"), [[1, 2]] * ROWS, max_length=50, threads=1
    )
    for step in (1, 2, 3):
        assert torch.equal(stepped(), torch.full((ROWS, WORDS), float(step)))
        assert library.steps == step  # and waits


def test_an_abandoned_generation_ends_at_once():
    """The rows before the last would go on to the last token, beside whatever is measured next."""
    library = Library()
    stepped = CTranslate2Stepper(
        library, Path("nowhere"), [[1, 2]] * ROWS, max_length=50, threads=1
    )
    stepped()
    worker = stepped._worker
    del stepped
    worker.join(timeout=10)
    assert not worker.is_alive()
    assert library.steps <= 2


def test_more_steps_than_planned_are_refused():
    library = Library()
    stepped = CTranslate2Stepper(library, Path("nowhere"), [[1, 2]], max_length=2, threads=1)
    stepped(), stepped()
    with pytest.raises(RuntimeError, match="max_length=2"):
        stepped()
