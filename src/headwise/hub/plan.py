"""What a file must hold to be a model, worked out from the names that one architecture gives its tensors."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..blueprint import Model
from ..errors import SpecError
from .slots import NOTHING, Piece, Slot, pieces

LAYER = re.compile(r"^(\w+)\.(\d+)\.")
ADDED = re.compile(r"^(\w+\.\{layer\}\.(?:attention|cross))\.(?:output\.o_bias|constant)$")


class Map(NamedTuple):
    """The names that the files of some families give our tensors, {layer} standing for the number of a layer.

    A path that begins with a dot stands behind the name of the trunk, of which `trunks` lists all that files use, the
    one to write first. `twins` are second names of tensors, with the first, and `spelt` other ends of names, with those
    used here. What is `ignored` may lie in a file besides: nothing that was learnt, or heads that its class has not.
    """

    families: tuple[str, ...]
    slots: Mapping[str, str | Slot]
    trunks: tuple[str, ...] = ("",)
    twins: Mapping[str, str] = NOTHING
    spelt: Mapping[str, str] = NOTHING
    ignored: tuple[str, ...] = ()

    def slot(self, name: str) -> Slot | None:
        """Where the tensor of this name lies, if files have a place for it."""
        own = LAYER.sub(r"\1.{layer}.", name)
        found = self.slots.get(own) or self._added(own)
        return Slot(found) if isinstance(found, str) else found

    def _added(self, own: str) -> str | Slot | None:
        """Where a vector lies that an attention adds although its files have none: as the bias of its last matrix."""
        if not (site := ADDED.match(own)):
            return None
        matrix = self.slots.get(f"{site[1]}.output.o")
        path = matrix.path if isinstance(matrix, Slot) else matrix or ""
        bias = f"{path.removesuffix('.weight')}.bias" if path.endswith(".weight") else None
        return self.slots.get(f"{site[1]}.output.o_bias", bias)

    def trunk(self, names: Iterable[str]) -> str:
        """The name of the trunk that these names stand behind."""
        names = list(names)
        found = (trunk for trunk in self.trunks if any(name.startswith(f"{trunk}.") for name in names) or not trunk)
        return next(found, self.trunks[0])

    def usual(self, name: str) -> str:
        """The name of a tensor as it is spelt here."""
        for other, ours in self.spelt.items():
            if name.endswith(other):
                return name.removesuffix(other) + ours
        return name

    def ignoring(self, names: Iterable[str]) -> Map:
        """The same where tensors of these names may be left out too."""
        return self._replace(ignored=(*self.ignored, *(f"^{re.escape(name)}$" for name in names)))

    def ignores(self, name: str) -> bool:
        """Whether a tensor of this name may be left out."""
        return any(re.search(pattern, name) for pattern in self.ignored)


@dataclass(frozen=True)
class Plan:
    """The pieces of each tensor in a file, by its name there, and the second names that it may go by."""

    pieces: Mapping[str, list[Piece]]
    twins: Mapping[str, str]

    def source(self, path: str, names: Container[str]) -> str | None:
        """The name by which a file that holds these names has a tensor: its first, or a second one."""
        twins = (second for second, first in self.twins.items() if first == path)
        return next((name for name in (path, *twins) if name in names), None)

    @staticmethod
    def of(described: Model, names: Map, trunk: str) -> Plan:
        """The plan of this model; a learned tensor that files of this kind have no place for is refused."""
        found: dict[str, list[Piece]] = {}
        for piece in _pieces(described, names, trunk):
            found.setdefault(piece.path, []).append(piece)
        twins = {_behind(trunk, second): _behind(trunk, first) for second, first in names.twins.items()}
        for reader, owner in described.ties().items():
            second, first = (names.slot(name) for name in (reader, owner))
            if second and first:
                twins[_behind(trunk, second.path)] = _behind(trunk, first.path)
        return Plan(found, {second: first for second, first in twins.items() if first in found})


def _pieces(described: Model, names: Map, trunk: str) -> Iterator[Piece]:
    for weight in described.weights():
        slot, layer = names.slot(weight.name), LAYER.match(weight.name)
        if slot is not None:
            numbers = {"layer": layer[2]} if layer else {}
            yield from pieces(slot._replace(path=_behind(trunk, slot.path)), weight, numbers)
        elif weight.learned:
            raise SpecError(
                f"{weight.name} has no place in files of {' and '.join(names.families)}; write it with hw.save"
            )


def _behind(trunk: str, path: str) -> str:
    return f"{trunk}{path}".removeprefix(".") if path.startswith(".") else path
