"""Time and memory of a trace: a GPT-2 of 124M parameters runs on 4,096 tokens, with and without
tracing.

`python -m benchmarks.capture [TOKENS]` prints the seconds of both runs, the announced and the
recorded bytes, and how much higher the peak memory of the tracing process is. Each run is a process
of its own.
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
    """One process: build the model and run it once, plain or traced."""
    net = hw.build(hw.families.read_model_spec(SHAPE | {"n_positions": tokens}), seed=0).eval()
    ids = torch.randint(0, 50257, (1, tokens), generator=torch.Generator().manual_seed(0))
    log: list[str] = []
    begun = time.perf_counter()
    if kind == "traced":
        recorded = hw.trace(net, ids, log=log.append).nbytes
    else:
        with torch.inference_mode():
            net(ids)
        recorded = 0
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "recorded_bytes": recorded, "log": log[:1], "peak": peak,
            "parameters": sum(p.numel() for p in net.parameters())}  # fmt: skip


def main(argv: list[str]) -> int:
    """Run both processes, one after the other."""
    tokens = int(argv[0]) if argv else TOKENS
    if len(argv) > 1:
        print(json.dumps(run(argv[1], tokens)))
        return 0
    results = {
        kind: json.loads(
            subprocess.check_output([sys.executable, "-m", "benchmarks.capture", str(tokens), kind])
        )
        for kind in ("plain", "traced")
    }
    extra_peak = results["traced"]["peak"] - results["plain"]["peak"]
    print(
        json.dumps(
            {
                "tokens": tokens,
                "threads": torch.get_num_threads(),
                **results,
                "extra_peak_bytes": extra_peak,
            },
            indent=2,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
