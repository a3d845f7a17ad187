"""Saved models: contents of the folder, loading, and no loss of an earlier model on failure."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import headwise as hw
from headwise import cli
from headwise.models import families, model_spec as bp
from headwise.models.model_spec.serialization import TOKENIZER_FILE, ModelManifest
from headwise.models.save_load import (
    CONFIG_FILE,
    MANIFEST_FILE,
    MODEL_CARD_FILE,
    WEIGHTS_FILE,
)

WORDS = 11


def described(words: int = WORDS, model: int = 12) -> bp.ModelSpec:
    spec = hw.design(model=model, heads=3, kv=1, pattern="causal()", modifiers=(hw.parts.Alibi(),))
    blocks = [
        bp.BlockSpec(spec, feed=bp.ExpertsSpec(bp.FeedForwardSpec(5), 3, 1, bias="constant"))
    ] * 2
    stack = bp.StackSpec.from_blocks(
        "decoder", model, blocks, embedding=bp.EmbeddingSpec(words), norm=bp.NormSpec("rms")
    )
    return bp.ModelSpec(
        "small", "decoder", (stack,), (bp.OutputHeadSpec("tokens", words, table="decoder"),)
    )


def words(count: int = WORDS) -> str:
    return Tokenizer(WordLevel({f"w{n}": n for n in range(count)}, unk_token="w0")).to_str()


def check_same(ours: hw.Transformer, theirs: hw.Transformer) -> None:
    one, two = ours.state_dict(), theirs.state_dict()
    assert list(one) == list(two)
    assert all(
        one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one
    )
    assert ours.spec == theirs.spec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model and its tokenizer."""
    place = tmp_path / "runs" / "one"
    hw.save(hw.build(described(), seed=0), place, tokenizer=words(), readme="## Training\n\nNone.")
    return place


# --- what transformers says about it --------------------------------------------------------------


REFUSED = [
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "LlamaConfig",
    "LlamaForCausalLM",
    "BertModel",
    "T5ForConditionalGeneration",
    "ViTModel",
    "CLIPModel",
]


@pytest.mark.parametrize("name", REFUSED)
def test_transformers_builds_no_random_model_from_the_folder(folder: Path, name: str):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    with pytest.raises(
        ValueError, match=r"holds a headwise model, .*; load it with headwise\.load\(folder\)"
    ):
        getattr(transformers, name).from_pretrained(folder, num_labels=3, dtype=torch.float16)
    hw.load(folder)


@pytest.mark.slow
def test_every_config_class_of_transformers_refuses_the_folder(folder: Path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import CONFIG_MAPPING

    accepted = []
    for name in CONFIG_MAPPING:
        try:
            CONFIG_MAPPING[name].from_pretrained(folder)
        except ImportError:  # it needs a package that is not installed
            continue
        except ValueError as error:
            accepted += (
                []
                if "headwise.load(folder)" in str(error) or "Unrecognized model type" in str(error)
                else [name]
            )
        else:
            accepted.append(name)
    assert not accepted


# --- what is written, and read back ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_saved_models_load_equal(tmp_path: Path, dtype: torch.dtype):
    net = hw.build(described(), seed=0).to(dtype)
    net.decoder.blocks[0].feed.router_bias.fill_(3.0)
    hw.save(net, tmp_path)
    again = hw.load(tmp_path, dropout=0.25)
    check_same(again, net)
    assert not any(module.training for module in again.modules())
    assert all(p.requires_grad and not p.is_meta for p in again.parameters())
    assert again.dropout == 0.25
    x = torch.randint(0, WORDS, (2, 5))
    assert torch.equal(again(x), net.eval()(x))
    assert again(x).sum().backward() is None
    assert hw.generation.greedy_decode(again, x, max_new_tokens=3) == hw.generation.greedy_decode(
        net, x, max_new_tokens=3
    )


def test_loading_does_not_import_the_compiler(folder: Path):
    """Which takes half a second, and some arithmetic on the meta device does it."""
    code = (
        f"import sys, headwise; headwise.load({str(folder)!r}); sys.exit('torch._dynamo' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_matches_its_manifest(folder: Path):
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [CONFIG_FILE, MANIFEST_FILE, MODEL_CARD_FILE, TOKENIZER_FILE, WEIGHTS_FILE]
    )
    page = (folder / MODEL_CARD_FILE).read_text()
    assert "# small" in page
    assert "2 layers of 12, 1,800 parameters in float32" in page
    assert "## Training\n\nNone." in page
    assert str(bp.ModelTable(described())) in page
    assert hw.load(folder).usage.tokenizer == words()
    assert families.read_model_spec(folder) == described()
    tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == described().shapes()


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path):
    for document, fact in (
        (words(13), "knows 13 tokens, the model 11"),
        ("{}", "not a tokenizer document"),
    ):
        with pytest.raises(hw.SpecError, match=fact) as caught:
            hw.save(hw.build(described()), tmp_path / "new", tokenizer=document)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_only_models_are_saved(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"net is of type Linear; give a Transformer as hw\.build returns it"
    ):
        hw.save(torch.nn.Linear(1, 1), tmp_path)  # pyright: ignore[reportArgumentType] - that is the test
    (tmp_path / "file").write_text("")
    with pytest.raises(hw.SpecError, match="it is a file; give the path of a new folder"):
        hw.save(hw.build(described()), tmp_path / "file")


