"""Text as ids and back: incremental text, stops across tokens, and processor
settings of a folder.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel, WordPiece

import headwise as hw
from headwise.models import model_spec as bp
from headwise.models.generation import IncrementalDetokenizer, ModelTokenizer
from headwise.models.generation.generate import classify
from headwise.models.generation.text_output import Completion
from headwise.models.vocabulary import ByteVocabulary, train_bpe
from headwise.training.data import make_task

TEXT = "low lower lowest 你好 naïve 😀 — new newer newest"


def wordpiece() -> str:
    words = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "cat",
        "sat",
        "##s",
        ".",
        "dog",
        "##ing",
        ",",
    ]
    tokenizer = Tokenizer(WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizers.Lowercase(),
        pre_tokenizers.BertPreTokenizer(),
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(words[:4])
    return tokenizer.to_str()


def sentencepiece() -> str:
    """As Llama's: a space is a sign of its own, taken off where a text begins, and what is unknown
    is bytes.
    """
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["<unk>", *"▁lowernst", "▁lo", "lo"]
    vocabulary = {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(
        BPE(vocabulary, [("l", "o"), ("▁", "lo")], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fused = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(fused)
    return tokenizer.to_str()


DOCUMENTS = {
    "bytes": ByteVocabulary().document,
    "pieces": train_bpe([TEXT] * 5, 300, ("<s>", "</s>")).document,
    "sentencepiece": sentencepiece(),
    "wordpiece": wordpiece(),
}
WORDS = {name: ModelTokenizer(document) for name, document in DOCUMENTS.items()}


def pieces(incremental_detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    """What every id adds, and what is left at the end."""
    recorded, before = [], ""
    for one in [*ids, None]:
        if one is None:
            incremental_detokenizer.close()
        else:
            incremental_detokenizer.append(one)
        assert incremental_detokenizer.text.startswith(before)
        recorded.append(incremental_detokenizer.text[len(before) :])
        before = incremental_detokenizer.text
    return recorded


# --- as it comes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bytes", "pieces"])
@given(data=st.data())
def test_any_ids_come_as_the_text_that_they_are(name: str, data: st.DataObject):
    """Bytes that make no character among them."""
    words = WORDS[name]
    ids = data.draw(
        st.lists(st.one_of(st.integers(0, 255), st.sampled_from([0xE4, 0xBD, 0xA0, 0xF0])))
    )
    assert "".join(pieces(IncrementalDetokenizer(words), ids)) == words.text(ids)
    before = words.ids("low 你")
    assert (
        "".join(pieces(IncrementalDetokenizer(words, before), ids))
        == words.text([*before, *ids])[5:]
    )


@pytest.mark.parametrize("name", ["bytes", "pieces", "sentencepiece"])
@given(text=st.text(alphabet="lowernst 你😀é\n", max_size=20), first=st.integers(0, 20))
def test_a_text_goes_on_as_it_is_written(name: str, text: str, first: int):
    """Spaces at the seam too; and characters never come in part."""
    words = WORDS[name]
    ids = words.ids(text)
    result = pieces(IncrementalDetokenizer(words, ids[:0]), ids)
    assert "".join(result) == words.text(ids)
    assert not any("\ufffd" in piece for piece in result)
    begun = words.text(ids[:first])
    if not begun.endswith("\ufffd"):
        assert begun + "".join(
            pieces(IncrementalDetokenizer(words, ids[:first]), ids[first:])
        ) == words.text(ids)


def test_a_character_waits_for_its_last_byte():
    incremental_detokenizer = IncrementalDetokenizer(WORDS["bytes"])
    assert pieces(incremental_detokenizer, list("a你😀".encode())) == [
        "a",
        "",
        "",
        "你",
        "",
        "",
        "",
        "😀",
        "",
    ]
    assert pieces(IncrementalDetokenizer(WORDS["bytes"]), [0xF0, 0x9F, 0x41, 0xE4]) == [
        "",
        "",
        "\ufffdA",
        "",
        "\ufffd",
    ]
    assert pieces(IncrementalDetokenizer(WORDS["bytes"]), [0xFF] * 6) == ["", "", "", "\ufffd"] + [
        "\ufffd"
    ] * 2 + ["\ufffd" * 3]


def test_emitted_text_is_never_withdrawn():
    """Behind whole characters a byte comes that spoils all bytes before it, to such a decoder."""
    words = WORDS["sentencepiece"]
    whole = list("你".encode())
    assert words.text([*whole, 0xFF]) == "\ufffd" * 4
    assert "".join(pieces(IncrementalDetokenizer(words), [*whole, 0xFF])) == "你\ufffd"


# --- stops ----------------------------------------------------------------------------------------


@given(
    text=st.text(alphabet="ab你", max_size=24),
    stops=st.lists(st.text(alphabet="ab你", min_size=1, max_size=4), max_size=3),
)
def test_an_answer_is_the_text_before_the_first_stop(text: str, stops: list[str]):
    """Told in pieces that never hold what a stop cuts off; ids end where that begins."""
    answer = Completion((), stops, IncrementalDetokenizer(WORDS["bytes"]))
    ids, message, recorded = list(text.encode()), "", []
    for one in ids:
        answer.take(one)
        message += answer.take_new_text()
        recorded += answer.take_new_ids()
        assert all(stop not in message for stop in stops)
    answer.close()
    cut = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    assert message + answer.take_new_text() == answer.text == text[:cut]
    assert recorded + answer.take_new_ids() == answer.ids == list(text[:cut].encode())


def test_the_work_for_a_stop_text_grows_as_the_output_does():
    answer = Completion((), ["x" * 20_000], IncrementalDetokenizer(WORDS["bytes"]))
    begin = time.process_time()
    for _ in range(3000):
        answer.take(ord("x"))
        assert (answer.take_new_text(), answer.take_new_ids()) == ("", [])
    # every beginning of the stop text at every token: minutes
    assert time.process_time() - begin < 5


@pytest.mark.parametrize(
    ("stops", "message"),
    [(["a"] * 65, "65 texts and ids"), (["a" * 4097], "a text of 4097 characters")],
)
def test_stop_texts_have_a_largest_number_and_length(stops: list[str], message: str):
    assert hw.DecodingConfig(stop=("a" * 4096,) * 64).words
    with pytest.raises(hw.SpecError, match=f"{message}; give at most"):
        hw.DecodingConfig(stop=tuple(stops))


def test_a_possible_stop_is_withheld_only_while_possible():
    answer = Completion((), ("abc",), IncrementalDetokenizer(WORDS["bytes"]))
    recorded = []
    for one in b"xababab":
        answer.take(one)
        recorded.append(answer.take_new_text())
    assert recorded == ["x", "", "", "ab", "", "ab", ""]
    answer.take(ord("c"))
    assert (answer.over, answer.take_new_text(), answer.text, bytes(answer.ids)) == (
        True,
        "",
        "xabab",
        b"xabab",
    )


# --- generation of text ---------------------------------------------------------------------------


def decoder(words: int, positions: int = 0) -> bp.ModelSpec:
    block = bp.BlockSpec(
        hw.design(model=12, heads=3, pattern="causal()"), feed=bp.FeedForwardSpec(17)
    )
    places = bp.PositionSpec("learned", positions) if positions else bp.PositionSpec("sinusoidal")
    stack = bp.StackSpec.from_blocks(
        "decoder",
        12,
        [block],
        embedding=bp.EmbeddingSpec(words, positions=places),
        norm=bp.NormSpec(),
    )
    return bp.ModelSpec("small", "decoder", (stack,), (bp.OutputHeadSpec("tokens", words),))


def random_model(described: bp.ModelSpec, **usage: Any) -> hw.Transformer:
    net = hw.build(described, seed=0).double()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "norm." not in name:
                p.copy_(torch.randn(p.shape, dtype=p.dtype) * 0.5)
    net.usage = hw.ProcessorSpec(**usage)
    return net


@pytest.fixture
def speaker() -> hw.Transformer:
    """A model that reads and writes bytes."""
    return random_model(decoder(256), tokenizer=DOCUMENTS["bytes"])


SAMPLING = {"max_new_tokens": 30, "temperature": 1.0, "seed": 4}


def test_text_behind_text_is_ids_behind_ids(speaker: hw.Transformer):
    ids = hw.generate(speaker, list(b"low"), **SAMPLING)
    text = hw.generate(speaker, "low", **SAMPLING)
    assert text == bytes(ids).decode(errors="replace")
    assert hw.generate(speaker, ["low", "lowest"], **SAMPLING)[0] == text
    assert "".join(hw.stream(speaker, "low", **SAMPLING)) == text
    around = replace(speaker.usage, prefix_ids=(1, 2), eos=(ids[5],))
    speaker.usage = around
    expected = hw.generate(speaker, [1, 2, *b"low"], **SAMPLING)
    assert hw.generate(speaker, "low", **SAMPLING) == bytes(expected).decode(errors="replace")
    assert hw.generate(speaker, "", **SAMPLING) == bytes(
        hw.generate(speaker, [1, 2], **SAMPLING)
    ).decode(errors="replace")


def test_a_stop_ends_an_answer_as_text_and_as_ids(speaker: hw.Transformer):
    for temperature, beams in ((1.0, 1), (0.0, 3)):
        options = SAMPLING | {"temperature": temperature}
        free = hw.generate(speaker, "low", **options, config=hw.DecodingConfig(beams=beams))
        stop = free[4:7]
        how = hw.DecodingConfig(stop=(stop, "never there"), beams=beams)
        cut = hw.generate(speaker, "low", **options, config=how)
        assert stop not in cut
        if beams == 1:
            assert cut == free[: free.index(stop)]
            assert "".join(hw.stream(speaker, "low", **options, config=how)) == cut
            ids = hw.generate(speaker, list(b"low"), **options, config=how)
            assert list(hw.stream(speaker, list(b"low"), **options, config=how)) == ids
            assert bytes(ids).decode(errors="replace") == cut


@pytest.mark.parametrize("name", ["dates", "wordpiece", "chars"])
def test_unknown_tokens_are_reported(name: str):
    # of which <unk> itself is none
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    document = {
        "dates": make_task("dates").tokenizer,
        "wordpiece": wordpiece(),
        "chars": tokenizer.to_str(),
    }[name]
    texts = {
        "dates": ("<zh>3 May €", "€", 10),
        "wordpiece": ("The cät sat", "cät", 4),
        "chars": ("abx", "x", 2),
    }
    text, piece, at = texts[name]
    with pytest.raises(hw.SpecError) as caught:
        ModelTokenizer(document or "", "read").ids(text)
    assert str(caught.value).startswith(f"cannot tokenize {piece!r} at character {at}")


def test_special_tokens_are_text_unless_they_are_to_be_read():
    words = WORDS["pieces"]
    assert words.text(words.ids("a</s>")) == "a</s>"
    assert words.ids("a</s>", "read")[-1] == 1
    assert words.text([*words.ids("a"), 1]) == "a"


# --- what a folder says ---------------------------------------------------------------------------


def test_a_folder_keeps_the_processor_spec(tmp_path: Path):
    size = Tokenizer.from_str(DOCUMENTS["pieces"]).get_vocab_size()
    net = random_model(
        decoder(size),
        tokenizer=DOCUMENTS["pieces"],
        eos=(1,),
        prefix_ids=(0,),
        parse_special=True,
        mask=0,
    )
    hw.save(net, tmp_path / "a")
    again = hw.load(tmp_path / "a")
    assert again.usage == net.usage
    hw.save(again, tmp_path / "b")
    assert hw.load(tmp_path / "b").usage == net.usage
    assert (tmp_path / "b" / "tokenizer.json").read_text() == DOCUMENTS["pieces"]
    generated = hw.generate(net, "low", **SAMPLING)
    assert hw.generate(hw.load(tmp_path / "b"), "low", **SAMPLING) == generated
    again.usage = hw.ProcessorSpec()
    hw.save(again, tmp_path / "a")
    assert hw.load(tmp_path / "a").usage == hw.ProcessorSpec()


EDITED = {
    "unknown": ("eos = [1]", "eoss = [1]", "usage has no 'eoss'; did you mean 'eos'"),
    "no ids": ("eos = [1]", 'eos = ["x"]', r"ProcessorSpec\(eos=\('x',\)\); give a tuple of ids"),
    "beyond": (
        "eos = [1]",
        "eos = [300]",
        r"eos=\(300,\) is out of range for small, whose vocabulary has 300 tokens",
    ),
    "no table": ("[usage]\neos = [1]\n", "", "usage = 3 is not a table"),
}


@pytest.mark.parametrize("name", EDITED)
def test_an_invalid_processor_spec_is_refused(tmp_path: Path, name: str):
    old, new, words = EDITED[name]
    hw.save(random_model(decoder(300), eos=(1,)), tmp_path)
    path = tmp_path / "headwise.toml"
    text = path.read_text().replace(old, new)
    path.write_text(f"usage = 3\n{text}" if name == "no table" else text)
    with pytest.raises(hw.SpecError, match=words) as caught:
        hw.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_the_processor_spec_of_another_model_is_not_saved(tmp_path: Path):
    for usage, words in (
        ({"tokenizer": DOCUMENTS["bytes"]}, "tokenizer knows 256 tokens, the model 101"),
        ({"source_tokenizer": DOCUMENTS["bytes"]}, "source_tokenizer knows 256 tokens"),
        ({"labels": ("a", "b")}, "there are 2 labels for 101 outputs"),
        ({"bos": (300,)}, "is out of range"),
    ):
        with pytest.raises(hw.SpecError, match=words):
            hw.save(random_model(decoder(101), **usage), tmp_path)
    for wrong in (
        {"mask": -1},
        {"parse_special": "maybe"},
        {"size": (3,)},
        {"mean": (0.5,)},
        {"eos": [1]},
    ):
        with pytest.raises(hw.SpecError):
            hw.ProcessorSpec(**wrong)


def test_tasks_give_processor_specs(tmp_path: Path):
    dates = make_task("dates")
    batch = dates.batch(0, 5)
    words = ModelTokenizer(dates.tokenizer or "", dates.usage.parse_special)
    for row, one in enumerate(batch.gold):
        tag = f"<{one.direction.split('-')[1]}>"
        ids = words.ids(tag + one.source)
        assert batch.source is not None
        assert batch.source[row, : len(ids)].tolist() == ids
    assert (batch.x[:, 0] == dates.usage.bos[0]).all()
    (tmp_path / "p.tsv").write_text("\n".join(f"low {n}\tneu {n}" for n in range(40)))
    task = make_task(
        "parallel",
        path=str(tmp_path / "p.tsv"),
        vocab=280,
        vocabularies="separate",
        valid=0.2,
        test=0.0,
    )
    read = ModelTokenizer(task.usage.source_tokenizer or "")
    written = ModelTokenizer(task.usage.tokenizer or "")
    batch = task.batch(0, 3, "valid")
    assert batch.source is not None
    own = batch.source[0].tolist()
    assert own[: own.index(task.usage.suffix_ids[0])] == read.ids(read.text(own))
    assert written.text(batch.x[0].tolist()) == batch.gold[0]


# --- classes and masks ----------------------------------------------------------------------------


def encoder(head: bp.OutputHeadSpec, words: int = 12) -> bp.ModelSpec:
    block = bp.BlockSpec(hw.design(model=12, heads=3), feed=bp.FeedForwardSpec(17))
    embedding = bp.EmbeddingSpec(words, positions=bp.PositionSpec("sinusoidal"))
    return bp.ModelSpec(
        "reader",
        "encoder",
        (bp.StackSpec.from_blocks("encoder", 12, [block], embedding=embedding),),
        (head,),
    )


AROUND = {"prefix_ids": (1,), "suffix_ids": (2,), "tokenizer": wordpiece()}


def test_texts_are_classified_each_as_alone():
    net = random_model(
        encoder(bp.OutputHeadSpec("classes", 3, "mean")), **AROUND, labels=("x", "y", "z")
    )
    with torch.no_grad():
        expected = [
            net(torch.tensor([ids]))[0].softmax(-1) for ids in ([1, 4, 5, 2], [1, 4, 9, 6, 8, 2])
        ]
    for guesses, shares in zip(classify(net, ["The cat", "the dog sat."]), expected, strict=True):
        found = {guess.name: guess.share for guess in guesses}
        assert [found[name] for name in "xyz"] == pytest.approx(shares.tolist(), rel=1e-5)
        assert [guess.share for guess in guesses] == sorted(found.values(), reverse=True)


def test_a_model_without_classes_gives_a_reason():
    net = random_model(encoder(bp.OutputHeadSpec("classes", 3, "mean")), **AROUND)
    with pytest.raises(hw.SpecError, match="has 3 classes but 0 names; set"):
        classify(net, ["the"])
    with pytest.raises(hw.SpecError, match="is not pooled over the row"):
        classify(random_model(encoder(bp.OutputHeadSpec("tokens", 12)), **AROUND), ["the"])


def test_a_source_is_read_with_its_own_words():
    """And the answer is written with those of the target."""
    spec, full = hw.design(model=12, heads=3, pattern="causal()"), hw.design(model=12, heads=3)
    first = bp.StackSpec.from_blocks(
        "encoder", 12, [bp.BlockSpec(full)], embedding=bp.EmbeddingSpec(256)
    )
    second = bp.StackSpec.from_blocks(
        "decoder",
        12,
        [bp.BlockSpec(spec, full, bp.FeedForwardSpec(17))],
        embedding=bp.EmbeddingSpec(12),
    )
    described = bp.ModelSpec(
        "pair", "encoder-decoder", (first, second), (bp.OutputHeadSpec("tokens", 12),)
    )
    usage = {
        "tokenizer": wordpiece(),
        "source_tokenizer": DOCUMENTS["bytes"],
        "bos": (1,),
        "suffix_ids": (0,),
    }
    net = random_model(described, **usage)
    ids = hw.generate(net, [*b"low", 0], **SAMPLING)
    assert hw.generate(net, "low", **SAMPLING) == ModelTokenizer(wordpiece()).text(ids)
