"""A config.json that says a model whose heads were cut, if there is one: tried by reading it back."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ... import models
from ...errors import SpecError
from ...families import get_weight_names, read_model_spec, write_config
from ...families.config_writer import find_differences
from ...files import TEMPORARY, sha256
from ...hub.checkpoint_weights import INDEX_FILE, WEIGHTS_FILE, SafetensorsFolder
from ...hub.model_import import CONFIG_FILE
from ...model_spec import ModelSpec, StackSpec, to_dict
from ...model_spec.serialization import MANIFEST_FILE, RECORD_FILE, RECORD_FORMAT, SurgeryRecord
from ...models import Transformer
from ...spec.attention_spec import AttentionSpec
from . import resized_modules as resized
from .load_check import LoadCheck, check_load
from .shard_rewrite import CanonicalForm, ShardRewrite, fsync_file, to_canonical_form, write_shards

# The keys by which configs say how many heads there are; how wide they are never changes.
HEAD_COUNT_KEYS = (
    "num_attention_heads",
    "num_heads",
    "n_head",
    "n_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
KV_COUNT_KEYS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
ATTENTION_NAMES = {"attention": "attention", "cross": "cross-attention"}


class ConfigKeys(NamedTuple):
    """The keys of a config, or why there are none."""

    keys: Mapping[str, Any] | None
    reason: str


def find_config_keys(model_spec: ModelSpec, config: Mapping[str, Any]) -> ConfigKeys:
    """What a config.json must say for this model, beginning with what it said before its heads were cut.

    >>> import headwise as hw
    >>> config = {"model_type": "mistral", "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
    >>> config |= {"num_hidden_layers": 1, "vocab_size": 5, "intermediate_size": 6, "head_dim": 2}
    >>> three = hw.families.read_model_spec(config | {"num_attention_heads": 3, "num_key_value_heads": 3})
    >>> find_config_keys(three, config).keys["num_attention_heads"]
    3
    """
    whys = list[str]()
    for keys in _candidate_configs(model_spec, config):
        try:
            why = _first_difference(read_model_spec(keys), model_spec) or _hf_error(keys)
        except SpecError as error:
            why = f"config.json cannot say it ({str(error).removeprefix('config: ').partition(';')[0]})"
        if not why:
            return ConfigKeys(keys, "")
        whys.append(why)
    return ConfigKeys(None, describe_uneven_layers(model_spec) or whys[0])


def describe_uneven_layers(model_spec: ModelSpec) -> str:
    """Why no numbers that hold for all layers say a model; nothing if its layers are alike."""
    return next(
        (
            why
            for stack in model_spec.stacks
            for why in _iter_uneven_layers(stack, _stack_prefix(model_spec, stack.name))
        ),
        "",
    )


def _iter_uneven_layers(stack: StackSpec, where: str) -> Iterator[str]:
    first = dict[str, tuple[int, AttentionSpec]]()
    for depth, block in enumerate(stack.layers):
        yield from (f"{where}layer {depth} has no {ATTENTION_NAMES[role]} left" for role in block.still)
        for role, spec in block.attention_specs.items():
            before, other = first.setdefault(role, (depth, spec))
            if told := _describe_difference(spec, depth, other, before):
                yield f"{where}{told}"


def _stack_prefix(described: ModelSpec, stack: str) -> str:
    return f"in the {stack} " if len(described.stacks) > 1 else ""


def _describe_difference(one: AttentionSpec, depth: int, other: AttentionSpec, before: int) -> str:
    for what, count, another in (
        ("head", one.heads.q, other.heads.q),
        ("key-value head", one.heads.kv, other.heads.kv),
    ):
        if count != another:
            return f"layer {depth} keeps {count} {what}{'s' * (count > 1)} and layer {before} {another}"
    return ""


def _candidate_configs(described: ModelSpec, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Configs that may say it, nearest to what was there first."""
    specs = dict(described.attention_specs())
    if not specs:
        return
    edited = dict(config)
    sites = {
        name: [spec for site, spec in specs.items() if site.startswith(f"{name}.")]
        for name in (stack.name for stack in described.stacks)
    }
    last = list(specs.values())[-1].heads
    for name in HEAD_COUNT_KEYS:
        own = next((rows[0].heads for side, rows in sites.items() if rows and name.startswith(side)), last)
        edited |= {name: own.q} if name in config else {}
    edited |= {name: last.kv for name in KV_COUNT_KEYS if config.get(name) is not None}
    yield edited
    wide, shared = (
        {"head_dim": last.dim},
        {KV_COUNT_KEYS[0]: last.kv},
    )  # which follow from others where they are not said
    for more in (wide, shared, wide | shared):
        if not any(config.get(name) is not None for name in more):
            yield edited | more
    yield from _sibling_configs(described, config)


def _sibling_configs(described: ModelSpec, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A sister whose files have the same names: transformers takes no llama whose heads do not divide its width."""
    try:
        keys = write_config(described)
    except SpecError:
        return
    if get_weight_names(keys["model_type"]) is get_weight_names(described.name):
        yield dict(config) | keys


def _first_difference(theirs: ModelSpec, ours: ModelSpec) -> str:
    """The first difference of two descriptions, but for names and notes."""
    theirs = replace(theirs, name=ours.name, notes=ours.notes)
    for where, one, other in find_differences(theirs, ours):
        if where.endswith(".merge.bias"):
            return "it adds a vector behind its heads that config.json cannot say"
        return f"config.json would say {where} = {one}, where the model has {other}"
    return "" if to_dict(theirs) == to_dict(ours) else "config.json would say another model"


def _hf_error(keys: Mapping[str, Any]) -> str:
    """Why transformers takes no such config; nothing if it does, or is not installed."""
    if find_spec("transformers") is None:
        return ""
    import transformers

    try:
        rest = {name: value for name, value in keys.items() if name != "model_type"}
        transformers.AutoConfig.for_model(keys["model_type"], **rest)
    except Exception as error:  # whatever its checks raise
        return f"transformers refuses the config: {' '.join(str(error).split())[:200]}"
    return ""


# --- A model whose heads were cut or shared as a folder ------------------------------------------------

NO_FILES: Mapping[str, Any] = {}
# What belongs to a model besides its weights: data that somebody reads, never pickles and never code.
COMPANION_FILES = re.compile(
    r"(tokenizer[\w.-]*|special_tokens_map|added_tokens|vocab[\w.-]*|merges|generation_config|preprocessor_config"
    r"|processor_config|chat_template[\w.-]*|modules|sentence_bert_config|config_sentence_transformers|config"
    r"|sentencepiece[\w.-]*|source|target|spiece)\.(json|txt|model|jinja|spm)|(LICEN[CS]E|NOTICE)[\w.-]*"
)
SENTENCE_TRANSFORMERS_MODULE = re.compile(r"\d+_\w+")  # a folder of sentence-transformers: 1_Pooling


class WrittenFolder(NamedTuple):
    """What became of a model: the kind of folder, the sentence that says why, and the names of the files in it."""

    kind: str
    summary: str
    files: tuple[str, ...]


def write_model_folder(
    net: Transformer,
    source: Path | None,
    folder: Path | str,
    record: Mapping[str, Any],
    *,
    extra_files: Mapping[str, bytes] = NO_FILES,
) -> WrittenFolder:
    """Write a model whose heads were cut into a new folder, beside it heads.json with `record`, which says how.

    Of a folder of transformers (`source`) it is one again: plain if a config.json can say it; else with a loader of its
    own beside it; where neither gives what the model gives, and of all other sources, a folder as hw.save writes it.
    `more` are files to lie there too, by name. All of it appears at once, or nothing.

    >>> import headwise as hw, tempfile
    >>> net = hw.build(
    ...     hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 5})
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(
    ...         write_model_folder(net, None, f"{folder}/small", {"kept": {}}).kind,
    ...         *sorted(os.listdir(f"{folder}/small")),
    ...     )
    ours README.md heads.json headwise.toml model.safetensors
    """
    folder = Path(folder).resolve()
    check_folder_empty(folder)
    known = hash_source_files(source)
    fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        kind, sentence, told = _write_first_kind(net, source, fresh)
        for name, data in extra_files.items():
            (fresh / name).write_bytes(data)
        files = {path.relative_to(fresh).as_posix(): path for path in sorted(fresh.rglob("*")) if path.is_file()}
        document = {"format": RECORD_FORMAT, "kind": kind, "sentence": sentence, "done": dict(record), "source": known}
        document |= told | {"files": {name: sha256(path) for name, path in files.items() if name not in extra_files}}
        _write_json(fresh / RECORD_FILE, document)
        os.rename(fresh, folder)  # refused by the system where something has come in between
    except OSError as error:
        raise OSError(f"{folder} cannot be written: {error.strerror or error}; give another place") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return WrittenFolder(kind, sentence, (*files, RECORD_FILE))


def check_folder_empty(folder: Path | str) -> None:
    """Refuse a place that holds something already; asked before any work is done for it."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        holds = f"holds {sorted(os.listdir(folder))[0]}" if folder.is_dir() else "is a file"
        raise SpecError(f"{folder} {holds}; give a new folder, or an empty one")


def read_record(path_or_folder: Path | str) -> SurgeryRecord:
    """What was done to the model in a folder, or what a heads.json says of itself.

    >>> read_record("nowhere")
    Traceback (most recent call last):
    headwise.errors.SpecError: nowhere holds no heads.json; give a folder that headwise prune or convert wrote
    """
    path = Path(path_or_folder)
    path = path if path.is_file() else path / RECORD_FILE
    if not path.is_file():
        raise SpecError(f"{path_or_folder} holds no {RECORD_FILE}; give a folder that headwise prune or convert wrote")
    return SurgeryRecord.from_file(path)


def check_record(record: SurgeryRecord, source: Path | None) -> None:
    """Refuse what was decided for another checkpoint: it speaks of heads by number, and those are others there."""
    known = hash_source_files(source)
    if not record.source:
        raise SpecError("this plan was made for a model in memory, which no file can be compared with; make it anew")
    wrong = [name for name in {**record.source, **known} if record.source.get(name) != known.get(name)]
    if wrong:
        raise SpecError(f"this plan was made for another checkpoint: {wrong[0]} differs from {source}; make it anew")


def hash_source_files(source: Path | None) -> dict[str, str]:
    """The SHA-256 of the description and of the weights of a source, by the names of its files."""
    if source is None:
        return {}
    if source.is_file():
        return {source.name: sha256(source)}
    names = [MANIFEST_FILE, RECORD_FILE] if (source / MANIFEST_FILE).is_file() else [CONFIG_FILE, RECORD_FILE]
    weights = (
        SafetensorsFolder(source).files if (source / INDEX_FILE).is_file() or (source / WEIGHTS_FILE).is_file() else []
    )
    paths = [path for path in (*(source / name for name in names), *weights) if path.is_file()]
    return {path.name: sha256(path) for path in paths}


# --- the kinds -----------------------------------------------------------------------------------------


def _write_first_kind(net: Transformer, source: Path | None, fresh: Path) -> tuple[str, str, dict[str, Any]]:
    """Write the first kind that holds what the model is: the kind, the sentence, and what heads.json says of it."""
    if source is None or not (source / CONFIG_FILE).is_file() or (source / MANIFEST_FILE).is_file():
        like = "as the source was" if source else "because the model came from memory"
        return _write_native(net, fresh, f"A folder of headwise, {like}; load it with headwise.load.")
    form = to_canonical_form(net)
    way = ShardRewrite.of(source, read_model_spec(source), form)
    config = find_config_keys(form.model_spec, json.loads((source / CONFIG_FILE).read_text(encoding="utf-8")))
    odd = form.find_extra_constants(way.weight_names)
    why = config.reason or (f"{next(iter(odd))} is not what config.json makes of it" if odd else "")
    if not why and config.keys:
        _rewrite_folder(source, way, dict(config.keys), fresh)
        trial = _check_load(fresh, net, form)
        if trial.agrees:
            sentence = (
                "A transformers checkpoint: config.json says every layer, and AutoModel.from_pretrained loads it."
            )
            return "transformers", sentence, {"checked": trial.message}
        if trial.is_skipped:
            sentence = "A transformers checkpoint, not tried with transformers, which is not installed"
            return "transformers", f"{sentence}: config.json says every layer.", {"checked": trial.message}
        why = trial.message
        shutil.rmtree(fresh)
    _rewrite_folder(source, way, json.loads((source / CONFIG_FILE).read_text(encoding="utf-8")), fresh)
    found = resized.add_loader(fresh, way, net, why)
    if not isinstance(found, str):
        return "resized", found.summary, dict(found.document)
    shutil.rmtree(fresh)
    return _write_native(net, fresh, f"A folder of headwise, because {why}, and {found}; load it with headwise.load.")


def _check_load(fresh: Path, net: Transformer, form: CanonicalForm) -> LoadCheck:
    try:
        return check_load(fresh, net, form)
    except SpecError as error:
        return LoadCheck(False, 0, str(error))


def _write_native(net: Transformer, fresh: Path, sentence: str) -> tuple[str, str, dict[str, Any]]:
    models.save(net, fresh)
    return "ours", sentence, {}


def _rewrite_folder(source: Path, way: ShardRewrite, config: dict[str, Any], fresh: Path) -> None:
    """The folder again, with other weights and this config."""
    fresh.mkdir(parents=True)
    for path in _list_companion_files(source):
        target = fresh / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
        fsync_file(target)
    _write_json(fresh / CONFIG_FILE, config)
    write_shards(way, fresh)


def _list_companion_files(source: Path) -> Iterator[Path]:
    """What lies in a folder besides its weights and belongs to the model."""
    for path in sorted(source.iterdir()):
        if path.is_dir() and SENTENCE_TRANSFORMERS_MODULE.fullmatch(path.name):
            inner = sorted(path.iterdir())
            yield from (
                one
                for one in inner
                if one.is_file() and (COMPANION_FILES.fullmatch(one.name) or one.name == WEIGHTS_FILE)
            )
        elif path.is_file() and COMPANION_FILES.fullmatch(path.name) and path.name != CONFIG_FILE:
            yield path


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    fsync_file(path)
