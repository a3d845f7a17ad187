"""Heads over long texts: retrieval heads, which copy what is hidden in them, and streaming heads,
which need only the first tokens and the latest ones.

Retrieval (Wu et al. 2024, 2404.15574): a needle is inserted at several depths into haystacks of
several lengths, and the model answers a question about it. At a step at which the model predicts a
token of the needle, a head retrieves it if the largest weight of the head is on this same token
inside the needle. The retrieval score of a head is the number of tokens that it retrieves over the
number of tokens of the needle.

The paper lets the model decode. Here the answer is the needle itself, by teacher forcing, so that
one forward pass measures all steps, and a needle has as many steps as tokens. As in the released
code, only needles that the model finds count: it must predict at least half of their tokens
correctly (in the code, a ROUGE-1 recall of more than 50).

Streaming (Xiao et al. 2024, 2410.10819): DuoAttention learns a gate for each key-value head. Here
the head itself is measured, by the change of its output when it attends to `sinks` first and
`window` latest keys alone: the norm of the difference over the norm of the output, before the
output projection. Files list the scores as those of DuoAttention do.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...attention.masking.pattern_base import Pattern
from ...attention.masking.patterns import First, Window
from ...kernels.devices import to_float64
from ...report.data import Table
from ...util.errors import SpecError, pluralise
from ...util.files import read_json_file, read_text_file, write_atomically
from ...util.output_paths import Existing, FolderKind, stage_folder
from ...util.size_limits import check_whole_number
from ..inspect.attention_sites import require_ability
from ..inspect.hooks import CallHook, SiteModule, run_observed
from ..inspect.model_inputs import get_max_length
from ..inspect.model_tokenizer import make_reader
from ..inspect.site import ObservedCall
from ..inspect.trace_capture import get_model_name
from .annotated_examples import GENERAL_TEXTS, annotate_row, read_lines
from .head_table import HeadTable, Measure, rows_of_heads
from .objectives import get_output_tensor, other_head_reason
from .resampling import Array, Jackknife, correct_p_values, excess_p_values, ratio_of_sums
from .text_analysis import read_texts, text_reader

RETRIEVAL = "retrieval"
LENGTHS = (128, 256, 512)  # tokens of a haystack
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # place of the needle, as a share of the haystack
MAX_SHIFT = 0.1  # of a needle from its depth to the end of a sentence, as a share of the haystack
SENTENCE_ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f")
MADE_UP = "made-up"  # the needles of `make_needles`
MIN_FOUND = 0.5  # share of the tokens of a needle that the model must predict
MIN_RETRIEVAL = 0.1  # score of a retrieval head in the paper
SIGNIFICANCE = 0.05
NUM_SHOWN = 20  # heads of a printed table
OUTSIDE = "outside"  # share of the weight on keys that a streaming head drops
CHANGE = "streaming_change"
SINKS, WINDOW = 64, 256  # of the released scripts
PASSAGE = 4  # tokens of a passage, in numbers of kept keys
NUM_ROWS = 64  # queries that are measured together
SCORES_FILE = "full_attention_heads.tsv"
CONFIG_FILE = "config.json"
STREAMING_HEADS = FolderKind(
    "list of streaming heads", (SCORES_FILE,), lambda _: (SCORES_FILE, CONFIG_FILE)
)
NAMES = "Marta Oskar Yasmin Tobias Ingrid Rafael Noemi Viktor Leila Henrik Amara Dmitri"
PLACES = "Oslo Lisbon Nairobi Quito Hanoi Tallinn Perth Cusco Malmo Accra Riga Turin"
THINGS = "lanterns violins compasses kettles tulips anchors ledgers pigeons"


class Needle(NamedTuple):
    """A fact that is hidden in a text, and the question that it answers."""

    text: str
    question: str


def make_needles(count: int = 10, seed: int = 0) -> list[Needle]:
    """Return facts about names, places and numbers that no model can know.

    >>> make_needles(1)[0].question
    'What does Noemi keep in Perth?'
    """
    draw = random.Random(seed)
    needles: list[Needle] = []
    for _ in range(count):
        name, place, thing = (draw.choice(one.split()) for one in (NAMES, PLACES, THINGS))
        fact = f"{name} keeps {draw.randrange(1000, 10000)} {thing} in a cellar in {place}."
        needles.append(Needle(fact, f"What does {name} keep in {place}?"))
    return needles


def read_needles(path: Path | str) -> list[Needle]:
    """Read lines NEEDLE, tab, QUESTION."""
    rows = [line.split("\t") for line in read_lines(path)]
    for number, columns in enumerate(rows, 1):
        if len(columns) != len(Needle._fields):
            fact = f"{path} line {number} has {pluralise(len(columns), 'column')}"
            raise SpecError(f"{fact}; write NEEDLE, tab, QUESTION")
    return [Needle(*columns) for columns in rows]


def find_decoder_sites(model: nn.Module) -> list[SiteModule]:
    """Return the self-attentions of a model; raise SpecError unless it predicts the next token."""
    reason = other_head_reason(model, "next-token")
    if reason:
        raise SpecError(f"cannot measure heads over long texts: {reason}; use a decoder")
    return [one for one in require_ability(model, "observe") if one.site.kind == "attention"]


def read_ids(model: nn.Module, texts: Any) -> tuple[list[int], list[list[int]], tuple[str, ...]]:
    """Return the special ids before each text, the other ids of each sentence of the texts (None:
    general ones), and notes on what was skipped.
    """
    texts = read_lines(GENERAL_TEXTS) if texts is None else texts
    examples, notes = read_texts(model, texts, min_count=1)
    rows = [example.streams["text"] for example in examples]
    first = rows[0].is_special.tolist()
    prefix = rows[0].ids[: [*first, False].index(False)].tolist()
    sentences: list[list[int]] = []
    for row in rows:
        sentences.append([])
        tokens = zip(row.ids.tolist(), row.words, row.is_special.tolist(), strict=True)
        for token_id, word, is_special in tokens:
            if not is_special:
                sentences[-1].append(token_id)
            if word.endswith(SENTENCE_ENDS):
                sentences.append([])
    return prefix, [sentence for sentence in sentences if sentence], notes


class HiddenNeedle(NamedTuple):
    """Token ids of a haystack, a question and the answer, and the place of the needle in them; the
    answer repeats the needle.
    """

    ids: Tensor
    needle: range

    @property
    def steps(self) -> slice:
        """The rows that predict the answer."""
        return slice(len(self.ids) - len(self.needle) - 1, len(self.ids) - 1)


def hide_needle(
    sentences: Sequence[Sequence[int]], needle: Sequence[int], length: int, depth: float
) -> tuple[list[int], int]:
    """Return a haystack of `length` tokens with a needle between two sentences, nearest to a depth,
    and the place of the needle. Sentences are repeated if they are shorter. The needle stands
    inside a sentence, at the depth itself, if no end of one lies within a tenth of the length.

    >>> hide_needle([[1, 2, 3], [4, 5]], [8, 9], 7, 0.5)
    ([1, 2, 3, 8, 9, 4, 5, 1, 2], 3)
    """
    haystack: list[int] = []
    boundaries = [0]
    while len(haystack) < length:
        haystack += sentences[(len(boundaries) - 1) % len(sentences)]
        boundaries.append(min(len(haystack), length))
    start = min(boundaries, key=lambda place: abs(place - depth * length))
    if abs(start - depth * length) > MAX_SHIFT * length:
        start = round(depth * length)
    return [*haystack[:start], *needle, *haystack[start:length]], start


# --- Scores ---------------------------------------------------------------------------------------


def find_largest_keys(rows: slice, call: ObservedCall) -> tuple[Tensor, Tensor]:
    """Return the key with the largest weight in some rows, [H, T], and the allowed pairs."""
    return call.all_weights(rows)[0].argmax(-1).cpu(), call.allowed_pairs(rows)[0].cpu()


def count_retrieved(
    hidden: HiddenNeedle, predicted_T: Tensor, largest_HT: Tensor, allowed: Tensor
) -> Tensor:
    """Return how many tokens of the needle each head retrieves, [heads, 3]: its own number, and
    what is expected of a head that reads a random allowed key, and of this head if its largest keys
    belonged to other steps.
    """
    is_copy_TS = predicted_T[:, None] == hidden.ids[: allowed.shape[-1]]
    is_copy_TS[:, : hidden.needle.start] = False
    is_copy_TS[:, hidden.needle.stop :] = False
    copies_THT = is_copy_TS[:, largest_HT].double()  # prediction of one step, keys of another
    retrieved_H = copies_THT.diagonal(dim1=0, dim2=2).sum(-1)
    uniform_H = ((allowed & is_copy_TS).sum(-1) / allowed.sum(-1)).sum(-1).double()
    permuted_H = copies_THT.sum((0, 2)) / len(predicted_T)
    return torch.stack([retrieved_H, uniform_H.expand_as(retrieved_H), permuted_H], -1)


def measure_retrieval(
    model: nn.Module | Path | str,
    needles: Sequence[Needle] = (),
    texts: Any = None,
    *,
    lengths: Sequence[int] = LENGTHS,
    tokenizer: object = None,
    progress: Callable[[int], object] = lambda _: None,
) -> HeadTable:
    """Measure which heads retrieve needles from haystacks made of `texts`, as this module defines:
    a table with the measure "retrieval".

    Every needle is hidden at every depth, in haystacks of alternating length. Without needles those
    of `make_needles` are used, without texts the general ones of headwise. Intervals and p-values
    are over needles.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 256}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> measure_retrieval(net, make_needles(2), lengths=[60], tokenizer="bytes").notes[0]
    'the model found 0 of 10 hidden needles: no score'
    """
    if not lengths:
        raise SpecError("lengths is empty; give numbers of tokens, such as lengths=[128]")
    for length in lengths:
        check_whole_number("each of lengths", length, 1)
    for number, needle in enumerate(needles):
        if not isinstance(needle, Needle):
            fact = f"needle {number} is of type {type(needle).__name__}"
            raise SpecError(f"{fact}; give Needle(text, question)")
    with text_reader(model, tokenizer) as reader:
        sites = find_decoder_sites(reader)
        prefix, filler, notes = read_ids(reader, texts)
        read_row = make_reader(reader).read_source
        limit = get_max_length(reader)
        tests: list[tuple[int, HiddenNeedle]] = []
        for number, needle in enumerate(needles or make_needles()):
            asked = f"\nQuestion: {needle.question}\nAnswer:"
            rows = [annotate_row(read_row(text)) for text in (f" {needle.text}", asked)]
            own, question = (row.ids[~row.is_special].tolist() for row in rows)
            around = len(prefix) + 2 * len(own) + len(question)
            fitting = [one for one in lengths if limit is None or one + around <= limit]
            if not fitting:
                fact = f"a haystack of {min(lengths)} tokens needs {around} more around it"
                raise SpecError(f"{fact}, and the model takes {limit}; give shorter lengths=")
            for place, depth in enumerate(DEPTHS):
                length = fitting[(number + place) % len(fitting)]
                haystack, start = hide_needle(filler, own, length, depth)
                start += len(prefix)
                ids = torch.tensor([*prefix, *haystack, *question, *own])
                tests.append((number, HiddenNeedle(ids, range(start, start + len(own)))))
        return run_hidden_needles(reader, sites, tests, progress).with_notes(notes)


def run_hidden_needles(
    model: nn.Module,
    sites: Sequence[SiteModule],
    tests: Sequence[tuple[int, HiddenNeedle]],
    progress: Callable[[int], object] = lambda _: None,
) -> HeadTable:
    """Run a model on hidden needles with their numbers, and rate every head over needles."""
    num_heads = sum(one.site.q for one in sites)
    num_needles = 1 + max(number for number, _ in tests)
    sums = np.zeros((num_needles, num_heads, 3))
    counts = np.zeros((num_needles, num_heads))
    num_found = 0
    for done, (number, hidden) in enumerate(tests, 1):
        find_keys = partial(find_largest_keys, hidden.steps)
        hooks = {one.site.name: CallHook(find_keys) for one in sites}
        output = run_observed(model, hidden.ids[None, :-1], sites, hooks)
        predicted_T = get_output_tensor(output)[0, hidden.steps].argmax(-1).cpu()
        is_right = predicted_T == hidden.ids[-len(hidden.needle) :]
        if is_right.double().mean() >= MIN_FOUND:
            num_found += 1
            counts[number] += len(is_right)
            by_site = [count_retrieved(hidden, predicted_T, *one.result) for one in hooks.values()]
            sums[number] += torch.cat(by_site).numpy()
        progress(done)
    # chance: a random key, or permuted steps, whichever is higher
    chances = ratio_of_sums(sums, counts[..., None])
    baseline = np.where(chances[:, 2] > chances[:, 1], sums[..., 2], sums[..., 1])
    p = excess_p_values((sums[..., 0], counts), (baseline, counts))
    estimate = Jackknife.of_ratio(sums[..., 0], counts)
    columns = (estimate.value, *estimate.interval(), ratio_of_sums(baseline, counts))
    scores = np.stack([*columns, counts.sum(0), p], 1)
    is_retrieval = (estimate.value >= MIN_RETRIEVAL) & (correct_p_values(p) < SIGNIFICANCE)
    note = f"the model found {num_found} of {len(tests)} hidden needles"
    rule = f"score {MIN_RETRIEVAL} or more, corrected p below {SIGNIFICANCE}"
    count = f"{is_retrieval.sum()} of {num_heads} heads are retrieval heads ({rule})"
    note = f"{note}: {count if num_found else 'no score'}"
    return _make_table(model, sites, {RETRIEVAL: scores}, pluralise(num_needles, "needle"), note)


def _make_table(
    model: nn.Module,
    sites: Sequence[SiteModule],
    measures: Mapping[str, Array],
    texts: str,
    *notes: str,
) -> HeadTable:
    """Return a table of all heads with measures from arrays [heads, fields]."""
    places = [(one.site.name, head) for one in sites for head in range(one.site.q)]
    by_head: dict[tuple[str, int], dict[str, Measure]] = {place: {} for place in places}
    for name, rows in measures.items():
        rows[:, 1] = np.maximum(rows[:, 1], 0)  # shares and norms are not negative
        for place, fields in zip(places, rows.tolist(), strict=True):
            by_head[place][name] = Measure(*fields)
    heads = rows_of_heads([one.site for one in sites], by_head)
    return HeadTable(get_model_name(model), texts, tuple(heads), notes)


def top_heads(table: HeadTable, measure: str) -> Table:
    """Return the heads with the largest values of a measure; none if it has no value."""
    ranking = table.ranking(measure)
    rows = [row[:-1] for row in ranking.rows[:NUM_SHOWN] if row[1] == row[1]]  # without classes
    return replace(ranking, columns=ranking.columns[:-1], rows=rows)


# --- Streaming heads ------------------------------------------------------------------------------


def streaming_pattern(sinks: int, window: int) -> Pattern:
    """Return what a streaming head attends to under a causal mask."""
    check_whole_number("sinks", sinks, 0)
    check_whole_number("window", window, 1)
    return Window(window) | First(sinks) if sinks else Window(window)


def sum_streaming(pattern: Pattern, first: int, call: ObservedCall) -> Array:
    """Return what heads lose without the keys outside a pattern, summed over rows from `first` on,
    [heads, 5]: the weight outside, that of uniform attention, the number of rows, and the squared
    norms of the change of the output and of the output.
    """
    inputs = call.attention_inputs
    if inputs is None:
        fact = "cannot measure streaming heads, because the weights cannot be computed again"
        remedy = "load it with hw.load if headwise reads its family, or use another model"
        raise SpecError(f"{fact}: {call.unsupported}; {remedy}")
    kv_heads = [inputs.kv_head_of(head) for head in range(inputs.q_BTHK.shape[2])]
    v_HSV = to_float64(inputs.v_BSGV[0]).transpose(0, 1)[kv_heads]
    keys = torch.arange(v_HSV.shape[1], device=v_HSV.device)
    sums: Any = 0
    for start in range(first, len(keys), NUM_ROWS):
        rows = slice(start, min(start + NUM_ROWS, len(keys)))
        w_HTS = to_float64(call.all_weights(rows)[0])
        allowed = call.allowed_pairs(rows)[0].to(w_HTS.device)
        outside = allowed & ~pattern.allows(keys[rows, None], keys)
        lost_HTS = w_HTS * outside
        weight_HT = lost_HTS.sum(-1)
        o_HTV = w_HTS @ v_HSV
        # the softmax over the kept keys; zero if their weights are too small for a number
        kept_HT1 = (1 - weight_HT).clamp(min=1e-12)[..., None]
        change_HTV = ((w_HTS - lost_HTS) / kept_HT1) @ v_HSV - o_HTV
        uniform = outside.sum(-1) / allowed.sum(-1)
        parts = [weight_HT, uniform.expand_as(weight_HT), torch.ones_like(weight_HT)]
        parts += [change_HTV.square().sum(-1), o_HTV.square().sum(-1)]
        sums = sums + torch.stack(parts, -1).sum(1).cpu().numpy()
    return sums


def measure_streaming(
    model: nn.Module | Path | str,
    texts: Any = None,
    *,
    sinks: int = SINKS,
    window: int = WINDOW,
    tokenizer: object = None,
) -> HeadTable:
    """Measure how much every head needs keys outside `sinks` first and `window` latest ones: a
    table with the measures "outside", the share of its weight there, beside that of uniform
    attention, and "streaming_change", the relative change of its output without them.

    Texts are joined to passages of four times as many tokens as a streaming head keeps, or as many
    as the model takes or the texts have. Only queries that have keys outside count; intervals are
    over passages.
    """
    pattern = streaming_pattern(sinks, window)
    with text_reader(model, tokenizer) as reader:
        sites = find_decoder_sites(reader)
        prefix, filler, notes = read_ids(reader, texts)
        ids = np.concatenate(filler)
        num_kept = sinks + window
        limit = get_max_length(reader) or PASSAGE * num_kept
        length = min(PASSAGE * num_kept, limit, len(prefix) + len(ids))
        if length < 2 * num_kept:
            fact = f"streaming heads with {sinks} sinks and a window of {window} need passages of"
            have = f"the texts have {len(prefix) + len(ids)}"
            if limit < 2 * num_kept:
                have = f"the model takes {limit} tokens"
            remedy = "give a smaller window, or longer texts"
            raise SpecError(
                f"{fact} {2 * num_kept} to {PASSAGE * num_kept} tokens; {have}; {remedy}"
            )
        size = length - len(prefix)
        num_passages = len(ids) // size
        sum_rows = partial(sum_streaming, pattern, num_kept)
        sums: list[Array] = []
        for number in range(num_passages):
            passage = torch.tensor([*prefix, *ids[number * size : (number + 1) * size].tolist()])
            hooks = {one.site.name: CallHook(sum_rows) for one in sites}
            run_observed(reader, passage[None], sites, hooks)
            sums.append(np.concatenate([hook.result for hook in hooks.values()]))
        totals = np.stack(sums)  # [passages, heads, 5]
        outside = Jackknife.of_ratio(totals[..., 0], totals[..., 2])
        chance = ratio_of_sums(totals[..., 1], totals[..., 2])
        change = Jackknife.of_ratio(totals[..., 3], totals[..., 4]).map(np.sqrt)
        measures = {
            OUTSIDE: np.stack([outside.value, *outside.interval(), chance], 1),
            CHANGE: np.stack([change.value, *change.interval()], 1),
        }
        passages = f"{pluralise(num_passages, 'passage')} of {length} tokens"
        return _make_table(reader, sites, measures, passages, *notes)


# --- Files ----------------------------------------------------------------------------------------


class StreamingHeads(NamedTuple):
    """Scores of key-value heads [layers, heads], from 0 for streaming heads to 1 for heads that
    need all tokens, and the numbers of tokens that streaming heads keep. A layer with fewer heads
    than others has NaN behind them.
    """

    scores: Array
    sinks: int = SINKS
    window: int = WINDOW

    @staticmethod
    def of(table: HeadTable, sinks: int = SINKS, window: int = WINDOW) -> StreamingHeads:
        """Return the largest change of the heads that share keys and values, at most 1."""
        scores = np.full((len(table.sites), 1 + max(head.kv for head in table.heads)), np.nan)
        for head in table.heads:
            place = (table.sites.index(head.site), head.kv)
            scores[place] = np.fmax(scores[place], min(1.0, head.measures[CHANGE].value))
        return StreamingHeads(scores, sinks, window)

    @property
    def counts(self) -> list[int]:
        """Return the number of key-value heads of each layer."""
        return (~np.isnan(self.scores)).sum(1).tolist()

    def select(self, *, sparsity: float = 0.5, threshold: float | None = None) -> NDArray[np.bool_]:
        """Return which heads stream: this share with the lowest scores, as kvpress rounds it, or
        with `threshold` all heads below it.

        >>> StreamingHeads(np.array([[0.2, 0.9], [0.1, 0.4]])).select().tolist()
        [[True, False], [True, False]]
        """
        if threshold is not None:
            return self.scores < threshold
        if not 0 <= sparsity <= 1:
            raise SpecError(f"sparsity must be in [0, 1], got {sparsity}")
        ranks = self.scores.ravel().argsort(kind="stable").argsort()  # absent heads last
        return (ranks < round(sum(self.counts) * sparsity)).reshape(self.scores.shape)

    def write(self, folder: Path | str, existing: Existing = "refuse") -> None:
        """Write the two files of DuoAttention's `attn_patterns`, which kvpress reads too."""
        text = io.StringIO()
        np.savetxt(text, self.scores, delimiter="\t", fmt="%.17g")
        config = {"sink_size": self.sinks, "recent_size": self.window}
        with stage_folder(folder, STREAMING_HEADS, existing) as staged:
            write_atomically(staged / SCORES_FILE, text.getvalue().encode())
            write_atomically(staged / CONFIG_FILE, json.dumps(config, indent=1).encode())

    @staticmethod
    def read(folder: Path | str) -> StreamingHeads:
        """Read a folder of DuoAttention's kind; scores are cut off at 0 and 1, as there."""
        config = read_json_file(Path(folder) / CONFIG_FILE)
        path = Path(folder) / SCORES_FILE
        try:
            sizes = [int(config[name]) for name in ("sink_size", "recent_size")]
            scores = np.loadtxt(io.StringIO(read_text_file(path)), delimiter="\t", ndmin=2)
        except (KeyError, TypeError, ValueError) as error:
            fact = f"{folder} lists no streaming heads: {str(error).splitlines()[0]}"
            raise SpecError(f"{fact}; give the folder of --streaming, or of DuoAttention") from None
        return StreamingHeads(scores.clip(0, 1), *sizes)
