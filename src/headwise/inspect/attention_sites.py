"""Modules that serve several depths of a model: one site for each, told apart by the order of calls in a forward."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import families
from ..errors import SpecError
from ..families import get_weight_names
from ..model_spec import ModelSpec
from ..spec.attention_spec import AttentionSpec
from .adapters.example_run import TracedAdapter, UnclearTraceAdapter, trace_example
from .adapters.headwise_attention import HeadwiseAdapter
from .adapters.module_attributes import UNKNOWN_STACK, is_within, read_positive_int
from .adapters.output_projection import OutputProjectionAdapter
from .adapters.torch_mha import TorchMHAAdapter
from .adapters.transformers_interface import TransformersAdapter
from .hooks import SiteModule
from .site import POSSIBLE, Ability, Site, Sites

# Where a layer stands in a group of layers that is run again and again, as ALBERT has it (arXiv:1909.11942).
GROUPED_LAYER = re.compile(r"_groups\.(\d+)\.\w*layers\.(\d+)\.")
DEPTH_KEYS = ("num_hidden_layers", "num_hidden_groups", "inner_group_num")


def split_shared_modules(model: nn.Module, sites: Sequence[SiteModule]) -> list[SiteModule]:
    """The same, each with which call of its module it is: by its config, or by the places at which the module stands.

    >>> import headwise as hw
    >>> one = hw.Attention(hw.design(model=8, heads=2))
    >>> [(site.name, site.same_as) for site in hw.sites(nn.Sequential(one, one))]
    [('model.0.attention', None), ('model.1.attention', 'model.0.attention')]
    """
    split = [turn for one in sites for turn in _calls_of_module(model, one)]
    calls, so_far = Counter(id(one.module) for one in split), Counter[int]()
    told = []
    for one in split:
        told.append(one._replace(call_index=so_far[id(one.module)], calls_per_forward=calls[id(one.module)]))
        so_far[id(one.module)] += 1
    return told


def _calls_of_module(model: nn.Module, one: SiteModule) -> Iterator[SiteModule]:
    place = GROUPED_LAYER.search(f"{one.site.path}.")
    sizes = _read_group_sizes(model, one.site.path)
    if place is None or not all(sizes):
        yield one
        return
    layers, groups, inner = sizes
    group, within = int(place[1]), int(place[2])
    for run in range(layers):
        if int(run / (layers / groups)) == group:
            depth, site = run * inner + within, one.site
            name = f"{site.stack}.{depth}.{site.kind}"
            yield one._replace(site=replace(site, layer=depth, name=name))


def _read_group_sizes(model: nn.Module, path: str) -> tuple[int, int, int]:
    """How many runs, groups, and layers in a group: from the config nearest to a path; zeros if none says it."""
    parts = path.split(".")
    for end in range(len(parts), -1, -1):
        config = getattr(model.get_submodule(".".join(parts[:end])), "config", None)
        layers, groups, inner = (read_positive_int(config, (name,)) for name in DEPTH_KEYS)
        if layers and groups and inner:
            return layers, groups, inner
    return 0, 0, 0


# --- What stands in the way of looking at an attention, of changing it, and of making it smaller -------

PACKED_WEIGHT_NAMES = (
    "qweight",
    "qzeros",
    "weight_packed",
    "w_bit",
)  # what quantised layers keep in the place of a weight


def unhookable_reason(model: nn.Module, parts: Sequence[nn.Module]) -> str:
    """Why these parts of a model cannot be watched; nothing if they can."""
    if isinstance(model, nn.DataParallel):
        return "its replicas run in threads of their own; give model.module"
    if _is_compiled(model):
        return "it is compiled, and what was compiled cannot be watched; give the model as it was before"
    if any(tensor.is_meta for part in parts for tensor in part.parameters()):
        return "its weights are on the meta device, where nothing is computed; load them"
    return ""


def mark_unhookable(model: nn.Module, sites: Sequence[SiteModule]) -> Iterator[SiteModule]:
    """The same, where something stands in the way with the reason."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for one in sites:
        site, parts = one.site, [modules[one.site.path], one.module]
        if why := unhookable_reason(model, parts):
            no = Ability(False, why)
            site = replace(site, see=no if site.see.can else site.see, silence=no if site.silence.can else site.silence)
        if why := unprunable_reason(parts):
            site = replace(site, cut=Ability(False, why), share=Ability(False, why))
        yield one._replace(site=site)


