"""The job of the Prune screen: remove the heads that are off in the Lab, write the smaller model, and prove it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .model_actions import make_examples, read_heads
from .model_worker import JobProgress
from .open_model import AblatedHead, OpenModel

if TYPE_CHECKING:
    from ..surgery.verification.proof import ModelProof

FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TIMING_SECONDS = 4.0
STEPS = 4  # of the progress


def prune_heads(model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress) -> dict[str, Any]:
    """Write a copy of the model without these heads to a new folder, with the proof that it equals their ablation."""
    from ..hub.pretrained_models import load
    from ..surgery import DropHeads
    from ..surgery.attention_replacement import to_native_model
    from ..surgery.hf_export.model_folder import write_model_folder
    from ..surgery.pruning import prune
    from ..surgery.pruning_plan import fingerprint_model
    from ..surgery.verification.efficiency import TimingOptions
    from ..surgery.verification.proof import ProofOptions, prove, write_proof

    heads = read_heads(model, arguments)
    if not heads:
        raise ValueError("no head is off; switch heads off in the Lab first")
    folder = new_folder(model, str(arguments.get("name", "")))
    examples = make_examples(model, arguments)
    progress(0, STEPS, "removing heads")
    net = to_native_model(model.get_model())
    result = prune(net, DropHeads(tuple((head.site, head.head) for head in heads)))
    progress(1, STEPS, "writing the model")
    record = result.data | {"model": fingerprint_model(net)}
    written = write_model_folder(result.after, None, folder, record)
    progress(2, STEPS, "proving that it equals the ablated model")
    options = ProofOptions(
        result.plan.summary,
        keep=dict(result.plan.changed_sites),
        exports={"headwise.load of the written folder": lambda: load(folder)},
        timing=TimingOptions(seconds=TIMING_SECONDS),
        command=format_command(model, heads, folder),
    )
    proof = prove(net, result.after, examples, options, lambda note: progress(3, STEPS, note))
    write_proof(proof, folder)
    return describe_result(proof) | {"folder": folder.name, "kind": written.summary, "command": options.command}


def new_folder(model: OpenModel, name: str) -> Path:
    """The folder of a new model inside the output folder; raises ValueError if it may not be written."""
    if model.output_folder is None or model.read_only:
        raise ValueError("the page may not write; start it with --out DIR and without --read-only")
    if not FOLDER_NAME.fullmatch(name):
        raise ValueError(f"{name[:40]!r} is no folder name; use letters, digits, '.', '_' and '-'")
    folder = model.output_folder / name
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{name} exists already; choose another name")
    model.output_folder.mkdir(parents=True, exist_ok=True)
    return folder


def format_command(model: OpenModel, heads: Sequence[AblatedHead], folder: Path) -> str:
    """The command that does the same on the terminal.

    >>> format_command(OpenModel(), [AblatedHead("decoder.0.attention", 1)], Path("small"))
    'headwise prune MODEL --heads decoder.0.attention:1 --data TEXTS --out small'
    """
    by_site: dict[str, list[int]] = {}
    for head in heads:
        by_site.setdefault(head.site, []).append(head.head)
    listed = [f"{site}:{','.join(map(str, sorted(numbers)))}" for site, numbers in by_site.items()]
    name = model.name if model.trace is not None else "MODEL"
    return shlex.join(["headwise", "prune", name, "--heads", *listed, "--data", "TEXTS", "--out", folder.name])


def describe_result(proof: ModelProof) -> dict[str, Any]:
    """The figures of a proof for the page."""
    return {"holds": proof.holds, "proof": proof.data}
