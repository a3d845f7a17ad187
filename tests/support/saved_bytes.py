"""Bytes that layers and models save for the backward pass, as hooks see them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import headwise as hw
from headwise.attention.backends import sdpa
from headwise.costs.activations import SavedTensorRecorder, training_signature


def bytes_saved_by(run, *excluded: Tensor) -> int:
    """Bytes of every distinct storage that hooks see, without parameters, constants and ids."""
    excluded_storages = {t.untyped_storage().data_ptr() for t in excluded}
    tensors: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in excluded_storages:
            tensors.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(t.untyped_storage().nbytes() for t in tensors.values())


def layer_saved_bytes(layer: nn.Module, x: Tensor, z: Tensor | None = None) -> int:
    """Bytes that one call of a layer saves."""
    return bytes_saved_by(lambda: layer(x, source=z), *layer.parameters(), *layer.buffers())


BATCH, TOKENS, SOURCE = 2, 11, 13


def stack_input(stack: hw.model_spec.StackSpec, tokens: int, dtype: torch.dtype) -> Tensor:
    """Random ids or images for a stack."""
    patches = stack.embedding.patches
    if patches is None:
        return torch.randint(1, stack.embedding.tokens, (BATCH, tokens))
    return torch.randn(
        BATCH,
        patches.channels,
        patches.rows * patches.patch_height,
        patches.columns * patches.patch_width,
        dtype=dtype,
    )


def model_saved_bytes(
    model: hw.model_spec.ModelSpec, dtype: torch.dtype, settings: hw.costs.ActivationSettings
) -> int:
    """Bytes that hooks see in one training step, without ids, pixels and labels."""
    net = hw.build(model, dropout=settings.dropout, seed=0).to(dtype).train()
    net.checkpointing = settings.checkpoint
    more = {"source": stack_input(model.stacks[0], SOURCE, dtype)} if len(model.stacks) > 1 else {}
    x, labels = (
        stack_input(model.stacks[-1], TOKENS, dtype),
        torch.zeros(BATCH * 99, dtype=torch.int64),
    )
    with SavedTensorRecorder(
        [*net.parameters(), *net.buffers(), x, *more.values(), labels], {}
    ) as watch:
        y = net(x, **more).flatten(0, -2)
        F.cross_entropy(y, labels[: len(y)])
    return watch.total_bytes


def backend_profile(model: hw.model_spec.ModelSpec, dtype: str = "fp32") -> str:
    """The backend whose formula holds; with bfloat16 each attention has its usual one."""
    return (
        "dense"
        if any(
            sdpa.unsupported_reasons(training_signature(spec))
            for _, spec in model.attention_specs()
        )
        else ""
        if dtype == "bf16"
        else "sdpa"
    )
