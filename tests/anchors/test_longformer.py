"""Longformer as transformers has it: the same hidden states through its layers and through our
block.
"""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headwise as hw
from anchors.hf import Site, linear, randomised

B, T, LAYERS = 3, 12, 2
WINDOWS = (4, 6)  # of each layer: their number leaves the query's own key out and is even
GLOBALS = (0, 4, 5)
LENGTHS = [T, 9, 5]  # in the last row the last two global tokens stand at and beyond the end


@pytest.fixture(autouse=True)
def exact_softmax(monkeypatch: pytest.MonkeyPatch):
    """Theirs is taken in float32 whatever comes in: in float64 nothing else is left to differ."""
    plain = nn.functional.softmax

    def softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return plain(scores, dim=dim)

    monkeypatch.setattr(nn.functional, "softmax", softmax)
    with torch.no_grad():
        yield


def longformer() -> nn.Module:
    config = tf.LongformerConfig(
        vocab_size=37,
        hidden_size=15,
        num_attention_heads=3,
        num_hidden_layers=LAYERS,
        intermediate_size=29,
        attention_window=list(WINDOWS),
        attn_implementation="eager",
    )
    return randomised(tf.LongformerModel(config))


def site(attention: nn.Module, window: int) -> Site:
    """One of their layers, beside our spec."""
    inner, outer = attention.self, attention.output.dense
    pattern = hw.patterns.Window(keys=window + 1, after=window // 2) | hw.patterns.Global(GLOBALS)
    return Site(
        inner,
        outer,
        hw.design(model=15, heads=3, bias="qkvo", pattern=pattern),
        {},
        ("attentions", 0),
    )


def block(site: Site) -> hw.attention.LongformerAttention:
    """Ours, with their weights."""
    ours, inner = hw.attention.LongformerAttention(site.spec).double().eval(), site.reads
    weights = linear("local.output.o", site.writes)
    for side, name in zip("qkv", ("query", "key", "value"), strict=True):
        weights |= linear(f"local.project.{side}", getattr(inner, name))
        weights |= linear(f"overall.project.{side}", getattr(inner, f"{name}_global"))
    ours.load_state_dict(weights)
    return ours


def padded_inputs(pad: str) -> tuple[dict[str, Tensor], hw.SequenceInfo]:
    """What their model is given, and our tokens."""
    x = torch.zeros(B, T)
    tokens = (
        hw.SequenceInfo.from_batch(x)
        if pad == "none"
        else hw.SequenceInfo.from_batch(x, lengths=LENGTHS, pad=pad)
    )
    live, position = tokens.is_real.expand(B, -1), tokens.position.expand(B, -1)
    chosen = torch.isin(position, torch.tensor(GLOBALS)) & live
    options = {"input_ids": torch.randint(2, 37, (B, T)), "attention_mask": live.long()}
    return options | {"global_attention_mask": chosen.long()}, tokens


@pytest.mark.parametrize("pad", ["none", "right", "left"])
def test_layers_agree(pad: str, record_property):
    """At every token that is no padding; each row has other global tokens when rows are padded on
    the left.
    """
    model = longformer()
    sites = [
        site(layer.attention, window)
        for layer, window in zip(model.encoder.layer, WINDOWS, strict=True)
    ]
    hooks = [hook for each in sites for hook in each.hooks()]
    options, tokens = padded_inputs(pad)
    model(**options)
    for hook in hooks:
        hook.remove()
    live, worst = tokens.is_real.expand(B, -1), 0.0
    for each in sites:
        theirs = each.outputs[0][live]
        ours = block(each)(each.inputs[0], sequence=None if pad == "none" else tokens)[live]
        worst = max(worst, ((ours - theirs).abs().max() / theirs.abs().max()).item())
    record_property("worst", worst)
    assert worst < 1e-12


def test_the_two_sets_of_projections_differ():
    """What the anchor above rests on: one set in both places is another function."""
    each = site(longformer().encoder.layer[0].attention, WINDOWS[0])
    ours, x = block(each), torch.randn(B, T, 15, dtype=torch.float64)
    plain = hw.Attention(each.spec).double()
    plain.load_state_dict(ours.local.state_dict())
    distance = (ours(x) - plain(x)).abs().amax((0, 2))
    assert (distance[list(GLOBALS)] > 0.1).all()
    others = [t for t in range(T) if t not in GLOBALS]
    assert (distance[others] == 0).all()
