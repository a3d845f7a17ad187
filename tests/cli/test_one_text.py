"""Views of one text, and comparisons, against numpy on the tensors of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headwise as hw
from headwise import cli
from headwise.models.vocabulary import ByteVocabulary
from headwise.observe.bundled_sample import MODEL
from headwise.observe.traces import map_queries_and_keys

TEXT = "a cat sat"
HEADS, DIM, LAYERS = 3, 4, 2


def make_folder(folder: Path, seed: int) -> Any:
    """A GPT-2 with uneven attention over bytes, in float64, as a folder."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_embd=HEADS * DIM,
        n_head=HEADS,
        n_layer=LAYERS,
        vocab_size=256,
        n_positions=32,
        attn_implementation="eager",
    )
    model = transformers.GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1 if parameter.ndim == 1 else 0))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(ByteVocabulary().document)
    return model


class Rendering:
    """Attention weights [layers, heads, queries, keys], value outputs [layers, heads, keys, width],
    and states.
    """

    def __init__(self, model: Any, text: str) -> None:
        self.model, ids = model, torch.tensor([list(text.encode())])
        inputs: list[np.ndarray] = []
        handles = [
            block.ln_1.register_forward_hook(lambda _, __, out: inputs.append(out[0].numpy()))
            for block in model.transformer.h
        ]
        last: list[np.ndarray] = []
        handles.append(
            model.transformer.ln_f.register_forward_pre_hook(
                lambda _, args: last.append(args[0][0].numpy())
            )
        )
        with torch.no_grad():
            out = model(ids, output_attentions=True)
        for handle in handles:
            handle.remove()
        self.weights = np.stack([one[0].numpy() for one in out.attentions])
        self.logits, self.final = out.logits[0].numpy(), last[0]
        self.qkv = [
            self._project(block, x) for block, x in zip(model.transformer.h, inputs, strict=True)
        ]
        maps = [
            block.attn.c_proj.weight.detach().numpy().reshape(HEADS, DIM, -1)
            for block in model.transformer.h
        ]
        self.outputs = np.stack(
            [np.einsum("shd,hdm->hsm", qkv[2], m) for qkv, m in zip(self.qkv, maps, strict=True)]
        )

    @staticmethod
    def _project(block: Any, x: np.ndarray) -> np.ndarray:
        joined = (
            x @ block.attn.c_attn.weight.detach().numpy() + block.attn.c_attn.bias.detach().numpy()
        )
        return joined.reshape(len(x), 3, HEADS, DIM).transpose(1, 0, 2, 3)

    @property
    def norms(self) -> np.ndarray:
        return self.weights * np.linalg.norm(self.outputs, axis=-1)[:, :, None, :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("one-text")
    for seed, name in enumerate(("model", "other")):
        make_folder(base / name, seed)
    return base


def load(folder: Path, name: str = "model") -> Any:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder / name, attn_implementation="eager"
    )
    return loaded.double().eval()


