"""Describe any model of transformers for cost estimates, by its modules and short runs.

`count_model` builds the model of a config on the meta device. Runs of three lengths
(`counting_runs`) give the attention layers with their masks, the cache that the model itself keeps,
and, from torch's `FlopCounterMode`, every other matrix product. No weights are read, and no code of
a checkpoint runs.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.interfaces.core_types import AxisLayout
from ..attention.masking.patterns import Pattern, Window
from ..costs.counted_model import CountedCore, CountedModel, CountedProducts, Growth
from ..models.families.config_reader import TransformersConfig
from ..models.families.quantization_config import EXPERTS, HEADS, StoredFormat, read_stored_format
from ..models.model_spec import QuantizationSpec, WeightSpec
from ..models.model_spec.quantization import LINEAR_ROLE
from ..observe.inspect.attention_sites import find_attention
from ..util.errors import SpecError, pluralise
from .counting_runs import (
    COUNTING,
    WARNING,
    CacheEntry,
    Recorder,
    Run,
    Runs,
    one_line,
    recording,
    run_lengths,
    without_warnings,
)
from .transformers_loading import build_without_weights, find_class_of_task

ROUTERS = ("gate", "router", "shared_expert_gate")
AXES = ("out", "in", "height", "width", "depth")


def _growth(runs: Mapping[tuple[int, int], Run], read: Callable[[Run], int]) -> Growth:
    return Growth.through({point: read(run) for point, run in runs.items()}) if runs else Growth()


def _find_cores(model: nn.Module, runs: Runs) -> list[CountedCore]:
    """Return the attention cores and states of a model, those of equal layers apart."""
    first, *others = runs.whole.values()
    if any(run.core_paths != first.core_paths for run in others):
        raise ValueError("the number of attention calls depends on the length of the text")
    in_step: set[str] = set()
    keys_of_step: dict[str, dict[tuple[int, int], int]] = {}
    for point, run in runs.steps.items():
        in_step |= {*run.core_paths}
        for core in run.cores:
            keys_of_step.setdefault(core.path, {})[point] = core.keys
    last = next(reversed(runs.whole.values()))
    entries = {(entry.role, entry.index): entry for entry in last.entries}
    cores: list[CountedCore] = []
    for number, call in enumerate(first.cores):
        rows, queries, keys = (
            _growth(runs.whole, lambda run, name=name, at=number: getattr(run.cores[at], name))
            for name in ("rows", "queries", "keys")
        )
        role = "cross" if queries.t and not keys.t else "attention"
        module = model.get_submodule(call.path)
        layer: Any = getattr(module, "layer_idx", None)
        entry = entries.pop((role, layer), None) if call.path in in_step else None
        core = CountedCore(
            call.path,
            role,
            call.heads,
            call.dim,
            call.vdim,
            call.pattern,
            rows,
            queries,
            keys,
            kv_values=call.kv_values,
            in_step=call.path in in_step,
        )
        if call.path in in_step:
            core = replace(core, step_keys=Growth.through(keys_of_step[call.path]))
        cores.append(core if entry is None else _with_cache(core, entry, module))
    for core in _find_own_cores(model, runs, {call.path for call in first.cores}):
        module: Any = model.get_submodule(core.name)
        layer: Any = getattr(module, "layer_idx", None)
        entry = entries.pop((core.role, layer), None)
        if entry is not None:  # Falcon keeps a copy of shared keys and values for each query head
            entry = entry._replace(cached=min(entry.cached, core.kv_values or entry.cached))
        cores.append(core if entry is None else _with_cache(core, entry, module))
    for (role, index), entry in entries.items():
        cores.append(_with_cache(CountedCore(f"cache.{index}", role), entry, None))
    return cores


def _find_own_cores(model: nn.Module, runs: Runs, called: set[str]) -> Iterator[CountedCore]:
    """Yield the cores of attention layers that call no attention function, if their own products
    are scores and values of all heads.
    """
    patterns: set[Pattern | None] = set()
    for tokens, source in runs.whole:
        for queries, keys, pattern in runs.whole[tokens, source].masks:
            patterns |= {pattern} if queries == keys == tokens else set()
    token = Growth(t=Fraction(1))
    source = Growth(s=Fraction(1))
    for one in find_attention(model):
        site = one.site
        flops = _growth(runs.whole, lambda run, path=site.path: run.flops.get(path, 0))
        pair = Fraction(4 * site.q * site.dim)
        sizes = {
            Growth(tt=pair): (token, token),
            Growth(ss=pair): (source, source),
            Growth(ts=pair): (token, source),
        }.get(flops)
        if not pair or sizes is None or site.path in called:
            continue
        step = _growth(runs.steps, lambda run, path=site.path: run.flops.get(path, 0))
        step_keys = Growth(*(size / pair for size in step))
        is_self = sizes == (token, token)
        yield CountedCore(
            site.path,
            "cross" if sizes == (token, source) else "attention",
            site.q,
            site.dim,
            site.dim,
            next(iter(patterns)) if is_self and len(patterns) == 1 else None,
            Growth(c=Fraction(1)),
            *sizes,
            step_keys=step_keys,
            kv_values=2 * site.kv * site.dim,
            in_step=step != Growth(),
        )


def _with_cache(core: CountedCore, entry: CacheEntry, module: Any) -> CountedCore:
    """Return the core with what is cached of it: of latent attention the latent vectors, also where
    transformers keeps keys and values.
    """
    cached = entry.cached
    rank, rope = (getattr(module, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if isinstance(rank, int) and isinstance(rope, int):
        cached = min(cached, rank + rope)
        core = replace(core, step_sizes=(rank + rope, rank))
    return replace(
        core,
        kv_values=cached or core.kv_values,
        cached=cached + entry.extra,
        window=entry.window,
        state=entry.state,
        conv=entry.conv,
    )


def _find_products(
    model: nn.Module, runs: Runs, cores: list[CountedCore], quantised: set[str]
) -> list[CountedProducts]:
    """Return the matrix products of every module besides attention cores."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    attention = {core.name for core in cores}
    own_cores = attention - {core.path for run in runs.whole.values() for core in run.cores}
    latent = {core.name for core in cores if core.step_sizes}
    paths: dict[str, None] = {}
    for run in runs.whole.values():
        paths |= dict.fromkeys(run.flops)
    products: list[CountedProducts] = []
    for path in paths:
        whole = _growth(runs.whole, lambda run, path=path: run.flops.get(path, 0))
        step = _growth(runs.steps, lambda run, path=path: run.flops.get(path, 0))
        if whole == step == Growth() or path in own_cores:
            continue
        module = model.get_submodule(path)
        weights = tuple(
            _weight_spec(name, one, f"{path}.{name}" in quantised)
            for name, one in module.named_parameters(recurse=False)
        )
        routed = sum(weight.numel for weight in weights if len(weight.shape) == 3)
        is_conv = isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        active = Fraction(1) if is_conv or not routed else whole.t / (2 * routed)
        is_projection = any(path.startswith(f"{one}.") for one in attention)
        role = "attention projections" if is_projection else "other layers"
        role = "experts" if active < 1 else "head" if module is head else role
        reads_signal = runs.grows != "both" and not products and "embed" in path
        product = CountedProducts(
            path,
            role,
            whole,
            step,
            weights,
            active if 0 < active < 1 else Fraction(1),
            num_grad_factors=1 if reads_signal else 2,
        )
        if path.rpartition(".")[0] in latent and product.is_linear and step.t == whole.t:
            # It expands all cached latents in every step, which engines do not; see `step_sizes`.
            product = replace(product, step=Growth(c=whole.t))
        products.append(product)
    return products


