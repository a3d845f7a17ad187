"""The texts of a data set on which each head is strongest, and a sample of ordinary ones, found in
one pass and in bounded memory.

A head that looks clear on a few chosen texts often does something else on most others. Therefore a
uniform sample of the data set is kept beside the strongest texts, and divided into deciles of the
measure. The sample has the texts with the smallest hashes of seed and inputs, so that neither
the order of the texts nor their division among processes changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...report.data import Table
from ...report.notebook import ShownTable, TableResult
from ...report.text import cut
from ...util.errors import SpecError, check_known, pluralise
from ..head_names import locate_head, print_head
from ..inspect.site import Site
from ..inspect.trace_capture import get_model_name
from .annotated_examples import Example
from .attention_sinks import digest_inputs
from .head_measurement import (
    ExampleEngine,
    MeasureCollector,
    MeasureOptions,
    measure_heads,
    select_sites,
)
from .resampling import Array
from .text_analysis import find_sites, read_texts, text_reader
from .weight_bands import WeightBand

NUM_DECILES = 10
PER_DECILE = 3  # texts of each decile
MAX_SAMPLE = 1000  # texts of the uniform sample; deciles of more texts are estimated
CONTEXT = 24  # characters before a query in a table
LARGEST = "largest"


def _pairs_at_offset(band: WeightBand, offset: int) -> Tensor:
    return band.key_positions == band.query_positions[:, None] + offset


def _pairs_of_tokens(band: WeightBand, is_induction: bool) -> Tensor:
    t, s = band.same_id_pairs
    chosen = s + 1 < t if is_induction else s != t
    t = t[chosen] - band.first_query
    s = s[chosen] - band.first_key + is_induction
    is_in_band = (s >= 0) & (s < band.w_HTS.shape[2])
    pairs = torch.zeros(band.w_HTS.shape[1:], dtype=torch.bool)
    pairs[t[is_in_band], s[is_in_band]] = True
    return pairs


# What texts are compared by: "largest" is the largest weight of a query on one key, the others are
# the weight of a query on all keys that it is paired with, [T, S].
SEQUENCE_MEASURES: Mapping[str, Callable[[WeightBand], Tensor]] = {
    LARGEST: lambda band: band.allowed.any(0),
    "previous": partial(_pairs_at_offset, offset=-1),
    "self": partial(_pairs_at_offset, offset=0),
    "next": partial(_pairs_at_offset, offset=1),
    "duplicate": partial(_pairs_of_tokens, is_induction=False),
    "induction": partial(_pairs_of_tokens, is_induction=True),
    "punctuation": lambda band: band.slice_keys(band.key_tokens.is_punctuation),
}


class SequenceCollector(MeasureCollector):
    """Collects the `count` strongest texts of every head, and a sample of all texts, during the
    pass of `measure_heads`.

    A record is a row [value, hash of the text, query, key]; the value is -inf if the measure is
    undefined in a text.
    """

    needs_sinks = True

    def __init__(self, measure: str = LARGEST, count: int = 10, seed: int = 0) -> None:
        check_known("measure", measure, SEQUENCE_MEASURES)
        if count < 1:
            raise SpecError(f"count must be >= 1, got {count}")
        self.measure = measure
        self.count = count
        self.seed = seed
        self.num_texts = 0
        # Records [heads, 4] by hash and site, and the strongest [texts, heads, 4] by site.
        self.sample: dict[int, dict[str, Array]] = {}
        self.strongest: dict[str, Array] = {}
        self.texts: dict[int, tuple[int, Example]] = {}  # those with a record, and their numbers
        self._text: tuple[int, Example] | None = None
        self._records: dict[str, Array] = {}

    def start_example(self, example: Example) -> None:
        """Begin a text."""
        digest = digest_inputs(example, str(self.seed))
        self._text = (int.from_bytes(digest[:8]) >> 11, example)  # 53 bits, exact as a float
        self._records = {}

    def add_band(self, site: str, band: WeightBand) -> None:
        """Find the query with the largest value of each head, and its key with the largest weight;
        weights on sinks are left out.

        A query that may read a single key gives it all its weight, and is left out too.
        """
        assert self._text is not None
        is_largest = self.measure == LARGEST
        if not is_largest and not band.is_self_attention:
            return
        device = band.w_HTS.device
        is_sink = band.slice_keys(band.key_tokens.is_sink).to(device)
        pairs = SEQUENCE_MEASURES[self.measure](band).to(device) & ~is_sink
        candidates = band.allowed & pairs & (band.num_allowed_keys > 1)[..., None]
        weights = torch.where(candidates, band.w_HTS, 0)
        rows = weights.amax(-1) if is_largest else weights.sum(-1)
        value, query = torch.where(candidates.any(-1), rows, -torch.inf).double().max(1)
        key = weights[torch.arange(len(weights)), query].argmax(-1)
        text = torch.full_like(value, self._text[0])
        columns = (value, text, band.first_query + query, band.first_key + key)
        records = torch.stack([column.double() for column in columns], 1).cpu().numpy()
        earlier = self._records.get(site, records)
        self._records[site] = np.where(records[:, :1] > earlier[:, :1], records, earlier)

    def finish_example(self) -> None:
        """Keep the text if it is among the strongest of a head, or in the sample."""
        assert self._text is not None
        text, example = self._text
        strongest = {site: records[None] for site, records in self._records.items()}
        self._keep({text: self._records}, strongest, {text: (0, example)}, 1)

    def merge(self, later: SequenceCollector) -> None:
        """Add what was kept of later texts of the data set."""
        self._keep(later.sample, later.strongest, later.texts, later.num_texts)

    def _keep(
        self,
        sample: Mapping[int, dict[str, Array]],
        strongest: Mapping[str, Array],
        texts: Mapping[int, tuple[int, Example]],
        num_texts: int,
    ) -> None:
        """Merge the records of texts after those so far."""
        joined = self.sample | dict(sample)
        self.sample = {text: joined[text] for text in sorted(joined)[:MAX_SAMPLE]}
        for site, records in strongest.items():
            both = np.concatenate([self.strongest.get(site, records[:0]), records])
            order = np.lexsort((both[..., 1], -both[..., 0]), axis=0)[: self.count]
            self.strongest[site] = np.take_along_axis(both, order[..., None], 0)
        named = set(self.sample)
        for records in self.strongest.values():
            named.update(records[records[..., 0] > -np.inf][:, 1].astype(int).tolist())
        renumbered = {text: (self.num_texts + n, one) for text, (n, one) in texts.items()}
        candidates = self.texts | renumbered
        self.texts = {text: candidates[text] for text in candidates if text in named}
        self.num_texts += num_texts

    def result(self, model: nn.Module) -> TopSequences:
        """Return what was kept of every head."""
        modules, streams = select_sites(model)
        sites = [one.site for one in modules if one.site.name in self.strongest]
        heads: dict[tuple[str, int], list[HeadSequence]] = {}
        for name, strongest in self.strongest.items():
            sampled = [one[name] for one in self.sample.values() if name in one]
            columns = np.stack([strongest[0], *sampled])[1:]
            for head in range(strongest.shape[1]):
                rows = [[*record, 0] for record in strongest[:, head].tolist()]
                rows += _select_from_deciles(columns[:, head])
                heads[name, head] = [
                    HeadSequence(value, self.texts[int(text)][0], int(query), int(key), decile)
                    for value, text, query, key, decile in rows
                    if value > -np.inf
                ]
        examples = dict(sorted(self.texts.values(), key=lambda one: one[0]))
        name = get_model_name(model)
        return TopSequences(name, self.measure, self.num_texts, sites, streams, heads, examples)


def _select_from_deciles(records: Array) -> list[list[Any]]:
    """Select texts of each decile of a sample, those with the smallest hashes; add the decile."""
    defined = records[records[:, 0] > -np.inf]
    deciles = np.empty(len(defined), dtype=int)
    order = np.lexsort((defined[:, 1], defined[:, 0]))
    deciles[order] = np.arange(len(defined)) * NUM_DECILES // max(1, len(defined)) + 1
    chosen: list[list[Any]] = []
    for decile in range(NUM_DECILES, 0, -1):
        chosen += [[*row, decile] for row in defined[deciles == decile][:PER_DECILE].tolist()]
    return chosen


class HeadSequence(NamedTuple):
    """A text that was kept of a head: the value of the measure, its number among the different
    texts of the data set, the query with this value and its key with the largest weight among
    those that the measure is about, and the decile of the data set that it stands for, 1 to 10; 0
    for one of the strongest texts.
    """

    value: float
    text: int
    query: int
    key: int
    decile: int


@dataclass(frozen=True, repr=False)
class TopSequences(TableResult):
    """The strongest texts of every head over a data set, and some of each decile.

    `heads` maps a site and a head to its texts, the strongest first, and then the deciles from the
    highest to the lowest; `examples` maps the number of a text to the text, and `streams` the name
    of a site to the streams of its queries and keys.
    """

    model: str
    measure: str
    num_texts: int
    sites: Sequence[Site]
    streams: Mapping[str, tuple[str, str]]
    heads: Mapping[tuple[str, int], Sequence[HeadSequence]]
    examples: Mapping[int, Example]

    @property
    def table(self) -> Table:
        """The strongest text of each head, the head with the largest value first."""
        names = [one.name for one in self.sites]
        firsts = {head: sequences[0] for head, sequences in self.heads.items() if sequences}
        ordered = sorted(firsts, key=lambda head: -firsts[head].value)
        rows = [(print_head(*head, names), *self._describe(head, firsts[head])) for head in ordered]
        return self._make_table("strongest text of each head", "head", rows)

    def head_table(self, name: str) -> Table:
        """Return the texts that were kept of a head, such as L0H3."""
        head = locate_head(name, self.sites)
        sequences = self.heads.get(head, ())
        rows = [(str(one.decile or "strongest"), *self._describe(head, one)) for one in sequences]
        return self._make_table(name, "decile", rows)

    def _make_table(self, title: str, first: str, rows: Sequence[Sequence[Any]]) -> Table:
        columns = (first, self.measure, "text", "query", "key", "up to the query")
        texts = pluralise(self.num_texts, "text")
        return ShownTable(f"{self.model}, {texts}: {title}", columns, rows)

    def _describe(self, head: tuple[str, int], one: HeadSequence) -> tuple[Any, ...]:
        """Return value, text, query, key and what stands before the query."""
        queries, keys = (self.words(one.text, stream) for stream in self.streams[head[0]])
        before = "".join(queries[: one.query + 1]).strip()[-CONTEXT:]
        places = ((queries, one.query), (keys, one.key))
        tokens = [words[place] if words else "" for words, place in places]
        shown = [cut(word.strip() or repr(word), CONTEXT) for word in tokens]
        return (one.value, one.text, *shown, before)

    def words(self, text: int, stream: str) -> Sequence[str]:
        """Return the tokens of a text that was kept; none if they are only counted."""
        tokens = self.examples[text].streams.get(stream)
        return () if tokens is None else tokens.words

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        heads = [
            {"site": site, "head": head, "sequences": [one._asdict() for one in sequences]}
            for (site, head), sequences in self.heads.items()
        ]
        texts: dict[int, dict[str, list[str]]] = {}
        for number, example in self.examples.items():
            texts[number] = {name: list(one.words) for name, one in example.streams.items()}
        fields = {"model": self.model, "measure": self.measure, "num_texts": self.num_texts}
        return fields | {"heads": heads, "texts": texts}


def find_top_sequences(
    model: nn.Module | Path | str,
    texts: Any,
    measure: str = LARGEST,
    *,
    count: int = 10,
    seed: int = 0,
    engine: ExampleEngine | None = None,
    tokenizer: object = None,
) -> TopSequences:
    """Find the `count` texts on which each head of a model is strongest, and some of each decile.

    Model, texts and tokenizer as in `hw.heads`; `measure` is one of `SEQUENCE_MEASURES`. `engine`
    measures the texts elsewhere, with the same result, bit for bit.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 256}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> top = hw.head_analysis.find_top_sequences(net, ["abab", "abcd", "b"], tokenizer="bytes")
    >>> sorted(one.text for one in top.heads["decoder.0.attention", 1] if not one.decile)
    [0, 1]
    """
    with text_reader(model, tokenizer) as reader:
        examples, _ = read_texts(reader, texts, min_count=1)
        find_sites(reader, examples)
        collector = SequenceCollector(measure, count, seed)
        options = MeasureOptions(metrics=(), engine=engine, min_texts=1)
        measure_heads(reader, examples, options=options, collectors=[collector])
        return collector.result(reader)
