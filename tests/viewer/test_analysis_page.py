"""Aggregates of heads, products by channel and written tokens, on the page and in the answers of
the server.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.hub.transformers_loading import attach_tokenizer
from headwise.observe.inspect.model_tokenizer import find_token_decoder
from headwise.observe.traces.attention_trace import aggregate_heads, roll_out_attention
from headwise.viewer.answers import ask
from headwise.viewer.circuit_actions import score_text_edges
from headwise.viewer.model_worker import Job, JobCancelled, JobProgress
from headwise.viewer.open_model import OpenModel, id_inputs
from viewer.binary_messages import decode_arrays
from viewer.page_browser import sample_model, served, settled_box, wait_until
from viewer.page_models import GPT, progress


def open_screen(page: Any, url: str, address: str) -> None:
    page.goto(url)
    page.get_by_role("gridcell").first.wait_for()
    page.evaluate(f"location.hash = '#/{address}'")


def listed(page: Any) -> list[float]:
    """The weights of the first list of the Text screen."""
    return [
        float(value)
        for value in page.locator(".finder").first.locator("td.num").all_inner_texts()
        if value
    ]


def test_all_heads_together_are_shown(page: Any):
    model = sample_model(with_model=False)
    trace, layer = model.get_trace(), "encoder.1.attention"
    layers = [f"encoder.{n}.attention" for n in range(3)]
    expected = {
        "maximum of the layer": aggregate_heads(trace, [layer], "max"),
        "mean of all layers": aggregate_heads(trace, layers, "mean"),
        "rollout up to the layer": roll_out_attention(trace, layer),
    }
    with served(model) as url:
        open_screen(page, url, "text?site=1&head=2&heads=all&position=7")
        for label, weights in expected.items():
            page.get_by_label(re.compile("^of")).select_option(label)
            page.get_by_role("heading", name=label).first.wait_for()
            row = np.sort(weights[7])[::-1][:6]
            page.wait_for_timeout(500)
            assert listed(page) == pytest.approx(row, rel=0.06, abs=0.006), label


def test_products_by_channel_have_the_numbers_of_the_trace(page: Any):
    model = sample_model(with_model=False)
    layer = model.get_trace().get_layer("decoder.1.cross")
    q, k = (layer.arrays[name][0].astype(np.float64) for name in ("q", "k"))
    products = q[9, 2] * k[:, layer.kv_head_of_query[2]]
    site = [one.name for one in model.get_trace().layers].index("decoder.1.cross")
    with served(model) as url:
        open_screen(page, url, f"head?site={site}&head=2&position=9&form=channels&scale=lin")
        picture = page.locator(".channel-canvas canvas")
        picture.wait_for()
        wait_until(page, "document.querySelector('.channel-canvas canvas').width > 1")
        box = settled_box(picture)
        rows, channels = products.shape
        page.mouse.move(
            box["x"] + 3.5 * box["width"] / channels, box["y"] + 5.5 * box["height"] / rows
        )
        shown = page.get_by_test_id("channel")
        wait_until(
            page, "/channel 3/.test(document.querySelector('[data-testid=channel]').textContent)"
        )
        numbers = re.search(r"q × k = (\S+); score (\S+)", shown.inner_text())
        assert numbers is not None
        assert float(numbers[1]) == pytest.approx(products[5, 3], rel=2e-3)
        assert float(numbers[2]) == pytest.approx(
            products[5].sum() * layer.calls[0].scale, rel=2e-3
        )
        page.get_by_role("button", name="Table").click()
        assert (
            page.get_by_role("region", name="Largest products of each key")
            .locator("tbody tr")
            .count()
            > 50
        )


def test_the_tokens_that_a_head_writes_are_those_of_its_vector(page: Any):
    """By hand: the head's output times W_O, through the norm with the scale of the text, and the
    output head.
    """
    model = sample_model()
    net: Any = model.get_model()
    trace = model.get_recorded()
    final: list[torch.Tensor] = []
    handle = net.stacks["decoder"].norm.register_forward_pre_hook(
        lambda _, args: final.append(args[0])
    )
    with torch.inference_mode():
        net(**id_inputs(net, trace))
    handle.remove()
    state = {name: tensor.double() for name, tensor in net.state_dict().items()}
    layer = trace.get_layer("decoder.2.cross")
    values = layer.arrays["v"][0, :, layer.kv_head_of_query[1]]
    z = torch.from_numpy(trace.head_weights(layer.name, 1)[9] @ values).double()
    width = len(z)
    written = state["decoder.2.cross.output.o"][:, width : 2 * width] @ z
    h = final[0][0, 9].double()
    normed = (written - written.mean()) / (
        h.var(unbiased=False) + net.stacks["decoder"].norm.eps
    ).sqrt()
    table = next(
        tensor
        for name, tensor in state.items()
        if name.endswith(("head.tokens.weight", "embedding.tokens"))
    )
    logits = table @ (normed * state["decoder.norm.weight"])
    wanted = logits - logits.mean()
    site = [layer.name for layer in trace.layers].index("decoder.2.cross")
    answer = ask(model, f"/api/written?site={site}&head=1&query=9")
    fields, arrays = decode_arrays(answer)
    assert arrays["effects"] == pytest.approx(
        wanted[torch.from_numpy(arrays["ids"].copy()).long()].numpy(), rel=2e-3
    )
    assert arrays["effects"][0] == pytest.approx(wanted.max().item(), rel=2e-3)
    assert fields["words"][0] == find_token_decoder(net)(int(wanted.argmax()))
    with served(model) as url:
        open_screen(page, url, f"head?site={site}&head=1&position=9")
        rows = page.get_by_test_id("written").locator("tbody tr")
        rows.first.wait_for(timeout=60_000)
        assert rows.first.locator("td").nth(1).inner_text() == f"+{wanted.max():.2f}"
        page.evaluate("location.hash = location.hash.replace(/site=\\d+/, 'site=2')")
        page.get_by_text("to no logit directly").wait_for(timeout=20_000)


def test_a_kept_cell_says_why_its_key_is_chosen(page: Any):
    """The parts of the score are those of the library; a press on a head's name selects it."""
    net = hw.build(hw.families.read_model_spec(GPT), seed=0).eval()
    trace = hw.trace(net, torch.arange(1, 13)[None])
    model = OpenModel(trace, net)
    attributed = hw.head_analysis.attribute_score(
        net, [(torch.arange(1, 13)[None], 7, 3)], "L1H2", "mean"
    )
    fields, arrays = decode_arrays(ask(model, "/api/why?site=1&head=2&query=7&key=3"))
    assert fields["total"] == pytest.approx(attributed.total.value)
    for side, found in attributed.sides.items():
        names, values = zip(*((name, one.value) for name, one in found.by_size[:8]), strict=True)
        assert fields["writers"][side] == list(names)
        assert arrays[side] == pytest.approx(values, rel=1e-6)
    later, _ = decode_arrays(ask(model, "/api/why?site=1&head=2&query=3&key=7"))
    assert "may not attend to key 7" in later["reason"]
    with served(model) as url:
        open_screen(page, url, "head?site=1&head=2&cell=7.8.3.4")
        panel = page.locator(".panel", has=page.get_by_role("heading", name="Why this key?"))
        panel.get_by_role("button", name="Compute").click()
        rows = page.get_by_test_id("why").locator("tbody tr")
        rows.first.wait_for(timeout=60_000)
        query_side = page.get_by_test_id("why").locator("table").first.locator("tbody tr")
        shown = dict(row.split("\t") for row in query_side.all_inner_texts())
        value = attributed.sides["query"].parts["M0"].value
        assert float(shown["MLP of layer 0"].replace("−", "-")) == pytest.approx(value, rel=0.02)
        rows.get_by_role("button", name="L0 H1").first.click()
        page.get_by_role("heading", name="Head L0 H1").wait_for()


