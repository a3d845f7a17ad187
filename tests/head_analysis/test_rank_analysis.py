"""Effective dimensions of heads and ranks of their scores, against full singular values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import headwise as hw
from headwise.errors import SpecError
from headwise.head_analysis.rank_analysis import (
    count_dims,
    effective_rank,
    measure_qk_spectra,
    measure_score_ranks,
    stable_rank,
)
from support.number_examples import make_examples, small_gpt2
from support.stories_model import write_stories_folder

Array = NDArray[np.float64]


def num_singular_values(matrix: Array) -> int:
    """How many singular values hold 90 % of the sum of squares, counted one by one."""
    power = np.linalg.svd(matrix, compute_uv=False) ** 2
    for count in range(1, len(power) + 1):
        if power[:count].sum() >= 0.9 * power.sum() - 1e-12:
            return count
    return 0


def grouped(kv: int = 2) -> Any:
    """One layer of 20 channels with 4 heads."""
    torch.manual_seed(1)
    return hw.Attention(hw.design(model=20, heads=4, kv=kv))


@pytest.mark.parametrize("kv", [4, 2, 1])
def test_dims_are_those_of_the_full_products(kv: int):
    layer = grouped(kv)
    (found,) = measure_qk_spectra(torch.nn.ModuleList([layer]))
    q, k = (
        layer.weights["project"][side].detach().double().numpy().reshape(-1, 5, 20) for side in "qk"
    )
    each = [q[head].T @ k[head * kv // 4] for head in range(4)]
    assert [one.dims for one in found.heads] == [num_singular_values(one) for one in each]
    assert found.summed.dims == num_singular_values(np.sum(each, 0))
    assert found.queries.dims == num_singular_values(q.reshape(-1, 20))
    assert found.keys.dims == num_singular_values(k.reshape(-1, 20))
    assert (found.heads[0].most, found.summed.most, found.keys.most) == (
        5,
        min(20, 5 * kv),
        min(20, 5 * kv),
    )


def test_the_gaussian_baseline_has_the_scale_and_key_sharing_of_the_model():
    for kv in (4, 1):
        draw = np.random.default_rng(0)
        summed: list[int] = []
        for _ in range(40):
            keys = [draw.normal(size=(5, 20)) for _ in range(kv)]
            each = [draw.normal(size=(20, 5)) @ keys[head * kv // 4] for head in range(4)]
            summed.append(num_singular_values(np.sum(each, 0)))
        (found,) = measure_qk_spectra(torch.nn.ModuleList([grouped(kv)]), num_draws=20)
        assert found.summed.chance == pytest.approx(np.mean(summed), abs=0.7)


def test_the_edge_of_a_share_is_inside():
    assert count_dims(torch.ones(10)) == 9
    assert count_dims(torch.tensor([3.0, 0, 0])) == 1
    assert count_dims(torch.zeros(3)) == 0
    assert count_dims(torch.tensor([2.0, 1.0]), 0.8) == 1


def test_spectra_of_a_published_model_equal_the_published_ones(shared: Path, tmp_path: Path):
    data = shared / "data" / "model_stories260k"
    net = hw.load(write_stories_folder(data, tmp_path / "stories260K"))
    found = measure_qk_spectra(net)
    assert [one.summed.dims for one in found] == [10, 12, 10, 9, 7]
    assert [round(np.mean([head.dims for head in one.heads]), 1) for one in found] == [
        4.9,
        5.9,
        5.0,
        4.9,
        4.2,
    ]
    assert {one.queries.dims for one in found} <= set(range(14, 19))
    first = found[0]
    assert first.heads[0].chance == pytest.approx(6.7, abs=0.3)
    assert first.summed.chance == pytest.approx(17.8, abs=0.5)
    assert first.queries.chance == pytest.approx(33, abs=1)
    assert first.caveats == ("Rotary() changes q and k token by token",)
    assert first.data["summed"]["most"] == 32


def test_layers_without_such_products_have_no_spectrum():
    torch.manual_seed(0)
    odd = hw.Attention(hw.design(model=20, heads=4, similarity=hw.Additive()))
    with pytest.raises(SpecError, match="which is not a product of W_Q and W_K"):
        measure_qk_spectra(torch.nn.ModuleList([odd]))
    assert len(measure_qk_spectra(torch.nn.ModuleList([odd, grouped()]))) == 1


# --- ranks of scores ------------------------------------------------------------------------------


def ranks(matrix: Array) -> tuple[float, float]:
    values = np.linalg.svd(matrix, compute_uv=False)
    share = values / values.sum()
    share = share[share > 0]
    return float((values**2).sum() / values[0] ** 2), float(np.exp(-(share * np.log(share)).sum()))


def test_ranks_of_matrices():
    matrix = np.random.default_rng(0).normal(size=(9, 7))
    expected = ranks(matrix)
    assert stable_rank(torch.tensor(matrix)).item() == pytest.approx(expected[0])
    assert effective_rank(torch.tensor(matrix)).item() == pytest.approx(expected[1])
    assert stable_rank(torch.zeros(3, 3)).item() == effective_rank(torch.zeros(3, 3)).item() == 0


def test_scores_and_weights_of_a_model():
    net: Any = small_gpt2()
    texts = make_examples(3)
    values = {(one.site, one.head, one.stage): one for one in measure_score_ranks(net, texts)}
    expected: dict[str, list[tuple[float, float]]] = {"q": [], "weights": []}
    for text in texts:
        probe = hw.Probe("q", "k", "weights")
        net.probes = {"decoder.1.attention": probe}
        with torch.no_grad():
            net(text.inputs["x"])
        net.probes = {}
        q, k = (probe.tensors[side][0, :, 2].double().numpy() for side in "qk")
        expected["q"].append(ranks(q @ k.T))
        expected["weights"].append(ranks(probe.tensors["weights"][0, 2].double().numpy()))
    for stage, key in (("scores", "q"), ("weights", "weights")):
        one = values["decoder.1.attention", 2, stage]
        stable, effective = np.mean(expected[key], 0)
        assert one.stable.value == pytest.approx(stable, rel=1e-4)
        assert one.effective.value == pytest.approx(effective, rel=1e-3)
    assert all(
        one.effective.value <= one.bound == 5 for one in values.values() if one.stage == "scores"
    )
    assert not any(one.stage == "mixed" for one in values.values())


def test_mixing_heads_lifts_the_rank_of_scores():
    from headwise.model_spec import BlockSpec, EmbeddingSpec, ModelSpec, OutputHeadSpec, StackSpec

    spec = hw.design(model=20, heads=5, dim=2, modifiers=(hw.TalkingHeads(),))
    stack = StackSpec.from_blocks(
        "encoder", 20, [BlockSpec(spec, feed=None)], embedding=EmbeddingSpec(29)
    )
    net = hw.build(
        ModelSpec("mixed", "encoder", (stack,), (OutputHeadSpec("tokens", 29),)), seed=0
    ).eval()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "talking" in name:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
                )
    score_ranks = measure_score_ranks(net, make_examples(3))
    before, mixed = (
        np.mean([one.effective.value for one in score_ranks if one.stage == stage])
        for stage in ("scores", "mixed")
    )
    assert (
        max(one.effective.value for one in score_ranks if one.stage == "scores") <= 2 + 1e-3 < mixed
    )
    assert mixed > before


def test_ranks_of_models_of_others():
    pytest.importorskip("transformers")
    from support.transformers_models import ZOO

    model, texts = ZOO["gpt2"].build(), make_examples(3, "input_ids")
    values = {(one.site, one.head, one.stage): one for one in measure_score_ranks(model, texts)}
    with torch.no_grad():
        results = [
            model(**one.inputs, output_attentions=True).attentions[1][0, 3].double().numpy()
            for one in texts
        ]
    one = values["decoder.1.attention", 3, "weights"]
    assert one.stable.value == pytest.approx(
        np.mean([ranks(weights)[0] for weights in results]), rel=1e-4
    )
    assert values["decoder.1.attention", 3, "scores"].effective.value <= 8


def test_unsupported_models_are_refused():
    with pytest.raises(ValueError, match="Linear has no attention that can be observed"):
        measure_score_ranks(torch.nn.Linear(2, 2), make_examples(2))
    with pytest.raises(ValueError, match="cannot measure ranks without texts; give at least two"):
        measure_score_ranks(small_gpt2(), [])
