"""Entmax and sparsemax: sparse attention weights, exactly zero for keys with low scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels import row_normalisers
from ...kernels.launch import has_kernels
from ..interfaces import Normaliser
from ..interfaces.core_types import Param, PartParams, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import constant_value, weight

# closer to 1 the gradient in alpha, a difference divided by (alpha - 1)^2, is lost to rounding
MIN_ALPHA = 1.01
# weights are powers 1 / (alpha - 1): for larger alpha, float32 keeps too few digits of score - tau
MAX_ALPHA = 4.0
# from here on so few weights are nonzero that gathering pays for bfloat16 values too
MIN_GATHER_ALPHA = 1.5
# a rounded sigmoid may give exactly 2, where slopes of zero weights would be 0**0 = 1
MAX_NEWTON_ALPHA = 2 - 1e-6


@part
class Entmax(Normaliser):
    """w_j = [(alpha - 1) s_j - tau]_+ ^ (1 / (alpha - 1)), tau such that weights sum to one
    (1905.05702, 1909.00015).

    alpha = 1 would be softmax, 2 is sparsemax; the larger alpha, the fewer weights are nonzero. If
    two scores differ by 1 / (alpha - 1) or more, the lower one gets weight zero:

    >>> Entmax().normalise_row(torch.tensor([2.0, 0.0]), {}).tolist()
    [1.0, 0.0]
    >>> Entmax(alpha=2.0).normalise_row(torch.tensor([0.5, 0.0]), {}).tolist()
    [0.75, 0.25]

    kind="learned" is the adaptively sparse transformer: alpha_h = 1 + sigmoid(a_h), with one number
    a_h per score head, initialised to give `alpha`. Values below 1.01 are clamped to 1.01 and get
    no gradient.
    """

    paper = "1909.00015"
    shift_invariant: ClassVar[bool] = True
    sums_to_one: ClassVar[bool] = True
    alpha: float = 1.5
    kind: str = "fixed"
    field_choices: ClassVar = {"kind": ("fixed", "learned")}

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if self.alpha <= 1:
            yield (
                f"Entmax(alpha={self.alpha!r}) must be above 1; for alpha=1 use normaliser "
                "Softmax()"
            )
        elif self.alpha < MIN_ALPHA:
            yield (
                f"Entmax(alpha={self.alpha!r}) is too close to 1 to be computed; "
                f"use alpha={MIN_ALPHA}, or normaliser Softmax()"
            )
        elif self.kind == "fixed" and self.alpha > MAX_ALPHA:
            yield (
                f"Entmax(alpha={self.alpha!r}) is above {MAX_ALPHA}, where weights are "
                "inaccurate; use alpha=2.0"
            )
        elif self.kind == "learned" and self.alpha >= 2:
            yield (
                f"Entmax(alpha={self.alpha!r}, kind='learned') must start below 2; use "
                "alpha=1.5, or kind='fixed'"
            )

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        if self.kind == "fixed":
            return {}
        return {"a": weight("q", constant_value(math.log((self.alpha - 1) / (2 - self.alpha))))}

    def normalise_row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor:
        alpha = _alpha_of_parameter(p_h["a"]) if self.kind == "learned" else self.alpha
        return _entmax_by_bisection(s_S, alpha)

    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        if s_BHTS.shape[-1] == 0:
            return s_BHTS
        exact = s_BHTS.to(torch.promote_types(s_BHTS.dtype, torch.float32))
        alpha = self.alpha
        if self.kind == "learned":
            alpha = _alpha_of_parameter(p.broadcast_over_scores()["a"].to(exact.dtype))
        w_BHTS: Any = _EntmaxFunction.apply(exact, allowed, alpha)
        return w_BHTS.to(s_BHTS.dtype)

    def fused_normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        exact = s_BHTS.to(torch.promote_types(s_BHTS.dtype, torch.float32))
        if not row_normalisers.can_run_entmax(exact):
            return self.normalise(s_BHTS, allowed, p)
        return row_normalisers.masked_entmax(exact, allowed, self._alphas(exact, p), None, [])[
            0
        ].to(s_BHTS.dtype)

    def prefers_gather(self, device: str, dtype: torch.dtype) -> bool:
        is_sparse = self.kind == "fixed" and self.alpha >= MIN_GATHER_ALPHA
        has_dtype = dtype in row_normalisers.COMPUTE_DTYPES or (
            dtype == torch.bfloat16 and is_sparse
        )
        return device == "cpu" and has_dtype and has_kernels()

    def gather_values(
        self,
        s_BHTS: Tensor,
        allowed: Tensor,
        v_BSGV: Tensor,
        value_heads: tuple[int, ...],
        p: PartParams,
    ) -> Tensor:
        exact = s_BHTS.to(torch.promote_types(s_BHTS.dtype, torch.float32))
        v_BGSV = v_BSGV.transpose(1, 2).to(exact.dtype)
        if not row_normalisers.ENTMAX_KERNELS.can_run(exact):
            return (self.normalise(exact, allowed, p) @ v_BGSV[:, list(value_heads)]).to(
                v_BSGV.dtype
            )
        alphas = self._alphas(exact, p)
        return row_normalisers.masked_entmax(exact, allowed, alphas, v_BGSV, value_heads)[0].to(
            v_BSGV.dtype
        )

    def _alphas(self, s_BHTS: Tensor, p: PartParams) -> Tensor:
        """The alpha of each head, in the dtype of the scores."""
        heads = s_BHTS.shape[1]
        if self.kind == "learned":
            return _alpha_of_parameter(p["a"].to(s_BHTS.dtype))
        return s_BHTS.new_full((heads,), self.alpha)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(normaliser=cls(), pattern="causal", kv=2)
        yield base(normaliser=cls(alpha=2.0), vdim=5)
        yield base(normaliser=cls(alpha=1.25, kind="learned"), pattern="window(4)")
        yield base(normaliser=cls(alpha=2.5), pattern="causal")


def _alpha_of_parameter(a: Tensor) -> Tensor:
    return (1 + torch.sigmoid(a)).clamp(min=MIN_ALPHA, max=MAX_NEWTON_ALPHA)


# --- Reference for one row ------------------------------------------------------------------------


def _entmax_by_bisection(s_S: Tensor, alpha: Tensor | float) -> Tensor:
    """Any alpha: tau by bisection without gradient, then one Newton step that
    carries the gradient.
    """
    x_S = (alpha - 1) * (s_S - s_S.max())
    power = 1 / (alpha - 1)
    with torch.no_grad():
        tau = torch.full_like(x_S[0], -1.0)
        width = 1.0
        for _ in range(80):
            width /= 2
            tau = torch.where(((x_S - tau - width).relu() ** power).sum() >= 1, tau + width, tau)
    live = x_S > tau
    r = x_S[live] - tau
    tau = tau + ((r**power).sum() - 1) / (power * r ** (power - 1)).sum()
    live = x_S > tau
    return torch.where(live, torch.where(live, x_S - tau, 1.0) ** power, 0.0)


# --- All rows at once -----------------------------------------------------------------------------


class _EntmaxFunction(torch.autograd.Function):
    """Entmax weights with a closed-form backward pass, which needs only the weights.

    Second derivatives follow from differentiating the closed form through the weights.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(s_BHTS: Tensor, allowed: Tensor, alpha: Tensor | float) -> Tensor:
        s_BHTS = s_BHTS.masked_fill(~allowed, -torch.inf)
        # This view makes torch.compile store the masked scores once; it would fuse the mask into
        # every Newton step.
        s_BHTS = s_BHTS.as_strided(s_BHTS.shape, s_BHTS.stride())
        # The maximum is subtracted before multiplying, so that nothing overflows; rows without keys
        # have a finite one.
        top = s_BHTS.amax(-1, keepdim=True).clamp(min=torch.finfo(s_BHTS.dtype).min)
        x_BHTS = (s_BHTS - top).mul_(alpha - 1)
        if isinstance(alpha, Tensor) or alpha <= 2:
            tau = _solve_tau_newton(x_BHTS, alpha)
        else:
            tau = _solve_tau_bisection(x_BHTS, alpha)
        w_BHTS = x_BHTS.sub_(tau).clamp_(min=0) ** (1 / (alpha - 1))
        return w_BHTS / _safe_row_sum(w_BHTS.sum(-1, keepdim=True))

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | float], output: Tensor
    ) -> None:
        alpha = inputs[2]
        learned = [alpha] if isinstance(alpha, Tensor) else []
        ctx.alpha = None if learned else alpha
        ctx.save_for_backward(output, *learned)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor | None]:
        w_BHTS, *learned = ctx.saved_tensors
        alpha = learned[0] if learned else ctx.alpha
        slope = _power_of_weights(w_BHTS, 2 - alpha)
        total = _safe_row_sum(slope.sum(-1, keepdim=True))
        mean = (slope * grads[0]).sum(-1, keepdim=True) / total
        grad_alpha = (
            _grad_alpha(w_BHTS, slope / total, grads[0], alpha) if ctx.needs_input_grad[2] else None
        )
        return slope * (grads[0] - mean), None, grad_alpha


