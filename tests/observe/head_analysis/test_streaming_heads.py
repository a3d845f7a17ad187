"""Streaming heads against plain torch over transformers, their files as kvpress parses them, and
models that run them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.attention.masking.pattern_base import head_pattern
from headwise.observe.head_analysis.retrieval_heads import StreamingHeads
from headwise.surgery.attention_replacement import remove_heads, use_streaming_heads
from headwise.util.errors import SpecError
from support.transformers_models import FALLBACK, ZOO

SINKS, WINDOW = 2, 5
SCORES = np.array([[0.25, 1.0], [0.0, 1 / 3]])


def kept_pairs(count: int) -> Tensor:
    """What a streaming head keeps of a causal mask, one pair at a time."""
    kept = torch.zeros(count, count, dtype=torch.bool)
    for query in range(count):
        for key in range(query + 1):
            kept[query, key] = key < SINKS or query - key < WINDOW
    return kept


def plain_streaming(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Weight outside and relative change of the output of every head, [layers, heads]."""
    output = model(ids, output_attentions=True, output_hidden_states=True)
    kept = kept_pairs(ids.shape[1])
    outside, changes = [], []
    for layer, weights, hidden in zip(
        model.model.layers, output.attentions, output.hidden_states, strict=False
    ):
        states = layer.input_layernorm(hidden)
        values = layer.self_attn.v_proj(states)[0].unflatten(-1, (2, -1)).transpose(0, 1)
        values = values.repeat_interleave(2, 0).double()
        full = weights[0].double()
        logits = full.log().masked_fill(~kept, -torch.inf)
        rows = slice(SINKS + WINDOW, None)
        short = logits.softmax(-1)[:, rows] @ values
        whole = (full @ values)[:, rows]
        outside.append((full * ~kept)[:, rows].sum(-1).mean(-1))
        changes.append((short - whole).flatten(1).norm(dim=-1) / whole.flatten(1).norm(dim=-1))
    return torch.stack(outside), torch.stack(changes)


@torch.no_grad()
def test_changes_equal_plain_torch_over_transformers():
    model = ZOO["llama"].build("eager")
    ids = torch.randint(3, 60, (28,), generator=torch.Generator().manual_seed(0))
    table = hw.head_analysis.measure_streaming(model, [ids], sinks=SINKS, window=WINDOW)
    outside, changes = plain_streaming(model, ids[None])
    assert table.texts == "1 passage of 28 tokens"
    for head in table.heads:
        place = (head.layer, head.head)
        assert head.measures["outside"].value == pytest.approx(float(outside[place]), rel=1e-5)
        change = head.measures["streaming_change"].value
        assert change == pytest.approx(float(changes[place]), rel=1e-4)
        chance = np.mean([(row - 6) / (row + 1) for row in range(7, 28)])
        assert head.measures["outside"].chance == pytest.approx(chance)
    scores = StreamingHeads.of(table, SINKS, WINDOW).scores
    expected = changes.unflatten(1, (2, 2)).amax(-1).clamp(max=1)
    assert scores == pytest.approx(expected.numpy(), rel=1e-4)


def test_passages_join_texts_and_have_intervals():
    model = ZOO["llama"].build("eager")
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 60, (20,), generator=draw) for _ in range(5)]
    table = hw.head_analysis.measure_streaming(model, texts, sinks=SINKS, window=WINDOW)
    assert table.texts == "3 passages of 28 tokens"
    for head in table.heads:
        for one in head.measures.values():
            assert one.low < one.value < one.high
    joined = [torch.cat(texts)[start : start + 28] for start in (0, 28, 56)]
    same = hw.head_analysis.measure_streaming(model, joined, sinks=SINKS, window=WINDOW)
    assert [one.measures for one in same.heads] == [one.measures for one in table.heads]


