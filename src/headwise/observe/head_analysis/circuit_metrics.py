"""Metrics of a circuit: one number of the logits of a text, such as the difference of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...util.errors import check_known, pluralise
from ..inspect.model_inputs import is_encoder_decoder
from ..inspect.model_tokenizer import find_unknown_id, make_reader

LOGIT_DIFFERENCE = "logit_difference"
LOG_PROBABILITY = "log_probability"
TOKENS_OF_METRIC = {LOGIT_DIFFERENCE: ("A", "B"), LOG_PROBABILITY: ("A",)}


@dataclass(frozen=True)
class TokenMetric:
    """The logit of one token minus that of another, or the log-probability of one, at a position.

    Tokens are ids, or words that the model's tokenizer encodes as one token.

    >>> TokenMetric("logit_difference", (2, 0))(torch.tensor([[[1.0, 2.0, 4.0]]]))
    tensor(3.)
    """

    kind: str
    tokens: tuple[int | str, ...]
    position: int = -1

    def __post_init__(self) -> None:
        check_known("metric", self.kind, TOKENS_OF_METRIC)
        names = TOKENS_OF_METRIC[self.kind]
        if len(self.tokens) != len(names):
            raise ValueError(
                f"metric {self.kind} has {pluralise(len(self.tokens), 'token')}, but needs "
                f"{len(names)}; write "
                f"{self.kind}:{','.join(names)}"
            )

    @property
    def name(self) -> str:
        """The metric as it is written on the command line, with a position other than the last."""
        place = "" if self.position == -1 else f" at position {self.position}"
        return f"{self.kind}:{','.join(map(str, self.tokens))}{place}"

    def resolve(self, model: nn.Module) -> TokenMetric:
        """Return the metric with the ids of its words in the vocabulary of a model."""
        return replace(self, tokens=tuple(find_token_ids(model, self.tokens)))

    def __call__(self, logits: Tensor) -> Tensor:
        num_tokens, vocabulary = logits.shape[1:]
        resolve_index("position", self.position, num_tokens)
        ids = check_token_ids(self.tokens, vocabulary)
        row = logits[0, self.position]
        row = row.to(torch.promote_types(row.dtype, torch.float32))
        if self.kind == LOG_PROBABILITY:
            row = row.log_softmax(-1)
        values = row[ids]
        return values[0] - values[1:].sum()


def parse_metric(text: str, tokens: Sequence[str] = ()) -> TokenMetric:
    """Return the metric KIND:TOKEN,TOKEN; without tokens in it, those of `tokens`.

    >>> parse_metric("logit_difference: Mary, John").tokens
    (' Mary', ' John')
    """
    kind, colon, listed = text.partition(":")
    if colon and tokens:
        raise ValueError(
            f"metric {text} names tokens, and so does the pair: {','.join(tokens)}; give tokens in "
            "one of both places"
        )
    return TokenMetric(kind, tuple(listed.split(",")) if colon else tuple(tokens))


def resolve_index(name: str, index: int, num_tokens: int) -> int:
    """Return the place in a text of a position, which may count from its end; raise if it has none.

    >>> resolve_index("query", -1, 5)
    4
    """
    if not -num_tokens <= index < num_tokens:
        raise ValueError(
            f"the text has {pluralise(num_tokens, 'token')} and no {name} {index}; give one in "
            f"{-num_tokens}..{num_tokens - 1}"
        )
    return index % num_tokens


def check_token_ids(tokens: Sequence[int | str], vocabulary: int) -> list[int]:
    """Return tokens that are ids of a model with so many outputs; raise if one is not."""
    ids = [one for one in tokens if isinstance(one, int) and 0 <= one < vocabulary]
    wrong = [one for one in tokens if one not in ids]
    if wrong:
        raise ValueError(
            f"token {wrong[0]!r} is out of range: the model has outputs for tokens 0.."
            f"{vocabulary - 1}; give one of these"
        )
    return ids


def find_token_ids(model: nn.Module, tokens: Sequence[int | str]) -> list[int]:
    """Return the ids of tokens, given as ids or as words."""
    return [one if isinstance(one, int) else find_token_id(model, one) for one in tokens]


def find_token_id(model: nn.Module, word: str) -> int:
    """Return the id of a word that a model encodes as one token; raise if it is none or several."""
    reader = make_reader(model)
    row = (reader.read_target if is_encoder_decoder(model) else reader.read_source)(word)
    places = [n for n, (start, stop) in enumerate(row.offsets) if start < stop]
    if len(places) != 1:
        shown = " ".join(repr(row.words[n]) for n in places) or "none"
        raise ValueError(
            f"the metric needs {word!r} as one token, but the tokenizer makes {len(places)}: "
            f"{shown}; give a word that is one token (words after a space may need the space)"
        )
    token_id = row.ids[places[0]]
    if token_id == find_unknown_id(model):
        raise ValueError(
            f"the metric needs {word!r}, but the tokenizer does not know it: token {token_id} "
            "stands for all unknown words; give a word of the vocabulary"
        )
    return token_id
