"""A model by its id on the Hub: every command and verb opens it, only data files are fetched, and
each mistake is one line that says what to do.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import headwise as hw
from headwise import cli
from headwise.models import hub_files
from headwise.models.vocabulary import ByteVocabulary
from headwise.util.model_names import HubId, label_model, parse_hub_id
from support.hub_server import HubServer, Repo, read_files, running_hub

transformers = pytest.importorskip("transformers")

NAME = "org/tiny-qwen3"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TEXTS = ["the sea is blue", "a cat sat on a mat", "one two one two", "rain falls in spain"]
FOREIGN_FILES = {  # of a repository, none of which may be fetched
    "pytorch_model.bin": b"pickle",
    "modeling_qwen3.py": b"raise SystemExit",
    "consolidated.safetensors": b"the same weights again",
    "original/model.safetensors": b"",
    "onnx/config.json": b"{}",
    "README.md": b"# card",
    "training_args.bin": b"pickle",
    "tiny.Q4_0.gguf": b"GGUF",
}


def save_tiny(folder: Path, seed: int, **options: Any) -> Path:
    """A random Qwen3 with three layers and a tokenizer of bytes, as transformers saves it."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=257,
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=256,
        tie_word_embeddings=True,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text(ByteVocabulary().document)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder


class Models(NamedTuple):
    """Folders of the revisions main, v2 and sharded."""

    main: Path
    v2: Path
    sharded: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    return Models(
        save_tiny(folder / "main", 0),
        save_tiny(folder / "v2", 1),
        save_tiny(folder / "sharded", 2, max_shard_size="20KB"),
    )


@pytest.fixture
def hub(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.chdir(tmp_path)
    with running_hub(tmp_path / "cache", monkeypatch) as server:
        revisions = {
            name: read_files(folder) | FOREIGN_FILES for name, folder in models._asdict().items()
        }
        server.repos[NAME] = Repo(revisions)
        yield server
        forbidden = {name for name in server.fetched() if name in FOREIGN_FILES}
        assert forbidden == set()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return path


def same_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    state, other = first.state_dict(), second.state_dict()
    return state.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in state.items()
    )


def run_command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    code = cli.main(list(words))
    return (code, *capsys.readouterr())


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("Qwen/Qwen3-0.6B", HubId("Qwen/Qwen3-0.6B")),
        ("org/name@refs/pr/1", HubId("org/name", "refs/pr/1")),
        ("org/na_me.v2@" + "a" * 40, HubId("org/na_me.v2", "a" * 40)),
        *[
            (name, None)
            for name in (
                *("gpt2", "org/", "/name", "org/name@", "../name", "org/..", "a/b/c", "/tmp/none"),
                *("org/name@../x", "org/na--me", "org/na me", "-a/b", ".a/b", "a/b:c", "a\\b/c"),
                *("a/config.json", "a/b.toml", "a/b.py", "a/b.trace", "a/b.gguf", "~/b"),
                *("a/" + "b" * 95, "", "örg/name", "org/name\n", "org/name@a b"),
            )
        ],
    ],
)
def test_which_names_are_hub_ids(name: str, expected: HubId | None):
    assert parse_hub_id(name) == expected


def test_a_folder_comes_before_the_hub(hub: HubServer, models: Models, tmp_path: Path):
    shutil.copytree(models.v2, tmp_path / NAME)
    assert same_weights(hw.load(NAME), hw.load(models.v2))
    assert hub.requests == []


def test_labels_are_names_and_not_commits():
    commit = "0" * 40
    path = f"/home/me/.cache/hub/models--org--Qwen3-0.6B/snapshots/{commit}"
    assert label_model(path) == label_model("org/Qwen3-0.6B@v2") == "Qwen3-0.6B"


# --- every command and verb -----------------------------------------------------------------------


def test_heads_downloads_once_and_then_works_offline(
    hub: HubServer,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    arguments = ("heads", NAME, "--data", str(data))
    code, first, errors = run_command(capsys, *arguments)
    assert code == 0, errors
    assert "tiny-qwen3" in first
    assert f"downloading {NAME}" in errors
    assert hub.fetched() == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    hub.requests.clear()
    code, again, errors = run_command(capsys, *arguments)
    assert (code, again) == (0, first)
    assert "downloading" not in errors
    assert hub.fetched() == set()
    hub.requests.clear()
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert run_command(capsys, *arguments) == (0, first, "")
    assert hub.requests == []
    hub.stop()
    # In a process of its own, because connections of this one stay open.
    program = "import sys; from headwise.cli import main; sys.exit(main())"
    unreachable = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300
    )
    assert (unreachable.returncode, unreachable.stdout) == (0, first)
    assert "the Hub cannot be reached" in unreachable.stderr
    hub.start()


