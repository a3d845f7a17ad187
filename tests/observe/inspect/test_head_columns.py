"""Head k is head k: ablation equals zero columns of the output projection, or is refused with the
reason.

The columns are set to zero in plain torch, by names and sizes of each library. The models have code
between heads and projection that is not linear, several projections, or a projection that reads
more than the heads.
"""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from support.transformers_models import LLAMA, transformers

x_transformers = pytest.importorskip("x_transformers", reason="x-transformers is not installed")
WIDTH, HEADS, DIM = 24, 3, 8
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])


class JointAttention(nn.Module):
    """Attention of diffusers for SD3 and Flux: text and image attend to all tokens, and have own
    projections.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        names = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
        for name in names:
            self.add_module(name, nn.Linear(WIDTH, HEADS * DIM))
        self.to_out = nn.ModuleList([nn.Linear(HEADS * DIM, WIDTH), nn.Dropout(0.0)])

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        pairs = (
            (self.to_q, self.add_q_proj),
            (self.to_k, self.add_k_proj),
            (self.to_v, self.add_v_proj),
        )
        q, k, v = (
            torch.cat([of_text(text), of_image(image)], 1)
            .unflatten(-1, (HEADS, DIM))
            .transpose(1, 2)
            for of_image, of_text in pairs
        )
        z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        z_text, z_image = z.split([text.shape[1], image.shape[1]], 1)
        return self.to_out[1](self.to_out[0](z_image)), self.to_add_out(z_text)


class ParallelAttention(nn.Module):
    """Attention of Flux's single blocks, which has no output projection of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, HEADS * DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class JointModel(nn.Module):
    """A block with joint attention, and one with attention and feed-forward layer in parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.joint, self.single = JointAttention(), ParallelAttention()
        self.proj_mlp, self.proj_out = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(HEADS * DIM + 2 * WIDTH, WIDTH),
        )

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        y_image, y_text = self.joint(image, text)
        x = torch.cat([text + y_text, image + y_image], 1)
        return x + self.proj_out(torch.cat([self.single(x), F.gelu(self.proj_mlp(x))], 2))


def build_transformers(name: str, **changes: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**(LLAMA | changes))
    return getattr(transformers, f"{name}Model")._from_config(config, attn_implementation="eager")


CONVBERT = {"conv_kernel_size": 3, "embedding_size": 32, "num_attention_heads": 4, "head_ratio": 2}


class Case(NamedTuple):
    """A model, its inputs, its output projections with the width of their heads, and why it needs
    an example.
    """

    build: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    projections: Sequence[Sequence[str]]  # of each site
    width: int
    reason: str = ""


def x_transformer(**options: Any) -> Callable[[], nn.Module]:
    return lambda: x_transformers.Decoder(
        dim=WIDTH, depth=2, heads=HEADS, attn_dim_head=DIM, **options
    )


SITES_OF_X = [["layers.0.1.to_out"], ["layers.2.1.to_out"]]
SITES_OF_LLAMA = [["layers.0.self_attn.o_proj"], ["layers.1.self_attn.o_proj"]]
HIDDEN = (torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(1)),)
IMAGE_AND_TEXT = tuple(
    torch.randn(2, n, WIDTH, generator=torch.Generator().manual_seed(n)) for n in (5, 4)
)
CASES = {
    "x-transformers": Case(x_transformer(), HIDDEN, SITES_OF_X, DIM),
    "laser": Case(x_transformer(attn_laser=True), HIDDEN, SITES_OF_X, DIM),
    "orthogonalised": Case(
        x_transformer(attn_orthog_projected_values=True), HIDDEN, SITES_OF_X, DIM
    ),
    "gated values": Case(x_transformer(attn_gate_values=True), HIDDEN, SITES_OF_X, DIM),
    "bitnet": Case(lambda: build_transformers("BitNet"), (IDS,), SITES_OF_LLAMA, 8),
    "convbert": Case(
        lambda: build_transformers("ConvBert", **CONVBERT),
        (IDS,),
        [[f"encoder.layer.{n}.attention.output.dense"] for n in range(2)],
        8,
        r"output\.dense reads 32 channels, which are not 2 heads of 8; hw\.sites\(model, example\)",
    ),
    "joint": Case(
        JointModel,
        IMAGE_AND_TEXT,
        [["joint.to_out.0", "joint.to_add_out"], ["proj_out"]],
        DIM,
        r"several output projections \(to_out\.0, to_add_out\); hw\.sites\(model, example\)",
    ),
}


def zero_columns(model: nn.Module, projections: Sequence[str], width: int, head: int) -> nn.Module:
    """A copy with zeros in the columns of one head of these projections."""
    other = copy.deepcopy(model)
    for path in projections:
        other.get_submodule(path).weight[:, head * width : (head + 1) * width] = 0
    return other


def first_output(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


@pytest.mark.parametrize("example", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_ablation_equals_zero_columns(name: str, example: bool):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(3)
    found = hw.sites(model, case.inputs) if example else hw.sites(model)
    assert len(found) == len(case.projections)
    if case.reason and not example:
        assert not any(site.observe.possible for site in found)
        with pytest.raises(ValueError, match=case.reason), hw.ablate(model, [(found[0].name, 0)]):
            pass
        return
    whole = first_output(model(*case.inputs))
    for site, projections in zip(found, case.projections, strict=True):
        for head in range(site.heads):
            expected = first_output(
                zero_columns(model, projections, case.width, head)(*case.inputs)
            )
            with hw.ablate(model, [(site.name, head)]):
                ablated = first_output(model(*case.inputs))
            assert (ablated - expected).abs().max() <= 1e-5 * expected.abs().max(), (
                site.name,
                head,
            )
            assert (ablated - whole).abs().max() > 1e-4 * whole.abs().max()
    assert torch.equal(first_output(model(*case.inputs)), whole)


@torch.no_grad()
def test_heads_that_are_joined_from_several_calls_are_refused_until_they_are_declared():
    torch.manual_seed(0)
    model = build_transformers("DiffLlama", head_dim=8, attention_dropout=0.0).eval()
    reason = r"calls the attention function 2 times .* hw\.declare"
    with pytest.raises(ValueError, match=reason), hw.ablate(model, [(0, 0)]):
        pass
    with pytest.raises(ValueError, match=reason):
        hw.trace(model, IDS)
    for layer in model.layers:
        hw.declare(layer.self_attn, heads=2, output="o_proj")
    assert [(site.heads, site.dim) for site in hw.sites(model)] == [(2, 16), (2, 16)]
    expected = first_output(zero_columns(model, ["layers.1.self_attn.o_proj"], 16, 1)(IDS))
    with hw.ablate(model, [(1, 1)]):
        assert torch.allclose(first_output(model(IDS)), expected, atol=1e-5)


class TwoMaps(nn.Module):
    """Attention that calls the interface in a loop: for two packed sequences, or twice for the same
    queries.
    """

    def __init__(self, is_packed: bool) -> None:
        super().__init__()
        self.is_packed = is_packed
        self.config, self.num_heads, self.head_dim = transformers.LlamaConfig(), HEADS, DIM
        self.qkv, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        attention = transformers.AttentionInterface().get_interface("sdpa", None)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        outputs = list[Tensor]()
        if self.is_packed:  # several sequences in one row, as in vision towers
            for part in zip(*(y.split(x.shape[1] // 2, 2) for y in (q, k, v)), strict=True):
                outputs.append(attention(self, *part, None)[0])
            return self.o_proj(torch.cat(outputs, 1).flatten(2))
        for values in (v, -v / 2):
            outputs.append(attention(self, q, k, values, None)[0])
        return self.o_proj(sum(outputs).flatten(2))


@torch.no_grad()
def test_a_trace_tells_packed_sequences_from_several_maps_of_the_same_queries():
    torch.manual_seed(0)
    x = torch.randn(1, 6, WIDTH)
    (layer,) = hw.trace(TwoMaps(is_packed=True).eval(), x).layers
    assert [call.queries for call in layer.calls] == [(0, 3), (3, 6)]
    with pytest.raises(ValueError, match="several times for the same queries"):
        hw.trace(TwoMaps(is_packed=False).eval(), x)


@torch.no_grad()
def test_an_example_with_a_cache_is_run_twice_without_changing_it():
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1) | {
        "d_model": 32,
        "attention_window": [4],
    }
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    torch.manual_seed(0)
    model = transformers.LEDModel(
        transformers.LEDConfig(vocab_size=67, max_encoder_position_embeddings=64, **sizes)
    )
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
    found = hw.sites(model.eval(), inputs)
    assert [site.ablate.possible for site in found] == [True] * 3
    expected = zero_columns(model, ["decoder.layers.0.self_attn.out_proj"], 8, 2)(**inputs)
    with hw.ablate(model, [("decoder.0.attention", 2)]):
        assert torch.allclose(model(**inputs)[0], expected[0], atol=1e-5)


@torch.no_grad()
def test_the_coverage_check_finds_a_wrong_head(monkeypatch: pytest.MonkeyPatch):
    """`tools/coverage_table.py` finds projections and columns on its own, so it sees an ablation of
    the next head.
    """
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    tool = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "coverage_table.py"))
    assert tool["check_family"]("vit").ablated == "yes"
    ablate = hw.ablate
    monkeypatch.setattr(
        hw,
        "ablate",
        lambda model, heads: ablate(model, [(site, (head + 1) % 4) for site, head in heads]),
    )
    row = tool["check_family"]("vit")
    assert (row.ablated, row.reason[:32]) == ("no", "ablation and zero columns differ")
