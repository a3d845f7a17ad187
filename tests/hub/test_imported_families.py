"""Folders of more families: read as their config says, they answer as transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.families.test_model_families import EXPERTS, KINDS, read

import headwise as hw
from headwise.families import WEIGHT_NAMES

READ = [name for name, kind in KINDS.items() if kind.made.model_type in WEIGHT_NAMES and kind.said]


@pytest.mark.parametrize("name", READ)
def test_a_folder_says_the_same_here(name: str, tmp_path: Path):
    kind = KINDS[name]
    theirs = kind.build(**EXPERTS.get(name, {}))
    for key, buffer in theirs.named_buffers():
        if key.endswith("final_logits_bias"):
            buffer.normal_()
    theirs.save_pretrained(tmp_path)
    ours = hw.load(tmp_path)
    assert ours.spec == read(kind)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    given = kind.inputs()
    with torch.no_grad():
        said = theirs(**given)
        expected = said.logits if "logits" in said else said.pooler_output
        x = given.get("decoder_input_ids", given["input_ids"])
        got = ours(x, source=given["input_ids"]) if "decoder_input_ids" in given else ours(x)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * max(1.0, expected.abs().max().item()))


def test_enough_of_them():
    assert {KINDS[name].made.model_type for name in READ} >= {"gemma3_text", "olmo2", "phi3", "roberta", "marian"}
