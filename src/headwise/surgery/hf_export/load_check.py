"""A written folder tried as others would: loaded by transformers in a process of its own, without headwise."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...errors import SpecError
from ...hub.model_import import load_transformers_folder
from ...model_spec import StackSpec
from ...models import Transformer, build
from .shard_rewrite import CanonicalForm

TOLERANCE = 1e-5  # of the largest number that comes out
INPUT_LENGTH = 9
FIRST_TOKEN = 3  # ids before it often mean padding, beginnings and ends
TIMEOUT_SECONDS = 900

# What that process runs: folder, inputs and outputs, and the ways to load it, tried one after another.
DRIVER = """
import importlib.util, json, pathlib, sys
sys.modules["headwise"] = None
import torch, transformers
from safetensors.torch import load_file
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
folder, data, ways = sys.argv[1], load_file(sys.argv[2]), json.loads(pathlib.Path(sys.argv[3]).read_text())

def plain(_):
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
    model, told = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    lacking = [*told["missing_keys"], *told["mismatched_keys"]]
    if lacking:
        raise ValueError(f"{lacking[0]} is not loaded")
    return model.eval()

def own(modules):
    spec = importlib.util.spec_from_file_location("load_model", f"{folder}/load_model.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found.load(folder, modules=modules, dtype=torch.float32)

def distance(model):
    inputs = {name[3:]: value for name, value in data.items() if name.startswith("in.")}
    wanted = {name[4:]: value for name, value in data.items() if name.startswith("out.")}
    with torch.no_grad():
        said = model(**inputs)
        shared = [name for name in wanted if said.get(name) is not None and said[name].shape == wanted[name].shape]
        if not shared:
            said, shared = model.base_model(**inputs), ["last_hidden_state"]
    return max(float(((said[n] - wanted[n]).abs().max()) / wanted[n].abs().max().clamp(min=1)) for n in shared)

found, why = None, []
for number, modules in enumerate(ways["modules"] or [None]):
    try:
        far = distance((own if ways["modules"] else plain)(modules))
        if far <= ways["close"]:
            found = [number, far]
            break
        why.append(f"what it says differs by {far:.1e} of the largest number")
    except Exception as error:
        why.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
print("FOUND", json.dumps({"found": found, "why": why}))
"""


class LoadCheck(NamedTuple):
    """Whether a folder gives what the model gives, by which of the ways, and what is to be said of it."""

    agrees: bool
    candidate: int
    message: str
    is_skipped: bool = False


def check_load(
    folder: Path, net: Transformer, form: CanonicalForm, candidates: Sequence[Mapping[str, Any]] = ()
) -> LoadCheck:
    """Load a folder plainly, or by its own loader in one of these ways, and compare with the model that was written.

    It must come back as the form, tensor by tensor, and say what the model says: here, and loaded by transformers.
    """
    again = load_transformers_folder(folder)
    if odd := _find_changed_tensor(again, form):
        raise SpecError(f"{odd} is not read back as it was written")
    expected = _expected_outputs(_to_float32(net, next(again.parameters()).dtype))
    for name, said in _expected_outputs(again.float()).items():
        if not bool(((said - expected[name]).abs() <= TOLERANCE * expected[name].abs().max().clamp(min=1)).all()):
            raise SpecError("read back, it says something else")
    del again
    if find_spec("transformers") is None:
        return LoadCheck(False, 0, "transformers is not installed, so that nothing was tried", is_skipped=True)
    with tempfile.TemporaryDirectory() as work:
        data, ways = f"{work}/data.safetensors", Path(work, "ways.json")
        save_file(expected, data)
        ways.write_text(json.dumps({"modules": list(candidates), "close": TOLERANCE}))
        return _run_loader([sys.executable, "-I", "-B", "-c", DRIVER, str(folder), data, str(ways)])


def _run_loader(command: list[str]) -> LoadCheck:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return LoadCheck(False, 0, f"loading it took more than {TIMEOUT_SECONDS} seconds")
    lines = [line.removeprefix("FOUND ") for line in ran.stdout.splitlines() if line.startswith("FOUND ")]
    if not lines:
        return LoadCheck(False, 0, f"transformers could not be run: {' '.join(ran.stderr.split())[-200:]}")
    told = json.loads(lines[-1])
    if told["found"] is None:
        why = next((one for one in told["why"] if one.startswith("what it says")), told["why"][0])
        return LoadCheck(False, 0, f"loaded by transformers: {why}")
    number, far = told["found"]
    return LoadCheck(
        True, number, f"loaded without headwise, it differs from headwise by {far:.1e} of the largest number"
    )


def _find_changed_tensor(again: Transformer, form: CanonicalForm) -> str:
    """The first tensor that was not read back as it was written, in the kind of numbers of the files."""
    held = again.state_dict()
    for name, tensor in form.tensors.items():
        if name not in held or not torch.equal(held[name], tensor.cpu().to(held[name].dtype)):
            return name
    return ""


def _to_float32(net: Transformer, dtype: torch.dtype) -> Transformer:
    """The model in 32 bits, with the numbers that it has in those of the files."""
    with torch.device("meta"):
        copy = build(net.spec)
    held = {name: t.detach().cpu() for name, t in net.state_dict().items()}
    learned = {name for name, _ in net.named_parameters()}
    copy.load_state_dict({n: t.to(dtype).float() if n in learned else t for n, t in held.items()}, assign=True)
    copy.usage = net.usage
    return copy.eval()


def _expected_outputs(net: Transformer) -> dict[str, Tensor]:
    """Something to read, under transformers' names, and what the model says of it."""
    draw = torch.Generator().manual_seed(0)
    first, last = net.spec.stacks[0], net.spec.stacks[-1]
    x = _sample_input(first, net, draw)
    name = "pixel_values" if first.embedding and first.embedding.patches else "input_ids"
    given = {f"in.{name}": x}
    with torch.inference_mode():
        if first is last:
            h = net.hidden(x)
        else:
            y = _sample_input(last, net, draw)[:, :-2]
            given["in.decoder_input_ids"] = y
            h = net.hidden(y, source=x)
        said = {"out.last_hidden_state": h} | ({"out.logits": net.read(h)} if net.spec.heads else {})
    return given | {name: tensor.clone().contiguous() for name, tensor in said.items()}


def _sample_input(stack: StackSpec, net: Transformer, draw: torch.Generator) -> Tensor:
    embedding = stack.embedding
    if embedding is None:
        raise ValueError(f"{stack.name} reads neither ids nor pixels")
    if patches := embedding.patches:
        size = (1, patches.channels, patches.rows * patches.high, patches.columns * patches.wide)
        return torch.randn(size, generator=draw)
    longest = embedding.positions.length if embedding.positions and embedding.positions.length else INPUT_LENGTH
    count = min(INPUT_LENGTH, longest)
    ids = torch.randint(min(FIRST_TOKEN, embedding.tokens - 1), embedding.tokens, (1, count), generator=draw)
    if net.usage.end:
        ids[0, -1] = net.usage.end[0]  # what some classes read is the end of a text
    return ids
