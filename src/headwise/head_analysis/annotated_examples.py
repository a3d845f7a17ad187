"""A text with what is known of its tokens, as measures ask for it."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Batch, Task
from ..errors import SequenceTooLong, SpecError, UnknownToken
from ..generation import load_tokenizers
from ..inspect.model_inputs import PAD_ID, ModelInputs, get_max_length, is_encoder_decoder, prepare_inputs
from ..inspect.site_hooks import ModelRun
from ..models import Transformer
from ..traces import TokenRow

LABELS_INPUT = "labels"  # what inputs may say beside what the model reads: what is wanted at each place of its output


@dataclass(frozen=True, eq=False)
class TokenAnnotations:
    """What is known of the tokens of one stream, by number.

    `special` are those that stand for no text, `separator` those of them that end a part, `punctuation` those that say
    so; `first` begins every text where that is special or read by a causal model. `word` numbers the words that tokens
    are pieces of, -1 for none; `common` says how often each id was met in the whole data, 0 where nobody counted.
    """

    ids: Tensor
    words: tuple[str, ...]
    is_special: Tensor
    is_separator: Tensor
    is_punctuation: Tensor
    word_index: Tensor
    frequency: Tensor

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Example:
    """One text, or a source and a text, as a model is called with it.

    `arcs` are (dependent, governor, relation) of words, from 0; `links` are (source word, target word), sure ones with
    True; both are of gold and empty where there is none.
    """

    inputs: Any
    streams: Mapping[str, TokenAnnotations]
    dependencies: Sequence[tuple[int, int, str]] = field(default=())
    alignment_links: Sequence[tuple[int, int, bool]] = field(default=())

    @property
    def model_inputs(self) -> Any:
        """What the model reads of its inputs: all but the labels.

        >>> Example({"x": 3, "labels": 5}, {}).model_inputs
        {'x': 3}
        """
        told: Any = self.inputs
        return {name: one for name, one in told.items() if name != LABELS_INPUT} if isinstance(told, Mapping) else told


def find_sink_tokens(annotations: TokenAnnotations) -> Tensor:
    """Which keys are sinks for whatever has nowhere to look: the first token, and those that stand for no text."""
    found = annotations.is_special | annotations.is_separator
    first = torch.zeros_like(found)
    first[:1] = True
    return found | first


# --- Parsed sentences as CoNLL-U writes them (universaldependencies.org/format) ------------------------

NUM_COLUMNS = 10
ROOT_RELATION = "root"


@dataclass(frozen=True)
class ParsedSentence:
    """A text, where each word stands in it, and arcs (dependent, governor, relation) between words, from 0.

    Relations lose what stands behind their colon: "nsubj:pass" is "nsubj". The root has no arc.
    """

    text: str
    words: tuple[str, ...]
    word_spans: tuple[tuple[int, int], ...]
    dependencies: tuple[tuple[int, int, str], ...]


def read_conllu(lines: Iterable[str], source: str = "CoNLL-U") -> Iterator[ParsedSentence]:
    """The sentences of a file.

    >>> rows = [
    ...     "# text = Dogs bark",
    ...     "1\\tDogs\\t_\\t_\\t_\\t_\\t2\\tnsubj\\t_\\t_",
    ...     "2\\tbark\\t_\\t_\\t_\\t_\\t0\\troot\\t_\\t_",
    ... ]
    >>> next(read_conllu(rows))
    ParsedSentence(text='Dogs bark', words=('Dogs', 'bark'), word_spans=((0, 4), (5, 9)), dependencies=((0, 1,
    'nsubj'),))
    """
    rows: list[list[str]] = []
    text, first = "", 1
    for number, line in enumerate([*lines, ""], 1):
        if line.startswith("#"):
            name, _, value = line[1:].partition("=")
            text = value.strip() if name.strip() == "text" else text
        elif line.strip():
            rows.append(_split_columns(line, f"{source}, line {number}"))
        elif rows:
            yield _parse_sentence(text, rows, f"{source}, sentence at line {first}")
            rows, text = [], ""
        first = number + 1 if not rows else first


def _split_columns(line: str, where: str) -> list[str]:
    row = line.rstrip("\n").split("\t")
    if len(row) != NUM_COLUMNS:
        raise SpecError(f"{where}: a row has {len(row)} columns, not {NUM_COLUMNS}; part them by tabs")
    return row


def _parse_sentence(text: str, rows: Sequence[Sequence[str]], where: str) -> ParsedSentence:
    words: list[str] = []
    pieces: list[tuple[str, int]] = []  # how each stretch is written, and of how many words it is
    arcs: list[tuple[int, int, str]] = []
    covered = 0
    for row in rows:
        if "." in row[0]:  # a word that is not written
            continue
        if "-" in row[0]:
            first, last = (_parse_number(part, where) for part in row[0].split("-", 1))
            pieces.append((row[1], last - first + 1))
            covered = last
            continue
        number = _parse_number(row[0], where)
        if number != len(words) + 1:
            raise SpecError(f"{where}: word {number} follows word {len(words)}; number them 1, 2, 3")
        words.append(row[1])
        if number > covered:
            pieces.append((row[1], 1))
        governor = _parse_number(row[6], where)
        if governor:
            arcs.append((number - 1, governor - 1, row[7].partition(":")[0]))
    if wrong := [one for one in arcs if not one[1] < len(words)]:
        raise SpecError(f"{where}: word {wrong[0][0] + 1} hangs on word {wrong[0][1] + 1} of {len(words)}")
    text = text or " ".join(piece for piece, _ in pieces)
    return ParsedSentence(text, tuple(words), tuple(_find_word_spans(text, words, pieces, where)), tuple(arcs))


def _find_word_spans(
    text: str, words: Sequence[str], pieces: Sequence[tuple[str, int]], where: str
) -> Iterator[tuple[int, int]]:
    """Where each word stands; words that are written as one stand one after another in it, or all in all of it."""
    at, number = 0, 0
    for piece, count in pieces:
        start = text.find(piece, at)
        if start < 0:
            raise SpecError(f"{where}: {piece!r} does not stand in its text behind place {at}; correct # text =")
        own = words[number : number + count]
        inner = start
        for word in own:
            whole = "".join(own) != piece
            yield (start, start + len(piece)) if whole else (inner, inner + len(word))
            inner += len(word)
        at, number = start + len(piece), number + count


def _parse_number(said: str, where: str) -> int:
    if not said.isdigit():
        raise SpecError(f"{where}: {said!r} is no number of a word; give one of 0 and more")
    return int(said)


# --- Texts, parsed texts and pairs of texts, as scenes -------------------------------------------------

WORD_PATTERN = re.compile(r"\w+|[^\w\s]")  # of a text that nobody has taken apart
NON_SPACE_PATTERN = re.compile(r"\S+")
MAX_GENERATED_TOKENS = 64  # tokens that are written where a source has no text of its own
Span = tuple[int, int]


@dataclass
class ExampleReader:
    """Scenes of one data set, in order, with notes of what was left out or taken apart.

    How often ids are met is counted over all of them: `scenes` are complete when all have been added.
    """

    model: nn.Module
    examples: list[Example] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def add_text(
        self, text: str, target: str = "", sentence: ParsedSentence | None = None, alignment_links: Iterable[Any] = ()
    ) -> None:
        """One text, or a source and its target; with words and arcs of a parse, or links of an alignment."""
        if not text.strip():
            self.skipped["empty lines"] += 1
            return
        given = self._tokenise(text, target)
        if given is None:
            return
        arcs = () if sentence is None else sentence.dependencies
        linked = tuple(alignment_links)
        texts = {"source": text, "text": target}
        spans = dict.fromkeys(given.token_rows, None if sentence is None else sentence.word_spans)
        if linked:  # words of links stand between spaces
            spans = {
                name: [match.span() for match in NON_SPACE_PATTERN.finditer(texts[name])] for name in given.token_rows
            }
        streams = {name: _annotate_tokens(rows[0], spans[name]) for name, rows in given.token_rows.items()}
        if sentence is not None and (
            lost := _count_words_without_tokens(next(iter(streams.values())), len(sentence.word_spans))
        ):
            self.skipped[
                f"sentences whose words the tokenizer reads otherwise ({lost} of {len(sentence.word_spans)} words "
                "without a token in the first)"
            ] += 1
            return
        self.examples.append(Example(given.kwargs, streams, tuple(arcs), linked))

    def add_task_examples(self, task: Task, limit: int, split: str = "valid") -> None:
        """Examples of a task that knows which of its tokens are translations of which: each token is a word."""
        first = task.batch(0, 1, split)
        if first.source is None or not first.gold or not getattr(first.gold[0], "links", ()):
            raise SpecError(f"the task {task.name} knows of no links; give dates, or --align SOURCE TARGET GOLD")
        own = self.model.usage.tokenizer if isinstance(self.model, Transformer) else None
        if own is None or own != task.tokenizer:
            raise SpecError(f"the model does not read the ids of the task {task.name}; give one that was trained on it")
        for number in range(limit):
            batch = task.batch(number, 1, split)
            assert batch.source is not None, "links lead from a source"
            texts, spell = {"text": batch.x, "source": batch.source}, self.token_decoders()
            streams = {
                name: _annotate_tokens(_decode_row(ids[0].tolist(), spell[name]), None) for name, ids in texts.items()
            }
            streams["text"] = replace(
                streams["text"], word_index=streams["text"].word_index - 1
            )  # what begins it is no word
            gold = tuple((int(s), int(t), True) for s, t in batch.gold[0].links)
            self.examples.append(Example({"x": batch.x, "source": batch.source}, streams, (), gold))

    def token_decoders(self) -> Mapping[str, Callable[[int], str]]:
        """How ids are written, of the text and of the source."""
        if not isinstance(self.model, Transformer) or self.model.usage.tokenizer is None:
            return {"text": str, "source": str}
        reading, writing = load_tokenizers(self.model)
        return {"text": writing.token_text, "source": reading.token_text}

    def examples_with_frequencies(self) -> list[Example]:
        """The scenes, their tokens with how often each id was met in all of them."""
        met: dict[str, Counter[int]] = {}
        for scene in self.examples:
            for name, tokens in scene.streams.items():
                met.setdefault(name, Counter()).update(tokens.ids.tolist())
        return [
            replace(
                scene, streams={name: _with_frequencies(tokens, met[name]) for name, tokens in scene.streams.items()}
            )
            for scene in self.examples
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out, with counts."""
        return tuple(f"{count} {what}" for what, count in self.skipped.items())

    def _tokenise(self, text: str, target: str) -> ModelInputs | None:
        """The text as the model takes it; None, and a note, where it is too long."""
        two = is_encoder_decoder(self.model)
        try:
            if two and not target:
                return self._generate_target(text)
            return prepare_inputs(self.model, {"source": text, "text": target} if target else text, 0)
        except SequenceTooLong:
            self.skipped[f"texts longer than the {get_max_length(self.model)} tokens that the model takes"] += 1
        except UnknownToken:
            self.skipped["texts with something that the tokenizer does not know"] += 1
        return None

    def _generate_target(self, text: str) -> ModelInputs:
        """A source with what the model itself writes of it."""
        given = prepare_inputs(self.model, text, MAX_GENERATED_TOKENS)
        said = ModelRun(self.model, given, MAX_GENERATED_TOKENS).run_with_hooks([], {})
        rows = given.extend_rows(said.tolist() if isinstance(said, Tensor) else said)
        ours = not given.kwargs
        source = torch.tensor(given.prompt_ids) if ours else given.kwargs["input_ids"]
        names = dict(
            zip(
                ("source", "x") if ours else ("input_ids", "decoder_input_ids"),
                (source, torch.tensor([rows[0].ids])),
                strict=True,
            )
        )
        return replace(given, kwargs=names, token_rows={**given.token_rows, "text": rows})


