"""What importance is importance of: a loss that the model's own head has, or how far its output drifts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import nearest
from ..hub.readable import Readable, readable
from ..tasks import IGNORED
from .saying import head_of, ids_name, mask_of, output_of
from .scene import LABELS, Scene

LOSSES = ("next-token", "translation", "label")


class Question(NamedTuple):
    """What a model is given, and what is wanted at each place of its output, where anything is."""

    given: Readable
    labels: Tensor | None = None

    @property
    def asked(self) -> int:
        """How many places are asked; an output that is only compared is one."""
        return 1 if self.labels is None else int((self.labels != IGNORED).sum())


class Objective(ABC):
    """One number for each text that says how well, or how changed, a model speaks; more is worse.

    `sloped` says whether it has a slope where the model is unedited.
    """

    name: str
    sloped: bool = True

    @abstractmethod
    def refuses(self, model: nn.Module, scene: Scene) -> str:
        """Why it cannot be measured on this model; empty if it can."""

    @abstractmethod
    def question(self, model: nn.Module, scene: Scene, number: int) -> Question:
        """What a text, the one of this number, asks of a model."""

    @abstractmethod
    def value(self, said: Any, plain: Any, question: Question) -> Tensor:
        """The number, of what the model said and what it says unedited."""


@dataclass(frozen=True)
class Loss(Objective):
    """- log p of what is wanted, a mean over the places of a text that are asked.

    `name` is the head that says it: "next-token", "translation" (of the text, with the true one before it) or "label".
    What is wanted is the next token, or what the scene's inputs say under "labels", place by place, -100 for none.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in LOSSES:
            raise ValueError(f"Loss({self.name!r}) is unknown; {nearest(self.name, LOSSES)}")

    def refuses(self, model: nn.Module, scene: Scene) -> str:
        says = head_of(model)
        if says != self.name:
            return f"{type(model).__name__} has {f'a {says} head' if says else 'no head'}, so no {self.name} loss"
        if self.name == "label" and _labels(scene) is None:
            return "the texts come without labels"
        return ""

    def question(self, model: nn.Module, scene: Scene, number: int) -> Question:
        given, told = _given(model, scene), _labels(scene)
        if told is not None or self.name == "label":
            if told is None:
                raise ValueError(f"text {number} has no label; give inputs with {LABELS!r}, as the first has them")
            return Question(given, told.flatten())
        ids = torch.tensor(_ids(model, given))
        return Question(given, torch.cat([ids[1:], ids.new_full((1,), IGNORED)]))

    def value(self, said: Any, plain: Any, question: Question) -> Tensor:
        return _loss(said, question)


@dataclass(frozen=True)
class MaskedLoss(Objective):
    """- log p of tokens behind masks: a `share` of each text is masked, at least one, the same for every head.

    `mask` is the id of the mask, the tokenizer's own where nothing is said. Where a scene's inputs say "labels", its
    masks are its own.
    """

    name = "masked-token"
    mask: int | None = None
    share: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share!r} is no share of tokens; give more than 0 and at most 1")

    def refuses(self, model: nn.Module, scene: Scene) -> str:
        says = head_of(model)
        if says != self.name:
            return f"{type(model).__name__} has {f'a {says} head' if says else 'no head'}, so no {self.name} loss"
        if self.mask is None and _labels(scene) is None and mask_of(model) is None:
            return f"{type(model).__name__} has no mask that is known; say it, as in MaskedLoss(mask=103)"
        return ""

    def question(self, model: nn.Module, scene: Scene, number: int) -> Question:
        given, told = _given(model, scene), _labels(scene)
        if told is not None:
            return Question(given, told.flatten())
        ids = torch.tensor(_ids(model, given))
        special = scene.streams["text"].special.cpu() if "text" in scene.streams else torch.zeros(len(ids)).bool()
        free = np.flatnonzero(~special.numpy())
        count = min(len(free), max(1, round(self.share * len(free))))
        draw = np.random.default_rng((self.seed, number))
        places = torch.from_numpy(draw.choice(free, count, replace=False))
        labels = torch.full_like(ids, IGNORED)
        labels[places] = ids[places]
        mask = mask_of(model) if self.mask is None else self.mask
        assert mask is not None
        name = ids_name(model)
        told_ids = given.names[name].clone()
        told_ids[0, places.to(told_ids.device)] = mask
        return Question(replace(given, names={**given.names, name: told_ids}), labels)

    def value(self, said: Any, plain: Any, question: Question) -> Tensor:
        return _loss(said, question)


