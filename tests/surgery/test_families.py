"""Pruning and conversion of families of 2026 at tiny size: equal to zero columns and averaged rows,
which are set without headwise, also after the written folder is loaded without headwise.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.observe.head_analysis.annotated_examples import Example
from headwise.surgery import DropHeads, HeadRanking, KeepTop, PruneToBudget, PruningBudget
from headwise.surgery.verification.model_comparison import DeferredModel, compare_outputs
from headwise.surgery.verification.verify import VerificationOptions, check_surgery
from headwise.util.errors import SpecError
from support.families import FAMILIES, Family
from support.head_means import average_neighbours, zero_columns_of

transformers = pytest.importorskip("transformers")

BY_NAME = {family.name: family for family in FAMILIES}
FAST = {
    "Qwen3-Next",
    "Gemma 4",
    "gpt-oss",
    "DeepSeek V3.2",
    "Kimi Linear",
    "MiniMax",
    "Nemotron-H",
    "Falcon-H1",
    "Phi-4",
    "ModernBERT",
    "CLIP",
    "Whisper",
    "BERT",
}
# families whose heads cannot be separated, or whose layers share keys and values
WHOLE = {"DeepSeek V4", "MiniMax M2", "OLMo 2", "OLMo 3", "OLMo hybrid", "Mamba"}
SHARED = {"Gemma 3n", "Gemma 4, shared keys and values"}
CASES = [
    pytest.param(family, marks=() if family.name in FAST else pytest.mark.slow, id=family.name)
    for family in FAMILIES
    if family.name not in WHOLE | SHARED
]
TORCH_POOL = "head.attention"  # of SigLIP, an nn.MultiheadAttention


def readable_sites(model: nn.Module) -> list[Any]:
    """Return the attentions whose calls can be read; recurrent mixers cannot."""
    return [one for one in hw.sites(model) if one.observe.possible and one.path != TORCH_POOL]


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    values = model(**inputs).values()
    return [value for value in values if isinstance(value, Tensor)]


def difference(model: nn.Module, other: nn.Module, inputs: dict[str, Tensor]) -> float:
    """Return the largest difference of outputs, relative to the largest."""
    pairs = zip(outputs(model, inputs), outputs(other, inputs), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def output_projection(model: nn.Module, path: str) -> nn.Module:
    names = ("o_proj", "out_proj", "dense", "Wo", "o_a_proj")
    found = dict(model.get_submodule(path).named_modules())
    parent = path.rpartition(".")[0]
    beside = (f"{parent}.output.dense", f"{parent}.output")
    modules = dict(model.named_modules())
    chosen = [found[name] for name in names if name in found] or [
        modules[name] for name in beside if hasattr(modules.get(name), "weight")
    ]
    return chosen[0]


def with_zero_columns(model: nn.Module, heads: list[tuple[str, int]]) -> nn.Module:
    expected = copy.deepcopy(model)
    sites = {one.name: one for one in hw.sites(model)}
    for name, head in heads:
        projection: Any = output_projection(expected, sites[name].path)
        groups = getattr(projection, "n_groups", 1)
        width = projection.in_features * groups // sites[name].heads
        zero_columns_of(projection, head, width)
    return expected


def with_equal_heads(model: nn.Module, kv: int) -> nn.Module:
    expected = copy.deepcopy(model)
    for one in readable_sites(model):
        average_neighbours(expected.get_submodule(one.path), one.q, one.kv, one.kv // kv)
    return expected


def load_without_headwise(folder: Path) -> nn.Module:
    script = folder / "load_model.py"
    if script.is_file():
        spec = importlib.util.spec_from_file_location("load_model", script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.load(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def tolerance(family: Family) -> float:
    """Of outputs in float64; Llama 4 rotates queries and keys and routes in float32 for every dtype."""
    return 1e-6 if family.name == "Llama 4" else 1e-9


@pytest.mark.parametrize("family", CASES)
@torch.no_grad()
def test_a_pruned_family_equals_zero_columns(family: Family):
    """In float64: the query heads of one key-value head, and as many of each; attention only."""
    model, inputs = family.build(torch.float64), family.inputs(torch.float64)
    sites = readable_sites(model)
    whole = [(one.name, head) for one in sites for head in range(one.q // one.kv)]
    each = [(one.name, head) for one in sites for head in range(0, one.q, max(2, one.q // one.kv))]
    for heads in (whole, each) if sites[0].q > sites[0].kv else (whole,):
        done = hw.prune_module(model, heads, inputs)
        expected = with_zero_columns(model, heads)
        assert difference(done.after, expected, inputs) < tolerance(family)
        assert difference(done.after, model, inputs) > 1e-6
        assert done.removed_params == count(model) - count(done.after) > 0
        left = {one.name: one.heads for one in hw.sites(done.after)}
        changed = [name for name, number in left.items() if number < model_heads(model, name)]
        assert set(changed) <= {name for name, _ in heads}


def model_heads(model: nn.Module, name: str) -> int:
    return next(one.heads for one in hw.sites(model) if one.name == name)


@pytest.mark.parametrize("family", CASES)
@torch.no_grad()
def test_a_converted_family_equals_averaged_heads(family: Family, tmp_path: Path):
    """In float64, and in the written folder in float32."""
    model, inputs = family.build(torch.float64), family.inputs(torch.float64)
    if any(one.path == TORCH_POOL for one in hw.sites(model)):
        pytest.skip("its pooling is an nn.MultiheadAttention, tested elsewhere")
    kv = min(one.kv for one in readable_sites(model)) // 2
    done = hw.convert_module(model, kv, inputs)
    assert difference(done.after, with_equal_heads(model, kv), inputs) < tolerance(family)
    assert done.removed_params == count(model) - count(done.after) > 0
    small, read = family.build(), family.inputs()
    hw.convert_module(small, kv, read).save_pretrained(tmp_path / "converted")
    loaded = load_without_headwise(tmp_path / "converted")
    assert difference(loaded, with_equal_heads(small, kv), read) < 1e-5


PLAIN_OR_RESIZED = {
    "Qwen3-Next": "transformers",
    "gpt-oss": "transformers",
    "Nemotron-H": "transformers",
    "MiniMax": "resized",  # its lightning attention reads the same number of heads
    "Whisper": "resized",  # its width is heads * dim
    "BERT": "resized",
}


@pytest.mark.parametrize("name", PLAIN_OR_RESIZED)
@torch.no_grad()
def test_a_written_family_equals_zero_columns_without_headwise(name: str, tmp_path: Path):
    """Also with headwise, which reads the folder by its record."""
    model, inputs = BY_NAME[name].build(), BY_NAME[name].inputs()
    heads = [(one.name, h) for one in readable_sites(model) for h in range(one.q // one.kv)]
    done = hw.prune_module(model, heads, inputs)
    written = done.save_pretrained(tmp_path / "small")
    assert written.kind == PLAIN_OR_RESIZED[name]
    assert ("because" in written.summary) == (written.kind == "resized")
    loaded = load_without_headwise(tmp_path / "small")
    assert difference(loaded, with_zero_columns(model, heads), inputs) < 1e-5
    assert count(loaded) == count(done.after) < count(model)
    read = [(one.name, one.q, one.kv) for one in hw.sites(tmp_path / "small")]
    assert read == [(one.name, one.q, one.kv) for one in hw.sites(done.after)]


@torch.no_grad()
def test_layers_with_other_heads_are_written_as_a_resized_folder(tmp_path: Path):
    model, inputs = BY_NAME["Falcon-H1"].build(), BY_NAME["Falcon-H1"].inputs()
    heads = [("decoder.1.attention", 0), ("decoder.1.attention", 2)]
    done = hw.prune_module(model, heads, inputs)
    written = done.save_pretrained(tmp_path / "small")
    assert "decoder.1.attention keeps 2 heads" in written.summary
    loaded = load_without_headwise(tmp_path / "small")
    assert difference(loaded, with_zero_columns(model, heads), inputs) < 1e-5
    done.after.set_attn_implementation("sdpa")  # its modules follow the model
    assert done.after.model.layers[1].self_attn.config._attn_implementation == "sdpa"
    assert difference(done.after, loaded, inputs) < 1e-5


@torch.no_grad()
def test_hw_prune_and_hw_convert_change_hybrids(tmp_path: Path):
    """The recurrent layer stays as it is; the most important heads by a gradient are kept."""
    family = BY_NAME["Qwen3-Next"]
    model, inputs = family.build(), family.inputs()
    texts = [Example({"input_ids": inputs["input_ids"][[n]]}, {}) for n in range(2)]
    pruned = hw.prune(model, 0.5, texts)
    assert "2 of 4 heads kept, the most important of each layer by michel" in str(pruned)
    assert "changed as a module of transformers" in str(pruned)
    expected = with_zero_columns(model, list(pruned.removed_heads))
    assert difference(pruned.after, expected, inputs) < 1e-5
    recurrent = [
        one.layers[0].linear_attn.state_dict() for one in (model.model, pruned.after.model)
    ]
    assert all(torch.equal(one, recurrent[1][key]) for key, one in recurrent[0].items())
    assert pruned.save_pretrained(tmp_path / "small").kind == "transformers"
    converted = hw.convert(model, 1)
    assert difference(converted.after, with_equal_heads(model, 1), inputs) < 1e-5
    listed = DropHeads((("decoder.1.attention", 0), ("decoder.1.attention", 2)))
    both = hw.prune(model, listed)
    assert both.removed_heads == listed.heads
    assert "2 of 4 heads kept, all but the listed heads" in str(both)


def test_sites_name_cuts_that_are_only_made_if_exact():
    """A family that headwise reads is cut by its spec; OLMo hybrid is refused when it is tried."""
    for name, word in (("Qwen3", "yes"), ("Qwen3-Next", "if exact"), ("OLMo hybrid", "if exact")):
        sites = hw.sites(BY_NAME[name].build())
        readable = [one for one in sites if one.observe.possible]
        assert {str(one.prune) for one in readable} == {word}
        assert ("if exact: the modules" in str(sites)) == (word == "if exact")


def test_the_verification_finds_a_wrong_module():
    """A hybrid that still has its heads, or other key-value heads, is not the ablated one."""
    family = BY_NAME["Qwen3-Next"]
    model, inputs = family.build(), family.inputs()
    texts = [Example({"input_ids": inputs["input_ids"][[n]]}, {}) for n in range(2)]
    pruned = hw.prune(model, 0.5, texts)
    converted = hw.convert(model, 1, texts)
    options = VerificationOptions("", **pruned.verification_options)
    equal_heads = converted.verification_options["exports"].values()
    for after, holds in ((pruned.after, True), (model, False)):
        assert check_surgery((model, after), texts, options)[0][0].same is holds
    for after, holds in ((converted.after, True), (model, False)):
        for make in equal_heads:
            assert compare_outputs("", (after, DeferredModel(make)), texts).same is holds


@torch.no_grad()
def test_query_heads_of_layers_that_share_keys_and_values_are_cut():
    model, inputs = BY_NAME["Gemma 3n"].build(torch.float64), BY_NAME["Gemma 3n"].inputs()
    heads = [(one.name, head) for one in hw.sites(model) for head in (0, 2)]
    done = hw.prune_module(model, heads, inputs)
    assert difference(done.after, with_zero_columns(model, heads), inputs) < 1e-9


def prune(name: str, *heads: tuple[str, int]) -> Any:
    family = BY_NAME[name]
    return hw.prune_module(family.build(), heads, family.inputs())


FIRST = "decoder.0.attention"
REFUSED = {
    "shared keys": (
        lambda: prune("Gemma 3n", ("decoder.2.attention", 0), ("decoder.2.attention", 1)),
        r"key-value heads of decoder\.2\.attention: other layers read its keys and values",
    ),
    "read keys": (
        lambda: hw.convert(BY_NAME["Gemma 4, shared keys and values"].build(), 1),
        r"other layers read its keys and values; remove the same number of query heads of each",
    ),
    "groups of outputs": (
        lambda: prune("DeepSeek V4", (FIRST, 0)),
        r"o_a_proj\.weight holds the removed heads in neither whole rows nor whole columns",
    ),
    "joined queries": (
        lambda: prune("OLMo hybrid", ("decoder.1.attention", 0), ("decoder.1.attention", 1)),
        "queries of a head depend on rows of all heads, as behind a norm over all heads",
    ),
    "joined keys": (
        lambda: hw.convert(BY_NAME["MiniMax M2"].build(), 1),
        "keys of a head depend on rows of all heads, as behind a norm over all heads",
    ),
    "one key-value head": (
        lambda: hw.convert(BY_NAME["DeepSeek V4"].build(), 1),
        "nothing would change: attentions of .* have 1 key-value head already; give fewer",
    ),
    "no attention": (
        lambda: hw.prune(BY_NAME["Mamba"].build(), KeepTop(0.5, HeadRanking("random"))),
        "model_type 'mamba' is not known",
    ),
    "fold": (
        lambda: hw.prune(BY_NAME["LFM2"].build(), 0.5, fold="mean"),
        r"fold='mean' needs a model that headwise loads as its own: .*lfm2",
    ),
    "budget": (
        lambda: hw.prune(BY_NAME["LFM2"].build(), PruneToBudget(PruningBudget("parameters", 0.9))),
        "PruneToBudget needs a model that headwise loads as its own",
    ),
    "no input": (
        lambda: hw.convert(BY_NAME["DINOv2"].build(), 1),
        "without an input; give texts, images, or hw.Example",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_cuts_that_are_not_exact_are_refused_with_the_reason(name: str):
    change, reason = REFUSED[name]
    with pytest.raises(SpecError, match=reason) as excinfo:
        change()
    assert "\n" not in str(excinfo.value)


@torch.no_grad()
def test_the_same_head_of_each_group_of_outputs_is_cut():
    """DeepSeek V4 projects the outputs of groups of heads apart, with shared columns."""
    family = BY_NAME["DeepSeek V4"]
    model, inputs = family.build(torch.float64), family.inputs()
    heads = [(FIRST, 0), (FIRST, 2)]
    done = hw.prune_module(model, heads, inputs)
    assert difference(done.after, with_zero_columns(model, heads), inputs) < 1e-9


def test_a_split_torch_attention_is_not_written(tmp_path: Path):
    model, inputs = BY_NAME["SigLIP 2 vision"].build(), BY_NAME["SigLIP 2 vision"].inputs()
    pool = next(one.name for one in hw.sites(model) if one.path == TORCH_POOL)
    done = hw.prune_module(model, [(pool, 0)], inputs)
    with pytest.raises(SpecError, match=r"torch MultiheadAttention was split; prune other layers"):
        done.save_pretrained(tmp_path / "small")
    assert not any(tmp_path.iterdir())
