"""Short runs of a model without weights: attention calls and their masks, the cache, and FLOPs.

Tensors on the meta device have shapes and no values, so that a run costs no memory. The attention
and mask functions of transformers are replaced by those of a `Recorder`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from logging import CRITICAL
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from ..attention.masking.patterns import Blocks, Causal, Full, Pattern, Window
from ..observe.inspect.model_inputs import list_arguments
from ..util.errors import SpecError
from .transformers_loading import without_hub_kernels

COUNTING = "headwise_counting"  # name of the attention function that records its calls
# Tokens of the shortest run, of which the longest has three times as many: whole blocks of layers
# that compress or chunk their tokens; less for models of short texts.
UNITS = (128, 16)
PATTERN = "headwise_pattern"  # attribute of a mask
WARNING = "warn_if_padding_and_no_attention_mask"
READ_VALUE = {"item": float, "__bool__": bool, "__int__": int, "__float__": float}
CHUNK_KEYS = ("chunk_size", "mamba_chunk_size", "mlstm_chunk_size")


# --- One run --------------------------------------------------------------------------------------


class CoreCall(NamedTuple):
    """One call of the attention function: a module, sizes of its tensors, and its pattern."""

    path: str
    heads: int
    dim: int
    vdim: int
    kv_values: int
    pattern: Pattern | None
    rows: int
    queries: int
    keys: int


class CacheEntry(NamedTuple):
    """The values that the cache of a model holds of one layer after a run."""

    role: str
    index: int
    cached: int = 0
    extra: int = 0  # of an indexer
    window: int | None = None
    state: int = 0
    conv: int = 0


@dataclass
class Run:
    """One forward call: FLOPs by module, calls of attention, outputs and the cache."""

    flops: dict[str, int]
    cores: list[CoreCall]
    output: Any
    entries: list[CacheEntry]
    masks: list[tuple[int, int, Pattern | None]]

    @property
    def core_paths(self) -> list[str]:
        """The paths of the modules that compute attention, one for each call."""
        return [core.path for core in self.cores]

    @property
    def busy_paths(self) -> set[str]:
        """The paths of the modules that multiply matrices themselves."""
        return {path for path, flops in self.flops.items() if flops}


@dataclass
class Recorder:
    """Attention and mask functions of transformers, which record sizes and patterns."""

    paths: Mapping[nn.Module, str]
    chosen_keys: int | None = None
    cores: list[CoreCall] = field(default_factory=list)
    masks: list[tuple[int, int, Pattern | None]] = field(default_factory=list)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Record a call, and return head outputs without values."""
        rows, heads, queries, dim = query.shape
        keys = key.shape[2]
        vdim = value.shape[-1]
        pattern = self._find_pattern(module, queries, keys, attention_mask, options)
        numbers = key.shape[1] * (key.shape[3] + vdim)
        sizes = (heads, dim, vdim, numbers, pattern, rows, queries, keys)
        self.cores.append(CoreCall(self.paths[module], *sizes))
        return query.new_empty(rows, queries, heads, vdim), None

    def _find_pattern(
        self, module: nn.Module, queries: int, keys: int, mask: Any, options: Mapping[str, Any]
    ) -> Pattern | None:
        if mask is None:
            is_causal = options.get("is_causal")
            is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            return Causal() if is_causal and queries == keys > 1 else Full()
        if PATTERN in vars(mask):
            return vars(mask)[PATTERN]
        # The model has changed the mask: it adds a bias, as T5, or keys that an indexer chose.
        if self.chosen_keys and queries == keys:
            return Window(self.chosen_keys)  # with as many pairs
        fitting = {pattern for *sizes, pattern in self.masks if sizes == [queries, keys]}
        return fitting.pop() if len(fitting) == 1 else None

    def make_mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        *_: Any,
        mask_function: Callable[..., Any],
        local_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Tensor:
        """Return a mask without values that carries the pattern of the mask function."""
        pattern = recognise_pattern(mask_function, local_size)
        self.masks.append((q_length, kv_length, pattern))
        mask: Any = torch.empty(batch_size, 1, q_length, kv_length, dtype=dtype, device="meta")
        setattr(mask, PATTERN, pattern)
        return mask


