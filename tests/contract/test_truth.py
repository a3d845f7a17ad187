"""Output and every gradient are the reference's: every example, every way to fill a batch, every
backend.
"""

from __future__ import annotations

import copy

import pytest
import torch

import headwise as hw
from headwise.attention import reference
from headwise.attention.attention_call import PositionLimit
from headwise.attention.interfaces import ScoreStep
from headwise.costs import part_checks
from support import layer_cases as cases
from support.layer_cases import EVERY, EVERY_CASE, EXAMPLES, ONE_SEQUENCE, check_close
from support.layer_checks import check_comparisons, layer_gradients


@pytest.mark.parametrize("name", EVERY_CASE)
def test_output_is_the_references(name, spec, layer, x, z):
    modes = (
        cases.sequence_infos(x)
        if name in EXAMPLES
        else {"packed": cases.sequence_infos(x)["packed"]}
    )
    for tokens in modes.values():
        expected = reference.reference_attention(layer, x, source=z, tokens=tokens)
        for backend in cases.supporting_backends(spec):
            layer.backend_name = backend
            check_close(layer(x, source=z, sequence=tokens), expected)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_source_is_read_as_the_reference_reads_it(name):
    try:
        spec = cases.as_cross_attention(EXAMPLES[name])
    except hw.SpecError as reason:
        pytest.skip(f"not defined for a source: {reason}")
    layer = cases.layer(spec)
    x, z = cases.tensors(spec)
    sequence = hw.SequenceInfo.from_batch(z, lengths=[11, 5, 0])
    expected = reference.reference_attention(layer, x, source=z, source_tokens=sequence)
    keep = layer.project_source(z, sequence=sequence)
    for backend in cases.supporting_backends(spec):
        layer.backend_name = backend
        check_close(layer(x, source=keep), expected)
    check_close(layer(x[:, :1], source=keep), expected[:, :1])
    check_close(layer(x, source=z), reference.reference_attention(layer, x, source=z))


@pytest.mark.parametrize("name", EVERY_CASE)
def test_gradients_are_the_references(name):
    check_comparisons(part_checks.compare_gradients(EVERY[name]))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_mask_of_the_callers_own_is_obeyed(spec, layer, x, z):
    mask = (
        torch.rand(cases.BATCH, 1, cases.TOKENS, cases.TOKENS if z is None else cases.SOURCE) < 0.6
    )
    check_close(
        layer(x, source=z, mask=mask), reference.reference_attention(layer, x, source=z, mask=mask)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_low_precision_errs_no_more_than_twice_as_dense(name, dtype):
    spec = EXAMPLES[name]
    exact = cases.layer(spec)
    coarse = copy.deepcopy(exact).to(dtype)
    exact.load_state_dict(
        {k: v.double() if v.is_floating_point() else v for k, v in coarse.state_dict().items()}
    )
    x, z = cases.tensors(spec, dtype)
    exact.backend_name = "dense"  # test_output_is_the_references compares it with the reference
    truth = exact(x.double(), source=None if z is None else z.double())

    def error(backend):
        coarse.backend_name = backend
        return (coarse(x, source=z).double() - truth).abs().max()

    limit = 2 * error("dense") + 4 * torch.finfo(dtype).eps * truth.abs().max()
    assert limit < 0.2 * truth.abs().max() + 1e-3
    for backend in cases.supporting_backends(spec, dtype=dtype):
        assert error(backend) <= limit, backend


def knows_places(spec) -> bool:
    """True if positions were learned one by one, or the pattern allows keys by their positions."""
    pairs = [(i, j) for i in range(cases.TOKENS) for j in range(cases.SOURCE)]
    patterns = (
        spec.pattern.patterns if isinstance(spec.pattern, hw.patterns.PerHead) else (spec.pattern,)
    )
    return PositionLimit.from_spec(spec) is not None or any(
        one.allows(i, j) != one.allows(i + 1000, j + 1000) for one in patterns for i, j in pairs
    )


@pytest.mark.parametrize("name", [name for name in EXAMPLES if not knows_places(EXAMPLES[name])])
def test_only_distances_matter(spec, layer, x, z):
    place = torch.arange(cases.TOKENS)[None]
    moved = hw.SequenceInfo(place + 1000, torch.zeros_like(place))
    if z is None:
        check_close(layer(x, sequence=moved), layer(x), rtol=1e-8, atol=1e-9)
        return
    far = torch.arange(cases.SOURCE)[None] + 1000
    keep = layer.project_source(z, sequence=hw.SequenceInfo(far, torch.zeros_like(far)))
    check_close(layer(x, source=keep, sequence=moved), layer(x, source=z), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ONE_SEQUENCE)
def test_packed_documents_do_not_meet(spec, layer, x):
    together = layer(
        x,
        sequence=hw.SequenceInfo.from_batch(
            x, segments=torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * cases.BATCH)
        ),
    )
    separate = torch.cat([layer(x[:, :3]), layer(x[:, 3:])], 1)
    check_close(together, separate)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_query_with_nothing_to_read_reads_zero(spec, layer, x, z):
    x.requires_grad_()
    keys = cases.TOKENS if z is None else cases.SOURCE
    probe = hw.Probe("heads")
    mask = torch.ones(cases.BATCH, 1, cases.TOKENS, keys, dtype=torch.bool)
    mask[1, :, 2] = False
    y = layer(x, source=z, mask=mask, probe=probe)
    assert (probe.tensors["heads"][1, 2] == 0).all()
    for grad in layer_gradients(layer, y, x).values():
        assert grad.isfinite().all()
    if z is None:
        blind = layer(x, sequence=hw.SequenceInfo.from_batch(x, lengths=[7, 3, 0]))
        check_close(blind[2], layer.merge_heads(torch.zeros_like(probe.tensors["heads"]))[2])


class Nowhere:
    """A pair of tokens that does not say where they stand."""

    @property
    def i(self):
        raise AssertionError("a part that is not positional asked where a query stands")

    @property
    def j(self):
        raise AssertionError("a part that is not positional asked where a key stands")

    def take(self, factors, index):
        return factors[..., index]


@pytest.mark.parametrize("name", EXAMPLES)
def test_parts_that_read_positions_declare_positional(name):
    spec = EXAMPLES[name]
    layer = cases.layer(spec)
    for step, part in spec.parts_of(ScoreStep):
        if not part.positional:
            p = layer.get_submodule(step).broadcast_over_scores()
            scores = torch.randn(
                cases.BATCH, spec.heads.q, cases.TOKENS, cases.SOURCE, dtype=torch.float64
            )
            assert part.score(scores, Nowhere(), None, p).shape == scores.shape
    x, _ = cases.tensors(spec)
    if not spec.positional and spec.source is None:
        place = torch.randperm(50)[: cases.TOKENS][None]
        moved = hw.SequenceInfo(place, torch.zeros_like(place))
        check_close(layer(x, sequence=moved), layer(x))
