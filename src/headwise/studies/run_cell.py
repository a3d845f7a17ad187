"""One cell: train the model, test it, measure its heads, edit it, and write the result once. Any
engine calls `run_cell`.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention import backends
from ..attention.interfaces.core_types import Probe
from ..kernels.capabilities import use_threads
from ..models import Transformer, build
from ..models.model_spec.serialization import from_dict as read_model
from ..observe.head_analysis.annotated_examples import Example, examples_from_task
from ..observe.head_analysis.head_classes import classify_heads
from ..observe.head_analysis.head_measurement import MeasureCollector, measure_heads
from ..observe.head_analysis.head_similarity import spread_of_sets
from ..observe.head_analysis.head_table import HeadTable
from ..observe.head_analysis.rank_analysis import effective_rank, measure_rank_collapse
from ..observe.head_analysis.weight_bands import WeightBand
from ..observe.inspect.ablation import ABLATION_MODES, ablate
from ..observe.inspect.adapters.known_interfaces import HeadwiseCall
from ..observe.inspect.attention_sites import find_attention
from ..observe.inspect.hooks import AttentionHook, run_observed
from ..observe.inspect.site import ObservedCall
from ..surgery.any_model import convert, prune
from ..surgery.conversion import ALIGN_SIDES, Pool
from ..surgery.head_selection import (
    RANKING_METHODS,
    HeadRanking,
    KeepTop,
    score_heads,
)
from ..surgery.l0_gates import GateTrainingOptions, KeepOpenGates
from ..surgery.pruning_plan import choose_sites
from ..training.data import Task, make_task
from ..training.evaluation import sum_batch_metrics
from ..training.loop import train
from ..training.recipe import Recipe, from_dict as read_recipe
from ..training.training_run import CHECKPOINT_FOLDER, CheckpointFolder, read_checkpoint
from ..util.errors import SpecError, TrainingDiverged, suggest
from ..util.files import read_lines, write_atomically
from ..util.size_limits import Record

RESULT_FILE = "result.json"
RUN_FOLDER = "run"
EDIT_FOLDER = "edits"
LOG_FILE = "metrics.jsonl"
NOT_DEFINED = "not defined: some weights of mixed heads are negative"
MAX_QUERIES = 256  # queries of a text with summarised scores


def run_cell(config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Run a cell in its folder and return its result; a folder that holds a result is read, not run
    again.

    A cell that was killed resumes from its last checkpoint and ends with the same bits. Divergence,
    lack of memory and invalid settings are results too: they carry a status and a message instead
    of metrics.
    """
    path = Path(folder)
    stored = read_result(path)
    if stored is not None:
        return stored
    path.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    processor_start = time.process_time()
    result: dict[str, Any]
    try:
        with use_threads(1):  # sums and times must not depend on the number of processors
            result = {"status": "done", **_train_and_test(config, path)}
    except TrainingDiverged as error:
        result = {"status": "diverged", "message": str(error).partition(";")[0]}
    except MemoryError:
        result = {"status": "out of memory", "message": "the process could not allocate memory"}
    except (ValueError, NotImplementedError) as error:
        result = {"status": "failed", "message": str(error)}
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        result = {"status": "out of memory", "message": str(error).splitlines()[0]}
    times = {
        "seconds": time.perf_counter() - start,
        "processor": time.process_time() - processor_start,
    }
    result["timing"] = times | result.get("timing", {})
    write_result(path, result)
    shutil.rmtree(path / RUN_FOLDER / CHECKPOINT_FOLDER, ignore_errors=True)
    gc.collect()
    return result


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return the result of a cell, or None if it has not ended."""
    try:
        return json.loads((folder / RESULT_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        raise SpecError(
            f"{folder / RESULT_FILE} is damaged; delete it, and the cell is run again"
        ) from None


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Write the result of a cell, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / RESULT_FILE, json.dumps(result, indent=1, sort_keys=True).encode() + b"\n"
    )


def _train_and_test(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    task = read_task(config["task"])
    recipe = read_recipe(config["recipe"])
    num_texts = config["head_texts"]
    clock = StepClock()
    run_folder = folder / RUN_FOLDER
    spec = read_model(config["model"])
    trained = train(task, spec, recipe, run_folder, "allowed", [clock], curves=False)
    net = trained.net
    curve = read_curve(run_folder / LOG_FILE)
    sums = sum_batch_metrics(net, task, (recipe.batch, recipe.evaluate_batches), trained.split)
    tests: dict[str, dict[str, float]] = {}
    # The heads before the first step, and at every checkpoint if the recipe keeps several.
    untrained = build(spec, seed=recipe.seed, init=recipe.init)
    untrained.usage = task.usage
    heads_at = {"step 0": summarise_heads(untrained, task, num_texts)}
    paths = CheckpointFolder(run_folder / CHECKPOINT_FOLDER).paths
    for path in reversed(paths if recipe.keep > 1 and num_texts > 1 else ()):
        checkpoint = read_checkpoint(path)
        if checkpoint.step:
            untrained.load_state_dict(checkpoint.tensors_of_kind("model"))
            heads_at[f"step {checkpoint.step}"] = summarise_heads(untrained, task, num_texts)
    for name, values in config["tests"].items():
        test = read_task(values)
        tests[name] = evaluate_model(net, test, recipe)
        heads_at[f"test {name}"] = summarise_heads(net, test, num_texts)
    heads = summarise_heads(net, task, num_texts)
    edits: dict[str, Any] = {}
    for name, values in config["edits"].items():
        out = run_folder / EDIT_FOLDER / name
        edits[name] = evaluate_edit(net, task, recipe, ModelEdit(**values), out)
    return {
        "metrics": dict(trained.metrics),
        "valid": next((point["metrics"] for point in curve if point["step"] == trained.best), {}),
        "counts": {name: count for name, (_, count) in sums.items() if count},
        "parameters": sum(one.numel() for one in net.parameters() if one.requires_grad),
        "steps": trained.steps,
        "best_step": trained.best,
        "curve": curve,
        "tests": tests,
        "heads": heads,
        "heads_at": heads_at,
        "edits": edits,
        "timing": {"training": trained.seconds, "step": clock.median},
    }


class StepClock:
    """Log the processor time of training steps; other processes do not change it."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._steps: list[float] = []

    @property
    def median(self) -> float:
        """Return the median processor seconds of a step; NaN if fewer than two steps were taken."""
        return statistics.median(self._steps) if self._steps else math.nan

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Nothing is opened."""

    def close(self) -> None:
        """Nothing is closed."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Add the time since the last step, unless something else was recorded between the two."""
        now = time.process_time()
        if record["event"] == "step":
            if self._last is not None:
                self._steps.append(now - self._last)
            self._last = now
        else:
            self._last = None


