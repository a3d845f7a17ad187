"""What autograd keeps of a run until the way back: each memory once, under the step that kept it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from .. import backends
from ..interfaces import Part
from ..nn.attention import Attention
from ..spec.attention_spec import AttentionSpec
from .symbolic_int import SymbolicInt

BACKENDS_PREFIX = f"{backends.__name__}."


@dataclass
class SavedTensor:
    """One memory that is kept: who kept it, its dtype, the shape of what lies in it, its bytes.

    `core` says that it was kept between queries, keys and values and what is read of them, and nowhere else.
    """

    step: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    in_core: bool

    @staticmethod
    def from_tensor(tensor: Tensor, step: str, core: bool = False) -> SavedTensor:
        """All that lies in the memory of this tensor, of which it may be a part."""
        return SavedTensor(step, tensor.dtype, _storage_shape(tensor), tensor.untyped_storage().nbytes(), core)


class SavedTensorRecorder:
    """Notes what is kept while it is on. Parameters and constants are there anyway and do not count.

    >>> import headwise as hw
    >>> layer, x = hw.Attention(hw.design(model=8, heads=2), backend="dense"), torch.randn(3, 5, 8)
    >>> with SavedTensorRecorder.for_module(layer) as watch:
    ...     y = layer(x)
    >>> watch.total_bytes == 4 * (5 * 3 * 5 * 8 + 2 * 3 * 2 * 5 * 5) + 2 * 5 * 5  # x, q, k, v, o; weights, masks
    True
    """

    def __init__(self, owned: Iterable[Tensor], steps: Mapping[int, str]) -> None:
        self.saved: dict[int, SavedTensor] = {}
        self.named: dict[int, str] = {}  # memories whose name is known better than by who kept them
        self._owned = {storage_address(tensor): tensor for tensor in owned}
        self.handed: Sequence[Tensor] = ()  # what a backend was handed
        self._steps, self._alive = steps, list[Tensor]()  # alive, so that no address is used twice
        self._hooks = saved_tensors_hooks(self._record, _identity)

    @staticmethod
    def for_module(net: nn.Module, spec: AttentionSpec | None = None) -> SavedTensorRecorder:
        """A watch over a module; with the spec of a layer, steps go by the names of its parts."""
        parts = {} if spec is None else {id(part): name for name, part in spec.parts()}
        return SavedTensorRecorder([*net.parameters(), *net.buffers()], parts)

    def __enter__(self) -> SavedTensorRecorder:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    @property
    def total_bytes(self) -> int:
        """All bytes that are kept."""
        return sum(saved.nbytes for saved in self.saved.values())

    def label_storage(self, tensor: Tensor, name: str) -> None:
        """Call this memory so, whoever keeps it."""
        self.named[storage_address(tensor)] = name
        self._alive.append(tensor)

    def _record(self, tensor: Tensor) -> Tensor:
        where = storage_address(tensor)
        if where in self._owned:
            return tensor
        step, core = self._current_part()
        if where in self.saved:
            self.saved[where].in_core &= core
            return tensor
        self._alive.append(tensor)
        self.saved[where] = SavedTensor.from_tensor(tensor, step, core)
        return tensor

    def tensors_by_step(self) -> list[SavedTensor]:
        """What was kept, in order, by the best name there is."""
        for where, saved in self.saved.items():
            saved.step = self.named.get(where, saved.step)
        return list(self.saved.values())

    def tensors_outside_core(self) -> list[SavedTensor]:
        """What would be kept if the core were computed anew on the way back: all but its own, and what it is handed."""
        self.tensors_by_step()
        kept = {where: saved for where, saved in self.saved.items() if not saved.in_core}
        handed = {storage_address(tensor): tensor for tensor in self.handed}
        return [
            *kept.values(),
            *(
                SavedTensor.from_tensor(handed[w], "core.inputs")
                for w in handed
                if w not in kept and w not in self._owned
            ),
        ]

    def _current_part(self) -> tuple[str, bool]:
        """The part and the method of it that is running, asked of the interpreter; and whether in a backend."""
        frame, owner, step, core = sys._getframe(2), None, "", False
        while frame is not None:
            me = frame.f_locals.get("self")
            if isinstance(me, Part) and owner in (None, id(me)):
                owner = id(me)
                step = f"{self._steps.get(owner, type(me).__name__)}.{frame.f_code.co_name}"
            if frame.f_globals.get("__name__", "").startswith(BACKENDS_PREFIX):
                core = True
                self.handed = self.handed or iter_tensors(frame.f_locals.get("inputs"))
            frame = frame.f_back
        return step or ("attend" if core else "layer"), core


def storage_address(tensor: Tensor) -> int:
    """What tells one memory from another, on devices that have none too."""
    return tensor.untyped_storage()._cdata


def iter_tensors(told: Any) -> list[Tensor]:
    """Every tensor in what a call was handed."""
    if isinstance(told, Tensor):
        return [told]
    inside = told.values() if isinstance(told, Mapping) else told if isinstance(told, tuple) else ()
    return [tensor for item in inside for tensor in iter_tensors(item)]


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _storage_shape(tensor: Tensor) -> tuple[int, ...]:
    """The axes of all that lies in the memory of a tensor, of which it may be a part."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    base = tensor._base
    for told in (tensor, *(() if base is None else (base,))):
        if told.numel() == count:
            return tuple(told.shape)
    return (count,)


