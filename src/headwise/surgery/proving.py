"""A model before and after, held to each other in every way that the data allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .. import __version__
from ..errors import nearest
from ..heads.objectives import Objective, objective_of
from ..heads.saying import head_of
from ..heads.scene import Scene
from ..hub.editing import Head
from ..models import Transformer
from ..models.generating import answering
from ..tasks import Task
from .agreement import Agreeing
from .equality import Says, reloaded, silenced
from .examples import Changed, Most
from .phases import Pace
from .proof import Proof
from .quality import Quality, Tallied, check_count, check_drifts
from .savings import savings
from .sayings import saying
from .scores import EXAMPLES, bleu_row, can_bleu, pairs_of, task_rows
from .speeds import speeds

TARGETS = ("given", "own")
Tell = Callable[[str], object]


@dataclass(frozen=True)
class Asked:
    """What was done, in a sentence, and what is to be proven of it.

    `keep` names the heads that each site kept, `said` what those that are gone say instead of nothing: vectors that
    were folded in. `same` gives models that must say what the model before says, `again` what was written, read anew;
    they are called as the model is. `cut` are the models with and without the heads that went, if these are not those
    before and after. `length` and `source` are tokens that are priced. `task` scores free answers.
    targets="own": texts beside sources are what the model before wrote itself. `command` does all of it again.
    """

    what: str
    keep: Mapping[str, Sequence[int]] = field(default_factory=dict)
    said: Mapping[Head, Tensor] = field(default_factory=dict)
    again: Mapping[str, Callable[[], Says]] = field(default_factory=dict)
    same: Mapping[str, Callable[[], Says]] = field(default_factory=dict)
    cut: tuple[Transformer, Transformer] | None = None
    objective: str | Objective | None = None
    pace: Pace = field(default_factory=Pace)
    length: int | None = None
    source: int | None = None
    task: Task | None = None
    examples: int = EXAMPLES
    targets: str = "given"
    command: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.targets not in TARGETS:
            raise ValueError(f"targets={self.targets!r} is unknown; {nearest(self.targets, TARGETS)}")


def prove(
    before: Transformer, after: Transformer, scenes: Sequence[Scene], how: Asked, tell: Tell = lambda _: None
) -> Proof:
    """What is left of a model after heads were cut or shared, held to the model before over texts.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... )
    >>> texts = [Scene({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)]
    >>> proof = prove(net, net, texts, Asked("nothing was done", pace=Pace(length=8, steps=2, seconds=0.01)))
    >>> proof.holds, proof.quality.row("loss").change.value, proof.agreement.kl
    (True, 0.0, 0.0)
    """
    check_count(len(scenes), "texts")
    _check_alike(before, after)
    with answering(before), answering(after):
        tell(f"{len(scenes)} texts, before and after")
        compared = _Compared.of(before, after, scenes, how.objective)
        tell("what was cut, silenced")
        whole, less = how.cut or (before, after)
        equal = list(silenced(whole, less, scenes, how.keep, how.said)) if how.keep else []
        equal += [reloaded(what, before, read(), scenes) for what, read in how.same.items()]
        tell("what was written, read again")
        equal += [reloaded(what, after, read(), scenes) for what, read in how.again.items()]
        tell("free answers")
        found, more = _scored(compared.tallied.quality, (before, after), scenes, how)
        tell("speed")
        timed = speeds(before, after, how.pace)
        saved = savings(before, after, how.length, how.source)
        examples = compared.most.examples((before, after), found.objective)
    notes = (*how.notes, *more, *saved.kept)
    return Proof(
        model=before.described.name, what=how.what,
        keep={site: tuple(heads) for site, heads in how.keep.items()}, texts=len(scenes), equal=tuple(equal),
        savings=saved, speeds=timed, quality=found, agreement=compared.agreeing.agreement, examples=examples,
        command=how.command, versions={"headwise": __version__, "torch": torch.__version__}, notes=notes,
    )  # fmt: skip


@dataclass
class _Compared:
    """What one reading of all texts by both models gives."""

    tallied: Tallied
    agreeing: Agreeing
    most: Most

    @staticmethod
    def of(
        before: Transformer, after: Transformer, scenes: Sequence[Scene], asked: str | Objective | None
    ) -> _Compared:
        chosen, said = objective_of(before, asked, scenes[0])
        check_drifts(chosen, before)
        found = _Compared(
            Tallied(chosen, [said] if said else []), Agreeing("logits" if head_of(before) else "states"), Most()
        )
        for number, scene in enumerate(scenes):
            question = chosen.question(before, scene, number)
            own, other = saying(after, question.given), saying(before, question.given)
            found.agreeing.take(other, own)
            worse = found.tallied.take(question, own.output, other.output)
            if worse is not None:
                losses = found.tallied.losses
                found.most.take(Changed(abs(worse), number, losses, question, (other.output, own.output)))
        return found


def _scored(
    found: Quality, nets: tuple[Transformer, Transformer], scenes: Sequence[Scene], how: Asked
) -> tuple[Quality, list[str]]:
    """With what free answers are worth, where they can be had."""
    rows, notes = list(found.rows), list[str]()
    if how.task is not None:
        rows += [row for row in task_rows(*nets, how.task, how.examples) if row.name not in {one.name for one in rows}]
    if how.targets == "own":
        notes.append("the texts beside the sources are what the model before wrote: loss and accuracy are against that")
    elif can_bleu(nets[0]):
        rows.append(bleu_row(*nets, pairs_of(nets[0], scenes)))
    return replace(found, rows=tuple(rows)), notes


def _check_alike(before: Transformer, after: Transformer) -> None:
    """Refuse two models that nothing can be said of side by side."""
    told = [
        (one.described.kind, [(head.name, head.outputs) for head in one.described.heads]) for one in (before, after)
    ]
    if told[0] != told[1]:
        raise ValueError(f"the model before is {told[0]}, the one after {told[1]}; give what was made of that model")
