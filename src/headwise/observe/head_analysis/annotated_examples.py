"""Examples for measuring heads: model inputs with annotations of their tokens, read from text,
parses or aligned pairs.

An `Example` is one text, or a source and a target. `examples_from_lines`,
`examples_from_sentences`, `examples_from_pairs` and `examples_from_task` return an `ExampleReader`
with the examples and notes on what was skipped.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...models import Transformer
from ...training.data import Batch, Task
from ...training.data.translation import join_words
from ...util.errors import SequenceTooLong, SpecError, UnknownToken
from ...util.files import read_text_file
from ..inspect.model_inputs import (
    ModelInputs,
    get_max_length,
    is_encoder_decoder,
    prepare_inputs,
    run_prepared,
    split_rows,
)
from ..inspect.model_tokenizer import PAD_ID, decode_rows, find_token_decoder
from ..traces import TokenRow

# key of an example's inputs that holds the expected outputs and is not passed to the model
LABELS_INPUT = "labels"


@dataclass(frozen=True, eq=False)
class TokenAnnotations:
    """Annotate the tokens of one stream, one entry per token.

    - `ids`, `words`: token ids and their texts.
    - `is_special`: tokens that stand for no text, such as [CLS], or that are padding.
    - `is_separator`: special tokens other than the first one.
    - `is_punctuation`: tokens written in punctuation characters only.
    - `word_index`: index of the word that the token is part of, -1 for none.
    - `frequency`: how often the id occurs in the whole data set, 0 if not counted.
    - `first_is_sink`: whether the first token was measured to be an attention sink of the model.
    - `patch_grid`: row and column of each patch of an image, [T, 2]; -1 for other tokens. None for
      texts.
    - `has_words`: False for tokens that are only counted, such as those of sound.
    """

    ids: Tensor
    words: tuple[str, ...]
    is_special: Tensor
    is_separator: Tensor
    is_punctuation: Tensor
    word_index: Tensor
    frequency: Tensor
    first_is_sink: bool = False
    patch_grid: Tensor | None = None
    has_words: bool = True

    @property
    def count(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    @cached_property
    def is_sink(self) -> Tensor:
        """Attention sinks: special tokens, separators, and the first token if measured as one by
        `attention_sinks.mark_first_token_sinks`.
        """
        is_first = torch.zeros_like(self.is_special)
        is_first[:1] = self.first_is_sink
        return self.is_special | self.is_separator | is_first


@lru_cache(maxsize=64)
def count_tokens(stream: str, count: int) -> TokenAnnotations:
    """Tokens of a stream of which only the number is known, such as those of an image or of sound;
    calls with equal arguments return the same object.
    """
    places = torch.arange(count)
    no = torch.zeros(count, dtype=torch.bool)
    words = ("",) * count
    return TokenAnnotations(places, words, no, no, no, places, no.long(), has_words=False)


@dataclass(frozen=True, eq=False)
class Example:
    """Hold the inputs of one model call, a text or a source and a target, and their annotations.

    `streams` maps "text" (and "source") to token annotations; tokens of streams that it lacks are
    only counted. `dependencies` are gold (dependent,
    governor, relation) triples of word indices from 0. `alignment_links` are gold (source word,
    target word, is sure) triples. Both may be empty.
    """

    inputs: Any
    streams: Mapping[str, TokenAnnotations]
    dependencies: Sequence[tuple[int, int, str]] = field(default=())
    alignment_links: Sequence[tuple[int, int, bool]] = field(default=())

    @property
    def parsed_stream(self) -> str:
        """Return the name of the stream with dependencies: the source of an encoder-decoder, else
        the text.
        """
        return "source" if "source" in self.streams else "text"

    def is_within(self, lengths: range) -> bool:
        """Return True if every stream's number of tokens is one of `lengths`."""
        return all(tokens.count in lengths for tokens in self.streams.values())

    @property
    def model_inputs(self) -> Any:
        """The inputs without the labels.

        >>> Example({"x": 3, "labels": 5}, {}).model_inputs
        {'x': 3}
        """
        inputs: Any = self.inputs
        if not isinstance(inputs, Mapping):
            return inputs
        return {name: value for name, value in inputs.items() if name != LABELS_INPUT}

    @property
    def batch_key(self) -> tuple[object, ...] | None:
        """Return what examples must share to be rows of one batch; None unless the inputs are one
        row of ids, or several by name.
        """
        inputs = self.model_inputs
        named = inputs if isinstance(inputs, Mapping) else {"": inputs}
        for value in named.values():
            is_row = isinstance(value, Tensor) and value.dim() == 2 and len(value) == 1
            if not is_row or value.is_floating_point():
                return None
        shapes = [(name, value.shape, value.dtype) for name, value in named.items()]
        return (*shapes, *(tokens.count for tokens in self.streams.values()))


