"""`headwise train`: train a model on a built-in task or your data, and save it in a folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..util.errors import SpecError, pluralise, suggest
from ..util.files import read_text_file
from ..util.model_names import parse_hub_id
from .arguments import (
    BAD_INPUT,
    DESCRIPTION_SUFFIXES,
    PRESETS,
    DeviceOptions,
    check_model_path,
    is_published_model,
    parse_assignments,
    print_note,
    print_page,
    resolve_target,
    to_json,
)
from .exit_status import Terminated
from .options import Count, InputFile, Positive, UsageError, options

if TYPE_CHECKING:
    from ..attention.spec.attention_spec import AttentionSpec
    from ..models import Transformer
    from ..models.distributed import ProcessInfo
    from ..models.model_spec import ModelSpec
    from ..training import Recipe
    from ..training.data import Task


@options
class TrainOptions(DeviceOptions):
    """Train a model on a built-in task, or on the text, sentence pairs, images or numbers in a file
    or folder. Writes the model, its scores and checkpoints to a folder; a run can be killed and
    resumed at any time.

    TASK  a built-in task, a file, or a folder
    --data PATH  a file, a folder, or stdlib (the source code of Python's standard library)
    --out DIR  write the model and checkpoints to this folder
    --model MODEL  a model (.toml, config.json, gpt2), another attention for the task's model (a
        preset, or a .toml of headwise spec), gru-fixed, gru-additive or gru-dot, or weights to
        continue from (a folder, or a Hub id)
    --recipe FILE  a .toml with training options; command-line options override it
    --steps COUNT  optimizer steps (default: 1000)
    --batch COUNT  examples per step (default: 128)
    --lr RATE  peak learning rate (default: 0.002)
    --seed INT  random seed of initial weights and dropout (default: 0)
    --set KEY=VALUE  set a field of the task or recipe, as in task.digits=3, recipe.schedule=wsd;
        repeatable
    --resume  continue the run in this folder; given training options, such as more --steps, apply
        from there on
    --json  print one JSON document instead of text

    execution and logging:
    --schedule NAME  constant, cosine, inverse-sqrt, one-cycle or wsd (default: one-cycle)
    --precision NAME  fp32, bf16, or auto, which is bf16 where it was measured to be faster
        (default: auto)
    --compile WHEN  torch.compile: auto, on or off (default: auto)
    --rows KIND  padded, or packed, with several texts per row (default: padded)
    --parallelism AXES  work per rank, as in data=2,shards=2; auto is data parallelism (default:
        auto)
    --logger NAME  also log to tensorboard

    examples:
    headwise train dates --out runs/dates --steps 600
    headwise train --data texts.txt --model gqa --out runs/texts
    """

    command = "train"
    outputs = {"out": "models.save_load:MODEL_FOLDER"}
    names = {"TASK": "what", "--set": "changes", "--logger": "loggers"}
    choices = {"loggers": "training.loggers:LOGGERS"}
    what: str | None = None
    data: str | None = None
    out: str
    model: str | None = None
    recipe: InputFile | None = None
    steps: Count | None = None
    batch: Count | None = None
    lr: Positive | None = None
    seed: int | None = None
    device: str | None = None
    changes: tuple[str, ...] = ()
    resume: bool = False
    json: bool = False
    schedule: str | None = None
    precision: str | None = None
    compile: str | None = None
    rows: str | None = None
    parallelism: str | None = None
    loggers: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse impossible options before data or a model is loaded."""
        if self.data is not None:
            if not _may_be_data(self.data):
                fact = f"there is no file or folder {self.data!r} for --data"
                raise UsageError(f"{fact}; give one that exists")
        elif self.what is None:
            listed = ", ".join(_list_tasks())
            raise UsageError(f"give something to train on: {listed}, or a file or folder")
        elif self.what not in _list_tasks() and not _may_be_data(self.what):
            remedy = suggest(self.what, _list_tasks())
            raise UsageError(f"there is no task, file or folder {self.what!r}; {remedy}")
        path = Path(self.model or "")
        if self.model is not None and path.exists() and path.suffix not in DESCRIPTION_SUFFIXES:
            check_model_path("--model", self.model)


