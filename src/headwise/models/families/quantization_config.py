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
EXPERTS = ("*.*.feed.each",)
HEADS = ("head",)
FLOAT32_BITS = 32
SCALE_BITS = 16


class QuantizedModules(NamedTuple):
    """The format of quantised matrices, patterns of our names that have it, and modules of the file
    that have not.

    A module of `excluded` is a part of its full name by whole words, with `*` for any word, or
    "re:" and a regular expression. If `only` is given, other modules are not quantised.
    """

    format: WeightFormat
    excluded: Sequence[str] = ()
    included: tuple[str, ...] = LAYER_MATRICES
    only: Sequence[str] | None = None


def with_quantization(
    config: TransformersConfig, model: ModelSpec, names: WeightNames | None
) -> ModelSpec:
    """Return the model with the quantisation of its config, and a note that describes it.

    An unknown method is not an error: the note says that the weights are counted in the format of
    the workload.
    """
    table = config.read_table(KEY)
    if table is None:
        return model
    fact = f"{KEY}: the weights are stored in fewer bits"
    method = str(
        table.values.get("quant_method", "bitsandbytes" if "load_in_4bit" in table.values else "")
    )
    modules = READERS[method](table) if method in READERS else None
    if modules is None:
        note = (
            f"{fact} by quant_method = {method!r}, which is not known here; they are counted "
            "as if they were not"
        )
        return replace(model, notes=(*model.notes, note))
    if modules.excluded and names is None:
        note = (
            f"{fact}; {', '.join(modules.excluded)} are counted as quantised, although they are not"
        )
        quantization = QuantizationSpec(modules.format, modules.included)
        return replace(model, notes=(*model.notes, note), quantization=quantization)
    quantization = _name_weights(model, names, modules)
    note = f"{fact}, as {_describe_format(modules.format)}"
    return replace(model, notes=(*model.notes, note), quantization=quantization)


def _describe_format(weight_format: WeightFormat) -> str:
    bits = f"{weight_format.bits_per_weight:.4g} bits with their scales"
    return f"{weight_format.name} ({bits})"


# --- One reader for each quant_method -------------------------------------------------------------


def _read_modules(table: TransformersConfig, *keys: str) -> list[str] | None:
    for key in keys:
        names = table.read_list(key)
        if names is not None:
            wrong = [name for name in names if not isinstance(name, str)]
            if wrong:
                table.fail(f"{key} holds {wrong[0]!r}", "list names of modules")
            return cast("list[str]", names)
    return None


def _read_mxfp4(table: TransformersConfig) -> QuantizedModules:
    """gpt-oss (2508.10925): the matrices of experts alone, in blocks of 32 with
    a scale of 8 bits.
    """
    return QuantizedModules(
        WEIGHT_FORMATS["mxfp4"],
        _read_modules(table, "modules_to_not_convert") or (),
        included=EXPERTS,
    )


def _read_fp8(table: TransformersConfig) -> QuantizedModules:
    """DeepSeek-V3 (2412.19437) and others: blocks with a float32 scale, or one scale for a whole
    matrix.
    """
    rows = columns = 0
    if table.values.get("weight_block_size") is not None:
        rows, columns = table.read_pair("weight_block_size", 128)
    excluded = _read_modules(table, "modules_to_not_convert", "ignored_layers")
    return QuantizedModules(WeightFormat("fp8", 8, rows, columns, FLOAT32_BITS), excluded or ())


def _read_fbgemm(table: TransformersConfig) -> QuantizedModules:
    """One float32 scale for each row."""
    excluded = _read_modules(table, "modules_to_not_convert")
    return QuantizedModules(WeightFormat("fp8", 8, 1, 0, FLOAT32_BITS), excluded or ())