def _list_quantised(model: nn.Module, stored: StoredFormat | None) -> Iterator[str]:
    """Yield the names of the matrices that quantisers convert: of linear maps and experts, besides
    routers, the output head and the modules that a config leaves out.
    """
    included = stored.included if stored else ()
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    for path, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        is_linear &= path.rpartition(".")[2] not in ROUTERS and included != EXPERTS
        is_linear &= module is not head or HEADS[0] in included
        if stored is not None and not stored.has_module(path, module is head):
            continue
        for name, tensor in module.named_parameters(path, recurse=False):
            is_expert = tensor.dim() == 3 and "expert" in path
            if is_expert or (tensor.dim() == 2 and is_linear):
                yield name


def _weight_spec(name: str, tensor: Tensor, is_quantised: bool) -> WeightSpec:
    axes = ("experts", *AXES)[tensor.dim() != 3 :] if tensor.dim() < 4 else AXES
    names = axes[: tensor.dim()]
    layout = AxisLayout(tuple((axis,) for axis in names))
    role = LINEAR_ROLE if is_quantised else ""
    return WeightSpec(name, layout, dict(zip(names, tensor.shape, strict=True)), role)


Component = CountedCore | CountedProducts


def _merge_equal(components: list[Component]) -> tuple[Component, ...]:
    """Merge equal components of layers that differ in their number."""
    counts: Counter[Component] = Counter()
    for one in components:
        counts[replace(one, name=_star(one.name))] += 1
    return tuple(replace(one, times=count) for one, count in counts.items())