def examples_from_lines(model: nn.Module, lines: Iterable[str], limit: int | None = None) -> ExampleReader:
    """Scenes of texts, one a line; a tab parts a source from its target. A line that is too long is split at words."""
    sources = ExampleReader(model)
    for line in lines:
        if limit is not None and len(sources.examples) >= limit:
            break
        source, _, target = line.partition("\t")
        pieces = [source] if target or is_encoder_decoder(model) else list(_split_text(model, source))
        if len(pieces) > 1:
            sources.skipped["lines split, for the model takes no more tokens at once"] += 1
        for piece in pieces:
            sources.add_text(piece, target)
    return sources


def examples_from_sentences(
    model: nn.Module, sentences: Iterable[ParsedSentence], limit: int | None = None
) -> ExampleReader:
    """Scenes of parsed sentences."""
    sources = ExampleReader(model)
    for sentence in sentences:
        if limit is not None and len(sources.examples) >= limit:
            break
        sources.add_text(sentence.text, sentence=sentence)
    return sources


def examples_from_pairs(
    model: nn.Module, pairs: Iterable[tuple[str, str]], gold_links: Iterable[Sequence[tuple[int, int, bool]]]
) -> ExampleReader:
    """Scenes of sources and targets with links between their words."""
    sources = ExampleReader(model)
    for number, ((source, target), links) in enumerate(zip(pairs, gold_links, strict=True), 1):
        counts = len(source.split()), len(target.split())
        for one in links:
            if not (0 <= one[0] < counts[0] and 0 <= one[1] < counts[1]):
                fact = f"pair {number} links word {one[0]} with {one[1]}, of {counts[0]} and {counts[1]} words"
                raise SpecError(f"{fact}; count from 0")
        sources.add_text(source, target, alignment_links=links)
    return sources


