"""Jobs of the Lab: run the open model on the open text with and without some heads, and compare."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from ..util.errors import pluralise
from .model_actions import check_token_counts, make_examples
from .model_worker import HEADS, LINES, SEED, TOKENS, JobProgress, Pair, action, integer, text
from .open_model import (
    CAPTURE_BUDGET,
    MAX_COPIED_PARAMS,
    AblatedHead,
    OpenModel,
    get_native_copy,
    id_inputs,
    id_rows,
    open_inputs,
)
from .surgery_actions import UNKNOWN_MODEL, list_heads

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..models import Transformer
    from ..observe.inspect.ablation import HeadPatch, HeadRef
    from ..observe.inspect.hooks import AttentionHook, SiteModule
    from ..observe.inspect.model_inputs import ModelInputs

LASTING_MODES = ("zero", "mean", "noise")  # replacements that need no other tokens


class Ablation(NamedTuple):
    """Ablated heads, the tokens of each stream where they are ablated (no entry: all), the text of
    "resample", and the random seed.

    Without a text, "resample" takes each head's output for the tokens of the open text in another
    order.
    """

    heads: Sequence[AblatedHead] = ()
    tokens: Mapping[str, tuple[int, ...]] = {}
    resample_text: str = ""
    seed: int = 0

    @property
    def fits_other_texts(self) -> bool:
        """True if the same ablation is defined for texts of any length."""
        return not self.tokens and all(head.mode in LASTING_MODES for head in self.heads)

    @property
    def removes_heads(self) -> bool:
        """True if the ablation equals removing the weights of these heads."""
        return not self.tokens and all(
            head.mode == "zero" and not head.scale for head in self.heads
        )


ABLATION_FIELDS = {
    "heads": HEADS,
    "tokens": TOKENS,
    "resample_text": text(key="resampleText"),
    "seed": SEED,
}


class Outputs(NamedTuple):
    """Output of one run: logits [T, vocabulary], or vectors [T, width] of a model without a token
    head.
    """

    values: Tensor
    are_logits: bool


class LabRuns:
    """Runs of the open model on the open text, with all heads and with some ablated.

    A headwise model restarts at the first layer with an ablated head.
    """

    def __init__(self, model: OpenModel) -> None:
        from ..observe.head_analysis.importance_methods import RepeatedForward
        from ..observe.inspect.attention_sites import find_attention

        self.net = model.get_model()
        self.inputs = open_inputs(model)
        self.trace = model.get_recorded()
        site_modules = find_attention(self.net)
        self.modules: list[SiteModule] = [one for one in site_modules if one.site.ablate.possible]
        self.forward = RepeatedForward(self.net, self.modules, self.inputs)

    @property
    def heads(self) -> list[Pair]:
        """List the heads that can be ablated on this text, layer by layer."""
        heads: list[Pair] = []
        for layer in self.trace.layers:
            count = self.forward.head_counts.get(layer.name, 0)
            heads += [(layer.name, head) for head in range(count)]
        return heads

    def all_heads(self) -> Outputs:
        """The outputs of the model as it is."""
        return self._read(self.forward.baseline_outputs)

    def without(self, ablation: Ablation) -> Outputs:
        """The outputs with these heads ablated."""
        return self.patched(self.make_patches(ablation), ablation.tokens)

    def patched(
        self, patches: Mapping[HeadRef, HeadPatch], tokens: Mapping[str, tuple[int, ...]]
    ) -> Outputs:
        """The outputs with the outputs of these heads replaced, at these tokens of each stream."""
        if not patches:
            return self.all_heads()
        return self._read(self.forward.run_with_hooks(self.make_hooks(patches, tokens)))

    def make_hooks(
        self,
        patches: Mapping[HeadRef, HeadPatch],
        tokens: Mapping[str, tuple[int, ...]] | None = None,
    ) -> dict[str, AttentionHook]:
        """The hooks that replace the outputs of these heads, by site."""
        from ..observe.inspect.ablation import OutputEditor

        by_site: dict[str, dict[int, HeadPatch]] = {}
        for place, patch in patches.items():
            site, head = cast("tuple[str, int]", place)
            by_site.setdefault(site, {})[head] = patch
        hooks: dict[str, AttentionHook] = {}
        for site, edited in by_site.items():
            stream = self.trace.get_layer(site).query_stream
            hooks[site] = OutputEditor(site, edited, (tokens or {}).get(stream))
        return hooks

    def make_patches(self, ablation: Ablation) -> dict[HeadRef, HeadPatch]:
        """The replacement of every ablated head; means and the moments of noise are those over the
        open text.
        """
        from ..observe.inspect.ablation import ConstantOutput, ScaledOutput
        from ..observe.inspect.dataset_means import head_means, head_noise, head_outputs

        patches: dict[HeadRef, HeadPatch] = {}
        refs: dict[str, list[HeadRef]] = {"mean": [], "noise": [], "resample": []}
        for head in ablation.heads:
            if head.mode == "zero":
                patches[head.site, head.head] = ScaledOutput(head.scale)
            else:
                refs[head.mode].append((head.site, head.head))
        batch = self.inputs.kwargs
        vectors: dict[HeadRef, Tensor] = {}
        if refs["mean"]:
            vectors |= head_means(self.net, [batch], refs["mean"])
        if refs["resample"]:
            vectors |= head_outputs(self.net, self.resample_inputs(ablation), refs["resample"])
        if refs["noise"]:
            patches |= head_noise(self.net, [batch], refs["noise"], seed=ablation.seed)
        return patches | {ref: ConstantOutput(value) for ref, value in vectors.items()}

    def resample_inputs(self, ablation: Ablation) -> dict[str, torch.Tensor]:
        """Token ids of the same lengths as the open text: of another text, or its own tokens in
        another order.
        """
        import torch

        from ..observe.inspect.model_inputs import prepare_inputs

        ids = id_rows(self.net, self.trace)
        if not ablation.resample_text:
            generator = torch.Generator().manual_seed(ablation.seed)
            return {
                name: torch.tensor([row])[:, torch.randperm(len(row), generator=generator)]
                for name, row in ids.items()
            }
        if len(ids) > 1:
            raise ValueError(
                "resample of an encoder-decoder model has no other text; leave it empty"
            )
        ((name, row),) = ids.items()
        other = prepare_inputs(self.net, [ablation.resample_text], 0).token_rows["text"][0].ids
        if len(other) < len(row):
            fact = f"the text of resample has {len(other)} tokens, the open text {len(row)}"
            raise ValueError(f"{fact}; give a longer one, or none")
        return {name: torch.tensor([list(other[: len(row)])])}

    def _read(self, result: Any) -> Outputs:
        """The outputs for the first text."""
        import torch

        from ..observe.head_analysis.objectives import detect_head_objective, get_output_tensor

        logits = getattr(result, "logits", None)
        values = logits if isinstance(logits, torch.Tensor) else get_output_tensor(result)
        predicts = detect_head_objective(self.net) in ("next-token", "translation", "masked-token")
        has_tokens = values.dim() == 3
        first = values[0] if has_tokens else values[:1]
        return Outputs(first.cpu().double(), predicts and has_tokens)


def position_changes(before: Outputs, after: Outputs) -> Tensor:
    """Return the change at every position: KL(before || after) in nats for logits, 1 - cosine for
    vectors.
    """
    import torch.nn.functional as F

    if not before.are_logits:
        return 1 - F.cosine_similarity(before.values, after.values, dim=-1)
    old = before.values.log_softmax(-1)
    new = after.values.log_softmax(-1)
    return (old.exp() * (old - new)).sum(-1).clamp(min=0)


def format_prune_command(model: OpenModel, ablation: Ablation) -> str:
    """Return the `headwise prune` command for these heads; "" unless all are ablated to zero,
    fully, and at all tokens.
    """
    if not ablation.heads or not ablation.removes_heads:
        return ""
    named = list_heads([(head.site, head.head) for head in ablation.heads])
    target = model.target or UNKNOWN_MODEL
    options = ["--heads", *named, "--data", "texts.txt", "--out", "pruned"]
    return shlex.join(["headwise", "prune", target, *options])


TOP_TOKENS = 12  # rows of the table of next tokens
LAST_POSITIONS = 128  # positions with a table of next tokens
MAX_RANDOM_SETS = 20
MAX_NEW_TOKENS = 64
COMPARED_TOKENS = 24  # of the texts that go on with and without heads
HALF_TOLERANCE_STEPS = 16  # epsilons of the largest output, within which outputs of 16 bits agree
MIN_TEXTS = 2
MAX_TEXTS = 256  # an interval needs two; more than 256 take long


# --- Some heads ablated ---------------------------------------------------------------------------


@action("ablate", random=integer(0, MAX_RANDOM_SETS, 0), **ABLATION_FIELDS)
def compute_effect(
    model: OpenModel, progress: JobProgress, random: int, **fields: Any
) -> dict[str, Any]:
    """Compare the model with and without ablated heads on the open text.

    With `random` = N, also compare N random sets with the same number of other heads.
    """
    ablation = Ablation(**fields)
    heads = ablation.heads
    model.check_ablated(heads)
    runs = LabRuns(model)
    progress(0, 2 + random, "all heads")
    before = runs.all_heads()
    progress(1, 2 + random, f"{pluralise(len(heads), 'head')} ablated")
    after = runs.without(ablation)
    result = compare_outputs(model, before, after)
    result["check"] = check_by_removal(model, ablation, after)
    result["command"] = format_prune_command(model, ablation)
    result["random"] = []
    for count, chosen in enumerate(sample_heads(runs.heads, heads, random)):
        progress(2 + count, 2 + random, f"random heads {count + 1}")
        after = runs.without(ablation._replace(heads=chosen))
        change = position_changes(before, after).mean().item()
        result["random"].append({"change": change, "loss": _mean(_loss_by_position(model, after))})
    return result


def sample_heads(
    measured: Sequence[Pair], heads: Sequence[AblatedHead], count: int, seed: int = 0
) -> list[list[AblatedHead]]:
    """Sample equally large random sets of other heads, ablated in the same way; all heads are
    candidates if too few others remain.
    """
    chosen = {(head.site, head.head) for head in heads}
    others = [key for key in measured if key not in chosen]
    pool = others if len(others) >= len(heads) else list(measured)
    generator = np.random.default_rng(seed)
    sets: list[list[AblatedHead]] = []
    for _ in range(count if heads else 0):
        places = generator.permutation(len(pool))[: len(heads)].tolist()
        chosen_heads = zip([pool[place] for place in places], heads, strict=True)
        sets.append([head._replace(site=key[0], head=key[1]) for key, head in chosen_heads])
    return sets


def compare_outputs(model: OpenModel, before: Outputs, after: Outputs) -> dict[str, Any]:
    """Compute loss and change, in total and by position, and the likeliest next tokens before and
    after.
    """
    from ..observe.inspect.model_tokenizer import find_token_decoder

    changes = position_changes(before, after)
    pair = {"before": before, "after": after}
    losses = {name: _loss_by_position(model, outputs) for name, outputs in pair.items()}
    tables: list[list[dict[str, Any]]] = []
    if losses["before"]:
        tables = _next_tokens(before, after, find_token_decoder(model.get_model()))
    return {
        "loss": {name: _mean(values) for name, values in losses.items()},
        "lossByPosition": losses,
        "kl": changes.mean().item(),
        "klByPosition": changes.tolist(),
        "outputs": _quantity(before),
        "nextAt": tables,
        "nextFrom": len(changes) - len(tables),
    }


def _quantity(outputs: Outputs) -> str:
    """The key of the page's text for the change of these outputs."""
    return "lab.divergence" if outputs.are_logits else "lab.cosine"


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _loss_by_position(model: OpenModel, outputs: Outputs) -> list[float]:
    """Return the cross-entropy of each next token in nats; empty if the model predicts no next
    tokens.
    """
    import torch
    import torch.nn.functional as F

    from ..observe.head_analysis.objectives import detect_head_objective

    rows = model.get_recorded().streams.get("text", ())
    ids = list(rows[0].ids) if rows else []
    is_causal = outputs.are_logits and detect_head_objective(model.get_model()) != "masked-token"
    if not is_causal or len(ids) < 2:
        return []
    return F.cross_entropy(outputs.values[:-1], torch.tensor(ids[1:]), reduction="none").tolist()


