"""Makes the bundled sample of `headwise view`: `python tools/make_view_sample.py`, about six
minutes on one core.

It trains a small encoder-decoder on the task dates (seeded, no data from elsewhere), measures and
classifies its heads over held-out examples, traces one translation, and writes all of it to
src/headwise/observe/sample. --run keeps the training run in a folder, from which a second call
continues.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch

import headwise as hw
from headwise.models import Transformer
from headwise.observe.bundled_sample import FOLDER, MEASURES, MODEL, SOURCE, TRACE
from headwise.observe.head_analysis.annotated_examples import ExampleReader
from headwise.observe.head_analysis.word_alignment import AlignmentScores
from headwise.observe.traces import save_trace
from headwise.training import ConsoleLogger, Recipe, train
from headwise.training.data.date_translation import VOCABULARY, DateTranslation
from headwise.training.data.synthetic_task import ModelShape, make_small_translator
from headwise.util.files import write_atomically

TASK = DateTranslation(digits=8)
SHAPE = ModelShape(width=96, heads=6, layers=3, feed=256)
RECIPE = Recipe(
    steps=1600,
    batch=96,
    lr=3e-3,
    evaluate_every=400,
    checkpoint_every=400,
    precision="fp32",
    compile="off",
    rows="padded",
    attention="fused",
)
NUM_EXAMPLES = 256  # held-out examples over which the heads are measured
README = (
    "Translates dates and amounts of money between English, ISO notation and Chinese; made "
    "for headwise view."
)


def measure(net: Transformer) -> hw.head_analysis.head_table.HeadTable:
    """Measures and classes of all heads over held-out examples with their known alignments."""
    reader = ExampleReader(net)
    reader.add_task_examples(TASK, NUM_EXAMPLES)
    table = hw.measure_heads(
        net,
        reader.examples_with_frequencies(),
        collectors=[AlignmentScores()],
        name="dates translator",
    )
    return hw.classify_heads(table)


def capture(net: Transformer) -> hw.Trace:
    """Trace of one translation, with values, so that the page can show what heads write."""
    target = hw.generate(net, SOURCE)
    print(f"{SOURCE} -> {target}")
    return hw.trace(
        net, {"source": SOURCE, "text": target}, capture=hw.Capture(extra=("v",))
    ).with_thumbnails()


def main() -> None:
    """Train, measure, trace, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="folder of the training run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.run or Path(tempfile.mkdtemp(prefix="view-sample-"))
    spec = make_small_translator("dates", len(VOCABULARY), SHAPE)
    result = train(TASK, spec, RECIPE, out=folder, resume="allowed", loggers=[ConsoleLogger()])
    print(f"exact match over held-out examples: {result.metrics['exact_match']:.1%}")
    net = result.net.eval()
    table, trace = measure(net), capture(net)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    hw.save(net, MODEL, readme=README)
    save_trace(trace, TRACE, overwrite=True)
    data = {**table.data, "heads": [{"site": head.site, **head.data} for head in table.heads]}
    write_atomically(MEASURES, json.dumps(data, separators=(",", ":")).encode())
    for path in sorted(path for path in FOLDER.rglob("*") if path.is_file()):
        print(f"{path.stat().st_size:10,} bytes  {path.relative_to(FOLDER)}")
    print(table)


if __name__ == "__main__":
    main()
