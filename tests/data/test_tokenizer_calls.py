"""A tokenizer in a process of its own: the ids of the library, and an end of what takes too long or crashes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from headwise.data import tokenizer_calls
from headwise.data.tokenizer_calls import EncodedText, TokenizerProcess, is_bounded_decoder
from headwise.errors import SpecError, UnknownToken
from headwise.generation.text_output import ModelTokenizer

LIMIT = 1.0
# Every "x" becomes ten by each replacement: 1,000 gigabytes for one character.
GROWING = [{"type": "Replace", "pattern": {"String": "x"}, "content": "x" * 10} for _ in range(12)]


def make_document(**parts: Any) -> str:
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "x": 2, "ab": 3}, "merges": [["a", "b"]]}
    return json.dumps({"version": "1.0", "added_tokens": [], **dict.fromkeys(names), "model": model, **parts})


HUNGRY = make_document(normalizer={"type": "Sequence", "normalizers": GROWING})
RUNAWAY = make_document(
    pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
)
SLOW = ("a" * 27 + "b") * 10_000  # the expression tries all ways to divide each run of a


@pytest.fixture
def runaway() -> Iterator[TokenizerProcess]:
    process = TokenizerProcess(RUNAWAY, LIMIT)
    yield process
    process.close()


def test_ids_and_offsets_are_those_of_the_library():
    process = TokenizerProcess(make_document())
    expected = Tokenizer.from_str(make_document()).encode("abbaab", add_special_tokens=False)
    assert process.encode("abbaab", True) == EncodedText(expected.ids, expected.offsets)
    assert process.encode("", False) == EncodedText([], [])
    process.close()


def test_a_text_that_takes_too_long_fails_alone(runaway: TokenizerProcess):
    assert runaway.encode("ab", True).ids == [3]
    begin = time.perf_counter()
    with pytest.raises(
        SpecError, match=r"the tokenizer cannot encode this text: it took longer than 1 s; give another"
    ):
        runaway.encode(SLOW, True)
    assert time.perf_counter() - begin < 5 * LIMIT
    assert runaway.encode("ba", True).ids == [1, 0]


def test_a_text_that_needs_too_much_memory_fails_alone():
    process = TokenizerProcess(HUNGRY, 60.0)
    with pytest.raises(SpecError, match="it crashed; give another text"):
        process.encode("x", True)
    assert process.encode("ab", True).ids == [3]
    process.close()


def test_a_process_that_crashes_is_started_again(runaway: TokenizerProcess):
    assert runaway.encode("a", True).ids == [0]
    assert runaway._process is not None
    runaway._process.kill()
    runaway._process.wait()
    with pytest.raises(SpecError, match="it crashed; give another text"):
        runaway.encode("a", True)
    assert runaway.encode("a", True).ids == [0]


REPLACE = {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "!"}


def test_ids_that_take_too_long_to_decode_fail_alone():
    model = {"type": "BPE", "vocab": {"a": 0, SLOW: 1, "x": 2}, "merges": []}
    words = ModelTokenizer(make_document(model=model, decoder=REPLACE))
    encoding, decoding = words.isolate(LIMIT)
    assert words.text([0, 2, 0]) == "!x!"
    with pytest.raises(SpecError, match=r"the tokenizer cannot decode these ids: it took longer than 1 s; give"):
        words.text([0, 1])
    assert words.text([2, 0]) == "x!"
    assert encoding._process is None  # decoding does not wait for a text
    for process in (encoding, decoding):
        process.close()


def test_a_text_longer_than_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch):
    grown = {"type": "Sequence", "decoders": GROWING[:5]}
    process = TokenizerProcess(make_document(decoder=grown))
    assert process.decode([2]) == "x" * 100_000
    monkeypatch.setattr(tokenizer_calls, "MAX_ANSWER_BYTES", 50_000)
    with pytest.raises(SpecError, match="cannot decode these ids: its answer exceeds 50,000 bytes"):
        process.decode([2])
    assert process.decode([0]) == "a"
    process.close()


@pytest.mark.parametrize(
    ("decoder", "bounded"),
    [
        (None, True),
        ({"type": "ByteLevel"}, True),
        ({"type": "Replace", "pattern": {"String": "_"}, "content": " "}, True),
        ({"type": "Replace", "pattern": {"String": "_"}, "content": "  "}, False),
        ({"type": "Replace", "pattern": {"String": ""}, "content": ""}, False),
        (REPLACE, False),
        ({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}, True),
        ({"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": [REPLACE]}]}, False),
        ({"type": "Another"}, False),
    ],
)
def test_decoders_that_may_run_here(decoder: Any, bounded: bool):
    assert is_bounded_decoder(decoder) is bounded


def test_threads_take_turns(runaway: TokenizerProcess):
    outcomes = dict[str, Any]()

    def encode(text: str) -> None:
        try:
            outcomes[text] = runaway.encode(text, True).ids
        except SpecError as error:
            outcomes[text] = str(error)

    threads = [threading.Thread(target=encode, args=(text,)) for text in ("a", SLOW, "b", "ab")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert "took longer" in outcomes.pop(SLOW)
    assert outcomes == {"a": [0], "b": [1], "ab": [3]}


def test_an_isolated_tokenizer_says_what_it_said():
    words = make_document(
        model={"type": "WordLevel", "vocab": {"ab": 0, "a": 1}, "unk_token": "[UNK]"},
        pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
    )
    here, isolated = ModelTokenizer(words), ModelTokenizer(words)
    (process,) = isolated.isolate()
    for text in ("", "ab", "a ab a"):
        assert (isolated.ids(text), isolated.places(text)) == (here.ids(text), here.places(text))
    messages = []
    for tokenizer in (here, isolated):
        with pytest.raises(UnknownToken) as excinfo:
            tokenizer.ids("ab ac")
        messages.append(str(excinfo.value))
    assert messages[0] == messages[1]
    process.close()


def test_an_answer_just_before_the_limit_leaves_no_ended_process(monkeypatch: pytest.MonkeyPatch):
    """The timer ends the process after the answer was read: the next text gets a new process."""
    process = TokenizerProcess(make_document())
    process.encode("a", False)

    class LateTimer(threading.Timer):
        def cancel(self) -> None:
            self.function(*self.args)
            super().cancel()

    monkeypatch.setattr(threading, "Timer", LateTimer)
    first = process.encode("a", False)
    monkeypatch.undo()
    assert process.encode("a", False) == first
    process.close()
