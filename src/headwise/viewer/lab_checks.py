"""Checks beside the effect of ablated heads: the same outputs by a second way, how the text goes
on, and the loss over several texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import pluralise
from .binary_answers import MAX_COPIED_PARAMS, get_native_copy
from .lab_runs import AblationOptions, LabRuns, Outputs, find_token_decoder, id_inputs, read_options
from .model_actions import make_examples, read_heads
from .model_worker import JobProgress
from .open_model import AblatedHead, OpenModel

if TYPE_CHECKING:
    from torch import Tensor

    from ..head_analysis.annotated_examples import Example
    from ..inspect.ablation import HeadPatch
    from ..inspect.hooks import AttentionHook
    from ..inspect.model_inputs import ModelInputs
    from ..models import Transformer
    from ..surgery.verification.model_comparison import OutputDifference


NEW_TOKENS = 24  # of the texts that are compared
HALF_TOLERANCE_STEPS = (
    16  # machine epsilons of the largest output, within which outputs of 16 bits agree
)
LASTING_MODES = ("zero", "mean", "noise")  # replacements that need no other tokens


# --- The second way: a model without the weights of these heads -----------------------------------


def check_by_removal(
    model: OpenModel, heads: Sequence[AblatedHead], options: AblationOptions, after: Outputs
) -> dict[str, Any]:
    """Compare the outputs with ablated heads to those of a copy of the model without the weights of
    these heads.

    Returns the largest difference of any output (a logit, if the model has some), the largest
    output, and whether the difference is within rounding; or the reason why the heads cannot be
    removed from a copy.
    """
    if options.tokens or any(head.mode != "zero" or head.scale != 0 for head in heads):
        return _unchecked(
            "removing weights equals zero ablation at all tokens, and no other ablation"
        )
    try:
        native, smaller = _copy_without_weights(model, heads)
        values = _run_open_text(model, smaller)
    except (ValueError, KeyError, IndexError, NotImplementedError) as error:
        return _unchecked(str(error))
    if values.shape != after.values.shape:
        return _unchecked("the copy without these heads has outputs of another shape")
    comparison = _compare(model, (native, smaller), heads, (values, after.values))
    return {"possible": True, "reason": "", **comparison.data, "areLogits": after.are_logits}


def _compare(
    model: OpenModel,
    nets: tuple[Transformer, Transformer],
    heads: Sequence[AblatedHead],
    values: tuple[Tensor, Tensor],
) -> OutputDifference:
    """Compare the outputs of both ways; if models of 16 bits agree within their rounding, compare
    in float32.
    """
    import torch

    from ..head_analysis.annotated_examples import Example
    from ..inspect.ablation import ScaledOutput
    from ..surgery.verification.model_comparison import (
        ABLATION,
        OUTPUT_TOLERANCE,
        OutputDifference,
        compare_outputs,
        full_precision,
        parameter_dtype,
    )

    difference, largest = float((values[0] - values[1]).abs().max()), float(values[1].abs().max())
    dtype = parameter_dtype(nets[0])
    is_rounded = dtype != full_precision(dtype)
    tolerance = HALF_TOLERANCE_STEPS * torch.finfo(dtype).eps if is_rounded else OUTPUT_TOLERANCE
    comparison = OutputDifference(
        "", difference, largest, 1, str(dtype).removeprefix("torch."), tolerance
    )
    if not is_rounded or not comparison.same:
        return comparison
    example = Example(dict(id_inputs(nets[0], model.get_recorded())), {})
    return compare_outputs(
        ABLATION, nets, [example], {(one.site, one.head): ScaledOutput(0.0) for one in heads}
    )


def _unchecked(reason: str) -> dict[str, Any]:
    return {"possible": False, "reason": reason}


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
    counts = {site: len(spec.score_head_of_output) for site, spec in native.spec.attention_specs()}
    keep = {
        site: [
            head
            for head in range(counts[site])
            if (site, head) not in {(one.site, one.head) for one in heads}
        ]
        for site in dict.fromkeys(one.site for one in heads)
    }
    return native, remove_heads(native, keep).eval()


def _run_open_text(model: OpenModel, net: Transformer) -> Tensor:
    """The outputs of a headwise model for the first text, in float64."""
    import torch

    from ..head_analysis.objectives import get_output_tensor

    with torch.inference_mode():
        output = net(**id_inputs(net, model.get_recorded()))
    values = get_output_tensor(output)
    return (values[0] if values.dim() == 3 else values[:1]).double().cpu()


# --- How the text goes on -------------------------------------------------------------------------


def continue_both(
    model: OpenModel, runs: LabRuns, heads: Sequence[AblatedHead], options: AblationOptions
) -> dict[str, Any]:
    """The text that the model writes after the open one (an encoder-decoder: for its source), with
    and without heads.

    Greedy decoding. Returns the tokens `before` and `after`, or the reason why there are none.
    """
    if options.tokens or any(head.mode not in LASTING_MODES for head in heads):
        return _unchecked(
            "a text is continued with heads that are ablated at all tokens by zero, mean or noise"
        )
    try:
        inputs, first = _prompt(model, runs)
        patches = runs.make_patches(heads, options)
        texts = [_generate(runs, inputs, first, chosen) for chosen in ({}, patches)]
    except (ValueError, KeyError, NotImplementedError, AttributeError) as error:
        return _unchecked(str(error))
    return {"possible": True, "reason": "", "before": texts[0], "after": texts[1]}


def _prompt(model: OpenModel, runs: LabRuns) -> tuple[ModelInputs, int]:
    """The inputs to continue, and the position of the first new token in the answer."""
    from ..head_analysis.objectives import detect_head_objective
    from ..inspect.model_inputs import is_encoder_decoder, prepare_inputs

    net, streams = runs.net, runs.trace.streams
    if detect_head_objective(net) not in ("next-token", "translation"):
        raise ValueError("the model predicts no next tokens")
    if is_encoder_decoder(net):
        source = streams["source"][0].text
        if not source:
            raise ValueError("the source has no text to translate again; enter one on the page")
        return prepare_inputs(net, [source], NEW_TOKENS), 0
    ids = id_inputs(net, runs.trace)
    return prepare_inputs(net, ids, NEW_TOKENS), len(streams["text"][0].ids)


def _generate(
    runs: LabRuns, inputs: ModelInputs, first: int, patches: Mapping[Any, Any]
) -> list[str]:
    """The new tokens, as texts."""
    import torch

    from ..inspect.ablation import OutputEditor
    from ..inspect.hooks import ModelRun

    by_site: dict[str, dict[int, Any]] = {}
    for (site, head), patch in patches.items():
        by_site.setdefault(str(site), {})[int(head)] = patch
    editors = {site: OutputEditor(site, edited, None) for site, edited in by_site.items()}
    output = ModelRun(runs.net, inputs, NEW_TOKENS).run_with_hooks(runs.modules, editors)
    ids = list((output.tolist() if isinstance(output, torch.Tensor) else output)[0])
    prompt = list(inputs.prompt_ids[0]) if inputs.prompt_ids else []
    new = ids[len(prompt) :] if first and ids[: len(prompt)] == prompt else ids
    decode = find_token_decoder(runs.net)
    return [decode(token) for token in new[:NEW_TOKENS]]


# --- Several texts --------------------------------------------------------------------------------

MIN_TEXTS, MAX_TEXTS = (
    2,
    256,
)  # an interval needs as many; more would take long beside the open text


def evaluate_texts(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """Loss, perplexity and accuracy over the texts of the job, before and after, with intervals
    over texts.

    Means and the moments of noise are those over the open text, as in its own effect. The ablated
    heads of the model do not change.
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
            f"cannot evaluate on {pluralise(len(lines), 'text')}; give {MIN_TEXTS} to "
            f"{MAX_TEXTS}, one a line"
        )
    return make_examples(model, {"texts": lines})


def _make_editors(
    model: OpenModel, runs: LabRuns, arguments: Mapping[str, Any]
) -> dict[str, AttentionHook]:
    """The hooks that replace the outputs of the heads of a job, by site, for
    texts of any length.
    """
    from ..inspect.ablation import OutputEditor

    heads, options = read_heads(model, arguments), read_options(model, arguments)
    if not heads:
        raise ValueError("no head is ablated, so nothing would differ; ablate some heads first")
    if options.tokens or any(head.mode not in LASTING_MODES for head in heads):
        raise ValueError(
            "other texts have other tokens; ablate at all tokens, by zero, mean or noise"
        )
    model.check_ablated(heads)
    by_site: dict[str, dict[int, HeadPatch]] = {}
    for (site, head), patch in runs.make_patches(heads, options).items():
        by_site.setdefault(str(site), {})[int(head)] = patch
    return {site: OutputEditor(site, patches, None) for site, patches in by_site.items()}
