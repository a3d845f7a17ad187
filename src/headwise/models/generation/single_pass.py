"""Classes of texts, images or audio, from one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...attention.masking.sequence_info import SequenceInfo
from ...util.errors import SpecError
from ..transformer import Transformer
from .decoding_state import eval_mode, pad_left
from .prompts import encode_text


class Prediction(NamedTuple):
    """A class or token name and its probability."""

    name: str
    share: float


def classify(
    net: Transformer, inputs: Sequence[str] | Tensor, sequence: SequenceInfo | None = None
) -> list[list[Prediction]]:
    """Return the classes of each input, most likely first, from the model's first output head.

    Inputs are texts, or a tensor that the model reads: ids, or pixels or frames prepared by
    `scale_inputs`.

    >>> import headwise as hw
    >>> from headwise import model_spec as bp
    >>> stack = bp.StackSpec.from_blocks("encoder", 3, [], embedding=bp.EmbeddingSpec(5))
    >>> net = hw.build(
    ...     bp.ModelSpec("small", "encoder", (stack,), (bp.OutputHeadSpec("classes", 2, "mean"),)),
    ...     seed=0,
    ... )
    >>> net.usage = hw.ProcessorSpec(labels=("cat", "dog"))
    >>> [likeliest, other] = classify(net, torch.tensor([[3, 1, 4]]))[0]
    >>> sorted([likeliest.name, other.name]), round(likeliest.share + other.share, 6)
    (['cat', 'dog'], 1.0)
    """
    names = require_class_names(net)
    device = next(net.parameters()).device
    if not isinstance(inputs, Tensor):
        inputs, sequence = pad_left([encode_text(net, text) for text in inputs], device)
    if sequence is not None:
        sequence = sequence.to(device)
    with eval_mode(net):
        shares = net(inputs.to(device), sequence=sequence).float().softmax(-1)
    ranked = list[list[Prediction]]()
    for row in shares.tolist():
        predictions = [Prediction(*pair) for pair in zip(names, row, strict=True)]
        ranked.append(sorted(predictions, key=lambda one: -one.share))
    return ranked


def require_class_names(net: Transformer) -> tuple[str, ...]:
    """Return the class names; raise if the model has none or its first output
    head is not pooled.
    """
    spec = net.spec
    names = net.usage.labels
    if not spec.heads or spec.heads[0].at == "each":
        raise SpecError(
            f"the first output head of {spec.name} is not pooled over the row; give a classifier"
        )
    if not spec.heads[0].outputs:
        fact = (
            f"{spec.name} has no classes: it gives one vector for each text, without words or "
            "labels for it"
        )
        raise SpecError(
            f"{fact}; see its heads with `headwise view` or `headwise heads`, or give a "
            "fine-tuned model"
        )
    if len(names) != spec.heads[0].outputs:
        fact = f"{spec.name} has {spec.heads[0].outputs} classes but {len(names)} names"
        raise SpecError(f'{fact}; set net.usage = hw.ProcessorSpec(labels=("cat", "dog"))')
    return names


def scale_inputs(net: Transformer, values: Any) -> Tensor:
    """Normalise pixels [n, height, width, channels] in 0..1, or frames [n, time, features], as in
    training.

    >>> import headwise as hw
    >>> from headwise import model_spec as bp
    >>> patches = bp.EmbeddingSpec(patches=bp.PatchSpec(1, 1, 2, 2, channels=1))
    >>> net = hw.build(
    ...     bp.ModelSpec(
    ...         "tiny", "vision", (bp.StackSpec.from_blocks("encoder", 3, [], embedding=patches),)
    ...     )
    ... )
    >>> net.usage = hw.ProcessorSpec(mean=(0.5,), deviation=(0.25,))
    >>> scale_inputs(net, np.array([[[[0.5], [1.0]], [[0.75], [0.0]]]])).tolist()
    [[[[0.0, 2.0], [1.0, -2.0]]]]
    """
    mean, deviation = (np.asarray(statistic) for statistic in (net.usage.mean, net.usage.deviation))
    num_channels = values.shape[-1]
    if len(mean) != num_channels:
        fact = f"{net.spec.name} normalises {len(mean)} channels, but the input has {num_channels}"
        raise SpecError(
            f"{fact}; give such an input, or set net.usage = hw.ProcessorSpec(mean=..., "
            "deviation=...)"
        )
    scaled = torch.from_numpy(((values - mean) / deviation).astype(np.float32))
    return scaled.movedim(-1, 1).contiguous() if scaled.dim() == 4 else scaled
