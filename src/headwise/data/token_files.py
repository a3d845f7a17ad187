"""Language modelling on files of token ids (.npy, .bin, .safetensors), which stay on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import SpecError, suggest
from .example_order import DEFAULT_HELD_OUT, check_split_shares
from .file_task import FileTask
from .images import open_npy
from .language_modelling import SCAN_TOKENS, TokenSpan, TokenStreamDataset, split_ranges
from .text_files import existing_file, existing_path, find_splits
from .vocabulary import SubwordVocabulary, read_vocabulary

TOKEN_FILE_SUFFIXES = (".npy", ".bin", ".safetensors")
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


@dataclass(frozen=True, repr=False)
class TokenFileMetadata:
    """Content of the JSON file beside the ids: vocabulary size, storage type, and path of the
    tokenizer.json.
    """

    vocab: int = 0
    dtype: str = ""
    tokenizer: str = ""


@dataclass(frozen=True, repr=False)
class TokenFileTask(FileTask):
    """Language modelling on stored token ids, in rows of `length`; the ids are never all in memory
    at once.

    `path` is a file, whose end is held out by the shares `valid` and `test`, or a folder with files
    for each split, such as train.bin and val.bin. `tensor` names the tensor of a .safetensors file
    with several. Defaults for `vocab`, `dtype` (of a .bin) and `tokenizer_path` are read from the
    keys vocab, dtype and tokenizer of a JSON file beside the ids: FILE.json or meta.json. Without
    it, `vocab` is one more than the largest id.
    """

    name: ClassVar[str] = "tokens"
    path: str
    length: int = 64
    vocab: int = 0
    dtype: str = ""
    tokenizer_path: str = ""
    tensor: str = ""
    valid: float = DEFAULT_HELD_OUT
    test: float = DEFAULT_HELD_OUT

    def check(self) -> None:
        check_split_shares(self.valid, self.test)
        if self.length < 1 or self.vocab < 0:
            raise SpecError(
                f"length={self.length} must be at least 1 and vocab={self.vocab} at least 0; "
                "use for example length=64 and vocab=50257"
            )
        _check_dtype(self.dtype, "dtype")

    def _split_paths(self) -> dict[str, Path]:
        path = existing_path(self.path)
        if not path.is_dir():
            return {"train": path}
        if len(paths := find_splits(path, TOKEN_FILE_SUFFIXES)) < 2:
            suffixes = ", ".join(TOKEN_FILE_SUFFIXES)
            raise SpecError(
                f"{path} has no train and valid files ({suffixes}); name them train.bin and "
                "valid.bin, or give one file"
            )
        return paths

    def files(self) -> Sequence[Path]:
        meta, path = self._find_metadata()
        meta_paths = [path] if path else []
        tokenizer_paths = [existing_file(meta.tokenizer)] if meta.tokenizer else []
        return [*self._split_paths().values(), *meta_paths, *tokenizer_paths]

    def _find_metadata(self) -> tuple[TokenFileMetadata, Path | None]:
        """The options of this task, completed from the JSON file beside the ids, and the path of
        that file.
        """
        train = self._split_paths()["train"]
        candidates = [train.with_suffix(".json"), train.with_name("meta.json")]
        path = next((path for path in candidates if path.is_file()), None)
        stored = _read_metadata(path) if path else TokenFileMetadata()
        for name in ("vocab", "dtype"):
            value, stored_value = getattr(self, name), getattr(stored, name)
            if value and stored_value and value != stored_value:
                raise SpecError(
                    f"{name}={value!r}, but {path} has {name}={stored_value!r}; correct one of them"
                )
        tokenizer = self.tokenizer_path or (
            str(train.with_name(stored.tokenizer)) if stored.tokenizer else ""
        )
        return TokenFileMetadata(
            self.vocab or stored.vocab, self.dtype or stored.dtype, tokenizer
        ), path

    def read(self) -> TokenStreamDataset:
        meta, _ = self._find_metadata()
        arrays = {split: self._open_ids(path, meta) for split, path in self._split_paths().items()}
        vocabulary = self._read_vocabulary(meta)
        known_size = vocabulary.size if vocabulary else meta.vocab
        largest = max(
            _find_largest_id(arrays[split], known_size, path)
            for split, path in self._split_paths().items()
        )
        size = meta.vocab or known_size or largest + 1
        ranges = split_ranges(
            {split: len(ids) for split, ids in arrays.items()}, (self.valid, self.test)
        )
        spans = {
            split: TokenSpan(arrays[owner], start, stop)
            for split, (owner, start, stop) in ranges.items()
        }
        bytes_per_id = vocabulary.bytes_per_id if vocabulary else None
        if bytes_per_id is not None:  # `vocab` may be larger than the tokenizer's vocabulary
            bytes_per_id = np.pad(bytes_per_id, (0, size - len(bytes_per_id)))
        return TokenStreamDataset(
            spans, self.length, size, vocabulary=vocabulary, bytes_per_id=bytes_per_id
        )

    def _read_vocabulary(self, meta: TokenFileMetadata) -> SubwordVocabulary | None:
        if not meta.tokenizer:
            return None
        vocabulary = read_vocabulary(existing_file(meta.tokenizer))
        if meta.vocab and vocabulary.size > meta.vocab:
            fact = f"{meta.tokenizer} has {vocabulary.size} tokens, more than vocab={meta.vocab}"
            raise SpecError(f"{fact}; give the tokenizer that produced the ids")
        return vocabulary

    def _open_ids(self, path: Path, meta: TokenFileMetadata) -> Any:
        if path.suffix not in TOKEN_FILE_SUFFIXES:
            raise SpecError(
                f"{path} is not a file of token ids; store them as {', '.join(TOKEN_FILE_SUFFIXES)}"
            )
        ids = {".npy": _open_npy_ids, ".bin": _open_bin_ids, ".safetensors": _open_safetensors_ids}[
            path.suffix
        ](path, meta, self.tensor)
        if not len(ids):
            raise SpecError(f"{path} is empty; give a file with token ids")
        return ids


def _read_metadata(path: Path) -> TokenFileMetadata:
    try:
        entries: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not valid JSON: {error}; correct it, or remove it") from None
    if not isinstance(entries, dict):
        raise SpecError(
            f"{path} holds {type(entries).__name__}; write an object with vocab, dtype and "
            "tokenizer"
        )
    meta = TokenFileMetadata(
        *(
            entries.get(name, default)
            for name, default in (("vocab", 0), ("dtype", ""), ("tokenizer", ""))
        )
    )
    if (
        type(meta.vocab) is not int
        or meta.vocab < 0
        or type(meta.dtype) is not str
        or type(meta.tokenizer) is not str
    ):
        raise SpecError(
            f"{path} holds {entries}; write vocab as an integer >= 0, dtype and tokenizer as text"
        )
    _check_dtype(meta.dtype, f"{path}: dtype")
    return meta


def _check_dtype(dtype: str, where: str) -> None:
    if dtype and dtype not in TOKEN_DTYPES:
        raise SpecError(
            f"{where}={dtype!r} is not supported for token ids; {suggest(dtype, TOKEN_DTYPES)}"
        )


def _open_npy_ids(path: Path, meta: TokenFileMetadata, tensor: str) -> Any:
    ids = open_npy(path)
    return _check_ids(ids, str(ids.dtype), path, meta)


def _open_bin_ids(path: Path, meta: TokenFileMetadata, tensor: str) -> Any:
    if not meta.dtype:
        raise SpecError(
            f"the dtype of {path} is unknown; give it, as in dtype='uint16', or write "
            f"{path.stem}.json beside the file"
        )
    size, item = path.stat().st_size, np.dtype(meta.dtype).itemsize
    if size % item:
        raise SpecError(
            f"{path} has {size} bytes, not a multiple of the {item} of {meta.dtype}; "
            "give the right dtype=, or create the file again"
        )
    dtype = np.dtype(meta.dtype).newbyteorder("<")
    return np.memmap(path, dtype, "r") if size else np.empty(0, dtype)


def _open_safetensors_ids(path: Path, meta: TokenFileMetadata, tensor: str) -> Any:
    try:
        file = safe_open(path, "np")
    except (SafetensorError, OSError) as error:
        raise SpecError(
            f"cannot read {path} as safetensors: {' '.join(str(error).split())}; create it again"
        ) from None
    names = sorted(file.keys())
    if not tensor and len(names) != 1:
        raise SpecError(
            f"{path} holds the tensors {', '.join(names)}; name the token ids with tensor="
        )
    if tensor and tensor not in names:
        raise SpecError(f"{path} has no tensor {tensor!r}; {suggest(tensor, names)}")
    ids = LazyTensor(file.get_slice(tensor or names[0]))
    return _check_ids(ids, ids.dtype, path, meta)


class LazyTensor:
    """A tensor in a safetensors file; slicing reads only the slice."""

    def __init__(self, slice_: Any) -> None:
        self._slice = slice_
        self.shape = tuple(slice_.get_shape())
        name: str = slice_.get_dtype()  # as in "U16"
        self.dtype = {"U": "uint", "I": "int", "F": "float"}.get(name[0], name[0]) + name[1:]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, cut: slice) -> Any:
        start, stop, _ = cut.indices(len(self))
        return self._slice[start:stop]


def _check_ids(ids: Any, dtype: str, path: Path, meta: TokenFileMetadata) -> Any:
    if len(ids.shape) != 1 or not dtype.startswith(("int", "uint")):
        shape = " x ".join(map(str, ids.shape)) or "a single number"
        raise SpecError(f"{path} holds {dtype} of shape {shape}; give integers in one dimension")
    if meta.dtype and meta.dtype != dtype:
        raise SpecError(
            f"{path} holds {dtype}, but dtype={meta.dtype!r} was given; leave dtype out"
        )
    return ids


def _find_largest_id(ids: Any, size: int, path: Path) -> int:
    """Largest id, found in chunks; raises SpecError for negative ids and, if `size` > 0, for ids >=
    `size`.
    """
    largest = 0
    for start in range(0, len(ids), SCAN_TOKENS):
        chunk = np.asarray(ids[start : start + SCAN_TOKENS])
        invalid = (chunk < 0) | (chunk >= size) if size else chunk < 0
        if invalid.any():
            n = int(np.argmax(invalid))
            vocabulary = f"the vocabulary of {size}" if size else "any vocabulary"
            fact = f"{path} holds the id {int(chunk[n])} at index {start + n}, outside {vocabulary}"
            raise SpecError(f"{fact}; give the vocab and tokenizer that produced the ids")
        largest = max(largest, int(chunk.max()))
    return largest
