"""Collaborative attention: all heads share one query-key space. Also converts trained multi-head
layers to it.

The scores of head i are a bilinear form T_i = q_i^T k_i, with the trained q_i [dim, model] and k_i
[dim, source]. The conversion approximates the forms of all heads together by a sum of products of
three vectors (a CP decomposition) with alternating least squares. The tensor of all forms is never
computed; products of its factors suffice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...util.errors import SpecError
from ..interfaces import Project, QKTransform
from ..interfaces.core_types import (
    AxisLayout,
    CoreShape,
    Param,
    PartParams,
    SpecFactory,
    TransformsQK,
)
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import normal_with_std, ones_init, weight, xavier_uniform, zeros_init
from .linear_projection import LinearProjection, absorb_matrix_per_head


class BilinearForm(NamedTuple):
    """The forms T_i = q_i^T k_i of all heads, with q [heads, dim, model] and k [heads, dim,
    source].
    """

    q: Tensor
    k: Tensor


class TrilinearFactors(NamedTuple):
    """Factorised forms T_i = q^T diag(mixing_i) k, with q [rank, model], mixing [heads, rank] and k
    [rank, source].
    """

    q: Tensor
    mixing: Tensor
    k: Tensor


def init_head_blocks(shape: tuple[int, ...]) -> Tensor:
    """A block-diagonal mixing [heads, width]: head h has ones in its own block of ceil(width /
    heads) channels.

    The last block has the remaining channels.

    >>> init_head_blocks((2, 3)).tolist()
    [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    heads, width = shape
    owner = torch.arange(width) // math.ceil(width / heads)
    return (owner == torch.arange(heads)[:, None]).to(torch.get_default_dtype())


def normalise_form_scale(form: BilinearForm) -> tuple[BilinearForm, int]:
    """The form divided by 2^size, and size. Both factors of each head get similar magnitudes.

    Squares of the scaled form neither overflow nor underflow.
    """
    largest = [factor.abs().amax((1, 2)) for factor in form]
    nonzero = (largest[0] > 0) & (largest[1] > 0)
    q, k = (torch.frexp(value).exponent for value in largest)
    size = int((q + k)[nonzero].amax()) if nonzero.any() else 0
    return BilinearForm(
        _multiply_power_of_two(form.q, torch.where(nonzero, k - size, -q)),
        _multiply_power_of_two(form.k, -k),
    ), size


def _multiply_power_of_two(x: Tensor, power: Tensor) -> Tensor:
    """x 2^power for one power or one per head; in two steps, because 2^power alone may overflow."""
    power = power.to(x.dtype)[..., None, None]
    first = torch.div(power, 2, rounding_mode="floor")
    return torch.ldexp(torch.ldexp(x, first), power - first)


def factorise_least_squares(
    form: BilinearForm, rank: int, max_sweeps: int, tolerance: float
) -> tuple[int, TrilinearFactors]:
    """The number of sweeps and the factors of this rank found by alternating least squares.

    Stops after `max_sweeps` sweeps, or when a sweep reduces the relative error by less than the
    fraction `tolerance`.
    """
    factors = factorise_truncated_svd(form, rank)
    error = _relative_error_of_products(form, factors)
    # exact already, or a form of zeros, which sweeps would turn into arbitrary factors
    if not error:
        return 0, factors
    for sweep in range(max_sweeps):
        candidate = _als_sweep(form, factors)
        candidate_error = _relative_error_of_products(form, candidate)
        # Convergence is slow along valleys: a longer step is taken where it helps, so errors still
        # never grow.
        factor = math.sqrt(sweep + 1)
        extrapolated = TrilinearFactors(
            *(start + factor * (end - start) for start, end in zip(factors, candidate, strict=True))
        )
        extrapolated_error = _relative_error_of_products(form, extrapolated)
        if extrapolated_error < candidate_error:
            candidate = extrapolated
            candidate_error = extrapolated_error
        gain = error - candidate_error
        error = candidate_error
        factors = _balance_norms(candidate)
        if gain <= tolerance * (error + gain) or error < 1e-8:  # smaller errors are rounding
            return sweep + 1, factors
    return max_sweeps, factors


def factorise_exact(form: BilinearForm) -> TrilinearFactors:
    """Factorise exactly with rank heads * dim: every head has separate vectors."""
    rank = form.q.shape[0] * form.q.shape[1]
    return TrilinearFactors(
        form.q.flatten(0, 1), init_head_blocks((len(form.q), rank)).to(form.q), form.k.flatten(0, 1)
    )


def factorise_truncated_svd(form: BilinearForm, rank: int) -> TrilinearFactors:
    """Keep the largest singular triples over all heads.

    This is the best approximation with vectors that each belong to one head.
    """
    (uq, rq) = torch.linalg.qr(form.q.mT)
    (uk, rk) = torch.linalg.qr(form.k.mT)
    x, sizes, y = torch.linalg.svd(rq @ rk.mT, full_matrices=False)
    root = sizes.sqrt()[..., None]
    q = ((uq @ x).mT * root).flatten(0, 1)
    k = ((uk @ y.mT).mT * root).flatten(0, 1)
    largest = sizes.flatten().sort(descending=True, stable=True).indices[:rank]
    mixing = F.one_hot(largest // sizes.shape[1], len(form.q)).T.to(q)
    # there are fewer triples than `rank` where dim exceeds the model or source width
    padding = rank - len(largest)
    return TrilinearFactors(
        F.pad(q[largest], (0, 0, 0, padding)),
        F.pad(mixing, (0, padding)),
        F.pad(k[largest], (0, 0, 0, padding)),
    )


def relative_error(form: BilinearForm, factors: TrilinearFactors) -> float:
    """||T - T'|| / ||T||, computed head by head from the difference of the forms, so that nothing
    large cancels.
    """
    squared_error = 0.0
    squared_norm = 0.0
    for q, k, mixing in zip(form.q, form.k, factors.mixing, strict=True):
        exact = q.T @ k
        squared_error += (exact - factors.q.T @ (mixing[:, None] * factors.k)).square().sum().item()
        squared_norm += exact.square().sum().item()
    return math.sqrt(squared_error / squared_norm) if squared_norm else math.sqrt(squared_error)


def _relative_error_of_products(form: BilinearForm, factors: TrilinearFactors) -> float:
    """Like `relative_error`, from inner products of factors: cheap, but inaccurate below the root
    of machine epsilon.

    ||T - T'||^2 = <T, T> - 2 <T, T'> + <T', T'>.
    """
    squared_norm = ((form.q @ form.q.mT) * (form.k @ form.k.mT)).sum()
    q = _project_vectors(factors.q, form.q)
    k = _project_vectors(factors.k, form.k)
    cross = (factors.mixing.T * (q * k).sum(-1)).sum()
    approximated = (
        (factors.mixing.T @ factors.mixing) * (factors.q @ factors.q.T) * (factors.k @ factors.k.T)
    ).sum()
    squared_error = max((squared_norm - 2 * cross + approximated).item(), 0.0)
    return math.sqrt(squared_error / max(squared_norm.item(), torch.finfo(squared_norm.dtype).tiny))


def _project_vectors(vectors: Tensor, weights: Tensor) -> Tensor:
    """Each vector projected to the channels of each head, [rank, heads, dim]."""
    return (vectors @ weights.flatten(0, 1).T).unflatten(1, weights.shape[:2])


def _als_sweep(form: BilinearForm, factors: TrilinearFactors) -> TrilinearFactors:
    """One sweep of alternating least squares: each factor in turn is the
    optimum for the other two.
    """
    q, mixing, k = factors
    by_q = _project_vectors(q, form.q)
    by_k = _project_vectors(k, form.k)
    mixing = _solve_regularised((q @ q.T) * (k @ k.T), (by_q * by_k).sum(-1), mixing.T).T
    cross = (mixing.T[..., None] * by_k).flatten(1) @ form.q.flatten(0, 1)
    q = _solve_regularised((mixing.T @ mixing) * (k @ k.T), cross, q)
    cross = (mixing.T[..., None] * _project_vectors(q, form.q)).flatten(1) @ form.k.flatten(0, 1)
    return TrilinearFactors(
        q, mixing, _solve_regularised((mixing.T @ mixing) * (q @ q.T), cross, k)
    )


def _solve_regularised(gram: Tensor, rhs: Tensor, old: Tensor) -> Tensor:
    """The solution of gram x = rhs, pulled slightly towards `old`.

    Directions that the Gram matrix does not determine therefore stay as they were, and errors
    cannot grow.
    """
    pull = 1e-10 * gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
    return torch.linalg.solve(gram + pull * torch.eye(len(gram)).to(gram), rhs + pull * old)


def _balance_norms(factors: TrilinearFactors) -> TrilinearFactors:
    """The factors rescaled so that the three vectors of each product have equal norms."""
    norms = torch.stack([factors.q.norm(dim=1), factors.mixing.norm(dim=0), factors.k.norm(dim=1)])
    scale = torch.where(
        norms.prod(0) > 0,
        norms.prod(0).pow(1 / 3) / norms.clamp(min=torch.finfo(norms.dtype).tiny),
        1,
    )
    return TrilinearFactors(
        factors.q * scale[0, :, None], factors.mixing * scale[1], factors.k * scale[2, :, None]
    )


# --- The part -------------------------------------------------------------------------------------

_INITIALISERS = {"normal": normal_with_std(0.2), "ones": ones_init, "blocks": init_head_blocks}


@part
class Collaborative(Project):
    """s_i = scale (x W_Q diag(m_i) . z W_K + z.c_i): one shared key, a mixing vector and a content
    bias per head.

    (2006.16362.) The scale is 1/sqrt(heads.dim) for any shared width, so that a converted layer
    keeps its scores. Internally the content bias is part of the key: q' = [m_i * q, e_i], k' = [k,
    z.c_1 .. z.c_h].

    `start` is the initialisation of the mixing, as in the released code: "normal" with deviation
    0.2 (which the code calls uniform), "ones", or "blocks", where every head has ceil(width / h)
    separate channels and the last head the rest. `convert_to_collaborative` converts a trained
    layer.

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2, project=Collaborative(width=4))
    >>> hw.costs.cached_numbers_per_token(
    ...     spec
    ... )  # 4 shared key channels, 2 content biases, 8 value channels
    14
    """

    paper = "2006.16362"
    disagreements: ClassVar[tuple[str, ...]] = (
        (
            "One released code scales scores by the shared width, the other by the width of the "
            "original heads: this "
            "follows the latter, so that a converted layer keeps its scores. In a new layer D is "
            "heads.dim."
        ),
        "The code calls its initialisation uniform but it is normal with deviation 0.2: normal.",
        "The paper describes a Tucker decomposition, its code computes CP: CP, initialised by "
        "singular vectors.",
    )
    width: int = 64
    bias: str = ""
    start: str = "normal"
    field_choices: ClassVar = {"bias": ("", "v"), "start": tuple(_INITIALISERS)}
    field_minima: ClassVar = {"width": 1}
    needed_dot_product: ClassVar = "its content bias"

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if any(step.transformed_sides(spec) & set("qk") for _, step in spec.parts_of(QKTransform)):
            yield (
                "Collaborative has one query-key space for all heads, so it supports no QK "
                "transforms; leave them out"
            )

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        return {"width": self.width}

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        axis = spec.heads.value_axis
        params = {
            "q": weight("width model", xavier_uniform, "query"),
            "k": weight("width source", xavier_uniform, "source"),
            "mixing": weight("q width", _INITIALISERS[self.start]),
            "content": weight("q source", xavier_uniform, "source"),
            "v": weight(f"({axis} vdim) source", xavier_uniform, "source"),
        }
        return params | ({"v_bias": weight(f"({axis} vdim)", zeros_init)} if self.bias else {})

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
        width = self.width + heads.q
        keys = (0,) * heads.q
        return CoreShape(keys, spec.value_head_of_row, width, heads.vdim, heads.dim**-0.5)

    def project_query(self, x_BTD: Tensor, transform: TransformsQK, p: PartParams) -> Tensor:
        mixed = F.linear(x_BTD, p["q"])[..., None, :] * p["mixing"]
        one_hot = torch.eye(mixed.shape[-2], dtype=mixed.dtype, device=mixed.device)
        return torch.cat([mixed, one_hot.expand(*mixed.shape[:2], -1, -1)], -1)

    def project_kv(
        self, z_BSE: Tensor, transform: TransformsQK, p: PartParams
    ) -> dict[str, Tensor]:
        v = F.linear(z_BSE, p["v"], p["v_bias"] if self.bias else None)
        v_BSGV = v.unflatten(-1, (-1, p.sizes["vdim"]))
        return {
            "k": F.linear(z_BSE, p["k"]),
            "content": F.linear(z_BSE, p["content"]),
            "v": transform(v_BSGV, "v"),
        }

    def expand_kv(
        self, entry: Mapping[str, Tensor], transform: TransformsQK, p: PartParams
    ) -> tuple[Tensor, Tensor]:
        return torch.cat([entry["k"], entry["content"]], -1)[..., None, :], entry["v"]

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(project=cls(width=8), pattern="causal", vdim=5)
        yield base(project=cls(width=9, bias="v"), kv=2, source=13)
        yield base(project=cls(width=8, start="blocks"))


class CollaborativeConversion(NamedTuple):
    """Result of `convert_to_collaborative`: the layer, the relative error of its score forms, and
    the sweeps used.
    """

    spec: AttentionSpec
    weights: dict[str, Tensor]
    relative_error: float
    sweeps: int


def convert_to_collaborative(
    spec: AttentionSpec,
    weights: Mapping[str, Tensor],
    width: int,
    *,
    max_sweeps: int = 500,
    tolerance: float = 1e-6,
) -> CollaborativeConversion:
    """Convert a trained layer with `LinearProjection` to `Collaborative`, with a shared query-key
    space of `width` channels.

    (2006.16362.) The scores of head i are a bilinear form T_i = W_Q^i W_K^i^T, approximated in
    float64 by sum_r a_r m_ir b_r^T; `relative_error` is ||T - T'|| / ||T||. At width h D the
    weights are copied and the error is 0. b_Q becomes the content bias c_i = W_K^i b_Q^i. b_K is
    dropped: this is exact if scores are invariant to a constant added to a row, and refused
    otherwise. Values, merge, modifiers and the scale 1/sqrt(D) stay (one of the released codes uses
    1/sqrt(width / h)).

    >>> import headwise as hw
    >>> spec = hw.design(model=8, heads=2)
    >>> conversion = convert_to_collaborative(spec, hw.Attention(spec).state_dict(), 8)
    >>> conversion.spec.project, conversion.relative_error
    (Collaborative(width=8), 0.0)
    """
    reasons = list(_argument_errors(width, max_sweeps, tolerance))
    reasons = reasons or list(dict.fromkeys(_conversion_obstacles(spec, weights, width)))
    if reasons:
        raise SpecError("; ".join(reasons))
    assert isinstance(spec.project, LinearProjection)
    form = _bilinear_form(spec, weights)
    bias = spec.project.bias
    scaled_form, size = normalise_form_scale(form)
    if width == spec.heads.q * spec.heads.dim:
        sweeps = 0
        scaled_factors = factorise_exact(scaled_form)
        factors = factorise_exact(form)
    else:
        sweeps, scaled_factors = factorise_least_squares(scaled_form, width, max_sweeps, tolerance)
        half = size // 2
        q, k = (
            _multiply_power_of_two(x, torch.tensor(power, device=x.device))
            for x, power in ((scaled_factors.q, size - half), (scaled_factors.k, half))
        )
        factors = scaled_factors._replace(q=q, k=k)
    content = form.k.new_zeros(form.k.shape[::2])
    if "q" in bias:
        b_q = weights["project.q_bias"].detach().to(form.q.dtype).view(form.q.shape[:2])
        content = (b_q[:, None] @ form.k)[:, 0]
    like = weights["project.q"]
    new_weights = {f"project.{name}": tensor.to(like) for name, tensor in factors._asdict().items()}
    new_weights["project.content"] = content.to(like)
    new_spec = replace(spec, project=Collaborative(width=width, bias="v" if "v" in bias else ""))
    copied = {name: weights[name].clone() for name in new_spec.shapes() if name not in new_weights}
    error = relative_error(scaled_form, scaled_factors)
    return CollaborativeConversion(new_spec, new_weights | copied, error, sweeps)


def _bilinear_form(spec: AttentionSpec, weights: Mapping[str, Tensor]) -> BilinearForm:
    heads = spec.heads
    q, k = (
        weights[f"project.{side}"].detach().double().unflatten(0, (-1, heads.dim)) for side in "qk"
    )
    return BilinearForm(q, k[list(heads.kv_head_of_query)])


def _argument_errors(width: int, sweeps: int, tolerance: float) -> Iterator[str]:
    """Reasons why these arguments are invalid."""
    for name, count in (("width", width), ("max_sweeps", sweeps)):
        if type(count) is not int:
            yield f"{name}={count!r} is not an integer; give one"
        elif name == "max_sweeps" and count < 0:
            yield f"max_sweeps={count} is negative; give 0 or more"
    if not tolerance >= 0:
        yield (
            f"tolerance={tolerance!r} is not a relative gain per sweep; give 0.0 or more, 1e-6 "
            "is usual"
        )


def _conversion_obstacles(
    spec: AttentionSpec, weights: Mapping[str, Tensor], width: int
) -> Iterator[str]:
    """Reasons why this layer cannot share queries and keys between heads."""
    if not isinstance(spec.project, LinearProjection):
        yield (
            f"cannot convert a layer with project {type(spec.project).__name__}; give one with "
            "project LinearProjection"
        )
        return
    missing = [name for name in spec.shapes() if name not in weights]
    if missing:
        yield f"weights lack {', '.join(missing)}; give the state_dict of a layer of this spec"
    full = spec.heads.q * spec.heads.dim
    if not 1 <= width <= full:
        yield f"width={width} is not within 1..{full}; {full} is exact"
    for name, transform in spec.parts_of(QKTransform):
        if transform.transformed_sides(spec) & set("qk"):
            yield (
                f"{name} transforms the queries and keys of each head, which a shared space "
                "does not have; retrain"
            )
    if not spec.similarity.linear:
        yield f"{type(spec.similarity).__name__} is not a dot product of q and k; use DotProduct"
    if "k" in spec.project.bias:
        for reason in spec.shift_sensitivity():
            yield f"the key bias cannot be dropped because {reason}; train without a key bias"
