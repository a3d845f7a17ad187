"""What a GPU is asked, in one command that installs nothing: `make gpu`.

1. The tests that are marked `gpu`: the contract of the layers on CUDA.
2. Every backend that supports a call, compared with `dense`, and with the same layer as a plain
   module on torch's fused attention. Each call runs once with torch's
   `set_sync_debug_mode("error")`, which raises if the host waits for the device.
3. Tokens per second of a decoder with the shape of GPT-2, and of the same model in transformers if
   it is installed.

It needs torch, numpy and pytest alone. docs/gpu.json, from which docs/gpu.md is made, is written
after every row, so that it is there even if a row hangs or a test fails. `--dry-run` runs all of it
with few tokens on the pretended device of the tests, and keeps no results.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import headwise as hw
from headwise.attention import backends
from headwise.attention.backends import CallSignature
from headwise.costs.roofline import time_run

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "gpu.json"
TESTS = ("-m", "gpu", "tests/contract/test_gpu.py", "tests/contract/test_device.py")
DRY_TESTS = ("-k", "pretend", "tests/contract/test_device.py")
TEST_SECONDS = 240
WIDTH = 512
HEADS = 8
PROMPT_TOKENS = 64
DECODER = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257}


class Sizes(NamedTuple):
    """How much is measured: tokens of a sequence, seconds of a row, tokens that the decoder
    generates, and its config.
    """

    tokens: int = 2048
    seconds: float = 0.3
    new_tokens: int = 128
    decoder: Mapping[str, Any] = DECODER


SIZES = Sizes()
DRY_SIZES = Sizes(64, 0.0, 4, DECODER | {"n_embd": 96, "n_layer": 2, "vocab_size": 101})
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
WITH_PEER = ("plain heads, causal", "grouped heads, causal")
PEER = "plain module on torch's SDPA"


def measure_spec(
    name: str, dtype: torch.dtype, device: str, sizes: Sizes = SIZES
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
    x = torch.randn(1, sizes.tokens, WIDTH, device=device, dtype=dtype)
    with torch.no_grad():
        expected = judge(x).float()
        runs: dict[str, Callable[[], torch.Tensor]] = {}
        for backend in supported:
            layer = hw.Attention(spec, backend=backend).to(device, dtype).eval()
            layer.load_state_dict(judge.state_dict())
            runs[backend] = partial(layer, x)
        if name in WITH_PEER:
            runs[PEER] = partial(plain_layer, judge, x)
        return [
            {"backend": run, **_measure(runs[run], expected, dtype, sizes.seconds)} for run in runs
        ]


def plain_layer(layer: hw.Attention, x: torch.Tensor) -> torch.Tensor:
    """Causal attention with the weights of a layer, as one writes it by hand on torch alone."""
    heads = layer.spec.heads
    weights = layer.state_dict()
    batch, tokens, _ = x.shape
    q, k, v = (
        F.linear(x, weights[f"project.{name}"]).view(batch, tokens, count, -1).transpose(1, 2)
        for name, count in (("q", heads.q), ("k", heads.kv), ("v", heads.kv))
    )
    is_grouped = heads.kv != heads.q
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
    return F.linear(o.transpose(1, 2).flatten(2), weights["output.o"])


def _measure(
    run: Callable[[], torch.Tensor], expected: torch.Tensor, dtype: torch.dtype, max_seconds: float
) -> dict[str, Any]:
    try:
        error = float((run().float() - expected).abs().max() / expected.abs().max())
        waits = expected.is_cuda and _waits_for_device(run)
        seconds = time_run(run, max_seconds)
    except Exception as failure:  # what does not run is reported
        return {"failed": describe_failure(failure)}
    return {
        "seconds": seconds,
        "error": error,
        "is_right": error <= TOLERANCE[dtype],
        "waits": waits,
    }


def describe_failure(failure: Exception) -> str:
    """Return an exception in one line of at most 160 characters."""
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:160]


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


def decode_greedily(
    net: hw.Transformer,
    ids: torch.Tensor,
    new_tokens: int,
    step: Callable[..., torch.Tensor] | None = None,
    kind: str = "smallest",
) -> torch.Tensor:
    """Continue ids [1, tokens], one token a step; `hw.generate` would need a package more."""
    cache = net.cache(batch=1, capacity=ids.shape[1] + new_tokens, kind=kind)
    generated = [ids]
    for number in range(new_tokens):
        logits = (step if step and number else net)(generated[-1], cache=cache)
        generated.append(logits[:, -1:].argmax(-1))
    return torch.cat(generated, 1)


def measure_decoding(device: str, sizes: Sizes = SIZES) -> dict[str, float]:
    """Tokens per second of one sequence in bfloat16, ours and that of transformers if it is there;
    the weights are random.
    """
    config = dict(sizes.decoder)
    new_tokens = sizes.new_tokens
    net = hw.build(hw.families.read_model_spec(config), seed=0).to(device, torch.bfloat16).eval()
    ids = torch.ones(1, PROMPT_TOKENS, dtype=torch.long, device=device)
    run: dict[str, Callable[[], Any]] = {"headwise": lambda: decode_greedily(net, ids, new_tokens)}
    if device == "cuda":
        step = torch.compile(net, mode="reduce-overhead")
        run["headwise, compiled"] = lambda: decode_greedily(net, ids, new_tokens, step, "static")
    if find_spec("transformers") is not None:
        import transformers

        more = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config | more))
        model = model.to(device, torch.bfloat16).eval()
        lengths = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        run["transformers"] = lambda: model.generate(ids, do_sample=False, **lengths)
    with torch.no_grad():
        return {name: new_tokens / time_run(call, sizes.seconds) for name, call in run.items()}


def run_tests(selection: Sequence[str]) -> dict[str, Any]:
    """Run these tests in a process; return the last line that pytest prints."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *selection], cwd=ROOT, timeout=TEST_SECONDS, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return {"result": f"not finished after {TEST_SECONDS} s", "passed": False, "failed": []}
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-160:]]
    failed = [line[:160] for line in lines if re.match("FAILED|ERROR", line)]
    print(*failed, lines[-1], sep="\n", file=sys.stderr)
    return {"result": lines[-1], "passed": done.returncode == 0, "failed": failed[:20]}


