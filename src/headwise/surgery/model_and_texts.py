"""The inputs and outputs of `hw.prune` and `hw.convert`: any model with plain texts, and folders of
the result.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import nn

from ..hub.pretrained_models import load, load_original, open_model
from ..hub.transformers_loading import read_live_processor
from ..models import Transformer
from ..models.model_spec.serialization import TOKENIZER_FILE
from ..observe.head_analysis.annotated_examples import Example
from ..observe.head_analysis.attention_sinks import DistinctExamples
from ..observe.head_analysis.text_analysis import read_texts, text_reader
from ..observe.inspect.attention_sites import sites
from ..observe.inspect.model_inputs import get_device
from ..report.data import Item, Table
from ..report.notebook import NotebookResult
from ..util.errors import SpecError
from ..util.output_paths import Existing, check_output, stage_folder
from .attention_replacement import to_native_model
from .hf_export.model_folder import (
    COMPRESSED_MODEL,
    OutputFolder,
    WrittenFolder,
    copy_companions,
    forecast_folder,
    is_transformers_folder,
    write_model_folder,
)
from .pruning_plan import fingerprint_model
from .verification.model_comparison import is_language_model, random_ids
from .verification.verify import VerificationOptions, VerificationReport, verify, write_verification


class OriginalModel(NamedTuple):
    """The caller's model and tokenizer, for writing folders of the same kind."""

    model: nn.Module
    tokenizer: object = None


class OpenedModel(NamedTuple):
    """A model as the caller gave it, the headwise model equal to it, texts as its examples, and
    notes on skipped texts.
    """

    original: OriginalModel
    net: Transformer
    examples: list[Example]
    notes: tuple[str, ...]


class UnreadModel(SpecError):
    """Raised for a transformers model that headwise does not load as its own, with the reason."""

    def __init__(self, reason: str, model: nn.Module) -> None:
        super().__init__(reason)
        self.model = model


def read_model_and_texts(model: Any, texts: Any, tokenizer: object = None) -> OpenedModel:
    """Return a headwise or transformers model with its texts; raises UnreadModel for a transformers
    model that headwise does not load as its own.
    """
    model = open_model(model)
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) is None and not isinstance(model, Transformer):
        raise SpecError(
            f"{type(model).__name__} is no model of transformers or headwise; "
            "hw.prune_module(model, heads, example) "
            "removes heads of any nn.Module, and hw.convert_module(model, kv, example) shares its "
            "keys and values"
        )
    try:
        net = to_native_model(model)
    except SpecError as error:
        is_offloaded = any(parameter.is_meta for parameter in model.parameters())
        if is_offloaded or not any(site.ablate.possible for site in sites(model)):
            raise
        raise UnreadModel(str(error), model) from None
    original = OriginalModel(model, tokenizer)
    if net is model:
        with text_reader(net, tokenizer) as reader:
            assert isinstance(reader, Transformer)
            return OpenedModel(original, reader, *read_texts(reader, texts))
    has_strings = isinstance(texts, str) or (
        isinstance(texts, (list, tuple)) and any(not isinstance(item, Example) for item in texts)
    )
    needed = "required" if tokenizer is not None or has_strings else "if it fits"
    net.usage = read_live_processor(model, net.spec, tokenizer, needed)
    return OpenedModel(original, net, *read_texts(net, texts))


@contextmanager
def read_example(
    unread: UnreadModel, texts: Any, tokenizer: object
) -> Iterator[tuple[list[Example], Any, tuple[str, ...]]]:
    """Context with the texts as examples of a model that headwise does not load, an input to
    compare the changed model on, and notes.
    """
    model: Any = unread.model
    with text_reader(model, tokenizer) as reader:
        examples, notes = read_texts(reader, texts)
        if not examples and not is_language_model(model):
            raise SpecError(
                f"cannot compare the changed {type(model).__name__} without an input; give texts, "
                "images, or hw.Example({name: tensor}, {}) in a list"
            )
        example: Any = examples[0].model_inputs if examples else random_ids(model)
        yield examples, example, (*notes, MODULE_NOTE)


MODULE_NOTE = (
    "changed as a module of transformers, because headwise does not load this model as its own: "
    "retraining and folding are not available"
)


@dataclass(frozen=True, eq=False, repr=False)
class SurgeryResult(NotebookResult):
    """Model before and after a change, and the model as the caller gave it.

    `summary` is the change in one clause, `verification_options` are the arguments of
    `VerificationOptions` that check it.
    """

    before: Any
    after: Any
    original: OriginalModel

    @property
    @abstractmethod
    def data(self) -> dict[str, Any]:
        """The change as JSON-serialisable values."""

    @property
    @abstractmethod
    def summary(self) -> str: ...

    @property
    @abstractmethod
    def verification_options(self) -> dict[str, Any]: ...

    @property
    @abstractmethod
    def head_rows(self) -> list[tuple[str, int, int, int, int]]:
        """Each attention with its query heads before and after, and its key-value heads."""

    @abstractmethod
    def write_folder(
        self, after: Any, target: OutputFolder, record: Mapping[str, Any]
    ) -> WrittenFolder:
        """Write `after`, the changed model that was perhaps retrained, to a folder."""

    @abstractmethod
    def forecast_folder(self, source: Path | None) -> str | None:
        """Return why the folder will not be a plain checkpoint of transformers, "" if it will be
        one; None if it will be one of headwise, as `source`, the folder of the original, is.
        """

    @property
    def removed_params(self) -> int:
        """Number of parameters of the model less that of the copy."""
        sizes = [sum(one.numel() for one in net.parameters()) for net in (self.before, self.after)]
        return sizes[0] - sizes[1]

    @property
    def report_items(self) -> Sequence[Item]:
        """The query heads and key-value heads of every attention, before and after."""
        title, *notes = str(self).splitlines()
        columns = ("site", "heads", "heads after", "KV heads", "KV heads after", "heads kept")
        kept_heads = self.verification_options.get("keep", {})
        rows = [(*row, " ".join(map(str, kept_heads.get(row[0], ())))) for row in self.head_rows]
        return [Table(title, columns, rows, notes).without_empty_columns()]

    @property
    def record(self) -> dict[str, Any]:
        """The change, and the fingerprint of the model that it was made to, for heads.json."""
        return self.data | {"model": fingerprint_model(self.before)}

    def save_pretrained(self, folder: Path | str, *, overwrite: bool = False) -> WrittenFolder:
        """Write the changed model to a new folder, with its tokenizer and the change in heads.json.

        The folder of a transformers model is one that transformers loads, if its layers can be
        described or resized; `summary` of the result names the kind of folder. Uses the weights in
        memory, not the weights in the original folder.
        """
        existing: Existing = "overwrite" if overwrite else "refuse"
        check_output(folder, COMPRESSED_MODEL, existing)
        target = OutputFolder(Path(folder), existing)
        return self.write_folder(self.after, target, self.record)


