"""Read the weights of a checkpoint (one safetensors file, or shards with an index) into a headwise
model.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..kernels.capabilities import available_memory
from ..kernels.devices import AS_SAVED, Placement, exact_device, free_memory, resolve_dtype
from ..models import Transformer, build
from ..models.families.weight_names import EMPTY, CheckpointPlan, TensorPiece, WeightNames
from ..models.hub_files import INDEX_FILE, read_shard_index
from ..models.model_spec import ModelSpec
from ..models.model_spec.serialization import WEIGHTS_FILE
from ..util.errors import SpecError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorInfo(NamedTuple):
    """Shape and dtype ("F32", ...) of a tensor, from the header of its file."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TensorSource:
    """Tensors of a checkpoint: infos by name, and a function that yields each once.

    `path` is for messages; `files` are the files that hold them.
    """

    path: Path
    infos: Mapping[str, TensorInfo]
    iter_tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    files: Sequence[Path] = ()


def open_folder(folder: Path) -> TensorSource:
    """Return the tensors of model.safetensors, or of the shards in its index file."""
    index = folder / INDEX_FILE
    has_index = index.is_file()
    files = (
        [folder / name for name in _list_shards(index)] if has_index else [folder / WEIGHTS_FILE]
    )
    infos = dict[str, TensorInfo]()
    for path in files:
        infos |= _read_infos(path)

    def iter_tensors() -> Iterator[tuple[str, Tensor]]:
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    yield name, file.get_tensor(name)

    return TensorSource(index if has_index else files[0], infos, iter_tensors, files)


def wrap_tensors(name: str, tensors: Mapping[str, Tensor]) -> TensorSource:
    """Present in-memory tensors as a checkpoint."""
    unloaded = [key for key, tensor in tensors.items() if tensor.is_meta]
    if unloaded:
        raise SpecError(
            f"cannot copy {name}: {unloaded[0]} is on the meta device; load the model without "
            "offloading"
        )
    dtype_names = {dtype: word for word, dtype in DTYPES.items()}
    infos = {
        key: TensorInfo(
            tuple(tensor.shape),
            dtype_names.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
        )
        for key, tensor in tensors.items()
    }

    def iter_tensors() -> Iterator[tuple[str, Tensor]]:
        for key, tensor in tensors.items():
            yield key, tensor.detach().contiguous()

    return TensorSource(Path(name), infos, iter_tensors)


