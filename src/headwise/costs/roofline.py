"""What machines can do at most, from a table, and what follows from it: the roofline."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import SpecError, suggest
from ..files import write_atomically
from ..interfaces.core_types import CallSize
from .flops import AttentionComponent, ForwardCall, ModelComponent, cached_numbers

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
STORAGE_BYTES = DTYPE_BYTES | {"int8": 1}
SCALE_BYTES = 4  # bytes of the float32 number that a row of int8 is multiplied with
THIS_MACHINE = "here"
HARDWARE_TABLE = tomllib.loads(files("headwise.costs").joinpath("hardware.toml").read_text())


@dataclass(frozen=True)
class Device:
    """FLOPs a second by precision, bytes a second, bytes of memory."""

    name: str
    description: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    kind: str = "cuda"  # what torch calls it

    @staticmethod
    def from_name(name: str) -> Device:
        """The machine of this name; "here" is the one that runs this, measured when first asked for.

        >>> round(Device.from_name("h200").ridge_point("bf16"), 1)
        206.0
        """
        if name == THIS_MACHINE:
            return get_this_machine()
        if name not in HARDWARE_TABLE:
            raise SpecError(f"there is no device {name!r}; {suggest(name, [*HARDWARE_TABLE, THIS_MACHINE])}")
        row = HARDWARE_TABLE[name]
        flops = {"bf16": row["bf16"] * 1e12, "fp16": row["bf16"] * 1e12, "fp32": row["fp32"] * 1e12}
        return Device(name, row["what"], flops, row["gbps"] * 1e9, row["gb"] * 1e9, row.get("kind", "cuda"))

    def with_efficiency(self, compute: float = 1.0, bandwidth: float = 1.0) -> Device:
        """The same machine when programs reach only these shares of its products and of its bandwidth.

        >>> Device.from_name("h200").with_efficiency(compute=0.5).flops["bf16"]
        494500000000000.0
        """
        for name, share in (("products", compute), ("memory", bandwidth)):
            if not 0 < share <= 1:
                raise SpecError(f"{name}={share!r} is no share of what a machine can do; give more than 0, at most 1")
        flops = {dtype: rate * compute for dtype, rate in self.flops.items()}
        less = [
            f"{share:.0%} of its {name}"
            for name, share in (("products", compute), ("bandwidth", bandwidth))
            if share < 1
        ]
        what = f"{self.description}, reaching {' and '.join(less)}" if less else self.description
        return replace(self, description=what, flops=flops, bandwidth=self.bandwidth * bandwidth)

    def ridge_point(self, dtype: str) -> float:
        """FLOPs a byte at which products begin to take longer than memory."""
        return self.flops[dtype] / self.bandwidth

    def compute_bound_tokens(self, dtype: str, weights: str = "") -> float:
        """Tokens in a step from which a product with a matrix waits for compute, its in- and output left out.

        Two FLOPs for each number of the matrix and token, against the bytes of that number:

        >>> [round(Device.from_name(name).compute_bound_tokens("bf16")) for name in ("a100", "h100", "h200")]
        [153, 295, 206]
        >>> round(Device.from_name("h100").compute_bound_tokens("bf16", weights="int8"))  # half as many bytes
        148
        """
        return self.ridge_point(dtype) * STORAGE_BYTES[weights or dtype] / 2

    def min_seconds(self, flops: int, moved: int, dtype: str) -> float:
        """Seconds at least: products and memory overlap at best."""
        return max(flops / self.flops[dtype], moved / self.bandwidth)

    def limiting_resource(self, flops: int, moved: int, dtype: str) -> str:
        """Which of the two it waits for."""
        return "compute" if flops / self.flops[dtype] >= moved / self.bandwidth else "memory"


@dataclass(frozen=True)
class NumberFormats:
    """How numbers are held: those that products are made of, those of weights, and those that are remembered.

    Weights and cache are held as products are made unless said; int8 has a float32 scale for each row.

    >>> NumberFormats("bf16", cache="int8")
    NumberFormats(compute='bf16', weights='bf16', cache='int8')
    """

    compute: str = "bf16"
    weights: str = ""
    cache: str = ""

    def __post_init__(self) -> None:
        dtype_bytes(self.compute)
        for name in ("weights", "cache"):
            said = getattr(self, name) or self.compute
            if said not in STORAGE_BYTES:
                raise SpecError(f"{name}={said!r} is unknown; {suggest(said, STORAGE_BYTES)}")
            object.__setattr__(self, name, said)


def dtype_bytes(dtype: str) -> int:
    """Bytes of one number that products are made of.

    >>> dtype_bytes("bf16")
    2
    """
    if dtype not in DTYPE_BYTES:
        raise SpecError(f"dtype={dtype!r} is unknown; {suggest(dtype, DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def stored_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a tensor held so; of int8 each row along the last axis has a scale.

    Keys of 8 heads and 128 channels, of one token:

    >>> stored_bytes((8, 128), "bf16"), stored_bytes((8, 128), "int8")
    (2048, 1056)
    """
    scales = SCALE_BYTES * math.prod(shape[:-1]) if STORAGE_BYTES[dtype] == 1 else 0
    return math.prod(shape) * STORAGE_BYTES[dtype] + scales


