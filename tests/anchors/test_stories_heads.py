"""stories260K, trained by others: what is seen of it here is what transformers computes of the same
weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.hub.pretrained_models import load_original
from support.stories_model import write_stories_folder

pytest.importorskip("transformers", reason="transformers is not installed")


def test_rows_are_those_of_transformers(shared: Path, tmp_path: Path):
    data = shared / "data" / "model_stories260k"
    net = hw.load(write_stories_folder(data, tmp_path / "stories260K"))
    hw.export(net, tmp_path / "llama")
    other = load_original(tmp_path / "llama")
    other.set_attn_implementation("eager")
    trace = hw.trace(net, "Once upon a time there was a little dog.", max_new_tokens=8)
    ids = torch.tensor([trace.streams["text"][0].ids])
    with torch.no_grad():
        outputs = other(input_ids=ids, output_attentions=True)
    for layer, weights in enumerate(outputs.attentions):
        num_queries = trace.get_layer(layer).num_queries
        assert num_queries == ids.shape[1] - 1
        for head in range(8):
            own = weights[0, head, :num_queries, :num_queries].numpy()
            np.testing.assert_allclose(trace.head_weights(layer, head), own, atol=1e-5)
    assert {len(one.calls) for one in trace.layers} == {8}
