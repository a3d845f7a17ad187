"""What statistics of heads take beside reading a text: a decoder layer of 12 heads of 64, causal, 8,192 tokens.

`python -m benchmarks.head_statistics [TOKENS]` prints the seconds of a forward and of a forward that is looked at, in
turns in one process, their ratio, each statistic alone, and by how much the memory of the process grew beyond the model
and what one forward takes. Seconds are the least of three.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable

import torch

import headwise as hw
from headwise.heads.looking import look
from headwise.heads.measuring import Adding
from headwise.heads.scene import Scene, Tokens
from headwise.heads.statistics import STATISTICS
from headwise.hub.finding import found

TOKENS, WORDS, TIMES = 8192, 1000, 3
SHAPE = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 1, "vocab_size": WORDS}


def text(count: int) -> Tokens:
    """Random tokens, a seventh of them punctuation and a hundredth separators."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, WORDS, (count,), generator=draw)
    ends = torch.rand(count, generator=draw) < 0.01
    common = torch.bincount(ids, minlength=WORDS)[ids]
    return Tokens(ids, ("",) * count, ends, ends, ids % 7 == 0, torch.arange(count), common)


def seconds(run: Callable[[], object]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def peak() -> int:
    """The most bytes that the process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(argv: list[str]) -> int:
    """Forwards and looks in turns, then each statistic."""
    count = int(argv[0]) if argv else TOKENS
    net = hw.build(hw.families.read(SHAPE | {"n_positions": count}), seed=0).eval()
    told = text(count)
    scene, those = Scene(told.ids[None], {"text": told}), found(net)
    streams = {one.site.name: ("text", "text") for one in those}

    def forward() -> None:
        with torch.inference_mode():
            net(told.ids[None])

    def looked(names: tuple[str, ...]) -> None:
        look(net, those, scene, streams, Adding([STATISTICS[name] for name in names]).see)

    forward()
    before = peak()
    turns = [(seconds(forward), seconds(lambda: looked(tuple(STATISTICS)))) for _ in range(TIMES)]
    grown = peak() - before
    plain, all_of_them = (min(turn[n] for turn in turns) for n in range(2))
    alone = {name: min(seconds(lambda name=name: looked((name,))) for _ in range(2)) / plain for name in STATISTICS}
    print(json.dumps({"tokens": count, "threads": torch.get_num_threads(), "forward": plain, "looked": all_of_them,
                      "ratio": all_of_them / plain, "grown": grown, "alone": alone}, indent=2))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
