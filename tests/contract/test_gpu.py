"""The same promises on CUDA, where there is one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from benchmarks.gpu import HEADS, SPECS, WIDTH

import headwise as hw
from headwise.attention import reference
from headwise.attention.backends import BACKENDS, CallSignature
from support import layer_cases as cases
from support.layer_cases import EXAMPLES

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
WIDE_TOKENS = 144  # more than one block of FlexAttention's and of the kernels'


def on_device(spec, dtype, one=False, grad=False) -> list[str]:
    """The backends that run this spec there."""
    job = CallSignature(spec, spec.core_of(spec.projection_form(one)), DEVICE, dtype, grad, one)
    return [name for name, backend in BACKENDS.items() if not backend.unsupported_reasons(job)]


@torch.no_grad()
def run_dense(layer: hw.Attention, x: torch.Tensor, **more: torch.Tensor | None) -> torch.Tensor:
    layer.backend_name = "dense"
    return layer(x, **more)


def check_errors(
    spec: hw.AttentionSpec, x: torch.Tensor, z: torch.Tensor | None, by: Callable[..., torch.Tensor]
) -> None:
    """Every backend errs at most twice as much as `dense` against `by` in float64."""
    exact = cases.layer(spec)
    coarse = copy.deepcopy(exact).to(DEVICE, x.dtype)
    keep = {
        k: v.cpu().double() if v.is_floating_point() else v.cpu()
        for k, v in coarse.state_dict().items()
    }
    exact.load_state_dict(keep)
    truth = by(exact, x.double(), source=None if z is None else z.double())

    def error(backend):
        coarse.backend_name = backend
        with torch.no_grad():
            y = coarse(x.to(DEVICE), source=None if z is None else z.to(DEVICE))
        return (y.double().cpu() - truth).abs().max()

    limit = 2 * error("dense") + 4 * torch.finfo(x.dtype).eps * truth.abs().max()
    for backend in on_device(spec, x.dtype):
        assert error(backend) <= limit, backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_backend_errs_no_more_than_twice_as_dense(name, dtype):
    spec = EXAMPLES[name]
    check_errors(spec, *cases.tensors(spec, dtype), reference.reference_attention)


@pytest.mark.parametrize("name", SPECS)
def test_wide_heads_err_no_more_than_twice_as_dense(name):
    """Heads of 64 channels in bfloat16, as flash, cuDNN and FlexAttention accept them."""
    spec = hw.design(model=WIDTH, heads=HEADS, **SPECS[name])
    x = torch.randn(1, WIDE_TOKENS, WIDTH, dtype=torch.bfloat16)
    # The reference would walk over every query; `dense` equals it in float64 by the contract.
    check_errors(spec, x, None, run_dense)


@pytest.mark.parametrize("tokens", BACKENDS["flex"].FLEX_BLOCK_LENGTHS)
def test_flex_keeps_the_numbers_at_its_block_edges(tokens):
    spec = hw.design(
        model=64,
        heads=4,
        kv=2,
        dim=16,
        pattern="window(40) | first(3)",
        modifiers=(hw.parts.Rotary(), hw.parts.Softcap(limit=2.0)),
    )
    layer, judge = (hw.Attention(spec, backend=name).cuda() for name in ("flex", "dense"))
    judge.load_state_dict(layer.state_dict())
    x = torch.randn(3, tokens, 64, device="cuda")
    at = hw.SequenceInfo.from_batch(x, lengths=[tokens, tokens // 2, tokens - 1])
    torch.testing.assert_close(layer(x, sequence=at), judge(x, sequence=at), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", EXAMPLES)
def test_decoding_is_one_pass_there_too(name):
    spec = cases.as_causal(EXAMPLES[name])
    layer = cases.layer(spec, torch.float32).cuda()
    x = cases.tensors(spec, torch.float32)[0].cuda()
    cache = layer.cache(batch=cases.BATCH, capacity=9)
    with torch.no_grad():
        steps = torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(cases.TOKENS)], 1)
        torch.testing.assert_close(steps, layer(x), rtol=1e-3, atol=1e-3)


def test_compiled_generation_is_the_same():
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 50}
    net = hw.build(hw.families.read_model_spec(config), seed=0).cuda()
    prompts = [[3, 1, 4], [1, 5]]
    compiled = hw.DecodingConfig(compile=True)
    for count in (8, 90, 8):
        expected = hw.generate(net, prompts, max_new_tokens=count)
        assert hw.generate(net, prompts, max_new_tokens=count, config=compiled) == expected
