"""Streams of tokens in chunks through a KV cache, compared with one pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

import headwise as hw

MODEL = 10


KINDS = {
    "plain": {"pattern": "causal()", "kv": 2, "vdim": 5, "modifiers": (hw.parts.Rotary(),)},
    "extra": {
        "pattern": "causal()",
        "modifiers": (hw.parts.DynamicComposition(rank=1), hw.parts.Alibi()),
    },
    "ring": {"pattern": "window(3)", "kv": 3, "modifiers": (hw.parts.Alibi(),)},
    "dilated": {"pattern": "dilated(3, 2)"},
    "sinks": {"pattern": "window(3) | first(2)", "kv": 2, "modifiers": (hw.parts.Rotary(),)},
    "latent": {
        "pattern": "causal()",
        "project": hw.parts.MLAProjection(rank=8, rope=2),
        "modifiers": (hw.parts.Rotary(),),
    },
    "latent ring": {
        "pattern": "window(4)",
        "project": hw.parts.MLAProjection(rank=8, rope=2),
        "modifiers": (hw.parts.Rotary(),),
    },
    "state": {
        "pattern": "causal()",
        "similarity": hw.parts.FeatureMap(),
        "normaliser": hw.parts.SumNormaliser(),
        "kv": 2,
        "vdim": 5,
    },
}


ONE_DOCUMENT = {
    "right padding": [["aaaaa", "aaa.."], ["a", "a"], ["a", "."], ["aaa", ".aa"], ["a", "a"]],
    "left padding": [["aaaaa", "..aaa"], ["a", "a"], [".", "a"], ["aa", ".a"], ["a", "a"]],
    "a late row": [["aaa", "..."], ["a", "."], ["a", "a"], ["aa", "aa"], ["aaaa", "a..."]],
    "holes": [["a.aa", ".a.a"], ["a", "a"], ["a..a", "aaaa"], ["a", "."], ["a", "a"]],
    "even": [["a" * n] * 2 for n in (3, 1, 4, 1, 1, 7)],
    "one by one": [["a", "a"]] * 13,
    "a long start": [["a" * n] * 2 for n in (11, 1, 2, 1)],
    "nothing first": [["", ""], ["aaa", "aaa"], ["", ""], ["a", "a"]],
    "one row only": [["aaaa"], ["a"], ["aa"]],
}


def build_layer(kind: str) -> hw.Attention:
    """A random layer of one kind."""
    layer = hw.Attention(
        hw.design(**({"model": MODEL, "heads": 6, "dim": 4} | KINDS[kind]))
    ).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


def random_tensor(*shape: int) -> Tensor:
    """A random float64 tensor."""
    return torch.randn(*shape, dtype=torch.float64)


def stream_chunks(stream: list[list[str]]) -> Iterator[tuple[Tensor, hw.SequenceInfo]]:
    """x and sequence of each chunk; a token is placed after the earlier tokens of its segment in
    its row.
    """
    recorded: list[dict[str, int]] = [defaultdict(int) for _ in stream[0]]
    for words in stream:
        position = torch.zeros(len(words), len(words[0]), dtype=torch.int64)
        segment = position - 1
        for b, word in enumerate(words):
            for t, letter in enumerate(word):
                if letter != ".":
                    position[b, t], segment[b, t] = recorded[b][letter], ord(letter) - ord("a")
                    recorded[b][letter] += 1
        yield random_tensor(len(words), len(words[0]), MODEL), hw.SequenceInfo(position, segment)


def check_stream(
    layer: hw.Attention,
    stream: list[list[str]],
    cache: hw.KVCache,
    *,
    infer_positions: bool = False,
) -> None:
    """Outputs of each document, token by token through the cache, equal those of one pass over it
    alone.

    With `infer_positions` the cache derives the positions.
    """
    inputs, outputs = defaultdict(list), defaultdict(list)
    with torch.no_grad():
        for x, at in stream_chunks(stream):
            y = layer(x, cache=cache, sequence=None if infer_positions else at)
            for b, t in at.is_real.nonzero().tolist():
                inputs[b, int(at.segment[b, t])].append(x[b, t])
                outputs[b, int(at.segment[b, t])].append(y[b, t])
        for document, xs in inputs.items():
            alone = layer(torch.stack(xs)[None])[0]
            torch.testing.assert_close(
                torch.stack(outputs[document]), alone, rtol=0, atol=1e-11, msg=f"{document}"
            )
    assert len(inputs) >= len(stream[0])


EVEN = [
    name for name, chunks in ONE_DOCUMENT.items() if all(set("".join(c)) <= {"a"} for c in chunks)
]
