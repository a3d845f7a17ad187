"""Attentions found by what they do: a module that compares, heard in one run of the model on an example.

The innermost module in which a comparison begins and ends is the site. Whatever its parts are called, it is seen at the
function that compares, and what heads say is changed before anything else touches it. What is heard and not understood
is listed with the reason. What was found is known of these modules as long as they live, and of no copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ...site import Ability
from ..watching import Core, Seen, Stand, changed, watchers
from . import forwards
from .base import Found, Given, Route
from .hearing import Ear, Heard
from .places import HEADS, Sizes, number, site, within
from .projection import declared
from .reading import ANYHOW

TWICE = "it compares several times in one call, and headwise does not know which heads are which; hw.declare says it"
AROUND = "it compares, and so does a module within it"
UNREAD = "no values are multiplied with what its softmax gives, so that nobody knows what its weights weigh"


class Manner(NamedTuple):
    """How a module was heard to compare; `why` says what of it is not understood."""

    heads: int
    kv: int
    dim: int
    pattern: str
    why: str = ""


_KNOWN: WeakKeyDictionary[nn.Module, Manner] = WeakKeyDictionary()


class Called(Route):
    """Modules that were heard to compare, and understood."""

    def find(self, model: nn.Module) -> Iterator[Found]:
        for path, module, manner in _known(model):
            if not manner.why:
                forwards.give(module, _listening)
                sizes = Sizes(manner.heads, manner.kv, manner.dim)
                able = forwards.reached(module)
                yield Found(site(path, module, sizes, pattern=manner.pattern, see=able, silence=able), module, self)

    def stands(self) -> list[Stand]:
        return forwards.stands(_listening)


class Unclear(Route):
    """Modules that were heard to compare in a way that is not understood; nothing can be done to them."""

    def find(self, model: nn.Module) -> Iterator[Found]:
        for path, module, manner in _known(model):
            if manner.why:
                no = Ability(False, manner.why)
                sizes = Sizes(manner.heads, manner.kv, manner.dim)
                yield Found(site(path, module, sizes, pattern=ANYHOW, see=no, silence=no), module, self)

    def stands(self) -> list[Stand]:
        return []


def _known(model: nn.Module) -> Iterator[tuple[str, nn.Module, Manner]]:
    """What was heard of modules of a model; what somebody declared goes before it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    said = [path for path, module in modules.items() if declared(module)]
    for path, module in modules.items():
        if module in _KNOWN and not any(within(path, other) or within(other, path) for other in said):
            yield path, module, _KNOWN[module]


def _listening(module: nn.Module, run: forwards.Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward of a module that is watched; it must compare once, as it did when it was found."""
    those = watchers(module)
    if not those:
        return run(*args, **kwargs)
    heads, times = _KNOWN[module].heads, 0

    def told(heard: Heard) -> Tensor | None:
        nonlocal times
        times += 1
        if heard.core is None or heard.z_BTHV is None or heard.z_BTHV.shape[2] != heads or times > 1:
            raise ValueError(f"{type(module).__name__} {_OTHERWISE}")
        for watcher in those:
            if watcher.wants_core:
                watcher.core(heard.core)
        return changed(those, heard.z_BTHV)

    with Ear(told):
        result = run(*args, **kwargs)
    if not times:
        raise ValueError(f"{type(module).__name__} {_OTHERWISE}")
    return result


_OTHERWISE = "does not compare as when it was found; give hw.sites(model, example) an example like this input"


def tried(model: nn.Module, example: Any) -> None:
    """Run a model on an example and remember which of its modules compare, and how."""
    if any(module.training for module in model.modules()):
        raise ValueError("the model is in train mode, where a run would change it; call model.eval() first")
    trial = Trial()
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    with torch.random.fork_rng(devices), torch.no_grad(), trial.listening() as ear:
        try:
            _run(model, example)
        except Exception as error:  # whatever a model raises
            said = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(f"{type(model).__name__} cannot be run on this example: {said}") from error
    for made in ear.made:
        owners = [module for module in made.inside if not type(module).__module__.startswith("torch.nn.")]
        if owners and not made.read and made.axes == 4 and owners[-1] not in trial.manners:
            trial.manners[owners[-1]] = Manner(0, 0, 0, ANYHOW, UNREAD)
    _KNOWN.update(trial.manners)


def _run(model: nn.Module, example: Any) -> None:
    if isinstance(example, Mapping):
        model(**example)
    else:
        model(*(example if isinstance(example, (tuple, list)) else [example]))


@dataclass
class Frame:
    """One call of a module: how it compared itself, and how often modules within it did."""

    module: nn.Module
    own: list[Manner]
    within: int = 0


class Trial:
    """What is heard of the modules of a model while it runs once."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.inside: list[nn.Module] = []
        self.manners: dict[nn.Module, Manner] = {}
        self.thread = get_ident()

    @contextmanager
    def listening(self) -> Iterator[Ear]:
        """While this lasts, modules that this thread runs are told apart and heard."""
        ends = [register_module_forward_pre_hook(self.enter)]
        try:
            ends.append(register_module_forward_hook(self.leave, always_call=True))
            with Ear(self.told, inside=self.inside) as ear:
                yield ear
        finally:
            for end in ends:
                end.remove()

    def enter(self, module: nn.Module, _: Any) -> None:
        """A module begins."""
        if get_ident() == self.thread:
            self.frames.append(Frame(module, []))
            self.inside.append(module)

    def leave(self, module: nn.Module, _: Any, result: Any) -> None:
        """A module ends, or fails."""
        if get_ident() != self.thread or module is not self.inside[-1]:
            return
        frame = self.frames.pop()
        self.inside.pop()
        if not frame.own:
            return
        manner = frame.own[0]
        if len(frame.own) > 1:
            manner = manner._replace(why=TWICE)
        elif frame.within:
            manner = manner._replace(why=AROUND)
        self.manners[module] = _both(self.manners.get(module, manner), manner)

    def told(self, heard: Heard) -> None:
        """Something was compared."""
        if not heard.since:
            return
        frame = self.frames[heard.since - 1]
        frame.own.append(_manner(frame.module, heard))
        for outer in self.frames[: heard.since - 1]:
            outer.within += 1


def _manner(module: nn.Module, heard: Heard) -> Manner:
    if heard.core is None or heard.z_BTHV is None:
        return Manner(number(module, HEADS), 0, 0, ANYHOW, heard.why)
    heads, says = heard.z_BTHV.shape[2], number(module, HEADS)
    kv, dim = heard.kv or heads, heard.dim or heard.z_BTHV.shape[3]
    why = f"it says that it has {says} heads, and compares {heads}" if says and says != heads else ""
    return Manner(heads, kv, dim, _pattern(heard.core), why)


def _pattern(core: Core) -> str:
    """Who reads whom, as far as one call shows it."""
    if isinstance(core, Seen) and core.mask is None:
        return "causal()" if core.causal else "full()"
    read = (core.weights if isinstance(core, Given) else core.rows(0)) > 0
    if bool(read.all()):
        return "full()"
    square = read.shape[-1] == read.shape[-2]
    return "causal()" if square and torch.equal(read, read.new_ones(read.shape).tril()) else ANYHOW


def _both(one: Manner, other: Manner) -> Manner:
    """How a module compares that was called twice."""
    if one.why or other.why or one[:3] != other[:3]:
        return one._replace(why=one.why or other.why or "it compares otherwise each time that it is called")
    return one if one == other else one._replace(pattern=ANYHOW)
