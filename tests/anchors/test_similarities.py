"""Comparisons other than products, each against its formula in numpy and
against those who use it.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import headwise as hw
from headwise import costs
from headwise.attention.parts import dot_product
from support import layer_cases as cases
from support.layer_cases import base, check_close

KEYS, VALUES, QUERY = (51.0, 56.0, 58.0), (40.0, 43.0, 48.0), 57.0
READ = {0.5: 45.5, 1.0: 45.49999993, 2.0: 45.465599, 5.0: 44.406018, 10.0: 43.873980}  # by width


def arrays(layer) -> dict[str, np.ndarray]:
    """The weights of a layer as numpy sees them."""
    return {name: tensor.numpy() for name, tensor in layer.state_dict().items()}


def softmax(s):
    """Over the last axis."""
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attended(w, x, compare, kv):
    """y of six heads of width 4 over kv key heads: `compare(h, q, k)` gives the scores [B, T, S] of
    head h.
    """
    heads = []
    for h in range(6):
        g = h * kv // 6
        q, k = x @ w["project.q"][4 * h : 4 * h + 4].T, x @ w["project.k"][4 * g : 4 * g + 4].T
        v = x @ w["project.v"][5 * g : 5 * g + 5].T
        heads.append(softmax(compare(h, q[:, :, None], k[:, None])) @ v)
    return np.concatenate(heads, -1) @ w["output.o"].T


# --- Additive -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", [1, 2, 6])
def test_additive_scores_by_their_formula(kv):
    """1409.0473, section A.1.2: v^T tanh(W_a s + U_a h), with the bias that the paper does not
    print.
    """
    layer = cases.layer(base(similarity=hw.parts.Additive(), kv=kv, vdim=5))
    w, (x, _) = arrays(layer), cases.tensors(layer.spec)
    v, b = w["similarity.v"], w["similarity.bias"]
    expected = attended(w, x.numpy(), lambda h, q, k: np.tanh(q + k + b[h]) @ v[h], kv)
    check_close(layer(x), torch.from_numpy(expected))


def test_one_additive_head_has_the_papers_parameters():
    hidden, state, annotations = 7, 10, 13
    spec = hw.design(
        model=state, heads=1, dim=hidden, source=annotations, similarity=hw.parts.Additive()
    )
    ours = [
        np.prod(shape)
        for name, shape in spec.shapes().items()
        if name not in ("project.v", "output.o")
    ]
    assert sum(ours) == hidden * state + hidden * annotations + hidden + hidden
    work = hw.costs.CallSize(1, 3, 11, 11)
    assert spec.core.flops(work.pairs) == 2 * 33 * (hidden + spec.heads.vdim)
    assert costs.count_parameters(spec) == sum(map(np.prod, spec.shapes().values()))


class Translator(nn.Module):
    """A GRU that reads its source at every step through `read(state, source)`, as 1409.0473
    decodes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(3, 5, batch_first=True, bidirectional=True, dtype=torch.float64)
        self.decoder = nn.GRUCell(10, 10, dtype=torch.float64)

    def forward(self, source, steps, reader):
        """The states of the decoder, fed with what it read: the reader is made once for the
        encoder's outputs.
        """
        read = reader(self.encoder(source)[0])
        state, states = torch.ones(len(source), 10, dtype=torch.float64), []
        for _ in range(steps):
            state = self.decoder(read(state), state)
            states.append(state)
        return torch.stack(states, 1)


def test_a_recurrent_decoder_reads_through_the_layer():
    lengths = [11, 5, 2]
    layer = cases.layer(
        hw.design(model=10, heads=1, dim=7, vdim=10, source=10, similarity=hw.parts.Additive())
    )
    with torch.no_grad():
        for name in ("project.v", "output.o"):
            layer.get_parameter(name).copy_(torch.eye(10))
    w = dict(layer.named_parameters())

    def ours(h_BSE):
        sequence = layer.project_source(
            h_BSE, sequence=hw.SequenceInfo.from_batch(h_BSE, lengths=lengths)
        )
        return lambda state: layer(state[:, None], source=sequence)[:, 0]

    def written_out(h_BSE):
        def read(state):
            rows = []
            for row, length in enumerate(lengths):
                h = h_BSE[row, :length]
                inner = w["project.q"] @ state[row] + h @ w["project.k"].T + w["similarity.bias"][0]
                rows.append((torch.tanh(inner) @ w["similarity.v"][0]).softmax(0) @ h)
            return torch.stack(rows)

        return read

    model, source = Translator(), torch.randn(3, 11, 3, dtype=torch.float64)
    grads = []
    for reader in (ours, written_out):
        states = model(source, 4, reader)
        loss = (
            states * torch.linspace(-1, 2, states.numel(), dtype=torch.float64).view_as(states)
        ).sum()
        grads.append(
            (
                states,
                *torch.autograd.grad(
                    loss, [*model.parameters(), w["project.q"], w["similarity.v"]]
                ),
            )
        )
    for mine, theirs in zip(*grads, strict=True):
        check_close(mine, theirs)
    assert all(grad.abs().max() > 0 for grad in grads[0])


