"""RMSNorm of each head's output before the merge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch.nn.functional as F
from torch import Tensor

from ..interfaces import OutputStep
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import Param, PartParams, SpecFactory, SymmetryGroup
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec
from .initialisers import ones_init


@part
class HeadNorm(OutputStep):
    """o_h -> w o_h / sqrt(mean(o_h^2) + eps): RMSNorm of every head's output over its own channels.

    This is the norm of differential attention (2410.05258) as a separate part. scope="shared": one weight w of vdim
    numbers for all heads, as in its released code; scope="head": one per output head, as in a group norm (2307.08621).

    >>> import torch
    >>> HeadNorm().transform_outputs(torch.tensor([[[[3.0, 4.0]]]]), torch.ones(1, 1, 1), {"scale": torch.ones(2)})
    tensor([[[[0.8485, 1.1314]]]])
    """

    paper = "2410.05258"
    scope: str = "shared"
    eps: float = 1e-5

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        if not self.eps > 0:
            yield f"HeadNorm(eps={self.eps!r}) must be positive; 1e-5 is usual"
        if self.scope not in ("shared", "head"):
            yield f"HeadNorm(scope={self.scope!r}) is unknown; use 'shared' or 'head'"
        steps = [step for _, step in spec.parts_of(OutputStep)]
        later = [type(step).__name__ for step in steps[steps.index(self) :] if step.combines_rows]
        if self.scope == "head" and later:
            yield f"HeadNorm(scope='head') would run before {later[0]} combines rows; write it after {later[0]}"

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        return {"scale": Param(AxisLayout.parse("vdim" if self.scope == "shared" else "out vdim"), ones_init)}

    def symmetry(self, spec: AttentionSpec, side: str, p: Mapping[str, Tensor]) -> SymmetryGroup:
        of_scale = SymmetryGroup.commuting_with_scales(p["scale"].reshape(-1, spec.heads.vdim).T.tolist())
        return of_scale if side == "v" else super().symmetry(spec, side, p)

    def transform_outputs(self, o_BTRV: Tensor, x_BTD: Tensor, p: PartParams) -> Tensor:
        return F.rms_norm(o_BTRV, o_BTRV.shape[-1:], eps=self.eps) * p["scale"]

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(),), pattern="causal", kv=2, vdim=5)
        yield base(modifiers=(cls(scope="head", eps=1e-2),), vdim=5)
