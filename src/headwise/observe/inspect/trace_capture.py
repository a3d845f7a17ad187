"""Record the queries, keys and masks of every attention layer of a run on the CPU, within a budget
of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...hub.pretrained_models import open_model
from ...models import Transformer
from ...report.text import format_bytes
from ...util.errors import SpecError
from ...util.model_names import label_model
from ..traces import AttentionCallRecord, AttentionRecord, PackedMask, Trace
from ..traces.attention_record import Array
from .attention_sites import find_attention, find_attention_in_run, require_ability
from .hooks import AttentionHook, SiteModule, run_observed
from .model_inputs import ModelInputs, get_streams, prepare_inputs
from .model_tokenizer import decode_rows, use_tokenizer
from .site import AttentionInputs, ObservedCall, Site, Sites

PRECISIONS = ("own", "half")
EXTRA_TENSORS = ("v", "z")


@dataclass(frozen=True)
class Capture:
    """Choose tensors to record of a run besides queries and keys.

    `extra` may contain "v" (values) and "z" (head outputs). `sites` are site names or layer numbers
    (default: all). `budget` is the maximum number of bytes recorded. precision="own" keeps the
    model's precision (float32 for bfloat16, which is exact); "half" stores float16, and weights
    computed from it are rounded accordingly.

    >>> Capture(extra=("values",))
    Traceback (most recent call last):
    headwise.util.errors.SpecError: Capture(extra=('values',)) holds 'values'; give some of v, z
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


@dataclass
class CaptureBuffer:
    """Share state between the recorders of a run: recorded bytes, and masks without duplicates."""

    capture: Capture
    nbytes: int = 0
    grids: list[PackedMask] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)
    _masks_seen: list[tuple[Tensor, int]] = field(default_factory=list)

    def copy_to_host(self, tensor: Tensor) -> Array:
        """Copy a tensor to the CPU; raise if it does not fit into the budget."""
        half = self.capture.precision == "half" or tensor.dtype == torch.float16
        dtype = torch.float16 if half else torch.float32
        self.reserve(tensor.numel() * dtype.itemsize)
        # copy=True, because without it to() may return the tensor itself, which a cache overwrites
        # later
        return tensor.detach().to("cpu", dtype, copy=True).contiguous().numpy()

    def reserve(self, nbytes: int) -> None:
        """Count `nbytes` more; raise if they exceed the budget."""
        self.nbytes += nbytes
        if self.nbytes > self.capture.budget:
            raise SpecError(
                f"cannot record this run: it takes at least {format_bytes(self.nbytes)}, beyond a "
                f"budget of {format_bytes(self.capture.budget)}; give a larger budget=, fewer "
                "sites=, fewer tokens, or precision='half'"
            )

    def add_mask(self, tensor: Tensor) -> int:
        """Store a mask or bias and return its index; layers that share a mask store it once."""
        for stored, number in self._masks_seen:
            if stored is tensor:
                return number
        mask_4d = tensor.detach()[(None,) * (4 - tensor.dim())]  # add missing batch and head axes
        mask_4d = mask_4d if mask_4d.dtype == torch.bool else mask_4d.float()
        grid = PackedMask.pack(mask_4d.cpu().numpy())
        number = self._numbers.get(grid.identity)
        if number is None:
            number = self._numbers[grid.identity] = len(self.grids)
            self.reserve(grid.values.nbytes)
            self.grids.append(grid)
        # keep two: models that alternate local and global layers share one mask of each kind
        self._masks_seen = [*self._masks_seen[-1:], (tensor, number)]
        return number


