"""Read and write config.json key by key, with the defaults of transformers; a wrong value raises a
SpecError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, cast

from ..errors import SpecError, suggest
from ..model_spec import (
    FeedForwardSpec,
    ModelSpec,
    OutputHeadSpec,
    StackSpec,
    UnsupportedPart,
    to_dict,
)
from ..size_limits import MAX_HEAD_DIM, MAX_HEADS
from ..spec.attention_spec import AttentionSpec

REMOTE_CODE_KEYS = (
    "auto_map",
    "trust_remote_code",
    "custom_pipelines",
)  # these keys would run code shipped with the weights
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
        return (
            None
            if self.find_key(names, default)[1] is None
            else self.read_int(*names, default=default or 1, maximum=maximum)
        )

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

    def read_optional_float(self, name: str) -> float | None:
        """Return a positive number, or None if the key is null or missing."""
        return None if self.values.get(name) is None else self.read_float(name, default=1.0)

    def read_bool(self, name: str, default: bool) -> bool:
        """Return true or false; null counts as false, as in transformers."""
        value = self.values.get(name, default)
        if value is not None and not isinstance(value, bool):
            self.fail(f"{name} = {value!r} is neither true nor false", "give one of them")
        return bool(value)

    def read_choice(self, name: str, default: str, choices: Iterable[str]) -> str:
        """Return a string that is one of `choices`."""
        value, choices = self.values.get(name, default), list(choices)
        if value not in choices:
            self.fail(f"{name} = {value!r} is not known", suggest(str(value), choices))
        return value

    def read_choices(self, name: str, choices: Iterable[str]) -> list[str] | None:
        """Return a list of strings from `choices`, or None if the key is null or missing."""
        value, choices = self.values.get(name), list(choices)
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
        """Return the head dimension from a key of its own, at most `MAX_HEAD_DIM`."""
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

    def read_num_kv_heads(self, heads: int, *, default: int | None = None) -> int:
        """Return `num_key_value_heads`, which must divide `heads`; without it, every query head has
        its own.
        """
        name = "num_key_value_heads"
        kv = self.read_optional_int(name, default=default, maximum=MAX_HEADS) or heads
        if heads % kv:
            self.fail(
                f"num_attention_heads = {heads} is not a multiple of {name} = {kv}",
                "give a divisor",
            )
        return kv

    def require_default(self, name: str, default: Any, reason: str) -> None:
        """Refuse every value of a key other than its default; `reason` continues the sentence `name
        = value ...`.
        """
        if self.values.get(name, default) not in (default, None):
            self.fail(
                f"{name} = {self.values[name]!r} {reason}", f"give {default!r} or leave it out"
            )

    def add_note(self, text: str) -> None:
        """Add a fact that the model description cannot express, once."""
        if text not in self.notes:
            self.notes.append(text)


# --- Registry of families, by the model_type in config.json ---------------------------------------

ConfigReader = Callable[[TransformersConfig, str], ModelSpec]
ConfigWriter = Callable[[ModelSpec, str], dict[str, Any]]


class ModelFamily(NamedTuple):
    """One architecture: its model_type, the prefix of its class names, its default task and its
    config reader.
    """

    name: str
    class_prefix: str
    default_task: str
    reader: ConfigReader


FAMILIES: dict[str, ModelFamily] = {}
WRITERS: dict[str, ConfigWriter] = {}


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


def register_writer(*names: str) -> Callable[[ConfigWriter], ConfigWriter]:
    """Register a config writer for these families.

    The writer gets a model and a family name and returns the keys that describe the model as nearly
    as the family can; `write_config` checks the result.
    """

    def add(writer: ConfigWriter) -> ConfigWriter:
        WRITERS.update(dict.fromkeys(names, writer))
        return writer

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
    model_type, classes = config.values.get("model_type"), _read_class_names(config)
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
        run = (
            f" and {own}, which would run code shipped with the model, is not followed"
            if own
            else ""
        )
        config.fail(
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
    return (
        len(named.values)
        if named and named.values
        else config.read_int("num_labels", default=default, minimum=1)
    )


def read_tied_stack(config: TransformersConfig, stack: str, default: bool) -> str:
    """Return the stack whose token embedding the language-model head shares, or "" if it has its
    own matrix.
    """
    return stack if config.read_bool("tie_word_embeddings", default) else ""


def make_decoder_model(
    config: TransformersConfig, task: str, stack: StackSpec, head: OutputHeadSpec
) -> ModelSpec:
    """Return a decoder of one stack, with a language-model head or the classifier of the task."""
    return assemble_model(config, "decoder", (stack,), select_decoder_heads(config, task, head))


def assemble_model(
    config: TransformersConfig,
    kind: str,
    stacks: tuple[StackSpec, ...],
    heads: tuple[OutputHeadSpec, ...],
    unsupported_parts: tuple[UnsupportedPart, ...] = (),
) -> ModelSpec:
    """Return a model of the family of this config, with the notes that reading it has left."""
    return ModelSpec(
        config.family_name, kind, stacks, heads, tuple(config.notes), unsupported_parts
    )


def select_decoder_heads(
    config: TransformersConfig, task: str, head: OutputHeadSpec
) -> tuple[OutputHeadSpec, ...]:
    """Return the heads of a decoder's task: `head` for language models, otherwise a classifier or
    none.
    """
    count = read_num_labels(config)
    heads_by_task: dict[str, list[OutputHeadSpec]] = {
        "ForCausalLM": [head],
        "LMHeadModel": [head],
        "Model": [],
        "ForSequenceClassification": [OutputHeadSpec("classes", count, at="last")],
        "ForTokenClassification": [OutputHeadSpec("classes", count, bias="learned")],
        "ForQuestionAnswering": [OutputHeadSpec("span", 2, bias="learned")],
    }
    return select_heads(config, task, heads_by_task)


# --- Writing --------------------------------------------------------------------------------------

DEFAULT_TEXT = "the default"
REMEDY = "save it with hw.save, which writes every model"
Difference = tuple[
    str, str, str
]  # path in the description, value in the family, value in the model


def write_config(model: ModelSpec, family: str = "auto") -> dict[str, Any]:
    """Return the config.json keys that describe this model in a family, for "auto" in the first
    family that can.

    The keys are read back. If they describe a different model, a SpecError names the first
    difference, for "auto" in the family with the fewest differences.

    >>> model = read_config(
    ...     TransformersConfig(
    ...         {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11}
    ...     )
    ... )
    >>> write_config(model)["n_layer"]
    2
    >>> write_config(model, "llama")
    Traceback (most recent call last):
    headwise.errors.SpecError: a llama has stacks.0.embedding.positions = the default, gpt2 {'kind': 'learned', ...
    """
    if family != "auto" and family not in WRITERS:
        raise SpecError(
            f"cannot write configs of {family!r}; {suggest(family, ['auto', *WRITERS])}"
        )
    attempts, refusal = list[tuple[list[Difference], dict[str, Any]]](), SpecError()
    for name in WRITERS if family == "auto" else [family]:
        try:
            attempts.append(_try_family(model, name))
        except SpecError as error:  # the family cannot express these sizes
            refusal = error
    if not attempts:
        raise refusal
    differences, keys = min(attempts, key=lambda attempt: len(attempt[0]))
    if not differences:
        return keys
    (where, theirs, own), name = differences[0], keys["model_type"]
    raise SpecError(f"a {name} has {where} = {theirs}, {model.name} {own}; {REMEDY}")


def _try_family(model: ModelSpec, family: str) -> tuple[list[Difference], dict[str, Any]]:
    """Return the keys for one family, and the differences of the model that they describe from this
    one.
    """
    keys = {"architectures": [_class_name(family)], "model_type": family} | WRITERS[family](
        model, family
    )
    theirs = replace(
        read_config(TransformersConfig(keys, f"as a {family}")), name=model.name, notes=model.notes
    )
    return list(find_differences(theirs, model)), keys


def find_differences(one: ModelSpec, other: ModelSpec) -> Iterator[Difference]:
    """Yield the differences of two model descriptions, layer by layer: path, value in one, value in
    the other.
    """
    return _compare_trees("", _layers_to_dict(one), _layers_to_dict(other))


def _layers_to_dict(model: ModelSpec) -> dict[str, Any]:
    """Return a model as plain values, with runs of repeated layers expanded to single layers."""
    plain = to_dict(model)
    for stack in plain["stacks"]:
        runs = stack.pop("runs")
        stack["layers"] = [
            block for run in runs for _ in range(run["times"]) for block in run["blocks"]
        ]
    return plain


def get_first_layer(
    model: ModelSpec, family: str
) -> tuple[StackSpec, AttentionSpec, FeedForwardSpec]:
    """Return the last stack and the attention and feed-forward of its first layer; refuse models
    without them.
    """
    stack = model.stacks[-1]
    if not stack.layers or stack.embedding is None:
        _raise_missing(model, family, "layers over an embedding")
    block = stack.layers[0]
    if not isinstance(block.attention, AttentionSpec):
        _raise_missing(model, family, "an attention that an AttentionSpec describes in every layer")
    if not isinstance(block.feed, FeedForwardSpec):
        _raise_missing(model, family, "one feed-forward in every layer")
    return stack, block.attention, block.feed


def activation_to_config(name: str) -> str:
    """Return the name of an activation in transformers, or `name` itself if transformers has no
    such activation.

    >>> activation_to_config("silu"), activation_to_config("gelu_tanh")
    ('silu', 'gelu_new')
    """
    return next((theirs for theirs, ours in ACTIVATIONS.items() if ours == name), name)


def _class_name(family: str) -> str:
    entry = FAMILIES[family]
    return f"{entry.class_prefix}{entry.default_task}"


def _raise_missing(model: ModelSpec, family: str, has: str) -> NoReturn:
    raise SpecError(f"a {family} has {has}, and {model.name} has not; {REMEDY}")


def _compare_trees(where: str, one: Any, other: Any) -> Iterator[Difference]:
    """Yield the differences of two trees of plain values: path, value in one,
    value in the other.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        first, second = cast("Mapping[str, Any]", one), cast("Mapping[str, Any]", other)
        for key in [*first, *(key for key in second if key not in first)]:
            inner = f"{where}.{key}" if where else key
            yield from _compare_trees(
                inner, first.get(key, DEFAULT_TEXT), second.get(key, DEFAULT_TEXT)
            )
    elif isinstance(one, list) and isinstance(other, list):
        items, others = cast("list[Any]", one), cast("list[Any]", other)
        for n, (item, another) in enumerate(zip(items, others, strict=False)):
            yield from _compare_trees(f"{where}.{n}", item, another)
        if len(items) != len(others):
            yield f"the number of {where}", str(len(items)), str(len(others))
    elif one != other:
        yield where, _show_value(one), _show_value(other)


def _show_value(value: Any) -> str:
    return DEFAULT_TEXT if value is DEFAULT_TEXT else repr(value)
