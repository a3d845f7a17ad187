"""Text files in other encodings, and folders that are not of data."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from headwise import cli
from headwise.models.vocabulary import read_tokenizer_file, read_vocabulary
from headwise.observe.head_analysis.annotated_examples import read_lines
from headwise.training.data import text_files
from headwise.training.data.text_files import list_files
from headwise.util.errors import SpecError
from headwise.util.files import read_json_file, read_text_file


@pytest.mark.parametrize(
    "read", [read_text_file, read_json_file, read_tokenizer_file, read_vocabulary, read_lines]
)
@pytest.mark.parametrize(
    ("data", "fact", "encoding"),
    [
        ("{}\n\né".encode("latin1"), "line 3: byte 0xe9", "latin1"),
        ("{}".encode("utf-16"), "line 1: byte 0xff", "utf-16"),
    ],
)
def test_another_encoding_is_named_with_its_line(read, data, fact, encoding, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(data)
    remedy = f"convert the file, as in iconv -f {encoding} -t utf-8"
    with pytest.raises(SpecError, match=re.escape(f"{path}, {fact} is not UTF-8; {remedy}")):
        read(path)


def test_json_is_named_with_its_line(tmp_path: Path):
    (tmp_path / "a").write_text('{\n"a": 1,\n}')
    with pytest.raises(SpecError, match=r"a, line 3 is not JSON: .*; delete or correct the file"):
        read_json_file(tmp_path / "a")
    (tmp_path / "a").write_text("[" * 100_000)
    with pytest.raises(SpecError, match="is nested too deeply"):
        read_json_file(tmp_path / "a")


def test_the_root_of_the_disk_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    started = time.monotonic()
    for argv in (["/"], ["--data", "/"], ["text:/"], ["images:/"], ["--data", "//tmp/.."]):
        assert cli.main(["train", *argv, "--out", str(tmp_path / "out")]) == 2
        assert (
            "is the root of the file system; give the folder with the data"
            in capsys.readouterr().err
        )
    assert time.monotonic() - started < 20


def test_a_folder_of_other_files_is_not_walked_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_OTHER_FILES", 20)
    for number in range(9):
        (tmp_path / f"{number}").mkdir()
        for other in range(5):
            (tmp_path / f"{number}" / f"{other}.o").touch()
    with pytest.raises(
        SpecError, match=r"contains at least 25 files that are no data, and 0 that may be; give the"
    ):
        list_files(tmp_path, (".txt",))
    for number in range(3):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(SpecError, match=r"at least 35 files"):
        list_files(tmp_path, (".txt",))
    (tmp_path / "4.txt").touch()
    (tmp_path / "5.txt").touch()
    assert len(list_files(tmp_path, (".txt",))) == 5