def _safe_row_sum(total: Tensor) -> Tensor:
    """A divisor for row sums: sums are at least one up to rounding, and zero for rows without
    allowed keys.
    """
    return total.clamp(min=0.5)


def _power_on_support(r: Tensor, power: Tensor | float) -> Tensor:
    """r^power where r > 0, and zero where r = 0, for any power."""
    if isinstance(power, Tensor) or power > 0:
        return r**power
    return r.sign() if power == 0 else (r**power).masked_fill_(r == 0, 0.0)


def _power_of_weights(w_BHTS: Tensor, power: Tensor | float) -> Tensor:
    """w^power where w > 0, and zero elsewhere; differentiable, because second derivatives must
    avoid powers of zero.
    """
    if not torch.is_grad_enabled():
        return _power_on_support(w_BHTS, power)
    nonzero = w_BHTS != 0
    return torch.where(nonzero, torch.where(nonzero, w_BHTS, 1.0) ** power, 0.0)


def _solve_tau_newton(x_BHTS: Tensor, alpha: Tensor | float) -> Tensor:
    """tau such that the norm of [x - tau]_+ of order 1 / (alpha - 1) is one, by Newton's method
    from tau = -1.

    The norm is convex, so steps never pass the root. The sum of powers is convex too, but so steep
    for alpha near 1 that a Newton step on it makes almost no progress.
    """
    tau = torch.full_like(x_BHTS[..., :1], -1.0)
    # Enough steps for adversarial rows: each halves the error or the slope at least.
    max_alpha = 2 if isinstance(alpha, Tensor) else alpha
    num_steps = 3 + math.ceil(8 * (max_alpha - 1)) + (3 if tau.dtype == torch.float64 else 0)
    for _ in range(num_steps):
        r_BHTS = (x_BHTS - tau).clamp_(min=0)
        slope_BHTS = _power_on_support(r_BHTS, 1 / (alpha - 1) - 1)
        # Below the root both sums are at least one; for rows without allowed keys they are zero and
        # tau stays.
        slope = slope_BHTS.sum(-1, keepdim=True).clamp(min=1)
        total = slope_BHTS.mul_(r_BHTS).sum(-1, keepdim=True).clamp(min=1)
        tau = tau + (total - total ** (2 - alpha)) / slope
    return tau


