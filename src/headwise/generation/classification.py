"""The class of a text, an image or an utterance, by a head that reads it as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError
from ..masking.sequence_info import SequenceInfo
from ..models.transformer import Transformer
from .decoding_state import eval_mode, pad_left
from .prompts import encode_text


class Prediction(NamedTuple):
    """What may stand there, and how likely that is."""

    name: str
    share: float


def classify(
    net: Transformer, inputs: Sequence[str] | Tensor, sequence: SequenceInfo | None = None
) -> list[list[Prediction]]:
    """The classes of each input, likeliest first, by the model's first head.

    Inputs are texts; or what the model reads as it is, ids, or pixels and frames that `scaled` has prepared.

    >>> import headwise as hw
    >>> from headwise import model_spec as bp
    >>> stack = bp.StackSpec.from_blocks("encoder", 3, [], embedding=bp.EmbeddingSpec(5))
    >>> net = hw.build(bp.ModelSpec("small", "encoder", (stack,), (bp.OutputHeadSpec("classes", 2, "mean"),)), seed=0)
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
    return [_rank_predictions(names, row) for row in shares]


def require_class_names(net: Transformer) -> tuple[str, ...]:
    """The names of its classes; refuse a model that has none, or no head that reads a row as a whole."""
    described, names = net.spec, net.usage.labels
    if not described.heads or described.heads[0].at == "each":
        raise SpecError(f"the first head of {described.name} does not read rows as a whole; give a model that does")
    if len(names) != described.heads[0].outputs:
        fact = f"{described.name} tells {described.heads[0].outputs} classes apart and says the names of {len(names)}"
        raise SpecError(f'{fact}; name them, as in net.usage = Usage(labels=("cat", "dog"))')
    return names


def scale_inputs(net: Transformer, values: Any) -> Tensor:
    """Pixels [n, high, wide, channels] from 0 to 1, or frames [n, time, features], as in training.

    >>> import headwise as hw
    >>> from headwise import model_spec as bp
    >>> patches = bp.EmbeddingSpec(patches=bp.PatchSpec(1, 1, 2, 2, channels=1))
    >>> net = hw.build(bp.ModelSpec("tiny", "vision", (bp.StackSpec.from_blocks("encoder", 3, [], embedding=patches),)))
    >>> net.usage = hw.ProcessorSpec(mean=(0.5,), deviation=(0.25,))
    >>> scale_inputs(net, np.array([[[[0.5], [1.0]], [[0.75], [0.0]]]])).tolist()
    [[[[0.0, 2.0], [1.0, -2.0]]]]
    """
    mean, deviation = (np.asarray(told) for told in (net.usage.mean, net.usage.deviation))
    wide = values.shape[-1]
    if len(mean) != wide:
        fact = f"{net.spec.name} says how {len(mean)} channels are brought to scale, and the input has {wide}"
        raise SpecError(f"{fact}; give such an input, or say it, as in net.usage = Usage(mean=..., deviation=...)")
    found = torch.from_numpy(((values - mean) / deviation).astype(np.float32))
    return found.movedim(-1, 1).contiguous() if found.dim() == 4 else found


def _rank_predictions(names: tuple[str, ...], shares: Tensor) -> list[Prediction]:
    order: list[int] = shares.argsort(descending=True, stable=True).tolist()
    return [Prediction(names[n], float(shares[n])) for n in order]
