"""The job of the Lab over several texts: loss and accuracy with all heads and without the ablated ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import pluralise
from .lab_checks import LASTING_MODES
from .lab_runs import LabRuns, read_options
from .model_actions import make_examples, read_heads
from .model_worker import JobProgress
from .open_model import OpenModel

if TYPE_CHECKING:
    from ..head_analysis.annotated_examples import Example
    from ..inspect.ablation import HeadPatch
    from ..inspect.hooks import AttentionHook

MIN_TEXTS, MAX_TEXTS = 2, 256  # an interval needs as many; more would take long beside the open text


def evaluate_texts(model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress) -> dict[str, Any]:
    """Loss, perplexity and accuracy over the texts of the job, before and after, with intervals over texts.

    Means and the moments of noise are those over the open text, as in its own effect. The ablated heads of the model do
    not change.
    """
    from ..head_analysis.importance_methods import make_forward
    from ..head_analysis.objectives import choose_objective, get_output_tensor
    from ..surgery.verification.quality_metrics import QualityTally

    examples = read_evaluation_set(model, arguments)
    net, runs = model.get_model(), LabRuns(model)
    editors = _make_editors(model, runs, arguments)
    objective, note = choose_objective(net, None, examples[0])
    tally = QualityTally(objective, [note] if note else [])
    for number, example in enumerate(examples):
        progress(number, len(examples), "reading texts")
        question = objective.prepare_input(net, example, number)
        forward = make_forward(net, runs.modules, question.inputs)
        before, after = forward.baseline_outputs, forward.run_with_hooks(editors)
        tally.add_pair(question, get_output_tensor(after), get_output_tensor(before))
    return tally.report.data


def read_evaluation_set(model: OpenModel, arguments: Mapping[str, Any]) -> list[Example]:
    """The texts of a job, one a line; raises ValueError for too few or too many."""
    texts = arguments.get("texts")
    lines = [text for text in texts if str(text).strip()] if isinstance(texts, list) else []
    if not MIN_TEXTS <= len(lines) <= MAX_TEXTS:
        raise ValueError(
            f"cannot evaluate on {pluralise(len(lines), 'text')}; give {MIN_TEXTS} to {MAX_TEXTS}, one a line"
        )
    return make_examples(model, {"texts": lines})


def _make_editors(model: OpenModel, runs: LabRuns, arguments: Mapping[str, Any]) -> dict[str, AttentionHook]:
    """The hooks that replace the outputs of the heads of a job, by site, for texts of any length."""
    from ..inspect.ablation import OutputEditor

    heads, options = read_heads(model, arguments), read_options(model, arguments)
    if not heads:
        raise ValueError("no head is ablated, so nothing would differ; ablate some heads first")
    if options.tokens or any(head.mode not in LASTING_MODES for head in heads):
        raise ValueError("other texts have other tokens; ablate at all tokens, by zero, mean or noise")
    model.check_ablated(heads)
    by_site: dict[str, dict[int, HeadPatch]] = {}
    for (site, head), patch in runs.make_patches(heads, options).items():
        by_site.setdefault(str(site), {})[int(head)] = patch
    return {site: OutputEditor(site, patches, None) for site, patches in by_site.items()}
