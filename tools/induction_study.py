"""When does induction appear? `python tools/induction_study.py RUNS` writes
docs/findings/stdlib.md.

It trains a small language model for each seed on the source of the standard library, in the folder
RUNS; an interrupted run is resumed. Then it measures the saved weights of several steps on the same
texts, and those of a randomly initialised baseline. `induction_page` writes the page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import headwise as hw
from headwise.head_analysis.random_baseline import make_random_baseline
from headwise.models import Transformer
from headwise.training.training_run import CHECKPOINT_FOLDER, CheckpointFolder, read_checkpoint
from induction_measures import (
    Array,
    Data,
    Found,
    Place,
    Seen,
    Setting,
    Story,
    held_out,
    losses_of,
    repeated_scenes,
    seen,
    source_scenes,
    strongest,
)
from induction_page import page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "findings" / "stdlib.md"
TWIN = 1000  # the seed of weights that are not trained


def trained(setting: Setting, seed: int, folder: Path) -> Callable[[int], Transformer]:
    """Train, or go on, with every checkpoint kept; what gives the model as it was after a step."""
    task = setting.task(seed)
    described = setting.model(task)
    hw.train(task, described, replace(setting.recipe, seed=seed), folder, resume="allowed")
    checkpoints = CheckpointFolder(folder / CHECKPOINT_FOLDER)

    def at(step: int) -> Transformer:
        net = hw.build(described)
        net.load_state_dict(read_checkpoint(checkpoints.path(step)).tensors_of_kind("model"))
        net.usage = task.usage
        return net.eval()

    return at


def found(setting: Setting, folder: Path, say: Callable[[str], object] = print) -> Found:
    """Train one model for each seed, and see all that was kept of each."""
    runs = [(seed, trained(setting, seed, folder / str(seed))) for seed in setting.seeds]
    task, net = setting.task(0), runs[0][1](0)
    data = Data(
        held_out(task, setting.rows),
        source_scenes(net, task, setting.texts),
        *(repeated_scenes(setting.vocab, setting.length, setting.texts, seed) for seed in (0, 1)),
    )
    stories: list[Story] = []
    for seed, at in runs:
        steps: list[Seen] = []
        for step in setting.kept:
            steps.append(seen(at(step), data))
            say(f"seed {seed}, step {step}")
        stories.append(ended(seed, at(setting.kept[-1]), steps, data))
    count = sum(one.numel() for one in net.parameters())
    return Found(setting, task, count, tuple(stories), seen(as_twin(net), data))


def as_twin(net: Transformer) -> Transformer:
    """The same architecture with weights that no seed began with."""
    other = make_random_baseline(net, seed=TWIN)
    assert isinstance(other, Transformer)
    return other


def ended(seed: int, net: Transformer, steps: Sequence[Seen], data: Data) -> Story:
    """The story of a seed, by the model at its end."""
    called, others = list[Place](), list[Place]()
    table = steps[-1].tables["repeated"]
    for site in table.sites:
        own = sorted(
            (one for one in table.heads if one.site == site),
            key=lambda one: one.measures["induction"].value,
        )
        induction_heads = [
            (site, one.head) for one in own if "induction" in [label.name for label in one.classes]
        ]
        called += induction_heads
        others += [(site, one.head) for one in own if (site, one.head) not in induction_heads][
            : len(induction_heads)
        ]
    quiet: list[Mapping[str, Array]] = []
    for heads in (called, others):
        with hw.ablate(net, heads):
            quiet.append(losses_of(net, data))
    return Story(
        seed,
        tuple(steps),
        strongest(net, data.choosing),
        (tuple(called), tuple(others)),
        (quiet[0], quiet[1]),
    )


def main(argv: list[str]) -> int:
    """Train, measure, and write the page."""
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    PAGE.write_text(page(found(Setting(), Path(argv[0]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
