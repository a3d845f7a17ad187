"""The layer and the inputs of the example that a test is about, by its `name`."""

from __future__ import annotations

import pytest
from torch import Tensor

import headwise as hw
from support import layer_cases as cases


@pytest.fixture
def spec(name: str) -> hw.AttentionSpec:
    return cases.EVERY[name]


@pytest.fixture
def layer(spec: hw.AttentionSpec) -> hw.Attention:
    return cases.layer(spec)


@pytest.fixture
def tensors(spec: hw.AttentionSpec) -> tuple[Tensor, Tensor | None]:
    return cases.tensors(spec)


@pytest.fixture
def x(tensors: tuple[Tensor, Tensor | None]) -> Tensor:
    return tensors[0]


@pytest.fixture
def z(tensors: tuple[Tensor, Tensor | None]) -> Tensor | None:
    return tensors[1]
