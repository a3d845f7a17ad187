"""A model before and after, held to each other in every way that the data allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .. import __version__
from ..errors import suggest
from ..heads.objectives import Objective, choose_objective
from ..heads.saying import detect_head_objective
from ..heads.scene import Example
from ..hub.editing import HeadRef
from ..models import Transformer
from ..models.generating import answering
from ..tasks import Task
from .agreement import AgreementAccumulator
from .equality import ModelCall, compare_reloaded, compare_ablated
from .examples import TextChange, LargestChanges
from .phases import TimingOptions
from .proof import ModelProof
from .quality import QualityReport, QualityTally, check_min_count, check_drift_baseline
from .savings import compare_cost
from .sayings import compute_output_and_states
from .scores import DEFAULT_NUM_EXAMPLES, compare_bleu, can_compute_bleu, get_translation_pairs, compare_task_scores
from .speeds import compare_speed

TARGET_SOURCES = ("given", "own")
LogFunction = Callable[[str], object]


@dataclass(frozen=True)
class ProofOptions:
    """What was done, in a sentence, and what is to be proven of it.

    `keep` names the heads that each site kept, `said` what those that are gone say instead of nothing: vectors that
    were folded in. `same` gives models that must say what the model before says, `again` what was written, read anew;
    they are called as the model is. `cut` are the models with and without the heads that went, if these are not those
    before and after. `length` and `source` are tokens that are priced. `task` scores free answers.
    targets="own": texts beside sources are what the model before wrote itself. `command` does all of it again.
    """

    change: str
    keep: Mapping[str, Sequence[int]] = field(default_factory=dict)
    replacements: Mapping[HeadRef, Tensor] = field(default_factory=dict)
    exports: Mapping[str, Callable[[], ModelCall]] = field(default_factory=dict)
    equivalents: Mapping[str, Callable[[], ModelCall]] = field(default_factory=dict)
    ablation_pair: tuple[Transformer, Transformer] | None = None
    objective: str | Objective | None = None
    timing: TimingOptions = field(default_factory=TimingOptions)
    length: int | None = None
    source_length: int | None = None
    task: Task | None = None
    num_examples: int = DEFAULT_NUM_EXAMPLES
    target_source: str = "given"
    command: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.target_source not in TARGET_SOURCES:
            raise ValueError(f"targets={self.target_source!r} is unknown; {suggest(self.target_source, TARGET_SOURCES)}")


def prove(
    before: Transformer, after: Transformer, texts: Sequence[Example], options: ProofOptions, log: LogFunction = lambda _: None
) -> ModelProof:
    """What is left of a model after heads were cut or shared, held to the model before over texts.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... )
    >>> texts = [Example({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)]
    >>> proof = prove(net, net, texts, ProofOptions("nothing was done", pace=Pace(length=8, steps=2, seconds=0.01)))
    >>> proof.holds, proof.quality.row("loss").change.value, proof.agreement.kl
    (True, 0.0, 0.0)
    """
    check_min_count(len(texts), "texts")
    _check_comparable(before, after)
    with answering(before), answering(after):
        log(f"{len(texts)} texts, before and after")
        compared = _TextComparison.of(before, after, texts, options.objective)
        log("what was cut, silenced")
        whole, less = options.ablation_pair or (before, after)
        equal = list(compare_ablated(whole, less, texts, options.keep, options.replacements)) if options.keep else []
        equal += [compare_reloaded(what, before, read(), texts) for what, read in options.equivalents.items()]
        log("what was written, read again")
        equal += [compare_reloaded(what, after, read(), texts) for what, read in options.exports.items()]
        log("free answers")
        found, more = _add_generation_scores(compared.tally.report, (before, after), texts, options)
        log("speed")
        timed = compare_speed(before, after, options.timing)
        saved = compare_cost(before, after, options.length, options.source_length)
        examples = compared.changes.format_examples((before, after), found.objective)
    notes = (*options.notes, *more, *saved.uncut_cache_notes)
    return ModelProof(
        model=before.described.name, what=options.change,
        keep={site: tuple(heads) for site, heads in options.keep.items()}, num_texts=len(texts), equal=tuple(equal),
        savings=saved, speeds=timed, quality=found, agreement=compared.agreement.result, examples=examples,
        command=options.command, versions={"headwise": __version__, "torch": torch.__version__}, notes=notes,
    )  # fmt: skip


@dataclass
class _TextComparison:
    """What one reading of all texts by both models gives."""

    tally: QualityTally
    agreement: AgreementAccumulator
    changes: LargestChanges

    @staticmethod
    def of(
        before: Transformer, after: Transformer, scenes: Sequence[Example], asked: str | Objective | None
    ) -> _TextComparison:
        chosen, said = choose_objective(before, asked, scenes[0])
        check_drift_baseline(chosen, before)
        found = _TextComparison(
            QualityTally(chosen, [said] if said else []), AgreementAccumulator("logits" if detect_head_objective(before) else "states"), LargestChanges()
        )
        for number, scene in enumerate(scenes):
            question = chosen.prepare_input(before, scene, number)
            own, other = compute_output_and_states(after, question.inputs), compute_output_and_states(before, question.inputs)
            found.agreement.update(other, own)
            worse = found.tally.add_pair(question, own.output, other.output)
            if worse is not None:
                losses = found.tally.last_losses
                found.changes.add(TextChange(abs(worse), number, losses, question, (other.output, own.output)))
        return found


def _add_generation_scores(
    found: QualityReport, nets: tuple[Transformer, Transformer], scenes: Sequence[Example], how: ProofOptions
) -> tuple[QualityReport, list[str]]:
    """With what free answers are worth, where they can be had."""
    rows, notes = list(found.rows), list[str]()
    if how.task is not None:
        rows += [row for row in compare_task_scores(*nets, how.task, how.num_examples) if row.name not in {one.name for one in rows}]
    if how.target_source == "own":
        notes.append("the texts beside the sources are what the model before wrote: loss and accuracy are against that")
    elif can_compute_bleu(nets[0]):
        rows.append(compare_bleu(*nets, get_translation_pairs(nets[0], scenes)))
    return replace(found, rows=tuple(rows)), notes


def _check_comparable(before: Transformer, after: Transformer) -> None:
    """Refuse two models that nothing can be said of side by side."""
    told = [
        (one.described.kind, [(head.name, head.outputs) for head in one.described.heads]) for one in (before, after)
    ]
    if told[0] != told[1]:
        raise ValueError(f"the model before is {told[0]}, the one after {told[1]}; give what was made of that model")