def test_load_reads_a_revision(hub: HubServer, models: Models):
    for name, folder in ((NAME, models.main), (f"{NAME}@v2", models.v2)):
        assert same_weights(hw.load(name), hw.load(folder))
    commit = hub.repos[NAME].commit("sharded")
    sharded = hw.load(f"{NAME}@{commit}")
    assert same_weights(sharded, hw.load(models.sharded))
    assert sharded.usage.tokenizer == hw.load(models.sharded).usage.tokenizer
    assert len([name for name in hub.fetched() if name.startswith("model-")]) > 1


def test_cost_fetches_no_weights(
    hub: HubServer, models: Models, capsys: pytest.CaptureFixture[str]
):
    tables: list[dict[str, Any]] = []
    for name in (NAME, str(models.main)):
        assert cli.main(["cost", name, "--json"]) == 0
        tables.append(json.loads(capsys.readouterr().out))
    names = [table["rows"][0].pop("name") for table in tables]
    assert names == ["tiny-qwen3", "main"]
    assert tables[0] == tables[1]
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]
    assert hw.families.read_model_spec(NAME) == hw.families.read_model_spec(models.main)


def test_prune_writes_what_it_writes_for_a_folder(
    hub: HubServer, models: Models, data: Path, capsys: pytest.CaptureFixture[str]
):
    fast = ("--seconds", "0.05", "--length", "8")
    for name, out in ((NAME, "hub"), (str(models.main), "local")):
        words = ["prune", name, "--heads", "0:0,1", "--data", str(data), "--out", out, *fast]
        assert cli.main(words) == 0, capsys.readouterr().err
    assert same_weights(hw.load("hub"), hw.load("local"))
    written, expected = ({path.name for path in Path(out).iterdir()} for out in ("hub", "local"))
    assert written == expected
    assert hw.load("hub").spec.stacks[0].runs  # a folder that opens
    cache = Path("cache")
    assert not [path for path in cache.rglob("*") if path.name.endswith(".py")]


def test_convert_run_trace_and_train_take_a_name(
    hub: HubServer, data: Path, capsys: pytest.CaptureFixture[str]
):
    fast = ["--seconds", "0.05", "--length", "8"]
    book = data.with_name("book.txt")
    book.write_text("\n".join(TEXTS * 20))
    convert = ["convert", NAME, "--kv", "1", "--data", str(data), "--out", "smaller", *fast]
    for words in (
        convert,
        ["run", NAME, "the sea", "--max-new-tokens", "3", "--device", "cpu"],
        ["trace", NAME, "--text", "the sea", "--out", "a.trace"],
        ["train", "--data", str(book), "--model", NAME, "--out", "tuned", "--steps", "1"],
    ):
        assert cli.main(words) == 0, (words, capsys.readouterr().err)
    assert hw.load_trace("a.trace").model["name"] == "tiny-qwen3"
    assert [spec.heads.kv for _, spec in hw.load("smaller").spec.attention_specs()] == [1, 1, 1]


def test_view_opens_a_name_and_compares_it_with_another(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
):
    from headwise.viewer import view

    page = hw.view(NAME, "the sea is blue")
    assert page.opened.name == "tiny-qwen3"
    assert hw.load(page.opened.target)
    served: list[Any] = []
    monkeypatch.setattr(view, "serve_page", lambda opened, *_, **__: served.append(opened))
    words = ["view", NAME, "--text", "the sea", "--compare", f"{NAME}@v2", "--no-browser"]
    assert cli.main(words) == 0
    assert served[0].other == f"{NAME}@v2"


def test_verbs_of_python_take_a_name(hub: HubServer, models: Models):
    def describe(name: Any) -> list[Any]:
        table, ranking = hw.heads(name, TEXTS), hw.importance(name, TEXTS)
        trace = hw.trace(name, "the sea")
        pruned = hw.prune(name, 0.5, TEXTS).after
        return [
            [head.measures for head in table.heads],
            [(head.site, head.head, head.measure) for head in ranking.heads],
            trace.head_weights(1, 0).tolist(),
            hw.sites(name).to_dict,
            [tensor.tolist() for tensor in pruned.parameters()],
        ]

    assert repr(describe(NAME)) == repr(describe(str(models.main)))


def test_a_factory_opens_in_every_command(
    tmp_path: Path, models: Models, data: Path, capfd: pytest.CaptureFixture[str]
):
    file = tmp_path / "mine.py"
    file.write_text(
        "from transformers import AutoModelForCausalLM\n"
        f"def make(): return AutoModelForCausalLM.from_pretrained({str(models.main)!r})\n"
    )
    name = f"{file}:make"
    for words in (
        ["heads", name, "--data", str(data)],
        ["trace", name, "--text", "the sea", "--out", str(tmp_path / "a.trace")],
        ["sites", name],
    ):
        assert cli.main(words) == 0, (words, capfd.readouterr().err)
    assert f"running make of {file}" in capfd.readouterr().err
    assert same_weights(hw.load(name), hw.load(models.main))
    assert len(hw.sites(name)) == 3


