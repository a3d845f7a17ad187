"""A config.json read key by key: what is missing is what transformers would take, what is wrong is said in one line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

from ..errors import SpecError, suggest
from ..model_spec import ModelSpec, OutputHeadSpec, StackSpec

MAX_HEADS = 1 << 16  # of these there are lists, one item for each: a larger number is a slip
MAX_HEAD_DIM = 1 << 16
REMOTE_CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines")  # would run code that came with the weights
# transformers' names of activations, and ours.
ACTIVATIONS = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
    **dict.fromkeys(("silu", "swish"), "silu"),
    **{name: name for name in ("relu", "relu2", "relu6", "tanh", "sigmoid", "mish", "quick_gelu", "linear")},
}


class TransformersConfig:
    """The keys of one config; `notes` gather what the description of the model does not say.

    Keys may be given several names, of which the first that is there counts.
    """

    def __init__(self, values: Mapping[str, Any], source: str = "config.json") -> None:
        self.values, self.source, self.notes, self.family_name = values, source, list[str](), ""

    def fail(self, fact: str, remedy: str) -> NoReturn:
        """The one line that says what is wrong here."""
        raise SpecError(f"{self.source}: {fact}; {remedy}")

    def find_key(self, names: Sequence[str], default: Any) -> tuple[str, Any]:
        """The name and value of the first key that is there."""
        found = [name for name in names if name in self.values]
        return (found[0], self.values[found[0]]) if found else (names[0], default)

    def read_int(self, *names: str, default: int, minimum: int = 1, maximum: int | None = None) -> int:
        """A whole number."""
        name, value = self.find_key(names, default)
        if type(value) is not int:
            self.fail(f"{name} = {value!r} is no whole number", f"give one of at least {minimum}")
        if value < minimum or (maximum is not None and value > maximum):
            bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            self.fail(f"{name} = {value} is no size of a model", f"give one {bounds}")
        return value

    def read_optional_int(self, *names: str, default: int | None = None, maximum: int | None = None) -> int | None:
        """A whole number, or None where the key is null or missing."""
        return (
            None
            if self.find_key(names, default)[1] is None
            else self.read_int(*names, default=default or 1, maximum=maximum)
        )

    def read_float(self, *names: str, default: float) -> float:
        """A positive number."""
        name, value = self.find_key(names, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            self.fail(f"{name} = {value!r} is no positive number", f"give one such as {default}")
        return float(value)

    def read_optional_float(self, name: str) -> float | None:
        """A positive number, or None where the key is null or missing."""
        return None if self.values.get(name) is None else self.read_float(name, default=1.0)

    def read_bool(self, name: str, default: bool) -> bool:
        """True or false; null counts as missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            self.fail(f"{name} = {value!r} is neither true nor false", "give one of them")
        return default if value is None else value

    def read_choice(self, name: str, default: str, choices: Iterable[str]) -> str:
        """One of a few words."""
        value, choices = self.values.get(name, default), list(choices)
        if value not in choices:
            self.fail(f"{name} = {value!r} is not known", suggest(str(value), choices))
        return value

    def read_choices(self, name: str, choices: Iterable[str]) -> list[str] | None:
        """A list of such words, or None where the key is null or missing."""
        value, choices = self.values.get(name), list(choices)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            self.fail(f"{name} = {value!r} is no list", f"list words such as {choices[0]!r}")
        told: list[Any] = list(cast("Sequence[Any]", value))
        for word in told:
            if word not in choices:
                self.fail(f"{name} names {word!r}", suggest(str(word), choices))
        return told

    def read_list(self, name: str) -> list[Any] | None:
        """A list of anything, or None where the key is null or missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, (list, tuple)):
            self.fail(f"{name} = {value!r} is no list", "write it as one, or leave it out")
        return None if value is None else [*cast("Sequence[Any]", value)]

    def read_table(self, *names: str) -> TransformersConfig | None:
        """A table inside, or None where the key is null or missing."""
        name, value = self.find_key(names, None)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.fail(f"{name} = {value!r} is no table", f"write {name} = {{...}} or leave it out")
        inner = TransformersConfig(cast("Mapping[str, Any]", value), f"{self.source}: {name}")
        inner.notes = self.notes
        return inner

    def read_pair(self, name: str, default: int) -> tuple[int, int]:
        """One size for both sides, or a list of two: height and width."""
        value = self.values.get(name, default)
        both: list[Any] = [value] * 2 if not isinstance(value, (list, tuple)) else list(cast("list[Any]", value))
        if len(both) != 2 or any(type(side) is not int or side < 1 for side in both):
            self.fail(f"{name} = {value!r} is neither a size nor two", f"give {default}, or height and width")
        return both[0], both[1]

    def read_activation(self, name: str, default: str) -> str:
        """An activation by our word for it."""
        return ACTIVATIONS[self.read_choice(name, default, ACTIVATIONS)]

    def read_num_layers(self, *names: str, default: int) -> int:
        """How many layers a stack has."""
        return self.read_int(*names, default=default, maximum=10_000)

    def read_num_heads(self, *names: str, default: int) -> int:
        """How many heads."""
        return self.read_int(*names, default=default, maximum=MAX_HEADS)

    def read_head_dim(self, *names: str, default: int) -> int:
        """How wide a head is, where that is a number of its own."""
        return self.read_int(*names, default=default, maximum=MAX_HEAD_DIM)

    def resolve_head_dim(self, model: int, heads: int, *names: str, default: int | None = None) -> int:
        """How wide a head is: as said, or the model's width divided among them."""
        told = self.read_optional_int(*names, default=default, maximum=MAX_HEAD_DIM) if names else None
        if told is None and model % heads:
            add = f", or add {names[0]}" if names else ""
            self.fail(f"a hidden size of {model} does not divide among {heads} heads", f"give a multiple{add}")
        if told is None and model // heads > MAX_HEAD_DIM:
            self.fail(f"{model} / {heads} = {model // heads} channels are no head", f"give at most {MAX_HEAD_DIM}")
        return model // heads if told is None else told

    def read_num_kv_heads(self, heads: int, *, default: int | None = None) -> int:
        """How many key-value heads: all, unless said."""
        name = "num_key_value_heads"
        kv = self.read_optional_int(name, default=default, maximum=MAX_HEADS) or heads
        if heads % kv:
            self.fail(f"num_attention_heads = {heads} do not share {name} = {kv} evenly", "give a divisor")
        return kv

    def require_default(self, name: str, default: Any, reason: str) -> None:
        """A key that may only have its usual value."""
        if self.values.get(name, default) not in (default, None):
            self.fail(f"{name} = {self.values[name]!r} {reason}", f"give {default!r} or leave it out")

    def add_note(self, text: str) -> None:
        """Keep something that the description does not say."""
        if text not in self.notes:
            self.notes.append(text)


# --- Families by the name that a config gives them -----------------------------------------------------

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


def register_family(
    name: str, class_prefix: str, default_task: str = "ForCausalLM"
) -> Callable[[ConfigReader], ConfigReader]:
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
        config.fail(
            f"architectures names {classes[0]!r}, model_type {found.name!r}", f"name a class {found.class_prefix}..."
        )
    return classes[0].removeprefix(found.class_prefix)


def select_heads(
    config: TransformersConfig, task: str, heads_by_task: Mapping[str, Sequence[OutputHeadSpec]]
) -> tuple[OutputHeadSpec, ...]:
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
    return ModelSpec(
        config.family_name, "decoder", (stack,), select_decoder_heads(config, task, head), tuple(config.notes)
    )


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
