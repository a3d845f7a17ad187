"""Checks of context parallelism (tokens of each row divided over two ranks), by name; each runs on
both ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import headwise as hw
from headwise.attention.masking.sequence_info import SequenceInfo
from headwise.models import model_spec as bp
from headwise.models.distributed.parallel_attention import (
    TensorContextParallel,
    set_parallel_context,
    shard_tokens,
    use_whole_rows,
)
from headwise.training.data import IGNORE_INDEX, Batch
from models.distributed.parallel_models import (
    HEADS,
    MODEL,
    STEPS,
    all_ranks,
    build_model,
    check_context_parallel,
    gather_token_outputs,
    make_batch,
    make_model_spec,
    make_stack,
    model_output,
    real_tokens,
    small_spec,
    summed_loss,
)
from models.distributed.rank_checks import run_checks
from support import layer_cases as cases
from support.layer_cases import check_close

CASES: dict[str, Callable[[], None]] = {}


def case(check_: Callable[[], None]) -> Callable[[], None]:
    """Register a check under its function name."""
    CASES[check_.__name__] = check_
    return check_


def check(name: str) -> None:
    """Run one check: "preset kind", or a registered name."""
    if name in CASES:
        CASES[name]()
    else:
        preset, kind = name.split()
        check_model(make_model_spec(preset, kind), steps=STEPS if kind == "decoder" else 1)


def check_model(model: bp.ModelSpec, tokens=None, count: int = 7, steps: int = 1) -> None:
    """Check a model whose padding has no labels."""
    batch = make_batch(model, tokens or {}, count)
    if batch.labels.dim() == 2:
        batch = replace(batch, labels=batch.labels.where(real_tokens(batch), IGNORE_INDEX))
    check_context_parallel(build_model(model), all_ranks(), batch, steps=steps)


def decoder(*blocks: bp.BlockSpec, heads=None, **options) -> bp.ModelSpec:
    """A decoder of these blocks."""
    return bp.ModelSpec(
        "one",
        "decoder",
        (make_stack("decoder", blocks, **options),),
        heads or (bp.OutputHeadSpec("tokens", 11),),
    )


def with_context_parallel(layer):
    """A copy that divides its rows over the ranks."""
    part = copy.deepcopy(layer)
    set_parallel_context(part, TensorContextParallel(context_group=all_ranks()))
    return part


def shard_of(x: Tensor, tokens: SequenceInfo | None) -> tuple[Tensor, SequenceInfo]:
    """This rank's shard of x and of its sequence."""
    own = shard_tokens(Batch(x, torch.zeros(x.shape[:2], dtype=torch.int64), tokens), all_ranks())
    assert own.tokens is not None
    return own.x, own.tokens


def check_layer(name: str, layer, x: Tensor, tokens: SequenceInfo, source=None) -> None:
    """Outputs and gradients of one layer equal those of the undivided layer."""
    group, part, leaves = (
        all_ranks(),
        with_context_parallel(layer),
        [x.detach().requires_grad_()],
    )
    is_real = tokens.is_real.expand(x.shape[:2])
    grad_weights = (
        torch.randn(x.shape, generator=torch.Generator().manual_seed(4), dtype=x.dtype)
        * is_real[..., None]
    )
    (own, at), (shard_grad_weights, _) = (
        shard_of(leaves[0], tokens),
        shard_of(grad_weights, tokens),
    )
    recorded, theirs = {}, {}
    if source is not None:
        z, entry = source[0].detach().requires_grad_(), source[1]
        cut, cut_entry = shard_of(z, entry)
        recorded, theirs = (
            {"source": part.project_source(cut, sequence=cut_entry)},
            {"source": layer.project_source(z, sequence=entry)},
        )
        leaves.append(z)
    ours, whole = part(own, sequence=at, **recorded), layer(leaves[0], sequence=tokens, **theirs)
    named = {"msg": lambda message: f"{name}: {message}"}
    check_close(gather_token_outputs(ours, x.shape[1], group)[is_real], whole[is_real], **named)
    first = torch.autograd.grad((whole * grad_weights).sum(), leaves, materialize_grads=True)
    second = torch.autograd.grad((ours * shard_grad_weights).sum(), leaves, materialize_grads=True)
    for grad, other in zip(first, second, strict=True):
        check_close(group.all_reduce(other), grad, **named)


