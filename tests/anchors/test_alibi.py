"""ALiBi against the numbers its authors print: slopes per head, and a bias that falls with
distance.
"""

import pytest
import torch

import headwise as hw
from headwise.attention.parts.relative_position_bias import alibi_slopes

PUBLISHED = {
    8: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    12: [
        2**-1,
        2**-2,
        2**-3,
        2**-4,
        2**-5,
        2**-6,
        2**-7,
        2**-8,
        2**-0.5,
        2**-1.5,
        2**-2.5,
        2**-3.5,
    ],
}


@pytest.mark.parametrize("heads", PUBLISHED)
def test_slopes_are_the_published_ones(heads):
    assert alibi_slopes(heads) == pytest.approx(PUBLISHED[heads])


def test_scores_fall_with_distance_by_the_slope():
    layer = hw.Attention(
        hw.design(model=16, heads=8, pattern="causal()", modifiers=(hw.parts.Alibi(),))
    ).double()
    with torch.no_grad():
        layer.project["q"].zero_()
    probe = hw.Probe("scores")
    layer(torch.randn(1, 5, 16, dtype=torch.float64), probe=probe)
    last = probe.tensors["scores"][0, :, 4]
    expected = torch.tensor(PUBLISHED[8], dtype=torch.float64)[:, None] * torch.tensor(
        [-4.0, -3, -2, -1, 0]
    )
    torch.testing.assert_close(last, expected, check_dtype=False)
