"""Runs of the bundled translator over held-out texts: its outputs, weights and measured heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from ..attention.interfaces.core_types import Probe
from ..models import Transformer
from ..observe.bundled_sample import load_sample_model
from ..observe.head_analysis.annotated_examples import ExampleReader
from ..observe.head_analysis.head_classes import classify_heads
from ..observe.head_analysis.head_measurement import measure_heads
from ..observe.head_analysis.head_table import HeadTable
from ..observe.head_analysis.rank_analysis import LayerSpectrum
from ..observe.head_analysis.word_alignment import AlignmentScores
from ..observe.inspect.hooks import record_modules
from ..training.data.date_translation import DateTranslation

TASK = DateTranslation(digits=8)  # of the training of the translator
NUM_TEXTS = 64
LENGTHS = ((11, 10), (10, 11), (11, 11), (7, 7))  # of targets and sources; the four most common
MEASURED_TEXTS = 64

Batches = Sequence[dict[str, Tensor]]


@cache
def held_out_texts() -> tuple[dict[str, Tensor], ...]:
    """Inputs of 64 texts that the translator was not trained on, in one batch for each length."""
    groups: dict[tuple[int, int], list[dict[str, Tensor]]] = {lengths: [] for lengths in LENGTHS}
    size = NUM_TEXTS // len(LENGTHS)
    number = 0
    while any(len(group) < size for group in groups.values()):
        example = TASK.batch(number, 1, "valid")
        number += 1
        assert example.source is not None
        group = groups.get((example.x.shape[1], example.source.shape[1]))
        if group is not None and len(group) < size:
            group.append({"x": example.x, "source": example.source})
    return tuple(
        {name: torch.cat([inputs[name] for inputs in group]) for name in ("x", "source")}
        for group in groups.values()
    )


def load_translator() -> Transformer:
    """The bundled translator in float64."""
    return load_sample_model().double()


def batch_log_probs(net: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Log-probabilities [texts, target tokens, vocabulary]."""
    with torch.no_grad():
        return net(**inputs).double().log_softmax(-1)


def output_log_probs(net: nn.Module, batches: Batches) -> Tensor:
    """Log-probabilities [target tokens of all texts, vocabulary]."""
    return torch.cat([batch_log_probs(net, inputs).flatten(0, 1) for inputs in batches])


def record_weights(net: nn.Module, site: str) -> list[Tensor]:
    """The weights [texts, heads, queries, keys] of one attention over each batch of the texts."""
    module = net.get_submodule(site)
    with record_modules([module]) as calls:
        output_log_probs(net, held_out_texts())
    weights = []
    for call in calls[module]:
        probe = Probe("weights")
        with torch.no_grad():
            module(*call.args, **call.kwargs | {"probe": probe})
        weights.append(probe.tensors["weights"])
    return weights


@cache
def measure_translator() -> HeadTable:
    """Measures and classes of all heads of the translator over held-out texts."""
    net = load_sample_model()
    reader = ExampleReader(net)
    reader.add_task_examples(TASK, MEASURED_TEXTS)
    examples = reader.examples_with_frequencies()
    return classify_heads(measure_heads(net, examples, collectors=[AlignmentScores()]))


def holds_the_energy(net: nn.Module, spectra: Iterable[LayerSpectrum]) -> bool:
    """True if the dimensions of each summed W_Q W_K^T hold 90 % of its energy, and one less does
    not.
    """
    for spectrum in spectra:
        state = net.get_submodule(spectrum.site).state_dict()
        summed = state["project.q"].double().T @ state["project.k"].double()
        energy = torch.linalg.svdvals(summed).square()
        share = energy.cumsum(0) / energy.sum()
        if not share[spectrum.summed.dims - 2] < 0.9 <= share[spectrum.summed.dims - 1]:
            return False
    return True
