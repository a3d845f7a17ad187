"""An accelerator that does not exist, for tests of device handling: its tensors compute on the CPU.

    with pretended_device() as device:
        model.to(device)

Results are right, forward and backward. It refuses what a GPU refuses: tensors of two devices in
one operation, `numpy()`, and custom operators for CPUs; and numbers of the dtypes in `missing`, as
Apple's GPUs refuse float64. `WAITS` counts the operations for which the
host waits until a GPU has computed: copies to the host, numbers read from a tensor, and results
whose shape depends on values. It needs torch >= 2.13, and does not see kernels, memory, streams or
code for the device type "cuda".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

NAME = "pretend"
COPIES = ("aten::copy_", "aten::_to_copy", "aten::to")
INDEXING = (
    *("aten::index", "aten::index_put_", "aten::index_put", "aten::_unsafe_index"),
)  # take indices of the CPU
CONSTRUCTORS = (
    *("tensor", "as_tensor", "asarray", "new_tensor"),
)  # fill a device without an operation
BUILTIN = ("aten", "prim", "prims", "profiler")
# of a custom operator that runs on devices
DEVICE_KERNELS = ("CompositeExplicitAutograd", "PrivateUse1:", "CUDA:")
WAITING = (
    "aten::_local_scalar_dense",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
    "aten::_unique2",
    "aten::unique_consecutive",
)
WAITS: Counter[str] = Counter()
REGISTERED: list[Any] = []
MISSING: set[torch.dtype] = set()


class DeviceTensor(Tensor):
    """A tensor of the device; its numbers are in `host`."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        if host.dtype in MISSING:
            raise TypeError(f"cannot convert a tensor of the device to {host.dtype}")
        layout = {
            "strides": host.stride(),
            "storage_offset": host.storage_offset(),
            "layout": host.layout,
        }
        device = torch.device(NAME, 0)
        wrapper = Tensor._make_wrapper_subclass(
            cls, host.size(), dtype=host.dtype, device=device, **layout
        )
        wrapper.host = host
        return wrapper

    def __repr__(self, **options: Any) -> str:
        return f"DeviceTensor({self.host!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **options: Any) -> Any:
        raise TypeError("can't convert a tensor of the device to numpy; use Tensor.cpu() first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_operation(func, args, kwargs or {})


def run_operation(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the host; results are on the device if `device`, the tensor written or an
    input is.
    """
    name = func.name().split(".")[0]
    leaves = tree_leaves((args, kwargs))
    target = kwargs.get("device") or next(
        (arg for arg in args if isinstance(arg, torch.device)), None
    )
    if name == "aten::copy_":
        target = args[0].device
    inputs = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    if not inputs and not is_on_device(target):
        return func(*args, **kwargs)
    if inputs and name not in COPIES:
        check_operation(name, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
    if inputs and waits_for_device(name, args, target):
        WAITS[name] += 1
    with torch.inference_mode(False):  # tensors of inference mode cannot be wrapped
        result = func(*tree_map(to_host, args), **tree_map(to_host, kwargs))
        if name == "aten::copy_":
            return args[0]
        if target is not None and not is_on_device(target):
            return result
        wrapped = tree_map(
            lambda leaf: DeviceTensor(leaf) if isinstance(leaf, Tensor) else leaf, result
        )
        is_new = target is not None or name in COPIES
        return wrapped if is_new else return_and_correct_aliasing(func, args, kwargs, wrapped)


def waits_for_device(name: str, args: Any, target: Any) -> bool:
    """True if a GPU must finish its work before the operation returns."""
    is_copy_to_host = name in COPIES and target is not None and not is_on_device(target)
    indices = args[1] if name in INDEXING else ()
    selects_by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
    return name in WAITING or is_copy_to_host or selects_by_mask


def count_waits(run: Callable[[], object]) -> int:
    """How many times a call waits for the device."""
    before = WAITS.total()
    run()
    return WAITS.total() - before


def check_operation(name: str, tensors: list[Tensor]) -> None:
    """Raise as a GPU does if some of the tensors are on the CPU, or if the operator has no kernel
    for devices.
    """
    strangers = [x for x in tensors if not isinstance(x, DeviceTensor) and x.dim()]
    if name in INDEXING:
        strangers = [x for x in strangers if x.dtype not in (torch.int64, torch.bool, torch.uint8)]
    if strangers:
        shapes = [tuple(x.shape) for x in strangers]
        raise RuntimeError(
            f"{name}: expected all tensors on one device, found {NAME}:0 and cpu {shapes}"
        )
    if name.split("::")[0] not in BUILTIN:
        kernels = torch._C._dispatch_dump(name)
        if not any(kernel in kernels for kernel in DEVICE_KERNELS):
            raise RuntimeError(
                f"{name}: an operator for CPUs was called with tensors of the device"
            )


def is_on_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def to_host(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.host
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


class Operations(TorchDispatchMode):
    """Runs operations that create tensors on the device, which have no tensor of it among their
    arguments.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_operation(func, args, kwargs or {})


class Constructors(TorchFunctionMode):
    """Creates tensors of numbers on the CPU, and then moves them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        device = options.get("device") or (None if first is None else first.device)
        if name not in CONSTRUCTORS or not is_on_device(device):
            return func(*args, **options)
        grad_enabled = options.pop("requires_grad", False)
        options["device"] = "cpu"
        if name == "new_tensor":
            made = torch.tensor(*args[1:], **{"dtype": args[0].dtype, **options})
        else:
            made = (
                func(*args, **options)
                if first is None
                else first.to(options.get("dtype", first.dtype))
            )
        return made.to(device).requires_grad_(grad_enabled)


def register_device() -> None:
    """Register the device with torch, and the two operations that torch calls below its Python
    modes.

    It stays registered, so it is hidden from later tests of the process that look for an
    accelerator.
    """
    torch._C._get_accelerator = lambda: torch.device("cpu")
    torch.accelerator.is_available = lambda: False
    torch.accelerator.current_accelerator = lambda check_available=False: None
    backend_registration._setup_privateuseone_for_python_backend(rename=NAME)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    REGISTERED.append(library)  # which unregisters them when it is deleted


def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> Tensor:
    return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype))


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    to_host(target).copy_(to_host(source))
    return target


@contextmanager
def pretended_device(missing: Iterable[torch.dtype] = ()) -> Iterator[torch.device]:
    """Context in which the device exists; yields it."""
    if not REGISTERED:
        register_device()
    MISSING.update(missing)
    try:
        with Constructors(), Operations():
            yield torch.device(NAME, 0)
    finally:
        MISSING.clear()
