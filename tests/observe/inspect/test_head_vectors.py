"""Queries, keys, values and weights of single heads, read and replaced: against projections that
are replaced by plain hooks, and an attention function written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.hub.pretrained_models import copy_live_model
from support.layer_cases import check_close
from support.refusals import refused_cases
from support.transformers_models import DIM, FALLBACK, ZOO, run_model

CLEAN = torch.tensor([[5, 9, 2, 6, 5, 3, 11]])
CORRUPT = torch.tensor([[7, 1, 8, 2, 8, 1, 13]])
PARTS = ("q", "k", "v", "pattern")


def build(name: str, attention: str = "eager") -> Any:
    model = ZOO[name].build(attention)
    return model if name == "gpt-oss" else model.double()  # its experts have no float64


def run_patched(model: nn.Module, values: dict[Any, Tensor], part: str) -> Tensor:
    with hw.patch(model, values, part=part):
        return run(model, CLEAN)


def run(model: Any, ids: Tensor) -> Tensor:
    return run_model(model, {"input_ids": ids})


@contextmanager
def replaced_output(module: nn.Module, edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A plain forward hook of torch."""
    handle = module.register_forward_hook(lambda *call: edit(call[-1]))
    try:
        yield
    finally:
        handle.remove()


def record_output(model: nn.Module, module: nn.Module, ids: Tensor) -> Tensor:
    outputs: list[Tensor] = []

    def record(output: Tensor) -> Tensor:
        outputs.append(output)
        return output

    with replaced_output(module, record):
        run(model, ids)
    return outputs[0]


@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("columns", [None, [2, 4]])
def test_a_whole_group_is_its_projection(part, attention, columns):
    """Patching all query heads of a group is replacing their slice of the projection."""
    model = build("llama", attention)
    projection = model.get_submodule(f"model.layers.1.self_attn.{part}_proj")
    other = record_output(model, projection, CORRUPT)
    group = [2] if part == "q" else [2, 3]
    first = group[0] if part == "q" else group[0] // 2
    channels = slice(first * DIM, (first + 1) * DIM)
    rows = slice(None) if columns is None else columns

    def edit(output: Tensor) -> Tensor:
        output = output.clone()
        output[:, rows, channels] = other[:, rows, channels]
        return output

    with replaced_output(projection, edit):
        expected = run(model, CLEAN)
    heads = [(1, head) for head in group]
    values = hw.head_outputs(model, CORRUPT, heads, part=part)
    with hw.patch(model, values, part=part, tokens=columns):
        actual = run(model, CLEAN)
    assert (expected - run(model, CLEAN)).abs().max() > 1e-3
    # eager attention of transformers has its softmax in float32
    tolerance = 1e-10 if attention == "sdpa" else 1e-6
    check_close(actual, expected, rtol=tolerance, atol=tolerance)


Captured = dict[str, Any]


