"""Folders of transformers, read and written: the same numbers, the same tokens, the same tensors on
the way back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers as tf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

import headwise as hw
from anchors.hf import randomised
from anchors.hf_whole import BERT, GATED, LATENT, MODELS, VOCABULARY
from headwise.models import model_spec as bp
from headwise.models.vocabulary import train_bpe
from support.llama2c_tokenizer import FIRST, reference_tokenize
from support.stories_model import make_tokenizer

B, T, S = 2, 11, 13
PAIRS = ("t5", "t5-gated", "bart")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5}


def rope(table: dict[str, Any]) -> dict[str, Any]:
    return GATED | {
        "max_position_embeddings": 256,
        "rope_parameters": table | {"original_max_position_embeddings": 64},
    }


def gpt2(**options: Any) -> tf.GPT2Config:
    return tf.GPT2Config(
        n_embd=21, n_head=3, n_inner=29, n_layer=2, n_positions=23, vocab_size=VOCABULARY, **options
    )


# Besides those of hf_whole: what else their configs can say, and classes that stand on the same
# trunks.
MORE: dict[str, Callable[[], nn.Module]] = {
    "gpt2-by-depth": lambda: tf.GPT2LMHeadModel(gpt2(scale_attn_by_inverse_layer_idx=True)),
    "gpt2-trunk": lambda: tf.GPT2Model(gpt2()),
    "gpt2-classes": lambda: tf.GPT2ForSequenceClassification(gpt2(num_labels=5, pad_token_id=0)),
    "llama-tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GATED, tie_word_embeddings=True)),
    "llama-trunk": lambda: tf.LlamaModel(tf.LlamaConfig(**GATED)),
    "llama-span": lambda: tf.LlamaForQuestionAnswering(tf.LlamaConfig(**GATED)),
    "llama-3": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**rope(LLAMA3))),
    "llama-yarn": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**rope(YARN))),
    "llama-linear": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**rope({"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}))
    ),
    "qwen2": lambda: tf.Qwen2ForCausalLM(
        tf.Qwen2Config(**GATED, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    ),
    "deepseek-v2": lambda: tf.DeepseekV2ForCausalLM(
        tf.DeepseekV2Config(**(GATED | LATENT | {"topk_method": "greedy", "mlp_bias": True}))
    ),
    "bert-two-heads": lambda: tf.BertForPreTraining(tf.BertConfig(**BERT)),
}
ALL = MODELS | MORE
WRITTEN = (
    "gpt2",
    "gpt2-by-depth",
    "llama",
    "llama-tied",
    "llama-3",
    "llama-yarn",
    "llama-linear",
    "mistral",
)
WRITTEN += ("qwen2", "qwen3")


pytestmark = pytest.mark.usefixtures("without_gradients")


def saved_model(
    name: str, folder: Path, dtype: torch.dtype = torch.float64, **options: Any
) -> nn.Module:
    """A model of transformers with numbers that matter, and its folder."""
    theirs = randomised(ALL[name]()).to(dtype)
    for key, buffer in theirs.named_buffers():
        if key.endswith(("e_score_correction_bias", "final_logits_bias")):
            buffer.normal_()
    theirs.save_pretrained(folder, **options)
    return theirs


def ids(count: int) -> Tensor:
    """Ids 0 to 2 mean something to some models."""
    return torch.randint(3, VOCABULARY, (B, count))


def both(name: str, theirs: nn.Module, ours: hw.Transformer) -> list[tuple[Tensor, Tensor]]:
    """What each says of the same input, ours first."""
    x = ids(T)
    if name in PAIRS:
        source = ids(S)
        return [(ours(x, source=source), theirs(input_ids=source, decoder_input_ids=x).logits)]
    if name == "vit":
        pixels = torch.randn(B, 2, 11, 9, dtype=next(ours.parameters()).dtype)
        return [(ours(pixels), theirs(pixels).logits)]
    outputs = theirs(input_ids=x)
    if name.endswith("trunk"):
        return [(ours(x), outputs.last_hidden_state)]
    if name == "llama-span":
        return [(ours(x), torch.stack([outputs.start_logits, outputs.end_logits], -1))]
    if name == "bert-two-heads":
        return [
            (ours(x), outputs.prediction_logits),
            (ours(x, head="next"), outputs.seq_relationship_logits),
        ]
    return [(ours(x), outputs.logits)]


def check_close(name: str, theirs: nn.Module, ours: hw.Transformer) -> None:
    """To within a share of the largest number; rotary angles and RMSNorm are float32 in every dtype
    of theirs.
    """
    exact = (
        ours.spec.name in ("gpt2", "bert", "bart", "vit")
        and next(ours.parameters()).dtype == torch.float64
    )
    for got, expected in both(name, theirs, ours):
        assert expected.abs().max() > 0.1
        share = 1e-11 if exact else 1e-5
        torch.testing.assert_close(
            got, expected, rtol=0.0, atol=share * expected.abs().max().item()
        )


@pytest.mark.parametrize("name", ALL)
def test_outputs_equal_those_of_transformers(name: str, tmp_path: Path):
    theirs = saved_model(name, tmp_path)
    ours = hw.load(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.float64}
    assert not any(module.training for module in ours.modules())
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    check_close(name, theirs, ours)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "t5", "gpt-oss"])
def test_in_single_precision_too(name: str, tmp_path: Path):
    theirs = saved_model(name, tmp_path, torch.float32)
    check_close(name, theirs, hw.load(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_loading_preserves_the_dtype_of_the_file(dtype: torch.dtype, tmp_path: Path):
    """Numbers as they are; angles of rotary positions in their own precision."""
    theirs = saved_model("llama", tmp_path, dtype)
    ours = hw.load(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {dtype}
    assert torch.equal(ours.decoder.blocks[1].feed.up, theirs.model.layers[1].mlp.up_proj.weight)
    assert {b.dtype for b in ours.buffers()} == {torch.float64}
    assert torch.isfinite(ours(ids(T))).all()


def test_shards_are_put_together(tmp_path: Path):
    theirs = saved_model("qwen3", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    check_close("qwen3", theirs, hw.load(tmp_path))


# --- and back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITTEN)
def test_what_was_read_is_written_as_it_was(name: str, tmp_path: Path):
    """Every tensor to the bit, under its name; and the config says the same
    model to transformers.
    """
    theirs = saved_model(name, tmp_path / "theirs")
    hw.export(hw.load(tmp_path / "theirs"), tmp_path / "ours")
    one, two = (
        safetensors.torch.load_file(tmp_path / folder / "model.safetensors")
        for folder in ("theirs", "ours")
    )
    assert set(one) == set(two)
    assert all(torch.equal(one[key], two[key]) for key in one)
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(theirs)
    x = ids(T)
    torch.testing.assert_close(again(x).logits, theirs(x).logits, rtol=0.0, atol=1e-5)
    assert hw.load(tmp_path / "ours").spec == hw.load(tmp_path / "theirs").spec


def ours(form: str) -> bp.ModelSpec:
    """A model of our own that a format can say, sizes all different."""
    if form == "gpt2":
        spec = hw.design(model=21, heads=3, pattern="causal()", bias="qkvo")
        feed = bp.FeedForwardSpec(29, "relu", bias="ud")
        norm = bp.NormSpec("layer", 1e-3)
        positions = bp.PositionSpec("learned", 23)
    else:
        turns = (
            hw.parts.Rotary(
                base=300.0,
                scaling=hw.parts.YaRN(2.0, original=16, truncate=False, attention_factor=1.25),
            ),
        )
        own = {"model": 42 if form == "llama" else 21, "bias": "qkvo" if form == "llama" else ""}
        spec = hw.design(heads=6, kv=2, dim=10, pattern="causal()", modifiers=turns, **own)
        feed = bp.FeedForwardSpec(29, "gelu_tanh", "gated", "ugd" if form == "llama" else "")
        norm, positions = bp.NormSpec("rms", 1e-3), None
    embedding = bp.EmbeddingSpec(VOCABULARY, positions=positions)
    block = bp.BlockSpec(spec, feed=feed, norm=norm)
    stack = bp.StackSpec.from_blocks(
        "decoder", spec.model, [block] * 2, embedding=embedding, norm=norm
    )
    table = "decoder" if form == "gpt2" else ""
    return bp.ModelSpec(
        "mine", "decoder", (stack,), (bp.OutputHeadSpec("tokens", VOCABULARY, table=table),)
    )


@pytest.mark.parametrize("form", ["gpt2", "llama", "mistral"])
def test_a_model_of_ours_is_read_by_transformers(form: str, tmp_path: Path):
    """Nothing in the folder speaks of headwise, or asks for code. 21 channels on 6 heads are no
    llama there.
    """
    net, out = hw.build(ours(form), seed=0).eval(), tmp_path / "out"
    for p in net.parameters():
        p.copy_(p + 0.3 * torch.randn(p.shape))
    hw.export(net, out, max_length=None if form == "gpt2" else 77)
    tensors = {path.name: path.read_bytes() for path in out.iterdir()}
    assert sorted(tensors) == ["config.json", "model.safetensors"]
    assert not any(word in data for data in tensors.values() for word in (b"headwise", b"auto_map"))
    theirs = tf.AutoModelForCausalLM.from_pretrained(out).eval()
    assert theirs.config.model_type == form
    assert theirs.config.max_position_embeddings == (23 if form == "gpt2" else 77)
    check_same(net, theirs)
    prompt = ids(3)
    generated = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False
    )
    assert generated[:, 3:].tolist() == hw.generation.greedy_decode(net, prompt, max_new_tokens=9)


def check_same(net: hw.Transformer, theirs: nn.Module) -> None:
    x = ids(T)
    expected = theirs(x).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(net(x), expected, rtol=0.0, atol=1e-5 * expected.abs().max().item())


def test_a_tokenizer_goes_both_ways(tmp_path: Path):
    """The document is carried along, and transformers cuts text by it as it is, with what stands
    around a text.
    """
    words = train_bpe(["low lower lowest"] * 9, vocab_size=270, special_tokens=("<s>", "</s>"))
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 272}
    net = hw.build(
        hw.families.read_model_spec(
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | sizes
        )
    )
    for n, (before, behind) in enumerate((((), ()), ((0,), ()), ((0,), (1,)))):
        net.usage = bp.ProcessorSpec(
            prefix_ids=before, suffix_ids=behind, eos=(1,), tokenizer=words.document
        )
        out = tmp_path / str(n)
        hw.export(net, out)
        theirs = tf.AutoTokenizer.from_pretrained(out)
        assert theirs("the lowest").input_ids == [
            *before,
            *words.encode(["the lowest"])[0].tolist(),
            *behind,
        ]
        assert (theirs.bos_token_id, theirs.eos_token_id) == (before[0] if before else None, 1)
        assert tf.AutoConfig.from_pretrained(out).eos_token_id == 1
        again = hw.load(out).usage
        assert (again.prefix_ids, again.suffix_ids, again.eos, again.parse_special) == (
            before,
            behind,
            (1,),
            True,
        )
        assert (again.tokenizer == words.document) == (n == 0)


def test_transformers_makes_no_tokenizer_of_its_own(tmp_path: Path):
    """A Llama's would cut at other places than a document whose spaces are spaces."""
    pieces = [
        *FIRST,
        ("lo", -1.0),
        ("lo ", -2.0),
        *((char, -9.0 - n) for n, char in enumerate("low ")),
    ]
    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": len(pieces),
    }
    net = hw.build(
        hw.families.read_model_spec(
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | sizes
        )
    )
    net.usage = bp.ProcessorSpec(prefix_ids=(1,), tokenizer=make_tokenizer(pieces).to_str())
    hw.export(net, tmp_path / "out")
    theirs = tf.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("low lo w\n", " lo\u2581w", "lowlo \u00e9"):
        assert theirs(text).input_ids == [1, *reference_tokenize(pieces, text)]


def test_usage_settings_of_a_folder_are_read(tmp_path: Path):
    """Ids around a text as the tokenizer puts them, what begins and ends an answer, the mask, the
    names of classes.
    """
    saved_model("bert-classes", tmp_path)
    words = {
        word: n for n, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"))
    }
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.post_processor = TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(list(words)[:5])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    (tmp_path / "tokenizer_config.json").write_text('{"mask_token": "[MASK]"}')
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"] = {str(n): f"class {n}" for n in range(5)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    usage = hw.load(tmp_path).usage
    assert (usage.prefix_ids, usage.suffix_ids, usage.mask, usage.eos) == ((2,), (3,), 4, ())
    assert usage.labels == tuple(f"class {n}" for n in range(5))
    saved_model("t5", tmp_path / "t5")
    (tmp_path / "t5" / "generation_config.json").write_text(
        '{"decoder_start_token_id": 0, "eos_token_id": [1, 36, 37]}'
    )
    assert (hw.load(tmp_path / "t5").usage.bos, hw.load(tmp_path / "t5").usage.eos) == (
        (0,),
        (1, 36),
    )
