"""Checks beside the effect of ablated heads: the same outputs by a second way, how the text goes
on, and the loss over several texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import pluralise
from .action_fields import LINES, action
from .binary_answers import MAX_COPIED_PARAMS, get_native_copy
from .lab_runs import ABLATION_FIELDS, Ablation, LabRuns, Outputs, find_token_decoder, id_inputs
from .model_actions import make_examples
from .model_worker import JobProgress
from .open_model import AblatedHead, OpenModel

if TYPE_CHECKING:
    from torch import Tensor

    from ..inspect.model_inputs import ModelInputs
    from ..models import Transformer


NEW_TOKENS = 24  # of the texts that are compared
HALF_TOLERANCE_STEPS = 16  # epsilons of the largest output, within which outputs of 16 bits agree
MIN_TEXTS = 2
MAX_TEXTS = 256  # an interval needs two; more than 256 take long


def unchecked(reason: str) -> dict[str, Any]:
    """The answer of a check that is not possible."""
    return {"possible": False, "reason": reason}


# --- The second way: a model without the weights of these heads -----------------------------------


def check_by_removal(model: OpenModel, ablation: Ablation, after: Outputs) -> dict[str, Any]:
    """Compare the outputs with ablated heads to those of a copy of the model without the weights of
    these heads.

    Returns the largest difference of any output (a logit, if the model has some), the largest
    output, and whether the difference is within rounding; or the reason why the heads cannot be
    removed from a copy.
    """
    if not ablation.removes_heads:
        return unchecked(
            "removing weights equals zero ablation at all tokens, and no other ablation"
        )
    try:
        native, smaller = _copy_without_weights(model, ablation.heads)
        values = _run_open_text(model, smaller)
    except (ValueError, KeyError, IndexError, NotImplementedError) as error:
        return unchecked(str(error))
    if values.shape != after.values.shape:
        return unchecked("the copy without these heads has outputs of another shape")
    return {"possible": True, "reason": "", "areLogits": after.are_logits} | _compare(
        model, native, smaller, ablation.heads, float((values - after.values).abs().max()), after
    )


def _compare(
    model: OpenModel,
    native: Transformer,
    smaller: Transformer,
    heads: Sequence[AblatedHead],
    difference: float,
    after: Outputs,
) -> dict[str, Any]:
    """Compare the outputs of both ways; if models of 16 bits agree within their rounding, compare
    in float32.
    """
    import torch

    from ..head_analysis.annotated_examples import Example
    from ..inspect.ablation import ScaledOutput
    from ..surgery.verification import model_comparison as compare

    dtype = compare.parameter_dtype(native)
    is_rounded = dtype != compare.full_precision(dtype)
    tolerance = compare.OUTPUT_TOLERANCE
    if is_rounded:
        tolerance = HALF_TOLERANCE_STEPS * torch.finfo(dtype).eps
    largest = float(after.values.abs().max())
    name = str(dtype).removeprefix("torch.")
    difference_found = compare.OutputDifference("", difference, largest, 1, name, tolerance)
    if is_rounded and difference_found.same:
        example = Example(dict(id_inputs(native, model.get_recorded())), {})
        patches: dict[Any, Any] = {(head.site, head.head): ScaledOutput(0.0) for head in heads}
        difference_found = compare.compare_outputs(
            compare.ABLATION, (native, smaller), [example], patches
        )
    return dict(difference_found.data)


def _copy_without_weights(
    model: OpenModel, heads: Sequence[AblatedHead]
) -> tuple[Transformer, Transformer]:
    """The model as a headwise model, and a copy of it without these heads."""
    from ..surgery.attention_replacement import remove_heads

    native = get_native_copy(model.get_model())
    if sum(parameter.numel() for parameter in native.parameters()) > MAX_COPIED_PARAMS:
        raise ValueError(
            f"only models up to {MAX_COPIED_PARAMS / 1e6:,.0f} M parameters are copied; use the "
            "screen Prune"
        )
    specs = dict(native.spec.attention_specs())
    keep = {
        site: list(range(len(specs[site].score_head_of_output)))
        for site in dict.fromkeys(head.site for head in heads)
    }
    for head in heads:
        keep[head.site].remove(head.head)
    return native, remove_heads(native, keep).eval()


def _run_open_text(model: OpenModel, net: Transformer) -> Tensor:
    """The outputs of a headwise model for the first text, in float64."""
    import torch

    from ..head_analysis.objectives import get_output_tensor

    with torch.inference_mode():
        values = get_output_tensor(net(**id_inputs(net, model.get_recorded())))
    return (values[0] if values.dim() == 3 else values[:1]).double().cpu()


# --- How the text goes on -------------------------------------------------------------------------


@action("continue", **ABLATION_FIELDS)
def continue_text(model: OpenModel, progress: JobProgress, **fields: Any) -> dict[str, Any]:
    """The text that the model writes after the open one (an encoder-decoder: for its source), with
    and without heads. The ablated heads of the model do not change.

    Greedy decoding. Returns the tokens `before` and `after`, or the reason why there are none.
    """
    ablation = Ablation(**fields)
    model.check_ablated(ablation.heads)
    progress(0, 2, "continuing the text")
    runs = LabRuns(model)
    if not ablation.fits_other_texts:
        return unchecked(
            "a text is continued with heads that are ablated at all tokens by zero, mean or noise"
        )
    try:
        inputs, first = _prompt(runs)
        before = _generate(runs, inputs, first, {})
        after = _generate(runs, inputs, first, runs.make_patches(ablation))
    except (ValueError, KeyError, NotImplementedError, AttributeError) as error:
        return unchecked(str(error))
    return {"possible": True, "reason": "", "before": before, "after": after}


def _prompt(runs: LabRuns) -> tuple[ModelInputs, int]:
    """The inputs to continue, and the position of the first new token in the answer."""
    from ..head_analysis.objectives import detect_head_objective
    from ..inspect.model_inputs import is_encoder_decoder, prepare_inputs

    net = runs.net
    streams = runs.trace.streams
    if detect_head_objective(net) not in ("next-token", "translation"):
        raise ValueError("the model predicts no next tokens")
    if not is_encoder_decoder(net):
        ids = id_inputs(net, runs.trace)
        return prepare_inputs(net, ids, NEW_TOKENS), len(streams["text"][0].ids)
    source = streams["source"][0].text
    if not source:
        raise ValueError("the source has no text to translate again; enter one on the page")
    return prepare_inputs(net, [source], NEW_TOKENS), 0


def _generate(
    runs: LabRuns, inputs: ModelInputs, first: int, patches: Mapping[Any, Any]
) -> list[str]:
    """The new tokens, as texts."""
    import torch

    from ..inspect.hooks import ModelRun

    run = ModelRun(runs.net, inputs, NEW_TOKENS)
    output = run.run_with_hooks(runs.modules, runs.make_hooks(patches))
    ids = list((output.tolist() if isinstance(output, torch.Tensor) else output)[0])
    prompt = list(inputs.prompt_ids[0]) if inputs.prompt_ids else []
    new = ids[len(prompt) :] if first and ids[: len(prompt)] == prompt else ids
    decode = find_token_decoder(runs.net)
    return [decode(token) for token in new[:NEW_TOKENS]]


# --- Several texts --------------------------------------------------------------------------------


@action("evaluate", texts=LINES, **ABLATION_FIELDS)
def evaluate_texts(
    model: OpenModel, progress: JobProgress, texts: list[str], **fields: Any
) -> dict[str, Any]:
    """Loss, perplexity and accuracy over the texts of the job, before and after, with intervals
    over texts.

    Means and the moments of noise are those over the open text, as in its own effect. The ablated
    heads of the model do not change.
    """
    from ..head_analysis.importance_methods import make_forward
    from ..head_analysis.objectives import choose_objective, get_output_tensor
    from ..surgery.verification.quality_metrics import QualityTally

    ablation = Ablation(**fields)
    if not MIN_TEXTS <= len(texts) <= MAX_TEXTS:
        raise ValueError(
            f"cannot evaluate on {pluralise(len(texts), 'text')}; give {MIN_TEXTS} to "
            f"{MAX_TEXTS}, one a line"
        )
    if not ablation.heads:
        raise ValueError("no head is ablated, so nothing would differ; ablate some heads first")
    if not ablation.fits_other_texts:
        raise ValueError(
            "other texts have other tokens; ablate at all tokens, by zero, mean or noise"
        )
    model.check_ablated(ablation.heads)
    examples = make_examples(model, texts)
    runs = LabRuns(model)
    hooks = runs.make_hooks(runs.make_patches(ablation))
    objective, note = choose_objective(runs.net, None, examples[0])
    tally = QualityTally(objective, [note] if note else [])
    for number, example in enumerate(examples):
        progress(number, len(examples), "reading texts")
        question = objective.prepare_input(runs.net, example, number)
        forward = make_forward(runs.net, runs.modules, question.inputs)
        before = get_output_tensor(forward.baseline_outputs)
        after = get_output_tensor(forward.run_with_hooks(hooks))
        tally.add_pair(question, after, before)
    return tally.report.data
