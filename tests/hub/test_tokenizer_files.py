"""Tokenizers attached to models without one: bytes, or a file."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from torch import nn

import headwise as hw
from headwise.cli import main
from headwise.hub.transformers_loading import attach_tokenizer, has_tokenizer, read_processor
from headwise.models import model_spec as bp
from headwise.models.generation import encode_text, load_tokenizers
from headwise.observe.inspect.model_tokenizer import find_tokenizer
from headwise.surgery.verification.efficiency import TimingOptions
from headwise.surgery.verification.verify import VerificationOptions, verify
from support.llama2c_tokenizer import FIRST, reference_tokenize
from support.pruned_models import build_model, make_model_spec
from support.stories_model import make_tokenizer
from support.tiny_configs import model_config

QUICK = TimingOptions(length=8, steps=2, seconds=0.01)


def wordless(words=256, kind="decoder"):
    """A model without a tokenizer, of so many ids."""
    return build_model(replace(make_model_spec(kind, words=words)))


def test_ids_are_bytes_and_come_back_as_text():
    net, text = wordless(), "Grüße, 中 \n\x00."
    attach_tokenizer(net, "bytes")
    assert encode_text(net, text) == list(text.encode())
    assert load_tokenizers(net)[1].text(list(text.encode())) == text


def test_models_of_other_libraries_keep_a_tokenizer_that_is_attached():
    module = nn.Embedding(256, 2)
    assert not has_tokenizer(module)
    attach_tokenizer(module, "bytes")
    assert has_tokenizer(module)
    tokenizer = find_tokenizer(module)
    assert tokenizer is not None
    assert tokenizer.encode("né").ids == [110, 195, 169]
    with pytest.raises(ValueError, match="Embedding has a tokenizer of its own; leave 'bytes' out"):
        attach_tokenizer(module, "bytes")


def test_too_few_ids_another_tokenizer_and_models_of_others_are_refused(tmp_path):
    with pytest.raises(ValueError, match="knows 256 tokens, the model 255"):
        attach_tokenizer(wordless(255), "bytes")
    net = wordless()
    attach_tokenizer(net, "bytes")
    with pytest.raises(ValueError, match="has a tokenizer of its own; leave 'bytes' out"):
        attach_tokenizer(net, "bytes")
    with pytest.raises(ValueError, match="takes no token ids, so no text"):
        attach_tokenizer(build_model(make_model_spec("vision")), "bytes")
    with pytest.raises(ValueError, match="there is no tokenizer at"):
        attach_tokenizer(wordless(), str(tmp_path / "none"))
    (tmp_path / "odd.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match="is not a tokenizer document"):
        attach_tokenizer(wordless(), str(tmp_path / "odd.json"))
    (tmp_path / "odd.bin").write_bytes(b"\x01\x02")
    with pytest.raises(ValueError, match="is not a tokenizer document"):
        attach_tokenizer(wordless(), str(tmp_path / "odd.bin"))


def test_classes_without_names_are_called_as_transformers_calls_them(tmp_path):
    config = model_config("bert", hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    config |= {"vocab_size": 9, "architectures": ["BertForSequenceClassification"]}
    for names, expected in (
        ({}, ("LABEL_0", "LABEL_1")),
        ({"id2label": {"0": "no", "1": "yes"}}, ("no", "yes")),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | names))
        usage = read_processor(tmp_path, hw.families.read_model_spec(config | names))
        assert usage.labels == expected


SPECIAL_IDS = [
    ("eos_token_id", 99999),
    ("eos_token_id", -1),
    ("pad_token_id", -7),
    ("eos_token_id", [2, 9]),
]


@pytest.mark.parametrize(("key", "value"), SPECIAL_IDS)
def test_special_ids_outside_the_vocabulary_are_left_out(key, value, tmp_path):
    config = model_config("gpt2", n_embd=8, n_head=2, n_layer=1, vocab_size=9, eos_token_id=8)
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    usage = read_processor(tmp_path, hw.families.read_model_spec(config))
    assert usage.eos == {"pad_token_id": (8,)}.get(key, (2,) if isinstance(value, list) else ())


def test_a_tokenizer_that_gives_tokens_one_id_is_refused(tmp_path):
    words = {f"word{n}": min(n, 5) for n in range(9)}
    document = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "word0"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(
        ValueError,
        match=r"tokenizer.json gives 4 tokens the id 5, such as 'word5' and 'word6'; give",
    ):
        read_processor(tmp_path, make_model_spec("decoder", words=9))
    document["model"]["vocab"] = {f"word{n}": n for n in range(9)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert read_processor(tmp_path, make_model_spec("decoder", words=9)).tokenizer is not None


def test_a_document_is_read_as_it_is_meant(tmp_path):
    pieces = [*FIRST, (" ", -1.0), ("a", -2.0), ("b", -3.0), ("ab", -0.5)]
    make_tokenizer(pieces).save(str(tmp_path / "tokenizer.json"))
    net = wordless(len(pieces))
    attach_tokenizer(net, str(tmp_path / "tokenizer.json"))
    assert net.usage.prefix_ids == (1,)
    assert encode_text(net, "ab ba") == [1, *reference_tokenize(pieces, "ab ba")]
    small = wordless(len(pieces) - 1)
    with pytest.raises(ValueError, match="knows 263 tokens, the model 262"):
        attach_tokenizer(small, str(tmp_path / "tokenizer.json"))


def test_the_command_that_looks_at_heads_takes_it(tmp_path, capsys):
    net = wordless()
    hw.save(net, tmp_path / "net")
    (tmp_path / "texts").write_text("The cat sat.\nA dog ran over there.\n")
    result = ["heads", str(tmp_path / "net"), "--data", str(tmp_path / "texts"), "--json"]
    assert main(result) == 2
    assert "no tokenizer" in capsys.readouterr().err
    assert main([*result, "--tokenizer", "bytes"]) == 0
    assert len(json.loads(capsys.readouterr().out)["heads"]) == 8


def test_a_long_text_is_split():
    described = make_model_spec("decoder", words=256)
    first = replace(
        described.stacks[0],
        embedding=bp.EmbeddingSpec(256, positions=bp.PositionSpec("learned", 20)),
    )
    net = build_model(replace(described, stacks=(first,)))
    attach_tokenizer(net, "bytes")
    from headwise.observe.head_analysis.annotated_examples import examples_from_lines

    sources = examples_from_lines(net, ["The cat sat.", "A dog ran over all there."])
    verification = verify(
        net,
        net,
        sources.examples_with_frequencies(),
        VerificationOptions("Nothing.", timing=QUICK, notes=sources.notes),
    )
    assert verification.notes == ("lines split because they are longer than the model takes: 1",)
    assert verification.savings.length == 20


def test_translations_are_scored_against_their_references():
    net = build_model(make_model_spec("encoder-decoder", words=256))
    net.usage = hw.ProcessorSpec(bos=(1,), eos=(2,))
    attach_tokenizer(net, "bytes")
    sources = hw.ExampleReader(net)
    for source, text in (
        ("a cat sits", "eine Katze sitzt dort"),
        ("dogs run", "zwei Hunde laufen schnell"),
        ("a bird", "ein Vogel"),
    ):
        sources.add_text(source, text)
    verification = verify(
        net, net, sources.examples_with_frequencies(), VerificationOptions("Nothing.", timing=QUICK)
    )
    bleu = verification.quality.row("BLEU")
    assert bleu.before.value == bleu.after.value
    assert bleu.change.value == 0.0
    assert 0 <= bleu.after.value < 20
