"""The texts that changed most, and what both models say of them."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import __version__
from ...data import IGNORE_INDEX, Task
from ...errors import suggest
from ...files import write_atomically
from ...generation import eval_mode, load_tokenizers, max_positions
from ...generation.generate import generate
from ...head_analysis.annotated_examples import Example
from ...head_analysis.objectives import EvaluationInput, Objective, choose_objective, detect_head_objective
from ...inspect.ablation import HeadRef
from ...models import Transformer
from .efficiency import CostComparison, SpeedComparison, TimingOptions, compare_cost, compare_speed
from .model_comparison import (
    AgreementAccumulator,
    ModelAgreement,
    ModelCall,
    OutputDifference,
    compare_ablated,
    compare_reloaded,
    compute_output_and_states,
)
from .quality_metrics import (
    DEFAULT_NUM_EXAMPLES,
    QualityReport,
    QualityTally,
    can_compute_bleu,
    check_drift_baseline,
    check_min_count,
    compare_bleu,
    compare_task_scores,
    get_translation_pairs,
)

MAX_EXAMPLES = 5  # examples
MAX_CONTINUATION_TOKENS = 16  # tokens that a model says behind the first half of a text
MAX_TRANSLATION_TOKENS = 48  # tokens of an answer to a source
MAX_POSITIONS = 6  # of a text, of which it is told what both think is there


@dataclass(frozen=True)
class ChangedExample:
    """One text by its number: how good both were, what was read, what was wanted, and what both say."""

    number: int
    before: float
    after: float
    read: str
    wanted: str
    said_before: str
    said_after: str

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True, order=True)
class TextChange:
    """A text by how much worse it got, up or down; its question, and what both said."""

    abs_change: float
    number: int
    losses: tuple[float, float] = field(compare=False)
    question: EvaluationInput = field(compare=False)
    outputs: tuple[Tensor, Tensor] = field(compare=False)

    @property
    def ids(self) -> list[tuple[int, ...]]:
        """What was read, stream by stream; nothing where that is no text."""
        return [row.ids for rows in self.question.inputs.token_rows.values() for row in rows]


@dataclass
class LargestChanges:
    """The texts that changed most, as they come."""

    changes: list[TextChange] = field(default_factory=list)

    def add(self, one: TextChange) -> None:
        """One text more, unless the same is there already."""
        if one.ids and any(one.ids == held.ids for held in self.changes):
            return
        (heapq.heappush if len(self.changes) < MAX_EXAMPLES else heapq.heappushpop)(self.changes, one)

    def format_examples(self, nets: tuple[Transformer, Transformer], objective: str) -> tuple[ChangedExample, ...]:
        """As a reader sees them, the farthest first; `kind` is the objective that says what is asked."""
        return tuple(_format_example(one, nets, objective) for one in sorted(self.changes, reverse=True))


def _format_example(one: TextChange, nets: tuple[Transformer, Transformer], kind: str) -> ChangedExample:
    named = EXAMPLE_FORMATTERS.get(kind, _format_input)
    read, wanted, said = named(one, nets)
    return ChangedExample(one.number, *one.losses, read, wanted, *said)


FormattedTexts = tuple[str, str, tuple[str, str]]
ModelPair = tuple[Transformer, Transformer]


def _format_continuation(one: TextChange, nets: ModelPair) -> FormattedTexts:
    """What both say behind the first half of a text."""
    ids = one.question.inputs.token_rows["text"][0].ids
    half = max(1, len(ids) // 2)
    room = max_positions(nets[0].spec.stacks[-1])
    count = max(1, min(MAX_CONTINUATION_TOKENS, MAX_CONTINUATION_TOKENS if room is None else room - half + 1))
    said = tuple(generate(net, list(ids[:half]), max_new_tokens=count) for net in nets)
    spell = _target_speller(nets[0])
    return spell(ids[:half]), spell(ids[half:]), (spell(said[0]), spell(said[1]))


def _format_translation(one: TextChange, nets: ModelPair) -> FormattedTexts:
    rows, (read, write) = one.question.inputs.token_rows, (_source_speller(nets[0]), _target_speller(nets[0]))
    source, text = rows["source"][0].ids, rows["text"][0].ids
    said = ("", "")
    if nets[0].usage.begin:
        room = max_positions(nets[0].spec.stacks[-1])
        count = min(
            MAX_TRANSLATION_TOKENS, MAX_TRANSLATION_TOKENS if room is None else max(1, room - len(nets[0].usage.begin))
        )
        told = [generate(net, list(source), max_new_tokens=count) for net in nets]
        said = write(told[0]), write(told[1])
    begin = len(nets[0].usage.begin)
    return read(source), write(text[begin:]), said


def _format_masked_tokens(one: TextChange, nets: ModelPair) -> FormattedTexts:
    """What both think stands at masked places."""
    spell, labels = _target_speller(nets[0]), _get_labels(one)
    places = torch.nonzero(labels != IGNORE_INDEX).flatten()[:MAX_POSITIONS]
    best = [flatten_positions(said).argmax(-1)[places.to(said.device)].tolist() for said in one.outputs]
    wanted = ", ".join(spell([label]) for label in labels[places].tolist())
    before, after = (", ".join(spell([label]) for label in told) for told in best)
    rows = one.question.inputs.token_rows
    return spell(rows["text"][0].ids) if "text" in rows else "", wanted, (before, after)


def _format_labels(one: TextChange, nets: ModelPair) -> FormattedTexts:
    """Which class both take it for."""
    names = nets[0].usage.labels
    labels = _get_labels(one)
    places = torch.nonzero(labels != IGNORE_INDEX).flatten()[:MAX_POSITIONS]

    def named(ids: Sequence[int]) -> str:
        return ", ".join(names[label] if label < len(names) else f"class {label}" for label in ids)

    best = [named(flatten_positions(said).argmax(-1)[places.to(said.device)].tolist()) for said in one.outputs]
    rows = one.question.inputs.token_rows
    read = _source_speller(nets[0])(rows["text"][0].ids) if "text" in rows else f"input {one.number}"
    return read, named(labels[places].tolist()), (best[0], best[1])


def _format_input(one: TextChange, nets: ModelPair) -> FormattedTexts:
    rows = one.question.inputs.token_rows
    return _source_speller(nets[0])(rows["text"][0].ids) if "text" in rows else f"input {one.number}", "", ("", "")


EXAMPLE_FORMATTERS: dict[str, Callable[[TextChange, ModelPair], FormattedTexts]] = {
    "next-token": _format_continuation,
    "translation": _format_translation,
    "masked-token": _format_masked_tokens,
    "label": _format_labels,
}


def flatten_positions(said: Tensor) -> Tensor:
    """One row for each place."""
    return said.reshape(-1, said.shape[-1])


def _get_labels(one: TextChange) -> Tensor:
    assert one.question.labels is not None, "something is asked"
    return one.question.labels


def _target_speller(net: Transformer) -> Callable[[Sequence[int]], str]:
    return _make_speller(net, 1)


def _source_speller(net: Transformer) -> Callable[[Sequence[int]], str]:
    return _make_speller(net, 0)


def _make_speller(net: Transformer, which: int) -> Callable[[Sequence[int]], str]:
    """How ids are written, of the text that is read, 0, or said, 1."""
    if net.usage.tokenizer is None:
        return lambda ids: " ".join(map(str, ids))
    words = load_tokenizers(net)[which]
    return lambda ids: words.text(ids) or " ".join(words.token_text(one) for one in ids)


# --- What was proven of a model that was changed, as plain values, as a file, as a page and on a -------

PROOF_VERSION = 1  # of the JSON document
PROOF_JSON, PROOF_PAGE = "proof.json", "PROOF.md"


@dataclass(frozen=True)
class ModelProof:
    """What was done to which model; that silencing, cutting and reading again say the same; what was saved, how fast
    both are, how well they speak, where they part, and the texts that changed most."""

    model: str
    what: str
    keep: Mapping[str, tuple[int, ...]]
    num_texts: int
    equal: tuple[OutputDifference, ...]
    savings: CostComparison
    speeds: SpeedComparison
    quality: QualityReport
    agreement: ModelAgreement
    examples: tuple[ChangedExample, ...]
    command: str = ""
    versions: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether everything that must say the same does, as far as rounding allows."""
        return all(one.same for one in self.equal)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values; what is no finite number is None."""
        told = {
            "version": PROOF_VERSION,
            "model": self.model,
            "what": self.what,
            "command": self.command,
            "texts": self.num_texts,
            "keep": {site: list(heads) for site, heads in self.keep.items()},
            "holds": self.holds,
            "equal": [one.data for one in self.equal],
            "savings": self.savings.data,
            "speeds": self.speeds.data,
            "quality": self.quality.data,
            "agreement": self.agreement.data,
            "examples": [one.data for one in self.examples],
            "versions": dict(self.versions or {}),
            "notes": list(self.notes),
        }
        return replace_non_finite(told)


def write_proof(proof: ModelProof, folder: Path | str) -> tuple[Path, Path]:
    """The proof as a file for programs and a page for people, in a folder, made where it is missing."""
    from .proof_report import render_proof

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / PROOF_JSON, folder / PROOF_PAGE
    write_atomically(paths[0], (json.dumps(proof.data, indent=1, allow_nan=False) + "\n").encode())
    write_atomically(paths[1], render_proof(proof).encode())
    return paths


def replace_non_finite(value: Any) -> Any:
    """Plain values with None for every number that is not finite.

    >>> replace_non_finite({"a": [1.5, float("nan")]})
    {'a': [1.5, None]}
    """
    if isinstance(value, Mapping):
        return {name: replace_non_finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_non_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- A model before and after, held to each other in every way that the data allow ---------------------

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
            raise ValueError(
                f"targets={self.target_source!r} is unknown; {suggest(self.target_source, TARGET_SOURCES)}"
            )


def prove(
    before: Transformer,
    after: Transformer,
    texts: Sequence[Example],
    options: ProofOptions,
    log: LogFunction = lambda _: None,
) -> ModelProof:
    """What is left of a model after heads were cut or shared, held to the model before over texts.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ...     ),
    ...     seed=0,
    ... )
    >>> texts = [Example({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)]
    >>> proof = prove(
    ...     net, net, texts, ProofOptions("nothing was done", timing=TimingOptions(length=8, steps=2, seconds=0.01))
    ... )
    >>> proof.holds, proof.quality.row("loss").change.value, proof.agreement.kl
    (True, 0.0, 0.0)
    """
    check_min_count(len(texts), "texts")
    _check_comparable(before, after)
    with eval_mode(before), eval_mode(after):
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
        model=before.spec.name,
        what=options.change,
        keep={site: tuple(heads) for site, heads in options.keep.items()},
        num_texts=len(texts),
        equal=tuple(equal),
        savings=saved,
        speeds=timed,
        quality=found,
        agreement=compared.agreement.result,
        examples=examples,
        command=options.command,
        versions={"headwise": __version__, "torch": torch.__version__},
        notes=notes,
    )


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
            QualityTally(chosen, [said] if said else []),
            AgreementAccumulator("logits" if detect_head_objective(before) else "states"),
            LargestChanges(),
        )
        for number, scene in enumerate(scenes):
            question = chosen.prepare_input(before, scene, number)
            own, other = (
                compute_output_and_states(after, question.inputs),
                compute_output_and_states(before, question.inputs),
            )
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
        rows += [
            row
            for row in compare_task_scores(*nets, how.task, how.num_examples)
            if row.name not in {one.name for one in rows}
        ]
    if how.target_source == "own":
        notes.append("the texts beside the sources are what the model before wrote: loss and accuracy are against that")
    elif can_compute_bleu(nets[0]):
        rows.append(compare_bleu(*nets, get_translation_pairs(nets[0], scenes)))
    return replace(found, rows=tuple(rows)), notes


def _check_comparable(before: Transformer, after: Transformer) -> None:
    """Refuse two models that nothing can be said of side by side."""
    told = [(one.spec.kind, [(head.name, head.outputs) for head in one.spec.heads]) for one in (before, after)]
    if told[0] != told[1]:
        raise ValueError(f"the model before is {told[0]}, the one after {told[1]}; give what was made of that model")
