"""Models in which it is known which heads make a prediction, and through which inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.observe.head_analysis.attribution_patching import attribute_heads
from headwise.observe.head_analysis.circuit_graph import CircuitModel
from headwise.observe.head_analysis.circuit_metrics import TokenMetric, parse_metric
from headwise.observe.head_analysis.edge_attribution import (
    EdgeOptions,
    attribute_edges,
    run_circuit,
)
from headwise.observe.head_analysis.path_patching import PairRuns, patch_paths, read_pairs
from headwise.observe.head_analysis.score_attribution import attribute_score, attribute_value
from observe.head_analysis import handset_heads
from observe.head_analysis.handset_heads import (
    COPY,
    DIM,
    MODEL,
    TOKEN,
    WORDS,
    induction_model,
)

# the last token 3 stood before 5 in the clean text
CLEAN = torch.tensor([[0, 3, 5, 7, 2, 8, 3]])
CORRUPT = torch.tensor([[0, 4, 5, 7, 2, 8, 3]])
METRIC = TokenMetric("logit_difference", (5, 7))
PAIRS = [(CLEAN, CORRUPT)]
# other tokens: where the pair stands, and which tokens it has
MORE = [
    (torch.tensor([[0, 1, 9, 2, 6, 10, 1]]), torch.tensor([[0, 4, 9, 2, 6, 10, 1]]), (9, 2)),
    (torch.tensor([[0, 6, 2, 8, 7, 1, 2]]), torch.tensor([[0, 6, 3, 8, 7, 1, 2]]), (8, 7)),
    (torch.tensor([[0, 5, 1, 4, 9, 6, 4]]), torch.tensor([[0, 5, 1, 3, 9, 6, 4]]), (9, 5)),
]


def test_the_model_predicts_by_induction():
    net = induction_model()
    with torch.no_grad():
        assert net(CLEAN)[0, -1].argmax() == 5
        assert METRIC(net(CLEAN)) > 1
        assert abs(METRIC(net(CORRUPT))) < 0.2 * METRIC(net(CLEAN))


def test_the_path_goes_through_the_keys_of_the_induction_head():
    paths = [
        ("L0H0", "L1H0.k"),
        ("L0H0", "L1H0.q"),
        ("L0H0", "L1H0.v"),
        ("L0H1", "L1H0.k"),
        ("L0H2", "L1H0.k"),
        ("L0H0", "logits"),
        ("L1H0", "logits"),
    ]
    result = patch_paths(induction_model(), PAIRS, METRIC, paths)
    shares = {path.name: path.effect.value / result.total for path in result.paths}
    assert shares["L0H0 -> L1H0.k"] == pytest.approx(1, abs=0.1)
    assert shares["L1H0 -> logits"] == pytest.approx(1, abs=0.1)
    for name in ("L0H0 -> L1H0.q", "L0H0 -> L1H0.v", "L0H1 -> L1H0.k", "L0H2 -> L1H0.k"):
        assert abs(shares[name]) < 0.05
    assert abs(shares["L0H0 -> logits"]) < 0.05
    chance = {path.name: path.effect.chance / result.total for path in result.paths}
    assert abs(chance["L0H0 -> L1H0.k"]) < 0.05


def test_only_the_key_of_the_matching_token_matters():
    net = induction_model().requires_grad_(False)
    values = hw.head_outputs(net, CORRUPT, [(1, 0)], part="k")
    clean = METRIC(net(CLEAN))
    total = METRIC(net(CORRUPT)) - clean
    shares: list[float] = []
    for column in range(CLEAN.shape[1]):
        with hw.patch(net, values, part="k", tokens=[column]):
            shares.append(float((METRIC(net(CLEAN)) - clean) / total))
    assert int(np.argmax(shares)) == 2  # the token behind the replaced one
    assert shares[2] == pytest.approx(1, abs=0.1)
    pattern = hw.head_outputs(net, CORRUPT, [(1, 0)], part="pattern")
    with hw.patch(net, pattern, part="pattern"):
        by_pattern = METRIC(net(CLEAN)) - clean
    assert float(by_pattern / total) == pytest.approx(1, abs=0.1)


def test_head_effects_find_both_heads_over_several_pairs():
    pairs = [(*PAIRS[0], METRIC)]
    for clean, corrupt, tokens in MORE:
        pairs.append((clean, corrupt, TokenMetric("logit_difference", tokens)))
    result = attribute_heads(induction_model(), pairs, "logit_difference", steps=32)
    assert {one.name for one in result.by_size[:2]} == {"L0H0", "L1H0"}
    assert result.pairs == 4
    for one in result.by_size[:2]:
        assert one.exact is not None
        assert one.exact.value == pytest.approx(result.total, rel=0.15)
        assert one.exact.low <= one.exact.value <= one.exact.high
        assert one.exact.high < 0
        assert abs(one.effects["output"].chance) < 0.1 * abs(result.total)
        assert one.level < 0.05
    for one in result.by_size[2:]:
        assert one.exact is not None
        assert abs(one.exact.value) < 0.05 * abs(result.total)


def test_the_largest_edges_are_the_circuit():
    options = EdgeOptions(steps=32, points=6)
    graph = attribute_edges(induction_model(), PAIRS, METRIC, options=options)
    into = [one for one in graph.edges if one.receiver.startswith("L1H0")]
    assert (into[0].sender, into[0].receiver) == ("L0H0", "L1H0.k")
    names = [(one.sender, one.receiver) for one in graph.edges[:8]]
    assert ("L1H0", "logits") in names
    assert graph.sizes[-1].faithfulness.value == pytest.approx(1)


def test_pairs_count_in_circuits_by_their_difference():
    pairs = [(*PAIRS[0], METRIC), (CLEAN, CLEAN, METRIC)]
    clean, corrupt, tokens = MORE[0]
    pairs.append((clean, corrupt, TokenMetric("logit_difference", tokens)))
    options = EdgeOptions(points=4, draws=1, exact=0)
    together = attribute_edges(induction_model(), pairs, "", options=options)
    assert together.notes[-1] == "circuits leave out 1 pair without a difference"
    nodes = CircuitModel(induction_model())
    used = read_pairs(induction_model(), [pairs[0], pairs[2]], "")
    runs = [PairRuns(nodes, pair) for pair in used]
    is_edge = ~np.isnan(together.scores)
    size = together.sizes[1]
    places = np.argwhere(is_edge)
    order = np.abs(together.scores[is_edge]).argsort(kind="stable")[::-1]
    kept = np.zeros_like(is_edge)
    kept[tuple(places[order[: size.edges]].T)] = True
    left = sum(run_circuit(one, kept) - one.corrupt_value for one in runs)
    whole = sum(one.clean_value - one.corrupt_value for one in runs)
    assert size.faithfulness.value == pytest.approx(left / whole, abs=2e-5)
    assert size.faithfulness.low < size.faithfulness.value < size.faithfulness.high


def test_the_induction_head_looks_at_what_the_previous_token_head_wrote():
    """Token 3 at the end meets 5, behind the first 3: its own token as the query, and what (0, 0)
    wrote there as the key.
    """
    result = attribute_score(induction_model(), [(CLEAN, -1, 2)], "L1H0", "mean")
    parts = {
        side: {name: one.value / result.total.value for name, one in of_side.parts.items()}
        for side, of_side in result.sides.items()
    }
    assert parts["query"]["token embedding"] == pytest.approx(1, abs=0.1)
    assert parts["key"]["L0H0"] == pytest.approx(1, abs=0.1)
    for side, name in (("key", "token embedding"), ("query", "L0H0")):
        assert abs(parts[side].get(name, 0)) < 0.05  # those that add nothing are left out
    first = result.pairs[0]
    assert (first.query, first.key) == ("token embedding", "L0H0")
    assert first.effect.value == pytest.approx(result.total.value, rel=0.1)
    assert abs(result.sides["key"].parts["L0H0"].chance) < 0.05 * result.total.value
    value = attribute_value(induction_model(), [(CLEAN, -1, 2)], "L1H0", (5, 7))
    copied = value.sides["value"].parts["token embedding"].value
    assert copied == pytest.approx(value.total.value, rel=0.1)
    assert value.sides["value"].all_keys is not None
    assert value.total.value == pytest.approx(value.sides["value"].all_keys.value, rel=0.1)


# --- An addition of two heads ---------------------------------------------------------------------


def addition_model() -> hw.Transformer:
    """Two heads copy the second and the third token; the logits are the sum of both copies."""
    net = handset_heads.decoder()
    named = dict(net.named_parameters())
    (head,) = [one for name, one in named.items() if name.startswith("head.") and one.dim() == 2]
    place = handset_heads.PLACE
    one_place = [torch.eye(handset_heads.PLACES)[[column]] for column in (1, 2)]
    with torch.no_grad():
        for number in range(2):
            handset_heads._set_score(
                net,
                "decoder.0.attention",
                number,
                handset_heads._map(place, handset_heads.ANY),
                handset_heads._map(place, one_place[number]),
                2,
            )
            channels = slice(number * DIM, (number + 1) * DIM)
            value = named["decoder.0.attention.project.v"]
            output = named["decoder.0.attention.output.o"]
            value[channels] = 0
            value[number * DIM : number * DIM + WORDS, TOKEN] = torch.eye(WORDS)
            output[:, channels] = 0
            output[COPY, number * DIM : number * DIM + WORDS] = (1 + number) * torch.eye(WORDS)
        head.zero_()
        head[:, COPY] = torch.eye(WORDS)
    return net.double()


def test_two_heads_that_add_have_effects_that_add():
    """The corrupt text exchanges both tokens: each head's effect is known, and so is their sum."""
    net = addition_model()
    clean = torch.tensor([[0, 3, 5, 7, 2]])
    corrupt = torch.tensor([[0, 4, 6, 7, 2]])

    def metric(logits: Tensor) -> Tensor:
        return logits[0, -1, 3] - logits[0, -1, 4] + logits[0, -1, 5] - logits[0, -1, 6]

    result = patch_paths(
        net,
        [(clean, corrupt)],
        metric,
        [("L0H0", "logits"), ("L0H1", "logits"), ("L0:0,1", "logits"), ("L0H2", "logits")],
        mlps="frozen",
    )
    first, second, both, none = (path.effect.value for path in result.paths)
    assert first + second == pytest.approx(both, rel=0.05)
    assert second == pytest.approx(2 * first, rel=0.1)
    assert abs(none) < 0.02 * abs(both)
    assert both == pytest.approx(result.total, rel=0.05)
    assert MODEL == 45


# --- Metrics --------------------------------------------------------------------------------------


def test_metrics_by_their_definition():
    logits = torch.randn(1, 5, 11, dtype=torch.float64)
    row = logits[0, -2]
    assert TokenMetric("logit_difference", (3, 7), -2)(logits) == row[3] - row[7]
    probability = row.exp()[4] / row.exp().sum()
    assert TokenMetric("log_probability", (4,), 3)(logits) == pytest.approx(
        float(probability.log())
    )
    assert parse_metric("log_probability:x").tokens == ("x",)
    assert parse_metric("logit_difference", ("a", "b")).name == "logit_difference:a,b"
    assert TokenMetric("log_probability", (4,), 3).name == "log_probability:4 at position 3"
    with pytest.raises(ValueError, match="names tokens, and so does the pair: c,d"):
        parse_metric("logit_difference:a,b", ("c", "d"))
