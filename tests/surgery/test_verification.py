"""Compression verification reports: equality, savings, and the report."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.models import model_spec as bp
from headwise.observe.inspect.model_inputs import ModelInputs
from headwise.surgery.attention_replacement import remove_heads
from headwise.surgery.verification.efficiency import (
    TimedPhase,
    TimingOptions,
    compare_cost,
    summarise_rounds,
)
from headwise.surgery.verification.model_comparison import (
    OutputComparison,
    build_ablations,
    compare_ablated,
    compare_outputs,
    compute_output,
)
from headwise.surgery.verification.verify import (
    VerificationOptions,
    render_summary,
    render_verification,
    verify,
    write_verification,
)
from support.flop_counting import flop_counter
from support.pruned_models import (
    KEEP,
    KINDS,
    build_model,
    make_attention,
    make_examples,
    make_model_spec,
)

QUICK = TimingOptions(length=16, steps=2, seconds=0.01)


def two(kind):
    """A model of this kind, before and after."""
    net = build_model(make_model_spec(kind))
    net.usage = {
        "encoder": hw.ProcessorSpec(mask=1),
        "encoder-decoder": hw.ProcessorSpec(bos=(1,), eos=(2,)),
    }.get(kind, net.usage)
    return net, remove_heads(net, KEEP[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_pruned_model_equals_ablation_of_its_heads_only(kind):
    net, after = two(kind)
    single, exact = compare_ablated(net, after, make_examples(kind), KEEP[kind])
    assert single.same
    assert single.dtype == "float32"
    assert single.texts == 6
    assert exact.same
    assert exact.apart < 1e-12
    assert exact.dtype == "float64"
    site = next(iter(KEEP[kind]))
    other = {**KEEP[kind], site: [head for head in range(4) if head not in KEEP[kind][site]]}
    assert not any(one.same for one in compare_ablated(net, after, make_examples(kind), other))


def test_folded_means_equal_mean_ablation():
    net, keep = build_model(make_model_spec("decoder")), {"decoder.1.attention": [1, 2]}
    means = hw.head_means(net, [one.inputs["x"] for one in make_examples("decoder")])
    own = net.state_dict()["decoder.1.attention.output.o"].reshape(24, 4, 6).double()
    constant = sum(own[:, head] @ means["decoder.1.attention", head] for head in (0, 3))
    after = remove_heads(net, keep, {"decoder.1.attention": constant.float()})
    assert all(
        one.same for one in compare_ablated(net, after, make_examples("decoder"), keep, means)[:1]
    )
    assert not compare_ablated(net, after, make_examples("decoder"), keep)[0].same
    assert set(build_ablations(net, keep, {})) == {
        ("decoder.1.attention", 0),
        ("decoder.1.attention", 3),
    }


def test_a_model_that_was_read_again_otherwise_is_found_out():
    net, after = two("decoder")
    again, first = remove_heads(net, KEEP["decoder"]), make_examples("decoder")[0].inputs["x"]

    def compare(model):
        return compare_outputs("again", (after, model), make_examples("decoder"))

    assert compare(again).apart == 0.0
    assert compare(lambda x: {"outputs": (again(x),)}["outputs"]).same
    once = compare(lambda x: after(x) + 0.5 * torch.equal(x, first))
    assert once.apart == pytest.approx(0.5)
    assert not once.same
    with torch.no_grad():
        again.get_parameter("decoder.1.feed.up")[3, 5] += 0.1
    found = compare(again)
    assert found.apart > found.allowed
    assert not found.same
    with pytest.raises(ValueError, match="cannot compare outputs of shapes"):
        compare(lambda x: after(x)[:, 1:])
    with pytest.raises(ValueError, match="function produced NaN or inf on this text"):
        compare(lambda x: after(x) * torch.nan)


def test_empty_outputs_are_finite_and_cannot_be_compared():
    empty = torch.empty(0, 3)
    assert compute_output(torch.nn.Identity(), ModelInputs((empty,))) is empty
    net = torch.nn.Linear(3, 3)
    comparison = OutputComparison("empty", (net, net))
    with pytest.raises(ValueError, match=r"outputs of shape \[0, 3\] on text 0: they are empty"):
        comparison.add(ModelInputs((empty,)))


def test_the_verification_reports_small_savings_if_heads_are_mixed():
    talking = replace(make_model_spec("decoder", 1), stacks=(
        bp.StackSpec.from_blocks("decoder", 24, [bp.BlockSpec(make_attention(kv=4, modifiers=(hw.parts.TalkingHeads(),)), feed=bp.FeedForwardSpec(31))],  # noqa: E501 - one case a line
                    embedding=bp.EmbeddingSpec(23)),))  # fmt: skip
    net, keep = build_model(talking), {"decoder.0.attention": [2]}
    verification = verify(
        net,
        remove_heads(net, keep),
        make_examples("decoder"),
        VerificationOptions("One head was kept.", keep=keep, timing=QUICK),
    )
    assert verification.holds
    assert verification.savings.get_cost("cache per token").ratio == 1.0
    assert "| cache per token | 192 B | 192 B | +0.0% |" in render_verification(verification)
    assert (
        "decoder.0.attention: 3 of 4 heads removed, but all 4 key-value heads are still in use"
        in verification.notes
    )
    assert (
        verification.savings.get_cost("parameters").before
        - verification.savings.get_cost("parameters").after
        == 3 * 6 * 24
    )


@pytest.mark.parametrize("kind", ["encoder", "vision"])
def test_flops_are_those_torch_counts_if_every_pair_is_allowed(kind):
    nets = two(kind)
    found, x = compare_cost(*nets, length=11), make_examples(kind)[0].inputs["x"]
    x = x if kind == "vision" else torch.zeros(1, 11, dtype=torch.int64)
    for net, options in zip(nets, found.get_cost("forward")[2:], strict=True):
        with flop_counter() as counted, torch.no_grad():
            net(x)
        assert options == counted.get_total_flops()


def test_a_decode_step_and_its_cache_have_the_counted_sizes():
    nets = two("decoder")
    found = compare_cost(*nets, length=13)
    step, values, each = (
        found.get_cost(name) for name in ("decode step", "cache total", "cache per token")
    )
    for net, flops, nbytes, one in zip(nets, step[2:], values[2:], each[2:], strict=True):
        cache = net.cache(batch=1, capacity=13)
        with torch.no_grad():
            net(torch.zeros(1, 12, dtype=torch.int64), cache=cache)
            with flop_counter() as counted:
                net(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
        assert flops == counted.get_total_flops()
        assert nbytes == cache.nbytes == 13 * one
    for net, number, size in zip(
        nets, found.get_cost("parameters")[2:], found.get_cost("weights")[2:], strict=True
    ):
        assert (number, size) == (
            sum(p.numel() for p in net.parameters()),
            sum(p.nbytes for p in net.parameters()),
        )
    half = compare_cost(*(net.to(torch.bfloat16) for net in nets), length=13)
    assert half.get_cost("cache per token").before * 2 == each.before
    assert half.dtype == "bfloat16"


def test_cross_attention_is_counted_separately():
    nets = two("encoder-decoder")
    saved = compare_cost(*nets, length=5)
    found, own, whole = (
        saved.get_cost(f"cache {name}") for name in ("per source token", "per token", "total")
    )
    assert [5 * (one + each) for one, each in zip(found[2:], own[2:], strict=True)] == list(
        whole[2:]
    )
    for net, options in zip(nets, found[2:], strict=True):
        memory = net.encode(torch.zeros(1, 5, dtype=torch.int64))
        assert options * 5 == sum(
            t.nbytes for tensor in memory.layers for t in tensor.entry.values()
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_verification_of_every_kind_is_whole_and_reads_well(kind, tmp_path):
    net, after = two(kind)
    how = VerificationOptions(
        "Heads were cut.",
        KEEP[kind],
        exports={"read again": lambda: after},
        timing=QUICK,
        command="do it | again",
    )
    verification = verify(net, after, make_examples(kind), how)
    assert verification.holds
    assert len(verification.equal) == 3
    paths = write_verification(verification, tmp_path / "new" / "folder")
    data, text = json.loads(paths[0].read_text()), paths[1].read_text()
    assert data == json.loads(json.dumps(verification.data))
    assert data["keep"] == {s: list(h) for s, h in KEEP[kind].items()}
    for shown in (text, render_summary(verification)):
        assert "equal up to rounding" in shown
        assert "\x1b" not in shown


@pytest.mark.parametrize("kind", KINDS)
def test_the_changed_model_runs_once_on_each_text(kind):
    net, after = two(kind)
    export = copy.deepcopy(after)
    runs: dict[torch.nn.Module, int] = dict.fromkeys((net, after, export), 0)
    for model in runs:
        model.register_forward_pre_hook(lambda own, _: runs.update({own: runs[own] + 1}))
    how = VerificationOptions("", KEEP[kind], exports={"again": lambda: export}, timing=None)
    texts = make_examples(kind)
    assert verify(net, after, texts, how).holds
    # the model before runs unchanged and with ablated heads
    assert list(runs.values()) == [2 * len(texts), len(texts), len(texts)]


def test_a_verification_finds_an_export_that_differs_on_one_text():
    net, after = two("decoder")
    texts = make_examples("decoder")
    last = texts[-1].inputs["x"]

    def export(x):
        return after(x) + 0.5 * torch.equal(x, last)

    how = VerificationOptions(
        "", KEEP["decoder"], exports={"right": lambda: after, "wrong": lambda: export}, timing=None
    )
    for exports in (how.exports, {"wrong": how.exports["wrong"]}):
        verification = verify(net, after, texts, replace(how, exports=exports))
        assert not verification.holds
        assert [check.same for check in verification.equal[-len(exports) :]] == [
            name == "right" for name in exports
        ]
        assert verification.equal[-1].apart == pytest.approx(0.5)
    with torch.no_grad():
        after.get_parameter("decoder.1.feed.up")[3, 5] += 0.1
    assert not verify(net, after, texts, replace(how, exports={})).holds


def test_an_attention_that_is_gone_altogether_is_proven_too():
    net = build_model(make_model_spec("decoder"))
    keep = {"decoder.0.attention": [], "decoder.1.attention": [0, 1]}
    verification = verify(
        net,
        remove_heads(net, keep),
        make_examples("decoder"),
        VerificationOptions("One layer lost all.", keep, timing=QUICK),
    )
    assert verification.holds
    assert verification.savings.sites[0].after == (0, 0, 0, 0)
    assert "4 -> 0" in render_verification(verification)


def test_a_page_carries_no_signs_of_others():
    net, after = two("decoder")
    evil = "a\x1b[2J|`<script>\u202e\n# b"
    verification = verify(
        net,
        after,
        make_examples("decoder"),
        VerificationOptions(evil, timing=QUICK, notes=(evil,), command=evil),
    )
    for shown in (
        render_verification(replace(verification, model=evil)),
        render_summary(verification),
    ):
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "\n# b" not in shown


def test_a_speed_without_a_verdict_has_no_factor():
    net, after = two("decoder")
    verification = verify(
        net, after, make_examples("decoder"), VerificationOptions("", timing=QUICK)
    )
    wild = summarise_rounds(
        TimedPhase("prefill", "tokens/s", 8, lambda net: lambda: None),
        np.array([[1.0, 0.3], [1.0, 3.0], [4.0, 1.0], [4.0, 1.5], [1.0, 1.6]]),
    )
    assert wild.after < wild.before
    assert wild.speedup > 2  # the median of ratios contradicts the ratio of medians
    verification = replace(verification, speeds=replace(verification.speeds, phases=(wild,)))
    assert "no verdict" in render_summary(verification)
    for shown in (render_summary(verification), render_verification(verification)):
        assert f"{wild.speedup:.2f}" not in shown


def test_unprovable_pairs_are_refused():
    net, after = two("decoder")
    texts = make_examples("decoder")
    with pytest.raises(
        ValueError, match="cannot compute a confidence interval over 1 different texts"
    ):
        verify(net, after, texts[:1], VerificationOptions("", timing=QUICK))
    with pytest.raises(ValueError, match="Give a model made from the first"):
        verify(net, two("encoder")[0], texts, VerificationOptions("", timing=QUICK))
    with pytest.raises(ValueError, match=r"no attention 'decoder\.7\.attention'"):
        compare_ablated(net, after, texts, {"decoder.7.attention": [0]})
    with pytest.raises(ValueError, match="no head 4 to keep; give heads"):
        compare_ablated(net, after, texts, {"decoder.0.attention": [4]})
    with pytest.raises(ValueError, match=r"with \[3\] and \[2\] layers"):
        verify(
            build_model(make_model_spec("decoder", 3)),
            net,
            texts,
            VerificationOptions("", timing=QUICK),
        )
