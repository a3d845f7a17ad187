"""Retrieval heads: which heads copy a sentence that is hidden in a long text (Wu et al. 2024,
2404.15574).

A needle is inserted at several depths into haystacks of several lengths, and the model answers a
question about it. At a step at which the model predicts a token of the needle, a head retrieves it
if the largest weight of the head is on this same token inside the needle. The retrieval score of a
head is the number of tokens that it retrieves over the number of tokens of the needle.

The paper lets the model decode. Here the answer is the needle itself, by teacher forcing, so that
one forward pass measures all steps, and a needle has as many steps as tokens. As in the released
code, only needles that the model finds count: it must predict at least half of their tokens
correctly (in the code, a ROUGE-1 recall of more than 50).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...report.data import Table
from ...util.errors import SpecError, pluralise
from ..inspect.attention_sites import require_ability
from ..inspect.hooks import AttentionHook, run_observed
from ..inspect.model_inputs import get_max_length
from ..inspect.model_tokenizer import make_reader
from ..inspect.site import ObservedCall, Site
from ..inspect.trace_capture import get_model_name
from .annotated_examples import GENERAL_TEXTS, Example, annotate_row, read_lines
from .head_table import HeadMeasures, HeadTable, Measure
from .objectives import detect_head_objective, get_output_tensor
from .resampling import Array, Jackknife, correct_p_values, excess_p_values, ratio_of_sums
from .text_analysis import read_texts, text_reader

RETRIEVAL = "retrieval"
LENGTHS = (128, 256, 512)  # tokens of a haystack
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # place of the needle, as a share of the haystack
NUM_NEEDLES = 10
MIN_FOUND = 0.5  # share of the tokens of a needle that the model must predict
MIN_RETRIEVAL = 0.1  # score of a retrieval head in the paper
SIGNIFICANCE = 0.05
NUM_SHOWN = 20  # heads of a printed table
NAMES = "Marta Oskar Yasmin Tobias Ingrid Rafael Noemi Viktor Leila Henrik Amara Dmitri"
PLACES = "Oslo Lisbon Nairobi Quito Hanoi Tallinn Perth Cusco Malmo Accra Riga Turin"
THINGS = "lanterns violins compasses kettles tulips anchors ledgers pigeons"


class Needle(NamedTuple):
    """A fact that is hidden in a text, and the question that it answers."""

    text: str
    question: str


def make_needles(count: int = NUM_NEEDLES, seed: int = 0) -> list[Needle]:
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


def check_decoder(model: nn.Module, what: str) -> None:
    """Raise SpecError unless a model predicts the next token."""
    objective = detect_head_objective(model)
    if objective != "next-token":
        kind = objective or "no tokens"
        fact = f"{what} needs a model that predicts the next token; {get_model_name(model)}"
        raise SpecError(f"{fact} predicts {kind}; use a decoder such as GPT-2")


def split_special(examples: Sequence[Example]) -> tuple[list[int], list[list[int]]]:
    """Return the special ids before each text, and the other ids of the texts."""
    rows = [example.streams["text"] for example in examples]
    first = rows[0].is_special.tolist()
    prefix = rows[0].ids[: [*first, False].index(False)].tolist()
    return prefix, [row.ids[~row.is_special].tolist() for row in rows]


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
    texts: Sequence[Sequence[int]], needle: Sequence[int], length: int, depth: float
) -> tuple[list[int], int]:
    """Return a haystack of `length` tokens with a needle between two texts, nearest to a depth, and
    the place of the needle. Texts are repeated if they are shorter.

    >>> hide_needle([[1, 2, 3], [4, 5]], [8, 9], 7, 0.5)
    ([1, 2, 3, 8, 9, 4, 5, 1, 2], 3)
    """
    haystack: list[int] = []
    boundaries = [0]
    while len(haystack) < length:
        haystack += texts[(len(boundaries) - 1) % len(texts)]
        boundaries.append(min(len(haystack), length))
    start = min(boundaries, key=lambda place: abs(place - depth * length))
    return [*haystack[:start], *needle, *haystack[start:length]], start


# --- Scores ---------------------------------------------------------------------------------------


class LargestKeyHook(AttentionHook):
    """Record the key with the largest weight in some rows, and the keys that the mask allows."""

    def __init__(self, rows: slice) -> None:
        self.rows = rows
        self.largest_HT = torch.empty(0)
        self.allowed = torch.empty(0)

    def on_call(self, call: ObservedCall) -> None:
        """Read these rows alone."""
        self.largest_HT = call.all_weights(self.rows)[0].argmax(-1).cpu()
        self.allowed = call.allowed_pairs(self.rows)[0].cpu()


def count_retrieved(
    largest_HT: Tensor, allowed: Tensor, hidden: HiddenNeedle, predicted_T: Tensor
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
    with text_reader(model, tokenizer) as reader:
        check_decoder(reader, "the needle test")
        examples, notes = read_texts(reader, texts or read_lines(GENERAL_TEXTS), min_count=1)
        prefix, filler = split_special(examples)
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
                fact = f"a haystack of {min(lengths)} tokens with a needle has"
                fact = f"{fact} {min(lengths) + around}, and {get_model_name(reader)} takes {limit}"
                raise SpecError(f"{fact}; give shorter lengths= or needles")
            for place, depth in enumerate(DEPTHS):
                length = fitting[(number + place) % len(fitting)]
                haystack, start = hide_needle(filler, own, length, depth)
                start += len(prefix)
                ids = torch.tensor([*prefix, *haystack, *question, *own])
                tests.append((number, HiddenNeedle(ids, range(start, start + len(own)))))
        return run_hidden_needles(reader, tests, progress).with_notes(notes)


def run_hidden_needles(
    model: nn.Module,
    tests: Sequence[tuple[int, HiddenNeedle]],
    progress: Callable[[int], object] = lambda _: None,
) -> HeadTable:
    """Run a model on hidden needles with their numbers, and rate every head over needles."""
    sites = [one for one in require_ability(model, "observe") if one.site.kind == "attention"]
    num_heads = sum(one.site.q for one in sites)
    num_needles = 1 + max(number for number, _ in tests)
    sums = np.zeros((num_needles, num_heads, 3))
    counts = np.zeros((num_needles, num_heads))
    num_found = 0
    for done, (number, hidden) in enumerate(tests, 1):
        hooks = {one.site.name: LargestKeyHook(hidden.steps) for one in sites}
        output = run_observed(model, hidden.ids[None, :-1], sites, hooks)
        predicted_T = get_output_tensor(output)[0, hidden.steps].argmax(-1).cpu()
        is_right = predicted_T == hidden.ids[-len(hidden.needle) :]
        if is_right.double().mean() >= MIN_FOUND:
            num_found += 1
            counts[number] += len(is_right)
            by_site = [
                count_retrieved(one.largest_HT, one.allowed, hidden, predicted_T)
                for one in hooks.values()
            ]
            sums[number] += torch.cat(by_site).numpy()
        progress(done)
    measures = rate_heads(sums, counts)
    levels = correct_p_values([one.p for one in measures])
    pairs = zip(measures, levels, strict=True)
    count = sum(one.value >= MIN_RETRIEVAL and level < SIGNIFICANCE for one, level in pairs)
    note = f"the model found {num_found} of {len(tests)} hidden needles"
    rule = f"score {MIN_RETRIEVAL} or more, corrected p below {SIGNIFICANCE}"
    more = f"{count} of {num_heads} heads are retrieval heads ({rule})" if num_found else "no score"
    texts = pluralise(num_needles, "needle")
    heads = rows_of_heads([one.site for one in sites], [{RETRIEVAL: one} for one in measures])
    return HeadTable(get_model_name(model), texts, heads, (f"{note}: {more}",))


def rows_of_heads(
    sites: Sequence[Site], measures: Sequence[dict[str, Measure]]
) -> tuple[HeadMeasures, ...]:
    """Return a row for every head of these sites, with its measures."""
    heads: list[HeadMeasures] = []
    for site in sites:
        for head in range(site.q):
            place = (site.stack, site.kind, site.layer, head, head * site.kv // site.q, site.name)
            heads.append(HeadMeasures(*place, measures[len(heads)]))
    return tuple(heads)


def rate_heads(sums: Array, counts: Array) -> list[Measure]:
    """Return the score of every head with its interval over needles, from the numbers of
    `count_retrieved` [needles, heads, 3] and the numbers of tokens [needles, heads].

    The chance level is that of a random key or of permuted steps, whichever is higher.
    """
    chances = ratio_of_sums(sums, counts[..., None])
    baseline = np.where(chances[:, 2] > chances[:, 1], sums[..., 2], sums[..., 1])
    estimate = Jackknife.of_ratio(sums[..., 0], counts)
    low, high = estimate.interval()
    p = excess_p_values((sums[..., 0], counts), (baseline, counts))
    chance = ratio_of_sums(baseline, counts)
    columns = (estimate.value, np.maximum(low, 0), high, chance, counts.sum(0), p)
    return [Measure(*column) for column in np.stack(columns, 1).tolist()]


def retrieval_table(table: HeadTable) -> Table:
    """Return the heads that retrieve most; none without scores."""
    is_scored = bool(table.heads[0].measures[RETRIEVAL].rows)
    ranking = table.ranking(RETRIEVAL)
    rows = [row[:-1] for row in ranking.rows[: NUM_SHOWN * is_scored]]  # without classes
    return replace(ranking, columns=ranking.columns[:-1], rows=rows)
