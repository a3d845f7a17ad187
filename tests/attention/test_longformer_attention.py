"""Longformer attention: two layers of the reference, rows of many kinds, and no wasted product."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

import headwise as hw
from headwise import costs
from headwise.attention import reference
from support import layer_cases as cases
from support.layer_cases import BATCH, TOKENS, base, check_close
from support.layer_checks import layer_gradients, torch_flops

PATTERN = "window(3, after=1) | global((0, 4))"
KINDS = {
    "plain": base(pattern=PATTERN, bias="qkvo"),
    "grouped": base(pattern=PATTERN, kv=2, vdim=5),
    "three in a union": base(pattern="global((4,)) | dilated(3, 2, after=1) | global((0, 4))"),
    "turned": base(pattern=PATTERN, kv=3, modifiers=(hw.parts.QKNorm(), hw.parts.Rotary())),
    "by distance": base(
        pattern=PATTERN, modifiers=(hw.parts.Alibi(), hw.parts.Shaw(2), hw.parts.ShawValues(2))
    ),
    "mixed": base(
        pattern=PATTERN, modifiers=(hw.parts.DynamicComposition(rank=1), hw.parts.HeadGate())
    ),
    "in pairs": base(pattern=PATTERN, heads=3, modifiers=(hw.parts.Differential(),)),
    "dilated heads": base(
        pattern=hw.patterns.PerHead.from_heads(
            hw.patterns.parse_pattern(f"{near} | global((0, 4))")
            for near in (
                "window(3, after=1)",
                *["dilated(3, 2, after=1)"] * 2,
                *["window(3, after=1)"] * 3,
            )
        )
    ),
    "latent": base(
        pattern=PATTERN,
        project=hw.parts.MLAProjection(rank=8, rope=2),
        modifiers=(hw.parts.Rotary(),),
    ),
}


def built(spec: hw.AttentionSpec) -> hw.attention.LongformerAttention:
    block = hw.attention.LongformerAttention(spec).double().eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return block


def truth(block: hw.attention.LongformerAttention, x: Tensor, tokens: hw.SequenceInfo) -> Tensor:
    """Each layer by the reference, on every token; the second's where a token is global."""
    near = reference.reference_attention(block.local, x, tokens=tokens)
    spec = replace(block.local.spec, pattern=hw.patterns.Full(), source=block.local.spec.model)
    shares = {
        name: (block.overall if name == "project" else block.local).weights[name]
        for name, _ in spec.parts()
    }
    overall = hw.Attention(spec, shared=shares).eval()
    far = reference.reference_attention(overall, x, source=x, tokens=tokens, source_tokens=tokens)
    chosen = torch.isin(tokens.position, torch.tensor(block.positions)) & tokens.is_real
    return torch.where(chosen[..., None], far, near)


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_is_read_by_its_own_layer(kind: str):
    block, x = built(KINDS[kind]), torch.randn(BATCH, TOKENS, 10).double()
    for tokens in cases.sequence_infos(x).values():
        check_close(block(x, sequence=tokens), truth(block, x, tokens))


def test_gradients_are_the_references():
    block = built(KINDS["grouped"])
    x = torch.randn(BATCH, TOKENS, 10, dtype=torch.float64, requires_grad=True)
    tokens = cases.sequence_infos(x)["packed"]
    expected = layer_gradients(block, truth(block, x, tokens), x)
    for name, grad in layer_gradients(block, block(x, sequence=tokens), x).items():
        check_close(grad, expected[name], msg=lambda m, name=name: f"{name}: {m}")


LEARNED = {
    "gates": {"modifiers": (hw.parts.HardConcreteGate(start=0.3), hw.parts.HeadGate())},
    "a router": {"modifiers": (hw.parts.MixtureOfHeads(2, 2), hw.parts.T5Bias(buckets=8, reach=9))},
    "by queries": {
        "modifiers": (hw.parts.MixtureOfHeads(2, 2, router="norm"), hw.parts.KnockingHeads())
    },
    "sinks": {"normaliser": hw.parts.SinkSoftmax(), "similarity": hw.parts.Additive()},
}


@pytest.mark.parametrize("kind", LEARNED)
def test_only_the_projections_come_twice(kind: str):
    block = hw.attention.LongformerAttention(base(pattern=PATTERN, **LEARNED[kind]))
    names = [name for name, _ in block.named_parameters()]
    assert [name for name in names if name.startswith("overall.")] == [
        f"overall.project.{side}" for side in "qkv"
    ]
    block.train()(torch.randn(BATCH, TOKENS, 10)).sum().backward()
    assert all(p.grad is not None for p in block.parameters())


