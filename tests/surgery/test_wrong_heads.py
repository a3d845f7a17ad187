"""A wrong head makes a verification report fail, in every family and precision: of pruning, conversion, folding
and export.
"""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from headwise.hub.pretrained_models import copy_live_model
from headwise.models import Transformer
from headwise.observe.head_analysis.annotated_examples import Example
from headwise.surgery import DropHeads, Pool, ToLatent, ToMHA
from headwise.surgery.any_model import convert, prune
from headwise.surgery.attention_replacement import get_attention, remove_heads
from headwise.surgery.pruning import PruningResult
from headwise.surgery.verification.efficiency import TimingOptions
from headwise.surgery.verification.model_comparison import compare_ablated, compare_outputs
from headwise.surgery.verification.verify import (
    VerificationOptions,
    check_surgery,
    render_verification,
    verify,
)
from support.transformers_models import FALLBACK, ZOO, transformers

QUICK = TimingOptions(length=4, steps=1, seconds=1e-4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WITHOUT_WEIGHT_NAMES = ("whisper", "falcon", "deberta-v2", "longformer")
FAMILIES = {
    name: model for name, model in (ZOO | FALLBACK).items() if name not in WITHOUT_WEIGHT_NAMES
}
WITHOUT_SDPA = ("gemma2", "gpt-oss", "gptj", "bloom")
HEAD = 1


def build_native(name: str, dtype: torch.dtype) -> Transformer:
    """A tiny model of this family with the initial weights of transformers,
    whose logits are small.
    """
    torch.manual_seed(0)
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.keys)
    attention = "eager" if name in WITHOUT_SDPA else "sdpa"
    model = getattr(transformers, family.model)._from_config(config, attn_implementation=attention)
    return copy_live_model(model.to(dtype).eval()).eval()


def make_examples(name: str) -> list[Example]:
    """Two inputs of one row."""
    inputs = FAMILIES[name].inputs()
    names = {"input_ids": "x", "pixel_values": "x"}
    if "decoder_input_ids" in inputs:
        names = {"input_ids": "source", "decoder_input_ids": "x"}
    rows = range(2)
    return [
        Example({names[key]: value[row : row + 1] for key, value in inputs.items()}, {})
        for row in rows
    ]


def prune_one_head(net: Transformer, examples: list[Example], fold: str = "none") -> PruningResult:
    """Remove one head of the last attention."""
    site = [name for name, _ in net.spec.attention_specs()][-1]
    return prune(net, DropHeads(((site, HEAD),)), examples, fold=fold)


def without_another_head(done: PruningResult) -> Transformer:
    """The model without another head than the plan says."""
    (site, kept), *_ = done.plan.changed_sites.items()
    wrong = {site: sorted({*kept, HEAD} - {kept[-1]})}
    return remove_heads(done.removal_source, wrong, done.site_constants)


def exchange_heads(net: Transformer, site: str) -> Transformer:
    """A copy in which the heads of an attention have each other's columns of
    the output projection.
    """
    wrong = copy.deepcopy(net)
    attention = get_attention(wrong, site)
    output = attention.weights["output"]["o"]
    with torch.no_grad():
        output.copy_(output.unflatten(1, (-1, attention.spec.heads.vdim)).flip(1).flatten(1))
    return wrong


# Every family in one dtype, in turn.
DTYPE_OF_FAMILY = list(zip(FAMILIES, itertools.cycle(DTYPES)))


@pytest.mark.parametrize(("name", "dtype"), DTYPE_OF_FAMILY, ids=str)
def test_a_wrong_head_is_found_in_every_family(name: str, dtype: torch.dtype):
    net, examples = build_native(name, dtype), make_examples(name)
    done = prune_one_head(net, examples)
    right = compare_ablated(net, done.after, examples, done.plan.changed_sites)
    assert all(check.same for check in right), right
    assert [check.dtype for check in right] == ["float32", "float64"]
    wrong = compare_ablated(net, without_another_head(done), examples, done.plan.changed_sites)
    assert not any(check.same for check in wrong), wrong


CONVERSIONS = {"aligned": Pool(2, align="values"), "mha": ToMHA(), "latent": ToLatent()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", ["none", "mean", "bias", *CONVERSIONS])
def test_a_wrong_head_is_found_after_every_change(change: str, dtype: torch.dtype):
    net, examples = build_native("gpt2", dtype), make_examples("gpt2")
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1 * name.endswith("bias"))
    site = [name for name, _ in net.spec.attention_specs()][-1]
    if change in CONVERSIONS:
        done: Any = convert(net, CONVERSIONS[change], examples)
        equivalents = done.verification_options["equivalents"]
        ((name, load),) = equivalents.items()
        wrong_form = {"equivalents": {name: lambda: exchange_heads(load(), site)}}
        assert not holds(
            VerificationOptions("", **done.verification_options | wrong_form), examples
        )
    else:
        done = prune_one_head(net, examples, change)
    right = VerificationOptions("", **done.verification_options)
    assert holds(right, examples)
    wrong = exchange_heads(done.after, site)
    is_compared = (
        change not in CONVERSIONS or dtype != torch.float32
    )  # float32 weights are those of the conversion
    assert holds(replace(right, surgery_pair=(net, wrong)), examples) != is_compared
    assert compare_outputs("export", (done.after, copy.deepcopy(done.after)), examples).same
    assert not compare_outputs("export", (done.after, wrong), examples).same


def holds(options: VerificationOptions, examples: list[Example]) -> bool:
    assert options.surgery_pair is not None
    return all(check.same for check in check_surgery(options.surgery_pair, examples, options)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_report_states_the_rounding_of_16_bits_and_judges_in_float32(dtype: torch.dtype):
    net, examples = build_native("gpt2", dtype), make_examples("gpt2")
    done = prune_one_head(net, examples)
    name = str(dtype).removeprefix("torch.")
    for after in (done.after, without_another_head(done)):
        options = VerificationOptions(
            "", **done.verification_options | {"surgery_pair": (net, after)}, timing=QUICK
        )
        verification = verify(net, after, examples, options)
        assert verification.holds is (after is done.after)
        assert [check.dtype for check in verification.equal] == ["float32", "float64"]
        assert [row.dtype for row in verification.rounding] == [name] * (dtype != torch.float32)
        row = re.search(
            rf"\| same comparison in {name} +\| +[\d.e+-]+ \| +- \| +2 \| +- \|",
            render_verification(verification),
        )
        assert (row is None) is (dtype == torch.float32)
        assert verification.data["rounding"] == [asdict(row) for row in verification.rounding]
