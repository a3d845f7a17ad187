"""Recurrences and convolutions: torch.nn.GRU and Conv1d, a whole model in float64, decoding, costs,
refusals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise import cli, costs
from headwise.attention.cache import HiddenStateCache
from headwise.costs.cost_estimate import estimate_cost
from headwise.costs.training_memory import recompute_flops
from headwise.models import model_spec as bp
from headwise.models.block import CausalConvolution, GatedRecurrence
from headwise.models.distributed.parallel_attention import check_context_parallel
from headwise.observe.head_analysis.head_importance import IMPORTANCE_METHODS
from headwise.studies.cells import resize_model
from headwise.training.data import Batch, make_task
from headwise.training.data.synthetic_task import (
    ModelShape,
    make_small_decoder,
    make_small_translator,
)
from headwise.training.train_step import count_step_flops
from support.saved_bytes import BATCH, SOURCE, TOKENS, backend_profile, model_saved_bytes

WIDTH, HEADS, VOCAB, T, S = 12, 3, 23, 5, 7
GRUS = ("gru-fixed", "gru-additive", "gru-dot")
DECODERS = ("gru", "conv", "conv-dilated")


def described(network: str, layers: int = 2, feed: int = 0) -> bp.ModelSpec:
    return make_small_translator(
        "small", VOCAB, ModelShape(WIDTH, HEADS, layers, feed, network=network)
    )


def built(network: str) -> hw.Transformer:
    net = hw.build(described(network), seed=0).double()
    for name, parameter in net.named_parameters():
        # biases and v of additive attention start at 0
        if "norm" not in name and ".embedding" not in name:
            nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(len(name)))
    return net


def torch_gru(weights: dict[str, Tensor], prefix: str) -> nn.GRU:
    gru = nn.GRU(WIDTH, WIDTH, batch_first=True).double()
    names = {
        "input": "weight_ih_l0",
        "state": "weight_hh_l0",
        "input_bias": "bias_ih_l0",
        "state_bias": "bias_hh_l0",
    }
    gru.load_state_dict({theirs: weights[f"{prefix}.{ours}"] for ours, theirs in names.items()})
    return gru


def test_a_recurrence_and_its_gradients_are_those_of_torch():
    torch.manual_seed(0)
    layer = GatedRecurrence(bp.RecurrentSpec(), WIDTH).double()
    for bias in (layer.get_parameter("input_bias"), layer.get_parameter("state_bias")):
        nn.init.normal_(bias)
    gru = torch_gru({f".{name}": tensor.detach() for name, tensor in layer.named_parameters()}, "")
    x = torch.randn(2, T, WIDTH, dtype=torch.float64)
    output, expected = layer(x, hw.SequenceInfo.contiguous(0, T, "cpu")), gru(x)[0]
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for result in (output, expected):
        result.square().sum().backward()
    pairs = {
        "input": "weight_ih_l0",
        "state": "weight_hh_l0",
        "input_bias": "bias_ih_l0",
        "state_bias": "bias_hh_l0",
    }
    for ours, theirs in pairs.items():
        torch.testing.assert_close(layer.get_parameter(ours).grad, gru.get_parameter(theirs).grad)


def rendered(net: hw.Transformer, source: Tensor, x: Tensor) -> Tensor:
    """Logits of one pair of rows: every sublayer from the paper's formula, the recurrence by
    torch.nn.GRU.
    """
    weights = {name: tensor.detach() for name, tensor in net.state_dict().items()}

    def norm(name: str, h: Tensor) -> Tensor:
        return F.layer_norm(h, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    def attend(name: str, z: Tensor, memory: Tensor) -> Tensor:
        dim = WIDTH // HEADS
        q, k, v = (
            tensor @ weights[f"{name}.project.{side}"].T
            for tensor, side in ((z, "q"), (memory, "k"), (memory, "v"))
        )
        heads: list[Tensor] = []
        for head in range(HEADS):
            own = slice(head * dim, (head + 1) * dim)
            if f"{name}.similarity.v" in weights:  # 1409.0473: v . tanh(W s + U h + b)
                inner = torch.tanh(
                    q[:, None, own] + k[None, :, own] + weights[f"{name}.similarity.bias"][head]
                )
                scores = inner @ weights[f"{name}.similarity.v"][head]
            else:
                scores = q[:, own] @ k[:, own].T / dim**0.5
            heads.append(scores.softmax(-1) @ v[:, own])
        return torch.cat(heads, -1) @ weights[f"{name}.output.o"].T

    table = weights["encoder.embedding.tokens"]
    h = table[source]
    for layer in range(2):
        gru = torch_gru(weights, f"encoder.{layer}.mixer")
        h = h + gru(norm(f"encoder.{layer}.mixer_norm", h)[None])[0][0].detach()
    memory = norm("encoder.norm", h)
    y = table[x]
    for layer in range(2):
        name = f"decoder.{layer}.mixer"
        first = torch.tanh(memory[-1] @ weights[f"{name}.start"].T + weights[f"{name}.start_bias"])
        y = (
            y
            + torch_gru(weights, name)(norm(f"{name}_norm", y)[None], first[None, None])[0][
                0
            ].detach()
        )
        if f"decoder.{layer}.cross.output.o" in weights:
            cross = f"decoder.{layer}.cross"
            y = y + attend(cross, norm(f"{cross}_norm", y), memory)
    return norm("decoder.norm", y) @ table.T


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("network", GRUS)
def test_a_model_with_padded_rows_computes_its_formulas(network: str, pad: str):
    net, lengths, source_lengths = built(network), (T, 3), (4, S)
    x, source = torch.randint(VOCAB, (2, T)), torch.randint(VOCAB, (2, S))
    sequence, source_sequence = (
        hw.SequenceInfo.from_batch(ids, lengths=own, pad=pad)
        for ids, own in ((x, lengths), (source, source_lengths))
    )
    logits = net(x, sequence=sequence, source=source, source_sequence=source_sequence).detach()
    for row, (length, source_length) in enumerate(zip(lengths, source_lengths, strict=True)):
        own, read = (
            slice(n) if pad == "right" else slice(-n, None) for n in (length, source_length)
        )
        expected = rendered(net, source[row, read], x[row, own])
        torch.testing.assert_close(logits[row, own], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("network", GRUS)
def test_cached_steps_give_the_states_of_one_pass(network: str):
    net = built(network)
    x, source = torch.randint(VOCAB, (3, T)), torch.randint(VOCAB, (3, S))
    encoded = net.encode(source, sequence=hw.SequenceInfo.from_batch(source, lengths=[S, 4, 6]))
    padded = hw.SequenceInfo.from_batch(x, lengths=[T, 4, 2], pad="left")
    for sequence in (None, padded):
        whole = net(x, sequence=sequence, source=encoded)
        cache = net.cache(batch=3, capacity=T)
        parts = []
        for begin, end in ((0, 3), (3, 4), (4, T)):
            own = sequence and hw.SequenceInfo(
                sequence.position[:, begin:end], sequence.segment[:, begin:end]
            )
            parts.append(net(x[:, begin:end], sequence=own, source=encoded, cache=cache))
        real = torch.ones(3, T, dtype=torch.bool) if sequence is None else sequence.is_real
        torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], rtol=1e-10, atol=1e-10)
        assert cache.nbytes == 2 * 3 * WIDTH * 8  # layers, rows, channels, bytes
        cache.rows(torch.tensor([2, 2]))
        new = net(x[2:, :1].expand(2, 1), source=encoded.rows(torch.tensor([2, 2])), cache=cache)
        torch.testing.assert_close(new[0], new[1])


@pytest.mark.parametrize("network", GRUS)
def test_greedy_decoding_takes_the_likeliest_token_of_full_passes(network: str):
    net = built(network)
    source, x = torch.randint(VOCAB, (1, S)), torch.tensor([[1]])
    expected: list[int] = []
    for _ in range(6):
        expected.append(int(net(x, source=source)[0, -1].argmax()))
        x = torch.cat([x, torch.tensor([[expected[-1]]])], 1)
    decoded = hw.generation.greedy_decode(
        net, torch.tensor([[1]]), max_new_tokens=6, encoder_output=net.encode(source)
    )
    assert decoded == [expected]


def test_without_attention_only_the_last_state_of_the_encoder_reaches_the_decoder():
    net = built("gru-fixed")
    x, encoded = torch.randint(VOCAB, (1, T)), net.encode(torch.randint(VOCAB, (1, S)))
    states = encoded.states.clone()
    states[:, :-1] += 1.0
    torch.testing.assert_close(
        net(x, source=encoded._replace(states=states)), net(x, source=encoded)
    )
    states[:, -1] += 1.0
    assert not torch.allclose(
        net(x, source=encoded._replace(states=states)), net(x, source=encoded)
    )


@pytest.mark.parametrize("network", GRUS)
def test_parameters_flops_and_saved_bytes_are_those_that_torch_counts(network: str):
    spec = described(network, feed=10)
    net = hw.build(spec, seed=0)
    assert costs.count_parameters(spec) == sum(parameter.numel() for parameter in net.parameters())
    for attention in (module for module in net.modules() if isinstance(module, hw.Attention)):
        attention.backend_name = "dense"
    with FlopCounterMode(display=False) as counted:
        net(
            x := torch.randint(VOCAB, (BATCH, TOKENS)),
            source=(source := torch.randint(VOCAB, (BATCH, SOURCE))),
        )
    assert count_step_flops(spec, Batch(x, x, source=source)) == 3 * counted.get_total_flops()
    load = hw.Workload(BATCH, TOKENS, "fp32", "cpu", source=SOURCE)
    assert estimate_cost(spec, load).counted_flops["prefill"] == counted.get_total_flops()
    way = hw.costs.ActivationSettings(backend_profile(spec), source=SOURCE)
    assert hw.costs.activation_memory(spec, load, way).total == model_saved_bytes(
        spec, torch.float32, way
    )


def test_a_checkpointed_model_recomputes_the_products_of_its_recurrences():
    spec, totals = described("gru-dot", feed=10), {}
    for checkpointing in ("none", "block"):
        net = hw.build(spec, seed=0).train()
        net.checkpointing = checkpointing
        for attention in (module for module in net.modules() if isinstance(module, hw.Attention)):
            attention.backend_name = "dense"
        with FlopCounterMode(display=False) as counted:
            net(
                torch.randint(VOCAB, (BATCH, TOKENS)), source=torch.randint(VOCAB, (BATCH, SOURCE))
            ).sum().backward()
        totals[checkpointing] = counted.get_total_flops()
    way = hw.costs.ActivationSettings("dense", "block", source=SOURCE)
    done = recompute_flops(
        spec, hw.Workload(BATCH, TOKENS, "fp32", "cpu", source=SOURCE), way
    ).total
    assert done == totals["block"] - totals["none"]


def test_a_folder_and_a_document_give_the_model_again(tmp_path: Path):
    net = built("gru-additive").float()
    hw.save(net, tmp_path / "gru")
    again = hw.load(tmp_path / "gru")
    assert again.spec == net.spec == bp.from_toml(str(net.spec))
    x, source = torch.randint(VOCAB, (2, T)), torch.randint(VOCAB, (2, S))
    assert torch.equal(again(x, source=source), net.eval()(x, source=source))


def test_the_command_trains_and_continues_a_recurrent_translator(tmp_path: Path, capsys: Any):
    out = str(tmp_path / "run")
    line = [
        "train",
        "dates",
        "--model",
        "gru-dot",
        "--out",
        out,
        "--batch",
        "8",
        "--set",
        "recipe.precision=fp32",
    ]
    assert cli.main([*line, "--steps", "2"]) == 0
    assert cli.main([*line[:-6], "--out", out + "2", "--set", "recipe.rows=packed"]) == 2
    assert (
        "has a recurrence or convolution, which needs a row for each text; use rows='padded'"
        in capsys.readouterr().err
    )
    assert cli.main([*line, "--steps", "3", "--resume"]) == 0
    assert "3 steps" in capsys.readouterr().out
    spec = hw.load(out).spec
    assert spec == resize_model(make_task("dates"), {"network": "gru-dot"})
    assert [name for name, _ in spec.attention_specs()] == ["decoder.0.cross", "decoder.1.cross"]


# --- convolutions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (3, 1), (4, 3)])
def test_a_convolution_and_its_gradients_are_those_of_torch(kernel: int, dilation: int):
    torch.manual_seed(0)
    layer = CausalConvolution(bp.ConvolutionSpec(kernel, dilation), WIDTH).double()
    nn.init.normal_(layer.get_parameter("taps_bias"))
    taps = layer.get_parameter("taps").detach().view(WIDTH, kernel, WIDTH).transpose(1, 2)
    conv = nn.Conv1d(WIDTH, WIDTH, kernel, dilation=dilation).double()
    conv.load_state_dict({"weight": taps, "bias": layer.get_parameter("taps_bias").detach()})
    x = torch.randn(2, 11, WIDTH, dtype=torch.float64, requires_grad=True)
    padded = F.pad(x.transpose(1, 2), ((kernel - 1) * dilation, 0))
    output = layer(x, hw.SequenceInfo.contiguous(0, 11, "cpu"))
    expected = conv(padded).transpose(1, 2)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    own, theirs = (
        torch.autograd.grad(y.square().sum(), [x, *weights], retain_graph=True)
        for y, weights in ((output, layer.parameters()), (expected, conv.parameters()))
    )
    torch.testing.assert_close(own[0], theirs[0])
    torch.testing.assert_close(own[1].view(WIDTH, kernel, WIDTH).transpose(1, 2), theirs[1])
    torch.testing.assert_close(own[2], theirs[2])


def built_decoder(network: str) -> hw.Transformer:
    net = hw.build(
        make_small_decoder("small", VOCAB, ModelShape(WIDTH, HEADS, 2, 10, network=network)), seed=0
    )
    for parameter in net.parameters():
        nn.init.normal_(
            parameter, std=0.4, generator=torch.Generator().manual_seed(parameter.numel())
        )
    return net.double()


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("network", DECODERS)
def test_cached_steps_of_padded_rows_give_the_outputs_of_each_row_alone(network: str, pad: str):
    net, count, lengths = built_decoder(network), 23, (23, 19, 2)
    x = torch.randint(VOCAB, (3, count))
    sequence = hw.SequenceInfo.from_batch(x, lengths=lengths, pad=pad)
    cache, parts = net.cache(batch=3, capacity=count), list[Tensor]()
    for begin, end in ((0, 8), (8, 9), (9, 20), (20, count)):
        own = hw.SequenceInfo(sequence.position[:, begin:end], sequence.segment[:, begin:end])
        parts.append(net(x[:, begin:end], sequence=own, cache=cache))
    whole = net(x, sequence=sequence)
    for row, length in enumerate(lengths):
        own = slice(length) if pad == "right" else slice(-length, None)
        expected = net(x[row : row + 1, own])[0]
        torch.testing.assert_close(whole[row, own], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(torch.cat(parts, 1)[row, own], expected, rtol=1e-10, atol=1e-10)
    # vectors of the model width in both layers
    states = {"gru": 2, "conv": 2 * 3, "conv-dilated": 3 + 12}
    assert cache.nbytes == states[network] * 3 * WIDTH * 8 == net.spec.num_state_values * 3 * 8
    cache.rows(torch.tensor([2, 0]))
    new = net(torch.tensor([[5], [5]]), cache=cache)
    alone = net(torch.cat([x[2, :2] if pad == "right" else x[2, -2:], torch.tensor([5])])[None])
    torch.testing.assert_close(new[0, -1], alone[0, -1], rtol=1e-10, atol=1e-10)


def test_a_convolution_in_place_of_the_first_attention():
    spec = make_small_decoder("small", VOCAB, ModelShape(WIDTH, HEADS, 3, network="conv-first"))
    plain = make_small_decoder("small", VOCAB, ModelShape(WIDTH, HEADS, 3))
    first, *others = spec.stacks[0].layers
    assert first.mixer == bp.ConvolutionSpec(kernel=4)
    assert first.attention is None
    assert others == list(plain.stacks[0].layers[1:])
    net = hw.build(spec, seed=0).double()
    x = torch.randint(VOCAB, (2, 9))
    cache = net.cache(batch=2, capacity=9)
    steps = [net(x[:, t : t + 1], cache=cache) for t in range(9)]
    torch.testing.assert_close(torch.cat(steps, 1), net(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("network", DECODERS)
def test_a_cache_holds_no_more_memory_than_its_states(network: str):
    net = built_decoder(network)
    cache = net.cache(batch=3, capacity=60)
    for count in (50, 1):
        net(torch.randint(VOCAB, (3, count)), cache=cache)
        mixers = [layer["mixer"] for layer in cache.layers]
        states = [
            one.state
            for one in mixers
            if isinstance(one, HiddenStateCache) and one.state is not None
        ]
        assert sum(state.untyped_storage().nbytes() for state in states) == cache.nbytes


@pytest.mark.parametrize("network", DECODERS)
def test_decoders_without_attention_count_and_generate(network: str, tmp_path: Path):
    net = built_decoder(network).float()
    spec, x = net.spec, torch.randint(VOCAB, (BATCH, TOKENS))
    assert costs.count_parameters(spec) == sum(parameter.numel() for parameter in net.parameters())
    with FlopCounterMode(display=False) as counted:
        net(x)
    assert count_step_flops(spec, Batch(x, x)) == 3 * counted.get_total_flops()
    load = hw.Workload(BATCH, TOKENS, "fp32", "cpu")
    assert estimate_cost(spec, load).counted_flops["prefill"] == counted.get_total_flops()
    way = hw.costs.ActivationSettings("dense")
    assert hw.costs.activation_memory(spec, load, way).total == model_saved_bytes(
        spec, torch.float32, way
    )
    prompt, ids = torch.tensor([[1, 7, 3]]), torch.tensor([[1, 7, 3]])
    for _ in range(9):
        ids = torch.cat([ids, net(ids)[:, -1:].argmax(-1)], 1)
    assert hw.generation.greedy_decode(net, prompt, max_new_tokens=9) == [ids[0, 3:].tolist()]
    hw.save(net, tmp_path / network)
    assert torch.equal(hw.load(tmp_path / network)(x), net.eval()(x))


# --- what is refused ------------------------------------------------------------------------------


def test_packed_rows_and_a_missing_source_are_refused():
    net, x = built("gru-fixed"), torch.randint(VOCAB, (1, T))
    source = torch.randint(VOCAB, (1, S))
    with pytest.raises(ValueError, match="cannot separate packed texts; pad them"):
        net(x, sequence=hw.SequenceInfo.packed([[2, 3]]), source=source)
    with pytest.raises(ValueError, match="has an encoder, which needs an input"):
        net(x)


def test_a_first_state_needs_an_encoder_of_the_same_width():
    block = bp.BlockSpec(mixer=bp.RecurrentSpec("source"))
    stack = bp.StackSpec.from_blocks("decoder", WIDTH, [block], embedding=bp.EmbeddingSpec(VOCAB))
    with pytest.raises(
        hw.SpecError, match="decoder starts from the state of an encoder; give initial='zeros'"
    ):
        bp.ModelSpec("small", "decoder", (stack,))


@pytest.mark.parametrize("network", GRUS)
def test_the_engine_refuses_recurrent_layers(network: str):
    with pytest.raises(hw.SpecError, match=r"use hw\.generate"):
        hw.Engine(built(network), budget=2**24)


def test_analyses_of_the_residual_stream_and_context_parallelism_are_refused():
    spec = described("gru-dot")
    with pytest.raises(hw.SpecError, match="whose state needs the tokens in order on one rank"):
        check_context_parallel(spec)
    reason = IMPORTANCE_METHODS["lrp"].unsupported_reason(hw.build(spec))
    assert reason == "encoder.0 has a gated recurrence, which it does not support"