@case
def every_part() -> None:
    """Every example of every part as one layer, with full, padded or packed rows."""
    for n, (name, spec) in enumerate(cases.QUICK.items()):
        layer = cases.layer(spec)
        x, z = cases.tensors(spec)
        for tensor in (*layer.state_dict().values(), x, *([] if z is None else [z])):
            dist.broadcast(tensor, 0)
        sequence = list(cases.sequence_infos(x).values())[n % 4]
        source = None if z is None else (z, SequenceInfo.from_batch(z, lengths=[11, 4, 9]))
        check_layer(
            name,
            layer,
            x,
            SequenceInfo.from_batch(x, lengths=[7, 3, 5]) if source else sequence,
            source,
        )


@case
def lengths() -> None:
    """Rows of any length: fewer tokens than ranks, one more than a multiple, no
    label on one rank.
    """
    model = make_model_spec("gqa", "decoder")
    for count in (1, 1, 2, 2, 3, 8):
        check_model(model, count=count)
    net, wire = build_model(model), all_ranks()
    batch = make_batch(model)
    check_context_parallel(
        net,
        wire,
        replace(batch, labels=batch.labels.where(torch.arange(7) < 2, IGNORE_INDEX)),
    )


@case
def filled() -> None:
    """Rows padded on either side, and rows of several texts."""
    for preset in ("gqa", "dcmha", "linear"):
        model = make_model_spec(preset, "decoder")
        for tokens in cases.sequence_infos(make_batch(model).x).values():
            check_model(model, {"x": tokens})
    x, source = (torch.zeros(3, count) for count in (7, 5))
    both = {
        "x": SequenceInfo.from_batch(x, lengths=[7, 2, 5]),
        "source": SequenceInfo.from_batch(source, lengths=[1, 5, 3]),
    }
    check_model(make_model_spec("mla", "encoder-decoder"), both)


@case
def rows_as_a_whole() -> None:
    """Output heads that read the first token, the last token or the mean of a
    row that is divided.
    """
    for at in ("first", "last", "mean"):
        model = decoder(
            bp.BlockSpec(small_spec("gqa"), feed=bp.FeedForwardSpec(8)),
            heads=(bp.OutputHeadSpec("class", 5, at=at),),
        )
        check_model(model)
        padded = SequenceInfo.from_batch(torch.zeros(3, 7), lengths=[5, 1, 7], pad="left")
        check_model(model, {"x": padded})


@case
def pieces() -> None:
    """Experts, merged cross-attention, a relative-position table shared by layers, all norm
    placements.
    """
    feed = bp.ExpertsSpec(bp.FeedForwardSpec(6), count=3, top_k=2, shared=bp.FeedForwardSpec(8))
    bias = hw.design(
        model=MODEL,
        heads=HEADS,
        modifiers=(hw.parts.T5Bias(buckets=8, reach=9), hw.parts.Softcap(2.0)),
    )
    check_model(decoder(*[bp.BlockSpec(bias, feed=feed, placement="sandwich")] * 2))
    one = make_model_spec("mha", "encoder-decoder")
    block = bp.BlockSpec(cross=small_spec("mha", bias="o"), form="merged")
    check_model(replace(one, stacks=(one.stacks[0], make_stack("decoder", [block] * 2))))


