"""`headwise train`: a model that learns a task or somebody's data, left in a folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import suggest
from .arguments import (
    BAD_INPUT,
    PRESETS,
    CommandParser,
    UsageError,
    add_json_argument,
    parse_value,
    print_page,
    to_json,
)

if TYPE_CHECKING:
    from ..data import Task
    from ..distributed import ProcessInfo
    from ..model_spec import ModelSpec
    from ..models import Transformer
    from ..training import Recipe

# Options that are words of the recipe, with the kind of their values and what they say.
RECIPE_OPTIONS: dict[str, tuple[type, str]] = {
    "steps": (int, "how many steps to take"),
    "batch": (int, "examples a step"),
    "lr": (float, "the highest rate of learning"),
    "precision": (str, "auto, fp32 or bf16; auto measures which is faster"),
    "compile": (str, "auto, on or off; auto tries where it can pay"),
    "rows": (str, "auto, padded or packed one text behind the other; auto measures which is faster"),
    "seed": (int, "of the fresh weights and of what is dropped"),
    "device": (str, "auto, cpu, cuda or cuda:1, say"),
    "spread": (str, "what ranks divide, as in data=2 or data=2,shards=2; auto divides the data"),
}
RESUME_HINT = "the same command with --resume goes on"
MAX_TEXT_BYTES = 2**20  # bytes of a recipe
DESCRIPTION_SUFFIXES = (".toml", ".json")  # ends of files that say what a model is, and hold no weights


def main(argv: list[str]) -> int:
    """Train, and say at the end what came of it; of many ranks one says it."""
    from ..distributed import join_process_group

    with join_process_group() as launch:
        try:
            _train(argv, launch)
        except (Exception, KeyboardInterrupt) as error:
            if not launch.speaks():
                raise SystemExit(BAD_INPUT) from None
            if isinstance(error, KeyboardInterrupt):
                print(
                    f"headwise: {error or 'interrupted; the run is as it was last kept'}; {RESUME_HINT}",
                    file=sys.stderr,
                )
            raise
    return 0


def _train(argv: list[str], launch: ProcessInfo) -> None:
    given = _parser().parse_args(argv)
    changes = _parse_changes(given.changes)
    recipe = _make_recipe(given, changes["recipe"])
    task = _make_task(given.what, given.data, changes["task"])
    if given.model is not None and "tokens" not in changes["task"]:
        task = _with_model_tokenizer(task, given.model)
    from ..training import ConsoleLogger, train

    described = None if given.model is None else _make_model(given.model, task, recipe)
    sinks = [ConsoleLogger(), *given.sinks]
    result = train(task, described, recipe, given.out, "allowed" if given.resume else "never", sinks)
    if launch.is_leader:
        print_page(to_json(result.data) if given.json else _format_result(result.data, given.out))


def _parser() -> CommandParser:
    parser = CommandParser(
        "train",
        "A model that learns a task made in code, or the text, pairs, images or numbers of a file or folder; it is "
        "left in a folder with its scores, and can be killed and resumed at any moment.",
        "headwise train dates --out runs/dates --steps 600",
    )
    parser.add_argument("what", nargs="?", metavar="TASK", help="a task by name, a file, or a folder")
    parser.add_argument("--data", metavar="PATH", help="a file, a folder, or stdlib, Python's own source")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to leave it in")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a .toml or config.json, a preset, or weights to go on from: a folder, or a file of llama2.c",
    )
    parser.add_argument("--recipe", metavar="FILE", help="a .toml that says how to train; options change it")
    for name, (kind, what) in RECIPE_OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, metavar=kind.__name__.upper(), help=what)
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one thing of the task or the recipe, as in task.digits=3, recipe.schedule=wsd",
    )
    parser.add_argument("--resume", action="store_true", help="go on where a run into this folder was ended")
    parser.add_argument(
        "--sink",
        dest="sinks",
        action="append",
        default=[],
        metavar="NAME",
        help="also tell tensorboard, mlflow, wandb or trackio",
    )
    add_json_argument(parser)
    return parser


def _parse_changes(said: list[str]) -> dict[str, dict[str, Any]]:
    """What --set says of the task and of the recipe."""
    found: dict[str, dict[str, Any]] = {"task": {}, "recipe": {}}
    for change in said:
        path, equals, words = change.partition("=")
        whose, _, key = path.strip().partition(".")
        if not equals or whose not in found or not key:
            raise UsageError(f"--set {change!r} says nothing; write task.KEY=VALUE or recipe.KEY=VALUE")
        found[whose][key] = parse_value(words)
    return found


def _make_recipe(given: argparse.Namespace, changes: Mapping[str, Any]) -> Recipe:
    from ..training.recipe import from_dict, from_toml

    base = from_toml(_read_text(given.recipe)) if given.recipe else None
    options = {name: getattr(given, name) for name in RECIPE_OPTIONS if getattr(given, name) is not None}
    return from_dict({**changes, **options}, base)


def _read_text(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            return file.read(MAX_TEXT_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{name!r} cannot be read: {error}; give a .toml with lines such as steps = 1000") from None


def _make_task(what: str | None, data: str | None, changes: Mapping[str, Any]) -> Task:
    """The task of this name, or what reads this data."""
    from ..data import TASKS, make_task, open_data
    from ..data.file_task import FileTask

    said = {key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()}
    made = [name for name, kind in TASKS.items() if not issubclass(kind, FileTask)]
    if data is not None:
        return open_data(f"{what}:{data}" if what else data, said)
    if what is None:
        raise UsageError(f"name what is to be learnt: {', '.join(made)}, or a file or folder")
    if what in made:
        return make_task(what, **said)
    if ":" not in what and not Path(what).exists() and "," not in what and what != "stdlib":
        raise UsageError(f"there is no task, file or folder {what!r}; {suggest(what, made)}")
    return open_data(what, said)


def _with_model_tokenizer(task: Task, model: str) -> Task:
    """The task, a text in the tokens of the model that goes on with it."""
    from ..data.language_modelling import TextTask
    from ..model_spec.serialization import TOKENIZER_FILE

    path = Path(model) / TOKENIZER_FILE
    return replace(task, tokens=str(path)) if isinstance(task, TextTask) and path.is_file() else task


def _make_model(name: str, task: Task, recipe: Recipe) -> ModelSpec | Transformer:
    """What a folder, a file or a preset says is to be trained."""
    if name in PRESETS:
        from ..training.run_setup import replace_self_attention

        return replace_self_attention(task.model(), name)
    path = Path(name)
    if not path.exists():
        raise UsageError(f"there is no preset, file or folder {name!r}; {suggest(name, PRESETS)}")
    from ..families import read_model_spec

    return read_model_spec(path) if path.suffix in DESCRIPTION_SUFFIXES else _load_weights(path, task, recipe)


def _load_weights(path: Path, task: Task, recipe: Recipe) -> Transformer:
    """What a folder or a file holds, to go on from; weights of 16 bits are too coarse to be changed a little."""
    from ..data.language_modelling import TOKENIZATIONS, TextTask
    from ..hub import load

    net = load(path, dropout=recipe.dropout)
    if path.is_file() and net.usage.tokenizer and isinstance(task, TextTask) and task.tokens in TOKENIZATIONS:
        remedy = "write it as a folder first, hw.save(hw.load(FILE), FOLDER), and give that"
        raise UsageError(f"{path} has a tokenizer that a text cannot be given by its path; {remedy}")
    return net if min(p.element_size() for p in net.parameters()) > 2 else net.float()


def _format_result(data: Mapping[str, Any], out: str) -> str:
    scores = [f"  {name:<20}{value:>10.4f}" for name, value in data["metrics"].items()]
    head = f"{data['task']}: {data['steps']} steps in {data['seconds']:.0f} s, left in {out}"
    return "\n".join([head, *scores])
