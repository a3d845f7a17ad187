"""Save a model to a folder with checksums, load it again, and check that its processor fits it."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors, save as tensor_bytes
from torch import Tensor

from .. import __version__
from ..util.errors import SpecError, pluralise
from ..util.escaping import escape_markdown
from ..util.files import read_text_file, sha256, write_atomically
from ..util.output_paths import FolderKind, check_output
from .model_spec import ModelSpec, ModelTable, ProcessorSpec, StackSpec
from .model_spec.components import TOKENIZER_FIELDS
from .model_spec.serialization import (
    CHECKED_FILES,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    ModelManifest,
)
from .transformer import Transformer, build
from .vocabulary import parse_tokenizer


def check_processor(spec: ModelSpec, processor: ProcessorSpec, file_prefix: str = "") -> None:
    """Refuse a processor that does not fit the model: tokenizer size, token ids, number of labels.

    `file_prefix` is put before file names in messages.

    >>> from headwise import families
    >>> small = families.read_model_spec({"model_type": "gpt2", "vocab_size": 11})
    >>> check_processor(small, ProcessorSpec(eos=(11,)))
    Traceback (most recent call last):
    headwise.util.errors.SpecError: eos=(11,) is out of range for gpt2, whose vocabulary has 11 ...
    """
    for name in TOKENIZER_FIELDS:
        document = getattr(processor, name)
        if document is not None:
            _check_tokenizer(spec, document, f"{file_prefix}{name}.json" if file_prefix else name)
    first = _vocab_size(spec.stacks[0])
    last = _vocab_size(spec.stacks[-1])
    sizes = {"prefix_ids": first, "suffix_ids": first, "bos": last, "eos": last}
    ids_by_field = {name: getattr(processor, name) for name in sizes} | {
        "mask": () if processor.mask is None else (processor.mask,)
    }
    for name, ids in ids_by_field.items():
        vocab_size = sizes.get(name, first)
        if any(token >= vocab_size for token in ids):
            fact = (
                f"{name}={ids} is out of range for {spec.name}, whose vocabulary has "
                f"{vocab_size} tokens"
            )
            remedy = f"give ids in 0..{vocab_size - 1}" if vocab_size else "leave it out"
            raise SpecError(f"{file_prefix}{fact}; {remedy}")
    if processor.labels and spec.heads and len(processor.labels) != spec.heads[0].outputs:
        fact = (
            f"there are {len(processor.labels)} labels for {spec.heads[0].outputs} outputs of "
            f"{spec.name}"
        )
        raise SpecError(f"{file_prefix}{fact}; give one for each")


def _vocab_size(stack: StackSpec) -> int:
    return stack.embedding.tokens if stack.embedding else 0


def _check_tokenizer(spec: ModelSpec, document: str, where: str) -> None:
    try:
        tokenizer = parse_tokenizer(document)
    except Exception as error:  # tokenizers raises bare Exception
        raise SpecError(
            f"{where} is not a tokenizer document: {error}; give Tokenizer.to_str()"
        ) from None
    ids = tokenizer.get_vocab(with_added_tokens=False)
    [(shared_id, count)] = Counter(ids.values()).most_common(1) or [(0, 1)]
    if count > 1:
        examples = " and ".join(
            sorted(repr(token) for token, token_id in ids.items() if token_id == shared_id)[:2]
        )
        fact = f"{where} gives {count} tokens the id {shared_id}, such as {examples}"
        raise SpecError(f"{fact}; give the tokenizer that the model was trained with")
    size = 1 + max(tokenizer.get_vocab().values(), default=-1)
    tables = list(filter(None, map(_vocab_size, spec.stacks)))
    if size > max(tables, default=0):  # larger tables are usual: they are often padded for speed
        table_sizes = " and ".join(map(str, tables)) or "no tokens"
        raise SpecError(
            f"{where} knows {size} tokens, the model {table_sizes}; give the tokenizer it was "
            "trained with"
        )


# --- A model as a folder --------------------------------------------------------------------------

MODEL_CARD_FILE = "README.md"
# A config.json that stops transformers before it builds anything, by the only messages that it can
# be made to print: automatic classes name the unknown model type, all other classes the label
# number that they cannot read. Without the file, a class such as LlamaForCausalLM builds a random
# model of its default size from this folder.
CONFIG_FILE = "config.json"
NOT_FOR_TRANSFORMERS = (
    "this folder holds a headwise model, not one of transformers; load it with "
    "headwise.load(folder)"
)
REFUSING_CONFIG = json.dumps(
    {"model_type": NOT_FOR_TRANSFORMERS, "id2label": {NOT_FOR_TRANSFORMERS: ""}}, indent=2
)


def is_refusing_config(path: Path) -> bool:
    """Return True if a config.json is the one of headwise folders, which stops transformers."""
    return path.is_file() and path.read_bytes().strip() == REFUSING_CONFIG.encode()


# A folder that a training run has begun to fill is one too; `headwise demo` keeps its first tour in
# "sample".
MODEL_FOLDER = FolderKind(
    "model or training run", (MANIFEST_FILE, "checkpoint", "metrics.jsonl", "sample")
)


def save(
    net: Transformer, folder: Path | str, *, tokenizer: str | None = None, readme: str = ""
) -> None:
    """Save a model to a folder, which is created if it is missing; `readme` is text for the model
    card.

    `net.usage` is saved with it; `tokenizer`, the JSON text of a `tokenizers.Tokenizer`, replaces
    the tokenizer in `net.usage`. A model that was saved there before is replaced. It stays loadable
    until all new files are on disk, even if saving fails half-way. A folder with other files is
    refused.

    >>> import headwise as hw, tempfile
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(net, folder, readme="Not trained.")
    ...     again = hw.load(folder)
    >>> all(
    ...     torch.equal(again.state_dict()[name], tensor)
    ...     for name, tensor in net.state_dict().items()
    ... )
    True
    """
    if not isinstance(net, Transformer):
        raise ValueError(
            f"net is of type {type(net).__name__}; give a Transformer as hw.build returns it, not "
            "a wrapper"
        )
    new = {
        WEIGHTS_FILE: tensor_bytes(
            {name: t.detach().cpu().contiguous() for name, t in net.state_dict().items()}
        )
    }
    usage = net.usage if tokenizer is None else replace(net.usage, tokenizer=tokenizer)
    check_processor(net.spec, usage)
    for name in TOKENIZER_FIELDS:
        text = getattr(usage, name)
        if text is not None:
            new[f"{name}.json"] = text.encode()
    folder = check_output(folder, MODEL_FOLDER, "continue")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(
            f"cannot create folder {folder}: {error.strerror}; give another path"
        ) from None
    _back_up_files(folder)
    for name, data in new.items():
        write_atomically(folder / name, data)
    manifest = ModelManifest(
        net.spec, {name: hashlib.sha256(data).hexdigest() for name, data in new.items()}, usage
    )
    # from here on, load() reads the new model
    write_atomically(folder / MANIFEST_FILE, str(manifest).encode())
    write_atomically(folder / MODEL_CARD_FILE, _model_card_text(net, readme).encode())
    write_atomically(folder / CONFIG_FILE, f"{REFUSING_CONFIG}\n".encode())
    for name in CHECKED_FILES:
        if name not in new:
            (folder / name).unlink(missing_ok=True)
        _backup_path(folder, name).unlink(missing_ok=True)


def load(folder: Path | str, *, dropout: float = 0.0) -> Transformer:
    """Load a model that `hw.save` wrote, in the dtype it was saved in and in eval mode."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    if WEIGHTS_FILE not in manifest.checksums:
        raise SpecError(
            f"{folder / MANIFEST_FILE} does not list {WEIGHTS_FILE}; save the model again"
        )
    try:
        tensors = read_tensors(_read_file(folder, manifest, WEIGHTS_FILE))
    except SafetensorError as error:
        raise SpecError(
            f"{folder / WEIGHTS_FILE} is not a safetensors file: {error}; save the model again"
        ) from None
    usage = _read_processor(folder, manifest)
    with torch.device("meta"):
        net = build(manifest.model, dropout=dropout)
    _check_tensors(net, tensors, folder / WEIGHTS_FILE)
    net.load_state_dict(tensors, assign=True)
    net.usage = usage
    return net.eval()