def _read_bitsandbytes(table: TransformersConfig) -> QuantizedModules:
    """int8 with a scale for each row (2208.07339), or 4 bits in blocks of 64 (2305.14314).

    transformers also converts the output head if the config lists modules to skip and the head is
    none of them.
    """
    skipped = _read_modules(table, "llm_int8_skip_modules")
    included = LAYER_MATRICES if skipped is None else (*LAYER_MATRICES, *HEADS)
    if not (table.read_bool("load_in_4bit", False) or table.read_bool("_load_in_4bit", False)):
        return QuantizedModules(WEIGHT_FORMATS["int8"], skipped or (), included)
    weight_format = replace(
        WEIGHT_FORMATS["nf4"], name=table.read_choice("bnb_4bit_quant_type", "fp4", ("fp4", "nf4"))
    )
    if table.read_bool("bnb_4bit_use_double_quant", False):
        weight_format = replace(weight_format, scale_bits=8, scales_per_group=256)
    return QuantizedModules(weight_format, skipped or (), included)


def _read_gptq(table: TransformersConfig) -> QuantizedModules:
    """GPTQ (2210.17323): groups of inputs with a 16-bit scale and a zero point, and the group of
    every input.
    """
    included = (*LAYER_MATRICES, *HEADS) if table.read_bool("lm_head", False) else LAYER_MATRICES
    blocks = table.read_list("modules_in_block_to_quantize")
    only = None if blocks is None else [str(name) for group in blocks for name in _as_list(group)]
    weight_format = replace(_read_integer_format(table), column_bits=32)
    return QuantizedModules(weight_format, (), included, only)


def _read_awq(table: TransformersConfig) -> QuantizedModules:
    """AWQ (2306.00978): groups of inputs with a 16-bit scale and a zero point."""
    return QuantizedModules(
        _read_integer_format(table), _read_modules(table, "modules_to_not_convert") or ()
    )


def _read_integer_format(table: TransformersConfig) -> WeightFormat:
    bits = table.read_int("bits", "w_bit", default=4, maximum=8)
    group = table.values.get("group_size", table.values.get("q_group_size", 128))
    columns = 0 if group == -1 else table.read_int("group_size", "q_group_size", default=128)
    return WeightFormat(f"int{bits}", bits, 1, columns, SCALE_BITS, zero_bits=bits)


def _read_compressed_tensors(table: TransformersConfig) -> QuantizedModules | None:
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
    if strategy not in sizes or (kind := weights.values.get("type", "int")) not in ("int", "float"):
        return None
    name = f"fp{bits}" if kind == "float" else f"int{bits}"
    zero_bits = 0 if kind == "float" or weights.read_bool("symmetric", True) else bits
    weight_format = WeightFormat(name, bits, *sizes[strategy], SCALE_BITS, zero_bits)
    return QuantizedModules(weight_format, _read_modules(table, "ignore") or ())


def _as_list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


READERS: Mapping[str, Callable[[TransformersConfig], QuantizedModules | None]] = {
    "mxfp4": _read_mxfp4,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "bitsandbytes": _read_bitsandbytes,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed_tensors,
}

# --- From modules of the file to our names --------------------------------------------------------


def _name_weights(
    model: ModelSpec, names: WeightNames | None, modules: QuantizedModules
) -> QuantizationSpec:
    """Return the quantisation with the names of our tensors instead of modules of the file.

    A pattern covers all layers if every layer that has the tensor is excluded.
    """
    by_pattern: dict[str, dict[str, bool]] = defaultdict(dict)
    for weight in model.weights():
        if names is not None and is_linear(weight):
            path = _module_path(weight, names)
            is_excluded = any(_is_part(path, module) for module in modules.excluded)
            if modules.only is not None and not weight.name.startswith("head."):
                is_excluded |= not any(_is_part(path, module) for module in modules.only)
            by_pattern[LAYER.sub(r"\1.*.", weight.name)][weight.name] = is_excluded
    excluded: list[str] = []
    for pattern, layers in by_pattern.items():
        excluded += (
            [pattern]
            if all(layers.values())
            else [name for name, is_out in layers.items() if is_out]
        )
    spec = QuantizationSpec(modules.format, modules.included)
    return replace(spec, excluded=tuple(name for name in excluded if spec.covers_name(name)))


def _module_path(weight: WeightSpec, names: WeightNames) -> str:
    """Name of the module that holds a tensor in the file; an axis in braces, such as that of
    experts, is its first.
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
