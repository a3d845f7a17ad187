"""The shape checker itself sees what it should."""

import pytest
import torch

from support.shape_checks import ShapeError, install_shape_checks, letters, with_shape_checks


def pair(q_BTK, k_BSK, place_BT):
    return q_BTK, k_BSK, place_BT


def test_letters_are_read_off_names():
    assert [letters(n) for n in ("q_BTHK", "o_B1HV", "rows", "kv_down")] == ["BTHK", "B1HV", "", ""]


@pytest.mark.parametrize(
    ("shapes", "fault"),
    [
        (((3, 7, 5), (3, 11, 5), (1, 7)), ""),
        (((3, 7, 5), (3, 11, 4), (1, 7)), "K=4"),
        (((3, 7, 5), (3, 11, 5), (3, 6)), "T=6"),
        (((3, 7), (3, 11, 5), (3, 7)), "not one axis for each"),
    ],
)
def test_a_wrong_shape_is_caught(shapes, fault):
    tensors = [torch.zeros(shape) for shape in shapes]
    if not fault:
        assert with_shape_checks(pair)(*tensors) == tuple(tensors)
        return
    with pytest.raises(ShapeError, match=fault):
        with_shape_checks(pair)(*tensors)


def test_the_package_carries_its_shapes_in_names(request):
    if not request.config.getoption("--shapes"):
        pytest.skip("runs where shapes are checked")
    assert install_shape_checks() >= 0
    import headwise as hw

    with pytest.raises(ShapeError, match="q_BHTK"):
        hw.Dot().scores(torch.zeros(2, 3), torch.zeros(2, 3, 5, 7), 1.0, None)
