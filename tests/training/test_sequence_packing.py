"""Packed batches have the loss, gradients and metrics of padded ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

import headwise as hw
from headwise.attention.masking.sequence_info import SequenceInfo
from headwise.models.distributed import Parallelism, ProcessInfo
from headwise.models.distributed.ranks import ProcessMesh, shard_batch
from headwise.models.distributed.sharded_model import BatchForward, wrap_single_process
from headwise.training import Recipe, train
from headwise.training.data import IGNORE_INDEX, Batch
from headwise.training.data.synthetic_task import ModelShape, make_small_translator
from headwise.training.data.task import UnpackableBatch, iter_texts, pack_batch
from headwise.training.evaluation import TaskEvaluator
from headwise.training.train_step import StepOptions, TrainStep
from support.small_training import Echo, RoutedEcho, short_recipe

IDS = 23
LENGTHS = [(5, 3), (1, 7), (4, 4), (9, 2), (2, 6)]


def pairs(lengths=LENGTHS) -> Batch:
    """Pairs of texts of these lengths, the source first."""
    draw = torch.Generator().manual_seed(7)
    ids = [
        torch.randint(IDS, (len(lengths), max(each)), generator=draw)
        for each in zip(*lengths, strict=True)
    ]
    source, x = ids
    sequence = [
        SequenceInfo.from_batch(one, lengths=list(each))
        for one, each in zip(ids, zip(*lengths, strict=True), strict=True)
    ]
    labels = torch.randint(IDS, x.shape, generator=draw).where(sequence[1].is_real, IGNORE_INDEX)
    return Batch(x, labels, sequence[1], source, sequence[0])


def net_of_pairs():
    return hw.build(
        make_small_translator("translator", IDS, ModelShape(64, 2, 2, 256)), seed=1
    ).double()


def gradients(net, batch, rows, **options):
    recipe = Recipe(batch=len(batch.labels), device="cpu", **options)
    net.zero_grad(set_to_none=True)
    loss = TrainStep(
        wrap_single_process(net.train()), recipe, StepOptions("fp32", "off", rows=rows)
    ).compute_gradients(batch)
    return {"loss": loss} | {
        name: p.grad for name, p in net.named_parameters() if p.grad is not None
    }


def check_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        torch.testing.assert_close(
            one, theirs[name], rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("accumulate", [1, 5])
def test_packed_pairs_have_the_unpacked_gradients(accumulate):
    net = net_of_pairs()
    expected = gradients(net, pairs(), "padded")
    check_same(gradients(net, pairs(), "packed", accumulate=accumulate), expected)


@pytest.mark.parametrize("task", [Echo(), RoutedEcho()], ids=["text", "terms"])
def test_packed_texts_have_the_unpacked_gradients(task):
    net = hw.build(task.model(), seed=1).double()
    terms = (("balance", 0.3),) if isinstance(task, RoutedEcho) else ()
    expected = gradients(net, task.batch(0, 6), "padded", aux_losses=terms)
    check_same(gradients(net, task.batch(0, 6), "packed", aux_losses=terms), expected)


def test_shares_of_ranks_are_packed_apart():
    net, recipe = net_of_pairs(), Recipe(batch=5, device="cpu")
    stepper = TrainStep(wrap_single_process(net), recipe, StepOptions("fp32", "off", rows="packed"))
    own = [stepper.compute_loss(shard_batch(pairs(), rank, 2).batch).item() for rank in range(2)]
    assert sum(own) == pytest.approx(stepper.compute_loss(pairs()).item(), rel=1e-12)
    idle = shard_batch(pairs(), 6, 7)
    assert (idle.rows, stepper.compute_loss(idle.batch).item()) == (0, 0)


@pytest.mark.parametrize("task", [Echo(), RoutedEcho()], ids=["text", "terms"])
def test_packed_evaluation_is_unchanged(task):
    net = hw.build(task.model(), seed=1).double().eval()
    world = ProcessMesh(ProcessInfo(), Parallelism(), "cpu")
    values = [
        TaskEvaluator(task, short_recipe(), StepOptions("fp32", "off", rows=rows), world)
        for rows in ("padded", "packed")
    ]
    first, second = (one.compute_metrics(BatchForward(net), "valid") for one in values)
    assert first.keys() == second.keys()
    assert all(first[name] == pytest.approx(second[name], rel=1e-10) for name in first)


ROWS = st.lists(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


@given(rows=ROWS)
def test_rows_of_any_texts_come_back(rows):
    sequence = [
        SequenceInfo.packed([[text[side] for text in row] for row in rows]) for side in (0, 1)
    ]
    x, source = (torch.randint(1, IDS, t.position.shape) for t in sequence)
    batch = Batch(x, x.where(sequence[0].is_real, IGNORE_INDEX), sequence[0], source, sequence[1])
    row = pack_batch(batch)
    own = row.batch.tokens
    assert own.is_real.all()
    assert row.batch.source_tokens.is_real.all()
    assert torch.equal(row.unpack(row.batch.x), x.where(sequence[0].is_real, 0))
    each = [text for one in rows for text in one if any(text)]
    assert own.lengths == (tuple(text[0] for text in each),)
    assert row.batch.source_tokens.lengths == (tuple(text[1] for text in each),)
    separate = [[text[0], text[1]] for text in each if text[0]]
    assert [[one.x.shape[1], one.source.shape[1]] for one in iter_texts(row.batch)] == separate


def test_padding_on_the_left_is_left_out_too():
    ids = torch.tensor([[0, 5, 6], [7, 8, 9]])
    row = pack_batch(
        Batch(
            ids,
            ids.where(ids > 0, IGNORE_INDEX),
            SequenceInfo.from_batch(ids, lengths=[2, 3], pad="left"),
        )
    )
    assert row.batch.x.tolist() == [[5, 6, 7, 8, 9]]
    assert row.batch.tokens.position.tolist() == [[0, 1, 0, 1, 2]]


def test_unpackable_batches_give_reasons():
    whole = pairs()
    cases = {
        "per example": replace(whole, labels=whole.labels[:, 0]),
        "not a batch of token ids": Batch(torch.randn(2, 3), torch.zeros(2, 3)),
        "labels at padding": replace(whole, labels=torch.zeros_like(whole.labels)),
        "positions from 0": Batch(
            whole.x, whole.x, SequenceInfo.contiguous(3, whole.x.shape[1], "cpu")
        ),
    }
    mixed = SequenceInfo(torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 0, 1]]))
    cases["not consecutive"] = Batch(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4), mixed)
    for message, batch in cases.items():
        with pytest.raises(UnpackableBatch, match=message):
            pack_batch(batch)


def test_a_packed_run_goes_on_with_the_same_bits(tmp_path):
    recipe = short_recipe(steps=6, batch=6, rows="packed", checkpoint_every=2, evaluate_every=3)
    whole = train(Echo(), recipe=recipe, out=tmp_path / "whole")
    padded = train(Echo(), recipe=replace(recipe, rows="padded"), out=tmp_path / "padded")
    assert whole.metrics["loss"] == pytest.approx(padded.metrics["loss"], rel=1e-4)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            train(Echo(), recipe=recipe, out=tmp_path / "parts")
    again = train(Echo(), recipe=recipe, out=tmp_path / "parts", resume="allowed")
    for name, tensor in whole.net.state_dict().items():
        assert torch.equal(tensor, again.net.state_dict()[name]), name


def stop_at(patch, step):
    from headwise.training.training_run import TrainingRun

    before = TrainingRun.step

    def stepping(self, batches):
        if self.progress.step == step:
            raise KeyboardInterrupt
        return before(self, batches)

    patch.setattr(TrainingRun, "step", stepping)
