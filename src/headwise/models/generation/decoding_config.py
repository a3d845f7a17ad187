"""Decoding options: sampling filters, beams and stop conditions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...util.errors import SpecError

# smaller ones take the likeliest token, as logits divided by them may overflow
MIN_TEMPERATURE = 1e-5
MAX_STOPS = 64
MAX_STOP_CHARS = 4096  # of one stop text


@dataclass(frozen=True)
class DecodingConfig:
    """How the next token is chosen, how many beams are searched, and where an output ends.

    Filters apply in this order. `repetition` penalises the logits of tokens in the prompt or the
    output (1909.05858); then logits are divided by the temperature. `top_k` keeps the k most likely
    tokens, `top_p` the smallest set of the most likely that has this probability (1904.09751),
    `min_p` tokens with at least this fraction of the highest probability (2407.01082).

    `beams` is the number of hypotheses searched at once; the `best` finished ones are returned. A
    score is the sum of log-probabilities divided by length ** `length_penalty`; the length counts
    the end token (1609.08144 uses another formula). An output stops before any text or id in
    `stop`, and before any id in `end` (None: the end ids of `model.usage`; (): never).

    `compile` compiles the decode step at its first use, in about a minute, and captures it as a
    CUDA graph on CUDA: worth it for many tokens on a GPU. Rows that have ended stay in the batch.

    >>> DecodingConfig(top_p=0.0)
    Traceback (most recent call last):
    headwise.util.errors.SpecError: top_p must be above 0 and at most 1, got 0.0; leave it out to
    keep every token
    """

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition: float = 1.0
    beams: int = 1
    length_penalty: float = 1.0
    best: int = 1
    stop: tuple[str | int, ...] = ()
    end: tuple[int, ...] | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        _check_count("top_k", self.top_k, "leave it out")
        for name in ("top_p", "min_p"):
            share = getattr(self, name)
            if share is not None and not (_is_number(share) and 0 < share <= 1):
                raise SpecError(
                    f"{name} must be above 0 and at most 1, got {share!r}; leave it out to keep "
                    "every token"
                )
        if not (_is_number(self.repetition) and self.repetition > 0):
            raise SpecError(
                f"repetition must be a number above 0, got {self.repetition!r}; give 1 for no "
                "penalty"
            )
        if not _is_number(self.length_penalty):
            raise SpecError(
                f"length_penalty must be a number, got {self.length_penalty!r}; give 0 for the "
                "sum, 1 for the mean"
            )
        for name in ("beams", "best"):
            _check_count(name, getattr(self, name) or 0, f"give {name}=1 for one output")
        if self.best > self.beams:
            raise SpecError(
                f"cannot return best={self.best} of beams={self.beams} beams; give "
                f"beams={self.best}"
            )
        if self.compile and self.beams > 1:
            raise SpecError(
                f"compile=True does not search beams={self.beams} beams; leave one of them out"
            )
        value = self.stop
        stops = (value,) if isinstance(value, (str, int)) else tuple(value)
        if len(stops) > MAX_STOPS:
            raise SpecError(f"stop has {len(stops)} texts and ids; give at most {MAX_STOPS}")
        for stop in stops:
            if isinstance(stop, str) and len(stop) > MAX_STOP_CHARS:
                raise SpecError(
                    f"stop holds a text of {len(stop)} characters; give at most {MAX_STOP_CHARS}"
                )
            if not (stop if isinstance(stop, str) else _is_whole_number(stop) and stop >= 0):
                raise SpecError(
                    f"stop must be a non-empty text or a token id, got {stop!r}; give stop='.', "
                    "for example"
                )
        object.__setattr__(self, "stop", stops)
        if self.end is not None:
            object.__setattr__(self, "end", _parse_ids("end", self.end))

    @property
    def filters(self) -> dict[str, float]:
        """The sampling filters that are set, by name."""
        filters = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return {name: value for name, value in filters.items() if value is not None}

    @property
    def words(self) -> tuple[str, ...]:
        """The texts that stop an output."""
        return tuple(stop for stop in self.stop if isinstance(stop, str))

    def ends(self, default_ids: Iterable[int]) -> frozenset[int]:
        """Return the ids that an output stops before; `default_ids` are the model's own end ids."""
        end_ids = default_ids if self.end is None else self.end
        return frozenset([*end_ids, *(stop for stop in self.stop if isinstance(stop, int))])


def check_decoding(config: DecodingConfig, temperature: float, vocab_size: int) -> None:
    """Refuse options that contradict each other, the temperature or the size of the vocabulary.

    >>> check_decoding(DecodingConfig(beams=12), 0.0, 11)
    Traceback (most recent call last):
    headwise.util.errors.SpecError: beams=12 is more than the 11 tokens of the vocabulary; give at
    most beams=11
    """
    if not isinstance(config, DecodingConfig):
        raise SpecError(
            f"config must be a DecodingConfig, got {config!r}; give DecodingConfig(top_p=0.9), "
            "for example"
        )
    if not (_is_number(temperature) and temperature >= 0):
        raise SpecError(
            f"temperature must be a finite number >= 0, got {temperature!r}; give 0 for no sampling"
        )
    if config.beams > vocab_size:
        fact = f"beams={config.beams} is more than the {vocab_size} tokens of the vocabulary"
        raise SpecError(f"{fact}; give at most beams={vocab_size}")
    if config.beams > 1 and temperature >= MIN_TEMPERATURE:
        raise SpecError(
            f"beam search does not sample, got beams={config.beams} and "
            f"temperature={temperature:g}; give temperature=0, or leave beams out"
        )
    if config.filters and temperature < MIN_TEMPERATURE:
        name, value = next(iter(config.filters.items()))
        fact = f"temperature={temperature:g} does not sample"
        raise SpecError(
            f"{name}={value} has no effect: {fact}; give temperature=1, or leave {name} out"
        )
    for end_id in config.ends(()):
        if end_id >= vocab_size:
            raise SpecError(
                f"end id {end_id} is outside the vocabulary of {vocab_size}; give "
                f"0..{vocab_size - 1}"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_count(name: str, value: Any, remedy: str) -> None:
    if value is not None and not (_is_whole_number(value) and value >= 1):
        raise SpecError(f"{name} must be an integer of at least 1, got {value!r}; or {remedy}")


def _parse_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = (value,) if _is_whole_number(value) else tuple(value)
    if not all(_is_whole_number(token_id) and token_id >= 0 for token_id in ids):
        raise SpecError(
            f"{name} must be one or more token ids, got {value!r}; give {name}=2, for example"
        )
    return ids


DEFAULT_DECODING = DecodingConfig()
