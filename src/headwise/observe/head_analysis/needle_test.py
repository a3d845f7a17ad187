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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...report.data import Column, Table
from ...report.notebook import TableResult
from ...report.render import to_plain, to_text
from ...report.text import choose_format, format_p
from ...util.errors import SpecError, pluralise
from ..head_names import print_head
from ..inspect.attention_sites import require_ability
from ..inspect.hooks import AttentionHook, run_observed
from ..inspect.model_inputs import get_max_length
from ..inspect.model_tokenizer import make_reader
from ..inspect.site import ObservedCall
from ..inspect.trace_capture import get_model_name
from .annotated_examples import GENERAL_TEXTS, Example, annotate_row, read_lines
from .head_table import INTERVAL_NOTE, Measure
from .objectives import detect_head_objective, get_output_tensor
from .resampling import Array, Jackknife, correct_p_values, excess_p_values, ratio_of_sums
from .text_analysis import read_texts, text_reader

LENGTHS = (128, 256, 512)  # tokens of a haystack
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # place of the needle, as a share of the haystack
NUM_NEEDLES = 10
MIN_FOUND = 0.5  # share of the tokens of a needle that the model must predict
NUM_SHOWN = 20  # heads of a printed table
MIN_RETRIEVAL = 0.1  # score of a retrieval head in the paper
SIGNIFICANCE = 0.05
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
    for number in range(count):
        name, place, thing = (draw.choice(one.split()) for one in (NAMES, PLACES, THINGS))
        amount = draw.randrange(1000, 10000)
        if number % 2:
            fact = f"The secret number of {name} from {place} is {amount}."
            needles.append(Needle(fact, f"What is the secret number of {name} from {place}?"))
        else:
            fact = f"{name} keeps {amount} {thing} in a cellar in {place}."
            needles.append(Needle(fact, f"What does {name} keep in {place}?"))
    return needles


def read_needles(path: Path | str) -> list[Needle]:
    """Read lines NEEDLE, tab, QUESTION."""
    needles: list[Needle] = []
    for number, line in enumerate(read_lines(path), 1):
        columns = line.split("\t")
        if line.strip():
            if len(columns) != len(Needle._fields):
                fact = f"{path} line {number} has {pluralise(len(columns), 'column')}"
                raise SpecError(f"{fact}; write NEEDLE, tab, QUESTION")
            needles.append(Needle(*columns))
    if not needles:
        raise SpecError(f"{path} has no needle; give at least one line NEEDLE, tab, QUESTION")
    return needles


# --- Texts with needles ---------------------------------------------------------------------------


class TokenTexts(NamedTuple):
    """Token ids of texts without the special tokens around them, and special ids before each."""

    prefix: list[int]
    texts: list[list[int]]

    @staticmethod
    def of(examples: Sequence[Example]) -> TokenTexts:
        """Read the ids of examples."""
        rows = [example.streams["text"] for example in examples]
        first = rows[0].is_special.tolist()
        prefix = rows[0].ids[: [*first, False].index(False)].tolist()
        return TokenTexts(prefix, [row.ids[~row.is_special].tolist() for row in rows])


def check_decoder(model: nn.Module, what: str) -> None:
    """Raise SpecError unless a model predicts the next token."""
    objective = detect_head_objective(model)
    if objective != "next-token":
        kind = objective or "no tokens"
        fact = f"{what} needs a model that predicts the next token; {get_model_name(model)}"
        raise SpecError(f"{fact} predicts {kind}; use a decoder such as GPT-2")


