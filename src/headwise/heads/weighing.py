"""How much every head matters for a named objective, over texts, with intervals, in a time that is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

import numpy as np
from torch import nn

from ..errors import nearest
from ..hub.finding import able
from ..hub.routes.base import Found
from .lrp import Relevance
from .methods import Clock, LeaveOneOut, Method, Michel, Shapley, Taylor, Text, TimeUp, clock
from .objectives import Objective, objective_of
from .passing import passage
from .rating import LEVEL, How, Importance, Worths, rated
from .scene import Scene
from .significance import least_p

METHODS: Mapping[str, Method] = {
    one.name: one
    for one in (
        LeaveOneOut(), Shapley(), Michel(), Michel("code"), Michel("bertology", batch=8), Taylor(), Taylor("size"),
        Relevance(),
    )
}  # fmt: skip
USUAL = How()


def importance(
    model: nn.Module,
    scenes: Iterable[Scene],
    *,
    method: str | Method = "leave-one-out",
    objective: str | Objective | None = None,
    how: How = USUAL,
    tell: Callable[[int], object] = lambda _: None,
) -> Importance:
    """How much each head of a model matters over texts: for the loss of the model's own head, or how far it drifts.

    `method` and `objective` are names, or objects with fields of their own; the objective is chosen by the model's head
    where none is named, and `notes` say which. Texts are read one at a time; `tell` hears how many there were. When the
    budget is used up, what was begun is left out, and said.

    >>> import headwise as hw, torch
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... )
    >>> texts = [Scene({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)]
    >>> found = importance(net.eval(), texts, method="taylor")
    >>> found.objective, found.texts, [(one.site, one.head) for one in found.heads]
    ('next-token', 5, [('decoder.0.attention', 0), ('decoder.0.attention', 1)])
    """
    check, way, those = clock(how.budget), _method(method), able(model, "silence")
    if why := way.refuses(model):
        raise ValueError(f"{way.name} cannot be used: {why}")
    drawn, notes = _drawn(scenes, how)
    if (first := next(drawn, None)) is None:
        raise ValueError("no text was given; give at least two")
    chosen, said = _objective(model, objective, first, way)
    units = Units(model, those, way, chosen)
    units.read(chain([first], drawn), check, tell)
    heads = rated(those, units.found, how, way.tested)
    notes += [*([said] if said else []), *units.notes(how, len(heads)), *way.notes]
    return Importance(type(model).__name__, way.name, way.measures or chosen.name, units.count, heads, tuple(notes))


class Units:
    """What was found text by text, or batch by batch."""

    def __init__(self, model: nn.Module, those: Sequence[Found], method: Method, objective: Objective) -> None:
        self.model, self.those, self.method, self.objective = model, those, method, objective
        self.found: list[Worths] = []
        self.count = self.silent = 0
        self.stopped, self.restarts = False, True

    def read(self, scenes: Iterator[Scene], check: Clock, tell: Callable[[int], object]) -> None:
        """Read texts to the end, or as long as there is time."""
        asking = self._asking(scenes)
        try:
            while texts := list(islice(asking, self.method.batch)):
                check()
                self.found.append(self.method.values(texts, check))
                self.count += len(texts)
                tell(self.count)
        except TimeUp:
            self.stopped = True
        if len(self.found) < 2:
            what = "texts" if self.method.batch == 1 else f"batches of {self.method.batch} texts"
            more = "; give a larger budget" if self.stopped else ""
            raise ValueError(f"{len(self.found)} {what} leave no interval; give at least two{more}")

    def _asking(self, scenes: Iterator[Scene]) -> Iterator[Text]:
        for number, scene in enumerate(scenes):
            question = self.objective.question(self.model, scene, number)
            if not question.asked:
                self.silent += 1
                continue
            way = passage(self.model, self.those, question.given)
            self.restarts = self.restarts and way.restarts
            yield Text(number, way, question, self.objective)

    def notes(self, how: How, heads: int) -> list[str]:
        """What must be known beside the numbers."""
        told, least = [], least_p(len(self.found))
        if self.method.tested == "signs" and how.correction != "none" and least * heads > LEVEL:
            told.append(f"{len(self.found)} texts tell no head from chance: no p is below {least:g}, of {heads} heads")
        if self.stopped:
            told.append(f"stopped after {self.count} texts, when {how.budget:g} seconds were used up")
        if self.silent:
            told.append(f"{self.silent} texts in which nothing is asked were left out")
        if not self.restarts and not self.method.sloped:
            told.append(f"{type(self.model).__name__} is run whole for every head, for its layers are not known here")
        missing = [one.site.name for one in self.those if not all(one.site.name in unit for unit in self.found)]
        if missing:
            told.append(f"not rated, for not every text reaches them: {', '.join(missing)}")
        return told


def _method(asked: str | Method) -> Method:
    if isinstance(asked, Method):
        return asked
    if asked not in METHODS:
        raise ValueError(f"there is no method {asked!r}; {nearest(str(asked), METHODS)}")
    return METHODS[asked]


def _objective(model: nn.Module, asked: str | Objective | None, scene: Scene, method: Method) -> tuple[Objective, str]:
    """What is measured, if this method can measure it."""
    if method.measures:
        if asked is not None:
            raise ValueError(f"{method.name} measures the {method.measures}; leave objective out")
        return objective_of(model, "drift", scene)[0], ""
    chosen, said = objective_of(model, asked, scene)
    if method.sloped and not chosen.sloped:
        fact = f"{chosen.name} has no slope at the model itself, which {method.name} asks for"
        raise ValueError(f"{fact}; use leave-one-out or shapley, or a model with a head and labels")
    return chosen, said


def _drawn(scenes: Iterable[Scene], how: How) -> tuple[Iterator[Scene], list[str]]:
    """The texts, or as many of them as are asked for, each alike likely, in their order."""
    if how.sample is None:
        return iter(scenes), []
    draw, kept, count = np.random.default_rng(how.seed), dict[int, Scene](), 0
    places: list[int] = []
    for count, scene in enumerate(scenes, 1):
        place = len(places) if len(places) < how.sample else int(draw.integers(count))
        if place >= how.sample:
            continue
        if place < len(places):
            del kept[places[place]]
            places[place] = count
        else:
            places.append(count)
        kept[count] = scene
    notes = [f"{len(kept)} of {count} texts, drawn with seed {how.seed}"]
    return iter([kept[number] for number in sorted(kept)]), notes
