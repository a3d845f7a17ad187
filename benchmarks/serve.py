"""Many requests at once: ours, transformers' `generate` on the padded batch of the same weights,
and what is predicted.

`python -m benchmarks.serve` prints one JSON document: 64 requests of lognormal lengths answered
both ways, requests of equal lengths answered three ways, steps of 1 to 64 rows beside their price,
and for 1 row and 64 where the time of a step goes. A number says how many threads.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import headwise as hw
from headwise.costs.roofline import Device, RooflineOperation, measure_this_machine
from headwise.kernels.compilation import compile_when_called
from headwise.models.families import read_model_spec

CONFIG = {
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
REQUESTS = 64
SEED = 0
PROMPTS, ANSWERS = (
    (40, 0.8, 256),
    (40, 1.0, 512),
)  # tokens: the median, the deviation of its logarithm, the most
BUDGET = 2**26
ROWS, PROMPT, STEPS = (64, 32, 16, 8, 4, 2, 1), 224, 8  # of the steps that are measured one by one
# Ours, by transformers' names of the same tensors.
OUTSIDE = {
    "decoder.embedding.tokens": "model.embed_tokens",
    "decoder.norm": "model.norm",
    "head.tokens": "lm_head",
}
INSIDE = {
    "attention.project.q": "self_attn.q_proj",
    "attention.project.k": "self_attn.k_proj",
    "attention.project.v": "self_attn.v_proj",
    "attention.output.o": "self_attn.o_proj",
    "feed.gate": "mlp.gate_proj",
    "feed.up": "mlp.up_proj",
    "feed.down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "feed_norm": "post_attention_layernorm",
}
EQUAL = (
    (64, 64, 32),
    (32, 64, 64),
    (4, 256, 48),
)  # rows, tokens of each prompt, tokens of each answer
# of requests of equal lengths: each way once in a round, and the fastest of all rounds counts
ROUNDS = 3
KERNELS = {
    "weights": ("headwise::small_batch_matmul", "aten::mm", "aten::addmm", "aten::bmm"),
    "gather": ("aten::index_select",),
}
CORE = ("aten::_scaled_dot_product", "headwise::paged_decode")


def draw_requests() -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens each asks for."""
    generator = torch.Generator().manual_seed(SEED)
    lengths = [
        (torch.randn(REQUESTS, generator=generator) * sigma + math.log(median))
        .exp()
        .long()
        .clamp(4, most)
        .tolist()
        for median, sigma, most in (PROMPTS, ANSWERS)
    ]
    vocabulary = CONFIG["vocab_size"]
    prompts = [
        torch.randint(vocabulary, (count,), generator=generator).tolist() for count in lengths[0]
    ]
    return list(zip(prompts, lengths[1], strict=True))


