"""The operation trace lists the tensor operations that run, for every example of every part."""

from __future__ import annotations

import json

import pytest
import torch

import headwise as hw
from headwise.attention.op_trace import walk
from support import layer_cases as cases

# d = 512, h = 8, batch 5, 10 tokens: the steps of multi-head attention as they are usually taught,
# of one stream.
TAUGHT = [
    ("project_query", "linear", (5, 10, 512)),
    ("project_query", None, (5, 10, 8, 64)),
    ("attend", "transpose", (5, 8, 10, 64)),
    ("scores", "matmul", (5, 8, 10, 10)),
    ("normalise", None, (5, 8, 10, 10)),
    ("attend", "matmul", (5, 8, 10, 64)),
    ("attend", "transpose", (5, 10, 8, 64)),
    ("merge", "contiguous", (5, 10, 8, 64)),
    ("merge", "view", (5, 10, 512)),
    ("merge", "linear", (5, 10, 512)),
]

# Where a step may belong: the methods of the seams, the backend, the layer itself, and what was
# given.
SEAMS = {
    "x",
    "source",
    "project_kv",
    "project_query",
    "transform",
    "expand_kv",
    "gate",
    "scores",
    "score",
    "mix",
    "normalise",
    "transform_weights",
}
SEAMS |= {
    "feature_map",
    "weighted_values",
    "query_factors",
    "key_factors",
    "change_rows",
    "attend",
    "project_heads",
    "transform_outputs",
    "layer",
    "merge",
}


def test_multi_head_attention_walks_as_it_is_taught():
    steps = iter(walk(hw.design(model=512, heads=8)).steps)
    for interface, operation, shape in TAUGHT:
        found = next(
            (
                s
                for s in steps
                if (s.interface, s.shape) == (interface, shape)
                and operation in (None, *s.operations)
            ),
            None,
        )
        assert found is not None, (interface, operation, shape)


def test_copies_and_views_are_distinguished():
    steps = walk(hw.design(model=512, heads=8)).steps
    memory = {(s.interface, s.operations[-1]): s.memory for s in steps}
    assert memory["attend", "transpose"] == memory["merge", "view"] == "view"
    assert (
        memory["merge", "contiguous"]
        == memory["project_query", "linear"]
        == memory["scores", "matmul"]
        == "copy"
    )
    moved = next(s for s in steps if s.interface == "merge" and s.operations == ("contiguous",))
    assert moved.strides == (5120, 512, 64, 1)


def test_a_layer_larger_than_memory_is_walked():
    steps = walk(hw.design(model=2**18, heads=2**9), tokens=10**6).steps
    assert steps[-1].shape == (5, 10**6, 2**18)
    with pytest.raises(ValueError, match=r"tensors of 2.21e\+20 numbers; use fewer tokens"):
        walk(hw.design(model=32, heads=8), tokens=2**31 - 1, batch=6)


@pytest.mark.parametrize("name", cases.EXAMPLES)
def test_every_example_can_be_walked(name: str):
    spec = cases.EXAMPLES[name]
    walked = walk(spec, cases.BATCH, cases.TOKENS, cases.SOURCE if spec.source else None)
    first, *_, last = walked.steps
    assert (first.memory, first.shape) == ("input", (cases.BATCH, cases.TOKENS, spec.model))
    assert last.shape == (cases.BATCH, cases.TOKENS, spec.model)
    assert [step.number for step in walked.steps] == list(range(len(walked.steps)))
    assert {step.interface for step in walked.steps} <= SEAMS
    acting = {step.part for step in walked.steps}
    assert {type(part).__name__ for part in (spec.project, spec.similarity, spec.merge)} <= acting
    assert max(map(len, str(walked).splitlines())) <= 80
    assert json.loads(walked.json())["steps"] == walked.rows


def test_every_modifier_is_seen_acting():
    named = {type(m).__name__: spec for spec in cases.EXAMPLES.values() for m in spec.modifiers}
    for name, spec in named.items():
        acting = {step.part for step in walk(spec, 3, 7, 11 if spec.source else None).steps}
        # a walk is not training, and no token has a say in a gate
        silent = name in ("WeightDropout", "HardConcreteGate")
        assert (name in acting) != silent, name


def test_a_single_query_walks_the_absorbed_way():
    spec = hw.design(
        preset="mla", model=20, heads=3, dim=4, project=hw.parts.MLAProjection(rank=7, rope=2)
    )
    assert "project_heads" in {step.interface for step in walk(spec, 3, 1).steps}
    assert "project_heads" not in {step.interface for step in walk(spec, 3, 7).steps}


def test_a_walk_leaves_no_trace():
    before = torch.random.get_rng_state()
    walk(hw.design(model=12, heads=3), 2, 5)
    assert torch.equal(before, torch.random.get_rng_state())