def _solve_tau_bisection(x_BHTS: Tensor, alpha: float) -> Tensor:
    """tau by bisection, for alpha > 2, where the order is below 1 and Newton's
    method may diverge.
    """
    tau = torch.full_like(x_BHTS[..., :1], -1.0)
    width = 1.0
    for _ in range(70 if tau.dtype == torch.float64 else 40):
        width /= 2
        total = ((x_BHTS - tau - width).clamp_(min=0) ** (1 / (alpha - 1))).sum(-1, keepdim=True)
        tau = torch.where(total >= 1, tau + width, tau)
    return tau


def _grad_alpha(w_BHTS: Tensor, share_BHTS: Tensor, grad_BHTS: Tensor, alpha: Tensor) -> Tensor:
    """The gradient with respect to alpha (1909.00015, proposition 1); share is the slopes divided
    by their sum.
    """
    r_BHTS = torch.where(w_BHTS != 0, w_BHTS, 1.0)  # so that the logarithm is differentiable
    entropy_BHTS = -r_BHTS * r_BHTS.log()
    direction = (
        (w_BHTS - share_BHTS) / (alpha - 1)
        + entropy_BHTS
        - share_BHTS * entropy_BHTS.sum(-1, keepdim=True)
    )
    return (grad_BHTS * direction / (alpha - 1)).sum_to_size(alpha.shape)