def read_task(values: Mapping[str, Any]) -> Task:
    """Make the task that `describe_task` described."""
    options = lists_to_tuples(values)
    name = str(options.pop("task"))
    return make_task(name, **options)


def lists_to_tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert lists from a file to tuples in options of a task."""
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }


def evaluate_model(net: Transformer, task: Task, recipe: Recipe) -> dict[str, float]:
    """Average each metric of a model over the batches of an evaluation, for tests."""
    sums = sum_batch_metrics(net, task, (recipe.batch, recipe.evaluate_batches), "test")
    return {name: total / count for name, (total, count) in sums.items() if count}


def read_curve(path: Path) -> list[dict[str, Any]]:
    """Return step and metrics of the evaluations of a run, once for steps that a resumed run
    repeated.
    """
    evaluations: dict[int, dict[str, Any]] = {}
    for record in read_lines(path):
        if record.get("event") == "evaluation":
            point = {"step": record["step"], "metrics": record["metrics"]}
            evaluations[record["step"]] = point
    return [evaluations[step] for step in sorted(evaluations)]


# --- Summaries of the heads of a study's model on a task ------------------------------------------


HEAD_MEASURES = (
    "entropy",
    "breadth",
    "confidence",
    "distance",
    "sink",
    "previous",
    "self",
    "induction",
)


def summarise_heads(net: Transformer, task: Task, num_texts: int) -> dict[str, Any]:
    """Means over all heads of a model on texts of a task, and the heads of each class; or a note
    why there are none.

    - `measures`, `chance`: `HEAD_MEASURES` and their chance levels; `classes`: number of heads by
      their first class;
    - `diversity`: generalised Jensen-Shannon divergence of the heads of a layer, from 0 (equal) to
      1 (1909.00015);
    - `support`, `support_spread`: number of keys with a weight above 0, mean over heads, and the
      standard deviation of this number over the heads of the model;
    - `score_deviation`: standard deviation of the scores of a query over its keys; `score_rank`:
      their effective rank; `score_change`: size of what modifiers and mixing add to the scores, as
      a share of the scores;
    - `gates`: for each attention with gates, the share of tokens for which each head is on;
    - `residual`: how different the tokens of a text are after each layer, from 0 (equal) to 1
      (2103.03404).

    Where heads are mixed after the softmax, weights may be negative; then only scores, gates and
    `residual` are defined.
    """
    if num_texts < 2:
        return {"note": "not measured"}
    net.eval()
    try:
        examples = examples_from_task(net, task, num_texts).examples_with_frequencies()
        spread = HeadSpread()
        table = classify_heads(measure_heads(net, examples, collectors=[spread]))
    except ValueError as error:
        return {"note": str(error)}
    summary = {"heads": len(table.heads), **_summarise_calls(net, examples)}
    if spread.has_negative:
        return {**summary, "note": NOT_DEFINED}
    classes = Counter(head.classes[0].name for head in table.heads)
    return {
        **summary,
        "measures": _means(table, "value"),
        "chance": _means(table, "chance"),
        "classes": dict(sorted(classes.items())),
        "diversity": spread.diversity,
        "support": statistics.fmean(spread.support),
        "support_spread": statistics.pstdev(spread.support),
    }


def _means(table: HeadTable, kind: str) -> dict[str, float]:
    """Average values or chance levels over the heads, for every measure that has them."""
    means: dict[str, float] = {}
    for name in HEAD_MEASURES:
        measures = [head.measures[name] for head in table.heads if name in head.measures]
        values = [getattr(measure, kind) for measure in measures]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if finite:
            means[name] = sum(finite) / len(finite)
    return means


class HeadSpread(MeasureCollector):
    """Collect head diversity within each layer during `measure_heads`.

    Also collects the number of keys to which each head gives a weight above 0.
    """

    def __init__(self) -> None:
        self._diversity = np.zeros(2)  # sum and number of rows
        self._support: dict[tuple[str, int], NDArray[np.float64]] = {}  # the same by head
        self.has_negative = False  # whether a weight is below 0

    @property
    def diversity(self) -> float | None:
        """Average over rows and layers; None if no layer has two heads."""
        total, count = self._diversity.tolist()
        return total / count if count else None

    @property
    def support(self) -> list[float]:
        """Average the number of keys over the rows of each head."""
        return [float(total / count) for total, count in self._support.values()]

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add the rows of a band."""
        heads, rows, _ = band.w_HTS.shape
        spread = spread_of_sets(band.w_HTS, torch.ones(1, heads), torch.ones(heads, rows))
        self._diversity += [float(one[0]) for one in spread]
        self.has_negative |= bool((band.w_HTS < 0).any())
        for head, keys in enumerate((band.w_HTS > 0).sum((-1, -2)).tolist()):
            self._support[site, head] = self._support.get((site, head), 0) + np.array([keys, rows])


