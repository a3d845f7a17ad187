"""Find the attention layers of any model, name them, and decide what can be done to each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import families
from ..errors import SpecError
from ..families import get_weight_names
from ..model_spec import ModelSpec
from ..spec.attention_spec import AttentionSpec
from .adapters.example_run import TracedAdapter, UnclearTraceAdapter, trace_example
from .adapters.native_attention import HeadwiseAdapter, TorchMHAAdapter
from .adapters.output_path import edit_place, measure_edit_places
from .adapters.output_projection import (
    UNKNOWN_STACK,
    OutputProjectionAdapter,
    UnclearProjectionAdapter,
    is_within,
    read_positive_int,
)
from .adapters.transformers_interface import TransformersAdapter
from .hooks import SiteAdapter, SiteModule
from .model_inputs import ModelInputs, check_is_module, prepare_inputs
from .site import POSSIBLE, Ability, Site, Sites

# --- Modules that run at several depths: one site per depth, distinguished by the order of calls --

# Path of a layer in a group of layers that is run repeatedly, as in ALBERT (arXiv:1909.11942).
GROUPED_LAYER = re.compile(r"_groups\.(\d+)\.\w*layers\.(\d+)\.")
DEPTH_KEYS = ("num_hidden_layers", "num_hidden_groups", "inner_group_num")


def split_shared_modules(model: nn.Module, sites: Sequence[SiteModule]) -> list[SiteModule]:
    """Split modules that run at several depths into one site per call, by their config or by their
    paths.

    >>> import headwise as hw
    >>> layer = hw.Attention(hw.design(model=8, heads=2))
    >>> [(site.name, site.same_as) for site in hw.sites(nn.Sequential(layer, layer))]
    [('model.0.attention', None), ('model.1.attention', 'model.0.attention')]
    """
    calls: list[SiteModule] = []
    for site_module in sites:
        calls += _calls_of_module(model, site_module)
    totals = Counter(id(call.module) for call in calls)
    num_uses = Counter[int]()
    numbered: list[SiteModule] = []
    for call in calls:
        key = id(call.module)
        numbered.append(call._replace(call_index=num_uses[key], calls_per_forward=totals[key]))
        num_uses[key] += 1
    return numbered


def _calls_of_module(model: nn.Module, site_module: SiteModule) -> list[SiteModule]:
    """One site for each depth at which a grouped layer runs; else the site itself."""
    site = site_module.site
    match = GROUPED_LAYER.search(f"{site.path}.")
    layers, groups, inner = _read_group_sizes(model, site.path)
    if match is None or not layers:
        return [site_module]
    calls: list[SiteModule] = []
    for run in range(layers):
        if int(run / (layers / groups)) == int(match[1]):
            depth = run * inner + int(match[2])
            name = f"{site.stack}.{depth}.{site.kind}"
            calls.append(site_module._replace(site=replace(site, layer=depth, name=name)))
    return calls


def _read_group_sizes(model: nn.Module, path: str) -> tuple[int, int, int]:
    """Numbers of layer runs, groups, and layers per group, from the config nearest to `path`; zeros
    without one.
    """
    parts = path.split(".")
    for end in range(len(parts), -1, -1):
        config = getattr(model.get_submodule(".".join(parts[:end])), "config", None)
        layers, groups, inner = (read_positive_int(config, (name,)) for name in DEPTH_KEYS)
        if layers and groups and inner:
            return layers, groups, inner
    return 0, 0, 0


# --- Why a layer cannot be observed, ablated, pruned or converted ---------------------------------

PACKED_WEIGHT_NAMES = ("qweight", "qzeros", "weight_packed", "w_bit")  # buffers of quantised layers
QUANTISERS = {"quantized", "bitsandbytes", "torchao"}


def unhookable_reason(model: nn.Module, parts: Sequence[nn.Module]) -> str:
    """Why these modules of a model cannot be observed; "" if they can."""
    if isinstance(model, nn.DataParallel):
        return "its replicas run in separate threads; give model.module"
    if is_compiled(model):
        return (
            "it is compiled, and compiled models cannot be observed; give the model from "
            "before torch.compile"
        )
    if any(tensor.is_meta for part in parts for tensor in part.parameters()):
        return "its weights are on the meta device, where nothing is computed; load them"
    return ""


def mark_unhookable(model: nn.Module, sites: Sequence[SiteModule]) -> Iterator[SiteModule]:
    """Replace the abilities that this model rules out by the reason."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for site_module in sites:
        site = site_module.site
        parts = [modules[site.path], site_module.module]
        reason = unhookable_reason(model, parts) or compiled_part_reason(modules, site.path)
        able = [name for name in ("observe", "ablate") if getattr(site, name).possible]
        if reason:
            site = replace(site, **dict.fromkeys(able, Ability(False, reason)))
        reason = unprunable_reason(parts)
        if reason:
            site = replace(site, prune=Ability(False, reason), convert=Ability(False, reason))
        yield site_module._replace(site=site)


