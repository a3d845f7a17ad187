"""Small training experiments that `headwise learn` quotes: `python tools/learn_training.py TEXT
CELLS [EXPERIMENT...]` (default: all).

TEXT is input.txt of tinyshakespeare. Models predict its characters: two pre-norm layers of
attention and feed-forward, 300 steps of 16 rows of 64 characters with AdamW. Arms with other
numbers of heads choose their learning rate by a seed of its own at half of the steps; the others
use the rate that multi-head attention chose. Then 5 seeds are trained; differences are paired by
seed (same data in the same order), with p corrected for the comparisons of an experiment (Holm).
CELLS is a file with one line for each trained model, so that an interrupted run goes on. The result
is learn/stored_training.json.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import headwise as hw
from headwise.attention.attention import Attention

OUT = Path(__file__).resolve().parents[1] / "src" / "headwise" / "learn" / "stored_training.json"
STEPS = 300
ROWS = 16
LENGTH = 64
RATES = (0.001, 0.003, 0.01)
LADDER = (0.003, 0.01, 0.03, 0.1, 0.3)
MERGE_RATE = 0.01  # the rate that multi-head attention chooses, for all ways to merge
SEEDS = (1, 2, 3, 4, 5)
TUNING_SEED = 99
SMALL_TEXT = 4000  # characters of the training text that models overfit
TEST_BATCHES = 24


@dataclass(frozen=True)
class Arm:
    """One kind of model: width, heads and their width, merge of the heads, biases, and text."""

    model: int = 64
    heads: int = 4
    dim: int | None = None
    merge: str = "learned"  # W_O is "learned" or "fixed"; or heads are merged by "mean" or "sum"
    bias: bool = False
    text: int = 0  # characters of the training text; 0 for all


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, arm: Arm) -> None:
        super().__init__()
        merge = {"merge": hw.parts.SumMerge()} if arm.merge in ("mean", "sum") else {}
        bias = {"bias": "qkvo"} if arm.bias else {}
        spec = hw.design(
            model=arm.model, heads=arm.heads, dim=arm.dim, pattern="causal()", **bias, **merge
        )
        self.attention = Attention(spec)
        self.norms = nn.ModuleList([nn.LayerNorm(arm.model, bias=arm.bias) for _ in range(2)])
        self.up = nn.Linear(arm.model, 4 * arm.model, bias=arm.bias)
        self.down = nn.Linear(4 * arm.model, arm.model, bias=arm.bias)
        self.scale = 1 / arm.heads if arm.merge == "mean" else 1.0

    def forward(self, x: Tensor, noise: tuple[int, ...], generator: Any) -> Tensor:
        outputs = self.attention.head_outputs(self.norms[0](x)) * self.scale
        if noise:
            chosen = outputs[:, :, list(noise)]
            drawn = torch.randn(chosen.shape, generator=generator)
            outputs = outputs.clone()
            outputs[:, :, list(noise)] = chosen.mean() + chosen.std() * drawn
        x = x + self.attention.merge_heads(outputs)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A model of characters."""

    def __init__(self, arm: Arm, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, arm.model)
        self.positions = nn.Embedding(LENGTH, arm.model)
        self.blocks = nn.ModuleList([Block(arm) for _ in range(2)])
        self.norm = nn.LayerNorm(arm.model, bias=arm.bias)
        self.head = nn.Linear(arm.model, vocabulary, bias=arm.bias)
        if arm.merge == "fixed":
            for block in self.blocks:
                block.attention.get_parameter("output.o").requires_grad_(False)

    def forward(self, ids: Tensor, noise: tuple[int, ...] = (), generator: Any = None) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, noise, generator)
        return self.head(self.norm(x))


