"""A site is one attention layer of any model: where it is, how many heads it has, and what may be done to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from .errors import nearest
from .spec import AttentionSpec

ABILITIES = ("see", "silence", "cut", "share")


class Ability(NamedTuple):
    """Whether something may be done to a site, and why not."""

    can: bool
    why: str = ""

    def __str__(self) -> str:
        return "yes" if self.can else "no"


YES = Ability(True)


@dataclass(frozen=True)
class Site:
    """One attention layer.

    `stack`, `layer` and `kind` ("attention" or "cross") make its name; `path` is that of its module. `see` is to read
    its queries, keys and weights, `silence` to change what its heads say, `cut` and `share` to make it smaller.
    `pattern` says in words who reads whom; `spec` is the layer in our words, or None, and then `unsaid` says why.
    `same_as` names the site whose module it shares.
    """

    name: str
    stack: str
    layer: int
    kind: str
    path: str
    q: int
    kv: int
    dim: int
    pattern: str
    spec: AttentionSpec | None
    unsaid: str
    see: Ability
    silence: Ability
    cut: Ability
    share: Ability
    same_as: str | None = None

    @property
    def data(self) -> dict[str, Any]:
        """All of it as plain values."""
        told = {name: value for name, value in asdict(self).items() if name not in (*ABILITIES, "spec")}
        able = {name: getattr(self, name)._asdict() for name in ABILITIES}
        return {**told, "spec": None if self.spec is None else str(self.spec), **able}


class Sites(list[Site]):
    """The sites of a model in the order of its layers; prints as a table. `missed` are modules that look like attention
    but could not be reached, each with its reason.
    """

    def __init__(self, sites: Iterable[Site], model: str, missed: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(sites)
        self.model, self.missed = model, tuple(missed)

    def named(self, which: int | str) -> Site:
        """The site of this name, or of this layer where the model has no other there.

        >>> yes = Ability(True)
        >>> site = Site("decoder.0.attention", "decoder", 0, "attention", "h.0", 4, 2, 8, "", None, "", *[yes] * 4)
        >>> Sites([site], "small").named(0).name
        'decoder.0.attention'
        """
        if isinstance(which, str):
            found = [site for site in self if site.name == which]
            if not found:
                raise ValueError(f"{self.model} has no site {which!r}; {nearest(which, [site.name for site in self])}")
            return found[0]
        found = [site for site in self if site.layer == which]
        if not found:
            layers = sorted({site.layer for site in self})
            raise ValueError(f"{self.model} has no layer {which!r}; its layers are {layers[0]}..{layers[-1]}")
        if len(found) > 1:
            names = ", ".join(site.name for site in found)
            raise ValueError(f"{self.model} has several sites at layer {which}: {names}; say which by its name")
        return found[0]

    @property
    def data(self) -> dict[str, Any]:
        """All of it as plain values."""
        missed = [{"path": path, "why": why} for path, why in self.missed]
        return {"model": self.model, "sites": [site.data for site in self], "missed": missed}

    def __str__(self) -> str:
        rows = [
            [site.name, str(site.q), str(site.kv), str(site.dim), site.pattern]
            + [str(getattr(site, name)) for name in ABILITIES]
            for site in self
        ]
        lines = _table([["site", "q", "kv", "dim", "pattern", *ABILITIES], *rows])
        return "\n".join([*lines, *_reasons(self), *(f"not reached: {path}: {why}" for path, why in self.missed)])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = {1, 2, 3}
    return [
        "  ".join(
            cell.rjust(width) if n in right else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, wide, strict=True))
        ).rstrip()
        for row in rows
    ]


def _reasons(sites: Sequence[Site]) -> list[str]:
    """Each reason once, with how many sites it keeps from what."""
    said: dict[tuple[str, str], int] = {}
    for site in sites:
        for name in ABILITIES:
            able: Ability = getattr(site, name)
            if not able.can:
                said[name, able.why] = said.get((name, able.why), 0) + 1
        if site.spec is None:
            said["spec", site.unsaid] = said.get(("spec", site.unsaid), 0) + 1
    return [f"no {name} at {count} of {len(sites)}: {why}" for (name, why), count in said.items()]