def unprunable_reason(parts: Sequence[nn.Module]) -> str:
    """Why an attention cannot be made smaller as it is; nothing if it could be."""
    for module in chain.from_iterable(part.modules() for part in parts):
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            return "its weights have an adapter beside them (LoRA); merge it first"
        if any(type(tensor.data).__name__ == "DTensor" for tensor in module.parameters(recurse=False)):
            return "its weights are spread over several processes; cut the model before it is spread"
        if kind := _find_packed_weights(module):
            return f"its weights are quantised ({kind}); cut the model that was quantised, then quantise it again"
        if getattr(module, "is_kv_shared_layer", False):
            return "it reads the keys and values of another layer"
        if getattr(module, "store_full_length_kv", False):
            return "other layers read its keys and values"
    return ""


def _find_packed_weights(module: nn.Module) -> str:
    """What a module keeps in the place of floating-point weights; nothing if it keeps those."""
    if any(part in ("quantized", "bitsandbytes", "torchao") for part in type(module).__module__.split(".")):
        return type(module).__name__
    packed = [tensor for name, tensor in module.named_buffers(recurse=False) if name in PACKED_WEIGHT_NAMES]
    for tensor in [*module.parameters(recurse=False), *packed]:
        whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
        if whole or tensor.dtype.itemsize == 1:  # floating-point numbers of one byte come with a scale beside them
            return str(tensor.dtype).removeprefix("torch.")
        if type(tensor.data) not in (Tensor, nn.Parameter):
            return type(tensor.data).__name__
    return ""


