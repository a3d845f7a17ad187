"""Ablation by means, other rows, noise and offset weights, each against a second implementation."""

from __future__ import annotations

import copy
from contextvars import copy_context
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor, nn

import headwise as hw
from headwise.attention import head_axis_ops
from headwise.observe.head_analysis.head_table import HeadClass, HeadImportance, HeadMeasures
from headwise.report.data import Estimate
from support import layer_cases as cases, spec_strategies as strategies
from support.layer_cases import check_close
from support.refusals import refused_cases
from support.tiny_configs import model_config
from support.transformers_models import FALLBACK, ZOO, TransformersModel, run_model

PRESETS = {name: hw.design(preset=name, model=16, heads=4) for name in hw.PRESETS}
GPT = model_config("gpt2", n_embd=12, n_head=3, n_layer=2, vocab_size=11, n_positions=16)
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
FOLDED = ("bert", "gpt2", "whisper", "deepseek")


def gpt() -> nn.Module:
    """A small decoder of ours with two layers of three heads, four wide."""
    return hw.build(hw.families.read_model_spec(GPT), seed=0).eval()


def test_heads_of_a_table_are_ablated_as_they_are():
    """`hw.ablate` takes the rows of `hw.heads` and `hw.importance`; their reprs fit a message."""
    net = gpt()
    with hw.ablate(net, [("decoder.1.attention", 2)]):
        expected = net(IDS)
    row = HeadMeasures(
        *("decoder", "attention", 1, 2, 2, "decoder.1.attention"),
        {f"measure {n}": Estimate(0.5, 0.4, 0.6) for n in range(20)},
        (HeadClass("previous", 0.87, "it does"),),
    )
    assert repr(row) == "<HeadMeasures: decoder.1.attention head 2, previous 0.87>"
    measured = HeadImportance("decoder.1.attention", "decoder", "attention", 1, 2, 2, 0.1, 0.0, 0.2)
    named = (row, [row], measured, {measured: 0.0}, {row: 0.0})
    contexts = [hw.ablate(net, heads) for heads in named]
    contexts.append(hw.patch(net, {measured: torch.zeros(4)}))
    for context in contexts:
        with context:
            assert torch.equal(net(IDS), expected)
    for wrong in (lambda: hw.ablate(net, [[1.0] * 999]), lambda: hw.ablate(net, {(0, 1): IDS})):
        with pytest.raises(ValueError, match=r"names no head|not a finite number") as caught:
            wrong()
        assert len(str(caught.value)) < 250
        assert "\n" not in str(caught.value)


def head_outputs(model: nn.Module, inputs, heads=None) -> dict:
    """What heads say now, patched or not."""
    return hw.head_outputs(model, inputs, heads)


class Hand(nn.Module):
    """Attention by its definition: z [B, T, H, V] in loops over heads, kept for whoever asks."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 3
        self.q, self.k, self.v, self.proj = (nn.Linear(12, 12) for _ in range(4))

    def outputs(self, x: Tensor) -> Tensor:
        """What heads say."""
        q, k, v = (self.__getattr__(name)(x).unflatten(-1, (3, 4)) for name in "qkv")
        weights = [
            (q[:, :, h] @ k[:, :, h].transpose(1, 2) / 2).softmax(-1) @ v[:, :, h] for h in range(3)
        ]
        return torch.stack(weights, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.outputs(x).flatten(2))


class SelfAttention(Hand):
    """The same under a name that says so."""


# --- means ----------------------------------------------------------------------------------------


@given(spec=st.sampled_from(list(PRESETS.values())) | strategies.specs(), seed=st.integers(0, 99))
def test_a_mean_is_a_cut_and_a_constant(spec: hw.AttentionSpec, seed: int):
    torch.manual_seed(seed)
    layer, outs = cases.layer(spec), len(spec.score_head_of_output)
    x, z = cases.tensors(spec)
    assume(outs > 1)
    entry = sorted({seed % outs, (seed // 7) % outs})[: outs - 1]
    means = hw.head_means(
        layer, [{"x": x + n, "source": z} for n in (0, 1)], [(0, head) for head in entry]
    )
    with torch.no_grad(), hw.patch(layer, means):
        patched = layer(x, source=z)
    keep = [head for head in range(outs) if head not in entry]
    small, weights = head_axis_ops.keep_heads(spec, layer.state_dict(), keep)
    cut = hw.Attention(small).double().eval()
    cut.load_state_dict(weights, strict=True)
    constant = torch.zeros(1, 1, outs, next(iter(means.values())).shape[-1], dtype=torch.float64)
    for (_, head), mean in means.items():
        constant[0, 0, head] = mean
    with torch.no_grad():
        folded = layer.merge_heads(constant) - layer.merge_heads(torch.zeros_like(constant))
        check_close(patched, cut(x, source=z) + folded)


def projection(model: nn.Module, path: str, out: str) -> nn.Module:
    """The output projection nearest to an attention."""
    near = path.rpartition(".")[0] if "|" not in out and out.startswith("output") else path
    ends = tuple(out.split("|"))
    return next(
        m for name, m in model.named_modules() if name.startswith(near) and name.endswith(ends)
    )


def fold(last: nn.Module, head: int, mean: Tensor) -> None:
    """Take a head's columns out of its projection, and add to the bias what its mean gives."""
    conv, width = type(last).__name__ == "Conv1D", len(mean)
    weight = last.weight.T if conv else last.weight
    columns = slice(head * width, (head + 1) * width)
    constant = weight[:, columns].double() @ mean
    bias = torch.zeros(len(weight)) if last.bias is None else last.bias
    last.bias = nn.Parameter((bias.double() + constant).float())
    weight[:, columns] = 0


