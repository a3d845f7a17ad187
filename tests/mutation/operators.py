"""Mutation operators: small changes of a Python syntax tree, and the points of a module where they
apply.

A mutation point is addressed by module, function, operator and number, never by source text or
line, so that an address stays valid when code is formatted again or other functions change.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MODULE_LEVEL = "<module>"
Function = ast.FunctionDef | ast.AsyncFunctionDef

COMPARISONS = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
]
SWAPPED_COMPARISON = {a: b for pair in COMPARISONS for a, b in (pair, pair[::-1])}
ARITHMETIC = [(ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.BitAnd, ast.BitOr)]
SWAPPED_ARITHMETIC = {a: b for pair in ARITHMETIC for a, b in (pair, pair[::-1])} | {
    ast.Div: ast.Mult
}
EXTREMES = [
    ("min", "max"),
    ("minimum", "maximum"),
    ("amin", "amax"),
    ("argmin", "argmax"),
    ("any", "all"),
]
SWAPPED_EXTREME = {a: b for pair in EXTREMES for a, b in (pair, pair[::-1])}


@dataclass(frozen=True)
class Address:
    """The `nth` (from 1) point of `operator` within `function` of `module`.

    `module` is a path relative to src/headwise, `function` a dotted name such as `Window.boxes`: a
    method, a class (its body outside methods) or `<module>`. Functions inside functions are
    addressed as `outer.inner`.
    """

    module: str
    function: str
    operator: str
    nth: int

    def __str__(self) -> str:
        return f"{self.module} {self.function} {self.operator} {self.nth}"


@dataclass(frozen=True)
class Mutant:
    """One changed module: its full source, and the change in words."""

    source: str
    change: str


# --- operators: a node gives the nodes that may replace it ----------------------------------------


def swap_comparison(node: ast.AST) -> Iterator[ast.AST]:
    """`<` and `<=`, `>` and `>=`, `==` and `!=`, `is` and `is not`, `in` and `not in`."""
    if isinstance(node, ast.Compare):
        for at, sign in enumerate(node.ops):
            signs = [*node.ops[:at], SWAPPED_COMPARISON[type(sign)](), *node.ops[at + 1 :]]
            yield ast.Compare(node.left, signs, node.comparators)


def swap_arithmetic(node: ast.AST) -> Iterator[ast.AST]:
    """`+` and `-`, `*` and `//`, `&` and `|`; `/` becomes `*`. Also in `x += y`."""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED_ARITHMETIC:
        yield ast.BinOp(node.left, SWAPPED_ARITHMETIC[type(node.op)](), node.right)
    if isinstance(node, ast.AugAssign) and type(node.op) in SWAPPED_ARITHMETIC:
        yield ast.AugAssign(node.target, SWAPPED_ARITHMETIC[type(node.op)](), node.value)


def raise_constant(node: ast.AST) -> Iterator[ast.AST]:
    """A number `n` becomes `n + 1`."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield ast.Constant(node.value + 1)


def lower_constant(node: ast.AST) -> Iterator[ast.AST]:
    """A number `n` becomes `n - 1`, unless it is 0."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value:
        yield ast.Constant(node.value - 1) if node.value >= 1 else ast.Constant(0.0)


def swap_and_or(node: ast.AST) -> Iterator[ast.AST]:
    """`and` and `or`."""
    if isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)


def remove_not(node: ast.AST) -> Iterator[ast.AST]:
    """`not x` becomes `x`; so do `-x` and `~x`."""
    if isinstance(node, ast.UnaryOp):
        yield node.operand


def swap_extreme(node: ast.AST) -> Iterator[ast.AST]:
    """`min` and `max`, `any` and `all`, and functions and methods of tensors named like them."""
    if isinstance(node, ast.Name) and node.id in SWAPPED_EXTREME and isinstance(node.ctx, ast.Load):
        yield ast.Name(SWAPPED_EXTREME[node.id], node.ctx)
    if (
        isinstance(node, ast.Attribute)
        and node.attr in SWAPPED_EXTREME
        and isinstance(node.ctx, ast.Load)
    ):
        yield ast.Attribute(node.value, SWAPPED_EXTREME[node.attr], node.ctx)


def shift_slice(node: ast.AST) -> Iterator[ast.AST]:
    """A bound of a slice becomes larger by one."""
    if isinstance(node, ast.Slice):
        if node.lower:
            yield ast.Slice(
                ast.BinOp(node.lower, ast.Add(), ast.Constant(1)), node.upper, node.step
            )
        if node.upper:
            yield ast.Slice(
                node.lower, ast.BinOp(node.upper, ast.Add(), ast.Constant(1)), node.step
            )


def negate_condition(node: ast.AST) -> Iterator[ast.AST]:
    """`if x` becomes `if not x`, in statements and in conditional expressions."""
    if isinstance(node, ast.If):
        yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    if isinstance(node, ast.IfExp):
        yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)


def flip_boolean(node: ast.AST) -> Iterator[ast.AST]:
    """`True` and `False`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)


