"""The jobs of the Lab: what the model does with some heads ablated, beside what it does with all of
them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .lab_checks import check_by_removal, continue_both
from .lab_runs import (
    LabRuns,
    Outputs,
    describe_recipe,
    find_token_decoder,
    open_inputs,
    position_changes,
    read_options,
)
from .model_actions import check_token_counts, read_heads, read_text
from .model_worker import JobProgress
from .open_model import ABLATION_MODES, CAPTURE_BUDGET, AblatedHead, OpenModel

TOP_TOKENS = 12  # rows of the table of next tokens
LAST_POSITIONS = 128  # positions with a table of next tokens
IGNORED = -100  # label of a position without a next token
MAX_RANDOM_SETS = 20
MAX_CURVE_SECONDS = 300.0  # a sweep or a curve that would take longer leaves heads out
RANDOM_ORDERS, RANDOM_POINTS = 3, 16  # of the curve in random order
TIMED_RUNS = 3
RANKINGS = ("once", "every")


# --- Some heads ablated ---------------------------------------------------------------------------


def describe_ablation(count: int) -> str:
    """The message of progress for a run without some heads."""
    return "one head ablated" if count == 1 else f"{count} heads ablated"


def compute_effect(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """Compare the model with the heads of the job ablated to the model with all heads, on the open
    text.

    With `random` = N also to N random sets of as many other heads. The ablated heads of the model
    change only if the job succeeds.
    """
    heads, options, count = (
        read_heads(model, arguments),
        read_options(model, arguments),
        arguments.get("random", 0),
    )
    if type(count) is not int or not 0 <= count <= MAX_RANDOM_SETS:
        raise ValueError(
            f"random={count!r} is no number of random sets; give 0 to {MAX_RANDOM_SETS}"
        )
    model.check_ablated(heads)
    runs = LabRuns(model)
    progress(0, 2 + count, "all heads")
    before = runs.all_heads()
    progress(1, 2 + count, describe_ablation(len(heads)))
    after = runs.without(heads, options)
    result = compare_outputs(model, before, after)
    result["check"] = check_by_removal(model, heads, options, after)
    result["recipe"] = describe_recipe(model, heads, options)
    result["random"] = []
    for number, chosen in enumerate(sample_heads(runs.heads, heads, count)):
        progress(2 + number, 2 + count, f"random heads {number + 1}")
        after = runs.without(chosen, options)
        result["random"].append(
            {"change": position_changes(before, after).mean().item(), "loss": _loss(model, after)}
        )
    progress.check()
    model.set_ablated(heads)
    return result | {"revision": model.revision}


def continue_text(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """The texts of the model with all heads, and with the heads of the job ablated; the ablated
    heads do not change.
    """
    heads, options = read_heads(model, arguments), read_options(model, arguments)
    model.check_ablated(heads)
    progress(0, 2, "continuing the text")
    return continue_both(model, LabRuns(model), heads, options)


def sample_heads(
    measured: Sequence[tuple[str, int]], heads: Sequence[AblatedHead], count: int, seed: int = 0
) -> list[list[AblatedHead]]:
    """Random sets of as many other heads, ablated in the same ways; of all heads where too few
    others are left.
    """
    chosen = {(head.site, head.head) for head in heads}
    others = [key for key in measured if key not in chosen]
    pool = others if len(others) >= len(heads) else list(measured)
    generator = np.random.default_rng(seed)
    sets = (
        generator.permutation(len(pool))[: len(heads)].tolist()
        for _ in range(count if heads else 0)
    )
    return [
        [
            AblatedHead(site, number, head.mode, head.scale)
            for (site, number), head in zip([pool[place] for place in places], heads, strict=True)
        ]
        for places in sets
    ]


def compare_outputs(model: OpenModel, before: Outputs, after: Outputs) -> dict[str, Any]:
    """Loss and change, in total and by position, and the likeliest next tokens before and after."""
    changes, pair = position_changes(before, after), {"before": before, "after": after}
    by_position = {name: _loss_by_position(model, outputs) for name, outputs in pair.items()}
    tables = (
        _next_tokens(before, after, find_token_decoder(model.get_model()))
        if by_position["before"]
        else []
    )
    return {
        "loss": {
            name: float(np.mean(losses)) if losses else None for name, losses in by_position.items()
        },
        "lossByPosition": by_position,
        "kl": changes.mean().item(),
        "klByPosition": changes.tolist(),
        "outputs": _quantity(before),
        "next": tables[-1] if tables else [],
        "nextAt": tables,
        "nextFrom": len(changes) - len(tables),
        "notes": [],
    }


def _quantity(outputs: Outputs) -> str:
    return "KL(before ‖ after), nats" if outputs.are_logits else "change of the output, 1 − cosine"


def _loss_by_position(model: OpenModel, outputs: Outputs) -> list[float]:
    """The cross-entropy of each next token, in nats; none for a model that
    predicts no next tokens.
    """
    import torch
    import torch.nn.functional as F

    from ..head_analysis.objectives import detect_head_objective

    ids = (
        list(model.get_recorded().streams["text"][0].ids)
        if "text" in model.get_recorded().streams
        else []
    )
    is_causal = outputs.are_logits and detect_head_objective(model.get_model()) != "masked-token"
    if not is_causal or len(ids) < 2:
        return []
    return F.cross_entropy(outputs.values[:-1], torch.tensor(ids[1:]), reduction="none").tolist()


def _loss(model: OpenModel, outputs: Outputs) -> float | None:
    losses = _loss_by_position(model, outputs)
    return float(np.mean(losses)) if losses else None


def _next_tokens(
    before: Outputs, after: Outputs, decode: Callable[[int], str]
) -> list[list[dict[str, Any]]]:
    """For each of the last positions, the tokens that are likely before or after, the likeliest
    first.
    """
    import torch

    old, new = (outputs.values[-LAST_POSITIONS:].softmax(-1) for outputs in (before, after))
    most = torch.maximum(old, new).topk(min(TOP_TOKENS, old.shape[-1]), dim=-1).indices
    tables: list[list[dict[str, Any]]] = []
    for tokens, shares, changed in zip(
        most.tolist(), old.gather(-1, most), new.gather(-1, most), strict=True
    ):
        values = zip(tokens, shares.tolist(), changed.tolist(), strict=True)
        rows = [
            {"token": decode(token), "before": share, "after": share_after}
            for token, share, share_after in values
        ]
        tables.append(sorted(rows, key=lambda row: -row["before"]))
    return tables


# --- Every head alone, and one more head at a time ------------------------------------------------


def plan_curves(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """How long a sweep and a cumulative curve take, from one timed run, and how many heads fit into
    the time limit.
    """
    runs = LabRuns(model)
    progress(0, 2, "all heads")
    runs.all_heads()
    heads = choose_heads(model, runs, arguments)
    if not heads:
        raise ValueError("no head of these layers can be ablated; choose other layers")
    progress(1, 2, "one head ablated")
    seconds = math.inf
    for _ in range(TIMED_RUNS):  # the first one is slower than those that follow
        begin = time.perf_counter()
        runs.without([AblatedHead(*heads[0])])
        seconds = min(seconds, time.perf_counter() - begin)
    fits = max(2, int(MAX_CURVE_SECONDS / max(seconds, 1e-6)))
    kinds = {"sweep": _plan(len(heads), fits, lambda count: count)}
    for ranking in RANKINGS:
        kinds[ranking] = _plan(
            len(heads), fits, lambda count, ranking=ranking: count_curve_runs(count, ranking)
        )
    plans = {
        name: {"heads": count, "seconds": cost * seconds} for name, (count, cost) in kinds.items()
    }
    return {
        "heads": len(heads),
        "secondsPerRun": seconds,
        "limit": MAX_CURVE_SECONDS,
        "plans": plans,
    }


def _plan(heads: int, fits: int, cost: Callable[[int], int]) -> tuple[int, int]:
    """The largest number of heads whose runs fit into the time limit, and these runs."""
    low, high = 1, heads
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle) <= fits else (low, middle - 1)
    return low, cost(low)


def count_curve_runs(heads: int, ranking: str) -> int:
    """The number of runs of a cumulative curve over so many heads, that in
    random order included.
    """
    ranked = heads if ranking == "once" else heads * (heads + 1) // 2 - heads
    return ranked + heads + RANDOM_ORDERS * min(RANDOM_POINTS, heads)


def choose_heads(
    model: OpenModel, runs: LabRuns, arguments: Mapping[str, Any], limit: int | None = None
) -> list[tuple[str, int]]:
    """The heads of a sweep or a curve: those of the layers `sites` (all by default), at most
    `limit` of them.

    A limit takes head 0 of every layer, then head 1, so that no layer is left out.
    """
    numbers = arguments.get("sites") or []
    if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
        raise ValueError("sites must be a list of site numbers")
    site_names = {model.site_name(number) for number in numbers}
    heads = [key for key in runs.heads if not site_names or key[0] in site_names]
    if limit is None or len(heads) <= limit:
        return heads
    return sorted(sorted(heads, key=lambda key: key[1])[:limit], key=heads.index)


def read_limit(arguments: Mapping[str, Any]) -> int | None:
    """The largest number of heads of a job; None for all."""
    limit = arguments.get("limit")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"limit={limit!r} is no number of heads; give 1 or more")
    return limit


def sweep_heads(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """Ablate every head alone; returns [site number, head, change, change of the loss] for each,
    layer by layer.
    """
    runs, options = LabRuns(model), read_options(model, arguments)
    mode, scale = str(arguments.get("mode", "zero")), float(arguments.get("scale", 0.0))
    if mode not in ABLATION_MODES:
        raise ValueError(f"unknown ablation {mode!r}; use one of {', '.join(ABLATION_MODES)}")
    progress(0, 0, "all heads")
    before = runs.all_heads()
    heads = [
        AblatedHead(*key, mode, scale)
        for key in choose_heads(model, runs, arguments, read_limit(arguments))
    ]
    patches, loss = runs.make_patches(heads, options), _loss(model, before)
    names = [layer.name for layer in model.get_recorded().layers]
    changes: list[list[Any]] = []
    for number, (site, head, _, _) in enumerate(heads):
        progress(number, len(heads), f"{site} {head}")
        after = runs.patched({(site, head): patches[site, head]}, options)
        rise = None if loss is None else (_loss(model, after) or 0.0) - loss
        changes.append(
            [names.index(site), head, float(position_changes(before, after).mean()), rise]
        )
    return {
        "heads": changes,
        "quantity": _quantity(before),
        "loss": loss,
        "notes": [f"{len(changes)} of {len(model.heads)} heads"],
    }


def remove_greedily(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """Ablate one more head at a time, that with the lowest loss first, and beside it in random
    orders.

    `ranking` "once" ranks the heads by the loss without each alone; "every" ranks them again after
    each head.
    """
    from ..head_analysis.annotated_examples import Example
    from ..head_analysis.importance_methods import ImportanceInput
    from ..head_analysis.objectives import choose_objective

    ranking = str(arguments.get("ranking", "once"))
    if ranking not in RANKINGS:
        raise ValueError(f"unknown ranking {ranking!r}; use one of {', '.join(RANKINGS)}")
    runs = LabRuns(model)
    example = Example(dict(runs.inputs.kwargs), {})
    objective, note = choose_objective(runs.net, None, example)
    evaluation = objective.prepare_input(runs.net, example, 0)
    if evaluation.inputs.kwargs is not runs.inputs.kwargs:  # masked tokens are another input
        from ..head_analysis.importance_methods import make_forward

        runs.forward = make_forward(runs.net, runs.modules, evaluation.inputs)
    text = ImportanceInput(0, runs.forward, evaluation, objective)
    heads = choose_heads(model, runs, arguments, read_limit(arguments))
    curve = _CumulativeCurve(text, heads, count_curve_runs(len(heads), ranking), progress)
    order = curve.ranked_once() if ranking == "once" else curve.ranked_every_time()
    names = [layer.name for layer in model.get_recorded().layers]
    return {
        "objective": objective.name,
        "baseline": float(text.value(text.run.baseline_outputs)),
        "order": [[names.index(site), head, value] for (site, head), value in order],
        "random": curve.in_random_orders(),
        "heads": len(model.heads),
        "notes": [note] if note else [],
    }


class _CumulativeCurve:
    """The objective of one text with more and more heads ablated."""

    def __init__(
        self, text: Any, heads: Sequence[tuple[str, int]], num_runs: int, progress: JobProgress
    ) -> None:
        self.text, self.heads, self.num_runs, self.progress, self.done = (
            text,
            list(heads),
            num_runs,
            progress,
            0,
        )

    def value(self, heads: Sequence[tuple[str, int]], note: str) -> float:
        """The objective without these heads."""
        self.progress(self.done, self.num_runs, note)
        self.done += 1
        by_site: dict[str, list[int]] = {}
        for site, head in heads:
            by_site.setdefault(site, []).append(head)
        return self.text.value_without(by_site)

    def ranked_once(self) -> list[tuple[tuple[str, int], float]]:
        """Heads in the order of the objective without each alone, with the objective after each
        removal.
        """
        alone = {head: self.value([head], "ranking the heads") for head in self.heads}
        order = sorted(self.heads, key=lambda head: alone[head])
        return [
            (head, self.value(order[: number + 1], describe_ablation(number + 1)))
            for number, head in enumerate(order)
        ]

    def ranked_every_time(self) -> list[tuple[tuple[str, int], float]]:
        """In every step the head whose removal leaves the lowest objective, with that objective."""
        removed: list[tuple[tuple[str, int], float]] = []
        left = list(self.heads)
        while left:
            ablated = [head for head, _ in removed]
            values = {
                head: self.value([*ablated, head], f"head {len(ablated) + 1}") for head in left
            }
            best = min(left, key=lambda head: values[head])
            removed.append((best, values[best]))
            left.remove(best)
        return removed

    def in_random_orders(self) -> list[dict[str, Any]]:
        """Mean, lowest and highest objective over random orders, at some numbers of heads."""
        counts = np.unique(
            np.linspace(1, len(self.heads), min(RANDOM_POINTS, len(self.heads))).round().astype(int)
        )
        orders = [
            np.random.default_rng(seed).permutation(len(self.heads))
            for seed in range(RANDOM_ORDERS)
        ]
        points: list[dict[str, Any]] = []
        for count in counts.tolist():
            values = [
                self.value(
                    [self.heads[place] for place in order[:count]],
                    f"random order, {describe_ablation(count)}",
                )
                for order in orders
            ]
            points.append(
                {
                    "heads": count,
                    "mean": float(np.mean(values)),
                    "low": min(values),
                    "high": max(values),
                }
            )
        return points


# --- The open text goes on ------------------------------------------------------------------------

MAX_NEW_TOKENS = 64


def generate_text(
    model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress
) -> dict[str, Any]:
    """Continue `text` (the open text by default) by `count` tokens of greedy decoding, and show the
    new trace.

    Returns the position of the first new token `first` and the number of new tokens `count`.
    """
    from ..head_analysis.objectives import detect_head_objective
    from ..inspect.model_inputs import prepare_inputs
    from ..inspect.trace_capture import Capture, trace

    net, count, text = model.get_model(), arguments.get("count", 16), read_text(arguments, "text")
    if type(count) is not int or not 1 <= count <= MAX_NEW_TOKENS:
        raise ValueError(
            f"count={count!r} is no number of tokens to generate; give 1 to {MAX_NEW_TOKENS}"
        )
    if detect_head_objective(net) != "next-token":
        raise ValueError(
            "only a decoder that predicts next tokens can continue a text; open such a model"
        )
    inputs: Any = [text] if text.strip() else dict(open_inputs(model).kwargs)
    first = (prepare_inputs(net, inputs, count).token_counts or {}).get("text", 0)
    check_token_counts({"text": first + count}, model.max_tokens)
    progress(0, 2, "generating one token" if count == 1 else f"generating {count} tokens")
    captured = trace(
        net,
        inputs,
        max_new_tokens=count,
        capture=Capture(extra=("v",), budget=CAPTURE_BUDGET),
        log=lambda note: progress(0, 2, note),
    )
    progress(1, 2, "drawing thumbnails")
    model.set_trace(captured.with_thumbnails())
    generated = len(captured.streams["text"][0].ids) - first
    return {"revision": model.revision, "first": first, "count": generated}
