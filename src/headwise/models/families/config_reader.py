"""Read config.json key by key, with the defaults of transformers; a wrong value raises a
SpecError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

from ...util.errors import SpecError, suggest
from ...util.size_limits import MAX_HEAD_DIM, MAX_HEADS
from ..model_spec import ModelSpec, OutputHeadSpec, StackSpec

# these keys would run code shipped with the weights
REMOTE_CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines")
# Keys for the number of heads.
HEAD_COUNT_KEYS = (
    "num_attention_heads",
    "num_heads",
    "n_head",
    "n_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
KV_COUNT_KEYS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
# Names of activations in transformers -> names in headwise.
ACTIVATIONS = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(
        ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"),
        "gelu_tanh",
    ),
    **dict.fromkeys(("silu", "swish"), "silu"),
    **{
        name: name
        for name in ("relu", "relu2", "relu6", "tanh", "sigmoid", "mish", "quick_gelu", "linear")
    },
}


class UndescribedSetting(SpecError):
    """A setting that no `ModelSpec` describes, as `fact` says."""

    def __init__(self, source: str, fact: str, remedy: str) -> None:
        super().__init__(f"{source}: {fact}; {remedy}")
        self.source = source
        self.fact = fact


class TransformersConfig:
    """The keys of one config.json, with typed readers that check every value.

    `notes` collects facts that the model description cannot express. Readers that take several
    names use the first one that is present.
    """

    def __init__(self, values: Mapping[str, Any], source: str = "config.json") -> None:
        self.values = values
        self.source = source
        self.notes = list[str]()
        self.family_name = ""

    def fail(self, fact: str, remedy: str) -> NoReturn:
        """Raise a SpecError: the source, what is wrong, and how to correct it."""
        raise SpecError(f"{self.source}: {fact}; {remedy}")

    def refuse(self, fact: str, remedy: str) -> NoReturn:
        """Raise an UndescribedSetting."""
        raise UndescribedSetting(self.source, fact, remedy)

    def find_key(self, names: Sequence[str], default: Any) -> tuple[str, Any]:
        """Return the name and value of the key that is present, or the first name and `default`.

        Several names of one setting must have the same value, because transformers uses one or the
        other.
        """
        present = [name for name in names if name in self.values]
        for other in present[1:]:
            if self.values[other] != self.values[present[0]]:
                fact = (
                    f"{present[0]} = {self.values[present[0]]!r} and {other} = "
                    f"{self.values[other]!r}"
                )
                self.fail(
                    f"{fact} are names of one setting", "give the same value, or leave one out"
                )
        return (present[0], self.values[present[0]]) if present else (names[0], default)

    def read_int(
        self, *names: str, default: int, minimum: int = 1, maximum: int | None = None
    ) -> int:
        """Return an integer from `minimum` to `maximum`."""
        name, value = self.find_key(names, default)
        if type(value) is not int:
            self.fail(
                f"{name} = {value!r} is not a whole number", f"give one of at least {minimum}"
            )
        if value < minimum or (maximum is not None and value > maximum):
            bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            self.fail(f"{name} = {value} is out of range", f"give one {bounds}")
        return value

    def read_optional_int(
        self, *names: str, default: int | None = None, maximum: int | None = None
    ) -> int | None:
        """Return an integer, or None if the key is null, or missing and `default` is None."""
        if self.find_key(names, default)[1] is None:
            return None
        return self.read_int(*names, default=default or 1, maximum=maximum)

    def read_float(self, *names: str, default: float) -> float:
        """Return a positive finite number."""
        name, value = self.find_key(names, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value < math.inf
        ):
            self.fail(f"{name} = {value!r} is not a positive number", f"give one such as {default}")
        return float(value)

    def read_bool(self, name: str, default: bool) -> bool:
        """Return true or false; null counts as false, as in transformers."""
        value = self.values.get(name, default)
        if value is not None and not isinstance(value, bool):
            self.fail(f"{name} = {value!r} is neither true nor false", "give one of them")
        return bool(value)

    def read_choice(self, name: str, default: str, choices: Iterable[str]) -> str:
        """Return a string that is one of `choices`."""
        value = self.values.get(name, default)
        choices = list(choices)
        if value not in choices:
            self.fail(f"{name} = {value!r} is not known", suggest(str(value), choices))
        return value

    def read_choices(self, name: str, choices: Iterable[str]) -> list[str] | None:
        """Return a list of strings from `choices`, or None if the key is null or missing."""
        value = self.values.get(name)
        choices = list(choices)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            self.fail(f"{name} = {value!r} is not a list", f"list words such as {choices[0]!r}")
        words: list[Any] = list(cast("Sequence[Any]", value))
        for word in words:
            if word not in choices:
                self.fail(f"{name} names {word!r}", suggest(str(word), choices))
        return words

    def read_list(self, name: str) -> list[Any] | None:
        """Return a list with items of any type, or None if the key is null or missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, (list, tuple)):
            self.fail(f"{name} = {value!r} is not a list", "write it as one, or leave it out")
        return None if value is None else [*cast("Sequence[Any]", value)]

    def read_table(self, *names: str) -> TransformersConfig | None:
        """Return a nested table, which shares `notes`, or None if the key is null or missing."""
        name, value = self.find_key(names, None)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.fail(
                f"{name} = {value!r} is not a table", f"write {name} = {{...}} or leave it out"
            )
        inner = TransformersConfig(cast("Mapping[str, Any]", value), f"{self.source}: {name}")
        inner.notes = self.notes
        return inner

    def read_pair(self, name: str, default: int) -> tuple[int, int]:
        """Return height and width, given as a list of two or as one size for both."""
        value = self.values.get(name, default)
        both: list[Any] = (
            [value] * 2 if not isinstance(value, (list, tuple)) else list(cast("list[Any]", value))
        )
        if len(both) != 2 or any(type(side) is not int or side < 1 for side in both):
            self.fail(
                f"{name} = {value!r} is neither one size nor two",
                f"give {default}, or height and width",
            )
        return both[0], both[1]

    def read_activation(self, name: str, default: str) -> str:
        """Return headwise's name of an activation given by its name in transformers."""
        return ACTIVATIONS[self.read_choice(name, default, ACTIVATIONS)]

    def read_num_layers(self, *names: str, default: int) -> int:
        """Return the number of layers of a stack, at most 10,000."""
        return self.read_int(*names, default=default, maximum=10_000)

    def read_num_heads(self, *names: str, default: int) -> int:
        """Return the number of attention heads, at most `MAX_HEADS`."""
        return self.read_int(*names, default=default, maximum=MAX_HEADS)

    def read_head_dim(self, *names: str, default: int) -> int:
        """Return the head dimension from a separate key, at most `MAX_HEAD_DIM`."""
        return self.read_int(*names, default=default, maximum=MAX_HEAD_DIM)

    def resolve_head_dim(
        self, model: int, heads: int, *names: str, default: int | None = None
    ) -> int:
        """Return the head dimension: the first of `names` that is set, otherwise `model` divided by
        `heads`.
        """
        head_dim = (
            self.read_optional_int(*names, default=default, maximum=MAX_HEAD_DIM) if names else None
        )
        if head_dim is None and model % heads:
            add = f", or add {names[0]}" if names else ""
            self.fail(
                f"a hidden size of {model} does not divide among {heads} heads",
                f"give a multiple{add}",
            )
        if head_dim is None and model // heads > MAX_HEAD_DIM:
            self.fail(
                f"{model} / {heads} = {model // heads} channels per head are too many",
                f"give at most {MAX_HEAD_DIM}",
            )
        return model // heads if head_dim is None else head_dim

    def require_default(self, name: str, default: Any, reason: str) -> None:
        """Refuse every value of a key other than its default; `reason` continues the sentence `name
        = value ...`.
        """
        if self.values.get(name, default) not in (default, None):
            self.refuse(
                f"{name} = {self.values[name]!r} {reason}", f"give {default!r} or leave it out"
            )

    def add_note(self, text: str) -> None:
        """Add a fact that the model description cannot express, once."""
        if text not in self.notes:
            self.notes.append(text)


