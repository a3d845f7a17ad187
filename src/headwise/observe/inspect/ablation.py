"""Ablate and patch heads while a model runs: scale their outputs, or replace outputs, queries,
keys, values or weights by vectors, other rows or noise.

`ablate` and `patch` make an `OutputEditor` for each attention layer, and `hook_sites` installs it
through the adapter of the layer, which calls it with the head outputs before the output projection.
"""

from __future__ import annotations

import math
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ...util.errors import check_known, pluralise
from ...util.escaping import escape_terminal
from ..head_names import check_head, parse_heads
from .attention_sites import check_found, check_head_part, find_attention
from .hooks import AttentionHook, SiteModule, hook_sites
from .model_inputs import check_eval_mode
from .site import HEAD_PARTS, OUTPUT, PATTERN, HeadVectors, Site, Sites

MAX_SEED = 2**31
MAX_REPR = 80  # characters of a wrong value in a message


class HeadCall(NamedTuple):
    """Describe one head in one forward call.

    Holds its output [B, T, head_dim], and the tokens [B, T] to patch (None: all). If another part
    of the head is patched, `output` is this part: q, k, v, or the pattern [B, T, keys].
    """

    site: str
    head: int
    output: Tensor
    token_mask: Tensor | None
    part: str = OUTPUT

    def check_width(self, value: Tensor) -> None:
        """Raise unless the last axis of a value has the channels of the output."""
        width = self.output.shape[-1]
        if value.shape[-1] != width:
            fact = f"heads of {self.site} output {width} channels, not {value.shape[-1]}"
            if self.part != OUTPUT:
                unit = "keys" if self.part == PATTERN else "channels"
                fact = f"{self.part} of {self.site} has {width} {unit}, not {value.shape[-1]}"
            raise ValueError(f"{fact}; give a vector of {width}")

    @property
    def patched_vectors(self) -> Tensor:
        """Return the output at the tokens to patch, [tokens, head_dim], in float32 or wider."""
        chosen = self.output.flatten(0, -2)
        if self.token_mask is not None:
            chosen = self.output[self.token_mask.expand(self.output.shape[:-1])]
        return chosen.to(torch.promote_types(chosen.dtype, torch.float32))


class HeadPatch(ABC):
    """Base class of replacements for a head's output."""

    def make_generator(self, site: str, head: int) -> torch.Generator | None:
        """Make the head's random generator for an active context; None if it needs none."""
        return None

    @abstractmethod
    def compute(self, head_call: HeadCall, generator: Any) -> Tensor:
        """Compute the new output of a head."""


@dataclass(frozen=True)
class ScaledOutput(HeadPatch):
    """Multiply the head's own output by `scale`."""

    scale: float

    def compute(self, head_call: HeadCall, generator: Any) -> Tensor:
        return head_call.output * self.scale


@dataclass(frozen=True)
class MeanOutput(HeadPatch):
    """Replace the output by its own mean over the patched tokens of each call, per channel."""

    def compute(self, head_call: HeadCall, generator: Any) -> Tensor:
        vectors = head_call.patched_vectors
        if len(vectors) < 2:
            raise ValueError(
                f"the mean of {len(vectors)} tokens would change nothing in {head_call.site}; "
                "patch the mean over data: hw.patch(model, hw.head_means(model, batches))"
            )
        return vectors.mean(0).to(head_call.output).expand_as(head_call.output)


@dataclass(frozen=True, eq=False)
class ConstantOutput(HeadPatch):
    """Replace the output by a vector [head_dim], or by one for each token [B, T, head_dim]."""

    value: Tensor

    def compute(self, head_call: HeadCall, generator: Any) -> Tensor:
        head_call.check_width(self.value)
        if self.value.dim() == 3:
            check_shape(head_call.site, self.value, head_call.output)
        return self.value.to(head_call.output).expand_as(head_call.output)


