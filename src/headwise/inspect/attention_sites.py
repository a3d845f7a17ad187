"""Find the attention layers of any model, name them, and decide what can be done to each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from .hooks import SiteModule
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
    split = [call for site_module in sites for call in _calls_of_module(model, site_module)]
    calls_per_module = Counter(id(site_module.module) for site_module in split)
    calls_so_far = Counter[int]()
    numbered = []
    for site_module in split:
        numbered.append(
            site_module._replace(
                call_index=calls_so_far[id(site_module.module)],
                calls_per_forward=calls_per_module[id(site_module.module)],
            )
        )
        calls_so_far[id(site_module.module)] += 1
    return numbered


def _calls_of_module(model: nn.Module, site_module: SiteModule) -> Iterator[SiteModule]:
    match = GROUPED_LAYER.search(f"{site_module.site.path}.")
    sizes = _read_group_sizes(model, site_module.site.path)
    if match is None or not all(sizes):
        yield site_module
        return
    layers, groups, inner = sizes
    group = int(match[1])
    within = int(match[2])
    for run in range(layers):
        if int(run / (layers / groups)) == group:
            depth = run * inner + within
            site = site_module.site
            name = f"{site.stack}.{depth}.{site.kind}"
            yield site_module._replace(site=replace(site, layer=depth, name=name))


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
        parts = [modules[site_module.site.path], site_module.module]
        reason = unhookable_reason(model, parts) or compiled_part_reason(modules, site.path)
        if reason:
            impossible = Ability(False, reason)
            site = replace(
                site,
                observe=impossible if site.observe.possible else site.observe,
                ablate=impossible if site.ablate.possible else site.ablate,
            )
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
    if any(
        part in ("quantized", "bitsandbytes", "torchao")
        for part in type(module).__module__.split(".")
    ):
        return type(module).__name__
    packed = [
        tensor
        for name, tensor in module.named_buffers(recurse=False)
        if name in PACKED_WEIGHT_NAMES
    ]
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
        stack_path, number = _split_at_number(site.path)
        if isinstance(modules.get(stack_path), nn.ModuleList):
            lists.setdefault(stack_path, set()).add(number)
    return [
        line
        for path, with_attention in lists.items()
        if (line := _describe_missing(path, modules[path], with_attention))
    ]


def _split_at_number(path: str) -> tuple[str, str]:
    """Split a module path at its first number: the path before it, and the number."""
    parts = path.split(".")
    index = next((n for n, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[:index]), parts[index]


def _describe_missing(path: str, layers: nn.Module, with_attention: set[str]) -> str:
    """Describe the layers of a ModuleList that are not in `with_attention`, the names of those with
    attention.
    """
    children = dict(layers.named_children())
    usual_children = {
        _child_names(child) for name, child in children.items() if name in with_attention
    }
    usual_kinds = frozenset(chain.from_iterable(usual_children))
    lacking = {
        name: _child_names(child) - usual_kinds
        for name, child in children.items()
        if name not in with_attention
    }
    if not lacking:
        return ""
    kinds = sorted(set(chain.from_iterable(lacking.values())))
    instead = f" ({', '.join(kinds)} instead)" if kinds else ""
    return (
        f"{len(lacking)} of {len(children)} layers have no attention{instead}: "
        f"{path}.{','.join(lacking)}"
    )


def _child_names(layer: nn.Module) -> frozenset[str]:
    """Class names of a layer's children, except norms."""
    return frozenset(
        name for child in layer.children() if "Norm" not in (name := type(child).__name__)
    )


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
        parts = site.path.split(".")
        stacks_in_path = {stack for stack in STACK_NAMES for part in parts if stack in part}
        has_number = any(part.isdigit() for part in parts)
        name_in_only_stack = f"{self.stacks[0]}.{site.layer}.{site.kind}"
        return (
            name_in_only_stack if has_number and stacks_in_path <= set(self.stacks) else site.name
        )


