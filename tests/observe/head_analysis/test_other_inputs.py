"""Heads of models that read images or sound, that pad or pool texts, and that a run must find: entropies
are those of the attentions that transformers returns."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import headwise as hw
from headwise.observe.head_analysis.head_metrics import WORD_METRICS
from support.vision_attentions import HEADS, WIDE, FusedAttention

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT: dict[str, Any] = {**SMALL, "vocab_size": 300, "max_position_embeddings": 128}
IMAGE: dict[str, Any] = {**SMALL, "image_size": 28, "patch_size": 14}
CONV: dict[str, Any] = {
    "conv_dim": [16, 16],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
}
SOUND: dict[str, Any] = {
    **SMALL,
    **CONV,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
SPEECH: dict[str, Any] = {
    "vocab_size": 300,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_source_positions": 20,
    "max_target_positions": 20,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}


def ids(count=12):
    return torch.randint(3, 200, (1, count))


def clip():
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=16)
    return transformers.CLIPModel(config), lambda: {
        "input_ids": ids(),
        "pixel_values": torch.randn(1, 3, 28, 28),
    }


def whisper():
    config = transformers.WhisperConfig(**SPEECH)
    model = transformers.WhisperForConditionalGeneration(config)
    return model, lambda: {"input_features": torch.randn(1, 80, 40), "decoder_input_ids": ids()}


def wav2vec2():
    model = transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**SOUND))
    return model, lambda: {"input_values": torch.randn(1, 400)}


def funnel():
    config = transformers.FunnelConfig(
        vocab_size=300, d_model=32, n_head=4, d_head=8, d_inner=48, block_sizes=[1, 1]
    )
    return transformers.FunnelModel(config), lambda: {"input_ids": ids()}


def xlnet():
    config = transformers.XLNetConfig(vocab_size=300, d_model=32, n_layer=2, n_head=4, d_inner=48)
    return transformers.XLNetModel(config), lambda: {"input_ids": ids()}


def longformer():
    model = transformers.LongformerModel(transformers.LongformerConfig(**TEXT, attention_window=8))
    return model, lambda: {"input_ids": ids(13)}  # padded to 16 tokens


def list_attentions(output):
    """The attentions of every layer in the order of the table: encoder, decoder with cross, or towers."""
    names = ("text_model_output", "vision_model_output")
    parts = [output[name].attentions for name in names if name in output]
    if output.get("encoder_attentions") is not None:
        decoder = [
            pair
            for layers in zip(output.decoder_attentions, output.cross_attentions, strict=True)
            for pair in layers
        ]
        parts = [output.encoder_attentions, decoder]
    return [layer for part in parts or [output.attentions] for layer in part]


@pytest.mark.parametrize("make", [clip, whisper, wav2vec2, funnel, xlnet, longformer])
def test_measures_are_means_over_the_attentions_of_transformers(make):
    torch.manual_seed(0)
    model, make_inputs = make()
    model.eval().set_attn_implementation("eager")
    texts = [make_inputs() for _ in range(3)]
    table = hw.heads(model, texts)
    sums, counts = torch.zeros(2, len(table.heads))
    for text in texts:
        with torch.no_grad():
            layers = list_attentions(model(**text, output_attentions=True))
        # Longformer returns the weights within the window, of a text without its padding
        entropies = torch.cat([-(w * w.clamp(min=1e-30).log()).sum(-1)[0].sum(-1) for w in layers])
        sums += entropies
        counts += torch.tensor([float(w.shape[2]) for w in layers for _ in range(4)])
    measured = torch.tensor([head.measures["entropy"].value for head in table.heads])
    torch.testing.assert_close(measured, sums / counts, rtol=0, atol=1e-5)


def test_tokens_that_are_counted_only_have_no_measures_of_words():
    torch.manual_seed(0)
    model, make_inputs = clip()
    table = hw.heads(model.eval(), [make_inputs() for _ in range(3)])
    for head in table.heads:
        is_text = head.site.startswith("text")
        assert {name in head.measures for name in WORD_METRICS} == {is_text}, head.site
        assert "previous" in head.measures


def test_equal_numbers_of_patches_and_tokens_are_not_confused():
    torch.manual_seed(0)
    model, _ = clip()  # 4 patches and a class token
    texts = [{"input_ids": ids(5), "pixel_values": torch.randn(1, 3, 28, 28)} for _ in range(3)]
    for head in hw.heads(model.eval(), texts).heads:
        assert ("punctuation" in head.measures) == head.site.startswith("text")


def test_heads_of_both_towers_matter_for_the_embeddings():
    torch.manual_seed(0)
    model, make_inputs = clip()
    texts = [make_inputs() for _ in range(3)]
    result = hw.importance(model.eval(), texts)
    assert result.objective == "drift"
    assert all(head.measure.value > 0 for head in result.heads)
    assert len(result.heads) == 16
    assert type(hw.prune(model, 0.5, texts)).__name__ == "ModuleChange"


class PlainVision(torch.nn.Module):
    """A vision transformer without a config, as in timm: a class token before 2 x 3 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = torch.nn.Conv2d(3, WIDE, kernel_size=4, stride=4)
        self.cls_token = torch.nn.Parameter(torch.randn(1, 1, WIDE))
        self.position = torch.nn.Parameter(torch.randn(1, 7, WIDE))
        self.blocks = torch.nn.ModuleList([FusedAttention(), FusedAttention()])

    def forward(self, image: Tensor) -> Tensor:
        patches = self.patch_embed(image).flatten(2).mT
        x = torch.cat((self.cls_token.expand(len(image), -1, -1), patches), 1) + self.position
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_vision_model_without_a_config_shows_its_grid_by_its_patch_convolution():
    torch.manual_seed(0)
    model, images = PlainVision().eval(), torch.randn(3, 3, 8, 12)
    table = hw.heads(model, images)
    assert table.texts == "3 images"
    traces = [hw.trace(model, image[None]) for image in images]
    weights = torch.stack([torch.as_tensor(trace.weights(1)) for trace in traces]).double()
    # of each patch: the weight on itself, and on the other patches of its row
    rows = torch.arange(6) // 3
    same_row = (rows[:, None] == rows) & ~torch.eye(6, dtype=torch.bool)
    # of the weight that the sink leaves, here the class token
    patches = weights[:, :, 1:, 1:] / (1 - weights[:, :, 1:, :1])
    for head in table.heads[HEADS:]:
        own = patches[:, head.head]
        found = {name: head.measures[name].value for name in ("same_patch", "same_row")}
        assert found["same_patch"] == pytest.approx(own.diagonal(0, 1, 2).mean().item(), abs=1e-6)
        expected = (own * same_row).sum(-1).mean().item()
        assert found["same_row"] == pytest.approx(expected, abs=1e-6)


def test_windows_of_an_image_are_refused_as_no_grid():
    model = PlainVision().eval()
    model.blocks = model.blocks[:1]
    model.forward = lambda image: model.blocks[0](model.patch_embed(image).flatten(2).mT[:, :4])
    with pytest.raises(hw.SpecError, match=r"over its 2 x 3 patches \(tokens: 4\)"):
        hw.heads(model, torch.randn(2, 3, 8, 12))