# --- Keeping the previous model loadable while saving ---------------------------------------------


def _backup_path(folder: Path, name: str) -> Path:
    """Return the backup of a file while its new version is written; `load` uses it if its checksum
    is in the manifest.
    """
    return folder / f".{name}.before"


def _back_up_files(folder: Path) -> None:
    """Link every file in the manifest to its backup path, so that overwriting the file loses
    nothing.
    """
    if not (folder / MANIFEST_FILE).is_file():
        return
    for name, checksum in _read_manifest(folder).checksums.items():
        path = folder / name
        backup = _backup_path(folder, name)
        if backup.is_file() and sha256(backup) == checksum:
            continue  # an earlier save failed half-way, so this backup is still needed
        if path.is_file():
            backup.unlink(missing_ok=True)
            try:
                os.link(path, backup)
            except OSError:  # not every file system supports hard links
                write_atomically(backup, path.read_bytes())


# --- Reading --------------------------------------------------------------------------------------


def _read_manifest(folder: Path) -> ModelManifest:
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise SpecError(f"{folder} contains no {MANIFEST_FILE}; give a folder that hw.save wrote")
    return ModelManifest.from_toml(read_text_file(path), str(path))


def _read_file(folder: Path, manifest: ModelManifest, name: str) -> bytes:
    """Return the file that matches its checksum: the file itself, or its backup if a later save
    failed half-way.
    """
    checksum = manifest.checksums[name]
    actual = ""
    for path in (folder / name, _backup_path(folder, name)):
        if not path.is_file():
            continue
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() == checksum:
            return data
        actual = (
            actual or f"{len(data):,} bytes with checksum {hashlib.sha256(data).hexdigest()[:8]}"
        )
    if not actual:
        raise SpecError(
            f"{folder / name} is missing; copy the folder again, or save the model again"
        )
    raise SpecError(
        f"{folder / name} has changed since it was saved: {actual}, expected {checksum[:8]}; copy "
        "the folder again"
    )


