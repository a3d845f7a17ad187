"""Whether what is said of how a model is used fits the model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors, save as tensor_bytes
from tokenizers import Tokenizer
from torch import Tensor

from .. import __version__
from ..errors import SpecError
from ..files import sha256, write_atomically
from ..model_spec import ModelSpec, ModelTable, ProcessorSpec, StackSpec
from ..model_spec.processor_spec import TOKENIZER_FIELDS
from ..model_spec.serialization import CHECKED_FILES, MANIFEST_FILE, TOKENIZER_FILE, WEIGHTS_FILE, ModelManifest
from .transformer import Transformer, build


def check_processor(spec: ModelSpec, processor: ProcessorSpec, file_prefix: str = "") -> None:
    """Refuse what speaks of another model; `where` stands before the names of files.

    >>> from headwise import families
    >>> small = families.read_model_spec({"model_type": "gpt2", "vocab_size": 11})
    >>> check_processor(small, ProcessorSpec(end=(11,)))
    Traceback (most recent call last):
    headwise.errors.SpecError: end=(11,) holds no id of gpt2, which has 11 of them; give ids in 0..10
    """
    for name in TOKENIZER_FIELDS:
        if (held := getattr(processor, name)) is not None:
            _check_tokenizer(spec, held, f"{file_prefix}{name}.json" if file_prefix else name)
    first, last = _vocab_size(spec.stacks[0]), _vocab_size(spec.stacks[-1])
    sizes = {"before": first, "behind": first, "begin": last, "end": last}
    told = {name: getattr(processor, name) for name in sizes} | {
        "mask": () if processor.mask is None else (processor.mask,)
    }
    for name, ids in told.items():
        known = sizes.get(name, first)
        if any(one >= known for one in ids):
            fact = f"{name}={ids} holds no id of {spec.name}, which has {known} of them"
            raise SpecError(
                f"{file_prefix}{fact}; give ids in 0..{known - 1}" if known else f"{file_prefix}{fact}; leave it out"
            )
    if processor.labels and spec.heads and len(processor.labels) != spec.heads[0].outputs:
        fact = f"there are {len(processor.labels)} labels for {spec.heads[0].outputs} outputs of {spec.name}"
        raise SpecError(f"{file_prefix}{fact}; give one for each")


def _vocab_size(stack: StackSpec) -> int:
    return stack.embedding.tokens if stack.embedding else 0


def _check_tokenizer(described: ModelSpec, document: str, where: str) -> None:
    try:
        size = 1 + max(Tokenizer.from_str(document).get_vocab().values(), default=-1)
    except Exception as error:  # the library has no other name for what it raises
        raise SpecError(f"{where} is no document of a tokenizer: {error}; give Tokenizer.to_str()") from None
    tables = [tokens for stack in described.stacks if (tokens := _vocab_size(stack))]
    if size > max(tables, default=0):  # more rows than tokens are usual: tables are often made as wide as is fast
        known = " and ".join(map(str, tables)) or "no tokens"
        raise SpecError(f"{where} knows {size} tokens, the model {known}; give the tokenizer it was trained with")


# --- A model as a folder -------------------------------------------------------------------------------

MODEL_CARD_FILE = "README.md"


def save(net: Transformer, folder: Path | str, *, tokenizer: str | None = None, readme: str = "") -> None:
    """Write a model into a folder, made where it is missing; `readme` is what its page says of training and scores.

    What `net.usage` says goes with it; `tokenizer`, the document of a `tokenizers.Tokenizer`, takes the place of its
    own. What was there before stays readable until all of the new files have reached the disk, whatever fails.

    >>> import headwise as hw, tempfile
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(net, folder, readme="Not trained.")
    ...     again = hw.load(folder)
    >>> all(torch.equal(again.state_dict()[name], tensor) for name, tensor in net.state_dict().items())
    True
    """
    if not isinstance(net, Transformer):
        raise ValueError(f"net is of type {type(net).__name__}; give what hw.build made, not a wrapper around it")
    new = {WEIGHTS_FILE: tensor_bytes({name: t.detach().cpu().contiguous() for name, t in net.state_dict().items()})}
    usage = net.usage if tokenizer is None else replace(net.usage, tokenizer=tokenizer)
    check_processor(net.spec, usage)
    new |= {f"{name}.json": held.encode() for name in TOKENIZER_FIELDS if (held := getattr(usage, name)) is not None}
    folder = Path(folder)
    _create_folder(folder)
    _back_up_files(folder)
    for name, data in new.items():
        write_atomically(folder / name, data)
    manifest = ModelManifest(net.spec, {name: hashlib.sha256(data).hexdigest() for name, data in new.items()}, usage)
    write_atomically(folder / MANIFEST_FILE, str(manifest).encode())  # from here on it is the new
    write_atomically(folder / MODEL_CARD_FILE, _model_card_text(net, readme).encode())
    for name in CHECKED_FILES:
        if name not in new:
            (folder / name).unlink(missing_ok=True)
        _backup_path(folder, name).unlink(missing_ok=True)


def load(folder: Path | str, *, dropout: float = 0.0) -> Transformer:
    """The model that `hw.save` wrote there, in the dtype it was saved in, set to answer and not to train."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    if WEIGHTS_FILE not in manifest.checksums:
        raise SpecError(f"{folder / MANIFEST_FILE} names no {WEIGHTS_FILE}; save the model again")
    try:
        held = read_tensors(_read_file(folder, manifest, WEIGHTS_FILE))
    except SafetensorError as error:
        raise SpecError(f"{folder / WEIGHTS_FILE} holds no tensors: {error}; save the model again") from None
    usage = _read_processor(folder, manifest)
    with torch.device("meta"):
        net = build(manifest.model, dropout=dropout)
    _check_tensors(net, held, folder / WEIGHTS_FILE)
    net.load_state_dict(held, assign=True)
    net.usage = usage
    return net.eval()


