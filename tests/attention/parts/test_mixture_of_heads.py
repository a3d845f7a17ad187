"""Routing of mixture-of-heads attention, against the formulas of arXiv:2410.11842 and its code, in
float64.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import headwise as hw
from headwise import costs
from headwise.attention import backends, head_axis_ops, reference
from headwise.costs.flops import forward_flops
from headwise.models.model_spec import BlockSpec, EmbeddingSpec, ModelSpec, StackSpec
from headwise.surgery.pruning_plan import list_units
from support import layer_cases as cases
from support.layer_cases import base, check_close
from support.layer_checks import torch_flops


def softmax(a):
    e = np.exp(a - a.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def best(p, active):
    """1 for the `active` largest of a row, the first of equals."""
    chosen = np.zeros_like(p)
    np.put_along_axis(chosen, np.argsort(-p, -1, kind="stable")[..., :active], 1.0, -1)
    return chosen


def heads_of(layer, x, **call):
    probe = hw.Probe("heads")
    layer(x, probe=probe, **call)
    return probe.tensors["heads"]


def plain(layer):
    """The same layer without its routing."""
    spec = cases.change_spec(
        layer.spec,
        modifiers=tuple(
            m for m in layer.spec.modifiers if not isinstance(m, hw.parts.MixtureOfHeads)
        ),
    )
    other = hw.Attention(spec).double().eval()
    other.load_state_dict({name: layer.state_dict()[name] for name in other.state_dict()})
    return other


def learned(x, p, always, active, norm):
    """g [B, T, heads] by the formulas: eq. 5 and 6 as printed, or as the
    released code scales them.
    """
    parts = []
    if always:
        shared = softmax(x @ p["shared"].T) if "shared" in p else np.ones((*x.shape[:2], 1))
        parts.append(shared * (always if norm == "code" and "shared" in p else 1))
    if "router" in p:
        share = softmax(x @ p["router"].T)
        keep = share * best(share, active)
        parts.append(active * keep / keep.sum(-1, keepdims=True) if norm == "code" else keep)
    if len(parts) == 2:
        kinds = softmax(x @ p["kind"].T) * (2 if norm == "code" else 1)
        parts = [part * kinds[..., n : n + 1] for n, part in enumerate(parts)]
    return np.concatenate(parts, -1)


@pytest.mark.parametrize("norm", ["code", "paper"])
@pytest.mark.parametrize(("always", "active"), [(2, 3), (1, 2), (0, 4), (6, 0), (5, 1), (0, 6)])
def test_learned_gates(always, active, norm):
    layer = cases.layer(
        base(modifiers=(hw.parts.MixtureOfHeads(always, active, norm=norm),), kv=2, vdim=5)
    )
    x, _ = cases.tensors(layer.spec)
    p = {name: t.detach().numpy() for name, t in layer.mixture_of_heads.named_parameters()}
    gates = torch.from_numpy(learned(x.numpy(), p, always, active, norm))
    check_close(heads_of(layer, x), heads_of(plain(layer), x) * gates[..., None])


def by_norm(x, weight, first, active):
    """p and the choice among the heads from `first` on, from queries as they are projected."""
    q = (x @ weight.T).reshape(*x.shape[:2], -1, 4)
    long = np.sqrt((q[:, :, first:] ** 2).sum(-1))
    p = softmax(long / long.std(-1, ddof=1, keepdims=True))
    return p, best(p, active)


@pytest.mark.parametrize(
    "turns", [(), (hw.parts.Rotary(),), (hw.parts.QKNorm(scope="full"),)], ids=str
)
@pytest.mark.parametrize(("always", "active"), [(2, 1), (1, 3), (0, 6), (4, 2)])
def test_gates_by_the_length_of_queries(always, active, turns):
    layer = cases.layer(
        base(
            modifiers=(*turns, hw.parts.MixtureOfHeads(always, active, router="norm")),
            kv=3,
            pattern="causal()",
        )
    )
    x, _ = cases.tensors(layer.spec)
    weight = layer.project["q"].detach().numpy()
    # one scale for all channels of a token, then one of each
    if turns and turns[0] == hw.parts.QKNorm(scope="full"):
        weight = weight * layer.qk_norm["q"].detach().numpy()[:, None]
    _, chosen = by_norm(x.numpy(), weight, always, active)
    gates = torch.from_numpy(np.concatenate([np.ones((3, 7, always)), chosen], -1))
    # 0 or 1, not close to it
    assert torch.equal(heads_of(layer, x), heads_of(plain(layer), x) * gates[..., None])


@pytest.mark.parametrize("training", [False, True])
def test_gradients_go_straight_through(training):
    """Eq. 10: what comes to the gate of a routed head, chosen or not, is handed
    to its p as it is.
    """
    layer = cases.layer(base(modifiers=(hw.parts.MixtureOfHeads(2, 1, router="norm"),))).train(
        training
    )
    x, _ = cases.tensors(layer.spec)
    c = torch.randn(3, 7, 10, dtype=torch.float64)
    ours = torch.autograd.grad((layer(x) * c).sum(), layer.project["q"])[0]

    other = plain(layer)
    o = heads_of(other, x)
    q = (x @ other.project["q"].T).view(3, 7, 6, 4)[:, :, 2:]
    long = q.pow(2).sum(-1).sqrt()
    p = (long / long.std(-1, keepdim=True)).softmax(-1)
    _, chosen = by_norm(x.numpy(), other.project["q"].detach().numpy(), 2, 1)
    gates = torch.from_numpy(np.concatenate([np.ones((3, 7, 2)), chosen], -1)).requires_grad_()
    loss = (other.merge_heads(o * gates[..., None]) * c).sum()
    through_heads, to_gates = torch.autograd.grad(
        loss, (other.project["q"], gates), retain_graph=True
    )
    through_p = torch.autograd.grad((p * to_gates[:, :, 2:]).sum(), other.project["q"])[0]
    # the others are not left out
    assert (to_gates[:, :, 2:][torch.from_numpy(chosen) == 0].abs() > 1e-3).any()
    check_close(ours, through_heads + through_p)


def balance(layer, x, **call):
    aux_losses = hw.attention.AuxLosses()
    layer(x, probe=hw.Probe(aux_losses=aux_losses), **call)
    return aux_losses.total("balance")


@pytest.mark.parametrize("router", ["learned", "norm"])
@pytest.mark.parametrize("norm", ["code", "paper"])
def test_the_balance(router, norm):
    layer = cases.layer(base(modifiers=(hw.parts.MixtureOfHeads(2, 3, norm=norm, router=router),)))
    x, _ = cases.tensors(layer.spec)
    if router == "learned":
        p = softmax((x @ layer.mixture_of_heads["router"].T).detach().numpy())
    else:
        p, _ = by_norm(x.numpy(), layer.project["q"].detach().numpy(), 2, 3)
    expected = (p.mean((0, 1)) * best(p, 3).mean((0, 1))).sum() * (4 if norm == "code" else 1)
    assert balance(layer, x).item() == pytest.approx(expected, rel=1e-12)
    short = balance(layer, x[:, :4])
    assert not torch.isclose(short, balance(layer, x))
    check_close(balance(layer, x, sequence=hw.SequenceInfo.from_batch(x, lengths=[4, 4, 4])), short)


def test_the_balance_of_a_model_is_the_sum_or_the_mean_over_its_layers():
    totals = {}
    for name in ("sum", "mean"):
        spec = base(modifiers=(hw.parts.MixtureOfHeads(2, 3, balance=name),))
        torch.manual_seed(0)
        layers = [cases.layer(spec.at_depth(n, 3)) for n in range(3)]
        x, _ = cases.tensors(spec)
        totals[name] = sum(balance(layer, x).item() for layer in layers)
    assert totals["mean"] == pytest.approx(totals["sum"] / 3, rel=1e-12)
    with pytest.raises(hw.SpecError, match=r"layers=3\) is the number of layers of a mean"):
        base(modifiers=(hw.parts.MixtureOfHeads(2, 3, layers=3),))
    with pytest.raises(hw.SpecError, match=r"balance='average'\) is unknown"):
        base(modifiers=(hw.parts.MixtureOfHeads(2, 3, balance="average"),))


@pytest.mark.parametrize("router", ["learned", "norm"])
def test_ties_choose_the_first_head(router):
    layer = cases.layer(base(modifiers=(hw.parts.MixtureOfHeads(1, 2, router=router),)))
    x, _ = cases.tensors(layer.spec)
    with torch.no_grad():
        for parameter in layer.mixture_of_heads.parameters():
            parameter.zero_()
        layer.project["q"].copy_(layer.project["q"][:4].repeat(6, 1))
    result = heads_of(layer, x).abs().sum(-1) > 0
    assert result.flatten(0, 1).unique(dim=0).tolist() == [[True, True, True, False, False, False]]


def test_queries_of_no_length_are_no_trouble():
    layer = cases.layer(base(modifiers=(hw.parts.MixtureOfHeads(2, 1, router="norm"),)))
    x = torch.zeros(2, 5, 10, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert all(t.grad.isfinite().all() for t in (x, *layer.parameters()) if t.grad is not None)


def test_a_pair_is_routed_by_its_first_head():
    layer = cases.layer(
        base(
            heads=3,
            modifiers=(hw.parts.Differential(), hw.parts.MixtureOfHeads(1, 1, router="norm")),
        )
    )
    x, _ = cases.tensors(layer.spec)
    _, chosen = by_norm(
        x.numpy(), layer.project["q"].detach().numpy().reshape(6, 4, 10)[::2].reshape(12, 10), 1, 1
    )
    result = heads_of(layer, x).abs().sum(-1) > 0
    assert result[:, :, 1:].tolist() == (chosen == 1).tolist()


def test_a_pruned_head_still_takes_part_in_routing():
    """Cut the head that would win: the others are silent where it was chosen, as if it had only
    been silenced.
    """
    layer = cases.layer(base(modifiers=(hw.parts.MixtureOfHeads(2, 1, router="norm"),)))
    x, _ = cases.tensors(layer.spec)
    small, weights = head_axis_ops.keep_heads(layer.spec, layer.state_dict(), [1, 3, 4])
    assert small.heads.q == 6
    assert len(small.score_head_of_output) == 3
    cut = cases.load_layer(small, weights)
    check_close(heads_of(cut, x), heads_of(layer, x)[:, :, [1, 3, 4]])
    routed = heads_of(cut, x)[:, :, 1:].abs().sum((-1, -2))
    assert (routed == 0).any()
    assert (routed > 0).any()


NORM = hw.parts.MixtureOfHeads(2, 2, router="norm")
PRUNED = {
    "each head its own keys": ({"modifiers": (NORM,)}, [1, 3, 4]),
    "a whole group, rotated": (
        {"modifiers": (hw.parts.Rotary(), NORM), "kv": 2, "pattern": "causal"},
        [3, 4, 5],
    ),
    "slopes of heads": (
        {"modifiers": (hw.parts.Alibi(), NORM), "pattern": "causal", "vdim": 5},
        [0, 4],
    ),
    "sinks": ({"modifiers": (NORM,), "normaliser": hw.parts.SinkSoftmax()}, [2, 5]),
    "a table and relative keys": (
        {"modifiers": (hw.parts.T5Bias(buckets=8, reach=9), hw.parts.Shaw(reach=2), NORM)},
        [1, 5],
    ),
    "learned scores": (
        {"modifiers": (hw.parts.LearnedScores(length=9, kind="factorised"), NORM)},
        [1, 2, 4],
    ),
    "scores from the input": (
        {"modifiers": (hw.parts.LearnedScores(length=9, kind="dense"), NORM)},
        [1, 2, 4],
    ),
    "sum of parameters": ({"modifiers": (NORM,), "similarity": hw.parts.Additive()}, [0, 3]),
    "linear attention": (
        {
            "modifiers": (NORM,),
            "similarity": hw.parts.FeatureMap(),
            "normaliser": hw.parts.SumNormaliser(),
        },
        [0, 3],
    ),
}


def pruned(name):
    options, keep = PRUNED[name]
    layer = cases.layer(base(**options))
    spec, weights = head_axis_ops.keep_heads(layer.spec, layer.state_dict(), keep)
    cut = cases.load_layer(spec, weights)
    return layer, cut, keep


@pytest.mark.parametrize("name", PRUNED)
@torch.no_grad()
def test_a_pruned_routed_layer_runs_on_the_same_backends(name):
    """The router reads the queries of removed heads, and no backend computes their scores."""
    layer, cut, keep = pruned(name)
    x, _ = cases.tensors(layer.spec)
    if name == "scores from the input":
        assert len(cut.spec.core_score_heads) == 6
        return
    assert (cut.spec.heads.q, len(cut.spec.core_score_heads)) == (6, len(keep))
    for options in ({}, {"grad_enabled": True}, {"single_query": True}):
        before, after = (
            backends.make_dispatch(backends.CallSignature(spec, spec.core, **options)).backend_names
            for spec in (layer.spec, cut.spec)
        )
        assert before == after
    expected = reference.reference_attention(cut, x)
    for backend in backends.make_dispatch(
        backends.CallSignature(cut.spec, cut.spec.core)
    ).backend_names:
        cut.backend_name = backend
        check_close(cut(x), expected)
        check_close(heads_of(cut, x), heads_of(layer, x)[:, :, keep])


@pytest.mark.parametrize("name", PRUNED)
def test_a_pruned_routed_layer_trains_and_decodes(name):
    _, cut, _ = pruned(name)
    x, _ = cases.tensors(cut.spec)
    gradients = {}
    for backend in ("dense", None):
        cut.backend_name = backend
        y = cut(x)
        gradients[backend] = torch.autograd.grad(y.square().sum(), list(cut.parameters()))
    for ours, theirs in zip(gradients[None], gradients["dense"], strict=True):
        check_close(ours, theirs)
    if cut.spec.pattern.tokens_before_decode == 0:
        cache = cut.cache(batch=3, capacity=7)
        check_close(torch.cat([cut(x[:, t : t + 1], cache=cache) for t in range(7)], 1), cut(x))


@pytest.mark.parametrize("name", PRUNED)
def test_a_pruned_routed_layer_costs_what_its_core_computes(name):
    layer, cut, keep = pruned(name)
    work = hw.costs.CallSize(1, 7, 7, 7)

    def core_flops(spec):
        return {
            t.name: t.value for t in forward_flops(spec, work).terms if t.name.startswith("core")
        }

    whole, own = core_flops(layer.spec), core_flops(cut.spec)
    assert 6 * own["core (scores)"] == len(cut.spec.core_score_heads) * whole["core (scores)"]
    assert 6 * own["core (values)"] == len(keep) * whole["core (values)"]
    kv = {layer.spec.heads.kv_head_of_query[head] for head in keep}
    cached = costs.cached_numbers_per_token(cut.spec)
    assert cached * layer.spec.heads.kv == costs.cached_numbers_per_token(layer.spec) * len(kv)
    cut.backend_name, (x, _) = "dense", cases.tensors(cut.spec)
    assert torch_flops(cut, x[:1]) == costs.counted_flops(cut.spec, work)


@pytest.mark.compile
@pytest.mark.parametrize(
    "name", ["each head its own keys", "slopes of heads", "a table and relative keys"]
)
def test_a_pruned_routed_layer_is_one_graph(name):
    _, cut, _ = pruned(name)
    x, _ = cases.tensors(cut.spec)
    torch._dynamo.reset()
    check_close(torch.compile(cut, fullgraph=True, backend="eager")(x), cut(x))


def test_whole_groups_of_a_routed_layer_can_be_pruned():
    spec = base(kv=2, pattern="causal", modifiers=(NORM,))
    stack = StackSpec.from_blocks("decoder", 10, [BlockSpec(spec)], embedding=EmbeddingSpec(7))
    units = list_units(ModelSpec("small", "decoder", (stack,)))["decoder.0.attention"]
    assert [unit.heads for unit in units] == [(0, 1, 2), (3, 4, 5)]


def test_a_mask_of_the_caller_names_every_score_head():
    _, cut, keep = pruned("each head its own keys")
    x, _ = cases.tensors(cut.spec)
    mask = torch.rand(3, 6, 7, 7) < 0.6
    probe = hw.Probe("weights")
    cut(x, mask=mask, probe=probe)
    assert not probe.tensors["weights"][~mask[:, keep]].any()


def test_all_scores_are_computed_where_keys_belong_to_a_removed_head_alone():
    """As in files of pruned models that kept these keys."""
    layer = cases.layer(base(modifiers=(hw.parts.MixtureOfHeads(2, 2, router="norm", heads=6),)))
    spec = layer.spec.with_heads(score_head_of_output=(1, 3))
    assert spec.core_score_heads == tuple(range(6))
    cut = hw.Attention(spec).double().eval()
    keep = {"out": head_axis_ops.select_heads([1, 3])}
    cut.load_state_dict(head_axis_ops.transform_axes(layer.spec, layer.state_dict(), keep))
    x, _ = cases.tensors(spec)
    check_close(heads_of(cut, x), heads_of(layer, x)[:, :, [1, 3]])
    check_close(cut(x), reference.reference_attention(cut, x))
