"""No code that a model folder names is run or asked for, on every path that loads one."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise import cli
from headwise.hub import pretrained_models
from headwise.hub.pretrained_models import load_original
from headwise.util.errors import SpecError

transformers = pytest.importorskip("transformers")
SOURCE = Path(hw.__file__).parent
SMALL = {"n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 300, "n_positions": 32}
KERNEL = "kernels-community/flash-attn2"
HOSTILE: dict[str, dict[str, Any]] = {
    "attention": {"attn_implementation": KERNEL},
    "private": {"_attn_implementation": KERNEL},
    "internal": {"_attn_implementation_internal": KERNEL},
    "by name of a part": {"attn_implementation": {"": "sdpa", "text": "owner/kernel"}},
    "list": {"attn_implementation": [KERNEL]},
    "nested": {"text_config": {"layers": [{"_attn_implementation": "owner/kernel"}]}},
    "experts": {"_experts_implementation": "owner/kernel"},
    "kernels": {"kernels": {"GPT2Attention": "owner/kernel"}},
    "kernel config": {"text_config": {"kernel_config": {"a": "b"}}},
}
# A stub of the package that fetches code of the Hub: it writes down every request.
STUB = """
import pathlib, types
LOG = pathlib.Path(__file__).with_name("requests")
class Anything:
    def __init__(self, *args, **kwargs): pass
    def __call__(self, *args, **kwargs): return args[0] if args else self
    def __getattr__(self, name): return Anything()
def request(*args, **kwargs):
    LOG.open("a").write(repr(args))
    raise RuntimeError("asked for code")
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    requests = ("get_kernel", "get_local_kernel", "get_loaded_kernel", "has_kernel")
    return request if name in requests else type(name, (Anything,), {})
"""


def make_folder(folder: Path, **settings: Any) -> Path:
    config = transformers.GPT2Config(**SMALL, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.mark.parametrize(
    "command", [("sites",), ("heads", "--data", "TEXTS"), ("view",), ("trace", "--text", "a")]
)
@pytest.mark.parametrize("name", HOSTILE)
def test_code_of_the_hub_is_refused(
    name: str, command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, texts = make_folder(tmp_path / "model", **HOSTILE[name]), tmp_path / "texts"
    texts.write_text("a\nb\n")
    capsys.readouterr()
    argv = [str(texts) if word == "TEXTS" else word for word in command]
    out = ["--out", str(tmp_path / "out.trace")] if command[0] == "trace" else []
    code = cli.main([argv[0], str(folder), *argv[1:], *out])
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    assert "which may run code of the Hub; remove that line" in err
    for load in (hw.load, load_original):
        with pytest.raises(SpecError, match="which may run code of the Hub"):
            load(folder)


@pytest.mark.parametrize(
    "settings",
    [{"_attn_implementation": "sdpa"}, {"task_specific_params": {"attn_implementation": None}}],
)
def test_implementations_of_transformers_are_accepted(settings: dict[str, Any], tmp_path: Path):
    model: Any = load_original(make_folder(tmp_path, **settings))
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.config._attn_implementation == "sdpa"


def test_flash_attention_of_a_config_is_not_used(tmp_path: Path):
    """Without the package of flash attention, transformers would fetch it from the Hub."""
    model: Any = load_original(make_folder(tmp_path, attn_implementation="flash_attention_2"))
    assert model.config._attn_implementation == "sdpa"


def test_code_of_the_folder_is_ignored_with_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    folder = make_folder(
        tmp_path, auto_map=code, configuration_files=["config.json", "config.4.0.0.json"]
    )
    (folder / "config.4.0.0.json").write_text(
        '{"model_type": "gpt2", "_attn_implementation": "owner/kernel"}'
    )
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    assert type(load_original(folder)).__name__ == "GPT2LMHeadModel"
    assert not (folder / "ran").exists()
    assert "auto_map is ignored, no code is run" in capsys.readouterr().err
    assert not hasattr(load_original(folder).config, "auto_map")


def test_an_adapter_is_refused(tmp_path: Path):
    folder = make_folder(tmp_path)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/model"}')
    with pytest.raises(SpecError, match="names another model; give a folder with merged weights"):
        load_original(folder)


@pytest.mark.parametrize("name", ["pipeline", "Trainer", "AutoTokenizer", "nothing"])
def test_an_architecture_is_a_model(name: str, tmp_path: Path):
    assert type(load_original(make_folder(tmp_path, architectures=[name]))).__name__ == "GPT2Model"


# Each script runs in a fork of one process, in which transformers and headwise were imported with
# the stub in place.
FORK_SCRIPTS = """
import json, os, sys, traceback
import transformers.models.gpt2.modeling_gpt2, transformers.models.yoso.modeling_yoso
import headwise.hub.pretrained_models
for line in sys.stdin:
    script, argv, errors = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = ["-c", *argv]
        try:
            exec(compile(script, "script", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


class StubProcess:
    """A process with a stub in the place of the package `kernels`, of which every script gets a
    fork.
    """

    def __init__(self, folder: Path) -> None:
        package, metadata = folder / "kernels", folder / "kernels-0.18.2.dist-info"
        for made in (package, metadata):
            made.mkdir(parents=True)
        (package / "__init__.py").write_text(STUB)
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n"
        )
        self.requests, self.errors = package / "requests", folder / "errors"
        path = os.pathsep.join([str(folder), str(SOURCE.parent)])
        environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-W", "ignore", "-c", FORK_SCRIPTS]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, script: str, *argv: str) -> tuple[str, str]:
        """The last error line of a script, and all requests, with those of the
        imports before it.
        """
        self.errors.unlink(missing_ok=True)
        requests, process = self.requests, self.process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([script, argv, str(self.errors)]) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ended\n"
        found = requests.read_text() if requests.exists() else ""
        requests.unlink(missing_ok=True)
        return (self.errors.read_text().strip().splitlines() or [""])[-1], found


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubProcess]:
    started = StubProcess(tmp_path_factory.mktemp("stub"))
    with started.process:
        assert started.run("") == ("", ""), "the imports alone asked for code"
        yield started