def _star(path: str) -> str:
    """Replace the numbers of layers in a path by stars.

    >>> _star("model.layers.11.mlp.1")
    'model.layers.*.mlp.*'
    """
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


# --- The model ------------------------------------------------------------------------------------


def count_model(config: Any, name: str = "", reason: str = "") -> CountedModel:
    """Describe the model of a transformers config for cost estimates; `reason` is why its modules
    are counted, by default that headwise has no reader for it.

    >>> from transformers import Ernie4_5Config
    >>> sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    >>> model = count_model(Ernie4_5Config(**sizes, **heads, vocab_size=10))
    >>> (
    ...     model.parameters.total,
    ...     [core.cached for core in model.components if core.role == "attention"],
    ... )
    (1848, [24])
    """
    config = copy.deepcopy(config)  # transformers writes the chosen attention into it
    reason = reason or f"headwise has no reader for {config.model_type!r}"
    return _count(lambda: _build(config, name), config, name, reason)


def count_module(model: Any) -> CountedModel:
    """Describe a transformers model in memory, also one with other heads than its config says.

    >>> from transformers import GPT2Config, GPT2Model
    >>> net = GPT2Model(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=5, n_positions=48))
    >>> count_module(net).parameters.total == sum(one.numel() for one in net.parameters())
    True
    """
    tensors = (*model.parameters(), *model.buffers())
    memo: dict[int, Any] = {id(one): torch.empty_like(one, device="meta") for one in tensors}
    for one in model.parameters():
        memo[id(one)] = nn.Parameter(memo[id(one)], requires_grad=False)
    empty = copy.deepcopy(model, memo).eval()

    def build() -> nn.Module:
        with suppress(ValueError):  # it computes attention itself
            empty.set_attn_implementation(COUNTING)
        return empty

    return _count(build, empty.config, "", "FLOPs and cache")


def _count(build: Callable[[], nn.Module], config: Any, name: str, reason: str) -> CountedModel:
    """Describe the model that `build` returns for this config."""
    for part in (config, config.get_text_config()):
        if getattr(part, "use_cache", True) is False:  # as training leaves it
            part.use_cache = True
    recorder = Recorder({}, getattr(config.get_text_config(), "index_topk", None))
    with recording(recorder), without_warnings():
        model: Any = build()
        for module in model.modules():
            if getattr(module, WARNING, None) is not None:
                setattr(module, WARNING, lambda *_, **__: None)  # it reads values of ids
        if model._can_set_experts_implementation():
            # whose shapes do not depend on the router
            model.set_experts_implementation("batched_mm")
        recorder.paths = {module: path for path, module in model.named_modules()}
        settings = TransformersConfig(config.to_dict(), config.model_type)
        stored = read_stored_format(settings)
        quantised = set(_list_quantised(model, stored))
        weights: Counter[WeightSpec] = Counter()
        for path, parameter in model.named_parameters():
            weights[_weight_spec(_star(path), parameter, path in quantised)] += 1
        kind = type(model).__name__
        notes = [f"{reason}: counted from {kind}"]
        components: list[Component] = []
        cores: list[CountedCore] = []
        can_decode = False
        try:
            runs = run_lengths(model, config, recorder)
            cores = _find_cores(model, runs)
            components = [*_find_products(model, runs, cores, quantised), *cores]
            can_decode = bool(runs.steps)
            notes += _list_notes(model, config, runs, cores)
            kind += f" of {_describe(cores)}"
        except Exception as error:  # a model may raise anything
            message = one_line(error)
            notes.append(f"FLOPs and cache are unknown, because it does not run here: {message}")
        notes += [] if stored is None else [stored.note]
    return CountedModel(
        name or config.model_type,
        kind,
        tuple(weights.items()),
        _merge_equal(components),
        tuple(notes),
        can_decode,
        _count_looked_up(model, [core.name for core in cores]),
        QuantizationSpec(stored.format) if stored and stored.format else None,
    )


