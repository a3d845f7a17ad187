"""Options for the device and the number format of a model, for every command that runs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .arguments import print_note
from .options import Options, options

ModelT = TypeVar("ModelT")


@options
class DeviceOptions(Options):
    """Options for the device that a command computes on.

    --device NAME  auto, cpu, cuda, cuda:1, mps, ... (default: auto)
    """

    device: str | None = "auto"


@options
class LoadingOptions(DeviceOptions):
    """Options for the device and the number format of a model that is loaded.

    --dtype NAME  number format, such as bf16 (default: as saved)
    """

    choices = {"dtype": "kernels.devices:DTYPES"}
    dtype: str | None = None

    @property
    def loading(self) -> dict[str, Any]:
        """Return the arguments of `hw.load`; "auto" leaves a model where a function placed it."""
        return {"device": "auto" if self.device is None else self.device, "dtype": self.dtype}


def load_on_device(load: Callable[..., ModelT], name: str, args: LoadingOptions) -> ModelT:
    """Load a model to the device and in the dtype of the options."""
    announce_placement(name, args)
    return load(name, **args.loading)


def announce_placement(name: str, args: LoadingOptions) -> None:
    """Print where a model runs, unless it is the CPU and the dtype of its file. Raises SpecError if
    this machine lacks the device or the dtype.
    """
    from ..kernels.devices import AS_SAVED, Placement

    placement = Placement.resolve(**args.loading)
    if placement != AS_SAVED:
        print_note(f"headwise: {name} runs on {placement}")
