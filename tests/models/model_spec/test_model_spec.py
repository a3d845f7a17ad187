"""Model specs: tensors, shared weights, serialization, notes and refusals."""

from __future__ import annotations

import json
import math
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
from headwise.models import families, model_spec
from headwise.models.model_spec import (
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
    WeightFormat,
)
from support.layer_cases import EXAMPLES
from support.refusals import check_refused, refused_calls
from support.spec_strategies import REPR_NAMES

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
        block(FULL),
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
                        top_k_groups=2,
                        group_score="top2",
                    )
                ),
                block(norm=NormSpec("rms", 1e-3), placement="sandwich"),
                block(placement="parallel"),
                block(norm=NormSpec("layer_no_affine"), placement="post_sublayer", scale=0.25),
                block(placement="parallel_two_norms"),
                name="encoder",
                embedding=EmbeddingSpec(
                    patches=PatchSpec(2, 3, 4, 5, channels=1, bias="none"),
                    first=1,
                    positions=PositionSpec("learned", 7, skipped=2),
                    scale=0.5,
                ),
                norm=NormSpec("rms_unit_offset"),
            ),
        ),
        (
            OutputHeadSpec(
                "classes",
                13,
                "first",
                HeadTransformSpec(17, "gelu", NormSpec("layer_no_bias")),
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
        (stack(block(), embedding=EmbeddingSpec(11)),),
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
    decoder(block(), block(kv_layers_back=1), block(value_residual="learned")),
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
            layer = next(one for one in model.stacks if name.startswith(one.name)).layers
            if layer[int(name.split(".")[1])].kv_layers_back:  # it projects queries alone
                built = {key: shape for key, shape in built.items() if key[-2:] not in (".k", ".v")}
                assert not {f"{name}.project.k", f"{name}.project.v"} & set(names)
            assert built.items() <= model.shapes().items()


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


def test_a_description_needs_no_torch():
    code = (
        "import sys, headwise.models.model_spec; print(*{'torch', 'numpy', 'transformers'} & "
        "set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


# --- what is shared -------------------------------------------------------------------------------


def test_a_table_of_relative_positions_is_named_where_it_first_stands():
    bias = spec(
        modifiers=(hw.parts.T5Bias(buckets=8, reach=9),), similarity=hw.parts.DotProduct(scale=1.0)
    )
    named = decoder(*[block(bias)] * 3).shapes()
    assert [name for name in named if name.endswith("t5_bias.table")] == [
        "decoder.0.attention.t5_bias.table"
    ]
    assert sum(name.endswith("t5_bias.column") for name in named) == 3


def test_tables_of_another_shape_are_not_shared():
    few = spec(
        modifiers=(hw.parts.T5Bias(buckets=8, reach=9),), similarity=hw.parts.DotProduct(scale=1.0)
    )
    more = replace(few, modifiers=(hw.parts.T5Bias(buckets=4, reach=9),))
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

SCHEDULED = hw.design(model=12, heads=2, modifiers=(hw.parts.Differential(),))


def test_a_stack_places_schedules_by_depth():
    built = StackSpec.from_blocks("decoder", 12, [BlockSpec(SCHEDULED, SCHEDULED)] * 3)
    depths = [
        tuple(s.modifiers[0].depth for s in layer.attention_specs.values())  # pyright: ignore[reportAttributeAccessIssue] - it is one
        for layer in built.layers
    ]
    assert depths == [(0, 0), (1, 1), (2, 2)]
    assert StackSpec.from_blocks("decoder", 12, built.layers) == built


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
    assert eval(repr(model), NAMESPACE | REPR_NAMES) == model
    assert hash(model) == hash(model_spec.from_toml(str(model)))


def test_examples_have_every_field():
    """No field of a piece stands at its default in all of them, so each has made the journey."""
    text = "\n".join(model_spec.to_json(model) for model in EVERY)
    for name in model_spec.__all__:
        piece = getattr(model_spec, name)
        # no pieces of a description
        if isinstance(piece, type) and name not in ("WeightSpec", "ProcessorSpec"):
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


TABLES = Path(__file__).parent


@pytest.mark.parametrize(("does", "words"), refused_calls(TABLES / "refused_pieces.txt"))
def test_an_impossible_piece_is_refused(does: str, words: str):
    check_refused(does, words, hw.SpecError, globals())


def config(family: str, **options: Any) -> ModelSpec:
    return families.read_model_spec({"model_type": family, "num_hidden_layers": 2} | options)


@pytest.mark.parametrize(("does", "words"), refused_calls(TABLES / "refused_configs.txt"))
def test_an_impossible_config_is_refused(does: str, words: str):
    check_refused(does, words, hw.SpecError, globals())


def check_file_refused(at: object, words: str) -> None:
    names = globals() | {"at": at}
    check_refused("families.read_model_spec(at)", words, hw.SpecError, names)


def test_files_that_are_no_config_are_refused(tmp_path: Path):
    check_file_refused(tmp_path, "neither headwise.toml nor config.json")
    check_file_refused(tmp_path / "absent.json", "cannot be read")
    file = tmp_path / "config.json"
    for text, words in (
        ("{", "is not JSON: .. give a config.json"),
        ("[1]", "holds a list .. give a config.json"),
        ("[" * 100_000, "is nested too deeply; give"),
        ("1" * 5000, "is not JSON: a number has more than 4,300 digits; give a config.json"),
    ):
        file.write_text(text)
        check_file_refused(tmp_path, f"{file} {words}")
    file.write_bytes(b"\xff\xfe{}")
    check_file_refused(file, "is not UTF-8")
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    check_file_refused(str(tmp_path), f"{file}: hidden_size = 'wide'")


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
