"""What `docs/build.py` writes into docs/engine.md: what benchmarks/serve.py measured last."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).resolve().parent.parent / "benchmarks" / "serve.json"
PARTS = {
    "weights": "products with weights",
    "core": "the core",
    "gather": "pages gathered for it",
    "else": "all else",
}


def page() -> str:
    """The machine, the comparison, steps by their rows, and where the time of a step goes."""
    told = json.loads(MEASURED.read_text())
    return "\n\n".join([_machine(told), _compared(told["lognormal"]), _scaling(told["scaling"]), _parts(told["parts"])])


def _machine(told: dict[str, Any]) -> str:
    machine = told["machine"]
    return (
        f"A random model of {told['parameters'] / 1e6:.1f} million parameters in the shape of Llama, float32, threads: "
        f"{machine['threads']}, torch {machine['torch']}. The machine reached {machine['flops'] / 1e9:.0f} GFLOP/s in "
        f"a large product and {machine['bandwidth'] / 1e9:.0f} GB/s in a large copy; predictions follow from these."
    )


def _compared(told: dict[str, Any]) -> str:
    ours, theirs, sizes, report = told["ours"], told["transformers"], told["bytes"], told["ours"]["report"]
    rows = [
        ("`Engine`", _whole(ours["tokens_per_second"]), _seconds(ours), _millions(sizes["peak"])),
        (
            "transformers, padded",
            _whole(theirs["tokens_per_second"]),
            _seconds(theirs),
            _millions(sizes["padded_batch"]),
        ),
        ("`headwise cost`, at most", _whole(told["predicted"]["tokens_per_second"]), "", ""),
    ]
    waits = " and ".join(
        f"{what} {report[name]['mean'] * 1e3:,.0f} ms (half within {report[name]['p50'] * 1e3:,.0f}, 95 of 100 within "
        f"{report[name]['p95'] * 1e3:,.0f})"
        for name, what in (("first_token_seconds", "until the first token"), ("token_seconds", "from token to token"))
    )
    return (
        f"{told['requests']} requests of lognormal lengths, all at once: {told['prompt_tokens']:,} tokens of prompts "
        f"and {told['tokens']:,} answered, the longest {told['longest_answer']}. {told['same_answers']} of "
        f"{told['requests']} answers are the same. **{told['ratio']['seconds']:.1f} times the tokens a second** "
        f"({told['ratio']['processor']:.1f} by processor time) of `generate` on the padded batch with the same "
        f"weights, in a budget of {_millions(sizes['budget'])}, of which {_millions(sizes['allocated'])} are taken; "
        f"{waits}.\n\n" + _table(["", "tokens a second", "seconds (of a processor)", "remembered at most"], rows)
    )


def _scaling(told: list[dict[str, Any]]) -> str:
    rows = [
        (
            f"{row['rows']}",
            f"{row['context']}",
            f"{row['step_seconds'] * 1e3:.1f} ms",
            f"{row['predicted_seconds'] * 1e3:.1f} ms",
            _whole(row["tokens_per_second"]),
            _whole(row["predicted_tokens_per_second"]),
        )
        for row in reversed(told)
    ]
    head = ["rows", "tokens of each", "a step", "at least, predicted", "tokens a second", "at most, predicted"]
    return "Steps in which every row gets a token:\n\n" + _table(head, rows)


def _parts(told: list[dict[str, Any]]) -> str:
    rows = [
        (
            f"{row['rows']}",
            PARTS[row["part"]],
            f"{row['intensity']:.2f}" if "intensity" in row else "",
            row.get("waits_for", ""),
            f"{row['seconds'] * 1e3:.2f} ms",
            f"{row['predicted_seconds'] * 1e3:.2f} ms" if "predicted_seconds" in row else "",
            f"{row['flops_per_second'] / 1e9:.1f}" if "flops_per_second" in row else "",
            f"{row['bytes_per_second'] / 1e9:.1f}" if "bytes_per_second" in row else "",
        )
        for row in sorted(told, key=lambda row: row["rows"])
    ]
    head = ["rows", "part of a step", "FLOP/byte", "waits for", "measured", "at least", "GFLOP/s", "GB/s"]
    return (
        "Where the time of a step goes. Rows share the weights, and many of them bring products with weights from "
        "waiting for memory to waiting for compute; the core has the same FLOPs a byte however many rows there are, "
        "two for each score head that shares a key-value head over the bytes of a number:\n\n" + _table(head, rows)
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _seconds(told: dict[str, float]) -> str:
    return f"{told['seconds']:.1f} ({told['processor']:.1f})"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
