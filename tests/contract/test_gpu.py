"""The same promises on CUDA, where there is one."""

from __future__ import annotations

import copy

import pytest
import torch

import headwise as hw
from headwise.attention import reference
from headwise.attention.backends import BACKENDS, CallSignature
from support import layer_cases as cases
from support.layer_cases import EXAMPLES

pytestmark = pytest.mark.gpu


def on_cuda(spec, dtype, one=False, grad=False) -> list[str]:
    """The backends that run this spec there."""
    job = CallSignature(spec, spec.core_of(spec.projection_form(one)), "cuda", dtype, grad, one)
    return [name for name, backend in BACKENDS.items() if not backend.unsupported_reasons(job)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_backend_errs_no_more_than_twice_as_dense(name, dtype):
    spec = EXAMPLES[name]
    exact = cases.layer(spec)
    coarse = copy.deepcopy(exact).to("cuda", dtype)
    keep = {
        k: v.cpu().double() if v.is_floating_point() else v.cpu()
        for k, v in coarse.state_dict().items()
    }
    exact.load_state_dict(keep)
    x, z = cases.tensors(spec, dtype)
    truth = reference.reference_attention(
        exact, x.double(), source=None if z is None else z.double()
    )

    def error(backend):
        coarse.backend_name = backend
        with torch.no_grad():
            y = coarse(x.cuda(), source=None if z is None else z.cuda())
        return (y.double().cpu() - truth).abs().max()

    limit = 2 * error("dense") + 4 * torch.finfo(dtype).eps * truth.abs().max()
    for backend in on_cuda(spec, dtype):
        assert error(backend) <= limit, backend


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