@pytest.mark.parametrize("numbers", [1, 2 * 6 * 11 * 4 * 3])
def test_blocks_of_additive_queries_are_one_pass(numbers, monkeypatch):
    layer = cases.layer(base(similarity=hw.parts.Additive(), kv=2, pattern="causal"))
    x = torch.randn(2, 11, 10, dtype=torch.float64)
    expected = layer(x)
    monkeypatch.setattr(dot_product, "MAX_PAIR_NUMEL", numbers)
    check_close(layer(x), expected)


# --- Gaussian -------------------------------------------------------------------------------------


def regression(width, keys=KEYS, values=VALUES, dtype=torch.float64):
    """A layer that looks a number up among pairs of key and value, and the pairs as its source."""
    spec = hw.design(model=1, heads=1, dim=1, source=2, similarity=hw.parts.Gaussian(width=width))
    layer = hw.Attention(spec).to(dtype)
    reads = {"project.q": [1], "project.k": [1, 0], "project.v": [0, 1], "output.o": [1]}
    with torch.no_grad():
        for name, weight in reads.items():
            layer.get_parameter(name).copy_(torch.tensor([weight]))
    return layer, torch.tensor(list(zip(keys, values, strict=True)), dtype=dtype)[None]


def looked_up(query, width, **pairs) -> float:
    """What the query reads."""
    layer, source = regression(width, **pairs)
    return layer(torch.tensor([[[query]]], dtype=source.dtype), source=source).item()


@pytest.mark.parametrize("width", READ)
def test_soft_look_up(width):
    """f(57) from 51: 40, 56: 43, 58: 48 by kernels of five widths (Nadaraya 1964, Watson 1964)."""
    assert looked_up(QUERY, width) == pytest.approx(READ[width], rel=1e-8)
    by_hand = softmax(-((QUERY - np.array(KEYS)) ** 2) / (2 * width**2)) @ np.array(VALUES)
    assert looked_up(QUERY, width) == pytest.approx(by_hand, rel=1e-12)


def test_widths_run_from_the_nearest_key_to_the_average():
    for key, value in zip(KEYS, VALUES, strict=True):
        assert looked_up(key + 0.4, 1e-3) == value
    assert looked_up(QUERY, 1e9) == pytest.approx(sum(VALUES) / 3, rel=1e-12)
    reads = [looked_up(QUERY, width) for width in (0.5, 1.0, 2.0, 5.0, 10.0, 100.0)]
    assert all(before > after for before, after in pairwise(reads))


def test_gaussian_scores_by_their_formula():
    layer = cases.layer(base(similarity=hw.parts.Gaussian(width=1.7), kv=2, vdim=5))
    x, _ = cases.tensors(layer.spec)
    expected = attended(
        arrays(layer), x.numpy(), lambda h, q, k: -((q - k) ** 2).sum(-1) / (2 * 1.7**2), 2
    )
    check_close(layer(x), torch.from_numpy(expected))


