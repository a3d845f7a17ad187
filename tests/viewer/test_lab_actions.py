"""The Lab: its numbers are those of a model whose weights are edited by hand."""

from __future__ import annotations

import contextlib
import copy
import math  # noqa: F401 - used in refused.txt
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from headwise.observe.inspect.ablation import ScaledOutput
from headwise.viewer import lab_actions
from headwise.viewer.lab_actions import compute_effect, sweep_heads
from headwise.viewer.model_worker import JobCancelled
from headwise.viewer.open_model import AblatedHead, OpenModel
from support.refusals import refused_cases
from viewer.page_models import GPT, progress

BERT = {
    "model_type": "bert",
    "hidden_size": 12,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "vocab_size": 40,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
    "architectures": ["BertModel"],
}


def open_model(config: dict[str, Any]) -> tuple[OpenModel, Any, torch.Tensor]:
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    ids = torch.randint(0, 40, (1, 17), generator=torch.Generator().manual_seed(0))
    return OpenModel(hw.trace(net, ids), net), net, ids


def without_head(net: Any, name: str, head: int) -> Any:
    """A copy whose output projection ignores a head of four channels."""
    edited = copy.deepcopy(net)
    edited.state_dict()[f"{name}.attention.output.o"][:, 4 * head : 4 * head + 4] = 0
    return edited


def test_the_effect_of_an_ablated_head_is_that_of_edited_weights():
    model, net, ids = open_model(GPT)
    found = compute_effect(model, {"heads": [[1, 2]]}, progress())
    with torch.inference_mode():
        old = net(ids)[0].double().log_softmax(-1)
        new = without_head(net, "decoder.1", 2)(ids)[0].double().log_softmax(-1)
    expected = F.kl_div(new, old, log_target=True, reduction="none").sum(-1)
    assert found["klByPosition"] == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-12)
    assert found["kl"] > 1e-9
    labels = ids[0, 1:]
    assert found["loss"]["before"] == pytest.approx(F.nll_loss(old[:-1], labels).item(), rel=1e-6)
    assert found["loss"]["after"] == pytest.approx(F.nll_loss(new[:-1], labels).item(), rel=1e-6)
    assert found["nextAt"][-1][0]["before"] == pytest.approx(old[-1].exp().max().item(), rel=1e-6)


def test_a_model_without_a_token_head_is_compared_by_its_vectors():
    model, net, ids = open_model(BERT)
    found = compute_effect(model, {"heads": [[1, 0]]}, progress())
    with torch.inference_mode():
        old, new = (one(ids).double() for one in (net, without_head(net, "encoder.1", 0)))
    assert found["klByPosition"] == pytest.approx(
        (1 - F.cosine_similarity(old, new, dim=-1)).tolist(), abs=1e-6
    )
    assert found["loss"] == {"before": None, "after": None}
    assert "cosine" in found["outputs"]


def test_a_sweep_ablates_every_head_alone():
    model, _, _ = open_model(GPT)
    found = sweep_heads(model, {}, progress())
    assert [entry[:2] for entry in found["heads"]] == [
        [site, head] for site in range(2) for head in range(3)
    ]
    alone = compute_effect(model, {"heads": [[1, 0]]}, progress())
    assert found["heads"][3][2] == pytest.approx(alone["kl"], rel=1e-9)
    rise = alone["loss"]["after"] - alone["loss"]["before"]
    assert found["heads"][3][3] == pytest.approx(rise, abs=1e-9)


@pytest.mark.parametrize(("heads", "message"), refused_cases(__file__, "lab", globals()))
def test_heads_that_are_not_there_are_refused(heads: Any, message: str):
    model, _, _ = open_model(GPT)
    with pytest.raises(ValueError, match=message):
        compute_effect(model, {"heads": heads}, progress())
    assert model.revision == 0


# --- modes, tokens, and what a job leaves behind --------------------------------------------------

PAIR = {
    "model_type": "bart",
    "d_model": 12,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "vocab_size": 40,
    "max_position_embeddings": 64,
}


def repeat(net: Any, ids: dict[str, torch.Tensor], patches: list[tuple[Any, Any]]) -> torch.Tensor:
    """The change of every position with patches, [(patches, positions)], by `hw.patch`."""
    with torch.inference_mode(), contextlib.ExitStack() as stack:
        old = net(**ids)[0].double().log_softmax(-1)
        for replaced, positions in patches:
            stack.enter_context(hw.patch(net, replaced, tokens=positions))
        new = net(**ids)[0].double().log_softmax(-1)
    return (old.exp() * (old - new)).sum(-1)


