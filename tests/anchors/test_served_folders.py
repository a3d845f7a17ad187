"""Continuous batching of transformers, which `transformers serve` uses, on folders that headwise
prune and convert wrote.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import headwise as hw
from support.transformers_models import ZOO, transformers

PROMPTS = [[5, 9, 11], [7, 8, 3, 21, 30]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["pruned", "converted"])
def test_a_plain_folder_is_served(kind: str, tmp_path: Path):
    model = ZOO["llama"].build("sdpa")
    heads = tuple((f"decoder.{layer}.attention", head) for layer in range(2) for head in (2, 3))
    if kind == "pruned":
        changed = hw.prune(model, hw.surgery.DropHeads(heads))
    else:
        changed = hw.convert(model, hw.surgery.Pool(1))
    changed.save_pretrained(tmp_path / "small")
    served = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "small", attn_implementation="sdpa"
    )
    options = transformers.GenerationConfig(
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
        num_blocks=16,
        max_batch_tokens=64,
    )
    answers = served.generate_batch(PROMPTS, generation_config=options)
    expected = hw.generate(
        hw.load(tmp_path / "small"), PROMPTS, max_new_tokens=6, config=hw.DecodingConfig(end=())
    )
    assert [answer.generated_tokens for answer in answers.values()] == expected
