"""What calls on CUDA run, without a GPU: which backend, which operations, and no value that is read
on the way.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from attention.backends.fake_cuda import calls_on_cuda, meta_input
from headwise.attention.backends import BACKENDS, block_sparse, flex, sdpa
from headwise.attention.masking.patterns import parse_pattern
from headwise.attention.masking.sequence_info import AttentionMask, SequenceInfo
from headwise.kernels import triton_support

SIZES = {"model": 128, "heads": 4}
SPECS = {
    "causal": hw.design(pattern="causal()", **SIZES),
    "gqa": hw.design(preset="gqa", **SIZES),
    "mla": hw.design(preset="mla", **SIZES),
    "moh": hw.design(preset="moh", **SIZES),
    "diff2": hw.design(preset="diff2", **SIZES),
    "window": hw.design(pattern="window(128)", **SIZES),
    "dilated": hw.design(pattern="window(128) | first(4)", **SIZES),
    "alibi": hw.design(pattern="causal()", modifiers=(hw.parts.Alibi(),), **SIZES),
    "softcap": hw.design(pattern="causal()", modifiers=(hw.parts.Softcap(5.0),), **SIZES),
    "sinks": hw.design(pattern="causal()", normaliser=hw.parts.SinkSoftmax(), **SIZES),
    "window and sinks": hw.design(
        pattern="window(128)", normaliser=hw.parts.SinkSoftmax(), **SIZES
    ),
    "dcmha": hw.design(preset="dcmha", **SIZES),
    "talking": hw.design(preset="talking", **SIZES),
    "entmax": hw.design(preset="entmax", **SIZES),
    "linear": hw.design(preset="linear", **SIZES),
}
ON_FLEX = ("window", "dilated", "alibi", "softcap", "sinks", "window and sinks")
WHOLE = dict.fromkeys(SPECS, "sdpa") | dict.fromkeys(ON_FLEX, "flex")
WHOLE |= dict.fromkeys(("dcmha", "talking", "entmax"), "chunked") | {"linear": "linear"}
STEP = {
    "causal": "sdpa",
    "gqa": "sdpa",
    "mla": "sdpa",
    "moh": "sdpa",
    "diff2": "sdpa",
    "window": "sdpa",
    "dilated": "sdpa",
    "alibi": "sdpa",
    "softcap": "dense",
    "sinks": "sdpa",
    "window and sinks": "sdpa",
    "dcmha": "dense",
    "linear": "linear",
}


@pytest.fixture(autouse=True)
def no_cpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the CPU, and Python's loops over blocks of queries, raise an error."""
    from headwise.kernels.launch import KernelSet

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a path of the CPU runs on CUDA")

    monkeypatch.setattr(KernelSet, "run_kernel", refuse)
    monkeypatch.setattr(block_sparse, "_attend_per_block", refuse)
    monkeypatch.setattr(flex, "_MASK_CACHE", {})


@pytest.mark.parametrize("name", SPECS)
def test_whole_sequences_forward_and_backward(name: str):
    layer, x = hw.Attention(SPECS[name]).to("meta"), meta_input(2, 600, 128)
    with calls_on_cuda() as calls:
        y = layer(x)
        grads = torch.autograd.grad(y.sum(), [x, *layer.parameters()], allow_unused=True)
    assert calls.backends == [WHOLE[name]]
    assert y.shape == x.shape
    assert grads[0] is not None
    assert hw.why(SPECS[name], device="cuda", tokens=600, when=["grad"]).backend == WHOLE[name]


def test_long_texts_skip_closed_heads_where_triton_is_installed(monkeypatch: pytest.MonkeyPatch):
    x = meta_input(2, 2100, 128)
    backends = []
    for triton in (None, SimpleNamespace()):
        monkeypatch.setattr(triton_support, "triton", triton)
        layer = hw.Attention(SPECS["moh"]).to("meta")
        with calls_on_cuda() as calls:
            layer(x).sum().backward()
            layer(x[:, :2047])
        backends.append(calls.backends)
    assert backends == [["sdpa", "sdpa"], ["routed", "sdpa"]]
    monkeypatch.setattr(triton_support, "triton", None)
    reasons = hw.why(SPECS["moh"], device="cuda").reasons_against["routed"]
    assert reasons == ["needs Triton on CUDA, which is not installed"]


@pytest.mark.parametrize("name", STEP)
def test_prefill_and_decode_steps_read_no_value(name: str):
    layer, x = hw.Attention(SPECS[name]).to("meta").eval(), meta_input(2, 300, 128)
    with calls_on_cuda() as calls, torch.no_grad():
        cache = layer.cache(batch=2, capacity=400)
        layer(x, cache=cache)
        layer(x[:, :1], cache=cache)
        layer(x[:, :1], cache=cache)
    assert calls.backends == [WHOLE[name], STEP[name], STEP[name]]


