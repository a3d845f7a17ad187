"""Models for checks on several ranks, and their comparison with one rank: outputs, gradients,
optimiser steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.attention.presets import PRESETS
from headwise.models import model_spec as bp
from headwise.models.distributed.parallel_attention import (
    CollectiveGroup,
    TensorContextParallel,
    join_runs,
    set_parallel_context,
    shard_tokens,
)
from headwise.models.distributed.sharded_model import TensorParallelModel
from headwise.training.data import IGNORE_INDEX, Batch
from support.layer_cases import check_close

MODEL, HEADS, WORDS = 16, 4, 11
# An encoder-decoder has the layers of the other kinds; these alone for presets that differ in keys,
# values or pattern.
CAUSAL_PRESETS = (  # not defined for later keys or a source
    "forgetting",
    "selective",
    "cope",
    "mta",
    "iha",
)
PRESET_KINDS = [
    (preset, "decoder" if preset in CAUSAL_PRESETS else "encoder-decoder") for preset in PRESETS
]
PRESET_KINDS += [
    (preset, kind)
    for preset in ("mha", "mla", "longformer", "linear")
    for kind in ("decoder", "encoder")
]
# Decoders whose second layer reads keys or values of the first.
LAYER_EDGES = {"shared-kv": {"kv_layers_back": 1}, "residual": {"value_residual": "learned"}}
PRESET_KINDS += [("gqa", kind) for kind in LAYER_EDGES]
STEPS = 3
Loss = Callable[[nn.Module, Batch], Tensor]
Grads = Mapping[str, Tensor]


def small_spec(preset: str, **changes) -> hw.AttentionSpec:
    """A preset in a small size."""
    small = {
        "mla": {"dim": 6, "project": hw.parts.MLAProjection(rank=10, rope=4)},
        "bigbird": {"pattern": "bigbird(64)"},
    }
    return hw.design(
        preset=preset, **({"model": MODEL, "heads": HEADS} | small.get(preset, {}) | changes)
    )


def make_stack(name: str, blocks, **changes) -> bp.StackSpec:
    """A stack with token embedding and learned positions."""
    table = bp.EmbeddingSpec(WORDS, positions=bp.PositionSpec("learned", 12))
    return bp.StackSpec.from_blocks(
        name, MODEL, blocks, **({"embedding": table, "norm": bp.NormSpec()} | changes)
    )


def make_model_spec(preset: str, kind: str) -> bp.ModelSpec:
    """Two layers of a preset: a decoder over vectors, an encoder with one output per row, or an
    encoder-decoder.
    """
    feed, full = (
        bp.FeedForwardSpec(10, bias="ud"),
        {} if preset in ("longformer", "bigbird") else {"pattern": "full()"},
    )
    heads = (bp.OutputHeadSpec("tokens", WORDS, bias="learned"),)
    if kind == "decoder" or kind in LAYER_EDGES:
        block = bp.BlockSpec(small_spec(preset), feed=feed)
        blocks = [block, replace(block, **LAYER_EDGES.get(kind, {}))]
        return bp.ModelSpec(
            "one", "decoder", (make_stack("decoder", blocks, embedding=None),), heads
        )
    encoder = make_stack(
        "encoder",
        [bp.BlockSpec(small_spec(preset, **full), feed=feed)] * (2 if kind == "encoder" else 1),
    )
    if kind == "encoder":
        return bp.ModelSpec("one", kind, (encoder,), (bp.OutputHeadSpec("class", 5, at="mean"),))
    cross = small_spec(preset, pattern="full()", source=MODEL)
    return bp.ModelSpec(
        "two",
        kind,
        (encoder, make_stack("decoder", [bp.BlockSpec(small_spec(preset), cross, feed)])),
        heads,
    )


def build_model(
    model: bp.ModelSpec, dtype: torch.dtype = torch.float64, dropout: float = 0.0
) -> hw.Transformer:
    """The model with random values added to all parameters; equal on every rank."""
    net = hw.build(model, seed=1, dropout=dropout).to(dtype)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape, generator=draw, dtype=torch.float64).to(dtype) * 0.3)
    return net


def make_batch(
    model: bp.ModelSpec, tokens: Mapping[str, hw.SequenceInfo | None] = {}, count: int = 7
) -> Batch:
    """Three rows of input with labels."""
    draw = torch.Generator().manual_seed(3)
    ids, source = (torch.randint(WORDS, (3, size), generator=draw) for size in (count, 5))
    labels = ids[:, 0] % 5 if model.heads[0].at != "each" else ids.roll(-1, 1)
    x = (
        ids
        if model.stacks[-1].embedding
        else torch.randn(3, count, MODEL, generator=draw, dtype=torch.float64)
    )
    two = len(model.stacks) > 1
    return Batch(
        x, labels, tokens.get("x"), source if two else None, tokens.get("source") if two else None
    )


def summed_loss(net: nn.Module, batch: Batch) -> Tensor:
    """Sum of the cross entropies."""
    logits = net(
        batch.x, sequence=batch.tokens, source=batch.source, source_sequence=batch.source_tokens
    )
    return F.cross_entropy(
        logits.flatten(0, -2), batch.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def adamw(net: nn.Module) -> torch.optim.AdamW:
    """AdamW with a large eps, so that rounding does not move parameters without a gradient."""
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)


def all_ranks() -> CollectiveGroup:
    """The group of all ranks."""
    return CollectiveGroup(dist.group.WORLD)


def check_gradients(ours: Mapping[str, Tensor], net: nn.Module, **tolerance: float) -> None:
    """Every gradient equals that of one rank, relative to the norm of all gradients."""
    theirs = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    norm = nn.utils.get_total_norm(list(theirs.values()))
    for name, grad in theirs.items():
        check_close(
            ours[name] / norm,
            grad / norm,
            msg=lambda message, name=name: f"{name}: {message}",
            **tolerance,
        )


def model_output(net: nn.Module, batch: Batch) -> Tensor:
    """The output of a model on a batch, without gradients."""
    with torch.no_grad():
        return net(
            batch.x, sequence=batch.tokens, source=batch.source, source_sequence=batch.source_tokens
        )


def backward_on(
    nets: Sequence[nn.Module], batches: Sequence[Batch], loss: Loss
) -> list[Tensor | None]:
    """Run the backward pass of each net on its batch; returns the gradients of floating-point
    inputs.
    """
    input_gradients = []
    for net, batch in zip(nets, batches, strict=True):
        x = batch.x.clone().requires_grad_(batch.x.is_floating_point())
        loss(net, replace(batch, x=x)).backward()
        input_gradients.append(x.grad)
    return input_gradients


def check_steps(nets, steps: int, gather: Callable[[], Grads], learn: Callable[[], None]) -> None:
    """Two nets have equal gradients at every step; `gather` returns the second's in the layout of
    the first.
    """
    optimisers = [adamw(net) for net in nets]
    for _ in range(steps):
        learn()
        check_gradients(gather(), nets[0])
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()


def check_tensor_parallel(
    net, part, divided: TensorParallelModel, batch: Batch, loss: Loss = summed_loss, steps: int = 1
) -> None:
    """Outputs, gradients and updated weights of a divided model equal those of the whole model."""
    check_close(model_output(part, batch), model_output(net, batch))

    def learn() -> None:
        whole, ours = backward_on([net, part], [batch, batch], loss)
        if whole is not None:
            check_close(ours, whole)
        divided.sum_replicated_gradients(dict(part.named_parameters()))

    def gather() -> Grads:
        return gather_whole(
            divided, {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
        )

    check_steps([net, part], steps, gather, learn)
    whole = gather_whole(divided, part.state_dict())
    for name, tensor in net.state_dict().items():
        check_close(whole[name], tensor)


def gather_whole(divided: TensorParallelModel, tensors: Grads) -> Grads:
    """Tensors of the whole model."""
    cut = {name for name, pieces in divided.pieces.items() if pieces[0].indices}
    return {
        name: divided.whole(name, tensor) if name in cut else tensor
        for name, tensor in tensors.items()
    }


def gather_token_outputs(y: Tensor, num_tokens: int, group: CollectiveGroup) -> Tensor:
    """Outputs of every token [B, num_tokens, ...] from those of each rank."""
    return join_runs(group.all_gather(y.detach()))[:, :num_tokens]


def check_context_parallel(
    net, group: CollectiveGroup, batch: Batch, loss: Loss = summed_loss, steps: int = 1
) -> None:
    """Outputs, gradients and updated weights under divided rows equal those under whole rows."""
    part, own = copy.deepcopy(net), shard_tokens(batch, group)
    set_parallel_context(part, TensorContextParallel(context_group=group))
    whole, ours = model_output(net, batch), model_output(part, own)
    if batch.labels.dim() == 2:
        ours, live = gather_token_outputs(ours, whole.shape[1], group), real_tokens(batch)
        check_close(ours[live], whole[live])
    else:
        check_close(ours, whole)

    def learn() -> None:
        whole, ours = backward_on([net, part], [batch, own], loss)
        if whole is not None:
            check_close(gather_token_outputs(ours, whole.shape[1], group), whole)
        for p in part.parameters():
            p.grad = None if p.grad is None else group.all_reduce(p.grad)

    check_steps(
        [net, part], steps, lambda: {name: p.grad for name, p in part.named_parameters()}, learn
    )
    for ours, theirs in zip(part.parameters(), net.parameters(), strict=True):
        check_close(ours, theirs)


def real_tokens(batch: Batch) -> Tensor:
    """Which tokens are not padding [B, T]."""
    shape = batch.x.shape[:2]
    if batch.tokens is None:
        return torch.ones(shape, dtype=torch.bool)
    return batch.tokens.is_real.expand(shape)
