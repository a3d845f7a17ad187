"""Kernels under checkpoints, frozen parameters, other devices and second derivatives, and with
invalid tables.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise.kernels import (
    PagedDecodeOptions,
    attend_paged,
    flash_attention,
    multiply_small_batch,
)
from headwise.kernels.flash_attention import WorkItems, gathered_attention
from headwise.kernels.operand_checks import can_skip_dispatcher
from support.layer_cases import check_close

TABLE = torch.tensor([[[0, 0, 4], [1, 0, 2]], [[2, 0, 0], [0, 0, 0]], [[3, 1, 3], [0, 2, 2]]])
LONG = 300  # tokens, more than a block of any kernel


def handed() -> list[Tensor]:
    """Queries, keys and values in five pages of four slots."""
    return [
        torch.randn(shape, dtype=torch.float64)
        for shape in ((3, 4, 16), (5, 2, 4, 16), (5, 2, 4, 7))
    ]


def layer_of(preset: str) -> hw.Attention:
    return hw.Attention(hw.design(preset=preset, model=16, heads=4)).double()


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["moh", "talking", "dcmha", "entmax", "mha"])
@pytest.mark.parametrize("again", [True, False], ids=["reentrant", "plain"])
def test_a_checkpoint_changes_no_gradient(preset, again):
    layer, x = layer_of(preset), torch.randn(2, LONG, 16, dtype=torch.float64)
    found = []
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=again)):
        layer.zero_grad()
        one = x.clone().requires_grad_()
        call(one).square().sum().backward()
        found.append([one.grad, *(p.grad for p in layer.parameters())])
    for ours, theirs in zip(*found, strict=True):
        check_close(ours, theirs)


def test_hooks_of_parameters_are_called_once():
    layer = hw.Attention(
        hw.design(model=16, heads=4, modifiers=(hw.parts.TalkingHeads(),)), backend="chunked"
    ).double()
    x = torch.randn(2, LONG, 16, dtype=torch.float64)
    found = []
    for times in (1, 3):
        layer.zero_grad()
        hooks = [
            p.register_hook(lambda grad, times=times: times * grad) for p in layer.parameters()
        ]
        layer(x).square().sum().backward()
        found.append([p.grad for p in layer.parameters()])
        for hook in hooks:
            hook.remove()
    for ours, theirs in zip(*found, strict=True):
        check_close(3 * ours, theirs)


@pytest.mark.parametrize("count", [40, LONG])
@pytest.mark.parametrize("kind", ["fixed", "learned"])
def test_torch_func_has_slopes_of_slopes_of_entmax(kind, count):
    layer = hw.Attention(
        hw.design(model=16, heads=4, pattern="causal", normaliser=hw.parts.Entmax(kind=kind))
    ).double()
    x, way, step = torch.randn(3, 1, count, 16, dtype=torch.float64)

    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: layer(x).square().sum())(x)

    found = (torch.func.grad(lambda x: (slope(x) * way).sum())(x) * step).sum()
    high, low = (torch.autograd.grad(layer(y).square().sum(), y)[0] for y in nearby(x, 1e-6 * step))
    check_close(found, ((high - low) * way).sum() / 2e-6, rtol=1e-5)


def nearby(x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """x a step further on, and back."""
    return (x + step).requires_grad_(), (x - step).requires_grad_()


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["moh", "talking", "dcmha", "entmax", "mha"])
def test_the_default_device_does_not_matter(preset):
    layer, x = layer_of(preset), torch.randn(1, LONG, 16, dtype=torch.float64)
    expected = layer(x)
    with torch.device("meta"):
        found = layer(x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("preset", ["talking", "dcmha", "entmax"])
def test_shapes_alone_run_through_blocks(preset):
    layer, x = (
        layer_of(preset).to("meta"),
        torch.randn(2, LONG, 16, device="meta", dtype=torch.float64),
    )
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape


@pytest.mark.parametrize(
    "name",
    [
        "flash_attention",
        "flash_attention_backward",
        "masked_softmax",
        "masked_entmax",
        "masked_entmax_backward",
        "head_mixing",
        "head_mixing_backward",
        "paged_decode",
        "small_batch_matmul",
    ],
)
def test_no_kernel_is_handed_memory_of_another_device(name):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(f"headwise::{name}", "CPU")
    # mixed heads and entmax have kernels of their own for GPUs
    is_for_gpus = name.startswith(("head_mixing", "masked_entmax"))
    assert has(f"headwise::{name}", "CUDA") == is_for_gpus
    assert not has(f"headwise::{name}", "CompositeExplicitAutograd")


# --- what lies beside memory ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "span", [[5, 0, 4], [-1, 0, 4], [1, -1, 2], [1, 0, 5], [1, 2**40, 2**41]], ids=str
)
def test_spans_beside_the_pages_are_refused(span):
    table = TABLE.clone()
    table[2, 0] = torch.tensor(span)
    with pytest.raises(ValueError, match=r"within 5 pages of 4 slots"):
        attend_paged(*handed(), table, scale=0.3)


def test_empty_spans_may_name_any_page():
    table = TABLE.clone()
    table[1] = torch.tensor([[9, 3, 3], [-7, 99, 4]])
    inputs = handed()
    check_close(
        attend_paged(*inputs, table, scale=0.3)[0], attend_paged(*inputs, TABLE, scale=0.3)[0]
    )


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        (PagedDecodeOptions(bias=torch.zeros(3, 4, 7)), r"the bias is \[3, 4, 7\]; give .* = 8"),
        (
            PagedDecodeOptions(bias=torch.zeros(2, 1, 8)),
            r"bias is torch.float32 \[2, 1, 8\]; give .* \[1\|3, 1\|4, \*\]",
        ),
        (PagedDecodeOptions(bias=torch.zeros(1, 3, 8)), r"bias is torch.float32 \[1, 3, 8\]"),
        (PagedDecodeOptions(sink=torch.zeros(3)), r"sink is torch.float32 \[3\]; give .* \[4\]"),
    ],
    ids=["columns", "rows", "heads", "sinks"],
)
def test_options_must_have_the_shape_of_the_call(beside, message):
    with pytest.raises(ValueError, match=message):
        attend_paged(*handed(), TABLE, scale=0.3, options=beside)


@pytest.mark.parametrize(
    "scale", [torch.ones(5, 2, 3), torch.ones(5, 2, 4, dtype=torch.bfloat16)], ids=["few", "half"]
)
def test_scales_are_one_for_each_key(scale):
    q, k, v = handed()
    with pytest.raises(ValueError, match=r"give torch.float32 \[5, 2, 4\]"):
        attend_paged(
            q.float(),
            k.to(torch.int8),
            v.to(torch.int8),
            TABLE,
            scale=0.3,
            options=PagedDecodeOptions(None, None, scale, scale),
        )


def test_more_keys_than_the_index_type_holds_are_refused():
    most = flash_attention.MAX_INDEX_BY_DTYPE[torch.float32]
    assert torch.tensor(float(most - 1)) + 1 == most
    assert torch.tensor(float(most)) + 1 == most
    q, k = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1).expand(1, most + 1, 1, 1)
    work_items = WorkItems.from_open_heads(
        torch.ones(1, 1, 1, dtype=torch.bool), 1, torch.tensor([[[most - 3, most + 1]]]), most + 1
    )
    with pytest.raises(
        ValueError, match=r"16,777,217 keys are more than 16,777,216 in torch.float32"
    ):
        gathered_attention(q, k, k, work_items, 1.0)


def test_numbers_of_two_kinds_are_refused():
    q = torch.zeros(1, 1, 1, 4)
    work_items = WorkItems.from_open_heads(
        torch.ones(1, 1, 1, dtype=torch.bool), 1, torch.tensor([[[0, 1]]]), 1
    )
    for k, v in ((q.double(), q), (q, q.double())):
        with pytest.raises(ValueError, match=r"is torch.float64 .*; give torch.float32"):
            gathered_attention(q, k, v, work_items, 1.0)


def test_spans_that_lie_apart_are_looked_at_alone():
    q, k, _ = handed()
    spans_BN3 = torch.tensor([[[1, 0, 4], [9, 0, 9], [0, 1, 3]]])
    attend_paged(q[:1], k, k, spans_BN3[:, ::2], scale=0.3)
    with pytest.raises(ValueError, match=r"spans hold \[9, 0, 9\]"):
        attend_paged(q[:1], k, k, spans_BN3, scale=0.3)


def random_tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_dispatch_modes_see_the_operation():
    """Gradients, graphs, transformations, modes and profilers: none of them is passed by."""
    x, w = random_tensor(0, 2, 16), random_tensor(1, 3, 16)
    assert not can_skip_dispatcher(x)
    with torch.no_grad():
        assert can_skip_dispatcher(x, torch.nn.Parameter(w))
        assert not can_skip_dispatcher(x.to("meta"))
        assert not can_skip_dispatcher(torch.nn.Buffer(x).as_subclass(Followed))
        assert not torch.func.vmap(lambda row: torch.tensor(can_skip_dispatcher(row)))(x).any()
        with FlopCounterMode(display=False) as counted:
            assert not can_skip_dispatcher(x)
            multiply_small_batch(x, [w])
            q, k = x.view(2, 1, 16), random_tensor(2, 2, 1, 5, 16)
            attend_paged(q, k, k, None, scale=1.0)
        assert counted.get_total_flops() == 2 * 2 * 16 * 3 + 4 * 2 * 5 * 16
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            assert not can_skip_dispatcher(x)
            multiply_small_batch(x, [w])
        assert "headwise::small_batch_matmul" in {event.name for event in recorded.events() or ()}
        assert can_skip_dispatcher(x)


class Followed(Tensor):
    """A tensor with a mind of its own."""