PLAIN = "import sys, transformers; transformers.AutoModel.from_pretrained(sys.argv[1])"
OURS = (
    "import sys; from headwise.hub.pretrained_models import load_original; "
    "load_original(sys.argv[1])"
)


def test_the_stub_sees_what_transformers_asks_for(stub: StubProcess, tmp_path: Path):
    folder = make_folder(tmp_path / "model", _attn_implementation=KERNEL)
    assert "flash-attn2" in stub.run(PLAIN, str(folder))[1]


@pytest.mark.parametrize("name", ["private", "by name of a part"])
def test_nothing_is_asked_for(name: str, stub: StubProcess, tmp_path: Path):
    folder = make_folder(tmp_path / "model", **HOSTILE[name])
    error, requests = stub.run(OURS, str(folder))
    assert "may run code of the Hub" in error
    assert requests == ""


def test_nothing_is_asked_for_by_a_flash_attention(stub: StubProcess, tmp_path: Path):
    folder = make_folder(tmp_path / "model", _attn_implementation="flash_attention_2")
    assert stub.run(OURS, str(folder)) == ("", "")


# With a GPU, the constructor of this model asks the package `kernels` for code.
YOSO = {
    "model_type": "yoso",
    "hidden_size": 12,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 30,
}
ON_A_GPU = """
import transformers.models.yoso.modeling_yoso as yoso
yoso.is_torch_cuda_available = yoso.is_ninja_available = lambda: True
"""