class ConfigSpecs(NamedTuple):
    """Specs of all attention layers that the config of a transformers model describes."""

    towers: tuple[TowerSpecs, ...]
    reason: str

    @staticmethod
    def from_model(model: nn.Module) -> ConfigSpecs:
        """Read from `model.config`; without one, `reason` explains why no site gets a spec."""
        as_dict = getattr(getattr(model, "config", None), "to_dict", None)
        if as_dict is None:
            return ConfigSpecs(tuple[TowerSpecs, ...](), "the model has no config to read")
        config: dict[str, Any] = as_dict()
        towers = tuple(_read_inner_towers(config))
        try:
            return ConfigSpecs(
                (*towers, TowerSpecs.from_config((), config)), "the config describes no such layer"
            )
        except SpecError as error:
            return ConfigSpecs(towers, str(error))

    def with_stack(self, site: Site) -> Site:
        """The site with its stack filled in, if it is unknown and the config describes only one."""
        stacks = {stack for tower in self.towers if not tower.path_words for stack in tower.stacks}
        return (
            replace(site, stack=stacks.pop())
            if site.stack == UNKNOWN_STACK and len(stacks) == 1
            else site
        )

    def with_spec(self, site: Site) -> Site:
        """The site with its spec, or with the reason why it has none, and with its stack named as
        in the config.
        """
        tower = next(
            (
                candidate
                for candidate in self.towers
                if not candidate.path_words or any(w in site.path for w in candidate.path_words)
            ),
            None,
        )
        if site.spec is not None or tower is None:
            return site if site.spec is not None else replace(site, spec_reason=self.reason)
        name = tower.spec_name(site)
        spec = tower.specs.get(name)
        if (
            not any(stack in site.path for stack in STACK_NAMES)
            and spec is not None
            and not tower.path_words
        ):
            site = replace(site, name=name, stack=name.partition(".")[0])
        if spec is None or name in tower.approximation_reasons:
            return replace(site, spec_reason=tower.approximation_reasons.get(name, self.reason))
        sizes = {
            "heads": len(spec.score_head_of_output),
            "q": spec.heads.q,
            "kv": spec.heads.kv,
            "dim": spec.heads.dim,
        }
        abilities = {"prune": tower.convertible, "convert": tower.convertible}
        return replace(
            site, **sizes, pattern=spec.pattern.text, spec=spec, spec_reason="", **abilities
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


def _read_inner_towers(config: Mapping[str, Any]) -> Iterator[TowerSpecs]:
    """Specs from the nested configs that headwise can read."""
    for key, words in TOWER_CONFIGS.items():
        inner_config = config.get(key)
        if isinstance(inner_config, Mapping):
            try:
                yield TowerSpecs.from_config(words, inner_config)
            except SpecError:
                continue


# --- All attention layers of a model --------------------------------------------------------------

ABILITY_PARTICIPLES = {"observe": "observed", "ablate": "ablated"}
ADAPTERS = (
    HeadwiseAdapter(),
    TransformersAdapter(),
    TorchMHAAdapter(),
    TracedAdapter(),
    OutputProjectionAdapter(),
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
    sites = [
        one
        for one in find_attention(model)
        if isinstance(one.adapter, TracedAdapter | TransformersAdapter)
    ]
    sites = [
        one
        for one in sites
        if one.site.ablate.possible and edit_place(one.module).projection is None
    ]
    with torch.no_grad():
        measure_edit_places(model, sites, lambda: model(*inputs.args, **inputs.kwargs))


def find_attention(model: nn.Module) -> list[SiteModule]:
    """Find the attention layers of a model with their modules and adapters; each site gets a unique
    name.
    """
    check_is_module(model)
    site_modules: list[SiteModule] = []
    for adapter in ADAPTERS:
        paths = [site_module.site.path for site_module in site_modules]
        site_modules += [
            site_module
            for site_module in adapter.find_sites(model)
            if not any(_contains(path, site_module.site.path) for path in paths)
        ]
    paths = [site_module.site.path for site_module in site_modules]
    site_modules += [
        site_module
        for site_module in UnclearTraceAdapter().find_sites(model)
        if not any(is_within(site_module.site.path, path) for path in paths)
    ]
    for site_module in UnclearProjectionAdapter().find_sites(model):
        if not any(_contains(other.site.path, site_module.site.path) for other in site_modules):
            site_modules.append(site_module)
    order = {path: n for n, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    config_specs = ConfigSpecs.from_model(model)
    placed = [
        site_module._replace(site=config_specs.with_stack(site_module.site))
        for site_module in sorted(
            site_modules, key=lambda site_module: order[site_module.site.path]
        )
    ]
    renamed = _rename_duplicates(split_shared_modules(model, placed))
    return list(
        mark_unhookable(
            model,
            [
                site_module._replace(site=config_specs.with_spec(site_module.site))
                for site_module in renamed
            ],
        )
    )


def require_ability(model: nn.Module, ability: str) -> list[SiteModule]:
    """The sites of a model in eval mode that have an ability, "observe" or "ablate"; raises if
    there are none.
    """
    all_sites = find_attention(model)
    able = [site_module for site_module in all_sites if getattr(site_module.site, ability).possible]
    if not able:
        reason = (
            getattr(all_sites[0].site, ability).reason
            if all_sites
            else "hw.sites(model, example) finds it in a run on an example"
        )
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
        site = site_module.site
        reason = getattr(site, ability).reason or reasons.get(site.name, "")
        if reason:
            left_out.setdefault(reason, []).append(site.name)
    return [f"left out {', '.join(names)}: {reason}" for reason, names in left_out.items()]


def _contains(path: str, other: str) -> bool:
    """Whether one of two modules contains the other."""
    return is_within(path, other) or is_within(other, path)


def _rename_duplicates(site_modules: list[SiteModule]) -> Iterator[SiteModule]:
    """Make names unique by naming stacks after module paths; repeated modules get `same_as`, the
    first site's name.
    """
    places = [(site_module.site.stack, site_module.site.layer) for site_module in site_modules]
    for name_stack in (_stack_before_first, _stack_before_last, _stack_full_path):
        names = [
            _site_name(place, site_module.site)
            for place, site_module in zip(places, site_modules, strict=True)
        ]
        is_duplicate = [names.count(name) > 1 for name in names]
        places = [
            name_stack(site_module.site) if duplicate else place
            for duplicate, place, site_module in zip(
                is_duplicate, places, site_modules, strict=True
            )
        ]
    first_names: dict[int, str] = {}
    for place, site_module in zip(places, site_modules, strict=True):
        name = _site_name(place, site_module.site)
        first_name = first_names.setdefault(id(site_module.module), name)
        stack, layer = place
        site = replace(
            site_module.site,
            name=name,
            stack=stack,
            layer=layer,
            same_as=None if first_name == name else first_name,
        )
        yield site_module._replace(site=site)


def _site_name(place: tuple[str, int], site: Site) -> str:
    stack, layer = place
    return f"{stack}.{layer}.{site.kind}"


def _stack_before_first(site: Site) -> tuple[str, int]:
    """Stack named by the path before the first number, or by the full path if it has none; and the
    layer.
    """
    parts, numbers = _split_path(site)
    return "_".join(parts[: numbers[0]] if numbers else parts), site.layer


def _stack_before_last(site: Site) -> tuple[str, int]:
    """Stack named by the path before the last number, which becomes the layer."""
    parts, numbers = _split_path(site)
    return (
        ("_".join(parts[: numbers[-1]]), int(parts[numbers[-1]]))
        if numbers
        else ("_".join(parts), site.layer)
    )


def _stack_full_path(site: Site) -> tuple[str, int]:
    """Stack named by the full path; and the layer."""
    return "_".join(_split_path(site)[0]), site.layer


def _split_path(site: Site) -> tuple[list[str], list[int]]:
    parts = site.path.split(".")
    return parts, [n for n, part in enumerate(parts) if part.isdigit()]
