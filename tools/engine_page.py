"""The generated part of docs/engine.md: the measurements of benchmarks/serve.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).resolve().parent.parent / "benchmarks" / "serve.json"
PARTS = {
    "weights": "matrix products with weights",
    "core": "attention core",
    "gather": "gathering of pages",
    "else": "other",
}


def page() -> str:
    """Markdown: machine, comparison with transformers, steps by number of rows, and the time of
    each part of a step.
    """
    measured = json.loads(MEASURED.read_text())
    return "\n\n".join(
        [
            _machine(measured),
            _compared(measured["lognormal"]),
            _equal_lengths(measured["equal_lengths"]),
            _scaling(measured["scaling"]),
            _parts(measured["parts"]),
        ]
    )


def _machine(measured: dict[str, Any]) -> str:
    machine, size = measured["machine"], measured["parameters"] / 1e6
    rate, bandwidth = machine["flops"] / 1e9, machine["bandwidth"] / 1e9
    return (
        f"A random model of {size:.1f} million parameters in the shape of Llama, float32, threads: "
        f"{machine['threads']}, torch {machine['torch']}. The machine reached {rate:.0f} GFLOP/s "
        "in a large product "
        f"and {bandwidth:.0f} GB/s in a large copy; predictions follow from these."
    )


def _compared(measured: dict[str, Any]) -> str:
    ours = measured["ours"]
    theirs = measured["transformers"]
    sizes = measured["bytes"]
    rows = [
        ("`Engine`", _whole(ours["tokens_per_second"]), _seconds(ours), _millions(sizes["peak"])),
        (
            "transformers, padded",
            _whole(theirs["tokens_per_second"]),
            _seconds(theirs),
            _millions(sizes["padded_batch"]),
        ),
    ]
    total, speedup = measured["requests"], measured["ratio"]["seconds"]
    return (
        f"{total} requests of log-normal lengths, submitted together: "
        f"{measured['prompt_tokens']:,} prompt tokens and "
        f"{measured['tokens']:,} generated, at most {measured['longest_answer']} per request. "
        f"{measured['same_answers']} of {total} answers are equal. **{speedup:.1f} times the "
        "tokens per second** "
        f"({measured['ratio']['processor']:.1f} by processor time) of `generate` on the padded "
        "batch with the same "
        f"weights. The KV cache is limited to {_millions(sizes['budget'])} and takes "
        f"{_millions(sizes['allocated'])}.\n\n"
        + _table(["", "tokens per second", "seconds (processor time)", "peak KV cache"], rows)
    )


def _equal_lengths(measured: list[dict[str, Any]]) -> str:
    rows = []
    for row in measured:
        best = row["best"]
        seconds = {
            name: f"{times['seconds']:.2f} ({times['processor']:.2f})"
            for name, times in best.items()
        }
        ratios = [
            f"{best[other]['processor'] / best['engine']['processor']:.2f}"
            for other in ("transformers", "generate")
        ]
        shape = f"{row['rows']} x ({row['prompt']} + {row['tokens']})"
        rows.append(
            (shape, seconds["engine"], seconds["transformers"], seconds["generate"], *ratios)
        )
    same = sum(row["same_answers"] for row in measured)
    head = ["rows x (prompt + answer)", "`Engine`, s (processor)", "transformers", "`hw.generate`"]
    return (
        "Requests of equal lengths, submitted together, where a padded batch has no padding: the "
        "least time of each in "
        "interleaved rounds, and how many times as fast the engine is, by processor time. Other "
        "work ran on the "
        f"machine. {same} of {sum(row['rows'] for row in measured)} answers are equal.\n\n"
        + _table([*head, "of transformers' speed", "of `hw.generate`'s speed"], rows)
    )


def _scaling(measured: list[dict[str, Any]]) -> str:
    rows = [
        (
            f"{row['rows']}",
            f"{row['context']}",
            f"{row['step_seconds'] * 1e3:.1f} ms",
            f"{row['predicted_seconds'] * 1e3:.1f} ms",
            _whole(row["tokens_per_second"]),
            _whole(row["predicted_tokens_per_second"]),
        )
        for row in reversed(measured)
    ]
    head = [
        "rows",
        "tokens per row",
        "time per step",
        "predicted lower limit",
        "tokens per second",
        "predicted upper limit",
    ]
    return "Decode steps of all rows:\n\n" + _table(head, rows)


def _parts(measured: list[dict[str, Any]]) -> str:
    rows = [
        (
            f"{row['rows']}",
            PARTS[row["part"]],
            f"{row['intensity']:.2f}" if "intensity" in row else "",
            row.get("bottleneck", ""),
            f"{row['seconds'] * 1e3:.2f} ms",
            f"{row['predicted_seconds'] * 1e3:.2f} ms" if "predicted_seconds" in row else "",
            f"{row['flops_per_second'] / 1e9:.1f}" if "flops_per_second" in row else "",
            f"{row['bytes_per_second'] / 1e9:.1f}" if "bytes_per_second" in row else "",
        )
        for row in sorted(measured, key=lambda row: row["rows"])
    ]
    head = [
        "rows",
        "part of a step",
        "FLOP/byte",
        "bound by",
        "measured",
        "lower limit",
        "GFLOP/s",
        "GB/s",
    ]
    return (
        "Time of each part of a step. Rows share the weights, so with more rows the products with "
        "weights change from "
        "memory-bound to compute-bound. The arithmetic intensity of the attention core does not "
        "depend on the number "
        "of rows: it is two FLOPs for each query head of a key-value head, per byte of a "
        "number.\n\n" + _table(head, rows)
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _seconds(measured: dict[str, float]) -> str:
    return f"{measured['seconds']:.1f} ({measured['processor']:.1f})"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