def _next_tokens(
    before: Outputs, after: Outputs, decode: Callable[[int], str]
) -> list[list[dict[str, Any]]]:
    """List the likely tokens before or after for each of the last positions, likeliest first."""
    import torch

    old = before.values[-LAST_POSITIONS:].softmax(-1)
    new = after.values[-LAST_POSITIONS:].softmax(-1)
    most = torch.maximum(old, new).topk(min(TOP_TOKENS, old.shape[-1]), dim=-1).indices
    tables: list[list[dict[str, Any]]] = []
    for position, tokens in enumerate(most):
        rows = [
            {
                "token": decode(token),
                "before": old[position, token].item(),
                "after": new[position, token].item(),
            }
            for token in tokens.tolist()
        ]
        tables.append(sorted(rows, key=lambda row: -row["before"]))
    return tables


# --- Every head alone -----------------------------------------------------------------------------


@action("sweep")
def sweep_heads(model: OpenModel, progress: JobProgress) -> dict[str, Any]:
    """Ablate every head alone; return [site number, head, change, change of the loss] for each."""
    runs = LabRuns(model)
    progress(0, 0, "all heads")
    before = runs.all_heads()
    loss = _mean(_loss_by_position(model, before))
    names = [layer.name for layer in model.get_recorded().layers]
    changes: list[list[Any]] = []
    for count, (site, head) in enumerate(runs.heads):
        progress(count, len(runs.heads), f"{site} {head}")
        after = runs.without(Ablation([AblatedHead(site, head)]))
        rise = None if loss is None else (_mean(_loss_by_position(model, after)) or 0.0) - loss
        change = float(position_changes(before, after).mean())
        changes.append([names.index(site), head, change, rise])
    return {"heads": changes, "quantity": _quantity(before), "loss": loss}


