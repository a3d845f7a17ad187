"""Model specs: tensors, shared weights, serialization, notes and refusals."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import headwise as hw
from headwise import costs
from headwise.costs.weight_storage import parameter_terms
from headwise.models import families, model_spec
from headwise.models.model_spec import (
    ApproximateAttention,
    BlockSpec,
    ConvolutionSpec,
    EmbeddingSpec,
    ExpertsSpec,
    FeedForwardSpec,
    HeadTransformSpec,
    LayerRun,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PatchSpec,
    PositionSpec,
    QuantizationSpec,
    RecurrentSpec,
    StackSpec,
    UnsupportedPart,
    WeightFormat,
)
from support.layer_cases import EXAMPLES

NAMESPACE = {name: getattr(model_spec, name) for name in model_spec.__all__}


def spec(**options: Any) -> hw.AttentionSpec:
    return hw.design(**({"model": 10, "heads": 6, "dim": 4, "kv": 2} | options))


LOCAL, FULL = spec(pattern="window(3)"), spec(pattern="causal()")


def block(attention: Any = FULL, **options: Any) -> BlockSpec:
    return BlockSpec(attention, **({"feed": FeedForwardSpec(7)} | options))


def stack(*blocks: BlockSpec, name: str = "decoder", model: int = 10, **options: Any) -> StackSpec:
    return StackSpec.from_blocks(name, model, blocks, **options)


def decoder(*blocks: BlockSpec, **options: Any) -> ModelSpec:
    return ModelSpec("small", "decoder", (stack(*blocks, embedding=EmbeddingSpec(11)),), **options)


def shapes(piece: Any, model: int = 10) -> dict[str, tuple[int, ...]]:
    return {w.name: w.shape for w in piece.weights(model)}


# Between them they have every field of every piece, none at its default.
EVERY = (
    decoder(
        *[block(LOCAL), block()] * 3,
        heads=(OutputHeadSpec("tokens", 11, table="decoder", bias="learned", cap=3.0),),
    ),
    decoder(
        block(ApproximateAttention(FULL, "it bends", (("bend", 3),))),
        block(None),
        block(None, constant_sublayers=("attention",)),
        notes=("as told",),
    ),
    ModelSpec(
        "image",
        "vision",
        (
            stack(
                block(
                    feed=ExpertsSpec(
                        FeedForwardSpec(7, "silu", "gated", "ugd"),
                        6,
                        2,
                        FeedForwardSpec(3),
                        "sigmoid",
                        "constant",
                        2.5,
                        groups=3,
                        active_groups=2,
                        group_score="top2",
                    )
                ),
                block(norm=NormSpec("rms", 1e-3), placement="sandwich"),
                block(placement="parallel"),
                block(norm=NormSpec("bare"), placement="after", scale=0.25),
                block(placement="abreast"),
                name="encoder",
                embedding=EmbeddingSpec(
                    patches=PatchSpec(2, 3, 4, 5, channels=1, bias="none"),
                    first=1,
                    positions=PositionSpec("learned", 7, skipped=2),
                    scale=0.5,
                ),
                norm=NormSpec("offset"),
            ),
        ),
        (
            OutputHeadSpec(
                "classes",
                13,
                "first",
                HeadTransformSpec(17, "gelu", NormSpec("unbiased")),
                "constant",
                scale=2.0,
            ),
        ),
    ),
    ModelSpec(
        "pair",
        "encoder-decoder",
        (
            stack(block(), name="encoder", embedding=EmbeddingSpec(11, types=2, norm=NormSpec())),
            stack(
                block(cross=spec(source=10), placement="post"),
                BlockSpec(cross=spec(source=10), form="merged"),
                embedding=EmbeddingSpec(
                    11, positions=PositionSpec("sinusoidal", layout="halves"), table="encoder"
                ),
            ),
        ),
    ),
    ModelSpec(
        "one layer",
        "decoder",
        (stack(block(), embedding=EmbeddingSpec(11), weights_of="first"),),
        beyond=(UnsupportedPart("bends", (("decoder.0.feed.bend", 3),)),),
        quantization=QuantizationSpec(
            WeightFormat("narrow", 3, 2, 16, 8, 4, 8, 2, "flat"),
            ("*.*.feed",),
            ("decoder.0.feed.up",),
        ),
    ),
    ModelSpec(
        "recurrent",
        "encoder-decoder",
        (
            stack(BlockSpec(mixer=RecurrentSpec()), name="encoder", embedding=EmbeddingSpec(11)),
            stack(
                BlockSpec(cross=spec(source=10), mixer=RecurrentSpec("source")),
                BlockSpec(mixer=ConvolutionSpec(3, 2)),
                embedding=EmbeddingSpec(11, table="encoder"),
            ),
        ),
    ),
)


# --- what is there --------------------------------------------------------------------------------


def test_every_tensor_is_named_once_and_built_by_the_spec():
    for model in EVERY:
        names = [w.name for w in model.weights()]
        assert len(set(names)) == len(names)
        for name, attention in model.attention_specs():
            built = {
                f"{name}.{key}": tuple(t.shape)
                for key, t in hw.Attention(attention).state_dict().items()
            }
            assert built.items() <= model.shapes().items()


@pytest.mark.parametrize(
    ("placement", "norms"),
    [("pre", 3), ("post", 3), ("after", 3), ("sandwich", 6), ("parallel", 1), ("abreast", 3)],
)
def test_norms_by_placement(placement: str, norms: int):
    whole = BlockSpec(FULL, spec(), FeedForwardSpec(7), placement=placement)
    assert (
        len(whole.norm_names)
        == norms
        == sum(w.role == "norm" for w in replace(whole, norm=NormSpec("rms")).weights(10))
    )
    assert BlockSpec(FULL, placement="pre").norm_names == ("attention_norm",)
    assert BlockSpec(placement=placement).norm_names == ()


def test_a_merged_block_holds_its_cross_attention_alone():
    """The mean is read through the same maps (1908.11365): 4 d^2, where two
    attentions have 8 d^2.
    """
    cross = hw.design(model=10, heads=2)
    merged = BlockSpec(cross=cross, feed=FeedForwardSpec(7), form="merged")
    plain = BlockSpec(cross, cross, FeedForwardSpec(7))
    assert merged.norm_names == ("cross_norm", "feed_norm")
    both = [
        sum(w.numel for w in one.weights(10) if w.role in ("attention", "cross"))
        for one in (merged, plain)
    ]
    assert both == [4 * 100, 8 * 100]
    for wrong in (BlockSpec(cross, cross), BlockSpec()):
        with pytest.raises(
            hw.SpecError,
            match=r"BlockSpec\(form='merged'\) adds a mean .*; give cross=, and no attention",
        ):
            replace(wrong, form="merged")


def test_a_feed_forward_equals_torch_modules():
    for gated in ("plain", "gated"):
        maps = {"up": (10, 7), "down": (7, 10)} | ({"gate": (10, 7)} if gated == "gated" else {})
        linear = {name: torch.nn.Linear(*sizes) for name, sizes in maps.items()}
        built = shapes(FeedForwardSpec(7, form=gated, bias="ugd" if gated == "gated" else "ud"))
        assert built == {name: tuple(of.weight.shape) for name, of in linear.items()} | {
            f"{name}_bias": tuple(of.bias.shape) for name, of in linear.items()
        }


def test_experts_have_one_of_each_and_a_constant_is_not_learned():
    experts = ExpertsSpec(
        FeedForwardSpec(7, form="gated", bias="u"),
        count=5,
        active=2,
        shared=FeedForwardSpec(3),
        bias="constant",
    )
    assert shapes(experts) == {
        "router": (5, 10),
        "router_bias": (5,),
        "each.up": (5, 7, 10),
        "each.up_bias": (5, 7),
        "each.gate": (5, 7, 10),
        "each.down": (5, 10, 7),
        "shared.up": (3, 10),
        "shared.down": (10, 3),
    }
    model = decoder(block(feed=experts))
    assert costs.count_constants(model) == 5
    assert costs.count_parameters(model) == sum(w.numel for w in model.weights()) - 5


@pytest.mark.parametrize(
    ("model", "heads", "hidden"), [(512, 8, 2048), (1024, 16, 4096)], ids=["base", "big"]
)
def test_vaswani_in_both_sizes_is_torch_nn_transformer(model: int, heads: int, hidden: int):
    """torch's has biases everywhere, and a norm behind either stack; 44,140,544 numbers in the base
    model.
    """
    every, past = (
        hw.design(model=model, heads=heads, bias="qkvo", pattern=p) for p in ("full()", "causal()")
    )
    feed = FeedForwardSpec(hidden, "relu", bias="ud")
    encoder = StackSpec.from_blocks(
        "encoder", model, [BlockSpec(every, feed=feed, placement="post")] * 6, norm=NormSpec()
    )
    both = StackSpec.from_blocks(
        "decoder", model, [BlockSpec(past, every, feed, placement="post")] * 6, norm=NormSpec()
    )
    num_params = costs.count_parameters(ModelSpec("vaswani", "encoder-decoder", (encoder, both)))
    with torch.device("meta"):
        state = torch.nn.Transformer(model, heads, 6, 6, hidden, batch_first=True).state_dict()
    assert num_params == sum(math.prod(tensor.shape) for tensor in state.values())
    assert model > 512 or num_params == 44_140_544


def test_numbers_beyond_any_machine_are_exact():
    model = decoder(
        block(feed=FeedForwardSpec(2**62 + 1)), heads=(OutputHeadSpec("tokens", 2**61),)
    )
    small = decoder(block(feed=FeedForwardSpec(1)), heads=(OutputHeadSpec("tokens", 1),))
    assert costs.count_parameters(model) - costs.count_parameters(small) == 2 * 10 * 2**62 + 10 * (
        2**61 - 1
    )
    assert model_spec.from_json(model_spec.to_json(model)) == model


def test_terms_add_up_and_have_formulas():
    for model in EVERY:
        bill = parameter_terms(model)
        assert bill.total == costs.count_parameters(model)
        assert len(set(bill.terms)) == len(bill.terms)
        for term in bill.terms:
            times, _, axes = term.formula.rpartition(" · ")
            alike = [
                w
                for w in model.weights()
                if re.sub(r"^(\w+)\.\d+\.", r"\1.*.", w.name) == term.name and w.trainable
            ]
            product = re.sub(r"(?<=[\w)]) (?=[\w(])", "*", axes)
            each = {
                eval(product, {"source": w.axis_sizes.get("model"), **w.axis_sizes}): w.numel
                for w in alike
            }
            assert term.value == int(times or 1) * each[term.value // int(times or 1)]


def test_a_description_needs_no_torch():
    code = (
        "import sys, headwise.models.model_spec; print(*{'torch', 'numpy', 'transformers'} & "
        "set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


# --- what is shared -------------------------------------------------------------------------------


def test_a_table_of_relative_positions_is_named_where_it_first_stands():
    bias = spec(modifiers=(hw.T5Bias(buckets=8, reach=9),), similarity=hw.Dot(scale=1.0))
    named = decoder(*[block(bias)] * 3).shapes()
    assert [name for name in named if name.endswith("t5_bias.table")] == [
        "decoder.0.attention.t5_bias.table"
    ]
    assert sum(name.endswith("t5_bias.column") for name in named) == 3


def test_tables_of_another_shape_are_not_shared():
    few = spec(modifiers=(hw.T5Bias(buckets=8, reach=9),), similarity=hw.Dot(scale=1.0))
    more = replace(few, modifiers=(hw.T5Bias(buckets=4, reach=9),))
    assert (
        sum("table" in name for name in decoder(block(few), block(more), block(few)).shapes()) == 2
    )


def test_ties_name_the_owner():
    model = EVERY[0]
    assert model.tied_weights() == {"head.tokens.weight": "decoder.embedding.tokens"}
    assert "head.tokens.weight" not in model.shapes()
    assert EVERY[3].tied_weights() == {"decoder.embedding.tokens": "encoder.embedding.tokens"}
    own = replace(model, heads=(OutputHeadSpec("tokens", 11),))
    assert own.tied_weights() == {}
    assert own.shapes()["head.tokens.weight"] == (11, 10)


# --- depth ----------------------------------------------------------------------------------------

SCHEDULED = hw.design(model=12, heads=2, modifiers=(hw.Differential(),))


def test_a_stack_places_schedules_by_depth():
    built = StackSpec.from_blocks("decoder", 12, [BlockSpec(SCHEDULED, SCHEDULED)] * 3)
    depths = [
        tuple(s.modifiers[0].depth for s in layer.attention_specs.values())  # pyright: ignore[reportAttributeAccessIssue] - it is one
        for layer in built.layers
    ]
    assert depths == [(0, 0), (1, 1), (2, 2)]
    assert StackSpec.from_blocks("decoder", 12, built.layers) == built
    near = StackSpec.from_blocks(
        "decoder", 12, [BlockSpec(ApproximateAttention(SCHEDULED, "so"))] * 2
    )
    assert [layer.attention_specs["attention"] for layer in near.layers] == [
        layer.attention_specs["attention"] for layer in built.layers[:2]
    ]


def test_an_unplaced_schedule_is_refused_with_the_reason():
    with pytest.raises(
        hw.SpecError,
        match=(
            r"layer 1 holds "
            r"Differential\(\).*depth.*StackSpec\.from_blocks.*Differential\(depth=1\)"
        ),
    ):
        StackSpec("decoder", 12, (LayerRun(2, (BlockSpec(SCHEDULED),)),))


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_stands_in_a_stack(name: str):
    attention = EXAMPLES[name]
    built = StackSpec.from_blocks("decoder", attention.model, [BlockSpec(attention)] * 3)
    assert len(built.layers) == 3
    model = ModelSpec(name, "decoder", (built,))
    assert model_spec.from_toml(model_spec.to_toml(model)) == model


# --- runs -----------------------------------------------------------------------------------------


def test_a_pattern_of_layers_is_one_run():
    built = stack(*[block(LOCAL), block(LOCAL), block()] * 4, block(LOCAL))
    assert [(run.times, len(run.blocks)) for run in built.runs] == [(4, 3), (1, 1)]
    assert built == StackSpec("decoder", 10, (LayerRun(1, built.layers),))


@given(st.lists(st.integers(0, 2), max_size=30))
def test_runs_are_the_layers_however_they_repeat(kinds: list[int]):
    blocks = [BlockSpec(feed=FeedForwardSpec(kind + 1)) for kind in kinds]
    assert list(StackSpec.from_blocks("decoder", 3, blocks).layers) == blocks


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", EVERY, ids=lambda model: model.name)
def test_text_is_read_back_as_the_same_model(model: ModelSpec):
    assert model_spec.from_toml(str(model)) == model
    assert model_spec.from_json(model_spec.to_json(model)) == model
    assert eval(repr(model), NAMESPACE | vars(hw)) == model
    assert hash(model) == hash(model_spec.from_toml(str(model)))


def test_examples_have_every_field():
    """No field of a piece stands at its default in all of them, so each has made the journey."""
    text = "\n".join(model_spec.to_json(model) for model in EVERY)
    for name in model_spec.__all__:
        piece = getattr(model_spec, name)
        if isinstance(piece, type) and name not in (
            "WeightSpec",
            "ProcessorSpec",
        ):  # no pieces of a description
            for field in fields(piece):
                assert f'"{field.name}"' in text, (name, field.name)


def test_a_model_spec_may_omit_defaults(tmp_path: Path):
    file = tmp_path / "small.toml"
    file.write_text(
        'name = "small"\nkind = "decoder"\n[[stacks]]\nname = "decoder"\nmodel = '
        "10\n[[stacks.runs]]\ntimes = 2\n"
        "[[stacks.runs.blocks]]\nattention = {model = 10, heads = {q = 6, kv = 2, dim = 4}}\n"
    )
    assert families.read_model_spec(file) == ModelSpec(
        "small", "decoder", (stack(*[BlockSpec(spec())] * 2),)
    )


# --- bad input ------------------------------------------------------------------------------------


def rows(table: str) -> list[Any]:
    split = (line.split(" -> ") for line in table.strip().splitlines())
    return [pytest.param(does.strip(), words.strip(), id=does.strip()) for does, words in split]


def check_refused(does: str, words: str, **named: object) -> None:
    """`does` ends in one error of one line whose message holds these words, ` .. ` between them."""
    with pytest.raises(hw.SpecError) as caught:
        eval(does, globals() | named)
    message = str(caught.value)
    assert re.search(".*".join(re.escape(word) for word in words.split(" .. ")), message), message
    assert "\n" not in message


PIECES = """
NormSpec("batch") -> kind='batch' .. use one of bare, layer, offset, rms, unbiased
NormSpec(eps=0.0) -> eps=0.0 .. not positive
NormSpec(eps=float("nan")) -> eps=nan .. finite
FeedForwardSpec(0) -> hidden=0 .. hidden=1 or more
FeedForwardSpec(-7) -> hidden=-7
FeedForwardSpec("7") -> hidden='7' .. int
FeedForwardSpec(True) -> hidden=True .. int
FeedForwardSpec(2.0) -> hidden=2.0 .. int
FeedForwardSpec(7, bias="g") -> bias='g' .. 'ud'
FeedForwardSpec(7, form="gate") -> form='gate' .. did you mean 'gated'
ExpertsSpec(FeedForwardSpec(3), 2, 3) -> active=3 .. count=2 .. at most 2
ExpertsSpec(FeedForwardSpec(3), 2, 1, scores="max") -> scores='max'
ExpertsSpec(FeedForwardSpec(3), 6, 1, groups=4) -> groups=4 .. must divide count=6 .. give a divisor
ExpertsSpec(FeedForwardSpec(3), 6, 1, groups=3, active_groups=4) -> active_groups=4 .. at most 3
ExpertsSpec(FeedForwardSpec(3), 6, 3, groups=3, active_groups=1) -> active=3 .. 1 groups of 2 experts .. at most 2
ExpertsSpec(FeedForwardSpec(3), 6, 1, groups=6, group_score="top2") -> needs two experts per group, got 1 .. fewer
PositionSpec("learned") -> length=512
PositionSpec("rotary", 3) -> kind='rotary'
EmbeddingSpec() -> exactly one of tokens= and patches=
EmbeddingSpec(11, PatchSpec(1, 1, 1, 1)) -> exactly one
EmbeddingSpec(-3) -> tokens=-3 .. tokens=0 or more
EmbeddingSpec(patches=PatchSpec(2, 2, 1, 1), positions=PositionSpec("learned", 5)) -> 5 positions for 4 tokens .. length=4
OutputHeadSpec("tokens") -> outputs= or transform=
OutputHeadSpec("tokens", 3, at="middle") -> at='middle'
OutputHeadSpec("tokens", 3, cap=0.0) -> cap=0.0
OutputHeadSpec("a.b", 3) -> name='a.b'
ApproximateAttention(FULL, "so", (("bias", 0),)) -> more=(('bias', 0),)
ApproximateAttention(FULL, "so", (("bias", "3"),)) -> more=(('bias', '3'),)
LayerRun(3, ()) -> blocks=()
LayerRun(3, (LOCAL,)) -> must hold blocks
LayerRun(0, (block(),)) -> times=0
BlockSpec(LOCAL, placement="before") -> placement='before'
BlockSpec("mha") -> attention='mha' .. AttentionSpec
stack(block(), model=12) -> 12 wide .. 10 .. one width
stack(block(), name="head") -> name='head'
stack(block(), name="a.b") -> name='a.b'
StackSpec("decoder", 10, (block(),)) -> must hold runs
StackSpec("decoder", 10, (LayerRun(10**12, (block(),)),)) -> 1000000000000 layers .. at most 10000
ModelSpec("m", "decoder", (stack(), stack(name="b"))) -> 2 stacks; give 1
ModelSpec("m", "encoder-decoder", (stack(),)) -> 1 stacks; give 2
ModelSpec("m", "seq2seq", (stack(),)) -> kind='seq2seq'
ModelSpec("m", "decoder", (block(),)) -> must hold StackSpecs
decoder(heads=(OutputHeadSpec("a", 3), OutputHeadSpec("a", 4))) -> 'head a' twice
decoder(heads=(OutputHeadSpec("a", 11, table="encoder"),)) -> table of 'encoder' .. name one of decoder
decoder(heads=(OutputHeadSpec("a", 12, table="decoder"),)) -> 12 x 10 .. 11 x 10 .. leave table out
decoder(block(cross=spec())) -> cross-attention .. no stack before
replace(EVERY[3], stacks=(StackSpec.from_blocks("encoder", 8, []), EVERY[3].stacks[1])) -> table of 'encoder' .. no stack owns one
model_spec.from_toml("name = ") -> not TOML
model_spec.from_json("{") -> not JSON
model_spec.from_json("1" * 5000) -> not JSON
model_spec.from_toml("a = " + "1" * 5000) -> not TOML
model_spec.from_json("[]") -> model = [] .. a table
model_spec.from_toml("name = 'm'") -> lacks kind
model_spec.from_toml("nam = 'm'") -> no 'nam'; did you mean 'name'
model_spec.from_toml("name = 'm'\\nkind = 'decoder'\\nstacks = 3") -> stacks=3 .. tuple
model_spec.from_toml("name = {a = 1}\\nkind = 'decoder'\\nstacks = []") -> name = {'a': 1} .. plain value
"""


@pytest.mark.parametrize(("does", "words"), rows(PIECES))
def test_an_impossible_piece_is_refused(does: str, words: str):
    check_refused(does, words)


def config(family: str, **options: Any) -> ModelSpec:
    return families.read_model_spec({"model_type": family, "num_hidden_layers": 2} | options)


CONFIGS = """
families.read_model_spec({}) -> neither model_type nor architectures .. add model_type
families.read_model_spec({"model_type": "lama"}) -> 'lama' is not known .. did you mean 'llama'
families.read_model_spec({"model_type": 7}) -> '7' is not known
families.read_model_spec({"model_type": "x", "auto_map": {"AutoConfig": "x.X"}}) -> 'x' is not known .. auto_map .. not followed
families.read_model_spec({"architectures": ["FalkonForCausalLM"]}) -> 'FalkonForCausalLM' is not known
families.read_model_spec({"architectures": "LlamaModel"}) -> architectures = 'LlamaModel' is not a list
config("llama", architectures=["GPT2Model"]) -> 'GPT2Model' .. 'llama' .. a class Llama
config("llama", architectures=["LlamaForCausalLn"]) -> 'ForCausalLn' .. did you mean 'ForCausalLM'
config("llama", hidden_size="12") -> hidden_size = '12' .. whole number
config("llama", hidden_size=True) -> hidden_size = True .. whole number
config("llama", hidden_size=12.0) -> hidden_size = 12.0 .. whole number
config("llama", hidden_size=None) -> hidden_size = None .. whole number
config("llama", hidden_size=0) -> hidden_size = 0 .. at least 1
config("llama", vocab_size=-5) -> vocab_size = -5 .. at least 1
config("llama", num_hidden_layers=10**12) -> num_hidden_layers = 1000000000000 .. from 1 to 10000
config("llama", num_attention_heads=10**9, head_dim=2) -> num_attention_heads = 1000000000
config("llama", head_dim=2**40) -> head_dim = 1099511627776
config("llama", hidden_size=2**64) -> channels per head are too many
config("llama", hidden_size=100) -> 100 does not divide among 32 heads .. head_dim
config("llama", head_dim=7) -> 7 of 7 channels .. even
config("llama", num_key_value_heads=5) -> num_attention_heads = 32 .. num_key_value_heads = 5
config("llama", attention_bias=1) -> attention_bias = 1 .. neither true nor false
config("llama", hidden_act="swiglu") -> hidden_act = 'swiglu'
config("llama", rms_norm_eps=0) -> rms_norm_eps = 0 .. positive
config("llama", rms_norm_eps="1e-5") -> rms_norm_eps = '1e-5' .. positive
config("llama", rope_theta=-1) -> rope_theta = -1
config("llama", rope_scaling=8) -> rope_scaling = 8 is not a table
config("llama", rope_scaling={"rope_type": "longer"}) -> rope_scaling: rope_type = 'longer' .. did you mean
config("llama", rope_scaling={"type": "linear", "factor": "2"}) -> factor = '2' .. positive
config("llama", rope_parameters={"full_attention": {}}) -> angles of its own .. one table
config("llama", id2label=["a"], architectures=["LlamaForSequenceClassification"]) -> id2label = ['a'] is not a table
config("qwen3", layer_types=["full_attention"]) -> names 1 layers of 2
config("qwen3", layer_types=["full", "full"]) -> layer_types names 'full' .. full_attention
config("qwen3", layer_types="full") -> layer_types = 'full' is not a list
config("qwen3", layer_types=["sliding_attention"] * 2) -> without a sliding_window
config("gemma2", sliding_window=None) -> without a sliding_window
config("gemma2", use_bidirectional_attention=True) -> use_bidirectional_attention .. not described
config("mistral", sliding_window=0) -> sliding_window = 0
config("gpt2", n_embd=10, n_head=3) -> 10 does not divide among 3 heads
config("gpt2", add_cross_attention=True) -> add_cross_attention .. give False
config("bert", position_embedding_type="relative_key") -> position_embedding_type = 'relative_key' .. 'absolute'
config("bert", architectures=["BertForCausalLM"]) -> 'ForCausalLM'
config("t5", feed_forward_proj="gated_gelu") -> feed_forward_proj = 'gated_gelu' .. did you mean 'gated-gelu'
config("t5", relative_attention_num_buckets=2) -> buckets=2
config("bart", tie_word_embeddings=False) -> tie_word_embeddings = False .. not used
config("vit", image_size=8) -> patch_size = (16, 16) is larger
config("vit", image_size=[8, 8, 8]) -> image_size = [8, 8, 8]
config("vit", patch_size="16") -> patch_size = '16'
config("deepseek_v3", num_key_value_heads=2) -> num_key_value_heads differs
config("deepseek_v3", num_experts_per_tok=300) -> num_experts_per_tok = 300 .. from 1 to 256
config("deepseek_v3", moe_layer_freq=2) -> moe_layer_freq = 2
config("gpt_oss", hidden_act="gelu") -> hidden_act = 'gelu'
"""


@pytest.mark.parametrize(("does", "words"), rows(CONFIGS))
def test_an_impossible_config_is_refused(does: str, words: str):
    check_refused(does, words)


def test_files_that_are_no_config_are_refused(tmp_path: Path):
    check_refused(
        "families.read_model_spec(at)", "neither headwise.toml nor config.json", at=tmp_path
    )
    check_refused("families.read_model_spec(at)", "cannot be read", at=tmp_path / "absent.json")
    file = tmp_path / "config.json"
    for text, words in (
        ("{", "is not JSON: .. give a config.json"),
        ("[1]", "holds a list .. give a config.json"),
        ("[" * 100_000, "is nested too deeply; give"),
        ("1" * 5000, "is not JSON: a number has more than 4,300 digits; give a config.json"),
    ):
        file.write_text(text)
        check_refused("families.read_model_spec(at)", f"{file} {words}", at=tmp_path)
    file.write_bytes(b"\xff\xfe{}")
    check_refused("families.read_model_spec(at)", "is not UTF-8", at=file)
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    check_refused("families.read_model_spec(at)", f"{file}: hidden_size = 'wide'", at=str(tmp_path))


def test_numbers_of_a_config_are_exact():
    wide, narrow = (config("llama", vocab_size=size, hidden_size=64) for size in (2**62, 1))
    assert costs.count_parameters(wide) - costs.count_parameters(narrow) == 2 * 64 * (2**62 - 1)


def test_omissions_are_noted():
    options = {
        "auto_map": {"AutoModel": "x.Y"},
        "quantization_config": {"bits": 4},
        "num_nextn_predict_layers": 1,
    }
    notes = "\n".join(config("deepseek_v3", architectures=["DeepseekV3Model"], **options).notes)
    for word in ("auto_map names code", "quantization_config", "num_nextn_predict_layers"):
        assert word in notes
    assert config("llama").notes == ("architectures is missing; read as LlamaForCausalLM",)
    assert config("llama", architectures=["LlamaModel"]).notes == ()


def test_a_family_is_known_by_the_class_alone():
    assert families.read_model_spec({"architectures": ["Qwen3ForCausalLM"]}).name == "qwen3"
    assert families.read_model_spec({"architectures": ["GPT2LMHeadModel"]}).name == "gpt2"


def test_biases_without_a_field_are_counted_and_noted():
    model = config("deepseek_v3", attention_bias=True, architectures=["DeepseekV3Model"])
    assert "attention_bias" in model.approximation_reasons()["decoder.1.attention"]
    shape = {
        name: size
        for name, size in model.shapes().items()
        if name.startswith("decoder.1.attention.project.")
    }
    assert shape["decoder.1.attention.project.q_down_bias"] == (1536,)
    assert shape["decoder.1.attention.project.kv_down_bias"] == (576,)


def test_layers_that_reuse_the_first_have_no_parameters():
    each, first = (stack(block(), block(), weights_of=whose) for whose in ("each", "first"))
    assert [w.name for w in first.weights()] == [
        w.name for w in each.weights() if not w.name.startswith("decoder.1.")
    ]
    assert len(first.layers) == 2
    with pytest.raises(
        hw.SpecError,
        match="cannot build small: all layers of decoder use the weights of the first; ",
    ):
        hw.build(ModelSpec("small", "decoder", (first,)))
