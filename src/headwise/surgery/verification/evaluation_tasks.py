"""Scores of decoders from log-probabilities of tokens: perplexity of a long text at a stated
context and stride, paired by window, and tasks of lm-evaluation-harness, paired by document.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...models import Transformer
from ...models.generation import ModelTokenizer, load_tokenizers
from ...models.generation.decoding_config import DecodingConfig
from ...models.generation.decoding_state import require_language_model
from ...models.generation.generate import generate
from ...models.model_spec import ProcessorSpec
from ...observe.head_analysis.objectives import detect_head_objective
from ...observe.inspect.model_inputs import get_device, get_max_length
from ...observe.inspect.model_tokenizer import (
    TOKENIZER_REMEDY,
    find_tokenizer,
    get_surrounding_ids,
)
from ...util.errors import SpecError
from ...util.files import read_text_file
from .model_comparison import get_model_name
from .quality_metrics import (
    LOSS,
    PERPLEXITY,
    Array,
    MetricRow,
    TextCounts,
    build_metric_row,
    check_min_count,
)

DEFAULT_CONTEXT = 1024  # tokens, if the model takes as many
BATCH_TOKENS = 4096  # in one forward call


class ScoredWindow(NamedTuple):
    """A forward call over tokens start..end of a text, which scores the tokens first..end."""

    start: int
    first: int
    end: int


@dataclass(frozen=True)
class PerplexityOptions:
    """A text file, the tokens per window (`context`), and those between the starts of windows.

    By default the context is 1,024 tokens or all that the model can take, and `stride` half of it.
    """

    file: Path | str
    context: int | None = None
    stride: int | None = None


def cut_windows(num_tokens: int, context: int, stride: int) -> list[ScoredWindow]:
    """Return the windows of a text; every token but the first is scored at most once.

    A token that is scored has all tokens before it in its window, at least `context - stride` of
    them after the first window. With `stride=context` the first token of a window has none, so it
    is not scored.

    >>> cut_windows(10, context=4, stride=3)[:2]
    [ScoredWindow(start=0, first=1, end=4), ScoredWindow(start=3, first=4, end=7)]
    """
    windows = list[ScoredWindow]()
    scored = 0
    for start in range(0, num_tokens, stride):
        end = min(start + context, num_tokens)
        first = max(scored, start + 1)
        if first < end:
            windows.append(ScoredWindow(start, first, end))
        scored = end
        if end == num_tokens:
            break
    return windows


def compare_perplexity(
    before: nn.Module, after: nn.Module, options: PerplexityOptions
) -> MetricRow:
    """Return the perplexity of a text file under both models, with intervals over windows."""
    file = Path(options.file)
    check_perplexity(before, options)
    context = default_context(before) if options.context is None else options.context
    stride = max(1, context // 2) if options.stride is None else options.stride
    usage, tokenizer = read_usage(before)
    ids = [*usage.prefix_ids, *tokenizer.ids(read_text_file(file))]
    windows = cut_windows(len(ids), context, stride)
    if len(windows) < 2:
        raise SpecError(
            f"cannot compute the interval of a perplexity: {file} has {len(ids)} tokens, one "
            f"window of {context}. Give a longer text, or a smaller context"
        )
    counts = list[list[TextCounts]]()
    for net in (after, before):
        rows = [ids[window.start : window.end] for window in windows]
        firsts = [window.first - window.start for window in windows]
        scores = score_targets(net, rows, firsts)
        counts.append([TextCounts({LOSS: -score.total}, score.num_targets) for score in scores])
    row = build_metric_row(PERPLEXITY, LOSS, (counts[0], counts[1]), np.exp)
    return row._replace(name=f"perplexity of {file.name}, context {context}, stride {stride}")


def default_context(model: nn.Module) -> int:
    """Return the default number of tokens per window."""
    return min(DEFAULT_CONTEXT, get_max_length(model) or DEFAULT_CONTEXT)


def check_perplexity(model: nn.Module, options: PerplexityOptions) -> None:
    """Refuse windows that the model cannot take, before anything is computed."""
    check_decoder(model)
    context = default_context(model) if options.context is None else options.context
    limit = get_max_length(model)
    if limit is not None and context > limit:
        raise SpecError(
            f"a context of {context} tokens is longer than the {limit} positions of "
            f"{get_model_name(model)}; give at most {limit}"
        )
    if context < 2:
        raise SpecError(f"a context of {context} predicts no token; give 2 or more")
    if options.stride is not None and not 1 <= options.stride <= context:
        raise SpecError(
            f"a stride of {options.stride} tokens leaves out tokens between windows of {context}; "
            f"give 1 to {context}"
        )


def check_decoder(model: nn.Module) -> None:
    """Refuse models that do not predict the next token from the tokens before it."""
    kind = "model without such a head"
    is_decoder = detect_head_objective(model) == "next-token"
    if isinstance(model, Transformer):
        require_language_model(model.spec)
        kind = model.spec.kind
        is_decoder = kind == "decoder"
    if not is_decoder:
        article = "an" if kind.startswith("e") else "a"
        raise SpecError(
            f"{get_model_name(model)} is {article} {kind}, and next tokens are scored under "
            "decoders; leave out its perplexity and evaluation tasks"
        )


def read_usage(model: nn.Module) -> tuple[ProcessorSpec, ModelTokenizer]:
    """Return the special ids and the tokenizer of a decoder."""
    if isinstance(model, Transformer):
        return model.usage, load_tokenizers(model)[1]
    fast = find_tokenizer(model)
    if fast is None:
        raise SpecError(f"{get_model_name(model)} has no tokenizer; {TOKENIZER_REMEDY}")
    own: Any = model
    config = own.config.get_text_config()
    values = [config.bos_token_id, config.eos_token_id]
    ids = [one if isinstance(one, list) else [one][one is None :] for one in values]
    usage = ProcessorSpec(get_surrounding_ids(fast)[0], bos=tuple(ids[0]), eos=tuple(ids[1]))
    return usage, ModelTokenizer(fast.to_str(), parse_special=True)


# --- Log-probabilities of targets -----------------------------------------------------------------


class TargetScore(NamedTuple):
    """Sum of the log-probabilities of the targets of one text, and if each is the likeliest."""

    total: float
    num_targets: int
    is_greedy: bool


def score_targets(
    model: nn.Module, rows: Sequence[Sequence[int]], firsts: Sequence[int]
) -> list[TargetScore]:
    """Score the tokens of each row from the index `first` on, given all tokens before them.

    Rows are batched by length and padded at their ends, which no earlier token attends to.
    """
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]), reverse=True)
    scores: dict[int, TargetScore] = {}
    start = 0
    while start < len(order):
        # the longest come first, so that a padded batch has about `BATCH_TOKENS`
        size = max(1, BATCH_TOKENS // max(1, len(rows[order[start]])))
        batch = order[start : start + size]
        start += size
        batch_scores = _score_batch(model, [rows[n] for n in batch], [firsts[n] for n in batch])
        scores |= zip(batch, batch_scores, strict=True)
    return [scores[index] for index in range(len(rows))]


@torch.inference_mode()
def _score_batch(
    model: nn.Module, rows: Sequence[Sequence[int]], firsts: Sequence[int]
) -> list[TargetScore]:
    device = get_device(model)
    length = max(len(row) for row in rows) - 1
    padded = [[*row[:-1], *[0] * (length + 1 - len(row))] for row in rows]
    inputs = torch.tensor(padded, device=device)
    # of a headwise model, only the logits of targets are computed
    is_native = isinstance(model, Transformer)
    h = model.hidden(inputs) if is_native else model(input_ids=inputs, use_cache=False).logits
    totals = list[Tensor]()
    greedy = list[Tensor]()
    for index, row in enumerate(rows):
        first = firsts[index]
        own = h[index : index + 1, first - 1 : len(row) - 1]
        logits = (model.apply_head(own) if is_native else own)[0].float()
        targets = torch.tensor(list(row[first:]), device=device)
        log_probs = logits.log_softmax(-1).gather(-1, targets[:, None])
        totals.append(log_probs.double().sum() if device.type == "cpu" else log_probs.sum())
        greedy.append((logits.argmax(-1) == targets).all())
    sums = torch.stack(totals).tolist()
    hits = torch.stack(greedy).tolist()
    return [
        TargetScore(sums[index], len(row) - firsts[index], hits[index])
        for index, row in enumerate(rows)
    ]


# --- Tasks of lm-evaluation-harness ---------------------------------------------------------------

TASK_FILES = (".yaml", ".yml")
DEFAULT_LENGTH = 2048  # tokens of a prompt and its answer, for models without a limit
# Defaults of the harness: tokens of an answer, and the seed that examples for prompts are drawn by.
DEFAULT_ANSWER_TOKENS = 256
FEWSHOT_SEED = 1234


@dataclass(frozen=True)
class EvaluationTasks:
    """Tasks by name (`arc_easy`) or file (`my_task.yaml`), and how many documents of each to use.

    A task file is a program: it may name functions in Python files beside it.
    """

    names: tuple[str, ...]
    limit: int | None = None


# metrics that the harness aggregates from (log-likelihood, weight) of each document
LIKELIHOOD_METRICS: Mapping[str, Callable[[Array], Array]] = {
    "perplexity": np.exp,
    "weighted_perplexity": np.exp,
    "bits_per_byte": lambda loss: loss / math.log(2),
}


def check_evaluation_tasks(tasks: EvaluationTasks) -> None:
    """Refuse a missing package or task file, before anything is computed."""
    if find_spec("lm_eval") is None:
        raise SpecError(
            f"{tasks.names[0]} is a task of lm-evaluation-harness, which is not installed; "
            "pip install 'headwise[eval]'"
        )
    for name in tasks.names:
        if Path(name).suffix in TASK_FILES and not Path(name).is_file():
            raise SpecError(
                f"there is no task file {name}; give an existing file, or a task's name"
            )


def compare_on_tasks(
    before: nn.Module, after: nn.Module, tasks: EvaluationTasks
) -> tuple[list[MetricRow], list[str]]:
    """Return a row for each metric of each task, with intervals over documents, and notes."""
    check_evaluation_tasks(tasks)
    check_decoder(before)
    loaded = _load_tasks(tasks.names)
    samples = [_evaluate(net, loaded, tasks.limit) for net in (after, before)]
    rows = list[MetricRow]()
    notes = [f"tasks were run by lm_eval {version('lm_eval')}"]
    for task, documents in samples[0].items():
        aggregations = loaded["tasks"][task].aggregation()
        higher = loaded["tasks"][task].higher_is_better()
        check_min_count(len({document["doc_id"] for document in documents}), f"documents of {task}")
        for label, metric, filter_name in _list_metrics(documents):
            pair = [
                [
                    document[metric]
                    for document in of_model[task]
                    if document["filter"] == filter_name
                ]
                for of_model in samples
            ]
            aggregation = getattr(aggregations.get(metric), "__name__", "")
            row = _compare_metric(f"{task} {label}", aggregation, pair)
            if row is None:
                notes.append(f"{task}: {label} has no value per document, so it is not compared")
                continue
            rows.append(row._replace(better="higher" if higher.get(metric, True) else "lower"))
    return rows, notes


def _load_tasks(names: Sequence[str]) -> dict[str, Any]:
    """Return tasks as the harness runs them; groups and tags give all of their tasks."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    only_files = all(Path(name).suffix in TASK_FILES for name in names)
    manager: Any = import_module("lm_eval.tasks").TaskManager(include_defaults=not only_files)
    unknown = [
        name
        for name in names
        if Path(name).suffix not in TASK_FILES and name not in manager.all_tasks
    ]
    if unknown:
        raise SpecError(
            f"{unknown[0]} is not a task of lm_eval {version('lm_eval')}; lm-eval ls tasks lists "
            "them, or give a file that ends in .yaml"
        )
    try:
        return manager.load(list(names))
    except Exception as error:
        raise _describe_failure("load", names, error) from error


