"""Operations that torch's FLOP counter misses and ours counts; FLOPs of checkpoints and fused
kernels.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import headwise as hw
from headwise.attention.backends import dense, sdpa
from headwise.attention.backends.core_interface import CoreInputs
from headwise.costs import flops as flop_formulas, formula_checks
from headwise.costs.formula_checks import fused_backward_flops
from headwise.costs.training_memory import recompute_flops
from headwise.models import model_spec as bp
from support import layer_cases as cases

CHANGED = "torch's counter has changed here; see whether auditing.FUSED and docs are still needed"
B, N, S, K = 2, 3, 5, 7


def flops(run, counter=None) -> int:
    with counter or FlopCounterMode(display=False) as counted:
        run()
    return counted.get_total_flops()


def heads(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


# --- pinned: when one of these fails, torch counts something else than when this was written ------


def test_torch_counts_the_fused_cpu_kernel_as_zero():
    q = heads(B, N, S, K)
    assert flops(lambda: F.scaled_dot_product_attention(q, q, q).sum().backward()) == 0, CHANGED
    assert not set(formula_checks.FUSED_FLOPS) & set(flop_registry), CHANGED


def test_torch_counts_no_causal_mask():
    q = heads(B, N, S, K)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        square = flops(lambda: F.scaled_dot_product_attention(q, q, q))
        assert flops(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)) == square, (
            CHANGED
        )
    assert square == 4 * B * N * S * S * K


def test_torch_counts_fast_paths_of_its_modules_as_zero():
    layer = nn.MultiheadAttention(24, 4, batch_first=True).eval()  # odd heads take no fast path
    encoder = nn.TransformerEncoderLayer(24, 4, 16, batch_first=True).eval()
    x = torch.randn(B, S, 24)
    with torch.no_grad():
        assert flops(lambda: layer(x, x, x, need_weights=False)) == 0, CHANGED
        assert flops(lambda: encoder(x)) == 0, CHANGED
    layer.train()
    projections = 2 * B * S * 4 * 24**2
    assert flops(lambda: layer(x, x, x, need_weights=False)) == projections, CHANGED


@pytest.mark.parametrize(
    "run",
    [
        lambda a, x: a @ x,
        lambda a, x: torch.mv(a, x),
        lambda a, x: torch.dot(x, x),
        lambda a, x: torch.outer(x, x),
        lambda a, x: (a * x).sum(),
    ],
    ids=["matmul", "mv", "dot", "outer", "sum"],
)
def test_torch_counts_matrix_vector_products_as_zero(run):
    a, x = torch.randn(S, S), torch.randn(S)
    assert flops(partial(run, a, x)) == 0, CHANGED


def test_torch_counts_a_sum_over_channels_by_einsum():
    x, w = torch.randn(B, S, K), torch.randn(K)
    assert flops(lambda: torch.einsum("bsd,d->bs", x, w)) == 2 * B * S * K, CHANGED


# --- ours -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("g", "causal"), [(4, False), (4, True), (2, False), (1, True)])
def test_the_fused_kernel_is_counted(g, causal):
    n, t = 4, S if causal else 11
    q, k, v = heads(B, n, S, K), heads(B, g, t, K), heads(B, g, t, K)
    run = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=True)
    assert flops(run, formula_checks.flop_counter()) == 2 * B * n * S * t * 2 * K
    both = flops(lambda: run().sum().backward(), formula_checks.flop_counter())
    assert both == 2 * B * n * S * t * (2 * K + 3 * K + 2 * K)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda a, x: torch.mv(a, x), "aten.mv"),
        (lambda a, x: torch.dot(x, x), "aten.dot"),
        (lambda a, x: torch.addmv(x, a, x), "aten.addmv"),
        (lambda a, x: torch.addr(a, x, x), "aten.addr"),
    ],
)
def test_a_product_without_a_formula_is_an_error(run, name):
    a, x = torch.randn(S, S), torch.randn(S)
    with pytest.raises(
        formula_checks.UncountedOperation, match=f"{name} multiplies but has no formula"
    ):
        flops(partial(run, a, x), formula_checks.flop_counter())


def test_fast_paths_are_errors_and_other_names_are_not():
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with (
        torch.no_grad(),
        pytest.raises(formula_checks.UncountedOperation, match="transformer_encoder_layer"),
    ):
        flops(lambda: encoder(torch.randn(B, S, 8)), formula_checks.flop_counter())
    x = torch.randn(B, S, 8)
    flops(
        lambda: F.layer_norm(F.gelu(x), (8,)).softmax(-1).cumsum(1).norm(),
        formula_checks.flop_counter(),
    )


def test_an_audit_runs_under_the_guard(monkeypatch):
    plain = dense.attend

    def attend(*args):
        torch.mv(torch.ones(3, 3), torch.ones(3))
        return plain(*args)

    monkeypatch.setattr(dense, "attend", attend)
    with pytest.raises(formula_checks.UncountedOperation, match=r"aten\.mv"):
        hw.check_formulas(hw.design(model=8, heads=2))


@pytest.mark.parametrize("preset", ["mha", "gqa", "mqa", "longformer", "moh"])
def test_gradients_under_the_fused_kernel(preset):
    spec = hw.design(preset=preset, model=32, heads=4)
    x = torch.randn(B, S, 32, requires_grad=True)
    layer, work = hw.Attention(spec, backend="sdpa"), hw.CallSize(B, S, S, S)
    with formula_checks.flop_counter() as counted:
        y = layer(x)
        ahead = counted.get_total_flops()
        y.sum().backward()
    assert ahead == flop_formulas.forward_flops(spec, work).total
    assert counted.get_total_flops() - ahead == fused_backward_flops(spec, work).total
    heads, core = spec.heads, spec.core
    plain = flop_formulas.backward_flops(spec, work).total - 4 * B * heads.q * S * S * (
        core.dim + core.vdim
    )
    assert fused_backward_flops(spec, work).total == plain + 2 * B * heads.q * S * S * (
        3 * core.dim + 2 * core.vdim
    )


# --- checkpoints ----------------------------------------------------------------------------------


def again(plain, job, attention_mask, inputs, bound, probe):
    """The dense core as a checkpoint of its own, handed every tensor by itself, so that hooks see
    what it holds.
    """
    q, k, v, values, entry, state, *_ = inputs

    def run(q, k, v, x, own, *args):
        changed = values._replace(x_BTD=x, q_BTHK=own)
        return plain(
            job,
            attention_mask,
            CoreInputs(q, k, v, changed, dict(zip(entry, args, strict=True)), state),
            bound,
            probe,
        )

    return checkpoint(
        run, q, k, v, values.x_BTD, values.q_BTHK, *entry.values(), use_reentrant=False
    )


def more(spec: hw.AttentionSpec, kind: str) -> tuple[int, int]:
    """FLOPs that a checkpointed layer does beyond a plain one, and the bytes it keeps."""
    x, z = (t if t is None else t.requires_grad_() for t in cases.tensors(spec, torch.float32))
    layer = hw.Attention(spec, backend="dense")
    with (
        FlopCounterMode(display=False) as counted,
        formula_checks.SavedTensorRecorder.for_module(layer) as watch,
    ):
        y = (
            layer(x, source=z)
            if kind == "core"
            else checkpoint(lambda *xz: layer(xz[0], source=xz[1]), x, z, use_reentrant=False)
        )
        ahead = counted.get_total_flops()
        y.sum().backward()
    return counted.get_total_flops() - ahead - flop_formulas.backward_flops(
        spec, work_of(spec)
    ).total, watch.total_bytes


def work_of(spec: hw.AttentionSpec) -> hw.CallSize:
    keys = cases.TOKENS if spec.source is None else cases.SOURCE
    return hw.CallSize(cases.BATCH, cases.TOKENS, keys, keys)


@pytest.mark.parametrize("kind", ["block", "core"])
@pytest.mark.parametrize("name", list(cases.EXAMPLES)[1::4])
def test_checkpoints_recompute_and_save_the_counted_amounts(name, kind, monkeypatch):
    spec = cases.EXAMPLES[name]
    with monkeypatch.context() as patch:  # the formula must not run into what it is held to
        if kind == "core":
            patch.setattr(dense, "attend", partial(again, dense.attend))
        done, values = more(spec, kind)
    source = None if spec.source is None else cases.SOURCE
    load = hw.Workload(cases.BATCH, cases.TOKENS, "fp32", "cpu")
    settings = hw.ActivationSettings(checkpoint=kind, source=source)
    assert recompute_flops(spec, load, settings).total == done
    assert (
        hw.layer_activation_memory(spec, load, "dense", checkpoint=kind, source=source).total
        == values
    )


def test_a_reading_behind_the_values_is_refused():
    spec = next(cases.EXAMPLES[name] for name in cases.EXAMPLES if name == "Shaw0")
    with pytest.raises(hw.SpecError, match="runs after the values are read"):
        recompute_flops(spec, hw.Workload(), hw.ActivationSettings(checkpoint="core"))
    with pytest.raises(hw.SpecError, match="did you mean 'block'"):
        recompute_flops(spec, hw.Workload(), hw.ActivationSettings(checkpoint="blck"))


class Block(nn.Module):
    """A block in plain torch, its norms where `place` says."""

    def __init__(self, spec: hw.AttentionSpec, place: str, dropout: float) -> None:
        super().__init__()
        d = spec.model
        self.attention, self.place, self.dropout = (
            hw.Attention(spec, backend="dense"),
            place,
            dropout,
        )
        self.norm_names = nn.ModuleList(nn.LayerNorm(d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        branches = (self.attention, lambda z: self.down(F.relu(self.up(z))))
        if self.place == "parallel":
            z = self.norm_names[0](x)
            return x + sum(F.dropout(run(z), self.dropout) for run in branches)
        for run, one, two in zip(branches, self.norm_names[:2], self.norm_names[2:], strict=True):
            y = F.dropout(run(x if self.place == "post" else one(x)), self.dropout)
            x = (
                one(x + y)
                if self.place == "post"
                else x + (two(y) if self.place == "sandwich" else y)
            )
        return x


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("place", ["pre", "post", "sandwich", "parallel"])
def test_a_checkpointed_block_does_all_but_the_last_product_again(place, dropout):
    spec, layers = hw.design(model=12, heads=2), 3
    blocks = [Block(spec, place, dropout) for _ in range(layers)]
    x = torch.randn(B, S, 12, requires_grad=True)

    def run(again: bool) -> None:
        h = x
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=False) if again else block(h)
        h.sum().backward()

    done = flops(partial(run, True)) - flops(partial(run, False))
    described = bp.BlockSpec(spec, feed=bp.FeedForwardSpec(36, "relu"), placement=place)
    model = bp.ModelSpec(
        "three", "decoder", (bp.StackSpec.from_blocks("decoder", 12, [described] * layers),)
    )
    way = hw.ActivationSettings("dense", "block", dropout)
    assert recompute_flops(model, hw.Workload(B, S), way).total == done
    assert recompute_flops(model, hw.Workload(B, S)).total == 0


def test_the_fused_call_takes_no_other_path_unnoticed():
    """What the audit of a fused layer rests on: whether torch really fuses it."""
    job = hw.backends.CallSignature(
        hw.design(preset="gqa"), hw.design(preset="gqa").core, needs_grad=True, training=True
    )
    assert sdpa.unsupported_reasons(job) == []
    checks = {check.what: check for check in hw.check_formulas(hw.design(preset="mla"))}
    assert (
        checks["backward FLOPs, sdpa"].measured == checks["backward FLOPs"].measured
    )  # composed: wider keys
    checks = {check.what: check for check in hw.check_formulas(hw.design(preset="gqa"))}
    assert checks["backward FLOPs, sdpa"].measured > checks["backward FLOPs"].measured
