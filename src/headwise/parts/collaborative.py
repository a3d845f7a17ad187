"""Bilinear forms that share their vectors: a tensor of one form a head as a sum of few products of three vectors.

The form of head i is T_i = q_i^T k_i, with q_i [dim, model] and k_i [dim, source] as trained. It is never written
out for all heads: what least squares need of it are products of its factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SpecError
from ..interfaces import Project, QKTransform
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import CoreShape, Param, PartParams, SpecFactory, TransformsQK
from ..interfaces.registry import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import normal_with_std, ones_init, xavier_uniform, zeros_init
from .linear_projection import Direct, absorb_matrix_per_head


class BilinearForm(NamedTuple):
    """q [heads, dim, model] and k [heads, dim, source]: T_i = q_i^T k_i."""

    q: Tensor
    k: Tensor


class TrilinearFactors(NamedTuple):
    """q [rank, model], mixing [heads, rank] and k [rank, source]: T_i = q^T diag(mixing_i) k."""

    q: Tensor
    mixing: Tensor
    k: Tensor


def init_head_blocks(shape: tuple[int, ...]) -> Tensor:
    """Ones where a head's own block of channels is, each as wide as if all were equal, the last what is left.

    >>> init_head_blocks((2, 3)).tolist()
    [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    heads, width = shape
    owner = torch.arange(width) // math.ceil(width / heads)
    return (owner == torch.arange(heads)[:, None]).to(torch.get_default_dtype())


def normalise_form_scale(form: BilinearForm) -> tuple[BilinearForm, int]:
    """The form over 2^size, each head's two halves alike in size: its squares then neither overflow nor vanish."""
    halves = [half.abs().amax((1, 2)) for half in form]
    live = (halves[0] > 0) & (halves[1] > 0)
    q, k = (torch.frexp(half).exponent for half in halves)
    size = int((q + k)[live].amax()) if live.any() else 0
    return BilinearForm(
        _multiply_power_of_two(form.q, torch.where(live, k - size, -q)), _multiply_power_of_two(form.k, -k)
    ), size


def scale_factors(factors: TrilinearFactors, size: int) -> TrilinearFactors:
    """The factors of a form 2^size as large."""
    half = size // 2
    q, k = (
        _multiply_power_of_two(x, torch.tensor(power)) for x, power in ((factors.q, size - half), (factors.k, half))
    )
    return factors._replace(q=q, k=k)


def _multiply_power_of_two(x: Tensor, power: Tensor) -> Tensor:
    """x 2^power, in two steps, for 2^power alone may be no number: one power for all, or one a head."""
    power = power.to(x.dtype)[..., None, None]
    first = torch.div(power, 2, rounding_mode="floor")
    return torch.ldexp(torch.ldexp(x, first), power - first)


def factorise_least_squares(
    form: BilinearForm, rank: int, max_sweeps: int, tolerance: float
) -> tuple[int, TrilinearFactors]:
    """Factors of this rank after so many sweeps of alternating least squares; fewer when one gains too little."""
    factors = factorise_truncated_svd(form, rank)
    error = _relative_error_of_products(form, factors)
    if not error:  # as it is of no form at all, of which sweeps could make anything
        return 0, factors
    for took in range(max_sweeps):
        swept = _als_sweep(form, factors)
        least = _relative_error_of_products(form, swept)
        # Progress is slow along valleys: a longer step is kept where it helps, so errors still never grow.
        further = _extrapolate_step(factors, swept, math.sqrt(took + 1))
        if (found := _relative_error_of_products(form, further)) < least:
            swept, least = further, found
        gain, error, factors = error - least, least, _balance_norms(swept)
        if gain <= tolerance * (error + gain) or error < 1e-8:  # below that, _missed is rounding
            return took + 1, factors
    return max_sweeps, factors


def factorise_exact(form: BilinearForm) -> TrilinearFactors:
    """Every head's own vectors, of rank heads * dim: exact."""
    rank = form.q.shape[0] * form.q.shape[1]
    return TrilinearFactors(
        form.q.flatten(0, 1), init_head_blocks((len(form.q), rank)).to(form.q), form.k.flatten(0, 1)
    )


def factorise_truncated_svd(form: BilinearForm, rank: int) -> TrilinearFactors:
    """The largest singular triples of all heads together, each still one head's own: the best without sharing."""
    (uq, rq), (uk, rk) = torch.linalg.qr(form.q.mT), torch.linalg.qr(form.k.mT)
    x, sizes, y = torch.linalg.svd(rq @ rk.mT, full_matrices=False)
    root = sizes.sqrt()[..., None]
    q, k = ((uq @ x).mT * root).flatten(0, 1), ((uk @ y.mT).mT * root).flatten(0, 1)
    largest = sizes.flatten().sort(descending=True, stable=True).indices[:rank]
    mixing = F.one_hot(largest // sizes.shape[1], len(form.q)).T.to(q)
    short = rank - len(largest)  # heads wider than what they compare are exact before the rank is spent
    return TrilinearFactors(
        F.pad(q[largest], (0, 0, 0, short)), F.pad(mixing, (0, short)), F.pad(k[largest], (0, 0, 0, short))
    )


def relative_error(form: BilinearForm, factors: TrilinearFactors) -> float:
    """||T - T'|| / ||T||, from what is left of one head's form after the other: no large numbers cancel."""
    missed, whole = 0.0, 0.0
    for q, k, mixing in zip(form.q, form.k, factors.mixing, strict=True):
        told = q.T @ k
        missed += (told - factors.q.T @ (mixing[:, None] * factors.k)).square().sum().item()
        whole += told.square().sum().item()
    return math.sqrt(missed / whole) if whole else math.sqrt(missed)


def _relative_error_of_products(form: BilinearForm, factors: TrilinearFactors) -> float:
    """The same from products of factors alone: cheap, and blind below the root of rounding."""
    whole = ((form.q @ form.q.mT) * (form.k @ form.k.mT)).sum()
    met = (factors.mixing.T * (_project_vectors(factors.q, form.q) * _project_vectors(factors.k, form.k)).sum(-1)).sum()
    own = ((factors.mixing.T @ factors.mixing) * (factors.q @ factors.q.T) * (factors.k @ factors.k.T)).sum()
    return math.sqrt(max((whole - 2 * met + own).item(), 0.0) / max(whole.item(), torch.finfo(whole.dtype).tiny))


def _project_vectors(vectors: Tensor, weights: Tensor) -> Tensor:
    """[rank, heads, dim]: each vector in the channels of each head."""
    return (vectors @ weights.flatten(0, 1).T).unflatten(1, weights.shape[:2])


def _als_sweep(form: BilinearForm, factors: TrilinearFactors) -> TrilinearFactors:
    """Each factor in turn the best for the other two."""
    q, mixing, k = factors
    by_q, by_k = _project_vectors(q, form.q), _project_vectors(k, form.k)
    mixing = _solve_regularised((q @ q.T) * (k @ k.T), (by_q * by_k).sum(-1), mixing.T).T
    met = (mixing.T[..., None] * by_k).flatten(1) @ form.q.flatten(0, 1)
    q = _solve_regularised((mixing.T @ mixing) * (k @ k.T), met, q)
    met = (mixing.T[..., None] * _project_vectors(q, form.q)).flatten(1) @ form.k.flatten(0, 1)
    return TrilinearFactors(q, mixing, _solve_regularised((mixing.T @ mixing) * (q @ q.T), met, k))


def _solve_regularised(gram: Tensor, met: Tensor, old: Tensor) -> Tensor:
    """The solution of gram x = met, held to the old one where the gram says nothing: errors can only fall."""
    hold = 1e-10 * gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
    return torch.linalg.solve(gram + hold * torch.eye(len(gram)).to(gram), met + hold * old)


def _extrapolate_step(old: TrilinearFactors, new: TrilinearFactors, times: float) -> TrilinearFactors:
    """The step from old to new, so many times as long."""
    return TrilinearFactors(*(one + times * (other - one) for one, other in zip(old, new, strict=True)))


def _balance_norms(factors: TrilinearFactors) -> TrilinearFactors:
    """The same products with their size shared out evenly among the three."""
    sizes = torch.stack([factors.q.norm(dim=1), factors.mixing.norm(dim=0), factors.k.norm(dim=1)])
    scale = torch.where(sizes.prod(0) > 0, sizes.prod(0).pow(1 / 3) / sizes.clamp(min=torch.finfo(sizes.dtype).tiny), 1)
    return TrilinearFactors(factors.q * scale[0, :, None], factors.mixing * scale[1], factors.k * scale[2, :, None])


# --- Heads that share one query-key space, each weighing its channels in its own way -------------------

_INITIALISERS = {"normal": normal_with_std(0.2), "ones": ones_init, "blocks": init_head_blocks}


@part
class Collaborative(Project):
    """s_i = scale (x W_Q diag(m_i) . z W_K + z.c_i): one shared key, a mixing vector and a content bias a head.

    (2006.16362.) The scale stays 1/sqrt(heads.dim) whatever the shared width, so that a converted layer keeps
    its scores. Inside, the content bias rides in the key: q' = [m_i * q, e_i], k' = [k, z.c_1 .. z.c_h].

    `start` is how the mixing begins, as in the released code: "normal" with deviation 0.2 (which it calls uniform),
    "ones", or "blocks", in which every head has ceil(width / h) channels for itself and the last what is left. A
    trained layer becomes one of these by `collaborate`.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, project=Collaborative(width=4))
    >>> hw.costs.cached_numbers_per_token(spec)  # 4 shared key channels, 2 content biases, 8 value channels
    14
    """

    paper = "2006.16362"
    disagreements: ClassVar[tuple[str, ...]] = (
        (
            "One released code scales scores by the shared width, the other by the original heads: the "
            "original, so that a converted layer keeps its scores."
        ),
        "The code calls its start uniform; it is normal with deviation 0.2, and so is this.",
        "The paper speaks of a Tucker decomposition, its code computes CP: CP, started from singular vectors.",
    )
    width: int = 64
    bias: str = ""
    start: str = "normal"

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.bias not in ("", "v"):
            yield f"Collaborative(bias={self.bias!r}) is unknown; its content bias stands for q's, so use '' or 'v'"
        if self.width < 1:
            yield f"Collaborative(width={self.width}) leaves nothing to compare; use at least 1"
        if self.start not in _INITIALISERS:
            yield f"Collaborative(start={self.start!r}) is unknown; use 'normal', 'ones' or 'blocks'"
        if not spec.similarity.linear:
            name = type(spec.similarity).__name__
            yield f"Collaborative adds its content bias inside a product, which {name} is not; use similarity Dot()"
        if any(step.transformed_sides(spec) & set("qk") for _, step in spec.parts_of(QKTransform)):
            yield "Collaborative's heads share one query-key space, which no per-head turn can reach; leave turns out"

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"width": self.width}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        axis = spec.heads.value_axis
        params = {
            "q": Param(AxisLayout.parse("width model"), xavier_uniform, "query"),
            "k": Param(AxisLayout.parse("width source"), xavier_uniform, "source"),
            "mixing": Param(AxisLayout.parse("q width"), _INITIALISERS[self.start]),
            "content": Param(AxisLayout.parse("q source"), xavier_uniform, "source"),
            "v": Param(AxisLayout.parse(f"({axis} vdim) source"), xavier_uniform, "source"),
        }
        return params | ({"v_bias": Param(AxisLayout.parse(f"({axis} vdim)"), zeros_init)} if self.bias else {})

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        values = AxisLayout.parse(f"{spec.heads.value_axis} vdim")
        return {"k": AxisLayout.parse("width"), "content": AxisLayout.parse("q"), "v": values}

    def absorb_matrix(
        self, spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, matrix: Tensor
    ) -> Mapping[str, Tensor]:
        names = [key for key in ("v", "v_bias") if key in self.params(spec)]
        return absorb_matrix_per_head(weights, names, matrix) if side == "v" else {}

    def core(self, spec: AttentionSpec) -> CoreShape:
        heads = spec.heads
        values = tuple(heads.value_head_of_row[row] for row in spec.score_head_of_row)
        return CoreShape((0,) * heads.q, values, self.width + heads.q, heads.vdim, heads.dim**-0.5)

    def project_query(self, x_BTD: Tensor, turn: TransformsQK, p: PartParams) -> Tensor:
        mixed = F.linear(x_BTD, p["q"])[..., None, :] * p["mixing"]
        own = torch.eye(mixed.shape[-2], dtype=mixed.dtype, device=mixed.device)
        return torch.cat([mixed, own.expand(*mixed.shape[:2], -1, -1)], -1)

    def project_kv(self, z_BSE: Tensor, turn: TransformsQK, p: PartParams) -> dict[str, Tensor]:
        v = F.linear(z_BSE, p["v"], p["v_bias"] if self.bias else None)
        v_BSGV = v.unflatten(-1, (-1, p.sizes["vdim"]))
        return {
            "k": F.linear(z_BSE, p["k"]),
            "content": F.linear(z_BSE, p["content"]),
            "v": turn(v_BSGV, "v"),
        }

    def expand_kv(self, entry: Mapping[str, Tensor], turn: TransformsQK, p: PartParams) -> tuple[Tensor, Tensor]:
        return torch.cat([entry["k"], entry["content"]], -1)[..., None, :], entry["v"]

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(project=cls(width=8), pattern="causal", vdim=5)
        yield base(project=cls(width=9, bias="v"), kv=2, source=13)
        yield base(project=cls(width=8, start="blocks"))


class CollaborativeConversion(NamedTuple):
    """A layer whose heads share queries and keys, how far its score forms are off, and the sweeps that took."""

    spec: AttentionSpec
    weights: dict[str, Tensor]
    relative_error: float
    sweeps: int


def convert_to_collaborative(
    spec: AttentionSpec, weights: Mapping[str, Tensor], width: int, *, max_sweeps: int = 500, tolerance: float = 1e-6
) -> CollaborativeConversion:
    """A trained layer of Direct as one of Collaborative, in a shared query-key space of this width (2006.16362).

    The scores of head i are a bilinear form T_i = W_Q^i W_K^i^T, taken for sum_r a_r m_ir b_r^T in float64; `error`
    is ||T - T'|| / ||T||. At width h D the weights are copied and it is 0. b_Q becomes the content bias c_i =
    W_K^i b_Q^i; b_K goes, which is exact where nothing sees one number added to a row, and is refused elsewhere.
    Values, merge, modifiers and the scale 1/sqrt(D) stay (one of the released codes takes 1/sqrt(width / h)).

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2)
    >>> made = convert_to_collaborative(spec, hw.Attention(spec).state_dict(), 8)
    >>> made.spec.project, made.relative_error
    (Collaborative(width=8), 0.0)
    """
    if reasons := list(_argument_errors(width, max_sweeps, tolerance)) or list(
        dict.fromkeys(_conversion_obstacles(spec, weights, width))
    ):
        raise SpecError("; ".join(reasons))
    assert isinstance(spec.project, Direct)
    form, bias = _bilinear_form(spec, weights), spec.project.bias
    even, size = normalise_form_scale(form)
    exact = width == spec.heads.q * spec.heads.dim
    took, found = (0, factorise_exact(even)) if exact else factorise_least_squares(even, width, max_sweeps, tolerance)
    factors = factorise_exact(form) if exact else scale_factors(found, size)
    content = form.k.new_zeros(form.k.shape[::2])
    if "q" in bias:
        b_q = weights["project.q_bias"].detach().to(form.q.dtype).view(form.q.shape[:2])
        content = (b_q[:, None] @ form.k)[:, 0]
    like = weights["project.q"]
    own = {f"project.{name}": tensor.to(like) for name, tensor in factors._asdict().items()}
    own["project.content"] = content.to(like)
    shared = replace(spec, project=Collaborative(width=width, bias="v" if "v" in bias else ""))
    kept = {name: weights[name].clone() for name in shared.shapes() if name not in own}
    return CollaborativeConversion(shared, own | kept, relative_error(even, found), took)


def _bilinear_form(spec: AttentionSpec, weights: Mapping[str, Tensor]) -> BilinearForm:
    heads = spec.heads
    q, k = (weights[f"project.{side}"].detach().double().unflatten(0, (-1, heads.dim)) for side in "qk")
    return BilinearForm(q, k[list(heads.reads)])


def _argument_errors(width: int, sweeps: int, tolerance: float) -> Iterator[str]:
    """Why these numbers cannot be meant."""
    for name, count in (("width", width), ("sweeps", sweeps)):
        if type(count) is not int:
            yield f"{name}={count!r} is no whole number; give one"
        elif name == "sweeps" and count < 0:
            yield f"sweeps={count} is fewer than none; give 0 or more"
    if not tolerance >= 0:
        yield f"tolerance={tolerance!r} is no least gain of a sweep; give 0.0 or more, 1e-6 is usual"


def _conversion_obstacles(spec: AttentionSpec, weights: Mapping[str, Tensor], width: int) -> Iterator[str]:
    """Why this layer cannot be one of shared queries and keys."""
    if not isinstance(spec.project, Direct):
        yield f"collaborate knows the weights of Direct, not of {type(spec.project).__name__}; give a layer of Direct"
        return
    if missing := [name for name in spec.shapes() if name not in weights]:
        yield f"weights lack {', '.join(missing)}; give the state_dict of a layer of this spec"
    full = spec.heads.q * spec.heads.dim
    if not 1 <= width <= full:
        yield f"width={width} is not within 1..{full}, and {full} is exact; give one that is"
    for name, turn in spec.parts_of(QKTransform):
        if turn.transformed_sides(spec) & set("qk"):
            yield f"{name} turns the queries and keys of each head, which a shared space does not have; train anew"
    if not spec.similarity.linear:
        yield f"{type(spec.similarity).__name__} compares by more than a product of q and k; use Dot"
    if "k" in spec.project.bias:
        for reason in spec.shift_sensitivity():
            yield f"the bias of keys has no place in a shared key and would be missed, for {reason}; train without it"
