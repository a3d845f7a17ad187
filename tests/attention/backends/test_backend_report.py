"""`why` reports which backend would run, before anything runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import headwise as hw
from headwise import costs
from headwise.attention import backends
from headwise.attention.backends.backend_report import BackendReport, why
from headwise.attention.cache import PagePool
from headwise.costs.cost_estimate import estimate_cost
from support import crossover, layer_cases as cases


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[ModuleType]:
    """Every backend whose `attend` runs, in order: one that passed its call on would show up with
    the other.
    """
    ran: list[ModuleType] = []

    def spy_on(backend: ModuleType) -> None:
        attend = backend.attend

        def attend_and_note(*args: object) -> torch.Tensor:
            ran.append(backend)
            return attend(*args)

        monkeypatch.setattr(backend, "attend", attend_and_note)

    for backend in backends.BACKENDS.values():
        spy_on(backend)
    return ran


def reported_backends(report: BackendReport) -> list[ModuleType]:
    """The backend of the call, or that of each group of heads with one pattern."""
    return [backends.BACKENDS[str(call.backend)] for call in report.call.groups or (report.call,)]


@pytest.mark.parametrize("name", cases.EXAMPLES)
def test_the_reported_backend_runs(name: str, chosen: list[ModuleType]):
    spec = cases.EXAMPLES[name]
    layer = hw.Attention(spec).eval()
    x, z = cases.tensors(spec, torch.float32)
    with torch.no_grad():
        layer(x, source=z)
    keys = (x if z is None else z).shape[1]
    assert reported_backends(why(spec, tokens=hw.costs.CallSize(*x.shape[:2], 0, keys))) == chosen


@pytest.mark.parametrize("name", cases.EXAMPLES)
def test_a_layer_explains_its_own_call(name: str, chosen: list[ModuleType]):
    spec = cases.as_causal(cases.EXAMPLES[name])
    layer = hw.Attention(spec).eval()
    x, _ = cases.tensors(spec, torch.float32)
    cache = layer.cache(batch=cases.BATCH, capacity=19)
    with torch.no_grad():
        for tokens in (x[:, :3], x[:, 3:4]):
            report = layer.why(tokens, cache=cache)
            assert report.call.size is not None
            assert report.call.size.queries == tokens.shape[1]
            assert chosen == reported_backends(report)
            chosen.clear()
            layer(tokens, cache=cache)
            assert chosen == reported_backends(report)
            chosen.clear()


def test_a_mask_in_the_tensors_is_a_reason():
    """Padding inside a row breaks the range of keys of a query, which only the tensors tell."""
    layer, sequence = (
        hw.Attention(hw.design(model=16, heads=2)).eval(),
        hw.SequenceInfo.contiguous(0, 100, torch.device("cpu")),
    )
    gap = hw.SequenceInfo(sequence.position, torch.where(sequence.position == 50, -1, 0).long())
    with torch.no_grad():
        assert layer.why(torch.randn(1, 100, 16)).backend == "flash_cpu"
        report = layer.why(torch.randn(1, 100, 16), sequence=gap)
    assert report.backend != "flash_cpu"
    assert len(report.reasons_against["flash_cpu"]) == 1


def test_caches_that_cannot_be_copied_are_refused():
    layer, x = hw.Attention(hw.design(model=16, heads=2, pattern="causal()")), torch.randn(1, 3, 16)
    cache, pool = layer.cache(batch=1, capacity=9), PagePool([layer.spec], pages=2)
    layer(x, cache=cache)
    with pytest.raises(ValueError, match=r"filled while gradients were on.*torch\.no_grad"):
        layer.why(x, cache=cache)
    with pytest.raises(ValueError, match=r"paged cache is not copied.*when=\['paged'\]"):
        layer.why(x, cache=pool.caches(pool.batch_of([pool.block_tables.new_sequence()]))[0])


def test_a_call_without_queries_runs_dense():
    with torch.no_grad():
        assert (
            hw.Attention(hw.design(model=8, heads=2)).why(torch.randn(1, 0, 8)).backend == "dense"
        )


def test_the_report_names_the_form_for_a_single_query():
    report = why(hw.design(preset="mla"))
    assert report.call.form == ""
    assert "absorbed" in report.other_call.form


@pytest.mark.parametrize("name", cases.EXAMPLES)
def test_every_page_fits_a_terminal(name: str):
    reasons = why(
        cases.EXAMPLES[name],
        want=["weights", "lse"],
        device="cuda",
        dtype="bf16",
        when=["grad", "mask"],
    )
    assert max(map(len, str(reasons).splitlines())) <= 80
    data = json.loads(reasons.json())
    assert {row["name"] for row in data["backends"]} == set(backends.BACKENDS)
    assert data["runs"] == reasons.backend


def test_wanting_weights_needs_a_backend_that_shows_them():
    reasons = why(hw.design(model=12, heads=3), want="weights")
    assert reasons.backend == "dense"
    assert all(
        "weights" in " ".join(reasons)
        for name, reasons in reasons.reasons_against.items()
        if name != "dense"
    )


def test_two_parts_of_a_kind_give_one_reason():
    reasons = why(hw.design(preset="talking", model=12, heads=3))
    assert all(len(reasons) == len(set(reasons)) for reasons in reasons.reasons_against.values())
    assert sum("TalkingHeads" in reason for reason in reasons.reasons_against["sdpa"]) == 1


def test_states_of_a_call_change_the_answer():
    spec = hw.design(model=12, heads=3, modifiers=(hw.parts.WeightDropout(0.5),))
    assert why(spec).backend == "flash_cpu"
    assert why(spec, when=["training"]).backend == "chunked"
    assert why(replace(spec, modifiers=()), when="mask").backend == "dense"


# --- lengths --------------------------------------------------------------------------------------

LONG = {
    "block_sparse": {"pattern": "window(20)"},
    "routed": {"pattern": "causal", "modifiers": (hw.parts.MixtureOfHeads(always=1, active=1),)},
    "flash_cpu": {"pattern": "causal"},
}


@pytest.mark.parametrize("name", LONG)
def test_a_backend_leaves_calls_to_others_that_it_was_measured_to_be_slower_for(name, chosen):
    spec, least = hw.design(model=12, heads=3, **LONG[name]), crossover.least(name)
    layer = hw.Attention(spec).eval()
    with torch.no_grad():
        for count in (least, least - 1, least, 2):
            layer(torch.randn(1, count, 12))
    ran = [
        next(one for one, module in backends.BACKENDS.items() if module is backend)
        for backend in chosen
    ]
    assert ran == [why(spec, tokens=count).backend for count in (least, least - 1, least, 2)]
    assert ran[0] == ran[2] == name
    assert name not in (ran[1], ran[3])
    [reason] = why(spec, tokens=least - 1).reasons_against[name]
    assert f"below {least:,} keys; this call has {least - 1:,}" in reason
    assert why(spec, tokens=least).backend == why(spec).backend == name


@pytest.mark.parametrize("name", LONG)
def test_a_backend_chosen_by_name_runs_at_any_length(name, chosen):
    layer = hw.Attention(hw.design(model=12, heads=3, **LONG[name]), backend=name)
    with torch.no_grad():
        layer(torch.randn(1, 5, 12))
    assert chosen == [backends.BACKENDS[name]]


def test_cached_and_source_tokens_count(chosen):
    spec, least = (
        hw.design(model=12, heads=3, **LONG["block_sparse"]),
        crossover.least("block_sparse"),
    )
    layer = hw.Attention(spec).eval()
    with torch.no_grad():
        cache = layer.cache(batch=1, capacity=least + 5)
        layer(torch.randn(1, least - 2, 12), cache=cache)
        layer(torch.randn(1, 2, 12), cache=cache)
        crossed = hw.Attention(
            replace(spec, source=12, pattern=hw.design(model=12, heads=3).pattern)
        ).eval()
        crossed(torch.randn(1, 2, 12), source=torch.randn(1, least, 12))
    # A ring of 20 slots and two new tokens are 22 keys, however many came before.
    assert chosen == [backends.sdpa, backends.sdpa, backends.flash_cpu]


def test_the_longest_packed_text_counts(chosen):
    layer, least = (
        hw.Attention(hw.design(model=12, heads=3, **LONG["block_sparse"])).eval(),
        crossover.least("block_sparse"),
    )
    with torch.no_grad():
        layer(torch.randn(1, least + 9, 12), sequence=hw.SequenceInfo.packed([[least - 1, 10]]))
        layer(torch.randn(1, least + 9, 12), sequence=hw.SequenceInfo.packed([[9, least]]))
    # The sequences of the first call run in two groups; those of the second as well, one of them
    # long enough.
    assert chosen == [backends.sdpa, backends.dense, backends.block_sparse, backends.dense]


def test_the_report_repeats_a_given_length():
    spec, least = (
        hw.design(model=12, heads=3, **LONG["block_sparse"]),
        crossover.least("block_sparse"),
    )
    assert f"sdpa; block_sparse from {least:,} keys on" in str(why(spec))
    assert why(spec).data["from"] == [
        {"keys": 0, "runs": "sdpa"},
        {"keys": least, "runs": "block_sparse"},
    ]
    assert "7 keys" in str(why(spec, tokens=7))
    assert why(spec, tokens=7).data["keys"] == 7
    assert why(spec, tokens=1).call.tokens == why(spec, tokens="1").call.tokens == "one"
    assert why(spec, tokens=7, device="cuda").backend == "block_sparse"  # not measured there


def test_a_report_without_a_length_starts_each_answer_with_the_lengths_of_the_backend():
    spec, least = hw.design(model=12, heads=3, **LONG["routed"]), crossover.least("routed")
    ranges = why(spec).call.length_ranges
    assert [name for _, name in ranges] == ["sdpa", "flash_cpu", "routed"]
    middle = ranges[1][0]
    rows = dict(re.findall(r"^  (\w+) +(\S.*)$", str(why(spec)), re.MULTILINE))
    assert rows["routed"] == f"runs calls of {least:,} or more keys"
    assert rows["flash_cpu"] == f"runs calls of {middle:,} to {least - 1:,} keys"
    assert rows["sdpa"] == f"runs calls of up to {middle - 1:,} keys"
    assert rows["dense"] == "supports this call; never preferred"


@pytest.mark.parametrize("context", [300, 500])
def test_executed_flops_are_those_of_the_backend_that_runs(context):
    spec = hw.design(model=12, heads=3, **LONG["block_sparse"])
    work, job = (
        costs.self_attention_work(spec, batch=1, queries=context),
        backends.CallSignature(spec, spec.core),
    )
    runs = backends.BACKENDS[str(why(spec, tokens=context).backend)]
    assert runs is (backends.sdpa if context == 300 else backends.block_sparse)
    cost = estimate_cost(spec, hw.Workload(context=context, dtype="fp32", device="cpu"))
    assert cost.executed_flops["prefill"] == costs.executed_flops(
        spec, work, runs.executed_flops(job, work)
    )