def join_inputs(examples: Sequence[Example]) -> Any:
    """Inputs of examples with equal `batch_key` as rows of one batch."""
    inputs = [example.model_inputs for example in examples]
    if len(inputs) == 1:
        return inputs[0]
    if isinstance(inputs[0], Tensor):
        return torch.cat(inputs)
    return {name: torch.cat([row[name] for row in inputs]) for name in inputs[0]}


# --- Parsed sentences in CoNLL-U (universaldependencies.org/format) -------------------------------

NUM_COLUMNS = 10
Span = tuple[int, int]
WORD_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class ParsedSentence:
    """A sentence, its words and their character spans, and dependencies (dependent, governor,
    relation), counted from
    0.

    Subtypes of relations are dropped: "nsubj:pass" becomes "nsubj". The root has no dependency.
    """

    text: str
    words: tuple[str, ...]
    word_spans: tuple[tuple[int, int], ...]
    dependencies: tuple[tuple[int, int, str], ...]


def read_conllu(lines: Iterable[str], source: str = "CoNLL-U") -> Iterator[ParsedSentence]:
    """Yield the sentences of a CoNLL-U file; `source` names the file in error messages.

    >>> rows = [
    ...     "# text = Dogs bark",
    ...     "1\\tDogs\\t_\\t_\\t_\\t_\\t2\\tnsubj\\t_\\t_",
    ...     "2\\tbark\\t_\\t_\\t_\\t_\\t0\\troot\\t_\\t_",
    ... ]
    >>> next(read_conllu(rows))
    ParsedSentence(text='Dogs bark', words=('Dogs', 'bark'), word_spans=((0, 4), (5, 9)),
    dependencies=((0, 1,
    'nsubj'),))
    """
    rows: list[tuple[str, list[str]]] = []  # the place of each row, for messages, and its columns
    text = ""
    first_line = 1
    for line_number, line in enumerate([*lines, ""], 1):
        if line.startswith("#"):
            name, _, value = line[1:].partition("=")
            text = value.strip() if name.strip() == "text" else text
        elif line.strip():
            where = f"{source}, line {line_number}"
            columns = line.rstrip("\n").split("\t")
            if len(columns) != NUM_COLUMNS:
                fact = f"a row has {len(columns)} columns, not {NUM_COLUMNS}"
                raise SpecError(f"{where}: {fact}; separate columns with tabs")
            rows.append((where, columns))
        elif rows:
            yield _parse_sentence(text, rows, f"{source}, sentence at line {first_line}")
            rows = []
            text = ""
        first_line = line_number + 1 if not rows else first_line