@pytest.mark.parametrize("mode", ["zero", "mean", "resample", "noise"])
@pytest.mark.parametrize("tokens", [{}, {"text": [2, 5, 16]}])
def test_every_mode_gives_the_change_of_the_library(mode: str, tokens: dict[str, list[int]]):
    model, net, ids = open_model(GPT)
    ref = ("decoder.0.attention", 1)
    order = torch.randperm(17, generator=torch.Generator().manual_seed(3))
    replaced = {
        "zero": lambda: {ref: ScaledOutput(0.0)},
        "mean": lambda: hw.head_means(net, [ids], [ref]),
        "noise": lambda: hw.head_noise(net, [ids], [ref], seed=3),
        "resample": lambda: hw.head_outputs(net, ids[:, order], [ref]),
    }[mode]()
    replaced = {**replaced, ("decoder.1.attention", 0): ScaledOutput(0.25)}
    heads = [[0, 1, mode, 0.0], [1, 0, "zero", 0.25]]
    found = compute_effect(model, {"heads": heads, "tokens": tokens, "seed": 3}, progress())
    expected = repeat(net, {"x": ids}, [(replaced, tokens.get("text"))])
    assert found["klByPosition"] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-9)
    assert found["kl"] > 1e-8
    if tokens:  # a causal model cannot change before the first chosen token
        assert max(found["klByPosition"][:2]) < 1e-12 < found["klByPosition"][2]


def test_tokens_are_those_of_the_stream_of_each_layer():
    net = hw.build(hw.families.read_model_spec(PAIR), seed=0).eval()
    ids = {"source": torch.arange(11)[None] + 3, "x": torch.arange(7)[None] + 3}
    model = OpenModel(hw.trace(net, ids), net)
    layers = model.get_trace().layers
    tokens = {"source": [10], "text": [6]}
    arguments = {"heads": [[number, 1] for number in range(len(layers))], "tokens": tokens}
    found = compute_effect(model, arguments, progress())
    patches = [
        ({(layer.name, 1): ScaledOutput(0.0)}, tokens[layer.query_stream]) for layer in layers
    ]
    assert [layer.query_stream for layer in layers].count("source") == 1
    assert found["kl"] == pytest.approx(repeat(net, ids, patches).mean().item(), rel=1e-4)
    with pytest.raises(ValueError, match="the source has 11 tokens, none at 11; give 0 to 10"):
        compute_effect(model, {"heads": [[0, 1]], "tokens": {"source": [11]}}, progress())


def test_zero_ablation_of_whole_heads_is_a_pruning_command():
    model, _, _ = open_model(GPT)
    model.target = "a model"
    found = compute_effect(model, {"heads": [[0, 1], [1, 2], [0, 0]]}, progress())
    named = "--heads decoder.0.attention:0,1 decoder.1.attention:2"
    assert found["command"] == f"headwise prune 'a model' {named} --data texts.txt --out pruned"
    assert compute_effect(model, {"heads": [[0, 1, "mean"]]}, progress())["command"] == ""


def test_ablated_heads_are_those_of_the_page_and_change_nothing_here(
    monkeypatch: pytest.MonkeyPatch,
):
    model, _, _ = open_model(GPT)
    before = model.describe()
    compute_effect(model, {"heads": [[0, 1]]}, progress())
    stopped = progress()
    stopped.job.cancel()
    with pytest.raises(JobCancelled):
        compute_effect(model, {"heads": [[1, 1]]}, stopped)
    monkeypatch.setattr(lab_actions, "compare_outputs", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compute_effect(model, {"heads": [[1, 1]]}, progress())
    assert model.describe() == before


def test_tables_of_next_tokens_follow_every_position():
    model, net, ids = open_model(GPT)
    found = compute_effect(model, {"heads": [[1, 2]]}, progress())
    with torch.inference_mode():
        shares = net(ids)[0].double().softmax(-1)
    assert [len(found["nextAt"]), found["nextFrom"]] == [17, 0]
    for position, table in enumerate(found["nextAt"]):
        assert table[0]["before"] == pytest.approx(shares[position].max().item(), rel=1e-6)
    losses = found["lossByPosition"]["before"]
    assert losses == pytest.approx(
        (-shares[:-1].log()[torch.arange(16), ids[0, 1:]]).tolist(), rel=1e-6
    )


def test_random_sets_have_as_many_other_heads():
    model, _, _ = open_model(GPT)
    found = compute_effect(model, {"heads": [[0, 0], [1, 1]], "random": 4}, progress())
    assert len(found["random"]) == 4
    all_heads = [(f"decoder.{layer}.attention", head) for layer in range(2) for head in range(3)]
    heads = [AblatedHead(*all_heads[0], "mean", 0.5), AblatedHead(*all_heads[4])]
    sets = lab_actions.sample_heads(all_heads, heads, 20)
    for chosen in sets:
        assert not {head[:2] for head in chosen} & {all_heads[0], all_heads[4]}
        assert [head[2:] for head in chosen] == [("mean", 0.5), ("zero", 0.0)]
        assert len({head[:2] for head in chosen}) == 2
    with pytest.raises(ValueError, match="random=-1 is out of range; give 0 to 20"):
        compute_effect(model, {"heads": [], "random": -1}, progress())
