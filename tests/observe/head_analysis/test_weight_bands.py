"""Bands of attention weights against the definition, for every band size, and the attention that
tokens receive.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import headwise as hw
from headwise.observe.head_analysis import head_measurement, weight_bands
from headwise.observe.head_analysis.annotated_examples import Example
from headwise.observe.head_analysis.head_measurement import (
    MeasureOptions,
    MetricSums,
    measure_heads,
    sum_examples,
)
from headwise.observe.head_analysis.head_metrics import ALL_METRICS
from headwise.observe.head_analysis.weight_bands import (
    WeightBand,
    WeightBandHook,
)
from headwise.observe.inspect.site import AttentionInputs
from observe.head_analysis import attention_maps as maps, handset_heads as handmade
from support import layer_cases as cases
from support.layer_cases import check_close
from support.site_recording import record_sites

COUNT = 23
SPECS = {
    "full": hw.design(model=12, heads=3),
    "causal": hw.design(model=12, heads=4, kv=2, pattern="causal"),
    "window": hw.design(model=12, heads=3, pattern="causal & window(4)"),
    "opened": hw.design(model=12, heads=3, pattern="causal & (window(3) | first(2))"),
    "bias": hw.design(model=12, heads=3, pattern="causal", modifiers=(hw.parts.Alibi(),)),
    "sinks": hw.design(model=12, heads=3, pattern="causal", normaliser=hw.parts.SinkSoftmax()),
    "sigmoid": hw.design(
        model=12, heads=3, pattern="causal & window(4)", normaliser=hw.parts.Sigmoid()
    ),
    "mixed": hw.design(model=12, heads=3, pattern="causal", modifiers=(hw.parts.TalkingHeads(),)),
}


def make_example(count: int = COUNT) -> Example:
    return Example(None, {"text": maps.weight_map("full", 0, count=count).key_tokens})


def bands(core, cells: int, monkeypatch: pytest.MonkeyPatch) -> list[WeightBand]:
    recorded: list[WeightBand] = []
    monkeypatch.setattr(weight_bands, "MAX_CELLS", cells)
    monkeypatch.setattr(weight_bands, "MIN_ROWS", 1)
    [site] = hw.sites(cases.layer(SPECS["full"]))
    examples = [make_example()]
    WeightBandHook(
        site.name, site.q, examples, ("text", "text"), lambda _, block: recorded.append(block)
    ).on_call(core)
    return recorded


def spread(some: list[WeightBand]) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and pairs of all bands at their places, [H, T, S]."""
    heads = some[0].w_HTS.shape[0]
    weights = torch.zeros(heads, COUNT, COUNT, dtype=some[0].w_HTS.dtype)
    allowed = torch.zeros(heads, COUNT, COUNT, dtype=torch.bool)
    for one in some:
        _, rows, keys = one.w_HTS.shape
        band = (
            slice(one.first_query, one.first_query + rows),
            slice(one.first_key, one.first_key + keys),
        )
        weights[:, band[0], band[1]], allowed[:, band[0], band[1]] = one.w_HTS, one.allowed
    return weights, allowed


@pytest.mark.parametrize("cells", [1, 300, 2**22])
@pytest.mark.parametrize("name", SPECS)
def test_bands_are_the_weights_of_the_definition(name, cells, monkeypatch):
    layer, probe = cases.layer(SPECS[name]), hw.Probe("weights")
    x = torch.randn(1, COUNT, 12, dtype=torch.float64)
    with torch.no_grad():
        layer(x, probe=probe)
        with record_sites(layer) as keeps:
            layer(x)
        (keep,) = keeps.values()
        weights, allowed = spread(bands(keep.seen[0], cells, monkeypatch))
    check_close(weights, probe.tensors["weights"][0])
    expected = torch.tensor(
        [[SPECS[name].pattern.allows(t, s) for s in range(COUNT)] for t in range(COUNT)]
    )
    assert torch.equal(allowed, expected.expand_as(allowed))


