"""Find the attention layers of any model, name them, and decide what can be done to each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ...attention.spec.attention_spec import AttentionSpec
from ...hub.pretrained_models import open_model
from ...models import families
from ...models.families import get_weight_names
from ...models.model_spec import ModelSpec
from ...util.errors import SpecError
from .abilities import (
    compiled_part_reason,
    is_compiled,
    kv_sharing_reason,
    unhookable_reason,
    unprunable_reason,
)
from .adapters.declarations import has_own_config
from .adapters.example_run import (
    UNCLEAR_TRACE,
    find_torch_attention,
    find_traced_attention,
    trace_example,
)
from .adapters.known_interfaces import find_headwise_attention, find_interface_attention
from .adapters.output_path import edit_place, measure_edit_places
from .adapters.output_projection import (
    UNCLEAR_PROJECTION,
    UNKNOWN_STACK,
    find_projected_attention,
    is_within,
    overlaps,
    read_positive_int,
)
from .hooks import SiteModule
from .model_inputs import ModelInputs, check_eval_mode, check_is_module, prepare_inputs
from .site import IF_EXACT, OUTPUT, POSSIBLE, Ability, Site, Sites

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
    """Return one site for each depth at which a grouped layer runs; else the site itself."""
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
    """Read numbers of layer runs, groups, and layers per group from the config nearest to `path`.

    Without a config, all are zero.
    """
    parts = path.split(".")
    for end in range(len(parts), -1, -1):
        config = getattr(model.get_submodule(".".join(parts[:end])), "config", None)
        layers, groups, inner = (read_positive_int(config, (name,)) for name in DEPTH_KEYS)
        if layers and groups and inner:
            return layers, groups, inner
    return 0, 0, 0


def mark_unhookable(model: nn.Module, sites: Sequence[SiteModule]) -> Iterator[SiteModule]:
    """Yield the sites; abilities that this model rules out are replaced by the reason."""
    modules = model.named_modules(remove_duplicate=False)
    compiled = {path: module for path, module in modules if is_compiled(module)}
    shared = {site_module.site.same_as for site_module in sites}
    for site_module in sites:
        site = site_module.site
        is_shared = site.same_as is not None or site.name in shared
        if site_module.adapter == "transformers" and site.observe.possible and not is_shared:
            for name in ("prune", "convert"):  # as modules of transformers
                own: Ability = getattr(site, name)
                site = replace(site, **{name: own if own.possible else IF_EXACT})
        parts = [site_module.module, *(override.module for override in site_module.overrides)]
        reason = unhookable_reason(model, parts) or compiled_part_reason(compiled, site.path)
        able = [name for name in ("observe", "ablate") if getattr(site, name).possible]
        if reason:
            site = replace(site, **dict.fromkeys(able, Ability(False, reason)))
        reason = unprunable_reason(parts) or kv_sharing_reason(parts)
        if reason:
            site = replace(site, prune=Ability(False, reason), convert=Ability(False, reason))
        yield site_module._replace(site=site)


def find_layers_without_attention(model: nn.Module, sites: Sequence[Site]) -> list[str]:
    """Describe layers without attention in stacks that also have attention, as in hybrid models."""
    lines: list[str] = []
    for path, layers in model.named_modules(remove_duplicate=False):
        is_inner = any(part.isdigit() for part in path.split("."))
        if is_inner or not isinstance(layers, nn.ModuleList):
            continue
        lacking: list[str] = []
        own_kinds: set[str] = set()
        other_kinds: set[str] = set()
        for name, layer in layers.named_children():
            kinds = {type(child).__name__ for child in layer.children()}
            if any(is_within(site.path, f"{path}.{name}") for site in sites):
                other_kinds |= kinds
            else:
                lacking.append(name)
                own_kinds |= kinds
        if not lacking or len(lacking) == len(layers):
            continue
        kinds = sorted(kind for kind in own_kinds - other_kinds if "Norm" not in kind)
        instead = f" ({', '.join(kinds)} instead)" if kinds else ""
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


class TowerSpecs:
    """Read specs from one config for modules with one of `path_words` in their path.

    Without `path_words`, it covers all other modules. If no config can be read, `reason` explains
    why no site gets a spec.
    """

    def __init__(
        self,
        path_words: tuple[str, ...],
        model_spec: ModelSpec | None,
        reason: str = "the config describes no such layer",
    ) -> None:
        self.path_words = path_words
        self.reason = reason
        self.specs: dict[str, AttentionSpec] = {}
        self.stacks: tuple[str, ...] = ()
        if model_spec is not None:
            self.specs.update(model_spec.attention_specs())
            self.stacks = tuple(stack.name for stack in model_spec.stacks)
            self.ability = _conversion_ability(model_spec, path_words)

    def place(self, site: Site) -> Site:
        """Use the config's only stack for a site with an unknown stack."""
        if site.stack == UNKNOWN_STACK and len(set(self.stacks)) == 1:
            return replace(site, stack=self.stacks[0])
        return site

    def describe(self, site: Site) -> Site:
        """Add the spec to a site, or the reason for none; name its stack as in the config."""
        name = site.name
        named = {stack for stack in STACK_NAMES if stack in site.path}
        if name not in self.specs and len(self.stacks) == 1:
            has_number = any(part.isdigit() for part in site.path.split("."))
            if has_number and named <= set(self.stacks):
                name = f"{self.stacks[0]}.{site.layer}.{site.kind}"
        spec = self.specs.get(name)
        if spec is not None and not named and not self.path_words:
            site = replace(site, name=name, stack=name.partition(".")[0])
        if spec is None:
            return replace(site, spec_reason=self.reason)
        return site.with_spec(spec, self.ability)


