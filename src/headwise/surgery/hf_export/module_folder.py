"""Folders of changed transformers models that headwise has no spec of: a plain checkpoint if a
config describes the new heads, else a folder with a loader script. Each is loaded and compared.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ...hub.pretrained_models import CONFIG_FILE
from ...hub.transformers_loading import (
    build_without_weights,
    load_model,
    load_resized,
    remove_code_settings,
)
from ...models.families.config_reader import HEAD_COUNT_KEYS, KV_COUNT_KEYS
from ...models.model_spec.serialization import RECORD_FILE
from ...observe.inspect.adapters.declarations import OwnConfig
from ...observe.inspect.model_inputs import ModelInputs
from ...observe.inspect.site import Site
from ...util.errors import SpecError
from ..resized_attention import HeadCounts
from ..verification.model_comparison import TOLERANCE, largest_difference, run_and_record
from .model_folder import (
    add_loader,
    copy_companions,
    describe_plain,
    describe_resized,
)

SiteCounts = Mapping[str, tuple[Site, HeadCounts, HeadCounts]]


def fill_module_folder(
    before: Any,
    changed: nn.Module,
    tokenizer: object,
    counts: SiteCounts,
    inputs: ModelInputs,
    fresh: Path,
) -> tuple[str, str, dict[str, Any]]:
    """Write a plain checkpoint if a config describes the heads, else one with a loader script;
    return kind, sentence and additions to heads.json.

    `counts` are the heads of every attention before and after. The folder is read back, and its
    outputs on `inputs` must be those of the changed model.
    """
    after, is_stored_once = with_plain_parameters(before, changed)
    expected = run_and_record(after, inputs, ())
    config, reason = (before.config, "") if is_stored_once else find_config(after, counts)
    additions = dict[str, Any]()
    if config is not None:
        kind = "transformers"
        _save(after, config, fresh)
        sentence = describe_plain(fresh)
        sentence += " Rows of shared heads are repeated in it." if is_stored_once else ""
        loaded = load_model(fresh, after.dtype)
    else:
        kind = "resized"
        sentence = describe_resized(reason, "hw.heads, hw.trace and other functions,")
        modules = list_module_changes(before, after)
        _save(after, after.config, fresh)
        additions = {"modules": modules, **add_loader(fresh, {"modules": modules})}
        loaded = load_resized(fresh, modules, dtype=after.dtype)
        (fresh / RECORD_FILE).unlink()
    copy_companions(before, tokenizer, fresh)
    difference = largest_difference(run_and_record(loaded, inputs, ()), expected)
    if not difference <= TOLERANCE:
        raise SpecError(
            f"the written folder of {type(after).__name__} differs from the changed model by "
            f"{difference:.2g} of the largest output, so it was removed; keep the model in memory"
        )
    message = f"loaded by transformers, outputs differ by {difference:.1e} of the largest output"
    return kind, sentence, {**additions, "checked": message}


def with_plain_parameters(before: nn.Module, after: nn.Module) -> tuple[Any, bool]:
    """Return the changed model, or a copy of the model with the weights that it computes from
    stored entries, and whether it has any.
    """
    computed = [path for path, one in after.named_modules() if parametrize.is_parametrized(one)]
    if not computed:
        return after, False
    plain = copy.deepcopy(before)
    with torch.no_grad():
        for path in computed:
            module: Any = after.get_submodule(path)
            for name in module.parametrizations:
                plain.get_parameter(f"{path}.{name}").copy_(getattr(module, name))
    return plain, True


def _save(model: Any, config: Any, folder: Path) -> None:
    """Save the weights with this config, without settings that name code."""
    own = model.config
    model.config = config
    try:
        model.save_pretrained(folder)
    finally:
        model.config = own
    path = folder / CONFIG_FILE
    settings = remove_code_settings(json.loads(path.read_text(encoding="utf-8")), CONFIG_FILE)
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def list_module_changes(before: nn.Module, after: nn.Module) -> dict[str, dict[str, Any]]:
    """Return shapes, integers and values of the config that differ, by module, as heads.json lists
    them for the loader script.
    """
    changes = dict[str, dict[str, Any]]()
    modules = dict(before.named_modules())
    for path, module in after.named_modules():
        change = dict[str, Any]()
        if path not in modules:
            raise SpecError(
                f"cannot write {type(after).__name__}: {path} is no module of transformers, because"
                " a torch MultiheadAttention was split; prune other layers"
            )
        old = modules[path]
        shapes = {name: list(one.shape) for name, one in old.named_parameters(recurse=False)}
        new = {name: list(one.shape) for name, one in module.named_parameters(recurse=False)}
        numbers = {name: one for name, one in vars(module).items() if type(one) is int}
        change["shapes"] = {name: one for name, one in new.items() if shapes.get(name) != one}
        change["set"] = {name: one for name, one in numbers.items() if vars(old).get(name) != one}
        config = getattr(module, "config", None)
        change["config"] = config.own_values if isinstance(config, OwnConfig) else {}
        if any(change.values()):
            changes[path] = {key: value for key, value in change.items() if value}
    return changes


# --- A config that describes the new heads --------------------------------------------------------


def find_config(model: Any, counts: SiteCounts) -> tuple[Any, str]:
    """Return a config that builds a model of these shapes; None, with the reason, if none does."""
    shapes = {name: tuple(one.shape) for name, one in model.state_dict().items()}
    reason = "no config gives its tensors these shapes"
    for sets_dim in (False, True):
        memo: dict[int, Any] = {}
        config = copy.deepcopy(model.config, memo)
        for part, sites in _list_parts(model, counts):
            uneven = _describe_uneven(sites)
            if uneven:
                return None, uneven
            _set_counts(memo.get(id(part)), sites, sets_dim)
        try:
            built = build_without_weights(type(model), config)
            getattr(config, "validate", bool)()  # save_pretrained would refuse an invalid one
        except Exception as error:  # a config may refuse values in any way
            fact = " ".join(str(error).split()).rpartition("Error: ")[2].rstrip(".")
            reason = f"transformers rejects the config: {fact[:120]}"
            continue
        if {name: tuple(one.shape) for name, one in built.state_dict().items()} == shapes:
            return config, ""
    return None, reason


def _list_parts(
    model: nn.Module, counts: SiteCounts
) -> Iterator[tuple[Any, Sequence[tuple[Site, HeadCounts, HeadCounts]]]]:
    """Yield each config with the sites whose modules read it, by their nearest config and stack."""
    sites = dict[tuple[int, str], list[tuple[Site, HeadCounts, HeadCounts]]]()
    configs = dict[int, Any]()
    for site, old, new in counts.values():
        path = site.path
        while getattr(model.get_submodule(path), "config", None) is None and path:
            path = path.rpartition(".")[0]
        config: Any = getattr(model.get_submodule(path), "config", None)
        config = config.shared_config if isinstance(config, OwnConfig) else config
        configs[id(config)] = config
        sites.setdefault((id(config), site.stack), []).append((site, old, new))
    for (key, _), rows in sites.items():
        yield configs[key], rows


def _describe_uneven(sites: Sequence[tuple[Site, HeadCounts, HeadCounts]]) -> str:
    """Return which two sites of equal heads now differ; "" if none do."""
    first = dict[HeadCounts, tuple[Site, HeadCounts]]()
    for site, old, new in sites:
        other, counts = first.setdefault(old, (site, new))
        if counts != new:
            return (
                f"{site.name} keeps {new.heads} heads on {new.kv_heads} key-value heads and "
                f"{other.name} {counts.heads} on {counts.kv_heads}"
            )
    return ""


def _set_counts(
    config: Any, sites: Sequence[tuple[Site, HeadCounts, HeadCounts]], sets_dim: bool
) -> None:
    """Set the numbers of heads in a config, and their width if it is derived from them."""
    fields = config.to_dict()  # other attributes are names of these
    for site, old, new in sites:
        for key in HEAD_COUNT_KEYS:
            is_other = key.startswith(("encoder_", "decoder_")) and not key.startswith(site.stack)
            if not is_other and fields.get(key) == old.heads:
                setattr(config, key, new.heads)
        for key in KV_COUNT_KEYS:
            if fields.get(key) == old.kv_heads:
                setattr(config, key, new.kv_heads)
        if sets_dim:
            config.head_dim = site.dim
