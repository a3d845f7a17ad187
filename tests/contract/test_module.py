"""A layer is a well-behaved torch module, and what passes inside can be seen."""

from __future__ import annotations

import copy

import pytest
import torch

import headwise as hw
from headwise.attention.backends import BACKENDS
from headwise.attention.interfaces import Mix
from headwise.attention.interfaces.core_types import Phase
from support import layer_cases as cases
from support.layer_cases import EXAMPLES, check_close


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_probe_sees_every_place(spec, layer, x, z):
    probe = hw.Probe("q", "k", "v", "scores", "weights", "lse", "heads")
    y = layer(x, source=z, probe=probe)
    check_close(y, layer(x, source=z))
    keys = cases.TOKENS if z is None else cases.SOURCE
    rows = len(spec.score_head_of_row)
    mixed = spec.num_heads_after(Phase.SCORES)
    assert probe.tensors["scores"].shape == (cases.BATCH, mixed, cases.TOKENS, keys)
    assert probe.tensors["weights"].shape == (cases.BATCH, rows, cases.TOKENS, keys)
    assert probe.tensors["lse"].shape == (cases.BATCH, mixed, cases.TOKENS)
    assert probe.tensors["heads"].shape == (
        cases.BATCH,
        cases.TOKENS,
        len(spec.score_head_of_output),
        layer.spec.heads.vdim,
    )
    assert probe.tensors["q"].shape[:3] == (cases.BATCH, cases.TOKENS, spec.heads.q)
    check_close(layer.merge_heads(probe.tensors["heads"]), y)


@pytest.mark.parametrize("name", EXAMPLES)
def test_weights_stay_within_the_pattern(spec, layer, x, z):
    probe = hw.Probe("weights")
    layer(x, source=z, probe=probe)
    sequence = hw.SequenceInfo.from_batch(x if z is None else z)
    allowed = hw.attention.AttentionMask(
        hw.SequenceInfo.from_batch(x), sequence, spec.pattern
    ).allowed
    if any(isinstance(part, Mix) and part.phase is Phase.WEIGHTS for part in spec.modifiers):
        # a row mixes weights of heads that may have several patterns
        allowed = allowed.any(1, keepdim=True)
    assert (probe.tensors["weights"].masked_select(~allowed) == 0).all()
    assert probe.tensors["weights"].masked_select(allowed).abs().sum() > 0


@pytest.mark.parametrize("name", EXAMPLES)
def test_copies_saves_and_moves(spec, layer, x, z):
    y = layer(x, source=z)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    check_close(copied(x, source=z), y)
    fresh = cases.load_layer(spec, copied.state_dict())
    check_close(fresh(x, source=z), y)
    constants = {k: v.clone() for k, v in copied.named_buffers()}
    back = copied.to(torch.bfloat16).to(torch.float64)
    for key, constant in back.named_buffers():
        assert torch.equal(constant, constants[key]), (
            f"{key} lost its precision on a trip through bfloat16"
        )


@pytest.mark.parametrize("name", EXAMPLES)
def test_odd_inputs_work(spec, layer, x, z):
    y = layer(x, source=z)
    check_close(layer(x.transpose(0, 1).contiguous().transpose(0, 1), source=z), y)
    assert layer(x[:0], source=None if z is None else z[:0]).shape == (0, cases.TOKENS, spec.model)
    assert layer(x[:, :0], source=z).shape == (cases.BATCH, 0, spec.model)
    if spec.pattern.tokens_before_decode == 0 and z is None:
        check_close(layer(x[:, :1]), y[:, :1])


# Each example is compiled once: the second of a part after its calls were planned. Examples after
# the second run in `make slow`.
FIRST_CALLS = [
    pytest.param(name, marks=() if name.endswith("0") else pytest.mark.slow)
    for name in EXAMPLES
    if not name.endswith("1")
]


@pytest.mark.compile
@pytest.mark.parametrize("name", FIRST_CALLS)
def test_one_graph_holds_the_first_call_of_a_layer(spec, layer, x, z):
    torch._dynamo.reset()
    traced = torch.compile(layer, fullgraph=True, backend="eager")
    check_close(traced(x, source=z), layer(x, source=z))


@pytest.mark.compile
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name.endswith("1")])
def test_one_graph_holds_a_layer_that_has_planned_its_calls(spec, layer, x, z):
    expected = layer(x, source=z)
    torch._dynamo.reset()
    check_close(torch.compile(layer, fullgraph=True, backend="eager")(x, source=z), expected)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["Rotary0", "Alibi1", "DynamicComposition0"])
def test_the_compiler_keeps_the_numbers(spec, layer, x, z):
    expected = layer(x, source=z)
    torch._dynamo.reset()
    check_close(torch.compile(layer, fullgraph=True)(x, source=z), expected)


@pytest.mark.compile
@pytest.mark.parametrize("tokens", BACKENDS["flex"].FLEX_BLOCK_LENGTHS)
def test_flex_keeps_the_numbers_at_its_block_edges_on_the_cpu(tokens):
    spec = hw.design(
        model=32,
        heads=4,
        kv=2,
        pattern="window(40) | first(3)",
        modifiers=(hw.parts.Rotary(), hw.parts.Softcap(2.0)),
    )
    layer = hw.Attention(spec, backend="flex")
    judge = hw.Attention(spec, backend="dense")
    judge.load_state_dict(layer.state_dict())
    x = torch.randn(3, tokens, 32)
    at = hw.SequenceInfo.from_batch(x, lengths=[tokens, 50, tokens - 1])
    with torch.no_grad():
        check_close(layer(x, sequence=at), judge(x, sequence=at), rtol=1e-4, atol=1e-5)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        *(
            (name, "causal()")
            for name in (
                "LinearProjection1",
                "Rotary0",
                "MLAProjection0",
                "DynamicComposition0",
                "Alibi1",
            )
        ),
        ("Rotary0", "window(3) | first(2)"),
        ("MLAProjection0", "window(3) | first(2)"),
    ],
)
def test_one_graph_holds_a_cached_step(name, pattern):
    spec = cases.change_spec(
        cases.as_causal(EXAMPLES[name]), pattern=hw.patterns.parse_pattern(pattern)
    )
    layer = cases.layer(spec)
    x = torch.randn(cases.BATCH, 11, spec.model, dtype=torch.float64)
    expected = layer(x)
    torch._dynamo.reset()
    step = torch.compile(cases.layer(spec), fullgraph=True, backend="eager")
    step.load_state_dict({f"_orig_mod.{key}": value for key, value in layer.state_dict().items()})
    cache = layer.cache(batch=cases.BATCH, capacity=13)
    with torch.no_grad():
        for t in range(11):
            check_close(step(x[:, t : t + 1], cache=cache), expected[:, t : t + 1])


@pytest.mark.parametrize("name", EXAMPLES)
def test_coarse_products_leave_finite_gradients(name):
    spec = EXAMPLES[name]
    layer = hw.Attention(spec).train()
    x, z = cases.tensors(spec, torch.float32)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, source=z, sequence=hw.SequenceInfo.from_batch(x, lengths=[7, 3, 0]))
    y.float().square().sum().backward()
    assert y.isfinite().all()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad is None or tensor.grad.isfinite().all()
