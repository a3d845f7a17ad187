"""`hw.prune` and `hw.convert` on a transformers model with plain strings, and the folders that they
write.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn  # noqa: F401 - used in refused.txt

import headwise as hw
from headwise.models.vocabulary import ByteVocabulary
from headwise.observe.head_analysis.annotated_examples import Example, examples_from_lines
from headwise.surgery import DropHeads, HeadRanking, KeepTop, Pool, ToMixtureOfHeads
from headwise.surgery.model_and_texts import split_examples
from support.refusals import refused_cases
from support.tiny_configs import model_config
from support.transformers_models import ZOO, without_columns

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TEXTS = ["one text here", "another one", "a third text", "and a fourth", "five is here too"]
PAIRS = [(text, text[::-1]) for text in TEXTS]
IDS = torch.tensor([list(b"some other text")])
DIM = 8


def live_model(name: str, folder: Path | None = None) -> Any:
    """A transformers model in memory; with a folder, loaded from it and with a tokenizer beside its
    weights.
    """
    zoo = ZOO[name]
    model: Any = zoo._replace(keys={**zoo.keys, "vocab_size": 300, "eos_token_id": None}).build(
        "sdpa"
    )
    if folder is None:
        return model
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(ByteVocabulary().document)
    return type(model).from_pretrained(folder).eval()


def fast_tokenizer() -> Any:
    document = ByteVocabulary().document
    from tokenizers import Tokenizer

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(document), pad_token="\x00"
    )


def ablated_logits(model: Any, removed: Any, suffix: str) -> torch.Tensor:
    """Logits of a copy of a transformers model whose output projections ignore
    the removed heads.
    """
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    layers = copy.model.layers if suffix == "o_proj" else copy.transformer.h
    paths = {id(module): path for path, module in copy.named_modules()}
    for site, head in removed:
        layer = layers[int(site.split(".")[1])]
        attention = layer.self_attn if suffix == "o_proj" else layer.attn
        without_columns(copy, paths[id(attention)], suffix, head, DIM)
    with torch.no_grad():
        return copy(IDS).logits


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_transformers_model_is_pruned_by_strings_and_saved(name: str, tmp_path: Path):
    model, suffix = live_model(name, tmp_path / "own"), ZOO[name].out
    before = {key: value.clone() for key, value in model.state_dict().items()}
    pruned = hw.prune(model, 0.5, TEXTS)
    net = hw.load(tmp_path / "own")
    assert (
        pruned.plan
        == hw.prune(net, 0.5, examples_from_lines(net, TEXTS).examples_with_frequencies()).plan
    )
    assert pruned.plan.num_kept == 4
    written = pruned.save_pretrained(tmp_path / "smaller")
    assert written.kind == {"llama": "transformers", "gpt2": "resized"}[name]
    expected = ablated_logits(model, pruned.plan.removed_heads, suffix)
    loaded: list[Callable[[torch.Tensor], torch.Tensor]] = [
        hw.load(tmp_path / "smaller"),
        pruned.after,
    ]
    if written.kind == "transformers":
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "smaller").eval()
        loaded.append(lambda ids: theirs(ids).logits)
    for call in loaded:
        torch.testing.assert_close(call(IDS).detach(), expected, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "smaller" / "tokenizer.json").read_text() == ByteVocabulary().document
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_weights_in_memory_are_saved_not_those_of_the_folder(tmp_path: Path):
    model = live_model("llama", tmp_path / "own")
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    pruned = hw.prune(
        model, DropHeads((("decoder.0.attention", 0), ("decoder.0.attention", 1))), TEXTS
    )
    pruned.save_pretrained(tmp_path / "smaller")
    expected = ablated_logits(model, pruned.plan.removed_heads, "o_proj")
    torch.testing.assert_close(
        hw.load(tmp_path / "smaller")(IDS).detach(), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("tokenizer", ["bytes", fast_tokenizer()], ids=["bytes", "transformers"])
def test_a_tokenizer_can_be_given_and_is_saved(tokenizer: Any, tmp_path: Path):
    pruned = hw.prune(live_model("llama"), 0.5, TEXTS, tokenizer=tokenizer)
    pruned.save_pretrained(tmp_path / "smaller")
    saved = hw.load(tmp_path / "smaller")
    assert hw.run_model(saved, "né").shape == (1, 3, 300)
    record = json.loads((tmp_path / "smaller" / "heads.json").read_text())
    assert record["change"]["keep"] == {
        site: list(heads) for site, heads in pruned.plan.keep.items()
    }


def test_a_headwise_model_takes_strings_and_stays_as_it_was(tmp_path: Path):
    config = model_config("gpt2", n_embd=24, n_head=3, n_layer=2, vocab_size=300, n_positions=64)
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    pruned = hw.prune(net, KeepTop(1, HeadRanking("michel")), TEXTS, tokenizer="bytes")
    assert net.usage.tokenizer is None
    assert pruned.save_pretrained(tmp_path / "smaller").kind == "ours"
    with torch.no_grad(), hw.ablate(net, pruned.plan.removed_heads):
        expected = net(IDS)
    reloaded = hw.load(tmp_path / "smaller")
    torch.testing.assert_close(
        hw.run_model(reloaded, "some other text"), expected, rtol=1e-5, atol=1e-5
    )
    assert "2 of 6 heads kept" in str(pruned)
    assert "parameters removed" in str(pruned)


def test_an_encoder_decoder_takes_pairs_or_lines_with_a_tab(tmp_path: Path):
    model = live_model("t5", tmp_path / "own")
    by_pairs = hw.prune(model, 0.5, PAIRS)
    assert by_pairs.plan == hw.prune(model, 0.5, ["\t".join(pair) for pair in PAIRS]).plan
    net = hw.load(tmp_path / "own")
    lines = examples_from_lines(
        net, ["\t".join(pair) for pair in PAIRS]
    ).examples_with_frequencies()
    assert by_pairs.plan == hw.prune(net, 0.5, lines).plan


@pytest.mark.filterwarnings("ignore:.* is not for transformers:UserWarning")
@pytest.mark.parametrize(
    "conversion",
    [
        2,
        Pool(2, align="both"),
        Pool(2, grouping="similar"),
        ToMixtureOfHeads(1, 2, HeadRanking("michel")),
    ],
    ids=["kv", "aligned", "similar", "routed"],
)
def test_a_transformers_model_is_converted_by_strings(conversion: Any, tmp_path: Path):
    model = live_model("gpt2", tmp_path / "own")
    converted, net = hw.convert(model, conversion, TEXTS), hw.load(tmp_path / "own")
    expected = hw.convert(
        net, conversion, examples_from_lines(net, TEXTS).examples_with_frequencies()
    )
    torch.testing.assert_close(converted.after(IDS), expected.after(IDS), rtol=0, atol=0)
    assert converted.groups == expected.groups
    converted.save_pretrained(tmp_path / "new")
    torch.testing.assert_close(
        hw.load(tmp_path / "new")(IDS), converted.after(IDS), rtol=1e-5, atol=1e-5
    )


def test_no_text_is_on_both_sides_of_a_split():
    examples = [Example({"x": number % 9}, {}) for number in range(18)]
    chosen, verification, notes = split_examples(examples, ["heads were ranked"])
    assert [one.inputs["x"] for one in chosen] == [0, 2, 4, 6, 8]
    assert [one.inputs["x"] for one in verification] == [1, 3, 5, 7]
    assert notes == [
        "heads were ranked with 5 texts that the verification does not use",
        "left out 9 texts that repeat an earlier one",
    ]


def test_skipped_texts_are_named():
    pruned = hw.prune(live_model("llama"), 0.5, [*TEXTS, " ", ""], tokenizer="bytes")
    assert "empty lines: 2" in pruned.plan.notes
    assert "empty lines: 2" in str(pruned)


@pytest.mark.parametrize(
    ("call", "message"), refused_cases(__file__, "models and texts", globals())
)
def test_wrong_arguments_give_one_line(call: Any, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        call(live_model("llama"))
    assert "\n" not in str(caught.value)


def test_a_folder_in_use_is_refused_before_any_work(tmp_path: Path):
    (tmp_path / "file").write_text("here")
    pruned = hw.prune(live_model("llama"), 0.5, TEXTS, tokenizer="bytes")
    with pytest.raises(ValueError, match="it contains file"):
        pruned.save_pretrained(tmp_path)


def test_a_folder_that_transformers_cannot_load_is_announced_and_refused_by_it(tmp_path: Path):
    pruned = hw.prune(
        live_model("llama"), DropHeads((("decoder.0.attention", 1),)), ["ab"], tokenizer="bytes"
    )
    folder = tmp_path / "out"
    with pytest.warns(
        UserWarning,
        match=f"{folder} is not for transformers. A headwise folder, because .*; load it with",
    ):
        assert pruned.save_pretrained(folder).kind == "ours"
    for name in ("AutoModelForCausalLM", "LlamaForCausalLM"):
        with pytest.raises(ValueError, match=r"headwise\.load\(folder\)"):
            getattr(transformers, name).from_pretrained(folder)
    torch.testing.assert_close(hw.load(folder)(IDS), pruned.after(IDS))
