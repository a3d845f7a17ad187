"""Checks of the entries of `headwise learn`, and numpy renderings of attention that they are
compared with.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Set
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.learn.catalogue import Entry, Result, load_documents
from headwise.learn.measured_layers import make_layer, sample
from headwise.learn.translator_runs import load_translator, record_weights

Numbers = Mapping[str, Any]
RESULTS = dict[str, Result]()


def entries_of(document: str) -> dict[str, Entry]:
    """The entries of one document by id."""
    return {entry.id: entry for entry in load_documents([document])[0].entries}


# Entries whose numbers have tests of their own: test_measured_layers, test_misconceptions, and
# test_layer_experiments and test_stored_findings for the runs of these modules.
SEPARATE = {"000-1f", "000-1g", "003-4.1c", "003-4.2d", "003-6.6b"}
OWN_TESTS = ("layer_experiments", "stored_findings")


def module_of(entry: Entry) -> str:
    """The module of the run of an entry; "" if it runs nothing."""
    run = getattr(entry.run, "func", entry.run)
    return getattr(run, "__module__", "").rpartition(".")[2]


def runnable(document: str, sections: str = "") -> list[str]:
    """Ids of the entries that run something, in sections that start with one of these characters."""
    entries = entries_of(document).values()
    ids = {one.id for one in entries if one.run and module_of(one) not in OWN_TESTS} - SEPARATE
    return sorted(id for id in ids if not sections or id.partition("-")[2][0] in sections)


def read_table(name: str) -> dict[str, str]:
    """A Python expression for each entry, from the lines `id -> expression` of a file."""
    text = Path(__file__).with_name(name).read_text("utf-8")
    lines = (line.partition(" -> ") for line in text.splitlines() if " -> " in line)
    return {id: expression for id, _, expression in lines}


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


def check_numbers(
    entry: Entry,
    computed: Mapping[str, Callable[[], Numbers]],
    names: dict[str, Any],
    counted_elsewhere: Mapping[str, set[str]] = MappingProxyType({}),
) -> None:
    """Check an entry against a function of the test module, or a formula of numbers.txt."""
    is_computed = entry.id in computed
    expected = computed[entry.id]() if is_computed else eval(NUMBERS[entry.id], names)
    check_entry(entry, expected, counted_elsewhere.get(entry.id, frozenset()))


def check_flip(entry: Entry, changes: Mapping[str, Any]) -> None:
    """With a changed input the statement fares differently, and the verdict shows it."""
    assert entry.run is not None
    assert entry.run(**changes).verdict != entry.verdict, entry.run(**changes).numbers


NUMBERS = read_table("numbers.txt")

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


def random_scores(width: int) -> np.ndarray:
    """Products of 512 random queries with 16 random keys each."""
    queries, keys = array(sample(width, 512, 1, width)), array(sample(width + 1, 512, 16, width))
    return np.einsum("rod,rkd->rk", queries, keys)


def jacobian_norm(scores: np.ndarray) -> float:
    """Mean Frobenius norm of the derivative of a softmax: diag(p) - p p^T."""
    p = softmax(scores)
    squares = (p**2).sum(-1)
    # ||diag(p) - p p^T||^2 = sum p_i^2 - 2 sum p_i^3 + (sum p_i^2)^2
    return float(np.sqrt(np.maximum(squares - 2 * (p**3).sum(-1) + squares**2, 0)).mean())


def masked_change() -> dict:
    """Change of outputs before and after position 5 if later tokens are other ones."""
    layer, x = make_layer(hw.design(model=12, heads=3, pattern="causal()")), array(sample(2, 9, 12))
    other = np.concatenate([x[:5], array(sample(3, 4, 12))])
    allowed = np.tril(np.ones((9, 9), dtype=bool))
    one, two = (layer_output(layer, rows, 3, allowed=allowed) for rows in (x, other))
    change = np.abs(one - two)
    return {"before": float(change[:5].max()), "after": float(change[5:].max()), "position": 5}


def changed_source() -> dict:
    """Change of the outputs of cross-attention with another source."""
    layer, x = make_layer(hw.design(model=12, heads=3)), array(sample(1, 5, 12))
    one, other = (layer_output(layer, x, 3, source=array(sample(s, 7, 12))) for s in (2, 3))
    return {"shape": "5 x 12", "change": float(np.abs(one - other).max())}


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


@cache
def translator_weights() -> dict[str, list[np.ndarray]]:
    """Weights [texts, heads, queries, keys] of every attention of the bundled translator, for each
    length of the held-out texts.
    """
    net = load_translator()
    sites = [site for site, _ in net.spec.attention_specs()]
    return {site: list(map(array, record_weights(net, site))) for site in sites}


def heads_of_the_translator() -> dict:
    """Divergence of pairs of heads in the layers of the bundled translator, and with the keys of
    one permuted.
    """
    pairs, chance = [], []
    for site, batches in translator_weights().items():
        if "decoder" in site and not site.endswith("cross"):
            continue
        for one, other in itertools.combinations(range(6), 2):
            generator = torch.Generator().manual_seed(len(pairs))
            gaps, permuted = [], []
            for weights in batches:
                order = torch.randperm(weights.shape[-1], generator=generator).numpy()
                gaps.append(divergence(weights[:, one], weights[:, other]))
                permuted.append(divergence(weights[:, one], weights[:, other][..., order]))
            pairs.append(np.mean(gaps))
            chance.append(np.mean(permuted))
    numbers = {
        "closest": float(min(pairs)),
        "mean": float(np.mean(pairs)),
        "chance": float(np.mean(chance)),
    }
    return numbers | {"pairs": len(pairs), "texts": 64}
