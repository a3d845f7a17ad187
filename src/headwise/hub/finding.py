"""Every attention of a model, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from .. import families
from ..errors import SpecError
from ..site import Ability, Site, Sites
from ..spec import AttentionSpec
from .depths import by_depth
from .routes.base import Found
from .routes.interface import Interface
from .routes.ours import Ours
from .routes.projection import Projection
from .routes.torch_mha import TorchMHA

ROUTES = (Ours(), Interface(), TorchMHA(), Projection())  # the first that leads to a module is taken


def sites(model: nn.Module) -> Sites:
    """The attention layers of a model, and what may be done to each.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11})
    ... )
    >>> [site.name for site in sites(net)]
    ['decoder.0.attention']
    """
    return Sites([one.site for one in found(model)], type(model).__name__)


def found(model: nn.Module) -> list[Found]:
    """The same with the modules, each site under a name of its own."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is of type {type(model).__name__}; give an nn.Module, or hw.load(folder)")
    seen: list[Found] = []
    for route in ROUTES:
        paths = [one.site.path for one in seen]
        seen += [one for one in route.find(model) if not any(_around(path, one.site.path) for path in paths)]
    order = {path: n for n, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    said = Said.of(model)
    renamed = _renamed(by_depth(model, sorted(seen, key=lambda one: order[one.site.path])))
    return [_hindered(model, one._replace(site=said.added(one.site))) for one in renamed]


class Said(NamedTuple):
    """What the config of a model of transformers says of its attentions, by the names of their sites."""

    specs: Mapping[str, AttentionSpec]
    unsaid: Mapping[str, str]
    why: str

    @staticmethod
    def of(model: nn.Module) -> Said:
        """Read from `model.config`, if it has one."""
        as_dict = getattr(getattr(model, "config", None), "to_dict", None)
        if as_dict is None:
            return Said({}, {}, "it keeps no config that could be read")
        try:
            described = families.read(as_dict())
        except SpecError as error:
            return Said({}, {}, str(error))
        return Said(dict(described.specs()), described.unsaid(), "its config describes no such layer")

    def added(self, site: Site) -> Site:
        """The site with its spec, or with the reason why it has none."""
        if site.spec is not None:
            return site
        spec, unsaid = self.specs.get(site.name), self.unsaid.get(site.name)
        if spec is None or unsaid:
            return replace(site, unsaid=unsaid or self.why)
        sizes = {"heads": len(spec.speaks), "q": spec.heads.q, "kv": spec.heads.kv, "dim": spec.heads.dim}
        return replace(site, **sizes, pattern=spec.pattern.text, spec=spec, unsaid="")


def _around(path: str, other: str) -> bool:
    """Whether one of two modules stands in the other."""
    return path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")


def _renamed(those: list[Found]) -> Iterator[Found]:
    """Where two sites would have one name, their stacks are called by their paths; one module met twice says so."""
    names = [one.site.name for one in those]
    first: dict[int, str] = {}
    for one in those:
        site = one.site
        if names.count(site.name) > 1:
            stack = _before(site.path)
            site = replace(site, stack=stack, name=f"{stack}.{site.layer}.{site.kind}")
        same = first.setdefault(id(one.module), site.name)
        yield one._replace(site=replace(site, same_as=None if same == site.name else same))


def _before(path: str) -> str:
    parts = path.split(".")
    numbers = [n for n, part in enumerate(parts) if part.isdigit()]
    return "_".join(parts[: numbers[0]] if numbers else parts)


def _hindered(model: nn.Module, one: Found) -> Found:
    """The same where nothing hinders watching; else with the reason."""
    why = ""
    if isinstance(model, nn.DataParallel):
        why = "its replicas run in threads of their own; give model.module"
    elif _compiled(model):
        why = "it is compiled, and what was compiled cannot be watched; give the model as it was before"
    elif any(tensor.is_meta for tensor in one.module.parameters()):
        why = "its weights are on the meta device, where nothing is computed; load them"
    if not why:
        return one
    no = Ability(False, why)
    return one._replace(site=replace(one.site, see=no if one.site.see.can else one.site.see, silence=no))


def _compiled(model: nn.Module) -> bool:
    """Whether torch.compile was here; its wrapper goes by its name, for importing it takes a second."""
    wrapped = type(model).__name__ == "OptimizedModule"
    return wrapped or any(module._compiled_call_impl is not None for module in model.modules())
