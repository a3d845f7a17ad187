"""The commands that write, each with two sets of arguments, so that an old output differs from a
new one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import headwise as hw
from headwise import cli
from headwise.cli.exit_status import run_guarded
from headwise.learn.sample_tour import TourScale, run_sample_tour
from headwise.models.vocabulary import ByteVocabulary
from headwise.observe.traces import save_trace
from support.tiny_configs import model_config

GPT = model_config("gpt2", n_embd=12, n_head=3, n_layer=2, vocab_size=256, n_positions=24)
OUT = "{OUT}"  # in arguments: the path of the output
TEXTS = (
    "the cat sat\non the mat\nand the dog\nlay by it\nall day long\nin the sun\nwhile "
    "birds\nsang songs\n"
)
STUDY = """
hypothesis = "A window of 3 recalls less than full attention"
seeds = [1]
head_texts = 2
[recipe]
steps = 2
batch = 4
lr = [0.001]
evaluate_every = 2
evaluate_batches = 1
[variants.mha]
[variants.near]
options = { pattern = "window(3)" }
[tasks.recall]
vocabulary = 16
length = 16
pairs = [2, 3]
"""
TOUR = TourScale(6, 8, 96, 4, 4, 4, 0.05)
# Nothing is chosen by measuring times, so that equal runs give equal bits.
CHOICES = {"precision": "fp32", "attention": "plain", "rows": "padded", "compile": "off"}
SETTINGS = CHOICES | {"checkpoint_every": 2, "batch": 4}
TRAINING = (
    "--steps",
    "6",
    *(word for item in SETTINGS.items() for word in ("--set", "recipe.{}={}".format(*item))),
)
Action = Callable[[Path], int]


class Command(NamedTuple):
    """A command that writes to a path.

    - `actions`: write an older and a newer output; the second starts without the state of the
      first.
    - `suffix`: of the file it writes; "" for a folder.
    - `results`: files by which a run that was continued is compared with one that was not; none if
      an output appears
      complete or not at all.
    - `parts`: files and folders below the output, each of which appears complete or not at all.
    - `share`: how many of the kills it gets, relative to other commands.
    """

    actions: tuple[Action, Action]
    suffix: str = ""
    results: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    share: float = 1.0


def import_everything() -> None:
    """Import all modules that commands use, so that forked processes need not."""
    for module in pkgutil.walk_packages(hw.__path__, "headwise."):
        if not module.name.startswith(("headwise.kernels", "headwise.__main__")):
            with suppress(ImportError):
                importlib.import_module(module.name)
    for name in ("backends.backend_svg", "backends.backend_agg", "figure", "font_manager"):
        importlib.import_module(f"matplotlib.{name}")
    importlib.import_module("torch._dynamo")  # which torch's optimisers import


def make_inputs(folder: Path) -> None:
    """Write a model, texts, traces and a study file."""
    folder.mkdir()
    net = hw.build(hw.families.read_model_spec(GPT), seed=0).eval()
    net.usage = hw.ProcessorSpec(tokenizer=ByteVocabulary().document)
    hw.save(net, folder / "model")
    (folder / "texts").write_text(TEXTS)
    (folder / "more").write_text(TEXTS.upper())
    (folder / "study.toml").write_text(STUDY)
    for name, text in (("a", "one two"), ("b", "three")):
        save_trace(hw.trace(net, text), folder / f"{name}.trace")


def list_commands(folder: Path) -> Mapping[str, Command]:
    """Every command that writes, with its inputs in `folder`."""
    model, texts, more = (str(folder / name) for name in ("model", "texts", "more"))
    traces = [str(folder / f"{name}.trace") for name in "ab"]
    fast = ("--seconds", "0.05", "--length", "8")

    def both(*argv: str, old: tuple[str, ...], new: tuple[str, ...]) -> tuple[Action, Action]:
        return _command(*argv, *old), _command(*argv, *new)

    def replacing(*argv: str, old: tuple[str, ...], new: tuple[str, ...]) -> tuple[Action, Action]:
        return both(*argv, "--out", OUT, "--overwrite", old=old, new=new)

    def with_texts(*argv: str) -> tuple[Action, Action]:
        return replacing(*argv, old=("--data", texts), new=("--data", more))

    def of_traces(command: str, *argv: str) -> tuple[Action, Action]:
        first, second = (_command(command, trace, *argv, "--overwrite") for trace in traces)
        return first, second

    study = _command("study", str(folder / "study.toml"), "--jobs", "0", "--out", OUT)
    train = _command("train", "copy", "--out", OUT, "--resume", *TRAINING)
    plots, pages = (("--plot", OUT, "--overwrite"), ("--html", OUT, "--overwrite"))
    return {
        "trace": Command(
            replacing("trace", model, old=("--text", "a"), new=("--text", "bc")), ".trace", share=2
        ),
        "trace --export": Command(of_traces("trace", "--export", OUT), ".csv", share=2),
        "view --export": Command(of_traces("view", "--export", OUT), ".html", share=2),
        "cost --plot": Command(
            both("cost", old=("mha", *plots), new=("gqa", *plots)), ".svg", share=2
        ),
        "heads": Command(with_texts("heads", model)),
        "heads --draw": Command(of_traces("heads", "--draw", "L0H0", "--out", OUT), share=2),
        "prune": Command(with_texts("prune", model, "--keep", "0.5", *fast), share=4),
        "prune --budget": Command(
            with_texts("prune", model, "--budget", "parameters=0.9", *fast), share=2
        ),
        "prune --sweep": Command(with_texts("prune", model, "--sweep")),
        "convert": Command(with_texts("convert", model, "--kv", "1", *fast), share=4),
        "learn --html": Command(
            both("learn", "000", *pages, old=("--lang", "en"), new=("--lang", "zh"))
        ),
        "train": Command((train, train), results=("model.safetensors",), share=2),
        "study": Command((study, study), results=("results.jsonl",), parts=("report",), share=0.5),
        "demo": Command((_tour, _tour), parts=("sample/pruned",), share=0.3),
    }


def _command(*argv: str) -> Action:
    return lambda out: cli.main([word.replace(OUT, str(out)) for word in argv])


def _tour(out: Path) -> int:
    def show(argv: list[str]) -> int:
        run_sample_tour(lambda page: None, lambda title: None, out, TOUR)
        return 0

    return run_guarded(show, ["demo"])
