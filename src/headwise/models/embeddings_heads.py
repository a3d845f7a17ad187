"""What enters a stack and what leaves a model, made of what a blueprint says of them."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SpecError
from ..masking.sequence_info import SequenceInfo
from ..model_spec import EmbeddingSpec, OutputHeadSpec, PatchSpec, PositionSpec
from ..nn.parallel_context import HasParallelContext
from ..nn.position_embeddings import sinusoidal_table
from ..ops.dropout import dropout
from ..ops.linear import linear
from .feed_forward import NormLayer, SpecModule, get_activation


class TokenTypeInput(NamedTuple):
    """Ids [B, T], and the type of each token, such as which of two sentences it belongs to."""

    ids: Tensor
    types: Tensor


class EmbeddingLayer(SpecModule):
    """Ids, an image or frames to what a stack reads."""

    def __init__(self, spec: EmbeddingSpec, width: int, dropout: float) -> None:
        super().__init__()
        if spec.first and not spec.patches:
            raise SpecError(f"first={spec.first} vectors stand before patches; of tokens, begin with one of them")
        self.spec, self.dropout = spec, dropout
        self._owner: tuple[
            EmbeddingLayer, ...
        ] = ()  # in a tuple: it is saved, moved and trained with its own stack alone
        self.register_weights(spec.weights(width))
        self.norm = NormLayer(spec.norm, width) if spec.norm else None
        if spec.positions and spec.positions.kind == "sinusoidal":
            sinusoidal_table(torch.zeros(1), width)  # refuses a width that has no pairs

    def share(self, owner: EmbeddingLayer) -> None:
        """Read the table of another stack."""
        self._owner = (owner,)

    @property
    def table(self) -> Tensor:
        """The vectors of tokens."""
        return cast(Tensor, (*self._owner, self)[0].tokens)

    def forward(self, x: Tensor) -> Tensor:
        """Vectors [B, T, model], before anybody knows where they stand."""
        told = self.spec
        if told.patches:
            h = self._embed_patches(x, told.patches)
        else:
            check_ids("ids", x, told.tokens, self.training)
            h = F.embedding(x, self.table)
        return h if told.scale == 1 else h * told.scale

    def place(self, h: Tensor, sequence: SequenceInfo, types: Tensor | None) -> Tensor:
        """The same with positions and types."""
        told = self.spec
        if told.positions:
            h = h + self._position_vectors(told.positions, sequence, h)
        if told.types:
            if types is None:
                types = torch.zeros(1, 1, dtype=torch.int64, device=h.device)
            else:
                check_ids("types", types, told.types, self.training)
            h = h + F.embedding(types, cast(Tensor, self.types))
        elif types is not None:
            raise ValueError("this model knows no types of tokens; give ids alone")
        h = h if self.norm is None else self.norm(h)
        return dropout(h, self.dropout, self.training)

    def _embed_patches(self, x: Tensor, told: PatchSpec) -> Tensor:
        pixels = _check_image(x, told)
        kernel = cast(Tensor, self.patches)
        grid = F.conv2d(pixels, kernel, self.get_weight("patches_bias"), stride=(told.high, told.wide))
        h = grid.flatten(2).transpose(1, 2)
        if not self.spec.first:
            return h
        return torch.cat([cast(Tensor, self.first).to(h.dtype).expand(len(h), -1, -1), h], 1)

    def _position_vectors(self, told: PositionSpec, at: SequenceInfo, like: Tensor) -> Tensor:
        position = at.position if at.start is not None else at.position.where(at.is_real, 0)
        if told.kind == "learned":
            check_position_range(at, told.length or 0)
            return F.embedding(position + told.skipped, cast(Tensor, self.positions))
        if at.start is None and not torch.compiler.is_compiling() and position.numel():
            every = torch.arange(int(position.max()) + 1, device=position.device)
            return sinusoidal_table(every, like.shape[-1], told.layout).to(like.dtype)[position]
        return sinusoidal_table(position, like.shape[-1], told.layout).to(like.dtype)


def check_ids(name: str, ids: Tensor, num_embeddings: int, training: bool) -> None:
    """Refuse what is no index of a table; on a graphics card in training the caller has looked, for that would wait."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        told = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{name} are {told}; give whole numbers [batch, tokens], torch.int64")
    if torch.compiler.is_compiling() or not ids.numel() or ids.is_meta or (training and ids.is_cuda):
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= num_embeddings:
        wrong = low if low < 0 else high
        raise ValueError(
            f"{name} hold {wrong}, but there are {num_embeddings} of them; give numbers in 0..{num_embeddings - 1}"
        )


