"""What a file must hold to be a model, worked out from the names that one architecture gives its tensors."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..blueprint import ModelSpec
from ..errors import SpecError
from .slots import EMPTY, TensorPiece, TensorLocation, make_pieces

LAYER = re.compile(r"^(\w+)\.(\d+)\.")
ADDED_BIAS = re.compile(r"^(\w+\.\{layer\}\.(?:attention|cross))\.(?:output\.o_bias|constant)$")


class WeightNames(NamedTuple):
    """The names that the files of some families give our tensors, {layer} standing for the number of a layer.

    A path that begins with a dot stands behind the name of the trunk, of which `trunks` lists all that files use, the
    one to write first. `twins` are second names of tensors, with the first, and `spelt` other ends of names, with those
    used here. What is `ignored` may lie in a file besides: nothing that was learnt, or heads that its class has not.
    """

    families: tuple[str, ...]
    locations: Mapping[str, str | TensorLocation]
    prefixes: tuple[str, ...] = ("",)
    tied_names: Mapping[str, str] = EMPTY
    suffix_aliases: Mapping[str, str] = EMPTY
    ignored: tuple[str, ...] = ()

    def find_location(self, name: str) -> TensorLocation | None:
        """Where the tensor of this name lies, if files have a place for it."""
        own = LAYER.sub(r"\1.{layer}.", name)
        found = self.locations.get(own) or self._added_bias(own)
        return TensorLocation(found) if isinstance(found, str) else found

    def _added_bias(self, own: str) -> str | TensorLocation | None:
        """Where a vector lies that an attention adds although its files have none: as the bias of its last matrix."""
        if not (site := ADDED_BIAS.match(own)):
            return None
        matrix = self.locations.get(f"{site[1]}.output.o")
        path = matrix.path if isinstance(matrix, TensorLocation) else matrix or ""
        bias = f"{path.removesuffix('.weight')}.bias" if path.endswith(".weight") else None
        return self.locations.get(f"{site[1]}.output.o_bias", bias)

    def find_prefix(self, names: Iterable[str]) -> str:
        """The name of the trunk that these names stand behind."""
        names = list(names)
        found = (trunk for trunk in self.prefixes if any(name.startswith(f"{trunk}.") for name in names) or not trunk)
        return next(found, self.prefixes[0])

    def canonical_name(self, name: str) -> str:
        """The name of a tensor as it is spelt here."""
        for other, ours in self.suffix_aliases.items():
            if name.endswith(other):
                return name.removesuffix(other) + ours
        return name

    def with_ignored(self, names: Iterable[str]) -> WeightNames:
        """The same where tensors of these names may be left out too."""
        return self._replace(ignored=(*self.ignored, *(f"^{re.escape(name)}$" for name in names)))

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of this name may be left out."""
        return any(re.search(pattern, name) for pattern in self.ignored)


@dataclass(frozen=True)
class CheckpointPlan:
    """The pieces of each tensor in a file, by its name there, and the second names that it may go by."""

    pieces: Mapping[str, list[TensorPiece]]
    tied_names: Mapping[str, str]

    def find_source(self, path: str, names: Container[str]) -> str | None:
        """The name by which a file that holds these names has a tensor: its first, or a second one."""
        twins = (second for second, first in self.tied_names.items() if first == path)
        return next((name for name in (path, *twins) if name in names), None)

    @staticmethod
    def from_spec(model_spec: ModelSpec, names: WeightNames, prefix: str) -> CheckpointPlan:
        """The plan of this model; a learned tensor that files of this kind have no place for is refused."""
        found: dict[str, list[TensorPiece]] = {}
        for piece in _make_pieces(model_spec, names, prefix):
            found.setdefault(piece.path, []).append(piece)
        twins = {_add_prefix(prefix, second): _add_prefix(prefix, first) for second, first in names.tied_names.items()}
        for reader, owner in model_spec.tied_weights().items():
            second, first = (names.find_location(name) for name in (reader, owner))
            if second and first:
                twins[_add_prefix(prefix, second.path)] = _add_prefix(prefix, first.path)
        return CheckpointPlan(found, {second: first for second, first in twins.items() if first in found})


def _make_pieces(described: ModelSpec, names: WeightNames, trunk: str) -> Iterator[TensorPiece]:
    for weight in described.weights():
        slot, layer = names.find_location(weight.name), LAYER.match(weight.name)
        if slot is not None:
            numbers = {"layer": layer[2]} if layer else {}
            yield from make_pieces(slot._replace(path=_add_prefix(trunk, slot.path)), weight, numbers)
        elif weight.trainable:
            raise SpecError(
                f"{weight.name} has no place in files of {' and '.join(names.families)}; write it with hw.save"
            )


def _add_prefix(trunk: str, path: str) -> str:
    return f"{trunk}{path}".removeprefix(".") if path.startswith(".") else path
