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
from ..observe.inspect.ablation import ablate
from ..observe.inspect.hooks import record_modules
from ..report.text import format_p
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


def mean_divergence(expected: Tensor, changed: Tensor) -> float:
    """Mean relative entropy of two tables of log-probabilities, in nats per token."""
    return float((expected.exp() * (expected - changed)).sum(-1).mean())


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


@cache
def follow_one_head() -> dict[str, float | str]:
    """Measure head 2 of the last cross-attention: how well it aligns words, how often the token
    that its output promotes most is the right next one, and what changes without it, and without
    all heads of its layer.
    """
    net, site, number = load_translator(), "decoder.2.cross", 2
    [head] = [
        one
        for one in measure_translator().heads
        if (one.kind, one.layer, one.head) == ("cross", 2, number)
    ]
    aligned = head.measures["alignment target"]
    state = net.state_dict()
    table, gain = state["encoder.embedding.tokens"], state["decoder.norm.weight"]
    output = state[f"{site}.output.o"].unflatten(1, (6, -1))[:, number]
    module = net.get_submodule(site)
    with record_modules([module]) as calls:
        expected = output_log_probs(net, held_out_texts())
    is_right: list[Tensor] = []
    for call, inputs in zip(calls[module], held_out_texts(), strict=True):
        probe = Probe("heads")
        with torch.no_grad():
            module(*call.args, **call.kwargs | {"probe": probe})
        written = probe.tensors["heads"][:, :, number] @ output.T
        # the scale of the final norm changes no order of tokens
        effects = (written - written.mean(-1, keepdim=True)) * gain @ table.T
        is_right.append((effects.argmax(-1)[:, :-1] == inputs["x"][:, 1:]).flatten())
    promoted = torch.cat(is_right)
    numbers: dict[str, float | str] = {
        "aligned": aligned.value,
        "aligned_chance": aligned.chance,
        "aligned_p": format_p(aligned.p),
        "promoted": float(promoted.double().mean()),
        "positions": len(promoted),
        "guess": 1 / len(table),
    }
    for name, heads in {"alone": [number], "layer": range(6)}.items():
        with ablate(net, [(site, one) for one in heads]):
            numbers[name] = mean_divergence(expected, output_log_probs(net, held_out_texts()))
    return numbers


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
