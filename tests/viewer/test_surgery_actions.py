"""Pruning and conversion on the page: the new folders hold what the library gives, and refusals
change nothing.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.cli import main
from headwise.hub.pretrained_models import load
from headwise.observe import bundled_sample
from headwise.observe.head_analysis.annotated_examples import examples_from_lines
from headwise.surgery import DropHeads, HeadRanking, KeepTop, Pool
from headwise.surgery.model_and_texts import split_examples
from headwise.surgery.pruning_plan import fingerprint_model
from headwise.viewer import surgery_actions
from headwise.viewer.model_worker import Job, JobCancelled, JobProgress, ModelWorker
from headwise.viewer.open_model import OpenModel
from headwise.viewer.server import ALL_JOBS
from headwise.viewer.view import Target, open_target
from support.refusals import refused_cases
from support.saved_models import save_models
from viewer.page_models import progress

HEADS = [[0, 1], [4, 3], [4, 5]]  # numbers of sites, as the page names heads
NAMED_HEADS = (("encoder.0.attention", 1), ("decoder.0.cross", 3), ("decoder.0.cross", 5))
TEXTS = list(bundled_sample.TEXTS[:4])
LLAMA = {
    "model_type": "llama",
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 20,
    "vocab_size": 40,
}


@pytest.fixture(autouse=True)
def short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surgery_actions, "TIMING_SECONDS", 0.05)


@pytest.fixture
def sample(tmp_path: Path) -> OpenModel:
    return open_target(Target(out=tmp_path / "out"))


def assert_equal_weights(found: nn.Module, expected: nn.Module) -> None:
    tensors = expected.state_dict()
    assert found.state_dict().keys() == tensors.keys()
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=0)


def run_job(model: OpenModel, kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The last event of a job, as the page sees it."""
    worker = ModelWorker(model, ALL_JOBS)
    job = worker.submit(kind, arguments)
    while not job.has_ended:
        time.sleep(0.02)
    worker.close()
    return job.events[-1]


# --- What is written ------------------------------------------------------------------------------


def test_listed_heads_are_pruned_as_the_library_does_and_the_verification_holds(sample, tmp_path):
    found = surgery_actions.prune_heads(
        sample, {"heads": HEADS, "texts": TEXTS, "name": "small"}, progress()
    )
    net = bundled_sample.load_sample_model()
    small = load(tmp_path / "out" / "small")
    assert_equal_weights(small, hw.prune(net, DropHeads(NAMED_HEADS)).after)
    example = examples_from_lines(net, TEXTS).examples[1]
    with torch.inference_mode(), hw.ablate(net, [(site, head) for site, head in NAMED_HEADS]):
        expected = net(**example.inputs)
    with torch.inference_mode():
        torch.testing.assert_close(small(**example.inputs), expected, rtol=1e-4, atol=1e-3)
    assert found["holds"] is True
    assert {check["what"] for check in found["verification"]["equal"]} >= {
        "heads ablated vs. removed",
        "headwise.load of the written folder",
    }
    assert (
        json.loads((tmp_path / "out" / "small" / "verification.json").read_text())["holds"] is True
    )
    assert (tmp_path / "out" / "small" / "texts.txt").read_text(
        encoding="utf-8"
    ).splitlines() == TEXTS
    assert found["folder"] == str(tmp_path / "out" / "small")
    parameters = found["verification"]["savings"]["numbers"][0]
    assert parameters["after"] == sum(parameter.numel() for parameter in small.parameters())


def test_a_share_keeps_the_heads_that_the_library_ranks_highest(sample: OpenModel, tmp_path: Path):
    lines = list(bundled_sample.TEXTS)
    arguments = {"keep": 0.5, "by": "michel", "per": "model", "texts": lines}
    net = bundled_sample.load_sample_model()
    examples = examples_from_lines(net, lines).examples_with_frequencies()
    selection, _, _ = split_examples(examples, ["heads were chosen"])
    expected = hw.prune(net, KeepTop(0.5, HeadRanking("michel"), "model"), selection)
    names = [layer.name for layer in sample.get_trace().layers]
    planned = surgery_actions.plan_pruning(sample, arguments, progress())
    assert sorted((names[site], head) for site, head in planned["removed"]) == sorted(
        expected.plan.removed_heads
    )
    assert planned["kept"] == 27
    assert not (tmp_path / "out").exists()  # a plan writes nothing
    surgery_actions.prune_heads(sample, arguments | {"name": "half"}, progress())
    assert_equal_weights(load(tmp_path / "out" / "half"), expected.after)


