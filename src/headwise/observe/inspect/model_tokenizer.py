"""Find the tokenizer of a model: the caller's, its own, or tokenizer.json next to its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import nn

from ...kernels.devices import ModuleT
from ...models import Transformer
from ...models.hub_files import fetch_model
from ...models.model_spec import ModelSpec, ProcessorSpec
from ...models.model_spec.serialization import TOKENIZER_FILE
from ...models.save_load import check_processor
from ...models.vocabulary import ByteVocabulary, encode_tokens, parse_tokenizer, read_tokenizer_file
from ...util.errors import SpecError
from ...util.model_names import parse_hub_id

BYTE_TOKENIZER = "bytes"
ATTACHED = "_headwise_tokenizer"  # attribute of a module that a tokenizer was attached to
TOKENIZER_KINDS = (
    "a tokenizer of transformers or tokenizers, a tokenizer.json or its folder, a Hub id, or "
    "'bytes'"
)
TOKENIZER_REMEDY = "give tokenizer=, one of transformers or the folder of one"

_current_tokenizer: ContextVar[tuple[nn.Module, Tokenizer] | None] = ContextVar(
    "current_tokenizer", default=None
)


def find_model_folder(model: nn.Module) -> Path | None:
    """Return the folder that a transformers model was loaded from, or its snapshot in the local
    cache; else None.

    Nothing is downloaded. In a wrapper such as SentenceTransformer, the first submodule with a
    config counts.
    """
    configs = (getattr(module, "config", None) for module in model.modules())
    config = next((config for config in configs if getattr(config, "_name_or_path", "")), None)
    name = str(getattr(config, "_name_or_path", "") or "")
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    return _find_cached_folder(name, getattr(config, "_commit_hash", None))


def _find_cached_folder(name: str, revision: str | None) -> Path | None:
    """Return the folder of a Hugging Face hub model in the local cache."""
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # not the name of a repository
        return None
    return Path(path).parent if isinstance(path, str) else None


def find_tokenizer(model: nn.Module) -> Tokenizer | None:
    """Return the tokenizer of a model outside headwise; None if there is none.

    It is the tokenizer given by `use_tokenizer` or `attach_tokenizer`, else the attribute
    `tokenizer` of the model, else the tokenizer.json in the folder of its weights.
    """
    current = _current_tokenizer.get()
    if current is not None and current[0] is model:
        return current[1]
    own = vars(model).get(ATTACHED) or _find_fast_tokenizer(getattr(model, "tokenizer", None))
    if own is not None:
        return _without_limits(own)
    folder = find_model_folder(model)
    if folder is None or not (folder / TOKENIZER_FILE).is_file():
        return None
    return read_tokenizer(folder)


def read_tokenizer(tokenizer: object) -> Tokenizer:
    """Return a tokenizer without truncation and padding, from any of `TOKENIZER_KINDS`.

    >>> read_tokenizer("bytes").encode("né").ids
    [110, 195, 169]
    """
    if isinstance(tokenizer, str) and tokenizer == BYTE_TOKENIZER:
        return parse_tokenizer(ByteVocabulary().document)
    if isinstance(tokenizer, (str, Path)):
        return _without_limits(_read_file(Path(tokenizer)))
    fast = _find_fast_tokenizer(tokenizer)
    if fast is None:
        raise SpecError(f"tokenizer is of type {type(tokenizer).__name__}; give {TOKENIZER_KINDS}")
    return _without_limits(fast)


def _read_file(path: Path) -> Tokenizer:
    hub_id = parse_hub_id(path)
    folder = path if hub_id is None else fetch_model(hub_id, weights=False)
    file = folder / TOKENIZER_FILE if folder.is_dir() else folder
    if not file.is_file():
        raise SpecError(f"there is no tokenizer at {str(file)!r}; give {TOKENIZER_KINDS}")
    return read_tokenizer_file(file)


def _find_fast_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """Return the `tokenizers.Tokenizer` in a transformers tokenizer, or the argument itself."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    fast = getattr(tokenizer, "backend_tokenizer", None)
    return fast if isinstance(fast, Tokenizer) else None


def _without_limits(tokenizer: Tokenizer) -> Tokenizer:
    """Copy a tokenizer without truncation and padding."""
    unlimited = parse_tokenizer(tokenizer.to_str())
    unlimited.no_truncation()
    unlimited.no_padding()
    return unlimited


def get_surrounding_ids(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ids that a tokenizer adds before and after every text."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    words = tokenizer.get_vocab(with_added_tokens=False).keys() - {
        added.content for added in tokenizer.get_added_tokens_decoder().values()
    }
    # Encode the shortest word of the vocabulary, because some tokenizers encode unknown words as
    # nothing.
    shortest = min(words, key=lambda word: (not word.isalnum(), len(word), word), default="")
    encoding = encode_tokens(tokenizer, shortest)
    is_special = encoding.special_tokens_mask
    positions = [n for n, special in enumerate(is_special) if not special] or [len(is_special)]
    return tuple(encoding.ids[: positions[0]]), tuple(encoding.ids[positions[-1] + 1 :])


def replace_tokenizer(
    model_spec: ModelSpec, processor: ProcessorSpec, tokenizer: Tokenizer
) -> ProcessorSpec:
    """Return the processor spec of a headwise model with this tokenizer; raise if it does not fit
    the model.
    """
    before, behind = get_surrounding_ids(tokenizer)
    document = tokenizer.to_str()
    extended = replace(
        processor,
        prefix_ids=before,
        suffix_ids=behind,
        parse_special=True,
        tokenizer=document,
        source_tokenizer=None,
    )
    check_processor(model_spec, extended)
    return extended


def with_tokenizer(model: ModuleT, tokenizer: object) -> ModuleT:
    """Return a model that encodes texts with `tokenizer`: a copy of a headwise model without its
    weights, which both share; another model itself, which keeps the tokenizer.
    """
    fast = read_tokenizer(tokenizer)
    if not isinstance(model, Transformer):
        _check_size(model, fast)
        setattr(model, ATTACHED, fast)
        return model
    view = copy(model)
    view.usage = replace_tokenizer(model.spec, model.usage, fast)
    return view


def _check_size(model: Any, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer with more ids than a model of transformers has embeddings."""
    try:
        rows = model.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        return  # no table of embeddings to compare with
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    if size > rows:
        raise SpecError(
            f"the tokenizer has {size:,} ids, and {type(model).__name__} has embeddings for "
            f"{rows:,}; give the tokenizer that the model was trained with, or ids in place of text"
        )


@contextmanager
def use_tokenizer(model: nn.Module, tokenizer: object = None) -> Iterator[nn.Module]:
    """Encode texts for a model with `tokenizer` (None: its own); yields the model to use.

    A headwise model is copied without its weights, which both share; other models are yielded
    unchanged.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 256}
    >>> net = hw.build(hw.families.read_model_spec(config))
    >>> with use_tokenizer(net, "bytes") as reader:
    ...     reader.usage.tokenizer is not None, net.usage.tokenizer is None
    (True, True)
    """
    if tokenizer is None:
        yield model
        return
    if isinstance(model, Transformer):
        yield with_tokenizer(model, tokenizer)
        return
    fast = read_tokenizer(tokenizer)
    _check_size(model, fast)
    token = _current_tokenizer.set((model, fast))
    try:
        yield model
    finally:
        _current_tokenizer.reset(token)