# --- The open text goes on ------------------------------------------------------------------------


@action("generate", count=integer(1, MAX_NEW_TOKENS, 16))
def generate_text(model: OpenModel, progress: JobProgress, count: int) -> dict[str, Any]:
    """Continue the open text by `count` tokens of greedy decoding, and show the new trace.

    Returns the position of the first new token `first` and the number of new tokens `count`.
    """
    from ..observe.head_analysis.objectives import detect_head_objective
    from ..observe.inspect.model_inputs import prepare_inputs
    from ..observe.inspect.trace_capture import Capture, trace

    net = model.get_model()
    if detect_head_objective(net) != "next-token":
        raise ValueError("error.onlyDecoder")
    inputs: Any = dict(open_inputs(model).kwargs)
    first = (prepare_inputs(net, inputs, count).token_counts or {}).get("text", 0)
    check_token_counts({"text": first + count}, model.max_tokens)
    progress(0, 2, "generating one token" if count == 1 else f"generating {count} tokens")
    captured = trace(
        net,
        inputs,
        max_new_tokens=count,
        capture=Capture(extra=("v",), budget=CAPTURE_BUDGET),
    )
    progress(1, 2, "drawing thumbnails")
    model.set_trace(captured.with_thumbnails())
    generated = len(captured.streams["text"][0].ids) - first
    return {"revision": model.revision, "first": first, "count": generated}