def main(
    device: str = "cuda",
    results: Path = RESULTS,
    sizes: Sizes = SIZES,
    tests: Sequence[str] = TESTS,
) -> int:
    """Run all three steps on a GPU; the exit code is 1 if a test or a row failed."""
    if device == "cuda" and not torch.cuda.is_available():
        print(
            "cannot run on a GPU: torch finds no CUDA device. Install a build of torch with CUDA.",
            file=sys.stderr,
        )
        return 1
    name = torch.cuda.get_device_name() if device == "cuda" else device
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "device": name,
        "torch": torch.__version__,
        "tokens": sizes.tokens,
        "tests": run_tests(tests),
        "rows": rows,
    }
    for layer in SPECS:
        for dtype in TOLERANCE:
            label = str(dtype).removeprefix("torch.")
            try:
                found = measure_spec(layer, dtype, device, sizes)
            except Exception as failure:  # without `dense` there is nothing to compare with
                found = [{"backend": "dense", "failed": describe_failure(failure)}]
            rows += [{"layer": layer, "dtype": label, **one} for one in found]
            results.write_text(json.dumps(report, indent=1) + "\n")
            print(f"{layer}, {label}", file=sys.stderr)
    try:
        report["decoding"] = measure_decoding(device, sizes)
    except Exception as failure:  # what does not run is reported
        report["decoding"] = {"failed": describe_failure(failure)}
    results.write_text(json.dumps(report, indent=1) + "\n")
    is_right = all(row.get("is_right") for row in rows) and "failed" not in report["decoding"]
    return 0 if is_right and report["tests"]["passed"] else 1


def dry_run(sizes: Sizes = DRY_SIZES, tests: Sequence[str] = DRY_TESTS) -> int:
    """Run all three steps on a pretended device; its times mean nothing, so they are not kept."""
    from support.pretended_device import NAME, pretended_device

    with TemporaryDirectory() as folder, pretended_device():
        results = Path(folder) / RESULTS.name
        code = main(NAME, results, sizes, tests)
        rows = json.loads(results.read_text())["rows"]
    right = sum(row.get("is_right", False) for row in rows)
    print(f"dry run: {right} of {len(rows)} rows are right; no results were kept", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(dry_run() if sys.argv[1:] == ["--dry-run"] else main())