def test_among_unit_keys_the_nearest_is_the_most_alike():
    """|q - k|^2 = |q|^2 + 1 - 2 q.k, and a softmax does not see |q|^2 + 1: only q.k / width^2 is
    left.
    """
    width, unit = 0.8, (hw.parts.QKNorm(kind="l2"),)
    near = cases.layer(base(similarity=hw.parts.Gaussian(width=width), modifiers=unit))
    alike = cases.layer(base(similarity=hw.parts.DotProduct(scale=1.0), modifiers=unit))
    alike.load_state_dict(near.state_dict())
    with torch.no_grad():
        alike.get_parameter("qk_norm.temperature").div_(width**2)
    x, _ = cases.tensors(near.spec)
    check_close(near(x), alike(x))


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_an_offset_of_all_tokens_costs_no_digits(offset):
    """In float32, whose square of 1e4 has steps of 8, more than all distances here together."""
    keys = torch.linspace(-2, 2, 9).add(offset)
    values = torch.linspace(0, 5, 9).sin()
    options = {"keys": keys.tolist(), "values": values.tolist()}
    queries = torch.tensor([-1.3, 0.1, 1.9]).add(offset)
    layer, source = regression(0.6, **options, dtype=torch.float32)
    judge, same = regression(0.6, **options)
    ours = layer(queries.view(1, 3, 1), source=source)
    check_close(ours, judge(queries.double().view(1, 3, 1), source=same), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("away", [1e3, 1e4, 1e6])
def test_far_tokens_that_nobody_reads_change_nothing(away):
    """In float32: a future token, padding, and the tokens of another document, as far off as they
    like.
    """
    layer = hw.Attention(base(similarity=hw.parts.Gaussian(), pattern="causal"))
    x = torch.randn(2, 7, 10)
    moved = x.clone()
    moved[:, 5:] = away
    with torch.no_grad():
        y = layer(x)
        assert torch.equal(layer(moved)[:, :5], y[:, :5])
        for tokens in (
            hw.SequenceInfo.from_batch(x, lengths=[5, 5]),
            hw.SequenceInfo.from_batch(x, segments=torch.tensor([[0] * 5 + [1] * 2] * 2)),
        ):
            assert torch.equal(
                layer(moved, sequence=tokens)[:, :5], layer(x, sequence=tokens)[:, :5]
            )


def test_clusters_far_apart_are_each_as_if_alone():
    spec = base(similarity=hw.parts.Gaussian(width=0.9))
    layer, judge = hw.Attention(spec), hw.Attention(spec).double()
    with torch.no_grad():
        layer.project["k"].copy_(layer.project["q"])
    judge.load_state_dict(layer.state_dict())
    x = torch.randn(1, 12, 10)
    x[:, ::2] += 256.0
    probe, result = hw.Probe("weights"), hw.Probe("weights")
    layer(x, probe=probe)
    judge(x.double(), probe=result)
    # of q and k, which have 1e-5 each
    assert (probe.tensors["weights"] - result.tensors["weights"]).abs().max() < 2e-4
    assert (result.tensors["weights"][..., ::2, 1::2] == 0).all()


@pytest.mark.parametrize("numbers", [1, 2 * 2 * 11 * 4 * 5])
def test_blocks_of_gaussian_queries_are_one_pass(numbers, monkeypatch):
    layer = cases.layer(base(similarity=hw.parts.Gaussian(width=1.3), kv=2, pattern="causal"))
    x = torch.randn(2, 11, 10, dtype=torch.float64)
    expected = layer(x)
    monkeypatch.setattr(dot_product, "MAX_PAIR_NUMEL", numbers)
    check_close(layer(x), expected)


def test_empty_slots_do_not_cost_digits_either():
    """Ragged rows decode among slots of zeros, 1e4 away from every key."""
    spec = hw.design(
        model=1, heads=1, dim=1, pattern="causal", similarity=hw.parts.Gaussian(width=0.6)
    )
    layer, judge = hw.Attention(spec), hw.Attention(spec).double()
    for built in (layer, judge):
        with torch.no_grad():
            for weight in built.parameters():
                weight.fill_(1.0)
    x = 1e4 + torch.linspace(0, 9, 24).sin().view(2, 12, 1)
    ours, truth = layer.cache(batch=2, capacity=500), judge.cache(batch=2, capacity=500)
    first = hw.SequenceInfo.from_batch(x[:, :6], lengths=[6, 2])
    with torch.no_grad():
        layer(x[:, :6], cache=ours, sequence=first)
        judge(x[:, :6].double(), cache=truth, sequence=first)
        for t in range(6, 12):
            step = x[:, t : t + 1]
            check_close(
                layer(step, cache=ours) - 1e4,
                judge(step.double(), cache=truth) - 1e4,
                rtol=0,
                atol=3e-3,
            )
