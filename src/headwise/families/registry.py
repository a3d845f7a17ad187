"""Families by the name that a config gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from ..blueprint import Head, Model, Stack
from ..errors import nearest
from .config import FOREIGN, Config

Reader = Callable[[Config, str], Model]
Writer = Callable[[Model, str], dict[str, Any]]


class Family(NamedTuple):
    """One architecture: its model_type, how its classes' names begin, and who reads it."""

    name: str
    stem: str
    usual: str
    reader: Reader


FAMILIES: dict[str, Family] = {}
WRITERS: dict[str, Writer] = {}


def family(name: str, stem: str, usual: str = "ForCausalLM") -> Callable[[Reader], Reader]:
    """Register a reader of configs. It is told what the model is for: the class's name behind `stem`, or the usual."""

    def add(reader: Reader) -> Reader:
        FAMILIES[name] = Family(name, stem, usual, reader)
        return reader

    return add


def writes(*names: str) -> Callable[[Writer], Writer]:
    """Register a writer of configs: what it is given reads as nearly that model in the family it is told."""

    def add(writer: Writer) -> Writer:
        WRITERS.update(dict.fromkeys(names, writer))
        return writer

    return add


def model(config: Config) -> Model:
    """The model that a config describes."""
    found = _family(config)
    task = _task(config, found)
    config.name = found.name
    for key in FOREIGN:
        if config.said.get(key):
            config.note(f"{key} names code that came with the model; it is not run, and not needed")
    if config.table("quantization_config"):
        config.note(
            "quantization_config: the weights are stored in fewer bits; how many numbers there are stays the same"
        )
    return found.reader(config, task)


def _family(config: Config) -> Family:
    told, classes = config.said.get("model_type"), _classes(config)
    by_stem = [f for f in FAMILIES.values() if classes and classes[0].startswith(f.stem)]
    if told is None and by_stem:
        return max(by_stem, key=lambda f: len(f.stem))
    if told is None and not classes:
        known = ", ".join(sorted(FAMILIES))
        config.wrong("neither model_type nor architectures says what this is", f"add model_type, one of {known}")
    name = str(told if told is not None else classes[0])
    if name not in FAMILIES:
        known = nearest(name.lower(), FAMILIES)
        own = next((key for key in FOREIGN if config.said.get(key)), "")
        run = f" and {own}, which would run code of its own, is not followed" if own else ""
        config.wrong(f"{'architectures' if told is None else 'model_type'} {name!r} is not known{run}", known)
    return FAMILIES[name]


def _classes(config: Config) -> list[str]:
    told: Any = config.said.get("architectures")
    names: list[Any] = cast("list[Any]", told) if isinstance(told, list) else [] if told is None else [told, None]
    if not all(isinstance(name, str) for name in names):
        config.wrong(f"architectures = {told!r} is no list of names", "list one, or leave it out")
    return names


def _task(config: Config, found: Family) -> str:
    classes = _classes(config)
    if not classes:
        config.note(f"architectures is not said; read as {found.stem}{found.usual}")
        return found.usual
    if not classes[0].startswith(found.stem):
        config.wrong(f"architectures names {classes[0]!r}, model_type {found.name!r}", f"name a class {found.stem}...")
    return classes[0].removeprefix(found.stem)


def choose(config: Config, task: str, ways: Mapping[str, Sequence[Head]]) -> tuple[Head, ...]:
    """The heads that a task asks for."""
    if task not in ways:
        config.wrong(f"architectures asks for {task!r}", f"{nearest(task, ways)}, behind the family's name")
    return tuple(ways[task])


def labels(config: Config, default: int = 2) -> int:
    """How many classes a classifier tells apart."""
    named = config.table("id2label")
    return len(named.said) if named and named.said else config.size("num_labels", default=default, least=1)


def tied(config: Config, stack: str, usual: bool) -> str:
    """The stack whose table a head over tokens reads: none where config says that it has its own."""
    return stack if config.flag("tie_word_embeddings", usual) else ""


def decoder(config: Config, task: str, stack: Stack, head: Head) -> Model:
    """A decoder of one stack, with the head over tokens or with a classifier in its place."""
    return Model(config.name, "decoder", (stack,), said_by(config, task, head), tuple(config.notes))


def said_by(config: Config, task: str, head: Head) -> tuple[Head, ...]:
    """The head over tokens, or a classifier in its place."""
    count = labels(config)
    ways: dict[str, list[Head]] = {
        "ForCausalLM": [head],
        "LMHeadModel": [head],
        "Model": [],
        "ForSequenceClassification": [Head("classes", count, at="last")],
        "ForTokenClassification": [Head("classes", count, bias="learned")],
        "ForQuestionAnswering": [Head("span", 2, bias="learned")],
    }
    return choose(config, task, ways)
