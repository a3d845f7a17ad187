"""Conversion of attention in whole models: pooling, splitting, merging and routing of heads."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.surgery import HeadRanking, Pool, ToCollaborative, ToLatent, ToMHA, ToMixtureOfHeads
from headwise.surgery.any_model import convert
from headwise.surgery.attention_replacement import get_attention, get_attention_parameters
from headwise.surgery.conversion import MAX_STATISTICS
from support.importance_examples import (
    BERT,
    GPT2,
    WORDS,
    build_model,
    make_examples,
    model_output,
    translator,
    with_random_biases,
)
from support.refusals import refused_cases

LLAMA = {
    "model_type": "llama",
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 20,
    "vocab_size": WORDS,
}
ALIGNED = Pool(2, align="both", grouping="similar")


def grouped(kv: int) -> dict[str, Any]:
    return LLAMA | {"num_key_value_heads": kv}


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_pooling_takes_means_of_neighbours():
    net = with_random_biases(build_model(LLAMA))
    done = convert(net, 3)
    for layer in (0, 1):
        site = f"decoder.{layer}.attention"
        for side in "kv":
            old, new = (
                get_attention_parameters(one, site)[f"project.{side}"] for one in (net, done.after)
            )
            close(new.view(3, 4, 24), old.view(3, 2, 4, 24).mean(1))
        close(
            get_attention_parameters(done.after, site)["project.q"],
            get_attention_parameters(net, site)["project.q"],
        )
    assert [spec.heads.kv_head_of_query for _, spec in done.after.spec.attention_specs()] == [
        (0, 0, 1, 1, 2, 2)
    ] * 2
    assert done.after.cache(batch=1, capacity=5).nbytes * 2 == net.cache(batch=1, capacity=5).nbytes


@pytest.mark.parametrize(
    "build",
    [
        lambda: build_model(LLAMA),
        lambda: build_model(BERT | {"num_attention_heads": 4}),
        translator,
    ],
)
def test_alignment_keeps_the_outputs_before_pooling(build):
    net = with_random_biases(build())
    kv = {spec.heads.kv for _, spec in net.spec.attention_specs()}
    texts = make_examples(net)
    if kv != {3, 2}:
        done = convert(net, ALIGNED, texts)
        assert done.equivalent is not None
        close(model_output(done.equivalent), model_output(net))
        assert {spec.heads.kv for _, spec in done.after.spec.attention_specs()} == {2}
        missed = [lost for one in done.layers.values() for lost in one.pooling_errors.values()]
        assert missed
        assert all(after <= before + 1e-12 for before, after in missed)
        return
    done = convert(net, Pool(1, align="values"), texts, kind="cross")
    assert done.equivalent is not None
    close(model_output(done.equivalent), model_output(net))
    sizes = {site: spec.heads.kv for site, spec in done.after.spec.attention_specs()}
    assert {kv for site, kv in sizes.items() if site.endswith("cross")} == {1}
    assert {kv for site, kv in sizes.items() if site.endswith("attention")} == {3}


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_equal_heads_are_found_and_pooled_without_loss(family: str):
    """Heads 0 and 3, 1 and 4, 2 and 5 say the same; neighbours do not. OLMo 2 normalises all heads
    of queries, and all of keys, as one vector.
    """
    net = with_random_biases(build_model(LLAMA | {"model_type": family}))
    with torch.no_grad():
        for layer in (0, 1):
            project = get_attention(net, f"decoder.{layer}.attention").weights["project"]
            for side in "kv":
                project[side].view(2, 3, 4, 24)[1] = project[side].view(2, 3, 4, 24)[0]
            if family == "olmo2":
                gains = get_attention(net, f"decoder.{layer}.attention").weights["qk_norm"]["k"]
                gains.view(2, 12)[1] = gains.view(2, 12)[0]
    done = convert(net, Pool(3, grouping="similar"), make_examples(net))
    assert set(done.groups.values()) == {((0, 3), (1, 4), (2, 5))}
    close(model_output(done.after), model_output(net))
    assert not torch.allclose(model_output(convert(net, 3).after), model_output(net), atol=1e-2)


@pytest.mark.parametrize("way", [ToMHA(), ToLatent()], ids=["split", "merged"])
def test_exact_conversions_keep_the_outputs(way):
    net = with_random_biases(build_model(grouped(2)))
    done = convert(net, way)
    close(model_output(done.after), model_output(net))
    assert way.is_exact
    if way == ToMHA():
        assert {spec.heads.kv for _, spec in done.after.spec.attention_specs()} == {6}
        again = convert(done.after, 2).after
        close(model_output(again), model_output(net))


def test_collaborative_heads_of_full_width_keep_the_outputs():
    net = with_random_biases(build_model(GPT2))
    done = convert(net, ToCollaborative(12))
    close(model_output(done.after), model_output(net))
    assert "relative error of attention scores 0.00%" in done.notes[0]
    small = convert(net, ToCollaborative(6))
    assert hw.costs.count_parameters(small.after.spec) < hw.costs.count_parameters(net.spec)


def test_routing_keeps_the_most_important_heads_open():
    net = with_random_biases(build_model(GPT2))
    texts = make_examples(net)
    done = convert(net, ToMixtureOfHeads(1, 2, HeadRanking("michel")), texts)
    close(model_output(done.after), model_output(net))
    found = hw.estimate_importance(net, texts, method="michel")
    first = [
        max(range(3), key=lambda head, n=layer: found.head(f"decoder.{n}.attention", head).value)
        for layer in (0, 1)
    ]
    slots = [
        get_attention_parameters(done.after, f"decoder.{layer}.attention")[
            "mixture_of_heads.slot"
        ].tolist()
        for layer in (0, 1)
    ]
    assert [slot.index(0) for slot in slots] == first
    one = convert(net, ToMixtureOfHeads(1, 1, HeadRanking("michel")), texts).after
    assert not torch.allclose(model_output(one), model_output(net), atol=1e-3)


def test_texts_are_read_as_often_as_sums_need_room(monkeypatch):
    net, recorded = with_random_biases(build_model(LLAMA)), list[str]()
    convert(net, ALIGNED, make_examples(net), log=recorded.append)
    assert sum("keys and values of 5 examples" in line for line in recorded) == 1
    assert MAX_STATISTICS > 2**20
    monkeypatch.setattr("headwise.surgery.conversion.MAX_STATISTICS", 1)
    recorded.clear()
    convert(net, ALIGNED, make_examples(net), log=recorded.append)
    assert sum("keys and values of 5 examples" in line for line in recorded) == 2


@pytest.mark.parametrize(("way", "message"), refused_cases(__file__, "conversions", globals()))
def test_impossible_conversions_are_reported(way, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        convert(build_model(LLAMA), way) if not isinstance(way, ToMixtureOfHeads) else convert(
            build_model(LLAMA), way, make_examples(build_model(LLAMA))
        )


def test_unknown_options_are_reported():
    for make, message in [
        (
            lambda: Pool(2, align="both sides"),
            "unknown align='both sides'; use one of both, keys, none, values",
        ),
        (
            lambda: Pool(2, grouping="alike"),
            "unknown grouping='alike'; use one of consecutive, similar",
        ),
        (
            lambda: convert(build_model(GPT2), 1, kind="crosses"),
            "unknown kind='crosses'; did you mean 'cross'",
        ),
        (
            lambda: convert(build_model(GPT2), 1, kind="cross"),
            "gpt2 has no cross-attention",
        ),
    ]:
        with pytest.raises(hw.SpecError, match=re.escape(message)):
            make()
    with pytest.raises(ValueError, match="Linear is no model of transformers or headwise"):
        convert(torch.nn.Linear(2, 2), 2)
