"""What the config of somebody else's model says of its attentions, given to their sites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from .. import families
from ..blueprint import ModelSpec
from ..errors import SpecError
from ..site import POSSIBLE, Ability, Site
from ..spec import AttentionSpec
from .maps import get_weight_names
from .routes.places import UNKNOWN_STACK

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
        return TowerSpecs(words, stacks, dict(described.attention_specs()), described.approximation_reasons(), _conversion_ability(described, words))

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
        tower = next((one for one in self.towers if not one.path_words or any(w in site.path for w in one.path_words)), None)
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
