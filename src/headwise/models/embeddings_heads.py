"""Input embeddings of a stack and output heads of a model, built from their specs."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.interfaces.core_types import HasParallelContext
from ..attention.masking.sequence_info import SequenceInfo
from ..attention.position_embeddings import sinusoidal_table
from ..kernels.counter_rng import dropout
from ..kernels.linear import linear
from ..util.errors import SpecError
from .feed_forward import NormLayer, SpecModule, get_activation
from .model_spec import EmbeddingSpec, OutputHeadSpec, PatchSpec, PositionSpec


class TokenTypeInput(NamedTuple):
    """Token ids [B, T] and token types [B, T], for example 0 and 1 for the two
    sentences of a pair.
    """

    ids: Tensor
    types: Tensor


class CheckedIds(NamedTuple):
    """Token ids [B, T] that are in the table of the model, as those that it generates."""

    ids: Tensor


ModelInput = Tensor | TokenTypeInput | CheckedIds


class EmbeddingLayer(SpecModule):
    """Embeds ids, images or frames: a token table or a patch embedding, positions, token types and
    a norm.
    """

    def __init__(self, spec: EmbeddingSpec, width: int, dropout: float) -> None:
        super().__init__()
        if spec.first and not spec.patches:
            raise SpecError(
                f"first={spec.first} needs patches; to begin a text with a special token, use its "
                "id"
            )
        self.spec = spec
        self.dropout = dropout
        # A tuple hides the owner of a shared table from nn.Module, so that only its own stack saves
        # and moves it.
        self._owner: tuple[EmbeddingLayer, ...] = ()
        self.register_weights(spec.weights(width))
        self.norm = NormLayer(spec.norm, width) if spec.norm else None
        if spec.positions and spec.positions.kind == "sinusoidal":
            sinusoidal_table(torch.zeros(1), width)  # raises if the width is odd

    def share(self, owner: EmbeddingLayer) -> None:
        """Use the token table of another stack."""
        self._owner = (owner,)

    @property
    def table(self) -> Tensor:
        """The token table [token, model], its own or another stack's."""
        return cast(Tensor, (*self._owner, self)[0].tokens)

    def forward(self, x: Tensor | CheckedIds) -> Tensor:
        """Return vectors [B, T, model] without positions."""
        spec = self.spec
        if isinstance(x, CheckedIds):
            h = F.embedding(x.ids, self.table)
        elif spec.patches:
            h = self._embed_patches(x, spec.patches)
        else:
            check_ids("ids", x, spec.tokens, self.training)
            h = F.embedding(x, self.table)
        return h if spec.scale == 1 else h * spec.scale

    def place(self, h: Tensor, sequence: SequenceInfo, types: Tensor | None) -> Tensor:
        """Add position and token-type embeddings, then apply the norm and dropout."""
        spec = self.spec
        if spec.positions:
            h = h + self._position_vectors(spec.positions, sequence, h)
        if spec.types:
            if types is None:
                types = torch.zeros(1, 1, dtype=torch.int64, device=h.device)
            else:
                check_ids("types", types, spec.types, self.training)
            h = h + F.embedding(types, cast(Tensor, self.types))
        elif types is not None:
            raise ValueError("this model has no token types; give ids alone")
        h = h if self.norm is None else self.norm(h)
        return dropout(h, self.dropout, self.training)

    def _embed_patches(self, x: Tensor, spec: PatchSpec) -> Tensor:
        pixels = _check_image(x, spec)
        kernel = cast(Tensor, self.patches)
        grid = F.conv2d(
            pixels,
            kernel,
            self.get_weight("patches_bias"),
            stride=(spec.patch_height, spec.patch_width),
        )
        h = grid.flatten(2).transpose(1, 2)
        if not self.spec.first:
            return h
        return torch.cat([cast(Tensor, self.first).to(h.dtype).expand(len(h), -1, -1), h], 1)

    def _position_vectors(self, spec: PositionSpec, sequence: SequenceInfo, h: Tensor) -> Tensor:
        is_contiguous = sequence.start is not None
        position = (
            sequence.position if is_contiguous else sequence.position.where(sequence.is_real, 0)
        )
        if spec.kind == "learned":
            length = spec.length or 0
            last = sequence.position_beyond(length)
            if last is not None:
                raise ValueError(
                    f"no position {last}: the last of {length} learned positions is {length - 1}; "
                    "give shorter input, or build the model with "
                    f"PositionSpec('learned', {last + 1})"
                )
            return F.embedding(position + spec.skipped, cast(Tensor, self.positions))
        if not is_contiguous and not torch.compiler.is_compiling() and sequence.count > 1:
            num_positions = max(sequence.max_position, 0) + 1
            all_positions = torch.arange(num_positions, device=position.device)
            return sinusoidal_table(all_positions, h.shape[-1], spec.layout).to(h)[position]
        return sinusoidal_table(position, h.shape[-1], spec.layout).to(h)