def unprunable_reason(parts: Sequence[nn.Module]) -> str:
    """Why heads of these modules cannot be pruned or converted; "" if they can."""
    for module in chain.from_iterable(part.modules() for part in parts):
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            return "its weights have an adapter (LoRA); merge it first"
        if any(
            type(tensor.data).__name__ == "DTensor" for tensor in module.parameters(recurse=False)
        ):
            return (
                "its weights are sharded over several processes; prune the model before it is "
                "sharded"
            )
        kind = _find_packed_weights(module)
        if kind:
            return (
                f"its weights are quantised ({kind}); prune the unquantised model, then "
                "quantise it again"
            )
        if getattr(module, "is_kv_shared_layer", False):
            return "it reads the keys and values of another layer"
        if getattr(module, "store_full_length_kv", False):
            return "other layers read its keys and values"
    return ""


def _find_packed_weights(module: nn.Module) -> str:
    """Type of the packed weights of a quantised module; "" if its weights are ordinary
    floating-point tensors.
    """
    if QUANTISERS & set(type(module).__module__.split(".")):
        return type(module).__name__
    buffers = dict(module.named_buffers(recurse=False))
    packed = [buffers[name] for name in PACKED_WEIGHT_NAMES if name in buffers]
    for tensor in [*module.parameters(recurse=False), *packed]:
        is_integer = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
        if is_integer or tensor.dtype.itemsize == 1:  # float8 weights come with a separate scale
            return str(tensor.dtype).removeprefix("torch.")
        if type(tensor.data) not in (Tensor, nn.Parameter):
            return type(tensor.data).__name__
    return ""


def is_compiled(module: nn.Module) -> bool:
    """True for torch.compile and TorchScript. Compares a class name, because importing
    torch._dynamo is slow.
    """
    if type(module).__name__ == "OptimizedModule" or isinstance(module, torch.jit.ScriptModule):
        return True
    is_decorated = getattr(type(module).forward, "_torchdynamo_orig_callable", None) is not None
    return is_decorated or module._compiled_call_impl is not None


def compiled_part_reason(modules: Mapping[str, nn.Module], path: str) -> str:
    """Why the module at `path` cannot be observed: it is compiled, lies in a compiled module or
    contains one; or "".
    """
    for other, module in modules.items():
        if (is_within(path, other) or is_within(other, path)) and is_compiled(module):
            part = "it" if other == path else f"{other} ({type(module).__name__})"
            return (
                f"{part} is compiled, and compiled modules cannot be observed; compile it "
                "after the analysis"
            )
    return ""


