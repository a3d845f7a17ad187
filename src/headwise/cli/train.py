"""`headwise train`: train a model on a built-in task or your data, and save it in a folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import suggest
from ..output_paths import check_output
from .arguments import (
    BAD_INPUT,
    PRESETS,
    add_json_argument,
    add_set_argument,
    is_published_model,
    parse_value,
    print_page,
    to_json,
)
from .command_parser import CommandParser, UsageError

if TYPE_CHECKING:
    from ..data import Task
    from ..distributed import ProcessInfo
    from ..model_spec import ModelSpec
    from ..models import Transformer
    from ..training import Recipe


class RecipeOption(NamedTuple):
    """An option that sets a field of the recipe: its type, help text, and the recipe's own default."""

    field: str
    type: type
    metavar: str
    help: str


# Options by name. The defaults are repeated here so that --help need not import torch; a test compares them.
EVERYDAY_OPTIONS = {
    "steps": RecipeOption("steps", int, "COUNT", "optimizer steps (default: 1000)"),
    "batch": RecipeOption("batch", int, "COUNT", "examples per step (default: 128)"),
    "lr": RecipeOption("lr", float, "RATE", "peak learning rate (default: 0.002)"),
    "seed": RecipeOption("seed", int, "INT", "random seed of initial weights and dropout (default: 0)"),
    "device": RecipeOption("device", str, "NAME", "auto, cpu, cuda, cuda:1, ... (default: auto)"),
}
EXPERT_OPTIONS = {
    "precision": RecipeOption(
        "precision", str, "NAME", "fp32, bf16, or auto, which measures which is faster (default: auto)"
    ),
    "compile": RecipeOption(
        "compile", str, "WHEN", "torch.compile: on, off, or auto, which tries it where it may help (default: auto)"
    ),
    "rows": RecipeOption(
        "rows", str, "KIND", "padded, packed (several texts per row), or auto, which measures both (default: auto)"
    ),
    "parallelism": RecipeOption(
        "parallelism", str, "AXES", "work per rank, as in data=2,shards=2; auto is data parallelism (default: auto)"
    ),
}
RESUME_HINT = "run the same command with --resume to continue"
MAX_TEXT_BYTES = 2**20  # largest recipe file that is read
DESCRIPTION_SUFFIXES = (".toml", ".json")  # model descriptions without weights


def main(argv: list[str]) -> int:
    """Train and print the scores; with several ranks, only one prints results or errors."""
    from ..distributed import join_process_group

    with join_process_group() as launch:
        try:
            _train(argv, launch)
        except (Exception, KeyboardInterrupt) as error:
            if not launch.claim_failure_report():
                raise SystemExit(BAD_INPUT) from None
            if isinstance(error, KeyboardInterrupt):
                print(
                    f"headwise: {error or 'interrupted after the last checkpoint'}; {RESUME_HINT}",
                    file=sys.stderr,
                )
            raise
    return 0


def _train(argv: list[str], launch: ProcessInfo) -> None:
    args = _parser().parse_args(argv)
    from ..models.save_load import MODEL_FOLDER

    check_output(args.out, MODEL_FOLDER, "continue")
    changes = _parse_changes(args.changes)
    recipe = _make_recipe(args, changes["recipe"])
    task = _make_task(args.what, args.data, changes["task"])
    if args.model is not None and "tokens" not in changes["task"]:
        task = _with_model_tokenizer(task, args.model)
    from ..training import ConsoleLogger, train

    model = None if args.model is None else _make_model(args.model, task, recipe)
    loggers = [ConsoleLogger(), *args.loggers]
    result = train(task, model, recipe, args.out, "allowed" if args.resume else "never", loggers)
    if launch.is_leader:
        print_page(to_json(result.data) if args.json else _format_result(result.data, args.out))


def _parser() -> CommandParser:
    parser = CommandParser(
        "train",
        "Train a model on a built-in task, or on the text, sentence pairs, images or numbers in a file or folder. "
        "Writes the model, its scores and checkpoints to a folder; a run can be killed and resumed at any time.",
        "headwise train dates --out runs/dates --steps 600",
        "headwise train --data texts.txt --model gqa --out runs/texts",
    )
    parser.add_argument("what", nargs="?", metavar="TASK", help="a built-in task, a file, or a folder")
    parser.add_argument(
        "--data", metavar="PATH", help="a file, a folder, or stdlib (the source code of Python's standard library)"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="write the model and checkpoints to this folder")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a .toml or config.json, a preset, or weights to continue from: a folder or a llama2.c file",
    )
    parser.add_argument(
        "--recipe", metavar="FILE", help="a .toml with training options; command-line options override it"
    )
    _add_recipe_options(parser, EVERYDAY_OPTIONS)
    add_set_argument(parser, "set a field of the task or recipe, as in task.digits=3, recipe.schedule=wsd; repeatable")
    parser.add_argument("--resume", action="store_true", help="continue the run in this folder")
    add_json_argument(parser)
    expert = parser.add_expert_group("execution and logging")
    _add_recipe_options(expert, EXPERT_OPTIONS)
    expert.add_argument(
        "--logger",
        dest="loggers",
        action="append",
        default=[],
        metavar="NAME",
        help="also log to tensorboard, mlflow, wandb or trackio; repeatable",
    )
    return parser


