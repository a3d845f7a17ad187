"""Models of transformers with headwise as attention backend, against their own eager attention and
float64.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.hub import transformers_backend
from headwise.observe.inspect.adapters import known_interfaces
from headwise.observe.inspect.attention_sites import find_attention
from support.site_recording import record_eager_weights, record_sites
from support.transformers_models import (
    LLAMA,
    LOCAL,
    WORDS,
    ZOO,
    TransformersModel,
    run_model,
    transformers,
)

LOWEST = torch.finfo(torch.float32).min
CHUNKS = LLAMA | {
    "attention_chunk_size": 4,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 48,
    "layer_types": ["chunked_attention", "full_attention"],
}
LATE = LLAMA | {
    "num_hidden_layers": 4,
    "layer_types": LOCAL * 2,
    "sliding_window": 5,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": WORDS,
    "num_kv_shared_layers": 2,
}
MORE = {
    "llama4": TransformersModel("Llama4ForCausalLM", "Llama4TextConfig", CHUNKS, "o_proj"),
    "gemma4": TransformersModel("Gemma4ForCausalLM", "Gemma4TextConfig", LATE, "o_proj"),
    "both ways": ZOO["llama"]._replace(keys=LLAMA | {"is_causal": False}),
}


def off(own: Tensor, expected: Tensor) -> float:
    """How far apart, of the largest number."""
    return float((own - expected).abs().max() / expected.abs().max())


def padded(inputs: dict[str, Tensor], side: str) -> dict[str, Tensor]:
    """The same with three tokens of the second row left out."""
    shown = torch.ones_like(inputs["input_ids"])
    shown[1, slice(0, 3) if side == "left" else slice(-3, None)] = 0
    return {**inputs, "attention_mask": shown}


@contextmanager
def fused_calls(monkeypatch: pytest.MonkeyPatch):
    """Shapes of queries, keys and mask of every fused call, and whether it was causal."""
    calls: list[tuple[Any, ...]] = []
    original = F.scaled_dot_product_attention

    def noting(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        m: Tensor | None = None,
        p: float = 0.0,
        c: bool = False,
        **how: Any,
    ):
        calls.append((tuple(q.shape), tuple(k.shape), None if m is None else tuple(m.shape), c))
        return original(q, k, v, m, p, c, **how)

    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", noting)
        yield calls


@pytest.mark.parametrize("name", ZOO | MORE)
def test_outputs_are_eagers(name: str):
    zoo = (ZOO | MORE)[name]
    eager, ours = zoo.build("eager"), zoo.build("headwise")
    inputs = zoo.inputs()
    kinds = [
        inputs,
        *([padded(inputs, "left"), padded(inputs, "right")] if "input_ids" in inputs else []),
    ]
    for value in kinds:
        assert off(run_model(ours, value), run_model(eager, value)) <= 1e-5
    ours.set_attn_implementation("eager")
    assert torch.equal(run_model(ours, inputs), run_model(eager, inputs))
    ours.set_attn_implementation("headwise")
    assert off(run_model(ours, inputs), run_model(eager, inputs)) <= 1e-5


MASKS = {
    "packed": lambda ids: {
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4]]).expand(2, -1)
    },
    "a mask of numbers": lambda ids: {
        "attention_mask": LOWEST * torch.ones(11, 11).triu(1).expand(2, 1, -1, -1)
    },
    "the last queries": lambda ids: {"logits_to_keep": 3},
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss", "gemma4"])
def test_other_masks(name: str, kind: str):
    zoo = (ZOO | MORE)[name]
    ids = zoo.inputs()["input_ids"]
    options = {"input_ids": ids, **MASKS[kind](ids)}
    assert (
        off(run_model(zoo.build("headwise"), options), run_model(zoo.build("eager"), options))
        <= 1e-5
    )


def test_a_boolean_mask_hides_false_pairs():
    """Which eager functions would add to the scores as ones."""
    zoo = ZOO["gemma2"]
    ids = zoo.inputs()["input_ids"]
    for name in ("gemma2", "llama"):
        ours = ZOO[name].build("headwise")
        shown = torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(0)) < 0.5
        shown |= torch.eye(11, dtype=torch.bool)
        numbers = torch.where(shown, 0.0, LOWEST)
        values = [
            run_model(ours, {"input_ids": ids, "attention_mask": mask}) for mask in (shown, numbers)
        ]
        assert off(values[0], values[1]) <= 1e-6


class Layer(nn.Module):
    """What is told of itself by a module that attends."""

    is_causal = True


def defined(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H, V] and weights, one query at a time in float64."""
    (batch, heads, queries, dim), (_, groups, keys, width) = q.shape, v.shape
    o = torch.zeros(batch, queries, heads, width, dtype=torch.float64)
    w = torch.zeros(batch, heads, queries, keys, dtype=torch.float64)
    grids = [
        options[name].expand(w.shape)
        for name in ("position_bias", "attention_mask")
        if name in options
    ]
    for b, h, t in itertools.product(range(batch), range(heads), range(queries)):
        g, row = h * groups // heads, []
        for j in range(keys):
            s = options.get("scaling", dim**-0.5) * float(q[b, h, t].double() @ k[b, g, j].double())
            if "softcap" in options:
                s = options["softcap"] * math.tanh(s / options["softcap"])
            s += sum(float(grid[b, h, t, j]) for grid in grids)
            row.append(-math.inf if options.get("is_causal") and j > t else s)
        sink = [float(options["s_aux"][h])] if "s_aux" in options else []
        e = [math.exp(s - max(row + sink)) for s in row + sink]
        w[b, h, t] = torch.tensor(e[:keys], dtype=torch.float64) / sum(e)
        o[b, t, h] = w[b, h, t] @ v[b, g].double()
    return o, w


