"""Sites: the attention layers of any model, with their heads and what can be done to them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ...attention.spec.attention_spec import AttentionSpec
from ...util.errors import suggest

WIDTH = 80  # terminal columns
ABILITIES = ("observe", "ablate", "prune", "convert")


class Ability(NamedTuple):
    """Whether an operation is possible at a site, and if not, the reason."""

    possible: bool
    reason: str = ""

    def __str__(self) -> str:
        return "yes" if self.possible else "no"


POSSIBLE = Ability(True)


@dataclass(frozen=True)
class Site:
    """One attention layer.

    The name is `stack.layer.kind`; `kind` is "attention" or "cross", and `path` is the path of the
    module. `heads` is the number of output heads, `q` of query heads, `kv` of KV heads, `dim` the
    head dimension. Four abilities: `observe` (read queries, keys and weights), `ablate` (change
    head outputs), `prune` (remove heads) and `convert` (to fewer KV heads). `pattern` is the
    attention pattern. `spec` is the layer as a headwise spec, or None, and then `spec_reason` is
    the reason. `same_as` names an earlier site that runs the same module.
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
    spec_reason: str
    observe: Ability
    ablate: Ability
    prune: Ability
    convert: Ability
    same_as: str | None = None

    @property
    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        fields = {
            name: value for name, value in asdict(self).items() if name not in (*ABILITIES, "spec")
        }
        abilities = {name: getattr(self, name)._asdict() for name in ABILITIES}
        return {**fields, "spec": None if self.spec is None else str(self.spec), **abilities}


class Sites(list[Site]):
    """The sites of a model in layer order. Prints as a table, followed by `notes` and the reasons
    for each "no".
    """

    def __init__(self, sites: Iterable[Site], model: str, notes: Sequence[str] = ()) -> None:
        super().__init__(sites)
        self.model = model
        self.notes = list(notes)

    def find(self, which: int | str) -> Site:
        """The site with this name, or the only site at this layer number.

        >>> yes = Ability(True)
        >>> site = Site(
        ...     "decoder.0.attention",
        ...     "decoder",
        ...     0,
        ...     "attention",
        ...     "h.0",
        ...     4,
        ...     4,
        ...     2,
        ...     8,
        ...     "",
        ...     None,
        ...     "",
        ...     *[yes] * 4,
        ... )
        >>> Sites([site], "small").find(0).name
        'decoder.0.attention'
        """
        if isinstance(which, str):
            matches = [site for site in self if site.name == which]
            if not matches:
                raise ValueError(
                    f"{self.model} has no site {which!r}; "
                    f"{suggest(which, [site.name for site in self])}"
                )
            return matches[0]
        matches = [site for site in self if site.layer == which]
        if not matches:
            layers = sorted({site.layer for site in self})
            raise ValueError(
                f"{self.model} has no layer {which!r}; its layers are {layers[0]}..{layers[-1]}"
            )
        if len(matches) > 1:
            names = ", ".join(site.name for site in matches)
            raise ValueError(
                f"{self.model} has several sites at layer {which}: {names}; give its name"
            )
        return matches[0]

    @property
    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"model": self.model, "sites": [site.to_dict for site in self], "notes": self.notes}

    def __str__(self) -> str:
        if not self:
            return (
                f"{self.model} has no attention that headwise finds; hw.sites(model, example) "
                "finds it by tracing a "
                "forward call, hw.declare(module, ...) declares one"
            )
        rows = [
            [site.name, str(site.q), str(site.kv), str(site.dim), site.pattern]
            + [str(getattr(site, name)) for name in ABILITIES]
            for site in self
        ]
        lines = _table([["site", "q", "kv", "dim", "pattern", *ABILITIES], *rows])
        return "\n".join([*lines, *_wrap([*self.notes, *_reasons(self)])])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right_aligned = {1, 2, 3}
    return [
        "  ".join(
            cell.rjust(width) if n in right_aligned else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _reasons(sites: Sequence[Site]) -> list[str]:
    """One line per reason: the abilities that it rules out, and at how many sites."""
    counts_by_reason: dict[str, dict[str, int]] = {}
    for site in sites:
        abilities = [(name, getattr(site, name)) for name in ABILITIES]
        reasons = [(name, ability.reason) for name, ability in abilities if not ability.possible]
        for name, reason in [
            *reasons,
            *([("spec", site.spec_reason)] if site.spec is None else []),
        ]:
            counts = counts_by_reason.setdefault(reason, {})
            counts[name] = counts.get(name, 0) + 1
    return [
        f"no {' or '.join(counts)} at {max(counts.values())} of {len(sites)}: {reason}"
        for reason, counts in counts_by_reason.items()
    ]


def _wrap(notes: Sequence[str]) -> list[str]:
    return [line for note in notes for line in textwrap.wrap(note, WIDTH, subsequent_indent="  ")]