def check_ids(name: str, ids: Tensor, num_embeddings: int, training: bool) -> None:
    """Refuse ids that are not integers [B, T] in 0..num_embeddings - 1.

    Training on a GPU skips the range check, because it would synchronise the device; the caller
    checks the data.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        actual = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{name} are {actual}; give integers [batch, tokens], torch.int64")
    if (
        torch.compiler.is_compiling()
        or not ids.numel()
        or ids.is_meta
        or (training and ids.device.type != "cpu")
    ):
        return
    low, high = torch.stack(ids.aminmax()).tolist()
    if low < 0 or high >= num_embeddings:
        invalid = low if low < 0 else high
        raise ValueError(
            f"{name} hold {invalid}, but the table has {num_embeddings} rows; give numbers in "
            f"0..{num_embeddings - 1}"
        )


def _check_image(x: Tensor, spec: PatchSpec) -> Tensor:
    """Crop pixels [B, C, H, W] to whole patches; frames [B, T, F] count as an image of one channel
    and T rows.
    """
    if isinstance(x, Tensor) and x.dim() == 3 and spec.channels == 1:
        x = x[:, None]
    high = spec.rows * spec.patch_height
    wide = spec.columns * spec.patch_width
    if (
        not isinstance(x, Tensor)
        or x.dim() != 4
        or x.shape[1] != spec.channels
        or not x.is_floating_point()
    ):
        actual = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"x is {actual}; give pixels as floating-point numbers [batch, {spec.channels}, "
            f"{high}, {wide}]"
        )
    rows = x.shape[2] // spec.patch_height
    # one column: a shorter input is a prefix
    fits = rows == spec.rows or (spec.columns == 1 and 0 < rows < spec.rows)
    if not fits or x.shape[3] // spec.patch_width != spec.columns:
        raise ValueError(
            f"an image of {x.shape[2]} x {x.shape[3]} is not {spec.rows} x {spec.columns} patches "
            "of "
            f"{spec.patch_height} x {spec.patch_width}; resize it to {high} x {wide}"
        )
    return x[:, :, : rows * spec.patch_height, : spec.columns * spec.patch_width]


class OutputHead(HasParallelContext, SpecModule):
    """Output head: maps the hidden states of each token, or of each row's first, last or mean
    token, to outputs.
    """

    def __init__(self, spec: OutputHeadSpec, width: int, owner: EmbeddingLayer | None) -> None:
        super().__init__()
        self.spec = spec
        self._owner = (owner,)
        self.register_weights(spec.weights(width))
        transform = spec.transform
        self.activation = get_activation(transform.activation) if transform else None
        self.transform_norm = (
            NormLayer(transform.norm, transform.hidden) if transform and transform.norm else None
        )

    def forward(self, h: Tensor, sequence: SequenceInfo | None = None) -> Tensor:
        """Return outputs [B, T, outputs], or [B, outputs] if the head pools each row."""
        spec = self.spec
        if spec.at != "each":
            sequence = sequence or SequenceInfo.contiguous(0, h.shape[1], h.device)
            gathered, sequence = self.parallel.gather_tokens({"states": h}, sequence)
            check_single_text(sequence, spec)
            h = POOLINGS[spec.at](gathered["states"], sequence)
        if self.activation is not None:
            h = self.activation(self.linear(h, "transform"))
            h = h if self.transform_norm is None else self.transform_norm(h)
        if not spec.outputs:
            return h
        h = h if spec.scale == 1 else h * spec.scale
        owner = self._owner[0]
        weight = cast(Tensor, self.weight) if owner is None else owner.table
        y = linear(h, weight, self.get_weight("bias"))
        return y if spec.cap is None else spec.cap * torch.tanh(y / spec.cap)


def pool_first(h: Tensor, sequence: SequenceInfo) -> Tensor:
    """Return the first token of each row that is not padding."""
    if sequence.start is not None:
        return h[:, 0]
    return _select_tokens(h, sequence.is_real.byte().argmax(1))


def pool_last(h: Tensor, sequence: SequenceInfo) -> Tensor:
    """Return the last token of each row that is not padding.

    >>> x = torch.arange(3.0)[None, :, None]
    >>> pool_last(x, SequenceInfo.from_batch(x, lengths=[2])).tolist()
    [[1.0]]
    """
    if sequence.start is not None:
        return h[:, -1]
    return _select_tokens(h, sequence.count - 1 - sequence.is_real.flip(1).byte().argmax(1))


def pool_mean(h: Tensor, sequence: SequenceInfo) -> Tensor:
    """Return the mean of each row's tokens without padding; zeros for a row of padding only."""
    if sequence.start is not None:
        return h.mean(1)
    is_real = sequence.is_real[..., None].to(h.dtype)
    return (h * is_real).sum(1) / is_real.sum(1).clamp(min=1)


def check_single_text(sequence: SequenceInfo, spec: OutputHeadSpec) -> None:
    """Refuse rows with several texts, because pooling would mix them."""
    if sequence.start is not None or torch.compiler.is_compiling():
        return
    last_segment = sequence.segment.amax(1, keepdim=True)
    if bool((sequence.is_real & (sequence.segment != last_segment)).any()):
        raise ValueError(
            f"{spec!r} pools whole rows, but a row holds several texts; give each text its own row"
        )


def _select_tokens(h: Tensor, index: Tensor) -> Tensor:
    index = index.expand(len(h))
    return h[torch.arange(len(h), device=h.device), index]


POOLINGS = {"first": pool_first, "last": pool_last, "mean": pool_mean}