RECIPE_FIELDS = (
    *("steps", "batch", "lr", "seed", "device"),
    *("schedule", "precision", "compile", "rows", "parallelism"),
)
RESUME_HINT = "run the same command with --resume to continue"


def main(argv: list[str]) -> int:
    """Train and print the scores. With several ranks, only one prints results or errors."""
    started_at = time.perf_counter()  # before torch is imported
    from ..models.distributed import join_process_group

    with join_process_group() as launch:
        try:
            _train(argv, launch, started_at)
        except (Exception, KeyboardInterrupt, Terminated) as error:
            if not launch.claim_failure_report():
                raise SystemExit(BAD_INPUT) from None
            if isinstance(error, KeyboardInterrupt | Terminated):
                fact = "" if isinstance(error, Terminated) else str(error)
                fact = fact or "interrupted after the last checkpoint"
                print_note(f"headwise: {fact}; {RESUME_HINT}")
            raise
    return 0


def _train(argv: list[str], launch: ProcessInfo, started_at: float) -> None:
    args = TrainOptions.parse(argv)
    changes: dict[str, dict[str, Any]] = {"task": {}, "recipe": {}}
    example = "--set task.KEY=VALUE, or recipe.KEY=VALUE"
    for path, value in parse_assignments(args.changes, example).items():
        table, _, key = path.partition(".")
        if table not in changes or not key:
            fact = f"--set {path} is not a field of the task or recipe"
            raise UsageError(f"{fact}; write task.KEY=VALUE or recipe.KEY=VALUE")
        changes[table][key] = value
    from ..training.recipe import from_dict, from_toml
    from ..training.run_setup import read_run_recipe

    base = read_run_recipe(args.out) if args.resume else None
    base = from_toml(read_text_file(args.recipe), base) if args.recipe else base
    values = {name: getattr(args, name) for name in RECIPE_FIELDS}
    fields = {name: value for name, value in values.items() if value is not None}
    recipe = from_dict({**changes["recipe"], **fields}, base)
    task = _make_task(args.what, args.data, changes["task"])
    if args.model is not None and "tokens" not in changes["task"]:
        task = _with_model_tokenizer(task, args.model)
    from ..training import ConsoleLogger, train

    model = None if args.model is None else _make_model(args.model, task, recipe)
    startup = time.perf_counter() - started_at
    loggers = [ConsoleLogger(startup=startup), *args.loggers]
    result = train(
        task, model, recipe, args.out, "with-changes" if args.resume else "never", loggers
    )
    data = result.data | {"seconds": result.seconds + startup}
    if launch.is_leader:
        print_page(to_json(data) if args.json else _format_result(data, args.out))


def _list_tasks() -> list[str]:
    """List the built-in tasks, except tasks that read files."""
    from ..training.data import TASKS
    from ..training.data.file_task import FileTask

    return [name for name, kind in TASKS.items() if not issubclass(kind, FileTask)]


def _may_be_data(name: str) -> bool:
    """True if a name refers to existing data, or has a form that `open_data` reads."""
    return ":" in name or "," in name or name == "stdlib" or Path(name).exists()


def _make_task(name: str | None, data: str | None, changes: Mapping[str, Any]) -> Task:
    """Return the built-in task of this name, or a task that reads the data."""
    from ..training.data import make_task, open_data

    fields = {
        key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()
    }
    if data is not None:
        return open_data(f"{name}:{data}" if name else data, fields)
    assert name is not None  # because _check_arguments has refused it
    return make_task(name, **fields) if name in _list_tasks() else open_data(name, fields)


def _with_model_tokenizer(task: Task, model: str) -> Task:
    """Return the task; a text task uses the tokenizer in the model's folder, if there is one."""
    from ..models.hub_files import fetch_model
    from ..models.model_spec.serialization import TOKENIZER_FILE
    from ..training.data.language_modelling import TextTask

    hub_id = parse_hub_id(model)
    folder = Path(model) if hub_id is None else fetch_model(hub_id, weights=False)
    path = folder / TOKENIZER_FILE
    if isinstance(task, TextTask) and path.is_file():
        return replace(task, tokens=str(path))
    return task


