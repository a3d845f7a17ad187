"""Sites: the attention layers of any model, with their heads and what can be done to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ...attention.spec.attention_spec import AttentionSpec
from ...report.data import Table
from ...report.render import to_text
from ...util.errors import suggest

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
        names = ("q", "kv", "dim", "pattern", *ABILITIES)
        rows: list[tuple[Any, ...]] = []
        sites_of_note: dict[str, dict[str, int]] = {}
        for site in self:
            rows.append((site.name, *(_cell(getattr(site, name)) for name in names)))
            reasons = [(name, getattr(site, name).reason) for name in ABILITIES]
            if site.spec is None:
                reasons.append(("spec", site.spec_reason))
            for name, reason in reasons:
                if reason:
                    counts = sites_of_note.setdefault(reason, {})
                    counts[name] = counts.get(name, 0) + 1
        notes = [*self.notes]
        for reason, counts in sites_of_note.items():
            where = f"{max(counts.values())} of {len(self)}"
            notes.append(f"no {' or '.join(counts)} at {where}: {reason}")
        return to_text(Table("", ("site", *names), rows, notes))


def _cell(value: object) -> Any:
    return str(value) if isinstance(value, Ability) else value
