"""A mark by which a model is known again: of its description and of every number in it."""

from __future__ import annotations

import hashlib

import torch

from ..blueprint import to_json
from ..models import Transformer


def fingerprint_model(net: Transformer) -> str:
    """SHA-256 of what a model is and of all that it holds.

    >>> import headwise as hw
    >>> small = hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 5})
    >>> nets = [hw.build(small, seed=seed) for seed in (0, 0, 1)]
    >>> [fingerprint_model(net) == fingerprint_model(nets[0]) for net in nets]
    [True, True, False]
    """
    mark = hashlib.sha256(to_json(net.described).encode())
    for name, tensor in net.state_dict().items():
        mark.update(f"{name} {tensor.dtype}".encode())
        mark.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return mark.hexdigest()
