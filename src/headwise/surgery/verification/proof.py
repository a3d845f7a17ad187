"""Full comparison of a model before and after a change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ... import __version__
from ...models import Transformer
from ...models.generation import eval_mode, load_tokenizers, max_positions
from ...models.generation.generate import generate
from ...models.model_spec.serialization import MANIFEST_FILE, RECORD_FILE
from ...observe.head_analysis.annotated_examples import Example
from ...observe.head_analysis.distinct_examples import DistinctExamples
from ...observe.head_analysis.objectives import (
    EvaluationInput,
    Objective,
    choose_objective,
    detect_head_objective,
)
from ...observe.inspect.ablation import HeadRef
from ...report.progress import count_items
from ...training.data import IGNORE_INDEX, Task
from ...util.errors import suggest
from ...util.output_paths import FolderKind
from .efficiency import CostComparison, SpeedComparison, TimingOptions, compare_cost, compare_speed
from .model_comparison import (
    AgreementAccumulator,
    JsonRecord,
    ModelAgreement,
    ModelCall,
    OutputDifference,
    build_ablations,
    compare_ablated,
    compare_outputs,
    compare_weights,
    compute_output_and_states,
    dtype_name,
    full_precision,
    parameter_dtype,
)
from .quality_metrics import (
    DEFAULT_NUM_EXAMPLES,
    QualityReport,
    QualityTally,
    can_compute_bleu,
    check_drift_baseline,
    check_min_count,
    compare_task_scores,
    compare_translations,
    get_translation_pairs,
)

# --- Texts that changed most ----------------------------------------------------------------------

MAX_EXAMPLES = 5
MAX_CONTINUATION_TOKENS = 16  # generated after the first half of a text
MAX_TRANSLATION_TOKENS = 48
MAX_POSITIONS = 6  # labelled positions of a text that are shown


@dataclass(frozen=True)
class ChangedExample:
    """A text as shown in a proof: its losses before and after, input, target, and both models'
    outputs.
    """

    number: int
    before: float
    after: float
    read: str
    target: str
    output_before: str
    output_after: str


class TextChange(NamedTuple):
    """A text with the change of its loss, its losses before and after, and both outputs."""

    abs_change: float
    number: int
    losses: tuple[float, float]
    question: EvaluationInput
    outputs: tuple[Tensor, Tensor]


def format_example(
    change: TextChange, nets: tuple[Transformer, Transformer], objective: str
) -> ChangedExample:
    """Return a text as it is shown for the objective of this name.

    Generators show what they continue with or translate to, other models with labels what they
    predict at labelled positions.
    """
    net = nets[0]
    spell_source, spell = (_make_speller(net, which) for which in (0, 1))
    rows = change.question.inputs.token_rows
    ids = rows["text"][0].ids if "text" in rows else None
    read = f"input {change.number}" if ids is None else spell_source(ids)
    target = ""
    outputs = ["", ""]
    if objective == "next-token" and ids is not None:
        half = max(1, len(ids) // 2)
        read = spell(ids[:half])
        target = spell(ids[half:])
        outputs = _generate(nets, ids[:half], MAX_CONTINUATION_TOKENS, half - 1)
    elif objective == "translation" and ids is not None:
        begin = len(net.usage.begin)
        source = rows["source"][0].ids
        read = spell_source(source)
        target = spell(ids[begin:])
        outputs = _generate(nets, source, MAX_TRANSLATION_TOKENS, begin) if begin else outputs
    elif objective in ("masked-token", "label"):
        labels = change.question.labels
        assert labels is not None, "the example has labels"
        positions = torch.nonzero(labels != IGNORE_INDEX).flatten()[:MAX_POSITIONS]
        names = net.usage.labels

        def name(label: int) -> str:
            if objective == "masked-token":
                return spell([label])
            return names[label] if label < len(names) else f"class {label}"

        target = ", ".join(map(name, labels[positions].tolist()))
        likeliest = [output.flatten(0, -2).argmax(-1) for output in change.outputs]
        outputs = [
            ", ".join(map(name, own[positions.to(own.device)].tolist())) for own in likeliest
        ]
    return ChangedExample(change.number, *change.losses, read, target, *outputs)


def _generate(
    nets: tuple[Transformer, Transformer], ids: Sequence[int], count: int, used: int
) -> list[str]:
    """Return what both models generate, in at most `count` tokens after `used` positions."""
    limit = max_positions(nets[0].spec.stacks[-1])
    count = count if limit is None else max(1, min(count, limit - used))
    spell = _make_speller(nets[0], 1)
    return [spell(generate(net, list(ids), max_new_tokens=count)) for net in nets]


def _make_speller(net: Transformer, which: int) -> Callable[[Sequence[int]], str]:
    """Return a function that turns token ids of the source (which=0) or target (1) into text."""
    if net.usage.tokenizer is None:
        return lambda ids: " ".join(map(str, ids))
    tokenizer = load_tokenizers(net)[which]
    return lambda ids: tokenizer.text(ids) or " ".join(tokenizer.token_text(token) for token in ids)


# --- Results --------------------------------------------------------------------------------------

PROOF_VERSION = 1  # of the JSON document
PROOF_JSON = "proof.json"
PROOF_PAGE = "PROOF.md"


@dataclass(frozen=True)
class ModelProof(JsonRecord):
    """Result of all comparisons of a model before and after a change.

    `what` is the change in a sentence and `keep` the heads kept by site. `equal` has the
    comparisons that must agree up to rounding (ablated against removed heads, exported against
    written models), `rounding` the differences of models of 16 bits in their own dtype. `savings`
    has sizes and FLOPs, `speeds` timings, `quality` losses and scores, `agreement` similarities of
    states and outputs.
    """

    computed: ClassVar = ("holds",)
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
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()
    rounding: tuple[OutputDifference, ...] = ()

    @property
    def holds(self) -> bool:
        """True if all outputs that must be equal are equal up to rounding."""
        return all(difference.same for difference in self.equal)

    @property
    def data(self) -> dict[str, Any]:
        """The proof as JSON-serialisable values; NaN and infinities are None."""
        rounding = [asdict(difference) for difference in self.rounding]
        return {"version": PROOF_VERSION, **super().data, "rounding": rounding}


PROOF_FOLDER = FolderKind(
    "folder of a model", (PROOF_JSON, RECORD_FILE, MANIFEST_FILE, "config.json")
)


# --- Comparison -----------------------------------------------------------------------------------

TARGET_SOURCES = ("given", "own")
LogFunction = Callable[[str], object]


@dataclass(frozen=True)
class ProofOptions:
    """Options of `prove`: `change` is a sentence that describes what was done to the model.

    `keep` has the heads kept by each site, `replacements` the constant outputs of removed heads if
    they were folded into biases. `equivalents` return models that must compute the same as the
    original, `exports` models read back from disk that must compute the same as the model after;
    they are called like the model. `surgery_pair` is the model before and after the change of its
    heads, if that is not the pair that is compared. `exact_change` makes the same change to a copy
    in float32, for changes that round new weights to the dtype of the model. `length` and
    `source_length` are token counts for FLOPs and cache. `task` scores generated answers.
    target_source="own" means that target texts were generated by the original. `command` is shown
    as the command that reproduces the proof.
    """

    change: str
    keep: Mapping[str, Sequence[int]] = field(default_factory=dict)
    replacements: Mapping[HeadRef, Tensor] = field(default_factory=dict)
    exports: Mapping[str, Callable[[], ModelCall]] = field(default_factory=dict)
    equivalents: Mapping[str, Callable[[], ModelCall]] = field(default_factory=dict)
    surgery_pair: tuple[Transformer, Transformer] | None = None
    exact_change: Callable[[], Transformer] | None = None
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
                f"unknown target_source={self.target_source!r}; "
                f"{suggest(self.target_source, TARGET_SOURCES)}"
            )


def prove(
    before: Transformer,
    after: Transformer,
    texts: Sequence[Example],
    options: ProofOptions,
    log: LogFunction = lambda _: None,
) -> ModelProof:
    """Compare a pruned or converted model with the original, on the same texts.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> texts = [Example({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)]
    >>> proof = prove(
    ...     net,
    ...     net,
    ...     texts,
    ...     ProofOptions("no change", timing=TimingOptions(length=8, steps=2, seconds=0.01)),
    ... )
    >>> proof.holds, proof.quality.row("loss").change.value, proof.agreement.kl
    (True, 0.0, 0.0)
    """
    distinct = DistinctExamples(texts)
    texts = list(distinct)
    check_min_count(len(texts), "different texts")
    _check_comparable(before, after)
    with eval_mode(before), eval_mode(after):
        log(f"comparing {len(texts)} texts before and after")
        tally, agreement, changes = _compare_texts(before, after, texts, options.objective, log)
        log("comparing removed with ablated heads")
        equal, rounding = check_surgery(options.surgery_pair or (before, after), texts, options)
        log("comparing exported models")
        equal += [
            compare_outputs(name, (after, load()), texts) for name, load in options.exports.items()
        ]
        log("scoring generated answers")
        quality, generation_notes = _add_generation_scores(
            tally.report, (before, after), texts, options
        )
        log("measuring speed")
        speeds = compare_speed(before, after, options.timing)
        savings = compare_cost(before, after, options.length, options.source_length)
        examples = [
            format_example(change, (before, after), quality.objective) for change in changes
        ]
    notes = (*options.notes, *distinct.notes, *generation_notes, *savings.uncut_cache_notes)
    return ModelProof(
        model=before.spec.name,
        what=options.change,
        keep={site: tuple(heads) for site, heads in options.keep.items()},
        num_texts=len(texts),
        equal=tuple(equal),
        rounding=tuple(rounding),
        savings=savings,
        speeds=speeds,
        quality=quality,
        agreement=agreement.result,
        examples=tuple(examples),
        command=options.command,
        versions={"headwise": __version__, "torch": torch.__version__},
        notes=notes,
    )


def check_surgery(
    pair: tuple[Transformer, Transformer], texts: Sequence[Example], options: ProofOptions
) -> tuple[list[OutputDifference], list[OutputDifference]]:
    """Compare the models that must be equal, and those of 16 bits also in their own dtype, where
    nothing is tolerated.

    A change that rounds new weights to 16 bits is compared as it was in float32, and the weights
    with those rounded.
    """
    full, changed = pair
    dtype = parameter_dtype(full)
    is_rounded = dtype != full_precision(dtype)
    exact = options.exact_change() if options.exact_change and is_rounded else None
    equal = list[OutputDifference]()
    rounding = list[OutputDifference]()
    in_own_dtype = f"same comparison in {dtype_name(dtype)}"
    if options.keep:
        equal += compare_ablated(full, exact or changed, texts, options.keep, options.replacements)
        patches = build_ablations(full, options.keep, options.replacements)
        rounding += (
            [compare_outputs(in_own_dtype, pair, texts, patches, dtype)] if is_rounded else []
        )
    for name, load in options.equivalents.items():
        model = load()
        equal.append(compare_outputs(name, (full, model), texts))
        rounding += (
            [compare_outputs(in_own_dtype, (full, model), texts, dtype=dtype)] if is_rounded else []
        )
    if exact is not None:
        equal.append(compare_weights("weights rounded from float32", changed, exact))
    return equal, rounding


def _compare_texts(
    before: Transformer,
    after: Transformer,
    examples: Sequence[Example],
    objective: str | Objective | None,
    log: LogFunction,
) -> tuple[QualityTally, AgreementAccumulator, list[TextChange]]:
    """Run both models once over all texts; return their quality, agreement, and the texts that
    changed most, largest change first.
    """
    resolved, note = choose_objective(before, objective, examples[0])
    check_drift_baseline(resolved, before)
    tally = QualityTally(resolved, [note] if note else [])
    agreement = AgreementAccumulator("logits" if detect_head_objective(before) else "states")
    changes = list[TextChange]()
    counted = count_items(examples, log, "comparing texts before and after", "texts")
    for number, example in enumerate(counted):
        question = resolved.prepare_input(before, example, number)
        after_run = compute_output_and_states(after, question.inputs)
        before_run = compute_output_and_states(before, question.inputs)
        agreement.update(before_run, after_run)
        outputs = (before_run.output, after_run.output)
        loss_change = tally.add_pair(question, after_run.output, before_run.output)
        if loss_change is not None:
            losses = tally.last_losses
            changes.append(TextChange(abs(loss_change), number, losses, question, outputs))
            changes = sorted(changes, key=lambda change: change[:2], reverse=True)[:MAX_EXAMPLES]
    return tally, agreement, changes


def _add_generation_scores(
    report: QualityReport,
    nets: tuple[Transformer, Transformer],
    examples: Sequence[Example],
    options: ProofOptions,
) -> tuple[QualityReport, list[str]]:
    """Return the report with scores of generated answers, if the model can
    generate any, and notes.
    """
    rows = list(report.rows)
    notes = list[str]()
    if options.task is not None:
        rows += [
            row
            for row in compare_task_scores(*nets, options.task, options.num_examples)
            if row.name not in {other.name for other in rows}
        ]
    if options.target_source == "own":
        notes.append(
            "target texts were generated by the model before; loss and accuracy refer to them"
        )
    elif can_compute_bleu(nets[0]):
        row, note = compare_translations(*nets, get_translation_pairs(nets[0], examples))
        rows += [row] if row.name not in {other.name for other in rows} else []
        notes += [note] if note else []
    return replace(report, rows=tuple(rows)), notes


def _check_comparable(before: Transformer, after: Transformer) -> None:
    """Raise ValueError if two models differ in kind or output heads."""
    kinds = [
        (net.spec.kind, [(head.name, head.outputs) for head in net.spec.heads])
        for net in (before, after)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"cannot compare models: before is {kinds[0]}, after is {kinds[1]}. Give a model made "
            "from the first"
        )
