"""Base classes of all parts, and the registry that finds a part by its name.

Parts that are not headwise's own come from a Python file; a saved model records which it needs.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import math
import re
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NamedTuple,
    Self,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from ...util.errors import SpecError, suggest
from ...util.size_limits import MAX_INTEGER, check_size
from .core_types import (
    AttentionSpec,
    AxisLayout,
    CallSize,
    CoreShape,
    Heads,
    Param,
    PartParams,
    SpecFactory,
    SymmetryGroup,
)

if TYPE_CHECKING:
    from torch import Tensor


# --- Registry -------------------------------------------------------------------------------------


C = TypeVar("C")
REGISTRY: dict[str, type] = {}
ENTRY_POINT_GROUP = "headwise.attention.parts"  # a package's entry point is named after its part


@dataclass_transform(frozen_default=True)
def part(cls: type[C]) -> type[C]:
    """Class decorator that makes a frozen dataclass and registers it under its name.

    It is for parts, and for the small values that parts have as fields.
    """
    if not cls.__module__.startswith("headwise."):
        _check_methods(cls)
    frozen = dataclass(frozen=True, repr=False)(cls)
    registered = REGISTRY.get(cls.__name__)
    if registered is not None and registered.__module__ != cls.__module__:
        raise SpecError(
            f"cannot register {cls.__name__} of {cls.__module__}: {registered.__module__} has "
            "that name too; rename one"
        )
    REGISTRY[cls.__name__] = frozen
    return frozen


def _check_methods(cls: type) -> None:
    """Raise SpecError for a method whose name or parameters are almost those of a base class."""
    inherited = {name for base in cls.__mro__[1:] for name in vars(base) if name[0] != "_"}
    for name, method in vars(cls).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        if name not in inherited:
            close = difflib.get_close_matches(name, inherited - set(vars(cls)), 1, cutoff=0.8)
            if close:
                raise SpecError(
                    f"headwise never calls {cls.__name__}.{name}; did you mean {close[0]!r}?"
                )
            continue
        expected = next(vars(base)[name] for base in cls.__mro__[1:] if name in vars(base))
        if inspect.isfunction(expected):
            own, base = inspect.signature(method), inspect.signature(expected)
            keywords = {
                one.name for one in base.parameters.values() if one.kind is one.KEYWORD_ONLY
            }
            try:
                own.bind(*set(base.parameters) - keywords, **dict.fromkeys(keywords))
            except TypeError:
                raise SpecError(
                    f"{cls.__name__}.{name} takes {', '.join(own.parameters)}; "
                    f"it is called with {', '.join(base.parameters)}"
                ) from None


def find_class(name: str) -> type:
    """The registered class with this name; an unknown name is looked up in the entry points of
    installed packages.

    >>> find_class("Softmaxx")
    Traceback (most recent call last):
    headwise.util.errors.SpecError: there is no part 'Softmaxx'; ...
    """
    if name not in REGISTRY:
        load_entry_point(name)
    if name not in REGISTRY:
        hint = suggest(
            name, [*REGISTRY, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))]
        )
        own = "if it is your own part, add --import FILE.py, or import its module in Python"
        raise SpecError(
            f"there is no part {name!r}; {hint if hint.startswith('did you mean') else own}"
        )
    return REGISTRY[name]


def load_entry_point(name: str) -> None:
    """Import the module that an installed package declares for this part, if any.

    Packages declare parts in the entry point group `headwise.attention.parts`.
    """
    entries = [*entry_points(group=ENTRY_POINT_GROUP, name=name)]
    places = sorted({entry.value for entry in entries})
    if len(places) > 1:
        raise SpecError(
            f"several packages declare the part {name}: {', '.join(places)}; uninstall all but one"
        )
    for entry in entries:
        package = entry.dist.name if entry.dist else entry.module
        fact = f"the package {package} declares the part {name} as {entry.value}"
        try:
            entry.load()
        except Exception as error:  # a module may raise anything
            raise SpecError(
                f"{fact}, which fails: {type(error).__name__}: {error}; update or uninstall "
                f"{package}"
            ) from error
        if name not in REGISTRY:
            raise SpecError(
                f"{fact}, which registers no part of this name; update or uninstall {package}"
            )


def field_defaults(cls: type) -> dict[str, Any]:
    """The default values of the fields of a registered class that have one."""
    return {f.name: f.default for f in fields(cls) if f.default is not MISSING}


@dataclass(frozen=True, repr=False)
class CheckedDataclass:
    """Base class of dataclasses that check the types of their fields.

    The repr is the constructor call, without arguments that equal their defaults.
    """

    def __post_init__(self) -> None:
        cls = type(self)
        if cls not in _FIELD_TYPES:
            hints = get_type_hints(cls)
            _FIELD_TYPES[cls] = {field.name: _classes(hints[field.name]) for field in fields(cls)}
        field_types = _FIELD_TYPES[cls]
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = field_types[field.name]
            if isinstance(value, float) and not math.isfinite(value):
                raise SpecError(
                    f"{type(self).__name__}({field.name}={value!r}) is not finite; give a finite "
                    "number"
                )
            if isinstance(value, int) and abs(value) > MAX_INTEGER:
                check_size(f"{type(self).__name__}.{field.name}", abs(value), MAX_INTEGER)
            wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
            if wrong:
                expected = " or ".join(
                    "None" if kind is type(None) else kind.__name__ for kind in kinds
                )
                examples = [
                    f"{name}()"
                    for name, cls in sorted(REGISTRY.items())
                    if CheckedDataclass in cls.__mro__ and issubclass(cls, kinds)
                ]
                if examples:
                    expected += f", such as {', '.join(examples)}"
                raise SpecError(
                    f"{type(self).__name__}({field.name}={value!r}) is of type "
                    f"{type(value).__name__}; give {expected}"
                )

    def check_fields(
        self, ranges: Mapping[str, tuple[float, float]], choices: Mapping[str, Collection[str]]
    ) -> None:
        """Raise SpecError for numbers out of range and for strings that are not
        among the choices.
        """
        class_name = type(self).__name__
        for name, (low, high) in ranges.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise SpecError(
                    f"{class_name}({name}={value!r}) is out of range; give {low:g} to {high:g}"
                )
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise SpecError(
                    f"{class_name}({name}={value!r}) is unknown; {suggest(value, allowed)}"
                )

    def __repr__(self) -> str:
        defaults = field_defaults(type(self))
        values = [(f.name, getattr(self, f.name)) for f in fields(self)]
        args = [
            f"{name}={value!r}"
            for name, value in values
            if name not in defaults or value != defaults[name]
        ]
        return f"{type(self).__name__}({', '.join(args)})"


# cached: resolving hints dominates the cost of a part
_FIELD_TYPES: dict[type, dict[str, tuple[type, ...]]] = {}


def _classes(hint: Any) -> tuple[type, ...]:
    options: tuple[Any, ...] = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kinds = tuple(get_origin(option) or option for option in options)
    return (*kinds, int) if float in kinds else kinds


# --- Base classes ---------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Part(CheckedDataclass, ABC):
    """Base class of everything that an attention layer is made of.

    A part is a frozen dataclass; it holds options, not tensors. Every method has a neutral default,
    so a part overrides only the methods that concern it.
    """

    paper: ClassVar[str] = ""  # arXiv number, or another name of the source
    # where paper and released code disagree, and which one this follows
    disagreements: ClassVar[tuple[str, ...]] = ()
    positional: ClassVar[bool] = False  # True if the result depends on token positions
    # The sides on which this part allows any orthogonal map of a head's channels: "k" (keys with
    # their queries), "v".
    unrestricted_sides: ClassVar[str] = "kv"
    # What `field_conflicts` checks: the values of text fields, the least values of numbers, numbers
    # above zero, and the tensors that need heads.dim or heads.vdim channels.
    field_choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    field_minima: ClassVar[Mapping[str, float]] = {}
    positive_fields: ClassVar[tuple[str, ...]] = ()
    needed_head_dims: ClassVar[str] = ""
    # What a project needs a similarity for that is a dot product, and text fields of distinct
    # letters with the letters that they may have.
    needed_dot_product: ClassVar[str] = ""
    letter_fields: ClassVar[Mapping[str, str]] = {}
    # Norms and biases that, like the matrices of the source, only make the kv entries of new
    # tokens: a layer that reads the entries of another layer has none of them.
    kv_only_params: ClassVar[tuple[str, ...]] = ()

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        """The parameters of this part, by name."""
        return {}

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        """The sizes of the axes that only this part has."""
        return {}

    def resample_constants(self, spec: AttentionSpec, seed: int) -> Mapping[str, Tensor]:
        """Return new values of random constants, such as random features; empty without any."""
        return {}

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        """The tensors that this part caches for each token, by name."""
        return {}

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        """FLOPs of extra matrix products, not counting declared parameters and the core."""
        return 0

    def constant_flops(self, spec: AttentionSpec, work: CallSize) -> int:
        """The part of `flops` with constants: one product in the backward pass, not two."""
        return 0

    def query_independent_flops(self, spec: AttentionSpec) -> int:
        """The part of `flops` independent of the queries: each block of queries repeats it."""
        return 0

    def field_conflicts(self, spec: AttentionSpec) -> Iterator[str]:
        """The reasons why fields of this part have values outside those declared by its class."""
        name = type(self).__name__
        for field, options in self.field_choices.items():
            value = getattr(self, field)
            if value not in options:
                *first, last = map(repr, options)
                yield f"{name}({field}={value!r}) is unknown; use {', '.join(first)} or {last}"
        for field, least in self.field_minima.items():
            value = getattr(self, field)
            if value is not None and not value >= least:
                yield f"{name}({field}={value!r}) must be at least {least}"
        for field in self.positive_fields:
            value = getattr(self, field)
            if value is not None and not value > 0:
                yield f"{name}({field}={value!r}) must be positive"
        if self.needed_head_dims and not spec.project.uses_head_dims:
            yield (
                f"{name} needs {self.needed_head_dims}, unlike {type(spec.project).__name__}; use "
                "project LinearProjection()"
            )
        if self.needed_dot_product and not spec.similarity.linear:
            yield (
                f"{name} needs a dot product for {self.needed_dot_product}, unlike "
                f"{type(spec.similarity).__name__}; use similarity DotProduct()"
            )
        for field, letters in self.letter_fields.items():
            value = getattr(self, field)
            if set(value) - set(letters) or len(set(value)) != len(value):
                listed = f"{', '.join(letters[:-1])} and {letters[-1]}"
                yield (f"{name}({field}={value!r}) is unknown; name each of {listed} at most once")

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        """Reasons why this part cannot be used in this spec; empty if it can."""
        return ()

    def required_score_heads(self, spec: AttentionSpec, heads: frozenset[int]) -> frozenset[int]:
        """The score heads that must be computed to get the results of `heads`."""
        return heads

    def symmetry(self, spec: AttentionSpec, side: str, p: Mapping[str, Tensor]) -> SymmetryGroup:
        """The orthogonal maps of a head's channels under which this part is invariant or
        equivariant.

        On side "k" a map applies to a key head and to all queries that use it, on side "v" to a
        value head.
        """
        widths = {"k": spec.heads.dim, "v": spec.heads.vdim}
        return (
            SymmetryGroup.full(widths[side]) if side in self.unrestricted_sides else SymmetryGroup()
        )

    def concatenates_key_heads(self) -> bool:
        """True if this part treats all key heads as one vector, so that repeating a key head
        changes the result.
        """
        return False

    def with_fixed_sizes(self, spec: AttentionSpec) -> Self:
        """A copy with every size given explicitly that would otherwise follow from the number of
        heads.
        """
        return self

    def fit_heads(self, heads: Heads) -> Heads:
        """The heads that this part needs, derived from the plain heads that `design` was given."""
        return self.widen_heads(heads)

    def widen_heads(self, heads: Heads) -> Heads:
        """`heads` with the widths that this part needs; applied again whenever `at_depth` changes
        the part.
        """
        return heads

    def max_positions(self, spec: AttentionSpec) -> int | None:
        """The number of supported positions, counted from 0; None if there is no limit."""
        return None

    def at_depth(self, layer: int, layers: int) -> Self:
        """A copy for one layer of a stack of `layers`, with depth schedules replaced by their
        values.
        """
        return self

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        """Small specs that together cover every field; the contract tests run on each of them."""
        return iter(())


class RecurrentPart(Part):
    """Base class of a similarity or normaliser that can summarise all past tokens in a state of
    fixed size, as linear attention does. The state is a sum over tokens: states of several chunks
    of tokens are computed apart and then added.
    """

    @abstractmethod
    def state_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        """The tensors of the state, by name; empty if tokens must be cached instead."""

    @abstractmethod
    def num_state_features(self, core: CoreShape) -> int:
        """The number of key features in the state; 0 if all tokens have equal weight."""

    @abstractmethod
    def unnormalised_weights(
        self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: PartParams
    ) -> Tensor:
        """Attention weights of these pairs before division by their sum, [B, H, T, S]."""

    @abstractmethod
    def update_state(
        self,
        state: Mapping[str, Tensor],
        k_BHSK: Tensor,
        v_BHSV: Tensor,
        live_BS: Tensor,
        p: PartParams,
    ) -> dict[str, Tensor]:
        """The state after adding these tokens; tokens that are not live (padding) are ignored."""

    @abstractmethod
    def read_state(
        self, q_BHTK: Tensor, state: Mapping[str, Tensor], p: PartParams
    ) -> tuple[Tensor, Tensor]:
        """The weighted sum of values for each query, and the sum of the weights to divide it by."""


OWN_PACKAGE = __name__.partition(".")[0]
FILE_NAME = re.compile(r"[\w.-]+\.py")
IMPORTED_FILES: list[Path] = []  # by `import_part_file`, in this order


def import_part_file(name: str | Path) -> None:
    """Import a Python file that registers parts; a file is run only once.

    The folder of the file is added at the end of `sys.path`, so that the file can import its
    neighbours.
    """
    path = Path(name).resolve()
    if path in IMPORTED_FILES:
        return
    if not path.is_file() or path.suffix != ".py":
        raise SpecError(
            f"cannot import {str(name)!r}: it is no Python file; give the .py file that defines "
            "your parts"
        )
    before = set(REGISTRY)
    if not _is_imported(path):
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        try:
            _run_file(path)
            if not any(
                map(_is_external, [*_new_classes(before), *vars(sys.modules[path.stem]).values()])
            ):
                raise SpecError(
                    f"{name} registers no part; decorate its class with @part of "
                    "headwise.attention.interfaces.part"
                )
        except BaseException:
            sys.modules.pop(path.stem, None)
            # the file may also be the first to import headwise
            for cls in filter(_is_external, _new_classes(before)):
                del REGISTRY[cls.__name__]
            raise
    IMPORTED_FILES.append(path)


def imported_part_files() -> tuple[str, ...]:
    """List the files imported by `import_part_file`, for import in another process."""
    return tuple(map(str, IMPORTED_FILES))


def _new_classes(before: set[str]) -> list[type]:
    return [cls for name, cls in REGISTRY.items() if name not in before]


def _is_imported(path: Path) -> bool:
    """True if this file is already imported as a module.

    Raises if another module has this name: the file would hide it.
    """
    try:
        module = sys.modules.get(path.stem) or importlib.util.find_spec(path.stem)
    except (ImportError, ValueError):
        module = None
    if module is None:
        return False
    origin = getattr(module, "__file__", None) or getattr(module, "origin", None) or "built in"
    if Path(origin).resolve() != path:
        raise SpecError(
            f"cannot import {path.name}: there is another module {path.stem} ({origin}); rename "
            "the file"
        )
    return path.stem in sys.modules


def _run_file(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # because the suffix is .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # a dataclass looks its own module up
    try:
        spec.loader.exec_module(module)
    except (SpecError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the file may raise anything, SystemExit included
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        line = f", line {lines[-1]}" if lines else ""
        raise SpecError(
            f"cannot import {path.name}{line}: {type(error).__name__}: {error}; correct the file"
        ) from error


def _is_external(value: Any) -> bool:
    """True if a value is a registered class that is not headwise's own."""
    if not isinstance(value, type) or REGISTRY.get(value.__name__) is not value:
        return False
    return value.__module__.partition(".")[0] != OWN_PACKAGE


