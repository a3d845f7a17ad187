"""Cost of whole models: known values, sums over decode steps, and the
command.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils import flop_counter

import headwise as hw
from headwise import cli, costs
from headwise.attention import backends
from headwise.attention.backends.query_blocks import split_queries, sum_block_pairs
from headwise.attention.cache import make_cache
from headwise.costs.components import list_components
from headwise.costs.cost_estimate import CostEstimate, estimate_cost
from headwise.costs.flops import SymbolicInt
from headwise.costs.training_memory import OPTIMISERS
from headwise.costs.weight_storage import parameter_terms
from headwise.costs.workload import select_layer
from headwise.models import families, model_spec
from headwise.models.model_spec import (
    BlockSpec,
    EmbeddingSpec,
    ExpertsSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PatchSpec,
    PositionSpec,
    StackSpec,
)
from support import layer_cases as cases, spec_strategies as strategies
from support.model_configs import gemma_3_1b
from support.tiny_configs import model_config

LLAMA3 = model_config("llama", hidden_size=4096, vocab_size=128256, intermediate_size=14336)
LLAMA3 |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
PRESET_SPECS = {name: hw.design(preset=name) for name in hw.PRESETS}
CACHED_SPECS = {
    name: spec
    for name, spec in (cases.EXAMPLES | PRESET_SPECS).items()
    if spec.pattern.tokens_before_decode is not None and spec.source is None
}
CACHED_SPECS["sinks"] = cases.base(kv=2, pattern="window(5) | first(3)")
DEEPSEEK = {"model_type": "deepseek_v3", "num_hidden_layers": 61}
T5 = {"model_type": "t5"}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA3,
    "qwen3": {"model_type": "qwen3"},
    "gemma2": {"model_type": "gemma2"},
    "mistral": {"model_type": "mistral"},
    "gpt2": {"model_type": "gpt2"},
    "bert": {"model_type": "bert"},
    "t5": T5,
    "bart": {"model_type": "bart"},
    "vit": {"model_type": "vit"},
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": {"model_type": "gpt_oss"},
}


def priced(config: dict[str, Any], **load: Any) -> CostEstimate:
    return estimate_cost(
        families.read_model_spec(config), hw.Workload(**({"context": 512} | load)), "model"
    )


# --- numbers from outside -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "params", "each"),
    [
        ({"model_type": "gpt2"}, 124_439_808, 12 * 3072),
        (LLAMA3, 8_030_261_248, 131_072),
        (
            LLAMA3
            | {
                "hidden_size": 8192,
                "intermediate_size": 28672,
                "num_hidden_layers": 80,
                "num_attention_heads": 64,
            },
            70_553_706_496,
            327_680,
        ),
        ({"model_type": "llama"}, 6_738_415_616, 524_288),
        (DEEPSEEK, 671_026_404_352, 70_272),
        ({"model_type": "gpt_oss"}, 116_829_156_672, 73_728),
    ],
    ids=["gpt-2", "llama-3-8b", "llama-3-70b", "llama-2-7b", "deepseek-v3", "gpt-oss-120b"],
)
def test_released_models(config, params, each):
    one = priced(config)
    assert (one.parameters.total, one.data["kv_bytes_per_token"]) == (params, each)


def test_a_token_uses_its_own_experts():
    """37 billion of 671 (2412.19437); 5.13 of 116.83 without the table of tokens (2508.10925)."""
    assert priced(DEEPSEEK).active_parameters == 671_026_404_352 - 58 * (256 - 8) * 3 * 7168 * 2048
    oss = priced({"model_type": "gpt_oss"})
    assert round((oss.active_parameters - 201_088 * 2880) / 1e9, 2) == 5.13


def test_gemma_keeps_windows_in_rings():
    """Every second of 26 layers keeps 4,096 tokens of 4 heads with 256 channels, the others all."""
    one = priced({"model_type": "gemma2"}, context=8192)
    assert one.cache_bytes == 13 * (4096 + 8192) * 2 * 4 * 256 * 2


def test_training_of_gpt_by_hand():
    """24 b s h^2 + 4 b s^2 h in every layer, and 2 b s h V, full square (zhihu 624740065)."""
    b, s, h = 3, 512, 768
    one = priced({"model_type": "gpt2"}, batch=b, context=s)
    assert (
        one.counted_flops["prefill"]
        == 12 * (24 * b * s * h**2 + 4 * b * s**2 * h) + 2 * b * s * h * 50257
    )
    assert one.counted_flops["backward"] == 2 * one.counted_flops["prefill"]


# --- sums -----------------------------------------------------------------------------------------


def test_a_long_generation_by_hand():
    """2 b n (k + v) [G p + G (G - 1) / 2 + G] for the steps behind a prompt of p, G of them, in
    every layer.
    """
    b, p, g = 2, 1000, 10**12
    steps = priced(LLAMA3, batch=b, context=p, generate=g + 1).flops_by_call["steps"]
    core = sum(term.value for term in steps.terms if "core" in term.name)
    assert core == 32 * 2 * b * 32 * 256 * (g * p + g * (g - 1) // 2 + g)
    head = next(term for term in steps.terms if term.name == "head.tokens.weight")
    assert (head.formula, head.value) == ("2 output hidden B T", 2 * 128256 * 4096 * b * g)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Tiny models of every kind: patterns layer by layer, experts, cross-attention, images, heads
    of all sorts.
    """
    kind = draw(st.sampled_from(model_spec.MODEL_KINDS))
    back = kind in ("decoder", "encoder-decoder")
    feeds = st.sampled_from(
        [
            None,
            FeedForwardSpec(7, bias="ud"),
            FeedForwardSpec(5, form="gated"),
            ExpertsSpec(FeedForwardSpec(3, form="gated"), 4, 2, shared=FeedForwardSpec(9)),
        ]
    )

    def stack(name: str, crosses: str, forward: bool) -> StackSpec:
        attention = strategies.patterns(forward=forward).map(lambda p: strategies.base(pattern=p))
        cross = strategies.base(source=10) if crosses == "cross" else None
        each = st.builds(
            BlockSpec, st.none() | attention, st.just(cross), feeds, st.just(NormSpec("rms"))
        )
        embedding_spec = EmbeddingSpec(
            patches=PatchSpec(2, 3, 2, 2), first=1, positions=PositionSpec("learned", 7)
        )
        table = embedding_spec if kind == "vision" else EmbeddingSpec(tokens=11, table="")
        return StackSpec.from_blocks(name, 10, draw(st.lists(each, max_size=3)), embedding=table)

    stacks = [stack("encoder", "none", False)] if kind == "encoder-decoder" else []
    stacks.append(stack("last", "cross" if stacks else "none", back))
    at = st.sampled_from(["each", "first", "last", "mean"])
    head = st.builds(
        OutputHeadSpec,
        st.just("out"),
        st.just(5),
        at=at,
        transform=st.none() | st.just(model_spec.HeadTransformSpec(6)),
    )
    return ModelSpec("tiny", kind, tuple(stacks), tuple(draw(st.lists(head, max_size=1))))