# --- A layer that runs without memory or numbers, and what autograd would keep of it -------------------

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU_FLASH_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class CallSizes(NamedTuple):
    """Rows, tokens of a row, and tokens of a source, which are those of the row when it reads itself."""

    batch: int
    tokens: int
    source: int


class SavedTensorRun(NamedTuple):
    """What a run keeps, in order, and without the core's own; and whether a fused kernel read the values."""

    saved: Sequence[SavedTensor]
    outside_core: Sequence[SavedTensor]
    is_fused: bool


def record_meta_run(
    spec: AttentionSpec, sizes: CallSizes, backend: str, dtype: str, device: str = "cpu"
) -> SavedTensorRun:
    """A layer of this spec in training on tensors of these sizes, of which only the shapes are there.

    >>> import headwise as hw
    >>> told = record_meta_run(hw.design(model=4096, heads=32), CallSizes(16, 32768, 32768), "sdpa", "bf16")
    >>> [saved.step for saved in told.saved]
    ['input', 'keys', 'queries', 'values', 'logsumexp', 'read']
    """
    with torch.device("meta"):
        layer = Attention(spec, backend=backend).to(TORCH_DTYPES[dtype])
    like = {"dtype": TORCH_DTYPES[dtype], "device": "meta", "requires_grad": True}
    x = torch.empty(sizes.batch, sizes.tokens, spec.model, **like)
    z = None if spec.source is None else torch.empty(sizes.batch, sizes.source, spec.source, **like)
    watch = SavedTensorRecorder.for_module(layer, spec)
    watch.label_storage(x, "input")
    if z is not None:
        watch.label_storage(z, "source")
    kernels = DeviceKernelMode(watch, device)
    with watch, kernels:
        layer(x, source=z)
    return SavedTensorRun(watch.tensors_by_step(), watch.tensors_outside_core(), kernels.fused)


class DeviceKernelMode(TorchFunctionMode):
    """Runs what a device would run where tensors without memory do something else."""

    def __init__(self, watch: SavedTensorRecorder, device: str) -> None:
        super().__init__()
        self.watch, self.cuda, self.fused = watch, device == "cuda", False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if self.cuda and func in _ON_CUDA:
            return _ON_CUDA[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, **how: Any) -> Tensor:
        causal, scale, grouped = (how.get(name) for name in ("is_causal", "scale", "enable_gqa"))
        if not (self.cuda or _uses_fused_kernel((q, k, v), bias, bool(grouped))):
            return F.scaled_dot_product_attention(q, k, v, bias, **how)
        self.fused = True
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.where(bias, 0.0, -torch.inf).to(q.dtype)
        if self.cuda:
            o, lse = _FusedAttention.apply(q, k, v, bias)
        else:
            o, lse = CPU_FLASH_OP(q, k, v, 0.0, bool(causal), attn_mask=bias, scale=scale)
        named = {"queries": q, "keys": k, "values": v, "logsumexp": lse, "read": o}
        named |= {} if bias is None else {"bias": bias}
        for name, tensor in named.items():
            self.watch.label_storage(tensor, name)
        return o


