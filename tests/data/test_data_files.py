"""Token ids, JSON lines, images and frames: batches hold the contents of the files."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from headwise import data, model_spec
from headwise.data import IGNORE_INDEX, Batch, Task, open_data
from headwise.data.images import read_idx
from headwise.data.language_modelling import TextTask
from headwise.errors import SpecError

IDS = np.arange(1009) * 613 % 331


def swept(task: Task, split: str, size: int = 5) -> list[Batch]:
    size = (
        size if split != "train" else task.examples or 0
    )  # an epoch of training ends inside a batch
    count = task.batches(size, split)
    assert count is not None
    return [task.batch(n, size, split) for n in range(count)]


def labels_of(task: Task, split: str) -> list[int]:
    """Every label of a split, in its order."""
    return [int(one) for one in task.batch(0, 9_999, split).labels.flatten() if one != IGNORE_INDEX]


# --- ids ------------------------------------------------------------------------------------------


def written(folder: Path, kind: str) -> str:
    """The ids as a file of one kind, with what it does not say of itself beside it."""
    path = folder / f"ids.{kind.split()[0]}"
    match kind.split():
        case ["npy", *_]:
            np.save(path, IDS.astype(kind.split()[1]))
        case ["bin", dtype]:
            path.write_bytes(IDS.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
            (folder / "meta.json").write_text(json.dumps({"vocab": 400, "dtype": dtype}))
        case ["safetensors", dtype]:
            save_file({"ids": IDS.astype(dtype), "more": np.zeros(3)}, path)
    return str(path)


KINDS = [
    "npy uint16",
    "npy int64",
    "bin uint16",
    "bin uint32",
    "safetensors uint16",
    "safetensors int32",
]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_file(kind: str, tmp_path: Path):
    options = {"tensor": "ids"} if kind.startswith("safe") else {}
    task = open_data(written(tmp_path, kind), {"length": 7, "valid": 0.2, "test": 0.1, **options})
    assert labels_of(task, "valid") + labels_of(task, "test") == IDS[706:].tolist()
    inside = " ".join(map(str, IDS[:706]))
    for row in task.batch(3, 20).x.tolist():
        assert task.text(row) in inside
    assert task.data.size == (400 if kind.startswith("bin") else 331)
    assert (pickle.loads(pickle.dumps(task)).batch(3, 20).x == task.batch(3, 20).x).all()


@pytest.mark.parametrize("kind", ["npy uint16", "bin uint16", "safetensors uint16"])
def test_ids_stay_on_disk(kind: str, tmp_path: Path):
    options = {"tensor": "ids"} if kind.startswith("safe") else {}
    ids = open_data(written(tmp_path, kind), options).data.spans["train"].ids
    assert not isinstance(ids, np.ndarray) or isinstance(ids, np.memmap)


def test_a_folder_has_parts_of_its_own_and_a_tokenizer(tmp_path: Path):
    (text := tmp_path / "a.txt").write_text("low lower lowest\n" * 50)
    text_task = TextTask(str(text), tokens="bpe", vocab=280)
    (tmp_path / "ids" / "x").mkdir(parents=True)
    for split, options in (("train", "low lower lowest\n" * 30), ("val", "lowest low\n" * 5)):
        (tmp_path / "ids" / f"{split}.bin").write_bytes(
            np.array(text_task.ids(options), "<u2").tobytes()
        )
    (tmp_path / "ids" / "tokenizer.json").write_text(text_task.tokenizer or "")
    meta = {"vocab": 290, "dtype": "uint16", "tokenizer": "tokenizer.json"}
    (tmp_path / "ids" / "meta.json").write_text(json.dumps(meta))
    task = open_data(str(tmp_path / "ids"), {"length": 5})
    assert (
        task.text(labels_of(task, "valid"))
        == ("lowest low\n" * 5)[len(task.text([text_task.ids("lowest")[0]])) :]
    )
    assert task.batches(5, "test") == 0
    assert task.tokenizer == text_task.tokenizer
    batch = task.batch(0, 3, "valid")
    metrics = task.measure(torch.zeros(*batch.x.shape, 290), batch)
    written_ = [int(one) for one in batch.labels.flatten() if one != IGNORE_INDEX]
    assert metrics["bits_per_byte"][1] == len(task.text(written_).encode())


# --- lines of JSON --------------------------------------------------------------------------------

ROWS = [
    {"id": n, "text": f"number {n} {'is' * (n % 5)} é", "kind": ["odd", "even"][n % 2 == 0]}
    for n in range(60)
]


@pytest.fixture
def lines(tmp_path: Path) -> str:
    (file := tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps(row) for row in ROWS))
    return str(file)


def test_texts_follow_each_other_with_an_end(lines: str):
    task = open_data(lines, {"vocab": 300, "length": 9, "valid": 0.2, "test": 0.1})
    ids = [row["text"] for row in ROWS]
    expected = [one for text in ids[42:54] for one in (*task.ids(text), 0)]
    assert labels_of(task, "valid") == expected[1:]
    assert labels_of(task, "test") == [one for text in ids[54:] for one in (*task.ids(text), 0)][1:]


def test_labels_stay_with_their_texts(lines: str):
    task = open_data(
        lines, {"vocab": 300, "label_field": "kind", "valid": 0.2, "test": 0.1, "length": 40}
    )
    assert task.data.names == ("even", "odd")
    by_text = {row["text"]: row["kind"] for row in ROWS}
    found = []
    for split in data.SPLITS:
        for batch in swept(task, split):
            live = (
                batch.tokens.is_real if batch.tokens else torch.ones_like(batch.x, dtype=torch.bool)
            )
            read = [task.text(row[at].tolist()) for row, at in zip(batch.x, live, strict=True)]
            found += read
            assert [by_text[one] for one in read] == [
                task.data.names[label] for label in batch.labels
            ]
    assert sorted(found) == sorted(by_text)
    cut = open_data(lines, {"vocab": 300, "label_field": "kind", "length": 5})
    assert max(batch.x.shape[1] for batch in swept(cut, "train")) == 5
    long = sum(len(cut.ids(row["text"])) > 4 for row in ROWS)  # and an end
    assert f"{long} of 60 texts have more than length=5 tokens" in cut.notes[0]


def test_two_fields_are_a_translation(lines: str, tmp_path: Path):
    fields = {"source_field": "text", "target_field": "kind", "vocab": 300}
    with pytest.raises(
        SpecError, match=r"form \d groups?, too few for 3 splits; use split_by='sources'"
    ):
        open_data(lines, fields)
    task = open_data(lines, {**fields, "split_by": "sources"})
    pairs = {pair for own in task.data.pairs.values() for pair in own}
    assert pairs == {(row["text"], row["kind"]) for row in ROWS}
    (folder := tmp_path / "parts").mkdir()
    for split, part in (("train", ROWS[:50]), ("dev", ROWS[50:])):
        (folder / f"{split}.jsonl.gz").write_bytes(
            gzip.compress("\n".join(map(json.dumps, part)).encode())
        )
    own = open_data(str(folder), {**fields, "split_by": "sources"})
    assert own.data.sizes == {"train": 50, "valid": 10}
    with pytest.raises(
        SpecError, match=r"sentences of every training pair are held out; .* split_by='sources'"
    ):
        open_data(str(folder), fields)
    kinds = open_data(str(folder), {"label_field": "kind", "vocab": 300})
    assert kinds.data.sizes == {"train": 50, "valid": 10, "test": 0}


def test_a_missing_validation_split_is_taken_from_training(lines: str, tmp_path: Path):
    (folder := tmp_path / "own").mkdir()
    for split, part in (("train", ROWS[:50]), ("test", ROWS[50:])):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, part)))
        np.save(folder / f"{split}.npy", IDS[:800] if split == "train" else IDS[800:])
    texts = open_data(f"jsonl:{folder}", {"vocab": 300, "length": 9, "valid": 0.1})
    assert [split for split, size in texts.data.sizes.items() if size] == ["train", "valid", "test"]
    tensors = [
        [one for row in part for one in (*texts.ids(row["text"]), 0)][1:]
        for part in (ROWS[45:50], ROWS[50:])
    ]
    assert [labels_of(texts, split) for split in ("valid", "test")] == tensors
    ids = open_data(f"tokens:{folder}", {"length": 9, "valid": 0.1})
    assert labels_of(ids, "valid") == IDS[720:800].tolist()
    assert labels_of(ids, "test") == IDS[801:].tolist()


# --- images ---------------------------------------------------------------------------------------

PICTURES = np.random.default_rng(0).integers(0, 256, (40, 6, 5), dtype=np.uint8)
IMAGE_LABELS = np.arange(40) % 3


def packed(array: np.ndarray, kind: int, code: str) -> bytes:
    """An idx file by hand."""
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    return head + struct.pack(f">{array.size}{code}", *array.flatten().tolist())


@pytest.mark.parametrize(
    ("kind", "code"), [(0x08, "B"), (0x09, "b"), (0x0B, "h"), (0x0C, "i"), (0x0D, "f"), (0x0E, "d")]
)
@pytest.mark.parametrize("end", ["", ".gz"])
def test_idx_files_round_trip(kind: int, code: str, end: str, tmp_path: Path):
    array = np.arange(2 * 3 * 5).reshape(2, 3, 5) * 4 - (50 if code != "B" else 0)
    raw = packed(array, kind, code)
    (path := tmp_path / f"a{end}").write_bytes(gzip.compress(raw) if end else raw)
    assert (read_idx(path) == array).all()


def as_idx(folder: Path) -> str:
    for name, array in (("images-idx3-ubyte", PICTURES), ("labels-idx1-ubyte", IMAGE_LABELS)):
        (folder / f"train-{name}").write_bytes(packed(array[:30], 8, "B"))
        (folder / f"t10k-{name}.gz").write_bytes(gzip.compress(packed(array[30:], 8, "B")))
    return str(folder)


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


@pytest.mark.parametrize("write", [as_idx, as_npz, as_folders])
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
    task = open_data(as_idx(tmp_path))
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


def as_files(folder: Path, labels: Any) -> str:
    rows = []
    for n, one in enumerate(UTTERANCES):
        np.save(folder / f"u{n}.npy", one)
        own = labels[n] if np.ndim(labels[n]) else [labels[n]]
        rows.append(f"u{n}\t{' '.join(map(str, own))}\n")
    (folder / "labels.tsv").write_text("".join(rows[::-1]))
    return str(folder)


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


@pytest.mark.parametrize("write", [as_row, as_files])
@pytest.mark.parametrize("each", ["frame", "utterance"])
def test_frames_stay_with_their_labels(write: Any, each: str, tmp_path: Path):
    labels = TRANSCRIPTS if each == "frame" else [len(one) for one in UTTERANCES]
    flat = np.concatenate(labels) if each == "frame" else labels
    task = open_data(
        write(tmp_path, flat if write is as_row else labels), {"valid": 0.2, "test": 0.2}
    )
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
    assert described.stacks[0].embedding.patches.wide == 5


def test_frames_of_one_length_are_an_array(tmp_path: Path):
    frames, labels = (
        np.stack([one[:3] for one in UTTERANCES]),
        np.stack([one[:3] for one in TRANSCRIPTS]),
    )
    np.savez(tmp_path / "a.npz", frames=frames, labels=labels)
    found = utterances(open_data(str(tmp_path / "a.npz")))
    assert sorted(tuple(names) for _, names in found) == sorted(map(tuple, labels.tolist()))


# --- all of them ----------------------------------------------------------------------------------


def opened(name: str, folder: Path, lines: str) -> Task:
    match name:
        case "tokens":
            return open_data(written(folder, "npy uint16"))
        case "jsonl":
            return open_data(lines, {"label_field": "kind", "vocab": 300})
        case "images":
            return open_data(as_idx(folder))
    return open_data(as_row(folder, [len(one) for one in UTTERANCES]))


@pytest.mark.parametrize("name", ["tokens", "jsonl", "images", "frames"])
def test_file_tasks_keep_the_promises_of_every_task(name: str, tmp_path: Path, lines: str):
    task = opened(name, tmp_path, lines)
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