def _build(config: Any, name: str) -> nn.Module:
    """Build the model of a config on the meta device, with the attention that records its calls."""
    model_class = find_class_of_task(config)
    message = ""
    for attention in (COUNTING, "eager", None):
        try:
            model: Any = build_without_weights(model_class, config, attention)
            break
        except Exception as error:  # a config may have any values
            message = one_line(error)
    else:
        raise SpecError(
            f"{name or config.model_type}: transformers cannot build {model_class.__name__}: "
            f"{message}; correct config.json"
        )
    return model


def _count_looked_up(model: nn.Module, attention: list[str]) -> int:
    """Count the parameters of embedding tables, without those that an output head multiplies with,
    and those of biases in attention layers.
    """
    linear = {
        id(module.weight)
        for module in model.modules()
        if isinstance(getattr(module, "weight", None), Tensor)
        and not isinstance(module, nn.Embedding)
    }
    tables = {
        id(module.weight): module.weight.numel()
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and id(module.weight) not in linear
        and path.rpartition(".")[0] not in attention
    }
    return sum(tables.values())


def _describe(cores: list[CountedCore]) -> str:
    """Describe the layers of a model."""
    num_attention = len([core for core in cores if core.heads])
    num_states = len([core for core in cores if core.state or core.conv])
    text = pluralise(num_attention, "attention layer")
    return text + (f" and {num_states} recurrent" if num_states else "")


def _list_notes(
    model: nn.Module, config: Any, runs: Runs, cores: list[CountedCore]
) -> Iterator[str]:
    """Yield what is not known about a model, or approximated."""
    if runs.step_error:
        yield f"decode steps and cache are unknown, because no step runs here: {runs.step_error}"
    if runs.reads_values:
        yield "it reads values of its inputs to decide what to compute; they are taken as zero"
    called = {core.name for core in cores}
    used: set[str] = set()
    states: set[int] = set()
    for run in runs.whole.values():
        used |= run.busy_paths
        states |= {entry.index for entry in run.entries if entry.state}
    attention_paths = [
        one.site.path for one in find_attention(model) if one.site.path not in called
    ]
    unknown = [core for core in cores if core.heads and core.pattern is None]
    active: set[str] = set()
    for path in used:
        words = path.split(".")
        active |= {".".join(words[:end]) for end in range(1, len(words) + 1)}
    # A module may also use the weights of one that it does not call, such as a convolution.
    idle = [path for path in _find_idle(model, "", active) if path.rpartition(".")[0] not in used]
    silent: list[str] = []
    for path in attention_paths:
        is_idle = any(path == one or path.startswith(f"{one}.") for one in idle)
        is_state = getattr(model.get_submodule(path), "layer_idx", None) in states
        silent += [] if is_idle or (is_state and path not in called) else [path]
    if unknown:
        yield (
            f"in {pluralise(len(unknown), 'attention layer')} it is unknown which pairs are "
            "allowed; all are required"
        )
    if silent:
        yield (
            f"{pluralise(len(silent), 'attention layer')} ({_star(silent[0])}): the products are "
            "counted as torch computes them, with all pairs"
        )
    chosen = getattr(config.get_text_config(), "index_topk", None)
    if chosen and any(core.pattern == Window(chosen) for core in cores):
        yield f"an indexer chooses {chosen:,} keys for each query: the pairs are as in a window"
    if idle:
        names = ", ".join(dict.fromkeys(map(_star, idle)))
        yield f"{names}: no part of the run, so its parameters are counted, its FLOPs are not"


def _find_idle(module: nn.Module, path: str, active: set[str]) -> list[str]:
    """Return the paths of the largest modules with matrices that no run multiplies with."""
    if path and path not in active:
        matrices = [one for one in module.modules() if not isinstance(one, nn.Embedding)]
        weights = chain.from_iterable(one.parameters(recurse=False) for one in matrices)
        return [path] if any(weight.dim() > 1 for weight in weights) else []
    idle: list[str] = []
    for name, child in module.named_children():
        idle += _find_idle(child, f"{path}.{name}" if path else name, active)
    return idle
