"""Outputs that match a regular expression or a JSON schema, for several kinds of tokenizers, also in the engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import headwise as hw
from headwise.data.vocabulary import ByteVocabulary
from headwise.errors import SpecError
from headwise.generation.output_constraint import ConstraintError, OutputGrammar, list_token_bytes
from headwise.generation.text_output import ModelTokenizer

TEXTS = ['{"name": "Ada", "age": 36}', "the quick brown fox jumps over 13 lazy dogs", "[1, 2.5, true, null]", "café"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def byte_level_document() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer.to_str()


def sentence_piece_document() -> str:
    """As Llama's: words begin with a mark, and bytes stand for characters without a token."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special)
    tokenizer.train_from_iterator([text.replace("é", "e") for text in TEXTS * 3], trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if not token["content"].startswith("<0x")]
    return json.dumps(document)


def character_document() -> str:
    characters = sorted(
        {char for text in TEXTS for char in text} | set('0123456789"{}[]:, .-abcdefghijklmnopqrstuvwxyz')
    )
    tokenizer = Tokenizer(models.WordLevel({char: n for n, char in enumerate(characters)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer.to_str()


DOCUMENTS = {
    "bytes": lambda: ByteVocabulary().document,
    "byte-level": byte_level_document,
    "sentencepiece": sentence_piece_document,
    "characters": character_document,
}


def make_net(document: str, end: tuple[int, ...] = ()) -> hw.Transformer:
    tokenizer = ModelTokenizer(document)
    config = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    sizes = {"num_hidden_layers": 1, "vocab_size": tokenizer.size + 3}  # more rows than tokens, as in many models
    net = hw.build(hw.families.read_model_spec(config | sizes), seed=3)
    net.usage = hw.ProcessorSpec(tokenizer=document, end=end)
    return net


@pytest.fixture(scope="module", params=list(DOCUMENTS))
def net(request: pytest.FixtureRequest) -> hw.Transformer:
    return make_net(DOCUMENTS[request.param]())


@pytest.mark.parametrize("name", list(DOCUMENTS))
def test_the_bytes_of_tokens_are_those_of_the_text(name: str):
    tokenizer = ModelTokenizer(DOCUMENTS[name]())
    token_bytes = list_token_bytes(tokenizer)
    for text in (TEXTS[1], TEXTS[0]):
        ids = tokenizer.ids(text)
        joined = b"".join(token_bytes[token_id] for token_id in ids).decode()
        assert joined.removeprefix(" ") == text
    if name != "characters":
        ids = tokenizer.ids("→é")
        assert b"".join(token_bytes[token_id] for token_id in ids).decode().strip() == "→é"


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_sampled_matches_the_expression(net: hw.Transformer, seed: int):
    """A random model would never do so by itself; the output ends where nothing can follow."""
    pattern = r"[a-c]{2}(0|[1-9][0-9]) (fox|dog)"
    config = hw.DecodingConfig(regex=pattern)
    text = hw.generate(net, "the", max_new_tokens=30, temperature=1.0, config=config, seed=seed)
    assert re.fullmatch(pattern, text), text
    assert "".join(hw.stream(net, "the", max_new_tokens=30, temperature=1.0, config=config, seed=seed)) == text


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_sampled_satisfies_the_schema(net: hw.Transformer, seed: int):
    config = hw.DecodingConfig(json_schema=json.dumps(SCHEMA))
    text = hw.generate(net, "the", max_new_tokens=60, temperature=1.0, config=config, seed=seed)
    value = json.loads(text)
    assert set(value) == {"name", "age"}
    assert len(value["name"]) <= 6
    assert isinstance(value["age"], int)
    assert value["age"] <= 99


def test_a_constraint_chooses_among_the_allowed_tokens_by_their_logits():
    """Greedy decoding in float64 by hand: of the bytes that may come next, the one with the highest logit."""
    net = make_net(ByteVocabulary().document)
    ids = list(b"the")
    allowed = [list(b"xyz"), list(b"xyz"), list(b"0123456789")]
    with torch.no_grad():
        for choices in allowed:
            logits = net.double()(torch.tensor([ids]))[0, -1]
            ids.append(max(choices, key=lambda token: float(logits[token])))
    text = hw.generate(net.float(), "the", max_new_tokens=9, config=hw.DecodingConfig(regex="[xyz]{2}[0-9]"))
    assert text.encode() == bytes(ids[3:])


def log_probability(net: hw.Transformer, prompt: str, text: str) -> float:
    """Of the bytes of a text after a prompt, without renormalisation."""
    ids = list((prompt + text).encode())
    with torch.no_grad():
        log_probs = net(torch.tensor([ids])).double().log_softmax(-1)[0]
    return sum(float(log_probs[n - 1, ids[n]]) for n in range(len(prompt), len(ids)))


@pytest.mark.parametrize("beams", [2, 9])
def test_beams_find_the_best_outputs_that_a_constraint_allows(beams: int):
    """With as many beams as allowed texts, the best ones of all of them, in the order of their mean log-probability."""
    net, prompts = make_net(ByteVocabulary().document), ["the", "of"]
    texts = [*(first + second for first in "abc" for second in "xy"), "q", "qaz"]
    config = hw.DecodingConfig(regex="[abc][xy]|q(az)?", beams=beams, best=2)
    for prompt, found in zip(prompts, hw.generate(net, prompts, max_new_tokens=5, config=config), strict=True):
        scores = {text: log_probability(net, prompt, text) / len(text) for text in texts if text != "q"}
        best = sorted(scores, key=lambda text: -scores[text])
        assert set(found) <= set(texts)
        if beams == 9:  # "q" alone does not end, because "az" may follow and the model has no end token
            assert found == best[:2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("letter", "other"), ["xy", "yx"])
def test_beams_cut_at_the_token_limit_rank_after_complete_ones(letter: str, other: str, temperature: float):
    """The cut hypothesis has the higher score for one of the two orders of the letters."""
    net = make_net(ByteVocabulary().document)
    options = {"max_new_tokens": 8, "temperature": temperature, "seed": 0}
    config = hw.DecodingConfig(beams=2, best=2, regex=f"{letter}|{other}{{20}}")
    assert hw.generate(net, "the", **options, config=config) == [letter, other * 8]
    assert hw.generate(net, "the", **options, config=hw.DecodingConfig(beams=2, regex=config.regex)) == letter
    both_match = hw.DecodingConfig(beams=2, best=2, regex=f"{letter}|{other}{{8,20}}")
    scores = {text: log_probability(net, "the", text) / len(text) for text in (letter, other * 8)}
    if not temperature:
        assert hw.generate(net, "the", **options, config=both_match) == sorted(scores, key=lambda text: -scores[text])


def test_a_stop_text_in_an_incomplete_output_does_not_outrank_complete_ones():
    net = make_net(ByteVocabulary().document)
    options = {"beams": 2, "regex": "xz|y{20}", "stop": ("y",), "length_penalty": 0.0}
    both = hw.generate(net, "the", max_new_tokens=8, config=hw.DecodingConfig(**options, best=2))
    one = hw.generate(net, "the", max_new_tokens=8, config=hw.DecodingConfig(**options))
    assert (both, one) == (["xz", ""], "xz")


def test_beams_compile_a_constraint_once_whatever_their_number_of_tokens(monkeypatch: pytest.MonkeyPatch):
    matchers = list[object]()
    make_matcher = OutputGrammar.make_matcher

    def count_matchers(grammar: OutputGrammar) -> object:
        matchers.append(make_matcher(grammar))
        return matchers[-1]

    monkeypatch.setattr(OutputGrammar, "make_matcher", count_matchers)
    net, counts = make_net(ByteVocabulary().document), list[int]()
    for length in (2, 20):
        text = hw.generate(net, "the", max_new_tokens=length, config=hw.DecodingConfig(beams=3, regex="[a-z]*"))
        assert re.fullmatch(f"[a-z]{{{length}}}", text)
        counts.append(len(matchers))
        matchers.clear()
    assert counts[0] == counts[1]


def test_beams_satisfy_a_schema_and_report_dead_ends():
    net = make_net(byte_level_document())
    schema = json.dumps({"enum": ["one", "two", "three"]})
    config = hw.DecodingConfig(json_schema=schema, beams=3, best=3)
    assert sorted(map(json.loads, hw.generate(net, "the", max_new_tokens=30, config=config))) == ["one", "three", "two"]
    sampled = hw.generate(net, "the", max_new_tokens=30, temperature=1.0, config=config, seed=2)
    assert {json.loads(text) for text in sampled} <= {"one", "two", "three"}
    with pytest.raises(ConstraintError, match="cannot continue '' as the constraint asks"):
        hw.generate(
            make_net(character_document()), "the", max_new_tokens=9, config=hw.DecodingConfig(regex="ab☃", beams=2)
        )


def test_the_end_token_is_allowed_only_where_the_output_may_end():
    document = byte_level_document()
    end = ModelTokenizer(document).id("<end>")
    assert end is not None
    net = make_net(document, (end,))
    with torch.no_grad():  # every logit is 0 but that of the end token, which is the highest
        net.get_submodule("head.tokens").get_parameter("weight").zero_()
    pattern = hw.DecodingConfig(regex="(ab){3}c*")
    shortest = hw.generate(net, "the", max_new_tokens=30, temperature=1.0, config=pattern, seed=1)
    assert re.fullmatch("(ab){3}c*", shortest)
    lengths = {
        len(hw.generate(net, "the", max_new_tokens=30, temperature=1.0, config=pattern, seed=n)) for n in range(9)
    }
    assert len(lengths) > 1, "the output may end after any number of c"


def test_the_engine_serves_constrained_requests_beside_others(net: hw.Transformer):
    engine = hw.Engine(net, budget=2**22)
    configs = [
        hw.DecodingConfig(regex="[0-9]{3}"),
        hw.DecodingConfig(),
        hw.DecodingConfig(json_schema='{"enum": [1, 2]}'),
    ]
    options = {"max_new_tokens": 12, "temperature": 0.9, "seed": 5}
    streams = [engine.submit("the", config=config, **options) for config in configs]
    expected = [hw.generate(net, "the", config=config, **options) for config in configs]
    assert [stream.result() for stream in streams] == expected
    assert re.fullmatch("[0-9]{3}", expected[0])
    assert expected[2] in ("1", "2")


def test_a_request_that_no_token_can_continue_fails_alone():
    net = make_net(character_document())
    engine = hw.Engine(net, budget=2**22)
    bad = engine.submit("the", max_new_tokens=9, config=hw.DecodingConfig(regex="a(Ω|Ψ)"))
    good = engine.submit("the", max_new_tokens=3)
    assert good.result() == hw.generate(net, "the", max_new_tokens=3)
    with pytest.raises(
        ConstraintError, match=r"cannot continue '.*' as the constraint asks: no token of the vocabulary"
    ):
        bad.result()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "a(("}, r"regex='a\(\(' is not valid: unclosed group; correct it"),
        ({"json_schema": '{"type": "foo"}'}, "json_schema=.* is not valid: Invalid type: foo"),
        ({"json_schema": "{"}, "json_schema='{' is not a JSON object"),
        ({"json_schema": {"type": "object"}}, r"json_schema must be a text, .* write json.dumps\(schema\)"),
        ({"regex": "a", "json_schema": "{}"}, "regex and json_schema exclude each other"),
    ],
)
def test_constraints_that_cannot_be_met_are_refused(options: dict, message: str):
    net = make_net(ByteVocabulary().document)
    with pytest.raises(ValueError, match=message):
        hw.generate(net, "the", max_new_tokens=3, config=hw.DecodingConfig(**options))


def test_a_model_without_tokenizer_has_no_text_to_constrain():
    net = make_net(ByteVocabulary().document)
    net.usage = hw.ProcessorSpec()
    with pytest.raises(SpecError, match="has no tokenizer"):
        hw.generate(net, [3, 1], max_new_tokens=3, config=hw.DecodingConfig(regex="a"))


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    net = make_net(byte_level_document())
    with pytest.raises(SpecError, match="need a package that is not installed; pip install llguidance"):
        hw.generate(net, "the", max_new_tokens=3, config=hw.DecodingConfig(regex="a"))


def test_a_trained_models_tokenizer_can_be_constrained(tmp_path: Path):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    task = hw.data.open_data(str(tmp_path / "a.txt"), {"length": 8, "test": 0.2, "tokens": "chars"})
    net = hw.build(task.model(), seed=0)
    net.usage = task.usage
    assert hw.generate(net, "the ", max_new_tokens=9, config=hw.DecodingConfig(regex="(quick|brown) fox")).endswith(
        " fox"
    )
