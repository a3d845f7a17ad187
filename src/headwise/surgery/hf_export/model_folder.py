"""Folders of pruned and converted models: config.json, weights, and heads.json with a record of the
changes. A folder is checked by loading it with transformers.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import models
from ...attention.head_axis_ops import keep_heads
from ...attention.spec.attention_spec import AttentionSpec
from ...attention.spec.heads import Heads
from ...hub.checkpoint_weights import open_folder
from ...hub.counting_runs import without_warnings
from ...hub.pretrained_models import CONFIG_FILE, load_transformers_folder
from ...hub.transformers_loading import (
    LOADER_SOURCE,
    check_config_values,
    load_model,
    load_resized,
    remove_code_settings,
    without_hub_kernels,
)
from ...models import Transformer
from ...models.families import get_weight_names, read_model_spec, write_config
from ...models.families.config_reader import HEAD_COUNT_KEYS, KV_COUNT_KEYS
from ...models.families.config_writer import find_differences
from ...models.families.weight_names import find_unnamed_weight
from ...models.generation import max_positions
from ...models.hub_files import COMPANION_FILES, INDEX_FILE, SENTENCE_TRANSFORMERS_MODULE
from ...models.model_spec import ModelSpec, to_dict
from ...models.model_spec.serialization import (
    MANIFEST_FILE,
    RECORD_FILE,
    RECORD_FORMAT,
    WEIGHTS_FILE,
    SurgeryRecord,
)
from ...observe.inspect.model_tokenizer import find_model_folder
from ...util.errors import SpecError, pluralise
from ...util.files import sha256, sync_folder
from ...util.output_paths import Existing, FolderKind, stage_folder
from ..attention_replacement import get_attention_parameters, replace_specs
from ..verification.model_comparison import (
    OUTPUT_TOLERANCE,
    cast_model,
    largest_difference,
    parameter_dtype,
    random_input,
)
from .resized_modules import list_module_changes
from .shard_rewrite import CanonicalForm, ShardRewrite, to_canonical_form, write_shards

ATTENTION_NAMES = {"attention": "attention", "cross": "cross-attention"}


def find_config_keys(
    model_spec: ModelSpec, config: Mapping[str, Any], *, by_transformers: bool = True
) -> tuple[Mapping[str, Any] | None, str]:
    """Find a config.json that describes a model, starting from the config it had before pruning;
    None with the reason if there is none.

    Every candidate is checked by reading it back, and by transformers unless its import, of some
    seconds, is not wanted.

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
    >>> find_config_keys(three, config)[0]["num_attention_heads"]
    3
    """
    reasons = list[str]()
    for keys in _candidate_configs(model_spec, config):
        try:
            reason = _first_difference(read_model_spec(keys), model_spec)
        except SpecError as error:
            reason = (
                "config.json cannot describe the model "
                f"({str(error).removeprefix('config: ').partition(';')[0]})"
            )
        if not reason and by_transformers:
            try:
                check_config_values(keys)
            except Exception as error:  # its checks raise many types
                message = " ".join(str(error).split())[:200]
                reason = f"transformers rejects the config: {message}"
        if not reason:
            return keys, ""
        reasons.append(reason)
    return None, describe_uneven_layers(model_spec) or reasons[0]


def is_transformers_folder(source: Path | None) -> bool:
    """True if a model was read from a folder of transformers, not from one of headwise."""
    return (
        source is not None
        and (source / CONFIG_FILE).is_file()
        and not (source / MANIFEST_FILE).is_file()
    )


def forecast_folder(net: Transformer, source: Path) -> str:
    """Return why the folder of a changed model will not be a plain checkpoint of transformers; ""
    if it will be one, as far as the config in `source` tells.
    """
    config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    model_spec = to_canonical_form(net).model_spec
    return find_config_keys(model_spec, config, by_transformers=False)[1]


def list_plain_counts(net: Transformer, source: Path) -> list[int]:
    """Return how many heads every attention may keep so that a plain checkpoint of transformers can
    describe the model, the largest number first.
    """
    config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    sites = dict(net.spec.attention_specs())
    kinds = {(spec.heads.q, spec.heads.kv) for spec in sites.values()}
    if len(kinds) != 1:
        return []
    num_heads, num_kv = kinds.pop()
    counts: list[int] = []
    for num_groups in range(num_kv - 1, 0, -1):
        heads = range(num_groups * num_heads // num_kv)
        specs: dict[str, AttentionSpec | None] = {}
        for site, spec in sites.items():
            weights = get_attention_parameters(net, site)
            shapes = {name: tensor.to("meta") for name, tensor in weights.items()}
            specs[site] = keep_heads(spec, shapes, heads)[0]
        model_spec = replace_specs(net.spec, specs)
        if not find_config_keys(model_spec, config, by_transformers=False)[1]:
            counts.append(len(heads))
    return counts


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
                start = f"{prefix}layer {depth} keeps"
                end = f"and layer {first_depth}"
                if spec.heads.q != heads.q:
                    return f"{start} {pluralise(spec.heads.q, 'head')} {end} {heads.q}"
                if spec.heads.kv != heads.kv:
                    heads_left = pluralise(spec.heads.kv, "key-value head")
                    return f"{start} {heads_left} {end} {heads.kv}"
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
    # transformers rejects a llama config if the number of heads does not divide its width, but not
    # one of another model type with the same tensor names
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


# --- Writing and checking of folders --------------------------------------------------------------

NO_FILES: Mapping[str, Any] = {}


class WrittenFolder(NamedTuple):
    """Kind of folder that was written, a sentence that explains why, the names of its files, and
    what loading it with transformers showed ("" if it was not).
    """

    kind: str
    summary: str
    files: tuple[str, ...]
    load_report: str


def write_model_folder(
    net: Transformer,
    source: Path | None,
    folder: Path | str,
    record: Mapping[str, Any],
    *,
    existing: Existing = "refuse",
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
    return write_changed_folder(
        OutputFolder(Path(folder), existing, source, extra_files),
        record,
        lambda fresh: _write_first_kind(net, source, fresh),
    )


class OutputFolder(NamedTuple):
    """A folder for a changed model: its path, what happens to an earlier one, the folder of the
    original (None: it was built in memory), and other files by name.
    """

    path: Path
    existing: Existing = "refuse"
    source: Path | None = None
    extra_files: Mapping[str, bytes] = NO_FILES


def write_changed_folder(
    target: OutputFolder,
    record: Mapping[str, Any],
    write: Callable[[Path], tuple[str, str, dict[str, Any]]],
) -> WrittenFolder:
    """Write a folder with `record` in its heads.json; `write` fills it, and returns its kind, a
    sentence and additions to heads.json.
    """
    with stage_folder(target.path, COMPRESSED_MODEL, target.existing) as fresh:
        source_hashes = hash_source_files(target.source)
        kind, sentence, additions = write(fresh)
        for name, data in target.extra_files.items():
            (fresh / name).write_bytes(data)
        paths = [path for path in sorted(fresh.rglob("*")) if path.is_file()]
        files = {path.relative_to(fresh).as_posix(): sha256(path) for path in paths}
        document = {
            "format": RECORD_FORMAT,
            "kind": kind,
            "sentence": sentence,
            "change": dict(record),
            "source": source_hashes,
            **additions,
            "files": files,
        }
        _write_json(fresh / RECORD_FILE, document)
    return WrittenFolder(kind, sentence, (*files, RECORD_FILE), additions.get("checked", ""))


def _list_written_names(folder: Path) -> set[str]:
    """Names that headwise wrote into a folder: those that its record lists, and reports; none
    without a record.
    """
    try:
        written = {Path(name).parts[0] for name in read_record(folder).files}
    except SpecError:
        return set()
    return {*written, RECORD_FILE, *REPORT_FILES}


REPORT_FILES = ("verification.json", "VERIFICATION.md")
COMPRESSED_MODEL = FolderKind("pruned or converted model", (RECORD_FILE,), _list_written_names)


def read_record(path_or_folder: Path | str) -> SurgeryRecord:
    """Read the record of changes from a heads.json, or from the folder that contains it.

    >>> read_record("nowhere")
    Traceback (most recent call last):
    headwise.util.errors.SpecError: nowhere contains no heads.json; give a folder that headwise
    prune or convert wrote
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
    weights = open_folder(source).files if has_weights else []
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
    rewrite = ShardRewrite.plan_rewrite(source, described, form)
    old_config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    keys, reason = find_config_keys(form.model_spec, old_config, by_transformers=False)
    unstorable = rewrite.find_unstorable_tensor()
    if unstorable:
        return write_native(f"because {unstorable}")
    extra_constants = form.find_extra_constants(rewrite.weight_names)
    for name in extra_constants:
        reason = reason or f"{name} differs from what config.json implies"
    while not reason and keys:
        _rewrite_folder(source, rewrite, keys, fresh)
        try:
            candidate, message = check_load(fresh, net, form)
        except SpecError as error:
            candidate = None
            message = str(error)
        if candidate is not None:
            return "transformers", describe_plain(fresh), {"checked": message}
        shutil.rmtree(fresh)
        # transformers, whose import takes seconds, is asked for another config only after a failure
        rejected = keys
        keys, reason = find_config_keys(form.model_spec, old_config)
        reason = message if keys == rejected else reason
    if ".part = " in reason:  # another computation; the loader script only changes sizes
        return write_native(f"because {reason}")
    _rewrite_folder(source, rewrite, old_config, fresh)
    additions: dict[str, Any] = {
        "model": to_dict(form.model_spec),
        "constants": {name: tensor.tolist() for name, tensor in extra_constants.items()},
        "unused_tensors": rewrite.unused_tensors,
    }
    failure = _add_checked_loader(fresh, rewrite, net, additions)
    if failure:
        shutil.rmtree(fresh)
        return write_native(f"because {reason}, and {failure}")
    return "resized", describe_resized(reason, "headwise.load"), additions


