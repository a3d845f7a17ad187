"""transformers' models on headwise: one token behind a long cache, and what it costs to have it registered only.

A step of a decoder with grouped heads runs on the same weights three ways: on headwise, and on transformers' own fused
and eager functions. The second part runs one model, unwatched and on its own fused function, in two processes that take
turns: one has imported `headwise.hub`, the other knows nothing of headwise.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch

from .timing import Case, interleaved

CONFIG = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4,
    "num_hidden_layers": 4, "vocab_size": 512, "max_position_embeddings": 16384,
}  # fmt: skip
WAYS = {"ours": "headwise", "transformers' sdpa": "sdpa", "transformers' eager": "eager"}
# What kind of cache, how many tokens it holds, and of which numbers.
DECODE = (("dynamic", 512, torch.float32), ("dynamic", 4096, torch.float32), ("dynamic", 4096, torch.bfloat16),
          ("static", 4096, torch.float32))  # fmt: skip
REPEATS, CALLS = 9, 4
PAIRS = 5
TOKENS = (1, 128)  # of an unwatched forward


def model(attention: str) -> Any:
    """A decoder with grouped heads, of the same weights every time."""
    theirs = import_module("transformers")
    torch.manual_seed(0)
    return theirs.LlamaForCausalLM._from_config(theirs.LlamaConfig(**CONFIG), attn_implementation=attention).eval()


def cache(net: Any, kind: str, past: int) -> Any:
    """One that holds so many tokens, and has room for all that are asked for."""
    theirs = import_module("transformers")
    room = past + (REPEATS + 2) * CALLS
    kept = theirs.DynamicCache() if kind == "dynamic" else theirs.StaticCache(net.config, max_cache_len=room)
    draw = torch.Generator().manual_seed(1)
    dim = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    for layer in range(CONFIG["num_hidden_layers"]):
        k, v = torch.randn(2, 1, CONFIG["num_key_value_heads"], past, dim, generator=draw).to(net.dtype)
        kept.update(k, v, layer)
    return kept


def step(net: Any, kept: Any) -> Callable[[], None]:
    """The next token, again and again."""
    token = torch.tensor([[7]])

    def run() -> None:
        net(token, past_key_values=kept)

    return run


def decode(kind: str, past: int, dtype: torch.dtype) -> dict[str, object]:
    """A row of the table: all ways, which say the same of the first token."""
    import_module("headwise.hub")
    nets = {name: model(attention).to(dtype) for name, attention in WAYS.items()}
    said = [net(torch.tensor([[7]]), past_key_values=cache(net, kind, past)).logits for net in nets.values()]
    for other in said[1:]:
        torch.testing.assert_close(said[0], other, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=1e-4)
    runs = {name: step(net, cache(net, kind, past)) for name, net in nets.items()}
    name = f"one token, {past} {kind}ally cached, {str(dtype).removeprefix('torch.')}"
    return interleaved(Case(name, runs.pop("ours"), runs), repeats=REPEATS, calls=CALLS)


def unwatched(tokens: int) -> dict[str, object]:
    """A row of the table: with the backend registered, and without; of several pairs of processes the middle one.

    Where a process happens to lie in memory makes it some per cent faster or slower than another like it.
    """
    return sorted((pair(tokens) for _ in range(PAIRS)), key=lambda row: row["ratio"]["not imported"])[PAIRS // 2]


def pair(tokens: int) -> dict[str, Any]:
    """The same of one pair of processes, taking turns."""
    with ExitStack() as stack:
        runs = {name: stack.enter_context(Elsewhere(name, tokens)) for name in ("registered", "absent")}
        case = Case(f"unwatched, {tokens} tokens", runs["registered"].run, {"not imported": runs["absent"].run})
        return interleaved(case, repeats=3 * REPEATS, calls=CALLS)


class Elsewhere:
    """A process that runs a model whenever it is told to."""

    def __init__(self, what: str, tokens: int) -> None:
        command = [sys.executable, "-m", "benchmarks.registered", what, str(tokens)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def __enter__(self) -> Elsewhere:
        self.run()
        return self

    def run(self) -> None:
        """One forward, waited for."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdout.readline()

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


def obey(what: str, tokens: int) -> None:
    """Run a model for every line that comes in."""
    torch.set_num_threads(1)
    if what == "registered":
        import_module("headwise.hub")
    net, ids = model("sdpa"), torch.arange(tokens)[None]
    assert ("headwise" in sys.modules) == (what == "registered")
    with torch.no_grad():
        for _ in sys.stdin:
            net(ids)
            print(flush=True)


def main() -> list[dict[str, object]]:
    """Rows of the table."""
    with torch.no_grad():
        rows = [decode(*case) for case in DECODE]
    return rows + [unwatched(tokens) for tokens in TOKENS]


if __name__ == "__main__":
    obey(sys.argv[1], int(sys.argv[2]))
