"""Base classes of tasks over files: `FileTask` holds the options, `Dataset` the data that was read."""

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
    """Base class of loaded data: `sizes` is the number of examples per split, `notes` states what was left out."""

    sizes: Mapping[str, int]
    notes: tuple[str, ...] = ()
    vocabulary: Vocabulary | None = None
    answers: int = 0
    end: int | None = None

    @abstractmethod
    def batch(self, index: int, size: int, split: str, seed: int) -> Batch:
        """Batch number `index` of a split, which must not be empty."""

    @abstractmethod
    def batches(self, size: int, split: str) -> int:
        """Number of batches in one pass over a split."""

    @abstractmethod
    def model(self) -> ModelSpec:
        """Spec of a default model for the data."""

    @property
    @abstractmethod
    def chance(self) -> Mapping[str, float]:
        """Value of each metric for random guessing."""

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Metrics of `logits` against `batch.labels`."""
        return measure_accuracy(logits, batch)

    def prompt(self, batch: Batch) -> tuple[Tensor, SequenceInfo | None]:
        """Prompts for generation."""
        raise NotImplementedError("this data does not use generation")

    def score(self, generated: Sequence[Sequence[int]], batch: Batch) -> MetricSums:
        """Metrics of generated answers."""
        raise NotImplementedError("this data does not use generation")

    @property
    def usage(self) -> ProcessorSpec:
        """How to turn raw input into ids, and ids into output, for a model that was trained on this data."""
        return ProcessorSpec(tokenizer=self.vocabulary.document if self.vocabulary else None)


# Datasets by task fields and file stamps, so that equal tasks read their files once; kept while a task uses them.
_LOADED_DATASETS: WeakValueDictionary[Any, Dataset] = WeakValueDictionary()


@dataclass(frozen=True, repr=False)
class FileTask(CheckedDataclass, Task):
    """Base class of tasks whose examples are read from files; tasks with equal fields share the data they read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed < 0:
            raise SpecError(f"seed={self.seed} is below 0; use 0 or more")
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
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def check(self) -> None:
        """Raise SpecError for invalid options, before any file is opened."""

    @abstractmethod
    def files(self) -> Sequence[Path]:
        """Paths of all files that are read."""

    @abstractmethod
    def read(self) -> Dataset:
        """Read the files."""

    @property
    def data(self) -> Dataset:
        """The data that was read."""
        return vars(self)["_data"]

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what was left out of the data, and why."""
        return self.data.notes

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        self._check_batch_arguments(size, split)
        if index < 0:
            raise ValueError(f"index={index} is below 0; batches are counted from 0")
        if not self.data.sizes.get(split):
            available = " and ".join(name for name in SPLITS if self.data.sizes.get(name))
            raise SpecError(
                f"{self!r} has no {split} split, only {available}; use one of these, or hold out data: {split}=0.05"
            )
        return self.data.batch(index, size, split, self.seed)

    def batches(self, size: int, split: str = "train") -> int | None:
        self._check_batch_arguments(size, split)
        return self.data.batches(size, split) if self.data.sizes.get(split) else 0

    def _check_batch_arguments(self, size: int, split: str) -> None:
        check_split(split)
        if size < 1:
            raise ValueError(f"a batch of {size} examples is empty; use 1 or more")

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
        """Token ids of a text, such as a prompt."""
        if self.data.vocabulary is None:
            raise ValueError(f"{self!r} has no tokenizer; pass ids instead of text")
        return self.data.vocabulary.encode([text])[0].tolist()


# --- Default models ------------------------------------------------------------------------------------

DEFAULT_SHAPE = ModelShape(width=128, heads=4, layers=4, feed=512)
TARGET_NUM_PATCHES = 64  # approximate number of patches per image


def make_language_model(vocab_size: int) -> ModelSpec:
    """A causal decoder of four layers with 128 channels, embedding and output weights tied.

    >>> from headwise import costs
    >>> costs.count_parameters(make_language_model(65))  # 65 d + 4 (12 d^2 + 9 d) + 2 d, for d = 128
    799616
    """
    blocks, embedding = DEFAULT_SHAPE.blocks("causal()"), EmbeddingSpec(vocab_size)
    stack = StackSpec.from_blocks("decoder", DEFAULT_SHAPE.width, blocks, embedding=embedding, norm=NormSpec())
    return ModelSpec("text", "decoder", (stack,), (OutputHeadSpec("tokens", vocab_size, table="decoder"),))


def make_translator(vocab_sizes: tuple[int, int], width: int, layers: int, table: str) -> ModelSpec:
    """Encoder and decoder of `layers` layers each, with 32 channels per head.

    table="one" ties the embeddings of source and target and the output weights; table="two" ties only the target
    embedding and the output weights. `vocab_sizes` are those of source and target.

    >>> make_translator((11, 11), 64, 2, "one").tied_weights()
    {'decoder.embedding.tokens': 'encoder.embedding.tokens', 'head.tokens.weight': 'encoder.embedding.tokens'}
    """
    shape = ModelShape(width, width // 32, layers, 4 * width)
    shared_table = "encoder" if table == "one" else ""
    source, target = EmbeddingSpec(vocab_sizes[0]), EmbeddingSpec(vocab_sizes[1], table=shared_table)
    stacks = (
        StackSpec.from_blocks("encoder", width, shape.blocks("full()"), embedding=source, norm=NormSpec()),
        StackSpec.from_blocks("decoder", width, shape.blocks("causal()", "full()"), embedding=target, norm=NormSpec()),
    )
    head = OutputHeadSpec("tokens", vocab_sizes[1], table=shared_table or "decoder")
    return ModelSpec("translator", "encoder-decoder", stacks, (head,))


def make_classifier(
    name: str, embedding: EmbeddingSpec, classes: int, pooling: str, kind: str = "encoder"
) -> ModelSpec:
    """An encoder of four layers with 128 channels; pooling="mean" gives one class per example, "each" one per token."""
    stack = StackSpec.from_blocks(
        "encoder", DEFAULT_SHAPE.width, DEFAULT_SHAPE.blocks("full()"), embedding=embedding, norm=NormSpec()
    )
    return ModelSpec(name, kind, (stack,), (OutputHeadSpec("classes", classes, pooling, bias="learned"),))


def make_patches(high: int, wide: int, channels: int) -> PatchSpec:
    """Square patches for images of this size, about 64 of them; a size that divides the image evenly is preferred.

    >>> make_patches(28, 28, 1)
    PatchSpec(rows=7, columns=7, high=4, wide=4, channels=1)
    """
    target_size = max(1, round((high * wide / TARGET_NUM_PATCHES) ** 0.5))
    divisors = [size for size in range(target_size, 2 * target_size + 1) if high % size == 0 and wide % size == 0]
    size = min([*divisors, target_size][0], high, wide)
    return PatchSpec(high // size, wide // size, size, size, channels)