def read_towers(model: nn.Module) -> list[TowerSpecs]:
    """Read the specs that the config of a transformers model describes; the last tower covers the
    whole config. `architectures` is ignored, because the task head does not matter here.
    """
    as_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if as_dict is None:
        return [TowerSpecs((), None, "the model has no config to read")]
    config: dict[str, Any] = as_dict()
    towers: list[TowerSpecs] = []
    for key, words in (*TOWER_CONFIGS.items(), ("", ())):
        part: Any = config.get(key) if key else config
        if isinstance(part, Mapping):
            settings = {name: value for name, value in part.items() if name != "architectures"}
            try:
                towers.append(TowerSpecs(words, families.read_model_spec(settings)))
            except SpecError as error:
                if not key:
                    towers.append(TowerSpecs((), None, str(error)))
    return towers


def _conversion_ability(model_spec: ModelSpec, path_words: tuple[str, ...]) -> Ability:
    """Return the ability to load the model in headwise, as pruning and conversion of heads need."""
    try:
        get_weight_names(model_spec.name)
    except SpecError as error:
        return Ability(False, str(error))
    if path_words:
        return Ability(False, "it belongs to a model that headwise does not load as a whole")
    return POSSIBLE


# --- All attention layers of a model --------------------------------------------------------------

ABILITY_PARTICIPLES = {"observe": "observed", "ablate": "ablated"}
ADAPTERS: tuple[Callable[[nn.Module], Iterator[SiteModule]], ...] = (
    find_headwise_attention,
    find_interface_attention,
    find_torch_attention,
    find_traced_attention,
    find_projected_attention,
)  # in order of precedence: the first adapter that finds a module is used


def sites(model: nn.Module | Path | str, example: Any = None, *, tokenizer: object = None) -> Sites:
    """List the attention layers of a model, and what can be done to each.

    `model` is a module, or a name as in `hw.load`.

    With an `example` (ids or another tensor, a tuple or mapping of the model's arguments, or a
    text) the model runs on it once, and modules that are seen to compute attention during this run
    are sites too. `tokenizer` encodes a text (default: the model's own).

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config))
    >>> [site.name for site in sites(net)]
    ['decoder.0.attention']
    """
    model = open_model(model)
    if example is not None:
        reason = unhookable_reason(model, [model])
        if reason:
            raise ValueError(f"{type(model).__name__} cannot be traced on an example: {reason}")
        _trace_inputs(model, prepare_inputs(model, example, 0, tokenizer))
    site_list = [site_module.site for site_module in find_attention(model)]
    return Sites(site_list, type(model).__name__, find_layers_without_attention(model, site_list))


def find_attention_in_run(model: nn.Module, inputs: ModelInputs) -> list[SiteModule]:
    """Find the attention layers of a model; if there are none, run these inputs to find them."""
    site_modules = find_attention(model)
    if any(one.site.observe.possible for one in site_modules) or unhookable_reason(model, [model]):
        return site_modules
    _trace_inputs(model, inputs)
    return find_attention(model)


def _trace_inputs(model: nn.Module, inputs: ModelInputs) -> None:
    """Find attention in a run on these inputs; measure where heads are edited in two more runs."""
    trace_example(model, inputs.args, inputs.kwargs)
    unmeasured = [
        site_module
        for site_module in find_attention(model)
        if site_module.adapter in ("traced", "transformers")
        and site_module.site.ablate.possible
        and edit_place(site_module.module).projection is None
    ]
    with torch.no_grad():
        measure_edit_places(model, unmeasured, lambda: model(*inputs.args, **inputs.kwargs))