class _CallHook(AttentionHook):
    """Read scores and gates of each call of one attention."""

    def __init__(self) -> None:
        self.scores: list[tuple[float, float, float]] = []
        self.gates: list[Tensor] = []

    def on_call(self, call: ObservedCall) -> None:
        """Read the spread, rank and change of the scores, and the share of tokens for which each
        head is on.
        """
        if not isinstance(call, HeadwiseCall):
            return
        queries = slice(0, MAX_QUERIES)
        inputs = call.inputs
        steps = inputs.steps
        q = inputs.q[:, queries].transpose(1, 2).float()
        k = inputs.k[:, :, list(call.signature.core.key_head_of_query)].transpose(1, 2).float()
        scale = inputs.query_context.scale
        scores = steps.similarity.scores(q, k, scale, steps.similarity_p)
        final = scores  # after the parts that change scores
        if steps.scores:
            job = replace(call.signature, probed_tensors=frozenset({"scores"}), training=False)
            probe = Probe("scores")
            backends.make_dispatch(job).attend(inputs._replace(probe=probe))
            final = probe.tensors["scores"][:, :, queries]
        allowed = call.allowed_pairs(queries).expand(scores.shape)
        rank = float(effective_rank(final[0].float()).mean())
        # NaN or infinite without scores, as of weights learned by position
        change = (final - scores).masked_fill(~allowed, 0).norm()
        change = float(change / scores.masked_fill(~allowed, 0).norm())
        self.scores.append((_row_deviation(final, allowed), rank, change))
        self.gates += [(gate != 0).float().mean((0, 1)).flatten() for gate in inputs.gates]