def parse_as_kvpress(folder: Path, ratio: float) -> tuple[int, int, np.ndarray]:
    """The files as DuoAttentionPress of kvpress reads them, written anew."""
    config = json.loads((folder / "config.json").read_text())
    rows = (folder / "full_attention_heads.tsv").read_text().strip().split("\n")
    scores = np.array([[float(cell) for cell in row.split("\t")] for row in rows])
    scores = np.clip(scores, 0, 1)
    streaming = np.zeros(scores.shape, dtype=bool)
    number = round(scores.size * ratio)
    for flat in np.argsort(scores, axis=None)[:number]:
        streaming[flat // scores.shape[1], flat % scores.shape[1]] = True
    return config["sink_size"], config["recent_size"], streaming


def test_files_are_those_of_duo_attention_and_return_the_scores(tmp_path):
    heads = StreamingHeads(SCORES, SINKS, WINDOW)
    heads.write(tmp_path / "list")
    assert sorted(one.name for one in (tmp_path / "list").iterdir()) == [
        "config.json",
        "full_attention_heads.tsv",
    ]
    for ratio in (0, 0.25, 0.5, 0.75, 1):
        sinks, window, streaming = parse_as_kvpress(tmp_path / "list", ratio)
        assert (sinks, window) == (SINKS, WINDOW)
        assert streaming.tolist() == heads.select(sparsity=ratio).tolist()
    read = StreamingHeads.read(tmp_path / "list")
    assert np.array_equal(read.scores, SCORES)
    assert read[1:] == (SINKS, WINDOW)
    assert read.select(threshold=0.3).tolist() == [[True, False], [True, False]]
    with pytest.raises(SpecError, match="it exists; add overwrite=True"):
        heads.write(tmp_path / "list")


def dense_streaming(model: Any, ids: Tensor, streaming: np.ndarray) -> Tensor:
    """Logits of transformers with a mask for every head, added before each softmax."""
    count = ids.shape[1]
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    handles = []
    for layer, kv_heads in zip(model.model.layers, streaming, strict=True):
        masks = [kept_pairs(count) if one else causal for one in kv_heads for _ in range(2)]
        added = torch.zeros(1, 4, count, count).masked_fill(~torch.stack(masks), -torch.inf)

        def use(module: Any, args: Any, kwargs: Any, added: Tensor = added) -> Any:
            return args, {**kwargs, "attention_mask": added}

        handles.append(layer.self_attn.register_forward_pre_hook(use, with_kwargs=True))
    logits = model(ids).logits
    for handle in handles:
        handle.remove()
    return logits


@torch.no_grad()
def test_the_model_equals_dense_masks_and_its_cache_has_the_priced_bytes(tmp_path):
    model = ZOO["llama"].build("eager")
    StreamingHeads(SCORES, SINKS, WINDOW).write(tmp_path / "list")
    net = use_streaming_heads(model, tmp_path / "list", sparsity=0.5).eval()
    ids = torch.randint(3, 60, (1, 31), generator=torch.Generator().manual_seed(1))
    expected = dense_streaming(model, ids, StreamingHeads(SCORES).select())
    assert (expected - model(ids).logits).abs().max() > 1e-3
    assert torch.allclose(net(ids), expected, atol=1e-5)
    cache = net.cache(batch=1, capacity=31)
    steps = [net(ids[:, :9], cache=cache)]
    steps += [net(ids[:, [place]], cache=cache) for place in range(9, 31)]
    assert torch.allclose(torch.cat(steps, 1), expected, atol=1e-5)
    token_bytes = 2 * 8 * 4  # a key and a value of 8 channels in float32
    kept = 2 * 31 + 2 * (SINKS + WINDOW)  # tokens of the four key-value heads
    (estimate,) = hw.cost(net.spec, hw.Workload(context=31, dtype="fp32"))
    assert cache.nbytes == estimate.cache_bytes == kept * token_bytes
    hw.save(net, tmp_path / "saved")
    assert torch.equal(hw.load(tmp_path / "saved")(ids), net(ids))


@torch.no_grad()
def test_all_or_no_heads_may_stream():
    model = ZOO["llama"].build("eager")
    ids = torch.randint(3, 60, (1, 31), generator=torch.Generator().manual_seed(1))
    heads = StreamingHeads(SCORES, SINKS, WINDOW)
    none = use_streaming_heads(model, heads, sparsity=0)
    assert torch.allclose(none(ids), model(ids).logits, atol=1e-5)
    both = use_streaming_heads(model, heads, threshold=2.0)
    assert next(both.spec.attention_specs())[1].pattern.text == "window(5) | first(2)"
    expected = dense_streaming(model, ids, np.ones((2, 2), dtype=bool))
    assert torch.allclose(both(ids), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "scores", "words"),
    [
        ('{"sink_size": 1}', "0.5", "lists no streaming heads: 'recent_size'; give the folder of"),
        ('{"sink_size": 1, "recent_size": 2}', "a\tb", "lists no streaming heads: could not conv"),
        ('{"sink_size": 1, "recent_size": 2}', "0.5\t0.1\n0.2", "lists no streaming heads: the n"),
        ("[1", "0.5", "line 1 is not JSON"),
    ],
)
def test_wrong_files(config, scores, words, tmp_path):
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "full_attention_heads.tsv").write_text(scores)
    with pytest.raises(SpecError, match=words) as caught:
        StreamingHeads.read(tmp_path)
    assert "\n" not in str(caught.value)


def test_wrong_models_and_texts():
    model = ZOO["llama"].build("eager")
    with pytest.raises(
        SpecError, match=r"for layers of \[2\] key-value heads, and .* has \[2, 2\]"
    ):
        use_streaming_heads(model, StreamingHeads(SCORES[:1]))
    with pytest.raises(SpecError, match=r"sparsity must be in \[0, 1\], got 1.5"):
        use_streaming_heads(model, StreamingHeads(SCORES), sparsity=1.5)
    ids = torch.arange(3, 16)
    for sizes, words in [((-1, 5), "sinks must be .* at least 0; got -1"), ((1, 0), "window must")]:
        with pytest.raises(SpecError, match=words):
            hw.head_analysis.measure_streaming(model, [ids], sinks=sizes[0], window=sizes[1])
        with pytest.raises(SpecError, match=words):
            use_streaming_heads(model, StreamingHeads(SCORES, *sizes))
    with pytest.raises(
        SpecError, match=r"need passages of 14 to 28 tokens; the texts have 13; give"
    ):
        hw.head_analysis.measure_streaming(model, [ids], sinks=SINKS, window=WINDOW)
    with pytest.raises(SpecError, match="of 80 to 160 tokens; the model takes 64 tokens"):
        hw.head_analysis.measure_streaming(model, [ids] * 9, sinks=10, window=30)


