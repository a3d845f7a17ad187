"""The numbered steps of a layer: those of multi-head attention as it is taught, with the names of
its tensors.
"""

from __future__ import annotations

import json

import pytest

import headwise as hw
from headwise import cli
from headwise.attention.op_trace import AttentionSteps
from support import layer_cases as cases

# Number, tensor and shape of every step: width 512, 8 heads, 5 rows of 10 tokens.
TAUGHT = [
    (0, "X", (5, 10, 512)),
    *((1, name, (5, 10, 512)) for name in "QKV"),
    *((2, name, (5, 10, 8, 64)) for name in "QKV"),
    (3, "Q, K, V", (5, 8, 10, 64)),
    (4, "Q K^T", (5, 8, 10, 10)),
    (4, "weights", (5, 8, 10, 10)),
    (4, "Z", (5, 8, 10, 64)),
    (5, "Z", (5, 10, 8, 64)),
    (6, "Z", (5, 10, 8, 64)),
    (7, "Z", (5, 10, 512)),
    (8, "output", (5, 10, 512)),
]


def test_multi_head_attention_has_the_eight_steps():
    steps = AttentionSteps(hw.walk(hw.design(model=512, heads=8))).steps
    assert [(step.number, step.tensor, step.shape) for step in steps] == TAUGHT
    memory = {step.number: step.memory for step in steps}
    assert [memory[number] for number in range(9)] == [
        *("input", "copy", "view", "view", "copy"),
        *("view", "copy", "view", "copy"),
    ]


def test_keys_and_values_have_their_own_names():
    """Keys of 6 channels and values of 10, in 2 of 4 heads; keys of a source of 7 tokens."""
    spec = hw.design(model=24, heads=4, kv=2, dim=6, vdim=10)
    steps = AttentionSteps(hw.walk(spec, 3, 5, 7)).steps
    shapes = {(step.number, step.tensor): step.shape for step in steps}
    assert shapes[0, "source"] == (3, 7, 24)
    assert (shapes[1, "Q"], shapes[1, "K"], shapes[1, "V"]) == ((3, 5, 24), (3, 7, 12), (3, 7, 20))
    assert (shapes[2, "Q"], shapes[2, "K"], shapes[2, "V"]) == (
        (3, 5, 4, 6),
        (3, 7, 2, 6),
        (3, 7, 2, 10),
    )
    assert shapes[8, "output"] == (3, 5, 24)


def test_other_parts_stand_between_without_a_number():
    steps = AttentionSteps(hw.walk(hw.design(preset="gqa"))).steps
    names = [(step.number, step.name) for step in steps]
    rotary = names.index((0, "transform: Rotary"))
    assert {number for number, _ in names[:rotary]} == {0, 1, 2}
    assert names[rotary + 1][0] == 3
    assert [
        step.tensor for step in AttentionSteps(hw.walk(hw.design(preset="talking"))).steps
    ].count("mix: TalkingHeads") == 2


@pytest.mark.parametrize("name", cases.EXAMPLES)
def test_every_example_has_steps_in_their_order(name: str):
    spec = cases.EXAMPLES[name]
    trace = hw.walk(spec, cases.BATCH, cases.TOKENS, cases.SOURCE if spec.source else None)
    steps = AttentionSteps(trace)
    numbers = [step.number for step in steps.steps if step.number]
    assert numbers == sorted(numbers)
    assert steps.steps[-1].shape == (cases.BATCH, cases.TOKENS, spec.model)
    assert max(map(len, str(steps).splitlines())) <= 120


def test_the_command_prints_steps_and_with_ops_operations(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["walk", "mha", "--batch", "2", "--tokens", "3"]) == 0
    page = capsys.readouterr().out
    assert " 8  multiply by W_O" in page
    assert "masked_fill" not in page
    assert cli.main(["walk", "mha", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert steps[1] == {
        "number": 1,
        "name": "project",
        "tensor": "Q",
        "shape": [5, 10, 512],
        "memory": "copy",
    }
    assert cli.main(["walk", "mha", "--ops"]) == 0
    assert "masked_fill" in capsys.readouterr().out
