"""The translator made smaller, with half of its heads and with shared keys and values, each with its proof."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import SpecError
from ..heads.scene import Scene
from ..heads.sources import of_examples
from ..hub.loading import load
from ..models import Transformer
from ..surgery import By, Keep, Pool
from ..surgery.folders import check_free, plan_of, write
from ..surgery.marks import mark_of
from ..surgery.phases import Pace
from ..surgery.proof import JSON
from ..surgery.proof import write as write_proof
from ..surgery.proving import Asked, prove
from ..surgery.pruning import prune
from ..surgery.scores import task_rows
from ..surgery.sharing import share
from ..surgery.uptraining import Uptraining, uptrain
from .progress import Progress
from .translator import Translator

SCORE = "exact_match"
Tell = Callable[[str], object]


class Made(NamedTuple):
    """A model with other heads, what was done in a sentence and as plain values, and what is to be proven of it."""

    net: Transformer
    what: str
    record: Mapping[str, Any]
    asked: Mapping[str, Any]


class Change(NamedTuple):
    """A way to make a translator smaller: its folder, its page, and for what part of the training it learns again."""

    name: str
    title: str
    make: Callable[[Transformer, Sequence[Scene], Tell], Made]
    part: float


class Scale(NamedTuple):
    """How many examples are learned from, look at heads, prove, and are translated; how long speed is measured."""

    lessons: int = 4000
    judges: int = 128
    texts: int = 64
    examples: int = 400
    seconds: float = 3.0


USUAL = Scale()
LEARNING = Uptraining(steps=1, batch=64, rate=1e-3, alpha=1.0, every=50)  # from the translator as it was alone


def halved(net: Transformer, texts: Sequence[Scene], tell: Tell) -> Made:
    """Half of all heads, those worth most; the others leave what they said on average."""
    done = prune(net, Keep(0.5, By(sample=64), per="model"), texts, fold="mean", tell=tell)
    asked = {"keep": dict(done.plan.changes), "said": dict(done.said), "cut": (net, done.after)}
    return Made(done.after, done.plan.sentence, done.data, asked)


def pooled(net: Transformer, texts: Sequence[Scene], tell: Tell) -> Made:
    """One head of keys and values for all query heads of a layer, the mean of those there were, aligned first."""
    tell("aligning keys and values")
    done = share(net, Pool(1, align="both"), texts)
    asked = {"same": {"aligned, before heads are pooled": lambda: done.same}}
    return Made(done.after, done.way.sentence, done.data, asked)


CHANGES = (
    Change("pruned", "Half of its heads", halved, 1 / 2),
    Change("shared", "Keys and values shared", pooled, 1 / 4),
)


class Smaller:
    """A translator changed in one way, in a folder beside it; made when its numbers are asked for, if it is not there.

    Numbers are always those of the folder, so that a second look shows what the first did.
    """

    def __init__(self, translator: Translator, change: Change, scale: Scale = USUAL) -> None:
        self.translator, self.change, self.scale = translator, change, scale
        self.folder = translator.folder / change.name
        self._data: dict[str, Any] | None = None
        if self._known() is None:
            check_free(self.folder)

    @property
    def how(self) -> Uptraining:
        """How it learns again: a part as long as it was trained."""
        return replace(LEARNING, steps=max(1, round(self.change.part * self.translator.recipe.steps)))

    @property
    def data(self) -> dict[str, Any]:
        """What was done, and the proof of it, as plain values."""
        if self._data is None:
            self._ready()
            proof = json.loads((self.folder / JSON).read_text(encoding="utf-8"))
            self._data = {"folder": str(self.folder), **plan_of(self.folder).done, "proof": proof}
        return self._data

    def _ready(self) -> None:
        """See to it that the folder holds what was made of this translator, in this way."""
        net = self.translator.result.net
        asked = {"model": mark_of(net), "how": repr(self.how), "scale": list(self.scale)}
        known = self._known()
        if known is not None and (self.folder / JSON).is_file() and known.items() >= asked.items():
            return
        if known is not None:
            shutil.rmtree(self.folder)
        self._make(net.eval(), asked)

    def _known(self) -> dict[str, Any] | None:
        """What an earlier demo left in the folder; what is not the demo's own is not touched."""
        try:
            done = plan_of(self.folder).done
        except SpecError:
            return None
        return dict(done) if done.get("demo") == self.change.name else None

    def _make(self, net: Transformer, asked: Mapping[str, Any]) -> None:
        task, scale, screen = self.translator.task, self.scale, Progress(self.change.name, self.how.steps)
        screen.tell("examples to learn from")
        texts = of_examples(net, task, scale.lessons, "train").counted()
        made = self.change.make(net, texts[: scale.judges], screen.tell)
        screen.tell("translating")
        cut = next(row for row in task_rows(net, made.net, task, scale.examples) if row.name == SCORE)
        learnt = uptrain(made.net, net, texts, self.how, screen.point)
        if learnt.ended:
            raise KeyboardInterrupt(learnt.ended)
        record = {**made.record, **asked, "demo": self.change.name, "cut": cut.data, "kept": learnt.step}
        record |= {"steps": self.how.steps, "curve": [at._asdict() for at in learnt.curve]}
        write(learnt.net, self.translator.folder, self.folder, record)
        notes = f"learned again for {self.how.steps} steps from what the model was; step {learnt.step} is kept"
        how = Asked(
            made.what, again={"headwise.load of what was written": lambda: load(self.folder)}, task=task,
            examples=scale.examples, pace=Pace(batch=16, length=16, steps=task.answers, seconds=scale.seconds),
            notes=(notes,), command="headwise demo", **made.asked,
        )  # fmt: skip
        proof = prove(net, learnt.net, of_examples(net, task, scale.texts).counted(), how, screen.tell)
        screen.tell("")
        write_proof(proof, self.folder)