DRAW = torch.Generator().manual_seed(7)
OPTIONS = {
    "plain": {},
    "scaled": {"scaling": 0.7},
    "capped": {"softcap": 1.3},
    "sinks": {"s_aux": torch.randn(6, generator=DRAW)},
    "causal": {"is_causal": True},
    "causal, capped": {"is_causal": True, "softcap": 1.3},
    "causal, biased": {"is_causal": True, "position_bias": torch.randn(1, 6, 5, 5, generator=DRAW)},
    "biased": {"position_bias": torch.randn(1, 6, 5, 5, generator=DRAW)},
    "masked": {
        "attention_mask": LOWEST
        * (torch.rand(2, 1, 5, 5, generator=DRAW) < 0.4)
        * (1 - torch.eye(5))
    },
}
OPTIONS["all"] = OPTIONS["capped"] | OPTIONS["sinks"] | OPTIONS["biased"] | OPTIONS["masked"]


@pytest.mark.parametrize(
    ("kind", "queries", "groups"),
    [
        (kind, queries, (1, 2, 6)[(n + queries) % 3])
        for n, (kind, queries) in enumerate(itertools.product(OPTIONS, (1, 5)))
    ],
)
def test_attention_equals_the_definition(kind: str, queries: int, groups: int):
    """Also for values of another width than keys."""
    draw = torch.Generator().manual_seed(3)
    q = torch.randn(2, 6, queries, 7, generator=draw)
    k = torch.randn(2, groups, 5, 7, generator=draw)
    v = torch.randn(2, groups, 5, 3, generator=draw)
    cut = {
        key: grid[..., :queries, :]
        for key, grid in OPTIONS[kind].items()
        if isinstance(grid, Tensor) and grid.dim() == 4
    }
    options = OPTIONS[kind] | cut
    if queries == 1:
        options = {key: value for key, value in options.items() if key != "is_causal"}
    o, w = defined(q, k, v, options)
    fields = {"attention_mask": None} | options
    own, nothing = transformers_backend.attention_forward(Layer(), q, k, v, **fields)
    again, weights = transformers_backend.attention_forward(
        Layer(), q, k, v, **fields, output_attentions=True
    )
    assert own.is_contiguous()
    assert torch.allclose(own.double(), o, atol=1e-6)
    assert torch.allclose(again.double(), o, atol=1e-6)
    assert torch.allclose(weights.double(), w, atol=1e-6)
    assert (nothing is not None) == bool({"softcap", "s_aux"} & options.keys())


RATES = ("attention_dropout", "attention_probs_dropout_prob", "dropout_rate", "hidden_dropout_prob")


