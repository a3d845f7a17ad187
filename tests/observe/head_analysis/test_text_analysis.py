"""`hw.heads` and `hw.importance` on models of every kind with plain strings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

import headwise as hw
from headwise import cli
from headwise.models.vocabulary import ByteVocabulary
from support.refusals import refused_cases
from support.transformers_models import ZOO, without_columns

TEXTS = ["one text here", "another one", "a third text", "and a fourth"]
WIDE, HEADS = 24, 3


class NanoGPT(nn.Module):
    """A decoder whose ids are called idx, as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, WIDE), nn.Linear(WIDE, 300)
        self.c_attn, self.c_proj = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(idx)
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).split(WIDE, dim=2)
        )
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.c_proj(z.transpose(1, 2).flatten(2)))


class SentenceEncoder(nn.Module):
    """An encoder that takes the tokenizer's output as one dictionary, as in
    sentence-transformers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.auto_model = small("bert")

    def forward(self, input: dict[str, Tensor]) -> Tensor:
        return self.auto_model(**input).last_hidden_state


def small(name: str, **changes: Any) -> Any:
    zoo = ZOO[name]
    return zoo._replace(
        keys={**zoo.keys, "vocab_size": 300, "eos_token_id": None}, **changes
    ).build("sdpa")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small("gpt2").save_pretrained(tmp_path / "own")
    (tmp_path / "own" / "tokenizer.json").write_text(ByteVocabulary().document)
    (tmp_path / "texts").write_text("\n".join([*TEXTS, "", ""]))
    return tmp_path


def test_the_table_is_that_of_the_command(folder: Path, capsys: pytest.CaptureFixture[str]):
    model = type(small("gpt2")).from_pretrained(folder / "own").eval()
    table = hw.heads(model, [*TEXTS, ""])
    assert cli.main(["heads", str(folder / "own"), "--data", str(folder / "texts"), "--json"]) == 0
    assert table.data == json.loads(capsys.readouterr().out)
    assert cli.main(["heads", str(folder / "own"), "--data", str(folder / "texts")]) == 0
    assert str(table) == capsys.readouterr().out.rstrip("\n")


def test_importance_is_the_rise_of_the_loss_without_the_head(folder: Path):
    model = type(small("gpt2")).from_pretrained(folder / "own").eval()
    messages: list[str] = []
    result = hw.importance(model, TEXTS, log=messages.append)
    assert messages[0].startswith("leave-one-out: at most ")  # said before it is measured
    assert (result.method, result.objective, result.texts) == ("leave-one-out", "next-token", 4)

    def losses(net: Any) -> Tensor:
        ids = [torch.tensor([list(text.encode())]) for text in TEXTS]
        return torch.stack(
            [F.cross_entropy(net(row).logits[0, :-1].double(), row[0, 1:]) for row in ids]
        )

    with torch.no_grad():
        whole = losses(model)
        path = "transformer.h.1.attn"
        without_columns(model, path, "c_proj", 2, 8)
        expected = float((losses(model) - whole).mean())
    assert math.isclose(
        result.head("decoder.1.attention", 2).value, expected, rel_tol=1e-3, abs_tol=1e-6
    )


def test_any_module_with_found_attention_is_measured():
    torch.manual_seed(0)
    model = NanoGPT().eval()
    hw.sites(model, "an example", tokenizer="bytes")
    table = hw.heads(model, TEXTS, tokenizer="bytes")
    assert [(head.head, head.measures["previous"].rows) for head in table.heads] == [
        (head, sum(len(text) - 1 for text in TEXTS)) for head in range(HEADS)
    ]
    entropy, rows = [0.0] * HEADS, 0
    for text in TEXTS:  # the same measure from the projections alone, in double precision
        q, k, _ = model.c_attn.double()(
            model.embedding.double()(torch.tensor(list(text.encode())))
        ).split(WIDE, dim=1)
        scores = torch.einsum(
            "thk,shk->hts", q.unflatten(1, (HEADS, -1)), k.unflatten(1, (HEADS, -1))
        )
        mask = torch.ones(len(text), len(text)).triu(1).bool()
        weights = (scores / (WIDE / HEADS) ** 0.5).masked_fill(mask, -math.inf).softmax(-1)
        rows += len(text)
        for head in range(HEADS):
            entropy[head] += float(torch.special.entr(weights[head].detach()).sum())
    for head in table.heads:
        assert math.isclose(head.measures["entropy"].value, entropy[head.head] / rows, rel_tol=1e-4)


def test_a_model_that_takes_one_dictionary_is_measured():
    table = hw.heads(SentenceEncoder().eval(), TEXTS, tokenizer="bytes")
    inner = hw.heads(small("bert"), TEXTS, tokenizer="bytes")
    assert len(table.heads) == 8
    for ours, theirs in zip(table.heads, inner.heads, strict=True):
        assert math.isclose(
            ours.measures["entropy"].value, theirs.measures["entropy"].value, rel_tol=1e-4
        )


class UnreachedTower(nn.Module):
    """A decoder beside an encoder that texts do not reach, as in vision-language models."""

    def __init__(self) -> None:
        super().__init__()
        self.text_model, self.vision_model, self.config = small("gpt2"), small("vit"), None

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.text_model(input_ids).logits


def compile_second_layer() -> nn.Module:
    model = small("gpt2")
    model.transformer.h[1] = torch.compile(model.transformer.h[1], backend="eager")
    return model


SKIPPED = {
    "compiled": (
        compile_second_layer,
        "decoder.1.attention: transformer.h.1 (OptimizedModule) is compiled, and",
    ),
    "unreached": (
        UnreachedTower,
        "encoder.0.attention, encoder.1.attention: 4 of 4 texts do not reach it",
    ),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_sites_that_are_not_measured_are_named_with_the_reason(name: str):
    build, start = SKIPPED[name]
    table = hw.heads(build().eval(), TEXTS, tokenizer="bytes")
    (note,) = [note for note in table.notes if note.startswith("left out ")]
    assert note.startswith(f"left out {start}")
    assert not any(head.site in note for head in table.heads)
    assert "note: left out " in str(table)


def test_the_mask_token_of_a_given_tokenizer_is_used():
    tokenizer = Tokenizer.from_str(ByteVocabulary().document)
    tokenizer.add_special_tokens(["[MASK]"])
    model = small("bert", model="BertForMaskedLM")
    assert hw.importance(model, TEXTS, tokenizer=tokenizer).objective == "masked-token"
    assert hw.importance(model, TEXTS, tokenizer="bytes").objective == "drift"


@pytest.mark.parametrize(("call", "message"), refused_cases(__file__, "texts", globals()))
def test_wrong_arguments_give_one_line(call: Any, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        call(small("gpt2"))
    assert "\n" not in str(caught.value)
