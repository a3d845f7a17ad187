"""What the page of a trained model says of how it was trained, and of its scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from ..text import format_toml
from .recipe import Recipe
from .run import TrainingRun
from .screen import format_duration

SPLIT_DESCRIPTIONS = {"valid": "held-out examples", "test": "the test split, looked at once, after training"}


def render_training_card(run: TrainingRun, metrics: Mapping[str, float], split: str) -> str:
    """Markdown: the task, the recipe as far as it is not the usual one, and every measure beside its chance level."""
    task, chance, choice = run.task, run.task.chance, run.train_step.options
    knobs = ", ".join(f"{f.name}={getattr(task, f.name)!r}" for f in fields(task))
    usual, own = vars(Recipe()), vars(run.recipe)
    said = [f"{name} = {format_toml(_to_plain(value))}" for name, value in own.items() if value != usual[name]]
    lines = ["## Training", "", f"The task is {task.name} ({knobs})."]
    lines += [
        f"{run.progress.step} steps of {run.recipe.batch} examples in {choice.precision}, "
        f"{format_duration(run.progress.seconds)} in all, from the seed {run.recipe.seed}."
    ]
    lines += ["", "What its recipe says besides the usual:", "", "```toml", *said, "```"] if said else []
    lines += ["", "## Scores", "", f"On {SPLIT_DESCRIPTIONS[split]}.", "", "| measure | value | by chance |", "|---|---|---|"]
    lines += [f"| {name} | {value:.4f} | {_format_chance(chance, name)} |" for name, value in metrics.items()]
    return "\n".join(lines)


def _to_plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _format_chance(chance: Mapping[str, float], name: str) -> str:
    return f"{chance[name]:.4f}" if name in chance else ""