def recognise_pattern(
    mask_function: Callable[..., Any], local_size: int | None = None
) -> Pattern | None:
    """Return the pattern of a mask function of transformers, None if it is another one.

    The function is evaluated for some queries and all keys around them.

    >>> recognise_pattern(lambda row, head, query, key: key <= query)
    Causal()
    """
    size = local_size or UNITS[1]
    candidates: list[Pattern] = [Causal(), Full()]
    if local_size:
        half = local_size // 2
        candidates += [Window(local_size), Window(local_size + 1)]
        candidates += [Causal() & Blocks(local_size)]
        candidates += [Window(2 * n + 1, n) for n in (half, local_size, local_size - 1) if n > 0]
    keys = torch.arange(4 * size + 2)
    queries = torch.tensor([0, 1, size - 1, size, size + 1, 2 * size + size // 3 + 1, 3 * size])
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    try:
        with _NoPadding():
            sides = (queries[None, None, :, None], keys[None, None, None])
            allowed = mask_function(zero, zero, *sides)
        allowed = torch.as_tensor(allowed).expand(1, 1, len(queries), len(keys))[0, 0]
        for pattern in candidates:
            if torch.equal(allowed, torch.as_tensor(pattern.allows(queries[:, None], keys[None]))):
                return pattern
    except (RuntimeError, IndexError, TypeError):  # it reads tensors of the call, without values
        return None
    return None


class _NoPadding(TorchFunctionMode):
    """Replace the number of padding tokens of each row, which a mask function looks up, by 0."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_lookup = func is Tensor.__getitem__ and args[0].is_meta and args[0].dim() == 1
        if is_lookup and not args[0].is_floating_point():
            args = (torch.zeros(args[0].shape, dtype=args[0].dtype), *args[1:])
        return func(*args, **(kwargs or {}))


class _ZeroValues(TorchFunctionMode):
    """Read zero and False from tensors without values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = READ_VALUE.get(getattr(func, "__name__", ""))
        if number is not None and args[0].is_meta:
            return False if args[0].dtype == torch.bool else number()
        return func(*args, **(kwargs or {}))


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Register the functions of a recorder with transformers under the name `COUNTING`, and its
    mask function also for models that compute attention themselves.
    """
    from transformers import masking_utils
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    masks: Any = masking_utils
    find_packed = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = lambda *_: None  # a run reads one text
    mask_functions = AttentionMaskInterface._global_mapping
    functions_before = dict(mask_functions)
    mask_functions.update(dict.fromkeys((COUNTING, "eager", "sdpa"), recorder.make_mask))
    AttentionInterface._global_mapping[COUNTING] = recorder.attend
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = find_packed
        del AttentionInterface._global_mapping[COUNTING]
        mask_functions.clear()
        mask_functions.update(functions_before)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Show no warnings of transformers, which are about running the model for its results."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def _run(model: nn.Module, recorder: Recorder, arguments: Mapping[str, Any]) -> Run:
    """Run a model, and return the FLOPs of every module without those of the modules in it."""
    recorder.cores.clear()
    recorder.masks.clear()
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), without_hub_kernels(), counter:
        output = model(**arguments)
    root = type(model).__name__
    totals: dict[str, int] = {"": counter.get_total_flops()}
    for name, by_operator in counter.flop_counts.items():
        if name.startswith(f"{root}."):
            totals[name.removeprefix(f"{root}.")] = sum(by_operator.values())
    own = Counter(totals)
    for path, total in totals.items():
        ancestor = path
        while ancestor:
            ancestor = ancestor.rpartition(".")[0]
            if ancestor in totals:
                own[ancestor] -= total
                break
    entries = list(_read_cache(_find_cache(output)))
    return Run(dict(own), list(recorder.cores), output, entries, list(recorder.masks))


def _find_cache(output: Any) -> Any:
    names = ("past_key_values", "cache_params") if isinstance(output, Mapping) else ()
    return next((output[name] for name in names if output.get(name) is not None), None)


def _count_states(layer: Any, name: str) -> int:
    states = getattr(layer, name, {}).values()
    return sum(one.numel() for one in states if one is not None)


def _read_cache(cache: Any) -> Iterator[CacheEntry]:
    """Yield what the cache of a model holds of each layer."""
    for role, name in (("attention", "self_attention_cache"), ("cross", "cross_attention_cache")):
        part = getattr(cache, name, cache if role == "attention" else None)
        for index, layer in enumerate(getattr(part, "layers", ())):
            tensors = {key: one for key, one in vars(layer).items() if isinstance(one, Tensor)}
            conv = _count_states(layer, "conv_states")
            state = _count_states(layer, "recurrent_states")
            keys = tensors.pop("keys", None)
            values = tensors.pop("values", None)
            cached = 0
            extra = 0
            if keys is not None and values is not None and keys.dim() == 4:
                cached = (keys.numel() + values.numel()) // keys.shape[-2]
                extra = sum(
                    one.numel() // one.shape[-2] for one in tensors.values() if one.dim() > 2
                )
            window = layer.sliding_window if getattr(layer, "is_sliding", False) else None
            if cached or conv or state:
                yield CacheEntry(role, index, cached, extra, window, state, conv)
        # MiniMax keeps the states of linear attention in a list of its own.
        for index, state in enumerate(getattr(part, "linear_cache", ())):
            if isinstance(state, Tensor):
                yield CacheEntry("attention", index, state=state.numel())


# --- Inputs ---------------------------------------------------------------------------------------

MakeArguments = Callable[[int, int], dict[str, Any]]
IDS = "input_ids"
DECODER_IDS = "decoder_input_ids"


def _ids(tokens: int) -> Tensor:
    return torch.zeros(1, tokens, dtype=torch.long, device="meta")


def _list_arguments(model: Any, config: Any) -> Iterator[tuple[str, MakeArguments]]:
    """Yield functions of the number of tokens and source tokens that return arguments of a model,
    with what grows: "both", "tokens" or "nothing".
    """
    main = str(getattr(model, "main_input_name", IDS))
    has_decoder = bool(getattr(config, "is_encoder_decoder", False))
    if main == IDS and has_decoder:
        yield "both", lambda tokens, source: {IDS: _ids(source), DECODER_IDS: _ids(tokens)}
    elif main == IDS:
        yield "tokens", lambda tokens, source: {IDS: _ids(tokens)}
        yield "tokens", lambda tokens, source: {IDS: _ids(tokens), "use_cache": False}
    names = list_arguments(model)
    for name, shape in _list_signals(config, {main, *names}):
        signal = torch.empty(shape, device="meta")
        if has_decoder:
            yield (
                "tokens",
                lambda tokens, source, name=name, signal=signal: {
                    name: signal,
                    DECODER_IDS: _ids(tokens),
                },
            )
        if main == name or IDS not in names:
            yield "nothing", lambda tokens, source, name=name, signal=signal: {name: signal}
        yield (
            "tokens",
            lambda tokens, source, name=name, signal=signal: {IDS: _ids(tokens), name: signal},
        )


def _find_number(config: Any, names: tuple[str, ...]) -> int | None:
    """Return the first of these settings that a config or one inside it has."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    for name in names:
        if isinstance(getattr(config, name, None), int):
            return getattr(config, name)
    numbers = (_find_number(part, names) for part in parts if part is not None)
    return next((number for number in numbers if number), None)


def _list_signals(config: Any, names: set[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of images and sounds that a model of this config may read."""
    vision = getattr(config, "vision_config", config)
    if "pixel_values" in names:
        size = getattr(vision, "image_size", None) or 224
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", 3)
        yield "pixel_values", (1, channels, height, width)
    if "input_features" in names:
        bins = _find_number(config, ("num_mel_bins", "input_dim", "input_feat_size")) or 80
        frames = 2 * (_find_number(config, ("max_source_positions",)) or 1500)
        yield "input_features", (1, bins, frames)
        yield "input_features", (1, frames, bins)
    if "input_values" in names:
        yield "input_values", (1, 16_000)
        yield "input_values", (1, 1, 16_000)
        yield (
            "input_values",
            (1, getattr(config, "max_length", 1024), getattr(config, "num_mel_bins", 128)),
        )


# --- The runs of a model, put together ------------------------------------------------------------


@dataclass
class Runs:
    """Runs of one model at several lengths, each with a decode step after it, if it can decode."""

    whole: dict[tuple[int, int], Run]
    steps: dict[tuple[int, int], Run]
    grows: str
    step_error: str = ""
    reads_values: bool = False


def run_lengths(model: nn.Module, config: Any, recorder: Recorder) -> Runs:
    """Run a model at as many lengths as its inputs need."""
    chunks = [getattr(config.get_text_config(), key, 0) for key in CHUNK_KEYS]
    long = max([UNITS[0], *(size for size in chunks if isinstance(size, int) and size <= 1024)])
    first_error: Exception | None = None
    attempts = product((nullcontext, _ZeroValues), _list_arguments(model, config), (long, UNITS[1]))
    for values, (grows, make_arguments), u in attempts:
        if values is _ZeroValues and "meta" not in str(first_error):
            break
        try:
            with values():
                runs = _run_multiples(model, recorder, make_arguments, grows, u)
            runs.reads_values = values is _ZeroValues
            return runs
        except Exception as error:  # a model may raise anything for inputs it does not read
            first_error = first_error or error
    raise first_error or SpecError(f"it reads {getattr(model, 'main_input_name', 'no ids')}")


def _run_multiples(
    model: nn.Module, recorder: Recorder, make_arguments: MakeArguments, grows: str, u: int
) -> Runs:
    """Run a model on u, 2 u and 3 u tokens, and on as many multiples of source tokens."""
    v = u + u // 2  # no multiple of u that occurs together with it
    points = [(1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2)]
    points = points[: {"nothing": 1, "tokens": 3}.get(grows)]
    runs = Runs({}, {}, grows)
    # The longest run comes first, because it is the first to fail.
    for x, y in sorted(points, reverse=True):
        arguments = make_arguments(x * u, y * v)
        run = _run(model, recorder, arguments)
        runs.whole[x * u, y * v] = run
        if run.entries and not runs.step_error and "use_cache" not in arguments:
            try:
                step = _step_arguments(run.output, make_arguments(1, 1))
                runs.steps[x * u, y * v] = _run(model, recorder, step)
            except Exception as error:  # a model may raise anything
                runs.step_error = one_line(error)
    if runs.step_error:
        runs.steps.clear()
    runs.whole = dict(sorted(runs.whole.items()))
    runs.steps = dict(sorted(runs.steps.items()))
    return runs


def _step_arguments(output: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a decode step after a call with this output."""
    name = "past_key_values" if output.get("past_key_values") is not None else "cache_params"
    if DECODER_IDS not in arguments:
        return {IDS: _ids(1), name: output[name]}
    from transformers.modeling_outputs import BaseModelOutput

    source = BaseModelOutput(last_hidden_state=output["encoder_last_hidden_state"])
    return {DECODER_IDS: _ids(1), "encoder_outputs": source, name: output[name]}


def one_line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())[:120] or type(error).__name__