@pytest.mark.parametrize("name", FOLDED)
@torch.no_grad()
def test_a_mean_is_columns_folded_into_the_bias(name: str):
    zoo: TransformersModel = (ZOO | FALLBACK)[name]
    model = zoo.build()
    inputs = zoo.inputs()
    whole, site = run_model(model, inputs), hw.sites(model)[-1]
    means = hw.head_means(model, [inputs], [(site.name, 1), (site.name, 3)])
    with hw.patch(model, means):
        patched = run_model(model, inputs)
    for (_, head), mean in means.items():
        fold(projection(model, site.path, zoo.out), head, mean)
    expected = run_model(model, inputs)
    assert (whole - expected).abs().max() > 1e-4
    assert (patched - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_means_are_those_of_the_tokens_that_count():
    zoo, lengths = ZOO["bert"], ((11, 4), (6, 7), (1, 5))
    model = zoo.build()
    batches, recorded = [], []
    for n, pair in enumerate(lengths):
        ids = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(n))
        mask = torch.arange(11) < torch.tensor(pair)[:, None]
        batches.append({"input_ids": ids, "attention_mask": mask.long()})
        z = head_outputs(model, batches[-1])
        recorded += [
            (z["encoder.1.attention", 2][row, : pair[row]]).double().numpy() for row in range(2)
        ]
    rows = np.concatenate(recorded)
    for value in (batches, iter(batches), [(one, one["attention_mask"].bool()) for one in batches]):
        mean = hw.head_means(model, value, [(1, 2)])["encoder.1.attention", 2]
        assert mean.dtype == torch.float64
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-12)
    noise = hw.head_noise(model, batches, [(1, 2)], seed=5)["encoder.1.attention", 2]
    np.testing.assert_allclose(noise.mean, rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(noise.std, rows.std(0, ddof=1), rtol=1e-12)


def test_padding_of_ours_does_not_count():
    net = gpt()
    right = {"x": IDS, "sequence": hw.SequenceInfo.from_batch(IDS, lengths=[5, 2])}
    left = {
        "x": IDS.flip(1),
        "sequence": hw.SequenceInfo.from_batch(IDS, lengths=[5, 2], pad="left"),
    }
    separate = [IDS[:1], IDS[1:, :2]]
    own = hw.head_means(net, separate)
    assert len(own) == 6
    for head, mean in hw.head_means(net, [right]).items():
        check_close(mean, own[head], atol=1e-6)
    turned = hw.head_means(net, [IDS.flip(1)[:1], IDS.flip(1)[1:, 3:]])
    for head, mean in hw.head_means(net, [left]).items():
        check_close(mean, turned[head], atol=1e-6)


def test_masks_by_stack():
    zoo = ZOO["bart"]
    model = zoo.build()
    inputs = zoo.inputs() | {
        "attention_mask": (torch.arange(11) < torch.tensor([[11], [6]])).long()
    }
    z = head_outputs(model, inputs)
    with pytest.raises(ValueError, match="for decoder, encoder"):
        hw.head_means(model, [inputs])
    masks = {"encoder": inputs["attention_mask"].bool()}
    means = hw.head_means(model, [(inputs, masks)])
    own = torch.cat([z["encoder.0.attention", 1][0], z["encoder.0.attention", 1][1, :6]])
    check_close(means["encoder.0.attention", 1], own.double().mean(0), atol=1e-6)
    check_close(
        means["decoder.1.cross", 1],
        z["decoder.1.cross", 1].double().flatten(0, 1).mean(0),
        atol=1e-6,
    )


# --- another row, another text --------------------------------------------------------------------


@torch.no_grad()
def test_another_row_by_hand():
    model = nn.Sequential(SelfAttention())
    x = torch.randn(4, 5, 12)
    order = (2, 2, 0, 1)
    z = model[0].outputs(x)
    z[:, :, 1] = z[list(order), :, 1]
    expected = model[0].proj(z.flatten(2))
    with hw.patch(model, {(0, 1): hw.Resample(rows=order)}):
        assert torch.allclose(model(x), expected, atol=1e-6)


@torch.no_grad()
def test_another_text_by_hand():
    model = nn.Sequential(SelfAttention(), SelfAttention()).eval()
    x, other = torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    z, theirs = model[0].outputs(x), model[0].outputs(other)
    z[:, 1:3, 0] = theirs[:, 1:3, 0]
    expected = model[1](model[0].proj(z.flatten(2)))
    with hw.patch(model, head_outputs(model, other, [(0, 0)]), tokens=[1, -3]):
        assert torch.allclose(model(x), expected, atol=1e-6)


@torch.no_grad()
def test_another_text_through_multihead_attention():
    layer = nn.TransformerEncoderLayer(12, 3, 17, dropout=0.0, batch_first=True).eval()
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x, other = torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    layer = model.layers[0]
    own, theirs = (layer.self_attn(one, one, one)[0] for one in (x, other))
    with hw.patch(model, head_outputs(model, other)):
        h = layer.norm1(x + theirs)  # every head says what it said of the other text
        assert torch.allclose(model(x), layer.norm2(h + layer._ff_block(h)), atol=1e-5)
    assert not torch.allclose(own, theirs, atol=1e-2)


def test_drawn_rows_are_never_ones_own_and_come_again():
    net = gpt()
    ids = torch.randint(0, 11, (5, 4))
    whole = head_outputs(net, ids, [(0, "all")])
    recorded = []
    for seed in (3, 3, 4):
        with hw.patch(net, {(0, "all"): hw.Resample(seed=seed)}):
            recorded += [[head_outputs(net, ids, [(0, "all")]) for _ in range(2)]]
    for one in (*recorded[0], *recorded[2]):
        orders = {tuple(_whose(one[head], whole[head])) for head in whole}
        (order,) = orders  # one for all heads
        assert sorted(order) == [0, 1, 2, 3, 4]
        assert all(row != whose for row, whose in enumerate(order))
    for first, again in zip(recorded[0], recorded[1], strict=True):
        assert all(torch.equal(first[head], again[head]) for head in whole)


def _whose(one: Tensor, whole: Tensor) -> list[int]:
    return [next(n for n in range(len(whole)) if torch.equal(row, whole[n])) for row in one]


# --- modes of ablation ----------------------------------------------------------------------------


@torch.no_grad()
def test_mode_mean_by_hand():
    model = nn.Sequential(SelfAttention())
    x = torch.randn(4, 5, 12)
    mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)) < 0.6
    for tokens in (None, mask, [1, -1]):
        patched = torch.ones(4, 5, dtype=torch.bool) if tokens is None else mask
        if isinstance(tokens, list):
            patched = torch.zeros(4, 5, dtype=torch.bool)
            patched[:, tokens] = True
        z = model[0].outputs(x)
        z[:, :, 2][patched] = z[:, :, 2][patched].double().mean(0).float()
        with hw.ablate(model, [(0, 2)], "mean", tokens=tokens):
            assert torch.allclose(model(x), model[0].proj(z.flatten(2)), atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(
    ("mode", "patch"),
    [("resample", hw.Resample(seed=3)), ("noise", hw.Noise(seed=3)), ("zero", torch.zeros(4))],
)
def test_modes_are_patches(mode: str, patch: hw.Resample | hw.Noise | Tensor):
    net, heads = gpt(), [(0, 1), (1, 0)]
    with hw.ablate(net, heads, mode, seed=3):
        ablated = net(IDS)
    with hw.patch(net, dict.fromkeys(heads, patch)):
        assert torch.equal(net(IDS), ablated)
    assert not torch.equal(net(IDS), ablated)


# --- noise ----------------------------------------------------------------------------------------


def test_noise_has_the_moments_of_the_head():
    net = gpt()
    ids = torch.randint(0, 11, (300, 16), generator=torch.Generator().manual_seed(0))
    heads = [(1, 0), (1, 2)]
    own = head_outputs(net, ids, heads)
    with hw.patch(net, dict.fromkeys(heads, hw.Noise(seed=1))):
        first, second = head_outputs(net, ids, heads), head_outputs(net, ids, heads)
    count, recorded = 300 * 16, []
    for head, z in own.items():
        z, noise = z.flatten(0, 1).double(), first[head].flatten(0, 1).double()
        assert ((noise.mean(0) - z.mean(0)).abs() < 4 * z.std(0) / count**0.5).all()
        assert ((noise.std(0) / z.std(0) - 1).abs() < 4 / (2 * count) ** 0.5).all()
        recorded += [((noise - noise.mean(0)) / noise.std(0)), second[head].flatten(0, 1).double()]
    both = torch.corrcoef(torch.cat(recorded, 1).T) - torch.eye(16)
    assert both.abs().max() < 5 / count**0.5  # of channels, heads and calls
    kurtosis = recorded[0].pow(4).mean()
    assert abs(kurtosis - 3) < 0.2


def test_noise_has_the_given_scale_and_seed():
    net, head = gpt(), ("decoder.0.attention", 1)
    options = {"mean": torch.tensor([5.0, 0.0, -5.0, 0.0]), "std": 0.5}
    recorded = []
    for heads in ([(0, 1)], [(0, 1), (0, 2)], [(0, 1)]):
        with hw.patch(
            net, dict.fromkeys(heads, hw.Noise(seed=3 if len(recorded) < 2 else 4, **options))
        ):
            recorded.append(head_outputs(net, IDS[:, :1], [(0, 1)])[head])
    assert torch.equal(recorded[0], recorded[1])  # whoever else is patched
    assert not torch.equal(recorded[0], recorded[2])
    with hw.patch(net, {(0, 1): hw.Noise(seed=3, mean=2.0, std=0)}):
        assert torch.equal(head_outputs(net, IDS, [(0, 1)])[head], torch.full((2, 5, 4), 2.0))
    at = torch.zeros(2, 5, dtype=torch.bool)
    at[0, 1:3] = True
    own = head_outputs(net, IDS, [(0, 1)])[head]
    with hw.patch(net, {(0, 1): hw.Noise(mean=0.0)}, tokens=at):
        noise = head_outputs(net, IDS, [(0, 1)])[head]
    assert torch.equal(noise[~at], own[~at])
    assert not torch.isclose(noise[at], own[at]).any()


# --- which heads, which tokens, in which order ----------------------------------------------------


@torch.no_grad()
def test_a_layer_in_one_word_and_scales_by_head():
    net = gpt()
    with hw.ablate(net, [(0, "all")]):
        one = net(IDS)
    with hw.ablate(net, [(0, head) for head in range(3)]):
        assert torch.equal(one, net(IDS))
    own = head_outputs(net, IDS)
    with hw.ablate(net, {(0, 1): 0.5, ("decoder.0.attention", 2): -2}):
        now = head_outputs(net, IDS)
    for head, times in ((0, 1), (1, 0.5), (2, -2)):
        assert torch.equal(
            now["decoder.0.attention", head], own["decoder.0.attention", head] * times
        )


@torch.no_grad()
def test_the_last_ablation_wins():
    net, head = gpt(), ("decoder.0.attention", 1)
    vector = torch.tensor([1.0, 2.0, 3.0, 4.0])
    own = head_outputs(net, IDS)[head]
    full = vector.expand(2, 5, 4)
    swap = hw.patch(net, {(0, 1): hw.Resample(rows=(1, 0))})
    with hw.ablate(net, [(0, 1)], scale=0.5):
        assert torch.equal(head_outputs(net, IDS)[head], own / 2)
        with hw.patch(net, {(0, 1): vector}):
            assert torch.equal(head_outputs(net, IDS)[head], full)
            with hw.ablate(net, [(0, 1)], scale=3, tokens=[0]):
                assert torch.equal(head_outputs(net, IDS)[head][:, 0], 3 * full[:, 0])
                assert torch.equal(head_outputs(net, IDS)[head][:, 1:], full[:, 1:])
        with swap:
            assert torch.equal(head_outputs(net, IDS)[head], own.flip(0) / 2)
    assert torch.equal(head_outputs(net, IDS)[head], own)


def test_gradients_reach_a_vector_that_is_learnt():
    net, vector = gpt(), torch.zeros(4, requires_grad=True)
    with hw.patch(net, {(0, 1): vector}):
        net(IDS).sum().backward()
    assert vector.grad is not None
    assert vector.grad.abs().max() > 0


# --- nothing is left behind, nothing is left undone -----------------------------------------------

KINDS = {
    "vector": lambda: {(0, 1): torch.ones(8)},
    "rows": lambda: {(0, 1): hw.Resample(rows=(1, 0))},
    "noise": lambda: {(0, 1): hw.Noise()},
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_hook_remains(kind: str):
    zoo = ZOO["llama"]
    model, inputs, patches = zoo.build(), zoo.inputs(), KINDS[kind]()
    kinds = {type(module) for module in model.modules()}
    before, tensors = run_model(model, inputs), {kind: dict(vars(kind)) for kind in kinds}
    state = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(RuntimeError, match="on purpose"), hw.patch(model, patches):
        _failing(model, inputs)
    with hw.patch(model, patches):
        patched, copied, elsewhere = run_model(model, inputs), copy.deepcopy(model), []
        thread = Thread(target=lambda: elsewhere.append(run_model(model, inputs)))
        thread.start()
        thread.join()
        assert torch.equal(elsewhere[0], before)
        assert torch.equal(run_model(copied, inputs), before)
        with pytest.raises(ValueError, match="input_ids"):
            model()
        if kind != "noise":
            assert torch.equal(run_model(model, inputs), patched)
    assert not torch.equal(patched, before)
    assert torch.equal(run_model(model, inputs), before)
    assert {kind: dict(vars(kind)) for kind in kinds} == tensors
    assert [dict(vars(module)) for module in model.modules()] == state


def test_ablations_of_sites_that_never_ran_are_reported():
    model, zoo = ZOO["bart"].build(), ZOO["bart"]
    ids = zoo.inputs()["input_ids"]
    words, quiet = r"decoder\.0\.attention never ran, .*forwards: 1", [("decoder.0.attention", 1)]
    with pytest.raises(ValueError, match=words), hw.ablate(model, quiet):
        _skipped(model, ids)
    with hw.ablate(model, [("encoder.0.attention", 1), *quiet]):  # only a part without it ran
        model.model.encoder(ids)
    with hw.ablate(model, quiet):  # nothing ran
        pass
    with (
        hw.ablate(model, [("encoder.0.attention", 1)]),
        torch.no_grad(),
    ):  # it ran once, and then no more
        memory = model.model.encoder(ids)
        model(encoder_outputs=memory, decoder_input_ids=ids)
    with (
        pytest.raises(RuntimeError, match="on purpose"),
        hw.ablate(model, quiet),
    ):  # what already flies goes on
        _failing(model.model.encoder, {"input_ids": ids})
    with pytest.raises(RuntimeError, match="on purpose"), hw.ablate(model, quiet):
        _skipped(model, ids, RuntimeError("on purpose"))


def _failing(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """A forward, and then something goes wrong."""
    run_model(model, inputs)
    raise RuntimeError("on purpose")


def _skipped(model: nn.Module, ids: Tensor, then: Exception | None = None) -> None:
    """A forward that goes around the layers of the decoder."""
    layers, model.model.decoder.layers = model.model.decoder.layers, model.model.decoder.layers[:0]
    try:
        with pytest.raises(ValueError, match="was replaced"):
            run_model(model, {"input_ids": ids, "decoder_input_ids": ids})
    finally:
        model.model.decoder.layers = layers
    model.model.decoder.layerdrop = 1.0
    model.model.decoder.train()
    try:
        run_model(model, {"input_ids": ids, "decoder_input_ids": ids})
    finally:
        model.model.decoder.layerdrop = 0.0
        model.eval()
    if then is not None:
        raise then


def test_a_model_that_changes_meanwhile():
    model, zoo = ZOO["llama"].build(), ZOO["llama"]
    layer = model.model.layers[0]
    with hw.ablate(model, [(0, 1)]):
        quiet = run_model(model, zoo.inputs())
        model.model.layers[0] = copy.deepcopy(layer)
        with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn was replaced"):
            run_model(model, zoo.inputs())
        model.model.layers[0] = layer
        assert torch.equal(run_model(model, zoo.inputs()), quiet)
        model.model.layers[1] = copy.deepcopy(model.model.layers[1])  # which nobody watches
        assert torch.equal(run_model(model, zoo.inputs()), quiet)


def test_checkpointing_is_refused():
    model, zoo = ZOO["llama"].build().train(), ZOO["llama"]
    model.activation_checkpointing_enable()
    with pytest.raises(ValueError, match="checkpointing"), hw.ablate(model, [(0, 1)]):
        model(**zoo.inputs())
    with torch.no_grad(), hw.ablate(model, [(0, 1)]):
        model(**zoo.inputs())
    model.activation_checkpointing_disable()
    with hw.ablate(model, [(0, 1)]):
        model(**zoo.inputs()).logits.sum().backward()
    net = gpt()
    net.checkpointing = "block"
    with pytest.raises(ValueError, match="checkpointing"), hw.ablate(net, [(0, 1)]):
        net(IDS)


def test_a_model_trains_with_ablated_heads():
    model, zoo = ZOO["llama"].build().train(), ZOO["llama"]
    with hw.ablate(model, [(0, 1)]):
        model(**zoo.inputs()).logits.sum().backward()
    grad = model.model.layers[0].self_attn.o_proj.weight.grad
    assert not grad[:, 8:16].any()
    assert grad[:, :8].any()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_weights_are_left_alone():
    model, zoo = ZOO["llama"].build(), ZOO["llama"]
    quantised = copy.deepcopy(model)
    kind = torch.ao.nn.quantized.dynamic.Linear
    for layer in quantised.model.layers:
        layer.self_attn.o_proj.qconfig = torch.ao.quantization.default_dynamic_qconfig
        layer.self_attn.o_proj = kind.from_float(layer.self_attn.o_proj)
    with hw.ablate(quantised, [(0, "all"), (1, "all")]):
        quiet = run_model(quantised, zoo.inputs())
    with hw.ablate(model, [(0, "all"), (1, "all")]):
        assert torch.allclose(
            quiet, run_model(model, zoo.inputs()), atol=1e-5
        )  # no head speaks: nothing is rounded


@pytest.mark.parametrize("runs_here", [True, False])
def test_a_thread_in_a_copy_of_the_context_is_watched(runs_here: bool):
    model, zoo, recorded = ZOO["llama"].build(), ZOO["llama"], []

    def run() -> None:
        recorded.append(run_model(model, zoo.inputs()))

    with hw.ablate(model, [(0, 1)]):  # that it ran elsewhere alone counts too
        thread = Thread(target=copy_context().run, args=(run,))
        thread.start()
        thread.join()
        if runs_here:
            run()
            assert torch.equal(*recorded)
    run()
    assert not torch.equal(recorded[0], recorded[-1])


@torch.no_grad()
def test_steps_of_generation():
    model, zoo = ZOO["llama"].build(), ZOO["llama"]
    ids = zoo.inputs()["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        layer.self_attn.o_proj.weight[:, :8] = 0
    with hw.ablate(model, [(0, 0), (1, 0)]):
        assert torch.equal(model.generate(ids, **options), other.generate(ids, **options))
    with (
        pytest.raises(ValueError, match="none of them has index 9"),
        hw.ablate(model, [(0, 0)], tokens=[9]),
    ):
        model.generate(ids, **options)


# --- what cannot be meant -------------------------------------------------------------------------

VECTOR, NAN = torch.zeros(4), torch.tensor([0.0, float("nan"), 0, 0])
MASK = torch.ones(2, 5, dtype=torch.bool)
FIRST_TOKEN = torch.arange(10).view(2, 5) < 1


@pytest.mark.parametrize(("how", "words"), refused_cases(__file__, "ablations", globals()))
def test_invalid_arguments_give_one_line(how: Any, words: str):
    net = gpt()
    with torch.no_grad():
        whole = net(IDS)
        with pytest.raises(ValueError, match=words) as excinfo, how(net):
            net(IDS)
        assert "\n" not in str(excinfo.value)
        assert torch.equal(net.eval()(IDS), whole)


def test_one_row_has_no_other():
    net = gpt()
    patch = hw.patch(net, {(0, 1): hw.Resample(seed=0)})
    with pytest.raises(ValueError, match="no other row"), patch:
        net(IDS[:1])


def test_numbers_that_are_not_finite_have_no_mean():
    net = gpt()
    with torch.no_grad():
        net.decoder.blocks[0].attention.project.v[0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        hw.head_means(net, [IDS], [(0, 0)])
