"""Ways to find how much each head matters in a text, each under the name of the paper that has it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import nearest
from .objectives import Objective, Question
from .passing import Kept, Passage, Silent
from .rating import Worths

Clock = Callable[[], None]
GRANULARITIES = ("paper", "code", "bertology")


class TimeUp(Exception):
    """The seconds that were given are used up."""


def clock(seconds: float | None, now: Callable[[], float] = time.monotonic) -> Clock:
    """What is asked between two runs whether there is time for another."""
    begun = now()

    def check() -> None:
        if seconds is not None and now() - begun > seconds:
            raise TimeUp

    return check


class Text(NamedTuple):
    """A text as methods see it: its number, its way through the model, and what is asked of it."""

    number: int
    way: Passage
    question: Question
    objective: Objective

    def value(self, said: object) -> Tensor:
        """The objective of what a model says."""
        plain = None if self.objective.sloped else self.way.plain
        return self.objective.value(said, plain, self.question)

    def without(self, silenced: Mapping[str, Sequence[int]]) -> float:
        """The objective while these heads are silent."""
        said = self.way.watched({name: Silent(*heads) for name, heads in silenced.items()})
        return float(self.value(said))


class Method(ABC):
    """A way to find what every head is worth in some texts.

    `sloped` says whether it needs the objective's gradients, `tested` whether what it gives may be of either sign, so
    that it can be told from chance; `batch` texts are asked at once. `measures` names what it measures where that is no
    objective of the caller's; `notes` say what must be known beside.
    """

    name: str
    sloped: ClassVar[bool] = False
    tested: ClassVar[str] = "none"
    measures: ClassVar[str] = ""
    notes: ClassVar[tuple[str, ...]] = ()
    batch: int = 1

    def refuses(self, model: nn.Module) -> str:
        """Why it cannot be used on this model; empty if it can."""
        return ""

    @abstractmethod
    def values(self, texts: Sequence[Text], check: Clock) -> Worths:
        """The sums of every head of every site over these texts, and what they are means over."""


@dataclass(frozen=True)
class LeaveOneOut(Method):
    """How much more the objective is when one head alone is silent: positive where the head helps (1905.10650)."""

    name = "leave-one-out"
    tested = "signs"

    def values(self, texts: Sequence[Text], check: Clock) -> Worths:
        text = texts[0]
        before, found = float(text.value(text.way.plain)), dict[str, list[float]]()
        for site, count in text.way.counts.items():
            for head in range(count):
                check()
                found.setdefault(site, []).append(text.without({site: [head]}) - before)
        return {site: _one(np.array(told)) for site, told in found.items()}


@dataclass(frozen=True)
class Shapley(Method):
    """What a head adds to those that still speak, a mean over orders in which they fall silent (2210.05709).

    It needs no gradients, and sees that two heads stand in for each other, which leave-one-out does not. Each text
    draws `orders` of its own; what all heads are worth together is what silence of all of them costs, exactly.
    """

    name = "shapley"
    tested = "signs"
    orders: int = 1
    seed: int = 0

    def values(self, texts: Sequence[Text], check: Clock) -> Worths:
        text = texts[0]
        every = [(site, head) for site, count in text.way.counts.items() for head in range(count)]
        found = {site: np.zeros(count) for site, count in text.way.counts.items()}
        draw, plain = np.random.default_rng((self.seed, text.number)), float(text.value(text.way.plain))
        for _ in range(self.orders):
            silenced, before = dict[str, list[int]](), plain
            for site, head in (every[n] for n in draw.permutation(len(every))):
                check()
                silenced.setdefault(site, []).append(head)
                after = text.without(silenced)
                found[site][head] += (after - before) / self.orders
                before = after
        return {site: _one(told) for site, told in found.items()}


@dataclass(frozen=True)
class Michel(Method):
    """z_h . dL/dz_h, which is how L follows a mask on the head, in one of three granularities (1905.10650).

    "paper": the size of its sum over the tokens of a text, a mean over texts. "code": as the authors' code has it, the
    sum of its sizes token by token, over all tokens. "bertology": as transformers had it, the size of its sum over
    `batch` texts, whose L is one mean, over all tokens.
    """

    granularity: str = "paper"
    batch: int = 1
    sloped = True

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            known = nearest(self.granularity, GRANULARITIES)
            raise ValueError(f"granularity={self.granularity!r} is unknown; {known}")
        if self.batch != 1 and (self.granularity != "bertology" or self.batch < 1):
            raise ValueError(f"batch={self.batch} texts are summed for granularity='bertology' alone; leave it out")

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - it follows from the fields
        """As it is asked for."""
        return "michel" if self.granularity == "paper" else f"michel-{self.granularity}"

    def values(self, texts: Sequence[Text], check: Clock) -> Worths:
        if self.granularity == "bertology":
            return self._batch(texts, check)
        found = {site: slope.by_token for site, slope in slopes(texts[0]).items()}
        if self.granularity == "paper":
            return {site: _one(np.abs(told.sum(0))) for site, told in found.items()}
        return {site: (np.abs(told).sum(0), np.full(told.shape[1], len(told))) for site, told in found.items()}

    def _batch(self, texts: Sequence[Text], check: Clock) -> Worths:
        asked = sum(text.question.asked for text in texts)
        sums, tokens = dict[str, np.ndarray](), dict[str, int]()
        for text in texts:
            check()
            for site, slope in slopes(text).items():
                share = slope.by_token.sum(0) * text.question.asked / asked
                sums[site] = sums.get(site, 0) + share
                tokens[site] = tokens.get(site, 0) + len(slope.by_token)
        return {site: (np.abs(told), np.full(len(told), float(tokens[site]))) for site, told in sums.items()}


@dataclass(frozen=True)
class Taylor(Method):
    """What leave-one-out is to first order, - z_h . dL/dz_h of a text; of="size", the size of its mean (1611.06440)."""

    of: str = "change"
    sloped = True

    def __post_init__(self) -> None:
        if self.of not in ("change", "size"):
            raise ValueError(f"of={self.of!r} is unknown; {nearest(self.of, ('change', 'size'))}")

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - it follows from the fields
        """As it is asked for."""
        return "taylor" if self.of == "change" else "taylor-size"

    @property
    def tested(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - it follows from the fields
        """Only what has a sign is."""
        return "signs" if self.of == "change" else "none"

    def values(self, texts: Sequence[Text], check: Clock) -> Worths:
        found = slopes(texts[0])
        if self.of == "change":
            return {site: _one(-slope.by_token.sum(0)) for site, slope in found.items()}
        return {site: _one(np.abs(slope.by_token.mean(0)) / slope.width) for site, slope in found.items()}


class Slope(NamedTuple):
    """z_h . dL/dz_h at each token, [tokens, heads], and how wide a head is."""

    by_token: np.ndarray
    width: int


def slopes(text: Text) -> dict[str, Slope]:
    """How the objective follows what each head says."""
    kept = {one.site.name: Kept() for one in text.way.those}
    with torch.enable_grad():
        value = text.value(text.way.sloped(kept))
        every = [z for one in kept.values() for z in one.z]
        told = torch.autograd.grad(value, every, allow_unused=True)
    grads = iter(told)
    return {name: _slope([(z, next(grads)) for z in one.z]) for name, one in kept.items() if one.z}


def _slope(told: Sequence[tuple[Tensor, Tensor | None]]) -> Slope:
    """Of all calls of a site: tokens one behind the other."""
    flat = [(z * (torch.zeros_like(z) if grad is None else grad)).sum(-1).flatten(0, -2) for z, grad in told]
    return Slope(torch.cat(flat).detach().double().cpu().numpy(), told[0][0].shape[-1])


def _one(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A mean over texts."""
    return sums, np.ones(len(sums))
