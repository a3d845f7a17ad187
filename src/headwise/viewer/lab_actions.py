"""The jobs of the Lab: what the model does with some heads ablated, beside what it does with all of
them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .action_fields import MOST, SEED, SITES, TOKENS, Pair, action, choice, integer, number, text
from .lab_checks import check_by_removal
from .lab_runs import (
    ABLATION_FIELDS,
    Ablation,
    LabRuns,
    Outputs,
    describe_recipe,
    find_token_decoder,
    open_inputs,
    position_changes,
)
from .model_actions import check_token_counts
from .model_worker import JobProgress
from .open_model import ABLATION_MODES, CAPTURE_BUDGET, AblatedHead, OpenModel

if TYPE_CHECKING:
    from ..head_analysis.importance_methods import ImportanceInput

TOP_TOKENS = 12  # rows of the table of next tokens
LAST_POSITIONS = 128  # positions with a table of next tokens
MAX_RANDOM_SETS = 20
MAX_CURVE_SECONDS = 300.0  # a sweep or a curve that would take longer leaves heads out
RANDOM_ORDERS = 3
RANDOM_POINTS = 16  # of the curve in random order
TIMED_RUNS = 3
RANKINGS = ("once", "every")
MAX_NEW_TOKENS = 64
LIMIT = integer(1, MOST, None)


# --- Some heads ablated ---------------------------------------------------------------------------


def describe_ablation(count: int) -> str:
    """The message of progress for a run without some heads."""
    return "one head ablated" if count == 1 else f"{count} heads ablated"


@action("ablate", random=integer(0, MAX_RANDOM_SETS, 0), **ABLATION_FIELDS)
def compute_effect(
    model: OpenModel, progress: JobProgress, random: int, **fields: Any
) -> dict[str, Any]:
    """Compare the model with the heads of the job ablated to the model with all heads, on the open
    text.

    With `random` = N also to N random sets of as many other heads. The ablated heads of the model
    change only if the job succeeds.
    """
    ablation = Ablation(**fields)
    heads = ablation.heads
    model.check_ablated(heads)
    runs = LabRuns(model)
    progress(0, 2 + random, "all heads")
    before = runs.all_heads()
    progress(1, 2 + random, describe_ablation(len(heads)))
    after = runs.without(ablation)
    result = compare_outputs(model, before, after)
    result["check"] = check_by_removal(model, ablation, after)
    result["recipe"] = describe_recipe(model, ablation)
    result["random"] = []
    for count, chosen in enumerate(sample_heads(runs.heads, heads, random)):
        progress(2 + count, 2 + random, f"random heads {count + 1}")
        after = runs.without(ablation._replace(heads=chosen))
        change = position_changes(before, after).mean().item()
        result["random"].append({"change": change, "loss": _loss(model, after)})
    progress.check()
    model.set_ablated(heads)
    return result | {"revision": model.revision}


def sample_heads(
    measured: Sequence[Pair], heads: Sequence[AblatedHead], count: int, seed: int = 0
) -> list[list[AblatedHead]]:
    """Random sets of as many other heads, ablated in the same ways; of all heads where too few
    others are left.
    """
    chosen = {(head.site, head.head) for head in heads}
    others = [key for key in measured if key not in chosen]
    pool = others if len(others) >= len(heads) else list(measured)
    generator = np.random.default_rng(seed)
    sets: list[list[AblatedHead]] = []
    for _ in range(count if heads else 0):
        places = generator.permutation(len(pool))[: len(heads)].tolist()
        chosen_heads = zip([pool[place] for place in places], heads, strict=True)
        sets.append([head._replace(site=key[0], head=key[1]) for key, head in chosen_heads])
    return sets


def compare_outputs(model: OpenModel, before: Outputs, after: Outputs) -> dict[str, Any]:
    """Loss and change, in total and by position, and the likeliest next tokens before and after."""
    changes = position_changes(before, after)
    pair = {"before": before, "after": after}
    losses = {name: _loss_by_position(model, outputs) for name, outputs in pair.items()}
    tables: list[list[dict[str, Any]]] = []
    if losses["before"]:
        tables = _next_tokens(before, after, find_token_decoder(model.get_model()))
    return {
        "loss": {name: _mean(values) for name, values in losses.items()},
        "lossByPosition": losses,
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


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _loss_by_position(model: OpenModel, outputs: Outputs) -> list[float]:
    """The cross-entropy of each next token, in nats; none for a model that predicts no next
    tokens.
    """
    import torch
    import torch.nn.functional as F

    from ..head_analysis.objectives import detect_head_objective

    rows = model.get_recorded().streams.get("text", ())
    ids = list(rows[0].ids) if rows else []
    is_causal = outputs.are_logits and detect_head_objective(model.get_model()) != "masked-token"
    if not is_causal or len(ids) < 2:
        return []
    return F.cross_entropy(outputs.values[:-1], torch.tensor(ids[1:]), reduction="none").tolist()


def _loss(model: OpenModel, outputs: Outputs) -> float | None:
    return _mean(_loss_by_position(model, outputs))


def _next_tokens(
    before: Outputs, after: Outputs, decode: Callable[[int], str]
) -> list[list[dict[str, Any]]]:
    """For each of the last positions, the tokens that are likely before or after, the likeliest
    first.
    """
    import torch

    old = before.values[-LAST_POSITIONS:].softmax(-1)
    new = after.values[-LAST_POSITIONS:].softmax(-1)
    most = torch.maximum(old, new).topk(min(TOP_TOKENS, old.shape[-1]), dim=-1).indices
    tables: list[list[dict[str, Any]]] = []
    for position, tokens in enumerate(most):
        shares = zip(
            tokens.tolist(),
            old[position, tokens].tolist(),
            new[position, tokens].tolist(),
            strict=True,
        )
        rows = [
            {"token": decode(token), "before": share, "after": changed}
            for token, share, changed in shares
        ]
        tables.append(sorted(rows, key=lambda row: -row["before"]))
    return tables


# --- Every head alone, and one more head at a time ------------------------------------------------


@action("lab-plan", sites=SITES)
def plan_curves(model: OpenModel, progress: JobProgress, sites: Collection[str]) -> dict[str, Any]:
    """How long a sweep and a cumulative curve take, from one timed run, and how many heads fit into
    the time limit.
    """
    runs = LabRuns(model)
    progress(0, 2, "all heads")
    runs.all_heads()
    heads = choose_heads(runs, sites)
    if not heads:
        raise ValueError("no head of these layers can be ablated; choose other layers")
    progress(1, 2, "one head ablated")
    seconds = math.inf
    for _ in range(TIMED_RUNS):  # the first one is slower than those that follow
        begin = time.perf_counter()
        runs.without(Ablation([AblatedHead(*heads[0])]))
        seconds = min(seconds, time.perf_counter() - begin)
    fits = max(2, int(MAX_CURVE_SECONDS / max(seconds, 1e-6)))
    plans: dict[str, dict[str, float]] = {}
    for name in ("sweep", *RANKINGS):
        counts = range(len(heads), 1, -1)
        count = next((count for count in counts if count_runs(count, name) <= fits), 1)
        plans[name] = {"heads": count, "seconds": count_runs(count, name) * seconds}
    return {
        "heads": len(heads),
        "secondsPerRun": seconds,
        "limit": MAX_CURVE_SECONDS,
        "plans": plans,
    }


def count_runs(heads: int, name: str) -> int:
    """The number of runs of a sweep or of a cumulative curve over so many heads, with the curve in
    random order.
    """
    if name == "sweep":
        return heads
    ranked = heads if name == "once" else heads * (heads + 1) // 2 - heads
    return ranked + heads + RANDOM_ORDERS * min(RANDOM_POINTS, heads)


def choose_heads(runs: LabRuns, sites: Collection[str], limit: int | None = None) -> list[Pair]:
    """The heads of a sweep or a curve: those of some sites (all by default), at most `limit`.

    A limit takes head 0 of every layer, then head 1, so that no layer is left out.
    """
    heads = [key for key in runs.heads if not sites or key[0] in sites]
    return sorted(sorted(heads, key=lambda key: key[1])[:limit], key=heads.index)


@action(
    "sweep",
    sites=SITES,
    limit=LIMIT,
    mode=choice(ABLATION_MODES, "zero"),
    scale=number(0.0),
    tokens=TOKENS,
    resample_text=text(key="resampleText"),
    seed=SEED,
)
def sweep_heads(
    model: OpenModel,
    progress: JobProgress,
    sites: Collection[str],
    limit: int | None,
    mode: str,
    scale: float,
    **fields: Any,
) -> dict[str, Any]:
    """Ablate every head alone; returns [site number, head, change, change of the loss] for each,
    layer by layer.
    """
    runs = LabRuns(model)
    progress(0, 0, "all heads")
    before = runs.all_heads()
    chosen = choose_heads(runs, sites, limit)
    ablation = Ablation([AblatedHead(*key, mode, float(scale)) for key in chosen], **fields)
    patches = runs.make_patches(ablation)
    loss = _loss(model, before)
    names = [layer.name for layer in model.get_recorded().layers]
    changes: list[list[Any]] = []
    for count, (site, head) in enumerate(chosen):
        progress(count, len(chosen), f"{site} {head}")
        after = runs.patched({(site, head): patches[site, head]}, ablation.tokens)
        rise = None if loss is None else (_loss(model, after) or 0.0) - loss
        change = float(position_changes(before, after).mean())
        changes.append([names.index(site), head, change, rise])
    return {
        "heads": changes,
        "quantity": _quantity(before),
        "loss": loss,
        "notes": [f"{len(changes)} of {len(model.heads)} heads"],
    }


@action("greedy", sites=SITES, limit=LIMIT, ranking=choice(RANKINGS, "once"))
def remove_greedily(
    model: OpenModel, progress: JobProgress, sites: Collection[str], limit: int | None, ranking: str
) -> dict[str, Any]:
    """Ablate one more head at a time, the one with the lowest loss first, and beside it in random
    orders.

    `ranking` "once" ranks the heads by the loss without each alone; "every" ranks them again after
    each head.
    """
    from ..head_analysis.annotated_examples import Example
    from ..head_analysis.importance_methods import ImportanceInput, make_forward
    from ..head_analysis.objectives import choose_objective

    runs = LabRuns(model)
    example = Example(dict(runs.inputs.kwargs), {})
    objective, note = choose_objective(runs.net, None, example)
    question = objective.prepare_input(runs.net, example, 0)
    if question.inputs.kwargs is not runs.inputs.kwargs:  # masked tokens are another input
        runs.forward = make_forward(runs.net, runs.modules, question.inputs)
    example_run = ImportanceInput(0, runs.forward, question, objective)
    heads = choose_heads(runs, sites, limit)
    curve = _CumulativeCurve(example_run, count_runs(len(heads), ranking), progress)
    order = curve.rank_once(heads) if ranking == "once" else curve.rank_every_time(heads)
    names = [layer.name for layer in model.get_recorded().layers]
    return {
        "objective": objective.name,
        "baseline": float(example_run.value(example_run.run.baseline_outputs)),
        "order": [[names.index(site), head, value] for (site, head), value in order],
        "random": curve.in_random_orders(heads),
        "heads": len(model.heads),
        "notes": [note] if note else [],
    }


class _CumulativeCurve:
    """The objective of one text with more and more heads ablated."""

    def __init__(self, run: ImportanceInput, num_runs: int, progress: JobProgress) -> None:
        self.run = run
        self.num_runs = num_runs
        self.progress = progress
        self.done = 0

    def value(self, heads: Sequence[Pair], note: str) -> float:
        """The objective without these heads."""
        self.progress(self.done, self.num_runs, note)
        self.done += 1
        by_site: dict[str, list[int]] = {}
        for site, head in heads:
            by_site.setdefault(site, []).append(head)
        return self.run.value_without(by_site)

    def rank_once(self, heads: Sequence[Pair]) -> list[tuple[Pair, float]]:
        """Heads in the order of the objective without each alone, with the objective after each
        removal.
        """
        alone = {head: self.value([head], "ranking the heads") for head in heads}
        order = sorted(heads, key=lambda head: alone[head])
        counts = range(1, len(order) + 1)
        values = [self.value(order[:count], describe_ablation(count)) for count in counts]
        return list(zip(order, values, strict=True))

    def rank_every_time(self, heads: Sequence[Pair]) -> list[tuple[Pair, float]]:
        """In every step the head whose removal leaves the lowest objective, with that objective."""
        removed: dict[Pair, float] = {}
        for number_removed in range(len(heads)):
            note = f"head {number_removed + 1}"
            left = [head for head in heads if head not in removed]
            values = {head: self.value([*removed, head], note) for head in left}
            best = min(left, key=lambda head: values[head])
            removed[best] = values[best]
        return list(removed.items())

    def in_random_orders(self, heads: Sequence[Pair]) -> list[dict[str, Any]]:
        """Mean, lowest and highest objective over random orders, at some numbers of heads."""
        steps = np.linspace(1, len(heads), min(RANDOM_POINTS, len(heads)))
        orders = [
            np.random.default_rng(seed).permutation(len(heads)).tolist()
            for seed in range(RANDOM_ORDERS)
        ]
        points: list[dict[str, Any]] = []
        for count in np.unique(steps.round().astype(int)).tolist():
            note = f"random order, {describe_ablation(count)}"
            chosen = [[heads[place] for place in order[:count]] for order in orders]
            values = [self.value(some, note) for some in chosen]
            mean = float(np.mean(values))
            points.append({"heads": count, "mean": mean, "low": min(values), "high": max(values)})
        return points


# --- The open text goes on ------------------------------------------------------------------------


@action("generate", count=integer(1, MAX_NEW_TOKENS, 16), prompt=text(key="text"))
def generate_text(
    model: OpenModel, progress: JobProgress, count: int, prompt: str
) -> dict[str, Any]:
    """Continue `text` (the open text by default) by `count` tokens of greedy decoding, and show the
    new trace.

    Returns the position of the first new token `first` and the number of new tokens `count`.
    """
    from ..head_analysis.objectives import detect_head_objective
    from ..inspect.model_inputs import prepare_inputs
    from ..inspect.trace_capture import Capture, trace

    net = model.get_model()
    if detect_head_objective(net) != "next-token":
        raise ValueError(
            "only a decoder that predicts next tokens can continue a text; open such a model"
        )
    inputs: Any = [prompt] if prompt.strip() else dict(open_inputs(model).kwargs)
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
