"""Targets of `headwise view`, by name: the bundled sample, a trace, a folder, FILE.py:FACTORY, or a
Hub model.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..util.errors import SpecError

if TYPE_CHECKING:
    from torch import nn

TRACE_SUFFIX = ".trace"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# No pickles and no Python files: weights and settings only.
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja"]
Log = Callable[[str], object]


def is_trace(name: str) -> bool:
    """Whether a name is that of a trace file.

    >>> is_trace("a.trace"), is_trace("model")
    (True, False)
    """
    return name.endswith(TRACE_SUFFIX)


def load_target(name: str, log: Log = lambda _: None) -> nn.Module:
    """Load the model of this name in eval mode; `log` gets the path of a Python file before it is
    run.
    """
    path, colon, factory = name.rpartition(":")
    if colon and path.endswith(".py"):
        return _call_factory(Path(path), factory, log)
    if Path(name).exists():
        return _load_folder(name)
    if HUB_NAME.fullmatch(name) and Path(name).suffix != ".py":
        return _load_folder(_fetch_from_hub(name))
    raise SpecError(
        f"there is no model {name!r}; give a folder, a .trace file, FILE.py:FACTORY, or a Hub id"
    )


def _load_folder(name: str) -> nn.Module:
    from ..hub.pretrained_models import load_original
    from ..hub.transformers_loading import check_folder

    check_folder(Path(name))
    model = load_original(name).eval()
    if any(tensor.is_meta for tensor in model.parameters()):
        raise SpecError(f"{name} has no weights; give a folder with model.safetensors")
    return model


def read_pruned_heads(name: str | None) -> dict[str, list[int]]:
    """The heads that `headwise prune` removed from the model in a folder, by site; none for other
    targets.
    """
    from ..models.model_spec.serialization import RECORD_FILE, SurgeryRecord

    path = Path(name or "") / RECORD_FILE
    if name is None or not path.is_file():
        return {}
    change = SurgeryRecord.from_file(path).change
    if change.get("operation") != "prune":
        return {}
    return {
        site: sorted(set(range(count)) - set(change["keep"][site]))
        for site, count in change["head_counts"].items()
    }


def _call_factory(path: Path, name: str, log: Log) -> nn.Module:
    """Import a Python file and return the model that its function makes."""
    from torch import nn

    if not path.is_file():
        raise SpecError(f"there is no file {str(path)!r}; give FILE.py:FACTORY")
    spec = importlib.util.spec_from_file_location(f"headwise_target_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SpecError(f"{path} cannot be imported; give a Python file")
    log(f"running {name} of {path.absolute()}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        factory: Any = getattr(module, name, None)
        if not callable(factory):
            raise SpecError(
                f"{path} has no function {name!r}; give the name of one that returns a model"
            )
        model = factory()
    except (SpecError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the file of the user may raise anything, SystemExit included
        raise SpecError(
            f"{path}:{name} failed: {type(error).__name__}: {error}; run it alone to see where"
        ) from error
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"{path}:{name} returned a {type(model).__name__}; it must return a torch.nn.Module"
        )
    return model.eval()


def _fetch_from_hub(name: str) -> str:
    """Download weights and settings of a Hub model, and return the folder."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise SpecError(
            f"there is no folder {name!r}, and Hub models need transformers; install headwise[hf]"
        ) from None
    try:
        return snapshot_download(name, allow_patterns=HUB_FILES)
    except Exception as error:  # the library raises errors of several HTTP packages
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise SpecError(
            f"there is no folder {name!r}, and the Hub does not give that model ({reason}); give "
            "a folder, or a Hub "
            "id that this machine can reach"
        ) from None
