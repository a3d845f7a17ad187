"""Images and frames: batches hold the contents of the files."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headwise.models import model_spec
from headwise.training import data
from headwise.training.data import IGNORE_INDEX, Batch, Task, open_data


def swept(task: Task, split: str, size: int = 5) -> list[Batch]:
    size = (
        size if split != "train" else task.examples or 0
    )  # an epoch of training ends inside a batch
    count = task.batches(size, split)
    assert count is not None
    return [task.batch(n, size, split) for n in range(count)]


# --- images ---------------------------------------------------------------------------------------

PICTURES = np.random.default_rng(0).integers(0, 256, (40, 6, 5), dtype=np.uint8)
IMAGE_LABELS = np.arange(40) % 3


def as_npz(folder: Path) -> str:
    arrays = {
        "x_train": PICTURES[:30],
        "y_train": IMAGE_LABELS[:30],
        "test_images": PICTURES[30:],
        "test_labels": IMAGE_LABELS[30:],
    }
    np.savez_compressed(folder / "a.npz", **arrays)
    return str(folder / "a.npz")


def as_folders(folder: Path) -> str:
    for n, (picture, label) in enumerate(zip(PICTURES, IMAGE_LABELS, strict=True)):
        path = folder / ("train" if n < 30 else "test") / "abc"[label] / f"{n:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    return str(folder)


@pytest.mark.parametrize("write", [as_npz, as_folders])
def test_pictures_stay_with_their_labels_at_mean_0_and_deviation_1(write: Any, tmp_path: Path):
    task = open_data(write(tmp_path), {"valid": 0.2})
    assert type(task).__name__ == "ImageClassification"
    assert task.data.sizes == {"train": 24, "valid": 6, "test": 10}
    label_of_picture = {
        picture.tobytes(): label for picture, label in zip(PICTURES, IMAGE_LABELS, strict=True)
    }
    inputs, recorded = task.data.inputs, {}
    for split in data.SPLITS:
        for batch in swept(task, split):
            assert batch.x.shape[1:] == (1, 6, 5)
            back = (batch.x[:, 0].numpy() * inputs.deviation + inputs.mean) * 255
            for picture, label in zip(
                back.round().astype(np.uint8), batch.labels.tolist(), strict=True
            ):
                assert label_of_picture[picture.tobytes()] == label
                recorded.setdefault(split, set()).add(picture.tobytes())
    assert [len(recorded[split]) for split in data.SPLITS] == [24, 6, 10]
    assert len(set().union(*recorded.values())) == 40
    every = task.batch(0, 24).x
    assert float(every.mean()) == pytest.approx(0, abs=1e-5)
    assert float(every.std(correction=0)) == pytest.approx(1, abs=1e-5)


def test_epochs_of_pictures_differ_and_have_each_once(tmp_path: Path):
    task = open_data(as_npz(tmp_path))
    count = task.examples
    orders = [
        torch.cat([task.batch(n, 7).x.flatten(1) for n in range(4)])[:count] for _ in range(1)
    ]
    first = torch.cat([task.batch(n, count).x for n in range(2)]).flatten(1)
    assert len(torch.unique(first[:count], dim=0)) == len(torch.unique(first, dim=0)) == count
    assert not torch.equal(first[:count], first[count:])
    assert torch.equal(
        orders[0], first[:count]
    )  # whatever the size of a batch, which goes on into the next epoch
    assert torch.equal(task.batch(3, 7).x.flatten(1)[-1], first[27])


def test_channels_may_come_first_or_last(tmp_path: Path):
    rgb = np.random.default_rng(1).random((12, 9, 7, 3), dtype=np.float32)
    for name, array in (("last", rgb), ("first", rgb.transpose(0, 3, 1, 2))):
        np.savez(tmp_path / f"{name}.npz", images=array, labels=IMAGE_LABELS[:12])
    last, first = (open_data(str(tmp_path / f"{name}.npz")) for name in ("last", "first"))
    assert torch.equal(last.batch(0, 5).x, first.batch(0, 5).x)
    assert last.batch(0, 5).x.shape == (5, 3, 9, 7)
    assert last.batch(0, 400).x.mean((0, 2, 3)).abs().max() < 0.1


def test_pictures_of_several_sizes_are_brought_to_one(tmp_path: Path):
    for n, label in enumerate("aabbab"):
        (tmp_path / label).mkdir(exist_ok=True)
        Image.new("RGB", (8 + n, 6), (40 * n, 0, 0)).save(tmp_path / label / f"{n}.png")
    batch = open_data(str(tmp_path), {"size": [6, 8]}).batch(0, 4)
    assert batch.x.shape == (4, 3, 6, 8)
    assert (batch.x.std((2, 3)) < 1e-4).all()  # of one colour, and still so


# --- frames ---------------------------------------------------------------------------------------

UTTERANCES = [
    np.random.default_rng(n).normal(3, 2, (3 + n % 4, 5)).astype(np.float32) for n in range(20)
]
TRANSCRIPTS = [np.arange(len(one)) % 3 + 5 for one in UTTERANCES]


def as_row(folder: Path, labels: Any) -> str:
    lengths = [len(one) for one in UTTERANCES]
    np.savez(folder / "a.npz", frames=np.concatenate(UTTERANCES), lengths=lengths, labels=labels)
    return str(folder / "a.npz")


def utterances(task: Task) -> list[tuple[np.ndarray, list[int]]]:
    """Every utterance of every split, as it was before, with its labels."""
    found = []
    for batch in (batch for split in data.SPLITS for batch in swept(task, split)):
        live = (
            batch.tokens.is_real
            if batch.tokens
            else torch.ones(batch.x.shape[:2], dtype=torch.bool)
        )
        for x, label, at in zip(batch.x, batch.labels, live, strict=True):
            assert not x[~at].any()
            assert label.ndim == 0 or (label[~at] == IGNORE_INDEX).all()
            names = [
                int(task.data.names[one])
                for one in (label[at] if label.ndim else label[None]).tolist()
            ]
            found.append(
                (x[at].numpy() * task.data.inputs.deviation + task.data.inputs.mean, names)
            )
    return found


@pytest.mark.parametrize("each", ["frame", "utterance"])
def test_frames_stay_with_their_labels(each: str, tmp_path: Path):
    labels = np.concatenate(TRANSCRIPTS) if each == "frame" else [len(one) for one in UTTERANCES]
    task = open_data(as_row(tmp_path, labels), {"valid": 0.2, "test": 0.2})
    found = utterances(task)
    assert len(found) == 20
    for frames, names in found:
        place = next(
            n
            for n, one in enumerate(UTTERANCES)
            if one.shape == frames.shape and np.allclose(one, frames, atol=1e-4)
        )
        assert names == (TRANSCRIPTS[place].tolist() if each == "frame" else [len(frames)])
    train = torch.cat(
        [b.x[b.tokens.is_real] if b.tokens else b.x.flatten(0, 1) for b in swept(task, "train")]
    )
    assert float(train.mean(0).abs().max()) < 1e-5
    assert float((train.std(0, correction=0) - 1).abs().max()) < 1e-4
    described = task.model()
    assert described.heads[0].at == ("each" if each == "frame" else "mean")
    assert described.stacks[0].embedding.patches.patch_width == 5


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["images", "frames"])
def test_file_tasks_keep_the_promises_of_every_task(name: str, tmp_path: Path):
    (tmp_path / "frames").mkdir()
    paths = {
        "images": as_npz(tmp_path),
        "frames": as_row(tmp_path / "frames", [len(one) for one in UTTERANCES]),
    }
    task = open_data(paths[name])
    assert task.name == name
    assert data.TASKS[name] is type(task)
    first = task.batch(5, 3)
    task.batch(0, 4, "valid")
    again = pickle.loads(pickle.dumps(task))
    assert again == task
    assert torch.equal(again.batch(5, 3).x, first.x)
    assert torch.equal(again.batch(5, 3).labels, first.labels)
    assert eval(repr(task), vars(data) | {type(task).__name__: type(task)}) == task
    described = task.model()
    assert model_spec.from_toml(model_spec.to_toml(described)) == described
    assert described.heads[0].outputs > int(first.labels.max())
    batch = task.batch(0, 3, "valid")
    for measure in task.measure(
        torch.zeros(*batch.labels.shape, described.heads[0].outputs), batch
    ):
        assert measure in task.chance
    other = replace(task, seed=9)
    assert not torch.equal(other.batch(5, 3).x, first.x)
    assert torch.equal(other.batch(0, 3, "valid").x, batch.x)