def test_bands_are_as_narrow_as_their_allowed_keys(monkeypatch: pytest.MonkeyPatch):
    layer = cases.layer(SPECS["window"])
    with torch.no_grad(), record_sites(layer) as keeps:
        layer(torch.randn(1, COUNT, 12, dtype=torch.float64))
    (keep,) = keeps.values()
    some = bands(keep.seen[0], 1, monkeypatch)
    assert [(one.first_query, one.first_key, one.w_HTS.shape[2]) for one in some] == [
        (t, max(0, t - 3), min(t, 3) + 1) for t in range(COUNT)
    ]
    some = bands(keep.seen[0], 3 * COUNT * 2, monkeypatch)
    assert max(one.w_HTS.shape[1] for one in some) > 4  # of few keys there are more rows
    assert all(one.w_HTS.numel() <= 3 * COUNT * 2 for one in some)


@pytest.mark.parametrize("kind", ["bool", "float", "each"])
def test_seen_keys_are_all_that_rows_may_read(kind: str):
    """The softmax over some keys is that over all where the others are barred; a row that reads
    nothing stays zero.
    """
    q, k = (
        torch.randn(1, 9, 6, 4, dtype=torch.float64),
        torch.randn(1, 11, 3, 4, dtype=torch.float64),
    )
    may = torch.rand(9, 11) < 0.6
    may[:, :2] = may[:, 8:] = False
    may[4] = False
    may = torch.stack([may, may.roll(1, 0)]).repeat(3, 1, 1) if kind == "each" else may
    mask = torch.zeros(may.shape).masked_fill(~may, -torch.inf) if kind == "float" else may
    attention_inputs = AttentionInputs(q, k, k, 0.5, mask=mask)
    rows, keys = slice(2, 7), slice(2, 8)
    scores = torch.stack([q[0, :, h] @ k[0, :, h // 2].T * 0.5 for h in range(6)])
    raw = torch.where(may, scores.exp(), 0)
    expected = (raw / raw.sum(-1, keepdim=True).clamp(min=1e-300))[None, :, rows]
    check_close(attention_inputs.all_weights(rows), expected)
    check_close(attention_inputs.all_weights(rows, keys), expected[..., keys])
    assert torch.equal(
        attention_inputs.allowed_pairs(rows),
        may.expand(1, 6 if kind == "each" else 1, 9, 11)[:, :, rows],
    )


@pytest.mark.parametrize("kind", ["causal", "holes", "each"])
def test_keys_outside_the_mask_add_zero(kind: str):
    block = maps.weight_map(kind, 3, count=COUNT)
    rows = slice(2, 9)
    may = block.allowed[..., rows, :].clone()
    may[..., :3] = may[..., 17:] = False
    weights = torch.where(may, block.w_HTS[:, rows], 0)
    weights[0, 3] = 0  # nor is one of these the largest, where nothing is
    whole = WeightBand(weights, may, 2, block.query_tokens, block.key_tokens)
    cut = replace(whole, w_HTS=weights[..., 3:17], allowed=may[..., 3:17], first_key=3)
    sums = []
    for one in (whole, cut):
        adding = MetricSums(tuple(ALL_METRICS.values()))
        adding.add_band("site", one)
        adding.finish_example()
        sums.append(adding.sums_by_example)
    for key, [both] in sums[0].items():
        for own, other in zip(both, sums[1][key][0], strict=True):
            assert own == pytest.approx(other, abs=1e-12, nan_ok=True), key


def test_chance_is_the_same_whether_it_was_known():
    """The second site of a text takes over what the first one found."""
    block = maps.weight_map("causal", 5)
    adding = MetricSums(tuple(ALL_METRICS.values()))
    for site in ("one", "two"):
        adding.add_band(site, block)
    adding.finish_example()
    alone = MetricSums(tuple(ALL_METRICS.values()))
    alone.add_band("one", block.uniform_baseline)
    alone.finish_example()
    for name in ALL_METRICS:
        found = [adding.sums_by_example[site, name, "chance"][0] for site in ("one", "two")]
        if ALL_METRICS[name].compute_chance is None:
            found.append(alone.sums_by_example["one", name, "own"][0])
        for other in found[1:]:
            for own, same in zip(found[0], other, strict=True):
                assert own == pytest.approx(same, abs=1e-12), name


@pytest.mark.parametrize("kind", ["causal", "each"])
def test_layers_measured_together_are_layers_measured_alone(kind, monkeypatch):
    block, other = maps.weight_map(kind, 5), maps.weight_map("full", 6)
    layers = [block, replace(block, w_HTS=block.w_HTS / 2), other, block]
    sums = list[dict[tuple[str, str, str], list[tuple[np.ndarray, np.ndarray]]]]()
    for cells in (1, 2**30):
        monkeypatch.setattr(head_measurement, "MIN_JOINED_CELLS", cells)
        adding = MetricSums(tuple(ALL_METRICS.values()))
        for _ in range(2):
            for number, layer in enumerate(layers):
                adding.add_band(f"layer {number}", layer)
            adding.finish_example()
        sums.append(adding.sums_by_example)
    assert sums[0].keys() == sums[1].keys()
    for key, texts in sums[0].items():
        for pair, same in zip(texts, sums[1][key], strict=True):
            for array, expected in zip(pair, same, strict=True):
                assert array == pytest.approx(expected, abs=1e-12, nan_ok=True), key


class DoubledRows(nn.Module):
    """A model that runs every text twice, as rows of one batch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([x, x]))[: len(x)]


@pytest.mark.parametrize("rows", ["texts", "doubled"])
def test_texts_of_one_batch_are_texts_alone(rows: str, monkeypatch: pytest.MonkeyPatch):
    """Also for a model whose attention has other rows than texts, which then run alone."""
    net = handmade.decoder()
    model = DoubledRows(net).eval() if rows == "doubled" else net
    texts = handmade.texts(9)
    lengths = [text.streams["text"].count for text in texts]
    assert 1 < len({*lengths}) < len(lengths)
    options = MeasureOptions(tuple(ALL_METRICS))
    num_rows = list[int]()
    net.register_forward_hook(lambda _, args, output: num_rows.append(len(output)))
    together = sum_examples(model, texts, options)
    assert model is not net or max(num_rows) > 1
    num_rows.clear()
    monkeypatch.setattr(head_measurement, "MAX_BATCH_TEXTS", 1)
    alone = sum_examples(model, texts, options)
    assert len(num_rows) == len(texts)
    assert together.num_examples == alone.num_examples == len(texts)
    for key, sums in together.sums_by_example.items():
        for pair, expected in zip(sums, alone.sums_by_example[key], strict=True):
            for array, same in zip(pair, expected, strict=True):
                assert array == pytest.approx(same, abs=1e-6, nan_ok=True), key


def test_too_few_tokens_for_the_model_are_refused():
    example, *more = handmade.texts(3)
    text = example.streams["text"]
    whole = ("first_is_sink", "patch_grid", "has_words")
    per_token = [name for name in text.__dataclass_fields__ if name not in whole]
    short = replace(text, **{name: getattr(text, name)[:-1] for name in per_token})
    with pytest.raises(
        ValueError,
        match=(
            f"{text.count} queries and {text.count} keys, but the example annotates "
            f"{text.count - 1}"
        ),
    ):
        measure_heads(handmade.decoder(), [Example(example.inputs, {"text": short}), *more])


def test_few_tokens_of_many_are_picked():
    """Whether few or many are asked for, and wherever the band begins."""
    block = maps.weight_map("causal", 1, count=301)
    cut = replace(block, w_HTS=block.w_HTS[..., 5:], allowed=block.allowed[..., 5:], first_key=5)
    for chosen in ([0], [7], [5, 100, 250], list(range(0, 301, 3))):
        keys = torch.zeros(301, dtype=torch.bool)
        keys[chosen] = True
        for one in (block, cut):
            expected = block.w_HTS[..., [s for s in chosen if s >= one.first_key]].sum(-1)
            check_close(one.weight_on(keys), expected)


# --- attention received ---------------------------------------------------------------------------
