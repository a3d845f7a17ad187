"""Attention modules found by their operations, checked against their own weights, or refused with
the reason.
"""

from __future__ import annotations

import copy
import json
from threading import Thread

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise import cli
from support.site_recording import record_sites
from support.third_party_attentions import (
    DIM,
    HEADS,
    WIDE,
    AttentionWithCore,
    BatchedHeads,
    GroupedQueryAttention,
    LoRALinear,
    NanoGPTBlock,
    NestedAttention,
    TalkingHeads,
    TimmAttention,
    TwoAttentions,
)
from support.transformers_models import FALLBACK, ZOO, run_model, transformers

FOUND = {
    "timm fused": (lambda: TimmAttention(True), "full()", "proj"),
    "timm": (lambda: TimmAttention(False), "full()", "proj"),
    "nanoGPT fused": (lambda: NanoGPTBlock(True), "causal()", "c_proj"),
    "nanoGPT": (lambda: NanoGPTBlock(False), "causal()", "c_proj"),
    "tutorial": (AttentionWithCore, "full()", "maps.3"),
}
X = torch.randn(2, 5, WIDE, generator=torch.Generator().manual_seed(3))


def blocks(make) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(make() for _ in range(2))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def spelt_out(layer: nn.Module, x: Tensor, causal: bool) -> Tensor:
    """Weights [B, H, T, S] by the definition, in float64, one pair at a time."""
    layer, x = copy.deepcopy(layer).double(), x.double()
    if isinstance(layer, AttentionWithCore):
        q, k = (one(x).unflatten(-1, (HEADS, DIM)) for one in layer.maps[:2])
    else:
        one = layer.qkv if isinstance(layer, TimmAttention) else layer.c_attn
        q, k, _ = one(x).unflatten(-1, (3, HEADS, DIM)).unbind(2)
    if isinstance(layer, TimmAttention):
        q, k = layer.q_norm(q), layer.q_norm(k)
    batch, length = x.shape[:2]
    weights = x.new_zeros(batch, HEADS, length, length)
    for b in range(batch):
        for h in range(HEADS):
            for t in range(length):
                reads = range(t + 1 if causal else length)
                scores = torch.stack([(q[b, t, h] * k[b, s, h]).sum() / DIM**0.5 for s in reads])
                weights[b, h, t, list(reads)] = scores.exp() / scores.exp().sum()
    return weights


@pytest.mark.parametrize("name", FOUND)
@torch.no_grad()
def test_attentions_are_found_by_their_operations(name: str):
    make, pattern, out = FOUND[name]
    model = blocks(make)
    assert hw.sites(model) == []
    sites = hw.sites(model, X)
    assert [(site.q, site.kv, site.dim, site.pattern) for site in sites] == [
        (HEADS, HEADS, DIM, pattern)
    ] * 2
    assert [site.layer for site in sites] == [0, 1]
    whole = model(X)
    with record_sites(model) as keeps:
        assert torch.equal(model(X), whole)
    (core,) = keeps[sites[0].name].seen
    expected = spelt_out(model[0], X, pattern == "causal()")
    for head in range(HEADS):
        assert torch.allclose(core.head_weights(head).double(), expected[:, head], atol=1e-5)
        assert torch.allclose(
            core.head_weights(head, slice(1, 3)).double(), expected[:, head, 1:3], atol=1e-5
        )
    with hw.ablate(model, [(1, 0), (1, 2)]):
        quiet = model(X)
    other = copy.deepcopy(model)
    assert hw.sites(other) == []  # nobody has heard the copy
    weight = other[1].get_submodule(out).weight
    weight[:, :DIM] = weight[:, 2 * DIM :] = 0
    assert torch.allclose(quiet, other(X), atol=1e-6)
    assert not torch.allclose(quiet, whole, atol=1e-2)
    assert torch.equal(model(X), whole)