@dataclass(frozen=True)
class Resample(HeadPatch):
    """The head's output for another row of the batch: row `rows[n]` for row n, or rows sampled from
    `seed`.

    Sampled rows form one cycle, so that no row keeps its own output. Heads with the same seed use
    the same rows. The rows should have equal lengths: padding in the other row is copied too. In a
    vision model that attends within windows, each window is a row.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    >>> with hw.patch(net, {(0, "all"): Resample(rows=(1, 0))}):
    ...     swapped = net(ids)
    >>> torch.equal(swapped, net(ids))
    False
    """

    rows: tuple[int, ...] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.seed is None):
            raise ValueError("give exactly one of rows and seed: rows=(1, 0), or seed=0")
        if self.rows is not None:
            object.__setattr__(self, "rows", tuple(self.rows))
            if not self.rows or any(type(row) is not int or row < 0 for row in self.rows):
                raise ValueError(
                    f"rows={self.rows!r} names no rows; give one row index >= 0 for each row, as "
                    "in (1, 0)"
                )
        if self.seed is not None:
            check_seed(self.seed)

    def make_generator(self, site: str, head: int) -> torch.Generator | None:
        return None if self.seed is None else torch.Generator().manual_seed(self.seed)

    def compute(self, head_call: HeadCall, generator: Any) -> Tensor:
        num_rows = len(head_call.output)
        order = self.rows
        if order is None:
            if num_rows < 2:
                raise ValueError("a batch of one row has no other row to sample; give several rows")
            # one random cycle through all rows, so that no row keeps its own output
            cycle = torch.randperm(num_rows, generator=generator).tolist()
            next_row = dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
            order = tuple(next_row[row] for row in range(num_rows))
        if len(order) != num_rows or max(order) >= num_rows:
            raise ValueError(
                f"{head_call.site} gets a batch of {num_rows} rows, but rows={order}; "
                f"give {num_rows} indices in 0..{num_rows - 1}"
            )
        return head_call.output[torch.tensor(order, device=head_call.output.device)]


@dataclass(frozen=True, eq=False)
class Noise(HeadPatch):
    """Gaussian noise with this mean and standard deviation: a number, or a vector [head_dim].

    By default, each is measured per channel on the head's own output over the tokens patched in
    the call. Each head has its own random generator, which continues from call to call and restarts
    when the context is entered again.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> outputs = []
    >>> for _ in range(2):
    ...     with hw.patch(net, {(0, 1): Noise(seed=7)}):
    ...         outputs.append(net(torch.tensor([[3, 1, 4]])))
    >>> torch.equal(*outputs)
    True
    """

    seed: int = 0
    mean: Tensor | float | None = None
    std: Tensor | float | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("mean", "std"):
            value = getattr(self, name)
            if value is None:
                continue
            is_vector = isinstance(value, Tensor) and value.dim() == 1
            if type(value) not in (int, float) and not is_vector:
                raise ValueError(
                    f"{name} is of type {type(value).__name__}; give a number, or a tensor "
                    "[head_dim]"
                )
            tensor = torch.as_tensor(value)
            if not tensor.isfinite().all() or (name == "std" and (tensor < 0).any()):
                raise ValueError(f"{name} must be finite, and std >= 0; got {name}={value!r}")

    def make_generator(self, site: str, head: int) -> torch.Generator | None:
        # torch generators on the CPU use 32 bits of the seed
        head_seed = zlib.crc32(f"{self.seed} {site} {head}".encode())
        return torch.Generator().manual_seed(head_seed)

    def compute(self, head_call: HeadCall, generator: Any) -> Tensor:
        output = head_call.output
        statistics: dict[str, Tensor] = {}
        for name in ("mean", "std"):
            value = getattr(self, name)
            if value is None:
                patched = head_call.patched_vectors
                if len(patched) < 2:
                    raise ValueError(
                        f"cannot compute mean and std of {len(patched)} tokens; give mean= and "
                        "std= to Noise"
                    )
                value = getattr(patched, name)(0)
            value = torch.as_tensor(value, device=output.device)
            if value.dim():
                head_call.check_width(value)
            statistics[name] = value
        noise = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        return (statistics["mean"] + statistics["std"] * noise).to(output)


def check_seed(seed: object) -> None:
    """Raise unless `seed` is a valid seed."""
    if type(seed) is not int or not 0 <= seed < MAX_SEED:
        raise ValueError(f"seed={seed!r} is no seed; give an integer in 0..{MAX_SEED - 1}")


def check_shape(site: str, value: Tensor, output: Tensor) -> None:
    """Raise unless `value` [B or 1, T or 1, ...] has the rows and tokens of
    `output` [B, T, ...].
    """
    actual = list(value.shape[:2])
    sizes = zip(actual, output.shape[:2], strict=True)
    if output.dim() != 3 or any(size not in (1, count) for size, count in sizes):
        raise ValueError(
            f"{site} gets tokens [B, T] = {list(output.shape[:-1])}, but {actual} were given; "
            "give the same shape"
        )