def find_attention(model: nn.Module) -> list[SiteModule]:
    """Find the attention layers of a model with their modules and adapters.

    Each site gets a unique name.
    """
    check_is_module(model)
    candidates: list[SiteModule] = []
    for find in ADAPTERS:
        candidates += find(model)
    # unclear modules are listed only where no other adapter found one
    unclear = (UNCLEAR_TRACE, UNCLEAR_PROJECTION)
    candidates.sort(key=lambda new: unclear.index(new.adapter) if new.adapter in unclear else -1)
    site_modules: list[SiteModule] = []
    paths: list[str] = []
    adapter = ""
    for new in candidates:
        if new.adapter != adapter or adapter == UNCLEAR_PROJECTION:
            adapter = new.adapter
            paths = [site_module.site.path for site_module in site_modules]
        is_known = is_within if adapter == UNCLEAR_TRACE else overlaps
        if not any(is_known(new.site.path, path) for path in paths):
            site_modules.append(new)
    modules = model.named_modules(remove_duplicate=False)
    order = {path: number for number, (path, _) in enumerate(modules)}
    site_modules.sort(key=lambda site_module: order[site_module.site.path])
    towers = read_towers(model)
    placed = [
        site_module._replace(site=towers[-1].place(site_module.site))
        for site_module in site_modules
    ]
    specified: list[SiteModule] = []
    for site_module in _rename_duplicates(split_shared_modules(model, placed)):
        site = site_module.site
        if has_own_config(site_module.module):
            site = replace(site, spec_reason="its heads differ from those in the model's config")
        elif site.spec is None:
            for tower in towers:
                if not tower.path_words or any(word in site.path for word in tower.path_words):
                    site = tower.describe(site)
                    break
        specified.append(site_module._replace(site=site))
    return list(mark_unhookable(model, specified))


def check_found(model: nn.Module, site_modules: Sequence[SiteModule]) -> None:
    """Raise if no attention of a model was found."""
    if not site_modules:
        raise ValueError(
            f"{type(model).__name__} has no attention that headwise finds; hw.sites(model, "
            "example) finds it in a run on an example"
        )


def require_ability(
    model: nn.Module, ability: str, site_modules: Sequence[SiteModule] | None = None
) -> list[SiteModule]:
    """Return the sites of a model in eval mode that have an ability, "observe" or "ablate", of
    all its sites or of some.

    Raises if there are none.
    """
    site_modules = find_attention(model) if site_modules is None else site_modules
    check_found(model, site_modules)
    able = [one for one in site_modules if getattr(one.site, ability).possible]
    if not able:
        site = site_modules[0].site
        participle = ABILITY_PARTICIPLES[ability]
        raise ValueError(f"{site.name} cannot be {participle}: {getattr(site, ability).reason}")
    if model.training:
        check_eval_mode(model)
    return able


def left_out_notes(
    model: nn.Module, ability: str, reasons: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Write one note for each reason why sites are left out.

    They lack an ability, or `reasons` names them.
    """
    left_out: dict[str, list[str]] = {}
    for site_module in find_attention(model):
        name = site_module.site.name
        reason = getattr(site_module.site, ability).reason or reasons.get(name, "")
        if reason:
            left_out.setdefault(reason, []).append(name)
    return [f"left out {', '.join(names)}: {reason}" for reason, names in left_out.items()]


# --- Unique names of sites ------------------------------------------------------------------------


def _rename_duplicates(site_modules: Sequence[SiteModule]) -> list[SiteModule]:
    """Make names unique by naming stacks after module paths.

    Repeated modules get `same_as`, the first site's name.
    """
    sites = [site_module.site for site_module in site_modules]
    for part in ("first", "last", "full"):
        counts = Counter((site.stack, site.layer, site.kind) for site in sites)
        for number, site in enumerate(sites):
            if counts[site.stack, site.layer, site.kind] > 1:
                sites[number] = _name_stack(site, part)
    first_names: dict[nn.Module, str] = {}
    renamed: list[SiteModule] = []
    for site_module, site in zip(site_modules, sites, strict=True):
        name = f"{site.stack}.{site.layer}.{site.kind}"
        first = first_names.setdefault(site_module.module, name)
        site = replace(site, name=name, same_as=None if first == name else first)
        renamed.append(site_module._replace(site=site))
    return renamed


def _name_stack(site: Site, part: str) -> Site:
    """Name the stack of a site by its path.

    Uses the path up to the first number, up to the last number (which becomes the layer), or in
    full.
    """
    parts = site.path.split(".")
    numbers = [n for n, name in enumerate(parts) if name.isdigit()]
    if part == "first" and numbers:
        return replace(site, stack="_".join(parts[: numbers[0]]))
    if part == "last" and numbers:
        end = numbers[-1]
        return replace(site, stack="_".join(parts[:end]), layer=int(parts[end]))
    return replace(site, stack="_".join(parts))


# --- Parts of heads that can be read and replaced ------------------------------------------------

VECTOR_ADAPTERS = ("headwise", "transformers")  # their layers pass q, k and v to a function


def head_part_problem(site_module: SiteModule, part: str) -> str:
    """Return why this part of heads of a site cannot be read and replaced; empty if it can."""
    site = site_module.site
    if part == OUTPUT:
        return site.ablate.reason
    if site.observe.possible and site_module.adapter not in VECTOR_ADAPTERS:
        return (
            "it neither is hw.Attention nor uses the attention interface of transformers; patch "
            "the outputs of its heads"
        )
    return site.observe.reason


def check_head_part(site_module: SiteModule, part: str, participle: str = "ablated") -> None:
    """Raise unless this part of heads of a site can be read and replaced."""
    reason = head_part_problem(site_module, part)
    name = site_module.site.name
    if reason and part == OUTPUT:
        raise ValueError(f"{name} cannot be {participle}: {reason}")
    if reason:
        raise ValueError(f"{part} of {name} cannot be replaced: {reason}")
