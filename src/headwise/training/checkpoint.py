"""Checkpoints: the complete state of a training run in one file with a checksum."""

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
    """Raised for a checkpoint file that is truncated or whose checksum is wrong."""


@dataclass(frozen=True, eq=False)
class TrainingCheckpoint:
    """State after `step` steps: tensors named by kind and name ("model decoder.norm.weight"), and JSON values."""

    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]

    def tensors_of_kind(self, name: str) -> dict[str, Tensor]:
        """Tensors of one kind, such as "model", without the kind in their names."""
        return {
            key.removeprefix(f"{name} "): value for key, value in self.tensors.items() if key.startswith(f"{name} ")
        }


class CheckpointFolder:
    """A folder of checkpoints that keeps the last `keep` and the best one."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    @property
    def paths(self) -> list[Path]:
        """Paths of all checkpoints, newest first."""
        return sorted(self.folder.glob(f"*{CHECKPOINT_SUFFIX}"), reverse=True)

    def path(self, step: int) -> Path:
        """Path of the checkpoint of a step."""
        return self.folder / f"{step:010}{CHECKPOINT_SUFFIX}"

    def save(self, checkpoint: TrainingCheckpoint, best: int | None = None) -> None:
        """Write a checkpoint, then delete all but the last `keep` and the one of step `best`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path(checkpoint.step), encode_checkpoint(checkpoint))
        kept_paths = {*self.paths[: self.keep], *([] if best is None else [self.path(best)])}
        for path in self.paths:
            if path not in kept_paths:
                path.unlink()

    def load_newest(self) -> tuple[TrainingCheckpoint | None, list[str]]:
        """The newest undamaged checkpoint (None if there are no files), and a message for each damaged newer one."""
        damages: list[str] = []
        for path in self.paths:
            try:
                return read_checkpoint(path), damages
            except DamagedCheckpoint as error:
                damages.append(str(error))
        if damages:
            raise SpecError(
                f"cannot read any checkpoint in {self.folder}: {'; '.join(damages)}; start again in another folder"
            )
        return None, []


def encode_checkpoint(checkpoint: TrainingCheckpoint) -> bytes:
    """Content of a checkpoint file: a safetensors file with the JSON state and a checksum of both in its header.

    >>> checkpoint = TrainingCheckpoint(3, {"model w": torch.ones(2)}, {"best": None})
    >>> b"model w" in encode_checkpoint(checkpoint), b"sha256" in encode_checkpoint(checkpoint)
    (True, True)
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    text = json.dumps({"format": CHECKPOINT_FORMAT, "step": checkpoint.step, **checkpoint.state})
    return safetensors.torch.save(tensors, metadata={"state": text, "sha256": _digest(tensors, text)})


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_checkpoint(path: Path) -> TrainingCheckpoint:
    """Read a checkpoint and verify its checksum; raises DamagedCheckpoint."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path.name} is truncated or not a checkpoint ({error})") from None
    if _digest(tensors, metadata.get("state", "")) != metadata.get("sha256"):
        raise DamagedCheckpoint(f"{path.name} is damaged: its checksum is wrong")
    state = json.loads(metadata["state"])
    if state["format"] != CHECKPOINT_FORMAT:
        raise SpecError(
            f"cannot read {path}: its format is {state['format']}, this version reads {CHECKPOINT_FORMAT}; "
            "resume with the version of headwise that wrote it"
        )
    return TrainingCheckpoint(state["step"], tensors, state)


def describe_first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first difference between two configurations as text; None if they are equal.

    >>> describe_first_difference({"recipe": {"lr": 0.1, "seed": 3}}, {"recipe": {"lr": 0.2, "seed": 3}})
    'recipe.lr was 0.1, is now 0.2'
    """
    difference = find_difference(old, new)
    return None if difference is None else f"{difference[0]} was {difference[1]}, is now {difference[2]}"