def check_position_range(sequence: SequenceInfo, length: int) -> None:
    """Refuse a position that has no row."""
    if sequence.start is not None:
        last = sequence.start + sequence.count - 1
    elif torch.compiler.is_compiling() or not sequence.position.numel():
        return
    else:
        last = int(sequence.position.masked_fill(~sequence.is_real, -1).max())
    if last >= length:
        raise ValueError(
            f"there is no position {last}, the last of {length} learned ones is {length - 1}; "
            f"give shorter input, or build the model with Positions('learned', {last + 1})"
        )


def _check_image(x: Tensor, told: PatchSpec) -> Tensor:
    """Pixels [B, C, H, W] of whole patches; frames [B, T, F] are a picture of one channel, as high as it is long."""
    if isinstance(x, Tensor) and x.dim() == 3 and told.channels == 1:
        x = x[:, None]
    high, wide = told.rows * told.high, told.columns * told.wide
    if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[1] != told.channels or not x.is_floating_point():
        said = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x is {said}; give pixels as floating-point numbers [batch, {told.channels}, {high}, {wide}]")
    rows = x.shape[2] // told.high
    fits = rows == told.rows or (told.columns == 1 and 0 < rows < told.rows)  # of one column, any rows are a beginning
    if not fits or x.shape[3] // told.wide != told.columns:
        raise ValueError(
            f"an image of {x.shape[2]} x {x.shape[3]} is not {told.rows} x {told.columns} patches of "
            f"{told.high} x {told.wide}; bring it to {high} x {wide}"
        )
    return x[:, :, : rows * told.high, : told.columns * told.wide]


class OutputHead(HasParallelContext, SpecModule):
    """A head: what states say, of each token, or of the first, the last or the mean of a row's."""

    def __init__(self, spec: OutputHeadSpec, width: int, owner: EmbeddingLayer | None) -> None:
        super().__init__()
        self.spec = spec
        self._owner = (owner,)
        self.register_weights(spec.weights(width))
        told = spec.transform
        self.activation = get_activation(told.activation) if told else None
        self.transform_norm = NormLayer(told.norm, told.hidden) if told and told.norm else None

    def forward(self, h: Tensor, sequence: SequenceInfo | None = None) -> Tensor:
        """[B, T, outputs], or [B, outputs] of a head that reads a row as a whole."""
        told = self.spec
        if told.at != "each":
            sequence = sequence or SequenceInfo.contiguous(0, h.shape[1], h.device)
            held, sequence = self.parallel.gather_tokens({"states": h}, sequence)
            check_single_text(sequence, told)
            h = POOLINGS[told.at](held["states"], sequence)
        if self.activation is not None:
            h = self.activation(self.linear(h, "transform"))
            h = h if self.transform_norm is None else self.transform_norm(h)
        if not told.outputs:
            return h
        h = h if told.scale == 1 else h * told.scale
        owner = self._owner[0]
        weight = cast(Tensor, self.weight) if owner is None else owner.table
        y = linear(h, weight, self.get_weight("bias"))
        return y if told.cap is None else told.cap * torch.tanh(y / told.cap)


def pool_first(h: Tensor, sequence: SequenceInfo) -> Tensor:
    """The first live token of each row."""
    if sequence.start is not None:
        return h[:, 0]
    return _select_tokens(h, sequence.is_real.byte().argmax(1))


def pool_last(h: Tensor, sequence: SequenceInfo) -> Tensor:
    """The last live token of each row.

    >>> x = torch.arange(3.0)[None, :, None]
    >>> pool_last(x, SequenceInfo.from_batch(x, lengths=[2])).tolist()
    [[1.0]]
    """
    if sequence.start is not None:
        return h[:, -1]
    return _select_tokens(h, sequence.count - 1 - sequence.is_real.flip(1).byte().argmax(1))


def pool_mean(h: Tensor, sequence: SequenceInfo) -> Tensor:
    """The mean of each row's live tokens; of none, zeros."""
    if sequence.start is not None:
        return h.mean(1)
    live = sequence.is_real[..., None].to(h.dtype)
    return (h * live).sum(1) / live.sum(1).clamp(min=1)


def check_single_text(sequence: SequenceInfo, spec: OutputHeadSpec) -> None:
    """Refuse several texts in a row that is to be read as a whole."""
    if sequence.start is not None or torch.compiler.is_compiling():
        return
    most = sequence.segment.amax(1, keepdim=True)
    if bool((sequence.is_real & (sequence.segment != most)).any()):
        raise ValueError(f"{spec!r} reads rows as a whole, but one of them holds several texts; give each its own row")


def _select_tokens(h: Tensor, index: Tensor) -> Tensor:
    index = index.expand(len(h))
    return h[torch.arange(len(h), device=h.device), index]


POOLINGS = {"first": pool_first, "last": pool_last, "mean": pool_mean}
