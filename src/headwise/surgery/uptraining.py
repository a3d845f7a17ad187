"""A cut or shared model learns again, from what it was made of and from texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..errors import SpecError
from ..heads.scene import Example
from ..models import Transformer
from .course import NoAuxiliaryTraining, RetrainingLoop, RetrainingPoint, PointCallback, no_progress
from .learning import RetrainingOptions, DistillationLoader, Student, cast_for_training
from .lessons import DistillationTexts
from .rebuilding import replace_attentions

TRAINABLE_PARTS = ("all", "attention")
KEEP_MODES = ("best", "last")


@dataclass(frozen=True, repr=False, kw_only=True)
class UptrainingOptions(RetrainingOptions):
    """The same, of a model that was changed and learns again.

    which="attention" lets nothing but attentions learn. keep="best" gives the model as it was at the lowest loss of
    texts held back, which may be step 0, before any; "last" as it ended.

    >>> UptrainingOptions(steps=50, alpha=1.0)
    Uptraining(steps=50, alpha=1.0)
    """

    choices: ClassVar = {**RetrainingOptions.choices, "which": TRAINABLE_PARTS, "keep": KEEP_MODES}
    which: str = "all"
    keep: str = "best"


class UptrainingResult(NamedTuple):
    """A model that has learnt, and how: its tensors are those of `step`, and `ended` says what ended it early."""

    net: Transformer
    curve: tuple[RetrainingPoint, ...]
    step: int
    stop_reason: str
    notes: tuple[str, ...]


def uptrain(
    student: Transformer,
    teacher: Transformer | None,
    examples: Sequence[Example],
    options: UptrainingOptions,
    progress: PointCallback = no_progress,
) -> UptrainingResult:
    """A copy of a model that has learnt to say what its teacher says, and what its texts want.

    Neither of the two is changed. `progress` hears of every step. Who interrupts is given the best so far.
    """
    lessons = DistillationLoader(DistillationTexts(student, examples, options.objective), options)
    net = cast_for_training(student, replace_attentions(student, {}))
    pupil = Student(net, teacher, lessons, list_trainable(net, options.which))
    course = RetrainingLoop(pupil, NoAuxiliaryTraining(), progress, options.keep)
    course.run()
    net.requires_grad_(True).to(next(student.parameters()).dtype).train(student.training)
    return UptrainingResult(net, tuple(course.curve), course.saved_step, course.stop_reason, lessons.texts.notes)


def list_trainable(net: Transformer, trainable: str = "all") -> list[str]:
    """The names of what may learn: all that is learned, or that of attentions.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> list_trainable(hw.build(hw.families.read(config), seed=0), "attention")[0]
    'decoder.0.attention.project.q'
    """
    sites = tuple(f"{site}." for site, _ in net.described.attention_specs())
    found = [name for name, _ in net.named_parameters() if trainable == "all" or name.startswith(sites)]
    if not found:
        raise SpecError(f"{net.described.name} has no attention that could learn; use which='all'")
    return found