def build_models() -> tuple[hw.Transformer, Any]:
    """Models with equal weights in both libraries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = hw.build(read_model_spec(CONFIG), seed=SEED).eval()
    config = {name: value for name, value in CONFIG.items() if name != "model_type"}
    theirs = LlamaForCausalLM(
        LlamaConfig(**config, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    ).eval()
    state = {
        _theirs(name): tensor
        for name, tensor in ours.state_dict().items()
        if not name.endswith("frequency")
    }
    theirs.load_state_dict(state)
    return ours, theirs


def _theirs(name: str) -> str:
    name = name.removesuffix(".weight")
    if name in OUTSIDE:
        return f"{OUTSIDE[name]}.weight"
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{INSIDE[rest]}.weight"


class Watch:
    """Wall-clock and processor seconds since it was made."""

    def __init__(self) -> None:
        self.begun = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """Since it was made."""
        return {
            "seconds": time.perf_counter() - self.begun[0],
            "processor": time.process_time() - self.begun[1],
        }


def run_engine(
    net: hw.Transformer, requests: list[tuple[list[int], int]]
) -> tuple[dict[str, float], Any, hw.Engine]:
    """Times, the generated ids, and the engine."""
    engine = hw.Engine(net, budget=BUDGET)
    watch = Watch()
    streams = [engine.submit(prompt, max_new_tokens=count) for prompt, count in requests]
    engine.finish_requests()
    return watch.read(), [stream.ids for stream in streams], engine


def run_padded_batch(
    net: Any, requests: list[tuple[list[int], int]]
) -> tuple[dict[str, float], list[list[int]]]:
    """The same requests by `generate` on one left-padded batch; each answer is cut to its requested
    length.
    """
    widest = max(len(prompt) for prompt, _ in requests)
    ids = torch.tensor([[0] * (widest - len(prompt)) + prompt for prompt, _ in requests])
    mask = torch.tensor(
        [[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests]
    )
    watch = Watch()
    with torch.no_grad():
        generated_ids = net.generate(
            ids, attention_mask=mask, max_new_tokens=max(n for _, n in requests), do_sample=False
        )
    spent = watch.read()
    return spent, [
        row[widest : widest + n]
        for row, (_, n) in zip(generated_ids.tolist(), requests, strict=True)
    ]


def compare_with_transformers(ours: hw.Transformer, theirs: Any, here: Device) -> dict[str, Any]:
    """Run ours, transformers, and ours again; before that a few requests, so that no kernel is
    compiled on the way.
    """
    requests = draw_requests()
    run_engine(ours, [(prompt, 4) for prompt, _ in requests[:8]])
    first, generated_ids, engine = run_engine(ours, requests)
    theirs_took, other = run_padded_batch(theirs, requests)
    again, _, _ = run_engine(ours, requests)
    ours_took = {name: statistics.mean((first[name], again[name])) for name in first}
    tokens = sum(n for _, n in requests)
    report = engine.report()
    longest = max(len(prompt) for prompt, _ in requests) + max(n for _, n in requests)
    return {
        "requests": REQUESTS,
        "prompt_tokens": sum(len(prompt) for prompt, _ in requests),
        "tokens": tokens,
        "longest_answer": max(n for _, n in requests),
        "ours": ours_took
        | {"tokens_per_second": tokens / ours_took["seconds"], "report": report.data},
        "transformers": theirs_took | {"tokens_per_second": tokens / theirs_took["seconds"]},
        "ratio": {name: theirs_took[name] / ours_took[name] for name in ours_took},
        "same_answers": sum(a == b for a, b in zip(generated_ids, other, strict=True)),
        "bytes": {
            "budget": BUDGET,
            "allocated": engine.memory.nbytes,
            "peak": report.peak_bytes,
            "padded_batch": hw.cost(ours.spec, hw.Workload(REQUESTS, longest, "fp32"))
            .estimates[0]
            .cache_bytes,
        },
    }


def compare_equal_lengths(ours: hw.Transformer, theirs: Any) -> list[dict[str, Any]]:
    """Requests of equal lengths, where a padded batch has no padding: the engine, `hw.generate` and
    transformers.

    Other work on the machine can only add time, so each way counts with the least of its rounds.
    """
    results = []
    for rows, length, count in EQUAL:
        generator = torch.Generator().manual_seed(SEED)
        ids = torch.randint(1, CONFIG["vocab_size"], (rows, length), generator=generator).tolist()
        requests = [(prompt, count) for prompt in ids]
        best: dict[str, dict[str, float]] = {}
        answers: dict[str, list[list[int]]] = {}
        for _ in range(ROUNDS):
            spent, answers["engine"], _ = run_engine(ours, requests)
            took = {"engine": spent}
            took["transformers"], answers["transformers"] = run_padded_batch(theirs, requests)
            watch = Watch()
            answers["generate"] = hw.generate(ours, ids, max_new_tokens=count)
            took["generate"] = watch.read()
            for name, times in took.items():
                least = best.setdefault(name, times)
                best[name] = {kind: min(least[kind], times[kind]) for kind in times}
        same = sum(a == b == c for a, b, c in zip(*answers.values(), strict=True))
        results.append(
            {"rows": rows, "prompt": length, "tokens": count, "same_answers": same, "best": best}
        )
    return results


def steps(net: hw.Transformer, here: Device) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps in which every row gets a token, by the number of rows; and of the most and the fewest,
    what they do.
    """
    generator = torch.Generator().manual_seed(SEED)
    engine = hw.Engine(
        net, budget=2**28, batching=hw.generation.BatchingConfig(rows=ROWS[0], chunk=2048)
    )
    prompts = torch.randint(CONFIG["vocab_size"], (ROWS[0], PROMPT), generator=generator).tolist()
    streams = [engine.submit(prompt, max_new_tokens=PROMPT) for prompt in prompts]
    while not all(stream.ids for stream in streams):
        engine.step()
    scaling = []
    parts = []
    for rows in ROWS:
        for stream in streams[rows:]:
            stream.cancel()
        engine.step()
        seconds = statistics.median(_timed(engine) for _ in range(STEPS))
        context = round(engine.report().steps[-1].context / rows)
        workload = hw.Workload(rows, context, "fp32", "here")
        step = hw.cost(net.spec, workload).estimates[0].operations["decode"]
        predicted = sum(operation.seconds for operation in step)
        scaling.append(
            {
                "rows": rows,
                "context": context,
                "step_seconds": seconds,
                "tokens_per_second": rows / seconds,
                "predicted_seconds": predicted,
                "predicted_tokens_per_second": rows / predicted,
            }
        )
        if rows in (ROWS[0], ROWS[-1]):
            parts += _parts(engine, rows, step, here)
    return scaling, parts