LOADS = st.builds(
    hw.Workload, batch=st.integers(1, 3), context=st.integers(1, 9), source=st.integers(1, 7)
)


@given(models(), LOADS)
def test_terms_add_up(model, load):
    one = estimate_cost(model, load)
    assert one.parameters.total == costs.count_parameters(model)
    every = one.data["terms"]
    assert len(
        {(term["breakdown"], term["name"], term["formula"], term["value"]) for term in every}
    ) == len(every)
    for name, total in one.required_flops.items():
        assert sum(term["value"] for term in every if term["breakdown"] == name) == total
        assert total <= one.counted_flops[name]
    for phase, operations in one.operations.items():
        assert sum(each.flops for each in operations) == one.required_flops[phase]
    alone = [
        select_layer(model, f"{s.name}.{n}") for s in model.stacks for n in range(len(s.layers))
    ]
    bare = [replace(stack, embedding=None) for stack in model.stacks]
    inner = None
    if model.kind != "vision":
        inner = estimate_cost(replace(model, stacks=tuple(bare), heads=()), load)
    if inner is not None and model.kind != "encoder-decoder":
        assert inner.required_flops["prefill"] == sum(
            estimate_cost(part, load).required_flops["prefill"] for part in alone
        )


@given(models().filter(lambda model: "decoder" in model.kind), LOADS, st.integers(1, 6))
def test_a_generation_is_the_sum_of_its_steps(model, load, written):
    whole = estimate_cost(model, replace(load, generate=written))
    steps = [
        estimate_cost(model, replace(load, context=load.context + n + 1))
        for n in range(written - 1)
    ]
    for way in ("required_flops", "executed_flops", "counted_flops"):
        every = [getattr(step, way)["decode"] for step in steps]
        assert getattr(whole, way)["steps"] == sum(every)
        assert getattr(whole, way)["generate"] == getattr(whole, way)["prompt"] + sum(every)
    assert (
        whole.cache_bytes
        == estimate_cost(model, replace(load, context=load.context + written - 1)).cache_bytes
    )


