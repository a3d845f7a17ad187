"""Folders of models that want to run code: refused before transformers reads them, or loaded
without their code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.util.errors import SpecError
from headwise.viewer.open_model import load_target

transformers = pytest.importorskip("transformers")


def make_folder(folder: Path, **settings: Any) -> Path:
    """A small GPT-2 with these settings added, and a Python file that would leave a trace if it
    ran.
    """
    config = transformers.GPT2Config(
        n_embd=12,
        n_head=3,
        n_layer=1,
        vocab_size=41,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"_attn_implementation": "owner/kernel"},
        {"_attn_implementation_internal": "owner/kernel"},
        {"attn_implementation": "owner/kernel:function"},
        {"attn_implementation": {"": "sdpa", "text": "owner/kernel"}},
        {"text_config": {"layers": [{"_attn_implementation_internal": "owner/kernel"}]}},
    ],
)
def test_attention_code_of_the_hub_is_refused(tmp_path, settings, monkeypatch):
    folder = make_folder(tmp_path / "model", **settings)
    monkeypatch.setattr(
        "headwise.hub.pretrained_models.load_model",
        lambda *_: pytest.fail("the folder was read by the loader"),
    )
    with pytest.raises(SpecError, match="may run code of the Hub; remove that line"):
        load_target(str(folder))


@pytest.mark.parametrize(
    "settings", [{}, {"_attn_implementation": "sdpa"}, {"trust_remote_code": True}]
)
def test_usual_settings_are_accepted(tmp_path: Path, settings: dict[str, Any]):
    folder = make_folder(tmp_path / "model", **settings)
    assert type(load_target(str(folder))).__name__ == "GPT2LMHeadModel"
    assert not (folder / "ran").exists()


def test_code_of_the_folder_is_not_run(tmp_path: Path):
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    folder = make_folder(tmp_path / "model", auto_map=code, model_type="evil")
    with pytest.raises(SpecError, match="cannot be loaded"):
        load_target(str(folder))
    assert not (folder / "ran").exists()


def test_pickles_are_not_read(tmp_path: Path):
    folder = make_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"anything": torch.zeros(3)}, folder / "pytorch_model.bin")
    with pytest.raises(SpecError, match="has no weights"):
        load_target(str(folder))
