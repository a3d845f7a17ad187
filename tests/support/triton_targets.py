"""Compiles the Triton kernels for GPUs that are not there, as launches of these calls would compile
them, and prints registers, spills and shared memory as JSON.

Run by a test in a process of its own for each target, which is the argument, because the
interpreter of Triton replaces its compiler.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class PretendedDriver:
    """Names a target and has no device."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return list(TARGETS.values()).index(self.target)

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def only_compiling(compiled: list[Any]):
    """Launches compile, and run nothing."""
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append(launch(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch


def read_usage(kernel: Any) -> dict[str, Any]:
    """Registers, spilled registers and shared memory of one compiled kernel."""
    usage = {"name": kernel.metadata.name, "shared": kernel.metadata.shared}
    if "amdgcn" in kernel.asm:
        # Scalars that are spilled lie in vector registers; `private_segment` is in memory.
        memory = re.search(r"\.private_segment_fixed_size:\s*(\d+)", kernel.asm["amdgcn"])
        vectors = re.search(r"\.vgpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"])
        registers = re.search(r"\.vgpr_count:\s*(\d+)", kernel.asm["amdgcn"])
        spills = int(memory[1]) + int(vectors[1])
        return {**usage, "registers": int(registers[1]), "spills": spills}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", printed).groups())
    return {**usage, "registers": registers, "spills": stack}


def main() -> None:
    from kernels.triton_cases import launches

    target = TARGETS[sys.argv[1]]
    driver.set_active(PretendedDriver(target))
    torch.version.hip = "6.0" if target.backend == "hip" else None
    rows = []
    for case, launch in launches().items():
        compiled: list[Any] = []
        begun = sum(os.times()[:4])
        with only_compiling(compiled), torch.no_grad():
            launch()
        seconds = sum(os.times()[:4]) - begun
        row = {"case": case, "seconds": seconds}
        print(case, f"{seconds:.1f} s", file=sys.stderr)
        print([read_usage(kernel) for kernel in compiled], file=sys.stderr)
        rows += [row | read_usage(kernel) for kernel in compiled]
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
