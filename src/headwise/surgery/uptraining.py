"""A cut or shared model learns again, from what it was made of and from texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..errors import SpecError
from ..heads.scene import Scene
from ..models import Transformer
from .course import Alone, Course, Point, Progress, unheard
from .learning import Learning, Lessons, Pupil, copied
from .lessons import Texts
from .rebuilding import rebuilt

WHICH = ("all", "attention")
KEEP = ("best", "last")


@dataclass(frozen=True, repr=False, kw_only=True)
class Uptraining(Learning):
    """The same, of a model that was changed and learns again.

    which="attention" lets nothing but attentions learn. keep="best" gives the model as it was at the lowest loss of
    texts held back, which may be step 0, before any; "last" as it ended.

    >>> Uptraining(steps=50, alpha=1.0)
    Uptraining(steps=50, alpha=1.0)
    """

    choices: ClassVar = {**Learning.choices, "which": WHICH, "keep": KEEP}
    which: str = "all"
    keep: str = "best"


class Uptrained(NamedTuple):
    """A model that has learnt, and how: its tensors are those of `step`, and `ended` says what ended it early."""

    net: Transformer
    curve: tuple[Point, ...]
    step: int
    ended: str
    notes: tuple[str, ...]


def uptrain(
    student: Transformer,
    teacher: Transformer | None,
    scenes: Sequence[Scene],
    how: Uptraining,
    progress: Progress = unheard,
) -> Uptrained:
    """A copy of a model that has learnt to say what its teacher says, and what its texts want.

    Neither of the two is changed. `progress` hears of every step. Who interrupts is given the best so far.
    """
    lessons = Lessons(Texts(student, scenes, how.objective), how)
    net = copied(student, rebuilt(student, {}))
    pupil = Pupil(net, teacher, lessons, learned(net, how.which))
    course = Course(pupil, Alone(), progress, how.keep)
    course.go()
    net.requires_grad_(True).to(next(student.parameters()).dtype).train(student.training)
    return Uptrained(net, tuple(course.curve), course.kept, course.ended, lessons.texts.notes)


def learned(net: Transformer, which: str = "all") -> list[str]:
    """The names of what may learn: all that is learned, or that of attentions.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> learned(hw.build(hw.families.read(config), seed=0), "attention")[0]
    'decoder.0.attention.project.q'
    """
    sites = tuple(f"{site}." for site, _ in net.described.specs())
    found = [name for name, _ in net.named_parameters() if which == "all" or name.startswith(sites)]
    if not found:
        raise SpecError(f"{net.described.name} has no attention that could learn; use which='all'")
    return found