def find_layers_without_attention(model: nn.Module, sites: Sequence[Site]) -> list[str]:
    """Describe the layers without attention in stacks where other layers have one, such as in
    hybrid models.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    lists: dict[str, set[str]] = {}
    for site in sites:
        parts = site.path.split(".")
        index = next((n for n, part in enumerate(parts) if part.isdigit()), 0)
        path = ".".join(parts[:index])
        if isinstance(modules.get(path), nn.ModuleList):
            lists.setdefault(path, set()).add(parts[index])
    lines: list[str] = []
    for path, with_attention in lists.items():
        layers = dict(modules[path].named_children())
        lacking = [name for name in layers if name not in with_attention]
        usual: set[str] = set()
        others: set[str] = set()
        for name, layer in layers.items():
            kinds = {type(child).__name__ for child in layer.children()}
            (usual if name in with_attention else others).update(kinds)
        kinds = sorted(kind for kind in others - usual if "Norm" not in kind)
        instead = f" ({', '.join(kinds)} instead)" if kinds else ""
        if lacking:
            lines.append(
                f"{len(lacking)} of {len(layers)} layers have no attention{instead}: "
                f"{path}.{','.join(lacking)}"
            )
    return lines


# --- Specs read from the config of a transformers model, assigned to its sites --------------------

# Nested configs, and words in the paths of the modules that they describe.
TOWER_CONFIGS = {
    "vision_config": ("vision", "visual"),
    "text_config": ("text", "language"),
    "audio_config": ("audio",),
}
STACK_NAMES = ("decoder", "encoder")


class TowerSpecs(NamedTuple):
    """Specs from one config, for the modules whose paths contain one of `path_words` (empty: all
    other modules).
    """

    path_words: tuple[str, ...]
    stacks: tuple[str, ...]
    specs: Mapping[str, AttentionSpec]
    approximation_reasons: Mapping[str, str]
    convertible: Ability

    @staticmethod
    def from_config(words: tuple[str, ...], config: Mapping[str, Any]) -> TowerSpecs:
        """Read from a config; `architectures` is ignored, because the task head does not matter
        here.
        """
        model_spec = families.read_model_spec(
            {key: value for key, value in config.items() if key != "architectures"}
        )
        stacks = tuple(stack.name for stack in model_spec.stacks)
        return TowerSpecs(
            words,
            stacks,
            dict(model_spec.attention_specs()),
            model_spec.approximation_reasons(),
            _conversion_ability(model_spec, words),
        )

    def spec_name(self, site: Site) -> str:
        """Name under which `specs` describes a site: its own, or with the only stack if its path
        names no stack.
        """
        if site.name in self.specs or len(self.stacks) != 1:
            return site.name
        has_number = any(part.isdigit() for part in site.path.split("."))
        named = {stack for stack in STACK_NAMES if stack in site.path}
        if has_number and named <= set(self.stacks):
            return f"{self.stacks[0]}.{site.layer}.{site.kind}"
        return site.name


class ConfigSpecs(NamedTuple):
    """Specs of all attention layers that the config of a transformers model describes."""

    towers: tuple[TowerSpecs, ...]
    reason: str

    @staticmethod
    def from_model(model: nn.Module) -> ConfigSpecs:
        """Read from `model.config`; without one, `reason` explains why no site gets a spec."""
        as_dict = getattr(getattr(model, "config", None), "to_dict", None)
        if as_dict is None:
            return ConfigSpecs((), "the model has no config to read")
        config: dict[str, Any] = as_dict()
        towers: list[TowerSpecs] = []
        for key, words in TOWER_CONFIGS.items():
            if isinstance(config.get(key), Mapping):
                with suppress(SpecError):
                    towers.append(TowerSpecs.from_config(words, config[key]))
        try:
            towers.append(TowerSpecs.from_config((), config))
        except SpecError as error:
            return ConfigSpecs(tuple(towers), str(error))
        return ConfigSpecs(tuple(towers), "the config describes no such layer")

    def with_stack(self, site: Site) -> Site:
        """The site with its stack filled in, if it is unknown and the config describes only one."""
        stacks = [tower.stacks for tower in self.towers if not tower.path_words]
        if site.stack == UNKNOWN_STACK and stacks and len(set(stacks[0])) == 1:
            return replace(site, stack=stacks[0][0])
        return site

    def with_spec(self, site: Site) -> Site:
        """The site with its spec, or with the reason why it has none, and with its stack named as
        in the config.
        """
        if site.spec is not None:
            return site
        for tower in self.towers:
            if not tower.path_words or any(word in site.path for word in tower.path_words):
                return self._with_spec_of(tower, site)
        return replace(site, spec_reason=self.reason)

    def _with_spec_of(self, tower: TowerSpecs, site: Site) -> Site:
        name = tower.spec_name(site)
        spec = tower.specs.get(name)
        names_stack = any(stack in site.path for stack in STACK_NAMES)
        if spec is not None and not names_stack and not tower.path_words:
            site = replace(site, name=name, stack=name.partition(".")[0])
        if spec is None or name in tower.approximation_reasons:
            return replace(site, spec_reason=tower.approximation_reasons.get(name, self.reason))
        return replace(
            site,
            heads=len(spec.score_head_of_output),
            q=spec.heads.q,
            kv=spec.heads.kv,
            dim=spec.heads.dim,
            pattern=spec.pattern.text,
            spec=spec,
            spec_reason="",
            prune=tower.convertible,
            convert=tower.convertible,
        )


def _conversion_ability(model_spec: ModelSpec, path_words: tuple[str, ...]) -> Ability:
    """Whether headwise can load the model as its own, which pruning and
    conversion of heads need.
    """
    try:
        get_weight_names(model_spec.name)
    except SpecError as error:
        return Ability(False, str(error))
    if path_words:
        return Ability(False, "it belongs to a model that headwise does not load as a whole")
    if any(stack.weights_of == "first" for stack in model_spec.stacks):
        return Ability(False, "all layers use the weights of the first")
    reasons = [
        *model_spec.approximation_reasons().values(),
        *(part.reason for part in model_spec.beyond),
    ]
    return Ability(False, reasons[0]) if reasons else POSSIBLE


# --- All attention layers of a model --------------------------------------------------------------

ABILITY_PARTICIPLES = {"observe": "observed", "ablate": "ablated"}
ADAPTERS: tuple[SiteAdapter, ...] = (
    HeadwiseAdapter(),
    TransformersAdapter(),
    TorchMHAAdapter(),
    TracedAdapter(),
    OutputProjectionAdapter(),
    UnclearTraceAdapter(),
    UnclearProjectionAdapter(),
)  # in order of precedence: the first adapter that finds a module is used


def sites(model: nn.Module, example: Any = None, *, tokenizer: object = None) -> Sites:
    """List the attention layers of a model, and what can be done to each.

    With an `example` (ids or another tensor, a tuple or mapping of the model's arguments, or a
    text) the model runs on it once, and modules that are seen to compute attention during this run
    are sites too. `tokenizer` encodes a text (default: that of the model).

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config))
    >>> [site.name for site in sites(net)]
    ['decoder.0.attention']
    """
    if example is not None:
        reason = unhookable_reason(check_is_module(model), [model])
        if reason:
            raise ValueError(f"{type(model).__name__} cannot be traced on an example: {reason}")
        _trace_inputs(model, prepare_inputs(model, example, 0, tokenizer))
    site_list = [site_module.site for site_module in find_attention(model)]
    return Sites(site_list, type(model).__name__, find_layers_without_attention(model, site_list))


def find_attention_in_run(model: nn.Module, inputs: ModelInputs) -> list[SiteModule]:
    """Find the attention layers of a model; if there are none, look for them in a run on these
    inputs.
    """
    site_modules = find_attention(model)
    if any(one.site.observe.possible for one in site_modules) or unhookable_reason(model, [model]):
        return site_modules
    _trace_inputs(model, inputs)
    return find_attention(model)


def _trace_inputs(model: nn.Module, inputs: ModelInputs) -> None:
    """Find attention in a run on these inputs, and measure where its heads are edited in two
    further runs.
    """
    trace_example(model, inputs.args, inputs.kwargs)
    unmeasured = [
        site_module
        for site_module in find_attention(model)
        if isinstance(site_module.adapter, TracedAdapter | TransformersAdapter)
        and site_module.site.ablate.possible
        and edit_place(site_module.module).projection is None
    ]
    with torch.no_grad():
        measure_edit_places(model, unmeasured, lambda: model(*inputs.args, **inputs.kwargs))


def find_attention(model: nn.Module) -> list[SiteModule]:
    """Find the attention layers of a model with their modules and adapters; each site gets a unique
    name.
    """
    check_is_module(model)
    site_modules: list[SiteModule] = []
    for adapter in ADAPTERS:
        paths = [site_module.site.path for site_module in site_modules]
        overlaps = is_within if isinstance(adapter, UnclearTraceAdapter) else _contains
        for new in adapter.find_sites(model):
            if isinstance(adapter, UnclearProjectionAdapter):
                paths = [site_module.site.path for site_module in site_modules]
            if not any(overlaps(new.site.path, path) for path in paths):
                site_modules.append(new)
    modules = model.named_modules(remove_duplicate=False)
    order = {path: number for number, (path, _) in enumerate(modules)}
    site_modules.sort(key=lambda site_module: order[site_module.site.path])
    config_specs = ConfigSpecs.from_model(model)
    placed = [
        site_module._replace(site=config_specs.with_stack(site_module.site))
        for site_module in site_modules
    ]
    renamed = _rename_duplicates(split_shared_modules(model, placed))
    specified = [
        site_module._replace(site=config_specs.with_spec(site_module.site))
        for site_module in renamed
    ]
    return list(mark_unhookable(model, specified))


def require_ability(model: nn.Module, ability: str) -> list[SiteModule]:
    """The sites of a model in eval mode that have an ability, "observe" or "ablate"; raises if
    there are none.
    """
    site_modules = find_attention(model)
    able = [
        site_module for site_module in site_modules if getattr(site_module.site, ability).possible
    ]
    if not able:
        reason = "hw.sites(model, example) finds it in a run on an example"
        if site_modules:
            reason = getattr(site_modules[0].site, ability).reason
        raise ValueError(
            f"{type(model).__name__} has no attention that can be {ABILITY_PARTICIPLES[ability]}: "
            f"{reason}"
        )
    if model.training:
        raise ValueError(
            "the model is in train mode, where dropout changes the attention weights; call "
            "model.eval() first"
        )
    return able


def left_out_notes(
    model: nn.Module, ability: str, reasons: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """One note for each reason why sites are left out: they lack an ability, or `reasons` names
    them.
    """
    left_out: dict[str, list[str]] = {}
    for site_module in find_attention(model):
        name = site_module.site.name
        reason = getattr(site_module.site, ability).reason or reasons.get(name, "")
        if reason:
            left_out.setdefault(reason, []).append(name)
    return [f"left out {', '.join(names)}: {reason}" for reason, names in left_out.items()]


def _contains(path: str, other: str) -> bool:
    """True if one of two modules contains the other."""
    return is_within(path, other) or is_within(other, path)


# --- Unique names of sites ------------------------------------------------------------------------


def _rename_duplicates(site_modules: Sequence[SiteModule]) -> list[SiteModule]:
    """Make names unique by naming stacks after module paths; repeated modules get `same_as`, the
    first site's name.
    """
    sites = [site_module.site for site_module in site_modules]
    for part in ("first", "last", "full"):
        counts = Counter(_site_name(site) for site in sites)
        sites = [
            _name_stack(site, part) if counts[_site_name(site)] > 1 else site for site in sites
        ]
    first_names: dict[int, str] = {}
    renamed: list[SiteModule] = []
    for site_module, site in zip(site_modules, sites, strict=True):
        name = _site_name(site)
        first_name = first_names.setdefault(id(site_module.module), name)
        site = replace(site, name=name, same_as=None if first_name == name else first_name)
        renamed.append(site_module._replace(site=site))
    return renamed


def _site_name(site: Site) -> str:
    return f"{site.stack}.{site.layer}.{site.kind}"


def _name_stack(site: Site, part: str) -> Site:
    """The site with its stack named by its path: up to the first number, up to the last number,
    which becomes the layer, or the full path.
    """
    parts = site.path.split(".")
    numbers = [n for n, name in enumerate(parts) if name.isdigit()]
    if part == "first" and numbers:
        return replace(site, stack="_".join(parts[: numbers[0]]))
    if part == "last" and numbers:
        end = numbers[-1]
        return replace(site, stack="_".join(parts[:end]), layer=int(parts[end]))
    return replace(site, stack="_".join(parts))
