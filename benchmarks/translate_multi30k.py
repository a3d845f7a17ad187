"""Multi30k from German to English: three layers each, 256 wide, one vocabulary of 6,000 pieces.

`python -m benchmarks.translate_multi30k [STEPS [FOLDER [LAYERS WIDTH]]]` trains through `hw.train`
(into FOLDER, whose run it goes on with), scores test_2016 by greedy decoding with sacreBLEU (13a,
cased), and prints the curve of held-out losses with the seconds. Six layers of 8 heads have 48
heads of each of three kinds, as in 1905.09418. The data is for research alone and is read where it
lies.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from headwise.models.distributed import Parallelism, ProcessInfo
from headwise.models.distributed.ranks import ProcessMesh
from headwise.models.model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PositionSpec,
    StackSpec,
)
from headwise.training import Recipe, TrainingResult
from headwise.training.data import make_task
from headwise.training.data.translation import ParallelTextTask, score_translations
from headwise.training.evaluation import TaskEvaluator
from headwise.training.train_step import StepOptions

from .real_data import find_files, unpack

VOCABULARY = 6000
WIDTH = 256
HEADS = 8
LAYERS = 3
STEPS = 2600  # of 128 pairs: 11 or 12 rounds of 29,000
FILES = ("train.de", "train.en", "val.de", "val.en", "test_2016_flickr.de", "test_2016_flickr.en")


def described(vocabulary: int, layers: int = LAYERS, width: int = WIDTH) -> ModelSpec:
    """An encoder and a decoder that share their table with the head."""

    def stack(name: str, block: BlockSpec, **embedding_options: str) -> StackSpec:
        embedding = EmbeddingSpec(
            vocabulary, positions=PositionSpec("sinusoidal"), scale=width**0.5, **embedding_options
        )
        return StackSpec.from_blocks(
            name, width, [block] * layers, embedding=embedding, norm=NormSpec()
        )

    feed = FeedForwardSpec(4 * width, "relu", bias="ud")
    full, causal = (
        hw.design(model=width, heads=HEADS, pattern=pattern) for pattern in ("full()", "causal()")
    )
    encoder = BlockSpec(full, feed=feed)
    decoder = BlockSpec(causal, cross=full, feed=feed)
    stacks = (stack("encoder", encoder), stack("decoder", decoder, table="encoder"))
    return ModelSpec(
        "multi30k",
        "encoder-decoder",
        stacks,
        (OutputHeadSpec("tokens", vocabulary, table="encoder"),),
    )


def recipe(steps: int) -> Recipe:
    """One-cycle over all steps."""
    return Recipe(
        steps=steps,
        batch=128,
        lr=1.5e-3,
        warmup=0.15,
        weight_decay=0.01,
        dropout=0.15,
        label_smoothing=0.1,
        evaluate_every=max(1, steps // 10),
        evaluate_batches=8,
        checkpoint_every=max(1, steps // 10),
    )


def score_test_set(data: ParallelTextTask, result: TrainingResult) -> dict[str, Any]:
    """All of the test set, translated greedily with the best weights."""
    recipe = Recipe(batch=100)
    choice = StepOptions("fp32", "off")
    examiner = TaskEvaluator(data, recipe, choice, ProcessMesh(ProcessInfo(), Parallelism()))
    translations = []
    references = []
    for index in range(data.batches(recipe.batch, "test") or 0):
        batch = data.batch(index, recipe.batch, "test")
        translations += [data.text(row) for row in examiner.generate_answers(result.net, batch)]
        references += batch.gold
    return {
        "test_2016": asdict(score_translations(translations, references)),
        "sentences": len(translations),
    }


def main(argv: list[str]) -> int:
    """Train, score, print."""
    paths = find_files(*(f"multi30k/{name}.gz" for name in FILES))
    if paths is None:
        return 0
    steps = int(argv[0]) if argv else STEPS
    with tempfile.TemporaryDirectory() as folder:
        out = Path(argv[1]) if len(argv) > 1 else Path(folder) / "run"
        texts = out.with_name(
            f"{out.name}-texts"
        )  # beside the run: a run goes on with the files that it began with
        texts.mkdir(parents=True, exist_ok=True)
        de, en, *held = unpack(paths, texts)
        data = make_task(
            "parallel", path=(de, en), valid=tuple(held[:2]), test=tuple(held[2:]), vocab=VOCABULARY
        )
        outputs = data.model().heads[0].outputs
        result = hw.train(
            data, described(outputs, *map(int, argv[2:])), recipe(steps), out=out, resume="allowed"
        )
        results = score_test_set(data, result)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    curve = {
        row["step"]: round(row["metrics"]["loss"], 3)
        for row in rows
        if row["event"] == "evaluation"
    }
    print(
        json.dumps(
            result.data | results | {"curve": curve, "threads": torch.get_num_threads()}, indent=2
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