# --- The outputs, by a copy of the model without the weights of the ablated heads -----------------


def unchecked(reason: str) -> dict[str, Any]:
    """Return the answer for a check that is not possible."""
    return {"possible": False, "reason": reason}


def check_by_removal(model: OpenModel, ablation: Ablation, after: Outputs) -> dict[str, Any]:
    """Compare the outputs with ablated heads to a copy of the model without these heads.

    Returns the largest difference of any output (a logit, if the model has some), the largest
    output, and whether the difference is within rounding; or the reason why the heads cannot be
    removed from a copy.
    """
    if not ablation.removes_heads:
        return unchecked(
            "removing weights equals zero ablation at all tokens, and no other ablation"
        )
    import torch

    from ..observe.head_analysis.objectives import get_output_tensor
    from ..surgery.attention_replacement import remove_heads

    try:
        native = get_native_copy(model.get_model())
        if sum(parameter.numel() for parameter in native.parameters()) > MAX_COPIED_PARAMS:
            limit = f"{MAX_COPIED_PARAMS / 1e6:,.0f} M parameters"
            return unchecked(f"only models up to {limit} are copied; use the screen Prune")
        specs = dict(native.spec.attention_specs())
        chosen = dict.fromkeys(head.site for head in ablation.heads)
        keep = {site: list(range(len(specs[site].score_head_of_output))) for site in chosen}
        for head in ablation.heads:
            keep[head.site].remove(head.head)
        smaller = remove_heads(native, keep).eval()
        with torch.inference_mode():
            values = get_output_tensor(smaller(**id_inputs(smaller, model.get_recorded())))
        values = (values[0] if values.dim() == 3 else values[:1]).cpu().double()
    except (ValueError, KeyError, IndexError, NotImplementedError) as error:
        return unchecked(str(error))
    if values.shape != after.values.shape:
        return unchecked("error.noCopy")
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
    """Compare the outputs of both models. If 16-bit models agree within rounding, compare in
    float32.
    """
    import torch

    from ..observe.head_analysis.annotated_examples import Example
    from ..observe.inspect.ablation import ScaledOutput
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


