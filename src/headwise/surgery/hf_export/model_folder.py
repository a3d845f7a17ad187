"""Folders of pruned and converted models: config.json, weights, and heads.json with a record of the
changes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ... import models
from ...errors import SpecError, pluralise
from ...families import get_weight_names, read_model_spec, write_config
from ...families.config_reader import HEAD_COUNT_KEYS, KV_COUNT_KEYS
from ...families.config_writer import find_differences
from ...families.weight_names import find_unnamed_weight
from ...files import sha256, sync_folder
from ...hub.checkpoint_weights import INDEX_FILE, WEIGHTS_FILE, SafetensorsFolder
from ...hub.pretrained_models import CONFIG_FILE
from ...hub.transformers_loading import check_config_values, remove_code_settings
from ...model_spec import ModelSpec, to_dict
from ...model_spec.serialization import MANIFEST_FILE, RECORD_FILE, RECORD_FORMAT, SurgeryRecord
from ...models import Transformer
from ...output_paths import FolderKind, stage_folder
from ...spec.heads import Heads
from . import resized_modules as resized
from .load_check import LoadCheck, check_load
from .shard_rewrite import CanonicalForm, ShardRewrite, to_canonical_form, write_shards

ATTENTION_NAMES = {"attention": "attention", "cross": "cross-attention"}


class ConfigKeys(NamedTuple):
    """Contents of a config.json, or the reason why none describes the model."""

    keys: Mapping[str, Any] | None
    reason: str


def find_config_keys(model_spec: ModelSpec, config: Mapping[str, Any]) -> ConfigKeys:
    """Find a config.json that describes a model, starting from the config it had before pruning.

    Every candidate is checked by reading it back.

    >>> import headwise as hw
    >>> config = {
    ...     "model_type": "mistral",
    ...     "hidden_size": 8,
    ...     "num_attention_heads": 4,
    ...     "num_key_value_heads": 4,
    ... }
    >>> config |= {"num_hidden_layers": 1, "vocab_size": 5, "intermediate_size": 6, "head_dim": 2}
    >>> three = hw.families.read_model_spec(
    ...     config | {"num_attention_heads": 3, "num_key_value_heads": 3}
    ... )
    >>> find_config_keys(three, config).keys["num_attention_heads"]
    3
    """
    reasons = list[str]()
    for keys in _candidate_configs(model_spec, config):
        try:
            reason = _first_difference(read_model_spec(keys), model_spec) or _hf_error(keys)
        except SpecError as error:
            reason = (
                "config.json cannot describe the model "
                f"({str(error).removeprefix('config: ').partition(';')[0]})"
            )
        if not reason:
            return ConfigKeys(keys, "")
        reasons.append(reason)
    return ConfigKeys(None, describe_uneven_layers(model_spec) or reasons[0])


def describe_uneven_layers(model_spec: ModelSpec) -> str:
    """Return how layers differ in their heads, which one config cannot express; "" if all are
    equal.
    """
    for stack in model_spec.stacks:
        prefix = f"in the {stack.name} " if len(model_spec.stacks) > 1 else ""
        first = dict[str, tuple[int, Heads]]()
        for depth, block in enumerate(stack.layers):
            for role in block.constant_sublayers:
                return f"{prefix}layer {depth} has no {ATTENTION_NAMES[role]} left"
            for role, spec in block.attention_specs.items():
                first_depth, heads = first.setdefault(role, (depth, spec.heads))
                if spec.heads.q != heads.q:
                    count = pluralise(spec.heads.q, "head")
                    return f"{prefix}layer {depth} keeps {count} and layer {first_depth} {heads.q}"
                if spec.heads.kv != heads.kv:
                    count = pluralise(spec.heads.kv, "key-value head")
                    return f"{prefix}layer {depth} keeps {count} and layer {first_depth} {heads.kv}"
    return ""


def _candidate_configs(
    model_spec: ModelSpec, config: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield configs that may describe the model, closest to the original config first."""
    specs = dict(model_spec.attention_specs())
    if not specs:
        return
    updated = dict(config)
    last_heads = list(specs.values())[-1].heads
    for name in HEAD_COUNT_KEYS:
        if name in config:
            own = [s for site, s in specs.items() if name.startswith(site.partition(".")[0])]
            updated[name] = own[0].heads.q if own else last_heads.q
    updated |= {name: last_heads.kv for name in KV_COUNT_KEYS if config.get(name) is not None}
    yield updated
    # Keys that have a derived default if the config does not set them.
    head_dim = {"head_dim": last_heads.dim}
    kv_heads = {KV_COUNT_KEYS[0]: last_heads.kv}
    for extra in (head_dim, kv_heads, head_dim | kv_heads):
        if not any(config.get(name) is not None for name in extra):
            yield updated | extra
    yield from _sibling_configs(model_spec, config)


