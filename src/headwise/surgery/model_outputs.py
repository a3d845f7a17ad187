"""Outputs of a model and of some of its modules, and the check of a changed model by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..observe.inspect.model_inputs import ModelInputs
from ..util.errors import SpecError

TOLERANCE = 1e-4  # largest difference of outputs that must be equal, relative to the largest
NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})


def run_and_record(
    model: nn.Module,
    inputs: ModelInputs,
    paths: Sequence[str],
    tensors: Mapping[str, Tensor] = NO_TENSORS,
) -> list[Tensor]:
    """Return the outputs of the modules at `paths` in call order, then the model outputs.

    Model outputs alone prove nothing if they do not depend on the modules, as with a zero last
    layer. `tensors` replace parameters during the run.
    """
    recorded: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        # Weights of heads, which nn.MultiheadAttention returns after the output, are not compared.
        recorded.extend(_tensors(output)[:1])

    handles = [model.get_submodule(path).register_forward_hook(record) for path in paths]
    try:
        with torch.set_grad_enabled(any(one.requires_grad for one in tensors.values())):
            outputs = functional_call(model, dict(tensors), inputs.args, dict(inputs.kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return [*recorded, *_tensors(outputs)]


def largest_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference of two lists of tensors, relative to the largest value of each."""
    differences = [torch.zeros((), dtype=torch.float64)]
    for tensor, other in zip(actual, expected, strict=True):
        if other.is_floating_point() and other.numel():
            scale = other.abs().max().clamp_min(1e-30)
            differences.append(((tensor - other).abs().max() / scale).cpu().double())
    return float(torch.stack(differences).max())  # NaN if any is


def _tensors(output: Any) -> list[Tensor]:
    """All tensors of a model's output."""
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, (Mapping, tuple, list)):
        return []
    return list(chain.from_iterable(map(_tensors, values)))


class ResultCheck(NamedTuple):
    """Outputs that a changed model must have on the example, and words for messages."""

    change: str
    other: str
    remedy: str
    expected: Sequence[Tensor]
    inputs: ModelInputs
    paths: Sequence[str]

    def compare(self, after: nn.Module) -> float:
        """Return the relative difference of the changed model from the expected outputs; raises if
        it is large.
        """
        name = f"{self.change} {type(after).__name__}"
        try:
            actual = run_and_record(after, self.inputs, self.paths)
        except Exception as error:  # the model may raise anything
            message = " ".join(str(error).split())[:200]
            raise SpecError(f"the {name} cannot run: {message}; {self.remedy}") from error
        if [tensor.shape for tensor in actual] != [tensor.shape for tensor in self.expected]:
            raise SpecError(f"the outputs of the {name} have other shapes; {self.remedy}")
        difference = largest_difference(actual, self.expected)
        if not difference <= TOLERANCE:
            raise SpecError(
                f"the {name} differs from the {self.other} by {difference:.2g} of the largest "
                f"output; {self.remedy}"
            )
        return difference
