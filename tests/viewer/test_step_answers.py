"""The steps of one head: every number follows from those before it, and they lead to the model's
own numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import headwise as hw
from headwise.attention.head_axis_ops import KeptHeads
from headwise.models.model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    StackSpec,
)
from headwise.observe.traces import trace_from_weights
from headwise.observe.traces.head_steps import MAX_KEY_VECTORS, HeadPlace, HeadSteps, recorded_steps
from headwise.viewer.answers import ONLY_TRACE, find_steps
from headwise.viewer.open_model import OpenModel
from headwise.viewer.server import ViewServer
from support.refusals import refused_cases
from support.tiny_configs import model_config
from viewer.binary_messages import decode_arrays

TOKENS, WORDS, MODEL = 13, 31, 20
T5 = model_config("t5", d_model=20, d_kv=7, d_ff=24, num_heads=3, num_layers=2, vocab_size=WORDS)
LAYERS: dict[str, dict[str, Any]] = {
    "window and GQA": {"pattern": "window(4)", "kv": 2},
    "RoPE": {"pattern": "causal", "modifiers": (hw.parts.Rotary(),)},
    "interleaved RoPE and QK-norm": {
        "pattern": "causal",
        "modifiers": (hw.parts.QKNorm(), hw.parts.Rotary(pairs="interleaved")),
    },
    "soft-cap": {"pattern": "causal", "modifiers": (hw.parts.Softcap(0.7),)},
    "sink": {"pattern": "window(5)", "kv": 2, "normaliser": hw.parts.SinkSoftmax()},
    "ALiBi": {"pattern": "causal", "modifiers": (hw.parts.Alibi(),)},
    "T5 bias": {"modifiers": (hw.parts.T5Bias(),)},
    "projection biases": {"pattern": "causal", "bias": "qkvo"},
    "talking heads": {"modifiers": (hw.parts.TalkingHeads(on="weights"),)},
    "sigmoid": {"pattern": "causal", "normaliser": hw.parts.Sigmoid()},
    "latent attention": {"pattern": "causal", "project": hw.parts.MLAProjection(rank=6, rope=0)},
}


def open_layers(placement: str = "pre", norm: str = "layer", **options: Any) -> OpenModel:
    """A decoder of two equal layers with random weights, large enough for uneven attention, and its
    trace.
    """
    sizes: dict[str, Any] = {"model": MODEL, "heads": 4, "dim": 6}
    return open_specs(hw.design(**sizes | options), placement, norm)


def open_specs(spec: hw.AttentionSpec, placement: str = "pre", norm: str = "layer") -> OpenModel:
    """A decoder of two layers with this spec, and its trace."""
    blocks = [
        BlockSpec(spec, feed=FeedForwardSpec(24), norm=NormSpec(norm), placement=placement)
        for _ in range(2)
    ]
    stack = StackSpec.from_blocks(
        "decoder", MODEL, blocks, embedding=EmbeddingSpec(WORDS), norm=NormSpec(norm)
    )
    net = hw.build(
        ModelSpec("small", "decoder", (stack,), (OutputHeadSpec("tokens", WORDS),)), seed=0
    ).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    ids = torch.randint(0, WORDS, (2, TOKENS), generator=generator)
    return OpenModel(hw.trace(net, ids, capture=hw.Capture(extra=("v",))), net)


def softmax(scores: np.ndarray, sink: float | None) -> np.ndarray:
    if sink is not None:
        scores = np.append(scores, sink)
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights if sink is None else weights[:-1]


def wide(steps: HeadSteps, name: str, array: str = "out") -> np.ndarray:
    return steps.find(name).arrays[array].astype(np.float64)


def check_scores(steps: HeadSteps) -> None:
    """The products, scale, score steps, mask and softmax follow from the vectors; weights of other
    heads may mix in.
    """
    q, k = wide(steps, "vectors", "q"), wide(steps, "vectors", "k")
    np.testing.assert_allclose(
        k @ q, wide(steps, "product")[steps.shown_keys], rtol=1e-4, atol=1e-5
    )
    scores = wide(steps, "product") * steps.find("scale").facts["scale"]
    np.testing.assert_allclose(scores, wide(steps, "scale"), rtol=1e-4, atol=1e-5)
    for step in steps.steps:
        if step.name == "score_step" and "added" in step.arrays:
            scores = scores + step.arrays["added"]
        elif step.name == "score_step":
            limit = step.facts.get("limit", step.facts.get("cap"))
            assert limit is not None
            scores = limit * np.tanh(scores / limit)
        if step.name == "score_step":
            np.testing.assert_allclose(scores, step.arrays["out"], rtol=1e-4, atol=1e-5)
    normalise = steps.find("normalise")
    scores = np.where(steps.find("mask").arrays["allowed"] > 0, scores, -np.inf)
    if "igmoid" in normalise.part:
        count = steps.find("mask").facts["allowed"]
        expected = 1 / (1 + np.exp(-(scores - np.log(count))))
    else:
        expected = softmax(scores, normalise.facts.get("sink"))
    np.testing.assert_allclose(expected, normalise.arrays["out"], rtol=1e-4, atol=1e-6)


def check_outputs(steps: HeadSteps) -> None:
    """The weighted sum, the head's contribution and the new residual stream."""
    last = [step for step in steps.steps if step.name in ("normalise", "weight_step")][-1]
    gather = steps.find("gather").arrays
    z = last.arrays["out"][steps.shown_keys].astype(np.float64) @ gather["v"] + gather["rest"]
    np.testing.assert_allclose(z, gather["out"], rtol=1e-4, atol=1e-5)
    terms = steps.find("contribution").arrays
    products = terms["input"][terms["channels"]].astype(np.float64) * terms["factors"]
    error = np.abs(terms["out"] - products.sum(1))
    smallest = np.abs(products).min(1)
    assert np.all(error <= smallest * (len(terms["input"]) - products.shape[1]) + 1e-5)
    sums = steps.steps[[step.name for step in steps.steps].index("contribution") + 1].arrays
    y = sums["own"].astype(np.float64) + sums["others"] + sums["bias"]
    expected = (
        sums["out"]
        if steps.find("residual_out").arrays.keys() != sums.keys()
        else sums["out"] - sums["in"]
    )
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("head", [0, 3])
def test_every_number_follows_from_those_before(name: str, head: int):
    opened = open_layers(**LAYERS[name])
    site = opened.get_trace().layers[1].name
    steps, note = find_steps(opened, HeadPlace(site, head, 7, 1))
    assert (steps.origin, note) == ("model", "")
    x, norm = wide(steps, "residual"), steps.find("norm")
    n = (x - x.mean()) / np.sqrt(x.var() + norm.facts["eps"]) * norm.arrays["weight"] + norm.arrays[
        "bias"
    ]
    np.testing.assert_allclose(n, norm.arrays["out"], rtol=1e-4, atol=1e-5)
    check_scores(steps)
    check_outputs(steps)
    last = [step for step in steps.steps if step.name in ("normalise", "weight_step")][-1]
    expected = opened.get_trace().head_weights(site, head, slice(7, 8), row=1)[0]
    np.testing.assert_allclose(last.arrays["out"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("head", [0, 1])
def test_a_pruned_head_has_its_own_scores_beside_queries_that_only_a_router_reads(head: int):
    routed = hw.design(
        model=MODEL,
        heads=4,
        dim=6,
        pattern="causal",
        modifiers=(hw.parts.MixtureOfHeads(2, 1, router="norm"),),
    )
    opened = open_specs(KeptHeads.from_spec(routed, [1, 3]).spec)
    site = opened.get_trace().layers[1].name
    steps, note = find_steps(opened, HeadPlace(site, head, 7, 1))
    assert (steps.origin, note) == ("model", "")
    check_scores(steps)
    expected = opened.get_trace().head_weights(site, head, slice(7, 8), row=1)[0]
    np.testing.assert_allclose(wide(steps, "normalise"), expected, rtol=1e-4, atol=1e-6)


def test_the_query_follows_from_the_norm_and_the_weights():
    opened = open_layers(pattern="causal", bias="q", kv=2)
    steps, _ = find_steps(opened, HeadPlace(opened.get_trace().layers[0].name, 2, 5))
    net, project = opened.get_model(), "decoder.0.attention.project"
    matrix = net.get_parameter(f"{project}.q").detach().double().view(4, 6, MODEL)[2].numpy()
    q = (
        matrix @ wide(steps, "norm")
        + net.get_parameter(f"{project}.q_bias").detach().double().view(4, 6)[2].numpy()
    )
    np.testing.assert_allclose(wide(steps, "project", "q"), q, rtol=1e-4, atol=1e-5)
    terms = steps.find("project").arrays
    factors = np.take_along_axis(matrix, terms["channels"], 1)
    np.testing.assert_allclose(terms["factors"], factors, rtol=1e-6)
    assert np.array_equal(terms["channels"][:, 0], np.abs(matrix * terms["input"]).argmax(1))


def test_a_rotation_turns_each_plane_by_its_angle():
    opened = open_layers(pattern="causal", modifiers=(hw.parts.Rotary(),))
    steps, _ = find_steps(opened, HeadPlace(opened.get_trace().layers[0].name, 1, 9))
    arrays = steps.find("transform").arrays
    for number, (first, second) in enumerate(arrays["planes"].tolist()):
        before = complex(arrays["q_in"][first], arrays["q_in"][second])
        after = complex(arrays["q"][first], arrays["q"][second])
        angle = 9 * 10_000.0 ** (-2 * number / 6)
        assert after == pytest.approx(before * np.exp(1j * angle), abs=1e-4)
    assert len(arrays["planes"]) == 3


@pytest.mark.parametrize(
    "placement", ["pre", "post", "post_sublayer", "sandwich", "parallel", "parallel_two_norms"]
)
@pytest.mark.parametrize("norm", ["rms", "layer_no_affine"])
def test_the_residual_stream_follows_the_placement_of_norms(placement: str, norm: str):
    opened = open_layers(placement, norm, pattern="causal")
    net, trace = opened.get_model(), opened.get_trace()
    states: list[torch.Tensor] = []
    handle = net.get_submodule("decoder.1").register_forward_pre_hook(
        lambda _, args: states.append(args[0])
    )
    steps, note = find_steps(opened, HeadPlace(trace.layers[1].name, 1, 6))
    handle.remove()
    assert note == ""
    np.testing.assert_allclose(
        steps.find("residual").arrays["out"], states[0][0, 6].numpy(), rtol=1e-6
    )
    check_outputs(steps)
    norms = [step for step in steps.steps if step.name in ("norm", "norm_after")]
    expected = {
        "post": ["norm_after"],
        "post_sublayer": ["norm_after"],
        "sandwich": ["norm", "norm_after"],
    }
    assert [step.name for step in norms] == expected.get(placement, ["norm"])
    for step in norms:
        x = step.arrays["in"].astype(np.float64)
        if norm == "layer_no_affine":
            n = (x - x.mean()) / np.sqrt(x.var() + step.facts["eps"])
        else:
            n = x / np.sqrt((x**2).mean() + step.facts["eps"]) * step.arrays["weight"]
        np.testing.assert_allclose(n, step.arrays["out"], rtol=1e-4, atol=1e-5)


def test_cross_attention_reads_the_source():
    net = hw.build(hw.families.read_model_spec(T5), seed=0).eval()
    inputs = {"x": torch.arange(1, 6)[None], "source": torch.arange(10, 17)[None]}
    opened = OpenModel(hw.trace(net, inputs, capture=hw.Capture(extra=("v",))), net)
    for site in ("decoder.1.cross", "decoder.1.attention", "encoder.1.attention"):
        steps, note = find_steps(opened, HeadPlace(site, 2, 3))
        assert note == ""
        check_scores(steps)
        check_outputs(steps)
    assert len(find_steps(opened, HeadPlace("decoder.1.cross", 2, 3))[0].positions) == 7


def test_a_trace_alone_holds_the_steps_from_the_queries_to_the_output():
    opened = open_layers(
        pattern="window(4)",
        kv=2,
        normaliser=hw.parts.SinkSoftmax(),
        modifiers=(hw.parts.Alibi(), hw.parts.Rotary()),
    )
    trace = opened.get_trace()
    place = HeadPlace(trace.layers[1].name, 3, 8, 1)
    steps, note = find_steps(OpenModel(trace), place)
    assert (steps.origin, note) == ("trace", ONLY_TRACE)
    assert [step.name for step in steps.steps][:3] == ["vectors", "product", "scale"]
    check_scores(steps)
    assert set(steps.missing) == {
        "residual",
        "norm",
        "project",
        "transform",
        "contribution",
        "residual_out",
    }
    of_model, _ = find_steps(opened, place)
    for name, array in (
        *(("vectors", "q"), ("scale", "out"), ("normalise", "out"), ("gather", "out")),
    ):
        np.testing.assert_allclose(
            wide(steps, name, array), wide(of_model, name, array), rtol=1e-3, atol=1e-5
        )


def test_a_trace_of_weights_says_what_it_lacks():
    weights = (
        np.tril(np.ones((5, 5), np.float32))[None, None]
        / np.arange(1, 6, dtype=np.float32)[:, None]
    )
    trace = trace_from_weights([weights], [list("abcde")])
    steps = recorded_steps(trace, HeadPlace(trace.layers[0].name, 0, 3))
    assert [step.name for step in steps.steps] == ["normalise"]
    np.testing.assert_allclose(wide(steps, "normalise"), [0.25] * 4 + [0.0])
    assert "values were not recorded" in steps.missing["gather"]
    assert "product" in steps.missing


def test_a_model_with_other_weights_is_not_taken_for_the_traced_one():
    opened = open_layers(pattern="causal")
    with torch.no_grad():
        opened.get_model().get_parameter("decoder.0.attention.project.q").mul_(-1)
    steps, note = find_steps(opened, HeadPlace(opened.get_trace().layers[0].name, 0, 9))
    assert steps.origin == "trace"
    assert "other weights than the trace" in note


def test_heads_that_combine_rows_keep_their_recorded_steps():
    opened = open_layers(pattern="causal", modifiers=(hw.parts.Differential(),))
    steps, note = find_steps(opened, HeadPlace(opened.get_trace().layers[0].name, 0, 4))
    assert steps.origin == "trace"
    assert "several rows" in note


def test_vectors_are_bounded_and_a_chosen_key_is_among_them():
    opened = open_layers(pattern="causal")
    ids = torch.arange(70)[None] % WORDS
    net = opened.get_model()
    opened = OpenModel(hw.trace(net, ids, capture=hw.Capture(extra=("v",))), net)
    place = HeadPlace(opened.get_trace().layers[1].name, 1, 66)
    row = opened.get_trace().head_weights(place.site, 1, slice(66, 67))[0]
    weakest = int(row[:67].argmin())
    steps, _ = find_steps(opened, place, weakest)
    assert len(steps.shown_keys) == MAX_KEY_VECTORS
    assert {weakest, int(row.argmax())} <= set(steps.shown_keys.tolist())
    assert steps.find("product").arrays["out"].shape == (70,)
    check_scores(steps)
    check_outputs(steps)


# --- over HTTP ------------------------------------------------------------------------------------


@pytest.fixture
def client() -> Any:
    view = ViewServer(open_layers(pattern="causal"), {"/index.html": (b"", "text/html")})
    yield TestClient(view.app())
    view.worker.close()


def test_the_answer_holds_every_array(client: TestClient):
    answer = client.get("/api/steps?site=1&head=2&query=6&row=1")
    header, arrays = decode_arrays(answer.content)
    assert (header["origin"], header["head"], header["query"], header["row"]) == ("model", 2, 6, 1)
    names = [step["name"] for step in header["steps"]]
    weights = arrays[f"{names.index('normalise')}.out"]
    assert weights.sum() == pytest.approx(1, abs=1e-5)
    assert arrays["positions"].tolist() == list(range(TOKENS))
    assert len(answer.content) < 40_000


@pytest.mark.parametrize(("query", "fact"), refused_cases(__file__, "steps", globals()))
def test_bad_indices_are_refused(client: TestClient, query: str, fact: str):
    answer = client.get(f"/api/steps?{query}")
    assert answer.status_code == 400
    assert fact in answer.json()["error"]["fact"]
