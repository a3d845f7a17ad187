"""Ids that somebody else made of text: .npy, .bin and .safetensors, read where they lie on disk."""

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
from .image_arrays import open_npy
from .language_modelling import SCAN_TOKENS, TokenSpan, TokenStreamDataset, split_ranges
from .text_files import existing_file, existing_path, find_splits
from .vocabulary import SubwordVocabulary, read_vocabulary

TOKEN_FILE_SUFFIXES = (".npy", ".bin", ".safetensors")
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


@dataclass(frozen=True, repr=False)
class TokenFileMetadata:
    """What stands beside the ids: how many kinds there are, how they are stored, and the tokenizer they are of."""

    vocab: int = 0
    dtype: str = ""
    tokenizer: str = ""


@dataclass(frozen=True, repr=False)
class TokenFileTask(FileTask):
    """The next id of a row of ids, from `length` of them, never all in memory at once.

    `path` is a file, of which the last shares are held out, or a folder with train.bin and val.bin, say. `vocab`,
    `dtype` (of a .bin) and `tokenizer_path`, where they are not given, are what a JSON document beside the file says
    as vocab, dtype and tokenizer: FILE.json or meta.json. Without any, `vocab` is one more than the largest id.
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
                f"length={self.length}, vocab={self.vocab} are no sizes; give length=64 and vocab=50257, say"
            )
        _check_dtype(self.dtype, "dtype")

    def _split_paths(self) -> dict[str, Path]:
        path = existing_path(self.path)
        if not path.is_dir():
            return {"train": path}
        if len(found := find_splits(path, TOKEN_FILE_SUFFIXES)) < 2:
            raise SpecError(
                f"{path} has no train with a valid of {', '.join(TOKEN_FILE_SUFFIXES)}; name them so, or give one file"
            )
        return found

    def files(self) -> Sequence[Path]:
        meta, path = self._find_metadata()
        told = [path] if path else []
        return [*self._split_paths().values(), *told, *([existing_file(meta.tokenizer)] if meta.tokenizer else [])]

    def _find_metadata(self) -> tuple[TokenFileMetadata, Path | None]:
        """What was said here, and where nothing was, what the document beside the file says."""
        first = self._split_paths()["train"]
        beside = [first.with_suffix(".json"), first.with_name("meta.json")]
        found = next((path for path in beside if path.is_file()), None)
        told = _read_metadata(found) if found else TokenFileMetadata()
        for name in ("vocab", "dtype"):
            here, there_ = getattr(self, name), getattr(told, name)
            if here and there_ and here != there_:
                raise SpecError(f"{name}={here!r}, but {found} says {there_!r}; correct one of them")
        tokenizer = self.tokenizer_path or (str(first.with_name(told.tokenizer)) if told.tokenizer else "")
        return TokenFileMetadata(self.vocab or told.vocab, self.dtype or told.dtype, tokenizer), found

    def read(self) -> TokenStreamDataset:
        meta, _ = self._find_metadata()
        arrays = {split: self._open_ids(path, meta) for split, path in self._split_paths().items()}
        vocabulary = self._read_vocabulary(meta)
        known = vocabulary.size if vocabulary else meta.vocab
        most = max(_find_largest_id(arrays[split], known, path) for split, path in self._split_paths().items())
        size = meta.vocab or known or most + 1
        told = split_ranges({split: len(ids) for split, ids in arrays.items()}, (self.valid, self.test))
        spans = {split: TokenSpan(arrays[owner], start, stop) for split, (owner, start, stop) in told.items()}
        widths = vocabulary.bytes_per_id if vocabulary else None
        if widths is not None:
            widths = np.pad(widths, (0, size - len(widths)))  # a table may have spare rows
        return TokenStreamDataset(spans, self.length, size, vocabulary=vocabulary, bytes_per_id=widths)

    def _read_vocabulary(self, meta: TokenFileMetadata) -> SubwordVocabulary | None:
        if not meta.tokenizer:
            return None
        vocabulary = read_vocabulary(existing_file(meta.tokenizer))
        if meta.vocab and vocabulary.size > meta.vocab:
            fact = f"{meta.tokenizer} knows {vocabulary.size} tokens, but vocab={meta.vocab}"
            raise SpecError(f"{fact}: it is of another vocabulary; give the one that the ids were made with")
        return vocabulary

    def _open_ids(self, path: Path, meta: TokenFileMetadata) -> Any:
        if path.suffix not in TOKEN_FILE_SUFFIXES:
            raise SpecError(f"{path} is none of {', '.join(TOKEN_FILE_SUFFIXES)}; store ids as one of these")
        ids = {".npy": _open_npy_ids, ".bin": _open_bin_ids, ".safetensors": _open_safetensors_ids}[path.suffix](
            path, meta, self.tensor
        )
        if not len(ids):
            raise SpecError(f"{path} is empty; give ids")
        return ids


def _read_metadata(path: Path) -> TokenFileMetadata:
    try:
        told: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{path} is no JSON: {error}; write vocab, dtype and tokenizer, or take it away") from None
    if not isinstance(told, dict):
        raise SpecError(f"{path} holds {type(told).__name__}; write an object with vocab, dtype and tokenizer")
    meta = TokenFileMetadata(
        *(told.get(name, usual) for name, usual in (("vocab", 0), ("dtype", ""), ("tokenizer", "")))
    )
    if type(meta.vocab) is not int or meta.vocab < 0 or type(meta.dtype) is not str or type(meta.tokenizer) is not str:
        raise SpecError(f"{path} says {told}; write vocab as a whole number, dtype and tokenizer as text")
    _check_dtype(meta.dtype, f"{path}: dtype")
    return meta


def _check_dtype(dtype: str, where: str) -> None:
    if dtype and dtype not in TOKEN_DTYPES:
        raise SpecError(f"{where}={dtype!r} is no kind of ids; {suggest(dtype, TOKEN_DTYPES)}")


def _open_npy_ids(path: Path, meta: TokenFileMetadata, tensor: str) -> Any:
    ids = open_npy(path)
    return _check_ids(ids, str(ids.dtype), path, meta)


def _open_bin_ids(path: Path, meta: TokenFileMetadata, tensor: str) -> Any:
    if not meta.dtype:
        raise SpecError(
            f"{path} does not say how its ids are stored; give dtype='uint16', or {path.stem}.json beside it"
        )
    size, item = path.stat().st_size, np.dtype(meta.dtype).itemsize
    if size % item:
        raise SpecError(
            f"{path} has {size} bytes, which are no whole {meta.dtype}; it was cut off, or is of another dtype"
        )
    dtype = np.dtype(meta.dtype).newbyteorder("<")
    return np.memmap(path, dtype, "r") if size else np.empty(0, dtype)


def _open_safetensors_ids(path: Path, meta: TokenFileMetadata, tensor: str) -> Any:
    try:
        file = safe_open(path, "np")
    except (SafetensorError, OSError) as error:
        raise SpecError(
            f"{path} is no whole safetensors file: {' '.join(str(error).split())}; write it again"
        ) from None
    names = sorted(file.keys())
    if not tensor and len(names) != 1:
        raise SpecError(f"{path} holds the tensors {', '.join(names)}; say which are the ids, as in tensor={names[:1]}")
    if tensor and tensor not in names:
        raise SpecError(f"{path} has no tensor {tensor!r}; {suggest(tensor, names)}")
    ids = LazyTensor(file.get_slice(tensor or names[0]))
    return _check_ids(ids, ids.dtype, path, meta)


class LazyTensor:
    """A tensor in a file, of which only what is asked for is read."""

    def __init__(self, slice_: Any) -> None:
        self._slice = slice_
        self.shape = tuple(slice_.get_shape())
        name: str = slice_.get_dtype()  # as in "U16"
        self.dtype = {"U": "uint", "I": "int"}.get(name[0], "float of ") + name[1:]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, cut: slice) -> Any:
        start, stop, _ = cut.indices(len(self))
        return self._slice[start:stop]


def _check_ids(ids: Any, dtype: str, path: Path, meta: TokenFileMetadata) -> Any:
    if len(ids.shape) != 1 or not dtype.startswith(("int", "uint")):
        shape = " x ".join(map(str, ids.shape)) or "a single number"
        raise SpecError(f"{path} holds {dtype}, {shape}; give whole numbers in one row")
    if meta.dtype and meta.dtype != dtype:
        raise SpecError(f"{path} holds {dtype}, but dtype={meta.dtype!r} was said; leave it out")
    return ids


def _find_largest_id(ids: Any, size: int, path: Path) -> int:
    """The largest id, all of them looked at a piece at a time; refuses one outside a vocabulary of `size`, if given."""
    most = 0
    for at in range(0, len(ids), SCAN_TOKENS):
        piece = np.asarray(ids[at : at + SCAN_TOKENS])
        wrong = (piece < 0) | (piece >= size) if size else piece < 0
        if wrong.any():
            n = int(np.argmax(wrong))
            known = f"a vocabulary of {size}" if size else "any vocabulary"
            fact = f"{path} holds the id {int(piece[n])} at place {at + n}, outside {known}"
            raise SpecError(f"{fact}; give the vocab and tokenizer that it was made with")
        most = max(most, int(piece.max()))
    return most