def _read_processor(folder: Path, manifest: ModelManifest) -> ProcessorSpec:
    """Return the saved processor with its tokenizer documents."""
    saved = [name for name in TOKENIZER_FIELDS if f"{name}.json" in manifest.checksums]
    documents = {name: _read_file(folder, manifest, f"{name}.json").decode() for name in saved}
    usage = replace(manifest.usage, **documents)
    check_processor(manifest.model, usage, f"{folder}/")
    return usage


def _check_tensors(net: Transformer, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuse tensors with names or shapes unlike the model's, and parameters of several dtypes."""
    mismatch = next(_tensor_mismatches(net, tensors), None)
    if mismatch:
        raise SpecError(
            f"{path}: {mismatch}; the file belongs to another model, save the model again"
        )
    dtypes = {tensors[name].dtype for name, _ in net.named_parameters()}
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        raise SpecError(
            f"{path} holds parameters of {', '.join(sorted(map(str, dtypes)))}; save them in one "
            "dtype"
        )


def _tensor_mismatches(net: Transformer, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    expected = net.state_dict()
    for name in tensors:
        if name not in expected:
            yield f"{name} is not a tensor of this model"
    for name, tensor in expected.items():
        if name not in tensors:
            yield f"{name} is missing"
        elif tensors[name].shape != tensor.shape:
            yield f"{name} is {list(tensors[name].shape)}, expected {list(tensor.shape)}"
        elif tensors[name].is_floating_point() != tensor.is_floating_point():
            yield f"{name} is {tensors[name].dtype}, expected {tensor.dtype}"


def _model_card_text(net: Transformer, readme: str) -> str:
    spec = net.spec
    num_params = sum(p.numel() for p in net.parameters())
    dtype = str(next(net.parameters()).dtype).removeprefix("torch.")
    layers = " and ".join(
        f"{pluralise(len(stack.layers), 'layer')} of {stack.model}" for stack in spec.stacks
    )
    lines = [f"# {escape_markdown(spec.name)}", ""]
    lines += [f"A model of kind {spec.kind}: {layers}, {num_params:,} parameters in {dtype}."]
    lines += [f"Written by headwise {__version__}; `headwise.load(folder)` reads it.", ""]
    lines += [readme.strip(), ""] if readme.strip() else []
    return "\n".join([*lines, "## Tensors", "", "```", str(ModelTable(spec)), "```", ""])