class HiddenNeedle(NamedTuple):
    """Token ids of a haystack with a needle, the question and the answer; the answer and the needle
    have the tokens `needle`.
    """

    ids: Tensor
    needle: range

    @staticmethod
    def place(
        filler: TokenTexts,
        needle: Sequence[int],
        question: Sequence[int],
        length: int,
        depth: float,
    ) -> HiddenNeedle:
        """Insert a needle between two texts of a haystack of `length` tokens, nearest to a depth.
        The filler is repeated if it is shorter.
        """
        haystack: list[int] = []
        boundaries = [0]
        while len(haystack) < length:
            haystack += filler.texts[(len(boundaries) - 1) % len(filler.texts)]
            boundaries.append(min(len(haystack), length))
        start = min(boundaries, key=lambda place: abs(place - depth * length))
        before = [*filler.prefix, *haystack[:start]]
        ids = [*before, *needle, *haystack[start:length], *question, *needle]
        return HiddenNeedle(torch.tensor(ids), range(len(before), len(before) + len(needle)))

    @property
    def steps(self) -> slice:
        """The rows that predict the answer."""
        return slice(len(self.ids) - len(self.needle) - 1, len(self.ids) - 1)


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
    num_allowed_HT = allowed.sum(-1).clamp(min=1)
    uniform_H = ((allowed & is_copy_TS).sum(-1) / num_allowed_HT).sum(-1).double()
    permuted_H = copies_THT.sum((0, 2)) / len(predicted_T)
    return torch.stack([retrieved_H, uniform_H.expand_as(retrieved_H), permuted_H], -1)


@dataclass(frozen=True)
class RetrievalHead:
    """Retrieval score of one head; `level` is the p-value corrected for all heads.

    The chance level of the score is that of a random key or of permuted steps, whichever is higher.
    """

    name: str
    site: str
    head: int
    score: Measure
    level: float

    @property
    def is_retrieval(self) -> bool:
        """True if the score is that of a retrieval head, and significant."""
        return self.score.value >= MIN_RETRIEVAL and self.level < SIGNIFICANCE


@dataclass(frozen=True, repr=False)
class RetrievalResult(TableResult):
    """Retrieval scores of all heads over the needles that a model found; no heads if it found none.

    A test is one needle at one depth in one haystack.
    """

    model: str
    needles: int
    tests: int
    num_found: int
    heads: tuple[RetrievalHead, ...]
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        """How many needles the model found."""
        needles = pluralise(self.needles, "needle")
        fact = f"{self.model} found {self.num_found} of {self.tests} hidden needles ({needles})"
        return f"retrieval: {fact}{'' if self.heads else ': no score'}"

    @property
    def table(self) -> Table:
        """A row for each head, the highest score first."""
        if not self.heads:
            return Table(self.title, ("head",), (), self.notes)
        ranked = sorted(self.heads, key=lambda one: -one.score.value)
        rows = [(one.name, *one.score[:4], one.level) for one in ranked]
        number = choose_format([0.01])
        alike = [Column(name, number) for name in ("score", "low", "high", "chance")]
        columns = ("head", *alike, Column("p", format_p))
        count = pluralise(sum(one.is_retrieval for one in self.heads), "retrieval head")
        note = (
            f"{count} of {len(self.heads)}: score {MIN_RETRIEVAL} or more, corrected p below 0.05"
        )
        return Table(f"{self.title}; {INTERVAL_NOTE}", columns, rows, (note, *self.notes))

    @property
    def top_table(self) -> Table:
        """The first rows of the table."""
        table = self.table
        return replace(table, rows=table.rows[:NUM_SHOWN])

    def __str__(self) -> str:
        return to_text(self.top_table)

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        return to_plain(self)


def measure_retrieval(
    model: nn.Module | Path | str,
    needles: Sequence[Needle] = (),
    texts: Any = None,
    *,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    tokenizer: object = None,
    progress: Callable[[int], object] = lambda _: None,
) -> RetrievalResult:
    """Measure which heads retrieve needles from haystacks made of `texts`, as this module defines.

    Every needle is hidden at every depth, in haystacks whose lengths alternate. Without needles
    those of `make_needles` are used, without texts the general ones of headwise. Intervals and
    p-values are over needles.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 256}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> print(measure_retrieval(net, make_needles(2), lengths=[60], tokenizer="bytes").title)
    retrieval: gpt2 found 0 of 10 hidden needles (2 needles): no score
    """
    needles = needles or make_needles()
    with text_reader(model, tokenizer) as reader:
        check_decoder(reader, "the needle test")
        examples, notes = read_texts(reader, texts or read_lines(GENERAL_TEXTS), min_count=1)
        filler = TokenTexts.of(examples)
        read_row = make_reader(reader).read_source
        encoded: list[tuple[list[int], list[int]]] = []
        for needle in needles:
            rows = [
                annotate_row(read_row(text))
                for text in (f" {needle.text}", f"\nQuestion: {needle.question}\nAnswer:")
            ]
            own, question = (row.ids[~row.is_special].tolist() for row in rows)
            encoded.append((own, question))
        around = len(filler.prefix) + max(2 * len(own) + len(asked) for own, asked in encoded)
        fitting = _fitting_lengths(reader, lengths, around)
        if len(fitting) < len(lengths):
            notes = (*notes, f"haystacks of {max(lengths)} tokens do not fit: left out")
        tests: list[tuple[int, HiddenNeedle]] = []
        for number, (own, question) in enumerate(encoded):
            for place, depth in enumerate(depths):
                length = fitting[(number + place) % len(fitting)]
                tests.append((number, HiddenNeedle.place(filler, own, question, length, depth)))
        return run_hidden_needles(reader, tests, len(needles), notes, progress)