@pytest.mark.parametrize("name", ["bert", "gemma2", "gpt-oss", "t5"])
def test_training_is_eagers(name: str):
    """Gradients, and from one seed the same weights dropped."""
    zoo, grads = ZOO[name], []
    rates = dict.fromkeys(RATES, 0.3)
    for kind in ("eager", "headwise"):
        model = zoo._replace(keys=zoo.keys | rates).build(kind).train()
        torch.manual_seed(5)
        outputs = model(**zoo.inputs())
        outputs = outputs.logits if "logits" in outputs else outputs.last_hidden_state
        (
            outputs * torch.randn(outputs.shape, generator=torch.Generator().manual_seed(2))
        ).sum().backward()
        grads.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    eager, ours = grads
    assert eager.keys() == ours.keys()
    largest = max(float(grad.abs().max()) for grad in eager.values())
    assert all(float((ours[key] - eager[key]).abs().max()) <= 1e-5 * largest for key in eager)


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        *((name, "dynamic") for name in ("llama", "gemma2", "gpt-oss", "gpt2", "t5", "whisper")),
        *((name, "static") for name in ("llama", "mistral", "t5")),
    ],
)
def test_generated_tokens_are_eagers(name: str, cache: str):
    zoo = ZOO[name]
    values = {key: value for key, value in zoo.inputs().items() if key != "decoder_input_ids"}
    values = padded(values, "left") if "input_ids" in values else values
    how = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    how |= {"cache_implementation": "static"} if cache == "static" else {}
    eager, ours = (zoo.build(kind).generate(**values, **how) for kind in ("eager", "headwise"))
    assert eager.shape[1] >= 9
    assert torch.equal(eager, ours)


def test_no_key_is_repeated_for_one_query(monkeypatch: pytest.MonkeyPatch):
    model, ids = ZOO["llama"].build("headwise"), ZOO["llama"].inputs()["input_ids"]
    whole = run_model(model, {"input_ids": ids})
    with torch.no_grad():
        past = model(ids[:, :-1]).past_key_values
        with fused_calls(monkeypatch) as calls:
            step = model(ids[:, -1:], past_key_values=past).logits
    assert calls == [((2, 2, 2, 8), (2, 2, 11, 8), None, False)] * 2
    assert off(step[:, -1], whole[:, -1]) <= 1e-5


def test_a_causal_prompt_needs_no_mask(monkeypatch: pytest.MonkeyPatch):
    model, inputs = ZOO["llama"].build("headwise"), ZOO["llama"].inputs()
    plain = ((2, 4, 11, 8), (2, 2, 11, 8), None, True)
    masked = ((2, 4, 11, 8), (2, 4, 11, 8), (2, 1, 11, 11), False)
    for value, expected in ((inputs, plain), (padded(inputs, "left"), masked)):
        with fused_calls(monkeypatch) as calls:
            run_model(model, value)
        assert calls == [expected] * 2


def test_a_mask_that_was_written_to_is_read():
    q = torch.randn(1, 2, 5, 3, generator=torch.Generator().manual_seed(0))
    mask = transformers_backend.make_mask(batch_size=1, q_length=5, kv_length=5)
    assert mask is not None
    marked, _ = transformers_backend.attention_forward(Layer(), q, q, q, mask)
    plain, _ = transformers_backend.attention_forward(Layer(), q, q, q, mask.clone())
    assert torch.allclose(marked, plain, atol=1e-6)
    mask[..., 1:, 0] = LOWEST
    written, _ = transformers_backend.attention_forward(Layer(), q, q, q, mask)
    same, _ = transformers_backend.attention_forward(Layer(), q, q, q, mask.clone())
    assert torch.equal(written, same)
    assert not torch.allclose(written, marked, atol=1e-3)


@pytest.mark.parametrize("name", ["bert", "gemma2"])
def test_half_precision_is_no_further_from_the_truth_than_eagers(name: str):
    """Rows that may read nothing among them."""
    zoo = ZOO[name]
    inputs = padded(zoo.inputs(), "left")
    truth = run_model(zoo.build("eager"), inputs)
    for mixed in (False, True):
        recorded = []
        for kind in ("eager", "headwise"):
            model = zoo.build(kind) if mixed else zoo.build(kind).bfloat16()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                recorded.append(float((run_model(model, inputs).float() - truth).abs().mean()))
        assert recorded[1] <= 1.3 * recorded[0]