def test_a_state_steps_as_long_as_it_likes():
    load = hw.Workload(batch=2, context=100, generate=8)
    one = estimate_cost(hw.design(preset="linear"), load)
    assert one.required_flops["steps"] == 7 * one.required_flops["decode"]
    assert one.executed_flops["steps"] == 7 * one.executed_flops["decode"]
    assert one.counted_flops["generate"] is None


def test_cross_attention_caches_its_source_once():
    near, far = (priced(T5, context=10, source=n) for n in (100, 300))
    assert (
        near.data["kv_bytes_per_token"] == near.data["kv_bytes_per_source_token"] == 6 * 2 * 512 * 2
    )
    assert near.cache_bytes == (10 + 100) * 6 * 2 * 512 * 2
    assert far.cache_bytes - near.cache_bytes == 200 * 6 * 2 * 512 * 2
    assert far.required_flops["decode"] - near.required_flops["decode"] == 6 * 2 * 200 * 8 * 128
    names = [one.name for one in near.operations["decode"]]
    assert names == [
        "embedding",
        "attention projections",
        "attention core",
        "cross projections",
        "cross core",
        "feed-forward",
        "head",
    ]
    cross = next(one for one in near.operations["decode"] if one.name == "cross projections")
    assert cross.moved == 6 * 2 * (2 * 512 * 512 + 2 * 512)  # W_Q and W_O alone


def test_a_fused_core_forms_its_scores_once_more():
    """5 products backwards on 4, 3 k + 2 v (2205.14135); a plain one keeps its scores."""
    spec = hw.design(model=6, heads=2, dim=5, vdim=7)
    fused = estimate_cost(spec, hw.Workload(context=64))
    around = 2 * fused.counted_flops["backward"] - 2 * 2 * 2 * 64**2 * 2 * 12
    assert 2 * fused.executed_flops["backward"] == around + 2 * 2 * 2 * 64**2 * (3 * 5 + 2 * 7)
    mixed = estimate_cost(
        replace(spec, modifiers=(hw.parts.TalkingHeads(),)), hw.Workload(context=64)
    )
    assert mixed.executed_flops["backward"] == mixed.counted_flops["backward"]


