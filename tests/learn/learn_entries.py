"""Checks of the entries of `headwise learn`, and numpy renderings of attention that they are
compared with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np
import pytest
import torch

from headwise.learn.catalogue import Entry, Result, load_documents
from headwise.observe.bundled_sample import load_sample_trace

Numbers = Mapping[str, Any]
RESULTS = dict[str, Result]()


def entries_of(document: str) -> dict[str, Entry]:
    """The entries of one document by id."""
    return {entry.id: entry for entry in load_documents([document])[0].entries}


def runnable(document: str) -> list[str]:
    """Ids of the entries that run something."""
    return [id for id, entry in entries_of(document).items() if entry.run is not None]


def shown_names(entry: Entry) -> set[str]:
    """The numbers that the reason of an entry prints."""
    return set(re.findall(r"\{(\w+)", entry.reason_text.en))


def checked(entry: Entry) -> Result:
    """The result of an entry, which is computed once."""
    if entry.id not in RESULTS:
        RESULTS[entry.id] = entry.check()
    return RESULTS[entry.id]


def check_entry(entry: Entry, expected: Numbers, counted_elsewhere: Set[str] = frozenset()) -> None:
    """The verdict is the documented one, and every printed number equals an independent
    computation.

    A test of its own bounds the numbers that are `counted_elsewhere`.
    """
    result = checked(entry)
    assert result.verdict == entry.verdict, dict(result.numbers)
    assert shown_names(entry) == set(expected) & shown_names(entry) | counted_elsewhere, (
        shown_names(entry)
    )
    for name, number in expected.items():
        found = result.numbers[name]
        if isinstance(number, float):
            assert found == pytest.approx(number, rel=1e-6, abs=1e-9), name
        else:
            assert found == number, name


def check_flip(entry: Entry, changes: Mapping[str, Any]) -> None:
    """With a changed input the statement fares differently, and the verdict shows it."""
    assert entry.run is not None
    assert entry.run(**changes).verdict != entry.verdict, entry.run(**changes).numbers


# --- numpy renderings -----------------------------------------------------------------------------


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None = None
) -> np.ndarray:
    return (
        softmax(q @ np.swapaxes(k, -1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)) @ v
    )


def entropy(weights: np.ndarray) -> np.ndarray:
    return -(weights * np.log(np.maximum(weights, 1e-300))).sum(-1)


def layer_parts(
    layer: torch.nn.Module,
    x: np.ndarray,
    heads: int,
    source: np.ndarray | None = None,
    allowed: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Weights [heads, T, S] and head outputs [T, heads, V] of a plain layer,
    for one row x [T, D].
    """
    state = {name: array(weight) for name, weight in layer.state_dict().items()}
    z = x if source is None else source
    q, k, v = (
        np.moveaxis((rows @ state[f"project.{side}"].T).reshape(len(rows), heads, -1), 1, 0)
        for side, rows in (("q", x), ("k", z), ("v", z))
    )
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    weights = softmax(scores)
    return weights, np.moveaxis(weights @ v, 0, 1)


def layer_output(layer: torch.nn.Module, x: np.ndarray, heads: int, **options: Any) -> np.ndarray:
    """Output [T, D] of a plain layer without biases."""
    outputs = layer_parts(layer, x, heads, **options)[1]
    return outputs.reshape(len(x), -1) @ array(layer.state_dict()["output.o"]).T


def derivative(
    function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, step: float = 1e-6
) -> np.ndarray:
    """Central differences of a function of x: [outputs, inputs]."""
    columns = []
    for index in range(x.size):
        change = np.zeros(x.size)
        change[index] = step
        change = change.reshape(x.shape)
        columns.append((function(x + change) - function(x - change)).ravel() / (2 * step))
    return np.stack(columns, 1)


def longest_chain(output: torch.Tensor) -> int:
    """Steps from an output to the furthest beginning of its graph: all nodes at a distance, one
    distance at a time.
    """
    assert output.grad_fn is not None
    count, nodes = 0, {output.grad_fn}
    while nodes:
        nodes = {node for above in nodes for node, _ in above.next_functions if node is not None}
        count += 1
    return count


def divergence(one: np.ndarray, other: np.ndarray) -> float:
    """Jensen-Shannon divergence as the mean of two relative entropies."""
    middle = (one + other) / 2

    def relative(p: np.ndarray) -> np.ndarray:
        return np.where(
            p > 0, p * np.log(np.maximum(p, 1e-300) / np.maximum(middle, 1e-300)), 0
        ).sum(-1)

    return float((relative(one) + relative(other)).mean() / 2)


def heads_of_the_translator() -> dict:
    """Divergence of pairs of heads in the layers of the bundled translator, and with the keys of
    one permuted.
    """
    trace, pairs, chance = load_sample_trace(), [], []
    for layer in trace.layers:
        if layer.kind == "attention" and layer.stack == "decoder":
            continue
        heads = [np.asarray(trace.head_weights(layer.name, head), dtype=float) for head in range(6)]
        for one in range(6):
            for other in range(one + 1, 6):
                pairs.append(divergence(heads[one], heads[other]))
                generator = torch.Generator().manual_seed(len(pairs))
                order = torch.randperm(heads[other].shape[1], generator=generator).numpy()
                chance.append(divergence(heads[one], heads[other][:, order]))
    numbers = {
        "closest": min(pairs),
        "mean": float(np.mean(pairs)),
        "chance": float(np.mean(chance)),
    }
    return {name: pytest.approx(value, abs=1e-6) for name, value in numbers.items()} | {
        "pairs": len(pairs)
    }