@pytest.mark.parametrize("name", ZOO)
def test_watched_on_headwise_as_on_eager(name: str, monkeypatch: pytest.MonkeyPatch):
    """Rows computed again are eager's weights, and silence is the same silence."""
    zoo = ZOO[name]
    eager, ours = zoo.build("eager"), zoo.build("headwise")
    inputs = zoo.inputs()
    with record_eager_weights(monkeypatch) as recorded, record_sites(eager):
        run_model(eager, inputs)
    with record_sites(ours) as keeps:
        whole = run_model(ours, inputs)
    for one in find_attention(eager):
        (core,) = keeps[one.site.name].seen
        for head in (0, 2):
            assert torch.allclose(core.head_weights(head), recorded[one.module][:, head], atol=1e-5)
    heads = [(site.name, 3 - n % 4) for n, site in enumerate(hw.sites(ours))]
    with hw.ablate(eager, heads), hw.ablate(ours, heads):
        quiet = run_model(ours, inputs)
        assert off(quiet, run_model(eager, inputs)) <= 1e-5
    assert off(quiet, whole) > 1e-4
    assert torch.equal(run_model(ours, inputs), whole)


BAD = {
    "indices": ({"indices": torch.zeros(2, 5, 1)}, "also gets indices; use"),
    "axes": ({"attention_mask": torch.zeros(2, 5, 5)}, "its mask has 3 axes"),
    "queries": (
        {"is_causal": True},
        "is_causal is ambiguous for 4 queries and 5 keys; give a mask",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_unsupported_arguments_are_refused(kind: str):
    options, why = BAD[kind]
    q, k = torch.zeros(2, 6, 4, 7), torch.zeros(2, 2, 5, 7)
    with pytest.raises(ValueError, match=why):
        transformers_backend.attention_forward(
            Layer(), q, k, k, **({"attention_mask": None} | options)
        )


LATER = """
import sys
import headwise
assert not {"torch", "transformers"} & sys.modules.keys()
import headwise.hub
assert "transformers" not in sys.modules
from transformers import AttentionInterface, AttentionMaskInterface
from headwise.hub import transformers_backend as registered
assert AttentionInterface()["headwise"] is registered.attention_forward
assert AttentionMaskInterface()["headwise"] is registered.make_mask
hooks = [one.module for one in sys.meta_path if isinstance(one, registered.ImportHook)]
assert registered.MODELS_MODULE not in hooks
"""


@pytest.mark.slow  # imports transformers in a process of its own
def test_registration_waits_for_the_import_of_transformers():
    assert subprocess.run([sys.executable, "-c", LATER], check=False).returncode == 0


def test_registration_waits_until_the_import_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of a package that stands in for transformers, whose first import fails."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").touch()
    models = tmp_path / "theirs" / "models_of_theirs.py"
    models.write_text("raise ImportError('something is missing')")
    done: list[int] = []
    monkeypatch.syspath_prepend(tmp_path)
    hook = "theirs.models_of_theirs", lambda: done.append(len(done))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the second text is as old as the first
    for _ in range(2):
        transformers_backend.register_after_import(*hook)
    hooks = [one for one in sys.meta_path if isinstance(one, transformers_backend.ImportHook)]
    assert [one.module for one in hooks].count("theirs.models_of_theirs") == 1
    with pytest.raises(ImportError, match="missing"):
        import_module("theirs.models_of_theirs")
    assert done == []
    models.write_text("value = 3")
    assert import_module("theirs.models_of_theirs").value == 3
    assert done == [0]
    transformers_backend.register_after_import(*hook)
    assert done == [0, 1]
    hooks = [one for one in sys.meta_path if isinstance(one, transformers_backend.ImportHook)]
    assert "theirs.models_of_theirs" not in [one.module for one in hooks]


@pytest.mark.parametrize(
    ("version", "registers"),
    [("5.2.9", False), ("4.57.1", False), ("5.3.0", True), ("6.0.dev0", True)],
)
def test_transformers_before_5_3_is_left_alone(
    version: str, registers: bool, monkeypatch: pytest.MonkeyPatch
):
    interfaces = (transformers.AttentionInterface, transformers.AttentionMaskInterface)
    for one in interfaces:
        keep = {name: tensor for name, tensor in one._global_mapping.items() if name != "headwise"}
        monkeypatch.setattr(one, "_global_mapping", keep)
    # which may stand there anew
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    transformers_backend.register_backend()
    assert ["headwise" in one() for one in interfaces] == [registers, registers]


def test_a_model_without_the_attention_interface_equals_eager():
    """Their own functions are given the masks that were made under the name of ours."""
    config = transformers.BloomConfig(hidden_size=32, n_head=4, n_layer=2, vocab_size=WORDS)
    recorded = []
    for kind in ("eager", "headwise"):
        torch.manual_seed(0)
        model = transformers.BloomForCausalLM._from_config(config, attn_implementation=kind).eval()
        recorded.append(run_model(model, padded(ZOO["llama"].inputs(), "left")))
    assert torch.equal(*recorded)


# --- continuous batching --------------------------------------------------------------------------


def test_sites_say_that_keys_are_in_a_paged_cache():
    q = torch.zeros(1, 4, 3, 8)
    call = known_interfaces.inputs_of_call(
        "headwise", Layer(), (q, q, q, None), {"cache": object()}
    )
    assert "paged cache" in call.unsupported


# --- bfloat16 -------------------------------------------------------------------------------------

LOWEST_BF16 = torch.finfo(torch.bfloat16).min
ROWS, HEADS, GROUPS, DIM = 3, 6, 2, 16


def random_tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def truth(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, scale: float) -> Tensor:
    """What each head reads, in float64, its keys repeated."""
    each = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(each, 1) for t in (k, v))
    s = q.double() @ k.transpose(2, 3) * scale
    s = s if added is None else s + added.double()
    return (s.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(
    ("keys", "shown"), [(1, "all"), (7, "padded"), (130, "by head"), (7, "nothing")]
)
def test_one_bf16_query_is_near_float64(keys, shown):
    q = random_tensor(0, ROWS, HEADS, 1, DIM)
    k = random_tensor(1, ROWS, GROUPS, keys, DIM)
    v = random_tensor(2, ROWS, GROUPS, keys, DIM)
    added = None
    if shown == "padded":
        added = torch.zeros(ROWS, 1, 1, keys, dtype=torch.bfloat16)
        added[1, ..., : keys // 2] = LOWEST_BF16
    elif shown == "by head":
        added = random_tensor(3, 1, HEADS, 1, keys)
    elif shown == "nothing":
        added = torch.full((ROWS, 1, 1, keys), LOWEST_BF16)
    with torch.no_grad():
        o, w = transformers_backend.attention_forward(nn.Module(), q, k, v, added, scaling=0.3)
        expected = truth(q, k, v, added if shown != "nothing" else added * 0, 0.3)
        each = HEADS // GROUPS
        theirs = F.scaled_dot_product_attention(
            q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1), added, scale=0.3
        ).transpose(1, 2)
    assert w is None
    assert o.shape == (ROWS, 1, HEADS, DIM)
    off = float((o.double() - expected).abs().max())
    assert off <= 2 * float((theirs.double() - expected).abs().max()) + 2**-8


def test_no_key_is_repeated_and_no_fused_call_is_made(monkeypatch):
    """The fused call reads bfloat16 slowly where rows are few; with gradients it is made, for it
    keeps no scores.
    """
    calls: list[tuple[int, ...]] = []
    original = F.scaled_dot_product_attention

    def noting(q: Tensor, *rest, **how) -> Tensor:
        calls.append(tuple(q.shape))
        return original(q, *rest, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    q = random_tensor(0, ROWS, HEADS, 1, DIM)
    k = random_tensor(1, ROWS, GROUPS, 9, DIM)
    v = random_tensor(2, ROWS, GROUPS, 9, DIM)
    with torch.no_grad():
        transformers_backend.attention_forward(nn.Module(), q, k, v)
        transformers_backend.attention_forward(nn.Module(), q.float(), k.float(), v.float())
    transformers_backend.attention_forward(nn.Module(), q, k, v)
    assert calls == [(ROWS, GROUPS, HEADS // GROUPS, DIM)] * 2