def _uses_fused_kernel(qkv: Sequence[Tensor], bias: Tensor | None, grouped: bool) -> bool:
    """Whether torch would take the fused kernel of the CPU: asked of torch, about tensors of one token."""
    few = [torch.zeros(1, t.shape[1], 1, t.shape[-1], dtype=t.dtype, device="cpu") for t in qkv]
    few = [t.requires_grad_() for t in few]
    mask = None
    if bias is not None:
        mask = torch.zeros(1, 1, 1, 1, dtype=bias.dtype, device="cpu").requires_grad_(bias.requires_grad)
    return bool(torch.ops.aten._fused_sdp_choice(few[0], few[1], few[2], mask, enable_gqa=grouped))


class _FusedAttention(torch.autograd.Function):
    """What the fused kernels of CUDA keep, but for a few bytes of random state and the padding of some."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        batch, heads, tokens, _ = q.shape
        o = q.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)  # token by token, as the merge reads it
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, *(() if bias is None else (bias,)), lse, o)
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("nothing without numbers goes back")


class _FusedRMSNorm(torch.autograd.Function):
    """What the fused RMSNorm of CUDA keeps: the input, one number a row, the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, over: int) -> Tensor:
        scale = x.new_empty(x.shape[: x.dim() - over], dtype=torch.float32)
        ctx.save_for_backward(x, scale, *(() if weight is None else (weight,)))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("nothing without numbers goes back")


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _FusedRMSNorm.apply(x, weight, len(shape))  # pyright: ignore[reportReturnType] - of a Function pyright knows no more


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """One byte for each element, where the CPU keeps one element for each."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


_ON_CUDA: dict[Any, Callable[..., Any]] = {F.rms_norm: _rms_norm, F.dropout: _dropout}

# --- From two runs of different sizes, the formula of each memory --------------------------------------

# Powers of rows, tokens and tokens of a source that one axis may hold, as when axes are laid out as one.
SIZE_POWERS = sorted(product((0, 1), (0, 1, 2), (0, 1, 2)), key=sum)
HEAD_AXES = ("q", "kv", "v", "out", "voice")  # axes that count heads
WIDTH_AXES = ("model", "dim", "vdim", "source")  # axes by which a last axis is called first

BytesByStep = dict[str, int]  # bytes by the step that keeps them, each number knowing its formula


class SymbolicAxes:
    """The sizes of a load under their letters, and of a spec under the names of its axes."""

    def __init__(self, spec: AttentionSpec, load: CallSizes) -> None:
        told, letter = (load.tokens, "s") if spec.source is None else (load.source, "t")
        letters = SymbolicInt.of(load.batch, "b"), SymbolicInt.of(load.tokens, "s"), SymbolicInt.of(told, letter)
        self.load, self.names = CallSizes(*letters), dict(_named_axis_sizes(spec))

    def infer_width(self, size: int, last: bool, rows: bool) -> list[int]:
        """A size that is the same under every load, under the name of its axis where it has one."""
        if last:
            # Only what rows of tokens have may be a number of heads behind everything else: gates, say.
            order = [*WIDTH_AXES, *(name for name in self.names if name not in HEAD_AXES), *(HEAD_AXES if rows else ())]
        else:
            order = [*HEAD_AXES, *self.names]
        told = {name: self.names[name] for name in order if name in self.names}
        for known in told.values():
            if known == size != 1:
                return [known]
        for many, wide in product(HEAD_AXES, told):
            pair = [self.names[n] for n in (many, wide) if n in self.names]
            if len(pair) == 2 and pair[0] * pair[1] == size and 1 not in pair:
                return pair
        return [size]

    def infer_factors(
        self, saved: SavedTensor, other: SavedTensor, sizes: tuple[CallSizes, CallSizes]
    ) -> list[int] | None:
        """What the bytes of one memory of two runs are a product of; None where they are none."""
        if len(saved.shape) != len(other.shape) or saved.dtype != other.dtype:
            return None
        found, rows = [saved.dtype.itemsize], False
        pairs = [pair for pair in zip(saved.shape, other.shape, strict=True) if pair != (1, 1)]
        for n, pair in enumerate(pairs, 1):
            axis = self._axis(pair, sizes, (n == len(pairs), rows))
            if axis is None:
                return None
            found += axis
            rows = rows or self.load.batch in axis
        return found

    def _axis(
        self, pair: tuple[int, int], sizes: tuple[CallSizes, CallSizes], where: tuple[bool, bool]
    ) -> list[int] | None:
        for powers in SIZE_POWERS:
            one, two = (_product_of_powers(each, powers) for each in sizes)
            if pair[0] * two == pair[1] * one and pair[0] % one == 0:
                letters = [size for size, times in zip(self.load, powers, strict=True) for _ in range(times)]
                return letters + self.infer_width(pair[0] // one, *where)
        for n in (1, 2):  # a token more, as of a sink
            more = pair[0] - sizes[0][n]
            if more == pair[1] - sizes[1][n]:
                return [self.load[n] + more]
        return None


def _named_axis_sizes(spec: AttentionSpec) -> Iterator[tuple[str, int]]:
    """Every axis of a spec with its size, and those that are laid end to end."""
    for _, part in spec.parts():
        sizes = spec.sizes_of(part)
        yield from ((name, SymbolicInt.of(size, name)) for name, size in sizes.items() if size > 1)
        layouts = [*(param.layout for param in part.params(spec).values()), *part.kv_entry_layouts(spec).values()]
        for axis in (axis for layout in layouts for axis in layout.axes if "|" in axis):
            size = sum(sizes[name] for name in axis.split("|"))
            yield axis, SymbolicInt.of(size, axis.replace("|", " + "), loose="sum")


def _product_of_powers(sizes: CallSizes, powers: Sequence[int]) -> int:
    total = 1
    for size, times in zip(sizes, powers, strict=True):
        total *= size**times
    return total


def infer_formulas(
    kept: Sequence[SavedTensor], others: Sequence[SavedTensor], axes: SymbolicAxes, sizes: tuple[CallSizes, CallSizes]
) -> BytesByStep | None:
    """The bytes of every step, from two runs; None where these are not alike."""
    if [saved.step for saved in kept] != [other.step for other in others]:
        return None
    found: dict[str, dict[tuple[str, ...], int]] = {}
    for saved, other in zip(kept, others, strict=True):
        factors = axes.infer_factors(saved, other, sizes)
        if factors is None:
            return None
        step, value = found.setdefault(saved.step, {}), _symbolic_product(factors)
        alike = tuple(sorted(factor.text for factor in factors if isinstance(factor, SymbolicInt)))
        step[alike] = step[alike] + value if alike in step else value
    return {name: _symbolic_sum(list(each.values())) for name, each in found.items()}


def _symbolic_product(factors: Sequence[int]) -> int:
    """The product, its letters first."""
    number = 1
    for factor in factors:
        number *= 1 if isinstance(factor, SymbolicInt) else factor
    named: dict[str, SymbolicInt] = {factor.text: factor for factor in factors if isinstance(factor, SymbolicInt)}
    times = Counter(factor.text for factor in factors if isinstance(factor, SymbolicInt))
    order = sorted(named, key=lambda text: (text not in ("b", "s", "t"), text in ("s", "t"), text not in HEAD_AXES))
    total = number
    for text in order:
        total = total * (named[text] if times[text] == 1 else named[text] ** times[text])
    return total


def _symbolic_sum(values: Sequence[int]) -> int:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def sum_bytes_by_step(kept: Sequence[SavedTensor]) -> BytesByStep:
    """The bytes of every step of one run, where any other size is another kind of call."""
    found: BytesByStep = {}
    for saved in kept:
        found[saved.step] = found.get(saved.step, 0) + saved.nbytes
    return found
