"""Transformer models: parameters, outputs, positions, initialisation, and refusals."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise import models
from headwise.kernels.counter_rng import dropout
from headwise.models import INIT_SCHEMES, EncoderOutput, model_spec as bp
from headwise.models.feed_forward import FeedForward, MixtureOfExperts
from headwise.models.generation import Engine
from headwise.studies.cells import resize_model  # noqa: F401 - lines of refused_models.txt use it
from headwise.training.data import make_task  # noqa: F401 - lines of refused_models.txt use it
from support.refusals import check_refused, refused_calls

MODEL, WORDS = 12, 11
CAUSAL = hw.design(model=MODEL, heads=3, kv=1, pattern="causal()", bias="qkvo")
FULL = hw.design(model=MODEL, heads=3)


def stack(*blocks: bp.BlockSpec, name: str = "decoder", **options: Any) -> bp.StackSpec:
    usual = {
        "embedding": bp.EmbeddingSpec(WORDS, positions=bp.PositionSpec("learned", 9)),
        "norm": bp.NormSpec(),
    }
    return bp.StackSpec.from_blocks(name, MODEL, blocks, **(usual | options))


def model(
    *blocks: bp.BlockSpec,
    heads: tuple[bp.OutputHeadSpec, ...] = (bp.OutputHeadSpec("tokens", WORDS),),
    **options: Any,
) -> bp.ModelSpec:
    return bp.ModelSpec("small", "decoder", (stack(*blocks, **options),), heads)


BLOCK = bp.BlockSpec(CAUSAL, feed=bp.FeedForwardSpec(17))
DECODER = model(BLOCK, BLOCK)
PAIR = bp.ModelSpec(
    "pair",
    "encoder-decoder",
    (
        stack(bp.BlockSpec(FULL, feed=bp.FeedForwardSpec(17)), name="encoder"),
        stack(*[bp.BlockSpec(CAUSAL, FULL, bp.FeedForwardSpec(17))] * 2),
    ),
    (bp.OutputHeadSpec("tokens", WORDS, table="decoder"),),
)
MERGING = bp.BlockSpec(cross=FULL, feed=bp.FeedForwardSpec(17), form="merged")
MERGED = replace(PAIR, stacks=(PAIR.stacks[0], stack(MERGING, MERGING)))


def built(described: bp.ModelSpec, **options: Any) -> hw.Transformer:
    """In float64, every number one that matters."""
    net = hw.build(described, **options).double().eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape, dtype=p.dtype) * 0.3)
    return net


def ids(rows: int = 3, count: int = 7) -> Tensor:
    return torch.randint(0, WORDS, (rows, count))


# --- what they hold -------------------------------------------------------------------------------


def test_shared_weights_are_one_tensor():
    spec = replace(CAUSAL, modifiers=(hw.parts.T5Bias(buckets=8, reach=9, looking="back"),))
    net = built(model(*[bp.BlockSpec(spec)] * 3))
    tables = [layer.attention.weights["t5_bias"]["table"] for layer in net.decoder.blocks]
    assert all(table is tables[0] for table in tables)
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.decoder.blocks[0].attention.weights["t5_bias"]["table"].zero_()
    assert other.decoder.blocks[2].attention.weights["t5_bias"]["table"].eq(0).all()
    assert tables[2].ne(0).any()
    net.to(torch.bfloat16)
    assert net.decoder.blocks[2].attention.weights["t5_bias"]["table"].dtype == torch.bfloat16
    x = ids()
    before = other(x)
    assert not torch.allclose(before, other.to(torch.float64)(x) + 1)
    net(x).sum().backward()
    assert tables[0].grad is not None


# --- where tokens stand ---------------------------------------------------------------------------

ROWS = ([2, 5, 3, 7], [4], [1, 0, 6])
POSITIONS = {
    "learned": bp.PositionSpec("learned", 9),
    "skipped": bp.PositionSpec("learned", 9, skipped=2),
    "sinusoidal": bp.PositionSpec("sinusoidal"),
    "none": None,
}


def positioned(kind: str) -> hw.Transformer:
    embedding = bp.EmbeddingSpec(WORDS, positions=POSITIONS[kind], norm=bp.NormSpec(), scale=3.0)
    return built(model(BLOCK, BLOCK, embedding=embedding))


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("kind", POSITIONS)
def test_padded_rows_are_as_if_alone(kind: str, pad: str):
    net, lengths = positioned(kind), [len(row) for row in ROWS]
    x = torch.zeros(3, 4, dtype=torch.int64)
    for n, row in enumerate(ROWS):
        x[n, 4 - len(row) if pad == "left" else 0 :][: len(row)] = torch.tensor(row)
    at = hw.SequenceInfo.from_batch(x, lengths=lengths, pad=pad)
    got = net(x, sequence=at)
    for n, row in enumerate(ROWS):
        torch.testing.assert_close(got[n][at.is_real[n]], net(torch.tensor([row]))[0])


@pytest.mark.parametrize("kind", POSITIONS)
def test_packed_rows_are_as_if_alone(kind: str):
    net = positioned(kind)
    x = torch.tensor([ROWS[0] + ROWS[2] + [0]])
    at = hw.SequenceInfo.from_batch(x, segments=torch.tensor([[0] * 4 + [1] * 3 + [-1]]))
    got = net(x, sequence=at)
    torch.testing.assert_close(got[0, :4], net(torch.tensor([ROWS[0]]))[0])
    torch.testing.assert_close(got[0, 4:7], net(torch.tensor([ROWS[2]]))[0])


def test_sinusoids_are_added_unscaled():
    """The scale is that of the table alone (1706.03762, section 3.4)."""
    net = hw.build(
        model(
            embedding=bp.EmbeddingSpec(WORDS, positions=bp.PositionSpec("sinusoidal"), scale=3.0),
            norm=None,
        )
    )
    codes = torch.tensor([[0.0, 1.0] * 6])
    torch.testing.assert_close(
        net.hidden(torch.tensor([[4]]))[0], 3 * net.decoder.embedding.tokens[4:5] + codes
    )


@pytest.mark.parametrize("pad", ["left", "right", "none"])
@pytest.mark.parametrize("at", ["first", "last", "mean"])
def test_heads_of_whole_rows_mind_padding(at: str, pad: str):
    transform = bp.HeadTransformSpec(5, "tanh", bp.NormSpec("layer_no_bias"))
    head = bp.OutputHeadSpec("classes", 3, at, transform, bias="learned", scale=2.0, cap=1.5)
    net = built(model(BLOCK, heads=(head,)))
    lengths = [4, 4, 4] if pad == "none" else [4, 1, 3]
    x = ids(3, 4)
    tokens = None if pad == "none" else hw.SequenceInfo.from_batch(x, lengths=lengths, pad=pad)
    got = net(x, sequence=tokens)
    assert got.shape == (3, 3)
    for row, length in enumerate(lengths):
        alone = x[row : row + 1, 4 - length :] if pad == "left" else x[row : row + 1, :length]
        h = net.hidden(alone)[0]
        read = {"first": h[0], "last": h[-1], "mean": h.mean(0)}[at]
        p = net.head["classes"]
        inner = F.layer_norm(
            torch.tanh(read @ p.transform.T + p.transform_bias), (5,), p.transform_norm.weight
        )
        expected = 1.5 * torch.tanh((2 * inner @ p.weight.T + p.bias) / 1.5)
        torch.testing.assert_close(got[row], expected)


def test_a_row_of_several_texts_cannot_be_read_as_a_whole():
    net = built(model(BLOCK, heads=(bp.OutputHeadSpec("classes", 3, "mean"),)))
    x = ids(1, 4)
    with pytest.raises(ValueError, match=r"a row holds several texts; give each text its own row"):
        net(x, sequence=hw.SequenceInfo.from_batch(x, segments=torch.tensor([[0, 0, 1, 1]])))


# --- what enters ----------------------------------------------------------------------------------


def vision(**options: Any) -> bp.ModelSpec:
    block = bp.BlockSpec(FULL, feed=bp.FeedForwardSpec(17))
    one = bp.StackSpec.from_blocks("encoder", MODEL, [block], embedding=bp.EmbeddingSpec(**options))
    return bp.ModelSpec("eye", "vision", (one,), (bp.OutputHeadSpec("classes", 3, "mean"),))


def test_patches_are_one_linear_map():
    net = built(
        vision(
            patches=bp.PatchSpec(2, 3, 4, 5, channels=2),
            first=1,
            positions=bp.PositionSpec("learned", 7),
        )
    )
    x = torch.randn(2, 2, 9, 15, dtype=torch.float64)
    embedding = net.encoder.embedding
    got = (
        embedding.place(embedding(x), hw.SequenceInfo.contiguous(0, 7, "cpu"), None)
        - embedding.positions
    )
    assert got.shape == (2, 7, MODEL)
    torch.testing.assert_close(got[1, 0], embedding.first[0])
    for row in range(2):
        for column in range(3):
            patch = x[1, :, 4 * row : 4 * row + 4, 5 * column : 5 * column + 5]
            expected = (
                torch.einsum("mchw,chw->m", embedding.patches, patch) + embedding.patches_bias
            )
            torch.testing.assert_close(got[1, 1 + 3 * row + column], expected)


def test_frames_over_time_are_an_image_of_one_column():
    """As many frames as there are: fewer than described are a beginning, and padding is as if it
    were not there.
    """
    described = vision(
        patches=bp.PatchSpec(9, 1, 1, 5, channels=1), positions=bp.PositionSpec("sinusoidal")
    )
    net = built(described)
    x = torch.randn(2, 7, 5, dtype=torch.float64)
    got = net(x, sequence=hw.SequenceInfo.from_batch(x, lengths=[7, 4]))
    torch.testing.assert_close(got[1], net(x[1:, :4])[0])
    torch.testing.assert_close(got[0], net(x[:1, None])[0])


# --- feed-forwards --------------------------------------------------------------------------------


def brute(experts_spec: bp.ExpertsSpec, p: Any, x: Tensor) -> Tensor:
    """One token after the other, by the definition."""
    out = []
    for row in x.flatten(0, 1):
        logits = p.router @ row + (p.router_bias if experts_spec.bias == "learned" else 0)
        kinds = {"softmax": logits.softmax(0), "softmax_of_top_k": logits}
        score = kinds.get(experts_spec.scores, logits.sigmoid())
        visible = score + (p.router_bias if experts_spec.bias == "constant" else 0)
        groups = visible.view(experts_spec.groups, -1).sort(descending=True).values
        totals = groups[:, : 2 if experts_spec.group_score == "top2" else 1].sum(-1).tolist()
        open_groups = sorted(range(len(totals)), key=lambda group: -totals[group])[
            : experts_spec.top_k_groups
        ]
        members = [
            expert
            for expert in range(experts_spec.count)
            if expert // groups.shape[1] in open_groups
        ]
        best = sorted(members, key=lambda expert: -visible[expert])[: experts_spec.top_k]
        share = score[best]
        kinds = {"softmax_of_top_k": share.softmax(0), "sigmoid": share / share.sum()}
        share = kinds.get(experts_spec.scores, share)
        y = torch.zeros_like(row)
        for weight, expert in zip(share, best, strict=True):
            gate, up = (getattr(p.expert, name)[expert] @ row for name in ("gate", "up"))
            inner = F.silu(gate + p.expert.gate_bias[expert]) * up
            y = y + experts_spec.scale * weight * (p.expert.down[expert] @ inner)
        out.append(y)
    y = torch.stack(out).view(x.shape)
    if experts_spec.shared is None:
        return y
    return y + F.linear(F.relu(F.linear(x, p.shared.up)), p.shared.down)


GROUPS = [(1, 1, "max"), (3, 2, "max"), (3, 1, "top2"), (3, 2, "top2"), (2, 2, "top2")]
SCORES = ("softmax", "softmax_of_top_k", "sigmoid", "sigmoid_sum")
ROUTERS = [  # each pair of options once
    (scores, GROUPS[(n + m) % 5], bias)
    for (n, scores), (m, bias) in product(
        enumerate(SCORES), enumerate(("", "learned", "constant", "learned", ""))
    )
]


@pytest.mark.parametrize(("scores", "groups", "bias"), ROUTERS)
def test_experts_follow_their_router(scores: str, groups: tuple[int, int, str], bias: str):
    shared = bp.FeedForwardSpec(3, "relu") if bias else None
    each = bp.FeedForwardSpec(7, "silu", "gated", "g")
    experts_spec = bp.ExpertsSpec(each, 6, 2, shared, scores, bias, 1.7, *groups)
    feed = MixtureOfExperts(experts_spec, 6).double()
    with torch.no_grad():
        for tensor in (*feed.parameters(), *feed.buffers()):
            tensor.copy_(torch.randn(tensor.shape, dtype=tensor.dtype))
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    expected = brute(experts_spec, feed, x)
    share, chosen = feed.route(x.flatten(0, 1))
    for run in (feed._run_chosen_experts, feed._run_all_experts):
        y = run(x.flatten(0, 1), share, chosen).view(x.shape) + (
            0 if feed.shared is None else feed.shared(x)
        )
        torch.testing.assert_close(y, expected)
    names, tensors = zip(*feed.named_parameters(), strict=True)
    expected_gradients = torch.autograd.grad(
        expected.square().sum(), (x, *tensors), retain_graph=True
    )
    got = torch.autograd.grad(feed(x).square().sum(), (x, *tensors))
    for name, ours, theirs in zip(("x", *names), got, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_an_unused_expert_costs_nothing():
    """32 tokens and one expert each: as many products as one feed-forward for all of them."""
    from torch.utils.flop_counter import FlopCounterMode

    feed = MixtureOfExperts(bp.ExpertsSpec(bp.FeedForwardSpec(16), 8, 1), 4)
    x = torch.randn(1, 32, 4)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        feed(x)
    assert counter.get_total_flops() == 2 * 32 * (4 * 8 + 2 * 4 * 16)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu", "relu2", "relu6", "mish"])
def test_activations_by_name(name: str):
    x = torch.linspace(-8, 8, 41, dtype=torch.float64)
    phi = 0.5 * (1 + torch.erf(x / 2**0.5))
    bent = 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    expected = {
        "gelu": x * phi,
        "gelu_tanh": x * bent,
        "silu": x / (1 + torch.exp(-x)),
        "relu": x.clamp(min=0),
    }
    expected |= {"relu2": x.clamp(min=0) ** 2, "relu6": x.clamp(0, 6)}
    expected |= {"mish": x * torch.tanh(torch.log1p(torch.exp(x)))}
    feed = FeedForward(bp.FeedForwardSpec(41, name), 41).double()
    with torch.no_grad():
        feed.up.copy_(torch.eye(41)), feed.down.copy_(torch.eye(41))
    torch.testing.assert_close(feed(x), expected[name])


# --- training -------------------------------------------------------------------------------------


def test_dropout_acts_in_training_alone_and_where_it_should():
    net = hw.build(model(BLOCK, BLOCK), dropout=0.5, seed=0)
    x = ids()
    assert not torch.equal(net(x), net(x))
    assert torch.equal(net.eval()(x), net(x))
    recorded: list[int] = []
    drop = dropout

    def counted(h: Tensor, rate: float, training: bool) -> Tensor:
        recorded.append(h.shape[-1])
        assert (rate, training) == (0.5, True)
        return drop(h, rate, training)

    with pytest.MonkeyPatch.context() as patch:
        for place in (models.block, models.embeddings_heads, models.feed_forward):
            patch.setattr(place, "dropout", counted)
        net.train()(x)
    each = [MODEL, 17, MODEL]  # behind the attention, inside the feed-forward, behind it
    assert recorded == [MODEL, *each, *each]  # and behind the embedding


def test_checkpointing_recomputes_activations():
    net = built(model(BLOCK, BLOCK), dropout=0.3)
    x, calls = ids(), []
    net.decoder.blocks[0].feed.register_forward_hook(lambda *_: calls.append(1))

    def gradients(kind: str) -> list[Tensor]:
        net.checkpointing = kind
        torch.manual_seed(7)
        net.zero_grad()
        net.train()(x).square().sum().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    plain = gradients("none")
    assert len(calls) == 1
    for ours, theirs in zip(gradients("block"), plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(calls) == 3
    with pytest.raises(ValueError, match="checkpointing='blocks' is unknown; did you mean 'block'"):
        net.checkpointing = "blocks"


@pytest.mark.compile
def test_forward_is_one_graph():
    """Tables that layers share, experts, padding, checkpoints."""
    spec = replace(CAUSAL, modifiers=(hw.parts.T5Bias(buckets=8, reach=9, looking="back"),))
    block = bp.BlockSpec(spec, feed=bp.ExpertsSpec(bp.FeedForwardSpec(7, form="gated"), 5, 2))
    net, x = built(model(block, block)), ids()
    check_one_graph(net, x)
    net.checkpointing = "block"
    check_one_graph(net, x, sequence=hw.SequenceInfo.from_batch(x, lengths=[7, 3, 5]))


@pytest.mark.compile
def test_forward_of_two_stacks_is_one_graph():
    short = replace(
        MERGED,
        stacks=(MERGED.stacks[0], replace(MERGED.stacks[1], runs=(bp.LayerRun(1, (MERGING,)),))),
    )
    x = ids()
    check_one_graph(
        built(short), x, sequence=hw.SequenceInfo.from_batch(x, lengths=[7, 3, 5]), source=ids(3, 5)
    )


def check_one_graph(net: hw.Transformer, x: Tensor, **options: Any) -> None:
    torch.compiler.reset()
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, **options), net(x, **options))


def test_probes_look_into_attentions_by_name():
    net = built(PAIR)
    probe, aux_losses = hw.Probe("weights"), hw.attention.AuxLosses()
    net.probes = {"decoder.1.cross": probe}
    x, source = ids(), ids(3, 5)
    net(x, source=source)
    assert probe.tensors["weights"].shape == (3, 3, 7, 5)
    with pytest.raises(
        ValueError, match=r"no attention is called 'decoder.1.cros'; did you mean 'decoder.1.cross'"
    ):
        net.probes = {"decoder.1.cros": probe}
    spec = replace(CAUSAL, modifiers=(hw.parts.MixtureOfHeads(always=1, active=1),))
    net = built(model(bp.BlockSpec(spec)))
    net.probes = {"decoder.0.attention": hw.Probe(aux_losses=aux_losses)}
    with torch.no_grad():
        net(x)
    assert float(aux_losses.total("balance")) > 0


# --- how they start -------------------------------------------------------------------------------


def test_a_seed_repeats_a_start_and_leaves_the_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, two, other = (hw.build(PAIR, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(
        hw.build(PAIR).decoder.embedding.tokens, hw.build(PAIR).decoder.embedding.tokens
    )


def wide(start: str, layers: int = 4) -> hw.Transformer:
    spec = hw.design(model=96, heads=4, pattern="causal()", bias="qkvo")
    one = bp.StackSpec.from_blocks(
        "decoder",
        96,
        [bp.BlockSpec(spec, feed=bp.FeedForwardSpec(384, bias="ud"))] * layers,
        embedding=bp.EmbeddingSpec(99),
    )
    return hw.build(
        bp.ModelSpec("wide", "decoder", (one,), (bp.OutputHeadSpec("tokens", 99),)),
        seed=0,
        init=start,
    )


def test_depth_scaled_start():
    """U(-b, b), b = sqrt(6 / (in + out)) / sqrt(l), layers counted from 1 (1908.11365)."""
    for depth, layer in enumerate(wide("depth").decoder.blocks, 1):
        for matrix in (layer.attention.weights["project"]["q"], layer.feed.up, layer.feed.down):
            bound = (6 / sum(matrix.shape)) ** 0.5 / depth**0.5
            assert 0.99 * bound < float(matrix.detach().abs().max()) <= bound * 1.000001


def test_the_start_of_gpt2():
    """N(0, 0.02), and 0.02 / sqrt(2 x 4 layers) where a sublayer ends."""
    net = wide("gpt2")
    for layer in net.decoder.blocks:
        for matrix in (layer.attention.weights["project"]["q"], layer.feed.up):
            assert float(matrix.detach().std()) == pytest.approx(0.02, rel=0.05)
        for matrix in (layer.attention.weights["output"]["o"], layer.feed.down):
            assert float(matrix.detach().std()) == pytest.approx(0.02 / 8**0.5, rel=0.05)
        assert not layer.feed.up_bias.any()
    for table in (net.decoder.embedding.tokens, net.head["tokens"].weight):
        assert float(table.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_the_usual_start():
    net = wide("xavier")
    up = net.decoder.blocks[0].feed.up
    assert float(up.detach().abs().max()) == pytest.approx((6 / 480) ** 0.5, rel=0.01)
    assert float(net.decoder.embedding.tokens.detach().std()) == pytest.approx(96**-0.5, rel=0.05)
    feed = MixtureOfExperts(bp.ExpertsSpec(bp.FeedForwardSpec(64), 5, 2), 32)
    assert float(feed.expert.up.detach().abs().max()) == pytest.approx((6 / 96) ** 0.5, rel=0.01)
    for start in INIT_SCHEMES:
        assert wide(start, 1)(torch.tensor([[1, 2]])).isfinite().all()


# --- what two stacks share ------------------------------------------------------------------------


@pytest.mark.parametrize("described", [PAIR, MERGED], ids=["plain", "merged"])
def test_encoder_outputs_are_reused(described: bp.ModelSpec):
    net = built(described)
    x, source = ids(), ids(3, 5)
    sequence = hw.SequenceInfo.from_batch(source, lengths=[5, 2, 3])
    memory = net.encode(source, sequence=sequence)
    got = net(x, source=source, source_sequence=sequence)
    torch.testing.assert_close(net(x, source=memory), got)
    for row, length in enumerate((5, 2, 3)):
        torch.testing.assert_close(
            net(x[row : row + 1], source=source[row : row + 1, :length])[0], got[row]
        )
    assert isinstance(memory, EncoderOutput)
    order = torch.tensor([2, 0, 2])
    torch.testing.assert_close(net(x[order], source=memory.rows(order)), got[order])


@pytest.mark.parametrize("described", [DECODER, PAIR, MERGED], ids=["decoder", "plain", "merged"])
def test_rows_of_caches_can_be_taken(described: bp.ModelSpec):
    net = built(described)
    x, source = ids(), ids(3, 5)
    memory = net.encode(source) if described is not DECODER else None
    cache = net.cache(batch=3, capacity=9)
    net(x[:, :4], cache=cache, source=memory)
    order = torch.tensor([1, 1, 2])
    cache.rows(order)
    memory = memory and memory.rows(order)
    after = torch.cat(
        [net(x[order, t : t + 1], cache=cache, source=memory) for t in range(4, 7)], 1
    )
    whole = net(x, source=None if memory is None else source)
    torch.testing.assert_close(after, whole[order, 4:])
    assert (cache.used, cache.batch) == (7, 3)


def test_a_merged_block_is_the_block_of_attentions():
    """The same tensors, and what MergedAttention makes of them between the same norms."""
    net = built(MERGED)
    layer = net.decoder.blocks[0]
    merged = hw.attention.MergedAttention(FULL).double().eval()
    merged.cross.load_state_dict(layer.cross.state_dict())
    z, x = (torch.randn(2, count, MODEL, dtype=torch.float64) for count in (5, 7))
    at, sequence = hw.SequenceInfo.contiguous(0, 7, "cpu"), hw.SequenceInfo.contiguous(0, 5, "cpu")
    normed = layer.cross_norm(x)
    mid = x + merged(normed, source=merged.project_source(z))
    expected = mid + layer.feed(layer.feed_norm(mid))
    from headwise.models.block import EarlierLayers, LayerInputs

    inputs = LayerInputs(at, None, z, sequence, {}, EarlierLayers())
    torch.testing.assert_close(layer(x, inputs), expected)
    # of 3 heads of 4 a sum and a count
    assert net.cache(batch=2, capacity=1000).nbytes == 2 * 2 * 3 * (4 + 1) * 8
    for wrong in ({"attention": CAUSAL, "cross": FULL}, {}):
        with pytest.raises(hw.SpecError, match="give cross=, and no attention"):
            bp.BlockSpec(**wrong, form="merged")
    with pytest.raises(hw.SpecError, match="W_V projects the source and x"):
        hw.build(
            replace(
                MERGED,
                stacks=(
                    replace(MERGED.stacks[0], model=10, runs=()),
                    stack(bp.BlockSpec(cross=replace(FULL, source=10), form="merged")),
                ),
            )
        )
    for read, write in ((bp.from_toml, bp.to_toml), (bp.from_json, bp.to_json)):
        assert read(write(MERGED)) == MERGED


# --- generation -----------------------------------------------------------------------------------


def test_rows_stop_before_the_end():
    net = built(DECODER)
    x = ids(16, 3)
    free = hw.generation.greedy_decode(net, x, max_new_tokens=6)
    end = next(one for row in free for one in row if not all(one in other for other in free))
    stopped = hw.generation.greedy_decode(net, x, max_new_tokens=6, end_id=end)
    assert stopped == [row[: row.index(end)] if end in row else row for row in free]
    assert min(map(len, stopped)) < max(map(len, stopped)) == 6
    assert hw.generation.greedy_decode(net, x[:1], max_new_tokens=6, end_id=free[0][0]) == [[]]


def test_generation_leaves_the_model_as_it_was():
    net = hw.build(DECODER, dropout=0.5, seed=0)
    net.decoder.blocks[0].feed.eval()
    before = [module.training for module in net.modules()]
    x = ids()
    assert hw.generation.greedy_decode(net, x, max_new_tokens=1) == hw.generation.greedy_decode(
        net, x, max_new_tokens=1
    )
    assert [module.training for module in net.modules()] == before
    with pytest.raises(ValueError, match="ids hold"):
        hw.generation.greedy_decode(net, x + WORDS, max_new_tokens=2)
    assert [module.training for module in net.modules()] == before


# --- what is refused ------------------------------------------------------------------------------


LONG, STRANGE = torch.zeros(1, 10, dtype=torch.int64), torch.tensor([[3, WORDS]])


@pytest.mark.parametrize("has_source", [False, True])
def test_a_decoder_without_self_attention_decodes(has_source: bool):
    """All heads of its self-attention may have been pruned; the cache counts tokens. Equal to
    uncached passes.
    """
    block = bp.BlockSpec(cross=FULL if has_source else None, feed=bp.FeedForwardSpec(17))
    pair = replace(PAIR, stacks=(PAIR.stacks[0], stack(block, block)))
    net = hw.build(pair if has_source else model(block), seed=1).eval()
    encoded = {"source": torch.tensor([[4, 2, 9, 1]])} if has_source else {}
    prompt = ids = torch.tensor([[3, 7, 5], [1, 1, 8]])[: 1 if has_source else 2]
    for _ in range(4):
        ids = torch.cat([ids, net(ids, **encoded)[:, -1:].argmax(-1)], 1)
    memory = net.encode(encoded["source"]) if has_source else None
    assert (
        hw.generation.greedy_decode(net, prompt, max_new_tokens=4, encoder_output=memory)
        == ids[:, 3:].tolist()
    )


def test_caches_without_self_attention_are_checked():
    net = hw.build(model(bp.BlockSpec(feed=bp.FeedForwardSpec(3))))
    with pytest.raises(hw.SpecError, match="capacity=0; capacity must be at least 1"):
        net.cache(batch=1, capacity=0)
    with pytest.raises(
        hw.SpecError, match="stores no keys or values; leave storage_format='int8' out"
    ):
        net.cache(batch=1, capacity=5, storage_format="int8")
    with pytest.raises(hw.SpecError, match="caches the keys and values of decoders"):
        Engine(net, budget=10**6)


def test_a_model_without_vocabulary_has_no_token_outputs():
    with pytest.raises(hw.SpecError, match=r"its first head must be Head\('tokens', 11\)"):
        hw.generation.greedy_decode(
            hw.build(model(BLOCK, heads=(bp.OutputHeadSpec("classes", 3, "last"),))),
            LONG[:, :3],
            max_new_tokens=2,
        )
    with pytest.raises(ValueError, match="has an encoder, which needs an input"):
        hw.generation.greedy_decode(hw.build(PAIR), LONG[:, :3], max_new_tokens=2)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_beyond_all_memory_is_refused_before_it_is_built(device: str):
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 10}
    described = hw.families.read_model_spec(
        config | {"intermediate_size": 10**18, "num_hidden_layers": 1}
    )
    with (
        torch.device(device),
        pytest.raises(hw.SpecError, match=r"cannot build llama: its weights need .* GB"),
    ):
        hw.build(described)


@pytest.mark.parametrize(
    ("does", "words"), refused_calls(Path(__file__).with_name("refused_models.txt"))
)
def test_what_cannot_be_built_or_called_gives_a_reason(does: str, words: str):
    check_refused(does, words, ValueError, globals())
