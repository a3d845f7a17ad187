"""`hw.evaluate` against losses and accuracies that are summed one label at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch

import headwise as hw
from headwise.training.data import Task, make_task


def by_hand(
    net: hw.Transformer, task: Task, batches: int, size: int, split: str
) -> dict[str, float]:
    """Mean loss and accuracy of every label, in float64."""
    losses, hits = list[float](), list[bool]()
    for index in range(batches):
        batch = task.batch(index, size, split)
        with torch.no_grad():
            logits = net(batch.x).double()
        for row, labels in zip(logits, batch.labels, strict=True):
            for scores, label in zip(row, labels.tolist(), strict=True):
                if label >= 0:
                    losses.append(
                        math.log(sum(math.exp(score - scores[label]) for score in scores.tolist()))
                    )
                    hits.append(int(scores.argmax()) == label)
    return {"loss": sum(losses) / len(losses), "accuracy": sum(hits) / len(hits)}


def _main(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of all labels, without those of parts of the examples."""
    return {name: metrics[name] for name in ("loss", "accuracy")}


@pytest.mark.parametrize("split", ["test", "valid"])
def test_metrics_are_means_over_all_labels(split: str):
    torch.manual_seed(3)
    task = make_task("group", length=5, group="S3")
    net = hw.Transformer(task.model()).train()
    result = hw.evaluate(net, task, lengths=(7, 11), batch=3, batches=2, split=split)
    assert net.training
    net.eval()
    assert _main(result.metrics) == pytest.approx(by_hand(net, task, 2, 3, split), rel=1e-5)
    assert list(result.by_length) == [7, 11]
    for length, metrics in result.by_length.items():
        longer = make_task("group", length=length, group="S3")
        assert _main(metrics) == pytest.approx(by_hand(net, longer, 2, 3, split), rel=1e-5)
    lines = {line.split()[0]: line.split()[1:] for line in str(result).splitlines()}
    assert lines["metric"] == ["the", "task", "length", "7", "length", "11"]
    rows = (result.metrics, *result.by_length.values())
    assert lines["loss"] == [f"{row['loss']:.4f}" for row in rows]
    assert lines["accuracy@t<=8"] == [
        "-" if "accuracy@t<=8" not in row else f"{row['accuracy@t<=8']:.4f}" for row in rows
    ]


def test_an_evaluated_model_stays_in_its_mode():
    task = make_task("group", length=12)
    net = hw.Transformer(task.model()).eval()
    first = hw.evaluate(net, task, batch=2, batches=1)
    assert not net.training
    assert first == hw.evaluate(net, task, batch=2, batches=1)
    assert first.by_length == {}


def test_wrong_sizes_and_tasks_without_a_length_are_refused():
    task = make_task("group", length=12)
    net = hw.Transformer(task.model())
    with pytest.raises(hw.SpecError, match="batches must be a whole number of at least 1; got 0"):
        hw.evaluate(net, task, batches=0)
    with pytest.raises(hw.SpecError, match="a length must be a whole number of at least 1; got 0"):
        hw.evaluate(net, task, lengths=(0,))
    with pytest.raises(hw.SpecError, match="the task 'copy' has no option length"):
        hw.evaluate(net, make_task("copy"), lengths=(8,))
