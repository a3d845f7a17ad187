"""Attribution of a score and of a value to earlier writers, against float64 renderings in plain
torch, and in a model in which the writers are known.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.hub.pretrained_models import copy_live_model
from headwise.observe.head_analysis.path_patching import estimate_effect
from headwise.observe.head_analysis.score_attribution import attribute_score, attribute_value
from support.plain_patching import CLEAN, DEPTH, LAYERS, SHAPES
from support.transformers_models import DIM, FALLBACK, HEADS, WIDE, ZOO

LAYER, HEAD, QUERY, KEY = 2, 3, 5, 2
TOKENS = (11, 4)


@functools.cache
def build(name: str, layers: int = LAYERS) -> Any:
    """A model in float64 whose norms and biases are random too."""
    entry = ZOO[name]
    key = DEPTH.get(name, "num_hidden_layers")
    model = entry._replace(keys={**entry.keys, key: layers}).build("sdpa")
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    return model.double()


def build_with(modifier: Any) -> Any:
    """A headwise model of two layers with a modifier in its attention."""
    attention = hw.design(model=WIDE, heads=HEADS, pattern="causal", modifiers=(modifier,))
    config = {"model_type": "llama", "hidden_size": WIDE, "num_attention_heads": HEADS}
    config |= {"num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 67}
    spec = hw.families.read_model_spec(config)
    stack = spec.stacks[0]
    blocks = [replace(one, attention=attention) for one in stack.layers]
    parts = {"embedding": stack.embedding, "norm": stack.norm}
    changed = type(stack).from_blocks(stack.name, stack.model, blocks, **parts)
    return hw.build(replace(spec, stacks=(changed,)), seed=0).eval()


# --- Plain renderings -----------------------------------------------------------------------------


class PlainGPT2:
    """Writers, norms and projections of GPT-2 of transformers, from its weights."""

    inner = "transformer"

    def __init__(self, model: Any) -> None:
        self.net = model.transformer
        self.layers = self.net.h
        self.final = self.net.ln_f
        self.groups = HEADS

    def embeddings(self, ids: Tensor) -> dict[str, Tensor]:
        places = torch.arange(ids.shape[1])
        return {
            "token embedding": self.net.wte.weight[ids[0]],
            "other embeddings": self.net.wpe.weight[places],
        }

    def write(self, layer: int, z: Tensor) -> tuple[list[Tensor], Tensor]:
        """What each head adds to the stream, and the bias."""
        out = self.layers[layer].attn.c_proj
        slices = [slice(head * DIM, (head + 1) * DIM) for head in range(HEADS)]
        return [z[:, one] @ out.weight[one] for one in slices], out.bias

    def norm(self, layer: int | None, term: Tensor, x: Tensor) -> Tensor:
        module = self.final if layer is None else self.layers[layer].ln_1
        variance = x.var(-1, correction=0, keepdim=True)
        centred = term - term.mean(-1, keepdim=True)
        return centred / (variance + module.eps).sqrt() * module.weight

    def bias(self, layer: int | None) -> Tensor:
        return self.final.bias if layer is None else self.layers[layer].ln_1.bias

    def project(self, layer: int, side: str, n: Tensor) -> Tensor:
        columns = "qkv".index(side) * WIDE + HEAD * DIM
        return n @ self.layers[layer].attn.c_attn.weight[:, columns : columns + DIM]

    def project_bias(self, layer: int, side: str) -> Tensor:
        columns = "qkv".index(side) * WIDE + HEAD * DIM
        return self.layers[layer].attn.c_attn.bias[columns : columns + DIM]

    def place(self, vectors: Tensor) -> Tensor:
        return vectors


class PlainLlama(PlainGPT2):
    """Llama of transformers: grouped heads, rotary positions and RMS norms."""

    def __init__(self, model: Any) -> None:
        self.net = model.model
        self.layers = self.net.layers
        self.final = self.net.norm
        self.groups = model.config.num_key_value_heads

    def embeddings(self, ids: Tensor) -> dict[str, Tensor]:
        return {"token embedding": self.net.embed_tokens.weight[ids[0]]}

    def write(self, layer: int, z: Tensor) -> tuple[list[Tensor], Tensor]:
        weight = self.layers[layer].self_attn.o_proj.weight.T
        slices = [slice(head * DIM, (head + 1) * DIM) for head in range(HEADS)]
        return [z[:, one] @ weight[one] for one in slices], torch.zeros(WIDE).double()

    def norm(self, layer: int | None, term: Tensor, x: Tensor) -> Tensor:
        module = self.final if layer is None else self.layers[layer].input_layernorm
        scale = (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()
        return term / scale * module.weight

    def bias(self, layer: int | None) -> Tensor:
        return torch.zeros(WIDE).double()

    def project(self, layer: int, side: str, n: Tensor) -> Tensor:
        head = HEAD if side == "q" else HEAD // (HEADS // self.groups)
        module = getattr(self.layers[layer].self_attn, f"{side}_proj")
        return n @ module.weight[head * DIM : (head + 1) * DIM].T

    def project_bias(self, layer: int, side: str) -> Tensor:
        return torch.zeros(DIM).double()

    def place(self, vectors: Tensor) -> Tensor:
        half = DIM // 2
        steps = torch.arange(half).double() / half
        angles = torch.arange(len(vectors))[:, None] * 10000.0**-steps
        first, second = vectors[:, :half], vectors[:, half:]
        rotated = (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        )
        return torch.cat(rotated, -1)


PLAIN = {"gpt2": PlainGPT2, "llama": PlainLlama}


class Recorded:
    """The terms of the residual stream before a layer, and what the run computes."""

    def __init__(self, name: str) -> None:
        self.model = build(name)
        self.plain = PLAIN[name](self.model)
        seen: dict[str, Tensor] = {}
        handles = []
        (head, _, mlp) = SHAPES[name]
        for layer in range(LAYERS):
            module = self.model.get_submodule(head.format(layer))
            handles.append(module.register_forward_pre_hook(self._keep_input(seen, f"z{layer}")))
            module = self.model.get_submodule(mlp.format(layer))
            handles.append(module.register_forward_hook(self._keep_output(seen, f"M{layer}")))
        module = self.plain.layers[LAYER]
        handles.append(module.register_forward_pre_hook(self._keep_input(seen, "x")))
        handles.append(self.plain.final.register_forward_pre_hook(self._keep_input(seen, "final")))
        with torch.no_grad():
            self.logits = self.model(input_ids=CLEAN).logits[0]
            for handle in handles:
                handle.remove()
            self.seen = seen
            self.terms = self.plain.embeddings(CLEAN)
            biases = torch.zeros(WIDE).double()
            for layer in range(LAYER):
                (written, bias) = self.plain.write(layer, seen[f"z{layer}"])
                for number, one in enumerate(written):
                    self.terms[f"L{layer}H{number}"] = one
                self.terms[f"M{layer}"] = seen[f"M{layer}"]
                biases = biases + bias
            self.terms["earlier biases"] = biases.expand(CLEAN.shape[1], -1)

    def _keep_input(self, seen: dict[str, Tensor], key: str) -> Any:
        return lambda _, args: seen.update({key: args[0][0]})

    def _keep_output(self, seen: dict[str, Tensor], key: str) -> Any:
        return lambda _, args, output: seen.update({key: output[0]})

    def vectors(self, side: str) -> dict[str, Tensor]:
        """Terms of q, k or v of the head, [tokens, width]."""
        plain = self.plain
        x = self.seen["x"]
        with torch.no_grad():
            parts = {
                name: plain.project(LAYER, side, plain.norm(LAYER, term, x))
                for name, term in self.terms.items()
            }
            bias = plain.project(LAYER, side, plain.bias(LAYER)) + plain.project_bias(LAYER, side)
            parts["own biases"] = bias.expand(len(x), -1)
            if side == "v":
                return parts
            return {name: plain.place(part) for name, part in parts.items()}


@pytest.mark.parametrize("baseline", ["zero", "mean"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_score_has_the_parts_of_a_plain_rendering(name, baseline):
    recorded = Recorded(name)
    q = {one: part[QUERY] for one, part in recorded.vectors("q").items()}
    k = {}
    for one, part in recorded.vectors("k").items():
        k[one] = part[KEY] - (part[: QUERY + 1].mean(0) if baseline == "mean" else 0)
    scale = DIM**-0.5
    whole_q = torch.stack([*q.values()]).sum(0)
    whole_k = torch.stack([*k.values()]).sum(0)
    score = float(whole_q @ whole_k * scale)
    expected = {
        "query": {one: float(part @ whole_k * scale) for one, part in q.items()},
        "key": {one: float(part @ whole_q * scale) for one, part in k.items()},
    }
    # the angles of rotary embeddings, and the norms of Llama of transformers, are in float32
    errors = {"gpt2": (1e-9, 1e-9), "llama": (3e-6, 1e-6)}[name]
    models = (recorded.model, copy_live_model(recorded.model))
    for model, error in zip(models, errors, strict=True):
        result = attribute_score(model, [(CLEAN, QUERY, KEY)], f"L{LAYER}H{HEAD}", baseline)
        largest = max(abs(one.value) for one in result.sides["key"].parts.values())
        assert result.total.value == pytest.approx(score, abs=error * largest)
        for side, parts in expected.items():
            actual = {name: one.value for name, one in result.sides[side].parts.items()}
            largest = max(map(abs, parts.values()))
            for one, part in parts.items():
                assert actual.get(one, 0) == pytest.approx(part, abs=error * largest)
            total = result.total.value
            assert sum(actual.values()) == pytest.approx(total, abs=1e-9 * largest)
        for pair in result.pairs:
            product = float(q[pair.query] @ k[pair.key] * scale)
            assert pair.effect.value == pytest.approx(product, rel=1e-5)
        sizes = sorted(abs(float(a @ b)) * scale for a in q.values() for b in k.values())
        assert abs(result.pairs[0].effect.value) == pytest.approx(sizes[-1], rel=1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_a_value_has_the_parts_of_a_plain_rendering(name):
    recorded = Recorded(name)
    plain = recorded.plain
    q, k, v = (recorded.vectors(side) for side in "qkv")
    whole = [torch.stack([*parts.values()]).sum(0) for parts in (q, k)]
    scores = whole[0][QUERY] @ whole[1][: QUERY + 1].T * DIM**-0.5
    weight = scores.softmax(-1)[KEY]
    head = recorded.model.get_output_embeddings().weight
    readout = head[TOKENS[0]] - head[TOKENS[1]]
    expected = {}
    with torch.no_grad():
        for one, part in v.items():
            z = torch.zeros(1, WIDE).double()
            z[0, HEAD * DIM : (HEAD + 1) * DIM] = weight * part[KEY]
            (written, _) = plain.write(LAYER, z)
            normed = plain.norm(None, written[HEAD], recorded.seen["final"][QUERY])
            expected[one] = float(normed[0] @ readout)
    result = attribute_value(recorded.model, [(CLEAN, QUERY, KEY)], f"L{LAYER}H{HEAD}", TOKENS)
    actual = {name: one.value for name, one in result.sides["value"].parts.items()}
    for one, part in expected.items():
        assert actual.get(one, 0) == pytest.approx(part, rel=1e-5, abs=1e-7)
    assert result.total.value == pytest.approx(sum(expected.values()), rel=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_values_of_all_keys_are_the_share_of_the_head(name):
    model = build(name)
    found = hw.attribute_logit(model, CLEAN, position=QUERY, token=TOKENS[0], baseline=TOKENS[1])
    (share,) = [one for one in found.heads if (one.site[8], one.head) == (str(LAYER), HEAD)]
    places = [(CLEAN, QUERY, key) for key in range(QUERY + 1)]
    results = [attribute_value(model, [one], f"L{LAYER}H{HEAD}", TOKENS) for one in places]
    assert sum(one.total.value for one in results) == pytest.approx(share.value, rel=1e-6)
    for one in results:
        assert one.sides["value"].all_keys is not None
        assert one.sides["value"].all_keys.value == pytest.approx(share.value, rel=1e-6)


@pytest.mark.parametrize(
    "modifier",
    [hw.parts.HeadGate(), hw.parts.OutputGate(), hw.parts.HeadNorm()],
    ids=lambda one: type(one).__name__,
)
def test_values_pass_the_gates_and_norms_of_head_outputs(modifier):
    net = build_with(modifier)
    found = hw.attribute_logit(net, CLEAN, position=QUERY, token=TOKENS[0], baseline=TOKENS[1])
    (share,) = [one for one in found.heads if (one.site[8], one.head) == ("1", 2)]
    results = [
        attribute_value(net, [(CLEAN, QUERY, key)], "L1H2", TOKENS) for key in range(QUERY + 1)
    ]
    assert sum(one.total.value for one in results) == pytest.approx(share.value, rel=1e-4)
    all_keys = results[0].sides["value"].all_keys
    assert all_keys is not None
    assert all_keys.value == pytest.approx(share.value, rel=1e-4)


def test_values_before_a_soft_cap_of_the_logits_are_refused():
    config = {**ZOO["gemma2"].keys, "attn_logit_softcapping": None}
    model = ZOO["gemma2"]._replace(keys=config).build("eager")  # caps its logits at 30
    for one in (model, copy_live_model(model)):
        with pytest.raises(ValueError, match="tanh follows the residual stream"):
            attribute_value(one, [(CLEAN, QUERY, KEY)], "L1H2", TOKENS)


# --- Other families -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["qwen3", "mistral", "gemma2", "gemma3", "gpt-oss", "olmo2", "phi3", "llama"]
)
def test_scales_of_all_norms_are_held(name):
    """In models without biases the writers alone sum to the score, QK-norm and norms of outputs
    included: were a norm not held, its biases would be what is left.
    """
    model = ZOO[name].build("eager" if name in ("gemma2", "gpt-oss") else "sdpa")
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if re.search(r"attn\..*bias$", path):  # of the projections of gpt-oss
                parameter.zero_()
    result = attribute_score(model, [(CLEAN, 6, 5)], "L1H2")
    for side in ("query", "key"):
        parts = {name: one.value for name, one in result.sides[side].parts.items()}
        largest = max(map(abs, parts.values()))
        biases = sum(parts.pop(one, 0.0) for one in ("earlier biases", "own biases"))
        assert abs(biases) < 1e-5 * largest
        assert sum(parts.values()) == pytest.approx(result.total.value, abs=1e-5 * largest)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_scores_without_a_causal_mask_have_parts(name):
    """In post-norm layers of BERT, too, and for the patches of an image."""
    entry = ZOO[name]
    model = entry.build("sdpa")
    inputs = {one: values[:1] for one, values in entry.inputs().items()}
    result = attribute_score(model, [(inputs, 2, 5)], "L1H2")
    for side in result.sides.values():
        assert {"M0", "L0H1", "token embedding", "other embeddings"} <= set(side.parts)
    weights = hw.compute_attention_maps(model, inputs).weights(hw.sites(model)[1].name)[2, 2]
    other = attribute_score(model, [(inputs, 2, 4)], "L1H2")
    difference = float((weights[5] / weights[4]).log())
    assert result.total.value - other.total.value == pytest.approx(difference, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_parts_in_float32_are_those_in_float64(name):
    model = copy_live_model(build(name))
    place = (CLEAN, QUERY, KEY)
    expected = attribute_score(model, [place], f"L{LAYER}H{HEAD}", "mean")
    actual = attribute_score(model.float(), [place], f"L{LAYER}H{HEAD}", "mean")
    for side, of_side in expected.sides.items():
        parts = actual.sides[side].parts
        largest = max(abs(one.value) for one in of_side.parts.values())
        for one, part in of_side.parts.items():
            value = parts[one].value if one in parts else 0.0
            assert value == pytest.approx(part.value, abs=1e-5 * largest)


def test_a_score_in_post_norm_layers_has_the_parts_of_a_plain_rendering():
    """BERT: the terms of writers pass both norms of the first layer with held scales."""
    model = build("bert", 2)
    (first, second) = model.encoder.layer
    norms = (first.attention.output.LayerNorm, first.output.LayerNorm)
    inputs: dict[Any, Tensor] = {}
    watched = [model.embeddings.LayerNorm, *norms, first.attention.output.dense]
    handles = [
        one.register_forward_pre_hook(lambda module, args: inputs.update({module: args[0][0]}))
        for one in watched
    ]
    mlp: list[Tensor] = []
    dense = first.output.dense
    handles.append(dense.register_forward_hook(lambda _, args, output: mlp.append(output[0])))
    with torch.no_grad():
        model(input_ids=CLEAN)
        for handle in handles:
            handle.remove()

        def norm(module: Any, term: Tensor) -> Tensor:
            variance = inputs[module].var(-1, correction=0, keepdim=True)
            centred = term - term.mean(-1, keepdim=True)
            return centred / (variance + module.eps).sqrt() * module.weight

        table = model.embeddings.word_embeddings.weight[CLEAN[0]]
        others = inputs[watched[0]] - table
        out = first.attention.output.dense
        written = {
            "token embedding": norm(watched[0], table),
            "other embeddings": norm(watched[0], others) + watched[0].bias,
        }
        for head in range(HEADS):
            columns = slice(head * DIM, (head + 1) * DIM)
            written[f"L0H{head}"] = inputs[out][:, columns] @ out.weight[:, columns].T
        terms = {name: norm(norms[1], norm(norms[0], one)) for name, one in written.items()}
        terms["M0"] = norm(norms[1], mlp[0])
        biases = norm(norms[0], out.bias.expand(7, -1)) + norms[0].bias
        terms["earlier biases"] = norm(norms[1], biases) + norms[1].bias
        rows = slice(HEAD * DIM, (HEAD + 1) * DIM)
        attention = second.attention.self
        q, k = (
            {name: (term @ one.weight[rows].T) for name, term in terms.items()}
            for one in (attention.query, attention.key)
        )
        q["own biases"] = attention.query.bias[rows].expand(7, -1)
        k["own biases"] = attention.key.bias[rows].expand(7, -1)
        whole = torch.stack([*q.values()]).sum(0)[QUERY] * DIM**-0.5
        expected = {name: float(part[KEY] @ whole) for name, part in k.items()}
    parts = attribute_score(model, [(CLEAN, QUERY, KEY)], f"L1H{HEAD}").sides["key"].parts
    assert {name: one.value for name, one in parts.items()} == pytest.approx(expected, rel=1e-6)


def test_rounding_is_no_row_and_in_16_bits_a_note():
    model: Any = ZOO["llama"].build()
    text = str(attribute_score(model, [(CLEAN, QUERY, KEY)], "L1H1"))
    assert "biases" not in text
    text = str(attribute_score(model.bfloat16(), [(CLEAN, QUERY, KEY)], "L1H1"))
    assert "biases include the rounding of bfloat16" in text


def test_the_additive_bias_of_a_score_is_a_part():
    """ALiBi in a headwise model: the parts sum to the score that softmax reads."""
    spec = hw.families.read_model_spec(
        {"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 32, "vocab_size": 67}
    )
    net = hw.build(spec, seed=0).eval().double()
    score = attribute_score(net, [(CLEAN, 6, 2)], "L1H1")
    other = attribute_score(net, [(CLEAN, 6, 5)], "L1H1")
    weights = hw.compute_attention_maps(net, CLEAN).weights("decoder.1.attention")[1, 6]
    difference = float((weights[2] / weights[5]).log())
    assert score.total.value - other.total.value == pytest.approx(difference, rel=1e-5)
    for side in ("query", "key"):
        parts = {name: one.value for name, one in score.sides[side].parts.items()}
        assert parts["score bias"] != 0
        assert sum(parts.values()) == pytest.approx(score.total.value, rel=1e-9)


def test_learned_biases_of_a_score_are_a_part():
    transformers = pytest.importorskip("transformers")
    keys = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 48}
    config = transformers.T5Config(**keys, vocab_size=67)
    model = transformers.T5EncoderModel(config).eval()
    model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data.normal_()
    bias = model.encoder.block[0].layer[0].SelfAttention.compute_bias(7, 7)[0, 0, 6, 2].detach()
    result = attribute_score(model, [(CLEAN, 6, 2)], "L1H0")
    parts = result.sides["key"].parts
    assert parts["score bias"].value == pytest.approx(float(bias), rel=1e-6)
    assert sum(one.value for one in parts.values()) == pytest.approx(result.total.value, rel=1e-6)


def test_biases_that_depend_on_the_query_are_refused():
    with pytest.raises(ValueError, match="adds a bias to it that depends on the text"):
        attribute_score(build_with(hw.parts.Shaw(4)), [(CLEAN, 6, 2)], "L1H1")
    result = attribute_score(build_with(hw.parts.T5Bias()), [(CLEAN, 6, 2)], "L1H1")
    assert result.sides["key"].parts["score bias"].value != 0


def test_attributions_run_in_inference_mode():
    model = ZOO["gpt2"].build()
    expected = attribute_score(model, [(CLEAN, 6, 2)], "L1H1")
    with torch.inference_mode():
        actual = attribute_score(model, [(CLEAN.clone(), 6, 2)], "L1H1")
    assert str(actual) == str(expected)
    with torch.inference_mode():
        model = ZOO["gpt2"].build()
    with pytest.raises(ValueError, match=r"has weights made in torch\.inference_mode"):
        attribute_score(model, [(CLEAN, 6, 2)], "L1H1")


def test_several_places_have_intervals_and_the_chance_of_other_heads():
    model = build("gpt2")
    places = [(CLEAN, -1, key) for key in (0, 2, 3, 4)]
    single = [attribute_score(model, [place], "L2H1").sides["key"].parts for place in places]
    result = attribute_score(model, places, "L2H1")
    values: dict[str, list[float]] = {name: [] for name in result.sides["key"].parts}
    for parts in single:
        for one, part in parts.items():
            values[one].append(part.value)
    others = np.array([values[f"L0H{head}"] for head in (0, 1, 3)]).mean(0)
    found = result.sides["key"].parts["L0H2"]
    assert found == pytest.approx(estimate_effect(np.array(values["L0H2"]), others))
    assert found.low < found.value < found.high
    text = str(result)
    assert "4 places" in text
    assert max(map(len, text.splitlines())) <= 80


# --- Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "head", "words"),
    [
        ((CLEAN, 7, 2), "L1H0", r"the text has 7 tokens and no query 7; give one in -7\.\.6"),
        ((CLEAN, 3, -8), "L1H0", "the text has 7 tokens and no key -8"),
        (
            (CLEAN, 2, 5),
            "L1H0",
            r"L1H0 at query 2 may not attend to key 5; give one of its keys, 0\.\.2",
        ),
        ((CLEAN, 2, 1), "L1H9", r"has no head 9; give heads in 0\.\.3"),
        ((CLEAN, 2, 1), "L7H0", r"has no layer L7; its layers are 0\.\.2"),
        ((CLEAN, 2, 1), "L1:0,1", "'L1:0,1' is 2 heads; give one"),
        ((CLEAN.expand(2, -1), 2, 1), "L1H0", "a place is in one text, got 2 rows"),
        ((CLEAN, 2), "L1H0", r"is no place; give \(text, query, key\)"),
        (("words of no model", 2, 1), "L1H0", "comes with no tokenizer"),
    ],
)
def test_places_and_heads_that_do_not_exist_are_refused(place, head, words):
    with pytest.raises(ValueError, match=words):
        attribute_score(build("gpt2"), [place], head)


def test_a_query_without_keys_is_refused():
    mask = torch.ones_like(CLEAN)
    mask[0, 0] = 0
    inputs = {"input_ids": CLEAN, "attention_mask": mask}
    with pytest.raises(ValueError, match="L1H0 at query 0 may not attend to any key; give a query"):
        attribute_score(ZOO["gpt2"].build(), [(inputs, 0, 0)], "L1H0")


def test_models_without_one_residual_stream_are_refused():
    with pytest.raises(ValueError, match="2 stacks of layers instead of one residual stream"):
        attribute_score(
            ZOO["t5"].build(), [({"input_ids": CLEAN, "decoder_input_ids": CLEAN}, 2, 1)], "D1H0"
        )
    with pytest.raises(ValueError, match=r"q of .* cannot be replaced"):
        attribute_score(FALLBACK["gptj"].build(), [(CLEAN, 2, 1)], "L1H0")
    with pytest.raises(ValueError, match="there is no place; give at least one"):
        attribute_score(build("gpt2"), [], "L1H0")
    with pytest.raises(ValueError, match="unknown baseline 'median'"):
        attribute_score(build("gpt2"), [(CLEAN, 2, 1)], "L1H0", "median")


def test_blocks_with_other_writers_are_refused():
    """The convolutions of LFM2 would be taken for biases; frozen MLPs on paths are refused too."""
    transformers = pytest.importorskip("transformers")
    kinds = ["conv", "full_attention"]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 67}
    config = transformers.Lfm2Config(
        **sizes, num_hidden_layers=2, num_attention_heads=4, layer_types=kinds
    )
    model = transformers.Lfm2ForCausalLM(config).eval()
    words = "headwise finds one MLP in model.layers.0 of Lfm2ForCausalLM, which also has weights"
    with pytest.raises(ValueError, match=words):
        attribute_score(model, [(CLEAN, 2, 1)], "decoder.1.attention:0")
    with pytest.raises(ValueError, match=words):
        hw.head_analysis.patch_paths(
            model, [(CLEAN, CLEAN)], "log_probability:3", [("embedding", "logits")], mlps="frozen"
        )


def test_a_norm_whose_scale_cannot_be_held_is_refused():
    class LlamaRMSNorm(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.square().mean(-1, keepdim=True) ** 0.5

    model: Any = ZOO["llama"].build()
    for layer in model.model.layers:
        layer.input_layernorm = layer.post_attention_layernorm = LlamaRMSNorm()
    model.model.norm = LlamaRMSNorm()
    with pytest.raises(ValueError, match="LlamaRMSNorm of LlamaForCausalLM computes its scale by"):
        attribute_score(model, [(CLEAN, 2, 1)], "L1H0")


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ((), r"got 0 tokens; give one, or two for the difference of their logits"),
        ((3, 67), r"^token 67 is out of range: the model has outputs for tokens 0\.\.66"),
        (5, r"tokens must be a list, got 5; give \[5\]"),
        (("a", "b"), "comes with no tokenizer"),
    ],
)
def test_tokens_that_do_not_exist_are_refused(tokens, words):
    with pytest.raises(ValueError, match=words):
        attribute_value(build("gpt2"), [(CLEAN, 2, 1)], "L1H0", tokens)