@torch.no_grad()
def test_all_arguments_of_the_attention_function_are_recorded():
    layer = blocks(GroupedQueryAttention)[0]
    mask = torch.randn(5, 5).masked_fill(torch.rand(5, 5) < 0.3, -torch.inf).fill_diagonal_(0.0)
    for value in ((X, mask), {"x": X, "mask": mask}):
        (site,) = hw.sites(layer, value)
        assert (site.q, site.kv, site.dim, site.pattern) == (4, 2, 3, "set by each call")
    with record_sites(layer) as keeps:
        layer(X, mask)
    (keep,) = keeps.values()
    q = layer.q(X).unflatten(-1, (4, 3))
    k = layer.kv(X).unflatten(-1, (2, 2, 3))[:, :, 0]
    for head in range(4):
        scores = q[:, :, head] @ k[:, :, head // 2].transpose(1, 2) * 0.7 + mask
        assert torch.allclose(keep.seen[0].head_weights(head), scores.softmax(-1), atol=1e-6)


UNCLEAR = {
    "talking": (TalkingHeads, "no values are multiplied"),
    "several": (TwoAttentions, "several times in one call"),
    "around": (NestedAttention, "so does a module within it"),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_unrecognised_attentions_are_listed_and_refused(name: str):
    make, why = UNCLEAR[name]
    model = blocks(make)
    sites = hw.sites(model, X)
    site = next(site for site in sites if site.path == "0")
    assert why in site.observe.reason
    assert why in " ".join(str(sites).split())
    with pytest.raises(ValueError, match=why), hw.ablate(model, [(site.name, 0)]):
        pass


@torch.no_grad()
def test_a_declared_attention_is_accepted_if_its_weights_explain_the_outputs():
    for first in (True, False):  # heads before the batch, and behind it
        model = blocks(lambda first=first: BatchedHeads(first))
        hw.declare(model[1], heads=HEADS, output="proj")
        with record_sites(model) as keeps:
            model(X)
        (keep,) = keeps.values()
        q, k, _ = model[1].qkv(model[0](X)).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        for head in range(HEADS):
            expected = (q[:, :, head] @ k[:, :, head].transpose(1, 2)).softmax(-1)
            assert torch.allclose(keep.seen[0].head_weights(head), expected, atol=1e-6)


@torch.no_grad()
def test_a_call_unlike_the_example_is_refused():
    model = blocks(lambda: NanoGPTBlock(True))
    hw.sites(model, X)
    state, whole = dict(vars(model[0])), model(X)
    model[0].fused = False
    with hw.ablate(model, [(0, 1)]):  # the other branch compares as well
        quiet = model(X)
    assert not torch.allclose(quiet, whole, atol=1e-2)
    model[0].forward = lambda x: x
    with pytest.raises(ValueError, match="set on the module itself"), hw.ablate(model, [(0, 1)]):
        pass
    del model[0].forward
    model[0].fused = True
    assert dict(vars(model[0])) == state
    mute = blocks(lambda: AttentionWithCore())
    hw.sites(mute, X)
    mute[1].core.soft = nn.Identity()
    with (
        pytest.raises(ValueError, match="does not compute attention as"),
        hw.ablate(mute, [(1, 1)]),
    ):
        mute(X)


@torch.no_grad()
def test_tracing_leaves_no_hook_and_stays_in_its_thread():
    model = blocks(lambda: TimmAttention(False))
    hw.sites(model, X)
    whole, recorded = model(X), []
    hooks = (
        torch.nn.modules.module._global_forward_hooks,
        torch.nn.modules.module._global_forward_pre_hooks,
    )
    assert not any(hooks)
    with hw.ablate(model, [(0, 1)]):
        quiet = model(X)
        thread = Thread(target=lambda: recorded.append(model(X)))
        thread.start()
        thread.join()
        copied = copy.deepcopy(model)
        with pytest.raises(RuntimeError, match="shape"):
            model(X[..., :3])
        assert torch.equal(model(X), quiet)
    assert not recorded[0].is_inference()
    assert torch.equal(copied(X), whole)
    assert torch.equal(model(X), whole)
    assert not hasattr(TimmAttention.forward, "__wrapped__")


BAD = {
    "train": (lambda model: model.train(), "model.eval"),
    "meta": (lambda model: model.to("meta"), "meta device"),
    "compiled": (lambda model: torch.compile(model, backend="eager"), "compiled"),
    "traced": (lambda model: torch.jit.trace(nn.Linear(WIDE, WIDE), X), "compiled"),
    "example": (
        lambda model: nn.Sequential(model, nn.Linear(7, 7)).eval(),
        "cannot run on this example",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_an_example_that_cannot_be_run(name: str):
    how, why = BAD[name]
    with pytest.raises(ValueError, match=why) as excinfo:
        hw.sites(how(blocks(lambda: NanoGPTBlock(True))), X)
    assert "\n" not in str(excinfo.value)


@pytest.mark.parametrize("name", FALLBACK)
def test_outputs_of_models_without_the_attention_interface(name: str):
    zoo = FALLBACK[name]
    model = zoo.build()
    inputs = zoo.inputs()
    if name == "longformer":
        inputs["global_attention_mask"] = torch.zeros(2, 11, dtype=torch.long)
        inputs["global_attention_mask"][0, :2] = inputs["global_attention_mask"][1, 4] = 1
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    whole = run_model(model, inputs)
    with record_sites(model) as keeps:
        assert torch.equal(run_model(model, inputs), whole)
    assert len(keeps) == 2
    for layer, keep in enumerate(keeps.values()):
        (core,) = keep.seen
        own = outputs.attentions[layer] if name != "longformer" else dense(outputs, layer, 2)
        for head in range(4):
            row = core.head_weights(head)[:, :11]
            assert torch.allclose(row.sum(-1), torch.ones(()), atol=1e-5)
            assert torch.allclose(row[..., :11], own[:, head], atol=1e-5)
            assert not row[..., 11:].any()


def dense(value: object, layer: int, side: int) -> Tensor:
    """Longformer's own weights, brought from its band to a grid one number at a time."""
    band, rows = value.attentions[layer], value.global_attentions[layer]
    grid = torch.zeros(2, 4, 11, 11)
    for b, everywhere in enumerate(([0, 1], [4])):
        for h in range(4):
            for t in range(11):
                for n, s in enumerate(everywhere):
                    grid[b, h, t, s] += band[b, h, t, n]
                for n in range(2 * side + 1):
                    if 0 <= t + n - side < 11:
                        grid[b, h, t, t + n - side] += band[b, h, t, 2 + n]
            for n, t in enumerate(everywhere):
                grid[b, h, t] = rows[b, h, :11, n] if rows.shape[2] > 2 else rows[b, h, n, :11]
    return grid


@torch.no_grad()
def test_a_lora_adapter_is_ablated_with_its_layer():
    torch.manual_seed(0)
    for name, attribute, path in (("llama", "o_proj", "self_attn"), ("gptj", "out_proj", "attn")):
        zoo = (ZOO | FALLBACK)[name]
        model = zoo.build()
        layers = model.model.layers if name == "llama" else model.transformer.h
        attention = getattr(layers[1], path)
        setattr(attention, attribute, LoRALinear(getattr(attention, attribute)))
        sites = hw.sites(model)
        assert sites[1].path.endswith(f".1.{path}")
        assert "built" not in sites[1].prune.reason
        assert "merge it first" in sites[1].prune.reason
        assert "merge" not in sites[0].prune.reason
        whole = run_model(model, zoo.inputs())
        with hw.ablate(model, [(1, 1)]):
            quiet = run_model(model, zoo.inputs())
        wrapped = getattr(attention, attribute)
        wrapped.base_layer.weight[:, 8:16] = 0
        wrapped.lora_A["default"].weight[:, 8:16] = 0
        assert torch.allclose(quiet, run_model(model, zoo.inputs()), atol=1e-5)
        assert not torch.allclose(quiet, whole, atol=1e-3)


class Packed(nn.Module):
    """A map that keeps whole numbers and a scale."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.scale = nn.Parameter(base.weight.abs().max() / 127)
        self.weight = nn.Parameter(
            (base.weight / self.scale).round().to(torch.int8), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.float() * self.scale).T


@torch.no_grad()
def test_quantised_weights_are_ablated_but_not_pruned():
    zoo = FALLBACK["gptj"]
    model = zoo.build()
    attention = model.transformer.h[0].attn
    attention.out_proj = Packed(attention.out_proj)
    sites = hw.sites(model)
    assert "quantised (int8)" in sites[0].prune.reason
    assert "quantised" not in sites[1].prune.reason
    with hw.ablate(model, [(0, 2)]):
        quiet = run_model(model, zoo.inputs())
    attention.out_proj.weight[:, 16:24] = 0
    assert torch.allclose(quiet, run_model(model, zoo.inputs()), atol=1e-5)


def test_layers_without_attention_are_reported():
    zoo = ZOO["llama"]
    model = zoo.build()

    class Steady(nn.Module):
        """What stands in the place of an attention."""

    model.model.layers[1].self_attn = Steady()
    sites = hw.sites(model)
    assert len(sites) == 1
    assert "1 of 2 layers have no attention (Steady instead): model.layers.1" in str(sites)
    assert sites.to_dict["notes"] == sites.notes
    assert ZOO["t5"].build() is not None
    for name in ("t5", "bart", "bert"):
        assert hw.sites(ZOO[name].build()).notes == []


HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 67,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "moe_intermediate_size": 16,
}


def test_the_command_lists_layers_without_attention(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    assert cli.main(["sites", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "decoder.1.attention  4   2    8  causal()" in out
    assert "decoder.0" not in out
    assert "1 of 2 layers have no attention (Qwen3NextGatedDeltaNet instead)" in " ".join(
        out.split()
    )
    assert max(map(len, out.splitlines())) <= 80


class Tiles(nn.Module):
    """Vision attention over tokens that lie on two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).flatten(1, 2).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        z = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(z.transpose(1, 2).flatten(2).unflatten(1, x.shape[1:3]))


@torch.no_grad()
def test_tokens_on_two_axes():
    model = blocks(Tiles)
    x = torch.randn(2, 3, 2, WIDE)
    hw.declare(model[0], heads=HEADS, output="proj")
    with record_sites(model) as keeps, hw.ablate(model, [(0, 1)]):
        quiet = model(x)
    (keep,) = keeps.values()
    assert keep.seen[0].head_weights(0).shape == (2, 6, 6)
    model[0].proj.weight[:, DIM : 2 * DIM] = 0
    assert torch.allclose(quiet, model(x), atol=1e-6)


def test_sites_of_stages_have_names_of_their_own():
    stage = {
        "depths": [2, 1],
        "num_heads": [2, 4],
        "embed_dim": 8,
        "window_size": 2,
        "image_size": 16,
        "patch_size": 2,
    }
    model = transformers.SwinModel(transformers.SwinConfig(**stage)).eval()
    names = [site.name for site in hw.sites(model)]
    assert len(names) == len(set(names)) == 3
    pixels, name = torch.randn(1, 3, 16, 16), names[1]
    with torch.no_grad():
        with hw.ablate(model, [(name, 1)]):
            quiet = model(pixels).last_hidden_state
        modules = dict(model.named_modules())
        path = next(site.path for site in hw.sites(model) if site.name == name)
        near = path.rpartition(".")[0]
        last = next(
            one
            for at, one in modules.items()
            if at.startswith(near) and at.endswith(("o_proj", "output.dense"))
        )
        last.weight[:, 4:8] = 0
        assert torch.allclose(quiet, model(pixels).last_hidden_state, atol=1e-6)


PATTERNS = {
    "llama": ["causal()", "causal()"],
    "gemma3": ["window(5)", "causal()"],
    "gptj": ["causal()", "causal()"],
    "bloom": ["causal()", "causal()"],
    "vit": ["full()", "full()"],
}
LAYERS = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 67,
}
LOCAL = {
    "gpt-neo": (
        lambda: transformers.GPTNeoConfig(
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            window_size=7,
            attention_types=[[["global", "local"], 1]],
        ),
        ["causal()", "window(7)"],
    ),
    "modernbert": (
        lambda: transformers.ModernBertConfig(
            **LAYERS,
            local_attention=8,
            pad_token_id=0,
            layer_types=["full_attention", "sliding_attention"],
        ),
        ["full()", "window(9, after=4)"],
    ),
    "llama4": (
        lambda: transformers.Llama4TextConfig(
            **LAYERS,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size_mlp=48,
            num_local_experts=2,
            attention_chunk_size=5,
            layer_types=["chunked_attention", "full_attention"],
        ),
        ["causal() & blocks(5)", "causal()"],
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_are_those_of_each_layer(name: str):
    model = (ZOO | FALLBACK)[name].build()
    assert [site.pattern for site in hw.sites(model)] == PATTERNS[name]


@pytest.mark.parametrize("name", LOCAL)
def test_local_and_global_layers_have_their_patterns(name: str):
    config, patterns = LOCAL[name]
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config(), attn_implementation="eager").eval()
    assert [site.pattern for site in hw.sites(model)] == patterns
    ids = torch.randint(3, 67, (1, 12))
    with torch.no_grad():
        grids = model(ids, output_attentions=True).attentions
    for grid, text in zip(grids, patterns, strict=True):
        pattern = hw.patterns.parse_pattern(text)
        allowed = torch.tensor([[bool(pattern.allows(t, s)) for s in range(12)] for t in range(12)])
        assert torch.equal(grid[0, 0] > 0, allowed)


@torch.no_grad()
def test_weights_are_those_before_dropout():
    model = blocks(lambda: TimmAttention(False))
    hw.sites(model, X)
    with record_sites(model) as keeps:
        model.train()(X)
    rows = keeps["model.0.attention"].seen[0].head_weights(1)
    assert torch.allclose(rows.double(), spelt_out(model[0], X, False)[:, 1], atol=1e-5)


class Soften(nn.Module):
    """Weights in a module of their own, which is all it does."""

    def forward(self, s: Tensor) -> Tensor:
        return s.softmax(-1)


class SplitAttention(nn.Module):
    """Weights made in one module, values read in another."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.soften, self.read = nn.Linear(WIDE, 3 * WIDE), Soften(), Read()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        return self.read(self.soften(q @ k.transpose(-2, -1)), v).transpose(1, 2).flatten(2)


class Read(nn.Module):
    """A product of two, as models that are to be quantised keep it."""

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return one @ other


@torch.no_grad()
def test_a_comparison_in_two_modules_is_that_of_the_one_around_them():
    model = blocks(SplitAttention)
    assert [site.path for site in hw.sites(model, X)] == ["0", "1"]
    with hw.ablate(model, [(1, 1)]):
        quiet = model(X)
    assert not quiet[..., DIM : 2 * DIM].any()
    assert torch.equal(quiet[..., :DIM], model(X)[..., :DIM])


class Louder(nn.Linear):
    """A map that goes on to its parent's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@torch.no_grad()
def test_a_forward_that_goes_on_to_its_parents_is_one():
    torch.manual_seed(0)
    model, plain = blocks(Tiles), blocks(Tiles)
    louder = Louder(WIDE, WIDE)
    louder.load_state_dict(model[0].proj.state_dict())
    model[0].proj = louder
    for one in (model, plain):
        hw.declare(one[0], heads=HEADS, output="proj")
    x, quiet = torch.randn(2, 3, 2, WIDE), []
    plain.load_state_dict(model.state_dict())
    hw.sites(plain)  # so that the parent's forward is stood at too
    for one in (model, plain):
        with hw.ablate(one, [(0, 1)], scale=0.5):
            quiet.append(one(x))
    assert torch.equal(*quiet)
