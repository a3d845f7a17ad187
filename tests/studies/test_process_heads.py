"""Heads of a corpus that is divided over processes: the bytes of one process with one thread."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from headwise.kernels.capabilities import use_threads
from headwise.observe import bundled_sample
from headwise.observe.head_analysis.annotated_examples import Example, ExampleReader
from headwise.observe.head_analysis.dependency_syntax import DependencyScores
from headwise.observe.head_analysis.head_measurement import MeasureOptions, measure_heads
from headwise.observe.head_analysis.top_sequences import SequenceCollector
from headwise.studies import process_engine
from headwise.studies.process_engine import SHARD_SIZE, ProcessHeads
from headwise.util.errors import SpecError
from studies import dying_cells
from support.command_help import run_json
from support.transformers_models import ZOO


def make_examples(model: nn.Module, count: int) -> list[Example]:
    """Texts with a chain of dependencies each."""
    draw = torch.Generator().manual_seed(0)
    reader = ExampleReader(model)
    for n in range(count):
        reader.add_inputs(torch.randint(3, 60, (4 + n % 5,), generator=draw))
    texts = reader.examples_with_frequencies()
    arcs = [(0, 1, "det"), (1, 2, "nsubj"), (2, 3, "obj")]
    return [Example(one.inputs, one.streams, dependencies=arcs) for one in texts]


def measure(model: nn.Module, examples: list[Example], engine: ProcessHeads | None) -> Any:
    """Everything that is measured, as JSON."""
    collectors = [
        SequenceCollector(count=3),
        DependencyScores(min_arcs=1),
    ]
    options = MeasureOptions(engine=engine)
    table = measure_heads(model, examples, options=options, collectors=collectors)
    sequences = collectors[0]
    assert isinstance(sequences, SequenceCollector)
    return json.dumps([table.data, sequences.result(model).data])


@pytest.mark.lengthy
def test_processes_give_the_bytes_of_one_thread():
    model = ZOO["llama"].build()
    examples = make_examples(model, 2 * SHARD_SIZE + 3)
    with use_threads(1):
        expected = measure(model, examples, None)
    assert "det" in expected
    for jobs in (1, 2, 3):
        assert measure(model, examples, ProcessHeads(jobs)) == expected


@pytest.mark.lengthy
def test_the_command_divides_texts_with_alignments(capsys: pytest.CaptureFixture[str]):
    command = "--task dates --limit 11 --sequences 2"
    with use_threads(1):
        expected = run_json(capsys, "heads", bundled_sample.MODEL, command)
    assert len(expected["sequences"]["heads"]) == len(expected["heads"])
    assert any("alignment input" in head["measures"] for head in expected["heads"])
    assert run_json(capsys, "heads", bundled_sample.MODEL, f"{command} --jobs 2") == expected


@pytest.mark.lengthy
def test_a_lost_process_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_engine, "_sum_pickled", dying_cells.die_before_the_cell)
    model = ZOO["llama"].build()
    with pytest.raises(SpecError, match=r"a process that measured texts ended.*fewer --jobs"):
        measure(model, make_examples(model, 3), ProcessHeads(1))


def test_a_model_that_cannot_be_copied_is_refused():
    class Local(type(ZOO["llama"].build())):
        """A class that no other process can import."""

    model = Local(ZOO["llama"].build().config).eval()
    with pytest.raises(SpecError, match=r"cannot send the model to other processes.*leave --jobs"):
        measure(model, make_examples(model, 3), ProcessHeads(2))
