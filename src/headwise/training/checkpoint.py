"""Checkpoints: all that a run needs to go on as if it had never stopped, one file each, with its own checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ..distributed.config_consistency import find_difference
from ..errors import SpecError
from ..files import write_atomically

CHECKPOINT_FORMAT = 1
CHECKPOINT_SUFFIX = ".safetensors"


class DamagedCheckpoint(SpecError):
    """A checkpoint that is not as it was written."""


@dataclass(frozen=True, eq=False)
class TrainingCheckpoint:
    """Tensors by kind and name, as "model decoder.norm.weight", and plain values beside them, after so many steps."""

    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]

    def tensors_of_kind(self, name: str) -> dict[str, Tensor]:
        """The tensors of one kind, by the rest of their names."""
        return {
            key.removeprefix(f"{name} "): value for key, value in self.tensors.items() if key.startswith(f"{name} ")
        }


class CheckpointFolder:
    """The checkpoints of one folder: the last `keep` of them, and the best."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    @property
    def paths(self) -> list[Path]:
        """Every checkpoint there is, the newest first."""
        return sorted(self.folder.glob(f"*{CHECKPOINT_SUFFIX}"), reverse=True)

    def path(self, step: int) -> Path:
        """Where the one of this step lies."""
        return self.folder / f"{step:010}{CHECKPOINT_SUFFIX}"

    def save(self, checkpoint: TrainingCheckpoint, best: int | None = None) -> None:
        """Write one, then take away all but the last few and the one of step `best`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path(checkpoint.step), encode_checkpoint(checkpoint))
        spared = {*self.paths[: self.keep], *([] if best is None else [self.path(best)])}
        for path in self.paths:
            if path not in spared:
                path.unlink()

    def load_newest(self) -> tuple[TrainingCheckpoint | None, list[str]]:
        """The newest that is whole, none if nothing was ever written, and what was found wrong with newer ones."""
        damages: list[str] = []
        for path in self.paths:
            try:
                return read_checkpoint(path), damages
            except DamagedCheckpoint as error:
                damages.append(str(error))
        if damages:
            raise SpecError(
                f"no checkpoint of {self.folder} can be read: {'; '.join(damages)}; begin in another folder"
            )
        return None, []


def encode_checkpoint(checkpoint: TrainingCheckpoint) -> bytes:
    """The file of a checkpoint: tensors as safetensors, all else as JSON in its header, and a checksum of both.

    >>> one = TrainingCheckpoint(3, {"model w": torch.ones(2)}, {"best": None})
    >>> b"model w" in encode_checkpoint(one), b"sha256" in encode_checkpoint(one)
    (True, True)
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    text = json.dumps({"format": CHECKPOINT_FORMAT, "step": checkpoint.step, **checkpoint.state})
    return safetensors.torch.save(tensors, metadata={"state": text, "sha256": _digest(tensors, text)})


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def read_checkpoint(path: Path) -> TrainingCheckpoint:
    """The checkpoint of a file, if it is just as it was written."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path.name} is cut short or no checkpoint ({error})") from None
    if _digest(tensors, told.get("state", "")) != told.get("sha256"):
        raise DamagedCheckpoint(f"{path.name} was changed after it was written, its checksum is another")
    state = json.loads(told["state"])
    if state["format"] != CHECKPOINT_FORMAT:
        raise SpecError(
            f"{path} has format {state['format']}, this is {CHECKPOINT_FORMAT}; resume with the version that wrote it"
        )
    return TrainingCheckpoint(state["step"], tensors, state)


def describe_first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Where two configurations first differ, in words; None where they do not.

    >>> describe_first_difference({"recipe": {"lr": 0.1, "seed": 3}}, {"recipe": {"lr": 0.2, "seed": 3}})
    'recipe.lr was 0.1, is now 0.2'
    """
    found = find_difference(old, new)
    return None if found is None else f"{found[0]} was {found[1]}, is now {found[2]}"