# --- Contexts that edit head outputs while a model runs -------------------------------------------

ALL_HEADS = "all"


@runtime_checkable
class HeadRow(Protocol):
    """A row of `hw.heads` or `hw.importance`."""

    @property
    def site(self) -> str: ...
    @property
    def head(self) -> int: ...


# layer number or site name, and head number or "all"; a name such as L0H3; or a row of a table
HeadRef = tuple[int | str, int | str] | str | HeadRow
TokenSelection = (
    Tensor | Sequence[int] | None
)  # a mask [B, T], column indices of a call, or None: all tokens


class OutputEditor(AttentionHook):
    """Replace one part of some heads of a site, at the given tokens or at all."""

    def __init__(
        self,
        site: str,
        patches: Mapping[int, HeadPatch],
        tokens: TokenSelection = None,
        part: str = OUTPUT,
    ) -> None:
        self.site = site
        self.tokens = tokens
        self.part = part
        self.patches = patches
        self.generators = {
            head: patch.make_generator(site, head) for head, patch in patches.items()
        }

    @property
    def needs_vectors(self) -> bool:
        return self.part != OUTPUT

    def on_vectors(self, vectors: HeadVectors) -> None:
        """Apply the patches to queries, keys, values or weights."""
        self._check_heads(vectors.num_heads)
        for head in self.patches:
            vectors.replace(self.part, head, self._patch(head, vectors.get(self.part, head)))

    def on_head_outputs(self, outputs: Tensor) -> Tensor | None:
        """Apply the patches to head outputs [..., heads, head_dim]."""
        if self.needs_vectors:
            return None
        self._check_heads(outputs.shape[-2])
        edited = outputs.clone()
        for head in self.patches:
            edited[..., head, :] = self._patch(head, outputs[..., head, :])
        return edited

    def _patch(self, head: int, output: Tensor) -> Tensor:
        """Return the part of a head [B, T, width] with the patched tokens."""
        token_mask = make_token_mask(self.site, self.tokens, output)
        head_call = HeadCall(self.site, head, output, token_mask, self.part)
        patched = self.patches[head].compute(head_call, self.generators[head])
        if token_mask is None:
            return patched
        return torch.where(token_mask[..., None], patched, output)

    def _check_heads(self, count: int) -> None:
        wrong = [head for head in self.patches if head >= count]
        if wrong:
            raise ValueError(f"{self.site} has no head {wrong[0]}; give heads in 0..{count - 1}")


def make_token_mask(site: str, tokens: TokenSelection, output: Tensor) -> Tensor | None:
    """Make a boolean mask of the selected tokens of a call, [B or 1, T or 1]; None selects all.

    `output` is that of one head, [B, T, width].
    """
    if tokens is None:
        return None
    if isinstance(tokens, Tensor):
        check_shape(site, tokens, output)
        return tokens.to(output.device)
    count = output.shape[1]
    wrong = [column for column in tokens if not -count <= column < count]
    if wrong:
        raise ValueError(
            f"{site} gets {count} tokens, none of them has index {wrong[0]}; give indices in "
            f"{-count}..{count - 1}"
        )
    mask = torch.zeros(1, count, dtype=torch.bool, device=output.device)
    mask[:, list(tokens)] = True
    return mask


ABLATION_MODES = ("zero", "mean", "resample", "noise")


def make_ablation(mode: str, scale: float = 0.0, seed: int = 0) -> HeadPatch:
    """Make the patch of one ablation mode; `scale` belongs to "zero", `seed` to "resample" and
    "noise".
    """
    if mode not in ABLATION_MODES:
        raise ValueError(f"mode={mode!r} is unknown; give one of {', '.join(ABLATION_MODES)}")
    if type(scale) not in (int, float) or not math.isfinite(scale):
        raise ValueError(
            f"scale={escape_terminal(repr(scale), MAX_REPR)} is not a finite number; give 0 to "
            "ablate, 0.5 to halve; hw.patch takes vectors"
        )
    if scale and mode != "zero":
        raise ValueError(
            f"mode={mode!r} replaces the output, so scale={scale} has no effect; leave scale out"
        )
    if mode == "mean":
        return MeanOutput()
    if mode == "resample":
        return Resample(seed=seed)
    return Noise(seed=seed) if mode == "noise" else ScaledOutput(scale)


