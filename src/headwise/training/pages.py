"""What the page of a trained model says of how it was trained, and of its scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from ..text import toml_of
from .recipe import Recipe
from .run import Run
from .screen import clock

SPLITS = {"valid": "held-out examples", "test": "the test split, looked at once, after training"}


def page(run: Run, metrics: Mapping[str, float], split: str) -> str:
    """Markdown: the task, the recipe as far as it is not the usual one, and every measure beside its chance level."""
    task, chance, choice = run.task, run.task.chance, run.stepper.choice
    knobs = ", ".join(f"{f.name}={getattr(task, f.name)!r}" for f in fields(task))
    usual, own = vars(Recipe()), vars(run.recipe)
    said = [f"{name} = {toml_of(_plain(value))}" for name, value in own.items() if value != usual[name]]
    lines = ["## Training", "", f"The task is {task.name} ({knobs})."]
    lines += [
        f"{run.progress.step} steps of {run.recipe.batch} examples in {choice.precision}, "
        f"{clock(run.progress.seconds)} in all, from the seed {run.recipe.seed}."
    ]
    lines += ["", "What its recipe says besides the usual:", "", "```toml", *said, "```"] if said else []
    lines += ["", "## Scores", "", f"On {SPLITS[split]}.", "", "| measure | value | by chance |", "|---|---|---|"]
    lines += [f"| {name} | {value:.4f} | {_chance(chance, name)} |" for name, value in metrics.items()]
    return "\n".join(lines)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _chance(chance: Mapping[str, float], name: str) -> str:
    return f"{chance[name]:.4f}" if name in chance else ""
