"""Text for language models: splits, labels and bits per byte."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from headwise.training.data import IGNORE_INDEX, Task
from headwise.training.data.language_modelling import TextTask

# Bytes of one to four for a character, lines of all lengths, and no newline at the end.
WORDS = (
    "the low lower lowest Äpfel 你好 \N{MATHEMATICAL BOLD CAPITAL A} naïve\n\n\twidest, wider; wide"
)
TEXT = "".join(f"{n} {WORDS} {n * 7919 % 101}\n" for n in range(97)) + "end"


@pytest.fixture
def path(tmp_path: Path) -> str:
    (file := tmp_path / "a.txt").write_bytes(TEXT.encode())
    return str(file)


def texts(path: str, **options) -> list[TextTask]:
    """The text cut into bytes, characters and learnt pieces."""
    return [
        TextTask(path, tokens=tokens, vocab=300, length=13, **options)
        for tokens in ("bytes", "chars", "bpe")
    ]


def labels_of(task: Task, split: str) -> list[int]:
    """Every label that a split asks for, in its order; small batches ask for the same."""
    some = range(task.batches(5, split) or 0)
    parts = [
        batch.labels[batch.labels != IGNORE_INDEX]
        for batch in (task.batch(n, 5, split) for n in some)
    ]
    whole = task.batch(0, 9_999, split).labels
    found = whole[whole != IGNORE_INDEX].tolist()
    assert sorted(torch.cat(parts).tolist()) == sorted(found)
    return found


def test_held_out_parts_end_the_text_and_each_byte_is_predicted_once(path: str):
    raw = TEXT.encode()
    for task in texts(path, valid=0.2, test=0.1):
        valid, test = (task.text(labels_of(task, split)).encode() for split in ("valid", "test"))
        assert raw.endswith(valid + test)
        assert abs(len(valid) - 0.2 * len(raw)) < 5
        assert abs(len(test) - 0.1 * len(raw)) < 5


def test_a_label_follows_its_input(path: str):
    for task in texts(path):
        for split in ("train", "valid", "test"):
            batch = task.batch(1, 3, split)
            both = batch.labels[:, 1:] != IGNORE_INDEX
            assert (batch.x[:, 1:][both] == batch.labels[:, :-1][both]).all()


def test_training_never_sees_held_out_text(tmp_path: Path):
    raw = bytes(range(1, 101))
    (tmp_path / "a.txt").write_bytes(raw)
    task = TextTask(str(tmp_path / "a.txt"), length=7, valid=0.2, test=0.1)
    recorded = {int(one) for n in range(40) for one in task.batch(n, 9).labels.flatten()}
    assert recorded == set(range(2, 71))  # every place but the first, to the last of seventy
    assert labels_of(task, "valid") == list(range(71, 91))
    assert labels_of(task, "test") == list(range(91, 101))
    assert (
        task.batch(0, 5, "valid").x[0, 0] == 70
    )  # the first is asked with the one before it in view


def test_a_few_batches_are_a_sample_of_the_whole_part(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 101)))
    task = TextTask(str(tmp_path / "a.txt"), length=5, valid=0.5, test=0.1)
    first = task.batch(0, 4, "valid").labels.flatten()  # of 10 windows in 3 batches
    assert sorted(first.tolist()) == [
        *range(41, 46),
        *range(56, 61),
        *range(71, 76),
        *range(86, 91),
    ]


def test_text_comes_back_as_it_went_in(path: str):
    for task in texts(path):
        assert task.text(task.ids(TEXT)) == TEXT
        again = Tokenizer.from_str(task.tokenizer or "")
        assert again.encode(TEXT[:500]).ids == task.ids(TEXT[:500])
        assert again.decode(task.ids(TEXT)) == TEXT


def test_pieces_are_learnt_from_the_part_to_train_on_alone(tmp_path: Path):
    (file := tmp_path / "a.txt").write_text("seen word again\n" * 90 + "zzqzzq\n" * 16)
    task = TextTask(str(file), tokens="bpe", vocab=300, valid=0.05, test=0.02)
    assert len(task.ids(" word")) == 1
    assert len(task.ids("zzqzzq")) == 6
    text_task = TextTask(str(file), tokens="bpe", vocab=300, valid=0.002, test=0.002)
    assert len(text_task.ids("zzqzzq")) < 6  # where training has it, it is learnt


def test_bits_for_each_byte_by_hand(path: str):
    for task in texts(path, test=0.0):
        size = task.data.size
        torch.manual_seed(0)
        total, tallies = 0.0, []
        for n in range(task.batches(5, "valid")):
            batch = task.batch(n, 5, "valid")
            logits = torch.randn(*batch.x.shape, size)
            tallies.append(task.measure(logits, batch))
            for row, expected in zip(
                logits.double().flatten(0, 1).tolist(), batch.labels.flatten().tolist(), strict=True
            ):
                if expected != IGNORE_INDEX:
                    total += math.log2(sum(math.exp(one) for one in row)) - row[
                        expected
                    ] / math.log(2)
        tensors = TEXT.encode()[-sum(tally["bits_per_byte"][1] for tally in tallies) :]
        assert tensors.decode() == task.text(
            labels_of(task, "valid")
        )  # so many bytes were counted as the part has
        assert sum(tally["bits_per_byte"][0] for tally in tallies) == pytest.approx(total, rel=1e-6)
        assert sum(tally["nats"][0] for tally in tallies) == pytest.approx(
            total * math.log(2), rel=1e-6
        )
        assert sum(tally["nats"][1] for tally in tallies) == len(labels_of(task, "valid"))


def test_chance_is_the_score_of_equal_logits(path: str):
    for task in texts(path):
        batch = task.batch(0, 400)
        found = task.measure(torch.zeros(*batch.x.shape, task.data.size), batch)
        for name, (total, count) in found.items():
            assert total / count == pytest.approx(task.chance[name], rel=0.05), name
    assert texts(path)[0].chance["bits_per_byte"] == pytest.approx(8)


def test_tasks_that_are_alike_read_once_and_a_changed_file_is_read_again(path: str):
    first = TextTask(path)
    assert TextTask(path, seed=3).data is first.data
    Path(path).write_bytes(TEXT.upper().encode() + b"!")
    assert TextTask(path).data is not first.data
    assert TextTask(path) == first  # the description is the same


def test_a_folder_is_its_files_by_name(tmp_path: Path):
    for name, text in (
        *(("b/one.md", "two\n"), ("a.txt", "one\n"), ("c.txt", "three\n"), ("d.bin", "\0")),
        (".e.txt", "x"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text * 20)
    raw = ("one\n" * 20 + "two\n" * 20 + "three\n" * 20).encode()
    task = TextTask(str(tmp_path), length=5, valid=0.5, test=0.4)
    assert task.text(labels_of(task, "valid") + labels_of(task, "test")).encode() == raw[28:]


def test_a_compressed_text_is_the_text(path: str, tmp_path: Path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    one, other = TextTask(path), TextTask(str(tmp_path / "a.txt.gz"))
    assert (one.batch(2, 3).x == other.batch(2, 3).x).all()


def test_the_standard_library_is_text_on_every_machine():
    task = TextTask("stdlib")
    assert task.examples is not None
    assert task.examples > 100_000  # windows of 64 bytes
    names = [str(path) for path in task.files()]
    assert names == sorted(names)
    assert not [name for name in names if "site-packages" in name or "/test/" in name]


def test_a_tokenizer_from_elsewhere_is_used_as_it_is(path: str, tmp_path: Path):
    text_task = TextTask(path, tokens="bpe", vocab=300)
    (tmp_path / "tokenizer.json").write_text(text_task.tokenizer or "")
    again = TextTask(path, tokens=str(tmp_path / "tokenizer.json"))
    assert again.ids(TEXT) == text_task.ids(TEXT)
    assert again.chance == text_task.chance
    data = json.loads(text_task.tokenizer or "")
    data["normalizer"] = {"type": "Replace", "pattern": {"String": "low"}, "content": ""}
    data["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "other.json").write_text(json.dumps(data))
    other = TextTask(path, tokens=str(tmp_path / "other.json"))
    assert (
        other.text(other.ids("the lowest lower")) == "the est er"
    )  # all of it, whatever its document cuts
    assert set(other.chance) == {
        "nats"
    }  # its tokens do not say how many bytes of the text they stand for


def test_marks_of_a_vocabulary_that_stand_in_a_text_are_text(path: str, tmp_path: Path):
    data = json.loads(TextTask(path, tokens="bpe", vocab=300).tokenizer or "")
    data["added_tokens"] = [
        {"id": 300, "content": "<s>", "special": True, "single_word": False, "lstrip": False}
    ]
    data["added_tokens"][0] |= {"rstrip": False, "normalized": False}
    (tmp_path / "t.json").write_text(json.dumps(data))
    task = TextTask(path, tokens=str(tmp_path / "t.json"))
    assert 300 not in task.ids("a <s> b")
    assert task.text(task.ids("a <s> b")) == "a <s> b"


def test_a_model_reads_it(path: str):
    for task in texts(path):
        described = task.model()
        assert described.kind == "decoder"
        assert described.stacks[0].embedding.tokens == task.data.size == described.heads[0].outputs


@pytest.mark.parametrize(
    "valid", [0.1, 0.11, 0.12]
)  # 300 and 70,000 bytes: in all, between and inside characters
def test_no_character_is_cut_in_two(tmp_path: Path, valid: float):
    for count in (100, 23_333):  # and one line that is longer than a block of text
        (file := tmp_path / f"{count}.txt").write_text("你" * count)
        for tokens in ("bytes", "bpe"):
            task = TextTask(str(file), tokens=tokens, vocab=258, length=5, valid=valid, test=0.0)
            example = task.text(labels_of(task, "valid"))
            assert set(example) == {"你"}
            assert abs(len(example) - valid * count) <= 1
