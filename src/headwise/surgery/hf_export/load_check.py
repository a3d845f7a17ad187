"""Check of an exported folder: load it with transformers in a separate process without headwise,
compare outputs.
"""

from __future__ import annotations

import copy
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from ...hub.pretrained_models import load_transformers_folder
from ...models import Transformer
from ...models.generation import max_positions
from ...util.errors import SpecError
from ...util.python_processes import python_command
from ..verification.model_comparison import (
    OUTPUT_TOLERANCE,
    cast_model,
    parameter_dtype,
    random_input,
)
from .shard_rewrite import CanonicalForm

INPUT_LENGTH = 9
TIMEOUT_SECONDS = 900

# Script of the process that loads the folder. Arguments: folder, file of inputs and outputs, and
# file of candidate changes, which are tried in order.
DRIVER = """
import importlib.util, json, pathlib, sys
sys.modules["headwise"] = None
import torch, transformers
from safetensors.torch import load_file
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
folder, data, options = sys.argv[1], load_file(sys.argv[2]), json.loads(pathlib.Path(sys.argv[3]).read_text())

def load_plain(_):
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
    safe = {"trust_remote_code": False, "use_safetensors": True, "attn_implementation": None, "local_files_only": True}
    model, info = kind.from_pretrained(folder, config=config, output_loading_info=True, dtype=torch.float32, **safe)
    missing = [*info["missing_keys"], *info["mismatched_keys"]]
    if missing:
        raise ValueError(f"{missing[0]} is not loaded")
    return model.eval()

def load_with_script(modules):
    spec = importlib.util.spec_from_file_location("load_model", f"{folder}/load_model.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.load(folder, modules=modules, dtype=torch.float32)

def max_relative_difference(model):
    inputs = {name[3:]: value for name, value in data.items() if name.startswith("in.")}
    expected = {name[4:]: value for name, value in data.items() if name.startswith("out.")}
    with torch.no_grad():
        outputs = model(**inputs)
        shared = [n for n in expected if outputs.get(n) is not None and outputs[n].shape == expected[n].shape]
        if not shared:
            outputs, shared = model.base_model(**inputs), ["last_hidden_state"]
    return max(float(((outputs[n] - expected[n]).abs().max()) / expected[n].abs().max()) for n in shared)

match, errors = None, []
for number, modules in enumerate(options["modules"] or [None]):
    try:
        difference = max_relative_difference((load_with_script if options["modules"] else load_plain)(modules))
        if difference <= options["tolerance"]:
            match = [number, difference]
            break
        errors.append(f"outputs differ by {difference:.1e} of the largest output")
    except Exception as error:
        errors.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
print("RESULT", json.dumps({"match": match, "errors": errors}))
"""


class LoadCheck(NamedTuple):
    """Result of a check: whether outputs agree, with which candidate, and a
    message for the user.
    """

    agrees: bool
    candidate: int
    message: str
    is_skipped: bool = False


def check_load(
    folder: Path,
    net: Transformer,
    form: CanonicalForm,
    candidates: Sequence[Mapping[str, Any]] = (),
) -> LoadCheck:
    """Load a folder with transformers, plainly or by its loader script and candidate changes, and
    compare with `net`.

    headwise must read the tensors of `form` back exactly, and outputs must agree with transformers.
    """
    reloaded = load_transformers_folder(folder)
    read_back = reloaded.state_dict()
    for name, tensor in form.tensors.items():
        other = read_back.get(name)
        if other is None or not torch.equal(other, tensor.cpu().to(other.dtype)):
            raise SpecError(f"{name} differs after reading the folder back")
    on_cpu = net if next(net.parameters()).device.type == "cpu" else copy.deepcopy(net).cpu()
    expected = _sample_inputs_and_outputs(
        cast_model(on_cpu, torch.float32, stored=parameter_dtype(reloaded))
    )
    del reloaded, read_back
    if find_spec("transformers") is None:
        return LoadCheck(
            False, 0, "transformers is not installed, so the folder was not tested", is_skipped=True
        )
    with tempfile.TemporaryDirectory() as temporary:
        data = f"{temporary}/data.safetensors"
        options = Path(temporary, "options.json")
        Path(data).write_bytes(save(expected))
        options.write_text(json.dumps({"modules": list(candidates), "tolerance": OUTPUT_TOLERANCE}))
        return _run_loader(
            python_command("-I", "-B", "-c", DRIVER, str(folder), data, str(options))
        )


def _run_loader(command: list[str]) -> LoadCheck:
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return LoadCheck(
            False, 0, f"loading it with transformers took more than {TIMEOUT_SECONDS} seconds"
        )
    lines = [
        line.removeprefix("RESULT ")
        for line in process.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    if not lines:
        return LoadCheck(
            False,
            0,
            f"the process with transformers failed: {' '.join(process.stderr.split())[-200:]}",
        )
    result = json.loads(lines[-1])
    if result["match"] is None:
        errors = result["errors"]
        error = next((error for error in errors if error.startswith("outputs differ")), errors[0])
        return LoadCheck(False, 0, f"transformers cannot load it, or its outputs differ: {error}")
    number, difference = result["match"]
    return LoadCheck(
        True,
        number,
        f"loaded without headwise, outputs differ by {difference:.1e} of the largest output",
    )


def _sample_inputs_and_outputs(net: Transformer) -> dict[str, Tensor]:
    """Return sample inputs under the names of transformers, and the model's outputs for them."""
    first = net.spec.stacks[0]
    last = net.spec.stacks[-1]
    like = next(net.parameters())
    lengths = [min(INPUT_LENGTH, max_positions(one) or INPUT_LENGTH) for one in (first, last)]
    x = random_input(first, like, 1, lengths[0])
    if net.usage.end and not x.is_floating_point():
        x[0, -1] = net.usage.end[0]  # some classification heads read the end-of-text token
    name = "pixel_values" if first.embedding and first.embedding.patches else "input_ids"
    tensors = {f"in.{name}": x}
    with torch.inference_mode():
        if first is last:
            h = net.hidden(x)
        else:
            y = random_input(last, like, 1, lengths[1])[:, :-2]
            tensors["in.decoder_input_ids"] = y
            h = net.hidden(y, source=x)
        outputs = {"out.last_hidden_state": h} | (
            {"out.logits": net.apply_head(h)} if net.spec.heads else {}
        )
    return tensors | {name: tensor.clone().contiguous() for name, tensor in outputs.items()}