@pytest.mark.parametrize("name", [name for name in SPECS if WHOLE[name] == "flex"])
def test_packed_documents_run_in_groups_of_flex(name: str):
    layer, x = hw.Attention(SPECS[name]).to("meta"), meta_input(1, 600, 128)
    with calls_on_cuda() as calls:
        layer(x, sequence=hw.SequenceInfo.packed([[400, 200]]).to("meta"))
    assert set(calls.backends) == {"flex"}


def test_the_layers_of_a_model_share_one_block_mask():
    layers = [hw.Attention(SPECS["window"]).to("meta") for _ in range(3)]
    x = meta_input(2, 600, 128)
    with calls_on_cuda() as calls, torch.no_grad():
        for layer in layers:
            layer(x)
        layers[0](x[:1])  # another batch size
        layers[0](x[:, :500])
    masks = [options["block_mask"] for options in calls.flex_options]
    assert len({id(mask) for mask in masks[:4]}) == 1
    assert masks[4] is not masks[0]


def test_flex_is_first_on_cuda_only_where_others_would_loop_or_store_a_bias():
    for name, spec in SPECS.items():
        for device in ("cuda", "cpu"):
            order = list(hw.why(spec, device=device).reasons_against)
            is_first = order.index("flex") < order.index("block_sparse")
            assert is_first == (device == "cuda" and name in ON_FLEX)


DROPPED = hw.design(modifiers=(hw.parts.WeightDropout(0.25),), pattern="causal()", **SIZES)


