"""The tokenizer of llama2.c by definition: slow, and without `tokenizers`."""

from __future__ import annotations

from itertools import pairwise

Scores = list[tuple[str, float]]  # pieces with their scores, by number
FIRST: Scores = [
    ("<unk>", 0.0),
    ("\n<s>\n", 0.0),
    ("\n</s>\n", 0.0),
    *((f"<0x{byte:02X}>", 0.0) for byte in range(256)),
]


def reference_tokenize(pieces: Scores, text: str) -> list[int]:
    """Characters or bytes, then repeatedly the adjacent pair of best score
    merged, leftmost first.
    """
    number = {piece: n for n, (piece, _) in enumerate(pieces)}
    tokens = [number[" "]] if text else []
    for char in text:
        tokens += [number[char]] if char in number else [byte + 3 for byte in char.encode()]
    while True:
        pairs = [pieces[a][0] + pieces[b][0] for a, b in pairwise(tokens)]
        candidates = [
            (pieces[number[pair]][1], -at) for at, pair in enumerate(pairs) if pair in number
        ]
        if not candidates:
            return tokens
        at = -max(candidates)[1]
        tokens[at : at + 2] = [number[pairs[at]]]
