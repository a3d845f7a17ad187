"""Checks of tensor parallelism (heads divided over two ranks), by name; each runs on both ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import headwise as hw
from headwise.attention.masking.sequence_info import SequenceInfo
from headwise.models import model_spec as bp
from headwise.models.distributed.head_partition import partition_heads
from headwise.models.distributed.parallel_attention import (
    TensorContextParallel,
    set_parallel_context,
)
from headwise.models.distributed.sharded_model import TensorParallelModel
from models.distributed.parallel_models import (
    HEADS,
    MODEL,
    STEPS,
    all_ranks,
    build_model,
    check_gradients,
    check_tensor_parallel,
    gather_whole,
    make_batch,
    make_model_spec,
    make_stack,
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


def split_over_ranks(net: hw.Transformer) -> tuple[hw.Transformer, TensorParallelModel]:
    """This rank's part of the model."""
    group = all_ranks()
    parts = TensorParallelModel(net.spec, group)
    return parts.shard_model(net), parts


def from_first_rank(x: Tensor) -> Tensor:
    """The tensor of the first rank."""
    return all_ranks().all_gather(x.detach())[0]


def check_model(model: bp.ModelSpec, tokens=None, steps: int = 1) -> None:
    """Check a model against this rank's part of it."""
    net = build_model(model)
    part, parts = split_over_ranks(net)
    check_tensor_parallel(net, part, parts, make_batch(model, tokens or {}), steps=steps)


def decoder(*blocks: bp.BlockSpec, **options) -> bp.ModelSpec:
    """A decoder of these blocks."""
    return bp.ModelSpec(
        "one",
        "decoder",
        (make_stack("decoder", blocks, **options),),
        (bp.OutputHeadSpec("tokens", 11),),
    )


@case
def every_part() -> None:
    """Every example of every part whose heads can be divided, as one layer."""
    group, count = all_ranks(), 0
    for name, spec in cases.QUICK.items():
        try:
            own = partition_heads(name, spec, group.size)[group.rank]
        except hw.SpecError:
            continue
        layer, count = cases.layer(spec), count + 1
        for tensor in layer.state_dict().values():
            dist.broadcast(tensor, 0)
        small = hw.Attention(own.spec).double().eval()
        small.load_state_dict(
            hw.attention.head_axis_ops.keep_heads(spec, layer.state_dict(), own.by_axis["out"])[1]
        )
        set_parallel_context(small, TensorContextParallel(tensor_group=group))
        x, z = (
            None if t is None else from_first_rank(t).requires_grad_() for t in cases.tensors(spec)
        )
        tokens = (
            None
            if spec.source is None and "source" in name
            else SequenceInfo.from_batch(x, lengths=[7, 3, 5])
        )
        grad_weights = from_first_rank(torch.randn(3, 7, spec.model, dtype=torch.float64))
        results = []
        for one in (layer, small):
            x.grad = None
            y = one(x, source=z, sequence=tokens)
            (y * grad_weights).sum().backward()
            results.append((y.detach(), x.grad, None if z is None else z.grad))
            if z is not None:
                z.grad = None
        for whole, ours in zip(*results, strict=True):
            if whole is not None:
                check_close(ours, whole, msg=lambda message, name=name: f"{name}: {message}")
    assert count > 100, count


@case
def uneven_heads() -> None:
    """Five heads and seven hidden units on two ranks; one kv head is used by both."""
    heads = hw.Heads(q=5, kv=3, dim=4, kv_head_of_query=(0, 0, 1, 1, 2))
    spec = replace(small_spec("gqa"), heads=heads)
    check_model(
        decoder(bp.BlockSpec(spec, feed=bp.FeedForwardSpec(7, "silu", form="gated", bias="ugd")))
    )


@case
def groups_of_a_mixing() -> None:
    """Heads composed in two groups, one on each rank."""
    mixed = (
        hw.parts.DynamicComposition(groups=2),
        hw.parts.DynamicComposition(on="weights", groups=2, static="full"),
    )
    check_model(
        decoder(
            bp.BlockSpec(hw.design(model=MODEL, heads=HEADS, pattern="causal", modifiers=mixed))
        )
    )


@case
def experts() -> None:
    """Every expert is narrower on each rank; one is shared by all tokens."""
    each = bp.FeedForwardSpec(6, bias="ud")
    feed = bp.ExpertsSpec(
        each,
        count=3,
        top_k=2,
        shared=bp.FeedForwardSpec(8, bias="d"),
        bias="learned",
        scores="softmax_of_top_k",
    )
    check_model(decoder(*[bp.BlockSpec(small_spec("gqa"), feed=feed)] * 2))


@case
def placements() -> None:
    """All norm placements, a table shared by layers, padding."""
    spec = hw.design(
        model=MODEL,
        heads=HEADS,
        pattern="causal",
        modifiers=(hw.parts.T5Bias(buckets=8, reach=9),),
        bias="qkvo",
    )
    for placement in ("post", "sandwich", "parallel"):
        model = decoder(*[bp.BlockSpec(spec, feed=bp.FeedForwardSpec(9), placement=placement)] * 2)
        check_model(model, {"x": SequenceInfo.from_batch(torch.zeros(3, 7), lengths=[7, 4, 1])})


@case
def merged() -> None:
    """Merged cross-attention: adds a mean of the past through its own projections."""
    one = make_model_spec("mha", "encoder-decoder")
    block = bp.BlockSpec(
        cross=small_spec("mha", bias="o"), feed=bp.FeedForwardSpec(6), form="merged"
    )
    check_model(replace(one, stacks=(one.stacks[0], make_stack("decoder", [block] * 2))))


