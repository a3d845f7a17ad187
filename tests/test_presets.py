"""Every preset works with every function at other sizes, and learns a lookup task."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headwise as hw
from headwise import costs
from headwise.attention import reference
from headwise.attention.presets import PRESETS
from support.layer_cases import check_close

PUBLISHED = (
    "mha gqa mqa mla moh dcmha mohsa collaborative talking diff entmax linear performer "
    "longformer bigbird kha"
)


def layer_of(name: str, dtype=torch.float64) -> hw.Attention:
    """A preset in the sizes of the command line's example, in float64 unless told."""
    torch.manual_seed(0)
    return hw.Attention(hw.design(preset=name, model=256, heads=8)).to(dtype)


def test_all_that_are_promised_are_there():
    assert set(PUBLISHED.split()) <= set(PRESETS)
    assert all(make.__doc__ for make in PRESETS.values())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_spec_like_any_other(name):
    spec = hw.design(preset=name, model=256, heads=8)
    assert spec.model == 256
    assert len(spec.score_head_of_output) == 8
    assert hw.from_toml(str(spec)) == spec
    layer = hw.Attention(spec)
    assert costs.count_parameters(spec) == sum(p.numel() for p in layer.parameters())
    assert hw.design(preset=name)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_equals_its_definition(name):
    layer, x = layer_of(name).eval(), torch.randn(1, 6, 256, dtype=torch.float64)
    check_close(layer(x), reference.reference_attention(layer, x))


@pytest.mark.parametrize("name", PRESETS)
def test_a_causal_preset_decodes_from_its_cache(name):
    layer = layer_of(name).eval()
    if layer.spec.pattern.tokens_before_decode != 0:
        with pytest.raises(ValueError, match="causal"):
            layer.cache(batch=2, capacity=12)
        return
    x = torch.randn(2, 11, 256, dtype=torch.float64)
    cache = layer.cache(batch=2, capacity=12)
    parts = [
        layer(x[:, :4], cache=cache),
        *(layer(x[:, t : t + 1], cache=cache) for t in range(4, 11)),
    ]
    check_close(torch.cat(parts, 1), layer(x))


@pytest.mark.parametrize("name", PRESETS)
def test_why_and_walk_accept_presets(name):
    spec = hw.design(preset=name, model=256, heads=8)
    reasons = hw.why(spec, when="grad")
    assert reasons.backend is not None
    assert str(hw.walk(spec, batch=1, tokens=5))


@pytest.mark.parametrize("name", PRESETS)
def test_gradients_are_finite_under_autocast(name):
    layer, x = layer_of(name, torch.float32).train(), torch.randn(2, 40, 256, requires_grad=True)
    tokens = hw.SequenceInfo.from_batch(x, lengths=[40, 0])  # a row of nothing but padding
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, sequence=tokens)
    assert y.isfinite().all()
    y.float().square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


# --- learning -------------------------------------------------------------------------------------

PAIRS, KEYS, VALUES, NUM_QUERIES = (
    8,
    16,
    8,
    4,
)  # pairs in a text, keys and values there are, questions at its end
CHANCE = torch.tensor(float(VALUES)).log().item()


class LookUp(nn.Module):
    """Tokens that hold a key and a value, then tokens that hold a key; one
    layer says which value.
    """

    def __init__(self, spec: hw.AttentionSpec) -> None:
        super().__init__()
        self.identity, self.value = (
            nn.Embedding(KEYS, spec.model),
            nn.Embedding(VALUES + 1, spec.model),
        )
        self.layer, self.says = hw.Attention(spec), nn.Linear(spec.model, VALUES)

    def forward(self, keys, values):
        x = F.rms_norm(self.identity(keys) + self.value(values), [self.layer.spec.model])
        return self.says(self.layer(x)[:, PAIRS:])


def texts(step: int, batch: int = 64):
    """Keys, values (the last value stands for a question), and the answers."""
    draw = torch.Generator().manual_seed(step)
    sample = torch.rand(batch, KEYS, generator=draw).argsort(1)[:, :PAIRS]
    values = torch.randint(VALUES, (batch, PAIRS), generator=draw)
    which = torch.rand(batch, PAIRS, generator=draw).argsort(1)[:, :NUM_QUERIES]
    blank = torch.full((batch, NUM_QUERIES), VALUES)
    return (
        torch.cat([sample, sample.gather(1, which)], 1),
        torch.cat([values, blank], 1),
        values.gather(1, which),
    )


def learnt(spec: hw.AttentionSpec, steps: int) -> float:
    """The loss on fresh texts after so many steps, in nats."""
    torch.manual_seed(0)
    model = LookUp(spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for step in range(steps):
        keys, values, answers = texts(step)
        loss = F.cross_entropy(model(keys, values).flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        keys, values, answers = texts(10**6, 512)
        return F.cross_entropy(model(keys, values).flatten(0, 1), answers.flatten()).item()


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_learns_to_look_up(name):
    loss = learnt(hw.design(preset=name, model=64, heads=4), steps=600)
    if name == "average":  # weights that do not see the tokens cannot look anything up
        assert loss > 0.3 * CHANCE
    else:
        assert loss < 0.1, f"{name}: {loss:.3f} nats, chance is {CHANCE:.3f}"