def _timed(engine: hw.Engine) -> float:
    begun = time.perf_counter()
    engine.step()
    return time.perf_counter() - begun


def _parts(
    engine: hw.Engine, rows: int, step: Iterable[RooflineOperation], here: Device
) -> list[dict[str, Any]]:
    """Where the time of a step goes: products with weights, which rows share, and the core, which
    they do not.
    """
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(STEPS):
            engine.step()
    taken = _taken(seen, STEPS)
    found = []
    for name in ("weights", "core"):
        operations = [one for one in step if one.name.endswith("core") == (name == "core")]
        flops = sum(one.flops for one in operations)
        moved = sum(one.moved for one in operations)
        found.append(
            {
                "rows": rows,
                "part": name,
                "flops": flops,
                "bytes": moved,
                "intensity": flops / moved,
                "seconds": taken[name],
                "predicted_seconds": sum(one.seconds for one in operations),
                "flops_per_second": flops / taken[name],
                "bytes_per_second": moved / taken[name],
                "bottleneck": "memory"
                if moved / here.bandwidth > flops / here.flops["fp32"]
                else "compute",
            }
        )
    return [
        *found,
        *({"rows": rows, "part": name, "seconds": taken[name]} for name in ("gather", "else")),
    ]


def _taken(seen: profile, steps: int) -> dict[str, float]:
    """Seconds of one step by what ran."""
    found = dict.fromkeys(("weights", "core", "gather", "else"), 0.0)
    for event in seen.key_averages():
        kinds = (kind for kind, names in KERNELS.items() if event.key in names)
        kind = "core" if event.key.startswith(CORE) else next(kinds, "else")
        found[kind] += event.self_cpu_time_total / 1e6 / steps
    return found


@compile_when_called()
def main(argv: Iterable[str] = ()) -> int:
    """Print the measurements; the argument is the number of threads (default: 1)."""
    threads = int(next(iter(argv), "1"))
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    here = measure_this_machine()
    ours, theirs = build_models()
    check: Tensor = torch.tensor([draw_requests()[0][0]])
    with torch.no_grad():
        torch.testing.assert_close(ours(check), theirs(check).logits, rtol=1e-3, atol=1e-4)
    machine = {"processor": platform.machine(), "torch": torch.__version__, "threads": threads}
    rates = {"flops": here.flops["fp32"], "bandwidth": here.bandwidth}
    results = {"machine": machine | rates, "parameters": sum(p.numel() for p in ours.parameters())}
    results["lognormal"] = compare_with_transformers(ours, theirs, here)
    results["equal_lengths"] = compare_equal_lengths(ours, theirs)
    results["scaling"], results["parts"] = steps(ours, here)
    print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
