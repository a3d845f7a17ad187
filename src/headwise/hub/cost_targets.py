"""Find what a cost estimate is of: a spec, a model that headwise reads, or any other model of
transformers, whose modules are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ..costs.components import SpecOrModel
from ..costs.cost_report import CostReport, Workload, cost as estimate_costs
from ..costs.counted_model import CountedModel
from ..models.families import CONFIG_REMEDY, FAMILIES, PUBLISHED_MODELS, read_model_spec
from ..models.families.config_reader import UndescribedSetting
from ..models.hub_files import CONFIG_FILE, MANIFEST_FILE, fetch_model
from ..models.model_spec import ModelSpec
from ..models.model_spec.serialization import find_record
from ..util.errors import SpecError
from ..util.files import read_text_file
from ..util.model_names import is_gguf_file, parse_hub_id
from ..util.size_limits import MAX_CONFIG_BYTES, MAX_WIDTH, parse_json, show_int
from .gguf_files import read_gguf_config
from .transformers_loading import config_of_settings, is_known_to_transformers, remove_code_settings

# Numbers of modules that a config may ask for; building more takes minutes.
MAX_MODULES = 1024
NUMBER_OF_MODULES = re.compile(
    r"(num|n|encoder|decoder)_\w*(layers?|blocks?|stages|levels|codebooks)"
    r"|\w*depths?|n_layer|layers"
)
Source = str | Path | Mapping[str, Any]


def describe_model(source: Source, spec_options: Sequence[str] = ()) -> ModelSpec | CountedModel:
    """Return the model that `source` names, as `read_model_spec` does; a model of transformers that
    headwise has no reader for, or with settings that no spec describes, is described by its
    modules, unless `spec_options` names options of the command line that need a spec.

    >>> describe_model({"model_type": "gpt2"}).name
    'gpt2'
    """
    if isinstance(source, Mapping):
        settings: Any = source
        name = "config"
    else:
        name = str(source)
        source, settings = _read_settings(Path(source))
    model_type = settings.get("model_type") if isinstance(settings, Mapping) else None
    is_countable = is_known_to_transformers(model_type)
    reason = ""
    if model_type in FAMILIES or not is_countable:
        try:
            return read_model_spec(source)
        except UndescribedSetting as error:
            if not is_countable:
                raise
            reason = error.fact
    if spec_options:
        fact = f"{spec_options[0]} is for models that headwise reads"
        raise SpecError(f"{fact}, and {name} is counted from its modules; leave it out")
    clean = remove_code_settings(settings, name)
    for key, value in _iter_sizes(clean):
        limit = MAX_MODULES if NUMBER_OF_MODULES.fullmatch(str(key)) else MAX_WIDTH
        if value > limit:
            fact = f"{name}: {key} = {show_int(value)} is out of range"
            raise SpecError(f"{fact}; give {limit:,} or less")
    from .module_counting import count_model

    return count_model(config_of_settings(clean, name), str(model_type), reason)


def _read_settings(path: Path) -> tuple[Source, Any]:
    """Return where a named model is, or its keys, and its settings; {} unless it has those of
    transformers.
    """
    if str(path) in PUBLISHED_MODELS and not path.exists():
        return str(path), {}
    hub_id = parse_hub_id(path)
    if hub_id is not None:
        path = fetch_model(hub_id, weights=False)
    if is_gguf_file(path):
        settings = read_gguf_config(path)
        return settings, settings
    file = path / CONFIG_FILE if path.is_dir() else path
    is_own = path.is_dir() and ((path / MANIFEST_FILE).is_file() or find_record(path) is not None)
    if is_own or file.suffix != ".json" or not file.is_file():
        return path, {}
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise SpecError(f"{file} is larger than {MAX_CONFIG_BYTES:,} bytes; {CONFIG_REMEDY}")
    return path, parse_json(str(file), read_text_file(file), CONFIG_REMEDY)


def _iter_sizes(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Yield every whole number of a JSON document with the key that it is below."""
    if isinstance(value, Mapping):
        for inner_key, inner in cast("Mapping[str, Any]", value).items():
            yield from _iter_sizes(inner, inner_key)
    elif isinstance(value, list):
        yield key, len(cast("list[Any]", value)) if NUMBER_OF_MODULES.fullmatch(str(key)) else 0
        for inner in cast("list[Any]", value):
            yield from _iter_sizes(inner, key)
    elif isinstance(value, int):
        yield key, value


def cost(
    target: SpecOrModel | Source | Mapping[str, SpecOrModel | Source],
    workload: Workload | None = None,
) -> CostReport:
    """Estimate the cost of layers and models before they run; no tensor is allocated.

    Pass one spec or model, or several by name, and a workload (default: one row of 2,048 tokens in
    bf16, or of the maximum length that all of them support if that is less). A model may be given
    by the name of its file or folder, its Hub id, or the keys of its config.json.

    >>> import headwise as hw
    >>> specs = {name: hw.design(preset=name, model=4096, heads=32) for name in ("gqa", "mla")}
    >>> {
    ...     estimate.name: estimate.data["kv_bytes_per_token"]
    ...     for estimate in cost(specs, hw.Workload(context=8192))
    ... }
    {'gqa': 4096, 'mla': 1152}
    """
    if isinstance(target, str | Path) or (isinstance(target, Mapping) and _is_config(target)):
        return estimate_costs(describe_model(target), workload)
    if isinstance(target, Mapping):
        described: dict[str, Any] = {}
        for name, one in target.items():
            is_source = isinstance(one, str | Path | Mapping)
            described[name] = describe_model(cast("Any", one)) if is_source else one
        return estimate_costs(described, workload)
    return estimate_costs(target, workload)


def _is_config(target: Mapping[str, Any]) -> bool:
    return isinstance(target.get("model_type"), str)