def drop_operand(node: ast.AST) -> Iterator[ast.AST]:
    """`a + b` becomes `a`, then `b`; so does every other operator, and each operand of `and` and
    `or` is left out.
    """
    if isinstance(node, ast.BinOp):
        yield node.left
        yield node.right
    if isinstance(node, ast.BoolOp):
        for at in range(len(node.values)):
            rest = [*node.values[:at], *node.values[at + 1 :]]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)


def fix_condition(node: ast.AST) -> Iterator[ast.AST]:
    """`a if c else b` becomes `a`, then `b`; `if c:` becomes `if True:`, then `if False:`."""
    if isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    if isinstance(node, ast.If):
        yield ast.If(ast.Constant(True), node.body, node.orelse)
        yield ast.If(ast.Constant(False), node.body, node.orelse)


def drop_statement(node: ast.AST) -> Iterator[ast.AST]:
    """A call, an assignment or an `if` without `else` becomes `pass`; a docstring stays."""
    if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
        yield ast.Pass()
    if isinstance(node, ast.Assign | ast.AugAssign) or (
        isinstance(node, ast.If) and not node.orelse
    ):
        yield ast.Pass()


OPERATORS: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    "comparison": swap_comparison,
    "arithmetic": swap_arithmetic,
    "constant": raise_constant,
    "and-or": swap_and_or,
    "not": remove_not,
    "extreme": swap_extreme,
    "slice": shift_slice,
    "negate": negate_condition,
    "boolean": flip_boolean,
    "constant-down": lower_constant,
    "operand": drop_operand,
    "condition": fix_condition,
    "statement": drop_statement,
}
# Samples leave out the last four: most of their mutants fail at once and say little about the
# tests.
SAMPLED = tuple(OPERATORS)[:9]


# --- where they apply -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a node stands: in `field` of `parent`, at `index` when the field is a list."""

    parent: ast.AST
    field: str
    index: int | None

    def put(self, node: ast.AST) -> None:
        """Put `node` there."""
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


# Annotations, decorators and base classes compute nothing.
UNTOUCHED = {"annotation", "returns", "decorator_list", "type_params", "bases"}
UNTOUCHED_METHODS = {"examples", "__repr__"}  # `examples` gives specs to the tests


def is_untouched(node: ast.AST) -> bool:
    """Whether nothing inside this node is changed: errors, messages, examples, imports for the type
    checker.
    """
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING")
    if isinstance(node, Function):
        return node.name in UNTOUCHED_METHODS
    return isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr)


def places(node: ast.AST, function: str = MODULE_LEVEL) -> Iterator[tuple[str, Place, ast.AST]]:
    """Every node below this one in source order, with the name of the function or class that it
    belongs to.
    """
    for field, value in ast.iter_fields(node):
        if field in UNTOUCHED:
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or is_untouched(child):
                continue
            inside = function
            if isinstance(child, Function | ast.ClassDef):
                inside = child.name if function == MODULE_LEVEL else f"{function}.{child.name}"
            yield inside, Place(node, field, index), child
            yield from places(child, inside)


def changes(tree: ast.Module, module: str) -> Iterator[tuple[Address, Place, ast.AST, ast.AST]]:
    """Every mutation point of a module: its address, its place, the node there and the node to put
    there.
    """
    numbers: Counter[tuple[str, str]] = Counter()
    for function, place, node in places(tree):
        for name, operator in OPERATORS.items():
            for new in operator(node):
                numbers[function, name] += 1
                yield Address(module, function, name, numbers[function, name]), place, node, new


def points(source: str, module: str) -> list[Address]:
    """The addresses of all mutation points of a module, in source order."""
    return [address for address, *_ in changes(ast.parse(source), module)]


def mutate(source: str, address: Address) -> Mutant:
    """The module changed at one address; KeyError if the module has no such point."""
    tree = ast.parse(source)
    for found, place, old, new in changes(tree, address.module):
        if found == address:
            change = f"{summary(old)} -> {summary(new)}"
            place.put(new)
            return Mutant(ast.unparse(ast.fix_missing_locations(tree)) + "\n", change)
    raise KeyError(f"no mutation point {address}")


def summary(node: ast.AST) -> str:
    """The first line of a node's source, cut after 80 characters."""
    return ast.unparse(ast.fix_missing_locations(node)).split("\n")[0][:80]