def _is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile or TorchScript was here; the former goes by its name, for importing it is slow."""
    if type(model).__name__ == "OptimizedModule" or isinstance(model, torch.jit.ScriptModule):
        return True
    return any(module._compiled_call_impl is not None for module in model.modules())


def find_layers_without_attention(model: nn.Module, sites: Sequence[Site]) -> list[str]:
    """Layers that have no attention, of stacks in which others have one."""
    modules = dict(model.named_modules(remove_duplicate=False))
    lists: dict[str, set[str]] = {}
    for site in sites:
        before, number = _split_at_number(site.path)
        if isinstance(modules.get(before), nn.ModuleList):
            lists.setdefault(before, set()).add(number)
    return [line for path, having in lists.items() if (line := _describe_missing(path, modules[path], having))]


def _split_at_number(path: str) -> tuple[str, str]:
    """What stands before the first number of a path, and that number."""
    parts = path.split(".")
    at = next((n for n, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[:at]), parts[at]


def _describe_missing(path: str, layers: nn.Module, having: set[str]) -> str:
    """What to say of the layers of a list that are not among those having an attention."""
    named = dict(layers.named_children())
    usual = {_child_names(child) for name, child in named.items() if name in having}
    usual_kinds = frozenset(chain.from_iterable(usual))
    lacking = {name: _child_names(child) - usual_kinds for name, child in named.items() if name not in having}
    if not lacking:
        return ""
    kinds = sorted(set(chain.from_iterable(lacking.values())))
    instead = f" ({', '.join(kinds)} instead)" if kinds else ""
    return f"{len(lacking)} of {len(named)} layers have no attention{instead}: {path}.{','.join(lacking)}"


def _child_names(layer: nn.Module) -> frozenset[str]:
    """What the parts of a layer are called."""
    return frozenset(name for child in layer.children() if "Norm" not in (name := type(child).__name__))


# --- What the config of somebody else's model says of its attentions, given to their sites -------------

# Configs inside a config, and how modules that they describe are called.
TOWER_CONFIGS = {"vision_config": ("vision", "visual"), "text_config": ("text", "language"), "audio_config": ("audio",)}
STACK_NAMES = ("decoder", "encoder")


class TowerSpecs(NamedTuple):
    """What a config says of the modules whose paths have one of these words in them; of no words, of all others."""

    path_words: tuple[str, ...]
    stacks: tuple[str, ...]
    specs: Mapping[str, AttentionSpec]
    approximation_reasons: Mapping[str, str]
    convertible: Ability

    @staticmethod
    def from_config(words: tuple[str, ...], config: Mapping[str, Any]) -> TowerSpecs:
        """Read from these keys; which head stands on the model does not matter here."""
        described = families.read_model_spec({key: value for key, value in config.items() if key != "architectures"})
        stacks = tuple(stack.name for stack in described.stacks)
        return TowerSpecs(
            words,
            stacks,
            dict(described.attention_specs()),
            described.approximation_reasons(),
            _conversion_ability(described, words),
        )

    def spec_name(self, site: Site) -> str:
        """By what name a site stands in the description: its own, or that of the only stack where paths name none."""
        if site.name in self.specs or len(self.stacks) != 1:
            return site.name
        parts = site.path.split(".")
        told = {stack for stack in STACK_NAMES for part in parts if stack in part}
        layered = any(part.isdigit() for part in parts)
        only = f"{self.stacks[0]}.{site.layer}.{site.kind}"
        return only if layered and told <= set(self.stacks) else site.name


class ConfigSpecs(NamedTuple):
    """What the config of a model of transformers says of its attentions."""

    towers: tuple[TowerSpecs, ...]
    reason: str

    @staticmethod
    def from_model(model: nn.Module) -> ConfigSpecs:
        """Read from `model.config`, if it has one."""
        as_dict = getattr(getattr(model, "config", None), "to_dict", None)
        if as_dict is None:
            return ConfigSpecs(tuple[TowerSpecs, ...](), "it keeps no config that could be read")
        told: dict[str, Any] = as_dict()
        inner = tuple(_read_inner_towers(told))
        try:
            return ConfigSpecs((*inner, TowerSpecs.from_config((), told)), "its config describes no such layer")
        except SpecError as error:
            return ConfigSpecs(inner, str(error))

    def with_stack(self, site: Site) -> Site:
        """The site in the one stack that there is, where nobody says in which."""
        stacks = {stack for tower in self.towers if not tower.path_words for stack in tower.stacks}
        return replace(site, stack=stacks.pop()) if site.stack == UNKNOWN_STACK and len(stacks) == 1 else site

    def with_spec(self, site: Site) -> Site:
        """The site with its spec, or with the reason why it has none; its stack as the description calls it."""
        tower = next(
            (one for one in self.towers if not one.path_words or any(w in site.path for w in one.path_words)), None
        )
        if site.spec is not None or tower is None:
            return site if site.spec is not None else replace(site, unsaid=self.reason)
        name = tower.spec_name(site)
        spec = tower.specs.get(name)
        if not any(stack in site.path for stack in STACK_NAMES) and spec is not None and not tower.path_words:
            site = replace(site, name=name, stack=name.partition(".")[0])
        if spec is None or name in tower.approximation_reasons:
            return replace(site, unsaid=tower.approximation_reasons.get(name, self.reason))
        sizes = {"heads": len(spec.score_head_of_output), "q": spec.heads.q, "kv": spec.heads.kv, "dim": spec.heads.dim}
        able = {"cut": tower.convertible, "share": tower.convertible}
        return replace(site, **sizes, pattern=spec.pattern.text, spec=spec, unsaid="", **able)


def _conversion_ability(described: ModelSpec, words: tuple[str, ...]) -> Ability:
    """Whether the model is read as one of headwise, heads of which are cut and shared."""
    try:
        get_weight_names(described.name)
    except SpecError as error:
        return Ability(False, str(error))
    if words:
        return Ability(False, "it is a part of a model that is not read as a whole")
    if any(stack.weights_of == "first" for stack in described.stacks):
        return Ability(False, "all layers read the weights of the first")
    whys = [*described.approximation_reasons().values(), *(beyond.reason for beyond in described.beyond)]
    return Ability(False, whys[0]) if whys else POSSIBLE


def _read_inner_towers(told: Mapping[str, Any]) -> Iterator[TowerSpecs]:
    """Towers that configs inside describe, as far as they are known."""
    for key, words in TOWER_CONFIGS.items():
        keys = told.get(key)
        if isinstance(keys, Mapping):
            try:
                yield TowerSpecs.from_config(words, keys)
            except SpecError:
                continue


# --- Every attention of a model, whoever wrote it ------------------------------------------------------

ABILITY_PARTICIPLES = {"see": "seen", "silence": "silenced"}
ADAPTERS = (
    HeadwiseAdapter(),
    TransformersAdapter(),
    TorchMHAAdapter(),
    TracedAdapter(),
    OutputProjectionAdapter(),
)  # the first that leads to a module is taken


def sites(model: nn.Module, example: Any = None) -> Sites:
    """The attention layers of a model, and what may be done to each.

    With an `example`, a tensor or a tuple or dict of what the forward takes, the model runs on it once, and modules
    that are heard to compare are sites too.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    ...     )
    ... )
    >>> [site.name for site in sites(net)]
    ['decoder.0.attention']
    """
    if example is not None:
        if why := unhookable_reason(_check_model(model), [model]):
            raise ValueError(f"{type(model).__name__} cannot be run on an example: {why}")
        trace_example(model, example)
    those = [one.site for one in find_attention(model)]
    return Sites(those, type(model).__name__, find_layers_without_attention(model, those))


def _check_model(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is of type {type(model).__name__}; give an nn.Module, or hw.load(folder)")
    return model


def find_attention(model: nn.Module) -> list[SiteModule]:
    """The same with the modules, each site under a name of its own."""
    _check_model(model)
    seen: list[SiteModule] = []
    for route in ADAPTERS:
        paths = [one.site.path for one in seen]
        seen += [one for one in route.find_sites(model) if not any(_contains(path, one.site.path) for path in paths)]
    paths = [one.site.path for one in seen]
    seen += [
        one
        for one in UnclearTraceAdapter().find_sites(model)
        if not any(is_within(one.site.path, path) for path in paths)
    ]
    order = {path: n for n, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    said = ConfigSpecs.from_model(model)
    placed = [
        one._replace(site=said.with_stack(one.site)) for one in sorted(seen, key=lambda one: order[one.site.path])
    ]
    renamed = _rename_duplicates(split_shared_modules(model, placed))
    return list(mark_unhookable(model, [one._replace(site=said.with_spec(one.site)) for one in renamed]))


def require_ability(model: nn.Module, ability: str) -> list[SiteModule]:
    """The sites of a model that is to be measured at which this can be done: "see" or "silence"."""
    every = find_attention(model)
    those = [one for one in every if getattr(one.site, ability).can]
    if not those:
        why = getattr(every[0].site, ability).why if every else "hw.sites(model) says what it saw"
        raise ValueError(f"{type(model).__name__} has no attention that can be {ABILITY_PARTICIPLES[ability]}: {why}")
    if model.training:
        raise ValueError("the model is in train mode, where dropout changes what is read; call model.eval() first")
    return those


def _contains(path: str, other: str) -> bool:
    """Whether one of two modules stands in the other."""
    return is_within(path, other) or is_within(other, path)


def _rename_duplicates(those: list[SiteModule]) -> Iterator[SiteModule]:
    """Where sites would have one name, their stacks are called by their paths; one module met twice says so."""
    places = [(one.site.stack, one.site.layer) for one in those]
    for how in (_stack_before_first, _stack_before_last, _stack_full_path):
        names = [_site_name(place, one.site) for place, one in zip(places, those, strict=True)]
        clash = [names.count(name) > 1 for name in names]
        places = [how(one.site) if again else place for again, place, one in zip(clash, places, those, strict=True)]
    first: dict[int, str] = {}
    for place, one in zip(places, those, strict=True):
        name = _site_name(place, one.site)
        same = first.setdefault(id(one.module), name)
        stack, layer = place
        site = replace(one.site, name=name, stack=stack, layer=layer, same_as=None if same == name else same)
        yield one._replace(site=site)


def _site_name(place: tuple[str, int], site: Site) -> str:
    stack, layer = place
    return f"{stack}.{layer}.{site.kind}"


def _stack_before_first(site: Site) -> tuple[str, int]:
    """Its stack called by the path before the first number, or by all of it."""
    parts, numbers = _split_path(site)
    return "_".join(parts[: numbers[0]] if numbers else parts), site.layer


def _stack_before_last(site: Site) -> tuple[str, int]:
    """Its stack called by the path before the last number, which is then its layer."""
    parts, numbers = _split_path(site)
    return ("_".join(parts[: numbers[-1]]), int(parts[numbers[-1]])) if numbers else ("_".join(parts), site.layer)


def _stack_full_path(site: Site) -> tuple[str, int]:
    """Its stack called by the whole path."""
    return "_".join(_split_path(site)[0]), site.layer


def _split_path(site: Site) -> tuple[list[str], list[int]]:
    parts = site.path.split(".")
    return parts, [n for n, part in enumerate(parts) if part.isdigit()]
