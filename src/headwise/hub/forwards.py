"""Standing at sites of a model through its forwards: where each begins, which depth a call is of, and what never ran.

A forward is a call of the model, or of a part of it, that is not inside another one. What was asked for and did not
happen is told: a module that is not in its place any more, one that runs more often than it has sites, one that never
ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .routes.base import Found
from .watching import Core, Holding, Stand, Watcher, watching


class Posts:
    """Who stands at which sites of a model, and what has run there."""

    def __init__(self, model: nn.Module, those: Sequence[Found], who: Mapping[str, Watcher]) -> None:
        self.model, self.routes = model, list(dict.fromkeys(one.route for one in those))
        self.at = {one.module: Post(self, one, those, who) for one in reversed(those)}
        paths = model.named_modules(remove_duplicate=False)
        self.places = {path: module for path, module in paths if module in self.at}
        self.below: dict[nn.Module, set[nn.Module]] = {}  # what is called, and who stands inside it
        for path, module in self.places.items():
            for above in _above(model, path):
                self.below.setdefault(above, set()).add(module)
        for post in self.at.values():
            self.below.setdefault(post.site, set())
        self.forwards, self.ran = Counter[nn.Module](), Counter[nn.Module]()

    def begin(self) -> Counter[nn.Module]:
        """A forward begins: an empty count of the calls in it, if what is to be watched is still there."""
        if gone := [path for path, module in self.places.items() if _in_place(self.model, path) is not module]:
            raise ValueError(
                f"{gone[0] or 'the model'} was replaced while somebody stood at it; change a model before, or after"
            )
        if torch.is_grad_enabled() and any(map(_runs_again, self.model.modules())):
            raise ValueError(
                "with checkpointing, layers run again on the way back, when nobody may stand there; switch it off"
            )
        return Counter()

    def end(self, begun: nn.Module, calls: Counter[nn.Module]) -> None:
        """A forward has ended: a module that serves several sites must have served all of them, or none."""
        for module in self.below[begun]:
            self.forwards[module] += 1
            post, count = self.at[module], calls[self.at[module].site]
            if post.calls > 1 and count not in (0, post.calls):
                raise ValueError(
                    f"{post.name} is a module of {post.calls} depths, which ran {count} times in a forward; run the "
                    "whole model"
                )

    def settle(self) -> None:
        """All is over: whoever had forwards around him, and was never called, did nothing of what was asked."""
        for module, post in self.at.items():
            if self.forwards[module] and not self.ran[module]:
                raise ValueError(
                    f"{post.name} never ran, though its model did (forwards: {self.forwards[module]}), and nothing was "
                    "done there; name sites that this input reaches"
                )


class Post:
    """A watcher of one module, which hands each call to whoever stands at the site that it is of."""

    def __init__(self, posts: Posts, one: Found, those: Sequence[Found], who: Mapping[str, Watcher]) -> None:
        self.posts, self.module = posts, one.module
        self.site = posts.model.get_submodule(one.site.path)
        self.calls, self.name = one.calls, one.site.name
        self.turns = {other.call: who[other.site.name] for other in those if other.module is one.module}
        self.wants_core = any(watcher.wants_core for watcher in self.turns.values())

    def core(self, seen: Core) -> None:
        """Let him see it who stands at this depth."""
        watcher = self.turns.get(self._turn())
        if watcher is not None and watcher.wants_core:
            watcher.core(seen)

    def heads(self, z: Tensor) -> Tensor | None:
        """Let him change it."""
        watcher = self.turns.get(self._turn())
        self.posts.ran[self.module] += 1
        return None if watcher is None else watcher.heads(z)

    def _turn(self) -> int:
        """Which call of its site this is, in the forward that runs: within one it may pass here several times."""
        forward = _FORWARDS.get().get(self.posts)
        turn = 0 if forward is None else forward[self.site] - 1
        if self.calls > 1 and (forward is None or turn < 0):
            raise ValueError(f"{self.name} is not called by a forward of its model; call the model itself")
        if turn >= self.calls:
            raise ValueError(
                f"{self.name} runs more than {self.calls} times in one forward, and nothing says of which depth that "
                "is; give the part of the model that runs it once"
            )
        return max(turn, 0)


Forwards = Mapping[Posts, Counter[nn.Module] | None]
_FORWARDS: ContextVar[Forwards] = ContextVar("forwards", default=MappingProxyType({}))
_STANDS: dict[type, Stand] = {}


@contextmanager
def standing(model: nn.Module, those: Sequence[Found], who: Mapping[str, Watcher]) -> Iterator[Posts]:
    """While this lasts, these watch at the sites of these names, each at its depth; `settle` tells who never did."""
    posts = Posts(model, [one for one in those if one.site.name in who], who)
    stands: list[Holding] = [_stand(kind) for kind in dict.fromkeys(map(type, posts.below))]
    for route in posts.routes:
        stands += route.stands()
    with watching({module: (post,) for module, post in posts.at.items()}, stands):
        token = _FORWARDS.set({**_FORWARDS.get(), posts: None})
        try:
            yield posts
        finally:
            _FORWARDS.reset(token)


def _stand(kind: type) -> Stand:
    return _STANDS.setdefault(kind, Stand(kind, "__call__", partial(_around, kind)))


def _above(model: nn.Module, path: str) -> list[nn.Module]:
    """Everything that a path goes through, the model and its end included."""
    parts = path.split(".") if path else []
    return [model.get_submodule(".".join(parts[:end])) for end in range(len(parts) + 1)]


def _in_place(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _around(kind: type, original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: nn.Module, *said: Any, **more: Any) -> Any:
        if type(self) is not kind:  # one of a class made of this one, which is stood at itself
            return original(self, *said, **more)
        now = _FORWARDS.get()
        begun = {posts: posts.begin() for posts, forward in now.items() if forward is None and self in posts.below}
        now = {**now, **begun}
        for forward in now.values():
            if forward is not None:
                forward[self] += 1
        if not begun:
            return original(self, *said, **more)
        token = _FORWARDS.set(now)
        try:
            given = original(self, *said, **more)
        finally:
            _FORWARDS.reset(token)
        for posts, calls in begun.items():
            posts.end(self, calls)
        return given

    return __call__


def _runs_again(module: nn.Module) -> bool:
    """Whether a module forgets on its way forth, and computes anew on its way back: ours, or transformers'."""
    theirs = module.training and bool(getattr(module, "gradient_checkpointing", False))
    return theirs or getattr(module, "checkpointing", "none") == "block"
