"""Activation memory: published formulas, plain modules under hooks, and every spec on its own
layer.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn

import headwise as hw
from headwise.costs import activations
from headwise.costs.training_memory import block_activation_memory, peak_activation_memory
from headwise.models import model_spec as bp
from support import layer_cases as cases
from support.saved_bytes import bytes_saved_by, layer_saved_bytes

BYTES = {torch.float32: 4, torch.bfloat16: 2}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def load(
    batch: int, tokens: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> hw.Workload:
    return hw.Workload(batch, tokens, NAMES[dtype], device)


# --- attention, written out in plain torch: the lines of the tables -------------------------------


class Plain(nn.Module):
    """One attention layer in a few lines: n heads of k and v channels, g of them of keys and
    values.
    """

    def __init__(self, how: str, d: int, heads: tuple[int, int, int, int]) -> None:
        super().__init__()
        n, g, k, v = heads
        self.how, self.heads = how, heads
        self.q, self.k, self.v = (nn.Linear(d, size, bias=False) for size in (n * k, g * k, g * v))
        self.o = nn.Linear(n * v, d, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
        n, g, _, v = self.heads
        b, s, _ = x.shape
        q = self.q(x).view(b, s, n, -1).transpose(1, 2)
        k, w = (f(x).view(b, s, g, -1).transpose(1, 2) for f in (self.k, self.v))
        if self.how == "flash":
            o = F.scaled_dot_product_attention(q, k, w, enable_gqa=n != g)
        elif self.how == "repeated":
            o = self.weights(
                q @ k.repeat_interleave(n // g, 1).mT, mask, dropout
            ) @ w.repeat_interleave(n // g, 1)
        else:
            rows = q.reshape(b, g, n // g * s, -1)
            o = (self.weights(rows @ k.mT, mask, dropout) @ w).view(b, n, s, v)
        return self.o(o.transpose(1, 2).reshape(b, s, -1))

    def weights(self, scores: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(mask, -torch.inf)
        return F.dropout((scores * self.heads[2] ** -0.5).softmax(-1), dropout)


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize(("n", "g"), [(4, 4), (6, 2), (5, 1)])
def test_plain_attention_saves_the_tabulated_bytes(dtype, n, g):
    b, s, d, k, v, each = 3, 7, 20, 4, 5, BYTES[dtype]
    x = torch.randn(b, s, d, dtype=dtype, requires_grad=True)
    mask = torch.ones(s, s, dtype=torch.bool).triu(1)

    def of(how: str, width: int = v, **more) -> int:
        plain = Plain(how, d, (n, g, k, width)).to(dtype)
        return bytes_saved_by(lambda: plain(x, **more), *plain.parameters())

    scores = b * n * s * s
    grouped = each * (b * s * d + b * n * s * k + b * g * s * (k + v) + scores + b * s * n * v)
    repeated = each * (b * s * d + b * n * (s * k + s * k + s * v) + scores + b * s * n * v)
    assert of("grouped") == grouped
    assert of("repeated") == repeated  # n heads of keys are stored: sharing saves nothing
    if g == n:
        assert of("repeated", mask=mask) == repeated + s * s  # once for all rows and heads
    # of the CPU a mask is as wide as a number
    assert of("repeated", dropout=0.5) == repeated + scores * (each + each)
    flash = each * (b * s * d + b * n * s * k + b * g * s * 2 * k + b * s * n * k) + 4 * b * n * s
    assert of("flash", width=k) == flash
    spec = hw.design(model=d, heads=n, kv=g, dim=k)
    assert hw.costs.layer_activation_memory(spec, load(b, s, dtype), "sdpa").total == flash
    assert hw.costs.layer_activation_memory(spec, load(b, s, dtype), "flash-cuda").total == flash


@given(
    sizes=st.tuples(
        st.integers(1, 4),
        st.integers(1, 30),
        st.integers(1, 3),
        st.integers(1, 3),
        st.integers(1, 6),
    ),
    pattern=st.sampled_from(["full", "causal", "window(4)"]),
    dtype=st.sampled_from(list(BYTES)),
)
def test_any_small_layer_saves_the_bytes_of_its_formula(sizes, pattern, dtype):
    batch, tokens, kv, groups, dim = sizes
    spec = hw.design(model=11, heads=kv * groups, kv=kv, dim=dim, pattern=pattern)
    x = torch.randn(batch, tokens, 11, dtype=dtype, requires_grad=True)
    # sdpa leaves single queries of shared keys to another backend
    in_rows = tokens == 1 and groups > 1
    for profile in ("dense",) if in_rows else ("dense", "sdpa"):
        layer = hw.Attention(spec, backend=profile).to(dtype)
        assert hw.costs.layer_activation_memory(
            spec, load(batch, tokens, dtype), profile
        ).total == layer_saved_bytes(layer, x)


@pytest.mark.parametrize("name", cases.EXAMPLES)
def test_every_part_saves_the_bytes_of_its_formula(name):
    spec, dtype = cases.EXAMPLES[name], torch.bfloat16
    x, z = (t if t is None else t.requires_grad_() for t in cases.tensors(spec, dtype))
    source = None if z is None else z.shape[1]
    for profile in ["dense"] + ["sdpa"] * (
        "sdpa" in cases.supporting_backends(spec, dtype=dtype, training=True, grad_enabled=True)
    ):
        bill = hw.costs.layer_activation_memory(
            spec, load(*x.shape[:2], dtype), profile, source=source
        )
        assert bill.total == layer_saved_bytes(
            hw.Attention(spec, backend=profile).to(dtype), x, z
        ), profile


def test_query_blocks_save_the_inputs_of_the_core():
    b, s, spec = 2, 150, hw.design(preset="entmax", model=6, heads=2, dim=3, modifiers=())
    memory = hw.costs.layer_activation_memory(spec, load(b, s), "chunked")
    assert memory.total == layer_saved_bytes(
        hw.Attention(spec, backend="chunked"), torch.randn(b, s, 6, requires_grad=True)
    )
    assert hw.costs.layer_activation_memory(
        spec, load(b, 128), "chunked"
    ) == hw.costs.layer_activation_memory(spec, load(b, 128), "dense")  # one block


def test_weight_dropout_keeps_a_mask_of_the_cpu_and_one_byte_elsewhere():
    spec = hw.design(model=8, heads=2, modifiers=(hw.parts.WeightDropout(0.5),))
    without, b, s = hw.design(model=8, heads=2), 3, 7
    layer = hw.Attention(spec, backend="dense").train()
    cpu = hw.costs.layer_activation_memory(spec, load(b, s), "dense")
    assert cpu.total == layer_saved_bytes(layer, torch.randn(b, s, 8, requires_grad=True))
    assert (
        cpu.total - hw.costs.layer_activation_memory(without, load(b, s), "dense").total
        == b * 2 * s * s * 4
    )
    with pytest.raises(
        hw.SpecError,
        match=r"needs dropout on weights, which only chunked and dense apply.*profile='dense'",
    ):
        hw.costs.layer_activation_memory(spec, load(b, s), "sdpa")


# --- blocks and models, held to plain modules -----------------------------------------------------


class Gpt(nn.Module):
    def __init__(self, h: int, a: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.one, self.has_source, self.dropout = nn.LayerNorm(h), nn.LayerNorm(h), dropout
        self.core = Plain("flash", h, (a, a, h // a, h // a))
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.core(self.one(x)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.has_source(x)))), self.dropout)


@pytest.mark.parametrize("dtype", BYTES)
def test_a_gpt_block(dtype):
    b, s, h, a, each = 3, 7, 24, 4, BYTES[dtype]
    formula = each * 16 * b * s * h + 4 * b * a * s + 4 * b * s * each
    block = bp.BlockSpec(hw.design(model=h, heads=a), feed=bp.FeedForwardSpec(4 * h, bias="ud"))
    plain, x = Gpt(h, a).to(dtype), torch.randn(b, s, h, dtype=dtype, requires_grad=True)
    assert bytes_saved_by(lambda: plain(x), *plain.parameters()) == formula
    at, way = load(b, s, dtype), hw.costs.ActivationSettings("sdpa")
    assert block_activation_memory(block, h, at, way).total == formula
    dense = each * (16 * b * s * h + b * a * s * s) + 4 * b * s * each
    more = 4 * b * a * s * s + 2 * s * s  # in single precision as well, and the masks: see above
    assert (
        block_activation_memory(block, h, at, hw.costs.ActivationSettings("dense")).total
        == dense + more
    )
    dropped = Gpt(h, a, 0.5).to(dtype)
    two = bytes_saved_by(lambda: dropped(x), *dropped.parameters()) - formula
    assert two == 2 * b * s * h * each  # of the CPU masks are as wide as numbers
    inside = 4 * b * s * h * each  # what a feed-forward of ours drops inside besides
    assert (
        block_activation_memory(
            block, h, at, hw.costs.ActivationSettings("sdpa", dropout=0.5)
        ).total
        == formula + two + inside
    )


def test_the_two_published_constants_fall_out():
    """Half precision, masks of one byte: 16 elements of 2 bytes and two masks are 34 b s h."""
    b, s, h, a = 3, 7, 24, 4
    block = bp.BlockSpec(hw.design(model=h, heads=a), feed=bp.FeedForwardSpec(4 * h, bias="ud"))
    memory = block_activation_memory(
        block, h, load(b, s, torch.bfloat16), hw.costs.ActivationSettings("flash-cuda", dropout=0.1)
    )
    # row sums; statistics; the mask inside, which they leave out
    small = 4 * b * a * s + 4 * b * s * 4 + 4 * b * s * h
    assert memory.total == 34 * b * s * h + small


class Llama(nn.Module):
    """Without rotary turns, whose cosines a formula need not know."""

    def __init__(self, d: int, heads: tuple[int, int, int, int], f: int) -> None:
        super().__init__()
        self.one, self.has_source = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.core = Plain("flash", d, heads)
        self.gate, self.up, self.down = (
            nn.Linear(*io, bias=False) for io in ((d, f), (d, f), (f, d))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.core(self.one(x))
        z = self.has_source(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))


@pytest.mark.parametrize("dtype", BYTES)
def test_a_llama_block(dtype):
    b, s, d, n, g, k, f, each = 3, 7, 24, 6, 2, 4, 50, BYTES[dtype]
    core = b * n * s * k + 2 * b * g * s * k
    formula = 2 * (8 * b * s * d + 4 * b * s) + each * (
        2 * b * s * d + core + b * s * n * k + 4 * b * s * f
    )
    formula += 4 * b * n * s
    plain, x = (
        Llama(d, (n, g, k, k), f).to(dtype),
        torch.randn(b, s, d, dtype=dtype, requires_grad=True),
    )
    assert bytes_saved_by(lambda: plain(x), *plain.parameters()) == formula
    spec = hw.design(preset="gqa", model=d, heads=n, kv=g, dim=k)
    feed = bp.FeedForwardSpec(f, "silu", form="gated")
    memory = block_activation_memory(
        bp.BlockSpec(spec, feed=feed, norm=bp.NormSpec("rms")),
        d,
        load(b, s, dtype),
        hw.costs.ActivationSettings("sdpa"),
    )
    turns = sum(term.value for term in memory.terms if "rotary" in term.name)
    assert turns == 8 * s * k  # a cosine and a sine of every channel; rounded, once for either side
    assert memory.total == formula + turns


def test_the_tail_of_a_language_model():
    b, s, h, vocab = 3, 7, 24, 31
    norm, head = nn.LayerNorm(h), nn.Linear(h, vocab)
    x, labels = torch.randn(b, s, h, requires_grad=True), torch.randint(0, vocab, (b * s,))
    measured = bytes_saved_by(
        lambda: F.cross_entropy(head(norm(x)).flatten(0, 1), labels),
        *norm.parameters(),
        *head.parameters(),
        labels,
    )
    assert measured == 4 * 2 * b * s * h + 2 * b * s * 4 + 4 * b * s * vocab + 4
    stack = bp.StackSpec.from_blocks(
        "decoder", h, [], embedding=bp.EmbeddingSpec(vocab), norm=bp.NormSpec()
    )
    model = bp.ModelSpec("tail", "decoder", (stack,), (bp.OutputHeadSpec("tokens", vocab),))
    assert hw.costs.activation_memory(model, load(b, s)).total == measured
    # the loss reads the first head alone
    unread = bp.OutputHeadSpec("classes", 5, "mean")
    two = replace(model, heads=(*model.heads, unread))
    assert hw.costs.activation_memory(two, load(b, s)).total == measured


FORMS = {
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu6": F.relu6,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "linear": lambda x: x,
}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("form", ["plain", "gated"])
@pytest.mark.parametrize("name", FORMS)
def test_feed_forwards_by_activation(name, form, dropout):
    b, s, d, f, act = 3, 7, 10, 26, FORMS[name]
    up, gate, down, x = (
        torch.randn(*size, requires_grad=True) for size in ((f, d), (f, d), (d, f), (b, s, d))
    )

    def run() -> Tensor:
        inner = act(x @ gate.T) * (x @ up.T) if form == "gated" else act(x @ up.T)
        return F.dropout(inner, dropout, True) @ down.T

    at = activations.ActivationContext.from_workload(load(b, s), s, "sdpa", dropout)
    result = sum(
        size
        for _, size in activations.feed_forward_bytes(
            bp.FeedForwardSpec(f, name, form), at.num_tokens, at
        )
    )
    assert 4 * b * s * d + result == bytes_saved_by(run, up, gate, down)


def test_bounded_gates_and_parallel_blocks():
    b, s, d, f = 3, 7, 8, 26
    up, gate, down = (torch.randn(*size, requires_grad=True) for size in ((f, d), (f, d), (d, f)))
    x = torch.randn(b, s, d, requires_grad=True)

    def run() -> Tensor:
        g, u = (x @ gate.T).clamp(max=7.0), (x @ up.T).clamp(-7.0, 7.0)
        return (g * torch.sigmoid(1.702 * g) * (u + 1)) @ down.T

    at = activations.ActivationContext.from_workload(load(b, s), s, "sdpa", 0.0)
    feed = bp.FeedForwardSpec(f, "bounded_silu(1.702, 7.0)", "gated")
    assert 4 * b * s * d + sum(
        size for _, size in activations.feed_forward_bytes(feed, at.num_tokens, at)
    ) == bytes_saved_by(run, up, gate, down)
    one, two = (
        bp.BlockSpec(hw.design(model=d, heads=2), feed=feed, placement=place)
        for place in ("parallel", "pre")
    )
    shared = (
        block_activation_memory(two, d, load(b, s)).total
        - block_activation_memory(one, d, load(b, s)).total
    )
    assert shared == 4 * 2 * b * s * d + 2 * 4 * b * s  # one norm, whose output both read


# --- checkpoints, large loads, refusals -----------------------------------------------------------


def test_checkpoints_of_a_whole_model():
    gpt = hw.families.read_model_spec(
        {"model_type": "gpt2", "n_layer": 5, "n_embd": 24, "n_head": 4, "vocab_size": 31}
    )
    at, way = load(3, 7), hw.costs.ActivationSettings("sdpa", "block")
    every, stored = (
        hw.costs.activation_memory(gpt, at, hw.costs.ActivationSettings("sdpa")).total,
        hw.costs.activation_memory(gpt, at, way).total,
    )
    block = block_activation_memory(
        gpt.stacks[0].layers[0], 24, at, hw.costs.ActivationSettings("sdpa")
    ).total
    assert every - stored == 5 * (block - 4 * 3 * 7 * 24)
    assert peak_activation_memory(gpt, at, way) == stored + block - 4 * 3 * 7 * 24


def test_long_workloads_stay_exact():
    batch, tokens = 2**10, 2**20
    spec = hw.design(model=512, heads=8)
    memory = hw.costs.layer_activation_memory(spec, hw.Workload(batch, tokens, "bf16"), "sdpa")
    assert memory.total == 2 * 5 * batch * tokens * 512 + 4 * batch * 8 * tokens
    window = hw.design(model=512, heads=8, pattern="window(5)")
    masked = hw.costs.layer_activation_memory(window, hw.Workload(batch, tokens, "bf16"), "sdpa")
    assert masked.total - memory.total == 2 * tokens**2


def test_a_load_at_the_edge_of_a_pattern_or_of_a_table():
    for tokens in (4, 5, 6):  # a window of as many tokens is a triangle, which needs no mask
        spec, x = (
            hw.design(model=8, heads=2, pattern="window(5)"),
            torch.randn(1, tokens, 8, requires_grad=True),
        )
        layer = hw.Attention(spec, backend="sdpa")
        assert hw.costs.layer_activation_memory(
            spec, load(1, tokens), "sdpa"
        ).total == layer_saved_bytes(layer, x)
    short = hw.design(model=8, heads=2, modifiers=(hw.parts.LearnedScores(length=1),))
    result = layer_saved_bytes(
        hw.Attention(short, backend="dense"), torch.randn(3, 1, 8, requires_grad=True)
    )
    assert hw.costs.layer_activation_memory(short, load(3, 1), "dense").total == result
    with pytest.raises(ValueError, match="knows no position 1"):
        hw.costs.layer_activation_memory(short, load(3, 2), "dense")