@case
def single_precision() -> None:
    """Equal within float32 rounding."""
    model = make_model_spec("gqa", "encoder")
    net = build_model(model, torch.float32)
    part, parts = split_over_ranks(net)
    batch = make_batch(model)
    for one in (net, part):
        summed_loss(one, batch).backward()
    parts.sum_replicated_gradients(dict(part.named_parameters()))
    check_gradients(
        gather_whole(parts, {name: p.grad for name, p in part.named_parameters()}),
        net,
        rtol=1e-5,
        atol=1e-6,
    )


@case
def terms() -> None:
    """Auxiliary losses: load balance over tokens, expected number of heads."""
    gates = (
        hw.parts.Rotary(),
        hw.parts.MixtureOfHeads(always=1, active=1),
        hw.parts.HardConcreteGate(),
    )
    spec = hw.design(model=MODEL, heads=HEADS, pattern="causal", modifiers=gates)
    model = decoder(*[bp.BlockSpec(spec)] * 2, embedding=None)
    net = build_model(model).eval()  # gates are not drawn
    part, parts = split_over_ranks(net)
    aux_losses: dict[int, dict] = {id(net): {}, id(part): {}}
    for one in (net, part):
        one.probes = {
            name: hw.Probe(aux_losses=hw.attention.AuxLosses(aux_losses[id(one)], name))
            for name, _ in model.attention_specs()
        }

    def loss(one, batch) -> Tensor:
        out = summed_loss(one, batch)
        return (
            out
            + 3 * hw.attention.AuxLosses(aux_losses[id(one)]).total("balance")
            + 5 * hw.attention.AuxLosses(aux_losses[id(one)]).total("l0")
        )

    check_tensor_parallel(net, part, parts, make_batch(model), loss)
    assert len(aux_losses[id(net)]) == 4
    for key, value in aux_losses[id(net)].items():
        check_close(aux_losses[id(part)][key], value)


@case
def dropout() -> None:
    """Residual dropout is equal on both ranks, dropout inside heads is not."""
    spec = hw.design(
        model=MODEL,
        heads=2,
        bias="o",
        modifiers=(hw.parts.WeightDropout(0.5), hw.parts.HardConcreteGate()),
    )
    net = build_model(
        decoder(*[bp.BlockSpec(spec, feed=bp.FeedForwardSpec(2048, "linear"))] * 2), dropout=0.5
    )
    part, _ = split_over_ranks(net.train())
    wire, ids = all_ranks(), torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))
    both = wire.all_gather(part(ids).detach())
    assert torch.equal(both[0], both[1])
    attention = part.decoder.blocks[0].attention
    with torch.no_grad():  # the two heads are made alike
        for p in attention.parameters():
            p.copy_(from_first_rank(p))
    read = wire.all_gather(
        attention.head_outputs(torch.ones(2, 9, MODEL, dtype=torch.float64)).detach()
    )
    assert not torch.allclose(read[0], read[1])
    assert not torch.equal(part(ids), part(ids))


@case
def recomputing() -> None:
    """A recomputed block repeats its dropout masks."""
    spec = hw.design(model=MODEL, heads=HEADS, modifiers=(hw.parts.WeightDropout(0.5),))
    net = build_model(decoder(*[bp.BlockSpec(spec, feed=bp.FeedForwardSpec(8))] * 2), dropout=0.5)
    gradients = []
    for checkpointing in ("none", "block"):
        net.checkpointing = checkpointing
        part, _ = split_over_ranks(net.train())
        torch.manual_seed(5)
        summed_loss(part, make_batch(net.spec)).backward()
        gradients.append([p.grad for p in part.parameters() if p.grad is not None])
    for plain, again in zip(*gradients, strict=True):
        check_close(again, plain)


@case
def one_file_whatever_the_split() -> None:
    """Gathered weights equal those of one rank bit by bit, signed zeros included."""
    net = build_model(make_model_spec("moh", "decoder"))
    with torch.no_grad():
        net.decoder.blocks[0].attention.weights["project"]["q"][3, 0] = -0.0
    part, parts = split_over_ranks(net)
    whole = gather_whole(parts, part.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        for place, tensors in (("one", net.state_dict()), ("two", whole)):
            again = hw.build(net.spec).double()
            again.load_state_dict(tensors)
            hw.save(again, Path(folder, place))
        first, second = (
            Path(folder, place, "model.safetensors").read_bytes() for place in ("one", "two")
        )
    assert first == second


@case
def decoding() -> None:
    """Each rank caches its own heads; the outputs are those of one rank."""
    net = build_model(
        decoder(*[bp.BlockSpec(small_spec("gqa"), feed=bp.FeedForwardSpec(8))] * 2)
    ).eval()
    part, _ = split_over_ranks(net)
    ids = make_batch(net.spec).x
    cache = part.cache(batch=3, capacity=7)
    with torch.no_grad():
        steps = [part(ids[:, t : t + 1], cache=cache) for t in range(7)]
    check_close(torch.cat(steps, 1), net(ids))
    assert cache.nbytes * 2 > net.cache(batch=3, capacity=7).nbytes


MIXED = ("dcmha", "talking", "selective", "mta")  # every head of these needs every other


def run_requested(folder: Path) -> dict[str, str | None]:
    """Results of the requested checks on this rank."""
    return run_checks(check, folder)
