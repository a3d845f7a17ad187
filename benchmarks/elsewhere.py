"""A process of its own that runs a model whenever it is told to; it knows of headwise only when told so.

`python -m benchmarks.elsewhere registered 1` runs a model on one token for every line of stdin.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from typing import Any

import torch

CONFIG = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4,
    "num_hidden_layers": 4, "vocab_size": 512, "max_position_embeddings": 16384,
}  # fmt: skip


def model(attention: str) -> Any:
    """A decoder with grouped heads, of the same weights every time."""
    theirs = import_module("transformers")
    torch.manual_seed(0)
    return theirs.LlamaForCausalLM._from_config(theirs.LlamaConfig(**CONFIG), attn_implementation=attention).eval()


class Elsewhere:
    """A process that runs a model whenever it is told to."""

    def __init__(self, what: str, tokens: int) -> None:
        command = [sys.executable, "-m", "benchmarks.elsewhere", what, str(tokens)]
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


if __name__ == "__main__":
    obey(sys.argv[1], int(sys.argv[2]))
