"""Objectives: one number per text for how well a model performs or how far its outputs have
drifted.

`choose_objective` picks the loss that fits the model's own head; `OutputDrift` works for any model.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models import Transformer
from ...models.vocabulary import parse_tokenizer
from ...training.data import IGNORE_INDEX
from ...util.errors import check_known
from ..inspect.model_inputs import (
    ModelInputs,
    find_ids_argument,
    is_encoder_decoder,
    prepare_inputs,
)
from ..inspect.model_tokenizer import find_tokenizer
from .annotated_examples import LABELS_INPUT, Example

# --- The head of a model --------------------------------------------------------------------------

# Objective by the class name of a transformers model.
OBJECTIVE_OF_CLASS = {
    "masked-token": re.compile("MaskedLM"),
    "label": re.compile("(Sequence|Image|Token|Audio)Classification"),
    "next-token": re.compile("CausalLM|LMHeadModel"),
    "translation": re.compile("ConditionalGeneration|MTModel|Seq2SeqLM"),
}
MASK_TOKENS = ("[MASK]", "<mask>")


def detect_head_objective(model: nn.Module) -> str:
    """Name of the objective that fits a model's own head; empty if it has none or it is unknown.

    >>> import headwise as hw
    >>> detect_head_objective(
    ...     hw.build(
    ...         hw.families.read_model_spec(
    ...             {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    ...         )
    ...     )
    ... )
    'next-token'
    """
    has_source = is_encoder_decoder(model)
    if not isinstance(model, Transformer):
        name = type(model).__name__
        if not has_source and getattr(model, "config", None) is None:
            return ""
        matches = [one for one, pattern in OBJECTIVE_OF_CLASS.items() if pattern.search(name)]
        is_translation = matches[:1] == ["translation"]
        return "next-token" if is_translation and not has_source else (*matches, "")[0]
    spec = model.spec
    if not spec.heads or not spec.heads[0].outputs:
        return ""
    embedding = spec.stacks[-1].embedding
    is_token = embedding is not None and embedding.tokens == spec.heads[0].outputs
    if not is_token or spec.heads[0].at != "each":
        return "label"
    names = {"decoder": "next-token", "encoder-decoder": "translation", "encoder": "masked-token"}
    return names.get(spec.kind, "label")


def find_mask_id(model: nn.Module) -> int | None:
    """Id of the mask token, from the model's usage or its tokenizer; None if there is none."""
    if isinstance(model, Transformer):
        if model.usage.mask is not None or model.usage.tokenizer is None:
            return model.usage.mask
        tokenizer = parse_tokenizer(model.usage.tokenizer)
    else:
        tokenizer = find_tokenizer(model)
    ids = [] if tokenizer is None else [tokenizer.token_to_id(mask) for mask in MASK_TOKENS]
    return next((mask_id for mask_id in ids if mask_id is not None), None)


def get_output_tensor(outputs: Any) -> Tensor:
    """The output tensor of a model: its last hidden state, else its logits, else the embeddings of
    texts and images side by side (CLIP), else the first element of a tuple.
    """
    if isinstance(outputs, Tensor):
        return outputs
    for name in ("last_hidden_state", "logits"):
        value = getattr(outputs, name, None)
        if isinstance(value, Tensor):
            return value
    embeddings: list[Any] = [getattr(outputs, f"{kind}_embeds", None) for kind in ("text", "image")]
    if all(isinstance(one, Tensor) for one in embeddings):
        return torch.cat(embeddings, -1)
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    fact = f"cannot find the output tensor in a {type(outputs).__name__}"
    raise ValueError(f"{fact}; wrap the model so that it returns one tensor")


# --- Objectives -----------------------------------------------------------------------------------

LOSS_NAMES = ("next-token", "translation", "label")


class EvaluationInput(NamedTuple):
    """Model inputs, and labels for each output position if the objective has any."""

    inputs: ModelInputs
    labels: Tensor | None = None

    @property
    def num_targets(self) -> int:
        """Number of positions with a label; 1 for an objective without labels."""
        return 1 if self.labels is None else int((self.labels != IGNORE_INDEX).sum())


class Objective(ABC):
    """Interface of objectives: one number for each text; higher is worse.

    `has_gradient` is false if the gradient at the unedited model is useless.
    """

    name: str
    has_gradient: bool = True

    @abstractmethod
    def unsupported_reason(self, model: nn.Module, example: Example) -> str:
        """Reason why the objective cannot be measured on this model; empty if it can."""

    @abstractmethod
    def prepare_input(self, model: nn.Module, example: Example, number: int) -> EvaluationInput:
        """Model inputs and labels for an example; `number` is its index and
        seeds random choices.
        """

    @abstractmethod
    def value(self, outputs: Any, baseline_outputs: Any, evaluation: EvaluationInput) -> Tensor:
        """The objective, from the outputs of the edited and of the unedited model."""


@dataclass(frozen=True)
class TargetLoss(Objective):
    """Cross-entropy of the targets, averaged over the labelled positions of a text.

    `name` is the kind of head: "next-token", "translation" (with teacher forcing) or "label". The
    targets are the next tokens, unless the example's inputs have "labels", one per position, with
    -100 for none.
    """

    name: str

    def __post_init__(self) -> None:
        check_known("loss", self.name, LOSS_NAMES)

    def unsupported_reason(self, model: nn.Module, example: Example) -> str:
        reason = other_head_reason(model, self.name)
        is_labelled = self.name != "label" or _get_labels(example) is not None
        return reason or ("" if is_labelled else "the texts come without labels")

    def prepare_input(self, model: nn.Module, example: Example, number: int) -> EvaluationInput:
        inputs = _read_inputs(model, example)
        labels = _get_labels(example)
        if labels is not None:
            return EvaluationInput(inputs, labels.flatten())
        if self.name == "label":
            raise ValueError(
                f"text {number} has no labels; add {LABELS_INPUT!r} to its inputs, as the first "
                "text has"
            )
        ids = torch.tensor(_get_ids(model, inputs))
        return EvaluationInput(inputs, torch.cat([ids[1:], ids.new_full((1,), IGNORE_INDEX)]))

    def value(self, outputs: Any, baseline_outputs: Any, evaluation: EvaluationInput) -> Tensor:
        return _cross_entropy(outputs, evaluation)


@dataclass(frozen=True)
class MaskedTokenLoss(Objective):
    """Cross-entropy of masked tokens; the same random `mask_fraction` of each text, at least one
    token, for every head.

    `mask_id` defaults to the tokenizer's mask. If an example's inputs have "labels", they must be
    masked already.
    """

    name = "masked-token"
    mask_id: int | None = None
    mask_fraction: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.mask_fraction <= 1:
            raise ValueError(f"mask_fraction must be > 0 and <= 1, got {self.mask_fraction!r}")

    def unsupported_reason(self, model: nn.Module, example: Example) -> str:
        reason = other_head_reason(model, self.name)
        if reason:
            return reason
        if self.mask_id is None and _get_labels(example) is None and find_mask_id(model) is None:
            return (
                f"the mask token of {type(model).__name__} is unknown; set it, as in "
                "MaskedTokenLoss(mask_id=103)"
            )
        return ""

    def prepare_input(self, model: nn.Module, example: Example, number: int) -> EvaluationInput:
        inputs = _read_inputs(model, example)
        labels = _get_labels(example)
        if labels is not None:
            return EvaluationInput(inputs, labels.flatten())
        ids = torch.tensor(_get_ids(model, inputs))
        special = torch.zeros(len(ids), dtype=torch.bool)
        if "text" in example.streams:
            special = example.streams["text"].is_special.cpu()
        candidates = np.flatnonzero(~special.numpy())
        count = min(len(candidates), max(1, round(self.mask_fraction * len(candidates))))
        generator = np.random.default_rng((self.seed, number))
        positions = torch.from_numpy(generator.choice(candidates, count, replace=False))
        labels = torch.full_like(ids, IGNORE_INDEX)
        labels[positions] = ids[positions]
        mask_id = find_mask_id(model) if self.mask_id is None else self.mask_id
        assert mask_id is not None
        name = find_ids_argument(model)
        masked_ids = inputs.kwargs[name].clone()
        masked_ids[0, positions.to(masked_ids.device)] = mask_id
        return EvaluationInput(replace(inputs, kwargs={**inputs.kwargs, name: masked_ids}), labels)

    def value(self, outputs: Any, baseline_outputs: Any, evaluation: EvaluationInput) -> Tensor:
        return _cross_entropy(outputs, evaluation)


@dataclass(frozen=True)
class OutputDrift(Objective):
    """Measure the distance between the outputs of the edited and the unedited model.

    `metric` is "cosine", 1 - cosine similarity, or "l2", |a - b| / |b|. `representation` "pooled"
    compares means over tokens; "tokens" averages the distances of single tokens. At the unedited
    model the drift is 0 and has no useful gradient, so methods that need gradients cannot use it.

    >>> a, b = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[4.0, 3.0]]])
    >>> [
    ...     round(OutputDrift(metric=by).value(a, b, EvaluationInput(ModelInputs())).item(), 4)
    ...     for by in ("cosine", "l2")
    ... ]
    [0.04, 0.2828]
    """

    representation: str = "pooled"
    metric: str = "cosine"
    has_gradient = False

    def __post_init__(self) -> None:
        check_known("representation", self.representation, ("pooled", "tokens"))
        check_known("metric", self.metric, ("cosine", "l2"))

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - from the fields
        """Name in `OBJECTIVES`."""
        prefix = "token-" if self.representation == "tokens" else ""
        return f"{prefix}drift" if self.metric == "cosine" else f"{prefix}drift-l2"

    def unsupported_reason(self, model: nn.Module, example: Example) -> str:
        return ""

    def prepare_input(self, model: nn.Module, example: Example, number: int) -> EvaluationInput:
        return EvaluationInput(_read_inputs(model, example))

    def value(self, outputs: Any, baseline_outputs: Any, evaluation: EvaluationInput) -> Tensor:
        vectors: list[Tensor] = []  # [1 or tokens, width], in at least float32
        for each in (outputs, baseline_outputs):
            tensor = get_output_tensor(each)
            flat = tensor.reshape(-1, tensor.shape[-1])
            flat = flat.to(torch.promote_types(tensor.dtype, torch.float32))
            is_pooled = self.representation == "pooled"
            vectors.append(flat.mean(0, keepdim=True) if is_pooled else flat)
        edited, baseline = vectors
        if self.metric == "l2":
            return ((edited - baseline).norm(dim=-1) / baseline.norm(dim=-1)).mean()
        return 1 - F.cosine_similarity(edited, baseline, dim=-1).mean()


OBJECTIVES: Mapping[str, Objective] = {
    objective.name: objective
    for objective in (
        TargetLoss("next-token"),
        MaskedTokenLoss(),
        TargetLoss("label"),
        TargetLoss("translation"),
        OutputDrift(),
        OutputDrift("tokens"),
        OutputDrift("pooled", "l2"),
        OutputDrift("tokens", "l2"),
    )
}


def choose_objective(
    model: nn.Module, requested: str | Objective | None, example: Example
) -> tuple[Objective, str]:
    """Return the objective to measure and a note on the choice: the requested one, else the loss of
    the model's head, else drift.
    """
    if requested is not None:
        objective = requested
        if isinstance(objective, str):
            check_known("objective", objective, OBJECTIVES)
            objective = OBJECTIVES[objective]
        reason = objective.unsupported_reason(model, example)
        if reason:
            fact = f"cannot measure objective {objective.name!r}: {reason}"
            raise ValueError(f"{fact}; objective='drift' works without a head")
        return objective, ""
    name = detect_head_objective(model)
    reason = f"{type(model).__name__} has no head whose loss is known"
    if name:
        objective = OBJECTIVES[name]
        reason = objective.unsupported_reason(model, example)
        if not reason:
            return objective, f"the objective is {objective.name} loss, by the model's own head"
    drift = "drift (1 - cosine similarity of the outputs, means over tokens)"
    return OutputDrift(), f"the objective is {drift}: {reason}"


def other_head_reason(model: nn.Module, name: str) -> str:
    """Return why a model's own head does not have the loss `name`; empty if it has."""
    own = detect_head_objective(model)
    head = f"a {own} head" if own else "no head"
    return "" if own == name else f"{type(model).__name__} has {head}, so no {name} loss"


def _read_inputs(model: nn.Module, example: Example) -> ModelInputs:
    inputs = prepare_inputs(model, example.model_inputs, 0)
    if any(len(rows) > 1 for rows in inputs.token_rows.values()):
        raise ValueError(
            f"an example is one text, but its inputs have {inputs.batch_size} rows; make one per "
            "row"
        )
    return inputs


def _get_labels(example: Example) -> Tensor | None:
    labels = example.inputs.get(LABELS_INPUT) if isinstance(example.inputs, Mapping) else None
    return torch.as_tensor(labels) if labels is not None else None


def _get_ids(model: nn.Module, inputs: ModelInputs) -> tuple[int, ...]:
    if "text" not in inputs.token_rows:
        fact = (
            f"cannot find targets in the inputs of {type(model).__name__}: they have no token ids"
        )
        raise ValueError(f"{fact}; give ids, or add {LABELS_INPUT!r} to the inputs")
    return inputs.token_rows["text"][0].ids


def _cross_entropy(outputs: Any, evaluation: EvaluationInput) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    labels = evaluation.labels
    assert labels is not None
    flat = logits.reshape(-1, logits.shape[-1])
    if len(flat) != len(labels):
        raise ValueError(
            f"the model has {len(flat)} output positions but the text has {len(labels)} labels; "
            "give one label for each"
        )
    targets = labels[labels != IGNORE_INDEX]
    invalid = targets[(targets < 0) | (targets >= flat.shape[1])]
    if len(invalid):
        num_classes = flat.shape[1]
        fact = f"label {int(invalid[0])} is out of range: the model has {num_classes} outputs"
        raise ValueError(f"{fact}; use labels 0..{num_classes - 1}")
    dtype = torch.promote_types(flat.dtype, torch.float32)
    return F.cross_entropy(flat.to(dtype), labels.to(flat.device), ignore_index=IGNORE_INDEX)
