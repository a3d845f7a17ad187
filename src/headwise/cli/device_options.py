"""Options for the device and the number format of a model, for every command that runs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from .arguments import print_note
from .options import Options, options

if TYPE_CHECKING:
    from ..kernels.devices import Placement

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


def load_on_device(load: Callable[..., ModelT], name: str, args: LoadingOptions) -> ModelT:
    """Load a model to the device and in the dtype of the options."""
    placement = choose_placement(name, args)
    return load(name, device=placement.device, dtype=placement.dtype)


def choose_placement(name: str, args: LoadingOptions) -> Placement:
    """Return the device and the dtype of the options. Print them for a model, unless they are the
    CPU and the dtype of its file.
    """
    from ..kernels.devices import AS_SAVED, Placement

    device = "auto" if args.device is None else args.device
    placement = Placement.resolve(device, args.dtype)
    if placement != AS_SAVED:
        print_note(f"headwise: {name} runs on {placement}")
    return placement
