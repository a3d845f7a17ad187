"""Decoding of a study's models against context length: time of the prompt and of a step, and bytes of the KV cache."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..bench.session import use_threads
from ..costs import cache_bytes
from ..errors import SpecError
from ..files import read_json_file, write_atomically
from ..kernels.compilation import compile_when_called
from ..model_spec import ModelSpec
from ..models import build
from .cells import CellGrid

DECODE_FILE = "decoding.json"
CONTEXTS = (64, 256, 1024, 4096)
STEPS = 9  # timed at each context, after one that is not
FORMAT = 1  # grows when other things are measured


def read_decode_times(grid: CellGrid, folder: Path) -> Mapping[str, Any]:
    """Decoding of each variant on the first task with a decoder; measured once, then read from the study's folder.

    The result has `task`, and `variants`: by name a list with one record for each context, or a note why there is none.
    """
    path = folder / DECODE_FILE
    task = next((one.name for one in grid.study.tasks.values() if _is_decoder(grid, one.name)), None)
    if task is None:
        return {"task": None, "variants": {}}
    specs = {name: grid.models[name, task].spec for name in grid.study.variants}
    stored = read_json_file(path) if path.exists() else None
    key = {"format": FORMAT, "task": task}
    if isinstance(stored, dict) and stored.items() >= key.items() and list(stored["variants"]) == list(specs):
        return stored
    measured = {**key, "variants": {name: measure_decoding(spec) for name, spec in specs.items()}}
    write_atomically(path, json.dumps(measured, indent=1).encode() + b"\n")
    return measured


def _is_decoder(grid: CellGrid, task: str) -> bool:
    return grid.models[grid.study.baseline, task].spec.kind == "decoder"


@compile_when_called()
@use_threads(1)
def measure_decoding(spec: ModelSpec, contexts: Sequence[int] = CONTEXTS) -> list[dict[str, Any]] | str:
    """Processor seconds of a prompt and of a decode step, and bytes of the cache, at each context, for one row and
    random weights; or why the model does not decode.
    """
    net = build(spec, seed=0).eval()
    attentions = [attention for _, attention in spec.attention_specs()]
    records: list[dict[str, Any]] = []
    generator = torch.Generator().manual_seed(0)
    for context in contexts:
        try:
            cache = net.cache(batch=1, capacity=context + STEPS + 1)
            formula = sum(cache_bytes(one, batch=1, capacity=context + STEPS + 1) for one in attentions)
            with torch.inference_mode():
                ids = torch.randint(0, spec.heads[0].outputs, (1, context), generator=generator)
                if not records:  # the first call compiles kernels
                    net(ids, cache=net.cache(batch=1, capacity=context))
                prompt = _time_call(net, ids, cache)
                seconds = [_time_call(net, ids[:, :1], cache) for _ in range(STEPS + 1)][1:]
        except (SpecError, ValueError, NotImplementedError) as error:
            if not records:
                return str(error)
            break
        held = sum(one.nbytes for layer in cache.layers for one in layer.values())
        times = {"prompt": prompt, "step": statistics.median(seconds)}
        records.append({"context": context, **times, "formula": formula, "held": held})
    return records


def _time_call(net: Any, ids: torch.Tensor, cache: Any) -> float:
    start = time.process_time()
    net(ids, cache=cache)
    return time.process_time() - start