def hand_attention(own: Captured, other: Captured | None, part: str, head: int, rows: Any):
    """An attention function of transformers in which every query head has its keys and values; one
    part of one head comes from another call.
    """

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        if module is not own["module"]:
            return plain(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        times = query.shape[1] // key.shape[1]
        vectors = {
            "q": query.clone(),
            "k": key.repeat_interleave(times, 1),
            "v": value.repeat_interleave(times, 1),
        }
        if other is not None and part in vectors:
            vectors[part][:, head, rows] = other[part][:, head, rows]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = vectors["q"] @ vectors["k"].transpose(2, 3) * scale
        if attention_mask is not None:
            scores = scores + attention_mask[..., : scores.shape[-1]]
        weights = scores.softmax(-1)
        if other is not None and part == "pattern":
            weights[:, head, rows] = other["pattern"][:, head, rows]
        own.update(vectors, pattern=weights)
        return (weights @ vectors["v"]).transpose(1, 2).contiguous(), weights

    def plain(module, query, key, value, attention_mask, scaling=None, **kwargs):
        times = query.shape[1] // key.shape[1]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = query @ key.repeat_interleave(times, 1).transpose(2, 3) * scale
        if attention_mask is not None:
            scores = scores + attention_mask[..., : scores.shape[-1]]
        weights = scores.softmax(-1)
        return (weights @ value.repeat_interleave(times, 1)).transpose(1, 2), weights

    return attend


def run_by_hand(
    name: str, path: str, part: str, head: int, columns: list[int] | None
) -> tuple[Tensor, nn.Module]:
    """The output of the clean text while one head has a part from the corrupt text."""
    transformers = pytest.importorskip("transformers")
    model = build(name)
    rows = slice(None) if columns is None else columns
    other: Captured = {"module": model.get_submodule(path)}
    own: Captured = {"module": model.get_submodule(path)}
    interface = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    MASKS.register("by_hand", MASKS["eager"])
    model.config._attn_implementation = "by_hand"
    try:
        interface.register("by_hand", hand_attention(other, None, part, head, rows))
        run(model, CORRUPT)
        interface.register("by_hand", hand_attention(own, other, part, head, rows))
        expected = run(model, CLEAN)
    finally:
        model.config._attn_implementation = "sdpa"  # eager has its softmax in float32
    return expected, model


PATHS = {
    "llama": "model.layers.0.self_attn",
    "gpt2": "transformer.h.0.attn",
    "bert": "encoder.layer.0.attention.self",
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("columns", [None, [1, 3]])
def test_one_head_alone_reads_its_own_keys(name, part, columns):
    (expected, model) = run_by_hand(name, PATHS[name], part, 1, columns)
    values = hw.head_outputs(model, CORRUPT, [(0, 1)], part=part)
    with hw.patch(model, values, part=part, tokens=columns):
        actual = run(model, CLEAN)
    assert (expected - run(model, CLEAN)).abs().max() > 1e-4
    check_close(actual, expected, rtol=1e-10, atol=1e-10)
    if name != "bert":  # the same in the headwise model of these weights
        ours = copy_live_model(model)
        values = hw.head_outputs(ours, CORRUPT, [(0, 1)], part=part)
        with hw.patch(ours, values, part=part, tokens=columns), torch.no_grad():
            # norms of transformers are in float32
            check_close(ours(CLEAN), expected, rtol=1e-4, atol=1e-6)


def test_patched_weights_have_no_dropout_to_lose():
    """A model in train mode is refused: the patched heads alone would have no dropout."""
    model = build("gpt2")
    values = hw.head_outputs(model, CORRUPT, [(0, 1)], part="q")
    with pytest.raises(ValueError, match="is in train mode"):
        hw.patch(model.train(), values, part="q")


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss", "qwen3", "deepseek"])
@pytest.mark.parametrize("ours", [False, True])
def test_windows_caps_sinks_and_latent_keys(name, ours):
    """A patch with the vectors of the text itself changes nothing; queries and keys of another text
    together are its pattern.
    """
    model = build(name, "sdpa" if name not in ("gpt-oss", "gemma2") else "eager")
    if ours and name in ("gpt-oss", "deepseek", "gemma2"):
        pytest.skip("covered by the transformers model")
    model = copy_live_model(model) if ours else model
    call = (lambda ids: model(ids).detach()) if ours else lambda ids: run(model, ids)
    expected = call(CLEAN)
    for part in PARTS:
        values = hw.head_outputs(model, CLEAN, [(0, "all"), (1, 2)], part=part)
        with hw.patch(model, values, part=part):
            check_close(call(CLEAN), expected, rtol=1e-4, atol=1e-5)
    values = {part: hw.head_outputs(model, CORRUPT, [(1, 2)], part=part) for part in PARTS}
    with hw.patch(model, values["pattern"], part="pattern"):
        expected = call(CLEAN)
    with hw.patch(model, values["q"], part="q"), hw.patch(model, values["k"], part="k"):
        actual = call(CLEAN)
    assert (expected - call(CLEAN)).abs().max() > 1e-4
    check_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_other_replacements_work_on_every_part():
    model = build("llama")
    for part in PARTS:
        value = hw.head_outputs(model, CLEAN, [(0, 1)], part=part)
        outputs: list[Tensor] = []
        for replacement in (hw.Noise(seed=3), hw.Noise(seed=3), next(iter(value.values())) * 0):
            with hw.patch(model, {(0, 1): replacement}, part=part):
                outputs.append(run(model, CLEAN))
        check_close(outputs[0], outputs[1], rtol=0, atol=0)
        assert (outputs[0] - outputs[2]).abs().max() > 1e-5
        assert (outputs[2] - run(model, CLEAN)).abs().max() > 1e-5


def test_gradients_reach_what_replaces_a_part():
    model = build("llama")
    value = hw.head_outputs(model, CORRUPT, [(0, 1)], part="k")
    (key,) = (one.requires_grad_() for one in value.values())
    with hw.patch(model, value, part="k"):
        model(CLEAN).logits.square().sum().backward()
    assert key.grad is not None
    assert key.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("make", "call", "words"),
    refused_cases(
        __file__,
        "vectors of heads",
        {
            "hw": hw,
            "torch": torch,
            "build": build,
            "FALLBACK": FALLBACK,
            "CLEAN": CLEAN,
            "run_patched": run_patched,
        },
        count=2,
    ),
)
def test_refused(make, call, words):
    with pytest.raises(ValueError, match=words):
        call(make())