def _add_recipe_options(parser: argparse._ActionsContainer, options: Mapping[str, RecipeOption]) -> None:
    for name, option in options.items():
        parser.add_argument(f"--{name}", type=option.type, metavar=option.metavar, help=option.help)


def _parse_changes(assignments: list[str]) -> dict[str, dict[str, Any]]:
    """Parse --set into changes of the task and of the recipe."""
    changes: dict[str, dict[str, Any]] = {"task": {}, "recipe": {}}
    for change in assignments:
        path, equals, text = change.partition("=")
        table, _, key = path.strip().partition(".")
        if not equals or table not in changes or not key:
            raise UsageError(
                f"--set {change!r} is not a field of the task or recipe; write task.KEY=VALUE or recipe.KEY=VALUE"
            )
        changes[table][key] = parse_value(text)
    return changes


def _make_recipe(args: argparse.Namespace, changes: Mapping[str, Any]) -> Recipe:
    from ..training.recipe import from_dict, from_toml

    base = from_toml(_read_text(args.recipe)) if args.recipe else None
    values = {option.field: getattr(args, name) for name, option in (EVERYDAY_OPTIONS | EXPERT_OPTIONS).items()}
    options = {name: value for name, value in values.items() if value is not None}
    return from_dict({**changes, **options}, base)


def _read_text(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            return file.read(MAX_TEXT_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{name!r} cannot be read: {error}; give a .toml with lines such as steps = 1000") from None


def _make_task(name: str | None, data: str | None, changes: Mapping[str, Any]) -> Task:
    """Return the built-in task of this name, or a task that reads the data."""
    from ..data import TASKS, make_task, open_data
    from ..data.file_task import FileTask

    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()}
    known = [name for name, kind in TASKS.items() if not issubclass(kind, FileTask)]
    if data is not None:
        return open_data(f"{name}:{data}" if name else data, fields)
    if name is None:
        raise UsageError(f"give something to train on: {', '.join(known)}, or a file or folder")
    if name in known:
        return make_task(name, **fields)
    if ":" not in name and not Path(name).exists() and "," not in name and name != "stdlib":
        raise UsageError(f"there is no task, file or folder {name!r}; {suggest(name, known)}")
    return open_data(name, fields)


def _with_model_tokenizer(task: Task, model: str) -> Task:
    """Return the task; a text task uses the tokenizer in the model's folder, if there is one."""
    from ..data.language_modelling import TextTask
    from ..model_spec.serialization import TOKENIZER_FILE

    path = Path(model) / TOKENIZER_FILE
    return replace(task, tokens=str(path)) if isinstance(task, TextTask) and path.is_file() else task


def _make_model(name: str, task: Task, recipe: Recipe) -> ModelSpec | Transformer:
    """Return the model to train: a description, or a model with weights."""
    if name in PRESETS:
        from ..training.run_setup import replace_self_attention

        return replace_self_attention(task.model(), name)
    path = Path(name)
    from ..families import PUBLISHED_MODELS, read_model_spec

    is_published = is_published_model(path)
    if not is_published and not path.exists():
        known = [*PRESETS, *PUBLISHED_MODELS]
        raise UsageError(f"there is no preset, file or folder {name!r}; {suggest(name, known)}")
    return (
        read_model_spec(path)
        if is_published or path.suffix in DESCRIPTION_SUFFIXES
        else _load_weights(path, task, recipe)
    )


def _load_weights(path: Path, task: Task, recipe: Recipe) -> Transformer:
    """Load weights to continue from; 16-bit weights become float32, because small updates would be rounded away."""
    from ..data.language_modelling import TOKENIZATIONS, TextTask
    from ..hub import load

    net = load(path, dropout=recipe.dropout)
    if path.is_file() and net.usage.tokenizer and isinstance(task, TextTask) and task.tokens in TOKENIZATIONS:
        remedy = "write it as a folder first, hw.save(hw.load(FILE), FOLDER), and give that"
        raise UsageError(f"{path} contains its tokenizer, but a text task needs it as a separate file; {remedy}")
    return net if min(p.element_size() for p in net.parameters()) > 2 else net.float()


def _format_result(data: Mapping[str, Any], out: str) -> str:
    scores = [f"  {name:<20}{value:>10.4f}" for name, value in data["metrics"].items()]
    summary = f"{data['task']}: {data['steps']} steps in {data['seconds']:.0f} s, saved in {out}"
    return "\n".join([summary, *scores])