def ablate(
    model: nn.Module,
    heads: Iterable[HeadRef] | Mapping[HeadRef, float],
    mode: str = "zero",
    *,
    scale: float = 0.0,
    tokens: TokenSelection = None,
    seed: int = 0,
) -> EditedHeads:
    """Context in which these heads are ablated: their outputs are replaced before the output
    projection.

    A head is (layer, head), (site name, head), (layer, "all"), a name such as "L0H3", or a row of
    `hw.heads` or `hw.importance`; layer -1 is the last. Modes:

    - `"zero"`: the output times `scale` (default 0); a mapping of heads gives each head its own
      scale;
    - `"mean"`: its mean over the tokens of the call. `hw.patch(model, hw.head_means(...))` takes
      means over data;
    - `"resample"`: its output for another row of the batch, sampled from `seed`;
    - `"noise"`: Gaussian noise from `seed`, with the mean and standard deviation of the output.

    `tokens` selects tokens by a mask [B, T] or by column indices of every call (default: all
    tokens).

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> ids = torch.tensor([[3, 1, 4]])
    >>> with ablate(net, [(0, 1), (1, "all")], tokens=[-1]):
    ...     ablated = net(ids)
    >>> torch.equal(ablated[:, :-1], net(ids)[:, :-1]), torch.equal(ablated[:, -1], net(ids)[:, -1])
    (True, False)
    """
    patches: dict[HeadRef, HeadPatch]
    if isinstance(heads, Mapping):
        if scale or mode != "zero":
            raise ValueError(
                "a mapping gives each head its own scale, so scale= and mode= have no place; "
                "leave them out, or give a list of heads"
            )
        patches = {head: make_ablation("zero", factor) for head, factor in heads.items()}
    else:
        patches = {head: make_ablation(mode, scale, seed) for head in _check_refs(heads)}
    return EditedHeads(model, patches, tokens)


def patch(
    model: nn.Module,
    values: Mapping[HeadRef, Tensor | HeadPatch],
    *,
    part: str = OUTPUT,
    tokens: TokenSelection = None,
) -> EditedHeads:
    """Context in which the outputs of these heads are replaced, at `tokens` (default: all).

    A value is a vector [head_dim], such as a mean over data; one for each token [B, T, head_dim],
    such as the outputs for another text; `hw.Resample`, or `hw.Noise`.

    With `part` "q", "k" or "v", the queries, keys or values of these heads are replaced as the
    attention function gets them, after rotary embeddings; with "pattern", their attention weights
    [B, T, keys]. `hw.head_outputs` returns them for another text. Keys and values of one head are
    what this query head alone reads: other heads of its key-value group keep theirs. `tokens` are
    then the keys of "k" and "v", and else the queries.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0)
    >>> ids = torch.tensor([[3, 1, 4]])
    >>> with patch(net, {(0, 1): torch.zeros(4)}):
    ...     patched = net(ids)
    >>> with ablate(net, [(0, 1)]):
    ...     torch.equal(patched, net(ids))
    True
    """
    if not isinstance(values, Mapping):
        raise ValueError(
            f"values are of type {type(values).__name__}; give a mapping of heads, as in {{(3, "
            "5): vector}"
        )
    patches = {head: _make_patch(head, value) for head, value in values.items()}
    return EditedHeads(model, patches, tokens, part)