# --- Parts that a saved model needs ---------------------------------------------------------------


class ExternalPart(NamedTuple):
    """A part that is not headwise's own: its name, its module, and the name of the file ("" if it
    has none).
    """

    name: str
    module: str
    file: str

    @staticmethod
    def from_class(kind: type) -> ExternalPart:
        """Return the record of a registered class."""
        path = getattr(sys.modules.get(kind.__module__), "__file__", None)
        return ExternalPart(kind.__name__, kind.__module__, Path(path).name if path else "")

    @staticmethod
    def from_dict(row: Any, source: str) -> ExternalPart:
        """Return the record that `_asdict` wrote; `source` names the file in error messages."""
        table = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
        values = [table.get(key) for key in ExternalPart._fields]
        if set(table) != set(ExternalPart._fields) or not all(
            isinstance(value, str) for value in values
        ):
            raise SpecError(
                f"{source}: parts = {row!r} is no table of name, module and file; save the model "
                "again"
            )
        return ExternalPart(*map(str, values))

    def check_registered(self, source: str) -> None:
        """Raise unless this part is registered.

        Runs only code of installed packages, never from a model's folder.
        """
        if self.name not in REGISTRY:
            load_entry_point(self.name)
        if self.name in REGISTRY and _is_external(REGISTRY[self.name]):
            return
        fact = f"{source} needs the part {self.name} of the module {self.module}"
        if self.name in REGISTRY:
            raise SpecError(
                f"{fact}, but {self.name} is now a part of headwise; use the headwise that saved "
                "the model"
            )
        file = self.file if FILE_NAME.fullmatch(self.file) else "FILE.py"
        raise SpecError(
            f"{fact}, which is not loaded; add --import {file}, or import that module in Python "
            "first"
        )


def find_external_parts(value: Any) -> list[ExternalPart]:
    """Return the parts in a spec, or in any nested dataclasses, that are not headwise's own; each
    once, by name.
    """
    classes: set[type] = {type(item) for item in _iter_dataclasses(value)}
    return sorted(ExternalPart.from_class(cls) for cls in classes if _is_external(cls))


def _iter_dataclasses(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in cast("list[Any]", value):
            yield from _iter_dataclasses(item)
    elif isinstance(value, Mapping):
        yield from _iter_dataclasses(list(cast("Mapping[str, Any]", value).values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield value
        for field in fields(value):
            yield from _iter_dataclasses(getattr(value, field.name))
