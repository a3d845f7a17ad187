"""Run every backend that supports a call on CUDA, compare it with `dense`, and write docs/gpu.json
for docs/gpu.md.

Each call runs once with torch's `set_sync_debug_mode("error")`, which raises if the host waits for
the device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from headwise.attention import backends
from headwise.attention.backends import CallSignature
from headwise.costs.roofline import time_run

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "gpu.json"
TOKENS = 2048
WIDTH = 512
HEADS = 8
SECONDS = 0.3
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 4e-2}  # of the largest number
SPECS: dict[str, dict[str, Any]] = {
    "plain heads, causal": {"pattern": "causal()"},
    "grouped heads, causal": {"preset": "gqa", "modifiers": (), "pattern": "causal()"},
    "a window of 128": {"pattern": "window(128)"},
    "ALiBi": {"pattern": "causal()", "modifiers": (hw.parts.Alibi(),)},
    "a soft cap": {"pattern": "causal()", "modifiers": (hw.parts.Softcap(20.0),)},
    "mixture of heads": {"preset": "moh"},
    "DCMHA": {"preset": "dcmha"},
    "entmax": {"preset": "entmax", "pattern": "causal()"},
    "linear attention": {"preset": "linear"},
}


def measure_spec(
    name: str, dtype: torch.dtype, device: str, tokens: int = TOKENS
) -> list[dict[str, Any]]:
    """The result of every backend that supports whole sequences of this kind of layer."""
    spec = hw.design(model=WIDTH, heads=HEADS, **SPECS[name])
    core = spec.core_of(spec.projection_form(False))
    reasons = backends.unsupported_reasons_by_backend(
        CallSignature(spec, core, device=device, dtype=dtype)
    )
    supported = [
        backend
        for backend, found in reasons.items()
        if not found and (device == "cuda" or backend != "flex")
    ]
    judge = hw.Attention(spec, backend="dense").to(device, dtype).eval()
    x = torch.randn(1, tokens, WIDTH, device=device, dtype=dtype)
    with torch.no_grad():
        expected = judge(x).float()
        return [_measure_backend(backend, judge, x, expected) for backend in supported]


def _measure_backend(
    backend: str, judge: hw.Attention, x: torch.Tensor, expected: torch.Tensor
) -> dict[str, Any]:
    layer = hw.Attention(judge.spec, backend=backend).to(x.device, x.dtype).eval()
    layer.load_state_dict(judge.state_dict())
    try:
        error = float((layer(x).float() - expected).abs().max() / expected.abs().max())
        waits = x.is_cuda and _waits_for_device(lambda: layer(x))
        seconds = time_run(lambda: layer(x), SECONDS)
    except Exception as failure:  # what does not run is reported
        return {
            "backend": backend,
            "failed": " ".join(f"{type(failure).__name__}: {failure}".split())[:160],
        }
    is_right = error <= TOLERANCE[x.dtype]
    return {
        "backend": backend,
        "seconds": seconds,
        "error": error,
        "is_right": is_right,
        "waits": waits,
    }


def _waits_for_device(run: Callable[[], Any]) -> bool:
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def main() -> int:
    """Measure all kinds of layers in float32 and bfloat16."""
    if not torch.cuda.is_available():
        print(
            "cannot run on a GPU: torch finds no CUDA device. Install a build of torch with CUDA.",
            file=sys.stderr,
        )
        return 1
    rows = []
    for name in SPECS:
        for dtype in TOLERANCE:
            label = str(dtype).removeprefix("torch.")
            rows += [
                {"layer": name, "dtype": label, **one} for one in measure_spec(name, dtype, "cuda")
            ]
            print(f"{name}, {label}", file=sys.stderr)
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "tokens": TOKENS}
    RESULTS.write_text(json.dumps(device | {"rows": rows}, indent=1) + "\n")
    return 0 if all(row.get("is_right") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
