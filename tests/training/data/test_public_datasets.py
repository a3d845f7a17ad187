"""Public data sets read from local copies, against known facts about them."""

from __future__ import annotations

import gzip
import hashlib
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from headwise.training.data import IGNORE_INDEX, Task, open_data
from headwise.training.data.translation import normalise_sentence, score_translations

pytestmark = pytest.mark.slow


def folder(shared: Path, name: str) -> Path:
    found = shared / "data" / name
    if not found.is_dir():
        pytest.skip(f"there is no {name} in the folder `shared`")
    return found


def labels_of(task: Task, split: str) -> list[int]:
    """Every label of a split, in its order."""
    return [
        int(one) for one in task.batch(0, 99_999, split).labels.flatten() if one != IGNORE_INDEX
    ]


def test_tiny_shakespeare_is_split_as_nanogpt_splits_it(shared: Path):
    path = folder(shared, "tinyshakespeare") / "input.txt"
    text = path.read_text()
    task = open_data(str(path), {"tokens": "chars", "valid": 0.1, "test": 0.0})
    alphabet = sorted(set(text))  # its prepare.py
    assert task.data.size == len(alphabet) == 65
    assert task.ids(text[:1000]) == [alphabet.index(char) for char in text[:1000]]
    valid = labels_of(task, "valid")
    assert (len(text) - len(valid), len(valid)) == (1_003_854, 111_540)
    assert task.text(valid) == text[1_003_854:]
    batch = task.batch(0, 64, "valid")
    flat = torch.zeros(*batch.x.shape, 65)
    nats, count = task.measure(flat, batch)["nats"]
    assert nats / count == pytest.approx(math.log(65))  # 4.1744


def test_mnist_has_the_mean_and_deviation_that_everybody_writes(shared: Path, tmp_path: Path):
    path = folder(shared, "mnist")
    arrays = {}
    for split, start in (("train", "train"), ("test", "t10k")):
        for name, kind, head in (("x", "images-idx3", 16), ("y", "labels-idx1", 8)):
            raw = gzip.decompress((path / f"{start}-{kind}-ubyte.gz").read_bytes())
            arrays[f"{name}_{split}"] = np.frombuffer(raw, np.uint8, offset=head)
    # of the original file
    assert hashlib.md5(raw).hexdigest() == "27ae3e4e09519cfbb04c329615203637"
    labels = arrays["y_test"]
    assert Counter(labels.tolist())[1] == 1135
    for name in ("x_train", "x_test"):
        arrays[name] = arrays[name].reshape(-1, 28, 28)
    np.savez(tmp_path / "mnist.npz", **arrays)
    task = open_data(str(tmp_path / "mnist.npz"), {"valid": 1 / 12})
    assert task.data.sizes == {"train": 55_000, "valid": 5_000, "test": 10_000}
    assert task.data.inputs.mean[0] == pytest.approx(0.1307, abs=0.002)
    assert task.data.inputs.deviation[0] == pytest.approx(0.3081, abs=0.002)
    assert (task.batch(0, 10_000, "test").labels.numpy() == labels).all()
    assert task.chance["accuracy"] == pytest.approx(0.1124, abs=0.002)  # ones are the most frequent


def test_multi30k_keeps_its_own_splits(shared: Path):
    path = folder(shared, "multi30k")
    files = {
        split: [path / f"{split}.{end}.gz" for end in ("de", "en")]
        for split in ("train", "val", "test_2016_flickr")
    }
    values = {split: tuple(map(str, both)) for split, both in files.items()}
    task = open_data(
        ",".join(values["train"]), {"valid": values["val"], "test": values["test_2016_flickr"]}
    )
    assert task.data.sizes == {"train": 28_998, "valid": 1_014, "test": 1_000}
    assert task.notes == (
        "2 of 29000 pairs are not trained on because their sentences are held out",
    )
    lines = [
        gzip.decompress(file.read_bytes()).decode().split("\n")[:-1]
        for file in files["test_2016_flickr"]
    ]
    translations = dict(zip(*lines, strict=True))
    batches = [task.batch(n, 64, "test") for n in range(task.batches(64, "test") or 0)]
    read = [reference for batch in batches for reference in batch.gold]
    assert Counter(read) == Counter(line.strip() for line in lines[1])
    for batch in batches:
        for ids, at, reference in zip(
            batch.source, batch.source_tokens.is_real, batch.gold, strict=True
        ):
            assert (
                translations[task.data.vocabularies[0].decode(ids[at].tolist())].strip()
                == reference
            )
    assert score_translations(read, read).bleu == pytest.approx(100)


def test_tatoeba_leaks_no_sentence(shared: Path):
    path = folder(shared, "tatoeba_cmn_eng") / "cmn.txt"
    lines = path.read_text().splitlines()
    assert len({line.split("\t")[0] for line in lines}) == 27_661
    task = open_data(f"parallel:{path}", {"test": 0.05})
    assert sum(task.data.sizes.values()) == 29_155
    assert task.data.sizes == {"train": 26_261, "valid": 1_444, "test": 1_450}
    for side in (0, 1):
        keys = {
            split: {normalise_sentence(pair[side]) for pair in pairs}
            for split, pairs in task.data.pairs.items()
        }
        assert sum(map(len, keys.values())) == len(set().union(*keys.values()))
    for target in task.batch(0, 64, "test").gold:
        assert task.text(task.ids(target)) == target
