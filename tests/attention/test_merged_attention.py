"""Merged attention: a sum of two layers with one W_V, and decoding with a constant cache."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

import headwise as hw
from headwise import costs
from headwise.attention.interfaces import QKTransform
from support.layer_cases import BATCH, SOURCE, TOKENS, base

SEPARATE_GROUPS = hw.Heads(q=6, kv=2, dim=4, vdim=5, value_heads=(0, 1, 0, 1, 2, 2))
KINDS = {
    "plain": base(),
    "grouped": base(kv=2, vdim=5, bias="qkvo"),
    "values apart": replace(base(bias="v"), heads=SEPARATE_GROUPS),
    "pruned": replace(
        base(vdim=5), heads=hw.Heads(q=6, kv=6, dim=4, vdim=5, score_head_of_output=(0, 2, 5))
    ),
}
POSITIONED = {
    "turned": base(kv=3, source=10, modifiers=(hw.parts.Rotary(),)),
    "mixed": base(kv=3, source=10, modifiers=(hw.parts.TalkingHeads(on="weights"),)),
    "biased and gated": base(
        kv=2, vdim=5, source=10, bias="v", modifiers=(hw.parts.Alibi(), hw.parts.HeadGate())
    ),
}
EVERY = KINDS | POSITIONED
CHUNKS = {
    "mixed": [2, 1, 1, 3],
    "none": [0, 5, 0, 2],
}


@dataclass(frozen=True, repr=False)
class Doubled(QKTransform):
    """Turns values."""

    def transformed_sides(self, spec: hw.AttentionSpec) -> frozenset[str]:
        return frozenset("v")

    def transform(self, x_BTHK: Tensor, side: str, precomputed: object, p: object) -> Tensor:
        return 2 * x_BTHK


def built(spec: hw.AttentionSpec) -> hw.attention.MergedAttention:
    block = hw.attention.MergedAttention(spec).double().eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return block


def numbers() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, TOKENS, 10).double(), torch.randn(BATCH, SOURCE, 10).double()


def check_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", EVERY)
def test_outputs_and_gradients_are_sums_of_two_layers(kind: str):
    """Two layers of their own, with equal weights: what they share gets the sum
    of their gradients.
    """
    block, (x, z) = built(EVERY[kind]), numbers()
    cross, mean = (hw.Attention(spec).double() for spec in (block.cross.spec, block.average.spec))
    cross.load_state_dict(block.cross.state_dict())
    mean.load_state_dict({name: cross.state_dict()[name] for name in mean.state_dict()})
    y = block(x, source=z)
    both = cross.merge_heads(cross.head_outputs(x, source=z) + mean.head_outputs(x))
    check_close(y, both)
    slope = torch.linspace(-1, 2, y.numel()).double().view_as(y)
    (y * slope).sum().backward()
    (both * slope).sum().backward()
    for name, parameter in cross.named_parameters():
        other = mean.get_parameter(name).grad if name in mean.state_dict() else None
        whole = parameter.grad if other is None else parameter.grad + other
        check_close(block.cross.get_parameter(name).grad, whole)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("kind", EVERY)
def test_cached_decode_is_one_pass(kind: str, chunks: str):
    block, (x, z) = built(EVERY[kind]), numbers()
    memory, cache = block.project_source(z), block.cache(batch=BATCH, capacity=1)
    with torch.no_grad():
        steps = [block(part, source=memory, cache=cache) for part in x.split(CHUNKS[chunks], 1)]
        check_close(torch.cat(steps, 1), block(x, source=z))


@pytest.mark.parametrize("pad", ["right", "left"])
@pytest.mark.parametrize("kind", EVERY)
def test_padded_rows_come_out_as_if_alone(kind: str, pad: str):
    block, (x, z) = built(EVERY[kind]), numbers()
    lengths, result = [TOKENS, 3, 5], [4, SOURCE, 7]
    at = hw.SequenceInfo.from_batch(x, lengths=lengths, pad=pad)
    memory = block.project_source(
        z, sequence=hw.SequenceInfo.from_batch(z, lengths=result, pad=pad)
    )
    with torch.no_grad():
        y = block(x, source=memory, sequence=at)
        for b in range(BATCH):
            mine, its = (
                slice(-n, None) if pad == "left" else slice(n) for n in (lengths[b], result[b])
            )
            check_close(y[b : b + 1, mine], block(x[b : b + 1, mine], source=z[b : b + 1, its]))
            padding = y[b][~at.is_real[b]]
            check_close(
                padding,
                block.cross.merge_heads(torch.zeros(1, len(padding), *block_heads(block)).double())[
                    0
                ],
            )


def block_heads(block: hw.attention.MergedAttention) -> tuple[int, int]:
    spec = block.cross.spec
    return len(spec.score_head_of_output), spec.heads.vdim


@pytest.mark.parametrize("pad", ["right", "left"])
@pytest.mark.parametrize("kind", EVERY)
def test_padded_prompts_decode_on(kind: str, pad: str):
    """Rows of different lengths in one prefill; then steps, where the cache knows where each row
    stands.
    """
    block, (x, z) = built(EVERY[kind]), numbers()
    lengths, memory = [4, 1, 3], block.project_source(z)
    prompt, rest = x[:, :4], x[:, 4:]
    cache = block.cache(batch=BATCH, capacity=1)
    with torch.no_grad():
        block(
            prompt,
            source=memory,
            cache=cache,
            sequence=hw.SequenceInfo.from_batch(prompt, lengths=lengths, pad=pad),
        )
        steps = torch.cat(
            [block(token, source=memory, cache=cache) for token in rest.split(1, 1)], 1
        )
        for b, n in enumerate(lengths):
            own = prompt[b : b + 1, -n:] if pad == "left" else prompt[b : b + 1, :n]
            alone = block(torch.cat([own, rest[b : b + 1]], 1), source=z[b : b + 1])
            check_close(steps[b : b + 1], alone[:, n:])


def test_the_cache_does_not_grow():
    block = built(KINDS["grouped"])
    cache = block.cache(batch=BATCH, capacity=9999)
    memory, sizes = block.project_source(torch.randn(BATCH, SOURCE, 10).double()), [cache.nbytes]
    for count in (1, 6, 50):
        with torch.no_grad():
            block(torch.randn(BATCH, count, 10).double(), source=memory, cache=cache)
        sizes.append(cache.nbytes)
    # of each head a sum of values and how many there were
    assert sizes == [BATCH * 6 * (5 + 1) * 8] * 4
    assert (
        costs.cache_bytes(block.average.spec, batch=BATCH, capacity=9999, bytes_per_number=8)
        == sizes[0]
    )


def test_rows_of_a_cache_can_be_taken():
    block, (x, z) = built(KINDS["plain"]), numbers()
    cache, pick = block.cache(batch=BATCH, capacity=1), torch.tensor([2, 0, 2, 1])
    with torch.no_grad():
        block(x[:, :4], source=z, cache=cache)
        cache.select_rows(pick)
        steps = [block(part[pick], source=z[pick], cache=cache) for part in x[:, 4:].split(1, 1)]
        check_close(torch.cat(steps, 1), block(x, source=z)[pick][:, 4:])


# --- one W_V, one W_O -----------------------------------------------------------------------------


def check_shared(block: hw.attention.MergedAttention) -> None:
    """Both branches read one W_V and one W_O: changing one changes what the other says."""
    spec = block.cross.spec
    for name, key in (("project", "v"), ("output", "o")):
        assert block.average.weights[name][key] is block.cross.weights[name][key]
    x = torch.randn(1, 3, spec.model, dtype=torch.float64).to(next(block.parameters()))
    with torch.no_grad():
        before = block.average(x)
        block.cross.project["v"].mul_(2)
        torch.testing.assert_close(block.average(x), 2 * before)


def test_copies_moves_and_reloads_stay_tied(tmp_path: Path):
    block, (x, z) = built(KINDS["plain"]), numbers()
    y = block(x, source=z)
    copied = copy.deepcopy(block)
    check_shared(copied)
    check_close(block(x, source=z), y)  # the copy's changes are its own
    file = tmp_path / "block.safetensors"
    safetensors.torch.save_file(block.state_dict(), file)
    for assign in (False, True):
        fresh = hw.attention.MergedAttention(KINDS["plain"]).double()
        fresh.load_state_dict(safetensors.torch.load_file(file), strict=True, assign=assign)
        check_close(fresh(x, source=z), y)
        check_shared(fresh)
    check_shared(copy.deepcopy(block).to(torch.float32).to(torch.bfloat16).to(torch.float64))
    empty = copy.deepcopy(block).to("meta").to_empty(device="cpu")
    empty.load_state_dict(block.state_dict())
    check_close(empty(x, source=z), y)
    check_shared(empty)


# --- at the door ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            base(source=13),
            "W_V projects the source and x, but their widths are 13 and 10; use source=10",
        ),
        (
            base(project=hw.parts.MLAProjection(rank=8, rope=2)),
            r"MLAProjection has no value projection W_V; use project LinearProjection\(\)",
        ),
        (base(project=hw.parts.Collaborative()), "Collaborative has no value projection"),
        (base(project=hw.parts.Overlapping(1), vdim=6), "Overlapping has no value projection"),
        (base(heads=3, modifiers=(hw.parts.Differential(),)), "differential combines rows"),
        (base(modifiers=(hw.parts.TalkingHeads(heads=5),)), "6 score heads are mixed to 5 rows"),
        (base(modifiers=(Doubled(),)), "doubled changes values"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value.project).__name__,
)
def test_specs_without_a_mean_are_refused(spec: hw.AttentionSpec, words: str):
    with pytest.raises(hw.SpecError, match=words):
        hw.attention.MergedAttention(spec)


def test_a_refused_call_leaves_the_cache_as_it_was():
    block, (x, z) = built(KINDS["plain"]), numbers()
    cache = block.cache(batch=BATCH, capacity=1)
    with pytest.raises(ValueError, match="source has 2 rows but x has 3"):
        block(x, source=z[:2], cache=cache)
    with pytest.raises(ValueError, match="made for another spec"):
        block(
            x,
            source=z,
            cache=hw.Attention(base(pattern="causal()")).double().cache(batch=BATCH, capacity=9),
        )
    with pytest.raises(ValueError, match="x has shape"):
        block(x[0], source=z, cache=cache)
    assert cache.used == 0
    with torch.no_grad():
        check_close(block(x, source=z, cache=cache), block(x, source=z))


def test_autocast_decodes_from_its_cache():
    """A memory of bfloat16 is read by a decoder whose own tokens are float32; outside autocast that
    is refused.
    """
    block, (x, z) = built(KINDS["grouped"]).float(), (t.float() for t in numbers())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        memory, cache = block.project_source(z), block.cache(batch=BATCH, capacity=1)
        steps = torch.cat([block(token, source=memory, cache=cache) for token in x.split(1, 1)], 1)
        whole = block(x, source=memory)
    exact = block(x, source=z)
    for y in (steps, whole):
        assert (y - exact).abs().max() < 0.03 * exact.abs().max()
    with pytest.raises(
        ValueError, match=r"source was projected in torch.bfloat16 on cpu but x is torch.float32"
    ):
        block(x, source=memory)


@pytest.mark.compile
def test_one_graph_holds_the_whole_block():
    block, (x, z) = built(KINDS["grouped"]), numbers()
    torch._dynamo.reset()
    check_close(
        torch.compile(block, fullgraph=True, backend="eager")(x, source=z), block(x, source=z)
    )
