"""Texts, parses and sentence pairs as annotated examples, with counts of skipped ones."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import headwise as hw
from headwise.observe.head_analysis.annotated_examples import (
    ExampleReader,
    ParsedSentence,
    examples_from_lines,
    examples_from_pairs,
    examples_from_sentences,
    parse_alignment_links,
    read_conllu,
    read_lines,
)
from headwise.observe.head_analysis.dependency_syntax import (
    DependencyScores,
    is_relation_measure,
    train_attention_probe,
)
from headwise.observe.head_analysis.head_measurement import measure_heads
from headwise.training.data.translation import join_words
from headwise.util.errors import SpecError
from support.conllu_examples import ROWS, WORDS, build_encoder, conllu_lines
from support.refusals import refused_cases


def test_a_parse():
    first, second = read_conllu(conllu_lines())
    assert first.text == "The dogs don't bark."
    assert first.words == ("The", "dogs", "do", "n't", "bark", ".")
    assert [first.text[slice(*span)] for span in first.word_spans] == list(first.words)
    assert first.dependencies == (
        *((0, 1, "det"), (1, 4, "nsubj"), (2, 4, "aux"), (3, 4, "advmod"), (5, 4, "punct")),
    )
    assert second.text == "a du"


def test_words_that_are_written_as_one_and_not_one_after_another():
    text = (
        "# text = vamos al mar\n1 vamos _ _ _ _ 0 root _ _\n2-3 al _ _ _ _ _ _ _ _\n2 a _ _ _ "
        "_ 4 case _ _\n"
    )
    (one,) = read_conllu(conllu_lines(text + "3 el _ _ _ _ 4 det _ _\n4 mar _ _ _ _ 1 obl _ _\n"))
    assert one.word_spans == ((0, 5), (6, 8), (6, 8), (9, 12))


@pytest.mark.parametrize(("text", "message"), refused_cases(__file__, "parses", globals()))
def test_a_parse_that_is_none(text: str, message: str):
    with pytest.raises(SpecError, match=message):
        list(read_conllu(conllu_lines(text)))


def test_token_annotations():
    sources = ExampleReader(build_encoder())
    sources.add_text("the dogs don't bark .")
    (example,) = sources.examples_with_frequencies()
    tokens = example.streams["text"]
    assert (
        tokens.words
        == ("[CLS]", "the", "dog", "s", "don", "'", "t", "bark", ".", "[SEP]")[: tokens.count]
    )
    assert tokens.is_special.nonzero().flatten().tolist() == [0, tokens.count - 1]
    assert tokens.is_separator.nonzero().flatten().tolist() == [tokens.count - 1]
    assert [tokens.words[n] for n in tokens.is_punctuation.nonzero().flatten().tolist()] == [
        "'",
        ".",
    ]
    assert tokens.frequency.min() >= 1


def test_pieces_belong_to_the_words_of_a_parse():
    sources = examples_from_sentences(
        build_encoder(), [next(read_conllu(conllu_lines(ROWS.replace("The", "the"))))]
    )
    (example,) = sources.examples_with_frequencies()
    tokens = example.streams["text"]
    words = [tokens.words[n] for n in range(tokens.count)]
    assert dict(zip(words, tokens.word_index.tolist(), strict=True))["bark"] == 4
    assert [word for word, n in zip(words, tokens.word_index.tolist(), strict=True) if n == 1] == [
        "dog",
        "s",
    ]
    assert [word for word, n in zip(words, tokens.word_index.tolist(), strict=True) if n == 3] == [
        "'",
        "t",
    ]
    assert example.dependencies[1] == (1, 4, "nsubj")


def test_frequencies_are_counted_over_all_texts():
    examples = examples_from_lines(
        build_encoder(), ["the dog", "the the bark"]
    ).examples_with_frequencies()
    the = [int(example.streams["text"].frequency[1]) for example in examples]
    assert the == [3, 3]


def test_skipped_texts_are_reported():
    sources = examples_from_lines(build_encoder(), ["", "the dog", "  ", " ".join(["bark"] * 23)])
    counts = [example.streams["text"].count for example in sources.examples_with_frequencies()]
    assert max(counts) <= 12
    assert sum(counts) - 2 * len(counts) == 25
    assert sources.notes == (
        "empty lines: 2",
        "lines split because they are longer than the model takes: 1",
    )


def test_texts_with_unknown_tokens_are_skipped():
    sources = examples_from_lines(build_encoder(), ["the dog", "the cat", "a bark"])
    assert [example.streams["text"].count for example in sources.examples_with_frequencies()] == [
        4,
        4,
    ]
    assert sources.notes == ("texts with characters that the tokenizer does not know: 1",)


def test_a_sentence_that_the_tokenizer_reads_otherwise():
    other = ParsedSentence("the dog", ("the", "dog", "gone"), ((0, 3), (4, 7), (7, 7)), ())
    sources = examples_from_sentences(build_encoder(), [other])
    assert sources.examples == []
    assert sources.notes == (
        "sentences skipped because some of their words have no token of their own: 1",
    )


def build_translator() -> hw.Transformer:
    """An encoder-decoder with the word-level tokenizer of `build_encoder` on both sides."""
    config = {
        "model_type": "bart",
        "d_model": 8,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "vocab_size": len(WORDS),
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 8,
        "decoder_ffn_dim": 8,
        "max_position_embeddings": 16,
    }
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    net.usage = hw.ProcessorSpec(tokenizer=build_encoder().usage.tokenizer, bos=(1,), eos=(2,))
    return net


def test_pairs_and_links():
    net = build_translator()
    (example,) = examples_from_pairs(
        net, [("the dog", "a b bark")], [parse_alignment_links("0-0 1?2", 1)]
    ).examples_with_frequencies()
    assert example.alignment_links == ((0, 0, True), (1, 2, False))
    assert example.streams["text"].words == ("[CLS]", "a", "b", "bark")
    assert example.streams["source"].words == ("the", "dog")
    with torch.no_grad():
        assert net(**example.inputs).shape == (1, 4, len(WORDS))
    with pytest.raises(
        SpecError,
        match="links word 2 to 0 but has 2 source words and 3 target words; count words from 0",
    ):
        examples_from_pairs(net, [("the dog", "a b bark")], [((2, 0, True),)])
    with pytest.raises(SpecError, match="'1~2' is not an alignment link"):
        parse_alignment_links("1~2", 4)


def test_the_parse_of_an_encoder_decoder_is_of_its_source():
    """Dependencies join words of the source; the target that the model generates has none."""
    net = build_translator()
    pairs = [("dogs", "the"), *product(("dog", "dogs", "the", "a", "b"), repeat=2)]
    sentences = [
        ParsedSentence(
            f"{first} {second}",
            (first, second),
            ((0, len(first)), (len(first) + 1, len(first) + 1 + len(second))),
            ((1, 0, "det"),),
        )
        for first, second in pairs
    ]
    examples = examples_from_sentences(net, sentences).examples_with_frequencies()
    assert examples[0].parsed_stream == "source"
    assert examples[0].dependencies == ((1, 0, "det"),)
    assert {*examples[0].streams["source"].word_index.tolist()} == {0, 1}
    table = measure_heads(net, examples, collectors=[DependencyScores()])
    sites = {head.site for head in table.heads if any(map(is_relation_measure, head.measures))}
    assert sites == {head.site for head in table.heads if head.site.startswith("encoder")}
    probe = train_attention_probe(net, examples)
    assert {weight.site for weight in probe.head_weights} == sites


def test_the_model_reads_chinese_words_joined():
    net = build_translator()
    reader = examples_from_pairs(net, [("the dog", "我 喜欢 Visual Studio 。")], [((1, 4, True),)])
    assert reader.notes == ("texts with characters that the tokenizer does not know: 1",)
    assert join_words("我 喜欢 Visual Studio 。")[0] == "我喜欢 Visual Studio。"
    assert join_words("日 is day")[0] == "日 is day"
    assert join_words("ค่า น้ำ です ね 。")[0] == "ค่าน้ำですね。"


def test_pairs_with_a_word_inside_a_token_are_left_out():
    reader = ExampleReader(build_translator())
    for source_spans in (
        ((0, 3),),
        ((0, 1), (1, 3)),
    ):  # the second word begins within the token "dog"
        spans = {"source": source_spans, "text": ((0, 1), (2, 3))}
        reader.add_text("dog", "a b", alignment_links=[(0, 0, True)], spans=spans)
    assert len(reader.examples) == 1
    assert reader.notes == (
        "sentences skipped because some of their words have no token of their own: 1",
    )


def test_a_source_alone_is_answered():
    config = {
        "model_type": "bart",
        "d_model": 8,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "vocab_size": len(WORDS),
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 8,
        "decoder_ffn_dim": 8,
        "max_position_embeddings": 80,
    }
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    net.usage = hw.ProcessorSpec(tokenizer=build_encoder().usage.tokenizer, bos=(1,), eos=())
    (example,) = examples_from_lines(net, ["the dog"]).examples_with_frequencies()
    generated = hw.generate(net, "the dog", max_new_tokens=64)
    assert example.streams["text"].count == 65
    assert net.usage.tokenizer is not None
    assert (
        Tokenizer.from_str(net.usage.tokenizer).decode(example.streams["text"].ids.tolist()[1:])
        == generated
    )


def test_a_file_that_is_no_text(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match=r"line 1: byte 0xff is not UTF-8"):
        read_lines(tmp_path / "a")


def test_examples_of_a_task_and_their_links():
    from headwise.training.data import make_task

    dates = make_task("dates")
    net = hw.build(dates.model(), seed=0).eval()
    net.usage = hw.ProcessorSpec(tokenizer=dates.tokenizer, bos=(1,), eos=(2,))
    sources = ExampleReader(net)
    sources.add_task_examples(dates, 5)
    for number, example in enumerate(sources.examples_with_frequencies()):
        gold = dates.batch(number, 1, "valid").gold[0]
        words = {
            name: dict(zip(tokens.word_index.tolist(), tokens.words, strict=True))
            for name, tokens in example.streams.items()
        }
        assert len(example.alignment_links) == len(gold.links)
        for source, text, _ in example.alignment_links:
            if (
                words["source"][source].isdigit()
                and words["text"][text].isdigit()
                and "iso" in gold.direction
            ):
                assert words["source"][source] == words["text"][text]
        values = [words["text"][n] for n in sorted(words["text"]) if n >= 0]
        assert "".join(values) == gold.target
    with pytest.raises(SpecError, match="has no gold alignments"):
        ExampleReader(net).add_task_examples(make_task("copy"), 2)
