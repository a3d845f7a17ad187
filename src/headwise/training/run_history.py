"""Changes of a run's recipe from one step on: which are possible, and how they are recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import SpecError, pluralise
from .recipe import CHANGEABLE_FIELDS, VALUES_BEFORE_FIELDS, Recipe, from_dict, rename_old_fields
from .training_run import CHECKPOINT_FOLDER, CheckpointFolder, describe_first_difference, read_checkpoint_state


@dataclass(frozen=True)
class RecipeChange:
    """Fields of the recipe that have another value after `step`: the old and the new value by name."""

    step: int
    fields: Mapping[str, tuple[Any, Any]]

    def __str__(self) -> str:
        changes = (f"{name} {_format(old)} -> {_format(new)}" for name, (old, new) in self.fields.items())
        return f"after step {self.step}: {', '.join(changes)}"

    @property
    def data(self) -> dict[str, Any]:
        """The change as plain values."""
        return {"step": self.step, "fields": {name: list(values) for name, values in asdict(self)["fields"].items()}}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> RecipeChange:
        """The change of plain values."""
        return RecipeChange(data["step"], {name: (old, new) for name, (old, new) in data["fields"].items()})


def _format(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def find_changes(
    step: int, old_config: Mapping[str, Any], config: Mapping[str, Any], resume: str, folder: Path
) -> RecipeChange | None:
    """The change of the recipe of a run at this step; None if its configuration is the same.

    Raises SpecError if anything else differs, and for any difference unless `resume` is "with-changes".
    """
    old, new = old_config["recipe"], config["recipe"]
    fields = {name: (old[name], new[name]) for name in CHANGEABLE_FIELDS if old[name] != new[name]}
    accepted = {**old, **{name: new[name] for name in fields}} if resume == "with-changes" else old
    if difference := describe_first_difference({**old_config, "recipe": accepted}, config):
        remedy = "resume with the old value, or train into another folder"
        if difference.partition(" ")[0].removeprefix("recipe.") in CHANGEABLE_FIELDS:
            remedy = "resume with the old value, or with the new one from here on by resume='with-changes'"
        raise SpecError(f"{folder} holds a run with another configuration: {difference}; {remedy}")
    if not fields:
        return None
    if new["steps"] < step:
        fact = (
            f"{folder} holds a run that has taken {pluralise(step, 'step')}, which steps={new['steps']} does not reach"
        )
        raise SpecError(f"{fact}; resume with steps={step} or more")
    return RecipeChange(step, fields)


def read_run_recipe(folder: Path | str) -> Recipe | None:
    """The recipe of the run in a folder, with all changes so far; None if there is no readable checkpoint."""
    for path in CheckpointFolder(Path(folder) / CHECKPOINT_FOLDER).paths:
        state = read_checkpoint_state(path)
        if state is not None:
            return from_dict({**VALUES_BEFORE_FIELDS, **rename_old_fields(state["config"]["recipe"])})
    return None


def format_history(changes: Sequence[RecipeChange]) -> list[str]:
    """Lines of Markdown about the changes of a run.

    >>> format_history([RecipeChange(24, {"steps": (24, 48), "lr": (0.002, 0.001)})])
    ['', 'Changes of the recipe:', '', '- after step 24: steps 24 -> 48, lr 0.002 -> 0.001']
    """
    return ["", "Changes of the recipe:", "", *(f"- {change}" for change in changes)] if changes else []
