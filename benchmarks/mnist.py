"""MNIST with a small vision model: patches of 7 x 7, four layers 96 wide, the mean of all tokens.

`python -m benchmarks.mnist` prints the accuracy on the test images and the seconds of training.
"""

from __future__ import annotations

import json
import sys
import tempfile

import headwise as hw
from headwise.models.model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PatchSpec,
    PositionSpec,
    StackSpec,
)
from headwise.training import Recipe
from headwise.training.data import make_task

from .real_data import find_files

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
RECIPE = Recipe(
    steps=4000,
    batch=128,
    lr=2e-3,
    weight_decay=0.1,
    evaluate_every=500,
    evaluate_batches=10**6,
    checkpoint_every=500,
)


def described() -> ModelSpec:
    """16 tokens of an image of 28 x 28."""
    block = BlockSpec(
        hw.design(model=96, heads=4, bias="qkvo"), feed=FeedForwardSpec(384, bias="ud")
    )
    embedding = EmbeddingSpec(
        patches=PatchSpec(4, 4, 7, 7, channels=1), positions=PositionSpec("learned", 16)
    )
    stack = StackSpec.from_blocks("encoder", 96, [block] * 4, embedding=embedding, norm=NormSpec())
    return ModelSpec(
        "digits", "vision", (stack,), (OutputHeadSpec("classes", 10, "mean", bias="learned"),)
    )


def main() -> int:
    """Train, measure, print."""
    paths = find_files(*(f"mnist/{name}.gz" for name in NAMES))
    if paths is None:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        result = hw.train(
            make_task("images", path=str(paths[0].parent)), described(), RECIPE, out=f"{folder}/run"
        )
    print(json.dumps(result.data | {"model": "digits"}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