def _sibling_configs(model_spec: ModelSpec, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the config of a model type with the same tensor names: transformers rejects a llama
    config whose number of heads does not divide its width.
    """
    try:
        keys = write_config(model_spec)
    except SpecError:
        return
    if get_weight_names(keys["model_type"]) is get_weight_names(model_spec.name):
        yield dict(config) | keys


def _first_difference(read_spec: ModelSpec, model_spec: ModelSpec) -> str:
    """Return the first difference of two model specs, except for names and notes; "" if there is
    none.
    """
    read_spec = replace(read_spec, name=model_spec.name, notes=model_spec.notes)
    for field, value, expected in find_differences(read_spec, model_spec):
        if field.endswith(".merge.bias"):
            return "it has an attention output bias, which config.json cannot express"
        return f"config.json gives {field} = {value}, the model has {expected}"
    return (
        "" if to_dict(read_spec) == to_dict(model_spec) else "config.json describes another model"
    )


def _hf_error(keys: Mapping[str, Any]) -> str:
    """Return the error of transformers for a config; "" if it accepts it or is not installed."""
    if find_spec("transformers") is None:
        return ""
    try:
        check_config_values(keys)
    except Exception as error:  # its checks raise many types
        return f"transformers rejects the config: {' '.join(str(error).split())[:200]}"
    return ""


# --- Writing and checking of folders --------------------------------------------------------------

NO_FILES: Mapping[str, Any] = {}
# Files of a model besides its weights that are copied: data only, never pickles or code.
COMPANION_FILES = re.compile(
    r"(tokenizer[\w.-]*|special_tokens_map|added_tokens|vocab[\w.-]*|merges|generation_config|preprocessor_config"
    r"|processor_config|chat_template[\w.-]*|modules|sentence_bert_config|config_sentence_transformers|config"
    r"|sentencepiece[\w.-]*|source|target|spiece)\.(json|txt|model|jinja|spm)|(LICEN[CS]E|NOTICE)[\w.-]*"
)
SENTENCE_TRANSFORMERS_MODULE = re.compile(
    r"\d+_\w+"
)  # a folder of sentence-transformers: 1_Pooling


class WrittenFolder(NamedTuple):
    """Kind of folder that was written, a sentence that explains why, and the names of its files."""

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
    """Write a pruned or converted model to a new folder, with `record`, the changes made, in
    heads.json.

    If `source` is a transformers folder, so is the result: a plain checkpoint if a config.json can
    describe the model, otherwise one with a loader script. If outputs differ with both, or for
    other sources, it is a folder as `hw.save` writes it. `extra_files` are written too, by name.
    The folder appears complete or not at all.

    >>> import headwise as hw, os, tempfile
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 5}
    ...     )
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(
    ...         write_model_folder(net, None, f"{folder}/small", {"kept": {}}).kind,
    ...         *sorted(os.listdir(f"{folder}/small")),
    ...     )
    ours README.md config.json heads.json headwise.toml model.safetensors
    """
    with stage_folder(folder, COMPRESSED_MODEL) as fresh:
        source_hashes = hash_source_files(source)
        kind, sentence, extra_document = _write_first_kind(net, source, fresh)
        for name, data in extra_files.items():
            (fresh / name).write_bytes(data)
        paths = [path for path in sorted(fresh.rglob("*")) if path.is_file()]
        files = {path.relative_to(fresh).as_posix(): path for path in paths}
        document = {
            "format": RECORD_FORMAT,
            "kind": kind,
            "sentence": sentence,
            "change": dict(record),
            "source": source_hashes,
            **extra_document,
            "files": {
                name: sha256(path) for name, path in files.items() if name not in extra_files
            },
        }
        _write_json(fresh / RECORD_FILE, document)
    return WrittenFolder(kind, sentence, (*files, RECORD_FILE))


def _list_written_names(folder: Path) -> set[str]:
    """Names that headwise wrote into a folder: those that its record lists, and reports; none
    without a record.
    """
    try:
        written = {Path(name).parts[0] for name in read_record(folder).files}
    except SpecError:
        return set()
    return {*written, RECORD_FILE, *REPORT_FILES}


REPORT_FILES = ("proof.json", "PROOF.md", "texts.txt")
COMPRESSED_MODEL = FolderKind("pruned or converted model", (RECORD_FILE,), _list_written_names)


def read_record(path_or_folder: Path | str) -> SurgeryRecord:
    """Read the record of changes from a heads.json, or from the folder that contains it.

    >>> read_record("nowhere")
    Traceback (most recent call last):
    headwise.errors.SpecError: nowhere contains no heads.json; give a folder that headwise prune or convert wrote
    """
    path = Path(path_or_folder)
    path = path if path.is_file() else path / RECORD_FILE
    if not path.is_file():
        raise SpecError(
            f"{path_or_folder} contains no {RECORD_FILE}; give a folder that headwise prune or "
            "convert wrote"
        )
    return SurgeryRecord.from_file(path)


def hash_source_files(source: Path | None) -> dict[str, str]:
    """Return the SHA-256 of the config and weight files of a source, by file name."""
    if source is None:
        return {}
    if source.is_file():
        return {source.name: sha256(source)}
    main = MANIFEST_FILE if (source / MANIFEST_FILE).is_file() else CONFIG_FILE
    has_weights = any((source / name).is_file() for name in (INDEX_FILE, WEIGHTS_FILE))
    weights = SafetensorsFolder(source).files if has_weights else []
    paths = [source / main, source / RECORD_FILE, *weights]
    return {path.name: sha256(path) for path in paths if path.is_file()}


# --- kinds of folders -----------------------------------------------------------------------------


def _write_first_kind(
    net: Transformer, source: Path | None, fresh: Path
) -> tuple[str, str, dict[str, Any]]:
    """Write the first kind of folder that reproduces the model; return kind, sentence and additions
    to heads.json.
    """

    def write_native(reason: str) -> tuple[str, str, dict[str, Any]]:
        models.save(net, fresh)
        return "ours", f"A headwise folder, {reason}; load it with headwise.load.", {}

    if source is None:
        return write_native("because the model was built in memory")
    if not (source / CONFIG_FILE).is_file() or (source / MANIFEST_FILE).is_file():
        return write_native("like its source")
    form = to_canonical_form(net)
    described = read_model_spec(source)
    missing = find_unnamed_weight(form.model_spec, get_weight_names(described.name))
    if missing:
        return write_native(f"because a checkpoint of {described.name} has no tensor for {missing}")
    rewrite = ShardRewrite.of(source, described, form)
    old_config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    config = find_config_keys(form.model_spec, old_config)
    unstorable = rewrite.find_unstorable_tensor()
    if unstorable:
        return write_native(f"because {unstorable}")
    reason = config.reason
    for name in form.find_extra_constants(rewrite.weight_names):
        reason = reason or f"{name} differs from what config.json implies"
    if not reason and config.keys:
        _rewrite_folder(source, rewrite, dict(config.keys), fresh)
        check = _check_load(fresh, net, form)
        sentence = {
            True: "A transformers checkpoint: config.json describes every layer, and "
            "AutoModel.from_pretrained loads it.",
            False: "A transformers checkpoint, not tested with transformers, which is not "
            "installed: config.json describes every layer.",
        }[check.agrees]
        if check.agrees or check.is_skipped:
            return "transformers", sentence, {"checked": check.message}
        reason = check.message
        shutil.rmtree(fresh)
    if ".part = " in reason:  # another computation; the loader script only changes sizes
        return write_native(f"because {reason}")
    _rewrite_folder(source, rewrite, old_config, fresh)
    resized_folder = resized.add_loader(fresh, rewrite, net, reason)
    if not isinstance(resized_folder, str):
        return "resized", resized_folder.summary, dict(resized_folder.document)
    shutil.rmtree(fresh)
    return write_native(f"because {reason}, and {resized_folder}")


def _check_load(fresh: Path, net: Transformer, form: CanonicalForm) -> LoadCheck:
    try:
        return check_load(fresh, net, form)
    except SpecError as error:
        return LoadCheck(False, 0, str(error))


def _rewrite_folder(
    source: Path, rewrite: ShardRewrite, config: dict[str, Any], fresh: Path
) -> None:
    """Copy a folder with new weights and this config, without settings that name code."""
    fresh.mkdir(exist_ok=True)
    for path in list_companion_files(source):
        target = fresh / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
        sync_folder(target)
    _write_json(fresh / CONFIG_FILE, remove_code_settings(config, CONFIG_FILE))
    write_shards(rewrite, fresh)


def list_companion_files(source: Path) -> Iterator[Path]:
    """Yield the files of a model folder that are copied besides its weights."""
    for path in sorted(source.iterdir()):
        if path.is_dir() and SENTENCE_TRANSFORMERS_MODULE.fullmatch(path.name):
            for file in sorted(path.iterdir()):
                is_copied = COMPANION_FILES.fullmatch(file.name) or file.name == WEIGHTS_FILE
                if file.is_file() and is_copied:
                    yield file
        elif path.is_file() and COMPANION_FILES.fullmatch(path.name) and path.name != CONFIG_FILE:
            yield path


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    sync_folder(path)