def _evaluate(
    net: nn.Module, loaded: Mapping[str, Any], limit: int | None
) -> dict[str, list[dict[str, Any]]]:
    """Run the tasks; return the metrics of each document, in the order of the documents."""
    harness: Any = import_module("lm_eval.evaluator")
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    try:
        with redirect_stderr(io.StringIO()):  # progress bars, which no option turns off
            results = harness.evaluate(
                lm=make_harness_model(net),
                task_dict=loaded,
                limit=limit,
                bootstrap_iters=0,
                log_samples=True,
            )
    except SpecError:
        raise
    except Exception as error:
        raise _describe_failure("run", loaded["tasks"], error) from error
    return {
        name: sorted(documents, key=lambda document: document["doc_id"])
        for name, documents in results["samples"].items()
    }


def _describe_failure(verb: str, names: Iterable[str], error: Exception) -> SpecError:
    """Return the error of a task: its file and the Python code that it names are a program."""
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return SpecError(
        f"cannot {verb} {', '.join(names)}: {reason}. Check the task file, or that its data can be "
        "downloaded"
    )


def _list_metrics(documents: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Return label, name and filter of each metric; labels name the filter if there are several."""
    pairs = dict.fromkeys(
        (metric, document["filter"]) for document in documents for metric in document["metrics"]
    )
    has_filters = len({filter_name for _, filter_name in pairs}) > 1
    return [
        (f"{metric} ({filter_name})" if has_filters else metric, metric, filter_name)
        for metric, filter_name in pairs
    ]


def _compare_metric(name: str, aggregation: str, pair: Sequence[Sequence[Any]]) -> MetricRow | None:
    """Return the row of a metric from its values of each document; None if they are no numbers."""
    transform = LIKELIHOOD_METRICS.get(aggregation)
    counts = list[list[TextCounts]]()
    for values in pair:
        if transform is not None:
            # one log-likelihood, or it and the number of words or bytes
            items = [value if isinstance(value, tuple) else (value, 1) for value in values]
            counts.append([TextCounts({LOSS: -total}, weight) for total, weight in items])
        elif aggregation == "mean" and all(isinstance(value, (int, float)) for value in values):
            counts.append([TextCounts({name: float(value)}, 1) for value in values])
        else:
            return None
    paired = (counts[0], counts[1])
    if transform is None:
        return build_metric_row(name, name, paired)
    return build_metric_row(name, LOSS, paired, transform)


# --- The model as the harness calls it ------------------------------------------------------------


def make_harness_model(net: nn.Module) -> Any:
    """Return a `lm_eval.api.model.LM` that runs a decoder with its tokenizer."""
    template: Any = import_module("lm_eval.api.model").TemplateLM
    utils: Any = import_module("lm_eval.utils")
    usage, tokenizer = read_usage(net)
    max_length = get_max_length(net) or DEFAULT_LENGTH
    prefix_ids = usage.prefix_ids
    starts = (*prefix_ids, *usage.bos, *usage.eos)

    class HeadwiseModel(template):
        @property
        def eot_token_id(self) -> int:
            if not starts:
                raise SpecError(
                    f"{get_model_name(net)} has no begin or end token, which tasks with empty "
                    "prompts need; name one in net.usage, or choose other tasks"
                )
            return starts[0]

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            ids = tokenizer.ids(string)
            is_prefixed = prefix_ids and tuple(ids[: len(prefix_ids)]) == prefix_ids
            return ids if add_special_tokens is False or is_prefixed else [*prefix_ids, *ids]

        def loglikelihood(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
        ) -> list[tuple[float, bool]]:
            rows = list[list[int]]()
            firsts = list[int]()
            for _, context, continuation in requests:
                row = [*context, *continuation][-(max_length + 1) :]
                rows.append(row)
                firsts.append(max(1, len(row) - len(continuation)))
            scores = score_targets(net, rows, firsts)
            return [(score.total, score.is_greedy) for score in scores]

        def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
            totals = list[float]()
            for request in requests:
                windows = utils.get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.eot_token_id,
                    max_seq_len=max_length,
                    context_len=1,
                )
                pairs = [(None, *utils.make_disjoint_window(window)) for window in windows]
                totals.append(sum(total for total, _ in self._loglikelihood_tokens(pairs)))
            return totals

        def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
            answers = list[str]()
            for request in requests:
                prompt, options = request.args
                new = options.get("max_gen_toks", DEFAULT_ANSWER_TOKENS)
                new = min(new, max_length - 1)
                until = options.get("until") or ()
                stops = (until,) if isinstance(until, str) else tuple(until)
                sampled = options.get("do_sample", False)
                temperature = options.get("temperature", 0.0) if sampled else 0.0
                context = self.tok_encode(prompt)[-(max_length - new) :]
                ids = _continue_prompt(net, context, new, temperature, stops)
                text = tokenizer.text(ids)
                for stop in stops:
                    text = text.partition(stop)[0]
                answers.append(text)
            return answers

    return HeadwiseModel()


def _continue_prompt(
    net: nn.Module, context: list[int], count: int, temperature: float, stops: tuple[str, ...]
) -> list[int]:
    """Return new tokens after a prompt, sampled with seed 0 unless the temperature is 0."""
    if isinstance(net, Transformer):
        config = DecodingConfig(stop=stops)
        sampling: dict[str, Any] = {"temperature": temperature, "seed": 0}
        return generate(net, context, max_new_tokens=count, config=config, **sampling)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
    model: Any = net
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(0)
        inputs = torch.tensor([context], device=get_device(net))
        mask = torch.ones_like(inputs)
        options = {"max_new_tokens": count, "pad_token_id": 0, "do_sample": False, **sampling}
        outputs = model.generate(inputs, attention_mask=mask, **options)
    return outputs[0, len(context) :].tolist()