# --- Registry of families, by the model_type in config.json ---------------------------------------

ConfigReader = Callable[[TransformersConfig, str], ModelSpec]


class ModelFamily(NamedTuple):
    """One architecture: its model_type, the prefix of its class names, its default task and its
    config reader.
    """

    name: str
    class_prefix: str
    default_task: str
    reader: ConfigReader


FAMILIES: dict[str, ModelFamily] = {}


def register_family(
    name: str, class_prefix: str, default_task: str = "ForCausalLM"
) -> Callable[[ConfigReader], ConfigReader]:
    """Register a config reader under a model_type.

    The reader gets the config and the task: the class name in `architectures` without
    `class_prefix` ("ForCausalLM", "Model", ...), or `default_task` if there is none.
    """

    def add(reader: ConfigReader) -> ConfigReader:
        FAMILIES[name] = ModelFamily(name, class_prefix, default_task, reader)
        return reader

    return add


def read_config(config: TransformersConfig) -> ModelSpec:
    """Return the model that a config describes."""
    family = _find_family(config)
    task = _read_task(config, family)
    config.family_name = family.name
    for key in REMOTE_CODE_KEYS:
        if config.values.get(key):
            config.add_note(
                f"{key} names code shipped with the model; headwise does not run it and does not "
                "need it"
            )
    return family.reader(config, task)


