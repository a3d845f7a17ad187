"""Published models by name: their sizes are those that their papers give."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwise.cli import main
from headwise.models.families import PUBLISHED_MODELS, read_model_spec
from headwise.models.model_spec import ModelTable

# millions of parameters by the papers, and how exactly they say so
SIZES = {
    "transformer-base": (65, 2),
    "transformer-big": (213, 2),
    "gpt2": (124, 0.5),
    "gpt3": (175_000, 500),
    "bert-base": (110, 1),
    "llama-65b": (65_200, 100),
    "llama-3-8b": (8_000, 50),
    "deepseek-v3": (671_000, 500),
    "gpt-oss-20b": (20_900, 50),
    "gpt-oss-120b": (116_800, 50),
    "vit-base": (86, 0.5),
}


def test_every_model_has_a_size():
    assert set(SIZES) == set(PUBLISHED_MODELS)


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_those_of_the_paper(name: str):
    millions, tolerance = SIZES[name]
    assert ModelTable(read_model_spec(name)).to_dict["parameters"] / 1e6 == pytest.approx(
        millions, abs=tolerance
    )


def test_commands_take_their_names(capsys: pytest.CaptureFixture[str]):
    assert main(["cost", "llama-65b", "--context", "2048"]) == 0
    assert "llama-65b: decoder of 80 layers" in capsys.readouterr().out
    assert main(["spec", "gpt3"]) == 0
    assert "layers 0 to 95, 96 x" in capsys.readouterr().out
    assert main(["cost", "gpt9"]) == 2
    assert "did you mean 'gpt3'" in capsys.readouterr().err
    assert main(["cost", "gpt3", "--heads", "4"]) == 2
    assert "gpt3 has its own heads; leave it out" in capsys.readouterr().err


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    with pytest.raises(ValueError, match="holds neither"):
        read_model_spec("gpt2")