def _read_infos(path: Path) -> dict[str, TensorInfo]:
    if not path.is_file():
        raise SpecError(f"{path} is missing; copy the folder again")
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            slices = {name: file.get_slice(name) for name in names}
            return {
                name: TensorInfo(tuple(tensor_slice.get_shape()), tensor_slice.get_dtype())
                for name, tensor_slice in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise SpecError(
            f"{path} is truncated or not safetensors: {error}; copy the file again"
        ) from None


def _list_shards(index: Path) -> list[str]:
    """List the shard files of an index. Raises unless each contains exactly its indexed tensors."""
    weight_map = read_shard_index(index)
    files = sorted(set(weight_map.values()))
    for file in files:
        infos = _read_infos(index.parent / file)
        indexed = {name for name, assigned in weight_map.items() if assigned == file}
        for name in sorted(indexed ^ set(infos)):
            fact = (
                f"{name} is not in {file}"
                if name in indexed
                else f"{file} contains {name}, which the index assigns to another file"
            )
            raise SpecError(
                f"{index}: {fact}; copy the folder again, the index belongs to other shards"
            )
    return files


def check_memory(folder: Path, placement: Placement) -> None:
    """Raise SpecError if the weights of a folder are larger than the free memory of the device."""
    if not (folder / INDEX_FILE).is_file() and not (folder / WEIGHTS_FILE).is_file():
        return
    try:
        infos = list(open_folder(folder).infos.values())
    except SpecError:
        return  # the loader explains what is wrong with the files
    device = placement.device
    needed = count_bytes(infos, placement.dtype)
    free = free_memory(device)
    if free is None or needed <= free:
        return
    remedies: list[str] = []
    half = count_bytes(infos, torch.bfloat16)
    if half < needed and half <= free:
        remedies.append(f"dtype='bf16' ({half / 1e9:,.1f} GB)")
    if device.type != "cpu" and needed <= available_memory():
        remedies.append("device='cpu'")
    remedy = f"use {' or '.join(remedies)}" if remedies else "choose a smaller model"
    has = f"{free / 1e9:,.1f} GB"
    has = f"this machine has {has}" if device.type == "cpu" else f"{device} has {has} free"
    raise SpecError(
        f"cannot load {folder}: its weights need {needed / 1e9:,.1f} GB, and {has}; {remedy}"
    )


def count_bytes(infos: Iterable[TensorInfo], dtype: torch.dtype | None = None) -> int:
    """Return the bytes of tensors, those of floating-point numbers in `dtype` unless it is None.

    >>> count_bytes([TensorInfo((3, 5), "F32"), TensorInfo((2,), "I64")], torch.bfloat16)
    46
    """
    total = 0
    for info in infos:
        bits = int(re.sub(r"\D.*", "", info.dtype.lstrip("BFIUC")) or 8)  # BOOL has no number
        if dtype is not None and info.dtype in DTYPES:
            bits = 8 * dtype.itemsize
        total += math.prod(info.shape) * bits // 8
    return total


# --- Build a model from the tensors of a checkpoint -----------------------------------------------


def build_from_weights(
    model_spec: ModelSpec,
    names: WeightNames,
    source: TensorSource,
    dropout: float,
    constants: Mapping[str, Any] = EMPTY,
    placement: Placement = AS_SAVED,
) -> Transformer:
    """Build a model with the weights of a checkpoint, in the checkpoint's dtype and in eval mode.

    `constants` overrides buffers of attention layers, by name, that otherwise follow from their
    specs.
    """
    tensors = read_tensors(model_spec, names, source, placement)
    # buffers of attention layers that follow from their specs, unless given
    for site, spec in model_spec.attention_specs():
        shapes = spec.shapes()
        for key, param in spec.params().items():
            name = f"{site}.{key}"
            if param.trainable or name in tensors:
                continue
            tensors[name] = value = param.init(shapes[key])
            if name in constants:
                try:
                    constant = torch.tensor(constants[name], dtype=value.dtype)
                    tensors[name] = constant.reshape(value.shape)
                except (TypeError, ValueError, RuntimeError):
                    raise SpecError(
                        f"{name} = {constants[name]!r} is not a list of {value.numel()} numbers; "
                        "copy the folder again"
                    ) from None
    with torch.device("meta"):
        net = build(model_spec, dropout=dropout)
    net.load_state_dict(tensors, assign=True)
    return placement.move(net.eval())


def read_tensors(
    model_spec: ModelSpec,
    names: WeightNames,
    source: TensorSource,
    placement: Placement = AS_SAVED,
) -> dict[str, Tensor]:
    """Read the tensors of a model by headwise names to where they are placed. Raises before
    reading if anything does not fit.
    """
    infos = {names.canonical_name(name): kind for name, kind in source.infos.items()}
    plan = CheckpointPlan.from_spec(model_spec, names, names.find_prefix(infos))
    mismatch = next(_find_mismatches(model_spec, plan, names, infos), None)
    if mismatch:
        raise SpecError(f"{source.path}: {mismatch}")
    shapes = model_spec.shapes()
    learned = list_learned(model_spec)
    tensors = dict[str, Tensor]()
    for path, pieces in plan.pieces.items():
        source_name = plan.find_source(path, infos)
        if source_name is not None:
            saved = DTYPES[infos[source_name].dtype]
            for piece in pieces:
                dtype = saved
                device = exact_device(placement.device)  # of constants
                if piece.name in learned:
                    device = placement.device
                    dtype = resolve_dtype(placement.dtype or saved, device)
                tensors[piece.name] = torch.empty(shapes[piece.name], dtype=dtype, device=device)
    to_compare = list[tuple[str, str, Tensor, Tensor]]()
    for file_name, tensor in note_zero_weights(source.path, source.iter_tensors()):
        name = names.canonical_name(file_name)
        first = plan.tied_names.get(name, name)
        for piece in plan.pieces.get(first, ()):
            file_tensor = piece.file_view.view(tensor)
            own_tensor = piece.own_view.view(tensors[piece.name])
            if name == plan.find_source(first, infos):
                own_tensor.copy_(file_tensor)
            else:
                to_compare.append((name, first, file_tensor, own_tensor))
    for name, first, file_tensor, own_tensor in to_compare:
        if not torch.equal(file_tensor.to(own_tensor), own_tensor):
            advice = (
                "but config.json ties them; if they are separate, set tie_word_embeddings = false"
            )
            raise SpecError(f"{source.path}: {name} differs from {first}, {advice}")
    return tensors


MIN_ROWS = 8  # of a matrix that is checked for a zero second half
MAX_ZERO_SHARE = 0.25  # of the matrices of a checkpoint; some are zero before training


def note_zero_weights(
    path: Path, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, and warn at the end if the file looks only partly copied.

    In such a file, the second half of a matrix or many whole matrices are zero. Padding rows of
    embeddings do not count: they fill less than half. Reads only one row of almost every matrix.
    """
    halves = list[str]()
    num_zero = 0
    num_matrices = 0
    for name, tensor in tensors:
        yield name, tensor
        if tensor.dim() < 2 or len(tensor) < MIN_ROWS or tensor.is_meta:
            continue
        num_matrices += 1
        half = len(tensor) // 2
        if tensor[-1].any() or tensor[half:].any():
            continue
        if tensor[:half].any():
            halves.append(name)
        else:
            num_zero += 1
    if halves or num_zero > MAX_ZERO_SHARE * num_matrices:
        facts = [f"the second half of {halves[0]} is zero"] if halves else []
        facts += [f"{num_zero} of {num_matrices} weight matrices are zero"] if num_zero else []
        remedy = "if this is not intended, copy the file again, as it may be incomplete"
        warnings.warn(f"{path}: {' and '.join(facts)}; {remedy}", stacklevel=2)


def list_learned(model_spec: ModelSpec) -> set[str]:
    """Return the names of the parameters of a model; its other tensors are constants."""
    return {weight.name for weight in model_spec.weights() if weight.trainable}


def _find_mismatches(
    model_spec: ModelSpec,
    plan: CheckpointPlan,
    names: WeightNames,
    infos: Mapping[str, TensorInfo],
) -> Iterator[str]:
    """Yield a message for each missing tensor, unexpected tensor or wrong shape, then for each
    unsupported dtype, and for parameters of several dtypes.
    """
    for path in plan.pieces:
        if plan.find_source(path, infos) is None:
            yield (
                f"{path} is missing; copy the files again, or give the config that belongs to them"
            )
    for name, info in infos.items():
        expected = plan.pieces.get(plan.tied_names.get(name, name))
        if expected is None and not names.is_ignored(name):
            yield (
                f"{name} is not a tensor of the described model; give the config that belongs "
                "to the file"
            )
        elif expected and info.shape != expected[0].shape:
            shapes = f"{list(info.shape)}, the config requires {list(expected[0].shape)}"
            yield f"{name} is {shapes}; give the config that belongs to the file"
    learned = list_learned(model_spec)
    sources = {path: plan.find_source(path, infos) for path in plan.pieces}
    dtypes = {path: infos[name].dtype for path, name in sources.items() if name}
    for path, dtype in dtypes.items():
        if dtype not in DTYPES:
            yield (
                f"{path} has dtype {dtype}; quantised weights are not supported, give them as "
                f"{', '.join(DTYPES)}"
            )
    learned_dtypes = set[str]()
    for path, pieces in plan.pieces.items():
        if not learned.isdisjoint(piece.name for piece in pieces):
            learned_dtypes.add(dtypes[path])
    if len(learned_dtypes) > 1:
        yield (
            f"parameters have the dtypes {' and '.join(sorted(learned_dtypes))}; save them in "
            "one dtype"
        )


def build_tensor(
    pieces: Sequence[TensorPiece], tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """Build a file tensor, in the file's layout, from the tensors of a headwise model."""
    tensor = torch.empty(pieces[0].shape, dtype=dtype)
    for piece in pieces:
        own = tensors[piece.name].detach().cpu().contiguous()
        piece.file_view.view(tensor).copy_(piece.own_view.view(own))
    return tensor
