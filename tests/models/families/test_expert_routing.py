"""Random configs of every family with experts: logits equal those of transformers, or headwise
refuses the config.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

import headwise as hw
from headwise.costs.weight_storage import active_parameters
from headwise.models import families
from support.config_fields import EXPERT_FAMILIES, LATENT, FamilyComparison

MAX_ERROR = 1e-5


def draw_routing(family: str, draw: random.Random) -> dict[str, Any]:
    """Return keys about experts; some are contradictory."""
    count = draw.choice([2, 4, 6, 8, 12])
    active = draw.randint(1, min(4, count))
    if family in ("mixtral", "gpt_oss"):
        return {
            "num_local_experts": count,
            "num_experts_per_tok": active,
            "intermediate_size": draw.randint(3, 20),
        }
    keys: dict[str, Any] = {
        "norm_topk_prob": draw.choice([True, False]),
        "num_experts_per_tok": active,
    }
    if not family.startswith("deepseek"):
        steps = {} if family == "olmoe" else {"decoder_sparse_step": draw.randint(1, 2)}
        return keys | steps | {"num_experts": count}
    groups = draw.choice([group for group in (1, 2, 3, 4, 6) if count % group == 0])
    keys |= {"n_routed_experts": count, "n_group": groups, "topk_group": draw.randint(1, groups)}
    keys |= {
        "routed_scaling_factor": draw.choice([1.0, 2.5, 16.0]),
        "n_shared_experts": draw.randint(1, 2),
    }
    methods = ["greedy", "group_limited_greedy"] if family == "deepseek_v2" else ["noaux_tc"]
    keys |= {
        "topk_method": draw.choice(methods),
        "norm_topk_prob": family == "deepseek_v3" and keys["norm_topk_prob"],
    }
    return keys | {"first_k_dense_replace": draw.randint(0, 1)}


def check_random_configs(family: str, seed: int, count: int) -> Counter[str]:
    draw, comparison = random.Random(f"{family} {seed}"), FamilyComparison(family)
    outcomes = Counter[str]()
    for _ in range(count):
        case = draw_routing(family, draw)
        outcome = comparison.compare(case)
        outcomes[outcome.kind] += 1
        assert outcome.kind != "different", (case, outcome)
        assert outcome.error < MAX_ERROR, (case, outcome)
    return outcomes


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_experts_are_chosen_as_in_transformers(family: str):
    outcomes = check_random_configs(family, 0, 6)
    assert outcomes["equal"] >= 3, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_experts_are_chosen_as_in_transformers_in_many_configs(family: str):
    outcomes = check_random_configs(family, 1, 60)
    assert outcomes["equal"] >= 30, outcomes


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_groups_of_experts_are_read_and_saved(family: str):
    """The fields are in the saved spec, and neither parameters nor costs depend on them."""
    keys = LATENT | {
        "model_type": family,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    }
    if family == "deepseek_v3":
        keys |= {"topk_method": "noaux_tc", "norm_topk_prob": False}
    model = families.read_model_spec(keys)
    experts = model.stacks[0].layers[-1].feed
    assert (experts.groups, experts.top_k_groups) == (4, 2)
    assert experts.group_score == {"deepseek_v2": "max", "deepseek_v3": "top2"}[family]
    assert hw.model_spec.from_toml(hw.model_spec.to_toml(model)) == model
    ungrouped = families.read_model_spec(keys | {"n_group": 1, "topk_group": 1})
    assert ungrouped != model
    for measure in (hw.costs.count_parameters, active_parameters):
        assert measure(ungrouped) == measure(model)


def test_the_defaults_of_groups_are_those_of_transformers():
    keys = LATENT | {"model_type": "deepseek_v3"}
    assert families.read_model_spec(keys) == families.read_model_spec(
        keys | {"n_group": 8, "topk_group": 4}
    )


REFUSED = {
    "deepseek_v2": {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "deepseek_v3": {
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "n_group": 3,
        "topk_group": 9,
    },
}


@pytest.mark.parametrize(
    ("family", "key"), [(family, key) for family, keys in REFUSED.items() for key in keys]
)
def test_routing_that_transformers_does_not_compute_is_refused(family: str, key: str):
    value = REFUSED[family][key]
    with pytest.raises(hw.SpecError, match=r"; "):
        families.read_model_spec(LATENT | {"model_type": family, key: value})