def test_removed_heads_are_replaced_by_their_mean(sample: OpenModel, tmp_path: Path):
    arguments = {"heads": HEADS, "fold": "mean", "texts": TEXTS, "name": "folded"}
    found = surgery_actions.prune_heads(sample, arguments, progress())
    net = bundled_sample.load_sample_model()
    examples = examples_from_lines(net, TEXTS).examples_with_frequencies()
    expected = hw.prune(net, DropHeads(NAMED_HEADS), examples, fold="mean").after
    assert_equal_weights(load(tmp_path / "out" / "folded"), expected)
    assert found["holds"]


def test_the_command_of_the_page_makes_the_same_model(sample, tmp_path, capsys):
    found = surgery_actions.prune_heads(
        sample, {"heads": HEADS, "texts": TEXTS, "name": "small"}, progress()
    )
    program, *words = shlex.split(found["command"])
    assert program == "headwise"
    assert main([*words, "--seconds", "0.05"]) == 0
    assert re.search(r"^outputs, 3 checks .* equal", capsys.readouterr().out, re.MULTILINE)
    assert_equal_weights(load(tmp_path / "out" / "small-again"), load(tmp_path / "out" / "small"))


def test_a_transformers_folder_becomes_one_again(tmp_path: Path):
    pytest.importorskip("transformers")
    source = save_models(tmp_path)["gpt2"]
    model = open_target(Target(str(source), "a text", out=tmp_path / "out"))
    arguments = {"heads": [[0, 1], [1, 1]], "texts": ["one line", "another line"], "name": "small"}
    found = surgery_actions.prune_heads(model, arguments, progress())
    expected = hw.prune(
        load(source), DropHeads((("decoder.0.attention", 1), ("decoder.1.attention", 1)))
    ).after
    assert_equal_weights(load(tmp_path / "out" / "small"), expected)
    assert found["kind"] != "ours"
    assert found["command"].split()[2] == str(source)


@pytest.mark.parametrize(
    ("arguments", "options", "pool"),
    [
        ({"kv": 2}, "--kv 2", Pool(2)),
        (
            {"kv": 3, "align": "both", "grouping": "similar"},
            "--kv 3 --align both --grouping similar",
            Pool(3, "both", "similar"),
        ),
    ],
)
def test_heads_are_pooled_as_the_library_does(sample, tmp_path, arguments, options, pool):
    arguments |= {"form": "kv", "texts": TEXTS, "name": "gqa"}
    found = surgery_actions.convert_heads(sample, arguments, progress())
    net = bundled_sample.load_sample_model()
    expected = hw.convert(net, pool, examples_from_lines(net, TEXTS).examples_with_frequencies())
    assert_equal_weights(load(tmp_path / "out" / "gqa"), expected.after)
    assert {entry["site"]: entry["groups"] for entry in found["groups"]} == {
        site: [list(group) for group in groups] for site, groups in expected.groups.items()
    }
    assert f" {options} --data " in found["command"]
    assert found["holds"]
    planned = surgery_actions.plan_conversion(sample, arguments, progress())
    assert planned["numbers"] == found["verification"]["savings"]["numbers"]


def test_an_exact_form_is_proved_to_be_exact(sample: OpenModel):
    found = surgery_actions.convert_heads(
        sample, {"form": "latent", "texts": TEXTS, "name": "mla"}, progress()
    )
    checks = {check["what"]: check["same"] for check in found["verification"]["equal"]}
    assert checks["the new form, an exact rewrite"] is True


# --- What is possible -----------------------------------------------------------------------------


def forms_of(model: OpenModel) -> dict[str, dict[str, Any]]:
    found = surgery_actions.describe_surgery(model, {}, progress())
    return {form["form"]: form for form in found["forms"]}


def test_the_forms_are_those_that_the_model_allows(sample: OpenModel):
    forms = forms_of(sample)
    assert [name for name, form in forms.items() if form["possible"]] == ["kv", "latent", "routed"]
    assert forms["kv"]["counts"] == [1, 2, 3]
    assert "rotary" in forms["collaborative"]["reason"]
    assert "its own key-value head already" in forms["mha"]["reason"]


