"""The job and the answers of the Diff screen: other texts, ablated heads,
pruned models and traces.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.observe import bundled_sample
from headwise.observe.traces import save_trace, trace_from_weights
from headwise.viewer.comparison_actions import compare_attention, exact_pair, pool_difference
from headwise.viewer.model_worker import Job, JobProgress
from headwise.viewer.open_model import OpenModel
from headwise.viewer.view import Target, open_target
from support.refusals import refused_cases
from viewer.binary_messages import decode_arrays
from viewer.page_models import GPT


def compare(opened: OpenModel, **arguments: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return decode_arrays(
        compare_attention(opened, arguments, JobProgress(Job("compare", arguments)))
    )


def open_gpt(ids: torch.Tensor | None = None) -> OpenModel:
    net = hw.build(hw.families.read_model_spec(GPT), seed=0).eval()
    if ids is None:
        ids = torch.randint(0, 40, (1, 23), generator=torch.Generator().manual_seed(0))
    return OpenModel(hw.trace(net, ids, capture=hw.Capture(extra=("v",))), net)


@pytest.fixture(scope="module")
def translator() -> OpenModel:
    return open_target(Target())


def test_heads_behind_an_ablated_one_attend_as_in_a_model_with_edited_weights() -> None:
    opened = open_gpt()
    header, arrays = compare(opened, **{"with": "ablated"}, heads=[[0, 1, "zero", 0.0]])
    assert header["heads"] == [[site, head] for site in range(2) for head in range(3)]
    edited = copy.deepcopy(opened.get_model())
    with torch.no_grad():
        edited.state_dict()["decoder.0.attention.output.o"].view(12, 3, 4)[:, 1] = 0
    ids = torch.tensor([list(opened.get_trace().streams["text"][0].ids)])
    after = hw.trace(edited, ids)
    for number, (site, head) in enumerate(opened.heads):
        before, expected = (
            opened.get_trace().head_weights(site, head),
            after.head_weights(site, head),
        )
        assert arrays["differences"][number, 1] == pytest.approx(
            np.abs(before - expected).max(), abs=1e-6
        )
        one, other = opened.get_comparison().weights(site, head)
        np.testing.assert_array_equal(one, before)
        np.testing.assert_allclose(other, expected, atol=1e-6)
    assert arrays["differences"][:3].max() == 0  # nothing comes before the first layer
    assert arrays["differences"][3:, 0].min() > 0
    assert arrays["text.pairs"].tolist() == [[place, place] for place in range(23)]


def test_another_text_is_aligned_with_the_open_one(translator: OpenModel) -> None:
    source = translator.get_trace().streams["source"][0]
    header, arrays = compare(
        translator, **{"with": "text"}, source=bundled_sample.TEXTS[3].partition("\t")[0]
    )
    assert header["kind"] == "text"
    assert header["words"]["source"] != list(source.words)
    assert 3 <= len(arrays["source.pairs"]) <= len(source.words)
    assert arrays["differences"][:, 0].max() > 0.01


def test_pictures_hold_the_largest_weights_and_changes_of_their_cells() -> None:
    opened = open_gpt()
    compare(opened, **{"with": "ablated"}, heads=[[0, 0]])
    comparison, (site, head) = opened.get_comparison(), opened.heads[4]
    one, other = comparison.weights(site, head)
    tile = pool_difference(comparison, site, head, 5)
    assert tile["queries"].tolist() == tile["keys"].tolist() == [0, 4, 9, 13, 18]
    edges = [0, 4, 9, 13, 18, 23]
    for row in range(5):
        for column in range(5):
            cell = np.s_[edges[row] : edges[row + 1], edges[column] : edges[column + 1]]
            assert tile["first"][row, column] / 255 == pytest.approx(one[cell].max(), abs=1 / 255)
            assert tile["second"][row, column] / 255 == pytest.approx(
                other[cell].max(), abs=1 / 255
            )
            changes = (other - one)[cell].ravel()
            expected = changes[np.abs(changes).argmax()]
            assert (int(tile["change"][row, column]) - 128) / 127 == pytest.approx(
                expected, abs=0.5 / 127
            )
    assert exact_pair(comparison, site, head, 20, 7).tolist() == [one[20, 7], other[20, 7]]
    whole = pool_difference(comparison, site, head, 512)
    assert whole["change"].shape == (23, 23)
    changes = np.sort(np.abs(other - one)[one != other])[::-1]
    assert len(tile["places"]) == len(changes) > 200
    for (query, key), pair, change in zip(tile["places"], tile["weights"], changes, strict=True):
        assert pair.tolist() == pytest.approx([one[query, key], other[query, key]], abs=1e-6)
        assert abs(pair[1] - pair[0]) == pytest.approx(change, abs=1e-7)


def test_a_pruned_model_is_compared_head_by_head(tmp_path: Path) -> None:
    opened = open_target(Target(out=tmp_path))
    removed = opened.heads[0]
    net: Any = opened.get_model()
    result = hw.prune(net, hw.surgery.DropHeads([removed]))
    folder = tmp_path / "pruned"
    from headwise.surgery.hf_export.model_folder import write_model_folder
    from headwise.surgery.pruning_plan import fingerprint_model

    write_model_folder(
        result.after,
        bundled_sample.MODEL,
        folder,
        dict(result.data) | {"model": fingerprint_model(net)},
    )
    opened.other = str(folder)
    header, arrays = compare(opened, **{"with": "other"})
    assert header["name"] == "pruned"
    assert [0, 0] not in header["heads"]
    assert len(header["heads"]) == len(opened.heads) - 1
    _, ablated = compare(opened, **{"with": "ablated"}, heads=[[0, removed[1]]])
    np.testing.assert_allclose(arrays["differences"], ablated["differences"][1:], atol=1e-5)


def test_traces_are_compared_without_a_model(tmp_path: Path) -> None:
    weights = np.full((1, 2, 3, 3), 1 / 3, np.float32)
    sharp = np.eye(3, dtype=np.float32)[None, None].repeat(2, 1)
    save_trace(trace_from_weights([sharp], ["a", "b", "c"]), tmp_path / "other.trace")
    opened = OpenModel(
        trace_from_weights([weights], ["a", "b", "c"]), other=str(tmp_path / "other.trace")
    )
    _, arrays = compare(opened, **{"with": "other"})
    np.testing.assert_allclose(arrays["differences"][:, 1], 2 / 3, atol=1e-6)
    np.testing.assert_allclose(arrays["differences"][:, 3], -np.log(3), atol=1e-6)
    assert opened.describe()["other"] == "other.trace"
    opened.set_trace(trace_from_weights([weights]))
    with pytest.raises(ValueError, match="nothing was compared"):
        opened.get_comparison()


@pytest.mark.parametrize(
    ("arguments", "message"), refused_cases(__file__, "comparisons", globals())
)
def test_requests_that_cannot_be_answered_say_why(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(open_gpt(), **arguments)


def test_a_model_that_lacks_the_open_token_ids_is_refused(tmp_path: Path) -> None:
    opened = open_gpt()
    hw.save(
        hw.build(hw.families.read_model_spec(GPT | {"vocab_size": 3}), seed=0), tmp_path / "small"
    )
    opened.other = str(tmp_path / "small")
    with pytest.raises(ValueError, match="the table has 3 rows"):
        compare(opened, **{"with": "other"})


def test_a_generated_text_is_compared_only_with_models_of_the_same_tokenizer(translator) -> None:
    streams = {
        name: (replace(rows[0], text="", offsets=()),)
        for name, rows in translator.get_trace().streams.items()
    }
    trace = replace(translator.get_trace(), streams=streams)
    opened = OpenModel(trace, translator.get_model(), other=str(bundled_sample.MODEL))
    _, arrays = compare(opened, **{"with": "other"})
    assert np.abs(arrays["differences"]).max() < 1e-5
    other = open_gpt().get_model()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("headwise.viewer.comparison_actions.load_target", lambda *_: other)
        with pytest.raises(ValueError, match="another tokenizer"):
            compare(opened, **{"with": "other"})
