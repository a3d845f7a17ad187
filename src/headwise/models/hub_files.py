"""Fetch models of the Hugging Face Hub into its local cache: safetensors, settings and tokenizers
only, never pickles or code.

`huggingface_hub` does the transfers: its cache, its progress bars, its login, and its settings such
as HF_HOME, HF_TOKEN and HF_HUB_OFFLINE apply.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..report.text import format_bytes
from ..util.errors import SpecError
from ..util.files import read_text_file
from ..util.model_names import HubId
from ..util.size_limits import MAX_CONFIG_BYTES, parse_json
from .model_spec.serialization import CHECKED_FILES, MANIFEST_FILE, RECORD_FILE, WEIGHTS_FILE

CONFIG_FILE = "config.json"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
ADAPTER_FILE = "adapter_config.json"  # it may name another model
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Files of a model besides its weights that are fetched, and copied: data only, never pickles or
# code.
COMPANION_FILES = re.compile(
    r"(tokenizer[\w.-]*|special_tokens_map|added_tokens|vocab[\w.-]*|merges|generation_config"
    r"|preprocessor_config|processor_config|chat_template[\w.-]*|modules|sentence_bert_config"
    r"|config_sentence_transformers|config|sentencepiece[\w.-]*|source|target|spiece)"
    r"\.(json|txt|model|jinja|spm)|(LICEN[CS]E|NOTICE)[\w.-]*"
)
# a folder of sentence-transformers: 1_Pooling
SENTENCE_TRANSFORMERS_MODULE = re.compile(r"\d+_\w+")
NATIVE_FILES = {MANIFEST_FILE, RECORD_FILE, *CHECKED_FILES} - {WEIGHTS_FILE}
MAX_SETTINGS_BYTES = 1 << 28  # of one file; the largest tokenizers have 2^25
CACHE_ERRORS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR}
CACHE_ERRORS |= {errno.EEXIST, errno.ENOENT, errno.EIO}
logger = logging.getLogger("headwise")


def fetch_model(
    name: HubId, check: Callable[[Path], object] = lambda _: None, *, weights: bool = True
) -> Path:
    """Return the folder of a Hub model in the local cache, after fetching the files that it lacks.

    `check` gets the folder when it has settings and no weights yet, and may raise. Without
    `weights`, only settings and tokenizers are fetched. If the Hub cannot be reached, a complete
    model in the cache is returned.
    """
    with _explained_errors(name):
        sizes = _list_files(name)
        settings = [] if sizes is None else _select_settings(name, sizes, weights)
        folder = _find_cached(name) if sizes is None else _download(name, settings, sizes)
    check(folder)
    if not weights:
        return folder
    index = folder / INDEX_FILE
    files = sorted(set(read_shard_index(index).values())) if index.is_file() else [WEIGHTS_FILE]
    if sizes is not None:
        absent = [file for file in files if file not in sizes]
        if absent:
            raise SpecError(
                f"{name} has no {absent[0]}, which its {INDEX_FILE} lists; give another revision"
            )
        with _explained_errors(name):
            _download(name, [*settings, *files], sizes)
    for file in files:
        if not (folder / file).is_file():
            raise SpecError(
                f"the cache holds only a part of {name}: {file} is missing; run the command again "
                "with a network"
            )
    return folder


def _list_files(name: HubId) -> dict[str, int] | None:
    """Return the size of each file of a Hub model; None if the Hub cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    except OfflineModeIsEnabled:
        return None
    except HfHubHTTPError as error:
        if error.response.status_code < 500:
            raise
        reason = f"HTTP error {error.response.status_code}"
    except Exception as error:  # of the HTTP package, which differs between versions
        reason = _first_line(error)
    else:
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}
    logger.warning("headwise: the Hub cannot be reached (%s); using %s of the cache", reason, name)
    return None


def _select_settings(name: HubId, sizes: Mapping[str, int], weights: bool) -> list[str]:
    """Return the files to fetch before the weights; refuse a model that cannot be loaded."""
    if ADAPTER_FILE in sizes:
        raise SpecError(
            f"{name} has {ADAPTER_FILE}, which names another model; give one with merged weights"
        )
    if CONFIG_FILE not in sizes and MANIFEST_FILE not in sizes:
        raise SpecError(
            f"{name} has no {CONFIG_FILE}, so it is not a model that transformers loads; give the "
            "id of one"
        )
    if weights and not {WEIGHTS_FILE, INDEX_FILE} & set(sizes):
        pickles = [file for file in sizes if file.endswith(PICKLE_SUFFIXES)]
        fact = (
            f"has its weights in {pickles[0]}, a pickle, which can run code when it is loaded"
            if pickles
            else f"has neither {WEIGHTS_FILE} nor {INDEX_FILE}"
        )
        raise SpecError(
            f"{name} {fact}; give a revision or a copy of the model with {WEIGHTS_FILE}, as "
            "save_pretrained writes it"
        )
    files = [file for file in sizes if _is_settings_file(file)]
    if WEIGHTS_FILE not in sizes and INDEX_FILE in sizes:
        files.append(INDEX_FILE)
    for file in files:
        limit = MAX_CONFIG_BYTES if file == CONFIG_FILE else MAX_SETTINGS_BYTES
        if sizes[file] > limit:
            raise SpecError(
                f"{file} of {name} has {format_bytes(sizes[file])}, and at most "
                f"{format_bytes(limit)} are read; give another revision or model"
            )
    return files


