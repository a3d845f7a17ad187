"""Token ids, batches, mappings and traces in place of texts: the same numbers as for the texts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from support.number_examples import small_gpt2
from support.tiny_configs import model_config
from viewer.page_browser import exported_data

TEXTS = ["one text, and more of it", "another one: longer, yes"]
IDS = torch.tensor([list(text.encode()) for text in TEXTS])
PADDED = torch.cat([torch.zeros(2, 3, dtype=torch.long), IDS], 1)
PADDED[0, :3] = torch.tensor([7, 8, 9])
MASK = torch.ones_like(PADDED)
MASK[1, :3] = 0


def decoder() -> nn.Module:
    """A decoder of bytes, without a tokenizer."""
    config = model_config("gpt2", n_embd=12, n_head=3, n_layer=2, vocab_size=256)
    return hw.build(hw.families.read_model_spec(config), seed=0).eval()


class OwnModule(nn.Module):
    """An encoder that nobody knows, of the ids `idx`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 12)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.table(idx)
        return self.attention(x, x, x)[0]


def values(table: hw.head_analysis.HeadTable) -> dict[Any, float]:
    """The value of every measure of every head."""
    return {
        (head.site, head.head, name): measure.value
        for head in table.heads
        for name, measure in head.measures.items()
    }


def check_equal(one: Any, other: Any, tolerance: float = 0.0) -> None:
    first, second = values(one), values(other)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert math.isclose(value, second[key], abs_tol=tolerance) or (
            math.isnan(value) and math.isnan(second[key])
        ), key


@pytest.mark.parametrize(
    "inputs",
    [
        IDS,
        [IDS[0], IDS[1][None]],
        [IDS[0].tolist(), IDS[1].numpy()],
        IDS.tolist(),
        np.asarray(IDS),
        {"input_ids": IDS},
        [{"input_ids": IDS[:1], "attention_mask": torch.ones(1, IDS.shape[1])}, {"x": IDS[1:]}],
    ],
    ids=["batch", "rows", "lists", "list of lists", "array", "mapping", "mappings"],
)
def test_ids_are_measured_as_their_texts(inputs: Any):
    net = decoder()
    by_ids = hw.heads(net, inputs, tokenizer="bytes")
    assert by_ids.texts == "2 texts"
    # of a text, words are known, and of ids, tokens; only measures of words may differ
    check_equal(by_ids, hw.heads(net, TEXTS, tokenizer="bytes"))


def test_padding_of_a_mapping_is_left_out():
    net = decoder()
    padded = hw.heads(net, {"input_ids": PADDED, "attention_mask": MASK})
    check_equal(padded, hw.heads(net, [PADDED[0], IDS[1]]))


def test_importance_takes_ids():
    net = decoder()
    by_ids = hw.importance(net, IDS)
    by_text = hw.importance(net, TEXTS, tokenizer="bytes")
    assert [head.value for head in by_ids.heads] == [head.value for head in by_text.heads]


def test_own_modules_are_measured_and_shown_by_ids():
    net = OwnModule().eval()
    table = hw.heads(net, IDS)
    weights = net.attention(*[net.table(IDS[:1])] * 3, average_attn_weights=False)[1][0, 1]
    entropy = -(weights * weights.log()).sum(-1).mean().item()
    alone = hw.heads(net, IDS[:1])
    assert alone.texts == "1 text"
    assert alone.heads[1].measures["entropy"].value == pytest.approx(entropy, abs=1e-6)
    assert len(table.heads) == 3
    assert "srcdoc" in hw.view(net, IDS, row=1)._repr_html_()


def test_a_trace_is_measured_without_the_model():
    net = small_gpt2()
    ids = torch.randint(3, 29, (3, 23), generator=torch.Generator().manual_seed(1))
    traced = hw.trace(net, ids)
    table = hw.heads(traced)
    assert table.texts == "3 texts"
    check_equal(table, hw.heads(net, ids), 1e-5)
    one = hw.heads(traced.select_row(2))
    check_equal(one, hw.heads(net, ids[2]), 1e-5)
    assert np.array_equal(traced.select_row(2)["L1H3"], traced.head_weights(1, 3, row=2))
    shown = exported_data(hw.view(traced, row=1).html)["answers"]["/api/document"]
    assert [site["name"] for site in shown["sites"]] == [site.name for site in hw.sites(net)]
    with pytest.raises(ValueError, match="a trace records its own texts; leave texts out"):
        hw.heads(traced, TEXTS)


def test_a_padded_batch_of_a_trace_is_measured_without_padding():
    net = decoder()
    traced = hw.trace(net, ["a longer text here", "short one"], tokenizer="bytes")
    texts = ["a longer text here", "short one"]
    check_equal(hw.heads(traced), hw.heads(net, texts, tokenizer="bytes"), 1e-5)


def test_tokens_of_ids_are_decoded_where_a_tokenizer_is_known():
    traced = hw.trace(decoder(), [72, 73], tokenizer="bytes")
    assert traced.streams["text"][0].words == ("H", "I")
    assert hw.trace(decoder(), [72, 73]).streams["text"][0].words == ("72", "73")


def test_one_text_has_measures_and_no_tests():
    net = decoder()
    table = hw.heads(net, "one short text", tokenizer="bytes")
    assert table.texts == "1 text"
    assert "classes need 20 rows and are not tested" in table.notes[0]
    assert all("fewer than 20 rows" in head.classes[0].evidence for head in table.heads)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a", IDS[0]], "texts are of several kinds; give strings, token ids or Examples only"),
        ([torch.zeros(3, 4)], "text 0 is of type Tensor; give strings, .* token ids"),
        ([{"x": torch.zeros(1, 3)}], "ids are torch.float32 .1, 3.; give integers"),
    ],
)
def test_other_inputs_are_refused(texts: Any, message: str):
    with pytest.raises(ValueError, match=message):
        hw.heads(decoder(), texts, tokenizer="bytes")
