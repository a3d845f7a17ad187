"""The example that puts circuits beside behaviour, on heads set by hand and against full matrices."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import headwise as hw
from headwise.models.vocabulary import ByteVocabulary
from headwise.observe.head_analysis.head_circuits import LowRankMap, as_native_model
from observe.head_analysis import handset_heads
from support.transformers_models import ZOO

EXAMPLE = Path(__file__).parents[1] / "examples" / "circuits_beside_behaviour.py"
SITE = "decoder.1.attention"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    described = importlib.util.spec_from_file_location("circuits_beside_behaviour", EXAMPLE)
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


def successor_model() -> hw.Transformer:
    """(1, 0) raises the logit of the token that it reads, (1, 1) that of the next token.

    There is no feed-forward layer, and the embeddings are unit vectors.
    """
    net = handset_heads.decoder()
    named = dict(net.named_parameters())
    words = handset_heads.WORDS
    token, dim = handset_heads.TOKEN, handset_heads.DIM
    (unembed,) = [one for name, one in named.items() if name.startswith("head.") and one.dim() == 2]
    with torch.no_grad():
        for head in range(2):
            rows = slice(head * dim, (head + 1) * dim)
            value, output = named[f"{SITE}.project.v"], named[f"{SITE}.output.o"]
            value[rows] = 0
            value[head * dim : head * dim + words, token] = torch.eye(words)
            output[:, rows] = 0
            output[token, head * dim : head * dim + words] = torch.eye(words).roll(head, 0)
        unembed.zero_()
        unembed[:, token] = torch.eye(words)
    return net


def test_roles_of_heads_set_by_hand(example):
    successors, copies = example.measure_roles(successor_model(), [[3, 4, 5, 6], [8, 9]], [2, 7])
    assert successors[SITE, 1] == 1
    assert copies[SITE, 0] == 1
    assert successors[SITE, 0] == 0
    assert successors["decoder.0.attention", 1] < 1


def test_the_head_set_by_hand_reads_the_previous_token_by_its_weights(example):
    by_qk = example.measure_previous_by_qk(handset_heads.decoder())
    numbers = {place: value for place, value in by_qk.items() if value == value}
    best = max(numbers, key=numbers.__getitem__)
    assert best == ("decoder.0.attention", 0)
    assert sorted(numbers.values())[-2] < 0.5 * by_qk[best]
    assert np.isnan(by_qk[SITE, 0])  # it reads what (0, 0) copies, which embeddings lack


def test_the_induction_head_composes_with_the_previous_token_head(example):
    net = handset_heads.decoder()
    previous = {(f"decoder.{layer}.attention", head): 0.1 for layer in (0, 1) for head in range(3)}
    previous["decoder.0.attention", 0] = 0.9
    composition = example.measure_k_composition(net, previous, count=1)
    assert {site for site, _ in composition} == {SITE}
    assert max(composition, key=composition.__getitem__) == (SITE, 0)
    assert composition[SITE, 0] > 0.05
    assert all(composition[SITE, 0] > 2 * composition[SITE, head] for head in (1, 2))


def test_k_composition_equals_full_matrices(example):
    draw = torch.Generator().manual_seed(0)

    def random_map() -> LowRankMap:
        return LowRankMap(torch.randn(13, 4, generator=draw), torch.randn(4, 13, generator=draw))

    receiver, senders = random_map(), [random_map() for _ in range(5)]
    qk = receiver.product.double().numpy()
    expected = []
    for sender in senders:
        ov = sender.product.double().numpy()
        expected.append(np.linalg.norm(qk @ ov.T) / np.linalg.norm(qk) / np.linalg.norm(ov))
    assert example.k_composition(receiver, senders).numpy() == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_previous_by_qk_equals_scores_by_the_modules_of_transformers(example):
    """Rotary positions: q k^T of every layer from the same random tokens."""
    model: Any = ZOO["llama"].build("eager")
    measured = example.measure_previous_by_qk(as_native_model(model))
    ids = torch.randint(67, (8, 64), generator=torch.Generator().manual_seed(0))
    for number, layer in enumerate(model.model.layers):
        z = layer.input_layernorm(model.model.embed_tokens(ids))
        q = layer.self_attn.q_proj(z).unflatten(-1, (4, 8)).transpose(1, 2)
        k = layer.self_attn.k_proj(z).unflatten(-1, (2, 8)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *model.model.rotary_emb(z, torch.arange(64)[None]))
        scores = (q @ k.repeat_interleave(2, 1).mT / 8**0.5).double().numpy()
        for head in range(4):
            previous, others = [], []
            for query in range(64):
                for key in range(query):
                    (previous if query - key == 1 else others).extend(scores[:, head, query, key])
            gap = (np.mean(previous) - np.mean(others)) / np.std(previous + others, ddof=1)
            assert measured[f"decoder.{number}.attention", head] == pytest.approx(gap, rel=1e-4)


def test_one_table_has_both_sides(example):
    config = {"model_type": "gpt2", "n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 256}
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    with pytest.raises(ValueError, match="has no tokenizer, so it only takes ids"):
        example.find_ids(net, "A B", is_series=True)
    net.usage = hw.ProcessorSpec(tokenizer=ByteVocabulary().document)
    assert example.find_ids(net, "A B AB C", is_series=True) == [65, 66]
    table = example.compare(net, ["one text", "another one", "a third"])
    assert len(table.rows) == 6
    assert [row[4] is None for row in sorted(table.rows)] == [True] * 3 + [False] * 3
    assert any("Spearman" in note for note in table.notes)
    assert "successors: 33 pairs, chance 0.06" in table.notes