# --- interrupted downloads ------------------------------------------------------------------------


def test_a_connection_that_breaks_goes_on_where_it_ended(
    hub: HubServer, models: Models, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cuts["model.safetensors"] = [5000]
    assert same_weights(hw.load(NAME), hw.load(models.main))
    ranges = [part for method, path, part in hub.requests if method == "GET" and part]
    assert ranges == ["bytes=5000-"]


def test_an_interrupted_download_keeps_complete_files(
    hub: HubServer, models: Models, monkeypatch: pytest.MonkeyPatch
):
    """A part of a model is no model, with or without a network."""
    name = f"{NAME}@sharded"
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    last = max(path.name for path in models.sharded.glob("model-*.safetensors"))
    hub.cuts[last] = [100] + [0] * 9
    with pytest.raises(hw.SpecError, match=rf"cannot download {name}: .*; run the command again"):
        hw.load(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(hw.SpecError, match=rf"only a part of {name}: {last} is missing; run the"):
        hw.load(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub.cuts.clear()
    hub.requests.clear()
    assert same_weights(hw.load(name), hw.load(models.sharded))
    assert hub.fetched() == {last}


def test_an_index_of_files_that_are_not_there(
    hub: HubServer, models: Models, data: Path, capfd: pytest.CaptureFixture[str]
):
    files = read_files(models.sharded)
    last = max(name for name in files if name.startswith("model-"))
    del files[last]
    hub.repos["org/part"] = Repo({"main": files})
    message = refuse(capfd, data, "org/part")
    assert message.startswith(f"org/part has no {last}, which its model.safetensors.index.json")


# --- mistakes -------------------------------------------------------------------------------------


def refuse(capfd: pytest.CaptureFixture[str], data: Path, name: str) -> str:
    """The one line of `heads`, `prune` and `cost` for a name; no file may be left."""
    before = sorted(path for path in data.parent.iterdir() if path.name != "cache")
    commands = {
        "heads": ["heads", name, "--data", str(data), "--out", "new"],
        "prune": ["prune", name, "--keep", "0.5", "--data", str(data), "--out", "new"],
        "load": [],
    }
    lines = set()
    for command, words in commands.items():
        if command == "load":
            with pytest.raises(hw.SpecError) as refused:
                hw.load(name)
            lines.add(f"headwise: {refused.value}")
            continue
        assert cli.main(words) == 2, command
        captured = capfd.readouterr()
        assert captured.out == ""
        errors = [line for line in captured.err.splitlines() if "downloading" not in line]
        assert len(errors) == 1, captured.err
        lines.add(errors[0])
    capfd.readouterr()
    assert len(lines) == 1, lines
    assert sorted(path for path in data.parent.iterdir() if path.name != "cache") == before
    return lines.pop().removeprefix("headwise: ")


def test_a_name_that_is_nowhere(hub: HubServer, data: Path, capfd: pytest.CaptureFixture[str]):
    message = refuse(capfd, data, "org/none")
    assert message.startswith("there is no folder 'org/none', and no public model of that name")
    assert "hf auth login" in message


@pytest.mark.parametrize("error", [(401, "GatedRepo"), (403, "GatedRepo"), (403, "")])
def test_a_gated_model(
    hub: HubServer, data: Path, capfd: pytest.CaptureFixture[str], error: tuple[int, str]
):
    hub.repos["org/gated"] = Repo({"main": {}}, error)
    message = refuse(capfd, data, "org/gated")
    assert message.startswith("access to org/gated is restricted; accept its terms")
    assert "hf auth login" in message


def test_a_revision_that_is_not_there(
    hub: HubServer, data: Path, capfd: pytest.CaptureFixture[str]
):
    message = refuse(capfd, data, f"{NAME}@v9")
    assert message == f"{NAME} has no revision 'v9'; give a branch, tag or commit of it"


def test_no_network(hub: HubServer, data: Path, capfd: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refuse(capfd, data, NAME)
    assert message.startswith(f"{NAME} is neither a folder here nor in the cache ")
    assert "HF_HUB_OFFLINE is set; run the command again with a network" in message
    assert hub.requests == []


def test_only_pickles(
    hub: HubServer, models: Models, data: Path, capfd: pytest.CaptureFixture[str]
):
    files = read_files(models.main)
    files["pytorch_model.bin"] = files.pop("model.safetensors")
    hub.repos["org/old"] = Repo({"main": files})
    message = refuse(capfd, data, "org/old")
    assert message.startswith("org/old has its weights in pytorch_model.bin, a pickle, which can")
    assert message.endswith("with model.safetensors, as save_pretrained writes it")
    assert hub.fetched() == set()


def test_an_adapter(hub: HubServer, models: Models, data: Path, capfd: pytest.CaptureFixture[str]):
    hub.repos["org/lora"] = Repo({"main": read_files(models.main) | {"adapter_config.json": b"{}"}})
    message = refuse(capfd, data, "org/lora")
    assert message.startswith("org/lora has adapter_config.json, which names another model; give")


def test_no_model_at_all(hub: HubServer, data: Path, capfd: pytest.CaptureFixture[str]):
    hub.repos["org/gguf"] = Repo({"main": {"tiny.gguf": b"GGUF", "README.md": b""}})
    message = refuse(capfd, data, "org/gguf")
    assert message.startswith("org/gguf has no config.json, so it is not a model that transformers")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model_type": "evil", "auto_map": {"AutoModel": "evil.Model"}},
            "has the model_type 'evil', which only code of its own can build (auto_map)",
        ),
        ({"model_type": "evil"}, "'evil', which is not known here; pip install --upgrade transfo"),
        ({"_attn_implementation": "owner/kernel"}, "which may run code of the Hub"),
        (None, "config.json of odd is not JSON: "),
        ([1], "config.json of odd contains a list, not an object; give another revision or model"),
    ],
)
def test_a_config_that_is_broken_or_asks_for_code(
    hub: HubServer,
    models: Models,
    data: Path,
    capfd: pytest.CaptureFixture[str],
    settings: Any,
    message: str,
):
    files = read_files(models.main) | {"evil.py": b"raise SystemExit(9)"}
    if isinstance(settings, dict):
        settings = json.loads(files["config.json"]) | settings
    files["config.json"] = b"{" if settings is None else json.dumps(settings).encode()
    hub.repos["org/odd"] = Repo({"main": files})
    assert message in refuse(capfd, data, "org/odd")
    assert hub.fetched() <= {"config.json", "generation_config.json", *TOKENIZER_FILES}


def test_code_of_a_known_model_is_ignored(hub: HubServer, models: Models, capfd):
    files = read_files(models.main) | {"evil.py": b"raise SystemExit(9)"}
    settings = json.loads(files["config.json"]) | {"auto_map": {"AutoModel": "evil.Model"}}
    files["config.json"] = json.dumps(settings).encode()
    hub.repos["org/odd"] = Repo({"main": files})
    assert same_weights(hw.load("org/odd"), hw.load(models.main))
    assert capfd.readouterr().err.count("auto_map is ignored, no code is run") == 1
    assert "evil.py" not in hub.fetched()


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_huge_file_of_settings_is_not_fetched(
    hub: HubServer, data: Path, capfd: pytest.CaptureFixture[str], file: str
):
    hub.claimed_sizes[file] = 10**9
    message = refuse(capfd, data, NAME)
    assert message.startswith(f"{file} of {NAME} has 1.00 GB, and at most ")
    assert hub.fetched() == set()


@pytest.mark.parametrize("name", ["../x", "a/b/c", "/no/such/folder", "org/..", "gpt2", "a/b@../c"])
def test_names_with_other_parts_are_no_hub_ids(
    hub: HubServer, data: Path, capfd: pytest.CaptureFixture[str], name: str
):
    message = refuse(capfd, data, name)
    assert message == (
        f"there is no folder or file {name!r}; give a folder with a model, a Hub id (org/name or "
        "org/name@revision), a .gguf file, or FILE.py:FACTORY, a function that returns a model"
    )
    assert hub.requests == []


def test_a_full_cache(hub: HubServer, data: Path, capfd: pytest.CaptureFixture[str], monkeypatch):
    real = shutil.disk_usage(data.parent)
    monkeypatch.setattr(hub_files.shutil, "disk_usage", lambda _: real._replace(free=1000))
    message = refuse(capfd, data, NAME)
    assert message.startswith(f"{NAME} needs ")
    assert "has 1.00 kB left; make room, or set HF_HOME to another folder" in message
    assert hub.fetched() == set()


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "no space left"), (errno.EROFS, "read-only file system")]
)
def test_a_cache_that_cannot_be_written(
    hub: HubServer,
    data: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch,
    code: int,
    words: str,
):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    message = refuse(capfd, data, NAME)
    assert message.startswith(f"cannot write {NAME} to the cache ")
    assert words in message
    assert message.endswith("set HF_HOME to a folder that may be written and has room")


def test_a_file_in_place_of_the_cache(hub: HubServer, data: Path, tmp_path: Path, capfd):
    (tmp_path / "cache").write_text("")
    assert refuse(capfd, data, NAME).startswith(f"cannot write {NAME} to the cache ")
