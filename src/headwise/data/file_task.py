"""Tasks over data that is brought along: a description says what to read and how, and holds what was read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from ..errors import SpecError
from ..interfaces.registry import CheckedDataclass
from ..masking.sequence_info import SequenceInfo
from ..model_spec import EmbeddingSpec, ModelSpec, NormSpec, OutputHeadSpec, PatchSpec, ProcessorSpec, StackSpec
from .synthetic_task import ModelShape
from .task import SPLITS, Batch, MetricSums, Task, check_split, measure_accuracy
from .vocabulary import Vocabulary


class Dataset(ABC):
    """What was read, ready to be handed out. `sizes` is how many examples each split has, `notes` what was left out."""

    sizes: Mapping[str, int]
    notes: tuple[str, ...] = ()
    vocabulary: Vocabulary | None = None
    answers: int = 0
    end: int | None = None

    @abstractmethod
    def batch(self, index: int, size: int, split: str, seed: int) -> Batch:
        """Batch `index` of a split that has examples."""

    @abstractmethod
    def batches(self, size: int, split: str) -> int:
        """How many batches show a split once."""

    @abstractmethod
    def model(self) -> ModelSpec:
        """A model of a size that suits the data."""

    @property
    @abstractmethod
    def chance(self) -> Mapping[str, float]:
        """What each measure reads when nothing was learnt."""

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """What is right where labels are given."""
        return measure_accuracy(logits, batch)

    def prompt(self, batch: Batch) -> tuple[Tensor, SequenceInfo | None]:
        """What generation starts from."""
        raise NotImplementedError("nothing is generated from this data")

    def score(self, generated: Sequence[Sequence[int]], batch: Batch) -> MetricSums:
        """What is right in free answers."""
        raise NotImplementedError("nothing is generated from this data")

    @property
    def usage(self) -> ProcessorSpec:
        """How a model that has learnt this is spoken to and understood."""
        return ProcessorSpec(tokenizer=self.vocabulary.document if self.vocabulary else None)


# What tasks that are alike have read, for as long as one of them lives: reading again would give the same.
_LOADED_DATASETS: WeakValueDictionary[Any, Dataset] = WeakValueDictionary()


@dataclass(frozen=True, repr=False)
class FileTask(CheckedDataclass, Task):
    """A task whose examples stand in files. Two that print alike, over unchanged files, are alike."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed < 0:
            raise SpecError(f"seed={self.seed} is below 0; give 0 or more")
        self.check()
        stamps = tuple((str(path), (at := path.stat()).st_mtime_ns, at.st_size) for path in self.files())
        key = type(self), tuple(value for name, value in self._field_values().items() if name != "seed"), stamps
        data = _LOADED_DATASETS.get(key)
        if data is None:
            data = _LOADED_DATASETS[key] = self.read()
        object.__setattr__(self, "_data", data)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._field_values()), ()

    def _field_values(self) -> dict[str, Any]:
        return {told.name: getattr(self, told.name) for told in fields(self)}

    def check(self) -> None:
        """Refuse fields that cannot be meant, before a file is opened."""

    @abstractmethod
    def files(self) -> Sequence[Path]:
        """Every file that is read."""

    @abstractmethod
    def read(self) -> Dataset:
        """What stands in them."""

    @property
    def data(self) -> Dataset:
        """What was read."""
        return vars(self)["_data"]

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out of the data, and why, a sentence each."""
        return self.data.notes

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        self._check_batch_arguments(size, split)
        if index < 0:
            raise ValueError(f"there is no batch {index}; count from 0")
        if not self.data.sizes.get(split):
            there = " and ".join(name for name in SPLITS if self.data.sizes.get(name))
            raise SpecError(f"{self!r} has examples for {there} alone; give test=0.05, or leave {split} out")
        return self.data.batch(index, size, split, self.seed)

    def batches(self, size: int, split: str = "train") -> int | None:
        self._check_batch_arguments(size, split)
        return self.data.batches(size, split) if self.data.sizes.get(split) else 0

    def _check_batch_arguments(self, size: int, split: str) -> None:
        check_split(split)
        if size < 1:
            raise ValueError(f"a batch of {size} is none; give 1 or more")

    def model(self) -> ModelSpec:
        return self.data.model()

    @property
    def chance(self) -> Mapping[str, float]:
        return self.data.chance

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        return self.data.measure(logits, batch)

    @property
    def answers(self) -> int:
        return self.data.answers

    def prompt(self, batch: Batch) -> tuple[Tensor, SequenceInfo | None]:
        return self.data.prompt(batch)

    def score(self, generated: Sequence[Sequence[int]], batch: Batch) -> MetricSums:
        return self.data.score(generated, batch)

    @property
    def end(self) -> int | None:
        return self.data.end

    @property
    def examples(self) -> int | None:
        return self.data.sizes["train"]

    @property
    def tokenizer(self) -> str | None:
        return self.data.usage.tokenizer

    @property
    def usage(self) -> ProcessorSpec:
        return self.data.usage

    def text(self, ids: Sequence[int]) -> str:
        return self.data.vocabulary.decode(ids) if self.data.vocabulary else super().text(ids)

    def ids(self, text: str) -> list[int]:
        """The ids of a text, such as a prompt."""
        if self.data.vocabulary is None:
            raise ValueError(f"{self!r} has no tokenizer; give it ids")
        return self.data.vocabulary.encode([text])[0].tolist()


# --- Models of a size that suits data ------------------------------------------------------------------

DEFAULT_SHAPE = ModelShape(width=128, heads=4, layers=4, feed=512)
TARGET_NUM_PATCHES = 64  # about how many an image is divided into


def make_language_model(vocab_size: int) -> ModelSpec:
    """Four layers, 128 wide, with one table of tokens at both ends.

    >>> from headwise import costs
    >>> costs.count_parameters(make_language_model(65))  # 65 d + 4 (12 d^2 + 9 d) + 2 d, for d = 128
    799616
    """
    blocks, embedding = DEFAULT_SHAPE.blocks("causal()"), EmbeddingSpec(vocab_size)
    stack = StackSpec.from_blocks("decoder", DEFAULT_SHAPE.width, blocks, embedding=embedding, norm=NormSpec())
    return ModelSpec("text", "decoder", (stack,), (OutputHeadSpec("tokens", vocab_size, table="decoder"),))


def make_translator(vocab_sizes: tuple[int, int], width: int, layers: int, table: str) -> ModelSpec:
    """An encoder and a decoder of so many layers, heads 32 wide; table="one" of tokens for all, or "two".

    >>> make_translator((11, 11), 64, 2, "one").tied_weights()
    {'decoder.embedding.tokens': 'encoder.embedding.tokens', 'head.tokens.weight': 'encoder.embedding.tokens'}
    """
    shape, own = ModelShape(width, width // 32, layers, 4 * width), "encoder" if table == "one" else ""
    read, said = EmbeddingSpec(vocab_sizes[0]), EmbeddingSpec(vocab_sizes[1], table=own)
    stacks = (
        StackSpec.from_blocks("encoder", width, shape.blocks("full()"), embedding=read, norm=NormSpec()),
        StackSpec.from_blocks("decoder", width, shape.blocks("causal()", "full()"), embedding=said, norm=NormSpec()),
    )
    return ModelSpec(
        "translator", "encoder-decoder", stacks, (OutputHeadSpec("tokens", vocab_sizes[1], table=own or "decoder"),)
    )


def make_classifier(
    name: str, embedding: EmbeddingSpec, classes: int, pooling: str, kind: str = "encoder"
) -> ModelSpec:
    """Four layers, 128 wide, that read all of an example and say its class, or that of each of its tokens."""
    stack = StackSpec.from_blocks(
        "encoder", DEFAULT_SHAPE.width, DEFAULT_SHAPE.blocks("full()"), embedding=embedding, norm=NormSpec()
    )
    return ModelSpec(name, kind, (stack,), (OutputHeadSpec("classes", classes, pooling, bias="learned"),))


def make_patches(high: int, wide: int, channels: int) -> PatchSpec:
    """An image in about 64 square patches, none cut off where a size divides it evenly.

    >>> make_patches(28, 28, 1)
    PatchSpec(rows=7, columns=7, high=4, wide=4, channels=1)
    """
    least = max(1, round((high * wide / TARGET_NUM_PATCHES) ** 0.5))
    even = [size for size in range(least, 2 * least + 1) if high % size == 0 and wide % size == 0]
    size = min([*even, least][0], high, wide)
    return PatchSpec(high // size, wide // size, size, size, channels)
