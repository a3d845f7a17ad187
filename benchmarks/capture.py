"""What it takes to keep a run: GPT-2's shape of 124M parameters reads 4,096 tokens, plainly and while it is traced.

`python -m benchmarks.capture [TOKENS]` prints the seconds of both, the bytes that were announced and kept, and by how
much more the memory of the process grew at most than in the plain run. Each run is a process of its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import torch

import headwise as hw

TOKENS = 4096
SHAPE = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257}


def run(kind: str, tokens: int) -> dict[str, object]:
    """One process: build, read once plainly or traced."""
    net = hw.build(hw.families.read_model_spec(SHAPE | {"n_positions": tokens}), seed=0).eval()
    ids = torch.randint(0, 50257, (1, tokens), generator=torch.Generator().manual_seed(0))
    told: list[str] = []
    begun = time.perf_counter()
    if kind == "traced":
        kept = hw.trace(net, ids, log=told.append).nbytes
    else:
        with torch.inference_mode():
            net(ids)
        kept = 0
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "kept": kept, "told": told[:1], "peak": peak,
            "parameters": sum(p.numel() for p in net.parameters())}  # fmt: skip


def main(argv: list[str]) -> int:
    """Both, one after the other."""
    tokens = int(argv[0]) if argv else TOKENS
    if len(argv) > 1:
        print(json.dumps(run(argv[1], tokens)))
        return 0
    told = {
        kind: json.loads(subprocess.check_output([sys.executable, "-m", "benchmarks.capture", str(tokens), kind]))
        for kind in ("plain", "traced")
    }
    grown = told["traced"]["peak"] - told["plain"]["peak"]
    print(json.dumps({"tokens": tokens, "threads": torch.get_num_threads(), **told, "grown": grown}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