def test_saving_again_takes_the_place_of_the_first(folder: Path):
    other = hw.build(described(13), seed=1)
    hw.save(other, folder)
    check_same(hw.load(folder), other)
    assert hw.load(folder).usage.tokenizer is None
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [CONFIG_FILE, MANIFEST_FILE, MODEL_CARD_FILE, WEIGHTS_FILE]
    )


# --- nothing is lost ------------------------------------------------------------------------------

CALLS = [
    (os, name) for name in ("open", "write", "fsync", "replace", "link", "unlink", "mkdir", "close")
]


class Kill(BaseException):
    """The end of a process, as far as a test in the same one can have it."""


def failing(patch: pytest.MonkeyPatch, at: int, error: BaseException) -> list[str]:
    """Let the call of this number to the system fail; the names of all calls so far."""
    done: list[str] = []

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing_call(*args: Any, **options: Any) -> Any:
            done.append(name)
            if len(done) == at:
                raise error
            return call(*args, **options)

        return failing_call

    for module, name in CALLS:
        patch.setattr(module, name, wrapped(name, getattr(module, name)))
    return done


def saved(net: hw.Transformer, folder: Path, at: int, error: BaseException) -> tuple[bool, int]:
    """Whether saving ended well although one call failed, and how many calls there were."""
    with pytest.MonkeyPatch.context() as patch:
        done = failing(patch, at, error)
        try:
            hw.save(net, folder, tokenizer=words(), readme="new")
        except (OSError, hw.SpecError, Kill):
            return False, len(done)
    return True, len(done)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), Kill()], ids=["full", "killed"]
)
def test_whatever_fails_a_whole_model_is_there(
    folder: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
):
    """Every call to the system fails once: what is loaded is the old model or the new one, and the
    next save works.
    """
    # counted all the same, and many times faster
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    begin, place = folder.with_name("begin"), folder.with_name("place")
    spec = hw.design(model=2, heads=1, pattern="causal()")
    stack = bp.StackSpec.from_blocks(
        "decoder", 2, [bp.BlockSpec(spec)], embedding=bp.EmbeddingSpec(WORDS)
    )
    old, new = (hw.build(bp.ModelSpec("tiny", "decoder", (stack,)), seed=seed) for seed in (0, 1))
    hw.save(old, begin, tokenizer=words())
    shutil.copytree(begin, folder, dirs_exist_ok=True)
    _, calls = saved(new, folder, 0, error)
    assert calls > 20
    outcomes = []
    for at in range(1, calls + 1):
        shutil.copytree(begin, place)
        well, _ = saved(new, place, at, error)
        outcomes.append(check_whole(place, old, new))
        assert outcomes[-1] == "new" or not well
        saved(new, place, at, error)  # once more in what the first failure left
        check_whole(place, old, new)
        hw.save(new, place, tokenizer=words())
        assert check_whole(place, old, new) == "new"
        assert sorted(path.name for path in place.iterdir() if path.suffix != ".tmp") == MODEL_FILES
        shutil.rmtree(place)
    assert set(outcomes) == {"old", "new"}


