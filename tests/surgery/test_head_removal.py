"""Removal of heads from whole models: outputs equal those of the model with the heads ablated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import headwise as hw
from headwise.models import Transformer, model_spec as bp
from headwise.surgery.attention_replacement import (
    AttentionChange,
    get_attention,
    get_attention_parameters,
    remove_heads,
    replace_attentions,
)
from support import spec_strategies as strategies
from support.importance_examples import (
    BERT,
    GPT2,
    LLAMA,
    WORDS,
    build_model,
    model_output,
    random_ids,
    translator,
    with_random_biases,
    with_uneven_attention,
)
from support.refusals import refused_cases

T5 = {
    "model_type": "t5",
    "d_model": 12,
    "d_kv": 5,
    "num_heads": 3,
    "num_layers": 3,
    "d_ff": 20,
    "vocab_size": WORDS,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
PLACEMENTS = ("pre", "post", "post_sublayer", "sandwich", "parallel", "parallel_two_norms")


def stacked(
    spec: hw.AttentionSpec, placement: str, scale: float = 1.0, layers: int = 2
) -> Transformer:
    """A model of layers with this attention."""
    block = bp.BlockSpec(spec, feed=bp.FeedForwardSpec(11), placement=placement, scale=scale)
    stack = bp.StackSpec.from_blocks(
        "decoder",
        spec.model,
        [block] * layers,
        embedding=bp.EmbeddingSpec(WORDS),
        norm=bp.NormSpec(),
    )
    return with_uneven_attention(
        hw.build(
            bp.ModelSpec("small", "decoder", (stack,), (bp.OutputHeadSpec("tokens", WORDS),)),
            seed=0,
        ),
        2.0,
    )


def removed_heads(net: Transformer, keep: dict[str, Any]) -> list[tuple[str, int]]:
    """The heads that a plan removes."""
    heads = {
        name: range(len(spec.score_head_of_output)) for name, spec in net.spec.attention_specs()
    }
    return [(site, head) for site, keep in keep.items() for head in heads[site] if head not in keep]


def check_cut(net: Transformer, keep: dict[str, Any]) -> Transformer:
    """Silenced = cut; the model itself is left as it was."""
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    small = remove_heads(net, keep)
    with hw.ablate(net, removed_heads(net, keep)):
        silent = model_output(net)
    torch.testing.assert_close(model_output(small), silent, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert sum(p.numel() for p in small.parameters()) == hw.costs.count_parameters(small.spec)
    assert not {p.data_ptr() for p in small.parameters()} & {p.data_ptr() for p in net.parameters()}
    return small


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("keep", [(0, 2), ()], ids=["some", "none"])
def test_pruned_equals_ablated_for_every_norm_placement(placement, keep):
    net = with_random_biases(
        stacked(hw.design(model=12, heads=3, bias="qkvo", pattern="causal"), placement, scale=0.7)
    )
    small = check_cut(net, {"decoder.0.attention": keep})
    assert small.spec.stacks[0].layers[0].constant_sublayers == (() if keep else ("attention",))
    check_cut(small, {"decoder.1.attention": (1,)})


@pytest.mark.parametrize("config", [GPT2, BERT, LLAMA], ids=lambda config: config["model_type"])
def test_pruned_equals_ablated_in_model_families(config):
    net = with_random_biases(build_model(config))
    stack = net.spec.stacks[0].name
    small = check_cut(net, {f"{stack}.0.attention": (1,), f"{stack}.1.attention": (0, 2)})
    assert [spec.heads.q for _, spec in small.spec.attention_specs()] == [1, 2]


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_cross_attention_is_cut_and_goes(placement):
    net = with_random_biases(translator(placement=placement))
    keep = {
        "encoder.0.attention": (2,),
        "decoder.0.cross": (),
        "decoder.1.cross": (1,),
        "decoder.1.attention": (),
    }
    small = check_cut(net, keep)
    assert [block.sublayer_names for block in small.spec.stacks[1].layers] == [
        ("attention", "cross", "feed")
    ] * 2
    source, text = random_ids(3, 6), random_ids(4, 5)
    cache, memory = small.cache(batch=1, capacity=9), small.encode(source)
    steps = [small(text[:, t : t + 1], source=memory, cache=cache) for t in range(5)]
    torch.testing.assert_close(
        torch.cat(steps, 1), small(text, source=source), rtol=1e-9, atol=1e-9
    )


def test_a_table_that_layers_share_stays_one_and_finds_another_owner():
    net = with_random_biases(build_model(T5))
    with torch.no_grad():
        get_attention(net, "encoder.0.attention").weights["t5_bias"]["table"].normal_()
    some = check_cut(net, {"encoder.0.attention": (2, 0), "encoder.2.attention": (1,)})
    assert [n for n in some.state_dict() if "encoder" in n and "table" in n] == [
        "encoder.0.attention.t5_bias.table"
    ]
    assert get_attention(some, "encoder.2.attention").weights["t5_bias"]["column"].tolist() == [1]
    late = check_cut(net, {"encoder.0.attention": ()})
    assert [n for n in late.state_dict() if "encoder" in n and "table" in n] == [
        "encoder.1.attention.t5_bias.table"
    ]
    table = get_attention_parameters(net, "encoder.1.attention")["t5_bias.table"]
    own = get_attention_parameters(net, "encoder.1.attention") | {"t5_bias.table": table + 1}
    alone = AttentionChange(get_attention(net, "encoder.1.attention").spec, own)
    with pytest.raises(hw.SpecError, match="shared with other layers"):
        replace_attentions(net, {"encoder.1.attention": alone})


@settings(max_examples=12)
@given(st.data())
def test_pruned_equals_ablated_for_any_spec(data):
    spec = data.draw(strategies.specs().filter(lambda spec: spec.source is None))
    try:
        net = stacked(spec, data.draw(st.sampled_from(PLACEMENTS)))
    except hw.SpecError:  # a schedule by depth, or a part that stands only once
        return
    outs = len(spec.score_head_of_output)
    keep = tuple(sorted(data.draw(st.sets(st.integers(0, outs - 1)))))
    small = remove_heads(net, {"decoder.0.attention": keep})
    x = random_ids(0, 5)
    with torch.no_grad(), hw.ablate(net, [(0, head) for head in range(outs) if head not in keep]):
        silent = net(x)
    with torch.no_grad():
        torch.testing.assert_close(small(x), silent, rtol=1e-7, atol=1e-7)


def test_a_vector_replaces_removed_attention():
    net = with_random_biases(
        stacked(hw.design(model=12, heads=3, bias="", pattern="causal"), "pre")
    )
    means = {
        "decoder.0.attention": torch.arange(12.0).double(),
        "decoder.1.attention": torch.ones(12).double(),
    }
    small = remove_heads(net, {"decoder.0.attention": (0, 2), "decoder.1.attention": ()}, means)
    specs = dict(small.spec.attention_specs())
    assert specs["decoder.0.attention"].merge.bias == "o"
    assert torch.equal(
        get_attention_parameters(small, "decoder.0.attention")["output.o_bias"],
        means["decoder.0.attention"],
    )
    assert torch.equal(
        small.state_dict()["decoder.1.attention.constant"], means["decoder.1.attention"]
    )


@pytest.mark.parametrize(("keep", "message"), refused_cases(__file__, "removals", globals()))
def test_impossible_removals_are_reported(keep, message):
    with pytest.raises(hw.SpecError, match=message):
        remove_heads(build_model(GPT2), keep)


def test_a_mean_that_rides_on_the_same_heads_is_not_cut():
    spec = hw.design(model=12, heads=3)
    merged = bp.BlockSpec(cross=spec, feed=bp.FeedForwardSpec(11), form="merged")
    own = bp.BlockSpec(spec, feed=bp.FeedForwardSpec(11))
    stacks = (
        bp.StackSpec.from_blocks("encoder", 12, [own], embedding=bp.EmbeddingSpec(WORDS)),
        bp.StackSpec.from_blocks("decoder", 12, [merged], embedding=bp.EmbeddingSpec(WORDS)),
    )
    net = hw.build(
        bp.ModelSpec("small", "encoder-decoder", stacks, (bp.OutputHeadSpec("tokens", WORDS),)),
        seed=0,
    )
    with pytest.raises(hw.SpecError, match=r"for cross-attention and for its running mean"):
        remove_heads(net, {"decoder.0.cross": (0,)})
    with pytest.raises(hw.SpecError, match=r"cannot remove all heads|merged block"):
        remove_heads(net, {"decoder.0.cross": ()})
