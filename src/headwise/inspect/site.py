"""A site is one attention layer of any model: where it is, how many heads it has, and what may be done to it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..errors import suggest
from ..spec.attention_spec import AttentionSpec

WIDTH = 80  # columns of a terminal
ABILITIES = ("see", "silence", "cut", "share")


class Ability(NamedTuple):
    """Whether something may be done to a site, and why not."""

    can: bool
    why: str = ""

    def __str__(self) -> str:
        return "yes" if self.can else "no"


POSSIBLE = Ability(True)


@dataclass(frozen=True)
class Site:
    """One attention layer.

    `stack`, `layer` and `kind` ("attention" or "cross") make its name; `path` is that of its module. `heads` is how
    many speak, `q` how many ask, `kv` how many heads of keys and values they read. `see` is to read queries, keys and
    weights, `silence` to change what heads say, `cut` and `share` to make the layer smaller. `pattern` says who reads
    whom; `spec` is the layer in our words, or None, and then `unsaid` says why. `same_as` names the site whose module
    it shares.
    """

    name: str
    stack: str
    layer: int
    kind: str
    path: str
    heads: int
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
    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        told = {name: value for name, value in asdict(self).items() if name not in (*ABILITIES, "spec")}
        able = {name: getattr(self, name)._asdict() for name in ABILITIES}
        return {**told, "spec": None if self.spec is None else str(self.spec), **able}


class Sites(list[Site]):
    """The sites of a model in the order of its layers; prints as a table, with `notes` on the rest of it beneath."""

    def __init__(self, sites: Iterable[Site], model: str, notes: Sequence[str] = ()) -> None:
        super().__init__(sites)
        self.model, self.notes = model, list(notes)

    def find(self, which: int | str) -> Site:
        """The site of this name, or of this layer where the model has no other there.

        >>> yes = Ability(True)
        >>> site = Site("decoder.0.attention", "decoder", 0, "attention", "h.0", 4, 4, 2, 8, "", None, "", *[yes] * 4)
        >>> Sites([site], "small").find(0).name
        'decoder.0.attention'
        """
        if isinstance(which, str):
            found = [site for site in self if site.name == which]
            if not found:
                raise ValueError(f"{self.model} has no site {which!r}; {suggest(which, [site.name for site in self])}")
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
    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {"model": self.model, "sites": [site.to_dict for site in self], "notes": self.notes}

    def __str__(self) -> str:
        if not self:
            return (
                f"{self.model} has no attention that headwise finds; hw.sites(model, example) finds one by what it "
                "does, hw.declare says where one is"
            )
        rows = [
            [site.name, str(site.q), str(site.kv), str(site.dim), site.pattern]
            + [str(getattr(site, name)) for name in ABILITIES]
            for site in self
        ]
        lines = _table([["site", "q", "kv", "dim", "pattern", *ABILITIES], *rows])
        return "\n".join([*lines, *_wrap([*self.notes, *_reasons(self)])])


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
    """Each reason once, with what it stands against and at how many sites."""
    said: dict[str, dict[str, int]] = {}
    for site in sites:
        no = [(name, getattr(site, name)) for name in ABILITIES]
        whys = [(name, able.why) for name, able in no if not able.can]
        for name, why in [*whys, *([("spec", site.unsaid)] if site.spec is None else [])]:
            counts = said.setdefault(why, {})
            counts[name] = counts.get(name, 0) + 1
    return [
        f"no {' or '.join(counts)} at {max(counts.values())} of {len(sites)}: {why}" for why, counts in said.items()
    ]


def _wrap(told: Sequence[str]) -> list[str]:
    return [line for long in told for line in textwrap.wrap(long, WIDTH, subsequent_indent="  ")]