def _row_deviation(scores_BHTS: Tensor, allowed: Tensor) -> float:
    """Average the standard deviation of a query's scores over its allowed keys.

    The mean covers queries with at least two allowed keys.
    """
    count = allowed.sum(-1)
    mean = scores_BHTS.masked_fill(~allowed, 0).sum(-1) / count.clamp(min=1)
    squares = (scores_BHTS - mean[..., None]).masked_fill(~allowed, 0).square().sum(-1)
    return float((squares / (count - 1).clamp(min=1)).sqrt()[count > 1].mean())


def _summarise_calls(net: Transformer, examples: Sequence[Example]) -> dict[str, Any]:
    """Average scores over attentions and texts; also gates of each attention, and token
    differences.
    """
    sites = [module for module in find_attention(net) if module.site.observe.possible]
    scores: list[tuple[float, float, float]] = []
    gates: dict[str, list[Tensor]] = {}
    for example in examples:
        hooks = {module.site.name: _CallHook() for module in sites}
        run_observed(net, example.model_inputs, sites, hooks)
        for name, hook in hooks.items():
            scores += hook.scores
            if hook.gates:
                gates.setdefault(name, []).append(torch.stack(hook.gates).prod(0))
    depths = measure_rank_collapse(net, examples)
    summary: dict[str, Any] = {
        "residual": [one.residual.value for one in depths if one.stack == depths[-1].stack]
    }
    if scores:
        means = np.mean(scores, 0).tolist()
        named = zip(("score_deviation", "score_rank", "score_change"), means, strict=True)
        summary |= {name: mean for name, mean in named if math.isfinite(mean)}
    if gates:
        summary["gates"] = {
            name: torch.stack(values).mean(0).tolist() for name, values in gates.items()
        }
    return summary


# --- Edits of a trained model, after which it is tested again -------------------------------------


CHANGES = ("ablate", "prune", "convert")
GATES = "gates"  # trained L0 gates instead of a ranking


