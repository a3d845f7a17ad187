"""Decoding of a study's models against context length: time of the prompt and of a step, and bytes
of the KV cache.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..kernels.capabilities import use_threads
from ..kernels.compilation import compile_when_called
from ..models import Transformer, build
from ..models.model_spec import ModelSpec
from ..models.transformer import ModelCache
from ..util.errors import SpecError
from ..util.files import read_json_file, write_atomically
from .cells import CellGrid
from .variant_models import count_cache_bytes

DECODE_FILE = "decoding.json"
CONTEXTS = (64, 256, 1024, 4096)
STEPS = 9  # timed at each context, after one that is not
FORMAT = 1  # grows when other things are measured


def read_decode_times(grid: CellGrid, folder: Path) -> Mapping[str, Any]:
    """Decoding of each variant on the first task with a decoder; measured once, then read from the
    study's folder.

    The result has `task`, and `variants`: by name a list with one record for each context, or a
    note why there is none.
    """
    path = folder / DECODE_FILE
    baseline = grid.study.baseline
    tasks = [
        name for name in grid.study.tasks if grid.models[baseline, name].spec.kind == "decoder"
    ]
    if not tasks:
        return {"task": None, "variants": {}}
    task = tasks[0]
    specs = {name: grid.models[name, task].spec for name in grid.study.variants}
    key = {"format": FORMAT, "task": task}
    if path.exists():
        stored = read_json_file(path)
        if stored.items() >= key.items() and list(stored["variants"]) == list(specs):
            return stored
    measured = {**key, "variants": {name: measure_decoding(spec) for name, spec in specs.items()}}
    write_atomically(path, json.dumps(measured, indent=1).encode() + b"\n")
    return measured


@compile_when_called()
@use_threads(1)
def measure_decoding(
    spec: ModelSpec, contexts: Sequence[int] = CONTEXTS
) -> list[dict[str, Any]] | str:
    """Processor seconds of a prompt and of a decode step, and bytes of the cache, at each context,
    for one row and random weights; or why the model does not decode.
    """
    net = build(spec, seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    records: list[dict[str, Any]] = []
    for context in contexts:
        ids = torch.randint(0, spec.heads[0].outputs, (1, context), generator=generator)
        try:
            if not records:  # the first call compiles kernels
                _measure_context(net, ids)
            records.append(_measure_context(net, ids))
        except (SpecError, ValueError, NotImplementedError) as error:
            return records or str(error)
    return records


@torch.inference_mode()
def _measure_context(net: Transformer, ids: torch.Tensor) -> dict[str, Any]:
    """Times of the prompt `ids` and of a step after it, and bytes of the cache by formula and as
    held.
    """
    capacity = ids.shape[1] + STEPS + 1
    cache = net.cache(batch=1, capacity=capacity)
    prompt = _time_call(net, ids, cache)
    seconds = [_time_call(net, ids[:, :1], cache) for _ in range(STEPS + 1)][1:]
    return {
        "context": ids.shape[1],
        "prompt": prompt,
        "step": statistics.median(seconds),
        "formula": count_cache_bytes(net.spec, capacity),
        "held": cache.nbytes,
    }


def _time_call(net: Transformer, ids: torch.Tensor, cache: ModelCache) -> float:
    start = time.process_time()
    net(ids, cache=cache)
    return time.process_time() - start