def examples_from_task(model: nn.Module, task: Task, limit: int, split: str = "valid") -> ExampleReader:
    """Scenes of a task's examples with what it wants of each; there are as many as it has, if that is fewer."""
    sources, first = ExampleReader(model), task.batch(0, 1, split)
    _check_task_matches(model, task, first)
    every = task.batches(1, split)
    spell = sources.token_decoders() if first.x.dim() == 2 and not first.x.is_floating_point() else {}
    for number in range(limit if every is None else min(limit, every)):
        one = task.batch(number, 1, split)
        named = {"x": one.x, "sequence": one.tokens, "source": one.source, "source_sequence": one.source_tokens}
        inputs = {name: told for name, told in named.items() if told is not None} | {LABELS_INPUT: one.labels}
        ids = {"text": one.x, "source": one.source} if spell else {}
        streams = {
            name: _annotate_tokens(_decode_row(told[0].tolist(), spell[name]), None)
            for name, told in ids.items()
            if told is not None
        }
        sources.examples.append(Example(inputs, streams))
    return sources


def _check_task_matches(model: nn.Module, task: Task, first: Batch) -> None:
    """Refuse a task that another model has learnt."""
    if not isinstance(model, Transformer):
        raise SpecError(f"{type(model).__name__} does not read the ids of the task {task.name}; give lines of text")
    mine, theirs = model.spec, task.model()
    ends = [[(s.embedding and (s.embedding.tokens, s.embedding.patches)) for s in one.stacks] for one in (mine, theirs)]
    heads = [one.heads[0].outputs if one.heads else 0 for one in (mine, theirs)]
    own = model.usage.tokenizer
    if ends[0] != ends[1] or heads[0] != heads[1] or (own is not None and own != task.tokenizer):
        raise SpecError(f"the model does not read and say what the task {task.name} asks; give one trained on it")