def test_gradients_are_spent_as_torch_spends_them():
    """Its counter has no entry for the CPU's flash attention: it is given the one for other
    devices.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    fields = {
        kernel: lambda q, k, v, *_, out_shape=None, **__: flop_counter.sdpa_flop_count(q, k, v)
    }
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    fields |= {
        back: lambda g, q, k, v, *_, out_shape=None, **__: flop_counter.sdpa_backward_flop_count(
            g, q, k, v
        )
    }
    spec = hw.design(model=12, heads=3, kv=1, pattern="causal()")
    x = torch.randn(2, 64, 12, requires_grad=True)
    with flop_counter.FlopCounterMode(display=False, custom_mapping=fields) as counter:
        y = hw.Attention(spec)(x)
        ahead = counter.get_total_flops()
        y.sum().backward()
    one = estimate_cost(spec, hw.Workload(batch=2, context=64, dtype="fp32", device="cpu"))
    assert one.executed_flops["prefill"] == ahead
    assert one.executed_flops["backward"] == counter.get_total_flops() - ahead


@given(strategies.patterns(), st.integers(0, 300), st.integers(1, 1500), st.integers(1, 1700))
def test_blocks_are_summed_as_they_are(pattern, first, queries, keys):
    result, actual = range(first, first + queries), range(keys)
    assert sum_block_pairs(pattern, result, actual) == sum(
        block.num_pairs for block in split_queries(pattern, result, actual)
    )


def test_numbers_beyond_machine_words_stay_exact():
    block = BlockSpec(
        hw.design(model=2**20, heads=2**10, pattern="window(4096)"), feed=FeedForwardSpec(2**30)
    )
    model = ModelSpec(
        "vast",
        "decoder",
        (
            StackSpec.from_blocks(
                "decoder", 2**20, [block] * 3, embedding=EmbeddingSpec(tokens=2**40)
            ),
        ),
    )
    one = estimate_cost(model, hw.Workload(batch=2**40, context=2**50))
    pairs = 2**50 * 4096 - 4096 * 4095 // 2
    assert one.required_flops["prefill"] == 3 * 2**40 * (
        4 * pairs * 2**20 + 2**50 * (8 * 2**40 + 4 * 2**50)
    )
    assert (
        json.loads(json.dumps(one.data))["flops"]["backward"] == 2 * one.required_flops["prefill"]
    )


def test_layers_that_are_equal_are_one_term():
    terms = {term.name: term for term in priced(LLAMA3).prefill_flops.terms}
    scores = terms["decoder.*.attention.core (scores)"]
    assert scores.formula == "32 · 2 B pairs[causal()] q dim"
    assert scores.value == 32 * 2 * (512 * 513 // 2) * 32 * 128
    local = [
        t
        for t in priced({"model_type": "gemma2"}).prefill_flops.terms
        if t.name.endswith("core (scores)")
    ]
    assert [t.formula for t in local] == [
        f"13 · 2 B pairs[{options}] q dim" for options in ("window(4096)", "causal()")
    ]


def test_mixed_weights_reach_the_values_of_pairs_that_one_head_hides():
    """4 tokens: 10 causal pairs for head 0, and 4 of a token with itself for head 1."""
    spec = hw.design(
        model=8,
        heads=2,
        pattern="perhead((causal(), window(1)), (0, 1))",
        modifiers=(hw.parts.TalkingHeads(on="weights"),),
    )
    work = hw.costs.self_attention_work(spec, batch=1, queries=4)
    products = {item.name: int(item.flops) for item in costs.flops.list_products(spec, work)}
    assert products["core (scores)"] == 2 * (10 + 4) * 4
    assert products["core (values)"] == 2 * (10 + 10) * 4


def test_terms_have_formulas():
    result = costs.flops.CostBreakdown.from_repeated_items(
        [
            ("a", SymbolicInt.with_formula(3, "x") + 1, 1),
            ("a", SymbolicInt.with_formula(3, "x") + 1, 1),
        ]
    )
    assert result.terms[0].formula == "2 · (x + 1)"
    shared = [
        term for term in parameter_terms(families.read_model_spec(T5)).terms if "table" in term.name
    ]
    assert [term.formula for term in shared] == ["bucket column"] * 2


def test_equal_blocks_are_one_piece_however_they_alternate():
    near, far = (
        BlockSpec(hw.design(model=10, heads=2, pattern=p)) for p in ("window(3)", "causal()")
    )
    found = list_components(
        ModelSpec("m", "decoder", (StackSpec.from_blocks("decoder", 10, [near, far, near, near]),))
    )
    assert [(piece.spec.pattern.text, piece.times) for piece in found] == [
        ("window(3)", 3),
        ("causal()", 1),
    ]


# --- scopes and notes -----------------------------------------------------------------------------


def test_a_block_is_a_model_of_one_layer():
    model = families.read_model_spec(T5)
    block = estimate_cost(select_layer(model, "decoder.3"), hw.Workload(context=5, source=7))
    cross = estimate_cost(select_layer(model, "3.cross"), hw.Workload(context=5, source=7))
    own = estimate_cost(select_layer(model, "encoder.0.attention"), hw.Workload(context=5))
    assert block.parameters.total == 3 * 512 + 8 * 512**2 + 2 * 512 * 2048 + 256
    assert cross.required_flops["prefill"] == 2 * 512**2 * (2 * 5 + 2 * 7) + 4 * 5 * 7 * 512
    assert (cross.required_flops["decode"], own.decode_flops) == (
        2 * 512**2 * 2 + 4 * 7 * 512,
        None,
    )
    assert select_layer(model, "encoder.1").kind == "encoder"


def test_notes_of_a_model_are_shown():
    stack = StackSpec.from_blocks("decoder", 10, [BlockSpec(feed=FeedForwardSpec(12))] * 2)
    model = ModelSpec("m", "decoder", (stack,), notes=("a note",))
    assert estimate_cost(model, hw.Workload()).notes == ("a note",)
    assert "a note" in str(hw.cost(model))


def test_optimisers():
    each = {name: one.bytes_per_parameter for name, one in OPTIMISERS.items()}
    assert each == {
        "zero": 16,
        "megatron": 18,
        "zhihu-624740065": 20,
        "adam-fp32": 16,
        "sgd-momentum": 12,
        "muon": 12,
    }


# --- the command ----------------------------------------------------------------------------------


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(["cost", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def folder(tmp_path):
    """A folder for each config."""
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.toml").write_text(str(families.read_model_spec(CONFIGS["gemma2"])))
    (tmp_path / "spec.toml").write_text(hw.to_toml(hw.design(preset="gqa")))
    return tmp_path


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_priced(capsys, folder, name):
    code, out, err = run(capsys, folder / name / "config.json", "--json")
    (row,) = json.loads(out)["rows"]
    assert (code, err, row["name"]) == (0, "", name)
    assert row["params"] == costs.count_parameters(families.read_model_spec(CONFIGS[name]))
    assert {
        "active_params",
        "active_params_without_embeddings",
        "flops",
        "executed_flops",
        "counted_flops",
        "kv_bytes_per_token",
        "activation_bytes",
    } <= set(row)
    assert {
        "weights_bytes",
        "intensity",
        "bound",
        "seconds",
        "operations",
        "notes",
        "terms",
    } <= set(row)
    assert ("decode" in row["flops"]) == (name not in ("bert", "vit"))
    for bill in row["flops"]:
        assert (
            sum(term["value"] for term in row["terms"] if term["breakdown"] == bill)
            == row["flops"][bill]
        )


def test_all_stand_in_one_table(capsys, folder):
    what = [
        folder / "llama",
        folder / "t5" / "config.json",
        folder / "model.toml",
        folder / "spec.toml",
        "mla",
    ]
    code, out, err = run(
        capsys, *what, "--generate", 20, "--operations", "--terms", "--optimiser", "zero"
    )
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "t5: encoder-decoder of 6 + 6 layers, 2,048 source tokens" in " ".join(out.split())
    assert "llama: decoder of 32 layers" in " ".join(out.split())
    assert "cross projections" in out
    assert "128,484,179,968" in out


def test_the_training_state_of_an_optimiser(capsys, folder):
    data = json.loads(run(capsys, folder / "gpt2", "--optimiser", "muon", "--json")[1])
    assert data["training_state"]["rows"][0]["in_all"] == 12 * 124_439_808


def test_a_layer_of_a_model(capsys, folder):
    code, out, _ = run(capsys, folder / "gpt2", "--layer", 11, "--json")
    assert (code, json.loads(out)["rows"][0]["params"]) == (0, 12 * 768**2 + 13 * 768)


def test_the_context_is_limited_by_positions(capsys, folder):
    data = lambda *argv: json.loads(run(capsys, *argv, "--json")[1])["workload"]["context"]  # noqa: E731 - three words
    assert data(folder / "gpt2", folder / "vit", "gqa") == 1024
    assert data(folder / "gpt2", "--generate", 25) == 1000
    assert data(folder / "llama", folder / "vit") == 2048


def test_a_model_is_changed_by_its_description(capsys, folder):
    changed = run(capsys, folder / "gpt2", "--json", "--set", "stacks.0.runs.0.times=2")
    assert json.loads(changed[1])["rows"][0]["params"] == 124_439_808 - 10 * (
        12 * 768**2 + 13 * 768
    )


BAD: dict[str, tuple[Any, str]] = {
    "unknown": ({"model_type": "gtp2"}, "did you mean 'gpt2'?"),
    "nothing": ({"hidden_size": 7}, "neither model_type nor architectures is present"),
    "indivisible": (
        {"model_type": "gpt2", "n_embd": 10, "n_head": 3},
        "a hidden size of 10 does not divide",
    ),
    "negative": (LLAMA3 | {"hidden_size": -4096}, "hidden_size = -4096 is out of range"),
    "absurd": (
        LLAMA3 | {"num_hidden_layers": 10**9},
        "num_hidden_layers = 1000000000 is out of range",
    ),
    "text": (LLAMA3 | {"vocab_size": "many"}, "vocab_size = 'many' is not a whole number"),
    "uneven": (LLAMA3 | {"num_key_value_heads": 5}, "is not a multiple of num_key_value_heads = 5"),
    "few": (
        CONFIGS["gemma2"] | {"layer_types": ["full_attention"] * 3},
        "layer_types names 3 layers of 26",
    ),
    "contradiction": (
        LLAMA3 | {"architectures": ["GPT2Model"]},
        "architectures names 'GPT2Model', model_type 'llama'",
    ),
    "list": ([1, 2], "holds a list, not a JSON object"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configs_are_refused_in_one_line(capsys, tmp_path, name):
    config, message = BAD[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = run(capsys, tmp_path / "config.json")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err
    assert "config.json" in err


def test_a_backend_that_keeps_scores_forms_none_again():
    job = backends.CallSignature(hw.design(model=6, heads=2), hw.design(model=6, heads=2).core)
    values = {
        name: backends.recomputed_flops(one, job, hw.costs.CallSize(1, 200, 200, 200), 100)
        for name, one in backends.BACKENDS.items()
    }
    assert values == dict.fromkeys(backends.BACKENDS, 50) | {
        "linear": 0,
        "dense": 0,
        "bf16_matmul": 0,
    }


# --- KV cache -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CACHED_SPECS)
def test_our_own_caches_hold_as_many_bytes(name: str):
    spec = CACHED_SPECS[name]
    for length in (1, 4, 41, 600):
        cache = make_cache(spec, batch=3, capacity=length)
        assert costs.cache_bytes(spec, batch=3, capacity=length) == cache.nbytes
    half = make_cache(spec, batch=1, capacity=9, dtype=torch.bfloat16)
    assert costs.cache_bytes(spec, batch=1, capacity=9, bytes_per_number=2) == half.nbytes


@pytest.mark.parametrize(
    ("config", "context", "expected"),
    [
        (LLAMA3, 1, 131_072),
        (DEEPSEEK_V3, 1, 70_272),
        ({"model_type": "gpt_oss"}, 1, 73_728),
        # 139.0 MiB in rings of 512 tokens for 22 of 26 layers (mlxcel 172)
        (None, 32_768, 1024 * (22 * 512 + 4 * 32_768)),
    ],
)
def test_published_bytes_of_the_cache(config: dict[str, Any] | None, context: int, expected: int):
    model = gemma_3_1b() if config is None else families.read_model_spec(config)
    assert estimate_cost(model, hw.Workload(context=context)).cache_bytes == expected