def _is_settings_file(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    if folder:
        is_module = SENTENCE_TRANSFORMERS_MODULE.fullmatch(folder)
        return bool(is_module and (COMPANION_FILES.fullmatch(name) or name == WEIGHTS_FILE))
    return bool(COMPANION_FILES.fullmatch(name)) or name in NATIVE_FILES


def read_shard_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor of an index of shards."""
    fields = parse_json(str(index), read_text_file(index), "copy the file again")
    weight_map: Any = fields.get("weight_map") if isinstance(fields, dict) else None
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise SpecError(
            f"{index} is not an index of shards; it must contain weight_map = {{tensor: file}}"
        )
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise SpecError(
                f"{index} names {file!r}; shards must be .safetensors files in the same folder"
            )
    return weight_map


def _download(name: HubId, files: Sequence[str], sizes: Mapping[str, int]) -> Path:
    """Download the files that the cache lacks; return the folder of the model."""
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache

    revision = name.revision
    missing = [
        file
        for file in files
        if not isinstance(try_to_load_from_cache(name.repo, file, revision=revision), str)
    ]
    num_bytes = sum(sizes[file] for file in missing)
    if num_bytes:
        cache = Path(constants.HF_HUB_CACHE)
        free = shutil.disk_usage(
            next(path for path in (cache, *cache.absolute().parents) if path.exists())
        ).free
        if num_bytes > free:
            raise SpecError(
                f"{name} needs {format_bytes(num_bytes)}, and the cache {cache} has "
                f"{format_bytes(free)} left; make room, or set HF_HOME to another folder"
            )
    if any(file.endswith(".safetensors") for file in missing):
        logger.warning("headwise: downloading %s (%s)", name, format_bytes(num_bytes))
    # Names are patterns of fnmatch, in which a bracket begins a set of letters.
    patterns = [file.replace("[", "[[]") for file in files]
    with _bars_on_terminals():
        return Path(snapshot_download(name.repo, revision=revision, allow_patterns=patterns))


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Show the Hub's progress bars on a terminal only; in a file they are many broken lines."""
    from huggingface_hub import utils

    if sys.stderr.isatty() or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _find_cached(name: HubId) -> Path:
    """Return the folder of a model in the cache; raise SpecError if it is not there."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    settings = [CONFIG_FILE, MANIFEST_FILE]
    try:
        return Path(
            snapshot_download(
                name.repo, revision=name.revision, allow_patterns=settings, local_files_only=True
            )
        )
    except LocalEntryNotFoundError:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "there is no connection"
        raise SpecError(
            f"{name} is neither a folder here nor in the cache {constants.HF_HUB_CACHE}, and the "
            f"Hub cannot be asked, because {reason}; run the command again with a network"
        ) from None


@contextmanager
def _explained_errors(name: HubId) -> Iterator[None]:
    """Turn the errors of `huggingface_hub` into one line that says what to do; its warnings are not
    shown.
    """
    library = logging.getLogger("huggingface_hub")
    level = library.level
    library.setLevel(logging.ERROR)
    try:
        yield
    except SpecError:
        raise
    except Exception as error:  # of several HTTP packages, besides those of the library
        raise SpecError(_explain(name, error)) from None
    finally:
        library.setLevel(level)


def _explain(name: HubId, error: Exception) -> str:
    from huggingface_hub import constants, errors

    login = "log in with `hf auth login`, or set HF_TOKEN"
    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name.repo} has no revision {name.revision!r}; give a branch, tag or commit of it"
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return (
            f"access to {name.repo} is restricted; accept its terms on its page of the Hub, and "
            f"{login}"
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return (
            f"there is no folder {str(name)!r}, and no public model of that name on the Hub; "
            f"correct the name, or {login} if the model is private"
        )
    if isinstance(error, OSError) and status is None and error.errno in CACHE_ERRORS:
        return (
            f"cannot write {name} to the cache {constants.HF_HUB_CACHE}: "
            f"{(error.strerror or _first_line(error)).lower()}; set HF_HOME to a folder that may "
            "be written and has room"
        )
    return (
        f"cannot download {name}: {_first_line(error)}; run the command again, which keeps "
        "complete files"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).split("\n")
    return " ".join(lines[0].split())[:120] or type(error).__name__