def parse_alignment_links(line: str, number: int) -> tuple[tuple[int, int, bool], ...]:
    """The links of a line as in "0-0 1-2 2?3": source and target word, sure with "-", possible with "?" or "p".

    >>> parse_alignment_links("0-0 1?2", 1)
    ((0, 0, True), (1, 2, False))
    """
    found: list[tuple[int, int, bool]] = []
    for one in line.split():
        parts = re.fullmatch(r"(\d+)([-?p])(\d+)", one)
        if parts is None:
            raise SpecError(f"line {number}: {one!r} is no link; write source-target, as in 0-0 1-2 2?3")
        found.append((int(parts[1]), int(parts[3]), parts[2] == "-"))
    return tuple(found)


def read_lines(path: Path | str) -> list[str]:
    """The lines of a file of text."""
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read as text: {error}; give a file in UTF-8") from None


def _split_text(model: nn.Module, text: str) -> Iterator[str]:
    """The text, or its halves, or theirs, each of which the model takes."""
    words = text.split(" ")
    if len(words) < 2 or not _is_long(model, text):
        yield text
        return
    for part in (words[: len(words) // 2], words[len(words) // 2 :]):
        yield from _split_text(model, " ".join(part))


def _is_long(model: nn.Module, text: str) -> bool:
    try:
        prepare_inputs(model, text, 0)
    except SequenceTooLong:
        return True
    except ValueError:  # for another reason, which is told when it is read
        return False
    return False


def _decode_row(ids: Sequence[int], spell: Callable[[int], str]) -> TokenRow:
    return TokenRow(tuple(ids), tuple(map(spell, ids)))


def _annotate_tokens(row: TokenRow, spans: Sequence[Span] | None) -> TokenAnnotations:
    """What is known of the tokens of a row; words as a parse has them, or as they stand between spaces."""
    whole = row.offsets or ((0, 0),) * len(row.ids)
    bare = torch.tensor([start == stop or one == PAD_ID for one, (start, stop) in zip(row.ids, whole, strict=True)])
    special = bare if row.offsets else torch.zeros(len(row.ids), dtype=torch.bool)
    separator = special.clone()
    separator[:1] = False
    punctuation = torch.tensor([_is_punctuation(word) for word in row.words]) & ~special
    known = spans if spans is not None else [match.span() for match in WORD_PATTERN.finditer(row.text)]
    word = torch.tensor(
        [-1 if not row.offsets or gone else _find_word(row, n, known) for n, gone in enumerate(special.tolist())]
    )
    if not row.offsets:
        word = torch.arange(len(row.ids))
    ids = torch.tensor(row.ids)
    return TokenAnnotations(ids, row.words, special, separator, punctuation, word, torch.zeros_like(ids))


def _find_word(row: TokenRow, number: int, spans: Sequence[Span]) -> int:
    """The word in which a token begins, spaces before it left aside; -1 where it begins in none."""
    start, stop = row.offsets[number]
    start += len(row.text[start:stop]) - len(row.text[start:stop].lstrip())
    return next((n for n, (first, last) in enumerate(spans) if first <= start < last), -1)


def _is_punctuation(word: str) -> bool:
    """Whether a token is written in signs of punctuation alone, in any language (Unicode's categories P).

    >>> [_is_punctuation(word) for word in (".", "。", " ,", "a.", "")]
    [True, True, True, False, False]
    """
    bare = word.strip().lstrip("Ġ▁")
    return bool(bare) and all(unicodedata.category(char).startswith("P") for char in bare)


def _count_words_without_tokens(tokens: TokenAnnotations, words: int) -> int:
    """How many words have no token."""
    return words - len(set(tokens.word_index.tolist()) - {-1})


def _with_frequencies(tokens: TokenAnnotations, met: Mapping[int, int]) -> TokenAnnotations:
    return replace(tokens, frequency=torch.tensor([met[one] for one in tokens.ids.tolist()]))
