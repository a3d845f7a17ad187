"""Tiny Shakespeare in nanoGPT's setting for a laptop: 0.8 million parameters, 2,000 steps of 12
rows of 64 characters.

`python -m benchmarks.shakespeare` trains ours through `hw.train`, and the same recipe written
plainly in PyTorch in the same process, and prints the validation loss in nats a character and the
seconds of each. nanoGPT's README reports
1.88, the mean of 20 random batches; ours is of the whole held-out text. The recipe's rate of learning is low for so
small a model, so ours runs at that rate and, everything else alike, at one of its own.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import headwise as hw
from headwise.training import Recipe
from headwise.training.data import make_task

from .real_data import find_files
from .reference_models import GPTShape, PlainGPT, to_model_spec

SHAPE = GPTShape()
STEPS = 2000
BATCH = 12
RATE = 1e-3
LEAST = 1e-4
WARM = 100
OWN_RATE = 4e-3  # falls to the same least
EVALUATIONS = 20  # batches, as in the recipe; the whole of the held-out text is measured besides


def ours(path: Path, folder: str, rate: float) -> dict[str, Any]:
    """Train with `hw.train`, which chooses the precision."""
    data = make_task(
        "text", path=str(path), tokens="chars", length=SHAPE.length, valid=0.1, test=0.0
    )
    recipe = Recipe(
        steps=STEPS,
        batch=BATCH,
        lr=rate,
        schedule="cosine",
        warmup=WARM / STEPS,
        min_lr_ratio=LEAST / rate,
        betas=(0.9, 0.99),
        weight_decay=0.1,
        clip=1.0,
        init="gpt2",
        seed=1337,
        evaluate_every=250,
        evaluate_batches=10**6,
        checkpoint_every=1000,
    )
    result = hw.train(data, to_model_spec(SHAPE), recipe, out=folder)
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    curve = {
        row["step"]: round(row["metrics"]["loss"], 4)
        for row in rows
        if row["event"] == "evaluation"
    }
    return {
        "nats": min(curve.values()),
        "seconds": result.seconds,
        "curve": curve,
        "precision": result.precision,
    }


def train_by_hand(path: Path) -> dict[str, float]:
    """The same recipe in plain PyTorch, in float32, with as many evaluations."""
    text = path.read_text()
    number = {sign: n for n, sign in enumerate(sorted(set(text)))}
    ids = torch.tensor([number[sign] for sign in text])
    cut = int(0.9 * len(ids))
    parts = {"train": ids[:cut], "valid": ids[cut:]}
    torch.manual_seed(1337)
    net = PlainGPT(SHAPE)
    matrices = [p for p in net.parameters() if p.ndim > 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.ndim < 2]},
    ]
    optimiser = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
    begun = time.perf_counter()
    best = math.inf
    for step in range(1, STEPS + 1):
        for group in optimiser.param_groups:
            group["lr"] = _rate(step)
        loss = _loss(net, parts["train"])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        if step % 250 == 0:
            with torch.no_grad():
                best = min(
                    best,
                    sum(_loss(net, parts["valid"]).item() for _ in range(EVALUATIONS))
                    / EVALUATIONS,
                )
    return {"nats": best, "seconds": time.perf_counter() - begun}


def _rate(step: int) -> float:
    if step <= WARM:
        return RATE * step / WARM
    return LEAST + (RATE - LEAST) * 0.5 * (1 + math.cos(math.pi * (step - WARM) / (STEPS - WARM)))


def _loss(net: PlainGPT, ids: torch.Tensor) -> torch.Tensor:
    at = torch.randint(len(ids) - SHAPE.length - 1, (BATCH,))
    rows = torch.stack([ids[start : start + SHAPE.length + 1] for start in at.tolist()])
    return F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def main() -> int:
    """Train both and print the losses."""
    paths = find_files("tinyshakespeare/input.txt")
    if paths is None:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = {"by hand": train_by_hand(paths[0])}
        for name, rate in (("ours", RATE), ("ours, own rate", OWN_RATE)):
            results[name] = ours(paths[0], f"{folder}/{rate}", rate)
            results[name]["time"] = results[name]["seconds"] / results["by hand"]["seconds"]
    print(json.dumps(results | {"threads": torch.get_num_threads()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
