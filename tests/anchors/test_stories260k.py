"""A trained model of 260,000 parameters, built from our layers: greedy decoding gives the published
story.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.hub.pretrained_models import load_original
from support.stories_model import write_stories_folder

PROMPT = 16  # the golden logits are those after so many ids


class Story:
    """Token embedding, 5 blocks of RMSNorm, attention, RMSNorm and SwiGLU, RMSNorm, and the
    embedding again.
    """

    def __init__(self, weights: dict[str, Tensor], golden: dict[str, Any]) -> None:
        sizes = golden["config"]
        self.weights, self.eps, self.capacity = weights, golden["rms_eps"], sizes["seq_len"]
        spec = hw.design(
            model=sizes["dim"],
            heads=sizes["n_heads"],
            kv=sizes["n_kv_heads"],
            pattern="causal()",
            modifiers=(hw.Rotary(base=golden["rope_theta"], pairs="interleaved"),),
        )
        self.layers = [hw.Attention(spec) for _ in range(sizes["n_layers"])]
        for depth, layer in enumerate(self.layers):
            named = {f"project.{side}": weights[f"w{side}"][depth] for side in "qkv"}
            layer.load_state_dict(named | {"output.o": weights["wo"][depth]} | constants(layer))

    def caches(self) -> list[hw.KVCache]:
        return [layer.cache(batch=1, capacity=self.capacity) for layer in self.layers]

    def __call__(self, ids: list[int], caches: list[hw.KVCache] | None = None) -> Tensor:
        """The logits [T, vocabulary] after each of these ids."""
        weights, result = self.weights, caches or [None] * len(self.layers)
        x = weights["tok_embeddings"][torch.tensor([ids])]
        for depth, (layer, cache) in enumerate(zip(self.layers, result, strict=True)):
            x = x + layer(self.norm(x, weights["attention_norm"][depth]), cache=cache)
            y = self.norm(x, weights["ffn_norm"][depth])
            gate, up, down = (weights[name][depth] for name in ("w1", "w3", "w2"))
            x = x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)
        return F.linear(self.norm(x, weights["norm"]), weights["tok_embeddings"])[0]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


def constants(layer: hw.Attention) -> dict[str, Tensor]:
    """What the layer holds that the checkpoint has no weights for: its own constants."""
    return {
        name: tensor for name, tensor in layer.state_dict().items() if name.startswith("rotary.")
    }


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    found = shared / "data" / "model_stories260k"
    if not found.is_dir():
        pytest.skip("there is no model_stories260k in the folder `shared`")
    return found


@pytest.fixture(scope="module")
def golden(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "golden.json").read_text())


@pytest.fixture(scope="module")
def weights(folder: Path) -> dict[str, Tensor]:
    with np.load(folder / "weights.npz") as recorded:
        return {name: torch.from_numpy(recorded[name]) for name in recorded.files}


@pytest.fixture(scope="module")
def story(weights: dict[str, Tensor], golden: dict[str, Any]) -> Story:
    return Story(weights, golden)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def check_top_five(logits: Tensor, golden: dict[str, Any]) -> None:
    """The five likeliest ids and their logits, as published by the reference run."""
    ids, values = zip(*golden["logits_after_first_16_ids_last_row_top5"], strict=True)
    top = logits.topk(5)
    assert top.indices.tolist() == list(ids)
    assert (top.values - torch.tensor(values)).abs().max() < 1e-4


def test_the_model_is_the_one_described(
    weights: dict[str, Tensor], story: Story, golden: dict[str, Any]
):
    """512 x 64 embeddings, 5 layers of 45,440 numbers of which 12,288 are attention, and the last
    norm.
    """
    trained = sum(
        weight.numel() for name, weight in weights.items() if not name.startswith("freqs")
    )
    assert trained == 512 * 64 + 5 * 45_440 + 64
    assert [sum(p.numel() for p in layer.parameters()) for layer in story.layers] == [12_288] * 5
    assert len(golden["greedy_ids"]) > 10 * PROMPT
    assert golden["greedy_ids"][0] == golden["bos_id"]


def test_frequencies_are_those_in_the_checkpoint(weights: dict[str, Tensor], story: Story):
    rate = torch.tensor(story.layers[0].spec.modifiers[0].frequencies(8), dtype=torch.float64)
    angle = torch.arange(story.capacity, dtype=torch.float64)[:, None] * rate
    assert (angle.cos() - weights["freqs_cos"]).abs().max() < 1e-5  # theirs were taken in float32
    assert (angle.sin() - weights["freqs_sin"]).abs().max() < 1e-5


def test_one_pass_predicts_every_next_id(story: Story, golden: dict[str, Any]):
    ids = golden["greedy_ids"]
    logits = story(ids)
    assert logits.argmax(-1)[:-1].tolist() == ids[1:]
    check_top_five(logits[PROMPT - 1], golden)


def test_greedy_decoding_through_caches(story: Story, golden: dict[str, Any]):
    ids, caches = golden["greedy_ids"], story.caches()
    written = ids[:1]
    while len(written) < len(ids):
        logits = story(written[-1:], caches)
        if len(written) == PROMPT:
            check_top_five(logits[-1], golden)
        written.append(int(logits[-1].argmax()))
    assert written == ids


@pytest.mark.parametrize("chunks", [(PROMPT,), (1, 2, 13, 1, 37), (3, 5, 7, 11)])
def test_a_prefill_in_chunks_changes_nothing(
    story: Story, golden: dict[str, Any], chunks: tuple[int, ...]
):
    ids, caches = golden["greedy_ids"], story.caches()
    got, at = [], 0
    for size in (*chunks, len(ids) - sum(chunks)):
        got.append(story(ids[at : at + size], caches))
        at += size
    logits = torch.cat(got)
    check_top_five(logits[PROMPT - 1], golden)
    assert (logits - story(ids)).abs().max() < 1e-4
    assert logits.argmax(-1)[:-1].tolist() == ids[1:]


def test_rows_of_different_lengths_do_not_disturb_each_other(story: Story, golden: dict[str, Any]):
    """One attention layer, the same story cut at three places and padded on the left."""
    layer, ids = story.layers[0], golden["greedy_ids"][:29]
    x = story.norm(
        story.weights["tok_embeddings"][torch.tensor([ids])], story.weights["attention_norm"][0]
    )
    lengths = [29, 17, 5]
    rows = [F.pad(x[0, :length], (0, 0, 29 - length, 0)) for length in lengths]
    batch = torch.stack(rows)
    got = layer(batch, sequence=hw.SequenceInfo.from_batch(batch, lengths=lengths, pad="left"))
    want = layer(x)[0]
    assert all(
        (row[29 - n :] - want[:n]).abs().max() < 1e-5 for row, n in zip(got, lengths, strict=True)
    )


# --- stories260k, trained by others ---


pytest.importorskip("transformers", reason="transformers is not installed")


def test_rows_are_those_of_transformers(shared: Path, tmp_path: Path):
    data = shared / "data" / "model_stories260k"
    net = hw.load(write_stories_folder(data, tmp_path / "stories260K"))
    hw.export(net, tmp_path / "llama")
    other = load_original(tmp_path / "llama")
    other.set_attn_implementation("eager")
    trace = hw.trace(net, "Once upon a time there was a little dog.", max_new_tokens=8)
    ids = torch.tensor([trace.streams["text"][0].ids])
    with torch.no_grad():
        outputs = other(input_ids=ids, output_attentions=True)
    for layer, weights in enumerate(outputs.attentions):
        num_queries = trace.get_layer(layer).num_queries
        assert num_queries == ids.shape[1] - 1
        for head in range(8):
            own = weights[0, head, :num_queries, :num_queries].numpy()
            np.testing.assert_allclose(trace.head_weights(layer, head), own, atol=1e-5)
    assert {len(one.calls) for one in trace.layers} == {8}
