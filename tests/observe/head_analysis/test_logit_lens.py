"""Logit lens against the states of plain transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headwise as hw
from headwise.hub.pretrained_models import copy_live_model
from headwise.observe.head_analysis.logit_lens import logit_lens
from support.plain_patching import CLEAN
from support.transformers_models import BERT, ZOO

NORMS = {
    "gpt2": ("transformer.h", "ln_2", "transformer.ln_f"),
    "llama": ("model.layers", "post_attention_layernorm", "model.norm"),
    "gemma2": ("model.layers", "pre_feedforward_layernorm", "model.norm"),
}


@pytest.mark.parametrize("name", NORMS)
def test_steps_equal_plain_states(name):
    model: Any = ZOO[name].build("eager")
    (layers, middle, final) = NORMS[name]
    entering: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: torch.nn.Module, args: Any) -> None:
            entering[name] = args[0]

        return hook

    handles: list[Any] = []
    for number, layer in enumerate(model.get_submodule(layers)):
        handles.append(layer.register_forward_pre_hook(keep(f"block {number - 1}")))
        before_mlp = layer.get_submodule(middle)
        handles.append(before_mlp.register_forward_pre_hook(keep(f"attention {number}")))
    with torch.no_grad():
        logits = model(input_ids=CLEAN).logits
        for handle in handles:
            handle.remove()
        entering["embedding"] = entering.pop("block -1")
        head = model.get_output_embeddings()
        norm = model.get_submodule(final)
        expected = {name: head(norm(state))[0, 3] for name, state in entering.items()}
        cap = getattr(model.config, "final_logit_softcapping", None)
        if cap:
            expected = {name: cap * torch.tanh(row / cap) for name, row in expected.items()}
    expected["block 1"] = logits[0, 3]
    for each in (model, copy_live_model(model)):
        lens = logit_lens(each, CLEAN, (7, 12), position=3)
        assert [one.step for one in lens.steps] == [
            "embedding",
            "attention 0",
            "block 0",
            "attention 1",
            "block 1",
        ]
        for one in lens.steps:
            row = expected[one.step]
            assert one.logit == pytest.approx(float(row[7]), rel=1e-4, abs=1e-5)
            assert one.difference == pytest.approx(float(row[7] - row[12]), rel=1e-4, abs=1e-4)
            assert one.log_probability == pytest.approx(float(row.log_softmax(-1)[7]), rel=1e-4)
            assert one.rank == 1 + int((row > row[7]).sum())
            (word, probability) = one.likeliest[0]
            assert probability == pytest.approx(float(row.softmax(-1).max()), rel=1e-4)
            assert word == str(int(row.argmax()))
        with torch.no_grad():
            own = each(CLEAN)
        own = own if isinstance(own, torch.Tensor) else own.logits
        assert lens.steps[-1].logit == float(own[0, 3, 7])
    texts = str(lens).splitlines()
    assert max(map(len, texts)) <= 80


def test_the_default_token_is_the_likeliest():
    model = ZOO["llama"].build()
    lens = logit_lens(model, CLEAN[:, :1])
    assert lens.steps[-1].rank == 1
    assert lens.steps[-1].difference is None
    assert len(lens.steps[0].likeliest) == 5
    assert "difference" not in str(lens)


def test_blocks_whose_mlp_is_unknown_have_one_step():
    spec = hw.families.read_model_spec(
        {"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 32, "vocab_size": 67}
    )
    assert len(logit_lens(hw.build(spec, seed=0).eval(), CLEAN).steps) == 5
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(vocab_size=67, hidden_size=32, n_layer=2, n_head=4)
    model = transformers.BloomForCausalLM(config).eval()
    assert [one.step for one in logit_lens(model, CLEAN).steps] == [
        "embedding",
        "block 0",
        "block 1",
    ]


@pytest.mark.parametrize("name", ["bert", "openai-gpt"])
def test_blocks_that_end_in_a_norm_have_one_step(name):
    """The stream after the attention passes the norm of the MLP too, so it is no step."""
    transformers = pytest.importorskip("transformers")
    config = {
        "bert": transformers.BertConfig(**BERT),
        "openai-gpt": transformers.OpenAIGPTConfig(n_embd=32, n_head=4, n_layer=2, vocab_size=67),
    }[name]
    kinds = {"bert": "BertForMaskedLM", "openai-gpt": "OpenAIGPTLMHeadModel"}
    model = getattr(transformers, kinds[name])(config).eval()
    for each in (model, copy_live_model(model)) if name == "bert" else (model,):
        steps = [one.step for one in logit_lens(each, CLEAN).steps]
        assert steps == ["embedding", "block 0", "block 1"]


def test_a_convolution_is_no_attention_step():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 67, "num_hidden_layers": 2}
    kinds = ["conv", "full_attention"]
    config = transformers.Lfm2Config(
        **sizes, num_attention_heads=4, num_key_value_heads=2, layer_types=kinds
    )
    lens = logit_lens(transformers.Lfm2ForCausalLM(config).eval(), CLEAN)
    assert [one.step for one in lens.steps] == ["embedding", "block 0", "attention 1", "block 1"]


def test_several_residual_streams_are_refused():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 67, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 67}
    config = transformers.Gemma3nTextConfig(
        **sizes,
        **heads,
        **per_layer,
        laurel_rank=4,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
        activation_sparsity_pattern=[0.0, 0.0],
    )
    model = transformers.Gemma3nForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"carries states \[4, 1, 7, 32\] instead of"):
        logit_lens(model, CLEAN)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gpt2", {"position": 7}, "the text has 7 tokens and no position 7"),
        (
            "gpt2",
            {"tokens": (67,)},
            r"^token 67 is out of range: the model has outputs for tokens 0\.\.66",
        ),
        ("gpt2", {"tokens": (1, 2, 3)}, "got 3 tokens; give one, or two"),
        ("gpt2", {"tokens": ("cat",)}, "comes with no tokenizer"),
        ("gpt2", {"inputs": "a cat"}, "comes with no tokenizer"),
        ("gpt2", {"inputs": CLEAN.expand(2, -1)}, "got 2 texts; give one"),
        ("bert", {}, "BertModel has no output head over the tokens of its text"),
        (
            "t5",
            {"inputs": {"input_ids": CLEAN, "decoder_input_ids": CLEAN}},
            "2 stacks of layers instead of one residual stream",
        ),
    ],
)
def test_what_has_no_lens_is_refused(name, options, words):
    with pytest.raises(ValueError, match=words):
        logit_lens(ZOO[name].build(), **{"inputs": CLEAN, **options})