def test_dropout_on_weights_is_that_of_the_fused_call(monkeypatch: pytest.MonkeyPatch):
    """In training only; on the CPU torch has no such kernel, so that others run there."""
    attend = torch.nn.functional.scaled_dot_product_attention
    rates: list[float] = []

    def record(*args: Any, dropout_p: float, **options: Any) -> Tensor:
        rates.append(dropout_p)
        return attend(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    layer, x = hw.Attention(DROPPED).to("meta"), meta_input(2, 600, 128)
    with calls_on_cuda() as calls:
        layer(x).sum().backward()
        layer.eval()(x)
    assert calls.backends == ["sdpa", "sdpa"]
    assert rates == [0.25, 0.0]
    assert hw.why(DROPPED, device="cpu", tokens=600, when=["training"]).backend != "sdpa"


def test_dropped_weights_keep_their_mean(monkeypatch: pytest.MonkeyPatch):
    """Over many draws, within five standard errors of the mean; no draw equals it."""
    monkeypatch.setattr(sdpa, "unsupported_reasons", lambda call: [])
    layer = hw.Attention(DROPPED, backend="sdpa")
    x = torch.randn(1, 12, 128)
    with torch.no_grad():
        expected = layer.eval()(x)
        draws = torch.cat([layer.train()(x) for _ in range(400)])
    error = draws.std(0) / 400**0.5
    assert ((draws.mean(0) - expected[0]).abs() < 5 * error + 1e-6).all()
    assert float((draws - expected).abs().mean()) > 0.01


def compute_all_scores(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
    """Return the outputs and sums of FlexAttention by its definition, with gradients."""
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    batch, _, queries, _ = q.shape
    b, t, n = (torch.arange(count) for count in (batch, queries, k.shape[2]))
    allowed = options["block_mask"].mask_mod(b[:, None, None], 0, t[:, None], n)
    scores = (q @ k.mT * options["scale"]).masked_fill(
        ~allowed.expand(batch, -1, -1)[:, None], -torch.inf
    )
    assert options["score_mod"] is None
    assert options["return_aux"].lse
    return scores.softmax(-1) @ v, SimpleNamespace(lse=scores.logsumexp(-1))


@pytest.mark.parametrize("pattern", ["causal()", "window(5)"])
def test_sinks_on_flex_take_their_share(pattern: str, monkeypatch: pytest.MonkeyPatch):
    """Outputs and gradients equal those of `dense`, which appends the sink to the scores."""
    monkeypatch.setattr(flex, "_unsupported_device_reasons", lambda call: [])
    monkeypatch.setattr(flex, "_run_compiled", compute_all_scores)
    spec = hw.design(model=32, heads=4, kv=2, pattern=pattern, normaliser=hw.parts.SinkSoftmax())
    layers = [hw.Attention(spec, backend=name).double() for name in ("flex", "dense")]
    with torch.no_grad():
        next(p for name, p in layers[0].named_parameters() if "sink" in name).normal_()
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(2, 20, 32, dtype=torch.float64, requires_grad=True)
    results = []
    for layer in layers:
        y = layer(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_returns_sums_in_nats():
    """The share of a sink rests on this convention; the call runs uncompiled on the CPU."""
    q, k, v = torch.randn(3, 1, 2, 9, 16)
    _, sums = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    torch.testing.assert_close(sums.lse, (q @ k.mT / 4).logsumexp(-1))


@pytest.mark.parametrize(
    ("dim", "dtype", "reason"),
    [
        (64, "float64", "does not support float64"),
        (192, "float32", "shared memory"),
        (288, "bfloat16", "shared memory"),
        (128, "float32", ""),
        (256, "bfloat16", ""),
    ],
)
def test_flex_is_refused_where_its_kernel_would_not_compile(dim: int, dtype: str, reason: str):
    spec = hw.design(model=128, heads=2, dim=dim, pattern="window(128)")
    report = hw.why(spec, device="cuda", dtype=dtype, tokens=600)
    assert (report.backend == "flex") is not bool(reason)
    assert reason in " ".join(report.reasons_against["flex"])


@pytest.mark.parametrize("pattern", ["causal()", "window(20)", "window(9) | first(3)"])
@pytest.mark.parametrize("starts", [(0, 0), (200, 0), (150, 90)])
def test_cached_masks_allow_the_pairs_of_the_pattern(pattern: str, starts: tuple[int, int]):
    """The mask of consecutive positions is computed from their offsets; here it is compared with
    the pattern itself.
    """
    query_start, key_start = starts
    queries, keys = (
        SequenceInfo.contiguous(query_start, 130, "cpu"),
        SequenceInfo.contiguous(key_start, 260, "cpu"),
    )
    attention_mask = AttentionMask(queries, keys, parse_pattern(pattern))
    mask = flex.block_mask(attention_mask, 2, "cpu")
    assert flex.block_mask(attention_mask, 3, "cpu") is mask
    i, j = (
        torch.arange(query_start, query_start + 130)[:, None],
        torch.arange(key_start, key_start + 260),
    )
    t, s = torch.arange(130)[:, None], torch.arange(260)
    allowed = parse_pattern(pattern).allows(i, j)
    assert torch.equal(mask.mask_mod(torch.tensor(0), torch.tensor(0), t, s), allowed)
    blocks = (
        torch.nn.functional.pad(allowed, (0, 384 - 260, 0, 256 - 130))
        .unflatten(0, (2, 128))
        .unflatten(2, (3, 128))
    )
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks.any(3).any(1))


PATTERNS = (
    "causal()",
    "full()",
    "window(20)",
    "window(300) | first(3)",
    "dilated(100, 2)",
    "prefix(140)",
    "global((5, 130))",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_blocks_are_those_that_torch_makes_of_all_pairs(pattern: str):
    """Also which of them need no test of their pairs."""
    tokens = SequenceInfo.contiguous(0, 700, "cpu")
    flex_mask = flex.block_mask(AttentionMask(tokens, tokens, parse_pattern(pattern)), 1, "cpu")
    made = create_block_mask(flex_mask.mask_mod, None, None, 700, 700, "cpu")
    assert torch.equal(flex_mask.to_dense(), made.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        found, wanted = (getattr(mask, name) for mask in (flex_mask, made))
        assert torch.equal(found, wanted)
    assert torch.equal(flex_mask.q_num_blocks, made.q_num_blocks)


def test_no_tensor_of_all_pairs_is_made(monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(one.numel() for one in [result] if isinstance(one, Tensor))
            return result

    tokens = SequenceInfo.contiguous(0, 2**16, "cpu")
    with Record():
        flex.block_mask(AttentionMask(tokens, tokens, parse_pattern("window(128)")), 1, "cpu")
    assert 0 < max(sizes) < 2 * (2**16 // 128) ** 2


def test_masks_of_documents_are_kept_with_their_positions():
    segments = torch.tensor([[0] * 70 + [1] * 60])
    tokens = SequenceInfo.from_batch(torch.zeros(1, 130, 8), segments=segments)
    attention_mask = AttentionMask(tokens, tokens, parse_pattern("causal()"))
    mask = flex.block_mask(attention_mask, 1, "cpu")
    assert flex.block_mask(attention_mask, 1, "cpu") is mask
    assert (
        flex.block_mask(AttentionMask(tokens, tokens, parse_pattern("window(5)")), 1, "cpu")
        is not mask
    )
    t, s = torch.arange(130)[:, None], torch.arange(130)
    expected = (s <= t) & (segments[0][:, None] == segments[0])
    assert torch.equal(mask.mask_mod(torch.tensor(0), torch.tensor(0), t, s), expected)


def test_no_backend_of_the_cpu_supports_a_call_on_cuda():
    for name, reasons in hw.why(SPECS["causal"], device="cuda").reasons_against.items():
        if name in ("ragged", "flash_cpu"):
            assert any("for the CPU only" in reason for reason in reasons), name
    assert set(WHOLE.values()) | set(STEP.values()) <= set(BACKENDS)