def _find_family(config: TransformersConfig) -> ModelFamily:
    model_type = config.values.get("model_type")
    classes = _read_class_names(config)
    by_class_name = [
        f for f in FAMILIES.values() if classes and classes[0].startswith(f.class_prefix)
    ]
    if model_type is None and by_class_name:
        return max(by_class_name, key=lambda f: len(f.class_prefix))
    if model_type is None and not classes:
        families = ", ".join(sorted(FAMILIES))
        config.fail(
            "neither model_type nor architectures is present", f"add model_type, one of {families}"
        )
    name = str(model_type if model_type is not None else classes[0])
    if name not in FAMILIES:
        families = suggest(name.lower(), FAMILIES)
        own = next((key for key in REMOTE_CODE_KEYS if config.values.get(key)), "")
        run = ""
        if own:
            run = f" and {own}, which would run code shipped with the model, is not followed"
        config.refuse(
            f"{'architectures' if model_type is None else 'model_type'} {name!r} is not known{run}",
            families,
        )
    return FAMILIES[name]


def _read_class_names(config: TransformersConfig) -> list[str]:
    architectures: Any = config.values.get("architectures")
    names: list[Any] = (
        cast("list[Any]", architectures)
        if isinstance(architectures, list)
        else []
        if architectures is None
        else [architectures, None]
    )
    if not all(isinstance(name, str) for name in names):
        config.fail(
            f"architectures = {architectures!r} is not a list of class names",
            "list one, or leave it out",
        )
    return names


def _read_task(config: TransformersConfig, family: ModelFamily) -> str:
    classes = _read_class_names(config)
    if not classes:
        config.add_note(
            f"architectures is missing; read as {family.class_prefix}{family.default_task}"
        )
        return family.default_task
    if not classes[0].startswith(family.class_prefix):
        config.fail(
            f"architectures names {classes[0]!r}, model_type {family.name!r}",
            f"name a class {family.class_prefix}...",
        )
    return classes[0].removeprefix(family.class_prefix)


def select_heads(
    config: TransformersConfig, task: str, heads_by_task: Mapping[str, Sequence[OutputHeadSpec]]
) -> tuple[OutputHeadSpec, ...]:
    """Return the output heads of a task, and refuse tasks that are not in `heads_by_task`."""
    if task not in heads_by_task:
        config.fail(
            f"architectures asks for {task!r}",
            f"{suggest(task, heads_by_task)}, after the family's class prefix",
        )
    return tuple(heads_by_task[task])


def read_num_labels(config: TransformersConfig, default: int = 2) -> int:
    """Return the number of classes of a classifier: the length of `id2label`, or `num_labels`."""
    named = config.read_table("id2label")
    if named and named.values:
        return len(named.values)
    return config.read_int("num_labels", default=default, minimum=1)


def read_tied_stack(config: TransformersConfig, stack: str, default: bool) -> str:
    """Return the stack that shares its token embedding with the language-model head, or "" if the
    head has its own matrix.
    """
    return stack if config.read_bool("tie_word_embeddings", default) else ""


def assemble_model(
    config: TransformersConfig,
    kind: str,
    stacks: tuple[StackSpec, ...],
    heads: tuple[OutputHeadSpec, ...],
) -> ModelSpec:
    """Return a model of the family of this config, with the notes that reading it has left."""
    return ModelSpec(config.family_name, kind, stacks, heads, tuple(config.notes))
