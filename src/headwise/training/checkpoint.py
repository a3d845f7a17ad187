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

from ..errors import SpecError
from ..files import write_atomically
from ..spread.alike import difference

FORMAT = 1
SUFFIX = ".safetensors"


class Damaged(SpecError):
    """A checkpoint that is not as it was written."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Tensors by kind and name, as "model decoder.norm.weight", and plain values beside them, after so many steps."""

    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]

    def kind(self, name: str) -> dict[str, Tensor]:
        """The tensors of one kind, by the rest of their names."""
        return {
            key.removeprefix(f"{name} "): value for key, value in self.tensors.items() if key.startswith(f"{name} ")
        }


class Checkpoints:
    """The checkpoints of one folder: the last `keep` of them, and the best."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    @property
    def paths(self) -> list[Path]:
        """Every checkpoint there is, the newest first."""
        return sorted(self.folder.glob(f"*{SUFFIX}"), reverse=True)

    def path(self, step: int) -> Path:
        """Where the one of this step lies."""
        return self.folder / f"{step:010}{SUFFIX}"

    def save(self, checkpoint: Checkpoint, best: int | None = None) -> None:
        """Write one, then take away all but the last few and the one of step `best`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path(checkpoint.step), encoded(checkpoint))
        spared = {*self.paths[: self.keep], *([] if best is None else [self.path(best)])}
        for path in self.paths:
            if path not in spared:
                path.unlink()

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest that is whole, none if nothing was ever written, and what was found wrong with newer ones."""
        damages: list[str] = []
        for path in self.paths:
            try:
                return read(path), damages
            except Damaged as error:
                damages.append(str(error))
        if damages:
            raise SpecError(
                f"no checkpoint of {self.folder} can be read: {'; '.join(damages)}; begin in another folder"
            )
        return None, []


def encoded(checkpoint: Checkpoint) -> bytes:
    """The file of a checkpoint: tensors as safetensors, all else as JSON in its header, and a checksum of both.

    >>> one = Checkpoint(3, {"model w": torch.ones(2)}, {"best": None})
    >>> b"model w" in encoded(one), b"sha256" in encoded(one)
    (True, True)
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    text = json.dumps({"format": FORMAT, "step": checkpoint.step, **checkpoint.state})
    return safetensors.torch.save(tensors, metadata={"state": text, "sha256": _digest(tensors, text)})


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def read(path: Path) -> Checkpoint:
    """The checkpoint of a file, if it is just as it was written."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise Damaged(f"{path.name} is cut short or no checkpoint ({error})") from None
    if _digest(tensors, told.get("state", "")) != told.get("sha256"):
        raise Damaged(f"{path.name} was changed after it was written, its checksum is another")
    state = json.loads(told["state"])
    if state["format"] != FORMAT:
        raise SpecError(f"{path} has format {state['format']}, this is {FORMAT}; resume with the version that wrote it")
    return Checkpoint(state["step"], tensors, state)


def first_difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Where two configurations first differ, in words; None where they do not.

    >>> first_difference({"recipe": {"lr": 0.1, "seed": 3}}, {"recipe": {"lr": 0.2, "seed": 3}})
    'recipe.lr was 0.1, is now 0.2'
    """
    found = difference(was, now)
    return None if found is None else f"{found[0]} was {found[1]}, is now {found[2]}"