def _parse_sentence(text: str, rows: Sequence[tuple[str, list[str]]], where: str) -> ParsedSentence:
    words: list[str] = []
    pieces: list[tuple[str, int]] = []  # each stretch of text and the number of words written in it
    dependencies: list[tuple[int, int, str]] = []
    covered = 0  # words up to this one belong to a multi-word token
    for place, row in rows:
        if "." in row[0]:  # an empty node: a word that is not written
            continue
        numbers = [_parse_number(part, place) for part in row[0].split("-", 1)]
        follows = f"follows word {len(words)}"
        if len(numbers) == 2:
            if numbers[0] != len(words) + 1 or numbers[1] < numbers[0]:
                raise SpecError(f"{place}: the range {row[0]} {follows}; write first-last")
            covered = numbers[1]
            pieces.append((row[1], covered - numbers[0] + 1))
            continue
        if numbers[0] != len(words) + 1:
            raise SpecError(f"{place}: word {numbers[0]} {follows}; number words 1, 2, 3")
        words.append(row[1])
        if numbers[0] > covered:
            pieces.append((row[1], 1))
        governor = _parse_number(row[6], place)
        if governor:
            dependencies.append((numbers[0] - 1, governor - 1, row[7].partition(":")[0]))
    for dependent, governor, _ in dependencies:
        if governor >= len(words):
            fact = f"the governor of word {dependent + 1} is word {governor + 1} of {len(words)}"
            raise SpecError(f"{where}: {fact}; give 1..{len(words)}, or 0 for the root")
    text = text or " ".join(piece for piece, _ in pieces)
    # Words of one multi-word token get consecutive spans if they spell the token together;
    # otherwise each gets its whole span.
    spans: list[Span] = []
    position = 0
    for piece, count in pieces:
        start = text.find(piece, position)
        if start < 0:
            fact = f"{where}: {piece!r} is not found in the text after character {position}"
            raise SpecError(f"{fact}; correct the line that starts with # text =")
        position = start + len(piece)
        written = words[len(spans) : len(spans) + count]
        if "".join(written) != piece:
            spans += [(start, position)] * count
            continue
        for word in written:
            spans.append((start, start + len(word)))
            start += len(word)
    return ParsedSentence(text, tuple(words), tuple(spans), tuple(dependencies))


def _parse_number(text: str, where: str) -> int:
    if not WORD_NUMBER.fullmatch(text):
        raise SpecError(f"{where}: {text!r} is not a word number; use integers from 0")
    return int(text)


# --- Examples from texts, parses, aligned pairs and tasks -----------------------------------------

WORD_PATTERN = re.compile(r"\w+|[^\w\s]")  # words of a text without a parse
MAX_GENERATED_TOKENS = 64  # length of the target that the model generates for a source without one