def read_tokenizer(folder: Path | str) -> str | None:
    """The document of the tokenizer that was saved with a model; None where there was none."""
    manifest = _read_manifest(Path(folder))
    return _read_file(Path(folder), manifest, TOKENIZER_FILE).decode() if TOKENIZER_FILE in manifest.checksums else None


# --- what stays readable -------------------------------------------------------------------------------


def _backup_path(folder: Path, name: str) -> Path:
    """Where a file waits while its successor is written: found by its checksum, as long as the manifest asks for it."""
    return folder / f".{name}.before"


def _create_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"{folder} cannot be a folder: {error.strerror}; give another place") from None


def _back_up_files(folder: Path) -> None:
    """Let what the manifest speaks of also go by another name, so that writing over it loses nothing."""
    if not (folder / MANIFEST_FILE).is_file():
        return
    for name, checksum in _read_manifest(folder).checksums.items():
        path, before = folder / name, _backup_path(folder, name)
        if before.is_file() and sha256(before) == checksum:
            continue  # an earlier save ended half-way: this is still the one that counts
        if path.is_file():
            before.unlink(missing_ok=True)
            _hard_link(path, before)


def _hard_link(path: Path, second: Path) -> None:
    try:
        os.link(path, second)
    except OSError:  # not every disk knows two names of one file
        write_atomically(second, path.read_bytes())


# --- what is read --------------------------------------------------------------------------------------


def _read_manifest(folder: Path) -> ModelManifest:
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise SpecError(f"{folder} holds no {MANIFEST_FILE}; give a folder that hw.save wrote")
    try:
        return ModelManifest.from_toml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {error}; save the model again") from None


def _read_file(folder: Path, manifest: ModelManifest, name: str) -> bytes:
    """A file as it was saved: under its name, or still under the other when a later save was cut short."""
    checksum, found = manifest.checksums[name], ""
    for path in (folder / name, _backup_path(folder, name)):
        if not path.is_file():
            continue
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() == checksum:
            return data
        found = found or f"{len(data):,} bytes with checksum {hashlib.sha256(data).hexdigest()[:8]}"
    if not found:
        raise SpecError(f"{folder / name} is missing; copy the folder again, or save the model again")
    raise SpecError(f"{folder / name} is not what was saved: {found}, saved was {checksum[:8]}; copy the folder again")


def _read_processor(folder: Path, manifest: ModelManifest) -> ProcessorSpec:
    """What was saved of how the model is used, its documents with it."""
    held = [name for name in TOKENIZER_FIELDS if f"{name}.json" in manifest.checksums]
    documents = {name: _read_file(folder, manifest, f"{name}.json").decode() for name in held}
    usage = replace(manifest.usage, **documents)
    check_processor(manifest.model, usage, f"{folder}/")
    return usage


def _check_tensors(net: Transformer, held: Mapping[str, Tensor], path: Path) -> None:
    """Refuse other names, other shapes, and more than one dtype."""
    if wrong := next(_tensor_mismatches(net, held), None):
        raise SpecError(f"{path}: {wrong}; the file belongs to another description")
    dtypes = {held[name].dtype for name, _ in net.named_parameters()}
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        raise SpecError(f"{path} holds parameters of {', '.join(sorted(map(str, dtypes)))}; save them in one dtype")


def _tensor_mismatches(net: Transformer, held: Mapping[str, Tensor]) -> Iterator[str]:
    wanted = net.state_dict()
    for name in held:
        if name not in wanted:
            yield f"{name} is no tensor of this model"
    for name, tensor in wanted.items():
        if name not in held:
            yield f"{name} is missing"
        elif held[name].shape != tensor.shape:
            yield f"{name} is {list(held[name].shape)}, the description says {list(tensor.shape)}"
        elif held[name].is_floating_point() != tensor.is_floating_point():
            yield f"{name} is {held[name].dtype}, the description wants {tensor.dtype}"


def _model_card_text(net: Transformer, readme: str) -> str:
    described = net.spec
    numbers = sum(p.numel() for p in net.parameters())
    dtype = str(next(net.parameters()).dtype).removeprefix("torch.")
    layers = " and ".join(f"{len(stack.layers)} layers of {stack.model}" for stack in described.stacks)
    lines = [f"# {described.name}", ""]
    lines += [f"A model of kind {described.kind}: {layers}, {numbers:,} parameters in {dtype}."]
    lines += [f"Written by headwise {__version__}; `headwise.load(folder)` reads it.", ""]
    lines += [readme.strip(), ""] if readme.strip() else []
    return "\n".join([*lines, "## Tensors", "", "```", str(ModelTable(described)), "```", ""])