class CallRecorder(AttentionHook):
    """Record the calls of one attention layer, or the `reason` why it cannot."""

    def __init__(self, site: Site, store: CaptureBuffer) -> None:
        self.site = site
        self.store = store
        self.calls: list[AttentionCallRecord] = []
        self.chunks: dict[str, list[Array]] = {}
        self.kv_head_of_query: tuple[int, ...] = ()
        self.reason = ""

    def on_call(self, call: ObservedCall) -> None:
        """Record queries and keys, or the weights if they cannot be recomputed from these."""
        if self.reason:
            return
        inputs = call.attention_inputs
        # Latent attention (MLA) changes the widths between prefill, which expands the latents, and
        # decode steps, which attend to the latents directly.
        if inputs and self._fits("q", inputs.q_BTHK) and self._fits("k", inputs.k_BSGK):
            self._record_scores(inputs)
        else:
            self._record_weights(call)

    def on_head_outputs(self, outputs: Tensor) -> None:
        """Record head outputs if requested."""
        if "z" in self.store.capture.extra and not self.reason:
            self._append("z", self.store.copy_to_host(outputs))

    def to_layer(self, streams: tuple[str, str]) -> AttentionRecord:
        """Make the trace record of this layer from the recorded calls."""
        arrays: dict[str, Array] = {}
        for name, chunks in self.chunks.items():
            arrays[name] = chunks[0] if len(chunks) == 1 else np.concatenate(chunks, 1)
        site = self.site
        weights = [array for name, array in arrays.items() if name.startswith("weights")]
        return AttentionRecord(
            site.name,
            site.stack,
            site.layer,
            site.kind,
            site.path,
            len(self.kv_head_of_query) or weights[0].shape[1],
            self.kv_head_of_query,
            *streams,
            tuple(self.calls),
            arrays,
        )

    def _append(self, name: str, array: Array) -> None:
        self.chunks.setdefault(name, []).append(array)

    def _count(self, name: str) -> int:
        return sum(chunk.shape[1] for chunk in self.chunks.get(name, ()))

    def _fits(self, name: str, tensor: Tensor) -> bool:
        """Return True if a tensor has the shape per token of the recorded ones."""
        return name not in self.chunks or self.chunks[name][0].shape[2:] == tensor.shape[2:]

    def _next_queries(self, count: int) -> tuple[int, int]:
        """Return the range of the next `count` queries in the text."""
        start = self.calls[-1].queries[1] if self.calls else 0
        return start, start + count

    def _record_weights(self, call: ObservedCall) -> None:
        """Record the weights of a call that cannot be recomputed from queries and keys."""
        try:
            weights = call.all_weights()
        except ValueError as error:  # includes NoBackend: no backend returns these weights
            self.reason = str(error)
            return
        span = self._next_queries(weights.shape[2])
        keys = weights.shape[3]
        first = 0 if keys >= span[1] or self.site.kind == "cross" else None
        places = None
        if call.key_positions is not None:
            order = _key_order(call.key_positions)
            weights = weights[..., order]
            keys = len(order)
            first, places = self._record_key_positions(call.key_positions[order])
        number = len(self.calls)
        self._append(f"weights.{number}", self.store.copy_to_host(weights))
        call_record = AttentionCallRecord(span, (0, keys), first, weights=number, places=places)
        self.calls.append(call_record)

    def _record_scores(self, inputs: AttentionInputs) -> None:
        """Record queries, keys and masks of a call; weights are recomputed from them."""
        if not self.kv_head_of_query:
            heads = inputs.q_BTHK.shape[2]
            self.kv_head_of_query = tuple(inputs.kv_head_of(head) for head in range(heads))
            if inputs.sinks is not None:
                self.chunks["sinks"] = [self.store.copy_to_host(inputs.sinks.flatten())]
        if inputs.key_positions is not None:
            inputs = _sort_keys(inputs, _key_order(inputs.key_positions))
        queries = inputs.q_BTHK.shape[1]
        span = self._next_queries(queries)
        first_row = self._count("q")
        self._append("q", self.store.copy_to_host(inputs.q_BTHK))
        grids: list[int] = []
        for grid in (inputs.bias, inputs.mask):
            if grid is not None:
                # columns beyond the keys, such as free slots of a cache, are dropped
                count = inputs.k_BSGK.shape[1]
                fits = grid.shape[-1] <= count
                grids.append(self.store.add_mask(grid if fits else grid[..., :count]))
        keys = self._record_keys(inputs, queries)
        places = None
        if inputs.key_positions is None:
            first = self._first_position(keys, span[1])
        else:
            first, places = self._record_key_positions(inputs.key_positions)
        self.calls.append(
            AttentionCallRecord(
                span,
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
        """Record the new keys of this call; return the range of all its keys among the recorded
        ones.
        """
        k_BSGK = inputs.k_BSGK
        count = k_BSGK.shape[1]
        num_recorded = self._count("k")
        num_new = count
        for candidate in (0, queries):
            k_cached = k_BSGK[:, : count - candidate]
            fits = self.calls and 0 < k_cached.shape[1] <= num_recorded
            if fits and candidate < count and self._ends_with(k_cached):
                num_new = candidate
                break
        if num_new:
            self._append("k", self.store.copy_to_host(k_BSGK[:, count - num_new :]))
            if "v" in self.store.capture.extra:
                self._append("v", self.store.copy_to_host(inputs.v_BSGV[:, count - num_new :]))
        stop = num_recorded + num_new
        return stop - count, stop

    def _ends_with(self, k_BSGK: Tensor) -> bool:
        """Return True if the recorded keys end with these."""
        half = self.chunks["k"][0].dtype == np.float16
        rest = k_BSGK.detach().to("cpu", torch.float16 if half else torch.float32).numpy()
        for chunk in reversed(self.chunks["k"]):
            count = min(chunk.shape[1], rest.shape[1])
            if not np.array_equal(chunk[:, -count:], rest[:, -count:]):
                return False
            rest = rest[:, :-count]
            if not rest.shape[1]:
                break
        return True

    def _record_key_positions(self, positions: Tensor) -> tuple[int | None, int | None]:
        """Return the first key position, or the number of a recorded array of positions if it has
        gaps.
        """
        count = len(positions)
        if not count:
            return 0, None
        first = int(positions[0])
        if int(positions[-1]) - first == count - 1:
            return first, None
        number = len(self.calls)
        self.store.reserve(4 * count)
        self._append(f"places.{number}", positions.to("cpu", torch.int32).numpy())
        return None, number

    def _first_position(self, keys: tuple[int, int], tokens: int) -> int | None:
        """Return the first key's position; None if the order of keys in the cache is unknown."""
        start, stop = keys
        if self.site.kind == "cross" or not self.calls:
            return 0
        last = self.calls[-1]
        if last.weights is None and last.first is not None and start < last.keys[1]:
            return last.first + start - last.keys[0]  # continues the keys of the last call
        return 0 if stop - start >= tokens else None


def _key_order(positions: Tensor) -> Tensor:
    """Return indices that sort keys by position, without empty slots (position -1)."""
    return positions.argsort()[int((positions < 0).sum()) :]


def _sort_keys(inputs: AttentionInputs, order: Tensor) -> AttentionInputs:
    """Put the keys of a call in this order."""
    assert inputs.key_positions is not None
    if torch.equal(order, torch.arange(inputs.k_BSGK.shape[1], device=order.device)):
        return inputs
    ordered = {
        "k_BSGK": inputs.k_BSGK[:, order],
        "v_BSGV": inputs.v_BSGV[:, order],
        "key_positions": inputs.key_positions[order],
    }
    for name in ("mask", "bias"):
        grid: Tensor | None = getattr(inputs, name)
        if grid is not None and grid.shape[-1] > 1:
            ordered[name] = grid[..., order]
    return replace(inputs, **ordered)


# --- Trace a run of any model ---------------------------------------------------------------------


def trace(
    model: nn.Module | Path | str,
    inputs: Any,
    *,
    max_new_tokens: int = 0,
    capture: Capture = Capture(),
    tokenizer: object = None,
) -> Trace:
    """Run a model on `inputs`, generate `max_new_tokens` tokens, and record every attention layer
    as a `Trace`.

    `model` is a module, or a name as in `hw.load`. `inputs` are ids or another tensor, a tuple or
    mapping of the model's arguments, or one or several texts, which `tokenizer` encodes (default:
    the model's own).

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> trace(net.eval(), torch.tensor([[3, 1, 4]])).head_weights(1, 0).shape
    (3, 3)
    """
    model = open_model(model)
    model_inputs = prepare_inputs(model, inputs, max_new_tokens, tokenizer)
    site_modules = (
        find_attention(model) if max_new_tokens else find_attention_in_run(model, model_inputs)
    )
    sites = _select_sites(model, site_modules, capture)
    store = CaptureBuffer(capture)
    recorders = {one.site.name: CallRecorder(one.site, store) for one in sites}
    output = run_observed(model, model_inputs, sites, recorders, max_new_tokens)
    rows = dict(model_inputs.token_rows)
    if max_new_tokens:
        new_ids = output.tolist() if isinstance(output, Tensor) else output
        rows["text"] = model_inputs.extend_rows(new_ids)
    with use_tokenizer(model, tokenizer) as reader:
        rows = decode_rows(reader, rows)
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
            layers.append(recorder.to_layer(get_streams(recorder.site, model_inputs.has_source)))
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
    """Return the images [B, 1 or 3, height, width] as bytes, by the stream attending to their
    patches.

    The lowest and highest values of each image become 0 and 255, because the inputs are normalised.
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


def _select_sites(
    model: nn.Module, all_sites: Sequence[SiteModule], capture: Capture
) -> list[SiteModule]:
    """Select the sites to record.

    Raises if a site named in `capture`, or every site, cannot be observed.
    """
    sites = Sites([one.site for one in all_sites], type(model).__name__)
    names = {sites.find(which).name for which in capture.sites}
    if not names:
        return require_ability(model, "observe", all_sites)
    selected: list[SiteModule] = []
    for one in all_sites:
        if one.site.name in names:
            selected += require_ability(model, "observe", [one])
    return selected


def get_model_name(model: nn.Module) -> str:
    """Return the name of a model: from its spec, its folder, or its class."""
    if isinstance(model, Transformer):
        return model.spec.name
    path = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    return label_model(path) or type(model).__name__