class Experiment:
    """The text, and the cells that are trained or were trained before."""

    def __init__(self, text: Path, cells: Path) -> None:
        characters = text.read_text(encoding="utf-8")
        alphabet = sorted(set(characters))
        self.vocabulary = len(alphabet)
        ids = torch.tensor([alphabet.index(one) for one in characters])
        self.test = ids[: len(ids) // 10]
        self.train = ids[len(ids) // 10 :]
        self.path = cells
        lines = cells.read_text("utf-8").splitlines() if cells.is_file() else []
        self.cells = {one["key"]: one for one in map(json.loads, lines)}

    def run(self, arm: Arm, rate: float, seed: int, steps: int = STEPS) -> dict[str, Any]:
        """Train one model, unless it was trained before; its measurements."""

        def measure() -> dict[str, Any]:
            model = self.train_model(arm, rate, seed, steps)
            return self._measure(model, arm, self.train[: arm.text or None], seed)

        return self.store([asdict(arm), rate, seed, steps], measure)

    def store(self, name: list[Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Measure and store one cell, unless it was stored before."""
        key = json.dumps(name)
        if key not in self.cells:
            with torch.no_grad():
                self.cells[key] = {"key": key} | measure()
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.cells[key]) + "\n")
            print(len(self.cells), key, round(self.cells[key]["test"], 3), flush=True)
        return self.cells[key]

    @torch.enable_grad()
    def train_model(self, arm: Arm, rate: float, seed: int, steps: int = STEPS) -> Model:
        """Train one model; the same arguments give the same bits."""
        torch.manual_seed(seed)
        model = Model(arm, self.vocabulary)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimiser = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
        data = torch.Generator().manual_seed(seed)
        text = self.train[: arm.text or None]
        for _ in range(steps):
            loss = self._loss(model, text, data)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return model

    def _loss(self, model: Model, text: Tensor, data: Any, noise: tuple[int, ...] = ()) -> Tensor:
        starts = torch.randint(len(text) - LENGTH - 1, (ROWS,), generator=data)
        rows = text[starts[:, None] + torch.arange(LENGTH + 1)]
        logits = model(rows[:, :-1], noise, data)
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def _mean_loss(self, model: Model, text: Tensor, noise: tuple[int, ...] = ()) -> float:
        data = torch.Generator().manual_seed(0)
        return float(
            np.mean([float(self._loss(model, text, data, noise)) for _ in range(TEST_BATCHES)])
        )

    def _measure(self, model: Model, arm: Arm, text: Tensor, seed: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "train": self._mean_loss(model, text),
            "test": self._mean_loss(model, self.test),
        }
        if arm.heads > 1:
            generator = np.random.default_rng(seed)
            for name, count in (("one", 1), ("quarter", arm.heads // 4), ("half", arm.heads // 2)):
                if count:
                    draws = [tuple(generator.permutation(arm.heads)[:count]) for _ in range(2)]
                    losses = [self._mean_loss(model, self.test, tuple(map(int, d))) for d in draws]
                    found[f"noise_{name}"] = float(np.mean(losses))
        rows = self.test[: 32 * LENGTH].unflatten(0, (32, LENGTH))
        x = model.tokens(rows) + model.positions.weight
        own: list[float] = []
        for block in model.blocks:
            probe = hw.Probe("weights")
            block.attention(block.norms[0](x), probe=probe)
            own.append(float(probe.tensors["weights"].diagonal(0, -2, -1).mean()))
            x = block(x, (), None)
        found["self"] = float(np.mean(own))
        return found

    def tune(self, arm: Arm) -> float:
        """The rate with the lowest loss on the tuning seed, at half of the steps."""
        losses = {rate: self.run(arm, rate, TUNING_SEED, STEPS // 2)["test"] for rate in RATES}
        return min(losses, key=lambda rate: losses[rate])

    def seeds(self, arm: Arm, rate: float | None = None) -> list[dict[str, Any]]:
        """The measurements of all seeds."""
        chosen = self.tune(arm) if rate is None else rate
        return [self.run(arm, chosen, seed) for seed in SEEDS]


def compare(one: list[float], other: list[float]) -> dict[str, Any]:
    """Mean difference of two arms, paired by seed, with its 95 % interval and p."""
    test = stats.ttest_rel(one, other)
    interval = test.confidence_interval(0.95)
    difference = float(np.mean(np.subtract(one, other)))
    ends = {"low": float(interval.low), "high": float(interval.high)}
    return {"difference": difference} | ends | {"p": float(test.pvalue)}


def correct(comparisons: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The comparisons of one experiment with p corrected for their number (Holm), as text."""
    largest = 0.0
    ordered = sorted(comparisons.values(), key=lambda one: one["p"])
    for place, one in enumerate(ordered):
        largest = max(largest, min(1.0, one["p"] * (len(ordered) - place)))
        one["significant"] = largest < 0.05
        one["p"] = "< 0.001" if largest < 0.001 else f"{largest:.3f}"
    return comparisons


def column(cells: list[dict[str, Any]], name: str, minus: str = "") -> list[float]:
    """A measurement of all seeds, minus another one."""
    return [cell[name] - (cell[minus] if minus else 0.0) for cell in cells]


def heads(experiment: Experiment) -> dict[str, Any]:
    """Loss, weight on the own token and damage by noise in heads, for 1, 4 and 16 heads."""
    cells = {count: experiment.seeds(Arm(heads=count)) for count in (1, 4, 16)}
    test = {count: column(of_arm, "test") for count, of_arm in cells.items()}
    found: dict[str, Any] = {
        f"h{count}": {
            "test": float(np.mean(test[count])),
            "deviation": float(np.std(test[count], ddof=1)),
            "self": float(np.mean(column(of_arm, "self"))),
        }
        for count, of_arm in cells.items()
    }
    found["chance"] = float(np.mean(1 / np.arange(1, LENGTH + 1)))
    compared = {
        "four_minus_one": compare(test[4], test[1]),
        "sixteen_minus_four": compare(test[16], test[4]),
        "self_one_minus_sixteen": compare(column(cells[1], "self"), column(cells[16], "self")),
    }
    for name in ("one", "quarter", "half"):
        few, many = (column(cells[count], f"noise_{name}", "test") for count in (4, 16))
        compared[f"noise_{name}"] = compare(many, few)
    return found | correct(compared)


def overfitting(experiment: Experiment) -> dict[str, Any]:
    """Loss on other text minus loss on the small text of the training, for 1 and 8 heads."""
    gaps = {
        count: column(experiment.seeds(Arm(heads=count, text=SMALL_TEXT), 0.01), "test", "train")
        for count in (1, 8)
    }
    means = {f"h{count}": float(np.mean(gap)) for count, gap in gaps.items()}
    compared = correct({"eight_minus_one": compare(gaps[8], gaps[1])})
    return means | compared | {"text": SMALL_TEXT}


def merges(experiment: Experiment) -> dict[str, Any]:
    """Loss with a learned W_O, a fixed random one, and the mean or sum of heads."""
    losses = {
        merge: column(experiment.seeds(Arm(merge=merge), MERGE_RATE), "test")
        for merge in ("learned", "fixed", "mean", "sum")
    }
    compared = {
        f"{merge}_minus_learned": compare(losses[merge], losses["learned"])
        for merge in ("fixed", "mean", "sum")
    }
    return {merge: float(np.mean(one)) for merge, one in losses.items()} | correct(compared)


def biases(experiment: Experiment) -> dict[str, Any]:
    """Loss without and with biases, in all dense layers and layer norms, over a ladder of learning
    rates; at most the loss of guessing, because training that diverged is no worse.
    """
    guess = math.log(experiment.vocabulary)
    found: dict[str, Any] = {"guess": guess, "diverged": 0}
    compared: dict[str, dict[str, Any]] = {}
    for rate in LADDER:
        losses: dict[str, list[float]] = {}
        for name, has_bias in (("without", False), ("with", True)):
            cells = experiment.seeds(Arm(bias=has_bias), rate)
            tests = column(cells, "test")
            losses[name] = [loss if loss < guess else guess for loss in tests]  # also NaN
            found[f"{name}_{rate:g}"] = float(np.mean(losses[name]))
            found["diverged"] += losses[name].count(guess)
        compared[f"difference_{rate:g}"] = compare(losses["without"], losses["with"])
    return found | correct(compared)


def mean_log_probs(members: Sequence[Tensor]) -> Tensor:
    """Log of the mean probabilities of several models."""
    return torch.stack([*members]).logsumexp(0) - math.log(len(members))


def without_head(model: Model, head: int, heads: int) -> Model:
    """A copy in which one head of each layer adds nothing."""
    ablated = copy.deepcopy(model)
    for block in ablated.blocks:
        block.attention.get_parameter("output.o").unflatten(-1, (heads, -1))[:, head] = 0.0
    return ablated


def measure_ensemble(
    experiment: Experiment, arms: tuple[Arm, Arm], rates: list[float], seed: int
) -> dict[str, Any]:
    """Losses of a model of the first arm, and of an ensemble of as many models of the second arm as
    the first has heads; and without one of its heads or of its models.
    """
    whole, part = arms
    model = experiment.train_model(whole, rates[0], seed)
    members = [experiment.train_model(part, rates[1], 100 * seed + n) for n in range(whole.heads)]
    rows = experiment.test[: 64 * (LENGTH + 1)].unflatten(0, (64, LENGTH + 1))
    ids = rows[:, :-1]
    target = rows[:, 1:].flatten()

    def loss(log_probs: Tensor) -> float:
        return float(F.nll_loss(log_probs.flatten(0, 1), target))

    outputs = [member(ids).log_softmax(-1) for member in members]
    ablated = [without_head(model, head, whole.heads) for head in range(whole.heads)]
    rest = [[*outputs[:n], *outputs[n + 1 :]] for n in range(whole.heads)]
    return {
        "test": loss(model(ids).log_softmax(-1)),
        "ensemble": loss(mean_log_probs(outputs)),
        "member": float(np.mean([loss(one) for one in outputs])),
        "without_head": float(np.mean([loss(one(ids).log_softmax(-1)) for one in ablated])),
        "without_member": float(np.mean([loss(mean_log_probs(one)) for one in rest])),
        "parameters": sum(map(torch.numel, model.parameters())),
        "parameters_ensemble": sum(
            one.numel() for member in members for one in member.parameters()
        ),
    }


def ensemble(experiment: Experiment) -> dict[str, Any]:
    """Loss of a model with 4 heads, also without one head of each layer, and of an ensemble of 4
    models with one head and half the width, whose probabilities are averaged, also without one of
    them.
    """
    arms = (Arm(), Arm(model=Arm().model // 2, heads=1))
    rates = [experiment.tune(arm) for arm in arms]
    cells = [
        experiment.store(
            ["ensemble", seed], partial(measure_ensemble, experiment, arms, rates, seed)
        )
        for seed in SEEDS
    ]
    names = ("test", "ensemble", "member", "without_head", "without_member")
    means = {name: float(np.mean(column(cells, name))) for name in names}
    sizes = {name: cells[0][name] for name in ("parameters", "parameters_ensemble")}
    compared = {
        "model_minus_ensemble": compare(column(cells, "test"), column(cells, "ensemble")),
        "damage": compare(
            column(cells, "without_head", "test"), column(cells, "without_member", "ensemble")
        ),
    }
    return means | sizes | correct(compared)


EXPERIMENTS = {
    "heads": heads,
    "overfitting": overfitting,
    "merges": merges,
    "biases": biases,
    "ensemble": ensemble,
}


def main(argv: list[str]) -> int:
    """Train what is missing; write the file after each experiment."""
    if len(argv) < 2 or not {*argv[2:]} <= {*EXPERIMENTS}:
        print(__doc__, file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    experiment = Experiment(Path(argv[0]), Path(argv[1]))
    stored = json.loads(OUT.read_text(encoding="utf-8"))
    for name in argv[2:] or EXPERIMENTS:
        stored[name] = EXPERIMENTS[name](experiment)
        OUT.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
