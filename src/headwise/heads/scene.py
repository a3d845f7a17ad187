"""A text with what is known of its tokens, as measures ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LABELS_INPUT = "labels"  # what inputs may say beside what the model reads: what is wanted at each place of its output


@dataclass(frozen=True, eq=False)
class TokenAnnotations:
    """What is known of the tokens of one stream, by number.

    `special` are those that stand for no text, `separator` those of them that end a part, `punctuation` those that say
    so; `first` begins every text where that is special or read by a causal model. `word` numbers the words that tokens
    are pieces of, -1 for none; `common` says how often each id was met in the whole data, 0 where nobody counted.
    """

    ids: Tensor
    words: tuple[str, ...]
    is_special: Tensor
    is_separator: Tensor
    is_punctuation: Tensor
    word_index: Tensor
    frequency: Tensor

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Example:
    """One text, or a source and a text, as a model is called with it.

    `arcs` are (dependent, governor, relation) of words, from 0; `links` are (source word, target word), sure ones with
    True; both are of gold and empty where there is none.
    """

    inputs: Any
    streams: Mapping[str, TokenAnnotations]
    dependencies: Sequence[tuple[int, int, str]] = field(default=())
    alignment_links: Sequence[tuple[int, int, bool]] = field(default=())

    @property
    def model_inputs(self) -> Any:
        """What the model reads of its inputs: all but the labels.

        >>> Example({"x": 3, "labels": 5}, {}).given
        {'x': 3}
        """
        told: Any = self.inputs
        return {name: one for name, one in told.items() if name != LABELS_INPUT} if isinstance(told, Mapping) else told


def find_sink_tokens(annotations: TokenAnnotations) -> Tensor:
    """Which keys are sinks for whatever has nowhere to look: the first token, and those that stand for no text."""
    found = annotations.is_special | annotations.is_separator
    first = torch.zeros_like(found)
    first[:1] = True
    return found | first