@dataclass
class ExampleReader:
    """Collect the examples of one data set in order, and count what was skipped or split.

    Token frequencies cover the whole data set: call `examples_with_frequencies` after everything
    has been added.
    """

    model: nn.Module
    examples: list[Example] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def add_text(
        self,
        text: str,
        target: str = "",
        *,
        dependencies: Sequence[tuple[int, int, str]] | None = None,
        alignment_links: Sequence[tuple[int, int, bool]] = (),
        spans: Mapping[str, Sequence[Span]] = MappingProxyType({}),
    ) -> None:
        """Add one text, or a source and its target, optionally with dependencies or alignment links
        between words.

        `spans` are the character spans of the words of a stream; without them its text is split
        into words. For an encoder-decoder model and no target, the model generates one.
        """
        if not text.strip():
            self.skipped["empty lines"] += 1
            return
        try:
            inputs = self._prepare(text, target)
        except (SequenceTooLong, UnknownToken) as error:
            reason = f"texts longer than the model's {get_max_length(self.model)} tokens"
            if isinstance(error, UnknownToken):
                reason = "texts with characters that the tokenizer does not know"
            self.skipped[reason] += 1
            return
        streams: dict[str, TokenAnnotations] = {}
        num_lost = 0  # words without a separate token
        for name, rows in inputs.token_rows.items():
            tokens = annotate_row(rows[0], spans.get(name))
            streams[name] = tokens
            words_with_tokens = {*tokens.word_index.tolist()} - {-1}
            num_lost += len(spans[name]) - len(words_with_tokens) if name in spans else 0
        if (dependencies is not None or alignment_links) and num_lost:
            reason = "sentences skipped because some of their words have no token of their own"
            self.skipped[reason] += 1
            return
        # a model that takes one dictionary is called with `args`
        arguments = inputs.args or inputs.kwargs
        links = tuple(alignment_links)
        self.examples.append(Example(arguments, streams, dependencies or (), links))

    def add_inputs(self, inputs: Any) -> None:
        """Add token ids, or the model's arguments by name; every row of a batch is a text."""
        for row in split_rows(self.model, inputs):
            prepared = prepare_inputs(self.model, row)
            token_rows = decode_rows(self.model, prepared.token_rows)
            streams = {name: annotate_row(rows[0]) for name, rows in token_rows.items()}
            self.examples.append(Example(prepared.args or prepared.kwargs, streams))

    def add_task_examples(self, task: Task, limit: int) -> None:
        """Add examples of a task with gold alignments of source and target tokens.

        Each token counts as a word.
        """
        first = task.batch(0, 1, "valid")
        if first.source is None or not first.gold or not getattr(first.gold[0], "links", ()):
            fact = f"the task {task.name} has no gold alignments"
            raise SpecError(f"{fact}; use --task dates, or --align SOURCE TARGET GOLD")
        tokenizer = self.model.usage.tokenizer if isinstance(self.model, Transformer) else None
        if tokenizer is None or tokenizer != task.tokenizer:
            fact = f"the model does not use the vocabulary of the task {task.name}"
            raise SpecError(f"{fact}; use a model trained on this task")
        for index in range(limit):
            batch = task.batch(index, 1, "valid")
            streams = self.annotate_batch(batch)
            # The start token of the target is not a word.
            streams["text"] = replace(streams["text"], word_index=streams["text"].word_index - 1)
            links = tuple((int(s), int(t), True) for s, t in batch.gold[0].links)
            inputs = {"x": batch.x, "source": batch.source}
            self.examples.append(Example(inputs, streams, (), links))

    def annotate_batch(self, batch: Batch) -> dict[str, TokenAnnotations]:
        """Annotate the streams of a batch of one example; each token counts as a word."""
        streams: dict[str, TokenAnnotations] = {}
        for name, ids in (("text", batch.x), ("source", batch.source)):
            if ids is not None:
                numbers = ids[0].tolist()
                decode = find_token_decoder(self.model, name)
                row = TokenRow(tuple(numbers), tuple(map(decode, numbers)))
                streams[name] = annotate_row(row)
        return streams

    def examples_with_frequencies(self) -> list[Example]:
        """The examples, with the frequency of each token's id over all of them."""
        counts: dict[str, Counter[int]] = {}
        for example in self.examples:
            for name, tokens in example.streams.items():
                counts.setdefault(name, Counter()).update(tokens.ids.tolist())
        examples: list[Example] = []
        for example in self.examples:
            streams = dict(example.streams)
            for name, tokens in example.streams.items():
                frequency = [counts[name][token_id] for token_id in tokens.ids.tolist()]
                streams[name] = replace(tokens, frequency=torch.tensor(frequency))
            examples.append(replace(example, streams=streams))
        return examples

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the numbers of texts that were skipped or split."""
        return tuple(f"{reason}: {count}" for reason, count in self.skipped.items())

    def _prepare(self, text: str, target: str) -> ModelInputs:
        """Model inputs of a text; the model generates the target of a source without one."""
        if target or not is_encoder_decoder(self.model):
            texts = {"source": text, "text": target} if target else text
            return prepare_inputs(self.model, texts, 0)
        max_length = get_max_length(self.model)  # the start token has the first position
        limit = min(MAX_GENERATED_TOKENS, (max_length or MAX_GENERATED_TOKENS + 1) - 1)
        inputs = prepare_inputs(self.model, text, limit)
        with torch.inference_mode():
            generated = run_prepared(self.model, inputs, limit)
        generated = generated.tolist() if isinstance(generated, Tensor) else generated
        rows = inputs.extend_rows(generated)
        ids = torch.tensor([rows[0].ids])
        kwargs = {"source": torch.tensor(inputs.prompt_ids), "x": ids}
        if inputs.kwargs:  # a transformers model
            kwargs = {"input_ids": inputs.kwargs["input_ids"], "decoder_input_ids": ids}
        return replace(inputs, kwargs=kwargs, token_rows={**inputs.token_rows, "text": rows})


def examples_from_lines(
    model: nn.Module, lines: Iterable[str | tuple[str, str]], limit: int | None = None
) -> ExampleReader:
    """Read one text per line; a tab separates a source from its target. A line may also be a pair
    (source, target).

    Lines longer than the model takes are split at spaces.
    """
    reader = ExampleReader(model)
    for line in lines:
        if limit is not None and len(reader.examples) >= limit:
            break
        pair = line.partition("\t")[::2] if isinstance(line, str) else line
        source, target = pair
        pieces = [source]
        if not target and not is_encoder_decoder(model):
            pieces = list(_split_text(model, source))
        if len(pieces) > 1:
            reader.skipped["lines split because they are longer than the model takes"] += 1
        for piece in pieces:
            reader.add_text(piece, target)
    return reader


def examples_from_sentences(
    model: nn.Module, sentences: Iterable[ParsedSentence], limit: int | None = None
) -> ExampleReader:
    """Read parsed sentences."""
    reader = ExampleReader(model)
    for sentence in sentences:
        if limit is not None and len(reader.examples) >= limit:
            break
        spans = {"source" if is_encoder_decoder(model) else "text": sentence.word_spans}
        reader.add_text(sentence.text, dependencies=sentence.dependencies, spans=spans)
    return reader


def examples_from_pairs(
    model: nn.Module,
    pairs: Iterable[tuple[str, str]],
    gold_links: Iterable[Sequence[tuple[int, int, bool]]],
) -> ExampleReader:
    """Read pairs of source and target, with gold links between their words, which are separated by
    spaces.

    The model reads the words of a language without spaces between words, such as Chinese, joined.
    """
    reader = ExampleReader(model)
    for number, (pair, links) in enumerate(zip(pairs, gold_links, strict=True), 1):
        (source, source_spans), (target, target_spans) = map(join_words, pair)
        for link in links:
            if not (0 <= link[0] < len(source_spans) and 0 <= link[1] < len(target_spans)):
                words = f"{len(source_spans)} source words and {len(target_spans)} target words"
                fact = f"pair {number} links word {link[0]} to {link[1]} but has {words}"
                raise SpecError(f"{fact}; count words from 0")
        spans = {"source": source_spans, "text": target_spans}
        reader.add_text(source, target, alignment_links=links, spans=spans)
    return reader


def examples_from_task(
    model: nn.Module, task: Task, limit: int, split: str = "valid"
) -> ExampleReader:
    """Read examples of a task with their labels: `limit` of them, or all if the task has fewer."""
    reader = ExampleReader(model)
    first = task.batch(0, 1, split)
    if not isinstance(model, Transformer):
        fact = f"{type(model).__name__} does not use the vocabulary of the task {task.name}"
        raise SpecError(f"{fact}; give lines of text instead")
    sizes: list[Any] = []  # a model that was built for another task has others
    for spec in (model.spec, task.model()):
        embeddings = [stack.embedding for stack in spec.stacks]
        table_sizes = [one and (one.tokens, one.patches) for one in embeddings]
        sizes.append((table_sizes, spec.heads[0].outputs if spec.heads else 0))
    if sizes[0] != sizes[1] or model.usage.tokenizer not in (None, task.tokenizer):
        fact = f"the model does not have the inputs and outputs of the task {task.name}"
        raise SpecError(f"{fact}; use one trained on it")
    num_examples = task.batches(1, split)
    has_tokens = first.x.dim() == 2 and not first.x.is_floating_point()
    for index in range(limit if num_examples is None else min(limit, num_examples)):
        batch = task.batch(index, 1, split)
        tensors = {
            "x": batch.x,
            "sequence": batch.tokens,
            "source": batch.source,
            "source_sequence": batch.source_tokens,
        }
        inputs: dict[str, Any] = {name: one for name, one in tensors.items() if one is not None}
        inputs[LABELS_INPUT] = batch.labels
        reader.examples.append(Example(inputs, reader.annotate_batch(batch) if has_tokens else {}))
    return reader


def parse_alignment_links(line: str, number: int) -> tuple[tuple[int, int, bool], ...]:
    """Parse a line such as "0-0 1-2 2?3": source word, "-" for a sure or "?" or "p" for a possible
    link, target word.

    >>> parse_alignment_links("0-0 1?2", 1)
    ((0, 0, True), (1, 2, False))
    """
    links: list[tuple[int, int, bool]] = []
    for item in line.split():
        match = re.fullmatch(r"(\d+)([-?p])(\d+)", item)
        if match is None:
            raise SpecError(
                f"line {number}: {item!r} is not an alignment link; write source-target, as in "
                "0-0 1-2 2?3"
            )
        links.append((int(match[1]), int(match[3]), match[2] == "-"))
    return tuple(links)


# Texts for a model whose user names none: prose, lists, dialogue, numbers and code, in English.
GENERAL_TEXTS = Path(__file__).parents[1] / "sample" / "texts.txt"
GENERAL_TEXTS_NOTE = "no texts were named: the heads were measured over general ones in English"


def read_lines(path: Path | str) -> list[str]:
    """Return the lines of a UTF-8 text file, without line ends."""
    lines = [line.removesuffix("\r") for line in read_text_file(path).split("\n")]
    return lines if lines[-1] else lines[:-1]


def _split_text(model: nn.Module, text: str) -> Iterator[str]:
    """Split a text in halves at spaces until the model takes each part."""
    words = text.split(" ")
    is_long = False
    try:
        prepare_inputs(model, text, 0)
    except SequenceTooLong:
        is_long = len(words) > 1
    except ValueError:
        pass  # any other problem is reported when the text is read
    if not is_long:
        yield text
        return
    for part in (words[: len(words) // 2], words[len(words) // 2 :]):
        yield from _split_text(model, " ".join(part))


def annotate_row(row: TokenRow, spans: Sequence[Span] | None = None) -> TokenAnnotations:
    """Annotate the tokens of a row.

    `spans` are the words of a parse, or None to split the text into words.
    """
    ids = torch.tensor(row.ids)
    special = torch.zeros(len(ids), dtype=torch.bool)
    word = torch.arange(len(ids))  # without character offsets, every token is a word
    if row.offsets:
        is_empty = [start == stop for start, stop in row.offsets]
        special = torch.tensor(is_empty, dtype=torch.bool) | (ids == PAD_ID)
        if spans is None:
            spans = [match.span() for match in WORD_PATTERN.finditer(row.text)]
        indices: list[int] = []  # of the word in which a token begins, leading spaces ignored
        for start, stop in row.offsets:
            text = row.text[start:stop]
            begin = start + len(text) - len(text.lstrip())
            words = (n for n, (first, last) in enumerate(spans) if first <= begin < last)
            indices.append(next(words, -1))
        word = torch.where(special, -1, torch.tensor(indices))
    separator = special.clone()
    separator[:1] = False
    punctuation = torch.tensor([_is_punctuation(text) for text in row.words]) & ~special
    frequency = torch.zeros_like(ids)
    return TokenAnnotations(ids, row.words, special, separator, punctuation, word, frequency)


def _is_punctuation(word: str) -> bool:
    """Return True if a token consists of punctuation in any language (Unicode categories P).

    >>> [_is_punctuation(word) for word in (".", "。", " ,", "a.", "")]
    [True, True, True, False, False]
    """
    bare = word.strip().lstrip("Ġ▁")
    return bool(bare) and all(unicodedata.category(char).startswith("P") for char in bare)
