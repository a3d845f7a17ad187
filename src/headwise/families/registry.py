"""Families by the name that a config gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from ..blueprint import OutputHeadSpec, ModelSpec, StackSpec
from ..errors import suggest
from .config import REMOTE_CODE_KEYS, TransformersConfig

ConfigReader = Callable[[TransformersConfig, str], ModelSpec]
ConfigWriter = Callable[[ModelSpec, str], dict[str, Any]]


class ModelFamily(NamedTuple):
    """One architecture: its model_type, how its classes' names begin, and who reads it."""

    name: str
    class_prefix: str
    default_task: str
    reader: ConfigReader


FAMILIES: dict[str, ModelFamily] = {}
WRITERS: dict[str, ConfigWriter] = {}


def register_family(name: str, class_prefix: str, default_task: str = "ForCausalLM") -> Callable[[ConfigReader], ConfigReader]:
    """Register a reader of configs. It is told what the model is for: the class's name behind `stem`, or the usual."""

    def add(reader: ConfigReader) -> ConfigReader:
        FAMILIES[name] = ModelFamily(name, class_prefix, default_task, reader)
        return reader

    return add


def register_writer(*names: str) -> Callable[[ConfigWriter], ConfigWriter]:
    """Register a writer of configs: what it is given reads as nearly that model in the family it is told."""

    def add(writer: ConfigWriter) -> ConfigWriter:
        WRITERS.update(dict.fromkeys(names, writer))
        return writer

    return add


def read_config(config: TransformersConfig) -> ModelSpec:
    """The model that a config describes."""
    found = _find_family(config)
    task = _read_task(config, found)
    config.family_name = found.name
    for key in REMOTE_CODE_KEYS:
        if config.values.get(key):
            config.add_note(f"{key} names code that came with the model; it is not run, and not needed")
    if config.read_table("quantization_config"):
        config.add_note(
            "quantization_config: the weights are stored in fewer bits; how many numbers there are stays the same"
        )
    return found.reader(config, task)


def _find_family(config: TransformersConfig) -> ModelFamily:
    told, classes = config.values.get("model_type"), _read_class_names(config)
    by_stem = [f for f in FAMILIES.values() if classes and classes[0].startswith(f.class_prefix)]
    if told is None and by_stem:
        return max(by_stem, key=lambda f: len(f.class_prefix))
    if told is None and not classes:
        known = ", ".join(sorted(FAMILIES))
        config.fail("neither model_type nor architectures says what this is", f"add model_type, one of {known}")
    name = str(told if told is not None else classes[0])
    if name not in FAMILIES:
        known = suggest(name.lower(), FAMILIES)
        own = next((key for key in REMOTE_CODE_KEYS if config.values.get(key)), "")
        run = f" and {own}, which would run code of its own, is not followed" if own else ""
        config.fail(f"{'architectures' if told is None else 'model_type'} {name!r} is not known{run}", known)
    return FAMILIES[name]


def _read_class_names(config: TransformersConfig) -> list[str]:
    told: Any = config.values.get("architectures")
    names: list[Any] = cast("list[Any]", told) if isinstance(told, list) else [] if told is None else [told, None]
    if not all(isinstance(name, str) for name in names):
        config.fail(f"architectures = {told!r} is no list of names", "list one, or leave it out")
    return names


def _read_task(config: TransformersConfig, found: ModelFamily) -> str:
    classes = _read_class_names(config)
    if not classes:
        config.add_note(f"architectures is not said; read as {found.class_prefix}{found.default_task}")
        return found.default_task
    if not classes[0].startswith(found.class_prefix):
        config.fail(f"architectures names {classes[0]!r}, model_type {found.name!r}", f"name a class {found.class_prefix}...")
    return classes[0].removeprefix(found.class_prefix)


def select_heads(config: TransformersConfig, task: str, heads_by_task: Mapping[str, Sequence[OutputHeadSpec]]) -> tuple[OutputHeadSpec, ...]:
    """The heads that a task asks for."""
    if task not in heads_by_task:
        config.fail(f"architectures asks for {task!r}", f"{suggest(task, heads_by_task)}, behind the family's name")
    return tuple(heads_by_task[task])


def read_num_labels(config: TransformersConfig, default: int = 2) -> int:
    """How many classes a classifier tells apart."""
    named = config.read_table("id2label")
    return len(named.values) if named and named.values else config.read_int("num_labels", default=default, minimum=1)


def read_tied_stack(config: TransformersConfig, stack: str, default: bool) -> str:
    """The stack whose table a head over tokens reads: none where config says that it has its own."""
    return stack if config.read_bool("tie_word_embeddings", default) else ""


def make_decoder_model(config: TransformersConfig, task: str, stack: StackSpec, head: OutputHeadSpec) -> ModelSpec:
    """A decoder of one stack, with the head over tokens or with a classifier in its place."""
    return ModelSpec(config.family_name, "decoder", (stack,), select_decoder_heads(config, task, head), tuple(config.notes))


def select_decoder_heads(config: TransformersConfig, task: str, head: OutputHeadSpec) -> tuple[OutputHeadSpec, ...]:
    """The head over tokens, or a classifier in its place."""
    count = read_num_labels(config)
    ways: dict[str, list[OutputHeadSpec]] = {
        "ForCausalLM": [head],
        "LMHeadModel": [head],
        "Model": [],
        "ForSequenceClassification": [OutputHeadSpec("classes", count, at="last")],
        "ForTokenClassification": [OutputHeadSpec("classes", count, bias="learned")],
        "ForQuestionAnswering": [OutputHeadSpec("span", 2, bias="learned")],
    }
    return select_heads(config, task, ways)