@dataclass(frozen=True)
class ModelEdit:
    """One edit of every trained model of a study, as the table [edits.NAME] of its file states it.

    - `change`: "ablate" replaces the outputs of a `share` of all heads, or of `count` heads, by
      `mode`; "prune" removes that share, and "convert" shares keys and values so that `kv`
      key-value heads are left in each layer;
    - `ranking`: which heads are changed, the least important ones by a method of `HeadRanking`, or
      by "gates", which are trained for `gate_steps` (1905.09418);
    - `align`: how heads are rotated before their mean is taken, as in `Pool`;
    - `of`: the only variant whose models are edited; empty for all;
    - `sites`: only heads of attentions with this prefix, such as "encoder", are changed;
    - `texts`: texts of the task on which heads are judged or compared;
    - `steps`: training steps after the edit, with the recipe of the cell.
    """

    change: str = ""
    of: str = ""
    share: float = 0.0
    count: int = 0
    kv: int = 0
    mode: str = "zero"
    sites: str = ""
    ranking: str = "random"
    gate_steps: int = 100
    align: str = "none"
    texts: int = 32
    steps: int = 0

    @property
    def training_steps(self) -> int:
        """Count the training steps of the edit: of its gates, and after it."""
        return self.steps + (self.gate_steps if self.ranking == "gates" else 0)

    @property
    def site_names(self) -> tuple[str, ...]:
        """Return the prefix of the attentions that are changed; empty for all."""
        return (self.sites,) if self.sites else ()

    @property
    def description(self) -> str:
        """Return the fields that are not defaults.

        >>> ModelEdit("prune", share=0.5, ranking="michel").description
        'change prune, share 0.5, ranking michel'
        """
        changed = [one for one in fields(self) if getattr(self, one.name) != one.default]
        return ", ".join(f"{one.name} {getattr(self, one.name)}" for one in changed)

    @staticmethod
    def parse(name: str, values: Mapping[str, Any]) -> ModelEdit:
        """Read the table of an edit; raise SpecError for unknown fields and values."""
        record = Record(f"edits.{name}", values, "correct the file")
        record.check_fields(one.name for one in fields(ModelEdit))
        readers = {str: record.read_text, float: record.read_number, int: record.read_int}
        edit_fields = [one for one in fields(ModelEdit) if one.name in values]
        edit = ModelEdit(**{one.name: readers[type(one.default)](one.name) for one in edit_fields})
        edit.check(name)
        return edit

    def check(self, name: str) -> None:
        """Raise SpecError if a value is impossible."""
        choices = {
            "change": CHANGES,
            "mode": ABLATION_MODES,
            "ranking": (*RANKING_METHODS, GATES),
            "align": tuple(ALIGN_SIDES),
        }
        for key, allowed in choices.items():
            value = getattr(self, key)
            if value not in allowed:
                raise SpecError(
                    f"edits.{name}.{key} = {value!r} is unknown; {suggest(value, allowed)}"
                )
        if self.change == "convert" and self.kv < 1:
            raise SpecError(f"edits.{name} leaves {self.kv} key-value heads; give kv = 1 or more")
        if self.count and (self.change != "ablate" or self.share):
            raise SpecError(
                f'edits.{name}.count is for change = "ablate" without a share; leave one of them '
                "out"
            )
        if self.change != "convert" and not self.count and not 0 < self.share < 1:
            raise SpecError(
                f"edits.{name}.share = {self.share:g} must be between 0 and 1; give share = 0.5"
            )
        if self.change == "ablate" and (self.steps or self.ranking == GATES):
            raise SpecError(
                f'edits.{name} trains heads that it ablates; give change = "prune", or leave '
                "steps out"
            )
        if self.sites and self.change == "convert":
            raise SpecError(f'edits.{name}.sites is for change = "ablate" or "prune"; leave it out')
        if self.texts < 2 or self.steps < 0 or self.gate_steps < 1:
            raise SpecError(
                f"edits.{name} needs texts >= 2, steps >= 0 and gate_steps >= 1; correct the file"
            )

    def check_model(self, net: Transformer) -> None:
        """Raise SpecError if the model lacks the attentions of `sites`, or if its heads cannot
        share keys and values as the edit requires.
        """
        choose_sites(dict(net.spec.attention_specs()), self.site_names)
        if self.change == "convert":
            convert(net, Pool(self.kv), kind="self")


def evaluate_edit(
    net: Transformer, task: Task, recipe: Recipe, edit: ModelEdit, folder: Path
) -> dict[str, Any]:
    """Edit a copy of a trained model and test it: metrics, parameters, and training steps after the
    edit.
    """
    examples = examples_from_task(net, task, edit.texts).examples
    edited = net
    context = nullcontext()
    if edit.change == "ablate":
        all_scores = score_heads(net, examples, HeadRanking(edit.ranking, seed=recipe.seed)).scores
        sites = choose_sites(dict(net.spec.attention_specs()), edit.site_names)
        scores = {head: one for head, one in all_scores.items() if head[0] in sites}
        count = edit.count or round(edit.share * len(scores))
        heads = sorted(scores, key=lambda head: scores[head])[:count]
        context = ablate(net, heads, edit.mode, seed=recipe.seed)
    elif edit.change == "prune":
        share = 1 - edit.share
        ranking = HeadRanking(edit.ranking, seed=recipe.seed)
        selection = KeepTop(share, ranking, scope="model", sites=edit.site_names)
        if edit.ranking == GATES:
            gates = GateTrainingOptions(
                heads=share,
                sites=edit.site_names,
                steps=edit.gate_steps,
                batch=recipe.batch,
                seed=recipe.seed,
            )
            selection = KeepOpenGates(gates)
        edited = prune(net, selection, examples).after
    else:
        pool = Pool(edit.kv, align=edit.align, seed=recipe.seed)
        edited = convert(net, pool, examples, kind="self").after
    if edit.steps:
        changes = dict.fromkeys(("steps", "evaluate_every", "checkpoint_every"), edit.steps)
        recipe = replace(recipe, **changes)
        edited = train(task, edited, recipe, folder, "allowed", curves=False).net
    with context:
        metrics = evaluate_model(edited.eval(), task, recipe)
    return {
        "metrics": metrics,
        "parameters": sum(one.numel() for one in edited.parameters()),
    }