@dataclass(frozen=True)
class Drift(Objective):
    """How far what a model says lies from what it says unedited: by="cosine", 1 - cosine; "l2", |a - b| / |b|.

    of="pooled": of the mean over tokens; "tokens": the mean over tokens of each one's. It has no slope where nothing is
    edited, so that no method with gradients can take it.

    >>> a, b = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[4.0, 3.0]]])
    >>> [round(Drift(by=by).value(a, b, Question(Readable())).item(), 4) for by in ("cosine", "l2")]
    [0.04, 0.2828]
    """

    of: str = "pooled"
    by: str = "cosine"
    sloped = False

    def __post_init__(self) -> None:
        for name, known in (("of", ("pooled", "tokens")), ("by", ("cosine", "l2"))):
            if (said := getattr(self, name)) not in known:
                raise ValueError(f"Drift({name}={said!r}) is unknown; {nearest(said, known)}")

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - it follows from the fields
        """As it is asked for."""
        return f"{'token-' if self.of == 'tokens' else ''}drift{'' if self.by == 'cosine' else '-l2'}"

    def refuses(self, model: nn.Module, scene: Scene) -> str:
        return ""

    def question(self, model: nn.Module, scene: Scene, number: int) -> Question:
        return Question(_given(model, scene))

    def value(self, said: Any, plain: Any, question: Question) -> Tensor:
        new, old = (_vectors(one, self.of) for one in (said, plain))
        if self.by == "l2":
            return ((new - old).norm(dim=-1) / old.norm(dim=-1)).mean()
        return 1 - F.cosine_similarity(new, old, dim=-1).mean()


OBJECTIVES: Mapping[str, Objective] = {
    one.name: one
    for one in (
        Loss("next-token"), MaskedLoss(), Loss("label"), Loss("translation"),
        Drift(), Drift("tokens"), Drift("pooled", "l2"), Drift("tokens", "l2"),
    )
}  # fmt: skip


def objective_of(model: nn.Module, asked: str | Objective | None, scene: Scene) -> tuple[Objective, str]:
    """What is measured of a model, and why where nobody asked for it: the loss of its head, else drift."""
    if asked is not None:
        if isinstance(asked, str) and asked not in OBJECTIVES:
            raise ValueError(f"there is no objective {asked!r}; {nearest(asked, OBJECTIVES)}")
        found = OBJECTIVES[asked] if isinstance(asked, str) else asked
        if why := found.refuses(model, scene):
            raise ValueError(f"{found.name} cannot be measured: {why}; objective='drift' needs no head")
        return found, ""
    says = head_of(model)
    if not says:
        return Drift(), f"{type(model).__name__} has no head whose loss is known, so what is measured is drift"
    found = OBJECTIVES[says]
    if why := found.refuses(model, scene):
        return Drift(), f"what is measured is drift: {why}"
    return found, f"what is measured is {found.name} loss, of the model's own head"


def _given(model: nn.Module, scene: Scene) -> Readable:
    given = readable(model, scene.given, 0)
    if any(len(rows) > 1 for rows in given.rows.values()):
        raise ValueError(f"a scene is one text, but its inputs hold {given.batch} rows; give each row a scene")
    return given


def _labels(scene: Scene) -> Tensor | None:
    told = scene.inputs.get(LABELS) if isinstance(scene.inputs, Mapping) else None
    return torch.as_tensor(told) if told is not None else None


def _ids(model: nn.Module, given: Readable) -> tuple[int, ...]:
    if "text" not in given.rows:
        raise ValueError(f"{type(model).__name__} is given no ids of a text, so no next token is known; give ids, "
                         "or labels beside the inputs")  # fmt: skip
    return given.rows["text"][0].ids


def _loss(said: Any, question: Question) -> Tensor:
    logits, labels = _logits(said), question.labels
    assert labels is not None
    flat = logits.reshape(-1, logits.shape[-1])
    if len(flat) != len(labels):
        raise ValueError(f"the model says {len(flat)} places and {len(labels)} labels are given; give one for each")
    asked = labels[labels != IGNORED]
    if len(wrong := asked[(asked < 0) | (asked >= flat.shape[1])]):
        known = flat.shape[1]
        raise ValueError(
            f"a label of a text is {int(wrong[0])}, but the model has {known} of them; give 0..{known - 1}"
        )
    exact = torch.promote_types(flat.dtype, torch.float32)
    return F.cross_entropy(flat.to(exact), labels.to(flat.device), ignore_index=IGNORED)


def _logits(said: Any) -> Tensor:
    return said if isinstance(said, Tensor) else said.logits


def _vectors(said: Any, of: str) -> Tensor:
    """[1 or tokens, width] of one text."""
    found = output_of(said)
    flat = found.reshape(-1, found.shape[-1]).to(torch.promote_types(found.dtype, torch.float32))
    return flat.mean(0, keepdim=True) if of == "pooled" else flat
