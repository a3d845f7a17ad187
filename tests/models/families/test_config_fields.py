"""Every field of every family's config class: a loaded model equals that of transformers, or
headwise refuses it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from headwise.models.families import FAMILIES, WEIGHT_NAMES
from support.config_fields import (
    BASES,
    FamilyComparison,
    classify_fields,
    list_cases,
    list_fields,
    list_outcomes,
)

TABLE_FILE = Path(__file__).parents[3] / "docs" / "config-fields.json"
NOT_IN_TRANSFORMERS = {"dcformer", "dcpythia"}
NUM_PAIRS = 10
QUICK_FAMILIES, QUICK_CASES = 6, 10


def test_every_family_that_is_loaded_is_compared():
    assert BASES.keys() == (WEIGHT_NAMES.keys() & FAMILIES.keys()) - NOT_IN_TRANSFORMERS


def test_random_fields_are_read_or_refused():
    draw = random.Random(20261128)
    outcomes = Counter[str]()
    for family in draw.sample(sorted(BASES), QUICK_FAMILIES):
        comparison = FamilyComparison(family)
        for case in draw.sample(list(list_cases(family, NUM_PAIRS)), QUICK_CASES):
            outcome = comparison.compare(case)
            outcomes[outcome.kind] += 1
            assert outcome.kind != "different", (family, case, outcome)
    assert outcomes["equal"] >= QUICK_FAMILIES * QUICK_CASES // 2, outcomes


KNOWN_ERRORS = [
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    ("qwen2", {"partial_rotary_factor": 0.5}),
    ("gemma", {"final_logit_softcapping": 2.0}),
    ("gemma3_text", {"attn_logit_softcapping": 2.0}),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("smollm3", {"sliding_window": 5, "layer_types": ["sliding_attention"] * 4}),
    ("gpt2", {"hidden_size": 64}),
    ("gpt_neox", {"rope_theta": 300.0}),
    ("gpt_neox", {"num_key_value_heads": 1}),
    ("deepseek_v3", {"norm_topk_prob": None}),
    ("deepseek_v3", {"n_group": 4, "topk_group": 1}),
    ("vit", {"head_dim": 16}),
    ("t5", {"is_encoder_decoder": False}),
]


@pytest.mark.parametrize(("family", "case"), KNOWN_ERRORS)
def test_keys_that_were_misread_are_read_or_refused(family: str, case: dict[str, object]):
    outcome = FamilyComparison(family).compare(case)
    assert outcome.kind in ("equal", "refused"), outcome


def test_the_table_of_fields_has_every_field():
    table = json.loads(TABLE_FILE.read_text())["families"]
    assert table.keys() == BASES.keys()
    for family, fields in table.items():
        assert {name for names in fields.values() for name in names} == set(list_fields(family)), (
            family
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", BASES)
def test_all_fields_are_read_or_refused(family: str):
    """The outcomes are those of docs/config-fields.json, which
    tools/coverage_table.py config-fields writes.
    """
    outcomes = list_outcomes(family, NUM_PAIRS)
    assert [(case, outcome) for case, outcome in outcomes if outcome.kind == "different"] == []
    assert classify_fields(outcomes) == json.loads(TABLE_FILE.read_text())["families"][family]
