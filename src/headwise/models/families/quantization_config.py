"""Read `quantization_config` of config.json: the number format of quantised weights, and which
weights have it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from ..model_spec import WEIGHT_FORMATS, ModelSpec, QuantizationSpec, WeightFormat, WeightSpec
from ..model_spec.quantization import LAYER_MATRICES, is_linear
from .config_reader import TransformersConfig
from .weight_names import LAYER, WeightNames

KEY = "quantization_config"
EXPERTS = ("*.*.feed.expert",)
HEADS = ("head",)
FLOAT32_BITS = 32
SCALE_BITS = 16


class StoredFormat(NamedTuple):
    """The format of quantised weights, None if it is not known here, and which modules of a file
    have it: none of `excluded`, and of layers those of `only` if it is given.
    """

    format: WeightFormat | None
    fact: str
    included: tuple[str, ...] = LAYER_MATRICES
    excluded: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None

    @property
    def note(self) -> str:
        """Describe the format in one sentence."""
        if self.format is None:
            return self.fact
        bits = f"{self.format.bits_per_weight:.4g} bits with their scales"
        return f"{self.fact}, as {self.format.name} ({bits})"

    def has_module(self, path: str, is_head: bool = False) -> bool:
        """True if the matrix of a linear map at this path of a file is quantised."""
        is_excluded = any(_is_part(path, module) for module in self.excluded)
        if self.only is not None and not is_head:
            is_excluded |= not any(_is_part(path, module) for module in self.only)
        return not is_excluded


def read_stored_format(config: TransformersConfig) -> StoredFormat | None:
    """Return the format that a config names, or None for weights that are not quantised.

    An unknown method is not an error: the weights are counted in the format of the workload, and
    the note reports that.
    """
    table = config.read_table(KEY)
    if table is None:
        return None
    fact = f"{KEY}: the weights are stored in fewer bits"
    method = str(
        table.values.get("quant_method", "bitsandbytes" if "load_in_4bit" in table.values else "")
    )
    weight_format = READERS[method](table) if method in READERS else None
    if weight_format is None:
        return StoredFormat(
            None,
            f"{fact} by quant_method = {method!r}, which is not known here; they are counted "
            "as if they were not",
        )
    excluded = _read_modules(table, EXCLUDING_KEYS.get(method, ())) or []
    blocks = table.read_list("modules_in_block_to_quantize") if method == "gptq" else None
    only = None if blocks is None else tuple(_flatten(blocks))
    return StoredFormat(weight_format, fact, _read_included(table, method), tuple(excluded), only)


def with_quantization(
    config: TransformersConfig, model: ModelSpec, names: WeightNames | None
) -> ModelSpec:
    """Return the model with the quantisation of its config, and a note that describes it."""
    stored = read_stored_format(config)
    if stored is None:
        return model
    if stored.format is None:
        return replace(model, notes=(*model.notes, stored.note))
    note = stored.note
    quantization = QuantizationSpec(stored.format, stored.included)
    if stored.excluded and names is None:
        modules = ", ".join(stored.excluded)
        note = f"{stored.fact}; {modules} are counted as quantised, although they are not"
    elif names:
        unquantised = _exclude_weights(model, names, stored)
        covered = [name for name in unquantised if quantization.covers_name(name)]
        quantization = replace(quantization, excluded=tuple(covered))
    return replace(model, notes=(*model.notes, note), quantization=quantization)


# --- The keys of each quant_method ----------------------------------------------------------------

# Keys with the modules that are not quantised. A module is a part of a full name in the file by
# whole words, with `*` for any word, or "re:" and a regular expression.
EXCLUDING_KEYS = {
    "mxfp4": ("modules_to_not_convert",),
    "fp8": ("modules_to_not_convert", "ignored_layers"),
    "fbgemm_fp8": ("modules_to_not_convert",),
    "bitsandbytes": ("llm_int8_skip_modules",),
    "awq": ("modules_to_not_convert",),
    "compressed-tensors": ("ignore",),
}


def _read_modules(table: TransformersConfig, keys: Sequence[str]) -> list[str] | None:
    for key in keys:
        names = table.read_list(key)
        if names is not None:
            wrong = [name for name in names if not isinstance(name, str)]
            if wrong:
                table.fail(f"{key} holds {wrong[0]!r}", "list names of modules")
            return cast("list[str]", names)
    return None


def _read_included(table: TransformersConfig, method: str) -> tuple[str, ...]:
    """Return patterns of our names that are quantised: the matrices of layers, and the output head
    if GPTQ's config includes it, or if bitsandbytes lists modules to skip without it.
    """
    if method == "mxfp4":  # gpt-oss (2508.10925): the matrices of experts alone
        return EXPERTS
    has_head = method == "gptq" and table.read_bool("lm_head", False)
    has_head |= method == "bitsandbytes" and table.values.get("llm_int8_skip_modules") is not None
    return (*LAYER_MATRICES, *HEADS) if has_head else LAYER_MATRICES


def _read_fp8(table: TransformersConfig) -> WeightFormat:
    """DeepSeek-V3 (2412.19437) and others: blocks with a float32 scale, or one scale for a whole
    matrix.
    """
    rows = columns = 0
    if table.values.get("weight_block_size") is not None:
        rows, columns = table.read_pair("weight_block_size", 128)
    return WeightFormat("fp8", 8, rows, columns, FLOAT32_BITS)


def _read_bitsandbytes(table: TransformersConfig) -> WeightFormat:
    """int8 with a scale for each row (2208.07339), or 4 bits in blocks of 64 (2305.14314)."""
    if not (table.read_bool("load_in_4bit", False) or table.read_bool("_load_in_4bit", False)):
        return WEIGHT_FORMATS["int8"]
    name = table.read_choice("bnb_4bit_quant_type", "fp4", ("fp4", "nf4"))
    weight_format = replace(WEIGHT_FORMATS["nf4"], name=name)
    if table.read_bool("bnb_4bit_use_double_quant", False):
        weight_format = replace(weight_format, scale_bits=8, scales_per_group=256)
    return weight_format


def _read_awq(table: TransformersConfig) -> WeightFormat:
    """AWQ (2306.00978): groups of inputs with a 16-bit scale and a zero point."""
    bits = table.read_int("bits", "w_bit", default=4, maximum=8)
    group = table.values.get("group_size", table.values.get("q_group_size", 128))
    columns = 0 if group == -1 else table.read_int("group_size", "q_group_size", default=128)
    return WeightFormat(f"int{bits}", bits, 1, columns, SCALE_BITS, zero_bits=bits)


def _read_compressed_tensors(table: TransformersConfig) -> WeightFormat | None:
    """compressed-tensors: the first group of the config, with a 16-bit scale by tensor, row, group
    or block.
    """
    groups = table.read_table("config_groups")
    tables = [groups.read_table(name) for name in groups.values] if groups else []
    weights = tables[0].read_table("weights") if len(tables) == 1 and tables[0] else None
    if weights is None:
        return None
    bits = weights.read_int("num_bits", default=8, maximum=8)
    strategy = weights.values.get("strategy")
    block = weights.read_pair("block_structure", 128) if strategy == "block" else (0, 0)
    group = weights.read_int("group_size", default=128) if strategy == "group" else 0
    sizes = {"tensor": (0, 0), "channel": (1, 0), "group": (1, group), "block": block}
    kind = weights.values.get("type", "int")
    if strategy not in sizes or kind not in ("int", "float"):
        return None
    name = f"fp{bits}" if kind == "float" else f"int{bits}"
    zero_bits = 0 if kind == "float" or weights.read_bool("symmetric", True) else bits
    return WeightFormat(name, bits, *sizes[strategy], SCALE_BITS, zero_bits)


READERS: Mapping[str, Callable[[TransformersConfig], WeightFormat | None]] = {
    "mxfp4": lambda table: WEIGHT_FORMATS["mxfp4"],
    "fp8": _read_fp8,
    "fbgemm_fp8": lambda table: WeightFormat("fp8", 8, 1, 0, FLOAT32_BITS),  # a scale for each row
    "bitsandbytes": _read_bitsandbytes,
    # GPTQ (2210.17323): as AWQ, and the group of every input.
    "gptq": lambda table: replace(_read_awq(table), column_bits=32),
    "awq": _read_awq,
    "compressed-tensors": _read_compressed_tensors,
}

# --- From modules of the file to our names --------------------------------------------------------


def _flatten(blocks: list[Any]) -> list[str]:
    names = list[str]()
    for group in blocks:
        names += map(str, cast("list[Any]", group) if isinstance(group, list) else [group])
    return names


def _exclude_weights(model: ModelSpec, names: WeightNames, stored: StoredFormat) -> list[str]:
    """Return the names of our matrices that the file does not quantise.

    A pattern covers all layers if every layer that has the tensor is excluded.
    """
    by_pattern: dict[str, dict[str, bool]] = defaultdict(dict)
    for weight in model.weights():
        if is_linear(weight):
            path = _module_path(weight, names)
            is_excluded = not stored.has_module(path, weight.name.startswith("head."))
            by_pattern[LAYER.sub(r"\1.*.", weight.name)][weight.name] = is_excluded
    patterns = list[str]()
    for pattern, layers in by_pattern.items():
        if all(layers.values()):
            patterns.append(pattern)
        else:
            patterns += [name for name, is_out in layers.items() if is_out]
    return patterns


def _module_path(weight: WeightSpec, names: WeightNames) -> str:
    """Return the name of the module that holds a tensor in the file; axes in braces, such as the
    expert axis, become 0.
    """
    location = names.find_location(weight.name)
    layer = LAYER.match(weight.name)
    if location is None:
        return ""
    path = location.path.replace("{layer}", layer[2] if layer else "")
    return names.prefixes[0] + re.sub(r"\{\w+\}", "0", path).removesuffix(".weight")


def _is_part(path: str, module: str) -> bool:
    if module.startswith("re:"):
        return re.match(module.removeprefix("re:"), path) is not None
    words = re.escape(module).replace(r"\*", r"[^.]+")
    return re.search(rf"(^|\.){words}(\.|$)", path) is not None