def test_a_model_with_shared_key_value_heads_can_be_given_one_for_each_query_head():
    net = hw.build(hw.families.read_model_spec(LLAMA), seed=0).eval()
    model = OpenModel(hw.trace(net, torch.tensor([[3, 1, 4, 1, 5]])), net)
    found = surgery_actions.describe_surgery(model, {}, progress())
    forms = {form["form"]: form for form in found["forms"]}
    assert (found["heads"], found["kvHeads"]) == (12, 4)
    assert forms["kv"]["counts"] == [1]
    assert forms["mha"]["possible"]


# --- What is refused ------------------------------------------------------------------------------


def read_only(model: OpenModel) -> None:
    model.read_only = True


def drop_model(model: OpenModel) -> None:
    model.load_model = None


def replace_model(model: OpenModel) -> None:
    model.model, model.target = nn.Linear(2, 2), ""


def make_folder(model: OpenModel) -> None:
    assert model.output_folder is not None
    (model.output_folder / "small").mkdir(parents=True)
    (model.output_folder / "small" / "kept.txt").write_text("kept")


def nothing(model: OpenModel) -> None:
    pass


PRUNE = {"heads": HEADS, "texts": TEXTS, "name": "small"}
CONVERT = {"form": "kv", "kv": 2, "texts": TEXTS, "name": "small"}


@pytest.mark.parametrize("kind", ["prune", "convert"])
@pytest.mark.parametrize(("change", "fact"), refused_cases(__file__, "surgery", globals()))
def test_what_cannot_be_written_or_changed_is_refused(sample, kind, change, fact):
    change(sample)
    event = run_job(sample, kind, PRUNE if kind == "prune" else CONVERT)
    assert event["state"] == "failed"
    assert event["error"]["fact"].startswith(fact)
    assert event["error"]["remedy"]
    assert sample.output_folder is not None
    files = sorted(path.name for path in sample.output_folder.rglob("*"))
    assert files == (["kept.txt", "small"] if change is make_folder else [])


@pytest.mark.parametrize(
    ("kind", "arguments", "fact"), refused_cases(__file__, "surgery arguments", globals(), 2)
)
def test_arguments_that_cannot_work_are_refused(sample, kind, arguments, fact):
    event = run_job(sample, kind, arguments)
    assert event["state"] == "failed"
    assert event["error"]["fact"].startswith(fact)
    assert event["error"]["remedy"]
    assert sample.output_folder is not None
    assert not list(sample.output_folder.rglob("*"))


# --- Jobs that end early --------------------------------------------------------------------------


class CancelledAt(JobProgress):
    """Cancels its job when a step begins."""

    def __init__(self, note: str) -> None:
        super().__init__(Job("test", {}))
        self.note = note

    def __call__(self, done: int, total: int = 0, note: str = "") -> None:
        if note.startswith(self.note):
            self.job.cancel()
        super().__call__(done, total, note)


@pytest.mark.parametrize(
    "note", ["removing heads", "writing the model", "comparing exported", "measuring speed"]
)
def test_a_cancelled_job_leaves_no_folder_and_the_open_model_as_it_was(sample, note):
    net: Any = sample.get_model()
    before, revision = fingerprint_model(net), sample.revision
    stop = CancelledAt(note)
    with pytest.raises(JobCancelled):
        surgery_actions.prune_heads(sample, PRUNE, stop)
    assert stop.job.is_cancelled
    assert fingerprint_model(net) == before
    assert (sample.model, sample.revision) == (net, revision)
    assert sample.output_folder is not None
    assert not list(sample.output_folder.rglob("*"))


def test_a_job_that_fails_while_it_proves_leaves_no_folder(sample, monkeypatch):
    def fail(*_: Any) -> None:
        raise ValueError("the disk is full; delete something")

    monkeypatch.setattr("headwise.surgery.model_and_texts.write_verification", fail)
    net: Any = sample.get_model()
    before = fingerprint_model(net)
    event = run_job(sample, "convert", CONVERT)
    assert event["error"] == {"fact": "the disk is full", "remedy": "delete something"}
    assert fingerprint_model(net) == before
    assert sample.output_folder is not None
    assert not list(sample.output_folder.rglob("*"))


def test_progress_names_the_steps_and_does_not_exceed_them(sample: OpenModel):
    job = Job("test", {})
    surgery_actions.prune_heads(sample, PRUNE, JobProgress(job))
    steps = [event for event in job.events if event["state"] == "running"]
    assert all(0 <= event["done"] < event["total"] == 10 for event in steps)
    assert [event["done"] for event in steps] == sorted(event["done"] for event in steps)
    assert "measuring speed: decode, 3 of 3" in [event["note"] for event in steps]
