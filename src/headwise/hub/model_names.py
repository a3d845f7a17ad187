"""Turn what a caller names into what the rest of the code opens: a folder, or a module."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

from torch import nn

from ..models.families import FAMILIES
from ..models.hub_files import CONFIG_FILE, MANIFEST_FILE, fetch_model
from ..util.errors import SpecError
from ..util.files import read_text_file
from ..util.model_names import (
    NAME_KINDS,
    Factory,
    is_gguf_file,
    label_model,
    parse_factory,
    parse_hub_id,
)
from ..util.size_limits import parse_json
from .gguf_files import unpack_gguf
from .transformers_loading import is_known_to_transformers, remove_code_settings


def find_model(what: Path | str | nn.Module) -> Path | nn.Module:
    """Return the folder of a named model, fetched from the Hub if it is a Hub id and unpacked if it
    is a GGUF file; or the module that is given, or that FILE.py:FACTORY returns.

    A folder or file of this name comes before the Hub, as in transformers.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     find_model(folder) == Path(folder)
    True
    """
    if isinstance(what, nn.Module):
        return what
    path = Path(what)
    if is_gguf_file(path):
        return unpack_gguf(path)
    if path.exists():
        return path
    factory = parse_factory(what)
    if factory is not None:
        return call_factory(factory)
    hub_id = parse_hub_id(what)
    if hub_id is not None:
        return fetch_model(hub_id, check_settings)
    raise SpecError(f"there is no folder or file {str(what)!r}; give {NAME_KINDS}")


def check_settings(folder: Path) -> None:
    """Refuse a folder whose weights cannot be loaded, before they are downloaded."""
    if (folder / MANIFEST_FILE).is_file():
        return
    what = f"{CONFIG_FILE} of {label_model(folder)}"
    remedy = "give another revision or model"
    settings = parse_json(what, read_text_file(folder / CONFIG_FILE), remedy)
    if not isinstance(settings, dict):
        raise SpecError(f"{what} contains a {type(settings).__name__}, not an object; {remedy}")
    model_type = str(remove_code_settings(settings, what).get("model_type"))
    if model_type in FAMILIES or is_known_to_transformers(model_type):
        return
    fact = f"{label_model(folder)} has the model_type {model_type[:60]!r}"
    if "auto_map" in settings:
        raise SpecError(
            f"{fact}, which only code of its own can build (auto_map), and that code is never run; "
            "load it in a file of yours, and give FILE.py:FACTORY"
        )
    raise SpecError(
        f"{fact}, which is not known here; pip install --upgrade transformers, or load the model "
        "in a file of yours, and give FILE.py:FACTORY"
    )


def call_factory(factory: Factory) -> nn.Module:
    """Import a Python file, call its factory, and return the model in eval mode."""
    path, name = factory
    if not path.is_file():
        raise SpecError(f"there is no file {str(path)!r}; give FILE.py:FACTORY")
    spec = importlib.util.spec_from_file_location(f"headwise_target_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SpecError(f"{path} cannot be imported; give a Python file")
    notice = "headwise: running %s of %s"
    logging.getLogger("headwise").warning(notice, name, path.absolute())
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        make_model: Any = getattr(module, name, None)
        if not callable(make_model):
            raise SpecError(
                f"{path} has no function {name!r}; give the name of one that returns a model"
            )
        model = make_model()
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
