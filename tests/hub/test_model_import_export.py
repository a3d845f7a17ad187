"""Folders of transformers: errors of one line, and no overwritten file."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

import headwise as hw
from headwise.attention.interfaces.core_types import AxisLayout
from headwise.models import model_spec as bp
from headwise.models.families import WEIGHT_NAMES, WRITERS, get_weight_names, write_config
from headwise.models.families.weight_names import CheckpointPlan, TensorLocation, make_pieces
from headwise.models.vocabulary import CharVocabulary
from support.tiny_configs import model_config

TOKENS, MODEL, HEADS, KV, HIDDEN, LAYERS = 11, 24, 6, 2, 13, 2
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": TOKENS,
    "hidden_size": MODEL,
}
LLAMA |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV}
LLAMA |= {"intermediate_size": HIDDEN, "rms_norm_eps": 1e-5}
GPT2 = model_config("gpt2", n_embd=15, n_head=3, n_layer=2, n_inner=13, vocab_size=TOKENS)
GPT2 |= {"n_positions": 7}
WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"


def built(config: dict[str, Any], **options: Any) -> hw.Transformer:
    """A model with numbers that matter."""
    net = hw.build(hw.families.read_model_spec(config | options), seed=0).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    return net


def written(folder: Path, config: dict[str, Any] = LLAMA, **options: Any) -> hw.Transformer:
    """A model and its folder."""
    net = built(config, **options)
    hw.export(net, folder)
    return net


def check_same(one: hw.Transformer, other: hw.Transformer) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def check_refused(words: str, load: Callable[[], object]) -> None:
    """One line that holds these words in this order, and ends with a remedy."""
    with pytest.raises(hw.SpecError) as caught:
        load()
    message, at = str(caught.value), 0
    assert "\n" not in message
    assert "; " in message, message
    for word in words.split(" .. "):
        assert word in message[at:], message
        at = message.index(word, at) + len(word)


# --- slots ----------------------------------------------------------------------------------------

SIZES = {"q": 2, "dim": 6, "model": 5, "rank": 3, "vdim": 4, "expert": 3}


def weight(layout: str, **sizes: int) -> bp.WeightSpec:
    return bp.WeightSpec("ours", AxisLayout.parse(layout), SIZES | sizes)


def test_a_location_in_a_fused_tensor_equals_slicing():
    """Each against plain numpy: an index, a half, every second row, one of two laid end to end."""
    fused = np.arange(5 * 36.0).reshape(5, 36)
    both = np.arange(2 * 10 * 3.0).reshape(20, 3)
    pairs = np.arange(12 * 5.0).reshape(12, 5)
    cases: list[tuple[str, TensorLocation, NDArray[Any], NDArray[Any]]] = [
        (
            "(q dim) model",
            TensorLocation("a", "model (qkv q dim)", {"qkv": 1}, {"qkv": 3}),
            fused,
            fused[:, 12:24].T,
        ),
        (
            "(q vdim) rank",
            TensorLocation("a", "(q [dim|vdim]) rank", {"dim|vdim": "vdim"}),
            both,
            np.r_[both[6:10], both[16:20]],
        ),
        ("model (q dim)", TensorLocation("a", "(q dim) model"), pairs, pairs.T),
        (
            "(q dim) model",
            TensorLocation(
                "a", "(q pair side) model", extra_axes={"side": 2}, own_layout="(q side pair) model"
            ),
            pairs,
            pairs[[0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]],
        ),
    ]
    for layout, slot, stored, expected in cases:
        own = weight(layout)
        (piece,) = make_pieces(slot, own, {})
        assert piece.shape == stored.shape
        ours = torch.zeros(own.shape, dtype=torch.float64)
        piece.own_view.view(ours).copy_(piece.file_view.view(torch.from_numpy(stored)))
        assert np.array_equal(ours.numpy(), expected), layout


def test_a_tensor_for_each_index_of_an_axis():
    own = weight("expert dim model")
    found = list(make_pieces(TensorLocation("{layer}.{expert}.w", "model dim"), own, {"layer": 7}))
    assert [piece.path for piece in found] == ["7.0.w", "7.1.w", "7.2.w"]
    ours = torch.arange(3 * 6 * 5.0).view(3, 6, 5)
    assert all(torch.equal(piece.own_view.view(ours), ours[n]) for n, piece in enumerate(found))
    assert all(piece.shape == (5, 6) for piece in found)


@pytest.mark.parametrize("family", sorted(set(hw.families.FAMILIES) & set(WEIGHT_NAMES)))
def test_every_family_that_is_described_is_read(family: str):
    """Every tensor of its usual model has a place; every number of a file is one of ours, and only
    one.
    """
    described = hw.families.read_model_spec({"model_type": family, "vocab_size": TOKENS} | FEW)
    names = WEIGHT_NAMES[family]
    plan = CheckpointPlan.from_spec(described, names, names.prefixes[0])
    for path, own in plan.pieces.items():
        stored = torch.empty(own[0].shape, device="meta")
        assert {piece.shape for piece in own} == {own[0].shape}, path
        assert sum(piece.file_view.view(stored).numel() for piece in own) == stored.numel(), path
    placed = {piece.name for own in plan.pieces.values() for piece in own}
    assert {w.name for w in described.weights() if w.trainable} <= placed


FEW = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 2
)
FEW |= {
    "n_routed_experts": 3,
    "n_group": 1,
    "topk_group": 1,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}


# --- folders of transformers ----------------------------------------------------------------------


def changed(
    folder: Path, change: Callable[[dict[str, Tensor]], object], name: str = WEIGHTS
) -> None:
    tensors = safetensors.torch.load_file(folder / name)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / name)


def change_config(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | keys))


def sharded(folder: Path) -> dict[str, str]:
    """The same weights in two files with an index, which is returned."""
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    where = {
        name: f"model-0000{n % 2 + 1}-of-00002.safetensors"
        for n, name in enumerate(sorted(tensors))
    }
    for file in set(where.values()):
        safetensors.torch.save_file(
            {name: tensors[name] for name in tensors if where[name] == file}, folder / file
        )
    (folder / WEIGHTS).unlink()
    indexed(folder, where)
    return where


def indexed(folder: Path, where: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


Q, UP = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"
HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: changed(f, lambda tensors: tensors.pop(Q)), f"{WEIGHTS}: {Q} is missing"),
    "extra": (
        lambda f: changed(f, lambda tensors: tensors.update(more=torch.ones(2))),
        "more is not a tensor of the described model",
    ),
    "shape": (
        lambda f: changed(f, lambda tensors: tensors.update({Q: tensors[Q][:-1]})),
        f"{Q} is [23, 24], .. requires [24, 24]",
    ),
    "transposed": (
        lambda f: changed(f, lambda tensors: tensors.update({UP: tensors[UP].T.contiguous()})),
        f"{UP} is [24, 13]",
    ),
    "mixed": (
        lambda f: changed(f, lambda tensors: tensors.update({Q: tensors[Q].half()})),
        "have the dtypes F16 and F32; save them",
    ),
    "whole": (
        lambda f: changed(f, lambda tensors: tensors.update({Q: tensors[Q].to(torch.int8)})),
        f"{Q} has dtype I8; quantised weights",
    ),
    "truncated": (lambda f: cut(f / WEIGHTS, -5), f"{WEIGHTS} is truncated or not safetensors"),
    "header": (lambda f: cut(f / WEIGHTS, 30), f"{WEIGHTS} is truncated or not safetensors"),
    "empty": (lambda f: cut(f / WEIGHTS, 0), f"{WEIGHTS} is truncated or not safetensors"),
    "gone": (
        lambda f: (f / WEIGHTS).unlink(),
        f"holds a {CONFIG} but neither {WEIGHTS} nor {INDEX}; give a folder with",
    ),
    "pickle": (
        lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"),
        "in pytorch_model.bin, a pickle, which can run code",
    ),
    "layers": (
        lambda f: change_config(f, num_hidden_layers=1),
        "model.layers.1. .. is not a tensor of the described model",
    ),
    "untied": (
        lambda f: change_config(f, tie_word_embeddings=True),
        "lm_head.weight differs from model.embed_tokens.weight, but config.json ties them",
    ),
    "family": (
        lambda f: change_config(f, model_type="lama", architectures=None),
        "model_type 'lama' is not known; did you mean",
    ),
    "bits": (
        lambda f: change_config(f, quantization_config={"bits": 4}),
        "stored in fewer bits .. 16 or 32 bits",
    ),
    "dynamic": (
        lambda f: change_config(f, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "rope_scaling: rope_type 'dynamic' rescales",
    ),
    "json": (lambda f: cut(f / CONFIG, 40), f"{CONFIG} is not JSON"),
    "ids": (
        lambda f: change_config(f, eos_token_id="2"),
        "eos_token_id = '2' is neither an id nor a list of ids; correct it",
    ),
    "generation": (
        lambda f: (f / "generation_config.json").write_text("["),
        "generation_config.json is not JSON",
    ),
    "tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        "tokenizer.json is not a tokenizer document",
    ),
    "words": (
        lambda f: (f / "tokenizer.json").write_text(words(12)),
        "knows 12 tokens, the model 11; give the tokenizer",
    ),
}


def cut(path: Path, size: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:size])


def words(count: int) -> str:
    return Tokenizer(WordLevel({f"w{n}": n for n in range(count)}, unk_token="w0")).to_str()


@pytest.mark.parametrize("what", HARM)
def test_a_harmed_folder_is_refused_in_one_line(what: str, tmp_path: Path):
    harm, message = HARM[what]
    written(tmp_path / "f")
    hw.load(tmp_path / "f")
    harm(tmp_path / "f")
    check_refused(message, lambda: hw.load(tmp_path / "f"))


SHARDS: dict[str, tuple[Callable[[Path, dict[str, str]], object], str]] = {
    "elsewhere": (
        lambda f, w: indexed(f, w | {Q: w[UP], UP: w[Q]}),
        " is not in model-00001-of-00002 .. belongs to other",
    ),
    "unnamed": (
        lambda f, w: indexed(f, {n: file for n, file in w.items() if n != Q}),
        f"contains {Q}, which the index assigns",
    ),
    "unheld": (lambda f, w: indexed(f, w | {"more": w[Q]}), "more is not in model-0000"),
    "outside": (
        lambda f, w: indexed(f, w | {Q: "../other.safetensors"}),
        "names '../other.safetensors'; shards must be",
    ),
    "pickle": (
        lambda f, w: indexed(f, w | {Q: "pytorch_model.bin"}),
        "names 'pytorch_model.bin'; shards must be",
    ),
    "gone": (lambda f, w: (f / w[Q]).unlink(), "-of-00002.safetensors is missing; copy"),
    "truncated": (
        lambda f, w: cut(f / w[Q], -9),
        "-of-00002.safetensors is truncated or not safetensors",
    ),
    "none": (
        lambda f, w: (f / INDEX).write_text("{}"),
        "is not an index of shards; it must contain weight_map",
    ),
    "list": (lambda f, w: indexed(f, list(w)), "is not an index of shards"),
    "json": (lambda f, w: (f / INDEX).write_text("{"), f"{INDEX} is not JSON"),
}


@pytest.mark.parametrize("what", SHARDS)
def test_a_wrong_index_is_refused_in_one_line(what: str, tmp_path: Path):
    harm, result = SHARDS[what]
    net = written(tmp_path / "f")
    where = sharded(tmp_path / "f")
    check_same(hw.load(tmp_path / "f"), net)
    if Q in where and where[Q] == where[UP]:
        where[UP], where["model.norm.weight"] = where["model.norm.weight"], where[UP]
    harm(tmp_path / "f", where)
    check_refused(result, lambda: hw.load(tmp_path / "f"))


def test_a_tied_head_may_be_there_or_not(tmp_path: Path):
    net = written(tmp_path / "f", tie_word_embeddings=True)
    check_same(hw.load(tmp_path / "f"), net)
    changed(
        tmp_path / "f",
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    check_same(hw.load(tmp_path / "f"), net)
    # kept under its second name alone
    changed(tmp_path / "f", lambda tensors: tensors.pop("model.embed_tokens.weight"))
    check_same(hw.load(tmp_path / "f"), net)
    changed(tmp_path / "f", lambda tensors: tensors.pop("lm_head.weight"))
    check_refused("model.embed_tokens.weight is missing", lambda: hw.load(tmp_path / "f"))


def test_a_tokenizer_without_an_unknown_token_is_read(tmp_path: Path):
    """It has nothing to say of words it does not know."""
    net = built(LLAMA)
    net.usage = bp.ProcessorSpec(prefix_ids=(2,), tokenizer=CharVocabulary("0123456789\n").document)
    hw.export(net, tmp_path / "f")
    usage = hw.load(tmp_path / "f").usage
    assert (usage.prefix_ids, usage.suffix_ids) == ((2,), ())
    assert Tokenizer.from_str(usage.tokenizer or "").encode("90").ids == [2, 10, 1]


def test_families_without_a_table_are_refused_by_name():
    check_refused(
        "cannot load weights of 'falcon'; use one of bart, bert, .. qwen3, .. vit, xlm-roberta",
        lambda: get_weight_names("falcon"),
    )


def test_names_of_other_times_are_read(tmp_path: Path):
    """Masks that old GPT-2 files hold, names without the trunk, gamma and beta
    of old BERT files.
    """
    net = written(tmp_path / "f", GPT2)

    def older(options: dict[str, Tensor]) -> None:
        bare = {name.removeprefix("transformer."): options.pop(name) for name in list(options)}
        options |= bare | {f"h.{n}.attn.bias": torch.ones(1, 1, 7, 7) for n in range(2)}

    changed(tmp_path / "f", older)
    check_same(hw.load(tmp_path / "f"), net)
    bert = WEIGHT_NAMES["bert"]
    assert (
        bert.canonical_name("bert.embeddings.LayerNorm.gamma") == "bert.embeddings.LayerNorm.weight"
    )
    assert (
        bert.canonical_name("bert.embeddings.LayerNorm.weight")
        == "bert.embeddings.LayerNorm.weight"
    )


def test_code_that_came_along_is_never_run(tmp_path: Path):
    """A config that names code, code beside it, and a pickle that would leave a trace."""
    net = written(tmp_path / "f")
    trace = tmp_path / "trace"
    change_config(
        tmp_path / "f", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    )
    (tmp_path / "f" / "evil.py").write_text(f"open({str(trace)!r}, 'w')")

    class Trace:
        def __reduce__(self) -> Any:
            return open, (str(trace), "w")

    evil = pickle.dumps({"weight": Trace()}, protocol=2)
    (tmp_path / "f" / "pytorch_model.bin").write_bytes(evil)
    check_same(hw.load(tmp_path / "f"), net)
    check_refused(
        "is a file, not a model folder", lambda: hw.load(tmp_path / "f" / "pytorch_model.bin")
    )
    (tmp_path / "f" / WEIGHTS).unlink()
    check_refused("a pickle, which can run code", lambda: hw.load(tmp_path / "f"))
    assert not trace.exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nowhere", "there is no folder or file"),
        ("empty", "holds neither headwise.toml nor config.json; give a folder that hw.save or"),
        ("old", "contains model.pt, a pickle, which can run code when it is loaded; give a folder"),
        ("file.txt", "is a file, not a model folder; give the folder of the model"),
        ("model.safetensors", "is a file, not a model folder; give the folder of the model"),
    ],
)
def test_folders_without_a_model_are_refused(name: str, expected: str, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model.pt").write_text("x")
    for file in ("file.txt", WEIGHTS):
        (tmp_path / file).write_text("abc")
    check_refused(expected, lambda: hw.load(tmp_path / name))


# --- export ---------------------------------------------------------------------------------------


def described(spec: hw.AttentionSpec, **options: Any) -> bp.ModelSpec:
    """A Llama but for what is said."""
    feed = options.pop("feed", bp.FeedForwardSpec(HIDDEN, "silu", "gated"))
    block = bp.BlockSpec(spec, feed=feed, norm=bp.NormSpec("rms", 1e-5), **options)
    stack = bp.StackSpec.from_blocks(
        "decoder",
        MODEL,
        [block] * LAYERS,
        embedding=bp.EmbeddingSpec(TOKENS),
        norm=bp.NormSpec("rms", 1e-5),
    )
    return bp.ModelSpec("mine", "decoder", (stack,), (bp.OutputHeadSpec("tokens", TOKENS),))


def attention(*modifiers: Any, **options: Any) -> hw.AttentionSpec:
    turns = options.pop("turns", (hw.parts.Rotary(),))
    return hw.design(
        **({"model": MODEL, "heads": HEADS, "kv": KV, "pattern": "causal()"} | options),
        modifiers=(*turns, *modifiers),
    )


UNSAID: dict[str, tuple[bp.ModelSpec, str]] = {
    "window": (
        described(attention(pattern="window(5) | first(2)")),
        "layers.0.attention.pattern = .. 'causal()', mine 'win",
    ),
    "modifier": (
        described(attention(hw.parts.HeadGate())),
        "the number of stacks.0.layers.0.attention.modifiers = 1, mine 2",
    ),
    "pairs": (
        described(attention(turns=(hw.parts.Rotary(pairs="interleaved"),))),
        "modifiers.0.pairs = the default, mine 'interl",
    ),
    "part": (
        described(attention(turns=(hw.parts.Rotary(dims=2),))),
        "modifiers.0.dims = the default, mine 2",
    ),
    "bent": (
        described(attention(turns=(hw.parts.Rotary(scaling=hw.parts.NTKScaling()),))),
        "modifiers.0.scaling = the default, mine",
    ),
    "no turn": (described(attention(turns=())), "modifiers"),
    "bias": (described(attention(bias="v")), "project.bias"),
    "scale": (
        described(attention(similarity=hw.parts.DotProduct(scale=0.3))),
        "similarity.scale = the default, mine 0.3",
    ),
    "sink": (described(attention(normaliser=hw.parts.SinkSoftmax())), "normaliser"),
    "placement": (
        described(attention(), placement="sandwich"),
        "placement = the default, mine 'sandwich'",
    ),
    "experts": (
        described(attention(), feed=bp.ExpertsSpec(bp.FeedForwardSpec(5), 3, 1)),
        "has one feed-forward in every layer, and mine",
    ),
    "no feed": (
        described(attention(), feed=None),
        "has one feed-forward in every layer, and mine has not",
    ),
    "encoder": (
        hw.families.read_model_spec({"model_type": "bert", "num_hidden_layers": 1}),
        "kind = 'decoder', bert 'encoder'",
    ),
    "classes": (
        hw.families.read_model_spec(LLAMA | {"architectures": ["LlamaForSequenceClassification"]}),
        "heads.0.name = 'tokens'",
    ),
}


@pytest.mark.parametrize("what", UNSAID)
def test_unwritable_specs_are_refused_with_the_first_difference(what: str, tmp_path: Path):
    model, message = UNSAID[what]
    check_refused(message, lambda: hw.export(hw.build(model), tmp_path / "f"))
    assert not any(tmp_path.iterdir())
    check_refused("has", lambda: hw.export(hw.build(model), tmp_path / "f", form="llama"))


@pytest.mark.parametrize("form", list(WRITERS))
def test_a_config_round_trips(form: str):
    for more in (
        {},
        {"tie_word_embeddings": True},
        {"hidden_act": "gelu_new", "activation_function": "relu"},
    ):
        model = hw.families.read_model_spec(
            (GPT2 if form == "gpt2" else LLAMA | {"architectures": None})
            | {"model_type": form}
            | more
        )
        again = hw.families.read_model_spec(write_config(model, form))
        assert (again.stacks, again.heads) == (model.stacks, model.heads)


def test_invalid_vocabulary_sizes_and_lengths_are_refused(tmp_path: Path):
    check_refused(
        "cannot write configs of 'lama'; did you mean 'llama'?",
        lambda: write_config(built(LLAMA).spec, "lama"),
    )
    for length in (0, True, 7.5):
        message = f"max_length={length!r} is not a number of positions; give an integer"
        check_refused(
            message,
            lambda length=length: hw.export(built(LLAMA), tmp_path / "f", max_length=length),
        )
    message = "cannot set max_length=9: the model has 7 learned positions; leave max_length out"
    check_refused(message, lambda: hw.export(built(GPT2), tmp_path / "f", max_length=9))
    net = built(LLAMA)
    net.decoder.norm.double()
    check_refused(
        "parameters have the dtypes torch.float32 and torch.float64; convert",
        lambda: hw.export(net, tmp_path / "f"),
    )
    with pytest.raises(ValueError, match=r"net is of type Linear; give what hw\.build made"):
        hw.export(torch.nn.Linear(1, 1), tmp_path)  # pyright: ignore[reportArgumentType] - that is the test
    assert not any(tmp_path.iterdir())


def test_existing_files_are_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    net = built(LLAMA)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    check_refused(
        "full: it contains notes.txt .. ; give the path of a new folder",
        lambda: hw.export(net, tmp_path / "full"),
    )
    check_refused(
        "file: it is a file; give the path of a new folder",
        lambda: hw.export(net, tmp_path / "file"),
    )
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    hw.export(net, tmp_path / "empty")
    check_same(hw.load(tmp_path / "empty"), net)
    monkeypatch.chdir(tmp_path / "empty")
    check_refused("it exists; add overwrite=True to replace it", lambda: hw.export(net, "."))
    monkeypatch.chdir(tmp_path)
    hw.export(net, "empty", overwrite=True)
    check_same(hw.load(tmp_path / "empty"), net)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace", "rename", "mkdir"])
def test_a_disk_that_fails_leaves_no_half_folder(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    net = built(LLAMA)
    with monkeypatch.context() as patch:

        def failing(*args: Any, **kwargs: Any) -> Any:
            patch.undo()
            raise OSError(28, "No space left on device")

        patch.setattr(os, call, failing)
        with pytest.raises(OSError, match=r"f.* cannot be written: .*No space left") as caught:
            hw.export(net, tmp_path / "f")
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())
    hw.export(net, tmp_path / "f")
    check_same(hw.load(tmp_path / "f"), net)
