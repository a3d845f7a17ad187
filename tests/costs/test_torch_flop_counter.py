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
from headwise.costs import flops as flop_formulas
from headwise.costs.activations import SavedTensorRecorder
from headwise.costs.training_memory import recompute_flops
from support import layer_cases as cases
from support.flop_counting import FUSED_FLOPS, flop_counter

CHANGED = "torch's counter has changed here; see whether FUSED_FLOPS and docs are still needed"
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
    assert not set(FUSED_FLOPS) & set(flop_registry), CHANGED


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
    assert flops(run, flop_counter()) == 2 * B * n * S * t * 2 * K
    both = flops(lambda: run().sum().backward(), flop_counter())
    assert both == 2 * B * n * S * t * (2 * K + 3 * K + 2 * K)


@pytest.mark.parametrize("preset", ["mha", "gqa", "mqa", "longformer", "moh"])
def test_gradients_under_the_fused_kernel(preset):
    """Five products backwards instead of four (2205.14135)."""
    spec = hw.design(preset=preset, model=32, heads=4)
    x = torch.randn(B, S, 32, requires_grad=True)
    layer, work = hw.Attention(spec, backend="sdpa"), hw.costs.CallSize(B, S, S, S)
    with flop_counter() as counted:
        y = layer(x)
        ahead = counted.get_total_flops()
        y.sum().backward()
    assert ahead == flop_formulas.forward_flops(spec, work).total
    plain = flop_formulas.backward_flops(spec, work).total
    again = 2 * B * spec.heads.q * S * S * spec.core.dim
    assert counted.get_total_flops() - ahead == plain + again


# --- checkpoints ----------------------------------------------------------------------------------


def more(spec: hw.AttentionSpec) -> tuple[int, int]:
    """FLOPs that a checkpointed layer does beyond a plain one, and the bytes it keeps."""
    x, z = (t if t is None else t.requires_grad_() for t in cases.tensors(spec, torch.float32))
    layer = hw.Attention(spec, backend="dense")
    with (
        FlopCounterMode(display=False) as counted,
        SavedTensorRecorder.for_module(layer) as watch,
    ):
        y = checkpoint(lambda *xz: layer(xz[0], source=xz[1]), x, z, use_reentrant=False)
        ahead = counted.get_total_flops()
        y.sum().backward()
    return counted.get_total_flops() - ahead - flop_formulas.backward_flops(
        spec, work_of(spec)
    ).total, watch.total_bytes


def work_of(spec: hw.AttentionSpec) -> hw.costs.CallSize:
    keys = cases.TOKENS if spec.source is None else cases.SOURCE
    return hw.costs.CallSize(cases.BATCH, cases.TOKENS, keys, keys)


@pytest.mark.parametrize("name", list(cases.EXAMPLES)[1::4])
def test_checkpoints_recompute_and_save_the_counted_amounts(name):
    spec = cases.EXAMPLES[name]
    done, values = more(spec)
    source = None if spec.source is None else cases.SOURCE
    load = hw.Workload(cases.BATCH, cases.TOKENS, "fp32", "cpu")
    settings = hw.costs.ActivationSettings(checkpoint="block", source=source)
    assert recompute_flops(spec, load, settings).total == done
    memory = hw.costs.layer_activation_memory(
        spec, load, "dense", checkpoint="block", source=source
    )
    assert memory.total == values


def test_another_kind_of_checkpoint_is_refused():
    with pytest.raises(hw.SpecError, match="did you mean 'block'"):
        recompute_flops(
            hw.design(model=8, heads=2),
            hw.Workload(),
            hw.costs.ActivationSettings(checkpoint="blck"),
        )