LOADER_NAME = "load_model.py"


def describe_plain(folder: Path) -> str:
    """Return the sentence of a plain checkpoint, with the class that its config.json names."""
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    name = (config.get("architectures") or ["AutoModel"])[0]
    return (
        "A transformers checkpoint: config.json describes every layer, and "
        f"transformers.{name}.from_pretrained loads it."
    )


def describe_resized(reason: str, loaders: str) -> str:
    """Return the sentence of a folder with a loader script."""
    not_plain = f"Not a plain transformers checkpoint, because {reason}"
    return f"{not_plain}; load it with {loaders} or {LOADER_NAME}."


def add_loader(folder: Path, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Add the loader script to a folder, and a draft of heads.json for it; return the entry of the
    script in heads.json.
    """
    loader = folder / LOADER_NAME
    loader.write_bytes(LOADER_SOURCE.read_bytes())
    sync_folder(loader)
    text = json.dumps({"format": RECORD_FORMAT, "kind": "resized", **draft})
    (folder / RECORD_FILE).write_text(text, encoding="utf-8")
    return {"loader": {"name": LOADER_NAME, "sha256": sha256(loader)}}


def _add_checked_loader(
    folder: Path, rewrite: ShardRewrite, net: Transformer, additions: dict[str, Any]
) -> str:
    """Add the loader script to a folder with written weights, and its arguments to `additions`;
    return why it does not work, or "".
    """
    loader = add_loader(folder, additions)
    try:
        candidates = list_module_changes(folder, rewrite)
        candidate, message = check_load(folder, net, rewrite.form, candidates)
    except SpecError as error:
        return str(error)
    (folder / RECORD_FILE).unlink()
    if candidate is None:
        return f"its loader script failed ({message})"
    additions |= {"modules": candidates[candidate], "checked": message, **loader}
    return ""


def _rewrite_folder(
    source: Path, rewrite: ShardRewrite, config: Mapping[str, Any], fresh: Path
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


def copy_companions(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Copy the files beside the weights of a live model to a folder, and write the tokenizer if it
    can be saved.
    """
    own_folder = find_model_folder(model)
    for path in () if own_folder is None else list_companion_files(own_folder):
        target = folder / path.relative_to(own_folder or path)
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
    save_tokenizer = getattr(tokenizer, "save_pretrained", None)
    if save_tokenizer is not None:
        save_tokenizer(folder)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    sync_folder(path)


INPUT_LENGTH = 9


def check_load(
    folder: Path,
    net: Transformer,
    form: CanonicalForm,
    candidates: Sequence[Mapping[str, Any]] = (),
) -> tuple[int | None, str]:
    """Load a folder with transformers, plainly or by its loader script and candidate changes, and
    compare with `net`.

    headwise must read the tensors of `form` back exactly, and outputs must agree with transformers.
    """
    reloaded = load_transformers_folder(folder)
    read_back = reloaded.state_dict()
    for name, tensor in form.tensors.items():
        other = read_back.get(name)
        if other is None or not torch.equal(other, tensor.cpu().to(other.dtype)):
            raise SpecError(f"{name} differs after reading the folder back")
    on_cpu = net if next(net.parameters()).device.type == "cpu" else copy.deepcopy(net).cpu()
    inputs, expected = _sample_inputs_and_outputs(
        cast_model(on_cpu, torch.float32, stored=parameter_dtype(reloaded))
    )
    del reloaded, read_back
    error = ""
    for number, modules in enumerate(candidates or [None]):
        try:
            with without_warnings(), without_hub_kernels():
                loaded: Any = (
                    load_model(folder, torch.float32)
                    if modules is None
                    else load_resized(folder, modules, dtype=torch.float32)
                )
            difference = _compare_named_outputs(loaded, inputs, expected)
        except Exception as failure:  # transformers may raise anything
            message = " ".join(str(failure).split())[:200]
            error = error or f"{type(failure).__name__}: {message}"
            continue
        if difference <= OUTPUT_TOLERANCE:
            message = "loaded by transformers, outputs differ by"
            return number, f"{message} {difference:.1e} of the largest output"
        if not error.startswith("outputs"):
            error = f"outputs differ by {difference:.1e} of the largest output"
    return None, f"transformers cannot load it, or its outputs differ: {error}"


@torch.no_grad()
def _compare_named_outputs(
    model: Any, inputs: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> float:
    """Return the largest difference of outputs by name, relative to the largest value of each; of
    the last hidden state if no other has the same shape.
    """
    outputs = model(**inputs)
    shapes = {name: getattr(value, "shape", None) for name, value in outputs.items()}
    shared = [name for name, value in expected.items() if shapes.get(name) == value.shape]
    if not shared:
        outputs = model.base_model(**inputs)
        shared = ["last_hidden_state"]
    pairs = [outputs[name] for name in shared], [expected[name] for name in shared]
    return largest_difference(*pairs)


def _sample_inputs_and_outputs(
    net: Transformer,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return sample inputs under the names of transformers, and the model's outputs for them."""
    first = net.spec.stacks[0]
    last = net.spec.stacks[-1]
    like = next(net.parameters())
    lengths = [min(INPUT_LENGTH, max_positions(one) or INPUT_LENGTH) for one in (first, last)]
    x = random_input(first, like, 1, lengths[0])
    if net.usage.eos and not x.is_floating_point():
        x[0, -1] = net.usage.eos[0]  # some classification heads read the end-of-text token
    name = "pixel_values" if first.embedding and first.embedding.patches else "input_ids"
    inputs = {name: x}
    with torch.inference_mode():
        if first is last:
            h = net.hidden(x)
        else:
            y = random_input(last, like, 1, lengths[1])[:, :-2]
            inputs["decoder_input_ids"] = y
            h = net.hidden(y, source=x)
        logits = {"logits": net.apply_head(h)} if net.spec.heads else {}
    return inputs, {"last_hidden_state": h, **logits}