@pytest.mark.parametrize("kind", LEARNED)
def test_a_fresh_block_is_the_plain_layer_while_training_too(kind: str):
    """A gate is drawn once a call, and its term tells all of it."""
    spec = base(pattern=PATTERN, **LEARNED[kind])
    block, plain = (
        hw.attention.LongformerAttention(spec).double().train(),
        hw.Attention(spec).double().train(),
    )
    plain.load_state_dict(block.local.state_dict())
    x, recorded = torch.randn(BATCH, TOKENS, 10).double(), []
    for built in (block, plain):
        torch.manual_seed(3)
        probe = hw.Probe(aux_losses=hw.attention.AuxLosses())
        recorded.append((built(x, probe=probe), probe.aux_losses.terms))
    check_close(recorded[0][0], recorded[1][0])
    assert recorded[0][1] == recorded[1][1]


@pytest.mark.parametrize("start", [0, 3, 5, 90])
def test_positions_count_from_where_the_tokens_stand(start: int):
    """A run that begins later holds fewer global tokens, or none."""
    block, x = built(KINDS["turned"]), torch.randn(BATCH, TOKENS, 10).double()
    run = hw.SequenceInfo.contiguous(start, TOKENS, "cpu")
    check_close(block(x, sequence=run), truth(block, x, run))
    sequence = hw.SequenceInfo(run.position.expand(BATCH, -1), run.segment.expand(BATCH, -1))
    check_close(block(x, sequence=sequence), block(x, sequence=run))


@pytest.mark.parametrize("kind", ["plain", "grouped", "mixed"])
def test_only_global_tokens_have_second_queries(kind: str):
    """The products of a call: the local layer's, and the second's with two queries to all keys,
    without its merge.
    """
    spec = KINDS[kind]
    block = hw.attention.LongformerAttention(spec).eval()
    block.local.backend_name = block.overall.backend_name = "dense"
    x = torch.randn(BATCH, TOKENS, 10)
    merge = 2 * BATCH * len(block.positions) * 10 * len(spec.score_head_of_output) * spec.heads.vdim
    local = costs.counted_flops(spec, hw.costs.CallSize(BATCH, TOKENS, TOKENS, TOKENS))
    overall = costs.counted_flops(
        block.overall.spec, hw.costs.CallSize(BATCH, len(block.positions), TOKENS, TOKENS)
    )
    assert torch_flops(block, x) == local + overall - merge


def test_no_global_token_no_second_layer():
    block, x = hw.attention.LongformerAttention(KINDS["plain"]), torch.randn(BATCH, 3, 10)
    run = hw.SequenceInfo.contiguous(20, 3, "cpu")
    assert torch_flops(block, x, sequence=run) == torch_flops(block.local, x, sequence=run)
    for empty in (x[:0], x[:, :0]):
        assert block(empty).shape == empty.shape
        tokens = hw.SequenceInfo.from_batch(
            empty, segments=torch.zeros(empty.shape[:2], dtype=torch.int64)
        )
        assert block(empty, sequence=tokens).shape == empty.shape


def test_one_merge_is_saved_once(tmp_path: Path):
    block, x = built(KINDS["plain"]), torch.randn(BATCH, TOKENS, 10).double()
    file = tmp_path / "block.safetensors"
    safetensors.torch.save_file(block.state_dict(), file)
    assert sum(name.endswith("output.o") for name in block.state_dict()) == 1
    fresh = hw.attention.LongformerAttention(KINDS["plain"]).double()
    fresh.load_state_dict(safetensors.torch.load_file(file))
    check_close(fresh(x), block(x))
    copied = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    check_close(copied(x), fresh(x))
    back = copied.to("meta").to_empty(device="cpu")
    back.load_state_dict(fresh.state_dict())
    check_close(back(x), fresh(x))


def test_a_probe_looks_into_the_local_layer():
    block, x = built(KINDS["plain"]), torch.randn(BATCH, TOKENS, 10).double()
    probe, local = hw.Probe("heads"), hw.Probe("heads")
    block(x, probe=probe)
    block.local(x, probe=local)
    check_close(probe.tensors["heads"], local.tensors["heads"])


def test_decoding_is_refused():
    block, x = hw.attention.LongformerAttention(KINDS["plain"]), torch.randn(BATCH, 1, 10)
    cache = hw.Attention(replace(KINDS["plain"], pattern=hw.patterns.Causal())).cache(
        batch=BATCH, capacity=9
    )
    with pytest.raises(ValueError, match="cache= is not supported; pass whole sequences"):
        block(x, cache=cache)


@pytest.mark.parametrize("kind", ["plain", "by distance"])
def test_autocast(kind: str):
    block, x = built(KINDS[kind]).float(), torch.randn(BATCH, TOKENS, 10)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = block(x)
    exact = block(x)
    assert (y - exact).abs().max() < 0.03 * exact.abs().max()


@pytest.mark.compile
@pytest.mark.parametrize("kind", ["grouped", "turned"])
def test_one_graph_holds_the_whole_block(kind: str):
    block, x = built(KINDS[kind]), torch.randn(BATCH, TOKENS, 10).double()
    torch._dynamo.reset()
    check_close(torch.compile(block, fullgraph=True, backend="eager")(x), block(x))
