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
from .feed_forward import Declared, Normed, activation


class Typed(NamedTuple):
    """Ids [B, T], and the type of each token, such as which of two sentences it belongs to."""

    ids: Tensor
    types: Tensor


class Embed(Declared):
    """Ids, an image or frames to what a stack reads."""

    def __init__(self, described: EmbeddingSpec, model: int, dropout: float) -> None:
        super().__init__()
        if described.first and not described.patches:
            raise SpecError(f"first={described.first} vectors stand before patches; of tokens, begin with one of them")
        self.described, self.dropout = described, dropout
        self._owner: tuple[Embed, ...] = ()  # in a tuple: it is saved, moved and trained with its own stack alone
        self.declare(described.weights(model))
        self.norm = Normed(described.norm, model) if described.norm else None
        if described.positions and described.positions.kind == "sinusoidal":
            sinusoidal_table(torch.zeros(1), model)  # refuses a width that has no pairs

    def share(self, owner: Embed) -> None:
        """Read the table of another stack."""
        self._owner = (owner,)

    @property
    def table(self) -> Tensor:
        """The vectors of tokens."""
        return cast(Tensor, (*self._owner, self)[0].tokens)

    def forward(self, x: Tensor) -> Tensor:
        """Vectors [B, T, model], before anybody knows where they stand."""
        told = self.described
        if told.patches:
            h = self._patched(x, told.patches)
        else:
            check_ids("ids", x, told.tokens, self.training)
            h = F.embedding(x, self.table)
        return h if told.scale == 1 else h * told.scale

    def place(self, h: Tensor, at: SequenceInfo, types: Tensor | None) -> Tensor:
        """The same with positions and types."""
        told = self.described
        if told.positions:
            h = h + self._positions(told.positions, at, h)
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

    def _patched(self, x: Tensor, told: PatchSpec) -> Tensor:
        pixels = _picture(x, told)
        kernel = cast(Tensor, self.patches)
        grid = F.conv2d(pixels, kernel, self.maybe("patches_bias"), stride=(told.high, told.wide))
        h = grid.flatten(2).transpose(1, 2)
        if not self.described.first:
            return h
        return torch.cat([cast(Tensor, self.first).to(h.dtype).expand(len(h), -1, -1), h], 1)

    def _positions(self, told: PositionSpec, at: SequenceInfo, like: Tensor) -> Tensor:
        position = at.position if at.start is not None else at.position.where(at.is_real, 0)
        if told.kind == "learned":
            check_last(at, told.length or 0)
            return F.embedding(position + told.skipped, cast(Tensor, self.positions))
        if at.start is None and not torch.compiler.is_compiling() and position.numel():
            every = torch.arange(int(position.max()) + 1, device=position.device)
            return sinusoidal_table(every, like.shape[-1], told.layout).to(like.dtype)[position]
        return sinusoidal_table(position, like.shape[-1], told.layout).to(like.dtype)


def check_ids(name: str, ids: Tensor, known: int, training: bool) -> None:
    """Refuse what is no index of a table; on a graphics card in training the caller has looked, for that would wait."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        told = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{name} are {told}; give whole numbers [batch, tokens], torch.int64")
    if torch.compiler.is_compiling() or not ids.numel() or ids.is_meta or (training and ids.is_cuda):
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= known:
        wrong = low if low < 0 else high
        raise ValueError(f"{name} hold {wrong}, but there are {known} of them; give numbers in 0..{known - 1}")


def check_last(at: SequenceInfo, length: int) -> None:
    """Refuse a position that has no row."""
    if at.start is not None:
        last = at.start + at.count - 1
    elif torch.compiler.is_compiling() or not at.position.numel():
        return
    else:
        last = int(at.position.masked_fill(~at.is_real, -1).max())
    if last >= length:
        raise ValueError(
            f"there is no position {last}, the last of {length} learned ones is {length - 1}; "
            f"give shorter input, or build the model with Positions('learned', {last + 1})"
        )


def _picture(x: Tensor, told: PatchSpec) -> Tensor:
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


class Reading(HasParallelContext, Declared):
    """A head: what states say, of each token, or of the first, the last or the mean of a row's."""

    def __init__(self, described: OutputHeadSpec, model: int, owner: Embed | None) -> None:
        super().__init__()
        self.described = described
        self._owner = (owner,)
        self.declare(described.weights(model))
        told = described.transform
        self.act = activation(told.activation) if told else None
        self.transform_norm = Normed(told.norm, told.hidden) if told and told.norm else None

    def forward(self, h: Tensor, at: SequenceInfo | None = None) -> Tensor:
        """[B, T, outputs], or [B, outputs] of a head that reads a row as a whole."""
        told = self.described
        if told.at != "each":
            at = at or SequenceInfo.contiguous(0, h.shape[1], h.device)
            held, at = self.parallel.gather_tokens({"states": h}, at)
            check_one(at, told)
            h = POOLED[told.at](held["states"], at)
        if self.act is not None:
            h = self.act(self.linear(h, "transform"))
            h = h if self.transform_norm is None else self.transform_norm(h)
        if not told.outputs:
            return h
        h = h if told.scale == 1 else h * told.scale
        owner = self._owner[0]
        weight = cast(Tensor, self.weight) if owner is None else owner.table
        y = linear(h, weight, self.maybe("bias"))
        return y if told.cap is None else told.cap * torch.tanh(y / told.cap)


def first(h: Tensor, at: SequenceInfo) -> Tensor:
    """The first live token of each row."""
    if at.start is not None:
        return h[:, 0]
    return _taken(h, at.is_real.byte().argmax(1))


def last(h: Tensor, at: SequenceInfo) -> Tensor:
    """The last live token of each row.

    >>> x = torch.arange(3.0)[None, :, None]
    >>> last(x, SequenceInfo.of(x, lengths=[2])).tolist()
    [[1.0]]
    """
    if at.start is not None:
        return h[:, -1]
    return _taken(h, at.count - 1 - at.is_real.flip(1).byte().argmax(1))


def mean(h: Tensor, at: SequenceInfo) -> Tensor:
    """The mean of each row's live tokens; of none, zeros."""
    if at.start is not None:
        return h.mean(1)
    live = at.is_real[..., None].to(h.dtype)
    return (h * live).sum(1) / live.sum(1).clamp(min=1)


def check_one(at: SequenceInfo, told: OutputHeadSpec) -> None:
    """Refuse several texts in a row that is to be read as a whole."""
    if at.start is not None or torch.compiler.is_compiling():
        return
    most = at.segment.amax(1, keepdim=True)
    if bool((at.is_real & (at.segment != most)).any()):
        raise ValueError(f"{told!r} reads rows as a whole, but one of them holds several texts; give each its own row")


def _taken(h: Tensor, index: Tensor) -> Tensor:
    index = index.expand(len(h))
    return h[torch.arange(len(h), device=h.device), index]


POOLED = {"first": first, "last": last, "mean": mean}