DEFAULT_FORMATS = NumberFormats()

# --- The machine that runs this, measured --------------------------------------------------------------

MEASURE_SECONDS = 0.25  # of one measurement: there are about ten
MATRIX_SIZES = (
    128,
    512,
    2048,
    8192,
)  # rows of the matrices that are multiplied, while the next would not take too long
COPY_BYTES = 2**28  # bytes, more than processors keep near themselves
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CGROUP_MEMORY_FILE = Path("/sys/fs/cgroup/memory.max")
AGE_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"))
_MEASURED_DEVICES: dict[str, Device] = {}  # measured in this process already, or read from the user's folder


@dataclass(frozen=True)
class DeviceMeasurement:
    """What was found of a machine, and when, in seconds since 1970."""

    machine: str
    flops: dict[str, float]
    bandwidth: float
    memory: float
    when: float
    kind: str = "cpu"

    def to_device(self, now: float, note: str = "") -> Device:
        """As a row of the table, with its age."""
        what = f"this machine ({self.machine}), measured {format_age(now - self.when)}{note}"
        return Device(THIS_MACHINE, what, self.flops, self.bandwidth, self.memory, self.kind)


def get_this_machine() -> Device:
    """This machine as it was measured last, by this process or an earlier one; measured now where it was not."""
    name = _machine_name()
    if name not in _MEASURED_DEVICES:
        found = _read_measurement(name)
        _MEASURED_DEVICES[name] = (
            _store_measurement(measure_machine(name)) if found is None else found.to_device(time.time())
        )
    return _MEASURED_DEVICES[name]


def remeasure_this_machine() -> Device:
    """This machine, measured now, whatever was known of it."""
    name = _machine_name()
    _MEASURED_DEVICES[name] = _store_measurement(measure_machine(name))
    return _MEASURED_DEVICES[name]


def format_age(seconds: float) -> str:
    """How long ago that was.

    >>> format_age(5), format_age(7200), format_age(86400 * 3.5)
    ('just now', '2 hours ago', '3 days ago')
    """
    for unit, name in AGE_UNITS:
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"


def _machine_name() -> str:
    """What measurements belong to: the processor, how many threads torch uses of it, and torch."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{processor_name()}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"


def processor_name() -> str:
    """The name of the processor, as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _measurement_path(machine: str) -> Path:
    return Path.home() / ".cache" / "headwise" / f"machine-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"


def _read_measurement(machine: str) -> DeviceMeasurement | None:
    """What was kept of this machine; nothing where that is missing, of another, or damaged."""
    try:
        told: dict[str, Any] = json.loads(_measurement_path(machine).read_text())
        found = DeviceMeasurement(**told)
        rates = [*found.flops.values(), found.bandwidth, found.memory, found.when]
        sound = all(isinstance(rate, float) and math.isfinite(rate) and rate > 0 for rate in rates)
        whole = (
            sound
            and set(found.flops) == set(DTYPE_BYTES)
            and found.machine == machine
            and found.kind in ("cpu", "cuda")
        )
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError):  # RuntimeError: there is no home
        return None
    return found if whole else None


def _store_measurement(found: DeviceMeasurement) -> Device:
    """Written into the user's folder where that can be; where it cannot, the device says so."""
    try:
        path = _measurement_path(found.machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(found)).encode())
    except (OSError, RuntimeError) as error:
        reason = str(error).partition(";")[0]
        return found.to_device(found.when, f", not kept for the next time: {reason}")
    return found.to_device(found.when)


