"""What a model says: which loss its own head has, what stands for a masked token, where its output is."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from ..data import IGNORE_INDEX
from ..errors import suggest
from ..inspect.model_inputs import ModelInputs, is_encoder_decoder, prepare_inputs
from ..model_spec.serialization import TOKENIZER_FILE
from ..models import Transformer
from .annotated_examples import LABELS_INPUT, Example

# What a model of transformers says by the name of its class.
OBJECTIVE_OF_CLASS = {
    "masked-token": re.compile("MaskedLM"),
    "label": re.compile("(Sequence|Image|Token|Audio)Classification"),
    "next-token": re.compile("CausalLM|LMHeadModel"),
    "translation": re.compile("ConditionalGeneration|MTModel|Seq2SeqLM"),
}
MASK_TOKENS = ("[MASK]", "<mask>")


def detect_head_objective(model: nn.Module) -> str:
    """Which loss a model's own head has; empty if none is known.

    >>> import headwise as hw
    >>> detect_head_objective(
    ...     hw.build(hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}))
    ... )
    'next-token'
    """
    if isinstance(model, Transformer):
        return _native_head_objective(model)
    if not is_encoder_decoder(model) and getattr(model, "config", None) is None:
        return ""
    found = next((name for name, words in OBJECTIVE_OF_CLASS.items() if words.search(type(model).__name__)), "")
    return "next-token" if found == "translation" and not is_encoder_decoder(model) else found


def _native_head_objective(net: Transformer) -> str:
    described = net.spec
    if not described.heads or not described.heads[0].outputs:
        return ""
    head, kind = described.heads[0], described.kind
    embedding = described.stacks[-1].embedding
    tokens = head.at == "each" and embedding is not None and embedding.tokens == head.outputs
    if not tokens:
        return "label"
    return {"decoder": "next-token", "encoder-decoder": "translation", "encoder": "masked-token"}.get(kind, "label")


def get_ids_argument(model: nn.Module) -> str:
    """What the ids are called that a model reads."""
    return "x" if isinstance(model, Transformer) else str(getattr(model, "main_input_name", "input_ids"))


def find_mask_id(model: nn.Module) -> int | None:
    """The id of the mask, of the model's usage or of the tokenizer that comes with it."""
    if isinstance(model, Transformer):
        if model.usage.mask is not None or model.usage.tokenizer is None:
            return model.usage.mask
        words = Tokenizer.from_str(model.usage.tokenizer)
    else:
        path = Path(str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")) / TOKENIZER_FILE
        if not path.is_file():
            return None
        words = Tokenizer.from_file(str(path))
    return next((one for mask in MASK_TOKENS if (one := words.token_to_id(mask)) is not None), None)


def get_output_tensor(outputs: Any) -> Tensor:
    """The tensor that a model says: its states, else its logits, else the first of what it returns."""
    if isinstance(outputs, Tensor):
        return outputs
    for name in ("last_hidden_state", "logits"):
        if isinstance(found := getattr(outputs, name, None), Tensor):
            return found
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    raise ValueError(
        f"the model returns {type(outputs).__name__}, and none of it is known to be its output; "
        "wrap it so that it returns one tensor"
    )


# --- What importance is importance of ------------------------------------------------------------------

LOSS_NAMES = ("next-token", "translation", "label")


class EvaluationInput(NamedTuple):
    """What a model is given, and what is wanted at each place of its output, where anything is."""

    inputs: ModelInputs
    labels: Tensor | None = None

    @property
    def num_targets(self) -> int:
        """How many places are asked; an output that is only compared is one."""
        return 1 if self.labels is None else int((self.labels != IGNORE_INDEX).sum())


class Objective(ABC):
    """One number for each text that says how well, or how changed, a model speaks; more is worse.

    `sloped` says whether it has a slope where the model is unedited.
    """

    name: str
    has_gradient: bool = True

    @abstractmethod
    def unsupported_reason(self, model: nn.Module, example: Example) -> str:
        """Why it cannot be measured on this model; empty if it can."""

    @abstractmethod
    def prepare_input(self, model: nn.Module, example: Example, number: int) -> EvaluationInput:
        """What a text, the one of this number, asks of a model."""

    @abstractmethod
    def value(self, outputs: Any, baseline_outputs: Any, evaluation: EvaluationInput) -> Tensor:
        """The number, of what the model said and what it says unedited."""


@dataclass(frozen=True)
class TargetLoss(Objective):
    """- log p of what is wanted, a mean over the places of a text that are asked.

    `name` is the head that says it: "next-token", "translation" (of the text, with the true one before it) or "label".
    What is wanted is the next token, or what the scene's inputs say under "labels", place by place, -100 for none.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in LOSS_NAMES:
            raise ValueError(f"Loss({self.name!r}) is unknown; {suggest(self.name, LOSS_NAMES)}")

    def unsupported_reason(self, model: nn.Module, example: Example) -> str:
        says = detect_head_objective(model)
        if says != self.name:
            return f"{type(model).__name__} has {f'a {says} head' if says else 'no head'}, so no {self.name} loss"
        if self.name == "label" and _get_labels(example) is None:
            return "the texts come without labels"
        return ""

    def prepare_input(self, model: nn.Module, example: Example, number: int) -> EvaluationInput:
        given, told = _read_inputs(model, example), _get_labels(example)
        if told is not None or self.name == "label":
            if told is None:
                raise ValueError(
                    f"text {number} has no label; give inputs with {LABELS_INPUT!r}, as the first has them"
                )
            return EvaluationInput(given, told.flatten())
        ids = torch.tensor(_get_ids(model, given))
        return EvaluationInput(given, torch.cat([ids[1:], ids.new_full((1,), IGNORE_INDEX)]))

    def value(self, outputs: Any, baseline_outputs: Any, evaluation: EvaluationInput) -> Tensor:
        return _cross_entropy(outputs, evaluation)


@dataclass(frozen=True)
class MaskedTokenLoss(Objective):
    """- log p of tokens behind masks: a `share` of each text is masked, at least one, the same for every head.

    `mask` is the id of the mask, the tokenizer's own where nothing is said. Where a scene's inputs say "labels", its
    masks are its own.
    """

    name = "masked-token"
    mask_id: int | None = None
    mask_fraction: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.mask_fraction <= 1:
            raise ValueError(f"share={self.mask_fraction!r} is no share of tokens; give more than 0 and at most 1")

    def unsupported_reason(self, model: nn.Module, example: Example) -> str:
        says = detect_head_objective(model)
        if says != self.name:
            return f"{type(model).__name__} has {f'a {says} head' if says else 'no head'}, so no {self.name} loss"
        if self.mask_id is None and _get_labels(example) is None and find_mask_id(model) is None:
            return f"{type(model).__name__} has no mask that is known; say it, as in MaskedLoss(mask=103)"
        return ""

    def prepare_input(self, model: nn.Module, example: Example, number: int) -> EvaluationInput:
        given, told = _read_inputs(model, example), _get_labels(example)
        if told is not None:
            return EvaluationInput(given, told.flatten())
        ids = torch.tensor(_get_ids(model, given))
        special = (
            example.streams["text"].is_special.cpu() if "text" in example.streams else torch.zeros(len(ids)).bool()
        )
        free = np.flatnonzero(~special.numpy())
        count = min(len(free), max(1, round(self.mask_fraction * len(free))))
        draw = np.random.default_rng((self.seed, number))
        places = torch.from_numpy(draw.choice(free, count, replace=False))
        labels = torch.full_like(ids, IGNORE_INDEX)
        labels[places] = ids[places]
        mask = find_mask_id(model) if self.mask_id is None else self.mask_id
        assert mask is not None
        name = get_ids_argument(model)
        told_ids = given.kwargs[name].clone()
        told_ids[0, places.to(told_ids.device)] = mask
        return EvaluationInput(replace(given, kwargs={**given.kwargs, name: told_ids}), labels)

    def value(self, outputs: Any, baseline_outputs: Any, evaluation: EvaluationInput) -> Tensor:
        return _cross_entropy(outputs, evaluation)


@dataclass(frozen=True)
class OutputDrift(Objective):
    """How far what a model says lies from what it says unedited: by="cosine", 1 - cosine; "l2", |a - b| / |b|.

    of="pooled": of the mean over tokens; "tokens": the mean over tokens of each one's. It has no slope where nothing is
    edited, so that no method with gradients can take it.

    >>> a, b = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[4.0, 3.0]]])
    >>> [round(OutputDrift(metric=by).value(a, b, EvaluationInput(ModelInputs())).item(), 4) for by in ("cosine", "l2")]
    [0.04, 0.2828]
    """

    representation: str = "pooled"
    metric: str = "cosine"
    has_gradient = False

    def __post_init__(self) -> None:
        for name, known in (("representation", ("pooled", "tokens")), ("metric", ("cosine", "l2"))):
            if (said := getattr(self, name)) not in known:
                raise ValueError(f"OutputDrift({name}={said!r}) is unknown; {suggest(said, known)}")

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - it follows from the fields
        """As it is asked for."""
        return f"{'token-' if self.representation == 'tokens' else ''}drift{'' if self.metric == 'cosine' else '-l2'}"

    def unsupported_reason(self, model: nn.Module, example: Example) -> str:
        return ""

    def prepare_input(self, model: nn.Module, example: Example, number: int) -> EvaluationInput:
        return EvaluationInput(_read_inputs(model, example))

    def value(self, outputs: Any, baseline_outputs: Any, evaluation: EvaluationInput) -> Tensor:
        new, old = (_get_vectors(one, self.representation) for one in (outputs, baseline_outputs))
        if self.metric == "l2":
            return ((new - old).norm(dim=-1) / old.norm(dim=-1)).mean()
        return 1 - F.cosine_similarity(new, old, dim=-1).mean()


OBJECTIVES: Mapping[str, Objective] = {
    one.name: one
    for one in (
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


def choose_objective(model: nn.Module, requested: str | Objective | None, example: Example) -> tuple[Objective, str]:
    """What is measured of a model, and why where nobody asked for it: the loss of its head, else drift."""
    if requested is not None:
        if isinstance(requested, str) and requested not in OBJECTIVES:
            raise ValueError(f"there is no objective {requested!r}; {suggest(requested, OBJECTIVES)}")
        found = OBJECTIVES[requested] if isinstance(requested, str) else requested
        if why := found.unsupported_reason(model, example):
            raise ValueError(f"{found.name} cannot be measured: {why}; objective='drift' needs no head")
        return found, ""
    says = detect_head_objective(model)
    if not says:
        return OutputDrift(), f"{type(model).__name__} has no head whose loss is known, so what is measured is drift"
    found = OBJECTIVES[says]
    if why := found.unsupported_reason(model, example):
        return OutputDrift(), f"what is measured is drift: {why}"
    return found, f"what is measured is {found.name} loss, of the model's own head"


def _read_inputs(model: nn.Module, scene: Example) -> ModelInputs:
    given = prepare_inputs(model, scene.model_inputs, 0)
    if any(len(rows) > 1 for rows in given.token_rows.values()):
        raise ValueError(f"a scene is one text, but its inputs hold {given.batch_size} rows; give each row a scene")
    return given


def _get_labels(scene: Example) -> Tensor | None:
    told = scene.inputs.get(LABELS_INPUT) if isinstance(scene.inputs, Mapping) else None
    return torch.as_tensor(told) if told is not None else None


def _get_ids(model: nn.Module, given: ModelInputs) -> tuple[int, ...]:
    if "text" not in given.token_rows:
        raise ValueError(
            f"{type(model).__name__} is given no ids of a text, so no next token is known; give ids, "
            "or labels beside the inputs"
        )
    return given.token_rows["text"][0].ids


def _cross_entropy(said: Any, question: EvaluationInput) -> Tensor:
    logits, labels = _get_logits(said), question.labels
    assert labels is not None
    flat = logits.reshape(-1, logits.shape[-1])
    if len(flat) != len(labels):
        raise ValueError(f"the model says {len(flat)} places and {len(labels)} labels are given; give one for each")
    asked = labels[labels != IGNORE_INDEX]
    if len(wrong := asked[(asked < 0) | (asked >= flat.shape[1])]):
        known = flat.shape[1]
        raise ValueError(
            f"a label of a text is {int(wrong[0])}, but the model has {known} of them; give 0..{known - 1}"
        )
    exact = torch.promote_types(flat.dtype, torch.float32)
    return F.cross_entropy(flat.to(exact), labels.to(flat.device), ignore_index=IGNORE_INDEX)


def _get_logits(said: Any) -> Tensor:
    return said if isinstance(said, Tensor) else said.logits


def _get_vectors(said: Any, of: str) -> Tensor:
    """[1 or tokens, width] of one text."""
    found = get_output_tensor(said)
    flat = found.reshape(-1, found.shape[-1]).to(torch.promote_types(found.dtype, torch.float32))
    return flat.mean(0, keepdim=True) if of == "pooled" else flat
