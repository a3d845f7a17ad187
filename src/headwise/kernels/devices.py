"""Devices and dtypes by name: which of them this machine has, and how much memory they have.

All other code computes on the device of its tensors.
"""

from __future__ import annotations

from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from ..util.errors import SpecError, suggest
from .capabilities import available_memory

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Placement(NamedTuple):
    """Where the weights of a model are loaded: a device, and a dtype or None for the saved one."""

    device: torch.device = torch.device("cpu")
    dtype: torch.dtype | None = None

    @classmethod
    def resolve(cls, device: torch.device | str, dtype: torch.dtype | str | None) -> Self:
        """Return the placement of these names. Raises SpecError if this machine lacks one."""
        chosen = resolve_device(device)
        return cls(chosen, None if dtype is None else resolve_dtype(dtype, chosen))

    def move(self, model: ModuleT) -> ModuleT:
        """Move a model here, and return it."""
        self.check(model)
        return model.to(device=self.device, dtype=self.dtype)

    def check(self, model: nn.Module) -> None:
        """Raise SpecError if the device lacks a dtype of a model that would be moved here."""
        for dtype in {parameter.dtype for parameter in model.parameters()}:
            if self.dtype is None and dtype in DTYPES.values():
                resolve_dtype(dtype, self.device)

    def __str__(self) -> str:
        is_gpu = self.device.type == "cuda"  # one of CUDA or ROCm
        gpu = f" ({torch.cuda.get_device_name(self.device)})" if is_gpu else ""
        dtype = "" if self.dtype is None else f" in {dtype_name(self.dtype)}"
        return f"{self.device}{gpu}{dtype}"


AS_SAVED = Placement()


def current_accelerator() -> torch.device | None:
    """Return the accelerator of this machine (CUDA, ROCm, XPU, MPS, ...), or None."""
    return torch.accelerator.current_accelerator(check_available=True)


def resolve_device(name: torch.device | str) -> torch.device:
    """Return a device that this machine has; "auto" is the accelerator, or the CPU without one.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return current_accelerator() or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
        is_there = device.type != "meta"
    except (RuntimeError, AssertionError, ImportError):  # torch built without CUDA asserts
        is_there = False
    if not is_there:
        raise SpecError(
            f"device={str(name)!r} is not available; use device='auto' or one of "
            f"{', '.join(list_devices())}"
        )
    return device if device.type != "cpu" else torch.device("cpu")  # "cpu:1" is the CPU too


def list_devices() -> list[str]:
    """Return the names of the devices of this machine.

    >>> list_devices()[0]
    'cpu'
    """
    accelerator = current_accelerator()
    if accelerator is None:
        return ["cpu"]
    count = torch.accelerator.device_count()
    return ["cpu", *(f"{accelerator.type}:{number}" for number in range(count))]


def resolve_dtype(name: torch.dtype | str, device: torch.device) -> torch.dtype:
    """Return a floating-point dtype that the device has.

    >>> resolve_dtype("bf16", torch.device("cpu"))
    torch.bfloat16
    """
    dtype = name if isinstance(name, torch.dtype) else DTYPES.get(name)
    if dtype is None or dtype not in DTYPES.values():
        raise SpecError(f"dtype={str(name)!r} is unknown; {suggest(str(name), DTYPES)}")
    if not has_dtype(device, dtype):
        raise SpecError(
            f"{device} has no {dtype_name(dtype)}; use dtype='float32', or device='cpu'"
        )
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


def has_dtype(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the device computes with numbers of this dtype; Apple's GPUs have no float64."""
    if device.type in ("cpu", "cuda", "meta"):
        return True
    try:
        torch.ones(1, dtype=dtype, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def to_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64 for exact sums: on its device, or on the CPU if the device has no
    float64.

    >>> to_float64(torch.ones(1)).dtype
    torch.float64
    """
    return tensor.to(exact_device(tensor.device), torch.float64)


def exact_device(device: torch.device) -> torch.device:
    """Return the device that computes float64 sums of its tensors: itself, or the CPU."""
    return device if has_dtype(device, torch.float64) else torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its work; return at once for other devices, whose
    calls wait themselves.
    """
    accelerator = current_accelerator()
    if accelerator is not None and device.type == accelerator.type:
        torch.accelerator.synchronize(device)


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that new tensors may fill; None if the device does not say.

    For the CPU, this is the memory of the machine, or the limit of its container.
    """
    if device.type == "cpu":
        return available_memory()
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    try:
        return torch.accelerator.get_memory_info(device)[0]
    except (RuntimeError, AttributeError):  # of devices without a count
        return None
