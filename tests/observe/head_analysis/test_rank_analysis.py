"""Effective dimensions of heads and ranks of their scores, against full singular values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import headwise as hw
from headwise.observe.head_analysis.rank_analysis import (
    count_dims,
    effective_rank,
    measure_qk_spectra,
)
from headwise.report.render import to_plain
from headwise.util.errors import SpecError
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
    assert (found.heads[0].most, found.summed.most) == (5, min(20, 5 * kv))


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
        *(4.9, 5.9, 5.0, 4.9, 4.2),
    ]
    first = found[0]
    assert first.heads[0].chance == pytest.approx(6.7, abs=0.3)
    assert first.summed.chance == pytest.approx(17.8, abs=0.5)
    assert first.caveats == ("Rotary() changes q and k token by token",)
    assert to_plain(first)["summed"]["most"] == 32


def test_layers_without_such_products_have_no_spectrum():
    torch.manual_seed(0)
    odd = hw.Attention(hw.design(model=20, heads=4, similarity=hw.parts.Additive()))
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
    assert effective_rank(torch.tensor(matrix)).item() == pytest.approx(expected[1])
    assert effective_rank(torch.zeros(3, 3)).item() == 0
