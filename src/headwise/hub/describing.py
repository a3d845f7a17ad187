"""What the config of somebody else's model says of its attentions, given to their sites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from .. import families
from ..blueprint import Model
from ..errors import SpecError
from ..site import YES, Ability, Site
from ..spec import AttentionSpec
from .maps import map_of
from .routes.places import UNKNOWN

# Configs inside a config, and how modules that they describe are called.
TOWERS = {"vision_config": ("vision", "visual"), "text_config": ("text", "language"), "audio_config": ("audio",)}
STACKS = ("decoder", "encoder")


class Tower(NamedTuple):
    """What a config says of the modules whose paths have one of these words in them; of no words, of all others."""

    words: tuple[str, ...]
    stacks: tuple[str, ...]
    specs: Mapping[str, AttentionSpec]
    unsaid: Mapping[str, str]
    whole: Ability

    @staticmethod
    def of(words: tuple[str, ...], told: Mapping[str, Any]) -> Tower:
        """Read from these keys; which head stands on the model does not matter here."""
        described = families.read({key: value for key, value in told.items() if key != "architectures"})
        stacks = tuple(stack.name for stack in described.stacks)
        return Tower(words, stacks, dict(described.specs()), described.unsaid(), _whole(described, words))

    def name(self, site: Site) -> str:
        """By what name a site stands in the description: its own, or that of the only stack where paths name none."""
        if site.name in self.specs or len(self.stacks) != 1:
            return site.name
        parts = site.path.split(".")
        told = {stack for stack in STACKS for part in parts if stack in part}
        layered = any(part.isdigit() for part in parts)
        only = f"{self.stacks[0]}.{site.layer}.{site.kind}"
        return only if layered and told <= set(self.stacks) else site.name


class Said(NamedTuple):
    """What the config of a model of transformers says of its attentions."""

    towers: tuple[Tower, ...]
    why: str

    @staticmethod
    def of(model: nn.Module) -> Said:
        """Read from `model.config`, if it has one."""
        as_dict = getattr(getattr(model, "config", None), "to_dict", None)
        if as_dict is None:
            return Said(tuple[Tower, ...](), "it keeps no config that could be read")
        told: dict[str, Any] = as_dict()
        inner = tuple(_inner(told))
        try:
            return Said((*inner, Tower.of((), told)), "its config describes no such layer")
        except SpecError as error:
            return Said(inner, str(error))

    def placed(self, site: Site) -> Site:
        """The site in the one stack that there is, where nobody says in which."""
        stacks = {stack for tower in self.towers if not tower.words for stack in tower.stacks}
        return replace(site, stack=stacks.pop()) if site.stack == UNKNOWN and len(stacks) == 1 else site

    def added(self, site: Site) -> Site:
        """The site with its spec, or with the reason why it has none; its stack as the description calls it."""
        tower = next((one for one in self.towers if not one.words or any(w in site.path for w in one.words)), None)
        if site.spec is not None or tower is None:
            return site if site.spec is not None else replace(site, unsaid=self.why)
        name = tower.name(site)
        spec = tower.specs.get(name)
        if not any(stack in site.path for stack in STACKS) and spec is not None and not tower.words:
            site = replace(site, name=name, stack=name.partition(".")[0])
        if spec is None or name in tower.unsaid:
            return replace(site, unsaid=tower.unsaid.get(name, self.why))
        sizes = {"heads": len(spec.speaks), "q": spec.heads.q, "kv": spec.heads.kv, "dim": spec.heads.dim}
        able = {"cut": tower.whole, "share": tower.whole}
        return replace(site, **sizes, pattern=spec.pattern.text, spec=spec, unsaid="", **able)


def _whole(described: Model, words: tuple[str, ...]) -> Ability:
    """Whether the model is read as one of headwise, heads of which are cut and shared."""
    try:
        map_of(described.name)
    except SpecError as error:
        return Ability(False, str(error))
    if words:
        return Ability(False, "it is a part of a model that is not read as a whole")
    if any(stack.weights_of == "first" for stack in described.stacks):
        return Ability(False, "all layers read the weights of the first")
    whys = [*described.unsaid().values(), *(beyond.reason for beyond in described.beyond)]
    return Ability(False, whys[0]) if whys else YES


def _inner(told: Mapping[str, Any]) -> Iterator[Tower]:
    """Towers that configs inside describe, as far as they are known."""
    for key, words in TOWERS.items():
        keys = told.get(key)
        if isinstance(keys, Mapping):
            try:
                yield Tower.of(words, keys)
            except SpecError:
                continue