def _fitting_lengths(model: nn.Module, lengths: Sequence[int], around: int) -> list[int]:
    """Return the lengths of haystacks for which a model has positions."""
    limit = get_max_length(model)
    fitting = [length for length in lengths if limit is None or length + around <= limit]
    if not fitting:
        fact = f"a haystack of {min(lengths)} tokens with a needle has {min(lengths) + around}"
        name = get_model_name(model)
        raise SpecError(f"{fact}, and {name} takes {limit}; give shorter lengths= or needles")
    return fitting


def run_hidden_needles(
    model: nn.Module,
    tests: Sequence[tuple[int, HiddenNeedle]],
    num_needles: int,
    notes: tuple[str, ...] = (),
    progress: Callable[[int], object] = lambda _: None,
) -> RetrievalResult:
    """Run a model on hidden needles with their numbers, and rate every head over needles."""
    sites = [one for one in require_ability(model, "observe") if one.site.kind == "attention"]
    names = [one.site.name for one in sites]
    places = [(one.site.name, head) for one in sites for head in range(one.site.q)]
    counts = np.zeros(num_needles)
    sums = np.zeros((num_needles, len(places), 3))
    num_found = 0
    for done, (number, hidden) in enumerate(tests, 1):
        hooks = {name: LargestKeyHook(hidden.steps) for name in names}
        output = run_observed(model, hidden.ids[None, :-1], sites, hooks)
        predicted_T = get_output_tensor(output)[0, hidden.steps].argmax(-1).cpu()
        answer_T = hidden.ids[-len(hidden.needle) :]
        if (predicted_T == answer_T).double().mean() >= MIN_FOUND:
            num_found += 1
            counts[number] += len(answer_T)
            by_site = [
                count_retrieved(hook.largest_HT, hook.allowed, hidden, predicted_T)
                for hook in hooks.values()
            ]
            sums[number] += torch.cat(by_site).numpy()
        progress(done)
    heads: list[RetrievalHead] = []
    if num_found:
        scores, levels = rate_heads(sums, counts)
        for place, score, level in zip(places, scores, levels, strict=True):
            heads.append(RetrievalHead(print_head(*place, names), *place, score, level))
    fields = (get_model_name(model), num_needles, len(tests), num_found)
    return RetrievalResult(*fields, tuple(heads), notes)


def rate_heads(sums: Array, counts: Array) -> tuple[list[Measure], list[float]]:
    """Return the score of every head with its interval over needles, and corrected p-values, from
    the numbers of `count_retrieved` [needles, heads, 3] and the numbers of tokens [needles].
    """
    tokens = np.broadcast_to(counts[:, None], sums.shape[:2])
    chances = [ratio_of_sums(sums[..., n], tokens) for n in (1, 2)]
    is_permuted = chances[1] > chances[0]
    baseline = np.where(is_permuted, sums[..., 2], sums[..., 1])
    estimate = Jackknife.of_ratio(sums[..., 0], tokens)
    low, high = estimate.interval()
    p = excess_p_values((sums[..., 0], tokens), (baseline, tokens))
    chance = np.maximum(*chances)
    rows = tokens.sum(0)
    columns = np.stack([estimate.value, np.maximum(low, 0), high, chance, rows, p], 1)
    return [Measure(*column) for column in columns.tolist()], correct_p_values(p).tolist()
