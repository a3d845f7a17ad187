"""Sentences and what they are in another language: batches for an encoder and a decoder, and what is right in them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..blueprint import ModelSpec, ProcessorSpec
from ..errors import SpecError, suggest
from ..tokens import SequenceInfo
from .base import IGNORED, Batch, Tally
from .brought import Data
from .order import Numbers, Plan, bucketed, budgeted, members, packed
from .sizes import translator
from .vocabulary import Ids, Pieces, learned

START, END = "<s>", "</s>"
FORMS = ("bucketed", "budget", "packed")
MANY = 10_000  # pairs from which on a wider model pays


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


@dataclass(frozen=True)
class Making:
    """How pairs become batches: what all adaptors that have pairs let a user choose.

    `vocab` pieces are learnt from the train split, one vocabulary for both sides or `separate` ones. Pairs with
    more than `longest` tokens on a side are not trained on. form="bucketed": a batch of so many pairs of about one
    length; "budget": as many as that many tokens hold; "packed": rows of `longest` tokens, filled with several pairs.
    """

    vocab: int = 8000
    vocabularies: str = "shared"
    longest: int = 128
    form: str = "bucketed"

    def __post_init__(self) -> None:
        for name, known in (("vocabularies", ("shared", "separate")), ("form", FORMS)):
            if (said := getattr(self, name)) not in known:
                raise SpecError(f"{name}={said!r} is unknown; {suggest(said, known)}")
        if self.longest < 2:
            raise SpecError(f"longest={self.longest} leaves no room beside the end; give longest=2 or more")


@dataclass(eq=False)
class Corpus:
    """The pairs of each split, and a sentence for each reason that some were left out."""

    splits: Mapping[str, list[Pair]]
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(train: Iterable[Pair], shares: tuple[float, float], own: Mapping[str, list[Pair]]) -> Corpus:
        """Held-out splits are their `own` pairs or a share of those to train on; no source is in two splits.

        Sources that differ in case, punctuation and spaces alone count as one.
        """
        pairs, notes = list(train), list[str]()
        whole = [pair for pair in pairs if pair.source and pair.target]
        if len(whole) < len(pairs):
            notes.append(f"left out, for a side of theirs is empty: {len(pairs) - len(whole)} of {len(pairs)} pairs")
        if not whole:
            raise SpecError("there is no pair with words on both sides; give source and target sentences")
        held = dict(own)
        if "valid" not in own:
            valid, test = shares[0], 0.0 if "test" in own else shares[1]
            found = members([plain(pair.source) for pair in whole], valid, test)
            held |= {split: [whole[n] for n in found[split]] for split in ("valid", "test") if split not in own}
            whole = [whole[n] for n in found["train"]]
        judged = {plain(pair.source) for split in held.values() for pair in split}
        kept = [pair for pair in whole if plain(pair.source) not in judged]
        if len(kept) < len(whole):
            notes.append(
                f"not trained on, for their sources are held out: {len(whole) - len(kept)} of {len(whole)} pairs"
            )
        if not kept:
            raise SpecError("every pair to train on is held out too; give other files to validate and test")
        return Corpus({"train": kept, **held}, notes)


def plain(sentence: str) -> str:
    """What two sentences share that are nearly one: letters and digits alone, or the sentence where it has none.

    >>> plain("Hi, Tom!") == plain("hi tom."), plain("?!")
    (True, '?!')
    """
    folded = unicodedata.normalize("NFKC", sentence).casefold()
    return re.sub(r"[\W_]+", "", folded) or sentence


class Side(NamedTuple):
    """One side of all pairs of a split, as ids."""

    ids: list[Ids]
    lengths: Numbers

    @staticmethod
    def of(ids: list[Ids]) -> Side:
        return Side(ids, np.array([len(one) + 1 for one in ids], np.int64))  # and the end, or the start


class Pairs(Data):
    """Pairs as ids. A source is read up to its end; a target is begun with a start and asked up to its end."""

    def __init__(self, corpus: Corpus, making: Making) -> None:
        self.making, self.pairs = making, dict(corpus.splits)
        self.vocabularies = _vocabularies(self.pairs["train"], making)
        self.vocabulary = target = self.vocabularies[1]
        self.target, self.start, self.end = target, target.special(START), target.special(END)
        coded = {split: self._coded(pairs) for split, pairs in self.pairs.items()}
        long = np.flatnonzero(_levels(coded["train"]) > making.longest)
        self.notes = tuple(corpus.notes)
        if len(long):
            said = f"not trained on, for they have more than longest={making.longest} tokens on a side"
            self.notes += (f"{said}: {len(long)} of {len(self.pairs['train'])} pairs",)
            kept = sorted(set(range(len(self.pairs["train"]))) - set(long.tolist()))
            self.pairs["train"] = [self.pairs["train"][n] for n in kept]
            coded["train"] = tuple(Side.of([side.ids[n] for n in kept]) for side in coded["train"])
        if not self.pairs["train"]:
            raise SpecError(f"no pair to train on has at most {making.longest} tokens on each side; raise longest=")
        self.coded = coded
        self.sizes = {split: len(pairs) for split, pairs in self.pairs.items()}
        held = [side.lengths for split, sides in coded.items() if split != "train" for side in sides[1:]]
        self.answers = int(np.concatenate([*held, coded["train"][1].lengths]).max()) + 8  # room for a longer wording
        self._plans: dict[tuple[str, int], Plan] = {}

    def _coded(self, pairs: list[Pair]) -> tuple[Side, ...]:
        texts = [pair.source for pair in pairs], [pair.target for pair in pairs]
        return tuple(Side.of(v.encode(side)) for v, side in zip(self.vocabularies, texts, strict=True))

    def _plan(self, size: int, split: str) -> Plan:
        """How examples share batches, which no seed changes."""
        key = split, size
        if key not in self._plans:
            form = "bucketed" if split != "train" and self.making.form == "packed" else self.making.form
            lengths = [side.lengths for side in self.coded[split]]
            levels = _levels(self.coded[split])
            if form == "packed":
                self._plans[key] = packed(lengths, self.making.longest, size)
            else:
                self._plans[key] = {"bucketed": bucketed, "budget": budgeted}[form](levels, size)
        return self._plans[key]

    def batches(self, size: int, split: str) -> int:
        return self._plan(size, split).batches

    def batch(self, index: int, size: int, split: str, seed: int) -> Batch:
        plan = self._plan(size, split)
        rows = plan.take(index, seed) if split == "train" else plan.sweep(index)
        sources, targets = self.coded[split]
        stop, end = self.vocabularies[0].special(END), self.target.special(END)
        source, source_tokens = _joined([[[*sources.ids[n], stop] for n in row] for row in rows])
        x, tokens = _joined([[[self.start, *targets.ids[n]] for n in row] for row in rows])
        labels, _ = _joined([[[*targets.ids[n], end] for n in row] for row in rows], IGNORED)
        alone = split != "train" or self.making.form != "packed"  # so that a row is one example
        gold = [self.pairs[split][row[0]].target for row in rows] if alone else ()
        return Batch(x, labels, tokens, source, source_tokens, gold)

    def prompt(self, batch: Batch) -> tuple[Tensor, SequenceInfo | None]:
        return batch.x[:, :1], None

    def score(self, generated: Sequence[Sequence[int]], batch: Batch) -> Tally:
        """How many answers are the wanted one, letter for letter."""
        if len(batch.gold) != len(generated):
            raise ValueError(f"{len(generated)} answers for {len(batch.gold)} sentences; packed rows cannot be scored")
        told = [self.target.decode(row) for row in generated]
        return {"exact_match": (float(sum(a == b for a, b in zip(told, batch.gold, strict=True))), len(told))}

    @property
    def usage(self) -> ProcessorSpec:
        source, target = self.vocabularies
        own = None if source is target else source.document
        around = {"behind": (source.special(END),), "begin": (self.start,), "end": (self.end,)}
        return ProcessorSpec(**around, tokenizer=target.document, source_tokenizer=own)

    @property
    def chance(self) -> Mapping[str, float]:
        return {"accuracy": 1 / self.target.size, "exact_match": 0.0}

    def model(self) -> ModelSpec:
        source, target = self.vocabularies
        width, layers = (256, 3) if self.sizes["train"] >= MANY else (128, 2)
        return translator((source.size, target.size), width, layers, table="one" if source is target else "two")


def _levels(sides: Sequence[Side]) -> Numbers:
    return np.max([side.lengths for side in sides], axis=0)


def _vocabularies(train: list[Pair], making: Making) -> tuple[Pieces, Pieces]:
    sources, targets = ([pair[n] for pair in train] for n in (0, 1))
    if making.vocabularies == "separate":
        first, second = (learned(texts, making.vocab, (START, END)) for texts in (sources, targets))
        return first, second
    both = learned([*sources, *targets], making.vocab, (START, END))
    return both, both


def _joined(rows: list[list[list[int]]], rest: int = 0) -> tuple[Tensor, SequenceInfo]:
    """Ids [B, T] of rows that hold one text or several, filled up with `rest`, and where each token stands."""
    length = max(sum(map(len, row)) for row in rows)
    ids, position, segment = np.is_full((3, len(rows), length), -1, np.int64)
    ids[:], position[:] = rest, 0
    for n, row in enumerate(rows):
        flat = [one for text in row for one in text]
        ids[n, : len(flat)] = flat
        position[n, : len(flat)] = [at for text in row for at in range(len(text))]
        segment[n, : len(flat)] = [k for k, text in enumerate(row) for _ in text]
    # Of texts alone in their rows nobody asks: filled up to one length they are one call.
    lengths = tuple(tuple(map(len, row)) for row in rows) if any(len(row) > 1 for row in rows) else None
    tokens = SequenceInfo(torch.from_numpy(position), torch.from_numpy(segment), checked=True, lengths=lengths)
    return torch.from_numpy(ids), tokens
