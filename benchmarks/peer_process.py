"""A model in a process of its own, with or without headwise imported, that runs a forward pass on
request.

`python -m benchmarks.peer_process registered 1` runs a model on one token for every line of stdin.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from typing import Any

import torch

CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "max_position_embeddings": 16384,
}


def build_model(attention: str) -> Any:
    """A decoder with grouped-query attention; its weights are always equal."""
    transformers = import_module("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**CONFIG), attn_implementation=attention
    ).eval()


class PeerProcess:
    """A process that runs one forward pass per request."""

    def __init__(self, backend: str, tokens: int) -> None:
        command = [sys.executable, "-m", "benchmarks.peer_process", backend, str(tokens)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def __enter__(self) -> PeerProcess:
        self.run()
        return self

    def run(self) -> None:
        """Run one forward pass and wait for it."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdout.readline()

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


def serve_requests(backend: str, tokens: int) -> None:
    """Run a forward pass for every line of stdin."""
    torch.set_num_threads(1)
    if backend == "registered":
        import_module("headwise.hub")
    net, ids = build_model("sdpa"), torch.arange(tokens)[None]
    assert ("headwise" in sys.modules) == (backend == "registered")
    with torch.no_grad():
        for _ in sys.stdin:
            net(ids)
            print(flush=True)


if __name__ == "__main__":
    serve_requests(sys.argv[1], int(sys.argv[2]))
