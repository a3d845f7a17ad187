"""llama2.c files and their tokenizers, against the definition; errors of one line."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

import headwise as hw
from headwise import model_spec as bp
from headwise.hub import llama2c
from headwise.hub.llama2c import make_tokenizer_json
from support.llama2c_tokenizer import FIRST, Scores, reference_tokenize, tokenizer_file

TOKENS, MODEL, HEADS, KV, HIDDEN, LAYERS, LENGTH = 11, 24, 6, 2, 13, 2, 19


def check_refused(words: str, load: Callable[[], object]) -> None:
    """One line that holds these words in this order, and ends with a remedy."""
    with pytest.raises(hw.SpecError) as caught:
        load()
    message, at = str(caught.value), 0
    assert "\n" not in message
    assert "; " in message, message
    for word in words.split(" .. "):
        assert word in message[at:], message
        at = message.index(word, at) + len(word)


# --- files of llama2.c ----------------------------------------------------------------------------

DIM = MODEL // HEADS


def checkpoint_bytes(untied: bool = False) -> tuple[bytes, dict[str, NDArray[Any]]]:
    """A file, written here number by number as its code reads it, and its tensors."""
    rng = np.random.default_rng(0)
    kv, sizes = KV * DIM, (MODEL, HIDDEN, LAYERS, HEADS, KV, -TOKENS if untied else TOKENS, LENGTH)
    shapes = {
        "tokens": (TOKENS, MODEL),
        "att": (LAYERS, MODEL),
        "wq": (LAYERS, MODEL, MODEL),
        "wk": (LAYERS, kv, MODEL),
    }
    shapes |= {"wv": (LAYERS, kv, MODEL), "wo": (LAYERS, MODEL, MODEL), "ffn": (LAYERS, MODEL)}
    shapes |= {
        "w1": (LAYERS, HIDDEN, MODEL),
        "w2": (LAYERS, MODEL, HIDDEN),
        "w3": (LAYERS, HIDDEN, MODEL),
        "final": (MODEL,),
    }
    tensors = {
        name: rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    angle = np.arange(LENGTH)[:, None] * 10_000.0 ** (-np.arange(0, DIM, 2) / DIM)
    tensors |= {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
    if untied:
        tensors["head"] = rng.normal(0, 1, (TOKENS, MODEL)).astype(np.float32)
    return struct.pack("<7i", *sizes) + b"".join(
        tensor.tobytes() for tensor in tensors.values()
    ), tensors


def defined(options: dict[str, NDArray[Any]], ids: Sequence[int]) -> NDArray[Any]:
    """What such a model says after each id: neighbouring channels turn together, one query at a
    time, in float64.
    """
    w = {name: tensor.astype(np.float64) for name, tensor in options.items()}

    def norm(x: NDArray[Any], gain: NDArray[Any]) -> NDArray[Any]:
        return gain * x / np.sqrt((x * x).mean() + 1e-5)

    def turned(x: NDArray[Any], at: int) -> NDArray[Any]:
        out = x.copy()
        for c in range(0, len(x), 2):
            angle = at * 10_000.0 ** (-(c % DIM) / DIM)
            out[c] = x[c] * np.cos(angle) - x[c + 1] * np.sin(angle)
            out[c + 1] = x[c] * np.sin(angle) + x[c + 1] * np.cos(angle)
        return out

    keys, values, recorded = [[] for _ in range(LAYERS)], [[] for _ in range(LAYERS)], []
    for at, token in enumerate(ids):
        x = w["tokens"][token].copy()
        for n in range(LAYERS):
            z = norm(x, w["att"][n])
            q = turned(w["wq"][n] @ z, at)
            keys[n].append(turned(w["wk"][n] @ z, at))
            values[n].append(w["wv"][n] @ z)
            heads = []
            for h in range(HEADS):
                own, kv = (
                    slice(h * DIM, (h + 1) * DIM),
                    slice(h // (HEADS // KV) * DIM, (h // (HEADS // KV) + 1) * DIM),
                )
                scores = np.exp([q[own] @ k[kv] / DIM**0.5 for k in keys[n]])
                heads.append(
                    sum(s * v[kv] for s, v in zip(scores / scores.sum(), values[n], strict=True))
                )
            x = x + w["wo"][n] @ np.concatenate(heads)
            z = norm(x, w["ffn"][n])
            gate = w["w1"][n] @ z
            x = x + w["w2"][n] @ (gate / (1 + np.exp(-gate)) * (w["w3"][n] @ z))
        recorded.append(w.get("head", w["tokens"]) @ norm(x, w["final"]))
    return np.array(recorded)


@pytest.mark.parametrize("untied", [False, True])
def test_a_llama2c_file_equals_its_definition(untied: bool, tmp_path: Path):
    data, values = checkpoint_bytes(untied)
    (tmp_path / "a.bin").write_bytes(data)
    net = hw.load(tmp_path / "a.bin")
    assert ("head.tokens.weight" in dict(net.named_parameters())) == untied
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        got = net.double()(torch.tensor([ids]))[0]
    assert np.abs(got.numpy() - defined(values, ids)).max() < 1e-10


def header(**options: int) -> bytes:
    sizes = dict(
        zip(
            llama2c.Llama2cHeader._fields,
            (MODEL, HIDDEN, LAYERS, HEADS, KV, TOKENS, LENGTH),
            strict=True,
        )
    )
    return struct.pack("<7i", *(sizes | options).values()) + checkpoint_bytes()[0][28:]


def angles(data: bytes) -> bytes:
    """Those of another base, at the end of the file."""
    other = np.arange(LENGTH)[:, None] * 500.0 ** (-np.arange(0, DIM, 2) / DIM)
    last = np.concatenate([np.cos(other), np.sin(other)]).astype(np.float32).tobytes()
    return data[: -len(last)] + last


FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "truncated": (
        lambda: checkpoint_bytes()[0][:-4],
        "bytes long, but its sizes require .. copy the file again",
    ),
    "longer": (lambda: checkpoint_bytes()[0] + bytes(4), "bytes long, but its sizes require"),
    "short": (lambda: checkpoint_bytes()[0][:20], "is 20 bytes long, too short"),
    "zeros": (
        lambda: bytes(500),
        "begins with [0, 0, 0, 0, 0, 0, 0], which are not sizes of a model",
    ),
    "heads": (lambda: header(heads=5), "which are not sizes of a model"),
    "kv": (lambda: header(kv=4), "which are not sizes of a model"),
    "huge": (lambda: header(layers=2**31 - 1), "its sizes require"),
    "negative": (lambda: header(hidden=-1), "which are not sizes of a model"),
    "version": (
        lambda: struct.pack("<7i", 0x616B3432, 2, 0, 0, 0, 0, 0),
        "has version 2 of llama2.c; export it",
    ),
    "zip": (lambda: b"PK\x03\x04" + bytes(90), "is a pickle, which can run code"),
    "angles": (
        lambda: angles(checkpoint_bytes()[0]),
        "contains a RoPE cos table whose base is not 10000",
    ),
    "not numbers": (
        lambda: angles(checkpoint_bytes()[0])[:-4] + struct.pack("<f", float("nan")),
        "table whose base is not",
    ),
}


@pytest.mark.parametrize("what", FILES)
def test_a_harmed_file_of_llama2c_is_refused_in_one_line(what: str, tmp_path: Path):
    make, result = FILES[what]
    (tmp_path / "a.bin").write_bytes(make())
    check_refused(result, lambda: hw.load(tmp_path / "a.bin"))


@pytest.mark.filterwarnings("ignore:.*weight matrices are zero:UserWarning")
def test_sizes_that_begin_like_a_pickle_are_read(tmp_path: Path):
    """640 channels are the bytes 80 02, as of a pickle's second protocol."""
    sizes = (640, 1, 1, 1, 1, 1, 1)
    data = struct.pack("<7i", *sizes)
    numbers = np.zeros((llama2c.Llama2cHeader(*sizes).file_size - 28) // 4, np.float32)
    numbers[-640:-320] = 1  # the cosines of position 0
    (tmp_path / "a.bin").write_bytes(data + numbers.tobytes())
    assert data[:2] == b"\x80\x02"
    assert hw.load(tmp_path / "a.bin").spec.stacks[0].model == 640


# --- its tokenizer --------------------------------------------------------------------------------


def invented(rng: random.Random) -> tuple[Scores, str]:
    """Pieces joined at random, in an order that follows from nothing, and the letters they are made
    of.
    """
    letters = rng.choice(["ab ", "a ", "abc ", "ab\u00e9 ", "xyab "])
    texts, built = list(letters), list[str]()
    for _ in range(rng.randrange(3, 25)):
        piece = rng.choice(texts + built) + rng.choice(texts + built)
        built += [piece] if piece not in texts + built and len(piece) < 9 else []
    scores = rng.sample(range(len(built)), len(built))
    pieces = [(piece, -float(score)) for piece, score in zip(built, scores, strict=True)]
    return FIRST + pieces + [(char, -1000.0 - n) for n, char in enumerate(texts)], letters


def test_text_is_cut_as_the_definition_cuts_it(tmp_path: Path):
    rng = random.Random(0)
    for _ in range(40):
        pieces, letters = invented(rng)
        (tmp_path / "t.bin").write_bytes(tokenizer_file(pieces))
        tokenizer = Tokenizer.from_str(make_tokenizer_json(tmp_path / "t.bin", len(pieces)))
        for _ in range(25):
            text = "".join(
                rng.choices(
                    letters + "\u00f1\n\u2581", [9] * len(letters) + [1, 1, 1], k=rng.randrange(31)
                )
            )
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert ids == reference_tokenize(pieces, text), (pieces, text)
            assert tokenizer.decode(ids) == text
            assert tokenizer.encode(text).ids == [1, *ids]


def spaced(count: int = TOKENS) -> Scores:
    return [*FIRST[:3], *((chr(97 + n), -float(n)) for n in range(count - 4)), (" ", -99.0)]


PIECES: dict[str, tuple[Callable[[], bytes], str]] = {
    "truncated": (
        lambda: tokenizer_file(spaced())[:-1],
        "contains 10 whole pieces, but the model has 11; give its own tokenizer",
    ),
    "longer": (
        lambda: tokenizer_file([*spaced(), ("z", 0.0)]),
        "contains 11 whole pieces, and more follows, but the model has 11",
    ),
    "empty": (lambda: b"", "contains 0 whole pieces, but the model has 11"),
    "negative": (
        lambda: (
            tokenizer_file(spaced())[:8] + struct.pack("<i", -5) + tokenizer_file(spaced())[12:]
        ),
        "contains 0 whole pieces",
    ),
    "no text": (lambda: tokenizer_file(spaced()).replace(b"a", b"\xff"), "piece 3 is not UTF-8"),
    "twice": (
        lambda: tokenizer_file([*spaced()[:-2], ("a", 0.0), (" ", -99.0)]),
        "contains a piece twice",
    ),
    "alike": (
        lambda: tokenizer_file([*spaced(9), ("ab", -1.0), ("cd", -1.0)]),
        "'ab' and 'cd' both have the score -1.0, so their order",
    ),
}


@pytest.mark.parametrize("what", PIECES)
def test_a_harmed_tokenizer_is_refused_in_one_line(what: str, tmp_path: Path):
    make, result = PIECES[what]
    (tmp_path / "a.bin").write_bytes(checkpoint_bytes()[0])
    (tmp_path / "other").write_bytes(make())
    assert hw.load(tmp_path / "a.bin").usage == bp.ProcessorSpec()
    check_refused(result, lambda: hw.load(tmp_path / "a.bin", tokenizer=tmp_path / "other"))
    check_refused(
        "cannot be read: No such file",
        lambda: hw.load(tmp_path / "a.bin", tokenizer=tmp_path / "none"),
    )
    check_refused(
        "is a folder, which contains its tokenizer",
        lambda: hw.load(tmp_path, tokenizer=tmp_path / "other"),
    )
    (tmp_path / "tok11.bin").write_bytes(make())
    check_refused(result, lambda: hw.load(tmp_path / "a.bin"))


@pytest.mark.parametrize("name", ["tok11.bin", "tokenizer.bin"])
def test_a_tokenizer_beside_a_file_is_found(name: str, tmp_path: Path):
    (tmp_path / "a.bin").write_bytes(checkpoint_bytes()[0])
    (tmp_path / name).write_bytes(tokenizer_file(spaced()))
    usage = hw.load(tmp_path / "a.bin").usage
    assert (usage.before, usage.end, usage.specials) == ((1,), (1,), "text")
    assert Tokenizer.from_str(usage.tokenizer or "").encode("ab").ids == [1, 10, 3, 4]