MODEL_FILES = sorted([CONFIG_FILE, MANIFEST_FILE, MODEL_CARD_FILE, TOKENIZER_FILE, WEIGHTS_FILE])


def check_whole(folder: Path, old: hw.Transformer, new: hw.Transformer) -> str:
    """Which of the two is there, and that it is all there."""
    found = hw.load(folder)
    fresh = torch.equal(found.decoder.embedding.tokens, new.decoder.embedding.tokens)
    check_same(found, new if fresh else old)
    assert hw.load(folder).usage.tokenizer == words()
    return "new" if fresh else "old"


# --- what is refused ------------------------------------------------------------------------------


def resaved(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Other tensors under a checksum that fits them."""
    import hashlib

    tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    change(tensors)
    data = safetensors.torch.save(tensors)
    (folder / WEIGHTS_FILE).write_bytes(data)
    result = ModelManifest.from_toml((folder / MANIFEST_FILE).read_text(), "")
    checksums = dict(result.checksums) | {WEIGHTS_FILE: hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST_FILE).write_text(str(result._replace(checksums=checksums)))


ROUTER = "decoder.1.feed.router"
WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "missing": (lambda tensors: tensors.pop(ROUTER), f"{ROUTER} is missing"),
    "strange": (
        lambda tensors: tensors.update(extra=torch.ones(2)),
        "extra is not a tensor of this model",
    ),
    "shape": (
        lambda tensors: tensors.update({ROUTER: torch.ones(2, 12)}),
        rf"{ROUTER} is \[2, 12\], expected \[3, 12\]",
    ),
    "whole": (
        lambda tensors: tensors.update({ROUTER: torch.ones(3, 12).long()}),
        f"{ROUTER} is torch.int64",
    ),
    "mixed": (
        lambda tensors: tensors.update({ROUTER: torch.ones(3, 12).double()}),
        "torch.float32, torch.float64; save",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_tensors_of_another_model_are_refused_by_name(folder: Path, what: str):
    change, words = WRONG[what]
    resaved(folder, change)
    with pytest.raises(hw.SpecError, match=words) as caught:
        hw.load(folder)
    assert "\n" not in str(caught.value)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def edited(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda f: truncated(f / WEIGHTS_FILE),
        "model.safetensors has changed since it was saved: .* bytes with checksum",
    ),
    "edited": (
        lambda f: edited(f / WEIGHTS_FILE),
        "model.safetensors has changed since it was saved",
    ),
    "tokenizer": (
        lambda f: edited(f / TOKENIZER_FILE),
        "tokenizer.json has changed since it was saved",
    ),
    "gone": (lambda f: (f / WEIGHTS_FILE).unlink(), "model.safetensors is missing"),
    "no tokenizer": (lambda f: (f / TOKENIZER_FILE).unlink(), "tokenizer.json is missing"),
    "no manifest": (
        lambda f: (f / MANIFEST_FILE).unlink(),
        "is a headwise folder without headwise.toml; copy the folder again",
    ),
    "empty": (
        lambda f: (f / MANIFEST_FILE).write_text(""),
        "has format = None; this version reads format = 1",
    ),
    "binary": (lambda f: (f / MANIFEST_FILE).write_bytes(b"\xff\xfe\0"), "is not UTF-8"),
    "no toml": (lambda f: (f / MANIFEST_FILE).write_text("model = ["), "is not TOML"),
    "newer": (
        lambda f: replaced(f, "format = 1", "format = 2"),
        "format = 2; this version reads format = 1",
    ),
    "half": (lambda f: replaced(f, "[model]", "[other]"), "it must hold format, files and model"),
    "elsewhere": (
        lambda f: replaced(f, f'"{WEIGHTS_FILE}"', '"../secret"'),
        "is none of model.safetensors",
    ),
    "kind": (
        lambda f: replaced(f, 'kind = "decoder"', 'kind = "decodr"'),
        "did you mean 'decoder'",
    ),
    "depth": (
        lambda f: replaced(f, "times = 2", "times = 3"),
        "decoder.2.attention.project.q is missing",
    ),
}


def replaced(folder: Path, old: str, new: str) -> None:
    text = (folder / MANIFEST_FILE).read_text()
    assert old in text
    (folder / MANIFEST_FILE).write_text(text.replace(old, new))


@pytest.mark.parametrize("what", HARM)
def test_a_harmed_folder_is_refused_in_one_line(folder: Path, what: str):
    harm, words = HARM[what]
    harm(folder)
    with pytest.raises(hw.SpecError, match=words) as caught:
        hw.load(folder)
    assert "\n" not in str(caught.value)


def test_garbage_under_a_good_checksum_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(safetensors.torch, "save", lambda tensors: b"no tensors at all")
    resaved(folder, lambda tensors: None)
    with pytest.raises(hw.SpecError, match="is not a safetensors file"):
        hw.load(folder)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": "{}"}, "holds a config.json but neither model.safetensors nor"),
        ({"pytorch_model.bin": "x"}, "contains pytorch_model.bin, a pickle, which can run code"),
        ({"notes.txt": "x"}, "holds neither headwise.toml nor config.json"),
    ],
)
def test_a_foreign_folder_is_refused(tmp_path: Path, files: dict[str, str], words: str):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(hw.SpecError, match=words):
        hw.load(tmp_path)
    with pytest.raises(hw.SpecError, match="there is no folder"):
        hw.load(tmp_path / "nowhere")


# --- as a table -----------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def tabled(data: dict[str, Any]) -> list[tuple[str, list[int], bool]]:
    """Every tensor of a table by its full name, as its document says."""
    found = []

    def add(under: str, rows: list[dict[str, Any]]) -> None:
        found.extend((f"{under}.{row['name']}", row["shape"], row["learned"]) for row in rows)

    for stack in data["stacks"]:
        add(f"{stack['name']}.embedding", stack["embedding"])
        add(f"{stack['name']}.norm", stack["norm"])
        for run in stack["layers"]:
            layers = run["each"] * run["times"]
            for depth, layer in enumerate(layers, run["start"]):
                add(f"{stack['name']}.{depth}", layer["tensors"])
    for head in data["heads"]:
        add(f"head.{head['name']}", head["tensors"])
    return found


@pytest.mark.parametrize("name", ["gpt2", "t5", "gemma2", "deepseek_v3", "bert", "vit"])
def test_a_table_is_the_whole_model(name: str):
    """Nothing twice and nothing missing, in 120 columns, with a sum that is the sum of its rows."""
    model = families.read_model_spec({"model_type": name})
    table = bp.ModelTable(model)
    result = tabled(table.to_dict)
    assert sorted(result) == sorted((w.name, list(w.shape), w.trainable) for w in model.weights())
    text = str(table)
    assert max(map(len, text.splitlines())) <= 120
    assert text.count("\n") < 160
    assert f"{table.to_dict['parameters']:,}" in [
        line.split()[-1] for line in text.splitlines() if line[:5] == "total"
    ]
    assert table.to_dict["parameters"] == hw.costs.count_parameters(model)


def test_headwise_spec_shows_a_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config, toml = tmp_path / "config.json", tmp_path / "model.toml"
    config.write_text(json.dumps({"model_type": "gpt2"}))
    toml.write_text(bp.to_toml(described()))
    assert run(capsys, "spec", str(folder)) == (0, f"{bp.ModelTable(described())}\n", "")
    assert run(capsys, "spec", str(toml))[1] == f"{bp.ModelTable(described())}\n"
    assert run(capsys, "spec", str(config))[1].startswith("gpt2: decoder\n")
    code, out, err = run(capsys, "spec", str(toml), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "model": bp.to_dict(described()),
        "table": bp.ModelTable(described()).to_dict,
    }
    assert bp.from_toml(run(capsys, "spec", str(folder), "--toml")[1]) == described()
    changed = bp.from_toml(run(capsys, "spec", str(toml), "--set", "name=other", "--toml")[1])
    assert changed == replace(described(), name="other")
    for argv, words in (
        ((str(folder), "--heads", "4"), "--heads is for presets"),
        ((str(tmp_path / "nothing"),), "there is no file"),
    ):
        code, out, err = run(capsys, "spec", *argv)
        assert (code, out) == (2, "")
        assert words in err