def measure_machine(machine: str) -> DeviceMeasurement:
    """A large product for each precision, the faster of a large copy and a large sum, and the memory there is."""
    kind = accelerator_type()
    memory = float(torch.cuda.mem_get_info()[1] if kind == "cuda" else _available_memory())
    flops = {name: _measure_matmul_flops(dtype) for name, dtype in TORCH_DTYPES.items()}
    numbers = torch.ones(int(min(COPY_BYTES, memory / 16)) // 4, device=kind)
    copy = torch.empty_like(numbers)
    copied = 2 * numbers.nbytes / time_run(lambda: copy.copy_(numbers), MEASURE_SECONDS)
    return DeviceMeasurement(
        machine,
        flops,
        max(copied, numbers.nbytes / time_run(numbers.sum, MEASURE_SECONDS)),
        memory,
        time.time(),
        kind,
    )


def _measure_matmul_flops(dtype: torch.dtype) -> float:
    """FLOPs a second of square matrices, of the largest that do not take too long."""
    found = 0.0
    for size in MATRIX_SIZES:
        if found and 2 * size**3 > found * MEASURE_SECONDS:
            break
        a, b = (torch.randn(size, size, device=accelerator_type()).to(dtype) for _ in range(2))
        found = max(found, 2 * size**3 / time_run(lambda a=a, b=b: a @ b, MEASURE_SECONDS))
    return found


def time_run(run: Callable[[], Any], max_seconds: float) -> float:
    """Seconds of one run, at best of as many as the time allows, after one that does not count."""
    run()
    synchronize_device()
    begun, best = time.perf_counter(), math.inf
    while True:
        start = time.perf_counter()
        run()
        synchronize_device()
        now = time.perf_counter()
        best = min(best, max(now - start, 1e-9))
        if now - begun >= max_seconds:
            return best


def accelerator_type() -> str:
    """The kind of device that is measured: a GPU where torch has one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize_device() -> None:
    """Until a GPU has done all it was asked for; others have."""
    if accelerator_type() == "cuda":
        torch.cuda.synchronize()


def _available_memory() -> int:
    """Bytes of memory, or of the share that a container may use."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(whole, int(CGROUP_MEMORY_FILE.read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return whole


# --- The roofline --------------------------------------------------------------------------------------

OPERATION_LABELS = {"feed": "feed-forward"}  # of what is not named by its role


@dataclass(frozen=True)
class RooflineOperation:
    """One part of a call: its FLOPs, the bytes it moves, and what follows on a machine."""

    name: str
    flops: int
    moved: int
    seconds: float
    bound: str

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.moved if self.moved else 0.0


class LayerOperation(NamedTuple):
    """One operation of one layer, and how many layers have it."""

    name: str
    flops: int
    bytes_moved: int
    num_layers: int


def list_operations(
    components: Iterable[ModelComponent], call: ForwardCall, dtype: str, device: str
) -> tuple[RooflineOperation, ...]:
    """Every operation of a call, that of all layers as one; layers run one after another."""
    every = [
        part
        for piece in components
        for part in _component_operations(piece, call, dtype_bytes(dtype))
        if part.flops or part.bytes_moved
    ]
    machine = Device.from_name(device)
    return tuple(
        _combine_layers(name, [part for part in every if part.name == name], machine, dtype)
        for name in dict.fromkeys(part.name for part in every)
    )


def merge_operations(name: str, some: Iterable[RooflineOperation]) -> RooflineOperation:
    """Several operations one after another; they wait for what most of the time is waited for."""
    every = list(some)
    waits = {bound: sum(one.seconds for one in every if one.bound == bound) for bound in ("compute", "memory")}
    return RooflineOperation(
        name,
        sum(one.flops for one in every),
        sum(one.moved for one in every),
        sum(one.seconds for one in every),
        max(waits, key=waits.__getitem__),
    )


def _combine_layers(name: str, parts: list[LayerOperation], machine: Device, dtype: str) -> RooflineOperation:
    return merge_operations(
        name,
        [
            RooflineOperation(
                name,
                part.num_layers * part.flops,
                part.num_layers * part.bytes_moved,
                part.num_layers * machine.min_seconds(part.flops, part.bytes_moved, dtype),
                machine.limiting_resource(part.flops, part.bytes_moved, dtype),
            )
            for part in parts
        ],
    )


def _component_operations(piece: ModelComponent, call: ForwardCall, each: int) -> Iterator[LayerOperation]:
    if not isinstance(piece, AttentionComponent):
        flops = sum(one.flops for one in piece.required_products(call))
        yield LayerOperation(
            OPERATION_LABELS.get(piece.role, piece.role), flops, each * piece.numbers_moved(call), piece.times
        )
        return
    work, spec = piece.work(call), piece.spec
    every = list(piece.required_products(call))
    core = sum(one.flops for one in every if one.name.startswith("core"))
    around = sum(one.flops for one in every) - core
    spoken = work.queries * (spec.heads.q * spec.core.dim + len(spec.score_head_of_row) * spec.core.vdim)
    told = work.new_tokens * spec.source if spec.source else 0
    moved = each * (piece.num_weights_read(call) + work.batch * (work.queries * 2 * spec.model + told))
    yield LayerOperation(f"{piece.role} projections", around, moved, piece.times)
    read = work.batch * (_cached_bytes_read(piece, work, call, each) + each * spoken)
    yield LayerOperation(f"{piece.role} core", core, read, piece.times)


def _cached_bytes_read(piece: AttentionComponent, work: CallSize, call: ForwardCall, each: int) -> int:
    """Bytes that one row reads of what is remembered: each token once, or its state in and out."""
    spec, heads = piece.spec, piece.spec.heads
    kept = cached_numbers(spec).total
    if spec.is_recurrent and call.mode == "steps":
        return 2 * kept * max(each, 4) * work.queries
    return work.keys * each * (heads.kv * heads.dim + heads.num_value_heads * heads.vdim if spec.is_recurrent else kept)