# --- How the text goes on -------------------------------------------------------------------------


@action("continue", **ABLATION_FIELDS)
def continue_text(model: OpenModel, progress: JobProgress, **fields: Any) -> dict[str, Any]:
    """Generate text after the open one (an encoder-decoder: for its source), with and without
    heads. The model's ablated heads do not change.

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
    """Return the inputs to continue, and the position of the first new token."""
    from ..observe.head_analysis.objectives import detect_head_objective
    from ..observe.inspect.model_inputs import is_encoder_decoder, prepare_inputs

    net = runs.net
    streams = runs.trace.streams
    if detect_head_objective(net) not in ("next-token", "translation"):
        raise ValueError("the model predicts no next tokens")
    if not is_encoder_decoder(net):
        ids = id_inputs(net, runs.trace)
        return prepare_inputs(net, ids, COMPARED_TOKENS), len(streams["text"][0].ids)
    source = streams["source"][0].text
    if not source:
        raise ValueError("the source has no text to translate again; enter one on the page")
    return prepare_inputs(net, [source], COMPARED_TOKENS), 0


def _generate(
    runs: LabRuns, inputs: ModelInputs, first: int, patches: Mapping[Any, Any]
) -> list[str]:
    """Generate the new tokens as texts."""
    import torch

    from ..observe.inspect.hooks import run_observed
    from ..observe.inspect.model_tokenizer import find_token_decoder

    hooks = runs.make_hooks(patches)
    output = run_observed(runs.net, inputs, runs.modules, hooks, COMPARED_TOKENS)
    ids = list((output.tolist() if isinstance(output, torch.Tensor) else output)[0])
    prompt = list(inputs.prompt_ids[0]) if inputs.prompt_ids else []
    new = ids[len(prompt) :] if first and ids[: len(prompt)] == prompt else ids
    decode = find_token_decoder(runs.net)
    return [decode(token) for token in new[:COMPARED_TOKENS]]


# --- Several texts --------------------------------------------------------------------------------


@action("evaluate", texts=LINES, **ABLATION_FIELDS)
def evaluate_texts(
    model: OpenModel, progress: JobProgress, texts: list[str], **fields: Any
) -> dict[str, Any]:
    """Evaluate loss, perplexity and accuracy over the job's texts, before and after, with intervals
    over texts.

    Means and noise moments are taken over the open text, as in `compute_effect`. The model's
    ablated heads do not change.
    """
    from ..observe.head_analysis.importance_methods import RepeatedForward
    from ..observe.head_analysis.objectives import choose_objective, get_output_tensor
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
        forward = RepeatedForward(runs.net, runs.modules, question.inputs)
        before = get_output_tensor(forward.baseline_outputs)
        after = get_output_tensor(forward.run_with_hooks(hooks))
        tally.add(question, after, before)
    return tally.report.data