@pytest.fixture(scope="module")
def bytes_model() -> OpenModel:
    """An untrained decoder of bytes, and a text of 12."""
    net = hw.build(hw.families.read_model_spec({**GPT, "vocab_size": 256}), seed=0).eval()
    attach_tokenizer(net, "bytes")
    return OpenModel(hw.trace(net, "Mary and Tim"), net)


def test_edges_of_two_texts_are_those_of_the_library(bytes_model: OpenModel):
    net = bytes_model.get_model()
    found = score_text_edges(bytes_model, {"other": "Tim and Mary", "tokens": "M,T"}, progress())
    metric = hw.head_analysis.TokenMetric("logit_difference", ("M", "T"))
    graph = hw.head_analysis.attribute_edges(net, [("Mary and Tim", "Tim and Mary")], metric)
    assert found["words"] == ["M", "T"]
    assert found["count"] == graph.num_edges
    listed = [(one.sender, one.receiver, one.score.value, one.exact) for one in graph.edges]
    assert [tuple(edge) for edge in found["edges"]] == listed
    difference = []
    for text in ("Mary and Tim", "Tim and Mary"):
        logits = net(torch.tensor([list(text.encode())]))[0, -1].tolist()
        difference.append(logits[ord("M")] - logits[ord("T")])
    assert [found["clean"], found["corrupt"]] == pytest.approx(difference, abs=1e-5)
    assert found["agreement"][0] == 20


