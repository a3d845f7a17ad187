"""The listings of the five documents, run with one import changed: to `hw.attend`, or to a layer of
`hw.attention`.

Each listing is executed twice: from the text of the document, where it lies beside the repository,
and as the rewritten equal of `seeds`. What the changed import computes has to be what the listing
computes by itself.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from anchors import seeds

DOCUMENTS = Path(__file__).resolve().parents[3] / "shared" / "seeds"
SOURCES = [pytest.param("document", marks=pytest.mark.slow), "rewritten"]
BATCH, TOKENS, SOURCE, HEADS, DIM = 2, 7, 11, 3, 4
MODEL, WIDE = HEADS * DIM, 17


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def check_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def read_listing(document: str, start: str) -> str:
    """The code of a document from the line that begins so to the end of its block, without
    indentation.
    """
    paths = sorted(DOCUMENTS.glob(f"{document}_*.txt"))
    if not paths:
        pytest.skip(f"the text of document {document} is not in {DOCUMENTS}")
    lines = paths[0].read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.strip().startswith(start))
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    block = list[str]()
    for line in lines[first:]:
        if line.startswith("```") or (line.strip() and not line.startswith(indent)):
            break
        block.append(line)
    return textwrap.dedent("\n".join(block))


def execute(code: str, **names: Any) -> dict[str, Any]:
    """The names that a listing defines, given those that it imports."""
    namespace: dict[str, Any] = {"torch": torch, "nn": nn, "F": F} | names
    exec(code, namespace)
    return namespace


def clones(module: nn.Module, count: int) -> nn.ModuleList:
    return nn.ModuleList(copy.deepcopy(module) for _ in range(count))


def without_rows_that_see_nothing(batch: int, queries: int, keys: int) -> Tensor:
    mask = torch.rand(batch, queries, keys) < 0.5
    mask[..., 0] = True
    return mask


# --- 002: the listing of multi-head attention, whose function `attention` is imported -------------


def make_multi_headed(
    source: str, attention: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> type[nn.Module]:
    if source == "rewritten":
        monkeypatch.setattr(seeds, "attention", attention)
        return seeds.MultiHeadedAttention
    code = read_listing("002", "class MultiHeadedAttention") + "\n"
    code += textwrap.indent(read_listing("002", "def forward(self, query, key, value"), "    ")
    return execute(code, attention=attention, clones=clones)["MultiHeadedAttention"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("masked", ["none", "causal", "padding", "any"])
def test_multi_headed_attention_imports_attend(
    source: str, masked: str, monkeypatch: pytest.MonkeyPatch
):
    """`from headwise import attend as attention`."""
    with monkeypatch.context() as patch:
        theirs = seeds.scattered(
            make_multi_headed(source, seeds.attention, patch)(HEADS, MODEL)
        ).eval()
        x, z = numbers(BATCH, TOKENS, MODEL), numbers(BATCH, SOURCE, MODEL)
        z = x if masked == "causal" else z
        masks = {
            "none": None,
            "causal": torch.ones(1, TOKENS, TOKENS).tril(),
            "padding": (torch.arange(SOURCE) < torch.tensor([[5], [SOURCE]]))[:, None],
            "any": without_rows_that_see_nothing(BATCH, TOKENS, SOURCE),
        }
        expected = theirs(x, z, z, masks[masked])
    ours = make_multi_headed(source, hw.attend, monkeypatch)(HEADS, MODEL).double().eval()
    ours.load_state_dict(theirs.state_dict())
    check_close(ours(x, z, z, masks[masked]), expected)


@pytest.mark.parametrize("source", SOURCES)
def test_its_dropout_reaches_attend(source: str, monkeypatch: pytest.MonkeyPatch):
    """The listing hands over its module; with `need_weights`, its `attn` has
    the dropped weights.
    """
    recording = list[Tensor]()

    def attention(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        output, weights = hw.attend(*tensors, need_weights=True, **options)
        assert weights is not None
        recording.append(weights)
        return output, weights

    layer = make_multi_headed(source, attention, monkeypatch)(HEADS, MODEL, dropout=0.5)
    x = torch.randn(BATCH, 64, MODEL)
    layer.train()(x, x, x)
    layer.eval()(x, x, x)
    dropped = [float((weights == 0).double().mean()) for weights in recording]
    assert dropped == [pytest.approx(0.5, abs=0.03), 0.0]


# --- 002: encoder and decoder layers, whose attention is a layer of `hw.attention` -----------------------


def make_layer(source: str, name: str, sublayers: int, **modules: nn.Module) -> nn.Module:
    """A layer of a listing that has no constructor, with its sublayers."""
    if source == "rewritten":
        layer = getattr(seeds, name).__new__(getattr(seeds, name))
        nn.Module.__init__(layer)
    else:
        layer = execute(read_listing("002", f"class {name}"))[name]()
    for key, module in modules.items():
        setattr(layer, key, module)
    layer.sublayer = nn.ModuleList(seeds.SublayerConnection(MODEL) for _ in range(sublayers))
    return layer


def adopt_linears(theirs: nn.Module) -> hw.attention.MultiHeadAttention:
    """Our layer with the four linear maps of the listing."""
    layer = hw.attention.MultiHeadAttention(MODEL, HEADS).double()
    for name, linear in zip(("query", "key", "value", "output"), theirs.linears, strict=True):
        getattr(layer, name).load_state_dict(linear.state_dict())
    return layer


@pytest.mark.parametrize("source", SOURCES)
def test_encoder_and_decoder_layers_import_our_layer(source: str):
    """`from headwise.attention import MultiHeadAttention`; both are called as attention(query, key, value,
    mask).
    """
    x, memory = numbers(BATCH, TOKENS, MODEL), numbers(BATCH, SOURCE, MODEL)
    hidden = torch.arange(SOURCE) < torch.tensor([[6], [SOURCE]])
    later = torch.ones(1, TOKENS, TOKENS).tril()
    cases = (
        ("EncoderLayer", 2, ("self_attn",), (x, later)),
        ("DecoderLayer", 3, ("self_attn", "src_attn"), (x, memory, hidden[:, None], later)),
    )
    for name, sublayers, attentions, arguments in cases:
        modules = {key: seeds.MultiHeadedAttention(HEADS, MODEL) for key in attentions}
        layer = make_layer(
            source, name, sublayers, feed_forward=seeds.feed_forward(MODEL, WIDE), **modules
        )
        layer = seeds.scattered(layer)
        expected = layer(*arguments)
        for key in attentions:
            setattr(layer, key, adopt_linears(getattr(layer, key)))
        check_close(layer(*arguments), expected)


# --- 000, 001, 003, and Llama 3 of 002 ------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_three_linear_maps_are_those_of_our_layer(source: str, bias: bool):
    layer = nn.Module()
    if source == "rewritten":
        layer = seeds.Projections(MODEL, MODEL, qkv_bias=bias)
    else:
        layer.hidden_size, layer.all_head_size = MODEL, MODEL
        execute(
            read_listing("000", "self.query = nn.Linear"),
            self=layer,
            config=SimpleNamespace(qkv_bias=bias),
        )
    layer, ours, x = (
        layer.double(),
        hw.attention.MultiHeadAttention(MODEL, HEADS, bias=bias).double(),
        numbers(1, 5, MODEL),
    )
    missing, unexpected = ours.load_state_dict(layer.state_dict(), strict=False)
    assert {name.split(".")[0] for name in missing} == {"output"}
    assert unexpected == []
    q, k, v = (
        getattr(layer, side)(x).view(1, 5, HEADS, DIM).transpose(1, 2).double()
        for side in ("query", "key", "value")
    )
    ours.output = nn.Identity()
    check_close(ours(x, x, x), seeds.attention(q, k, v)[0].transpose(1, 2).flatten(2))


@pytest.mark.parametrize("source", SOURCES)
def test_the_class_on_four_axes_is_attend(source: str):
    names = vars(seeds) if source == "rewritten" else execute(read_listing("001", "import torch"))
    q, k, v = numbers(3, BATCH, HEADS, TOKENS, DIM)
    check_close(hw.attend(q, k, v)[0], names["ScaledDotProductAttention"](DIM)(q, k, v))


@pytest.mark.parametrize("source", SOURCES)
def test_the_function_on_three_axes_is_attend(source: str):
    """`from headwise import attend as scaled_dot_product_attention`, except where a query sees
    nothing.
    """
    names = vars(seeds) if source == "rewritten" else execute(read_listing("003", "import torch"))
    theirs, ours = names["scaled_dot_product_attention"], partial(hw.attend, need_weights=True)
    q, k, v = numbers(BATCH, TOKENS, 5), numbers(BATCH, SOURCE, 5), numbers(BATCH, SOURCE, DIM)
    mask = without_rows_that_see_nothing(BATCH, TOKENS, SOURCE)
    for arguments in ((q, k, v), (q, k, v, mask), (q, k, v, mask.long())):
        for one, other in zip(ours(*arguments), theirs(*arguments), strict=True):
            # the scale of the listing is float32
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    mask[0, 1] = False
    assert (ours(q, k, v, mask)[0][0, 1] == 0).all()
    torch.testing.assert_close(theirs(q, k, v, mask)[0][0, 1], v[0].mean(0))


class ParallelLinear(nn.Linear):
    """The parallel linear maps of the listing on one rank."""

    def __init__(self, inputs: int, outputs: int, bias: bool, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=bias)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kv", [1, 2, 6])
def test_the_weights_of_llama_are_those_of_our_layer(source: str, kv: int):
    if source == "rewritten":
        theirs = seeds.LlamaAttention(24, 6, kv, BATCH, TOKENS)
    else:
        one_rank = SimpleNamespace(get_model_parallel_world_size=lambda: 1)
        code = "from __future__ import annotations\n" + read_listing(
            "002", "class Attention(nn.Module)"
        )
        parallel = dict.fromkeys(("ColumnParallelLinear", "RowParallelLinear"), ParallelLinear)
        listing = execute(code, fs_init=one_rank, **parallel)["Attention"]
        theirs = listing(SimpleNamespace(dim=24, n_heads=6, n_kv_heads=kv))
        assert theirs.n_rep == 6 // kv
    ours = hw.Attention(hw.design(model=24, heads=6, kv=kv, pattern="causal()"))
    state = {
        name.removesuffix(".weight")[1:]: weight for name, weight in theirs.state_dict().items()
    }
    named = {
        f"output.{key}" if key == "o" else f"project.{key}": weight for key, weight in state.items()
    }
    assert ours.load_state_dict(named) == ([], [])
    assert sum(weight.numel() for weight in named.values()) == hw.costs.count_parameters(ours.spec)
