"""The inputs and outputs of `hw.prune` and `hw.convert`: any model with plain texts, and folders of
the result.
"""

from __future__ import annotations

import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import nn

from ..hub.pretrained_models import load, open_model
from ..hub.transformers_loading import read_live_processor
from ..models import Transformer
from ..models.model_spec.serialization import TOKENIZER_FILE
from ..observe.head_analysis.annotated_examples import Example
from ..observe.head_analysis.attention_sinks import DistinctExamples
from ..observe.head_analysis.text_analysis import read_texts, text_reader
from ..observe.inspect.model_inputs import get_device
from ..observe.inspect.model_tokenizer import find_model_folder
from ..util.errors import SpecError
from ..util.output_paths import Existing, check_output, stage_folder
from .attention_replacement import to_native_model
from .hf_export.model_folder import (
    COMPRESSED_MODEL,
    NO_FILES,
    WrittenFolder,
    list_companion_files,
    write_model_folder,
)
from .pruning_plan import fingerprint_model
from .verification.verify import VerificationOptions, VerificationReport, verify, write_verification


class OriginalModel(NamedTuple):
    """The caller's model and tokenizer, for writing folders of the same kind."""

    model: nn.Module
    tokenizer: object = None


def read_model_and_texts(
    model: Any, texts: Any, tokenizer: object = None
) -> tuple[OriginalModel, Transformer, list[Example], tuple[str, ...]]:
    """Return a headwise or transformers model, a headwise model equal to it, the texts as examples,
    and notes on skipped texts.
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
    net = to_native_model(model)
    original = OriginalModel(model, tokenizer)
    if net is model:
        with text_reader(net, tokenizer) as reader:
            assert isinstance(reader, Transformer)
            return original, reader, *read_texts(reader, texts)
    has_strings = isinstance(texts, str) or (
        isinstance(texts, (list, tuple)) and any(not isinstance(item, Example) for item in texts)
    )
    needed = "required" if tokenizer is not None or has_strings else "if it fits"
    net.usage = read_live_processor(model, net.spec, tokenizer, needed)
    return original, net, *read_texts(net, texts)


@dataclass(frozen=True, eq=False)
class SurgeryResult(ABC):
    """Model before and after a change, and the model as the caller gave it.

    `summary` is the change in one clause, `verification_options` are the arguments of
    `VerificationOptions` that check it.
    """

    before: Transformer
    after: Transformer
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
    def record(self) -> dict[str, Any]:
        """The change, and the fingerprint of the model that it was made to, for heads.json."""
        return self.data | {"model": fingerprint_model(self.before)}

    def save_pretrained(self, folder: Path | str) -> WrittenFolder:
        """Write the changed model to a new folder, with its tokenizer and the change in heads.json.

        The folder of a transformers model is one that transformers loads, if its layers can be
        described or resized; `summary` of the result names the kind of folder. Uses the weights in
        memory, not the weights in the original folder.
        """
        check_output(folder, COMPRESSED_MODEL)
        original = self.original.model
        if isinstance(original, Transformer):
            return write_model_folder(self.after, None, folder, self.record)
        with TemporaryDirectory() as temporary:
            source = Path(temporary)
            _save_original(original, self.original.tokenizer, self.after, source)
            written = write_model_folder(self.after, source, folder, self.record)
        if written.kind == "ours":
            warnings.warn(f"{folder} is not for transformers. {written.summary}", stacklevel=2)
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


class OutputFolder(NamedTuple):
    """A folder for a changed model: its path, what happens to an earlier one, the folder of the
    original (None: it was built in memory), and other files by name.
    """

    path: Path
    existing: Existing = "refuse"
    source: Path | None = None
    extra_files: Mapping[str, bytes] = NO_FILES


def write_and_verify(
    result: SurgeryResult,
    after: Transformer,
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
        written = write_model_folder(
            after, folder.source, staged, record, extra_files=folder.extra_files
        )
        device = get_device(after)
        exports = {"headwise.load of the written folder": lambda: load(staged, device=device)}
        options = replace(options, exports=exports, **result.verification_options)
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
    own_folder = find_model_folder(model)
    for path in () if own_folder is None else list_companion_files(own_folder):
        target = folder / path.relative_to(own_folder or path)
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
    save_tokenizer: Any = getattr(tokenizer, "save_pretrained", None)
    file = folder / TOKENIZER_FILE
    if save_tokenizer is not None:
        save_tokenizer(folder)
    elif net.usage.tokenizer is not None and (tokenizer or not file.exists()):
        file.write_text(net.usage.tokenizer, encoding="utf-8")