def test_edges_are_refused_for_texts_that_do_not_fit(bytes_model: OpenModel):
    for other, tokens, message in (
        (" ", "", "other text is empty"),
        ("Tim and Mary!", "", "12 tokens and the other one 13"),
        ("Mary and Tim", "M,T", "change a word"),
        ("Marx and Tim", "", "both texts go on with"),
        *(("Tim and Mary", tokens, "two different next tokens") for tokens in ("M", "M,M", "M,")),
        ("Tim and Mary", "Mary,Tim", "as one token"),
    ):
        with pytest.raises(ValueError, match=message):
            score_text_edges(bytes_model, {"other": other, "tokens": tokens}, progress())
    with pytest.raises(ValueError, match="onlyDecoderEdges"):
        score_text_edges(sample_model(), {"other": "a"}, progress())
    net = hw.build(hw.families.read_model_spec(GPT), seed=0).eval()
    with pytest.raises(ValueError, match="has no tokenizer"):
        score_text_edges(
            OpenModel(hw.trace(net, torch.arange(3)[None]), net), {"other": "a"}, progress()
        )


def test_edges_stop_when_the_job_is_cancelled(bytes_model: OpenModel):
    job = Job("edges", {})

    class Stop(JobProgress):
        """Cancels the job in the middle of the scores."""

        def __call__(self, done: int, total: int = 0, note: str = "") -> None:
            if done == 3:
                self.job.cancel()
            super().__call__(done, total, note)

    with pytest.raises(JobCancelled):
        score_text_edges(bytes_model, {"other": "Tim and Mary", "tokens": "M,T"}, Stop(job))
    assert job.events[-1]["done"] == 2
    assert job.events[-1]["note"] == "scoring edges"


def test_the_map_draws_edges_over_its_heads(page: Any, bytes_model: OpenModel):
    """Each listed edge is one line, those of the selected head stand out, and each begins below
    its sender.
    """
    with served(bytes_model) as url:
        open_screen(page, url, "map")
        page.get_by_label("other text").fill("Tim and Mary")
        page.get_by_label("next tokens").fill("M,T")
        page.get_by_role("button", name="Show edges").click()
        rows = page.get_by_test_id("edges").locator("tbody tr")
        rows.first.wait_for(timeout=60_000)
        lines = page.locator(".edge-lines path")
        assert lines.count() == rows.count() == 30
        cells = [row.locator("td").all_inner_texts() for row in rows.all()]
        number = next(n for n, one in enumerate(cells) if one[0] == "L0 H1")
        cell = settled_box(page.locator("[data-head='0.1']"))
        start = lines.nth(number).evaluate(
            "line => { const at = line.getPointAtLength(0).matrixTransform(line.getScreenCTM()); "
            "return [at.x, at.y]; }"
        )
        assert start[0] == pytest.approx(cell["x"] + cell["width"] / 2, abs=2)
        assert cell["y"] < start[1] <= cell["y"] + cell["height"] + 2
        rows.nth(number).get_by_role("button", name="L0 H1").first.click()
        wait_until(page, "document.querySelectorAll('.edge-lines .dim').length > 0")
        of_head = sum("L0 H1" in one[0] or "L0 H1" in one[1] for one in cells)
        assert page.locator(".edge-lines path:not(.dim)").count() == of_head
        page.get_by_role("button", name="Hide edges").click()
        assert lines.count() == 0


def test_answers_refuse_what_they_cannot_give():
    model = sample_model(with_model=False)
    site = [layer.name for layer in model.get_trace().layers].index("decoder.2.cross")
    with pytest.raises(ValueError, match="only a trace is open"):
        ask(model, f"/api/written?site={site}&head=1&query=9")
    with pytest.raises(ValueError, match="choose self-attention"):
        ask(model, f"/api/aggregate?site={site}&how=rollout")
    with pytest.raises(ValueError, match="head=9 is out of range"):
        ask(model, f"/api/products?site={site}&head=9&query=9")
