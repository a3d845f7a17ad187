"""The jobs of the Lab: what the model does with some heads ablated, beside what it does with all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .model_actions import read_heads
from .model_worker import JobProgress
from .open_model import AblatedHead, OpenModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..inspect.ablation import HeadPatch, HeadRef
    from ..inspect.model_inputs import ModelInputs

TOP_TOKENS = 12  # rows of the table of next tokens
IGNORED = -100  # label of a position without a next token


class Outputs(NamedTuple):
    """The output of one run: logits [T, vocabulary], or vectors [T, width] of a model without a token head."""

    values: Tensor
    are_logits: bool


def compute_effect(model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress) -> dict[str, Any]:
    """Compare the model with the heads of the job ablated to the model with all heads, on the open text."""
    net, heads = model.get_model(), read_heads(model, arguments)
    model.set_ablated(heads)
    inputs = open_inputs(model)
    progress(0, 2, "all heads")
    before = run_outputs(net, inputs)
    progress(1, 2, f"{len(heads)} heads ablated")
    after = run_outputs(net, inputs, make_patches(net, inputs, heads))
    return compare_outputs(model, before, after) | {"revision": model.revision}


def sweep_heads(model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress) -> dict[str, Any]:
    """Ablate every head alone; returns [site number, head, change] for each, in the order of the page."""
    net, inputs = model.get_model(), open_inputs(model)
    before = run_outputs(net, inputs)
    known, names = model.sites, [layer.name for layer in model.get_trace().layers]
    changes: list[list[Any]] = []
    heads = [key for key in model.heads if key[0] in known and known[key[0]].ablate.possible]
    for number, (site, head) in enumerate(heads):
        progress(number, len(heads), f"{site} {head}")
        after = run_outputs(net, inputs, make_patches(net, inputs, [AblatedHead(site, head)]))
        changes.append([names.index(site), head, float(position_changes(before, after).mean())])
    return {"heads": changes, "quantity": _quantity(before), "notes": [f"{len(changes)} of {len(model.heads)} heads"]}


def open_inputs(model: OpenModel) -> ModelInputs:
    """The inputs of the open text, from its recorded token ids."""
    import torch

    from ..inspect.model_inputs import is_encoder_decoder, prepare_inputs
    from ..models import Transformer

    net, streams = model.get_model(), model.get_trace().streams
    text, source = ("x", "source") if isinstance(net, Transformer) else ("input_ids", "")
    if is_encoder_decoder(net) and not isinstance(net, Transformer):
        text, source = "decoder_input_ids", "input_ids"
    names = {"text": text, "source": source}
    ids = {names[name]: torch.tensor([list(rows[0].ids)]) for name, rows in streams.items() if rows and names.get(name)}
    if not ids:
        raise ValueError("the open text has no token ids; capture a text on the page first")
    return prepare_inputs(net, ids, 0)


def make_patches(net: nn.Module, inputs: ModelInputs, heads: Sequence[AblatedHead]) -> dict[HeadRef, HeadPatch]:
    """The patch of every ablated head; "mean" replaces its output by its mean over the tokens of the text."""
    from ..inspect.ablation import ConstantOutput, ScaledOutput
    from ..inspect.dataset_means import head_means

    patches: dict[HeadRef, HeadPatch] = {}
    averaged = [(head.site, head.head) for head in heads if head.mode == "mean"]
    means = head_means(net, [inputs.kwargs], averaged) if averaged else {}
    for head in heads:
        key = head.site, head.head
        if head.mode == "mean":
            patches[key] = ConstantOutput(means[key])
        elif head.mode == "zero":
            patches[key] = ScaledOutput(head.scale)
        else:
            raise ValueError(f"the mode {head.mode} needs other texts; use zero or mean on the page")
    return patches


def run_outputs(net: nn.Module, inputs: ModelInputs, patches: Mapping[HeadRef, HeadPatch] | None = None) -> Outputs:
    """Run the model, with some heads patched, and return its outputs for the first text."""
    import torch

    from ..head_analysis.objectives import detect_head_objective, get_output_tensor
    from ..inspect.ablation import edit_heads

    with torch.inference_mode():
        if patches:
            with edit_heads(net, patches, None):
                result = net(*inputs.args, **inputs.kwargs)
        else:
            result = net(*inputs.args, **inputs.kwargs)
    logits = getattr(result, "logits", None)
    values = logits if isinstance(logits, torch.Tensor) else get_output_tensor(result)
    are_logits = detect_head_objective(net) in ("next-token", "translation", "masked-token") and values.dim() == 3
    return Outputs(values[0].double() if values.dim() == 3 else values[:1].double(), are_logits)


def position_changes(before: Outputs, after: Outputs) -> Tensor:
    """The change of every position: KL(before || after) in nats for logits, 1 - cosine for vectors."""
    import torch.nn.functional as F

    if before.are_logits:
        old, new = before.values.log_softmax(-1), after.values.log_softmax(-1)
        return (old.exp() * (old - new)).sum(-1).clamp(min=0)
    return 1 - F.cosine_similarity(before.values, after.values, dim=-1)


def _quantity(outputs: Outputs) -> str:
    return "KL(before ‖ after), nats" if outputs.are_logits else "change of the output, 1 − cosine"


def compare_outputs(model: OpenModel, before: Outputs, after: Outputs) -> dict[str, Any]:
    """Loss, change by position, and the likeliest next tokens before and after."""
    import torch
    import torch.nn.functional as F

    from ..head_analysis.objectives import detect_head_objective

    net = model.get_model()
    changes = position_changes(before, after)
    loss: dict[str, float | None] = {"before": None, "after": None}
    table: list[dict[str, Any]] = []
    if before.are_logits and detect_head_objective(net) != "masked-token":
        ids = list(model.get_trace().streams["text"][0].ids)
        labels = torch.tensor([*ids[1:], IGNORED])
        if len(ids) > 1:
            for name, outputs in (("before", before), ("after", after)):
                loss[name] = F.cross_entropy(outputs.values, labels, ignore_index=IGNORED).item()
        table = _next_tokens(before.values[-1].softmax(-1), after.values[-1].softmax(-1), _token_decoder(net))
    return {
        "loss": loss,
        "kl": changes.mean().item(),
        "klByPosition": changes.tolist(),
        "outputs": _quantity(before),
        "next": table,
        "notes": [],
    }


def _next_tokens(before: Tensor, after: Tensor, decode: Callable[[int], str]) -> list[dict[str, Any]]:
    """The tokens that are likely before or after, the likeliest first."""
    import torch

    most = torch.maximum(before, after).topk(min(TOP_TOKENS, len(before))).indices.tolist()
    rows = [{"token": decode(token), "before": before[token].item(), "after": after[token].item()} for token in most]
    return sorted(rows, key=lambda row: -row["before"])


def _token_decoder(net: nn.Module) -> Callable[[int], str]:
    from ..head_analysis.annotated_examples import ExampleReader

    try:
        return ExampleReader(net).token_decoders()["text"]
    except (ValueError, KeyError, OSError):
        return str  # a model without a tokenizer shows ids