@pytest.mark.parametrize("count", [14, 20])
def test_a_short_text_within_the_stated_range_is_one_passage(count):
    model = ZOO["llama"].build("eager")
    ids = torch.arange(3, 3 + count)
    table = hw.head_analysis.measure_streaming(model, [ids], sinks=SINKS, window=WINDOW)
    assert table.texts == f"1 passage of {count} tokens"


@torch.no_grad()
def test_scores_of_a_pruned_model_belong_to_its_own_key_value_heads(tmp_path):
    net = hw.load(ZOO["llama"].build("eager"))
    keep = {"decoder.0.attention": (0, 1, 2), "decoder.1.attention": (0, 1)}
    pruned = remove_heads(net, keep).eval()
    maps = [spec.heads.kv_head_of_query for _, spec in pruned.spec.attention_specs()]
    assert maps == [(0, 0, 1), (0, 0)]
    ids = torch.randint(3, 60, (28,), generator=torch.Generator().manual_seed(0))
    table = hw.head_analysis.measure_streaming(pruned, [ids], sinks=SINKS, window=WINDOW)
    assert [head.kv for head in table.heads] == [0, 0, 1, 0, 0]
    changes = [min(1.0, head.measures["streaming_change"].value) for head in table.heads]
    expected = [[max(changes[:2]), changes[2]], [max(changes[3:]), np.nan]]
    listed = StreamingHeads.of(table, SINKS, WINDOW)
    assert np.array_equal(listed.scores, expected, equal_nan=True)
    listed.write(tmp_path / "list")
    streaming = use_streaming_heads(pruned, tmp_path / "list", sparsity=2 / 3)
    number = 0
    for layer, (_, spec) in enumerate(streaming.spec.attention_specs()):
        for head, kv in enumerate(maps[layer]):
            is_streaming = head_pattern(spec.pattern, head).text == "window(5) | first(2)"
            is_largest = expected[layer][kv] == np.nanmax(expected)
            assert is_streaming is not bool(is_largest)
            number += is_streaming
    assert number in (3, 4)
    assert streaming(ids[None]).isfinite().all()


def test_absent_heads_have_no_share_in_the_sparsity():
    scores = np.array([[0.1, 0.9, 0.3], [0.2, np.nan, np.nan]])
    listed = StreamingHeads(scores)
    assert listed.select(sparsity=0.5).tolist() == [[True, False, False], [True, False, False]]
    assert listed.select(sparsity=1).tolist() == [[True, True, True], [True, False, False]]
    assert listed.select(threshold=0.25).tolist() == listed.select(sparsity=0.5).tolist()


@torch.no_grad()
def test_streaming_heads_without_sinks_have_a_window_alone(tmp_path):
    model = ZOO["llama"].build("eager")
    ids = torch.randint(3, 60, (20,), generator=torch.Generator().manual_seed(0))
    table = hw.head_analysis.measure_streaming(model, [ids], sinks=0, window=WINDOW)
    weights = model(ids[None], output_attentions=True).attentions
    places = torch.arange(20)
    far = places[:, None] - places >= WINDOW
    for head in table.heads:
        rows = weights[head.layer][0, head.head].double()[WINDOW:]
        expected = float((rows * far[WINDOW:]).sum(-1).mean())
        assert head.measures["outside"].value == pytest.approx(expected, rel=1e-5)
    StreamingHeads.of(table, 0, WINDOW).write(tmp_path / "list")
    net = use_streaming_heads(model, tmp_path / "list", sparsity=1)
    assert next(net.spec.attention_specs())[1].pattern.text == "window(5)"


@pytest.mark.parametrize("name", ["gptj", "bloom", "falcon"])
def test_models_that_show_their_weights_alone_say_so(name):
    model = FALLBACK[name].build("eager")
    ids = torch.randint(3, 30, (20,), generator=torch.Generator().manual_seed(0))
    with pytest.raises(SpecError) as caught:
        hw.head_analysis.measure_streaming(model, [ids], sinks=SINKS, window=WINDOW)
    message = str(caught.value)
    assert message == (
        "cannot measure streaming heads, because the weights cannot be computed again: the model "
        "shows only the weights of its heads, not their values; load it with hw.load if headwise "
        "reads its family, or use another model"
    )
    if name != "falcon":
        net = hw.load(model)
        table = hw.head_analysis.measure_streaming(net, [ids], sinks=SINKS, window=WINDOW)
        assert table.texts == "1 passage of 20 tokens"