@dataclass(frozen=True, eq=False, repr=False)
class NativeResult(SurgeryResult):
    """A change of a model that headwise loads as its own."""

    before: Transformer
    after: Transformer

    @property
    def head_rows(self) -> list[tuple[str, int, int, int, int]]:
        after = {site: spec.heads for site, spec in self.after.spec.attention_specs()}
        rows = list[tuple[str, int, int, int, int]]()
        for site, spec in self.before.spec.attention_specs():
            q, kv = (after[site].q, after[site].kv) if site in after else (0, 0)
            rows.append((site, spec.heads.q, q, spec.heads.kv, kv))
        return rows

    def forecast_folder(self, source: Path | None) -> str | None:
        if source is None or not is_transformers_folder(source):
            return None
        return forecast_folder(self.after, source)

    def write_folder(
        self, after: Any, target: OutputFolder, record: Mapping[str, Any]
    ) -> WrittenFolder:
        original = self.original.model
        path, existing, source, extra_files = target
        write = partial(write_model_folder, after, existing=existing, extra_files=extra_files)
        if source is not None or isinstance(original, Transformer):
            return write(source, path, record)
        with TemporaryDirectory() as temporary:
            source = Path(temporary)
            _save_original(original, self.original.tokenizer, after, source)
            written = write(source, path, record)
        if written.kind == "ours":
            warnings.warn(f"{target.path} is not for transformers. {written.summary}", stacklevel=2)
        return written


def split_examples(
    examples: list[Example], uses: Sequence[str], min_count: int = 8
) -> tuple[list[Example], list[Example], list[str]]:
    """Split the examples in two, for the change of a model and for its verification report; also
    return notes for the report.

    `uses` is what the change uses texts for; if empty, the verification takes all examples. With
    fewer than `min_count` examples, both sides take all of them. Duplicates are dropped first, so
    that no text is on both sides.

    >>> split_examples([], ["heads were aligned"])[2]
    ['heads were aligned with the 0 texts of the verification, because they are too few to split']
    """
    distinct = DistinctExamples(examples)
    examples = list(distinct)
    if not uses:
        return examples, examples, [*distinct.notes]
    if len(examples) < min_count:
        selection = verification = examples
        end = (
            f"with the {len(examples)} texts of the verification, because they are too few to split"
        )
    else:
        selection = examples[::2]
        verification = examples[1::2]
        end = f"with {len(selection)} texts that the verification does not use"
    return selection, verification, [*(f"{use} {end}" for use in uses), *distinct.notes]


def write_and_verify(
    result: SurgeryResult,
    after: Any,
    examples: Sequence[Example],
    options: VerificationOptions,
    folder: OutputFolder,
    record: Mapping[str, Any],
    log: Callable[[str], object],
) -> tuple[WrittenFolder, VerificationReport]:
    """Write a changed model, perhaps retrained, with its verification report; the folder appears
    complete or not at all.

    `options` need not check the change and the folder: that is added here.
    """
    with stage_folder(folder.path, COMPRESSED_MODEL, folder.existing) as staged:
        log("writing the model")
        target = folder._replace(path=staged, existing="refuse")
        written = result.write_folder(after, target, record)
        device = get_device(after)
        is_native = isinstance(after, Transformer)
        load_folder = load if is_native else load_original
        name = f"{'headwise.load' if is_native else 'transformers'} of the written folder"
        checks = result.verification_options
        exports = {name: lambda: load_folder(staged, device=device)}
        checks["exports"] = exports | checks.get("exports", {})
        if written.load_report:
            options = replace(
                options, notes=(*options.notes, f"the folder was {written.load_report}")
            )
        options = replace(options, **checks)
        verification = verify(result.before, after, examples, options, log)
        log("writing the report")
        write_verification(verification, staged)
    return written, verification


def _save_original(model: nn.Module, tokenizer: object, net: Transformer, folder: Path) -> None:
    """Write a live transformers model with its tokenizer, as `write_model_folder` reads it."""
    save_model: Any = getattr(model, "save_pretrained", None)
    if save_model is None:
        raise SpecError(
            f"{type(model).__name__} has no save_pretrained, so its folder cannot be written; save "
            "the headwise model instead, hw.save(result.after, folder)"
        )
    save_model(folder)
    copy_companions(model, tokenizer, folder)
    file = folder / TOKENIZER_FILE
    if getattr(tokenizer, "save_pretrained", None) is not None:
        return
    if net.usage.tokenizer is not None and (tokenizer or not file.exists()):
        file.write_text(net.usage.tokenizer, encoding="utf-8")
