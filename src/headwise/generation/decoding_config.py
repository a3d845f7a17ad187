"""How tokens are chosen, described."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError, suggest

COMPILE_MODES = ("off", "auto", "on")


@dataclass(frozen=True)
class DecodingConfig:
    """What tokens are drawn from, how many answers are followed at once, and where an answer ends.

    Logits of tokens that were read or written before are first pushed down by `repetition` (1909.05858), then divided
    by the temperature. Of what is likely then, `top_k` keeps the k likeliest tokens, `top_p` the likeliest of these
    that together have this share (1904.09751), `min_p` those at least this share as likely as the likeliest
    (2407.01082). `beams` answers are followed at once, and of those that ended the `best` are told: the highest sums
    of log-likelihoods, each over its length to the power of `length_penalty`, its end included (1609.08144 has
    another). An answer stops before a text or an id of `stop`, and before `end`: what the model's usage says, where
    that is None; () for never. Of a prompt only the last `window` tokens are read, and where an answer reaches the
    last position that a model knows, it goes on from its last `window` tokens. Steps of one token are compiled, "on",
    "off", or "auto" where so many are asked for that it pays.

    >>> DecodingConfig(top_p=0.0)
    Traceback (most recent call last):
    headwise.errors.SpecError: top_p=0.0 keeps no token; give more than 0 and at most 1, or leave it out
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
    window: int | None = None
    compile: str = "off"

    def __post_init__(self) -> None:
        for name in ("top_k", "window"):
            _check_count(name, getattr(self, name), "leave it out")
        for name in ("top_p", "min_p"):
            share = getattr(self, name)
            if share is not None and not (_is_number(share) and 0 < share <= 1):
                keeps = "keeps no token" if name == "top_p" else "is no share"
                raise SpecError(f"{name}={share!r} {keeps}; give more than 0 and at most 1, or leave it out")
        if not (_is_number(self.repetition) and self.repetition > 0):
            raise SpecError(f"repetition={self.repetition!r} is no penalty; give 1 for none, 1.2 for a mild one")
        if not _is_number(self.length_penalty):
            raise SpecError(f"length_penalty={self.length_penalty!r} is no number; give 0 for none, 1 for the mean")
        for name in ("beams", "best"):
            _check_count(name, getattr(self, name) or 0, f"give {name}=1 for one answer")
        if self.best > self.beams:
            raise SpecError(f"best={self.best} of beams={self.beams} answers cannot be told; give beams={self.best}")
        if self.compile not in COMPILE_MODES:
            raise SpecError(f"compile={self.compile!r} is unknown; {suggest(str(self.compile), COMPILE_MODES)}")
        object.__setattr__(self, "stop", _parse_stops(self.stop))
        if self.end is not None:
            object.__setattr__(self, "end", _parse_ids("end", self.end))

    @property
    def filters(self) -> dict[str, float]:
        """What keeps some tokens from being drawn, as said."""
        told = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return {name: value for name, value in told.items() if value is not None}

    @property
    def words(self) -> tuple[str, ...]:
        """The texts that stop an answer."""
        return tuple(one for one in self.stop if isinstance(one, str))

    def ends(self, default_ids: Iterable[int]) -> frozenset[int]:
        """The ids that an answer stops before; `usual` are the model's own."""
        told = default_ids if self.end is None else self.end
        return frozenset([*told, *(one for one in self.stop if isinstance(one, int))])


def check_decoding(config: DecodingConfig, temperature: float, vocab_size: int) -> None:
    """Refuse what cannot be meant together, at this temperature and of so many tokens.

    >>> check_decoding(DecodingConfig(beams=12), 0.0, 11)
    Traceback (most recent call last):
    headwise.errors.SpecError: beams=12 are more than the 11 tokens an answer can begin with; give at most beams=11
    """
    if not isinstance(config, DecodingConfig):
        raise SpecError(f"config={config!r} is no way to decode; give DecodingConfig(top_p=0.9), say")
    if not (_is_number(temperature) and temperature >= 0):
        raise SpecError(f"temperature={temperature!r} cannot be; give 0 for the likeliest token, or 0.8 to draw")
    if config.beams > 1 and temperature:
        fact = f"beams={config.beams} follow the likeliest answers, and temperature={temperature} draws some"
        raise SpecError(f"{fact}; give temperature=0, or beams=1")
    if config.beams > vocab_size:
        fact = f"beams={config.beams} are more than the {vocab_size} tokens an answer can begin with"
        raise SpecError(f"{fact}; give at most beams={vocab_size}")
    if config.filters and not temperature:
        name, value = next(iter(config.filters.items()))
        says = "beams follow the likeliest" if config.beams > 1 else "temperature=0 takes the likeliest"
        raise SpecError(f"{name}={value} is for drawing, but {says}; give temperature=1, or leave {name} out")
    for one in config.ends(()):
        if one >= vocab_size:
            raise SpecError(f"the id {one} cannot end an answer of {vocab_size} tokens; give 0..{vocab_size - 1}")


def _is_number(said: Any) -> bool:
    return isinstance(said, (int, float)) and not isinstance(said, bool) and math.isfinite(said)


def _is_whole_number(said: Any) -> bool:
    return isinstance(said, int) and not isinstance(said, bool)


def _check_count(name: str, value: Any, remedy: str) -> None:
    if value is not None and not (_is_whole_number(value) and value >= 1):
        raise SpecError(f"{name}={value!r} is no count; give a whole number of at least 1, or {remedy}")


def _parse_stops(said: Any) -> tuple[str | int, ...]:
    """Texts and ids, from one of them or several."""
    told = (said,) if isinstance(said, (str, int)) else tuple(said)
    for one in told:
        if not (one if isinstance(one, str) else _is_whole_number(one) and one >= 0):
            raise SpecError(f"stop={one!r} stops nothing; give a text that is not empty, or an id")
    return told


def _parse_ids(name: str, said: Any) -> tuple[int, ...]:
    told = (said,) if _is_whole_number(said) else tuple(said)
    if not all(_is_whole_number(one) and one >= 0 for one in told):
        raise SpecError(f"{name}={said!r} holds no ids; give whole numbers such as {name}=2")
    return told


DEFAULT_DECODING = DecodingConfig()
