"""What a trace keeps beside its tensors: the image that a vision model read, and classes that a
person gave heads.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.observe.traces import save_trace, trace_from_weights
from headwise.observe.traces.trace_file import load_trace
from headwise.util.errors import SpecError
from headwise.viewer.model_actions import name_classes
from headwise.viewer.model_worker import Job, JobProgress
from headwise.viewer.open_model import OpenModel
from headwise.viewer.view import Target, open_model
from support.tiny_configs import model_config

VIT = {"model_type": "vit", "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2,
       "intermediate_size": 20, "image_size": 28, "patch_size": 7, "num_channels": 3,
       "architectures": ["ViTModel"]}  # fmt: skip


@pytest.fixture(scope="module")
def vit() -> Any:
    return hw.build(hw.families.read_model_spec(VIT), seed=0).eval()


def test_the_image_of_a_vision_model_is_kept_and_saved(vit: Any, tmp_path: Path):
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    trace = hw.trace(vit, {"x": pixels})
    low, high = (getattr(pixels[1].numpy(), name)() for name in ("min", "max"))
    wanted = np.round((pixels[1].numpy().transpose(1, 2, 0) - low) / (high - low) * 255)
    assert trace.images["text"].shape == (2, 28, 28, 3)
    assert np.abs(trace.images["text"][1].astype(float) - wanted).max() <= 1
    save_trace(trace, tmp_path / "a.trace")
    assert np.array_equal(load_trace(tmp_path / "a.trace").images["text"], trace.images["text"])


def test_a_model_of_texts_has_no_image():
    config = model_config("gpt2", n_embd=12, n_head=3, n_layer=1, vocab_size=40, n_positions=64)
    net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    assert hw.trace(net, torch.tensor([[3, 1, 4]])).images == {}


def test_an_image_is_opened_from_a_file(vit: Any, tmp_path: Path):
    np.save(
        tmp_path / "a.npy", np.random.default_rng(0).normal(size=(2, 28, 28, 3)).astype(np.float32)
    )
    opened = open_model(vit, Target(image=str(tmp_path / "a.npy")))
    assert opened.describe()["images"] == {"text": [28, 28, 3]}
    with pytest.raises(SpecError, match=r"without an image; give --image FILE"):
        open_model(vit, Target())


def test_classes_are_saved_with_the_trace(tmp_path: Path):
    trace = trace_from_weights([np.full((1, 2, 3, 3), 1 / 3)], ["a", "b", "c"])
    named = replace(trace, classes={(trace.layers[0].name, 1): "previous"})
    save_trace(named, tmp_path / "a.trace")
    assert load_trace(tmp_path / "a.trace").classes == {(trace.layers[0].name, 1): "previous"}
    save_trace(trace, tmp_path / "b.trace")
    assert load_trace(tmp_path / "b.trace").classes == {}


def test_classes_of_the_page_stay_with_the_model():
    trace = trace_from_weights([np.full((1, 2, 3, 3), 1 / 3)], ["a", "b", "c"])
    model = OpenModel(trace)
    progress = JobProgress(Job("classes", {}))
    assert name_classes(model, {"classes": [[0, 1, "my own"]]}, progress) == {"count": 1}
    assert model.describe()["classes"] == [[0, 1, "my own"]]
    model.set_trace(trace_from_weights([np.full((1, 2, 2, 2), 0.5)], ["d", "e"]))
    assert model.describe()["classes"] == [[0, 1, "my own"]]
    for wrong, match in (
        ([[0, 7, "a"]], "no head 7"),
        ([[0, 1, ""]], "not a name of a class"),
        ([[0, "1", "a"]], "list of"),
    ):
        with pytest.raises(ValueError, match=match):
            name_classes(model, {"classes": json.loads(json.dumps(wrong))}, progress)
    name_classes(model, {"classes": []}, progress)
    assert model.describe()["classes"] == []
