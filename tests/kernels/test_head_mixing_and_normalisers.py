"""Kernels for head mixing and row normalisers, with sums of values by sparse weights, and recomputed
query blocks, against the formulas.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import headwise as hw
from headwise.attention.backends import dense
from headwise.kernels import head_mixing as mixing, row_normalisers
from support.layer_cases import base, check_close


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


ALPHAS = [1.01, 1.25, 1.5, 2.0, 3.0]
VALUE_HEADS = [1, 0, 1, 1]  # the value head that each of four heads reads


def alphas(s: Tensor, alpha: float) -> Tensor:
    """The same for every head."""
    return s.new_full((s.shape[1],), alpha)


def entmax(s: Tensor, recorded: Tensor, alpha: float) -> Tensor:
    """The weights of the kernel."""
    return row_normalisers.masked_entmax(s, recorded, alphas(s, alpha), None, [])[0]


# --- heads mixed ----------------------------------------------------------------------------------


class Mixed:
    """A block of scores, and factors, of these sizes."""

    def __init__(self, sizes: dict[str, int], groups: int = 1, out: int | None = None) -> None:
        b, h, t, s = (sizes[letter] for letter in "bhts")
        q, k = sizes["q"], sizes["k"]
        self.own = torch.arange(h) if out is None else torch.randperm(h)[:out]
        self.each, o = h // groups, len(self.own)
        shapes = [
            (b, h, t, s),
            (b, t, q, h),
            (b, t, q, o),
            (b, t, o),
            (b, k, h, s),
            (b, k, o, s),
            (b, int(k > 0), o, s),
        ]
        self.tensors = [numbers(*shape).requires_grad_() for shape in shapes]

    def kernel(self) -> Tensor:
        a, *factors = self.tensors
        return mixing.mix_heads_by_factors(a, self.own, self.each, factors)

    def formula(self) -> Tensor:
        """a'_o = a_own (g_q + g_k) + sum_h a_h M[h, o], M from the ranks of query and key, within
        groups.
        """
        a, qs, qt, qg, ks, kt, kg = self.tensors
        heads = torch.arange(a.shape[1])
        to = self.own if self.each == a.shape[1] else heads
        joined = (heads[:, None] // self.each == to // self.each).double()
        m = (
            torch.einsum("btrh,btro->btho", qs, qt)[:, :, None]
            + torch.einsum("brhs,bros->bsho", ks, kt)[:, None]
        )
        gates = qg[:, :, None] + (kg[:, 0].transpose(1, 2)[:, None] if kg.shape[1] else 0.0)
        m = m * joined + (heads[:, None] == to).double() * gates[:, :, :, None]
        return torch.einsum("bhts,btsho->bots", a, m)


SIZES = st.fixed_dictionaries(
    {
        "b": st.integers(1, 3),
        "h": st.sampled_from([2, 4, 6]),
        "t": st.integers(1, 5),
        "s": st.sampled_from([1, 3, 15, 16, 17, 63, 64, 65, 131]),
        "q": st.integers(0, 3),
        "k": st.integers(0, 3),
    }
)


@given(SIZES, st.booleans(), st.booleans())
def test_mixing_of_a_block_equals_the_formula(sizes, grouped, cut):
    mixed = Mixed(
        sizes, groups=2 if grouped else 1, out=sizes["h"] - 1 if cut and not grouped else None
    )
    ours, theirs = mixed.kernel(), mixed.formula()
    check_close(ours, theirs)
    # as products of heads leave it
    grad = numbers(*(ours.shape[n] for n in (0, 2, 3, 1))).permute(0, 3, 1, 2)
    nonempty = [t for t in mixed.tensors if t.numel()]
    mine, expected = (
        torch.autograd.grad(built, nonempty, grad, allow_unused=True) for built in (ours, theirs)
    )
    for one, other in zip(mine, expected, strict=True):
        check_close(one, torch.zeros_like(one) if other is None else other, rtol=1e-9, atol=1e-10)


def test_threads_change_no_number():
    mixed = Mixed({"b": 2, "h": 6, "t": 5, "s": 300, "q": 2, "k": 2})
    grad, scores, sample = (
        numbers(2, 6, 5, 300),
        numbers(2, 6, 50, 300),
        torch.rand(2, 1, 50, 300) < 0.7,
    )
    few, v = (numbers(*shape).requires_grad_() for shape in ((2, 4, 50, 130), (2, 2, 130, 20)))
    alpha = few.new_tensor([1.2, 1.5, 1.8, 2.0]).requires_grad_()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        built = mixed.kernel()
        found.append([built, *torch.autograd.grad(built, mixed.tensors, grad)])
        found[-1] += [
            row_normalisers.masked_softmax(scores, sample),
            *row_normalisers.masked_entmax(scores, sample, alphas(scores, 1.5), None, []),
        ]
        o, state = row_normalisers.masked_entmax(few, sample[..., :130], alpha, v, VALUE_HEADS)
        found[-1] += [o, state, *torch.autograd.grad(o.sin().sum(), (few, v, alpha))]
    torch.set_num_threads(1)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


MIXED_HEADS = {
    "dim": 8,
    "modifiers": (hw.parts.DynamicComposition(), hw.parts.DynamicComposition(on="weights")),
}
ROUNDED = [
    ("mixed", MIXED_HEADS, torch.float32),
    ("1.5", {"normaliser": hw.parts.Entmax()}, torch.bfloat16),
]
ROUNDED += [
    (str(alpha), {"normaliser": hw.parts.Entmax(alpha=alpha)}, torch.float32)
    for alpha in (1.1, 1.25, 1.5, 1.75, 2.0)
]


@pytest.mark.parametrize(("name", "options", "dtype"), ROUNDED)
def test_rounded_numbers_are_as_good_as_plain_ones(name, options, dtype):
    layer = hw.Attention(base(pattern="causal", **options))
    if name == "mixed":
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.5)
    layer, x = layer.to(dtype), torch.randn(2, 259, 10).to(dtype)
    exact = copy.deepcopy(layer).double()
    exact.backend_name = "dense"
    truth = exact(x.double())

    def error(backend: str) -> float:
        layer.backend_name = backend
        outputs = layer(x)
        assert outputs.dtype == dtype
        return (outputs.double() - truth).abs().max().item()

    assert error("chunked") <= 2 * error("dense")


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 100, 1021])
def test_rows_are_softmax_over_allowed_keys(keys, dtype):
    s = (numbers(2, 3, 5, keys) * 4).to(dtype).requires_grad_()
    full, grad = torch.rand(2, 1, 5, keys) < 0.6, torch.randn(2, 3, 5, keys, dtype=dtype)
    full[1, :, 2] = False
    for value in (full, full[:1], full[:, :, :1], full[:1, :, :1]):
        below = s.double().masked_fill(~value, -torch.inf)
        expected = below.softmax(-1).nan_to_num(0.0)
        ours = row_normalisers.masked_softmax(s, value)
        check_close(ours, expected, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-7)
        mine = torch.autograd.grad(ours, s, grad)[0]
        w = expected.detach()
        theirs = w * (grad - (w * grad).sum(-1, keepdim=True))
        check_close(mine, theirs, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_far_scores_are_numbers(dtype):
    s = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [1e4, 1e4, -1e4]], dtype=dtype)[
        None, None
    ].requires_grad_()
    visible = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    expected = torch.tensor([[1, 0, 0], [1 / 3] * 3, [0.5, 0.5, 0]], dtype=dtype)[None, None]
    for built in (
        row_normalisers.masked_softmax(s, visible),
        *(entmax(s, visible, alpha) for alpha in ALPHAS),
    ):
        check_close(built, expected, rtol=1e-6)
        assert torch.autograd.grad(built.square().sum(), s)[0].isfinite().all()


@pytest.mark.parametrize("keys", [1, 16, 21])
def test_nan_inputs_give_nan(keys):
    s, visible = numbers(1, 2, 3, keys), torch.ones(1, 1, 1, keys, dtype=torch.bool)
    s[0, 0, 1, -1] = torch.nan
    for built in (
        row_normalisers.masked_softmax(s, visible),
        *(entmax(s, visible, alpha) for alpha in ALPHAS),
    ):
        assert built[0, 0, 1].isnan().all()
        assert built.isnan().sum() == keys
    assert (
        not row_normalisers.masked_softmax(s, visible.index_fill(3, torch.tensor(keys - 1), False))
        .isnan()
        .any()
    )


# --- sums of values by sparse weights --------------------------------------------------------------


def gather_formula(s: Tensor, recorded: Tensor, alpha: Tensor, v: Tensor) -> Tensor:
    """All weights, by the plain form of the same part with an alpha for each head, times all
    values.
    """
    weights = [plain_entmax(s[:, h : h + 1], recorded, alpha[h]) for h in range(s.shape[1])]
    return torch.cat(weights, 1) @ v[:, VALUE_HEADS[: s.shape[1]]]


def plain_entmax(s: Tensor, recorded: Tensor, alpha: Tensor) -> Tensor:
    """w = [(alpha - 1) s - tau]_+ ^ (1 / (alpha - 1)): tau by halving, and one Newton step for its
    gradient.
    """
    x = ((alpha - 1) * s).masked_fill(~recorded, -torch.inf)
    power, top = 1 / (alpha - 1), x.detach().amax(-1, keepdim=True)
    with torch.no_grad():
        low = (top - 1).nan_to_num(neginf=0.0)
        for n in range(1, 60):
            total = (x - low - 0.5**n).clamp(min=0).pow(power).sum(-1, keepdim=True)
            low = torch.where(total >= 1, low + 0.5**n, low)
    live = x > low
    r = torch.where(live, x - low, 1.0)
    over = torch.where(live, r**power, 0.0).sum(-1, keepdim=True) - 1
    fall = (power * torch.where(live, r ** (power - 1), 0.0)).sum(-1, keepdim=True)
    r = torch.where(live, r - over / fall.clamp(min=1e-9), 1.0)
    return torch.where(live & (r > 0), r**power, 0.0)


GATHER_SIZES = st.fixed_dictionaries(
    {
        "b": st.integers(1, 2),
        "h": st.integers(1, 4),
        "t": st.integers(0, 11),
        "s": st.integers(0, 70),
        "v": st.sampled_from([1, 5, 16, 63, 64, 65, 131]),
    }
)


@given(
    GATHER_SIZES,
    st.lists(st.sampled_from([1.05, 1.3, 1.5, 1.9, 2.0]), min_size=4, max_size=4),
    st.integers(0, 2),
)
def test_outputs_and_all_gradients(sizes, alphas, spread):
    b, h, t, keys, wide = (sizes[letter] for letter in "bhtsv")
    s, v = (
        (numbers(b, h, t, keys) * 3.0**spread).requires_grad_(),
        numbers(b, 2, keys, wide).requires_grad_(),
    )
    alpha = torch.tensor(alphas[:h], dtype=torch.float64).requires_grad_()
    sample = torch.rand(b, 1, t, keys) < 0.7
    ours, theirs = (
        row_normalisers.masked_entmax(s, sample, alpha, v, VALUE_HEADS[:h])[0],
        gather_formula(s, sample, alpha, v) if t * keys else None,
    )
    if theirs is None:
        assert torch.equal(ours, torch.zeros(b, h, t, wide, dtype=torch.float64))
        return
    check_close(ours, theirs, rtol=1e-8, atol=1e-9)
    grad = numbers(b, t, h, wide).transpose(1, 2)
    mine, expected = (torch.autograd.grad(built, (s, v, alpha), grad) for built in (ours, theirs))
    for one, other, size in zip(mine, expected, (1, 1, 1e3), strict=True):
        check_close(one, other, rtol=1e-6, atol=1e-8 * size)


def test_values_of_keys_without_weight_are_not_read():
    s, v = torch.tensor([[[[4.0, 2.4, 3.9, -5.0]]]], requires_grad=True), torch.ones(1, 1, 4, 3)
    v[0, 0, 1::2] = torch.nan
    v.requires_grad_()
    o = row_normalisers.masked_entmax(
        s, torch.ones(1, 1, 1, 4, dtype=torch.bool), torch.tensor([1.5]), v, [0]
    )[0]
    check_close(o, torch.ones(1, 1, 1, 3))
    of_scores, of_values = torch.autograd.grad(o.sum(), (s, v))
    assert of_scores.isfinite().all()
    assert (of_values[0, 0, 1::2] == 0).all()
    assert (of_values[0, 0, ::2] > 0).all()


@pytest.mark.parametrize("keys", [1, 16, 21])
def test_nan_reaches_every_output_that_depends_on_it(keys):
    s, v = numbers(1, 2, 3, keys), numbers(1, 2, keys, 5).requires_grad_()
    s[0, 0, 1, -1] = torch.nan
    s.requires_grad_()
    o = row_normalisers.masked_entmax(
        s, torch.ones(1, 1, 1, keys, dtype=torch.bool), s.new_full((2,), 1.5), v, [0, 1]
    )[0]
    assert o[0, 0, 1].isnan().all()
    assert o.isnan().sum() == 5
    of_scores, of_values = torch.autograd.grad(o.sum(), (s, v))
    assert of_scores[0, 0, 1].isnan().all()
    assert of_scores.isnan().sum() == keys
    assert of_values[0, 0].isnan().all()
    assert of_values[0, 1].isfinite().all()


def test_saved_bytes_grow_linearly_with_length():
    """Scores and weights of a block alone are held, and of them nothing when the next begins."""
    peaks = []
    for count in (512, 1024):
        layer = hw.Attention(
            base(normaliser=hw.parts.Entmax(kind="learned"), pattern="causal"), backend="chunked"
        )
        recorded: list[int] = []

        def keep(tensor: Tensor, tensors: list[int] = recorded) -> Tensor:
            tensors.append(tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(torch.randn(1, count, 10, requires_grad=True)).sum().backward()
        peaks.append(max(recorded))
    assert peaks[1] <= 2 * peaks[0]


GATHERS = "does not read the values of keys with zero weight"


@pytest.mark.parametrize(
    ("words", "dtype", "value"),
    [
        ({}, "float32", [GATHERS]),
        ({}, "bf16", [GATHERS]),
        ({"normaliser": hw.parts.Entmax(alpha=1.25)}, "bf16", []),
        ({"normaliser": hw.parts.Entmax(kind="learned")}, "float32", [GATHERS]),
        ({"normaliser": hw.parts.Entmax(kind="learned")}, "bf16", []),
        ({"modifiers": (hw.parts.TalkingHeads(),)}, "float32", [GATHERS]),
        ({"modifiers": (hw.parts.TalkingHeads(on="weights"),)}, "float32", []),
        ({"modifiers": (hw.parts.WeightDropout(0.1),)}, "float32", []),
        ({"modifiers": (hw.parts.ShawValues(3),)}, "float32", []),
        ({"modifiers": (hw.parts.Alibi(),)}, "float32", [GATHERS]),
        (
            {"normaliser": hw.parts.Softmax(), "modifiers": (hw.parts.TalkingHeads(),)},
            "float32",
            [],
        ),
    ],
    ids=str,
)
def test_why_reports_the_gathered_values(words, dtype, value):
    reasons = hw.why(base(**{"normaliser": hw.parts.Entmax(), **words}), dtype=dtype)
    assert reasons.call.notes["chunked"] == value
    assert reasons.call.notes["dense"] == []
    assert (GATHERS in " ".join(str(reasons).split())) == bool(value)
    assert (
        next(row["notes"] for row in reasons.data["backends"] if row["name"] == "chunked") == value
    )


# --- blocks that are run once more ----------------------------------------------------------------


def gradients(layer: hw.Attention, x: Tensor, z: Tensor | None = None) -> list[Tensor]:
    y = layer(x, source=z)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    return torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()])


SPARSE = [
    "window(40) | first(3)",
    "dilated(5, rate=3)",
    "window(9, after=4) | global((0, 77))",
    "edges(((3, 200), (250, 1)))",
]


@pytest.mark.parametrize("pattern", SPARSE)
def test_gradients_of_keys_read_by_several_blocks_are_added_up(pattern):
    spec = base(
        kv=2,
        vdim=5,
        pattern=pattern,
        modifiers=(
            hw.parts.Alibi(),
            hw.parts.TalkingHeads(),
            hw.parts.DynamicComposition(on="weights"),
        ),
    )
    layer, x = hw.Attention(spec).double(), numbers(2, 300, 10).requires_grad_()
    found = {}
    for layer.backend_name in ("chunked", "dense"):
        found[layer.backend_name] = gradients(layer, x)
    for ours, theirs in zip(found["chunked"], found["dense"], strict=True):
        check_close(ours, theirs, rtol=1e-8, atol=1e-9)


def test_only_inputs_that_require_grad_get_gradients():
    layer = hw.Attention(base(modifiers=(hw.parts.TalkingHeads(),)), backend="chunked").double()
    x = numbers(2, 300, 10)
    layer.project["k"].requires_grad_(requires_grad=False)
    layer(x).sum().backward()
    assert layer.project["k"].grad is None
    assert layer.project["v"].grad is not None
    layer.requires_grad_(requires_grad=False)
    assert not layer(x).requires_grad


def test_recomputation_repeats_the_dropout_mask():
    spec = base(modifiers=(hw.parts.TalkingHeads(), hw.parts.WeightDropout(0.5)))
    layer, x = hw.Attention(spec, backend="chunked").double().train(), numbers(2, 300, 10)
    v, step = layer.project["v"], numbers(*layer.project["v"].shape) * 1e-3

    def read() -> Tensor:
        torch.manual_seed(5)
        return layer(x).square().sum()

    built = read()
    torch.manual_seed(7)
    slope = (torch.autograd.grad(built, v)[0] * step).sum()
    after = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(3))
    with torch.no_grad():
        v += step
        high = read()
        v -= 2 * step
        low = read()
    check_close(slope, (high - low) / 2, rtol=1e-6)


def test_recomputation_repeats_autocast(monkeypatch):
    layer = hw.Attention(base(modifiers=(hw.parts.TalkingHeads(),), pattern="causal"))
    x = torch.randn(2, 300, 10, requires_grad=True)
    found, casts, form = {}, list[bool](), dense.attend_all_pairs
    monkeypatch.setattr(
        dense,
        "attend_all_pairs",
        lambda *args: casts.append(torch.is_autocast_enabled("cpu")) or form(*args),
    )
    for layer.backend_name in ("dense", "chunked"):
        casts.clear()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        found[layer.backend_name] = torch.autograd.grad(y.float().square().sum(), x)[0]
    blocks, rest = divmod(len(casts), 2)
    assert blocks > 1
    assert (rest, casts) == (0, [True] * 2 * blocks)
    assert not torch.equal(found["dense"], torch.zeros_like(x))
    check_close(
        found["chunked"], found["dense"], rtol=0, atol=0.05 * found["dense"].abs().max().item()
    )


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        *((None, {"preset": preset}) for preset in ("talking", "dcmha", "moh", "entmax")),
        *((backend, {"pattern": "causal"}) for backend in ("flash_cpu", "bf16_matmul")),
    ],
    ids=str,
)
def test_a_second_derivative_is_refused(backend, words):
    """At once: a second pass that is asked for x alone would go around what has
    none, and be wrong.
    """
    layer = hw.Attention(hw.design(model=16, heads=4, **words), backend=backend)
    x = torch.randn(1, 300, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*backend='dense'"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)


@pytest.mark.filterwarnings("ignore")  # of torch, that it loops over rows
@pytest.mark.parametrize(
    ("preset", "words"),
    [
        *((preset, {}) for preset in ("talking", "dcmha", "moh", "entmax")),
        *(("mha", {"pattern": pattern}) for pattern in ("window(20)", "causal")),
    ],
    ids=str,
)
def test_torch_func_transforms_use_plain_operations(preset, words):
    """Under torch.func a layer gives what dense gives, of values and of slopes
    along a direction.
    """
    spec = hw.design(preset=preset, model=16, heads=4, **words)
    layer, plain = hw.Attention(spec).double(), hw.Attention(spec, backend="dense").double()
    plain.load_state_dict(layer.state_dict())
    x, along = torch.randn(2, 3, 300, 16, dtype=torch.float64)
    with torch.no_grad():
        each = torch.vmap(lambda row: layer(row[None])[0])(x)
        assert torch.allclose(each, plain(x), rtol=1e-9, atol=1e-12)
        if preset in ("talking", "dcmha"):  # of others torch, or their closed form, refuses it
            assert torch.allclose(
                *(torch.func.jvp(f, (x,), (along,))[1] for f in (layer, plain)), rtol=1e-6
            )
    slope, expected = (
        torch.func.grad(lambda x, f=f: f(x).square().sum())(x) for f in (layer, plain)
    )
    assert torch.allclose(slope, expected, rtol=1e-8, atol=1e-10)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that an operation returns."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.nbytes = max(self.nbytes, leaf.numel() * leaf.itemsize)
        return result


def test_tensors_of_a_block_are_freed_before_the_next():
    """The largest that is held on the way back grows as the keys do, not as the pairs."""
    peaks = []
    for count in (512, 1024):
        layer = hw.Attention(
            base(modifiers=(hw.parts.TalkingHeads(),), pattern="causal"), backend="chunked"
        )
        y = layer(torch.randn(1, count, 10, requires_grad=True))
        with LargestTensor() as mode:
            y.sum().backward()
        peaks.append(mode.nbytes)
    assert peaks[1] <= 2 * peaks[0]


@pytest.mark.compile
@pytest.mark.parametrize(
    "words",
    [
        {"modifiers": (hw.parts.DynamicComposition(), hw.parts.DynamicComposition(on="weights"))},
        {"normaliser": hw.parts.Entmax()},
        {"normaliser": hw.parts.Entmax(kind="learned"), "modifiers": (hw.parts.TalkingHeads(),)},
    ],
    ids=["dynamic", "entmax", "learned"],
)
def test_kernels_stand_in_one_graph(words):
    layer = hw.Attention(
        hw.design(model=16, heads=4, pattern="causal", **words), backend="chunked"
    ).double()
    x = numbers(1, 300, 16).requires_grad_()
    torch._dynamo.reset()
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    check_close(y, layer(x))
    check_close(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(layer(x).sum(), x)[0])


def test_the_operations_pass_opcheck():
    """Fake tensors, gradients and strides of all of them, as torch checks them."""
    mixed = Mixed({"b": 2, "h": 4, "t": 3, "s": 19, "q": 2, "k": 1})
    a, *factors = mixed.tensors
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    found = torch.library.opcheck(
        mixing.mix_heads_by_factors, (a, mixed.own, mixed.each, factors), test_utils=checks
    )
    s, visible = numbers(2, 3, 5, 7).requires_grad_(), torch.ones(1, 1, 5, 7, dtype=torch.bool)
    found |= {
        f"softmax {k}": v
        for k, v in torch.library.opcheck(
            row_normalisers.masked_softmax, (s, visible), test_utils=checks
        ).items()
    }
    for tensor in ((None, []), (numbers(2, 2, 7, 5).requires_grad_(), [0, 1, 1])):
        arguments = (s, visible, alphas(s, 1.3).requires_grad_(), *tensor)
        more = torch.library.opcheck(row_normalisers.masked_entmax, arguments, test_utils=checks)
        assert {*found.values(), *more.values()} == {"SUCCESS"}
