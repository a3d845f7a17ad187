"""Record the queries, keys and masks of every attention layer of a run on the CPU, within a budget
of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import SpecError
from ..models import Transformer
from ..traces import AttentionCallRecord, AttentionRecord, PackedMask, Trace
from ..traces.attention_record import Array
from ..traces.attention_trace import format_bytes
from .attention_sites import find_attention, find_attention_in_run
from .hooks import AttentionInputs, ModelRun, ObservedCall, SiteModule
from .model_inputs import ModelInputs, get_streams, prepare_inputs
from .site import Site, Sites

PRECISIONS = ("own", "half")
EXTRA_TENSORS = ("v", "z")


@dataclass(frozen=True)
class Capture:
    """Tensors to record of a run besides queries and keys.

    `extra` may contain "v" (values) and "z" (head outputs). `sites` are site names or layer numbers
    (default: all). `budget` is the maximum number of bytes recorded. precision="own" keeps the
    model's precision (float32 for bfloat16, which is exact); "half" stores float16, and weights
    computed from it are rounded accordingly.

    >>> Capture(extra=("values",))
    Traceback (most recent call last):
    headwise.errors.SpecError: Capture(extra=('values',)) holds 'values'; give some of v, z
    """

    extra: tuple[str, ...] = ()
    sites: tuple[str | int, ...] = ()
    budget: int = 10**9
    precision: str = "own"

    def __post_init__(self) -> None:
        wrong = [name for name in self.extra if name not in EXTRA_TENSORS]
        if wrong:
            raise SpecError(
                f"Capture(extra={self.extra!r}) holds {wrong[0]!r}; give some of "
                f"{', '.join(EXTRA_TENSORS)}"
            )
        if self.precision not in PRECISIONS:
            raise SpecError(
                f"Capture(precision={self.precision!r}) is unknown; give one of "
                f"{', '.join(PRECISIONS)}"
            )
        if type(self.budget) is not int or self.budget < 1:
            raise SpecError(
                f"Capture(budget={self.budget!r}) is not a number of bytes; give an integer > 0, "
                "as in 10**9"
            )

    @property
    def bytes_per_number(self) -> int:
        """Bytes per recorded number."""
        return 2 if self.precision == "half" else 4


@dataclass
class CaptureBuffer:
    """State shared by the recorders of a run: the bytes recorded so far, and the masks without
    duplicates.
    """

    capture: Capture
    nbytes: int = 0
    grids: list[PackedMask] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)
    _masks_seen: list[tuple[Tensor, int]] = field(default_factory=list)

    def copy_to_host(self, tensor: Tensor) -> Array:
        """Copy a tensor to the CPU; raises if it does not fit into the budget."""
        half = self.capture.precision == "half" or tensor.dtype == torch.float16
        dtype = torch.float16 if half else torch.float32
        self.reserve(tensor.numel() * dtype.itemsize)
        # copy=True, because without it to() may return the tensor itself, which a cache overwrites
        # later
        return tensor.detach().to("cpu", dtype, copy=True).contiguous().numpy()

    def reserve(self, nbytes: int) -> None:
        """Count `nbytes` more; raises if they exceed the budget."""
        self.nbytes += nbytes
        if self.nbytes > self.capture.budget:
            fact = (
                f"cannot record this run: it takes at least {format_bytes(self.nbytes)}, beyond a "
                "budget of "
                f"{format_bytes(self.capture.budget)}"
            )
            raise SpecError(f"{fact}; give a larger budget=, fewer sites=, or precision='half'")

    def add_mask(self, tensor: Tensor) -> int:
        """Store a mask or bias and return its index; a mask that several layers share is stored
        once.
        """
        for stored, number in self._masks_seen:
            if stored is tensor:
                return number
        mask_4d = tensor.detach()[(None,) * (4 - tensor.dim())]  # add missing batch and head axes
        grid = PackedMask.pack(
            (mask_4d if mask_4d.dtype == torch.bool else mask_4d.float()).cpu().numpy()
        )
        number = self._numbers.get(grid.identity)
        if number is None:
            number = self._numbers[grid.identity] = len(self.grids)
            self.reserve(grid.values.nbytes)
            self.grids.append(grid)
        # keep two: models that alternate local and global layers share one mask of each kind
        self._masks_seen = [*self._masks_seen[-1:], (tensor, number)]
        return number


class CallRecorder:
    """Observer that records the calls of one attention layer."""

    needs_call = True

    def __init__(self, site: Site, store: CaptureBuffer) -> None:
        self.site = site
        self.store = store
        self.calls: list[AttentionCallRecord] = []
        self.chunks: dict[str, list[Array]] = {}
        self.kv_head_of_query: tuple[int, ...] = ()
        self.reason = ""

    def on_call(self, call: ObservedCall) -> None:
        """Record a call, or the reason why it cannot be recorded."""
        if self.reason:
            return
        inputs = call.attention_inputs
        if inputs is None or not self._has_same_widths(inputs):
            self._record_weights(call)
        else:
            self._record_scores(inputs)

    def on_head_outputs(self, z: Tensor) -> None:
        """Record head outputs if requested."""
        if "z" in self.store.capture.extra and not self.reason:
            self._append("z", self.store.copy_to_host(z))

    def to_layer(self, streams: tuple[str, str]) -> AttentionRecord:
        """Make the trace record of this layer from the recorded calls."""
        arrays = {name: _concatenate(chunks) for name, chunks in self.chunks.items()}
        site = self.site
        heads = len(self.kv_head_of_query) or next(
            a.shape[1] for name, a in arrays.items() if name.startswith("weights")
        )
        return AttentionRecord(
            site.name,
            site.stack,
            site.layer,
            site.kind,
            site.path,
            heads,
            self.kv_head_of_query,
            *streams,
            tuple(self.calls),
            arrays,
        )

    def _append(self, name: str, array: Array) -> None:
        self.chunks.setdefault(name, []).append(array)

    def _num_queries(self) -> int:
        """Number of queries recorded so far."""
        return self.calls[-1].queries[1] if self.calls else 0

    def _count(self, name: str) -> int:
        return sum(chunk.shape[1] for chunk in self.chunks.get(name, ()))

    def _has_same_widths(self, inputs: AttentionInputs) -> bool:
        """Whether queries and keys have the shape of earlier calls. Latent attention (MLA) changes
        it between prefill, which expands the latents, and decode steps, which attend to the latents
        directly.
        """
        head_shapes = {"q": inputs.q_BTHK.shape[2:], "k": inputs.k_BSGK.shape[2:]}
        return all(
            self.chunks[name][0].shape[2:] == shape
            for name, shape in head_shapes.items()
            if name in self.chunks
        )

    def _record_weights(self, call: ObservedCall) -> None:
        """Record the weights of a call that cannot be recomputed from queries and keys."""
        try:
            weights = call.all_weights()
        except ValueError as error:  # includes NoBackend: no backend returns these weights
            self.reason = str(error)
            return
        positions = None
        if call.key_positions is not None:
            order, positions = _key_order(call.key_positions)
            weights = weights[..., order]
        start = self._num_queries()
        queries, keys = weights.shape[2:]
        number = len(self.calls)
        self._append(f"weights.{number}", self.store.copy_to_host(weights))
        first = 0 if keys >= start + queries or self.site.kind == "cross" else None
        places = None
        if positions is not None:
            first, places = self._record_key_positions(positions)
        span = (start, start + queries)
        self.calls.append(
            AttentionCallRecord(span, (0, keys), first, weights=number, places=places)
        )

    def _record_scores(self, inputs: AttentionInputs) -> None:
        """Record the queries, keys and masks of a call whose weights can be
        recomputed from them.
        """
        if not self.kv_head_of_query:
            heads = inputs.q_BTHK.shape[2]
            self.kv_head_of_query = tuple(inputs.kv_head_of(head) for head in range(heads))
            if inputs.sinks is not None:
                self.chunks["sinks"] = [self.store.copy_to_host(inputs.sinks.flatten())]
        inputs, positions = _sort_keys(inputs)
        start = self._num_queries()
        first_row = self._count("q")
        queries = inputs.q_BTHK.shape[1]
        self._append("q", self.store.copy_to_host(inputs.q_BTHK))
        grids: list[int] = []
        for grid in (inputs.bias, inputs.mask):
            if grid is not None:
                # columns beyond the keys, such as free slots of a cache, are dropped
                count = inputs.k_BSGK.shape[1]
                fits = grid.shape[-1] <= count
                grids.append(self.store.add_mask(grid if fits else grid[..., :count]))
        keys = self._record_keys(inputs, queries)
        if positions is None:
            first = self._first_position(keys, start + queries)
            places = None
        else:
            first, places = self._record_key_positions(positions)
        self.calls.append(
            AttentionCallRecord(
                (start, start + queries),
                keys,
                first,
                inputs.scale,
                inputs.softcap,
                inputs.causal and queries > 1,
                tuple(grids),
                first_query_row=first_row,
                places=places,
            )
        )

    def _record_keys(self, inputs: AttentionInputs, queries: int) -> tuple[int, int]:
        """Record the new keys of this call, and return the range of all its keys among the recorded
        ones.
        """
        k_BSGK = inputs.k_BSGK
        count = inputs.k_BSGK.shape[1]
        num_recorded = self._count("k")
        for num_new in (0, queries, count):
            k_cached = k_BSGK[:, : count - num_new]
            fits = self.calls and 0 < k_cached.shape[1] <= num_recorded
            if num_new == count or (fits and self._ends_with(k_cached)):
                break
        tensors = {"k": k_BSGK}
        if "v" in self.store.capture.extra:
            tensors["v"] = inputs.v_BSGV
        for name, tensor in tensors.items():
            if num_new:
                self._append(name, self.store.copy_to_host(tensor[:, count - num_new :]))
        stop = num_recorded + num_new
        return stop - count, stop

    def _ends_with(self, k_BSGK: Tensor) -> bool:
        """Whether the recorded keys end with these."""
        half = self.chunks["k"][0].dtype == np.float16
        remaining = k_BSGK.detach().to("cpu", torch.float16 if half else torch.float32).numpy()
        for chunk in reversed(self.chunks["k"]):
            count = min(chunk.shape[1], remaining.shape[1])
            if not np.array_equal(
                chunk[:, chunk.shape[1] - count :], remaining[:, remaining.shape[1] - count :]
            ):
                return False
            remaining = remaining[:, : remaining.shape[1] - count]
            if not remaining.shape[1]:
                break
        return True

    def _record_key_positions(self, positions: Tensor) -> tuple[int | None, int | None]:
        """Position of the first key if the positions have no gaps, else the number of a recorded
        array of positions.
        """
        first, last = (int(positions[0]), int(positions[-1])) if len(positions) else (0, -1)
        if last - first == len(positions) - 1:
            return first, None
        number = len(self.calls)
        self.store.reserve(4 * len(positions))
        self._append(f"places.{number}", positions.to("cpu", torch.int32).numpy())
        return None, number

    def _first_position(self, keys: tuple[int, int], tokens: int) -> int | None:
        """Position of the first key; None if the order of keys in the cache is unknown."""
        start, stop = keys
        if self.site.kind == "cross" or not self.calls:
            return 0
        last = self.calls[-1]
        if (
            last.weights is None and last.first is not None and start < last.keys[1]
        ):  # continues the keys of the last call
            return last.first + start - last.keys[0]
        return 0 if stop - start >= tokens else None


def _key_order(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Indices that sort keys by position, without empty slots (position -1); and the sorted
    positions.
    """
    order = positions.argsort()[int((positions < 0).sum()) :]
    return order, positions[order]