def write_config(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


MAKE = """
import sys, transformers
model = transformers.YosoModel(transformers.AutoConfig.from_pretrained(sys.argv[1]))
"""
BASELINE = """
from headwise.observe.head_analysis.head_circuits import make_random_baseline
make_random_baseline(model)
"""


def test_nothing_is_asked_for_by_a_constructor(stub: StubProcess, tmp_path: Path):
    folder = write_config(tmp_path / "model", YOSO | {"intermediate_size": 8})
    assert "kernels-community/yoso" in stub.run(ON_A_GPU + MAKE, folder)[1]
    assert stub.run(ON_A_GPU + OURS, folder)[1] == ""
    assert stub.run(MAKE + ON_A_GPU + BASELINE, folder)[1] == ""


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_kernels_for_quantised_weights_are_not_fetched(
    method: str, stub: StubProcess, tmp_path: Path
):
    folder = make_folder(tmp_path / "model", quantization_config={"quant_method": method})
    error, requests = stub.run(OURS, str(folder))
    assert (
        f"has the quantisation {method}, which runs code of the Hub; remove the package kernels"
        in error
    )
    assert requests == ""


LOADER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("load_model", sys.argv[1] + "/load_model.py")
module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
print(module.load().config._attn_implementation, file=sys.stderr)
"""


def test_resized_checkpoints_ask_for_nothing(stub: StubProcess, tmp_path: Path):
    """The written config has no such settings, and load_model.py replaces those that are put there
    later.
    """
    from headwise.surgery import DropHeads
    from headwise.surgery.any_model import prune
    from headwise.surgery.hf_export.model_folder import write_model_folder

    folder = make_folder(
        tmp_path / "model", _attn_implementation="flash_attention_2", auto_map={"AutoModel": "a.B"}
    )
    net = hw.load(folder)
    texts = []
    if hasattr(hw.ExampleReader, "from_model"):
        texts = [hw.ExampleReader.from_model(net).read_ids([1, 2, 3])]
    smaller = prune(net, DropHeads((("decoder.0.attention", 1),)), texts).after
    written = write_model_folder(smaller, folder, tmp_path / "smaller", {})
    assert written.kind == "resized"
    config = json.loads((tmp_path / "smaller" / "config.json").read_text())
    assert not {"auto_map", "_attn_implementation"} & set(config)
    (tmp_path / "smaller" / "config.json").write_text(
        json.dumps(config | {"_attn_implementation": KERNEL})
    )
    assert stub.run(LOADER, str(tmp_path / "smaller")) == ("sdpa", "")


# --- one place ------------------------------------------------------------------------------------

LOADERS = re.compile(r"\b(?:from_pretrained|_?from_config|for_model)\(")
# of a model in memory
ALLOWED = {"hub/transformers_loading.py": 5, "observe/head_analysis/head_circuits.py": 1}


def test_loaders_of_transformers_are_called_in_one_place():
    found = {
        path.relative_to(SOURCE).as_posix(): len(LOADERS.findall(path.read_text()))
        for path in SOURCE.rglob("*.py")
    }
    assert {path: count for path, count in found.items() if count} == ALLOWED


def test_scripts_without_headwise_have_the_same_arguments():
    script = (SOURCE / "hub" / "load_model.txt").read_text()
    for text in (
        script,
        (SOURCE.parents[1] / "benchmarks" / "whole_models.py").read_text(),
    ):
        assert '"trust_remote_code": False' in text
        assert '"use_safetensors": True' in text
        assert '"attn_implementation": None' in text
    assert importlib.util.find_spec("headwise.hub.transformers_loading") is not None


# --- Files that were copied in part ---------------------------------------------------------------


@pytest.mark.parametrize("load", [pretrained_models.load_transformers_folder, load_original])
def test_a_file_that_is_zero_from_its_middle_is_noted_once(
    load: Callable[[Path], Any], tmp_path: Path
):
    config = transformers.GPT2Config(**SMALL)
    model = transformers.GPT2LMHeadModel(config)
    torch.nn.init.zeros_(model.transformer.h[1].mlp.c_proj.weight)  # as some are before training
    torch.nn.init.zeros_(model.transformer.wte.weight[200:])  # rows for padding
    model.save_pretrained(tmp_path)
    load(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    middle = (begin + len(data)) // 2
    path.write_bytes(data[:middle] + bytes(len(data) - middle))
    with pytest.warns(
        UserWarning, match="zero; if this is not intended, copy the file again"
    ) as caught:
        load(tmp_path)
    assert len(caught) == 1


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("model_type", "keys", "fact"),
    [
        ("llama", {"rope_parameters": ROPE}, "rope_type 'dynamic' rescales the base"),
        ("olmo", {"clip_qkv": 0.5}, "clip_qkv = 0.5 clips queries, keys and values"),
        ("glm4", {"head_dim": 8, "pad_token_id": 0}, "model_type 'glm4' is not known"),
    ],
)
def test_a_model_that_only_transformers_can_run_is_measured_by_its_name(
    model_type: str, keys: dict[str, Any], fact: str, tmp_path: Path
):
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        **keys,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(hw.SpecError, match=f"{re.escape(fact)}.*pass '{tmp_path}' to hw.heads"):
        hw.load(tmp_path)
    assert len(hw.heads(str(tmp_path), [torch.arange(12)[None]]).heads) == 4
