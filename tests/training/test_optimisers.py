"""Muon and SGD against their formulas in float64, and against torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import headwise as hw
from headwise.models.distributed import Parallelism
from headwise.models.model_spec import ExpertsSpec, FeedForwardSpec, ModelSpec, StackSpec
from headwise.training import Recipe, optimisers
from headwise.training.run_setup import check_ranks
from headwise.training.training_run import read_checkpoint
from headwise.util.errors import SpecError
from support.small_training import CrashingLogger, Echo, short_recipe


def test_sgd_is_its_formula():
    recipe = Recipe(lr=0.1, optimiser="sgd", momentum=0.8, weight_decay=0.3)
    start, kinds = np.random.default_rng(0).normal(size=(2, 5)), ("feed, decayed", "norm, kept")
    named = {kind: nn.Parameter(torch.tensor(row)) for kind, row in zip(kinds, start, strict=True)}
    sgd = optimisers.SGDOptimiser({kind: {kind: p} for kind, p in named.items()}, recipe)
    w, b = start.copy(), np.zeros((2, 5))
    for step in range(1, 5):
        rate, g = 0.1 / step, np.random.default_rng(step).normal(size=(2, 5))
        b = 0.8 * b + g + np.array([[0.3], [0.0]]) * w
        w = w - rate * b
        for row, parameter in enumerate(named.values()):
            parameter.grad = torch.tensor(g[row])
        sgd.step(rate)
    np.testing.assert_allclose(np.stack([p.detach().numpy() for p in named.values()]), w, rtol=1e-9)


class Experts(Echo):
    """The echo task for a model with two experts in its feed-forward layer."""

    def model(self) -> ModelSpec:
        plain = super().model()
        (stack,) = plain.stacks
        block = replace(stack.layers[0], feed=ExpertsSpec(FeedForwardSpec(13), count=2, active=1))
        return replace(
            plain, stacks=(StackSpec.from_blocks("decoder", 8, [block], embedding=stack.embedding),)
        )


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """Five steps of X <- a X + (b A + c A^2) X with A = X X^T (Jordan, 2024), in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / max(np.linalg.norm(x), 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def test_muon_is_its_formula_for_matrices_and_adamw_for_the_rest():
    """Against float64; torch orthogonalises in bfloat16, so an update is known to about a hundredth
    of its size.
    """
    task = Experts()
    described, recipe = (
        task.model(),
        Recipe(lr=0.05, optimiser="muon", momentum=0.9, weight_decay=0.2),
    )
    generator = torch.Generator().manual_seed(0)
    start = {
        name: torch.randn(shape, generator=generator) for name, shape in described.shapes().items()
    }
    named = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    groups = optimisers.group_parameters(named, described, "matrices")
    muon = optimisers.make_optimiser(groups, recipe, described)
    plain = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    adamw = optimisers.AdamWOptimiser(
        optimisers.group_parameters(plain, described, "matrices"), recipe
    )
    matrices = {
        name for name, weight in described.params().items() if optimisers.is_hidden_matrix(weight)
    }
    assert {name.partition(".0.")[2] for name in matrices} >= {
        "attention.project.q",
        "feed.each.up",
        "feed.each.down",
    }
    assert not any("embedding" in name or "head" in name for name in matrices)
    expected = {name: start[name].double().numpy() for name in matrices}
    momenta = {name: np.zeros(start[name].shape) for name in matrices}
    for step in range(1, 4):
        gradients = {
            name: torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()
        }
        for parameters in (named, plain):
            for name, parameter in parameters.items():
                parameter.grad = gradients[name].clone()
        muon.step(0.05 / step)
        adamw.step(0.05 / step)
        for name in matrices:
            g = gradients[name].double().numpy()
            momenta[name] = 0.9 * momenta[name] + 0.1 * g
            blended = 0.1 * g + 0.9 * momenta[name]
            each = blended if blended.ndim == 3 else blended[None]
            update = np.stack([0.2 * max(one.shape) ** 0.5 * newton_schulz(one) for one in each])
            expected[name] = expected[name] * (
                1 - 0.05 / step * 0.2
            ) - 0.05 / step * update.reshape(g.shape)
    for name in matrices:
        moved = np.abs(expected[name] - start[name].numpy()).max()
        np.testing.assert_allclose(named[name].detach().numpy(), expected[name], atol=0.03 * moved)
    for name in named.keys() - matrices:
        assert torch.equal(named[name], plain[name]), name


@pytest.mark.parametrize("name", ["muon", "sgd"])
def test_a_run_with_any_optimiser_resumes_with_the_same_bits(name: str, tmp_path: Path):
    recipe = short_recipe(optimiser=name, dropout=0.1)
    hw.train(Experts(), recipe=recipe, out=tmp_path / "whole")
    with pytest.raises(RuntimeError, match="a crash"):
        hw.train(Experts(), recipe=recipe, out=tmp_path / "resumed", loggers=[CrashingLogger(5)])
    hw.train(Experts(), recipe=recipe, out=tmp_path / "resumed", resume="allowed")
    whole, resumed = (
        read_checkpoint(tmp_path / folder / "checkpoint" / "0000000006.safetensors").tensors
        for folder in ("whole", "resumed")
    )
    assert whole.keys() == resumed.keys()
    assert any("momentum_buffer" in name for name in whole)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_muon_is_refused_where_ranks_hold_parts_of_matrices():
    class Ranks:
        parallelism = Parallelism(data=1, shards=2)
        num_data_shards, size = 2, 2

    with pytest.raises(
        SpecError,
        match=r"optimiser='muon' needs whole matrices on every rank, and .*shards=2 divides",
    ):
        check_ranks(Recipe(optimiser="muon"), Ranks())  # pyright: ignore[reportArgumentType] - all that is read
