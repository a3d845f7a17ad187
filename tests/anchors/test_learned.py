"""Learned scores: synthesizers by their formulas, and the positions that they do not know."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import headwise as hw
from headwise import costs
from headwise.attention.attention_call import PositionLimit
from support import layer_cases as cases
from support.layer_cases import base, check_close
from support.layer_checks import decode_in_chunks

KINDS = {
    "random": hw.parts.LearnedScores(length=9),
    "factorised": hw.parts.LearnedScores(length=9, kind="factorised", rank=3),
    "dense": hw.parts.LearnedScores(length=9, kind="dense"),
}
PLACES = torch.tensor([[1, 2, 3, 5, 6, 7, 8]])


def rows(kind, w, x, places):
    """R_h[i_t, :] of each query, [6, B, T, 9], by section 3.1 and 3.2 of 2005.00743."""
    w = {name.removeprefix("learned_scores."): value for name, value in w.items()}
    if kind == "random":
        return np.stack([np.stack([table[places]] * len(x)) for table in w["table"]])
    if kind == "factorised":
        tables = [a @ b.T for a, b in zip(w["asking"], w["told"], strict=True)]
        return np.stack([np.stack([table[places]] * len(x)) for table in tables])
    by_head = w["hidden"].reshape(6, 4, 10), w["hidden_bias"].reshape(6, 4), w["out"], w["out_bias"]
    return np.stack(
        [np.maximum(x @ w1.T + b1, 0) @ w2 + b2 for w1, b1, w2, b2 in zip(*by_head, strict=True)]
    )


@pytest.mark.parametrize(
    "project", [hw.parts.LinearProjection(), hw.parts.ValueProjection()], ids=["mixture", "pure"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_synthesizers_by_their_formulas(kind, project):
    layer = cases.layer(base(project=project, modifiers=(KINDS[kind],), pattern="causal"))
    w = {name: tensor.numpy() for name, tensor in layer.state_dict().items()}
    x, _ = cases.tensors(layer.spec)
    result, places = x.numpy(), PLACES[0].numpy()
    s = rows(kind, w, result, places)[..., places]
    if project == hw.parts.LinearProjection():
        q, k = (
            np.einsum("btd,hkd->hbtk", result, w[f"project.{side}"].reshape(6, 4, 10))
            for side in "qk"
        )
        s = s + q @ k.transpose(0, 1, 3, 2) / 2
    e = np.where(np.tril(np.ones((7, 7), bool)), np.exp(s - s.max(-1, keepdims=True)), 0.0)
    o = (
        e
        / e.sum(-1, keepdims=True)
        @ np.einsum("btd,hvd->hbtv", result, w["project.v"].reshape(6, 4, 10))
    )
    y = np.moveaxis(o, 0, 2).reshape(3, 7, 24) @ w["output.o"].T
    check_close(
        layer(x, sequence=hw.SequenceInfo(PLACES, torch.zeros_like(PLACES))), torch.from_numpy(y)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_scores_that_are_zero_are_an_average(kind):
    layer = cases.layer(
        base(project=hw.parts.ValueProjection(), modifiers=(KINDS[kind],), pattern="window(3)")
    )
    average = hw.Attention(
        base(
            project=hw.parts.ValueProjection(),
            normaliser=hw.parts.AverageNormaliser(),
            pattern="window(3)",
        )
    ).double()
    average.load_state_dict({k: v for k, v in layer.state_dict().items() if "learned" not in k})
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if name in (
                "learned_scores.table",
                "learned_scores.asking",
                "learned_scores.out",
                "learned_scores.out_bias",
            ):
                weight.zero_()
    x, _ = cases.tensors(layer.spec)
    check_close(layer(x), average(x))


def test_a_table_breaks_even_with_queries_and_keys():
    """h T^2 against 2 d h d_k, so T = sqrt(2 d d_k): 12 positions for d = 18 and d_k = 4."""
    plain = hw.design(model=18, heads=5, dim=4)
    for length, cheaper in ((11, True), (12, None), (13, False)):
        table = hw.design(
            model=18,
            heads=5,
            dim=4,
            project=hw.parts.ValueProjection(),
            modifiers=(hw.parts.LearnedScores(length=length),),
        )
        difference = costs.count_parameters(plain) - costs.count_parameters(table)
        assert difference == 2 * 18 * 5 * 4 - 5 * length**2
        assert (difference == 0) if cheaper is None else ((difference > 0) == cheaper)


def test_the_papers_sizes():
    """2005.00743, table 1, at h d_k = d: random h N^2, factorised 2 h N k, dense d^2 + d N beside
    its biases.
    """
    sizes = {"random": 2 * 9**2, "factorised": 2 * 2 * 9 * 3, "dense": 10**2 + 10 * 9 + 10 + 2 * 9}
    for kind, size in sizes.items():
        spec = hw.design(model=10, heads=2, modifiers=(KINDS[kind],))
        assert (
            costs.count_parameters(spec) - costs.count_parameters(hw.design(model=10, heads=2))
            == size
        )


# --- what it does not know ------------------------------------------------------------------------


def learned(**options) -> hw.Attention:
    """A layer that knows seven positions."""
    return cases.layer(
        base(**({"modifiers": (hw.parts.LearnedScores(length=7),), "pattern": "causal"} | options))
    )


def test_input_beyond_the_table_is_refused():
    layer, x = learned(), torch.randn(3, 8, 10, dtype=torch.float64)
    message = (
        r"LearnedScores\(length=7\) knows no position 7, its last one is 6; give it a length of "
        r"8, or give shorter input"
    )
    with pytest.raises(ValueError, match=message):
        layer(x)
    assert layer(x[:, :7]).isfinite().all()
    assert layer(x[:, :0]).shape == (3, 0, 10)
    assert PositionLimit.from_spec(layer.spec) == (7, "LearnedScores(length=7)")
    assert PositionLimit.from_spec(base()) is None
    both = base(modifiers=(hw.parts.LearnedScores(length=9), hw.parts.LearnedScores(length=8)))
    assert PositionLimit.from_spec(both) == (8, "LearnedScores(length=8)")
    with pytest.raises(ValueError, match=r"LearnedScores\(length=8\) knows no position 8"):
        hw.Attention(both).double()(torch.randn(1, 9, 10).double())


def test_positions_are_what_counts_and_not_how_many_tokens_there_are():
    layer, x = learned(), torch.randn(3, 12, 10, dtype=torch.float64)
    padded = hw.SequenceInfo.from_batch(x, lengths=[7, 2, 0])
    check_close(layer(x, sequence=padded)[0, :7], layer(x[:1, :7])[0])
    packed = hw.SequenceInfo.from_batch(x, segments=torch.tensor([[0] * 6 + [1] * 6] * 3))
    check_close(layer(x, sequence=packed)[:, 6:], layer(x[:, 6:]))
    far = torch.arange(12)[None].expand(3, -1) + 90
    far[:, :4] = torch.arange(4)
    beyond = hw.SequenceInfo(far, torch.tensor([[0] * 4 + [-1] * 8] * 3))
    check_close(layer(x, sequence=beyond)[:, :4], layer(x[:, :4]))
    with pytest.raises(ValueError, match="knows no position 7"):
        layer(x, sequence=hw.SequenceInfo.from_batch(x, lengths=[2, 8, 0]))


@pytest.mark.parametrize("ragged", [False, True])
def test_a_refused_step_leaves_the_cache_as_it_was(ragged):
    layer, x = learned(), torch.randn(2, 8, 10, dtype=torch.float64)
    cache = layer.cache(batch=2, capacity=40)
    layer(
        x[:, :4],
        cache=cache,
        sequence=hw.SequenceInfo.from_batch(x[:, :4], lengths=[4, 3]) if ragged else None,
    )
    before = (
        cache.used,
        cache.tokens.position.clone(),
        {k: v.clone() for k, v in cache.entry.items()},
    )
    with pytest.raises(ValueError, match="knows no position 7"):
        layer(x[:, 4:8], cache=cache)
    assert cache.used == before[0]
    assert torch.equal(cache.tokens.position, before[1])
    assert all(torch.equal(cache.entry[k], v) for k, v in before[2].items())
    steps = decode_in_chunks(layer, x[:, 4:7], (1, 1, 1), cache)
    check_close(steps[0], layer(x[:1, :7])[0, 4:])
    if not ragged:
        with pytest.raises(ValueError, match="knows no position 7"):
            layer(x[:, 7:], cache=cache)


def test_a_source_beyond_the_table_is_refused():
    layer = learned(pattern="full", source=13)
    x, z = torch.randn(3, 5, 10, dtype=torch.float64), torch.randn(3, 8, 13, dtype=torch.float64)
    for call in (lambda: layer.project_source(z), lambda: layer(x, source=z)):
        with pytest.raises(ValueError, match="knows no position 7"):
            call()
    sequence = layer.project_source(z, sequence=hw.SequenceInfo.from_batch(z, lengths=[7, 3, 1]))
    check_close(layer(x, source=sequence)[1], layer(x[1:2], source=z[1:2, :3])[0])


@pytest.mark.compile
def test_a_compiled_call_refuses_what_it_knows_without_asking():
    layer, x = learned(), torch.randn(3, 8, 10, dtype=torch.float64)
    expected = layer(x[:, :7])
    torch._dynamo.reset()
    traced = torch.compile(layer, fullgraph=True, backend="eager")
    check_close(traced(x[:, :7]), expected)
    check_close(
        traced(x, sequence=hw.SequenceInfo.from_batch(x, lengths=[7, 7, 7]))[:, :7], expected
    )
    with pytest.raises(Exception, match="knows no position 7"):
        traced(x)