def _check_memory(model_spec: ModelSpec, name: str, recipe: Recipe) -> None:
    """Raise if weights, gradients and optimiser state do not fit into device memory."""
    from ..costs import count_parameters
    from ..costs.training_memory import OptimiserMemory
    from ..kernels.devices import free_memory, resolve_device
    from ..models.distributed.parallelism import AUTO, Parallelism

    tensors = OptimiserMemory.from_name("adam-fp32").bytes_by_tensor
    ranks = Parallelism() if recipe.parallelism == AUTO else Parallelism.parse(recipe.parallelism)
    parts = ranks.shards * ranks.tensor
    *first, last = tensors
    what = f"{', '.join(first)} and {last}"
    size = sum(tensors.values()) / parts
    if tensors["weights"] > size:  # every rank builds the whole model before it is divided
        what = "the whole weights"
        size = tensors["weights"]
    device = resolve_device(recipe.device)
    available = free_memory(device)
    needed = size * count_parameters(model_spec)
    if available is not None and needed > available:
        owner = "this machine" if device.type == "cpu" else str(device)
        fact = f"{what} need {needed / 1e9:,.1f} GB{' per rank' if parts > 1 else ''}"
        has = f"{owner} has {available / 1e9:,.1f} GB{'' if device.type == 'cpu' else ' free'}"
        raise UsageError(f"cannot train {name}: {fact}, and {has}; choose a smaller model")


def _make_model(name: str, task: Task, recipe: Recipe) -> ModelSpec | Transformer:
    """Return the model to train: from a description, the task's model with another attention, or
    loaded weights.

    A published model gets the vocabulary of the task.
    """
    from ..attention.spec.attention_spec import AttentionSpec
    from ..models.families import PUBLISHED_MODELS
    from ..studies.cells import resize_model
    from ..training.data.synthetic_task import NETWORKS
    from ..training.run_setup import fit_vocabulary, replace_self_attention

    networks = [network for network in NETWORKS if network != "transformer"]
    path = Path(name)
    if name in PRESETS:
        return replace_self_attention(task.model(), name)
    if name in networks:
        return resize_model(task, {"network": name})
    is_published = is_published_model(path)
    if not is_published and not path.exists() and parse_hub_id(name) is None:
        remedy = suggest(name, [*PRESETS, *networks, *PUBLISHED_MODELS])
        raise UsageError(f"there is no preset, file or folder {name!r}; {remedy}")
    if not is_published and path.suffix not in DESCRIPTION_SUFFIXES:
        from ..hub import load

        net = load(name, dropout=recipe.dropout)
        # 16-bit weights become float32, because small updates would be lost in them
        return net if min(p.element_size() for p in net.parameters()) > 2 else net.float()
    target = resolve_target(name, {}, [])
    if isinstance(target, AttentionSpec):
        return replace_self_attention(task.model(), partial(_check_width, target, name, task.name))
    if is_published:
        try:
            target = fit_vocabulary(target, task.model())
        except SpecError as error:
            raise UsageError(f"cannot train {name} on {task.name}: {error}") from None
    _check_memory(target, name, recipe)
    return target


def _check_width(new: AttentionSpec, file: str, task: str, old: AttentionSpec) -> AttentionSpec:
    """Return the spec of a file, which replaces `old` in the task's model."""
    if new.source is not None:
        fact = f"{file} describes cross-attention, with source = {new.source}"
        raise UsageError(f"{fact}; give a self-attention")
    if new.model != old.model:
        fact = f"{file} is for models of width {new.model}, but the model of the task {task} has"
        remedy = f"headwise spec {file} --set model={old.model} --toml"
        raise UsageError(f"{fact} width {old.model}; write a file for it with {remedy}")
    return new


def _format_result(data: Mapping[str, Any], out: str) -> str:
    width = max([20, *map(len, data["metrics"])])
    scores = [f"  {name:<{width}}{value:>10.4f}" for name, value in data["metrics"].items()]
    summary = (
        f"{data['task']}: {pluralise(data['steps'], 'step')} in {data['seconds']:.0f} s, "
        f"saved in {out}"
    )
    return "\n".join([summary, *scores])
