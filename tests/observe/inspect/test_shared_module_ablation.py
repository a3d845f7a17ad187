"""Ablation at single depths of a module that serves several depths, against a copy without shared
layers.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from support.transformers_models import WIDE, WORDS, run_model, transformers

ALBERT = {
    "hidden_size": WIDE,
    "embedding_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
}
# layers, groups, layers in a group: of five layers, one group has three.
SHAPES = {
    "one": (3, 1, 1),
    "groups": (4, 2, 1),
    "inner": (2, 1, 2),
    "odd": (5, 2, 1),
    "all": (3, 3, 2),
}
IDS = {"input_ids": torch.randint(3, WORDS, (2, 7), generator=torch.Generator().manual_seed(1))}


def albert(shape: str, kind: str = "AlbertModel") -> nn.Module:
    """A small ALBERT with weights large enough for attention to be uneven."""
    layers, groups, inner = SHAPES[shape]
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        **ALBERT, num_hidden_layers=layers, num_hidden_groups=groups, inner_group_num=inner
    )
    model = getattr(transformers, kind)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def with_own_groups(model: nn.Module) -> nn.Module:
    """A copy in which every run of a group has a group of its own."""
    other = copy.deepcopy(model)
    layers, groups = other.config.num_hidden_layers, other.config.num_hidden_groups
    own = [other.encoder.albert_layer_groups[int(run / (layers / groups))] for run in range(layers)]
    other.config.num_hidden_groups = layers  # which every layer keeps
    other.encoder.albert_layer_groups = nn.ModuleList(copy.deepcopy(group) for group in own)
    return other.eval()


def attentions(model: nn.Module) -> list[nn.Module]:
    """In the order in which they run."""
    return [
        layer.attention
        for group in model.encoder.albert_layer_groups
        for layer in group.albert_layers
    ]


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_ablation_at_one_depth(shape: str):
    model = albert(shape)
    layers, _, inner = SHAPES[shape]
    sites = hw.sites(model)
    assert [site.name for site in sorted(sites, key=lambda site: site.layer)] == [
        f"encoder.{depth}.attention" for depth in range(layers * inner)
    ]
    whole = run_model(model, IDS)
    assert torch.allclose(run_model(with_own_groups(model), IDS), whole, atol=1e-5)
    for depth in range(layers * inner):
        other = with_own_groups(model)
        attentions(other)[depth].dense.weight[:, 8:16] = 0
        with hw.ablate(model, [(depth, 1)]):
            quiet = run_model(model, IDS)
            assert torch.equal(run_model(model, IDS), quiet)  # every forward counts anew
        assert torch.allclose(quiet, run_model(other, IDS), atol=1e-5)
        assert not torch.allclose(quiet, whole, atol=1e-3)
    assert torch.equal(run_model(model, IDS), whole)


@torch.no_grad()
def test_several_depths_at_once_and_inside_each_other():
    model = albert("odd")
    other = with_own_groups(model)
    for depth, head in ((0, 1), (2, 3), (4, 0)):
        attentions(other)[depth].dense.weight[:, 8 * head : 8 * head + 8] = 0
    with hw.ablate(model, [(0, 1), (4, 0)]), hw.ablate(model, [(2, 3)]):
        assert torch.allclose(run_model(model, IDS), run_model(other, IDS), atol=1e-5)


@torch.no_grad()
def test_means_of_one_depth():
    model = albert("one")
    means = hw.head_means(model, [IDS], [(1, 2), (2, 2)])
    other = with_own_groups(model)
    theirs = hw.head_means(other, [IDS], [(1, 2), (2, 2)])
    assert list(means) == list(theirs)
    for head, mean in means.items():
        assert torch.allclose(mean, theirs[head], atol=1e-6)
    assert not torch.allclose(*means.values(), atol=1e-3)
    with hw.patch(model, means), hw.patch(other, theirs):
        assert torch.allclose(run_model(model, IDS), run_model(other, IDS), atol=1e-5)


@torch.no_grad()
def test_depths_are_counted_from_zero_after_a_failed_forward():
    model = albert("one", "AlbertForMaskedLM")
    with hw.ablate(model, [(1, 2)]):
        quiet = model(**IDS).logits
        with pytest.raises(RuntimeError, match="on purpose"), broken(model):
            model(**IDS)
        assert torch.equal(model(**IDS).logits, quiet)
        assert torch.equal(
            model.albert(**IDS).last_hidden_state, model.albert(**IDS).last_hidden_state
        )


def broken(model: nn.Module):
    """A hook that stops a forward behind the first depth."""

    def stop(*_: object) -> None:
        raise RuntimeError("on purpose")

    return model.albert.encoder.albert_layer_groups[0].register_forward_hook(stop)


@torch.no_grad()
def test_a_part_of_the_depths_is_refused():
    model = albert("one")
    group = model.encoder.albert_layer_groups[0]
    with (
        pytest.raises(ValueError, match="a module of 3 depths, but ran 1 times"),
        hw.ablate(model, [(1, 2)]),
    ):
        group(torch.randn(1, 3, WIDE))
    with pytest.raises(ValueError, match="called outside a forward"), hw.ablate(model, [(1, 2)]):
        group.albert_layers[0].attention.forward(torch.randn(1, 3, WIDE))


@torch.no_grad()
def test_a_trace_keeps_every_depth():
    model = albert("odd")
    keep = hw.trace(model, IDS)
    own = model(**IDS, output_attentions=True).attentions
    assert len(own) == len(keep.layers) == 5
    for depth in range(5):
        assert torch.allclose(
            torch.from_numpy(keep.head_weights(depth, 3)), own[depth][0, 3], atol=1e-5
        )


class Attention(nn.Module):
    """Attention of one map for q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 3
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Again(nn.Module):
    """One layer, run three times, and nothing says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Attention()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x)
        return x


@torch.no_grad()
def test_unknown_depths_are_refused():
    model, x = Again(), torch.randn(2, 5, 12)
    with (
        pytest.raises(ValueError, match="runs more than 1 times in one forward call"),
        hw.ablate(model, [(0, 1)]),
    ):
        model(x)
    with hw.ablate(model.layer, [(0, 1)]):  # all of them are meant
        quiet = model(x)
    model.layer.proj.weight[:, 4:8] = 0
    assert torch.allclose(quiet, model(x), atol=1e-6)


@pytest.mark.parametrize("own", [False, True], ids=["theirs", "ours"])
@torch.no_grad()
def test_one_module_in_two_places(own: bool):
    layer = hw.Attention(hw.design(model=12, heads=3)).eval() if own else Attention()
    model, x = nn.Sequential(layer, nn.LayerNorm(12), layer), torch.randn(2, 5, 12)
    first, second = hw.sites(model)
    assert (first.same_as, second.same_as) == (None, first.name)
    other = copy.deepcopy(model)
    other[2] = copy.deepcopy(other[2])
    weight = other[2].weights["output"].o if own else other[2].proj.weight
    weight[:, 4:8] = 0
    with hw.ablate(model, [(second.name, 1)]):
        assert torch.allclose(model(x), other(x), atol=1e-6)
