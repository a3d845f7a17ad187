"""Edge cases of kernels: unread memory, gradients at boundaries, and probes of their inputs."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.attention.backends import block_sparse
from headwise.kernels import attend_paged, paged_decode, row_normalisers
from headwise.kernels.linear import linear, linear_many
from headwise.observe.inspect import hooks
from headwise.observe.inspect.attention_sites import find_attention
from support import crossover
from support.layer_cases import check_close

TABLE = torch.tensor([[[0, 0, 4], [1, 0, 2]], [[2, 0, 0], [0, 0, 0]], [[3, 1, 3], [0, 2, 2]]])
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 31,
}


def handed() -> list[Tensor]:
    """Queries, keys and values in five pages of four slots."""
    shapes = (3, 4, 16), (5, 2, 4, 16), (5, 2, 4, 7)
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def test_keys_outside_the_mask_have_no_gradient_even_if_nan():
    q, k, v = handed()
    with torch.no_grad():
        for pages in (k, v):
            pages[1, :, 2:] = torch.nan
    slopes = torch.autograd.grad(
        attend_paged(q, k, v, TABLE, scale=0.3)[0].square().sum(), (q, k, v)
    )
    assert all(slope.isfinite().all() for slope in slopes)
    assert not slopes[1][1, :, 2:].any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"v": torch.float32}, "k, v are torch.float64, torch.float32; give one dtype"),
        ({"k": torch.float16, "v": torch.float16}, "k is torch.float16"),
        ({"k": torch.int8, "v": torch.int8}, "give both scales for int8"),
        ({"spans": torch.int32}, "spans is torch.int32"),
    ],
)
def test_numbers_that_would_be_read_as_others_are_refused(changed, message):
    q, k, v = (t.detach() for t in handed())
    options = {"k": k, "v": v, "spans": TABLE}
    options |= {name: options[name].to(dtype) for name, dtype in changed.items()}
    with pytest.raises(ValueError, match=message):
        attend_paged(q, options["k"], options["v"], options["spans"], scale=0.3)


def test_shapes_that_do_not_meet_are_refused():
    q, k, v = handed()
    with pytest.raises(ValueError, match="give a multiple of the key heads"):
        attend_paged(q[:, :3], k, v, TABLE, scale=0.3)
    with pytest.raises(ValueError, match=r"give torch.int64 \[3, N, 3\]"):
        attend_paged(*handed(), TABLE[:2], scale=0.3)


def test_a_second_ceiling_counts():
    spec = hw.design(
        model=16,
        heads=4,
        pattern="causal",
        modifiers=(hw.parts.Softcap(0.7), hw.parts.Softcap(0.2)),
    )
    layer, plain = hw.Attention(spec), hw.Attention(spec, backend="dense")
    plain.load_state_dict(layer.state_dict())
    x, recorded = 3 * torch.randn(1, 30, 16), []
    with torch.no_grad(), crossover.sizes(ragged_float32=0):
        for one in (layer, plain):
            cache = one.cache(batch=1, capacity=30)
            one(x[:, :-1], cache=cache)
            recorded.append(one(x[:, -1:], cache=cache))
    check_close(*recorded, rtol=1e-5, atol=1e-6)
    assert "Softcap is not additive" in hw.why(spec, tokens="one").reasons_against["ragged"]


# --- caches of 8 bits -----------------------------------------------------------------------------


@pytest.fixture
def small():
    """A model, a text, and its caches in full and in 8 bits behind all of that
    but the last token.
    """
    net = hw.build(hw.families.read_model_spec(LLAMA), seed=0).eval()
    ids = torch.randint(31, (2, 40), generator=torch.Generator().manual_seed(0))
    caches = {
        store: net.cache(batch=2, capacity=50, storage_format=store) for store in (None, "int8")
    }
    with torch.no_grad():
        for cache in caches.values():
            net(ids[:, :-1], cache=cache)
    return net, ids[:, -1:], caches


def test_a_model_uses_an_int8_cache(small):
    net, last, caches = small
    with torch.no_grad():
        full, eight = (net(last, cache=cache) for cache in caches.values())
    check_close(eight, full, rtol=0, atol=0.02 * full.abs().max().item())
    assert 3 * caches["int8"].nbytes < 2 * caches[None].nbytes
    with pytest.raises(hw.SpecError, match="storage_format='int4' is unknown"):
        net.cache(batch=2, capacity=9, storage_format="int4")


def test_probes_see_dequantised_int8_keys(small):
    net, last, caches = small
    recorded = {}
    for store, cache in caches.items():
        probe = hw.Probe("k", "v")
        net.probes = {"decoder.0.attention": probe}
        with torch.no_grad():
            net(last, cache=cache)
        recorded[store] = probe.tensors
    for name in "kv":
        check_close(
            recorded["int8"][name],
            recorded[None][name],
            rtol=0,
            atol=0.02 * recorded[None][name].abs().max().item(),
        )


class Weights(hooks.AttentionHook):
    """Watches an attention, and asks for its weights."""

    def __init__(self) -> None:
        self.seen = []

    def on_call(self, recorded):
        self.seen.append(recorded.all_weights())


def test_weights_are_computed_again_from_8_bits(small):
    net, last, caches = small
    recorded = {}
    for store, cache in caches.items():
        one = Weights()
        sites = find_attention(net)
        with (
            torch.no_grad(),
            hooks.install_hooks({site.module: (one,) for site in sites}, sites),
        ):
            net(last, cache=cache)
        recorded[store] = one.seen
    for eight, full in zip(recorded["int8"], recorded[None], strict=True):
        assert full.shape[-1] == 40
        check_close(eight, full, rtol=0, atol=0.01)


# --- plans and products ---------------------------------------------------------------------------


def test_a_plan_is_handed_out_though_another_thread_forgets_all(monkeypatch):
    class Forgetful(dict):
        def __contains__(self, key):
            result = super().__contains__(key)
            self.clear()
            return result

        def get(self, key, default=None):
            result = super().get(key, default)
            self.clear()
            return result

    layer = hw.Attention(hw.design(model=8, heads=2, pattern="window(5)"))
    x = torch.randn(1, 300, 8)
    y = layer(x)
    monkeypatch.setattr(block_sparse, "_PLAN_CACHE", Forgetful(block_sparse._PLAN_CACHE))
    assert torch.equal(layer(x), y)


def test_a_matrix_of_another_width_is_refused():
    w = torch.randn(crossover.least("gemv_float32") // 4 // 64, 64)
    with torch.no_grad():
        for call in (
            lambda: linear(torch.randn(1, 32), w),
            lambda: linear_many(torch.randn(1, 32), (w, w)),
        ):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                call()


@pytest.mark.filterwarnings("ignore")  # of torch.func.jvp itself
def test_products_under_torch_func_are_torchs():
    w, x, along = (
        torch.randn(crossover.least("gemv_float32") // 4 // 64, 64),
        torch.randn(2, 64),
        torch.randn(2, 64),
    )
    with torch.no_grad():
        check_close(
            torch.vmap(lambda row: linear(row[None], w)[0])(x), x @ w.T, rtol=1e-5, atol=1e-5
        )
        slope = torch.func.jvp(lambda x: linear(x, w), (x,), (along,))[1]
    check_close(slope, along @ w.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pattern", ["causal", "window(7) | first(2)"])
def test_a_cache_goes_with_its_last_use(pattern):
    """No cycle holds its tensors until Python looks for garbage."""
    layer = hw.Attention(hw.design(model=16, heads=4, pattern=pattern))
    cache = layer.cache(batch=1, capacity=40)
    with torch.no_grad():
        for _ in range(3):
            layer(torch.randn(1, 1, 16), cache=cache)
    stored = weakref.ref(cache.entry["k"])
    gc.disable()
    try:
        del cache
        assert stored() is None
    finally:
        gc.enable()


def test_no_two_kernels_are_kept_under_one_name():
    built = [("attend", torch.float32), ("attend", torch.float64)]
    for name, dtype in built:
        paged_decode.PAGED_DECODE_KERNELS.compiled_function(name, dtype)
    row_normalisers.SOFTMAX_KERNELS.compiled_function("softmax", torch.float32)
    kernels = [
        *(paged_decode.PAGED_DECODE_KERNELS.compiled_functions[own] for own in built),
        row_normalisers.SOFTMAX_KERNELS.compiled_functions["softmax", torch.float32],
    ]
    keep = {kernel._cache._impl.filename_base for kernel in kernels}
    assert len(keep) == len(kernels), keep