def show(capsys: pytest.CaptureFixture[str], folder: Path, *options: str, text: str = TEXT) -> Any:
    assert cli.main(["heads", str(folder / "model"), "--text", text, "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


MATRICES = {
    "weights": ((), lambda one: one.weights.mean((0, 1))),
    "weights of a head": (("--head", "L1H2"), lambda one: one.weights[1, 2]),
    "norms": (("--show", "norms"), lambda one: one.norms.mean((0, 1))),
    "norms of a head": (("--show", "norms", "--head", "L0H1"), lambda one: one.norms[0, 1]),
    "rollout": (("--show", "rollout"), lambda one: rollout(one.weights)),
}


def rollout(weights: np.ndarray) -> np.ndarray:
    product = np.eye(weights.shape[-1])
    for layer in weights:
        product = (0.5 * np.eye(len(product)) + 0.5 * layer.mean(0)) @ product
    return product


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_are_those_of_numpy(capsys, folder: Path, name: str):
    options, render = MATRICES[name]
    found = show(capsys, folder, *options)
    np.testing.assert_allclose(
        found["values"], render(Rendering(load(folder), TEXT)), rtol=2e-5, atol=1e-7
    )
    assert found["queries"] == found["keys"] == list(TEXT)


def test_what_heads_add_to_a_difference_of_logits(capsys, folder: Path):
    argv = ("--show", "logits", "--position", "2", "--tokens")
    found = show(capsys, folder, *argv, "a,b")
    expected = hw.attribute_logit(load(folder), TEXT, position=2, token=97, baseline=98).data
    assert (found["token"], found["baseline"], found["position"]) == (97, 98, 2)
    assert found["logit"] == pytest.approx(expected["logit"], rel=1e-5)
    shares = {(share["site"], share["head"]): share["value"] for share in found["heads"]}
    for share in expected["heads"]:
        key = (share["site"], share["head"])
        assert shares[key] == pytest.approx(share["value"], rel=1e-4, abs=1e-7)
    command = ["heads", str(folder / "model"), "--text", TEXT, *argv, "a,b,c"]
    assert cli.main(command) == 2
    assert "--tokens a,b,c are 3 tokens; give one, or two" in capsys.readouterr().err


@pytest.mark.parametrize("position", [None, 2])
def test_what_heads_add_to_a_logit(capsys, folder: Path, position: int | None):
    """Through the final norm with the scale that it has for this text."""
    model = load(folder)
    if position is None:
        found = show(capsys, folder, "--show", "logits")
    else:
        found = hw.attribute_logit(model, TEXT, position=position, token=97).data
    one, place = Rendering(model, TEXT), len(TEXT) - 1 if position is None else position
    token = int(one.logits[place].argmax()) if position is None else 97
    assert (found["token"], found["position"], list(found["words"])) == (
        token,
        place,
        [chr(token)],
    )
    assert found["logit"] == pytest.approx(one.logits[place, token])
    gamma = model.transformer.ln_f.weight.detach().numpy()
    readout = model.lm_head.weight.detach().numpy()[token]
    deviation = np.sqrt(one.final[place].var() + model.transformer.ln_f.eps)
    added = {}
    for layer, head in np.ndindex(LAYERS, HEADS):
        written = one.weights[layer, head, place] @ one.outputs[layer, head]
        added[f"decoder.{layer}.attention", head] = (
            (written - written.mean()) / deviation * gamma @ readout
        )
    shares = {(share["site"], share["head"]): share["value"] for share in found["heads"]}
    assert shares == pytest.approx(added, rel=1e-4, abs=1e-6)
    assert found["rest"] == pytest.approx(
        one.logits[place, token] - sum(added.values()), rel=1e-4, abs=1e-5
    )


def test_queries_and_keys_on_a_plane(folder: Path):
    captured = hw.trace(load(folder), TEXT, max_new_tokens=0)
    found = map_queries_and_keys(captured, "decoder.1.attention", 2).data
    q, k, _ = Rendering(load(folder), TEXT).qkv[1][:, :, 2]
    q, k = ((x - x.mean(0)) / np.linalg.norm(x - x.mean(0), axis=1).mean() for x in (q, k))
    values, vectors = np.linalg.eigh(np.concatenate([q, k]).T @ np.concatenate([q, k]))
    plane = vectors[:, ::-1][:, :2]
    assert found["share"] == pytest.approx(values[::-1][:2].sum() / values.sum(), rel=1e-5)
    for name, points in (("queries", q @ plane), ("keys", k @ plane)):
        np.testing.assert_allclose(np.abs(found[name]), np.abs(points), rtol=1e-3, atol=1e-4)
    assert found["query_words"] == tuple(TEXT)


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    """Mean Jensen-Shannon divergence of rows, in nats."""
    middle = (p + q) / 2
    terms = [
        np.where(one > 0, one * np.log(np.where(one > 0, one, 1) / np.where(one > 0, middle, 1)), 0)
        for one in (p, q)
    ]
    return float((sum(terms) / 2).sum(-1).mean())


@pytest.mark.parametrize(("model", "text"), [("model", "a cot sat"), ("other", TEXT)])
def test_two_texts_and_two_checkpoints_are_compared(folder: Path, model: str, text: str):
    traces = [
        hw.trace(load(folder, name), words, max_new_tokens=0)
        for name, words in (("model", TEXT), (model, text))
    ]
    found = hw.compare_traces(*traces).data
    first, second = (
        Rendering(load(folder, one), words).weights
        for one, words in (("model", TEXT), (model, text))
    )
    assert found["aligned_tokens"] == {"text": len(TEXT)}
    assert len(found["heads"]) == LAYERS * HEADS
    for head in found["heads"]:
        place = int(head["site"].split(".")[1]), head["head"]
        assert head["divergence"] == pytest.approx(
            divergence(first[place], second[place]), rel=1e-3, abs=1e-6
        )
        assert head["largest"] == pytest.approx(
            np.abs(first[place] - second[place]).max(), rel=1e-4
        )


def test_a_table_lists_the_largest_keys_of_every_query(capsys, folder: Path):
    assert cli.main(["heads", str(folder / "model"), "--text", TEXT, "--head", "L1H2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "weights of decoder.1.attention head 2"
    weights = Rendering(load(folder), TEXT).weights[1, 2]
    for place, line in enumerate(lines[3:]):
        order = np.argsort(-weights[place])[: min(3, place + 1)]
        expected = "  ".join(f"{TEXT[key]!r} {key}: {weights[place, key]:.2f}" for key in order)
        assert line.split(f"{place}  ", 1)[1] == expected or min(weights[place][order]) < 0.01
    assert len(lines) == 3 + len(TEXT)


def test_an_encoder_decoder_needs_a_target(capsys, folder: Path, tmp_path: Path):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=256,
        d_model=12,
        d_kv=4,
        d_ff=14,
        num_layers=1,
        num_heads=3,
        decoder_start_token_id=0,
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(ByteVocabulary().document)
    assert cli.main(["heads", str(tmp_path), "--text", TEXT]) == 2
    assert (
        "is an encoder-decoder; add --target TEXT, which its decoder reads"
        in capsys.readouterr().err
    )
    assert (
        cli.main(
            ["heads", str(tmp_path), "--text", TEXT, "--target", "xyz", "--head", "X0H1", "--json"]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["queries"][1:], found["keys"]) == (list("xyz"), list(TEXT))
    np.testing.assert_allclose(np.sum(found["values"], -1), 1, rtol=1e-5)


def test_a_head_that_does_not_exist_is_refused(capsys, folder: Path):
    assert cli.main(["heads", str(folder / "model"), "--text", TEXT, "--head", "L1H3"]) == 2
    assert "decoder.1.attention has no head 3; give heads in 0..2" in capsys.readouterr().err


def test_python_takes_a_text_for_a_logit(folder: Path):
    model = load(folder)
    by_text, by_ids = (
        hw.attribute_logit(model, x) for x in (TEXT, torch.tensor([list(TEXT.encode())]))
    )
    assert by_text.heads == by_ids.heads
    assert by_text.token == by_ids.token
    assert by_text.words == (chr(by_text.token),)
    lines = str(by_text).splitlines()
    assert lines[0].startswith(
        f"logit of token {by_text.token} {chr(by_text.token)!r} at position {len(TEXT) - 1}"
    )
    assert len([line for line in lines if line.startswith("decoder.")]) == LAYERS * HEADS


def test_logits_of_an_encoder_decoder_are_refused_for_what_it_is(capsys):
    argv = ["heads", str(MODEL), "--text", "<zh>1 dollars", "--target", "1", "--show", "logits"]
    assert cli.main(argv) == 2
    assert "it has 2 stacks; give a model with one" in capsys.readouterr().err