class EditedHeads:
    """Context in which heads of a model are patched; refuses wrong heads when it is made, warns if
    it is never entered, and raises at its end if an edited site never ran.
    """

    _is_unused = False

    def __init__(
        self,
        model: nn.Module,
        patches: Mapping[HeadRef, HeadPatch],
        tokens: TokenSelection,
        part: str = OUTPUT,
    ) -> None:
        check_known("part", part, HEAD_PARTS)
        if part != OUTPUT:
            check_eval_mode(model)  # patched weights have no dropout
        if isinstance(tokens, Tensor):
            is_valid = tokens.dim() == 2 and tokens.dtype == torch.bool
        else:
            is_list = isinstance(tokens, Sequence) and all(type(index) is int for index in tokens)
            is_valid = tokens is None or is_list
        if not is_valid:
            raise ValueError(
                f"tokens is of type {type(tokens).__name__}; give a tensor [B, T] of torch.bool, "
                "or column indices"
            )
        self._model = model
        self._tokens = tokens
        self._part = part
        self._site_modules = find_attention(model)
        patches = dict(zip(_check_refs(patches), patches.values(), strict=True))
        self._patches: dict[str, dict[int, HeadPatch]] = {}
        for name, heads in group_by_site(model, self._site_modules, patches).items():
            check_head_part(next(one for one in self._site_modules if one.site.name == name), part)
            self._patches[name] = {head: patches[ref] for head, ref in heads.items()}
        self._is_unused = True

    def __enter__(self) -> None:
        self._is_unused = False
        editors = {
            name: OutputEditor(name, site_patches, self._tokens, self._part)
            for name, site_patches in self._patches.items()
        }
        self._context = hook_sites(self._model, self._site_modules, editors)
        self._hooks = self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        if error[0] is None:
            self._hooks.check_all_ran()

    def __repr__(self) -> str:
        count = pluralise(sum(map(len, self._patches.values())), "edited head")
        return f"<{count} of {type(self._model).__name__}, within `with` only>"

    def __del__(self) -> None:
        if self._is_unused:
            warnings.warn(
                f"{self!r} was never entered; write with ...: before the run", stacklevel=2
            )


def group_by_site(
    model: nn.Module, site_modules: Sequence[SiteModule], heads: Iterable[HeadRef]
) -> dict[str, dict[int, HeadRef]]:
    """Group heads by site name: head number -> the reference that the caller used."""
    check_found(model, site_modules)
    sites = Sites([one.site for one in site_modules], type(model).__name__)
    grouped: dict[str, dict[int, HeadRef]] = {}
    for ref in _check_refs(heads):
        place, numbers = parse_heads(ref) if isinstance(ref, str) else (ref[0], ref[1:])
        site = sites.find(place)
        site_heads = grouped.setdefault(site.name, {})
        for head in chain.from_iterable(_head_indices(site, number) for number in numbers):
            if head in site_heads:
                raise ValueError(f"head {head} of {site.name} is named twice; name it once")
            site_heads[head] = ref
    return grouped


def _head_indices(site: Site, head: int | str) -> Sequence[int]:
    """Return the numbers of the heads that `head` names.

    If the number of heads is unknown, the first call checks it.
    """
    if not isinstance(head, int):
        if not site.heads:
            raise ValueError(
                f"the number of heads of {site.name} is unknown; name each head by its number"
            )
        return range(site.heads)
    check_head(site.name, head, site.heads)
    return (head,)


def _check_refs(heads: Any) -> list[tuple[int | str, int | str] | str]:
    """Return `heads` as a list, the rows of a table as pairs; raise unless each is a name, or a
    pair (layer or site name, head or "all").
    """
    rows: list[Any] = (
        [heads] if isinstance(heads, str) or not isinstance(heads, Iterable) else [*heads]
    )
    refs: list[Any] = [(row.site, row.head) if isinstance(row, HeadRow) else row for row in rows]
    for ref in refs:
        is_pair = isinstance(ref, tuple) and len(ref) == 2 and type(ref[0]) in (int, str)
        is_pair = is_pair and (type(ref[1]) is int or ref[1] == ALL_HEADS)
        if not is_pair and not isinstance(ref, str):
            raise ValueError(
                f"{escape_terminal(repr(ref), MAX_REPR)} names no head; give (layer, head), "
                '(site, head), (layer, "all") or a name, as in (3, 5) or "L3H5"'
            )
    return refs


def _make_patch(head: HeadRef, value: object) -> HeadPatch:
    if isinstance(value, HeadPatch):
        return value
    if not isinstance(value, Tensor) or value.dim() not in (1, 3) or not value.is_floating_point():
        is_tensor = isinstance(value, Tensor)
        shape_text = f"{value.dtype} {list(value.shape)}" if is_tensor else type(value).__name__
        raise ValueError(
            f"{head} is given {shape_text}; give a float tensor [head_dim] or [B, T, head_dim], "
            "or e.g. hw.Noise()"
        )
    if value.is_meta or not value.isfinite().all():
        raise ValueError(f"{head} is given values that are NaN or infinite; give finite values")
    return ConstantOutput(value)