def _sort_keys(inputs: AttentionInputs) -> tuple[AttentionInputs, Tensor | None]:
    """Sort the keys by position; returns the inputs and the sorted positions, or None if these are
    unknown.
    """
    if inputs.key_positions is None:
        return inputs, None
    order, positions = _key_order(inputs.key_positions)
    if torch.equal(order, torch.arange(inputs.k_BSGK.shape[1], device=order.device)):
        return inputs, positions
    ordered = {"k_BSGK": inputs.k_BSGK[:, order], "v_BSGV": inputs.v_BSGV[:, order]}
    for name in ("mask", "bias"):
        grid: Tensor | None = getattr(inputs, name)
        if grid is not None and grid.shape[-1] > 1:
            ordered[name] = grid[..., order]
    return replace(inputs, **ordered), positions


def _concatenate(chunks: Sequence[Array]) -> Array:
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks, 1)


# --- Estimate of the size of a trace, before anything is computed ---------------------------------


def estimate_bytes(
    sites: Sequence[SiteModule],
    capture: Capture,
    streams: Mapping[str, tuple[str, str]],
    batch: int,
    num_tokens: Mapping[str, int],
) -> int:
    """Estimate the bytes that a trace of this size takes: queries, keys, requested extras, and
    masks as bits. `num_tokens` are the tokens of each stream, with those to generate.

    Biases are assumed to depend on the offset of key and query only, as position biases do.
    """
    numbers = 0
    masks: dict[tuple[str, int, int], int] = {}
    for site_module in sites:
        site = site_module.site
        queries, keys = (num_tokens[stream] for stream in streams[site.name])
        width = site.dim if site.spec is None else site.spec.heads.vdim
        if "z" in capture.extra:
            numbers += queries * site.heads * width
        if site_module.adapter.visible_tensors(site_module.module) == "weights":
            numbers += site.heads * queries * keys
            continue
        heads = site.q
        kv_heads = site.kv
        dim = site.dim
        if site.spec is not None:
            core = site.spec.core_of(site.spec.projection_form(one=False))
            heads = len(core.key_head_of_query)
            kv_heads = max(core.key_head_of_query) + 1
            dim = core.dim
        key_width = dim + width if "v" in capture.extra else dim
        numbers += queries * heads * dim + keys * kv_heads * key_width
        bits = batch * queries * -(-keys // 8)
        masks[site.pattern, queries, keys] = bits + 4 * site.q * (queries + keys)
    return batch * capture.bytes_per_number * numbers + sum(masks.values())


# --- Trace a run of any model ---------------------------------------------------------------------

ProgressFunction = Callable[[str], object]


def trace(
    model: nn.Module,
    inputs: Any,
    *,
    max_new_tokens: int = 0,
    capture: Capture = Capture(),
    log: ProgressFunction = lambda _: None,
    tokenizer: object = None,
) -> Trace:
    """Run a model on `inputs`, generate `max_new_tokens` tokens, and record every attention layer
    as a `Trace`.

    `inputs` are ids or another tensor, a tuple or mapping of the model's arguments, or one or
    several texts, which `tokenizer` encodes (default: that of the model). `log`, such as `print`,
    is called with the expected size before anything is computed; by default, nothing is printed.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> run = trace(net.eval(), torch.tensor([[3, 1, 4]]), log=print)
    about 435 bytes of 1.0 GB: queries and keys of 2 sites
    >>> run.head_weights(1, 0).shape
    (3, 3)
    """
    model_inputs = prepare_inputs(model, inputs, max_new_tokens, tokenizer)
    find = find_attention_in_run if not max_new_tokens else lambda model, _: find_attention(model)
    site_modules = find(model, model_inputs)
    sites = _select_sites(model, site_modules, capture)
    run = ModelRun(model, model_inputs, max_new_tokens)
    streams = {one.site.name: get_streams(one.site, model_inputs.has_source) for one in sites}
    counts = dict(model_inputs.token_counts or _count_tokens(run, sites, streams))
    counts["text"] += max_new_tokens
    expected = estimate_bytes(sites, capture, streams, model_inputs.batch_size, counts)
    limit = format_bytes(capture.budget)
    log(f"about {format_bytes(expected)} of {limit}: {_describe_capture(capture, sites)}")
    if expected > capture.budget:
        raise SpecError(
            f"cannot record this run: it takes about {format_bytes(expected)}, beyond a budget "
            f"of {limit}; give a larger budget=, fewer sites=, fewer tokens, or precision='half'"
        )
    store = CaptureBuffer(capture)
    recorders = {one.site.name: CallRecorder(one.site, store) for one in sites}
    output = run.run_with_hooks(sites, recorders)
    rows = dict(model_inputs.token_rows)
    if max_new_tokens:
        new_ids = output.tolist() if isinstance(output, Tensor) else output
        rows["text"] = model_inputs.extend_rows(new_ids)
    skipped = {
        one.site.name: one.site.observe.reason
        for one in find_attention(model)
        if not one.site.observe.possible
    }
    layers: list[AttentionRecord] = []
    for name, recorder in recorders.items():
        if recorder.reason or not recorder.calls:
            skipped[name] = recorder.reason or "it was not called"
        else:
            layers.append(recorder.to_layer(streams[name]))
    if not layers:
        raise ValueError(f"cannot record any attention layer: {next(iter(skipped.values()))}")
    description = {
        "name": get_model_name(model),
        "class": type(model).__name__,
        "torch": torch.__version__,
    }
    images = _read_images(model_inputs, layers)
    return Trace(description, rows, tuple(layers), tuple(store.grids), skipped, images=images)


MAX_IMAGE_SIDE = 512  # pixels of an image that is kept for pictures


def _read_images(model_inputs: ModelInputs, layers: Sequence[AttentionRecord]) -> dict[str, Array]:
    """The images of a model's inputs [B, 1 or 3, height, width] as bytes, by the stream that
    attends to their patches.

    The lowest and the highest value of each image become 0 and 255, because the inputs are
    normalised.
    """
    images = [
        tensor
        for tensor in (*model_inputs.args, *model_inputs.kwargs.values())
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dim() == 4
    ]
    streams = [layer.key_stream for layer in layers]
    wordless = [stream for stream in streams if stream not in model_inputs.token_rows]
    if len(images) != 1 or images[0].shape[1] not in (1, 3) or not wordless:
        return {}
    pixels = images[0].detach().float().cpu()
    step = -(-max(pixels.shape[-2:]) // MAX_IMAGE_SIDE)
    pixels = pixels[..., ::step, ::step]
    low = pixels.amin((1, 2, 3), keepdim=True)
    high = pixels.amax((1, 2, 3), keepdim=True)
    scaled = (pixels - low) / (high - low).clamp_min(1e-12) * 255
    return {wordless[0]: np.ascontiguousarray(scaled.round().byte().permute(0, 2, 3, 1).numpy())}


class TokenCounter:
    """Observer that counts the queries and keys of a call, and records nothing else."""

    needs_call = True

    def __init__(self) -> None:
        self.counts = (0, 0)

    def on_call(self, call: ObservedCall) -> None:
        """Count queries and keys."""
        inputs = call.attention_inputs
        if inputs is None:
            _, queries, keys = call.head_weights(0).shape
            self.counts = queries, keys
        else:
            self.counts = inputs.q_BTHK.shape[1], inputs.k_BSGK.shape[1]

    def on_head_outputs(self, z: Tensor) -> None:
        """Leave the outputs unchanged."""


def _count_tokens(
    run: ModelRun, site_modules: Sequence[SiteModule], streams: Mapping[str, tuple[str, str]]
) -> dict[str, int]:
    """Count the tokens of each stream in a run without recording; the shape of images and audio
    does not show it.
    """
    counters = {site_module.site.name: TokenCounter() for site_module in site_modules}
    # a forward call of a source alone does not run the decoder, so generate one token where tokens
    # are requested
    run._replace(max_new_tokens=min(run.max_new_tokens, 1)).run_with_hooks(site_modules, counters)
    counts = {"text": 0, "source": 0}
    for name, counter in counters.items():
        for stream, count in zip(streams[name], counter.counts, strict=True):
            counts[stream] = max(counts[stream], count)
    return counts


def _select_sites(
    model: nn.Module, all_sites: Sequence[SiteModule], capture: Capture
) -> list[SiteModule]:
    """The sites to record; raises if a site named in `capture`, or every site, cannot be observed."""
    sites = Sites([one.site for one in all_sites], type(model).__name__)
    if not sites:
        raise ValueError(
            f"{sites.model} has no attention that headwise finds; hw.sites(model, example) finds "
            "it in a run on an example"
        )
    names = {sites.find(which).name for which in capture.sites}
    selected = [one for one in all_sites if not names or one.site.name in names]
    able = [one for one in selected if one.site.observe.possible]
    if not able or (names and len(able) < len(selected)):
        site = next(one.site for one in selected if not one.site.observe.possible)
        raise ValueError(f"{site.name} cannot be observed: {site.observe.reason}")
    if model.training:
        raise ValueError(
            "the model is in train mode, where dropout changes the attention weights; call "
            "model.eval() first"
        )
    return able


def _describe_capture(capture: Capture, sites: Sequence[SiteModule]) -> str:
    extras = {"v": "values", "z": "head outputs"}
    names = ["queries", "keys", *(extras[name] for name in capture.extra)]
    description = f"{', '.join(names[:-1])} and {names[-1]} of {len(sites)} sites"
    visible = [one.adapter.visible_tensors(one.module) for one in sites]
    count = visible.count("weights")
    return f"{description}, for {count} of them the weights themselves" if count else description


def get_model_name(model: nn.Module) -> str:
    """Name of a model: that of its spec, its folder, or its class."""
    if isinstance(model, Transformer):
        return model.spec.name
    path = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    return path.rstrip("/").rpartition("/")[2] or type(model).__name__