@case
def a_block_of_several_layers() -> None:
    """Global tokens with their own projections, on one rank or on both."""
    x = torch.randn(3, 7, MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    for positions in ((0,), (0, 5)):
        pattern = hw.patterns.Window(3, after=1) | hw.patterns.Global(positions)
        block = hw.attention.LongformerAttention(
            hw.design(model=MODEL, heads=HEADS, pattern=pattern)
        ).double()
        for tensor in block.state_dict().values():
            dist.broadcast(tensor, 0)
        for tokens in cases.sequence_infos(x).values():
            check_layer("longformer", block, x, tokens)


@case
def terms() -> None:
    """Auxiliary losses over the tokens of all ranks: load balance and expected number of heads."""
    gates = (
        hw.parts.Rotary(),
        hw.parts.MixtureOfHeads(always=1, active=1),
        hw.parts.HardConcreteGate(),
    )
    model = decoder(
        *[bp.BlockSpec(hw.design(model=MODEL, heads=HEADS, pattern="causal", modifiers=gates))] * 2
    )
    net, aux_losses = build_model(model).eval(), []

    def loss(one, batch) -> Tensor:
        losses = hw.attention.AuxLosses()
        one.probes = {
            name: hw.Probe(aux_losses=hw.attention.AuxLosses(losses.terms, name))
            for name, _ in model.attention_specs()
        }
        out = summed_loss(one, batch) + 3 * losses.total("balance") + 5 * losses.total("l0")
        aux_losses.append(losses)
        return out

    check_context_parallel(net, all_ranks(), make_batch(model), loss)
    whole, ours = aux_losses[0], aux_losses[1]
    assert len(whole.terms) == 4
    for key, value in whole.terms.items():
        check_close(all_ranks().all_reduce(ours.terms[key]), value)


@case
def a_mask_over_all_keys() -> None:
    """The caller's mask covers the queries of one rank and the keys of all."""
    layer = cases.layer(hw.design(model=MODEL, heads=HEADS))
    for tensor in layer.state_dict().values():
        dist.broadcast(tensor, 0)
    x = torch.randn(2, 6, MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    mask = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(7)) < 0.6
    part, wire = with_context_parallel(layer), all_ranks()
    own, at = shard_of(x, None)
    mine = mask[:, :, at.start : at.start + 3]
    check_close(
        gather_token_outputs(part(own, sequence=at, mask=mine), 6, wire), layer(x, mask=mask)
    )


@case
def a_prompt_into_a_cache() -> None:
    """Every rank caches the tokens of all ranks and decodes alone."""
    for preset in ("gqa", "linear", "mla", "dcmha"):
        net = build_model(decoder(*[bp.BlockSpec(small_spec(preset))] * 2)).eval()
        part, ids = with_context_parallel(net), make_batch(net.spec, count=8).x
        own = shard_tokens(Batch(ids[:, :6], ids[:, :6]), all_ranks())
        with torch.no_grad():
            cache = part.cache(batch=3, capacity=8)
            part(own.x, sequence=own.tokens, cache=cache)
            assert cache.used == 6
            with use_whole_rows(part):
                steps = [part(ids[:, t : t + 1], cache=cache) for t in (6, 7)]
        check_close(torch.cat(steps, 1), model_output(net, Batch(ids, ids))[:, 6:])


@case
def without_given_positions() -> None:
    """Tokens without positions start at 0 on every rank and are refused."""
    part = with_context_parallel(build_model(decoder(bp.BlockSpec(small_spec("gqa")))))
    if all_ranks().rank:
        with pytest.raises(
            ValueError, match="rank 1 of 2 got 3 tokens from position 0, not its shard; pass"
        ):
            part(torch.zeros(1, 3, dtype=torch.int64))
    x = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="two tokens of one segment have the same position"):
        part(x, sequence=SequenceInfo.from_batch(x, lengths=[3, 2]))


@case
def single_precision() -> None:
    """Equal within float32 rounding."""
    model = make_model_spec("gqa", "encoder")
    net, wire = build_model(model, torch.float32), all_ranks()
    part, batch = with_context_parallel(net), make_batch(model)
    own = shard_tokens(batch, wire)
    for one, value in ((net, batch), (part, own)):
        summed_loss(one, value).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
    for ours, theirs in zip(part.parameters(), net.parameters(), strict=True):
        check_close(wire.all_reduce(ours.grad) / norm, theirs.grad / norm, rtol=1e-5, atol=1e-6)


def run_requested(folder: Path) -> dict[str, str | None]:
    """Results of the requested checks on this rank."""
    return run_checks(check, folder)
